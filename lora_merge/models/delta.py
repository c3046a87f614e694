"""Delta: what the active adapters make of one parameter; and the rectangles that this comes to.

`peft/read.py` reads deltas out of live PEFT models, `megatron/read.py` out of Megatron's; `operands.py` makes segments
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Any, NamedTuple, TypeVar, overload

from torch import Tensor, nn

from ..shards import Shard

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The two matrices of one adapter and its factor, live: what they hold is read at every run.

    Args:
        lora_A: `[r, in]`; expert-major `[E*r, in]` for fused experts; `[r, in, *kernel]` for a convolution.
        lora_B: `[out, r]`; expert-minor `[out, r*E]` for fused experts; `[out, r, 1, ...]` for a convolution; `[out]`
            for a bias.
        scaling: `layer.scaling[adapter]` as it stands.
        adapter: its name, where it has one.
    """

    lora_A: Shard
    lora_B: Shard
    scaling: float
    adapter: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of a parameter that one adapter puts others in the place of, live (`trainable_token_indices`).

    Args:
        indices: their numbers, each once.
        values: `[rows, in]`, in this order: what the rows are, not what is added to them.
        adapter: its name, where it has one.
    """

    indices: tuple[int, ...]
    values: Shard
    adapter: str = ""


class Run(NamedTuple):
    """Rows of a parameter that follow each other and come from one place.

    Args:
        first, many: numbers of the rows.
        which: of the delta's `rows`; None: they are the base's.
        at: where they begin in its values.
    """

    first: int
    many: int
    which: int | None = None
    at: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What the active adapters make of one parameter, as read by `read_deltas`.

    They add `sum(scaling * lora_B @ lora_A)`, once for each expert, or replace some of its rows.

    A parameter is one matrix or `experts` matrices; below, `[out, in]` is the shape of one, whichever way it is stored.

    Args:
        name: HF checkpoint name of the parameter (`model.layers.0.self_attn.q_proj.weight`).
        weight: the part of the parameter that this rank holds.
        factors: lora_A, lora_B and scaling of each active adapter; empty only where rows are replaced.
        experts: None for one matrix (a bias counts as `[out, 1]`, a convolution as `[out, in*kernel]`), else the
            number of matrices along the parameter's first dimension.
        transposed: a matrix is stored `[in, out]` (`fan_in_fan_out`, Embedding, transposed experts).
        magnitude: DoRA's magnitude vector, any shape with `out` elements; rows are scaled to that norm.
        owner: the module that holds the live parameter.
        attribute: the parameter's name in that module.
        rows: what adapters put in the place of rows of a matrix; no row twice. Nothing is added to such a parameter.
    """

    name: str
    weight: Shard
    factors: tuple[Factors, ...]
    experts: int | None = None
    transposed: bool = False
    magnitude: Shard | None = None
    owner: nn.Module | None = None
    attribute: str = ""
    rows: tuple[Rows, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)` of one matrix, from the parameter's shape."""
        lead = 0 if self.experts is None else 1
        rows, cols = self.weight.shape[lead], prod(self.weight.shape[lead + 1 :])
        return (cols, rows) if self.transposed else (rows, cols)

    def shards(self) -> Iterator[Shard]:
        """Yield lora_A and lora_B of every adapter, and the values of replaced rows."""
        for factors in self.factors:
            yield factors.lora_A
            yield factors.lora_B
        for rows in self.rows:
            yield rows.values

    def runs(self, begin: int, count: int) -> Iterator[Run]:
        """Say where some rows that follow each other come from: the base, or `rows`."""
        end = begin + count
        found = sorted((row, which, at) for which, some in enumerate(self.rows) for at, row in enumerate(some.indices))
        run: Run | None = None
        for row, which, at in found:
            if not begin <= row < end:
                continue
            if run is not None and (row, which, at) == (run.first + run.many, run.which, run.at + run.many):
                run = run._replace(many=run.many + 1)
                continue
            if run is not None:
                yield run
                begin = run.first + run.many
            if begin < row:
                yield Run(begin, row - begin)
            run = Run(row, 1, which, at)
        if run is not None:
            yield run
            begin = run.first + run.many
        if begin < end:
            yield Run(begin, end - begin)

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return logical `[out, in]` views, one for each expert, of a tensor laid out as the whole parameter."""
        out, cols = reversed(self.shape) if self.transposed else self.shape
        views = tensor.detach().view(self.experts or 1, out, cols).unbind(0)
        return tuple(view.t() for view in views) if self.transposed else views

    def key(self) -> tuple[Any, ...]:
        """Return all that a plan depends on; a plan serves as long as keys stay equal."""
        adapters = (*[(f.lora_A.key(), f.lora_B.key(), f.scaling) for f in self.factors],)
        magnitude = None if self.magnitude is None else self.magnitude.key()
        return self.name, self.experts, self.transposed, self.weight.key(), adapters, magnitude, self._replaced()

    def update(self) -> tuple[Any, ...]:
        """Return what is done to the parameter, wherever it is adapted: equal for two places of one parameter (a tied
        weight) if both do the same to it, by the same memory. An embedding holds the factors of its head the other way
        round."""
        if self.experts is not None or self.magnitude is not None:
            return self.key()[1:]
        factors = []
        for f in self.factors:
            out, into = (f.lora_A, f.lora_B) if self.transposed else (f.lora_B, f.lora_A)
            factors.append((out.key(turned=self.transposed), into.key(turned=self.transposed), f.scaling))
        return self.weight.key(), *factors, self._replaced()

    def _replaced(self) -> tuple[Any, ...]:
        return (*[(rows.indices, rows.values.key()) for rows in self.rows],)

    def describe(self) -> str:
        """Return what must be equal on every rank, in words."""
        adapters = ", ".join(
            f"{f.adapter and f'{f.adapter!r}: '}lora_A {f.lora_A.dtype} {list(f.lora_A.shape)} "
            f"lora_B {f.lora_B.dtype} {list(f.lora_B.shape)} x {f.scaling}"
            for f in self.factors
        )
        kind = f"{self.experts or ''}{' transposed' if self.transposed else ''}{' DoRA' if self.magnitude else ''}"
        if self.rows:
            shapes = (
                f"{r.adapter!r}: rows {list(r.indices)} by {r.values.dtype} {list(r.values.shape)}" for r in self.rows
            )
            adapters = ", ".join([*([adapters] if adapters else []), *shapes])
        return f"{self.name} {self.weight.dtype} {list(self.weight.shape)}{kind} + {adapters}"


class LazyList(Sequence[_T]):
    """A list that is made when somebody looks into it: a step over plans that stand does not."""

    def __init__(self, make: Callable[[], Sequence[_T]]) -> None:
        self._make = cache(make)

    @overload
    def __getitem__(self, index: int) -> _T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[_T]: ...

    def __getitem__(self, index: int | slice) -> _T | Sequence[_T]:
        return self._make()[index]

    def __len__(self) -> int:
        return len(self._make())


class Job(NamedTuple):
    """A box of a parameter on its way from `source` to `destination`, with what a delta adds to it.

    Args:
        start: index of the box in the whole parameter.
        source, destination: tensors of the box's shape; the same one merges in place.
    """

    delta: Delta
    start: tuple[int, ...]
    source: Tensor
    destination: Tensor


def whole_job(delta: Delta, source: Tensor, destination: Tensor) -> Job:
    """Return the job of a whole parameter."""
    return Job(delta, (0,) * len(delta.weight.shape), source, destination)


def in_place(delta: Delta) -> list[Job]:
    """Return the jobs that merge what this rank holds of a parameter where it lies."""
    return [Job(delta, piece.start, piece.tensor, piece.tensor) for piece in delta.weight.pieces]


class Rectangle(NamedTuple):
    """A job's part in one matrix, `[out, in]` seen logically.

    Args:
        expert: number of the matrix.
        row, col: index of its first element in the matrix.
        source, destination: 2-D views.
        first, pitch: see `Segment`.
    """

    expert: int
    row: int
    col: int
    source: Tensor
    destination: Tensor
    first: int
    pitch: tuple[int, int]


def rectangles(job: Job) -> Iterator[Rectangle]:
    """Yield a job as rectangles of matrices: one for a plain weight, one an expert for fused ones."""
    delta, start = job.delta, job.start
    shape = delta.weight.shape
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    lead = 0 if delta.experts is None else 1
    for e in range(start[0], start[0] + job.source.shape[0]) if lead else (0,):
        source, destination = (t[e - start[0]] if lead else t for t in (job.source, job.destination))
        base = e * strides[0] if lead else 0
        for s, d, col in _flattened(source, destination, shape[lead:], start[lead:]):
            row = start[lead]
            first, pitch = base + row * strides[lead] + col, (strides[lead], 1)
            if delta.transposed:
                yield Rectangle(e, col, row, s.t(), d.t(), first, (pitch[1], pitch[0]))
            else:
                yield Rectangle(e, row, col, s, d, first, pitch)


def _flattened(
    source: Tensor, destination: Tensor, shape: tuple[int, ...], start: tuple[int, ...]
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield a box as matrices `[rows, cols]`, with the number of the first column: the dimensions after the first in
    one."""
    if source.dim() == 1:
        yield source.unsqueeze(1), destination.unsqueeze(1), 0
    elif source.dim() == 2:
        yield source, destination, start[1]
    elif source.shape[1:] == shape[1:] and source.is_contiguous() and destination.is_contiguous():
        yield source.flatten(1), destination.flatten(1), 0
    else:
        steps = [prod(shape[d + 1 :]) for d in range(1, len(shape))]
        for index in product(*map(range, source.shape[1:-1])):
            number = sum((i + s) * step for i, s, step in zip((*index, 0), start[1:], steps, strict=True))
            at: Any = (slice(None), *index)
            yield source[at], destination[at], number
