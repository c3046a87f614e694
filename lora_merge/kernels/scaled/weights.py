"""Results of 8 bits: e4m3 elements of which a group shares a scale, as engines quantise what they load.

A sum is rounded to the dtype in which an engine loads weights (docs/vllm.md has what that costs: next to nothing), and
what becomes of that number is what vLLM's quantisers make of it, bit for bit (float32 throughout; `largest` is that of
the group's magnitudes):

| group | scale | element |
|---|---|---|
| tensor | `largest / 448` | `x * (1 / scale)` |
| channel (a row) | `max(largest / 448, 1 / (448 * 512))` | `x / scale` |
| block (128 x 128) | `max(largest, 1e-4) * (1 / 448)` | `x * (1 / scale)` |

rounded to the nearest e4m3 number, at most 448. `compiled` blocks are those of a function that Triton compiled, as
vLLM's is on GPUs: its `1 / scale` (PTX's div.full) may be off by two units of the last place. That shows only in
numbers that lie in the middle between two others, and only CUDA's kernel knows how; elsewhere they are blocks. A NaN
makes its group's scale one, so that it never hides, as it does in kernels of vLLM 0.26.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...errors import InvalidInput
from ..bindings.layout import GROUPS, SCALED_BLOCK
from ..packed import Packed
from ..segments import FP8, Segment

LARGEST = 448.0
"""The largest e4m3 number."""
LEAST_OF_BLOCK = 1e-4
SCALED_FROM = (torch.bfloat16, torch.float16)
"""Dtypes that sums can be rounded to before they are scaled."""
Group: TypeAlias = Literal["tensor", "channel", "block", "compiled"]
_CODES = {name.lower(): code for name, code in GROUPS.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Scaled:
    """A whole weight of 8 bits, and its scales.

    Args:
        weight: e4m3 `[rows, cols]`, contiguous.
        scales: float32, contiguous: `[1]`, `[rows, 1]`, or `[rows / 128, cols / 128]`, up.
        group: what shares a scale.
        dtype: in which an engine loads the weight: sums are rounded to it before they are scaled, whatever the base's
            dtype is; one of `SCALED_FROM`.
    """

    weight: Tensor
    scales: Tensor
    group: Group
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in SCALED_FROM:
            raise InvalidInput(f"dtype of a weight of 8 bits must be bfloat16 or float16, got {self.dtype}")

    @property
    def code(self) -> int:
        return _CODES[self.group]

    @property
    def sizes(self) -> tuple[int, int]:
        """Rows and columns of a group."""
        rows, cols = self.weight.shape
        if self.group == "tensor":
            return max(rows, 1), max(cols, 1)
        return (1, max(cols, 1)) if self.group == "channel" else (SCALED_BLOCK, SCALED_BLOCK)

    @property
    def grid(self) -> tuple[int, int]:
        """Groups one below the other, and side by side."""
        (rows, cols), (down, across) = self.weight.shape, self.sizes
        return -(-rows // down), -(-cols // across)


class Placed(NamedTuple):
    """A segment, and where its destination lies in a weight of 8 bits."""

    segment: Segment
    scaled: Scaled
    row: int
    col: int

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.segment.source.shape[0])

    @property
    def cols(self) -> slice:
        return slice(self.col, self.col + self.segment.source.shape[1])

    @property
    def ready(self) -> Rounded | None:
        """Its source as what is scaled, where it needs no merge and makes whole groups by itself; else None."""
        s = self.segment
        plain = s.rank == 0 and s.row_scale is None and s.source.dtype == self.scaled.dtype
        if not plain or isinstance(s.source, Packed) or (s.source.shape[1] > 1 and s.source.stride(1) != 1):
            return None
        return Rounded(s.source, self.scaled, self.row, self.col) if self.whole else None

    @property
    def whole(self) -> bool:
        """Whether it makes whole groups by itself."""
        ends = zip((self.rows, self.cols), self.scaled.sizes, self.scaled.weight.shape, strict=True)
        return not any(r.start % size or (r.stop % size and r.stop != end) for r, size, end in ends)


class Rounded(NamedTuple):
    """Numbers of 16 bits `[rows, cols]` that become whole groups of a weight of 8 bits.

    Attributes:
        source: columns side by side.
        row, col: of the weight, where they begin.
    """

    source: Tensor
    scaled: Scaled
    row: int
    col: int

    @property
    def destination(self) -> Tensor:
        rows, cols = self.source.shape
        return self.scaled.weight[self.row : self.row + rows, self.col : self.col + cols]

    @property
    def scales(self) -> Tensor:
        """Those of its groups, `[groups below each other, groups side by side]`."""
        (down, across), (rows, cols) = self.scaled.sizes, self.source.shape
        grid = self.scaled.scales.view(self.scaled.grid)
        row, col = self.row // down, self.col // across
        return grid[row : row - -rows // down, col : col - -cols // across]


class Scales:
    """What launches of results of 8 bits have in common; see `Launch`."""

    def __call__(self, stochastic: bool, seed: int) -> None:
        raise NotImplementedError

    def row_norms(self, out: Tensor) -> None:
        raise NotImplementedError("norms are taken of what is merged in place")


class Both(Scales):
    """Several of them, one after the other; see `Launch`."""

    def __init__(self, parts: Sequence[Scales]) -> None:
        self._parts = parts

    def __call__(self, stochastic: bool, seed: int) -> None:
        for part in self._parts:
            part(stochastic, seed)


def is_scaled(s: Segment) -> bool:
    """Return True if a segment's results are scaled; one of 8 bits whose source is, too, is copied."""
    return s.destination.dtype == FP8 and s.source.dtype != FP8


