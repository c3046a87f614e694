"""Versions out of real megatron-core models over gloo: each rank writes what it owns, and PEFT reads what transformers'
model then computes as Megatron's does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_models as mm
import pytest
import torch
import torch.distributed as dist
from megatron_processes import POOL

from lora_merge import InvalidInput, MergedWeights, Publisher, UnsupportedAdapter
from lora_merge.models.megatron.read import Chunks
from lora_merge.models.peft.folder import read_folder
from lora_merge.publish import contents
from lora_merge.publish.contents import Contents
from lora_merge.publish.store import Store
from tests.megatron.test_megatron_read import Case

CASES = [
    Case("qwen2", mm.Grid(tp=2), 2, "bridge"),
    Case("qwen2", mm.Grid(pp=2), 2, "canonical"),
    Case("llama", mm.Grid(tp=2, pp=2), 4, "bridge"),
    Case("llama", mm.Grid(tp=2), 4, "mcore"),  # two copies of the model
    Case("qwen3_moe", mm.Grid(tp=2, ep=2, etp=1), 2, "attention", hf={"dtype": torch.bfloat16}),
    Case("qwen3_moe", mm.Grid(ep=2), 2, "bridge"),
]


def made(case: Case) -> Chunks:
    assert case.style
    chunks = mm.megatron(case.kind, mm.hf_model(case.kind, **case.hf), case.grid, form=case.form)
    mm.adapt(chunks, case.style)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(".adapter." in name or ".lora_" in name)
    return Chunks(chunks, vocab_size=101)


def work(case: Case, urls: list[str], cache: str) -> dict[str, Any]:
    """On each rank: versions of a model in two stores, twice, and what it streams then."""
    model, wrote = made(case), list[int]()
    write = contents.write_from

    def noted(descriptor: int, at: int, data: Any) -> None:
        wrote.append(len(data))
        write(descriptor, at, data)

    published = []
    publishers = [Publisher(model, url) for url in urls]
    for step in range(2):
        with torch.no_grad():
            for chunk in model.list:
                for parameter in chunk.parameters():
                    if parameter.requires_grad:
                        parameter.mul_(1 + step)
        with mock.patch.object(contents, "write_from", noted):
            published += [publisher.publish().version for publisher in publishers[:1]]
        published += [publisher.publish().version for publisher in publishers[1:]]
    stream = {n: t.clone() for n, t in MergedWeights(model)}
    store = Store(urls[1])
    files = sorted(store.fetch(store.manifest(2), Path(cache)).iterdir()) if dist.get_rank() == 0 else []
    return {"versions": published, "wrote": sum(wrote), "stream": stream, "gathered": [f.read_bytes() for f in files]}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_rank_writes_what_it_owns(case: Case, tmp_path: Path) -> None:
    hf = mm.hf_model(case.kind, **case.hf)
    hf.save_pretrained(tmp_path / "base")
    # Into the second one the first rank writes what it gathers, as into object stores.
    ranks = POOL.run(case.world, work, case, [str(tmp_path / "run7"), f"memory:/{tmp_path}"], str(tmp_path / "cache"))
    assert [rank["versions"] for rank in ranks] == [[1, 1, 2, 2]] * case.world
    folder = tmp_path / "run7" / "versions" / "00000002"
    files = [(folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    assert ranks[0]["gathered"] == files
    header = 8 + int.from_bytes(files[1][:8], "little")
    copies = case.world // (case.grid.tp * case.grid.pp)
    assert all(rank["wrote"] for rank in ranks[: case.world // copies])
    assert sum(rank["wrote"] for rank in ranks) == 2 * (len(files[1]) - header), "each element once"
    policy = read_folder(folder, tmp_path / "base", hf.dtype, values=True)
    streamed, wanted = dict(MergedWeights(policy)), ranks[0]["stream"]
    assert streamed.keys() == wanted.keys()
    for name, tensor in streamed.items():
        assert torch.equal(tensor, wanted[name]), name
    assert json.loads(files[0])["base_model_name_or_path"] is None
    samples = Store(tmp_path / "run7").manifest(2).base.samples
    assert samples == Publisher(policy, tmp_path / "plain")._base_samples(*Contents(policy).tensors()), (
        "of the same base"
    )


def refused(case: Case, url: str, train: str, kind: type[Exception], message: str) -> None:
    """On each rank."""
    model = made(case)
    for chunk in model.list:
        for name, parameter in chunk.named_parameters():
            if train and train in name:
                parameter.requires_grad_(True)
    with pytest.raises(kind, match=message):
        Publisher(model, url).publish()


@pytest.mark.parametrize(
    ("case", "train", "kind", "message"),
    [
        (
            Case("llama", mm.Grid(tp=2), 2, "bridge"),
            "final_layernorm",
            InvalidInput,
            r"norm.weight is trained .*freeze",
        ),
        (Case("llama", mm.Grid(pp=2), 2, "bridge"), "final_layernorm", InvalidInput, "norm.weight is trained"),
        (
            Case("llama", mm.Grid(tp=2), 2, "several"),
            "",
            UnsupportedAdapter,
            "adapted 2 times, and a version holds one",
        ),
        (
            Case("qwen3_moe", mm.Grid(ep=2), 2, "fc1"),
            "",
            UnsupportedAdapter,
            r"experts.0.down_proj has no adapter, and",
        ),
    ],
)
def test_what_no_version_holds_is_refused_on_all_ranks(
    case: Case, train: str, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    POOL.run(case.world, refused, case, str(tmp_path / "run7"), train, kind, message)
    assert Store(tmp_path / "run7").numbers() == []
