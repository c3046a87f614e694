"""A base and adapters on disk -> a merged checkpoint: names, files and bits, held against MergedWeights on the loaded
model, float64, and what PEFT makes of the same files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import models
import pytest
import torch
from checkpoints import KINDS, assert_same, load, pair, tensors, write_adapter, write_base
from repository import ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_merge import InvalidInput, MergedWeights, UnsupportedAdapter, merge_checkpoint, read_deltas
from lora_merge.saving import chunks


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every matrix here is cut."""
    monkeypatch.setattr(chunks, "CHUNK", 1 << 10)


def streamed(model: Any, **options: Any) -> dict[str, Tensor]:
    weights = MergedWeights(model, **{k: v for k, v in options.items() if k != "seed"})
    return {name: t.clone() for b in weights.buckets(seed=options.get("seed")) for name, t in b.tensors()}


@pytest.mark.parametrize("kind", KINDS)
def test_bits_names_and_files(kind: str, tmp_path: Path) -> None:
    """One tensor a file, or all in one: what MergedWeights streams of the loaded model, in the base's files; and
    transformers loads a model from it that answers as the adapted one does."""
    from transformers import AutoModelForCausalLM

    base, adapter = pair(kind, tmp_path, shard="5GB" if kind == "qwen2" else "1KB")
    (saved,) = merge_checkpoint(base, [adapter], tmp_path / "out", verify=True)
    model = load(base, adapter)
    assert_same(tensors(tmp_path / "out"), streamed(model))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(p.name for p in base.iterdir())
    assert saved.verified == saved.nbytes == sum(t.nbytes for t in tensors(tmp_path / "out").values())
    # PEFT loads one update of two tied names as two.
    assert saved.changed >= len(read_deltas(model)) or kind in ("gpt_oss", "both of a tied model")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    if next(merged.parameters()).dtype == torch.float32:  # in bf16 rounding is seen
        wanted, got = (m(models.tokens()).logits for m in (model, merged))
        assert (wanted - got).abs().max() <= 1e-5 * wanted.abs().max()
    config, before = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "out", base))
    if "of a tied model" in kind:
        assert config.pop("tie_word_embeddings") is kind.startswith("both")  # which are one update
        before.pop("tie_word_embeddings")
    assert config == before


@pytest.mark.parametrize("kind", ["qwen2", "bf16", "gpt2", "mixtral"])
def test_against_peft_and_float64(kind: str, tmp_path: Path) -> None:
    """float32 adapters: PEFT rounds once, too. Each of the two lies within the bound of float64, and hardly an element
    has other bits (float32 sums in another order, next to a tie)."""
    base, adapter = pair(kind, tmp_path)
    merge_checkpoint(base, [adapter], tmp_path / "out")
    model = load(base, adapter)
    exact = {}
    for delta in read_deltas(model):
        (f,) = delta.factors
        weight = delta.weight.pieces[0].tensor
        wide = weight.double().clone()
        A, B = f.lora_A.pieces[0].tensor.double(), f.lora_B.pieces[0].tensor.double()
        experts = delta.experts or 1
        A, B = A.view(experts, -1, delta.shape[1]), B.view(delta.shape[0], -1, experts)
        bound = torch.zeros_like(wide)
        views = zip(delta.matrices(wide), delta.matrices(bound), strict=True)
        for e, (matrix, limit) in enumerate(views):
            limit += 2.0**-20 * abs(f.scaling) * (B[:, :, e].abs() @ A[e].abs()) + 2.0**-22 * matrix.abs()
            matrix += f.scaling * (B[:, :, e] @ A[e])
        exact[delta.name] = wide, bound
    merged = model.merge_and_unload()
    peft_out = tmp_path / "peft"
    merged.save_pretrained(peft_out)
    ours, theirs = tensors(tmp_path / "out"), tensors(peft_out)
    assert ours.keys() == theirs.keys()
    differing = total = 0
    for name, mine in ours.items():
        assert mine.dtype == theirs[name].dtype
        total += mine.numel()
        differing += int((mine != theirs[name]).sum())
        if name in exact:
            wide, bound = exact[name]
            half_step = (mine.double().abs() * torch.finfo(mine.dtype).eps / 2).clamp(min=1e-30)
            assert ((mine.double() - wide).abs() <= half_step + bound).all(), name
    if kind == "bf16":
        assert differing <= 1e-3 * total
    half = torch.finfo(torch.bfloat16 if kind == "bf16" else torch.float32).eps
    for name, mine in ours.items():
        assert (mine.double() - theirs[name].double()).abs().max() <= 4 * half * mine.double().abs().max(), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rounding", [{}, {"rounding": "stochastic", "seed": 11}])