def check_scaled(scaled: Sequence[Scaled]) -> None:
    """Raise `InvalidInput` unless weights and scales fit each other."""
    for number, s in enumerate(scaled):
        name = f"scaled weight {number}"
        if s.group not in _CODES:
            raise InvalidInput(f"{name}: group must be one of {', '.join(_CODES)}, got {s.group!r}")
        if s.weight.dtype != FP8 or s.weight.dim() != 2 or not s.weight.is_contiguous():
            raise InvalidInput(
                f"{name}: weight must be contiguous {FP8} [rows, cols], got {s.weight.dtype} "
                f"{tuple(s.weight.shape)} with strides {s.weight.stride()}"
            )
        wanted = s.grid[0] * s.grid[1]
        if s.scales.dtype != torch.float32 or s.scales.numel() != wanted or not s.scales.is_contiguous():
            raise InvalidInput(
                f"{name}: scales must be {wanted} contiguous float32 numbers, one for each {s.group} of "
                f"{tuple(s.weight.shape)}, got {s.scales.dtype} {tuple(s.scales.shape)}"
            )
        if s.scales.device != s.weight.device:
            raise InvalidInput(f"{name}: scales are on {s.scales.device}, the weight on {s.weight.device}")


def place(segments: Sequence[Segment], scaled: Sequence[Scaled]) -> list[Placed]:
    """Return where each segment's results lie.

    Raises:
        InvalidInput: one lies in none of the weights, is no rectangle of it, begins inside of a block, or some group is
            not written whole: its scale would be that of a part.
    """
    weights = sorted((s for s in scaled if s.weight.numel()), key=lambda s: s.weight.data_ptr())
    begins = np.array([s.weight.data_ptr() for s in weights], dtype=np.int64)
    found = [_place(segment, weights, begins) for segment in segments]
    _check_groups(found)
    return found


