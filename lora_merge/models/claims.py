"""Claims on weights: one `merged` at a time, and none while a stream reads them, in all threads. Also runs cleanup
steps to their end when they are interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..errors import AlreadyMerged, InvalidInput
from ..shards import Address, here
from ..signals import Deferred


@dataclass(eq=False)
class _Claim:
    """What one `merged`, or one pass of a stream, holds as long as it is under way. A claim ends with its holder, also
    where interrupts kept the holder from letting go of it: nothing else holds it or, by it, a model.

    Args:
        layers, weights: adapter layers, and what is written.
        held: what a pass reads.
        reader: whose streams may read what is merged as it lies; None: nobody's.
    """

    layers: Iterable[object] = ()
    weights: Mapping[Address, Tensor] = field(default_factory=dict)
    held: Sequence[torch.UntypedStorage] = ()
    reader: object | None = None


_Claims: TypeAlias = WeakValueDictionary[int, _Claim]

# Garbage may be collected while this thread has the lock, and a block or a pass among it lets go of its claim then.
_lock = threading.RLock()
_merged, _read = _Claims(), _Claims()
"""What is inside `merged`, and the passes of streams that are under way, each by its `id`."""
_looks: dict[Look, set[int]] = {}
"""The looks at models that are under way, each with the memory that left `merged` meanwhile."""


def _held(claims: _Claims) -> list[_Claim]:
    """Return those that somebody holds. Any may end meanwhile."""
    return [claim for one in claims.valuerefs() if (claim := one()) is not None]


class Look:
    """Marks the time in which a model is read. Another thread may be inside `merged` during it (tied weights are then
    separate), and have left before the reader makes its claim.

    `with` gives the memory of weights that left `merged` since, for `merging` and `check_readable`.
    """

    def __enter__(self) -> set[int]:
        left: set[int] = set()
        with _lock:
            _looks[self] = left
        return left

    def __exit__(self, *exception: object) -> None:
        with _lock:
            _looks.pop(self, None)


def merging(
    layers: Iterable[object], weights: Mapping[Address, Tensor], left: AbstractSet[int] = frozenset()
) -> AbstractContextManager[None]:
    """Claim weights for the time of one `merged`.

    Args:
        layers: its adapter layers.
        weights: what it writes.
        left: see `Look`.

    Raises:
        AlreadyMerged: some of them are inside `merged`, or were when they were looked at.
        InvalidInput: a stream reads the memory of some of them.
    """
    claim = _Claim(layers, weights)

    def let_go() -> None:
        with _lock:
            for seen in _looks.values() if id(claim) in _merged else ():
                seen |= _memory(weights.values())
            _merged.pop(id(claim), None)

    return undone(lambda: _claim_merge(claim, left), let_go)


def _claim_merge(claim: _Claim, left: AbstractSet[int]) -> None:
    layers, weights = claim.layers, claim.weights
    with _lock:
        there = any(_shared(layers, c.layers) or not c.weights.keys().isdisjoint(weights) for c in _held(_merged))
        if there or (left and not left.isdisjoint(_memory(weights.values()))):
            raise AlreadyMerged(
                "merged() is already entered on this model, or on one that shares weights with it; leave it before "
                "entering again"
            )
        if any(_meet(one.held, weights.values()) for one in _held(_read)):
            raise InvalidInput(
                "a stream of these weights (MergedWeights, VllmSync) is under way, which would read merged ones from "
                "here on: finish its iteration, or close it, before merged()"
            )
        _merged[id(claim)] = claim


def let_read(layers: Iterable[object], reader: object) -> None:
    """Let streams of a reader read, as it lies, what the `merged` of these adapter layers has merged."""
    with _lock:
        for claim in _held(_merged):
            if _shared(layers, claim.layers):
                claim.reader = reader


def is_read(weights: Sequence[Tensor]) -> bool:
    """Return True while a stream reads the memory of some of these weights."""
    with _lock:
        return any(_meet(one.held, weights) for one in _held(_read))


def check_unread(weights: Sequence[Tensor]) -> None:
    """Raise `InvalidInput` while a stream reads the memory of some of these weights, which are to change."""
    if is_read(weights):
        raise InvalidInput(
            "a stream of these weights (MergedWeights, VllmSync) is under way, and they are to change: finish its "
            "iteration, or close it, before the model computes with other adapters or its base is read"
        )


def reading(held: Sequence[torch.UntypedStorage], reader: object | None = None) -> AbstractContextManager[None]:
    """Claim the memory that one pass of a stream reads, for the time of the pass.

    Args:
        reader: see `let_read`.

    Raises:
        AlreadyMerged: some of it is inside `merged`.
    """
    claim = _Claim(held=held)

    def take() -> None:
        with _lock:
            check_readable(held, reader=reader)
            _read[id(claim)] = claim

    def let_go() -> None:
        with _lock:
            _read.pop(id(claim), None)

    return undone(take, let_go)


def check_readable(
    held: Sequence[torch.UntypedStorage], left: AbstractSet[int] = frozenset(), reader: object | None = None
) -> None:
    """Raise `AlreadyMerged` if some of this memory, but for what the reader may read, is inside `merged`, or was so
    when it was looked at (see `Look`)."""
    others = [claim for claim in _held(_merged) if reader is None or claim.reader is not reader]
    merged = any(_meet(held, claim.weights.values()) for claim in others)
    if merged or (left and _lies_in(held, left)):
        raise AlreadyMerged(
            "these weights are inside lora_merge.merged() and hold adapters on top of the base, or did so while they "
            "were looked at: leave the block first"
        )


def check_base(modules: Iterable[nn.Module]) -> None:
    """Raise `AlreadyMerged` if the base of some of PEFT's layers holds adapters."""
    for module in modules:
        if names := module.__dict__.get("merged_adapters"):
            raise AlreadyMerged(
                f"the base of a {type(module).__name__} already holds the adapters {', '.join(names)}: call "
                "unmerge_adapter(), or load the base again where its exact weights matter"
            )


def _shared(some: Iterable[object], others: Iterable[object]) -> bool:
    return not set(map(id, some)).isdisjoint(map(id, others))


def _meet(held: Sequence[torch.UntypedStorage], weights: Iterable[Tensor]) -> bool:
    return _lies_in(held, _memory(weights))


def _memory(weights: Iterable[Tensor]) -> set[int]:
    return {here(weight).untyped_storage().data_ptr() for weight in weights} - {0}


def _lies_in(held: Sequence[torch.UntypedStorage], memory: AbstractSet[int]) -> bool:
    return not memory.isdisjoint(storage.data_ptr() for storage in held)


@contextmanager
def undone(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Do something for the time of a block, and undo it after, whatever interrupts come.

    Args:
        begin: does it.
        end: undoes what was done of it; may be begun again.
    """
    try:
        begin()
        yield
    finally:
        try:
            to_the_end(end)
        except BaseException:  # an interrupt may come before the first line of a function
            to_the_end(end)
            raise


def to_the_end(step: Callable[[], object]) -> None:
    """Run a cleanup step, which may be begun again, to its end. Interrupts meanwhile, however many (Ctrl-C again and
    again), are raised after it."""
    signals, late = Deferred(), None
    try:
        while True:
            try:
                signals.defer()
                step()
                break
            except Exception:
                raise
            except BaseException as interrupt:  # one that came before signals waited, or that is no signal's
                late = interrupt
    finally:
        signals.deliver()
    if late is not None:
        raise late
