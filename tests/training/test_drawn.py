"""Training with rounding="stochastic": one draw a version, the same in the trainer and in what is served."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from backends import Backend
from helpers import assert_same_bits
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from processes import spawn
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lora_merge import InvalidInput, MergedWeights, Plan, Segment, SglangSync, save_merged, train_merged
from lora_merge.restore import TrackedPlan
from tests.training.test_train import LINEARS, adapted, assert_base, bits, loss_of, shake
from tests.training.test_train_ranks import whole

DRAWN: dict[str, Callable[[], PeftModel]] = {
    "bfloat16": lambda: adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS),
    "float16": lambda: adapted(models.qwen2, torch.float16, target_modules=LINEARS),
    "embedding and head": lambda: adapted(models.qwen2, torch.bfloat16, target_modules=["embed_tokens", "lm_head"]),
    "Conv1D": lambda: adapted(models.gpt2, torch.bfloat16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "convolutions": lambda: adapted(models.Convolutions, torch.bfloat16, target_modules=models.CONVOLUTIONS),
    "tied": lambda: adapted(
        partial(models.qwen2, tied=True), torch.bfloat16, target_modules=["embed_tokens", "lm_head", "q_proj"]
    ),
}


def held(model: nn.Module) -> dict[str, Tensor]:
    """What the model computes with, under the stream's names."""
    return {n.replace("base_model.model.", "").replace(".base_layer", ""): t for n, t in bits(model).items()}


def assert_streamed(computed: dict[str, Tensor], streamed: dict[str, Tensor]) -> None:
    for name, tensor in streamed.items():
        assert_same_bits(tensor, computed[name], name)


@pytest.mark.parametrize("name", DRAWN)
def test_a_pass_serves_what_is_trained(name: str) -> None:
    """A forward after a pass, and one before it, have its bits; each step draws anew."""
    model = DRAWN[name]()
    base, weights = bits(model), MergedWeights(model, rounding="stochastic")
    with train_merged(model, rounding="stochastic") as training:
        seen = []
        for _ in range(4):
            shake(model)
            training.refresh()  # the draw of what comes
            before = held(model)
            streamed = dict(weights)
            assert_streamed(before, streamed)
            training.refresh()
            assert_streamed(held(model), streamed)
            shake(model, 0.1)  # two steps that nothing is served of
            training.refresh()
            seen.append({n: t.clone() for n, t in streamed.items()})
        again = dict(weights)
        assert_streamed(again, dict(weights))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.mul_(1)
                torch._C._autograd._unsafe_set_version_counter((parameter,), (parameter._version + 1,))
        training.refresh()
        assert any(not torch.equal(tensor, again[n]) for n, tensor in held(model).items() if n in again)
    assert_base(model, base)


def test_one_draw_of_one_version() -> None:
    """Forwards, gradient accumulation, reference policies, pauses and a save between a pass and the next step keep its
    draw; the backward pass of a forward before them goes on."""
    model = DRAWN["bfloat16"]()
    base = bits(model)
    with train_merged(model, rounding="stochastic") as training:
        streamed = dict(MergedWeights(model, rounding="stochastic"))
        loss = loss_of(model)
        assert_streamed(held(model), streamed)
        with torch.no_grad(), model.disable_adapter():
            loss_of(model)
        loss.backward()
        assert_streamed(held(model), streamed)
        training.pause()
        loss_of(model).backward()
        assert_streamed(held(model), streamed)
        assert training.merges == 3
        list(MergedWeights(model, adapters=False))
        training.refresh()
        assert_streamed(held(model), streamed)
        model.add_adapter("reference", LoraConfig(r=4, target_modules=["q_proj"]))
        for name in ("reference", "default"):
            model.set_adapter(name)
            training.refresh()
        assert_streamed(held(model), streamed)
    assert_base(model, base)


def test_a_save_is_nothing_that_is_served(tmp_path: Path) -> None:
    model = DRAWN["bfloat16"]()
    with train_merged(model, rounding="stochastic") as training:
        streamed = dict(MergedWeights(model, rounding="stochastic"))
        save_merged(model, tmp_path / "nearest")
        save_merged(model, tmp_path / "drawn", rounding="stochastic", seed=77)
        training.refresh()
        assert_streamed(held(model), streamed)


