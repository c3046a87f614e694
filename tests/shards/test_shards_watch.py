"""A model under FSDP2 is read again when anything that the last reading looked at is other than it was, and only
then."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import with_lora
from processes import spawn
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lora_merge import InvalidInput, MergedWeights
from lora_merge.kernels.bindings import native
from lora_merge.models import snapshot
from lora_merge.models.live import live

pytestmark = pytest.mark.skipif(native.load_error() is not None, reason=str(native.load_error()))
TOKENS = torch.arange(8).view(2, 4)


def layers(model: Any) -> Any:
    return model.get_base_model().model.layers


def after_a_forward(model: Any) -> None:
    with torch.no_grad():
        model(input_ids=TOKENS)


def units(model: Any) -> Any:
    for layer in layers(model):
        fully_shard(layer)
    return fully_shard(model)


def kept(model: Any) -> Any:
    """After a forward all lies gathered."""
    for layer in layers(model):
        fully_shard(layer, reshard_after_forward=False)
    return fully_shard(model, reshard_after_forward=False)


def some(model: Any) -> Any:
    """The rest is no DTensor."""
    for layer in layers(model):
        fully_shard(layer)
    return model


def with_tensor_parallel(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for layer in layers(model):
        plan = {"mlp.gate_proj.base_layer": ColwiseParallel(), "mlp.down_proj.base_layer": RowwiseParallel()}
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    return model


def built(wrap: Callable[[Any], Any], **lora: Any) -> Any:
    return wrap(with_lora(models.qwen2, dtype=torch.float32, **lora))


def read(model: Any) -> Any:
    """The watch over what a reading looked at, if it stands."""
    stream = MergedWeights(model)
    for _ in range(4):
        stream.bucket_writer()
    noted = snapshot._noted[model].get((True, True))
    return None if noted is None or noted.watch is None else noted.again(model)


def streamed(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in MergedWeights(model)}


def assert_read_anew(model: Any, what: str) -> None:
    """Whoever reads now gets what somebody gets who knows of no reading before."""
    here = streamed(model)
    snapshot._noted.clear()
    there = streamed(model)
    assert here.keys() == there.keys(), what
    assert all(torch.equal(here[name], there[name]) for name in here), what


def every_wrap(rank: int) -> None:
    for wrap in (units, kept, some, with_tensor_parallel):
        model = built(wrap)
        found = read(model)
        assert found is not None, wrap.__name__
        snapshot._noted.clear()
        wanted = live(model).snapshot()
        assert found.facts == wanted.facts
        assert found.kinds == wanted.kinds
        for at in (1, 2, 3):
            assert list(map(id, found[at])) == list(map(id, wanted[at])), f"{wrap.__name__} {at}"
        assert_read_anew(model, wrap.__name__)


@pytest.mark.parametrize("world", [2])
def test_what_is_given_is_what_a_reading_gives(world: int) -> None:
    spawn(world, every_wrap)


def another_adapter(model: Any) -> None:
    model.add_adapter("other", model.peft_config["default"])
    model.set_adapter("other")


def another_scaling(model: Any) -> None:
    layers(model)[1].mlp.down_proj.scaling["default"] *= 2


def another_parameter(model: Any) -> None:
    layer = layers(model)[0].mlp.down_proj.base_layer
    held = layer.weight
    local = DTensor.from_local(held.to_local().clone() + 1, held.device_mesh, held.placements, run_check=False)
    layer._parameters["weight"] = nn.Parameter(local, requires_grad=False)


def another_shard(model: Any) -> None:
    held = layers(model)[0].mlp.up_proj.base_layer.weight
    held._local_tensor = held._local_tensor.clone() * 2


def other_memory(model: Any) -> None:
    held = layers(model)[0].mlp.up_proj.base_layer.weight
    held._local_tensor.data = held._local_tensor.clone() * 2


def disabled(model: Any) -> None:
    model.base_model.disable_adapter_layers()


def gathered(model: Any) -> None:
    layers(model)[1].unshard()


def in_training(model: Any) -> None:
    model.train()
    model(input_ids=TOKENS).logits.sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


CHANGES = [another_adapter, another_scaling, another_parameter, another_shard, other_memory, disabled, gathered]


def every_change(rank: int) -> None:
    for change in CHANGES:
        model = built(units)
        assert read(model) is not None
        change(model)
        assert snapshot._noted[model][True, True].again(model) is None, change.__name__
        if change is not another_adapter:  # whose halves lie on no mesh
            assert_read_anew(model, change.__name__)


def test_changes_are_seen() -> None:
    spawn(2, every_change)


def a_step(rank: int) -> None:
    """Training changes values alone: the next reading is the last one, and streams the new ones."""
    for wrap in (units, kept):
        model = built(wrap)
        assert read(model) is not None
        before = streamed(model)
        in_training(model)
        again = snapshot._noted[model][True, True].again(model)
        assert again is not None, wrap.__name__
        after = streamed(model)
        assert any(not torch.equal(before[name], after[name]) for name in before)
        assert_read_anew(model, wrap.__name__)
        after_a_forward(model)
        again = snapshot._noted[model].get((True, True))
        assert wrap is not kept or again is None or again.again(model) is None, "gathered parameters are others"
        assert_read_anew(model, wrap.__name__)


def test_a_step_of_training_is_no_change() -> None:
    spawn(2, a_step)


def inside_a_forward(rank: int) -> None:
    model = built(units)
    assert read(model) is not None
    found: list[str] = []

    def look(*_: Any) -> None:
        with pytest.raises(InvalidInput) as raised:
            MergedWeights(model).bucket_writer()
        found.append(str(raised.value))

    layers(model)[0].mlp.register_forward_hook(look)
    model(input_ids=TOKENS)
    assert "inside a forward or backward pass" in found[0]


def test_a_unit_that_computes_is_refused_still() -> None:
    spawn(2, inside_a_forward)


def let_go(rank: int) -> None:
    model = built(units)
    assert read(model) is not None
    gone, part = weakref.ref(model), weakref.ref(layers(model)[0].mlp.up_proj)
    del model
    gc.collect()
    assert gone() is None
    assert part() is None


def test_nothing_is_kept_alive() -> None:
    spawn(2, let_go)
