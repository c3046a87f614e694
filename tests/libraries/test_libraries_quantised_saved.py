"""Bases on disk that bitsandbytes quantised, merged tensor by tensor into plain checkpoints (`make test-libraries`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes.functional as F
import models
import pytest
import torch
from checkpoints import EXPERTS, assert_same, nothing_left, tensors, write_adapter
from helpers import assert_same_bits
from peft import PeftModel
from repository import ROOT
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_merge import InvalidInput, MergedWeights, merge_checkpoint
from lora_merge.kernels.plan import Plan
from lora_merge.kernels.reference import round_once
from lora_merge.kernels.segments import Segment
from lora_merge.saving import chunks
from lora_merge.saving.base import open_base
from lora_merge.saving.inspect import inspect_adapter

pytestmark = pytest.mark.filterwarnings("ignore")

ROW, WIDE = 64, 128  # whole blocks in each row: see test_libraries_quantised.py

KINDS: dict[str, dict[str, Any]] = {
    "nf4, double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "nf4 of float16": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "dtype": torch.float16},
    "nf4 of float32, double": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "dtype": torch.float32},
    "fp4 in bfloat16": {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16},
    "nf4, some plain": {"load_in_4bit": True, "llm_int8_skip_modules": ["v_proj", "lm_head"]},
    "int8": {"load_in_8bit": True},
    "int8 of float16": {"load_in_8bit": True, "dtype": torch.float16},
}


def qwen2() -> nn.Module:
    return models.qwen2(hidden_size=ROW, intermediate_size=WIDE)


def tied() -> nn.Module:
    return models.qwen2(True, hidden_size=ROW, intermediate_size=WIDE)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every matrix here is cut, within double quantisation's blocks, too."""
    monkeypatch.setattr(chunks, "CHUNK", 1 << 11)


def write_base(folder: Path, kind: str, build: Callable[[], nn.Module] = qwen2, shard: str = "5GB") -> Path:
    """A base as transformers quantises and saves it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options = dict(KINDS[kind])
    dtype = options.pop("dtype", torch.bfloat16)
    plain = folder.with_name(f"{folder.name}-plain")
    torch.manual_seed(7)
    made: Any = build()
    made.to(dtype).save_pretrained(plain)
    config = BitsAndBytesConfig(bnb_4bit_compute_dtype=dtype, **options)
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, device_map="cpu", dtype=dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def live(base: Path, *adapters: Path) -> Any:
    """The quantised model with all adapters active, as transformers and PEFT load it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, device_map="cpu", dtype="auto")
    model = PeftModel.from_pretrained(model, adapters[0], adapter_name="n0")
    for number, adapter in enumerate(adapters[1:], start=1):
        model.load_adapter(adapter, f"n{number}")
    model.base_model.set_adapter([f"n{number}" for number in range(len(adapters))])
    return model


def streamed(model: Any, **options: Any) -> dict[str, Tensor]:
    weights = MergedWeights(model, **{k: v for k, v in options.items() if k != "seed"})
    return {name: t.clone() for b in weights.buckets(seed=options.get("seed")) for name, t in b.tensors()}


def dequantised(base: Path) -> dict[str, Tensor]:
    """What bitsandbytes makes of the tensors in a base's files; 4 bits as one row, of which its kernels are right."""
    raw = tensors(base)
    found = {}
    for name, stored in raw.items():
        state = next((n for n in raw if n.startswith(f"{name}.quant_state.")), None)
        if state is not None:
            parts = {n.removeprefix(f"{name}."): t for n, t in raw.items() if n.startswith(f"{name}.")}
            state = F.QuantState.from_dict(parts, torch.device("cpu"))
            shape, state.shape = state.shape, torch.Size((1, state.shape.numel()))
            found[name] = F.dequantize_4bit(stored, state).view(shape)
        elif stored.dtype == torch.int8:
            found[name] = F.int8_vectorwise_dequant(stored, raw[f"{name.removesuffix('weight')}SCB"])
        elif not any(part in name for part in (".absmax", "quant_", "nested_", ".SCB", "weight_format")):
            found[name] = stored
    return found