def _place(s: Segment, weights: Sequence[Scaled], begins: np.ndarray) -> Placed:
    at = s.destination.data_ptr()
    number = int(np.searchsorted(begins, at, side="right")) - 1
    if number < 0 or at >= weights[number].weight.data_ptr() + weights[number].weight.nbytes:
        raise InvalidInput(f"{s.name}: a result of 8 bits needs the weight that it is part of, and its scales")
    scaled = weights[number]
    (rows, cols), (row, col) = s.source.shape, divmod(at - scaled.weight.data_ptr(), scaled.weight.shape[1])
    strides = (rows == 1 or s.destination.stride(0) == scaled.weight.shape[1]) and (
        cols == 1 or s.destination.stride(1) == 1
    )
    if not strides or row + rows > scaled.weight.shape[0] or col + cols > scaled.weight.shape[1]:
        raise InvalidInput(
            f"{s.name}: the destination must be rows and columns of the weight {tuple(scaled.weight.shape)}, got "
            f"{tuple(s.destination.shape)} with strides {s.destination.stride()}"
        )
    if s.source.dtype not in (*SCALED_FROM, torch.float32):
        raise InvalidInput(f"{s.name}: the weight must be bfloat16, float16 or float32, got {s.source.dtype}")
    if col % SCALED_BLOCK and scaled.sizes[1] == SCALED_BLOCK:
        raise InvalidInput(f"{s.name}: column {col} is inside of a block of {SCALED_BLOCK}; cut weights between them")
    return Placed(s, scaled, row, col)


def _check_groups(placed: Sequence[Placed]) -> None:
    for scaled, some in by_weight(placed):
        (down, across), (rows, cols) = scaled.sizes, scaled.weight.shape
        written = _elements(scaled, some)
        full = np.outer(_counts(slice(0, rows), down, scaled.grid[0]), _counts(slice(0, cols), across, scaled.grid[1]))
        if ((written > 0) & (written != full)).any():
            at = tuple(int(i) for i in np.argwhere((written > 0) & (written != full))[0])
            raise InvalidInput(
                f"{some[0].segment.name}: {written[at]} of {full[at]} elements of {scaled.group} {at} are written, and "
                "its scale is that of all: write whole groups in one plan"
            )


def rectangles(scaled: Scaled, placed: Sequence[Placed]) -> list[tuple[slice, slice]]:
    """Return rows and columns of the groups of a weight that are written."""
    (down, across), (rows, cols) = scaled.sizes, scaled.weight.shape
    written = _elements(scaled, placed) > 0
    found: list[tuple[slice, slice]] = []
    edges = [0, *(np.flatnonzero((written[1:] != written[:-1]).any(1)) + 1).tolist(), len(written)]
    for top, bottom in pairwise(edges):  # rows of groups that are alike
        changes = np.flatnonzero(np.diff(written[top], prepend=False, append=False)).tolist()
        for left, right in zip(changes[::2], changes[1::2], strict=True):
            end_row, end_col = min(bottom * down, rows), min(right * across, cols)
            found.append((slice(top * down, end_row), slice(left * across, end_col)))
    return found


def _elements(scaled: Scaled, placed: Sequence[Placed]) -> np.ndarray:
    """Return how many elements of each group are written."""
    (down, across), written = scaled.sizes, np.zeros(scaled.grid, dtype=np.int64)
    for p in placed:
        written += np.outer(_counts(p.rows, down, scaled.grid[0]), _counts(p.cols, across, scaled.grid[1]))
    return written


def _counts(part: slice, size: int, count: int) -> np.ndarray:
    """Return how many of a range's elements each of `count` groups of `size` has."""
    edges = np.clip(np.arange(count + 1, dtype=np.int64) * size, part.start, part.stop)
    return np.diff(edges)


def by_weight(placed: Sequence[Placed]) -> list[tuple[Scaled, list[Placed]]]:
    """Return the segments of each weight."""
    found: dict[int, tuple[Scaled, list[Placed]]] = {}
    for p in placed:
        found.setdefault(p.scaled.weight.data_ptr(), (p.scaled, []))[1].append(p)
    return list(found.values())


# ---- by tensor operations --------------------------------------------------------------------------------------------


