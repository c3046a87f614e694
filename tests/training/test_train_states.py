"""Checkpoints of a model in training: `state_dict` and `load_state_dict`, whoever calls them, have the base."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers import assert_same_bits
from processes import spawn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lora_merge import MergedWeights, train_merged
from tests.training.test_train import LINEARS, adapted, assert_base, bits, loss_of, losses_of


def made(dtype: torch.dtype = torch.bfloat16) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = adapted(models.qwen2, dtype, target_modules=LINEARS)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)


def steps(model: nn.Module, optimizer: Any, count: int = 2) -> list[float]:
    """Train, up to a forward; the losses."""
    losses = losses_of(model, optimizer, count)
    with torch.no_grad():
        return [*losses, loss_of(model).item()]


def by_torch(model: Any, optimizer: Any, path: Path) -> Callable[[Any, Any], object]:
    torch.save((model.state_dict(), optimizer.state_dict()), path / "state.pt")

    def load(model: Any, optimizer: Any) -> None:
        state, moments = torch.load(path / "state.pt")
        model.load_state_dict(state)
        optimizer.load_state_dict(copy.deepcopy(moments))

    return load


def by_parts(model: Any, optimizer: Any, path: Path) -> Callable[[Any, Any], object]:
    """As who saves a block at a time."""
    blocks = {name: copy.deepcopy(part.state_dict()) for name, part in model.named_children()}
    moments = copy.deepcopy(optimizer.state_dict())

    def load(model: Any, optimizer: Any) -> None:
        for name, part in model.named_children():
            part.load_state_dict(blocks[name])
        optimizer.load_state_dict(copy.deepcopy(moments))

    return load


def by_safetensors(model: Any, optimizer: Any, path: Path) -> Callable[[Any, Any], object]:
    from safetensors.torch import load_model, save_model

    save_model(model, str(path / "state.safetensors"))
    moments = copy.deepcopy(optimizer.state_dict())

    def load(model: Any, optimizer: Any) -> None:
        load_model(model, path / "state.safetensors")
        optimizer.load_state_dict(copy.deepcopy(moments))

    return load


def by_dcp(model: Any, optimizer: Any, path: Path) -> Callable[[Any, Any], object]:
    """As torch.distributed has it, and torchtitan."""
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=path / "dcp", no_dist=True)

    def load(model: Any, optimizer: Any) -> None:
        state, moments = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": moments}, checkpoint_id=path / "dcp", no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)

    return load


def by_accelerate(model: Any, optimizer: Any, path: Path) -> Callable[[Any, Any], object]:
    accelerate = pytest.importorskip("accelerate")

    def of(*prepared: Any) -> Any:
        found = accelerate.Accelerator(cpu=True)
        found.prepare(*prepared)
        return found

    of(model, optimizer).save_state(str(path / "state"))
    return lambda model, optimizer: of(model, optimizer).load_state(str(path / "state"))


WAYS = [by_torch, by_parts, by_safetensors, by_dcp, by_accelerate]


@pytest.mark.parametrize("way", WAYS)
def test_checkpoints(way: Callable[..., Callable[[Any, Any], object]], tmp_path: Path) -> None:
    """They hold the base, not merged weights under its names, to which adapters would be added once more after a
    load. Loaded in the midst of training, or into another model, training goes on in the same bits."""
    model, optimizer = made()
    base = bits(model)
    with train_merged(model):
        steps(model, optimizer)
        load = way(model, optimizer, tmp_path)
        wanted = steps(model, optimizer)
        last = dict(MergedWeights(model))
        load(model, optimizer)
        assert steps(model, optimizer) == wanted
    assert_base(model, base)
    other, anew = made()
    load(other, anew)
    assert_base(other, base)
    with train_merged(other):
        assert steps(other, anew) == wanted
        for name, tensor in MergedWeights(other):
            assert_same_bits(tensor, last[name], name)


READERS: dict[str, Callable[[Any, Any], object]] = {
    "state_dict": lambda model, training: model.state_dict(),
    "pause": lambda model, training: training.pause(),
    "the base's stream": lambda model, training: dict(MergedWeights(model, adapters=False)),
}


@pytest.mark.parametrize("name", READERS)
def test_the_base_is_read_in_the_middle_of_a_forward(name: str) -> None:
    """By a hook: the layers that follow compute with merged weights, as those before."""
    model, _ = made()
    block: Any = model.get_base_model().model.layers[0].mlp
    with train_merged(model) as training:
        wanted = loss_of(model)
        wanted.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        hook = block.register_forward_hook(lambda *_: READERS[name](model, training) and None)
        loss = loss_of(model)
        loss.backward()
        hook.remove()
    assert_same_bits(loss, wanted)
    for key, gradient in gradients.items():
        assert_same_bits(model.get_parameter(key).grad, gradient, key)


def test_copies_save_themselves() -> None:
    """Hooks of a training are copied with the model, and do nothing there."""
    model, _ = made()
    base = bits(model)
    with train_merged(model) as training:
        loss_of(model)
        training.pause()
        other = copy.deepcopy(model)
        loss_of(model)
        assert_state(other.state_dict(), base)
        other.load_state_dict(other.state_dict())
        assert training.merges == 2
    assert not model._state_dict_pre_hooks
    assert not model._load_state_dict_pre_hooks


def assert_state(state: dict[str, Any], base: dict[str, Tensor]) -> None:
    for name, tensor in state.items():
        if "lora_" not in name:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert_same_bits(whole, base[name.replace("_fsdp_wrapped_module.", "")], name)


def sharded(rank: int) -> None:
    for kind in ("fsdp2", "fsdp1"):
        inner, _ = made(torch.bfloat16 if kind == "fsdp2" else torch.float32)
        base, model = bits(inner), inner
        if kind == "fsdp2":
            for layer in inner.get_base_model().model.layers:
                fully_shard(layer)
            fully_shard(inner)
        else:
            model = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
        with train_merged(model) as training:
            wanted = steps(model, optimizer)
            assert_state(model.state_dict(), base)
            with torch.no_grad():
                assert loss_of(model).item() == wanted[-1]
            if rank == 0:  # one rank alone has its base back, and all go on
                training.pause()
            with torch.no_grad():
                assert loss_of(model).item() == wanted[-1]
            steps(model, optimizer)
        assert_state(model.state_dict(), base)
    dist.barrier()


def test_sharded_models() -> None:
    spawn(2, sharded)
