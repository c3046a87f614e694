"""Training on merged weights of fused experts on two ranks, beside one process that has everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from processes import spawn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lora_merge import train_merged
from tests.training.test_train_experts import experts
from tests.training.test_train_ranks import steps, whole


def trains(rank: int, kind: str) -> None:
    alone = experts()
    with train_merged(alone):
        wanted = steps(alone)
    inner = experts()
    before = {name: tensor.detach().clone() for name, tensor in inner.named_parameters()}
    model: Any = inner
    if kind == "ddp":
        model = DistributedDataParallel(inner)
    else:
        for layer in inner.get_base_model().model.layers:
            if kind == "fsdp2, experts by themselves":
                fully_shard(layer.mlp.experts.get_base_layer())
            fully_shard(layer, reshard_after_forward=kind != "fsdp2, kept")
        fully_shard(inner)
    training = train_merged(model)
    torch.testing.assert_close(steps(model), wanted, rtol=1e-5, atol=1e-5)
    assert training.merges == 4
    training.close()
    trained = {name: whole(p) for name, p in inner.named_parameters()}
    for name, parameter in alone.named_parameters():
        if "lora_" in name:
            torch.testing.assert_close(trained[name], parameter, rtol=1e-3, atol=1e-4)
        else:
            assert_same_bits(trained[name], before[name], name)
            assert inner.get_parameter(name).grad is None


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2, kept", "fsdp2, experts by themselves"])
def test_on_two_ranks(kind: str) -> None:
    spawn(2, trains, kind)
