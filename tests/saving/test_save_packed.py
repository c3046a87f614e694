"""Bases of which some tensors are packed in ways that are not decoded here: what is plain is merged, and the rest goes
along byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import models
import pytest
import torch
from checkpoints import assert_same, tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_merge import InvalidInput, cli, merge_checkpoint

LAYER = "model.layers.0.mlp."


def pack(base: Path, kind: str) -> dict[str, Tensor]:
    """Pack what the MLP holds, as the format lays it out; returns what the base holds now."""
    file = base / "model.safetensors"
    held: dict[str, Tensor] = {}
    for name, tensor in load_file(file).items():
        if not name.startswith(LAYER) or "router" in name or "bias" in name:
            held[name] = tensor
        elif kind == "mxfp4":
            experts, rows, cols = tensor.shape
            held[f"{name}_blocks"] = torch.randint(0, 256, (experts, cols, rows // 32, 16), dtype=torch.uint8)
            held[f"{name}_scales"] = torch.randint(0, 256, (experts, cols, rows // 32), dtype=torch.uint8)
        elif kind == "compressed-tensors":
            rows, cols = tensor.shape
            held[f"{name}_packed"] = torch.randint(-9, 9, (rows, cols // 8), dtype=torch.int32)
            held[f"{name}_scale"], held[f"{name}_shape"] = torch.rand(rows, 1), torch.tensor([rows, cols])
        elif kind == "gptq":
            stem = name.removesuffix("weight")
            held[f"{stem}qweight"] = torch.randint(-9, 9, (4, tensor.shape[0]), dtype=torch.int32)
            held[f"{stem}scales"], held[f"{stem}g_idx"] = torch.rand(1, 3), torch.arange(3)
        else:
            held[name], held[f"{name}_scale"] = tensor.to(torch.float8_e4m3fn), torch.rand(1)
    save_file(held, file, {"format": "pt"})
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors" if kind == "float8" else kind}
    (base / "config.json").write_text(json.dumps(config))
    return held


@pytest.mark.parametrize("kind", ["mxfp4", "compressed-tensors", "gptq", "float8"])
def test_the_plain_ones_are_merged(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build = models.gpt_oss if kind == "mxfp4" else models.qwen2
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    checkpoints.write_base(base, build, torch.bfloat16)
    checkpoints.write_adapter(adapter, base, build, dtype=torch.bfloat16, target_modules=["q_proj", "o_proj"])
    merge_checkpoint(base, adapter, tmp_path / "plain")
    merged = tensors(tmp_path / "plain")
    held = pack(base, kind)
    (one,) = merge_checkpoint(base, adapter, tmp_path / "out", verify=True)
    assert_same(
        tensors(one.folder),
        {name: merged[name] if "_proj.weight" in name and "attn" in name else t for name, t in held.items()},
    )
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, one.folder))
    assert after == before
    assert "what is packed goes along as it lies" in one.notes[0]
    assert cli.main(["inspect", str(adapter), str(base)]) == 0
    assert "it fits" in capsys.readouterr().out
    with pytest.raises(InvalidInput, match=r"dtype=float32 .* leave dtype out"):
        merge_checkpoint(base, adapter, tmp_path / "wide", dtype=torch.float32)
    options = checkpoints.EXPERTS if kind == "mxfp4" else {"target_modules": ["up_proj"]}
    checkpoints.write_adapter(tmp_path / "deep", base, build, dtype=torch.bfloat16, **options)
    with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match=r"is quantised .*deep changes .*beside"):
        merge_checkpoint(base, tmp_path / "deep", tmp_path / "second")
