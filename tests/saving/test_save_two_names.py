"""A base that holds a weight under its own name, and under one that transformers takes for it."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_merge import InvalidInput, merge_checkpoint

NAME = "model.layers.0.self_attn.{}.weight"


def test_which_is_loaded_is_not_guessed(tmp_path: Path) -> None:
    model = models.with_lora(models.qwen2, target_modules=["q_proj"])
    model.save_pretrained(tmp_path / "adapter")
    model.unload().save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    held = load_file(file)
    for changed in (
        False,
        True,
    ):  # transformers takes the one without "model." in the result, and would lose the adapter
        name = NAME.format("q_proj" if changed else "k_proj")
        save_file(held | {name.removeprefix("model."): torch.zeros_like(held[name])}, file, metadata={"format": "pt"})
        if not changed:
            merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
            continue
        with pytest.raises(InvalidInput, match=r"layers\.0\.self_attn\.q_proj\.weight are two names of one weight"):
            merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "other")
