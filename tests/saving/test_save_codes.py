"""Bases on disk in codes that are made here, on each device: the bits of a plain base of the values.

What real libraries write is in test_libraries_quantised_saved.py and test_save_fp8.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from checkpoints import assert_same, pair, tensors, write_adapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_merge import merge_checkpoint
from lora_merge.kernels.packed import Packed, moved
from lora_merge.saving import chunks
from lora_merge.saving.base import open_base
from tests.saving import test_save_fp8
from tests.saving.test_save import MEASURED, ROOT

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every matrix here is cut."""
    monkeypatch.setattr(chunks, "CHUNK", 3 << 10)


def four(name: str, shape: tuple[int, ...], double: bool) -> dict[str, Tensor]:
    """Random codes of 4 bits, as bitsandbytes has them, whatever their codebook."""
    count = shape[0] * shape[1]
    blocks = -(-count // 64)
    said: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    held = {
        name: torch.randint(256, (-(-count // 2), 1), dtype=torch.uint8),
        f"{name}.quant_map": torch.rand(16) * 2 - 1,
        f"{name}.absmax": torch.rand(blocks) * 0.1 + 0.01,
    }
    if double:
        said |= {"nested_blocksize": 32, "nested_dtype": "float32", "nested_offset": 0.05}
        held[f"{name}.absmax"] = torch.randint(256, (blocks,), dtype=torch.uint8)
        held[f"{name}.nested_absmax"] = torch.rand(-(-blocks // 32)) * 0.04
        held[f"{name}.nested_quant_map"] = torch.rand(256) * 2 - 1
    state = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return held | {f"{name}.quant_state.bitsandbytes__nf4": state}


def eight(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Random codes of LLM.int8."""
    owner = name.removesuffix(".weight")
    return {
        name: torch.randint(-127, 128, shape, dtype=torch.int8),
        f"{owner}.SCB": torch.rand(shape[0]) * 0.1,
        f"{owner}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def write_base(folder: Path, kind: str, build: Callable[[], nn.Module], turned: bool) -> None:
    """A model whose linear layers lie in codes.

    Args:
        turned: they are those of the transposed weights.
    """
    torch.manual_seed(7)
    model: Any = build().bfloat16()
    model.save_pretrained(folder)
    held: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dim() != 2 or any(part in name for part in ("embed", "lm_head", "wte", "wpe")):
            held[name] = tensor
            continue
        shape = tuple(tensor.shape[::-1] if turned else tensor.shape)
        held |= eight(name, shape) if kind == "int8" else four(name, shape, "double" in kind)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (folder / "config.json").write_text(json.dumps(config))


def decoded(folder: Path, to: Path, turned: bool) -> Path:
    """A plain base of the values that `open_base` reads; of turned ones transposed here."""
    base = open_base(folder)
    held = {}
    for name, stored in base.tensors.items():
        held[name] = torch.empty(stored.shape, dtype=stored.dtype)
        base.read(name, 0, held[name])
        if turned and name in getattr(base, "coded", {}):
            held[name] = held[name].t().contiguous()
    base.close()
    to.mkdir()
    save_file(held, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text(json.dumps(dict(base.config)))
    return to


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adapter", ["lora", "dora"])
@pytest.mark.parametrize("model", ["qwen2", "gpt2"])
@pytest.mark.parametrize("kind", ["nf4", "nf4, double", "int8"])
def test_bits(kind: str, model: str, adapter: str, device: str, tmp_path: Path) -> None:
    """32 codes a row: blocks of 64 reach over the ends of rows."""
    turned, build = model == "gpt2", getattr(models, model)
    write_base(tmp_path / "base", kind, build, turned)
    plain = decoded(tmp_path / "base", tmp_path / "plain", turned)
    targets = ["c_attn", "c_proj"] if turned else ["q_proj", "v_proj", "down_proj"]
    write_adapter(tmp_path / "adapter", plain, build, target_modules=targets, use_dora=adapter == "dora")
    for folder in ("base", "plain"):
        out = tmp_path / f"{folder}-out"
        merge_checkpoint(tmp_path / folder, tmp_path / "adapter", out, dtype=torch.bfloat16, device=device, verify=True)
    assert_same(tensors(tmp_path / "base-out"), tensors(tmp_path / "plain-out"))


def test_config_of_another_dtype(tmp_path: Path) -> None:
    """Who loads by the config would round again: a note says so."""
    write_base(tmp_path / "base", "nf4", models.qwen2, False)
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    write_adapter(tmp_path / "adapter", tmp_path / "base", models.qwen2)
    for said, dtype, told in (("bfloat16", torch.bfloat16, False), ("float16", torch.bfloat16, True)):
        (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"dtype": said}))
        (saved,) = merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / said)
        assert any("rounds these weights again" in note for note in saved.notes) == told
        assert tensors(tmp_path / said)["model.layers.0.mlp.up_proj.weight"].dtype == dtype


@pytest.mark.gpu
def test_fp8_on_a_gpu(tmp_path: Path) -> None:
    right = test_save_fp8.write_base(tmp_path / "base", models.qwen2)
    plain = test_save_fp8.plain_of(tmp_path / "base", right, tmp_path / "plain", torch.float32)
    write_adapter(tmp_path / "adapter", plain, models.qwen2)
    for folder in ("base", "plain"):
        out = tmp_path / f"{folder}-out"
        merge_checkpoint(tmp_path / folder, tmp_path / "adapter", out, dtype=torch.bfloat16, device="cuda")
    assert_same(tensors(tmp_path / "base-out"), tensors(tmp_path / "plain-out"))


def test_moved(tmp_path: Path) -> None:
    """All that values are made of goes along."""
    write_base(tmp_path / "base", "nf4, double", models.qwen2, False)
    base = open_base(tmp_path / "base")
    name = "model.layers.0.mlp.up_proj.weight"
    chunk = base.chunk(name, chunks.Rows(3, 7), chunks.take_new).tensor
    base.close()
    assert moved(chunk, torch.device("cpu")) is chunk
    there = moved(chunk, torch.device("meta"))
    assert isinstance(there, Packed)
    assert isinstance(chunk, Packed)
    assert {t.device.type for t in [there, *there.codes.tensors]} == {"meta"}
    assert (there.shape, there.stride(), there.place) == (chunk.shape, chunk.stride(), chunk.place)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read as Linux tells it")
@pytest.mark.parametrize("kind", ["nf4, double", "int8", "fp8"])
def test_memory(kind: str, tmp_path: Path) -> None:
    """Of a result of 430 MB, on a disk that is slower than merging: the buffers, not the base (see test_save.py)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12, "vocab_size": 8192}
    config = LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=8)

    def build() -> Any:
        return LlamaForCausalLM(config)

    if kind == "fp8":
        test_save_fp8.write_base(tmp_path / "base", build, (128, 128))
    else:
        write_base(tmp_path / "base", kind, build, False)
    write_adapter(tmp_path / "adapter", tmp_path / "base", build, dtype=torch.bfloat16)
    small_base, small = pair("bf16", tmp_path / "small")
    arguments = [small_base, small, tmp_path / "first", tmp_path / "base", tmp_path / "adapter", tmp_path / "out"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 400e6
    used = int(done.stdout.split()[-1])
    assert used < 300e6, f"{used / 1e6:.0f} MB"