def test_dtype_and_rounding(dtype: torch.dtype, rounding: dict[str, Any], tmp_path: Path) -> None:
    base, adapter = pair("qwen2", tmp_path, shard="10KB")
    merge_checkpoint(base, [adapter], tmp_path / "out", dtype=dtype, **rounding)
    assert_same(tensors(tmp_path / "out"), streamed(load(base, adapter), dtype=dtype, **rounding))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")


def test_several_adapters_have_one_sum(tmp_path: Path) -> None:
    """Rounded once, as MergedWeights does it with all of them active; scaled, too."""
    build, dtype = models.qwen2, torch.bfloat16
    write_base(tmp_path / "base", build, torch.float32)  # on a bf16 one PEFT 0.18 rounds the second adapter to bf16
    folders = [tmp_path / name for name in ("style", "maths", "tool use")]
    for number, folder in enumerate(folders):
        write_adapter(folder, tmp_path / "base", build, seed=number, r=3 + number)
    merge_checkpoint(tmp_path / "base", folders, tmp_path / "out", dtype=dtype)
    model = load(tmp_path / "base", *folders)
    assert_same(tensors(tmp_path / "out"), streamed(model, dtype=dtype))
    scales = {"style": 0.7, "tool use": -2.0}
    merge_checkpoint(tmp_path / "base", folders, tmp_path / "scaled", scales=scales, dtype=dtype)
    for number, scale in ((0, 0.7), (2, -2.0)):
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling[f"n{number}"] *= scale
    assert_same(tensors(tmp_path / "scaled"), streamed(model, dtype=dtype))
    (one,) = merge_checkpoint(tmp_path / "base", folders[0], tmp_path / "one")  # by itself, in no list
    assert one.adapters == "style"


def test_embeddings_that_were_saved_along(tmp_path: Path) -> None:
    """PEFT saves embeddings which an adapter targets beside it: they are the base's, and no reason to refuse a sum."""
    from transformers import AutoModelForCausalLM

    write_base(tmp_path / "base", checkpoints.tied, torch.float32)

    def build() -> Any:
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base")

    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        model = models.with_lora(build, seed=seed, target_modules=["q_proj", "embed_tokens"])
        model.save_pretrained(folder)
        assert any(
            "embed_tokens" in name and "lora" not in name for name in load_file(folder / "adapter_model.safetensors")
        )
    merge_checkpoint(tmp_path / "base", folders, tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), streamed(load(tmp_path / "base", *folders)))


def test_each_adapter_by_itself(tmp_path: Path) -> None:
    """Several outputs, and the base is read once."""
    build = models.qwen2
    write_base(tmp_path / "base", build, torch.bfloat16, shard="10KB")
    kinds: dict[str, dict[str, Any]] = {
        "a": {},
        "b": {"use_dora": True},
        "c": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    }
    for name, options in kinds.items():
        write_adapter(tmp_path / name, tmp_path / "base", build, dtype=torch.bfloat16, **options)
    saved = merge_checkpoint(
        tmp_path / "base",
        [tmp_path / name for name in kinds],
        tmp_path / "out",
        each=True,
        scales={"a": 0.5},
        verify=True,
    )
    assert [one.folder for one in saved] == [tmp_path / "out" / name for name in kinds]
    for name in kinds:
        model = load(tmp_path / "base", tmp_path / name)
        for module in model.modules():
            if name == "a" and isinstance(getattr(module, "scaling", None), dict):
                module.scaling["n0"] *= 0.5
        assert_same(tensors(tmp_path / "out" / name), streamed(model))