def exact(base: Path, *adapters: Path) -> dict[str, Tensor]:
    """What is to come out, in float64, by the definition of LoRA, of the files alone."""
    found = {name: tensor.double() for name, tensor in dequantised(base).items()}
    for adapter in adapters:
        config = json.loads((adapter / "adapter_config.json").read_text())
        held = load_file(adapter / "adapter_model.safetensors")
        for key, A in held.items():
            if "lora_A" in key:
                name = key.removeprefix("base_model.model.").replace("lora_A.", "")
                B = held[key.replace("lora_A", "lora_B")]
                found[name] = found[name] + config["lora_alpha"] / config["r"] * (B.double() @ A.double())
    return found


def assert_rounded_once(got: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Nearest, but for float32 sums in another order next to a tie."""
    assert got.keys() == right.keys()
    off = total = 0
    for name, wanted in right.items():
        rounded = round_once(wanted, got[name].dtype)
        off += int((rounded != got[name]).sum()) if got[name].dtype != torch.float32 else 0
        total += wanted.numel()
        error = (got[name].double() - wanted).abs()
        assert (error <= (rounded.double() - wanted).abs() + 2.0**-18 * wanted.abs().max()).all(), name
    assert off <= 1e-3 * total


@pytest.mark.parametrize("kind", KINDS)
def test_bits_names_and_files(kind: str, tmp_path: Path) -> None:
    """What MergedWeights streams of the loaded model, and what float64 says; the plain model's names, and a config that
    says of no quantisation; transformers loads it as a plain model that answers as the adapted one does."""
    from transformers import AutoModelForCausalLM

    base = write_base(tmp_path / "base", kind, shard="30KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    adapter = tmp_path / "adapter"
    write_adapter(adapter, base, qwen2, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
    (saved,) = merge_checkpoint(base, adapter, tmp_path / "out", verify=True)
    got, model = tensors(tmp_path / "out"), live(base, adapter)
    assert_same(got, streamed(model))
    assert_rounded_once(got, exact(base, adapter))
    dtype = KINDS[kind].get("dtype", torch.bfloat16)
    assert {t.dtype for t in got.values()} == {dtype}
    assert got.keys() == tensors(tmp_path / "base-plain").keys()
    assert saved.verified == saved.nbytes == sum(t.nbytes for t in got.values())
    assert saved.changed == 8
    assert "quantised" in saved.notes[0]
    assert "of its weights" in saved.notes[0]
    config, before = (json.loads((p / "config.json").read_text()) for p in (tmp_path / "out", base))
    assert before.pop("quantization_config")
    assert config == before
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert not hasattr(merged, "hf_quantizer") or merged.hf_quantizer is None
    with torch.no_grad():
        ours, theirs = (m(models.tokens()).logits.float() for m in (merged, model.train()))
    assert (ours - theirs).norm() <= 0.05 * theirs.norm()  # LLM.int8 rounds activations to 8 bits, too


def test_shards(tmp_path: Path) -> None:
    """What is four times as large is cut anew, with an index, or lies in one file."""
    base = write_base(tmp_path / "base", "nf4, double", shard="30KB")
    write_adapter(tmp_path / "adapter", base, qwen2)
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "one")
    assert [p.name for p in (tmp_path / "one").glob("model*")] == ["model.safetensors"]
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "several", max_shard_size="40KB")
    files = sorted(p.name for p in (tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert_same(tensors(tmp_path / "several"), tensors(tmp_path / "one"))


@pytest.mark.parametrize("kind", ["nf4, double", "int8"])
@pytest.mark.parametrize("options", [{"dtype": torch.float32}, {"rounding": "stochastic", "seed": 3}])
def test_dtype_and_rounding(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", kind)
    write_adapter(tmp_path / "adapter", base, qwen2, target_modules=["q_proj"])
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "out", **options)
    assert_same(tensors(tmp_path / "out"), streamed(live(base, tmp_path / "adapter"), **options))


@pytest.mark.parametrize("kind", ["nf4, double", "int8"])
def test_several_adapters(kind: str, tmp_path: Path) -> None:
    """Their sum, rounded once; and each into an output of its own, in one pass."""
    base = write_base(tmp_path / "base", kind)
    folders = [tmp_path / name for name in ("style", "maths")]
    for number, folder in enumerate(folders):
        write_adapter(folder, base, qwen2, seed=number, r=3 + number)
    merge_checkpoint(base, folders, tmp_path / "sum")
    assert_same(tensors(tmp_path / "sum"), streamed(live(base, *folders)))
    merge_checkpoint(base, folders, tmp_path / "all", each=True, verify=True)
    for folder in folders:
        assert_same(tensors(tmp_path / "all" / folder.name), streamed(live(base, folder)))


ADAPTERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "dora": (qwen2, {"use_dora": True}),
    "trained whole": (qwen2, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "bias": "all"}),
    "head": (qwen2, {"target_modules": ["q_proj", "lm_head"]}),
    "tied": (tied, {"target_modules": ["q_proj"]}),
    "head of a tied model": (tied, {"target_modules": ["q_proj", "lm_head"]}),
    "gpt2": (lambda: models.gpt2(ROW), {"target_modules": ["c_attn", "c_proj"]}),
}


@pytest.mark.parametrize("kind", ["nf4, double", "int8"])
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters(case: str, kind: str, tmp_path: Path) -> None:
    """GPT-2's weights are `[in, out]` in plain checkpoints, and quantised as `[out, in]`, square ones too."""
    build, options = ADAPTERS[case]
    base = write_base(tmp_path / "base", kind, build)
    write_adapter(tmp_path / "adapter", base, build, **options)
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "out")
    got = tensors(tmp_path / "out")
    assert_same(got, streamed(live(base, tmp_path / "adapter")))
    if case == "head of a tied model":
        assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    if case == "gpt2":
        assert {n: t.shape for n, t in got.items()} == {n: t.shape for n, t in tensors(tmp_path / "base-plain").items()}


