"""A checkpoint out of a real megatron-core model over gloo: one rank writes what MergedWeights streams, with the base's
config and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import megatron_models as mm
import torch
from checkpoints import assert_same, tensors
from megatron_processes import POOL

from lora_merge import MergedWeights, save_merged
from lora_merge.models.megatron.read import Chunks
from tests.megatron.test_megatron_read import Case


def work(case: Case, base: Path, out: Path) -> dict[str, Any]:
    """On each rank."""
    hf = mm.hf_model(case.kind, **case.hf)
    chunks = mm.megatron(case.kind, hf, case.grid, form=case.form)
    assert case.style
    mm.adapt(chunks, case.style)
    model = Chunks(chunks, vocab_size=101)
    saved = save_merged(model, out, base=base, max_shard_size="20KB", bucket_bytes=20_000)
    return {"wrote": saved is not None, "stream": {n: t.clone() for n, t in MergedWeights(model)}}


def test_one_rank_writes_what_all_hold(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    case = Case("llama", mm.Grid(tp=2), 4, "bridge")  # two copies of the model
    base = tmp_path / "base"
    mm.hf_model(case.kind, **case.hf).save_pretrained(base)
    (base / "tokenizer.json").write_text("{}")
    ranks = POOL.run(case.world, work, case, base, tmp_path / "out")
    assert [rank["wrote"] for rank in ranks] == [True] + [False] * (case.world - 1)
    assert_same(tensors(tmp_path / "out"), ranks[0]["stream"])
    names = {p.name for p in (tmp_path / "out").iterdir() if p.suffix != ".safetensors"}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(t, ranks[0]["stream"][n]) for n, t in loaded.state_dict().items() if n in ranks[0]["stream"])
