"""The Triton kernels of the gradients of lora_A and lora_B."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backends import GPU
from helpers import assert_same_bits
from repository import ROOT, SUPPORT

from lora_merge.kernels.triton.gradients import factor_gradients, serves

DEVICE = "cuda" if GPU else "cpu"
B, H, F = torch.bfloat16, torch.float16, torch.float32
pytestmark = [pytest.mark.gpu] if GPU else []


def made(tokens: int, columns: int, rows: int, rank: int, activations: torch.dtype, factors: torch.dtype) -> list:
    torch.manual_seed(tokens + rank)
    shapes = ((tokens, columns), (tokens, rows), (rank, columns), (rows, rank))
    dtypes = (activations, activations, factors, factors)
    return [torch.randn(s).to(d).to(DEVICE) for s, d in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize(
    ("size", "dtypes", "shares"),
    [
        ((70, 40, 100, 5), (B, F), None),
        ((130, 70, 33, 17), (B, F), 3),
        ((200, 66, 65, 1), (B, F), 2),
        ((130, 70, 33, 16), (B, B), 3),
        ((65, 64, 64, 16), (H, H), 1),
        ((65, 30, 64, 8), (H, F), 2),
        ((65, 30, 64, 8), (F, F), 2),
        ((3, 5, 2, 250), (B, F), 1),
        ((1, 3, 2, 1), (F, F), 1),
    ],
    ids=str,
)
def test_gradients(
    size: tuple[int, int, int, int], dtypes: tuple[torch.dtype, torch.dtype], shares: int | None
) -> None:
    """Against float64. Float32 factors: as exact as float32; 16-bit ones: products of rank are rounded to them."""
    x, dy, lora_A, lora_B = made(*size, *dtypes)
    assert serves(x, dy, lora_A, lora_B)
    found = factor_gradients(x, dy, lora_A, lora_B, shares)
    X, D, A, R = (t.double() for t in (x, dy, lora_A, lora_B))
    for got, wanted in zip(found, ((D @ R).t() @ X, D.t() @ (X @ A.t())), strict=True):
        assert (got.dtype, got.shape) == (F, wanted.shape)
        bound = 1e-6 if dtypes[1] == F else 2 * torch.finfo(dtypes[1]).eps
        assert (got - wanted).norm() <= bound * wanted.norm()


def test_inputs_that_are_not_contiguous() -> None:
    x, dy, lora_A, lora_B = made(70, 40, 50, 8, B, F)
    wanted = factor_gradients(x, dy, lora_A, lora_B)
    wide = torch.zeros(70, 90, dtype=B, device=DEVICE)
    wide[:, 3:43], wide[:, 43:] = x, dy[:, :47]
    turned = dy.t().contiguous().t()
    for some in ((wide[:, 3:43], turned), (x, dy.expand(1, 70, 50)[0])):
        found = factor_gradients(*some, lora_A.t().contiguous().t(), lora_B.t().contiguous().t())
        for one, other in zip(found, wanted, strict=True):
            assert_same_bits(one, other)


def test_what_is_left_to_torch() -> None:
    x, dy, lora_A, lora_B = made(4, 5, 6, 3, B, F)
    assert not serves(x[:0], dy[:0], lora_A, lora_B)
    assert not serves(x, dy.float(), lora_A, lora_B)
    assert not serves(x.double(), dy.double(), lora_A, lora_B)
    assert not serves(x, dy, torch.zeros(300, 5, device=DEVICE), torch.zeros(6, 300, device=DEVICE))


@pytest.mark.skipif(GPU, reason="the other tests compile them")
def test_compiles_for_hopper(tmp_path: Path) -> None:
    """Without a GPU: products go through the matrix unit, and tiles fit its shared memory."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(SUPPORT / "compile_triton_gradients.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
