"""Training on merged weights of fused experts on a GPU: gradients by grouped products; memory and time beside PEFT."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from lora_merge import train_merged
from tests.training.test_train import loss_of, truth
from tests.training.test_train_experts import SIZES, experts, gradients

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def larger(monkeypatch: pytest.MonkeyPatch, tokens: int, **sizes: int) -> None:
    """Have `experts` make models of these sizes, on data of so many tokens."""
    for key, value in sizes.items():
        monkeypatch.setitem(SIZES, key, value)
    data = torch.randint(3, models.VOCABULARY, (2, tokens // 2), generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def of_the_data(seed: int = 0) -> Tensor:
        return data

    monkeypatch.setattr(models, "tokens", of_the_data)


@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("how", ["grouped_mm", "eager"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_gradients(name: str, how: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No further from float64 than PEFT's own."""
    # Each token goes to all experts: rounding then sends none elsewhere than float64.
    larger(monkeypatch, 40, hidden_size=128, head_dim=32, moe_intermediate_size=64, num_experts_per_tok=4)
    model = experts(name, torch.bfloat16, how, r=rank).to(DEVICE)
    _, wanted = truth(model)
    own = gradients(model)
    with train_merged(model):
        got = gradients(model)
    for key, gradient in got.items():
        if "q_proj" in key:  # what comes back to it is mostly rounding
            continue
        errors = [((g.double() - wanted[key]).norm() / wanted[key].norm()).item() for g in (gradient, own[key])]
        assert gradient.dtype == torch.float32
        assert errors[0] < 0.03 or errors[0] < 3 * errors[1], f"{key}: {errors}"


def test_experts_without_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their factors get zeros, whichever way experts are computed."""
    larger(monkeypatch, 8, hidden_size=128, head_dim=32, num_experts=32, num_local_experts=32, num_hidden_layers=1)
    model = experts("qwen3_moe", torch.bfloat16, r=4).to(DEVICE)
    base: Any = model.get_base_model()
    with train_merged(model):
        grouped = gradients(model)
        base.set_experts_implementation("eager")
        for key, wanted in gradients(model).items():
            assert (grouped[key] - wanted).norm() <= 0.02 * wanted.norm(), key
            if "experts" in key and "lora_A" in key:
                empty = wanted.view(32, -1).abs().amax(1) == 0
                assert empty.any()
                assert not grouped[key].view(32, -1)[empty].any()


def test_memory_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less of both than PEFT's forward takes."""
    sizes = {"hidden_size": 1024, "head_dim": 128, "moe_intermediate_size": 512, "num_hidden_layers": 4}
    sizes |= {"num_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 8, "max_position_embeddings": 8192}
    larger(monkeypatch, 8192, **sizes)
    found: dict[str, tuple[float, float]] = {}
    for kind in ("merged", "peft"):
        model: Any = experts("qwen3_moe", torch.bfloat16, r=32).to(DEVICE)
        with train_merged(model) if kind == "merged" else nullcontext():
            for _ in range(3):
                loss_of(model).backward()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before, took = torch.cuda.memory_allocated(), []
            for _ in range(10):
                begin = time.perf_counter()
                loss_of(model).backward()
                torch.cuda.synchronize()
                took.append(time.perf_counter() - begin)
            found[kind] = min(took), torch.cuda.max_memory_allocated() - before
        del model
        torch.cuda.empty_cache()
    print({kind: f"{seconds * 1000:.1f} ms, {size / 2**30:.2f} GiB" for kind, (seconds, size) in found.items()})
    assert found["merged"][1] < found["peft"][1]
    assert found["merged"][0] < found["peft"][0]
