"""Training on the merged weight under DeepSpeed's ZeRO, beside PEFT's forward there (`make test-libraries`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from processes import spawn

from lora_merge import MergedWeights, train_merged
from tests.libraries.test_libraries_zero3 import CONFIGS, engine
from tests.training.test_train_layouts import assert_close, bases, build, loss_of, seen

pytestmark = pytest.mark.filterwarnings("ignore")
STAGES: dict[str, dict[str, Any]] = {"1": {"stage": 1}, "2": {"stage": 2}} | CONFIGS


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Whole, as the optimizer steps on them."""
    from deepspeed.utils import safe_get_full_grad

    return {n: safe_get_full_grad(p).clone() for n, p in model.named_parameters() if p.requires_grad}


def saved(model: Any) -> dict[str, torch.Tensor]:
    """As transformers' Trainer and accelerate have a model saved, on rank 0."""
    if model.zero_optimization_partition_weights():
        return model._zero3_consolidated_16bit_state_dict() or {}
    return {name: tensor.clone() for name, tensor in model.module_state_dict().items()}


def trains(rank: int, names: Sequence[str]) -> None:
    """Also a reference policy between steps, and a second forward and backward before one."""
    for name in names:
        what = f"{name} on rank {rank}"
        peft, model = (engine(build().train(), **STAGES[name]) for _ in range(2))
        before, state = bases(model), saved(model)
        training = train_merged(model)
        for step in range(4):
            for one in (peft, model):
                one.losses = loss_of(one, rank, step)
                one.backward(one.losses)
            torch.testing.assert_close(model.losses, peft.losses, rtol=1e-5, atol=1e-5, msg=what)
            if not step:
                assert_close(gradients(model), gradients(peft), what)
            for one in (peft, model):
                one.step()
            if step == 2:
                with torch.no_grad(), model.module.disable_adapter():
                    reference = loss_of(model, rank, 0)
            assert training.merges == step + 1, what
        with seen(model) as weights:
            loss = loss_of(model, rank, 0)
        with torch.no_grad(), model.module.disable_adapter():
            assert_same_bits(loss_of(model, rank, 0), reference, what)
        model.backward(loss)
        streamed = dict(MergedWeights(model))
        for weight in weights:
            assert_same_bits(weights[weight], streamed[weight], f"{what} {weight}")
        model.step()
        loss_of(model, rank, 0)
        for key, tensor in saved(model).items():
            if "lora_" not in key:
                assert_same_bits(tensor, state[key], f"{what}: {key} in a checkpoint")
        training.close()
        for now, then in zip(bases(model), before, strict=True):
            assert_same_bits(now, then, f"{what}: a base weight")
        with torch.no_grad(), model.module.disable_adapter():
            assert_same_bits(loss_of(model, rank, 0), reference, what)


def test_zero() -> None:
    spawn(2, trains, list(STAGES))
