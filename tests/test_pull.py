"""A stream as workers pull it: what is offered stays good as long as it is offered, and fills whatever buffer comes."""

from __future__ import annotations

import os
from typing import Any

import models
import pytest
import torch
from torch import Tensor

from lora_merge import MergedWeights
from lora_merge.engine.mapped import Exports, Mapped
from lora_merge.engine.pull import Pull, Pulls
from lora_merge.stream.places import Places

NEAREST = {"rounding": "nearest"}


def shared() -> Any:
    """A model whose weights other processes can map."""
    model = models.with_lora(models.qwen2, target_modules=["q_proj", "down_proj"])
    for parameter in model.parameters():
        parameter.share_memory_()
    return model


def beside(pull: Pull, kept: list[Tensor]) -> dict[str, Tensor]:
    """The tensors that go whole, out of a buffer that lies elsewhere each time."""
    kept.append(torch.empty(pull.capacity, dtype=torch.uint8))
    found = {}
    with pull.passing():
        for index, slots in enumerate(pull.table):
            pull.fill(index, kept[-1], NEAREST)
            found.update({slot.name: slot.view(kept[-1]).clone() for slot in slots})
    return {name: found[name] for name in pull.whole_names}


def test_what_goes_beside_it_fills_another_buffer_at_each_pass() -> None:
    model, kept = shared(), list[Tensor]()
    weights = MergedWeights(model)
    pulls, blocked = Pulls(weights), frozenset({"model.layers.0.self_attn.q_proj.weight", "model.norm.weight"})
    pull = pulls(weights.filler(), blocked)
    for step in range(3):
        assert pulls(weights.filler(), blocked) is pull, "it stays what it was"
        found = beside(pull, kept)
        assert found.keys() == blocked
        for name, tensor in MergedWeights(model):
            assert name not in found or torch.equal(tensor, found[name]), (step, name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)


def exported(weight: Tensor) -> Exports:
    exports = Exports(Places({"w": [(((0, 0), (4, 8)), weight)]}), (), "the trainer's")
    exports.release()
    return exports


def test_other_memory_at_the_same_address_is_other_memory() -> None:
    """Workers have the file mapped that lay there before, and would go on reading that."""
    weight = torch.ones(4, 8).share_memory_()
    exports = exported(weight)
    address = weight.data_ptr()
    assert exports.hold({address: weight.untyped_storage()})
    del weight
    other = torch.ones(4, 8).share_memory_()  # as if it were mapped there
    assert not exports.hold({address: other.untyped_storage()})


def test_another_file_under_the_same_path_is_another_file() -> None:
    """A descriptor that was closed is the next one's number."""
    weight = torch.ones(4, 8).share_memory_()
    exports = exported(weight)
    assert torch.equal(Mapped(exports.description, torch.device("cpu"), os.getpid()).views["w"][0][1], weight)
    path = exports.description["memory"][0]["path"]
    del weight
    other = torch.full((4, 8), 2.0).share_memory_()
    again = exported(other)
    assert again.description["memory"][0]["path"] == path
    assert again.digest != exports.digest
    with pytest.raises(RuntimeError, match="another file by now"):
        Mapped(exports.description, torch.device("cpu"), os.getpid())
