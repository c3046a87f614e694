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

from lora_merge import InvalidInput, MergedWeights, train_merged
from lora_merge.kernels import cpu
from tests.training.test_train import LINEARS, adapted, loss_of, losses_of


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def steps(model: Any, count: int = 4) -> list[float]:
    """Train; the losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    return losses_of(model, optimizer, count)


CONFIGS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "tokens": {"trainable_token_indices": {"embed_tokens": [50, 3, 4]}},
}


def trained(dtype: torch.dtype, config: dict[str, Any]) -> Any:
    """A model whose magnitudes are near the norms of rows."""
    model = adapted(models.qwen2, dtype, **config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.copy_(1 + 0.1 * parameter)
    return model


def trains(rank: int, kind: str, dtype: torch.dtype, what: str) -> None:
    config = {"target_modules": LINEARS} | CONFIGS[what]
    alone = trained(dtype, config)
    with train_merged(alone):
        wanted = steps(alone)
        last = dict(MergedWeights(alone))
    inner = trained(dtype, config)
    before = {name: tensor.detach().clone() for name, tensor in inner.named_parameters()}
    model: Any = inner
    if kind == "ddp":
        model = DistributedDataParallel(inner)
    else:
        for layer in inner.get_base_model().model.layers:
            fully_shard(layer, reshard_after_forward=kind != "fsdp2, kept")
        fully_shard(inner, reshard_after_forward=kind != "fsdp2, kept")
    training, launches, retrack = train_merged(model), list[int](), cpu._Tracked.retrack

    def counted(self: Any, *args: Any) -> None:
        launches.append(1)
        retrack(self, *args)

    cpu._Tracked.retrack = counted  # type: ignore[method-assign]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(steps(model), wanted, rtol=tolerance, atol=tolerance)
    assert training.merges == 4
    assert what == "dora" or len(launches) == 3  # one takes the place of the one before
    got = {name: whole(tensor) for name, tensor in MergedWeights(model)}
    assert got.keys() == last.keys()
    with torch.no_grad(), inner.disable_adapter():
        loss_of(model)
    loss_of(model).backward()
    training.close()
    for name, parameter in inner.named_parameters():
        if "lora_" not in name and "delta" not in name:
            assert_same_bits(whole(parameter), before[name], name)
    if kind == "fsdp2":
        adapters = {n: whole(p).detach().clone() for n, p in inner.named_parameters() if "lora_" in n}
        there = [dict.fromkeys(adapters)] * 2
        dist.all_gather_object(there, {n: float(t.double().sum()) for n, t in adapters.items()})
        assert there[0] == there[1]


@pytest.mark.parametrize(
    ("kind", "dtype", "what"),
    [
        ("ddp", torch.float32, "lora"),
        ("fsdp2", torch.float32, "lora"),
        ("fsdp2, kept", torch.bfloat16, "lora"),
        ("ddp", torch.float32, "dora"),
        ("fsdp2", torch.float32, "dora"),
        ("fsdp2, kept", torch.float32, "dora"),
        ("fsdp2", torch.float32, "tokens"),
    ],
    ids=str,
)
def test_on_two_ranks(kind: str, dtype: torch.dtype, what: str) -> None:
    spawn(2, trains, kind, dtype, what)


def refuses_zeros(rank: int) -> None:
    """A row of one rank's, and all say so."""
    model: Any = trained(torch.float32, {"target_modules": LINEARS, "use_dora": True})
    with torch.no_grad():
        model.base_model.model.model.layers[0].mlp.down_proj.lora_magnitude_vector["default"].weight[0] = 0
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    fully_shard(model)
    with train_merged(model), pytest.raises(InvalidInput, match=r"down_proj: the magnitude of adapter 'default' is 0"):
        loss_of(model)
    for name, parameter in model.named_parameters():
        assert_same_bits(whole(parameter), before[name], name)


def test_magnitudes_of_zero_are_refused_where_the_base_is_sharded() -> None:
    spawn(2, refuses_zeros)