def test_what_a_checkpoint_may_hold_besides(tmp_path: Path) -> None:
    """Tensors that the model does not know, of any dtype and of no dimension, go along as they are; so do files, but
    not those of other formats, and not what a trainer keeps. Weights of several dtypes keep theirs."""
    base, adapter = pair("qwen2", tmp_path)
    held = load_file(base / "model.safetensors")
    held["model.layers.0.mlp.up_proj.weight"] = held["model.layers.0.mlp.up_proj.weight"].bfloat16()
    held["model.norm.weight"] = held["model.norm.weight"].half()
    besides = {
        "a.number": torch.tensor(3.5),
        "a.count": torch.tensor(7, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 5),
        "ids": torch.arange(5000, dtype=torch.int32),
        "wide": torch.randn(3, 2, dtype=torch.float64),
    }
    save_file(held | besides, base / "model.safetensors", {"format": "pt", "note": "as it was"})
    (base / "tokenizer.json").write_text("{}")
    (base / "chat_template.jinja").write_text("{{ x }}")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool.jinja").write_text("tools")
    (base / "modeling_own.py").write_text("pass")
    (base / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense"}]))
    for part, file in (("1_Pooling", "config.json"), ("2_Dense", "model.safetensors")):
        (base / part).mkdir()
        (base / part / file).write_text("of sentence-transformers")
    for name in (
        "optimizer.pt",
        "pytorch_model.bin",
        "tf_model.h5",
        "README.md",
        ".gitattributes",
        "trainer_state.json",
    ):
        (base / name).write_text("not this")
    (base / "original").mkdir()
    (base / "original" / "consolidated.pth").write_text("nor this")
    merge_checkpoint(base, [adapter], tmp_path / "out")
    got = tensors(tmp_path / "out")
    assert_same({name: got.pop(name) for name in besides}, besides)
    assert {name: t.dtype for name, t in got.items()} == {name: t.dtype for name, t in held.items()}
    wanted = streamed(load(base, adapter))  # all in the dtype of the first, so compared one by one
    from lora_merge import merge

    f = next(d for d in read_deltas(load(base, adapter)) if d.name == "model.layers.0.mlp.up_proj.weight").factors[0]
    A, B = f.lora_A.pieces[0].tensor, f.lora_B.pieces[0].tensor
    up = merge(held["model.layers.0.mlp.up_proj.weight"], A, B, f.scaling)
    assert torch.equal(got["model.layers.0.mlp.up_proj.weight"], up)
    assert torch.equal(got["model.layers.1.mlp.up_proj.weight"], wanted["model.layers.1.mlp.up_proj.weight"])
    names = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool.jinja",
        "modeling_own.py",
        "modules.json",
        "1_Pooling/config.json",
        "2_Dense/model.safetensors",
    }
    from safetensors import safe_open

    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "note": "as it was"}


def test_a_tied_head_that_the_file_holds(tmp_path: Path) -> None:
    """Both names are written, with the same values where the adapter does not tell them apart, else apart."""
    for kind in ("tied, rslora", "embedding of a tied model", "head of a tied model"):
        base, adapter = pair(kind, tmp_path / kind)
        held = load_file(base / "model.safetensors")
        held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
        save_file(held, base / "model.safetensors", {"format": "pt"})
        merge_checkpoint(base, [adapter], tmp_path / kind / "out")
        got, wanted = tensors(tmp_path / kind / "out"), streamed(load(base, adapter))
        if kind == "tied, rslora":
            wanted["lm_head.weight"] = wanted["model.embed_tokens.weight"]
        assert_same(got, wanted)