def test_ragged_rows(tmp_path: Path) -> None:
    """Rows of an odd number of codes, of which the second begins in the middle of a byte; blocks that do not end with
    rows; every cut: bit by bit what bitsandbytes decodes."""
    for double in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            weight = (torch.randn(61, 333, generator=torch.Generator().manual_seed(1)) * 0.1).to(dtype)
            codes, state = F.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
            held = {"w.weight": codes} | {f"w.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
            folder = tmp_path / f"{double} {dtype}"
            folder.mkdir()
            save_file(held, folder / "model.safetensors", {"format": "pt"})
            said = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
            (folder / "config.json").write_text(json.dumps(said))
            base, right = open_base(folder), dequantised(folder)["w.weight"]
            for begin, end in [(0, 61), (0, 1), (1, 2), (3, 17), (40, 61), (58, 61)]:
                chunk = base.chunk("w.weight", chunks.Rows(begin, end), chunks.take_new).tensor
                out = torch.empty(end - begin, 333, dtype=dtype)
                Plan([Segment("w.weight", chunk, out)]).run()
                assert_same_bits(out, right[begin:end], f"rows {begin} to {end}")


def test_command(tmp_path: Path) -> None:
    """As a user runs it; the note is no part of the JSON's place."""
    base = write_base(tmp_path / "base", "nf4, double")
    write_adapter(tmp_path / "adapter", base, qwen2)
    command = [sys.executable, "-m", "lora_merge", "merge", base, tmp_path / "adapter", "--out", tmp_path / "out"]
    done = subprocess.run(
        [*map(str, command), "--verify", "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 0, done.stderr
    (output,) = json.loads(done.stdout)["outputs"]
    assert output["verified"] == output["nbytes"] == sum(t.nbytes for t in tensors(tmp_path / "out").values())
    assert "the base is quantised (bitsandbytes nf4)" in done.stderr
    assert_same(tensors(tmp_path / "out"), streamed(live(base, tmp_path / "adapter")))


def test_inspect(tmp_path: Path) -> None:
    """Held against what the codes stand for, and what rounding to bf16 loses."""
    base = write_base(tmp_path / "base", "int8")
    write_adapter(tmp_path / "adapter", base, qwen2, target_modules=["q_proj"])
    told = inspect_adapter(tmp_path / "adapter", base)
    assert not told.problems
    assert told.dtype == "bfloat16"
    assert len(told.updates) == 2
    weight = dequantised(base)["model.layers.0.self_attn.q_proj.weight"]
    assert abs(told.updates[0].weight / float(weight.double().norm()) - 1) < 1e-3
    assert told.updates[0].loss > 1e-3


Q = "model.layers.1.self_attn.q_proj.weight"


def _state(**said: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(held: dict[str, Tensor]) -> None:
        name = f"{Q}.quant_state.bitsandbytes__nf4"
        told = json.loads(bytes(held[name].tolist())) | said
        held[name] = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)

    return change


def _renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda held: held.update({f"{Q}.{new}": held.pop(f"{Q}.{old}")})


def _cut(part: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda held: held.update({f"{Q}{part}": held[f"{Q}{part}"][1:].contiguous()})


NF4, FP4 = "quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no absmax": (lambda t: t.pop(f"{Q}.absmax"), r"absmax is missing, expected torch\.uint8 \[64\]"),
    "no quant_map": (lambda t: t.pop(f"{Q}.quant_map"), r"quant_map is missing, expected torch\.float32 \[16\]"),
    "no nested_absmax": (lambda t: t.pop(f"{Q}.nested_absmax"), r"nested_absmax is missing"),
    "no nested_quant_map": (lambda t: t.pop(f"{Q}.nested_quant_map"), r"nested_quant_map is missing, .*\[256\]"),
    "no state": (lambda t: t.pop(f"{Q}.{NF4}"), r"is there, and no .*quant_state\.bitsandbytes__nf4 or fp4"),
    "no codes": (lambda t: t.pop(Q), "says what its codes stand for, and they are not there"),
    "nothing but codes": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith(f"{Q}.")],
        r"q_proj\.weight is torch\.uint8 .*nothing beside it says what",
    ),
    "two states": (lambda t: t.update({f"{Q}.{FP4}": t[f"{Q}.{NF4}"].clone()}), "it has two states"),
    "an unknown type": (_renamed(NF4, "quant_state.bitsandbytes__af4"), "is of type 'af4', expected nf4 or fp4"),
    "another type": (_renamed(NF4, FP4), "says quant_type 'nf4', expected 'fp4'"),
    "codes cut short": (_cut(""), r"2047 bytes hold no 4096 codes of 4 bits, a weight \[64, 64\]"),
    "absmax cut short": (_cut(".absmax"), r"absmax is torch\.uint8 \[63\], expected torch\.uint8 \[64\]"),
    "quant_map cut short": (_cut(".quant_map"), r"quant_map is torch\.float32 \[15\], expected .*\[16\]"),
    "absmax of another dtype": (
        lambda t: t.update({f"{Q}.absmax": t[f"{Q}.absmax"].float()}),
        r"absmax is torch\.float32 \[64\], expected torch\.uint8",
    ),
    "state is no JSON": (
        lambda t: t.update({f"{Q}.{NF4}": torch.zeros(3, dtype=torch.uint8)}),
        "is no JSON",
    ),
    "no block size": (_state(blocksize=0), "says blocksize 0, expected an even number"),
    "no dtype": (_state(dtype="int32"), "says dtype 'int32', expected bfloat16"),
    "another shape": (_state(shape=[64, 65]), r"2048 bytes hold no 4160 codes .*\[64, 65\]"),
    "no shape": (_state(shape=None), r"says shape None, expected \[out, in\]"),
    "no offset": (_state(nested_offset=None), "says nested_offset None, expected a finite number"),
    "a shape of another model": (_state(shape=[32, 128]), r"q_proj\.weight is \[32, 128\] in .*and \[64, 64\] by"),
}


def refused(folder: Path, kind: str, change: Callable[[dict[str, Tensor]], Any], match: str) -> str:
    """What is said of a base that was changed after it was written; nothing is left of the output."""
    base = write_base(folder / "base", kind)
    write_adapter(folder / "adapter", base, qwen2, target_modules=["q_proj"])
    held = load_file(base / "model.safetensors")
    change(held)
    save_file(held, base / "model.safetensors", {"format": "pt"})
    with nothing_left(folder), pytest.raises(InvalidInput, match=match) as raised:
        merge_checkpoint(base, folder / "adapter", folder / "out")
    return str(raised.value)


@pytest.mark.parametrize("case", BROKEN)
def test_broken(case: str, tmp_path: Path) -> None:
    """Refused by the weight's name, before the first byte."""
    assert Q in refused(tmp_path, "nf4, double", *BROKEN[case])


LAYER = "model.layers.1.self_attn.q_proj"
BROKEN_INT8: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scales": (lambda t: t.pop(f"{LAYER}.SCB"), r"SCB is missing, expected torch\.float32 \[64\]"),
    "scales cut short": (
        lambda t: t.update({f"{LAYER}.SCB": t[f"{LAYER}.SCB"][1:].contiguous()}),
        r"SCB is torch\.float32 \[63\], expected torch\.float32 \[64\]",
    ),
    "no codes": (lambda t: t.pop(f"{LAYER}.weight"), r"SCB scales its rows, and it is not there"),
    "plain beside scales": (
        lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].bfloat16()}),
        r"it is torch\.bfloat16 beside .*SCB, expected int8",
    ),
    "another order": (
        lambda t: t.update({f"{LAYER}.weight_format": torch.tensor(2, dtype=torch.uint8)}),
        "weight_format is not 0",
    ),
    "flat codes": (
        lambda t: t.update({f"{LAYER}.weight": t[f"{LAYER}.weight"].view(-1)}),
        r"its codes are \[4096\], expected \[out, in\]",
    ),
}


