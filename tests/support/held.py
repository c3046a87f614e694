"""What a rank's own part of a stream must be: `held_names`, `groups` and `iter_groups`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from helpers import assert_same_bits
from torch import Tensor

from lora_merge.stream.by_layer import by_layer


def assert_held(weights: Any, wanted: Mapping[str, Tensor], ranks: Any = None, what: str = "") -> None:
    """Every tensor is whole on the ranks that say so, None on the others, and held by one of them; as vLLM takes it, a
    layer at a time, without a look behind the last one."""
    names, held, groups = [meta.name for meta in weights.metadata()], weights.held_names(), weights.groups()
    assert sorted(names) == sorted(wanted)
    assert [name for layer in by_layer(names) for name in layer] == names, f"{what}: the order is not that of layers"
    alone = held is None
    mine = set(names if alone else held)
    assert groups == [layer for layer in by_layer(names) if mine & set(layer)]
    for _ in range(2):
        stream = weights.iter_groups()
        for layer in groups:
            got, tensors = next(stream)
            assert got == layer
            for name, tensor in zip(got, tensors, strict=True):
                assert (tensor is not None) == (name in mine), f"{what} {name}"
                if tensor is not None:
                    assert_same_bits(tensor, wanted[name], f"{what}, held: {name}")
        del stream, tensors, tensor
    if alone:
        return
    everybody: list[Any] = [None] * (dist.get_world_size() if ranks is None else ranks.size)
    dist.all_gather_object(everybody, sorted(mine), group=None if ranks is None else ranks.group)
    assert set().union(*everybody) == set(names)
    several = [name for name in names if sum(name in some for some in everybody) > 1]
    assert len(several) <= 1 or ranks is None, f"{what}: {several} are brought to several ranks"