def test_names_without_the_prefix(tmp_path: Path) -> None:
    """GPT-2's own checkpoint has no `transformer.` in front, and transformers loads it: names stay as they are."""
    base, adapter = pair("gpt2", tmp_path)
    held = load_file(base / "model.safetensors")
    save_file(
        {n.removeprefix("transformer."): t for n, t in held.items()}, base / "model.safetensors", {"format": "pt"}
    )
    merge_checkpoint(base, [adapter], tmp_path / "out")
    wanted = {name.removeprefix("transformer."): t for name, t in streamed(load(base, adapter)).items()}
    assert_same(tensors(tmp_path / "out"), wanted)


def test_a_pickled_base(tmp_path: Path) -> None:
    for shards in (1, 2):
        home = tmp_path / str(shards)
        base, adapter = pair("tied, rslora", home)
        wanted = streamed(load(base, adapter))
        held = load_file(base / "model.safetensors")
        held["lm_head.weight"] = held["model.embed_tokens.weight"]  # one memory, as torch.save keeps it
        (base / "model.safetensors").unlink()
        names = sorted(held)
        if shards == 1:
            torch.save(held, base / "pytorch_model.bin")
        else:
            files = {n: f"pytorch_model-0000{1 + i % 2}-of-00002.bin" for i, n in enumerate(names)}
            for file in set(files.values()):
                torch.save({n: held[n] for n in names if files[n] == file}, base / file)
            index = {"metadata": {"total_size": 1}, "weight_map": files}
            (base / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        merge_checkpoint(base, [adapter], home / "out")
        assert_same(tensors(home / "out"), wanted | {"lm_head.weight": wanted["model.embed_tokens.weight"]})
        assert (home / "out" / "model.safetensors").exists() == (shards == 1)


def test_shards_of_another_size(tmp_path: Path) -> None:
    base, adapter = pair("qwen2", tmp_path)
    merge_checkpoint(base, [adapter], tmp_path / "out", max_shard_size="20KB")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert all(f.name == f"model-{n:05d}-of-{len(files):05d}.safetensors" for n, f in enumerate(files, start=1))
    assert_same(tensors(tmp_path / "out"), streamed(load(base, adapter)))
    back = tmp_path / "back"
    merge_checkpoint(tmp_path / "base", [adapter], back, shard_size=10**9)
    assert [p.name for p in back.glob("*.safetensors")] == ["model.safetensors"]


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces, letters of other scripts, brackets; relative ones; a base of links, as the hub's cache has it; a base
    that may only be read."""
    base, adapter = pair("qwen2", tmp_path / "a home [1] für Modelle", shard="20KB")
    snapshot = tmp_path / "models--me--base" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for file in base.iterdir():
        blob = tmp_path / "models--me--base" / f"blob-{file.name}"
        shutil.copy(file, blob)
        blob.chmod(0o444)
        (snapshot / file.name).symlink_to(Path("../..") / blob.name)
    snapshot.chmod(0o555)
    monkeypatch.chdir(adapter.parent)
    out = Path("出力 [2]") / "new*"
    try:
        merge_checkpoint(snapshot, ["adapter"], out, verify=True)
        merge_checkpoint(Path("..") / "models--me--base" / "snapshots" / "0123", ["./adapter"], out, force=True)
    finally:
        snapshot.chmod(0o755)
    assert_same(tensors(out), streamed(load(base, adapter)))
    assert not any(p.is_symlink() for p in out.iterdir())
    assert (out / "config.json").stat().st_mode & 0o200, "a copy may be changed"
    assert [p.name for p in out.parent.iterdir()] == ["new*"]


def test_sums_that_are_not_defined(tmp_path: Path) -> None:
    build = models.qwen2
    write_base(tmp_path / "base", build, torch.float32)
    write_adapter(tmp_path / "plain", tmp_path / "base", build)
    write_adapter(tmp_path / "dora", tmp_path / "base", build, use_dora=True)
    write_adapter(tmp_path / "head", tmp_path / "base", build, target_modules=["q_proj"], modules_to_save=["lm_head"])
    write_adapter(tmp_path / "head2", tmp_path / "base", build, target_modules=["lm_head"])
    write_adapter(tmp_path / "other", tmp_path / "base", build, seed=3, target_modules=["k_proj"])
    for names, match in [
        (("plain", "dora"), "DoRA adapter dora beside others"),
        (("head", "head2"), r"lm_head.weight: head brings it whole .*, and head2 changes it too"),
    ]:
        with checkpoints.nothing_left(tmp_path), pytest.raises(UnsupportedAdapter, match=match):
            merge_checkpoint(tmp_path / "base", [tmp_path / n for n in names], tmp_path / "out")
    with pytest.raises(UnsupportedAdapter, match=r"a scale of 0\.5 on a DoRA adapter"):
        merge_checkpoint(tmp_path / "base", [tmp_path / "dora"], tmp_path / "out", scales={"dora": 0.5})
    merge_checkpoint(tmp_path / "base", [tmp_path / "head", tmp_path / "other"], tmp_path / "out")
    (saved,) = merge_checkpoint(tmp_path / "base", [tmp_path / "head"], tmp_path / "half", scales={"head": 0.5})
    assert "scale 0.5 of head is not that of tensors which it brings whole: lm_head.weight" in saved.notes[0]
    got = tensors(tmp_path / "out")
    head, other = (tensors_of(tmp_path, name) for name in ("head", "other"))
    wanted = head | {n: t for n, t in other.items() if "k_proj" in n}
    assert_same(got, wanted)


def tensors_of(folder: Path, adapter: str) -> dict[str, Tensor]:
    return streamed(load(folder / "base", folder / adapter))


def test_a_conversion_that_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a checkpoint's tensor is no view of a parameter (rows interleaved, as some rotary embeddings have it), the
    parameter is put together, merged whole, and taken apart again."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import PermuteForRope, WeightConverter

    pytest.importorskip("transformers.core_model_loading")
    base, adapter = pair("qwen2", tmp_path)
    known = conversion_mapping.get_checkpoint_conversion_mapping

    def mapping(name: str) -> Any:
        if name == "qwen2":
            return [WeightConverter("self_attn.o_proj.weight", "self_attn.o_proj.weight", [PermuteForRope()])]
        return known(name)

    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", mapping)
    try:
        wanted = streamed(load(base, adapter))
    except Exception as error:  # another transformers, which has it otherwise
        pytest.skip(f"no such conversion here: {error}")
    merge_checkpoint(base, [adapter], tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), wanted)


def test_what_must_not_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out "$UNSET" --force` means where one is; nor one's home, nor what holds either."""
    base, adapter = pair("qwen2", tmp_path / "models")
    (tmp_path / "mine" / "work").mkdir(parents=True)
    (tmp_path / "mine" / "work" / "thesis").write_text("kept")
    monkeypatch.chdir(tmp_path / "mine" / "work")
    for out in ("", ".", ".."):
        with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match="the folder that you are in"):
            merge_checkpoint(base, [adapter], out, force=True)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match="the folder that you are in"):
        merge_checkpoint(base, [adapter], ".")  # it would be another folder of this name
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_mount", lambda self: self.name == "empty")
        with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match="volume is mounted"):
            merge_checkpoint(base, [adapter], "empty")
    monkeypatch.setenv("HOME", str(tmp_path / "mine"))
    with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match="is or holds your home"):
        merge_checkpoint(base, [adapter], "~", force=True)


