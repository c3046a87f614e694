"""What tests of memory share."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor
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
