"""Training on the merged weight on several ranks: FSDP2 and DDP, beside one process that has everything."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from processes import spawn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lora_merge import MergedWeights, train_merged
from tests.training.test_train import LINEARS, adapted, loss_of


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def steps(model: Any, count: int = 4) -> list[float]:
    """Train; the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(count):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trains(rank: int, kind: str, dtype: torch.dtype) -> None:
    alone = adapted(models.qwen2, dtype, target_modules=LINEARS)
    with train_merged(alone):
        wanted = steps(alone)
        last = dict(MergedWeights(alone))
    inner = adapted(models.qwen2, dtype, target_modules=LINEARS)
    before = {name: tensor.detach().clone() for name, tensor in inner.named_parameters()}
    model: Any = inner
    if kind == "ddp":
        model = DistributedDataParallel(inner)
    else:
        for layer in inner.get_base_model().model.layers:
            fully_shard(layer, reshard_after_forward=kind != "fsdp2, kept")
        fully_shard(inner, reshard_after_forward=kind != "fsdp2, kept")
    training = train_merged(model)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(steps(model), wanted, rtol=tolerance, atol=tolerance)
    assert training.merges == 4
    got = {name: whole(tensor) for name, tensor in MergedWeights(model)}
    assert got.keys() == last.keys()
    with torch.no_grad(), inner.disable_adapter():
        loss_of(model)
    loss_of(model).backward()
    training.close()
    for name, parameter in inner.named_parameters():
        if "lora_" not in name:
            assert_same_bits(whole(parameter), before[name], name)
    if kind == "fsdp2":
        adapters = {n: whole(p).detach().clone() for n, p in inner.named_parameters() if "lora_" in n}
        there = [dict.fromkeys(adapters)] * 2
        dist.all_gather_object(there, {n: float(t.double().sum()) for n, t in adapters.items()})
        assert there[0] == there[1]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("ddp", torch.float32), ("fsdp2", torch.float32), ("fsdp2, kept", torch.bfloat16)],
    ids=str,
)
def test_on_two_ranks(kind: str, dtype: torch.dtype) -> None:
    spawn(2, trains, kind, dtype)
