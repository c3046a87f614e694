"""What a compiled CUDA kernel is to Python: an object that says which segments it serves, which of them go into one
launch, and how that is made.

Segments are assigned to a list of them: `merge.MERGES` or `tracked.TRACKED`. A kernel more, or a loader or an
epilogue of one that is there, is an object more in such a list. (What makes results of 8 bits is in none:
`scaled.separate` says which weights it takes.)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..bindings import layout
from ..bindings.layout import INLINE_SEGMENTS, RAW_COLS, RAW_COLS_1, RAW_ROWS, WORDS
from ..bindings.operators import Launcher
from ..segments import COLS, RANK, ROWS, UNIT_BEGIN, UNITS_ACROSS
from .table import ceil, index_of, place

MAX_STATIC_UNITS = 1024
"""Units that blocks take round robin. More are handed out by a counter, as blocks do not run at one pace; it takes an
allocation."""

Shape = TypeVar("Shape", bound=tuple[int, ...])
Launch = partial[None]
"""A function of `operators.py` with the arguments that stay the same from run to run; it is called with the others."""


NONE = np.zeros((0, WORDS), dtype=np.int64)


class Work(NamedTuple):
    """Segments of one launch.

    Attributes:
        kind: what they have in common, `Kernel.kinds`.
        merges: the segments.
        max_rank: of the launch: theirs, or one with room for more.
        numbers: of the segments in the table that was assigned.
        copies: raw copies that ride along.
        behind: segments behind the others, which have no units of work.
    """

    kind: tuple[int, ...]
    merges: np.ndarray
    max_rank: int
    device: torch.device
    numbers: np.ndarray = NONE
    copies: np.ndarray = NONE
    behind: np.ndarray = NONE

    @property
    def processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)


class Units(NamedTuple):
    """How work is cut: units of `strip` columns and up to `most` rows, a multiple of `rows`."""

    strip: int
    most: int
    rows: int = 64


class Kernel(ABC, Generic[Shape]):
    """One kernel, with one loader and one epilogue.

    Attributes:
        name: for people.
        blocks: of it that share a multiprocessor.
        options: numbers that its operator takes after those of all kernels.
    """

    name: str
    operator: ClassVar[Launcher]
    blocks: int
    options: tuple[int, ...] = ()

    @abstractmethod
    def serves(self, table: np.ndarray, device: torch.device) -> np.ndarray:
        """Return which segments of a packed table it can run, bool `[segments]`."""

    def could_serve(self, table: np.ndarray, device: torch.device) -> np.ndarray:
        """Return which ones it serves once `repack.py` has laid their adapters out for tensor maps."""
        return np.zeros(len(table), dtype=bool)

    @abstractmethod
    def kinds(self, table: np.ndarray) -> Sequence[np.ndarray]:
        """Return the codes that its operator takes, `[segments]` each, that of the products last. Segments of a launch
        have the same codes."""

    @abstractmethod
    def shape(self, work: Work, like: Shape | None = None) -> Shape | None:
        """Return how its blocks work; None where the adapters have no room in shared memory.

        Args:
            like: the shape of a launch whose units this one keeps.
        """

    @abstractmethod
    def units(self, work: Work, shape: Shape) -> Units:
        """Return how the work is cut into units."""

    def maps(self, work: Work, table: np.ndarray, device: torch.device) -> Tensor:
        """Return the tensor maps of a cut table, on the device; empty where the kernel needs none."""
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def launch(self, work: Work, shape: Shape | None = None) -> Launch:
        """Cut the work, and put the table where the launch finds it. `shape`: default the best one."""
        shape = shape or self.shape(work)
        assert shape is not None, (self, work.kind, work.max_rank)
        strip, most, rows = self.units(work, shape)
        merges, copies, none = work.merges, work.copies, np.zeros(len(work.behind), dtype=np.int64)
        rows_per_unit = ceil(_rows_per_unit(merges, strip, most, self.blocks * work.processors), rows) * rows
        merge_across = ceil(merges[:, COLS], strip)
        copy_across = ceil(copies[:, COLS], np.where(copies[:, ROWS] == 1, RAW_COLS_1, RAW_COLS))
        merge_units = merge_across * ceil(merges[:, ROWS], rows_per_unit)
        copy_units = copy_across * ceil(copies[:, ROWS], RAW_ROWS)
        table, units = np.concatenate([merges, copies, work.behind]), np.concatenate([merge_units, copy_units, none])
        table[:, UNIT_BEGIN] = np.cumsum(units) - units
        table[:, UNITS_ACROSS] = np.concatenate([merge_across, copy_across, none])
        counted = len(table) > INLINE_SEGMENTS or units.sum() > MAX_STATIC_UNITS
        counter = torch.zeros(2 if counted else 0, dtype=torch.int32, device=work.device if counted else "cpu")
        placed, unit_segment = place(table, units, work.device)
        return partial(
            self.operator, placed, unit_segment, counter, self.maps(work, table, placed.device), index_of(work.device),
            *work.kind, int(merge_units.sum()), int(copy_units.sum()), rows_per_unit, *shape, work.max_rank,
            *self.options,
        )  # fmt: skip


SomeKernel = TypeVar("SomeKernel", bound=Kernel[Any])


def serves(kernels: Sequence[Kernel[Any]], table: np.ndarray, device: torch.device) -> np.ndarray:
    """Return which segments one of them serves, bool `[segments]`."""
    return np.any([kernel.serves(table, device) for kernel in kernels], axis=0)


def assign(table: np.ndarray, kernels: Sequence[SomeKernel], device: torch.device) -> list[tuple[SomeKernel, Work]]:
    """Return the work of each launch: a segment goes to the last kernel that serves it, and one of them does."""
    taker = np.zeros(len(table), dtype=np.int64)
    for number, kernel in enumerate(kernels[1:], start=1):
        taker[kernel.serves(table, device)] = number
    found = []
    for taken in np.unique(taker).tolist():
        kernel, mine = kernels[taken], np.flatnonzero(taker == taken)
        kinds, kind_of = np.unique(np.stack(kernel.kinds(table[mine]), axis=1), axis=0, return_inverse=True)
        for i, kind in enumerate(kinds.tolist()):
            numbers = mine[kind_of.reshape(-1) == i]
            merges = table[numbers]
            found.append((kernel, Work(tuple(kind), merges, int(merges[:, RANK].max()), device, numbers)))
    return found


def arguments(launch: Launch) -> dict[str, Any]:
    """Return the numbers that a launch of a kernel holds, by the names that C++ has for them."""
    names = layout.parameters(launch.func.name)  # type: ignore[attr-defined]
    return dict(zip(names[names.index("maps") + 1 :], launch.args[5:], strict=False))


def tensors(launches: Sequence[Launch]) -> list[Tensor]:
    """Return the tensors that launches hold."""
    return [t for launch in launches for t in launch.args if isinstance(t, Tensor)]


def _rows_per_unit(merges: np.ndarray, strip: int, most: int, blocks: int) -> int:
    """Return how many rows a block takes with one strip of A: many, but with enough units for an even load."""
    strips = int((ceil(merges[:, COLS], strip) * ceil(merges[:, ROWS], 64)).sum())
    return 64 * min(most // 64, max(1, strips // (16 * blocks)))