@pytest.mark.parametrize(
    "inside", [[1], {3: torch.ones(2)}, torch.ones(2), None], ids=["list", "ints", "tensor", "none"]
)
def test_a_file_that_holds_no_state_dict(inside: Any, tmp_path: Path) -> None:
    base, adapter = pair("qwen2", tmp_path)
    for file in base.glob("*.safetensors*"):
        file.unlink()
    torch.save(inside, base / "pytorch_model.bin")
    with pytest.raises(InvalidInput, match=r"pytorch_model.bin holds a \w+, expected a state dict"):
        merge_checkpoint(base, [adapter], tmp_path / "out")


def test_arguments(tmp_path: Path) -> None:
    base, adapter = pair("qwen2", tmp_path)
    for options, match in [
        ({"dtype": torch.int8}, "dtype must be"),
        ({"seed": 3}, "a seed belongs to"),
        ({"rounding": "stochastic"}, "pass seed="),
        ({"max_shard_size": "five"}, "like 5GB"),
        ({"shard_size": "0GB"}, "like 5GB"),
        ({"shard_size": 1, "max_shard_size": "5GB"}, "got shard_size=1, its older name: pass one"),
        ({"device": "grafics"}, "device 'grafics' cannot be used here"),
        ({"device": "meta"}, "device 'meta' cannot be used here"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here .*lora-merge doctor"),
        ({"scales": {"none": 2.0}}, "there is no adapter 'none'; there are adapter"),
        ({"scales": {"adapter": float("nan")}}, "finite"),
    ]:
        with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match=match):
            merge_checkpoint(base, [adapter], tmp_path / "out", **options)
    with pytest.raises(InvalidInput, match="is a URL"):
        merge_checkpoint(base, [adapter], "s3://bucket/out")
    with pytest.raises(InvalidInput, match="at least one"):
        merge_checkpoint(base, [], tmp_path / "out")
    with pytest.raises(InvalidInput, match="both called 'adapter'"):
        merge_checkpoint(base, [adapter, adapter], tmp_path / "out", each=True)
    for out in (base, base / "inside", tmp_path, adapter):
        with pytest.raises(InvalidInput, match=r"holds, is or lies in|not empty"):
            merge_checkpoint(base, [adapter], out)
        with pytest.raises(InvalidInput, match="holds, is or lies in"):
            merge_checkpoint(base, [adapter], out, force=True)


