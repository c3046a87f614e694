"""Arguments and tensors that are no plain ones: taken as they are meant, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn

from lora_merge import InvalidInput, MergedWeights, Plan, Segment, merge, merge_, merged, run_segments, save_merged

W, A, B = torch.zeros(6, 8), torch.ones(2, 8), torch.ones(6, 2)


def segment(**odd: Any) -> Plan:
    return Plan([Segment(**{"name": "x", "source": W, "destination": W, "lora_A": A, "lora_B": B} | odd)])


def rectangles(**odd: Any) -> None:
    run_segments([W.clone()], [None], [A], [B], [1.0], ["x"], **odd)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: merge_(W, A, B, 10**400), "scaling must be finite"),
        (lambda: run_segments([W], [None], [A], [B], ["a"], ["x"]), "scaling must be one real number, got 'a'"),
        (lambda: rectangles(first=[2**63]), "first must fit in 64 bits"),
        (lambda: rectangles(pitch=[(2**70, 1)]), "pitch must fit in 64 bits"),
        (lambda: rectangles(first=[0.5]), "first must be a whole number, got 0.5"),
        (lambda: segment(first=2**63), "x: first must fit in 64 bits"),
        (lambda: segment(pitch=(1, 2, 3)), "x: pitch must be two whole numbers"),
        (lambda: segment(scaling="a"), "scaling must be one real number, got 'a'"),
        (lambda: segment(scaling=None), "scaling must be one real number, got None"),
        (lambda: segment(name=3), "name of segment 0 must be a string, got 3"),
        (lambda: merge(torch.nested.nested_tensor([W]), A, B, 1.0), "weight must be a dense tensor, got a nested"),
        (lambda: merge(W, A, B, 1.0, dtype="int8"), "dtype must be bfloat16, float16 or float32, got 'int8'"),
        (lambda: merge(W, A, B, 1.0, dtype=torch.int8), "dtype must be bfloat16, float16 or float32, got torch.int8"),
    ],
)
def test_refused_by_name(call: Callable[[], object], told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        call()


@pytest.mark.parametrize("name", ["bfloat16", "torch.bfloat16"])
def test_dtypes_by_name(name: str, tmp_path: Path) -> None:
    assert merge(W, A, B, 1.0, dtype=name).dtype == torch.bfloat16
    model = models.with_lora(models.qwen2)
    assert {tensor.dtype for _, tensor in MergedWeights(model, dtype=name)} == {torch.bfloat16}
    save_merged(model, tmp_path / "out", dtype=name)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_lazily_negated_views() -> None:
    """They are read as what they stand for, and never written to."""
    values = torch.randn(6, 8, dtype=torch.complex64)
    before, view = values.clone(), values.conj().imag
    assert view.is_neg()
    assert torch.equal(merge(view, A, B, 1.0), merge(view.clone(), A, B, 1.0))
    lazy = torch.randn(2, 8, dtype=torch.complex64).conj().imag
    assert torch.equal(merge(W, lazy, B, 1.0), merge(W, lazy.clone(), B, 1.0))
    for call in (
        lambda: merge_(view, A, B, 1.0),
        lambda: merge(W, A, B, 1.0, out=view),
        lambda: segment(source=view, destination=view),
    ):
        with pytest.raises(InvalidInput, match="lazily negated or conjugated view"):
            call()
    assert torch.equal(values, before)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex32])
def test_buffers_that_files_do_not_hold(dtype: torch.dtype, tmp_path: Path) -> None:
    model = models.with_lora(models.qwen2)
    model.base_model.model.register_buffer("odd", torch.ones(3, dtype=torch.complex64).to(dtype))
    with pytest.raises(InvalidInput, match=f"odd: expected a dtype that safetensors files hold .*, got {dtype}"):
        save_merged(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_without_elements() -> None:
    config = LoraConfig(r=2, target_modules=["0", "1"], init_lora_weights=False)
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 0)), config)
    x = torch.randn(3, 4)
    for _ in range(3):
        with merged(model):
            assert model(x).shape == (3, 0)
            assert model.base_model.model[0].merged
        assert {name: tuple(t.shape) for name, t in MergedWeights(model)}["1.weight"] == (0, 4)