def quantise(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return a whole weight of 8 bits and its scales, as the table above has them: the truth that kernels are held to.

    Args:
        x: `[rows, cols]`, bfloat16 or float16.
    """
    (rows, cols), x = x.shape, x.float()
    if group in ("tensor", "channel"):
        largest = x.abs().amax() if group == "tensor" else x.abs().amax(1, keepdim=True)
        scale = largest / torch.tensor(LARGEST, device=x.device)  # by a tensor: a number's inverse would be multiplied
        if group == "channel":
            scale = scale.clamp(min=1 / (LARGEST * 512))
        y = x / scale if group == "channel" else x * (torch.ones_like(scale) / scale)
        if group == "tensor":
            y = torch.where(y.isnan(), LARGEST, y)  # of zeros, whose scale is zero
        return _rounded(y), scale.reshape(-1, 1) if group == "channel" else scale.reshape(1)
    down, across = -(-rows // SCALED_BLOCK), -(-cols // SCALED_BLOCK)
    padded = x.new_zeros(down * SCALED_BLOCK, across * SCALED_BLOCK)
    padded[:rows, :cols] = x
    blocks = padded.view(down, SCALED_BLOCK, across, SCALED_BLOCK)
    part = torch.tensor(1 / LARGEST, device=x.device)
    scale = blocks.abs().amax((1, 3), keepdim=True).clamp(min=LEAST_OF_BLOCK) * part
    y = (blocks * (torch.ones_like(scale) / scale)).view(padded.shape)[:rows, :cols]
    return _rounded(y), scale.view(down, across)


def _rounded(y: Tensor) -> Tensor:
    """Round to the nearest e4m3 number; a NaN stays."""
    return y.clamp(-LARGEST, LARGEST).to(FP8)


TRIED_SCALES = 32
"""So many scales of each weight are tried at least. (A scale of 448ths is the same for many numbers whether they are
divided by 448 or multiplied by 1 / 448. vLLM 0.26 compiles its quantiser of blocks by shape: for a router of 16 rows it
divides.)"""


def trials(
    shapes: Mapping[str, tuple[int, ...]], quantised: AbstractSet[str], fewest: int
) -> Iterator[dict[str, Tensor]]:
    """Yield numbers of which no two groups make the same scales and values, to find out a layer's quantiser.

    Every other one has ties (`put_ties`), which tell inverses apart, and whose scales are the same by all rules: where
    a weight is one block, those of the others alone tell it from a tensor that shares a scale.

    Args:
        shapes: of the layer's parameters, by name.
        quantised: names of those that become 8 bits.
        fewest: scales of one of them.

    Yields:
        float32, by name, on the CPU.
    """
    generator = torch.Generator().manual_seed(0)
    given: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        numbers = torch.randn(shape, generator=generator, device="cpu")
        if name in quantised:  # and no bias, which vLLM 0.26 notes, too
            rows = torch.rand((*shape[:-1], 1), generator=generator, device="cpu") * 0.1
            rows[..., ::7, :] *= 1e-37  # some become zeros, with their sign
            rows[..., ::11, :] = 0
            numbers *= rows
        given[name] = numbers
    for number in range(-(-TRIED_SCALES // fewest)):
        for ties in (False, True):
            factor = float(torch.rand((), generator=generator, device="cpu")) + 0.5
            trial = {name: some * factor for name, some in given.items()}
            if ties:
                for name in quantised & trial.keys():
                    put_ties(trial[name], number * fewest)
            yield trial


def put_ties(numbers: Tensor, first: int) -> None:
    """Put numbers into a row of each block that lie in the middle between two of e4m3 once they are scaled: for others
    the last bits of `1 / scale` do not matter, as 16 bits cannot come so close.

    The largest of a block is 448 times an odd number, up to 35, over a power of two. With other ones there are no such
    numbers: a magnitude of 16 bits has eight significant ones (bf16; of fp16 eleven, and some are left out), and 448 is
    7 times a power of two.

    Args:
        numbers: `[..., rows, cols]` in float32, whose magnitudes are below 1.
        first: which of the odd numbers the first block gets; the others get the following ones in turn.
    """
    table = torch.arange(127, dtype=torch.uint8, device="cpu").view(FP8).float()
    ties = torch.cat([table[-1:], (table[1:] + table[:-1]) / 2])
    rows, cols = numbers.shape[-2:]
    across = torch.arange(cols, device="cpu")
    for count, begin in enumerate(range(0, rows, SCALED_BLOCK)):
        odd = 2 * ((first + count * -(-cols // SCALED_BLOCK) + across // SCALED_BLOCK) % 18) + 1
        numbers[..., min(begin + 1, rows - 1), :] = ties[across % SCALED_BLOCK % len(ties)] * odd / 256