@pytest.mark.parametrize("case", BROKEN_INT8)
def test_broken_int8(case: str, tmp_path: Path) -> None:
    refused(tmp_path, "int8", *BROKEN_INT8[case])


def test_config_and_files_disagree(tmp_path: Path) -> None:
    """A config that says of codes where there are none, and one that does not where there are."""
    base = write_base(tmp_path / "base", "nf4, double")
    write_adapter(tmp_path / "adapter", base, qwen2, target_modules=["q_proj"])
    plain = tmp_path / "base-plain"
    said, other = (json.loads((p / "config.json").read_text()) for p in (base, plain))
    (plain / "config.json").write_text(json.dumps(other | {"quantization_config": said.pop("quantization_config")}))
    (base / "config.json").write_text(json.dumps(said))
    with nothing_left(tmp_path):
        with pytest.raises(InvalidInput, match=r"no weight there lies in codes: .*take quantization_config out"):
            merge_checkpoint(plain, tmp_path / "adapter", tmp_path / "out")
        with pytest.raises(InvalidInput, match=r"quant_state.* is there\) and config.json has no quantization_config"):
            merge_checkpoint(base, tmp_path / "adapter", tmp_path / "out")


def quantised_by_hand(folder: Path, wanted: str) -> Path:
    """A plain base, of which the tensors with `wanted` in their names are put into codes one by one, as transformers 4
    saved experts; beside it the plain base of what these stand for."""
    right = folder.with_name(f"{folder.name}-right")
    right.mkdir()
    for file in sorted(folder.glob("*.safetensors")):
        held, values = load_file(file), {}
        for name, tensor in list(held.items()):
            values[name] = tensor
            if wanted in name and tensor.dim() == 2:
                held[name], state = F.quantize_4bit(tensor, quant_type="nf4", compress_statistics=True)
                held |= {f"{name}.{key}": value for key, value in state.as_dict(packed=True).items()}
                shape, state.shape = state.shape, torch.Size((1, tensor.numel()))
                values[name] = F.dequantize_4bit(held[name], state).view(shape)
        save_file(held, file, {"format": "pt"})
        save_file(values, right / file.name, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (right / "config.json").write_text(json.dumps(config))
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    return right


def test_experts(tmp_path: Path) -> None:
    """Experts that are linear layers on disk, and fused ones in transformers 5, where the adapter was trained."""
    torch.manual_seed(7)
    models.qwen3_moe().bfloat16().save_pretrained(tmp_path / "base")
    right = quantised_by_hand(tmp_path / "base", "_proj")
    write_adapter(tmp_path / "adapter", right, models.qwen3_moe, **EXPERTS)
    for folder in ("base", "base-right"):
        merge_checkpoint(tmp_path / folder, tmp_path / "adapter", tmp_path / f"{folder}-out")
    assert_same(tensors(tmp_path / "base-out"), tensors(tmp_path / "base-right-out"))


def test_pickled(tmp_path: Path) -> None:
    """A state dict of torch.save holds the same tensors."""
    base = write_base(tmp_path / "base", "nf4, double")
    write_adapter(tmp_path / "adapter", base, qwen2)
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "one")
    torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
    (base / "model.safetensors").unlink()
    merge_checkpoint(base, tmp_path / "adapter", tmp_path / "two")
    assert_same(tensors(tmp_path / "two"), tensors(tmp_path / "one"))


def test_no_bitsandbytes_is_needed(tmp_path: Path) -> None:
    """Only the model that was quantised needed it."""
    base = write_base(tmp_path / "base", "int8")
    write_adapter(tmp_path / "adapter", base, qwen2)
    code = """
import sys
sys.modules["bitsandbytes"] = None
from lora_merge import merge_checkpoint
merge_checkpoint(*sys.argv[1:])
"""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    folders = [str(tmp_path / name) for name in ("base", "adapter", "out")]
    subprocess.run([sys.executable, "-c", code, *folders], check=True, env=os.environ | {"PYTHONPATH": paths})
    assert_same(tensors(tmp_path / "out"), streamed(live(base, tmp_path / "adapter")))
