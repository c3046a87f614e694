"""Ranks: the processes that hold a model together, and the few collectives that are run over them."""

from __future__ import annotations

import hashlib
import pickle
from _thread import RLock
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InvalidInput
from ..signals import Deferred

_T = TypeVar("_T")
PADDING = 1.05
"""Parts that differ in size are padded to the largest for one all-gather, if that sends at most this much more."""
_SMALL = 2040
"""Bytes of a pickled value that one collective carries."""


class RankLost(RuntimeError):
    """The ranks cannot talk to each other any more: one has died, has left, or has not come in time.

    Attributes:
        step: of a push in which that was noticed.
    """

    step = ""


@contextmanager
def talking() -> Iterator[None]:
    """Talk to the other ranks; raise `RankLost` in place of torch.distributed's own error."""
    try:
        yield
    except (RankLost, torch.OutOfMemoryError, torch.AcceleratorError):  # these say what is wrong here
        raise
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0]
        raise RankLost(f"a rank has died, has left, or has not come in time ({said})") from error


@dataclass
class Ballot:
    """What a rank says in a vote, and then what came of it."""

    flag: bool = False


class Ranks:
    """The ranks that together hold one whole copy of a model. Every method is collective over them.

    Args:
        group: a process group; None for a model that one process holds by itself.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def alone(self) -> bool:
        return self.size == 1

    def global_rank(self, rank: int) -> int:
        """Return the rank in the world of a rank of these."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def talks_on(self, device: torch.device) -> torch.device:
        """Return the device on which the ranks can exchange tensors of `device`: itself, or this rank's GPU where they
        speak NCCL only.

        Raises:
            InvalidInput: there is none.
        """
        if self.alone:
            return device
        kinds = {part.partition(":")[0] for part in str(dist.get_backend_config(self.group)).split(",")}
        if device.type in kinds:
            return device
        if "cuda" in kinds and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        raise InvalidInput(
            f"weights lie on {device}, but their process group speaks {', '.join(sorted(kinds))} only: initialise it "
            f"with a backend for {device.type} too"
        )

    def any(self, flag: bool) -> bool:
        """Return True if the flag is set on some rank."""
        return self._any([flag])[0]

    def _any(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether it is set on some rank."""
        if self.alone:
            return flags
        there = torch.tensor(flags, dtype=torch.int32, device=self.talks_on(torch.device("cpu")))
        with talking():
            dist.all_reduce(there, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in there.tolist()]

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if not self.alone:
            sent = tensor.to(self.talks_on(tensor.device))
            with talking():
                dist.all_reduce(sent, group=self.group)
            tensor.copy_(sent)
        return tensor

    def gather(self, value: _T) -> list[_T]:
        """Return everybody's small Python value, by rank: one collective up to `_SMALL` bytes, where torch's
        `all_gather_object` takes two. A second one for what is longer moves these bytes alone."""
        if self.alone:
            return [value]
        data = pickle.dumps(value)
        heads = self._gather_heads(len(data).to_bytes(8, "little") + data[:_SMALL])
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        rests = self._gather_rests(data[_SMALL:], [max(size - _SMALL, 0) for size in sizes])
        return [pickle.loads((head[8:] + rest)[:size]) for size, head, rest in zip(sizes, heads, rests, strict=True)]

    def _gather_heads(self, data: bytes) -> list[bytes]:
        """Return everybody's first bytes, by rank, each with zeros behind them."""
        mine = torch.zeros(8 + _SMALL, dtype=torch.uint8, device="cpu")
        mine[: len(data)] = _bytes(data)
        mine = mine.to(self.talks_on(mine.device))
        everybody = mine.new_empty(self.size * len(mine))
        with talking():
            dist.all_gather_into_tensor(everybody, mine, group=self.group)
        return _parts(everybody, [len(mine)] * self.size)

    def _gather_rests(self, data: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Return everybody's other bytes, by rank, of which there are so many: a sum to which each rank adds its own
        part."""
        together = torch.zeros(sum(sizes), dtype=torch.uint8, device="cpu")
        if len(together):
            together.split(list(sizes))[self.rank].copy_(_bytes(data))
            self.sum_(together)
        return _parts(together, sizes)

    def spread(self, value: _T | None, rank: int) -> _T:
        """Return one rank's Python value on every rank; the values of the others are ignored."""
        values: list[Any] = [value]
        if not self.alone:
            with talking():
                dist.broadcast_object_list(values, src=self.global_rank(rank), group=self.group)
        return values[0]

    @contextmanager
    def vote(self, what: str) -> Iterator[Ballot]:
        """Raise on every rank if the block raises on any, so that no rank waits in a later collective.

        Yields:
            a flag that the block may set; after it, it is set if it was on some rank.

        Raises:
            its own error where there is one; else `InvalidInput` with the first error of another rank.
        """
        error: Exception | None = None
        ballot = Ballot()
        try:
            yield ballot
        except Exception as raised:
            error = raised
        failed, ballot.flag = self._any([error is not None, ballot.flag])
        if failed:
            self._raise(what, error)

    def _raise(self, what: str, error: Exception | None) -> None:
        mine = None if error is None else f"{type(error).__name__}: {error}"
        errors = self.gather(mine)
        if error is not None:
            raise error
        rank, other = next((rank, other) for rank, other in enumerate(errors) if other is not None)
        raise InvalidInput(f"{what}: rank {self.global_rank(rank)} failed, nothing was changed: {other}")

    def same(self, value: Any, what: Callable[[], Sequence[str]]) -> None:
        """Raise `InvalidInput` on every rank unless all hold an equal value.

        Args:
            what: the value in words, a line each; the lines that some rank lacks are named.
        """
        if self.alone:
            return
        digests = self.gather(hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest())
        if len(set(digests)) == 1:
            return
        lines = self.gather(list(what()))
        everywhere = set.intersection(*map(set, lines))
        differing = [
            f"rank {self.global_rank(rank)}: {line}"
            for rank, own in enumerate(lines)
            for line in own
            if line not in everywhere
        ]
        shown = "\n  ".join(differing[:20]) + (f"\n  and {len(differing) - 20} more" if len(differing) > 20 else "")
        raise InvalidInput(
            f"the ranks disagree on the model or its adapters, which every rank must hold alike:\n  {shown}"
        )

    def all_gather_parts(self, buffer: Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        """Begin to fill a buffer whose consecutive parts are the ranks': each holds its own, in the end everybody
        holds all.

        Args:
            buffer: uint8 `[sum(sizes)]`, or larger.
            sizes: bytes of each part, all positive.

        Returns:
            A call that waits for it: the current stream does where the ranks speak NCCL, else the caller.
        """
        if self.alone:
            return _nothing
        parts = list(buffer[: sum(sizes)].split(list(sizes)))
        mine, gloo = parts[self.rank], buffer.device.type == "cpu"
        works: list[Any] = []
        with talking():
            if len(set(sizes)) == 1:
                whole = buffer[: sum(sizes)]
                works.append(
                    dist.all_gather_into_tensor(whole, mine.clone() if gloo else mine, group=self.group, async_op=True)
                )
            elif gloo:
                for rank, part in enumerate(parts):
                    works.append(dist.broadcast(part, self.global_rank(rank), group=self.group, async_op=True))
            else:  # NCCL makes one group of broadcasts of it
                works.append(dist.all_gather(parts, mine, group=self.group, async_op=True))

        def wait() -> None:
            with talking():
                for work in works:
                    work.wait()

        return wait

    def all_to_all(self, out: Tensor, receives: Sequence[int], source: Tensor, sends: Sequence[int]) -> None:
        """Give every rank its part of a buffer, and fill another one with what each of them gives this one.

        Args:
            out, receives: uint8, and the bytes that come from each rank, one after another.
            source, sends: uint8, and the bytes that go to each rank, one after another.
        """
        if self.alone:
            out.copy_(source)
        else:
            with talking():
                dist.all_to_all_single(out, source, list(receives), list(sends), group=self.group)


@contextmanager
def noted(errors: list[Any], kind: type[BaseException] = Exception) -> Iterator[None]:
    """Note an error and go on: the other ranks are in collectives that this rank must still take part in.

    Args:
        kind: `BaseException` notes an interrupt, too.
    """
    try:
        yield
    except kind as error:
        errors.append(error)


def uninterrupted(among_others: bool) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of a block with collectives: signals (Ctrl-C) wait for its end, as the other ranks
    are in them, too. Where there are none it does nothing, in no line of Python: each bucket of a model has one."""
    return Deferred if among_others else RLock


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]


def _parts(tensor: Tensor, sizes: Sequence[int]) -> list[bytes]:
    """Return consecutive parts of so many bytes."""
    found, ends = tensor.cpu().numpy().tobytes(), list(accumulate(sizes))
    return [found[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _nothing() -> None:
    pass


def even(sizes: Sequence[int]) -> list[int]:
    """Return sizes of the ranks' parts of a buffer: all as large as the largest where that costs little."""
    largest = max(sizes)
    return [largest] * len(sizes) if largest * len(sizes) <= PADDING * sum(sizes) else list(sizes)
