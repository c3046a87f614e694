"""The checkpoint that an engine was started from, read again by vLLM's own loader: the base of adapters that are loaded
from a folder, where nobody has pushed one.

What vLLM reads of safetensors is mapped, not copied: a tensor that is kept here takes no memory of its own unless it is
in another dtype than the engine holds.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...shards import cut
from ...stream.buckets import Meta, Slot, Table, extent, lay_out, metas
from ..loader import Examination, Loader
from . import internals

_SMALL = 1 << 16
"""Elements of a tensor of which all are compared."""


class Checkpoint:
    """The checkpoint of one worker's engine.

    Args:
        load_config, model_config: vLLM's.
        model: vLLM's, live.
    """

    def __init__(self, load_config: Any, model_config: Any, model: Any) -> None:
        self._load_config, self._config, self._model = load_config, model_config, model

    def read(self, wanted: Mapping[str, Meta]) -> dict[str, Tensor]:
        """Tensors by name, on the CPU, in the dtypes that are wanted.

        Raises:
            RuntimeError: the engine was not loaded from a checkpoint, or it lacks some of them.
        """
        if not wanted:
            return {}
        found: dict[str, Tensor] = {}
        for name, tensor in self._stream():
            if name in wanted:
                found[name] = tensor
        where = self._config.model
        if lacking := sorted(wanted.keys() - found.keys()):
            raise RuntimeError(
                f"{where} holds no {lacking[0]}{_more(lacking)}, which the engine was to read again: it has other "
                "names than transformers writes; save it anew with transformers' save_pretrained, and start an engine "
                "on that"
            )
        for name, meta in wanted.items():
            if tuple(found[name].shape) != meta.shape:
                raise RuntimeError(
                    f"{name} is {list(meta.shape)} in the adapter's base and {list(found[name].shape)} in {where}"
                )
        return {name: found[name].to(meta.dtype) for name, meta in wanted.items()}

    def _stream(self) -> Any:
        """All that vLLM reads of it."""
        config = copy.copy(self._load_config)
        config.use_tqdm_on_load = False
        loader = internals.get_model_loader(config)
        if not hasattr(loader, "get_all_weights"):
            raise RuntimeError(
                f"the engine was started with load_format={self._load_config.load_format!r}, so that its weights "
                "cannot be read again; start it on a checkpoint of safetensors"
            )
        return loader.get_all_weights(self._config, self._model)

    def check(self, loader: Loader, examination: Examination, table: Table) -> None:
        """Raise `RuntimeError` where the engine holds something else than its checkpoint: small tensors are compared
        that keep their layout."""
        some = {
            name: meta
            for name, meta in metas(table).items()
            if name in examination.copies and meta.nbytes <= _SMALL * meta.dtype.itemsize
        }
        for slots in lay_out(list(some.values()), 1 << 24) if some else ():
            data = _bucket(slots, self.read({slot.name: some[slot.name] for slot in slots}), loader.device)
            same = loader.arrived(examination, slots, data)
            if differing := sorted(name for name, equal in same.items() if not equal):
                raise RuntimeError(
                    f"the engine's {differing[0]}{_more(differing)} is not what {self._config.model} holds: something "
                    "has changed its weights since it was started; start it anew"
                )


def load_again(loader: Loader, examination: Examination, table: Table, tensors: Mapping[str, Tensor]) -> None:
    """All tensors of a checkpoint into the engine, between the loader's `begin` and `finish`."""
    for index, slots in enumerate(table):
        loader.let_go()  # of plans that read the bucket before
        loader.load(examination, index, slots, _bucket(slots, tensors, loader.device), _nothing)
    loader.let_go()


def _bucket(slots: Sequence[Slot], tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """A bucket, filled on a device."""
    data = torch.empty(extent(slots), dtype=torch.uint8, device=device)
    for slot in slots:
        slot.view(data).copy_(cut(tensors[slot.name], slot.box))
    return data


def _nothing(name: str, tensor: Tensor) -> None:
    """Keep nothing of a tensor: its base is in the checkpoint."""


def _more(names: Collection[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