def test_a_scaling_and_another_adapter_are_another_version() -> None:
    model: Any = DRAWN["bfloat16"]()
    model.add_adapter("twin", LoraConfig(r=4, lora_alpha=6, target_modules=LINEARS))
    shake(model)
    weights = MergedWeights(model, rounding="stochastic")
    changes: list[Callable[[], object]] = [
        lambda: [m.set_scale("default", 3.0) for m in model.modules() if isinstance(m, LoraLayer)],
        lambda: model.base_model.set_adapter("twin"),
        lambda: model.base_model.set_adapter(["default", "twin"]),
    ]
    with train_merged(model, rounding="stochastic") as training:
        for change in changes:
            dict(weights)
            training.refresh()
            change()
            training.refresh()
            before = held(model)
            assert_streamed(before, dict(weights))


@pytest.mark.parametrize(("trained", "served"), [("nearest", "stochastic"), ("stochastic", "nearest")])
def test_another_rounding_is_refused(trained: str, served: str) -> None:
    """Before an engine is asked, whichever side rounds otherwise; and so is a draw of the sender's own."""
    model = DRAWN["bfloat16"]()
    with train_merged(model, rounding=trained):
        with pytest.raises(InvalidInput, match=f"rounding='{trained}' serve, and this would serve another one"):
            SglangSync(model, "http://127.0.0.1:9", rounding=served).push()
        if trained == "stochastic":
            with pytest.raises(InvalidInput, match="strategy='unshard' would draw others"):
                SglangSync(model, "http://127.0.0.1:9", rounding=trained, strategy="unshard").push()
            with pytest.raises(InvalidInput, match="draw others than those that are trained"):
                list(MergedWeights(model, rounding=trained, strategy="unshard"))
        with pytest.raises(InvalidInput, match=f"rounding='{served}' for a model that is trained"):
            list(MergedWeights(model, rounding=served))


def test_refused() -> None:
    with pytest.raises(InvalidInput, match=r"q_proj.weight is float32, which rounding='stochastic' does not round"):
        train_merged(adapted(models.qwen2, target_modules=["q_proj"]), rounding="stochastic")
    with pytest.raises(InvalidInput, match="rounding must be one of nearest, stochastic, got 'up'"):
        train_merged(DRAWN["bfloat16"](), rounding="up")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_tracked_draw_is_that_of_a_plan(backend: Backend, dtype: torch.dtype) -> None:
    """Bit for bit, also with special values, of views and of pieces; and the base comes back, draw after draw."""
    torch.manual_seed(0)
    rows, cols = 70, 100
    weight = torch.randn(rows, cols).to(dtype)
    weight.view(-1)[:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, torch.finfo(dtype).max])
    weight = weight.to(backend.device)
    lora_A, lora_B = (torch.randn(4, cols) * 0.1).to(backend.device), (torch.randn(rows, 4) * 0.1).to(backend.device)

    def segments(of: Tensor) -> list[Segment]:
        halves = [(of[:40], lora_B[:40], 0), (of[40:], lora_B[40:], 40 * cols)]
        return [Segment("w", w, w, lora_A, b, 2.0, None, first, (cols, 1)) for w, b, first in halves]

    base, drawn = weight.clone(), []
    plans = [TrackedPlan(segments(weight), rounding="stochastic") for _ in range(2)]
    for number in range(4):
        wanted = base.clone()
        Plan(segments(wanted)).run(rounding="stochastic", seed=number)
        plan, other = plans[number % 2], plans[1 - number % 2]
        plan.seed = number
        plan.remerge(other)
        assert_same_bits(weight, wanted, f"draw {number}")
        drawn.append(wanted)
    assert plan.nbytes < weight.nbytes
    plan.unmerge()
    assert_same_bits(weight, base, "base")
    assert dtype == torch.float32 or any(not torch.equal(drawn[0], one) for one in drawn[1:])


def trains(rank: int) -> None:
    inner = adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS)
    alone, before = copy.deepcopy(inner), bits(inner)
    for layer in inner.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(inner)
    model: Any = inner
    weights, one = (MergedWeights(m, rounding="stochastic") for m in (model, alone))
    with train_merged(model, rounding="stochastic") as training, train_merged(alone, rounding="stochastic") as other:
        for _ in range(3):
            for _ in range(2):
                torch.manual_seed(5)
                with torch.no_grad():
                    for p in (*model.parameters(), *alone.parameters()):
                        if p.requires_grad:
                            p.mul_(1.25)
                training.refresh()
                other.refresh()
                want = held(alone)
                for name, tensor in held(model).items():
                    assert_same_bits(whole(tensor), want[name], name)
            got = {n: whole(t) for n, t in weights}
            assert_streamed(want, got)
            assert_streamed(want, dict(one))
    for name, parameter in inner.named_parameters():
        if "lora_" not in name:
            assert_same_bits(whole(parameter), before[name], name)


def test_on_two_ranks() -> None:
    """Under FSDP2 each shard has the draw of the whole."""
    spawn(2, trains)