MEASURED = """
import sys, time
from pathlib import Path
import lora_merge, peft, transformers
from lora_merge import cli
from lora_merge.saving import writer
def resident(word):
    return int(Path("/proc/self/status").read_text().split(word + ":")[1].split()[0]) * 1024
lora_merge.merge_checkpoint(sys.argv[1], [sys.argv[2]], sys.argv[3])  # libraries and kernels are loaded
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
written = writer.write_from
def slow(*arguments):
    time.sleep(0.05)
    written(*arguments)
writer.write_from = slow
assert cli.main(["merge", sys.argv[4], sys.argv[5], "--out", sys.argv[6]]) == 0
print(resident("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read as Linux tells it")
@pytest.mark.parametrize("kind", ["plain", "dora"])
def test_memory(kind: str, tmp_path: Path) -> None:
    """Of a base of 430 MB, on a disk that is slower than merging: the buffers, and of DoRA the largest matrix, some
    times over; not the base."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 8192}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)

    def build() -> Any:
        return LlamaForCausalLM(config)

    write_base(tmp_path / "base", build, torch.bfloat16)
    options = {"use_dora": True} if kind == "dora" else {}
    write_adapter(tmp_path / "adapter", tmp_path / "base", build, dtype=torch.bfloat16, **options)
    small_base, small = pair("bf16", tmp_path / "small")
    arguments = [small_base, small, tmp_path / "first", tmp_path / "base", tmp_path / "adapter", tmp_path / "out"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size = (tmp_path / "base" / "model.safetensors").stat().st_size
    assert size > 400e6
    used = int(done.stdout.split()[-1])
    assert used < 300e6, f"{used / 1e6:.0f} MB for a base of {size / 1e6:.0f}"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "gpt2", "mixtral", "dora", "embeddings", "whole"])
def test_on_a_gpu(kind: str, tmp_path: Path) -> None:
    """Chunks merged there: the bits of the stream of the model that lies there."""
    base, adapter = pair(kind, tmp_path, shard="20KB")
    merge_checkpoint(base, [adapter], tmp_path / "out", device="cuda", verify=True)
    wanted = {name: t.cpu() for name, t in streamed(load(base, adapter).cuda()).items()}
    assert_same(tensors(tmp_path / "out"), wanted)
