"""What tests of memory share."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators returned and that are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def held(self) -> int:
        gc.collect()
        return sum(size for reference, size in self.seen.values() if not reference.expired())


def assert_nobody_holds_weights(model: nn.Module) -> None:
    """The memory of a model's weights, but for its adapters, is free when the model lets go of it."""
    base = [p for name, p in model.named_parameters() if "lora_" not in name]
    old = [StorageWeakRef(p.untyped_storage()) for p in base]
    for parameter in base:
        parameter.data = parameter.data.clone()
    gc.collect()
    assert all(reference.expired() for reference in old)
