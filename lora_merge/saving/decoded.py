"""A quantised base on disk, seen as the plain checkpoint that its codes stand for: decoded a chunk at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInput
from ..kernels.plan import Plan
from ..kernels.segments import FLOATS, copies
from ..stream.buckets import dtype_name
from .checkpoint import Checkpoint
from .chunks import Buffer, Rows, Take, take_new
from .format import Stored

QUANTIZED = "quantization_config"
"""What config.json says of how a base is quantised."""


@dataclass(eq=False)
class Coded(ABC):
    """A weight that lies in codes.

    Args:
        stored: its codes, as they lie in a file.
        shape: of the weight in the plain checkpoint.
        kept: dtype that it has in what is made of the base, unless another one is asked for.
        turned: the codes are those of the transposed weight.
        dtype: of the values that the codes stand for.
    """

    stored: Stored
    shape: tuple[int, ...]
    kept: torch.dtype
    turned: bool = False
    dtype: torch.dtype = torch.float32

    @abstractmethod
    def chunk(self, raw: Checkpoint, rows: Rows, take: Take) -> Buffer:
        """Return rows of the weight: a plain tensor, or a `Packed` one over codes that lie in the buffer.

        Args:
            raw: the base's files.
            take: gives memory for a shape and dtype.
        """

    def turn(self) -> None:
        """Note that the codes are those of the transposed weight."""
        if not self.turned:
            self.turned, self.shape = True, self.shape[::-1]


@dataclass(eq=False, kw_only=True)
class Decoded(Checkpoint):
    """A base whose tensors are those of the plain checkpoint, each of the dtype of its values.

    Args:
        raw: its files.
        coded: weights that lie in codes, by name.
    """

    raw: Checkpoint
    coded: Mapping[str, Coded]

    def read(self, name: str, begin: int, into: Tensor) -> None:
        """Read like `Checkpoint`; of a weight in codes whole rows."""
        coded = self.coded.get(name)
        if coded is None:
            self.raw.read(name, begin, into)
            return
        each = self.tensors[name].nbytes // coded.shape[0] if coded.shape[0] else 0
        first = begin // each if each else 0
        values = coded.chunk(self.raw, Rows(first, first + into.shape[0]), take_new).tensor
        if into.numel():
            Plan(copies(name, values, into)).run()

    def chunk(self, name: str, rows: Rows, take: Take) -> Buffer:
        coded = self.coded.get(name)
        return self.raw.chunk(name, rows, take) if coded is None else coded.chunk(self.raw, rows, take)

    def kept(self, name: str) -> torch.dtype:
        coded = self.coded.get(name)
        return self.raw.kept(name) if coded is None else coded.kept

    def turn(self, names: Collection[str]) -> None:
        found = {name: coded for name, coded in self.coded.items() if name in names}
        for coded in found.values():
            coded.turn()
        self.tensors = {
            name: replace(stored, shape=found[name].shape) if name in found else stored
            for name, stored in self.tensors.items()
        }

    def _lying(self) -> Mapping[str, Stored]:
        return self.raw.tensors

    def close(self) -> None:
        self.raw.close()


def decoded(raw: Checkpoint, coded: Mapping[str, Coded], beside: Collection[str], how: str) -> Decoded:
    """Return what is made of a quantised base's files.

    Args:
        coded: weights that lie in codes, by name.
        beside: names of tensors that say what codes stand for; they are no tensors of the plain checkpoint.
        how: it is quantised, in words.

    Raises:
        InvalidInput: it holds no codes.
    """
    if not coded:
        raise InvalidInput(
            f"{raw.folder}: config.json says {QUANTIZED}: {how}, and no weight there lies in codes: if these are plain "
            f"weights, take {QUANTIZED} out of config.json"
        )
    tensors = {
        name: replace(stored, dtype=coded[name].dtype, shape=coded[name].shape) if name in coded else stored
        for name, stored in raw.tensors.items()
        if name not in beside
    }
    _check_no_codes(raw, how, (stored for name, stored in tensors.items() if name not in coded))
    files = {file: tuple(name for name in names if name in tensors) for file, names in raw.files.items()}
    kept = {c.kept for c in coded.values()}
    dtypes = ", ".join(sorted(dtype_name(dtype) for dtype in kept))
    notes = [
        f"the base is quantised ({how}): {len(coded)} of its weights are written as what their codes stand for, in "
        f"{dtypes} unless dtype (--dtype) says otherwise"
    ]
    said = _config_dtype(raw.config)
    if said is not None and kept != {said}:
        named = dtype_name(said)
        notes.append(
            f"the base was quantised from {dtypes}, and config.json says {named}: who loads the result by its config "
            f"rounds these weights again, unless dtype={named} (--dtype {named}) is asked for"
        )
    return Decoded(
        folder=raw.folder,
        tensors=tensors,
        files={file: names for file, names in files.items() if names},
        metadata=raw.metadata,
        index=raw.index,
        config={key: value for key, value in raw.config.items() if key != QUANTIZED},
        notes=tuple(notes),
        raw=raw,
        coded=coded,
    )


def _check_no_codes(raw: Checkpoint, how: str, rest: Iterable[Stored]) -> None:
    for stored in rest:
        small = stored.dtype.itemsize == 1 and stored.dtype != torch.bool
        if small and (stored.dtype.is_floating_point or stored.name.endswith("weight")):
            raise InvalidInput(
                f"{raw.folder}: {stored.name} is {stored.dtype} {list(stored.shape)}, and nothing beside it says what "
                f"these codes stand for ({how}): the base is not whole; save or fetch it again"
            )


def _config_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype of config.json, where it is one of weights."""
    for said in (config, config.get("text_config")):
        named = said.get("dtype", said.get("torch_dtype")) if isinstance(said, Mapping) else None
        dtype = getattr(torch, str(named), None)
        if dtype in FLOATS:
            return dtype
    return None


def dtype_of_rest(config: Mapping[str, Any], rest: Iterable[Stored]) -> torch.dtype:
    """Return the dtype of a base whose codes say of none: that of config.json, or else that of most of its plain
    tensors.

    Args:
        rest: those that are no codes, and say of none what they stand for.
    """
    said = _config_dtype(config)
    if said is not None:
        return said
    count: dict[torch.dtype, int] = {}
    for stored in rest:
        if stored.dtype in FLOATS:
            count[stored.dtype] = count.get(stored.dtype, 0) + stored.nbytes // stored.dtype.itemsize
    return max(count, key=lambda dtype: count[dtype], default=torch.bfloat16)
