"""A pass of a stream whose weights are written in the middle of it ends in an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import models
import pytest
import torch
from helpers import assert_same_bits
from peft import LoraConfig
from torch import nn

from lora_merge import InvalidInput, MergedWeights

SMALL = 4096
"""Bytes of a bucket: a pass takes several."""


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return models.with_lora(models.qwen2)


@pytest.fixture
def begun(model: nn.Module) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
    """A pass of which one tensor was taken."""
    stream = iter(MergedWeights(model, bucket_bytes=SMALL))
    next(stream)
    yield stream
    model.unmerge_adapter()


def step(model: nn.Module) -> None:
    with torch.no_grad():
        next(tensor for name, tensor in model.named_parameters() if "lora_B" in name).add_(1)


def load(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize(
    ("change", "said"),
    [(step, r"lora_B.default.weight: written while"), (load, r" and \d+ more: written while")],
    ids=["step", "load_state_dict"],
)
def test_a_write_in_the_middle_of_a_pass(
    model: nn.Module, begun: Iterator[object], change: Callable[[nn.Module], None], said: str
) -> None:
    change(model)
    with pytest.raises(InvalidInput, match=said):
        list(begun)
    list(MergedWeights(model, bucket_bytes=SMALL))  # the next pass is one of the new weights


def test_pefts_merge_in_the_middle_of_a_pass(model: nn.Module, begun: Iterator[object]) -> None:
    """It writes through `.data`, which no version counter tells."""
    model.merge_adapter()
    with pytest.raises(InvalidInput, match="PEFT merged adapters while the model was streamed"):
        list(begun)


def test_a_pass_that_is_left_says_nothing(model: nn.Module, begun: Iterator[object]) -> None:
    step(model)
    begun.close()  # type: ignore[attr-defined]


def test_buckets_and_weights_of_inference_mode() -> None:
    with torch.inference_mode():
        base = models.qwen2()
    model = models.with_lora(lambda: base)
    weights = MergedWeights(model, bucket_bytes=SMALL)
    list(weights)
    buckets = weights.buckets()
    next(buckets)
    step(model)
    with pytest.raises(InvalidInput, match="written while the model was streamed"):
        list(buckets)


def test_other_adapters_in_the_middle_of_a_pass_change_nothing_of_it() -> None:
    """What is merged is chosen when the pass begins."""
    model = models.with_lora(models.qwen2)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    wanted = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    stream = iter(MergedWeights(model, bucket_bytes=SMALL))
    found = dict([next(stream)])
    model.set_adapter("other")
    found |= {name: tensor.clone() for name, tensor in stream}
    for name, tensor in wanted.items():
        assert_same_bits(found[name], tensor, name)
