"""Bases on disk in FP8 with a scale for each block, as DeepSeek-V3 and Qwen3 publish them, merged into plain bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import models
import pytest
import torch
from checkpoints import assert_same, nothing_left, tensors, write_adapter
from helpers import assert_same_bits
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_merge import InvalidInput, MergedWeights, merge_checkpoint
from lora_merge.kernels.reference import round_once
from lora_merge.saving import chunks
from lora_merge.saving.base import open_base

E4M3 = torch.float8_e4m3fn
MLP = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", "q_proj.weight", "o_proj.weight")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every matrix here is cut, also in the middle of a block."""
    monkeypatch.setattr(chunks, "CHUNK", 3 << 10)


def quantise(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes and scales, as DeepSeek's own script makes them: the largest of a block becomes 448."""
    high, wide = block
    rows, cols = weight.shape
    padded = nn.functional.pad(weight.float(), (0, -cols % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, -1, wide)
    scale = blocks.abs().amax((1, 3)) / torch.finfo(E4M3).max
    codes = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :cols].to(E4M3)
    return codes.contiguous(), scale


def write_base(
    folder: Path, build: Callable[[], nn.Module], block: tuple[int, int] = (16, 16), scales: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """A base in FP8, its scales in a file of their own; returns what its codes stand for, in float64, by definition."""
    checkpoints.write_base(folder, build, torch.bfloat16, shard="20KB")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }
    (folder / "config.json").write_text(json.dumps(config))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    right, apart = {}, {}
    for file in sorted(folder.glob("*.safetensors")):
        held = load_file(file)
        for name, tensor in list(held.items()):
            right[name] = tensor.double()
            if name.endswith(MLP) or ".experts." in name:
                held[name], scale = quantise(tensor, block)
                apart[f"{name}_scale_inv"] = scale.to(scales)
                spread = scale.to(scales).double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
                right[name] = held[name].double() * spread[: tensor.shape[0], : tensor.shape[1]]
        save_file(held, file, {"format": "pt"})
    save_file(apart, folder / "scales.safetensors", {"format": "pt"})
    index["weight_map"] |= dict.fromkeys(apart, "scales.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return right


def plain_of(base: Path, right: dict[str, Tensor], folder: Path, dtype: torch.dtype) -> Path:
    """A plain base of these values, which `MergedWeights` and PEFT know."""
    folder.mkdir()
    config = json.loads((base / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}))
    save_file({n: t.to(dtype) for n, t in right.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [(16, 16), (128, 128), (8, 24)])
def test_values(block: tuple[int, int], scales: torch.dtype, tmp_path: Path) -> None:
    """Weights that no adapter touches are float32 products, rounded once to bf16; with the adapter it is the sum; the
    file of scales is gone, config.json says of no quantisation."""
    right = write_base(tmp_path / "base", models.qwen2, block, scales)
    write_adapter(tmp_path / "adapter", tmp_path / "base", models.qwen2, target_modules=["q_proj", "v_proj"])
    (saved,) = merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", verify=True)
    got = tensors(tmp_path / "out")
    files = {"config.json", "generation_config.json", "model.safetensors"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == files
    assert got.keys() == right.keys()
    assert saved.verified == saved.nbytes
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for name, wanted in right.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" in held:
            A, B = (held[f"{key}.lora_{f}.weight"].double() for f in "AB")
            scaling = said["lora_alpha"] / said["r"]
            bound = 2.0**-20 * scaling * (B.abs() @ A.abs()) + 2.0**-22 * wanted.abs()
            wanted = wanted + scaling * (B @ A)
            rounded = round_once(wanted, torch.bfloat16)
            assert ((got[name].double() - wanted).abs() <= (rounded.double() - wanted).abs() + bound).all(), name
        else:
            assert_same_bits(got[name], wanted.float().bfloat16(), name)
    config, before = (json.loads((tmp_path / n / "config.json").read_text()) for n in ("out", "base"))
    assert before.pop("quantization_config")
    assert config == before
    assert "fp8 in blocks" in saved.notes[0]
    assert "bfloat16" in saved.notes[0]


@pytest.mark.parametrize("kind", ["plain", "dora", "experts", "rslora, stochastic", "whole"])
def test_as_the_plain_base(kind: str, tmp_path: Path) -> None:
    """What a float32 base of the same values gives, rounded to bf16; experts, which transformers fuses, too."""
    build: Any = models.qwen3_moe if kind == "experts" else models.qwen2
    known: dict[str, dict[str, Any]] = {
        "dora": {"use_dora": True},
        "experts": checkpoints.EXPERTS,
        "rslora, stochastic": {"use_rslora": True},
        "whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    }
    options = known.get(kind, {})
    run: dict[str, Any] = {"rounding": "stochastic", "seed": 5} if "stochastic" in kind else {}
    right = write_base(tmp_path / "base", build)
    plain = plain_of(tmp_path / "base", right, tmp_path / "plain", torch.float32)
    write_adapter(tmp_path / "adapter", plain, build, **options)
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", **run)
    got = tensors(tmp_path / "out")
    assert {t.dtype for t in got.values()} == {torch.bfloat16}
    weights = MergedWeights(checkpoints.load(plain, tmp_path / "adapter"), dtype=torch.bfloat16, **{
        key: value for key, value in run.items() if key != "seed"
    })  # fmt: skip
    wanted = {n: t.clone() for b in weights.buckets(seed=run.get("seed")) for n, t in b.tensors()}
    assert_same(got, wanted)


def test_as_transformers_dequantises(tmp_path: Path) -> None:
    """The reading of a real library: transformers decodes such a base where no GPU is."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    write_base(tmp_path / "base", models.qwen2)
    config = FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config, dtype=torch.bfloat16)
    theirs = model.state_dict()
    write_adapter(tmp_path / "adapter", tmp_path / "base", models.qwen2, target_modules=["v_proj"])
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    for name, tensor in tensors(tmp_path / "out").items():
        if name.endswith(MLP):
            assert_same_bits(tensor, theirs[name], name)


Q = "model.layers.1.self_attn.q_proj.weight"


def _scales(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    def do(base: Path) -> None:
        held, index = load_file(base / "scales.safetensors"), base / "model.safetensors.index.json"
        change(held)
        save_file(held, base / "scales.safetensors", {"format": "pt"})
        told = json.loads(index.read_text())
        names = {n: f for n, f in told["weight_map"].items() if f != "scales.safetensors" or n in held}
        told["weight_map"] = names | dict.fromkeys(held, "scales.safetensors")
        index.write_text(json.dumps(told))

    return do


def _config(**said: Any) -> Callable[[Path], None]:
    def do(base: Path) -> None:
        config = json.loads((base / "config.json").read_text())
        config["quantization_config"] |= said
        (base / "config.json").write_text(json.dumps(config))

    return do


SCALE = f"{Q}_scale_inv"
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "no scales": (_scales(lambda t: t.pop(SCALE)), r"weight_scale_inv is missing, expected float32 \[2, 2\]"),
    "scales of another size": (
        _scales(lambda t: t.update({SCALE: t[SCALE][:1].contiguous()})),
        r"weight_scale_inv is torch\.float32 \[1, 2\], expected float32, bfloat16 or float16 \[2, 2\]",
    ),
    "scales of another dtype": (
        _scales(lambda t: t.update({SCALE: t[SCALE].to(torch.int32)})),
        r"weight_scale_inv is torch\.int32",
    ),
    "scales of nothing": (
        _scales(lambda t: t.update({"model.gone.weight_scale_inv": torch.ones(1, 1)})),
        r"model\.gone\.weight, in FP8: .* scales its blocks, and it is not there",
    ),
    "another block": (_config(weight_block_size=[32, 16]), r"scale_inv is .* \[3, 2\], expected .*\[2, 2\]"),
    "one scale a tensor": (
        _config(weight_block_size=None),
        "weight_block_size: None: of FP8, bases with a scale for each block of a weight are read.*load the base in",
    ),
    "fixed scales of activations": (_config(activation_scheme="static"), r"fixed scales of activations \(static\)"),
    "another format": (_config(quant_method="gptq"), "quantization_config: gptq.*decoded are bitsandbytes"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken(case: str, tmp_path: Path) -> None:
    """Refused by name, before the first byte."""
    write_base(tmp_path / "base", models.qwen2)
    write_adapter(tmp_path / "adapter", tmp_path / "base", models.qwen2, target_modules=["q_proj"])
    change, match = BROKEN[case]
    change(tmp_path / "base")
    with nothing_left(tmp_path), pytest.raises(InvalidInput, match=match):
        merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")


def test_chunks_are_small(tmp_path: Path) -> None:
    """A chunk of a weight reads the codes and scales of its rows alone."""
    write_base(tmp_path / "base", models.qwen2)
    base = open_base(tmp_path / "base")
    name = "model.layers.0.mlp.gate_proj.weight"
    whole = torch.empty(48, 32)
    base.read(name, 0, whole)
    for begin, end in ((0, 1), (15, 17), (40, 48)):
        assert_same_bits(base.chunk(name, chunks.Rows(begin, end), chunks.take_new).tensor, whole[begin:end])
    base.close()
