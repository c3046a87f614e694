"""Weights beside an adapter: what a trainer trained whole is merged, what is no part of the model is named, and nothing
else is passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import models
import pytest
import torch
from checkpoints import assert_same, tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_merge import InvalidInput, merge_checkpoint
from lora_merge.saving.inspect import inspect_adapter

KEY = "base_model.model.model."
"""What names of parameters of a PeftModel begin with, which ms-swift and LLaVA write."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Tensor]]:
    """A base, an adapter of q_proj, and what is made of the two."""
    home = tmp_path_factory.mktemp("beside")
    checkpoints.write_base(home / "base", models.qwen2, torch.float32)
    checkpoints.write_adapter(home / "adapter", home / "base", models.qwen2, target_modules=["q_proj"])
    merge_checkpoint(home / "base", home / "adapter", home / "out")
    return home / "base", home / "adapter", tensors(home / "out")


def beside(adapter: Path, folder: Path, files: dict[str, Any]) -> Path:
    """The adapter with more files."""
    folder.mkdir()
    for path in adapter.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    for name, inside in files.items():
        if isinstance(inside, str):
            (folder / name).write_text(inside)
        elif name.endswith(".safetensors"):
            save_file(inside, folder / name)
        else:
            torch.save(inside, folder / name)
    return folder


@pytest.mark.parametrize("file", ["vit.safetensors", "non_lora_trainables.bin", "others.pt"])
def test_what_was_trained_whole_is_merged(
    file: str, saved: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path
) -> None:
    base, adapter, merged = saved
    mine = {"norm.weight": torch.rand(32), "layers.1.mlp.up_proj.weight": torch.rand(48, 32)}
    state = {"optimizer.pt": {"state": torch.rand(3)}, "training_args.bin": "no tensors", "scheduler.pt": {"a": 1}}
    state |= {"rng_state_0.pth": {"cpu": torch.rand(3)}, "notes.bin": {"step": 3}}
    folder = beside(adapter, tmp_path / "a", {file: {KEY + n: t for n, t in mine.items()}} | state)
    (folder / "global_step7").mkdir()
    for one in (base, folder):  # trainers copy along what the model reads beside its weights
        torch.save({"weight": torch.ones(2)}, one / "sparse_linear.pt")
    (one,) = merge_checkpoint(base, folder, tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), merged | {f"model.{n}": t for n, t in mine.items()})
    assert one.changed == 4
    assert not one.notes
    assert (one.folder / "sparse_linear.pt").exists()
    (base / "sparse_linear.pt").unlink()


def test_what_is_no_part_of_it_is_named(saved: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path) -> None:
    base, adapter, merged = saved
    whole = {f"base_model.model.{name}": torch.zeros_like(t) for name, t in merged.items()}
    half = dict(list(whole.items())[: len(whole) // 2])
    for number, (files, told) in enumerate(
        [
            ({"value_head.safetensors": {"v_head.summary.weight": torch.rand(1, 32)}}, "holds a value head"),
            ({"pytorch_model.bin": whole}, "holds a whole model, which is not read"),
            ({"model.safetensors": half, "config.json": "{}"}, "holds a whole model, which is not read"),
            ({"adapter_0.pt": {f"{KEY}layers.0.q_proj.lora_A.weight": torch.rand(2, 2)}}, "factors of LoRA, too"),
            ({"table.pt": "no file of torch"}, "cannot be read as tensors"),
            ({"trained.pt": {"model": {f"{KEY}norm.weight": torch.rand(32)}}}, "cannot be read as tensors"),
        ]
    ):
        folder = beside(adapter, tmp_path / f"a{number}", files)
        (one,) = merge_checkpoint(base, folder, tmp_path / f"out{number}")
        assert_same(tensors(one.folder), merged)
        assert next(iter(files)) in one.notes[0]
        assert told in one.notes[0]


def test_what_cannot_be_placed_is_refused(saved: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path) -> None:
    base, adapter, _ = saved
    for number, (files, match) in enumerate(
        [
            (
                {"extra.safetensors": {f"{KEY}vision.weight": torch.rand(3)}},
                "extra.safetensors .*vision.weight.* no pl",
            ),
            ({"extra.bin": {f"{KEY}norm.weight": torch.rand(3)}}, r"norm.weight as \[3\], and the base has \[32\]"),
            (
                {"a.pt": {f"{KEY}norm.weight": torch.rand(32)}, "b.pt": {f"{KEY}norm.weight": torch.rand(32)}},
                "norm.weight is in a.pt and, with other bits, in b.pt",
            ),
            (
                {f"model-0000{i}-of-00002.safetensors": {f"{KEY}norm.weight": torch.rand(32)} for i in (1, 2)},
                "norm.weight is in model-00002-of-00002.safetensors and, with other bits, in another file",
            ),
            (
                {"a.pt": {f"{KEY}norm.weight": torch.ones(32)}, "b.pt": {f"{KEY}norm.weight": torch.ones(32).half()}},
                "other bits",
            ),
            ({"q.pt": {f"{KEY}layers.0.self_attn.q_proj.weight": torch.rand(32, 32)}}, "the adapter changes, too"),
        ]
    ):
        folder = beside(adapter, tmp_path / f"a{number}", files)
        with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match=match):
            merge_checkpoint(base, folder, tmp_path / "out")


def test_an_adapter_that_is_there_in_both_formats(saved: tuple[Path, Path, dict[str, Tensor]], tmp_path: Path) -> None:
    """PEFT reads the first of them, whichever is the newer: they hold the same, or nobody knows which one is meant."""
    base, adapter, merged = saved
    held = load_file(adapter / "adapter_model.safetensors")
    first = min(held)
    merge_checkpoint(base, beside(adapter, tmp_path / "same", {"adapter_model.bin": held}), tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), merged)
    for number, (other, told) in enumerate(
        [
            (held | {first: held[first] + 1}, f"{first} has other bits in the second"),
            ({n: t for n, t in held.items() if n != first}, f"adapter_model.bin does not hold {first}"),
            (held | {"a.weight": torch.ones(1)}, "adapter_model.safetensors does not hold a.weight"),
            ("no file of torch", "which cannot be read"),
        ]
    ):
        folder = beside(adapter, tmp_path / f"a{number}", {"adapter_model.bin": other})
        for call in (lambda f=folder: merge_checkpoint(base, f, tmp_path / "o"), lambda f=folder: inspect_adapter(f)):
            with pytest.raises(InvalidInput, match=r"adapter_model\.safetensors.* and .*adapter_model\.bin") as error:
                call()
            assert told in str(error.value)
            assert "move the file that is not meant" in str(error.value)
