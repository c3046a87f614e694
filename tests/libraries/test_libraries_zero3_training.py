"""Training under DeepSpeed's ZeRO, merging between its steps: as if nobody had merged (`make test-libraries`)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from processes import spawn
from torch import Tensor, nn

from lora_merge import MergedWeights, merged
from tests.libraries.test_libraries_zero3 import CONFIGS, engine, loss_of
from tests.shards.test_shards_merge import MODELS, device, local_bits

pytestmark = pytest.mark.filterwarnings("ignore")
CLOSE: dict[bool, dict[str, float]] = {False: {}, True: {"rtol": 2**-6, "atol": 0.0}}
"""How far losses with merged weights may be from those with adapters, in float32 and in bf16."""


def policy(bf16: bool) -> nn.Module:
    return MODELS["qwen2"]().bfloat16() if bf16 else MODELS["qwen2 float32"]()


def trained(
    rank: int, merges: bool, stage: int, options: dict[str, Any], bf16: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of a few steps, and what is here of the model then."""
    model, losses = engine(policy(bf16).train(), stage=stage, bf16=bf16, **options), []
    weights = MergedWeights(model, bucket_bytes=10_000)
    for step in range(7):
        loss = loss_of(model, rank, step)
        model.backward(loss)
        if merges:
            with merged(model, strategy=(None, "unshard")[step % 2]):
                pass
            dict(weights)
        model.step()
        losses.append(loss.detach().clone())
        if merges and step % 4 > 1:  # DeepSpeed knows the order of a step by now, and gathers ahead of its use
            # On the module itself a forward leaves what it expects the backward pass to use.
            runs = model.module if step > 4 else model
            with torch.no_grad():
                adapter = loss_of(runs, rank, step)
                gathered = [p for p in model.parameters() if stage == 3 and p.ds_status.name == "AVAILABLE"]
                assert gathered or stage < 3 or runs is model
                with merged(model):
                    inside = loss_of(runs, rank, step)
                    torch.testing.assert_close(inside, adapter, **CLOSE[bf16])
                assert torch.equal(loss_of(runs, rank, step), adapter)
    assert_streams_what_computes(model, weights, bf16, stage)
    return losses, [*local_bits(model), *(t.clone() for t in dict(weights).values())]


def assert_streams_what_computes(model: Any, weights: MergedWeights, bf16: bool, stage: int) -> None:
    """After a step the stream is the merge of the parameters that the next forward computes with; of bf16 ones, not of
    the float32 numbers that the optimizer steps."""
    from deepspeed.runtime.zero import GatheredParameters
    from deepspeed.utils import safe_get_full_fp32_param

    masters = {n: safe_get_full_fp32_param(p) for n, p in model.module.named_parameters() if p.requires_grad}
    with GatheredParameters(list(model.module.parameters())) if stage == 3 else nullcontext():
        state = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    assert all(torch.equal(master.to(state[name].dtype), state[name]) for name, master in masters.items())
    assert bf16 == any(not torch.equal(master, state[name].float()) for name, master in masters.items())
    whole = policy(bf16).to(device())
    whole.load_state_dict(state)
    wanted, got = dict(MergedWeights(whole)), dict(weights)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(got[name], tensor, f"{name}, stage {stage}")


def assert_trains_as_if_never_merged(rank: int, stage: int, options: dict[str, Any], bf16: bool) -> None:
    once, again = (trained(rank, merges, stage, options, bf16) for merges in (False, True))
    told = f"stage {stage}, {options}, bf16 {bf16}"
    assert torch.equal(torch.stack(once[0]), torch.stack(again[0])), told
    assert not torch.equal(once[0][0], once[0][-1]), told
    for one, other in zip(once[1], again[1], strict=True):
        assert_same_bits(one, other, told)


def training(rank: int) -> None:
    """Merging in the gap between backward and step, and after it: the run is that which never merged."""
    runs: list[tuple[int, dict[str, Any]]] = [(3, config) for config in CONFIGS.values()]
    for stage, options in [*runs, (1, {}), (2, {})]:
        assert_trains_as_if_never_merged(rank, stage, options, bf16=False)


def training_in_bf16(rank: int) -> None:
    """With float32 numbers that the optimizer steps, and rounds to the parameters."""
    for stage, name in ((3, "some persist"), (3, "offloaded"), (2, "all persist")):
        assert_trains_as_if_never_merged(rank, stage, CONFIGS[name] if stage == 3 else {}, bf16=True)


def test_in_float32() -> None:
    spawn(2, training)


def test_in_bf16() -> None:
    spawn(2, training_in_bf16)
