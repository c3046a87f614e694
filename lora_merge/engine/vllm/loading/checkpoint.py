"""The checkpoint that an engine was started from, read again by vLLM's own loader: the base of adapters that are loaded
from a folder where nobody has pushed a base.

vLLM maps safetensors and does not copy them: a tensor that is kept here takes no memory of its own unless the engine
holds it in another dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor

from ....shards import cut
from ....stream.buckets import Meta, Slot, Table, extent, lay_out, metas
from ...stamps import Stamp, difference, stamp
from ...worker.loader import DryRunReport, Loader
from .. import internals
from .loaded_files import Sources, changed, check_unchanged, read_by

Files: TypeAlias = Mapping[str, Stamp]
_SMALL = 1 << 16
"""Most elements of a tensor that is compared whole."""


class Kept:
    """The files that kept tensors are mapped from, held open. Removing or replacing a folder changes nothing of what is
    mapped; writing into these files does.

    Args:
        where: where they lie, in words.
    """

    def __init__(self, files: Files, where: str) -> None:
        self._where = where
        self._open = {path: Path(path).open("rb") for path in files}  # noqa: SIM115 - as long as this is there
        self._before = {path: _contents(file) for path, file in self._open.items()}

    def check(self) -> None:
        """Raise `RuntimeError` if something was written into one of the files."""
        now = {path: _contents(file) for path, file in self._open.items()}
        if differs := difference(self._before, now):
            raise RuntimeError(changed(self._where, differs))


def _contents(file: BinaryIO) -> Stamp | None:
    """Return the stamp of an open file, whatever becomes of its names."""
    found = stamp(file.fileno())
    return found and found._replace(changed=0)


class Checkpoint:
    """The checkpoint of one worker's engine.

    Args:
        load_config, model_config: vLLM's.
        model: vLLM's, live.
    """

    def __init__(self, load_config: Any, model_config: Any, model: Any) -> None:
        self._load_config, self._config, self._model = load_config, model_config, model

    def read(self, wanted: Mapping[str, Meta]) -> dict[str, Tensor]:
        """Return tensors by name, on the CPU, in the dtypes that are wanted.

        Raises:
            RuntimeError: the engine was not loaded from a checkpoint, it has changed since, or it lacks some tensors.
        """
        if not wanted:
            return {}
        found, where = self.stored(wanted.keys()), self._config.model
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

    def stored(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return those of some tensors that are there, on the CPU, as they are stored.

        Args:
            names: theirs; None for all.

        Raises:
            RuntimeError: the engine was not loaded from a checkpoint, or that has changed since.
        """
        loader = self._loader()
        self.check_unchanged()
        weights = loader.get_all_weights(self._config, self._model)
        found = {name: tensor for name, tensor in weights if names is None or name in names}
        self.check_unchanged(read_by(loader))
        return found

    def check_unchanged(self, read: Sources | None = None) -> Files:
        """Return the files that the engine's weights came from.

        Args:
            read: the files that were read now.

        Raises:
            RuntimeError: a file has changed since the engine was started.
        """
        return check_unchanged(self._model, f"the checkpoint {self._config.model}", read)

    def _loader(self) -> Any:
        config = copy.copy(self._load_config)
        config.use_tqdm_on_load = False
        loader = internals.get_model_loader(config)
        if not hasattr(loader, "get_all_weights"):
            raise RuntimeError(
                f"the engine was started with load_format={self._load_config.load_format!r}, so that its weights "
                "cannot be read again; start it on a checkpoint of safetensors"
            )
        return loader

    def kept(self) -> Kept:
        """Return the files that tensors are mapped from, just after they were read."""
        return Kept(self.check_unchanged(), f"the checkpoint {self._config.model}")

    def check(self, loader: Loader, report: DryRunReport, table: Table) -> None:
        """Raise `RuntimeError` if the engine holds something else than its checkpoint. Small tensors that keep their
        layout are compared."""
        some = {
            name: meta
            for name, meta in metas(table).items()
            if name in report.copies and meta.nbytes <= _SMALL * meta.dtype.itemsize
        }
        for slots in lay_out(list(some.values()), 1 << 24) if some else ():
            data = _bucket(slots, self.read({slot.name: some[slot.name] for slot in slots}), loader.device)
            same = loader.arrived(report, slots, data)
            if differing := sorted(name for name, equal in same.items() if not equal):
                raise RuntimeError(
                    f"the engine's {differing[0]}{_more(differing)} is not what {self._config.model} holds: something "
                    "has changed its weights since it was started; start it anew"
                )


def load_again(loader: Loader, report: DryRunReport, table: Table, tensors: Mapping[str, Tensor]) -> None:
    """Load all tensors of a checkpoint into the engine, between the loader's `begin` and `finish`."""
    for index, slots in enumerate(table):
        loader.drop_plans()  # those that read the bucket before
        loader.load(report, index, slots, _bucket(slots, tensors, loader.device), _nothing)
    loader.drop_plans()


def _bucket(slots: Sequence[Slot], tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return a bucket on a device, filled with tensors."""
    data = torch.empty(extent(slots), dtype=torch.uint8, device=device)
    for slot in slots:
        slot.view(data).copy_(cut(tensors[slot.name], slot.box))
    return data


def _nothing(name: str, tensor: Tensor) -> None:
    """Keep nothing of a tensor: its base is in the checkpoint."""


def _more(names: Collection[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
