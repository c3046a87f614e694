"""A model that is trained on merged weights is streamed as it lies, and only then."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lora_merge import AlreadyMerged, InvalidInput, MergedWeights, train_merged
from tests.training.test_train import LINEARS, MODELS, adapted, assert_base, bits, loss_of, shake

UNDER_WAY = r"stream of these weights .* is under way"


def streamed(model: Any, **options: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in MergedWeights(model, **options)}


@pytest.mark.parametrize("name", MODELS)
def test_the_stream_is_that_of_the_paused_model(name: str) -> None:
    """Bit for bit, with the same names; the next forward merges nothing that the stream has merged."""
    model = MODELS[name]()
    before = bits(model)
    with train_merged(model) as training:
        for _ in range(2):
            loss_of(model).backward()
            as_it_lies = streamed(model)
            assert len(MergedWeights(model)) == len(as_it_lies)
            merges = training.merges
            loss_of(model)
            assert training.merges == merges
            weights = MergedWeights(model)
            weights.as_it_lies = False
            wanted = dict(weights)
            assert_base(model, before)
            assert list(as_it_lies) == list(wanted)
            for key, tensor in wanted.items():
                assert_same_bits(as_it_lies[key], tensor, key)
            shake(model)
            assert as_it_lies.keys() == streamed(model).keys()  # merges what was trained meanwhile


@pytest.mark.parametrize("name", MODELS)
def test_a_stream_between_forward_and_backward(name: str) -> None:
    """It merges the same bits again; the backward pass goes on, also after a pause. Where a tied weight has users of
    its own inside, these are others then, and it is refused."""
    model = MODELS[name]()
    with train_merged(model) as training:
        for _ in range(2):
            loss_of(model).backward()
            wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            model.zero_grad()
            loss = loss_of(model)
            streamed(model)
            training.pause()
            streamed(model)
            if name == "tied embedding":
                with pytest.raises(InvalidInput, match="computed with other adapters"):
                    loss.backward()
                return
            loss.backward()
            for key, parameter in model.named_parameters():
                if key in wanted:
                    assert parameter.grad is not None
                    assert_same_bits(parameter.grad, wanted[key], key)
            model.zero_grad()
            shake(model)


def test_what_other_streams_read() -> None:
    """The base, other roundings, named adapters, and other dtypes."""
    model = adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS)
    options: list[dict[str, Any]] = [
        {"adapters": False},
        {"adapter_names": ["default"]},
        {"dtype": torch.float32},
        {"strategy": "unshard"},
    ]
    wanted = [streamed(model, **some) for some in options]
    with train_merged(model):
        for some, found in zip(options, wanted, strict=True):
            loss_of(model)
            got = streamed(model, **some)
            if some.get("dtype") is None:
                assert all(torch.equal(got[name], tensor) for name, tensor in found.items()), some
            else:  # what it computes with, in more bits
                plain = streamed(model)
                assert all(torch.equal(got[name], tensor.float()) for name, tensor in plain.items())


def test_a_stream_that_is_under_way() -> None:
    """What it reads is not merged anew, nor brought back, behind its back; a forward without a change may come."""
    model = MODELS["linear"]()
    with train_merged(model) as training:
        loss_of(model)
        wanted = streamed(model)
        stream = iter(MergedWeights(model))
        first = next(stream)
        assert torch.equal(first[1], wanted[first[0]])
        loss_of(model)
        with pytest.raises(InvalidInput, match=UNDER_WAY):
            training.pause()
        with pytest.raises(InvalidInput, match=UNDER_WAY):
            streamed(model, adapters=False)
        shake(model)
        with pytest.raises(InvalidInput, match=UNDER_WAY):
            loss_of(model)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in stream), "one policy from end to end"
        merges = training.merges
        loss_of(model)
        assert training.merges == merges + 1


def test_readers_that_do_not_see_the_adapters() -> None:
    """The bare base, whose memory holds them, is refused as inside `merged`; a model around that has adapters of its
    own gets the base back."""
    inner = MODELS["linear"]()
    with train_merged(inner):
        loss_of(inner)
        projection = inner.get_base_model().model.layers[0].self_attn.q_proj.base_layer
        with pytest.raises(AlreadyMerged, match="inside lora_merge"):
            streamed(projection)
        other = get_peft_model(
            nn.Sequential(nn.Linear(4, 4)), LoraConfig(target_modules=["0"], init_lora_weights=False)
        )
        both = nn.ModuleDict({"one": inner, "other": other})
        got = streamed(both)
        wanted = streamed(other)
        assert all(torch.equal(got[f"other.{name}"], tensor) for name, tensor in wanted.items())
        with inner.disable_adapter():
            base = streamed(inner)
        assert all(torch.equal(base[name], tensor) for name, tensor in streamed(inner, adapters=False).items())
