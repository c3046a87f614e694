"""`tcp`, a worker's end: buckets over plain sockets. The trainer's end is tcp_sender.py.

A thread of the worker that leads on a host asks for a bucket whenever there is room for one, receives it, and publishes
it to the others on that host. If there are others, its two buffers are in shared memory, beside a mailbox like that of
mailbox.py, whose words carry the number of the transfer, too: the others ask the trainer for that number.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .base import WorkerEnd
from .liveness import TransferAborted, alive, error_text, wait_until
from .mailbox import ABORTED, DONE, FILLED, LEFT, PID, WORDS, WORKERS
from .memory import SharedMemory, bytes_of, host_buffers, shared_path
from .tcp_link import Frame, Kind, TcpLink, reach

_GAVE_UP = "the trainer gave up in the middle of a push"
_PAGE = 4096
"""Bytes: the buffers in shared memory begin at a page behind the mailbox."""


class TcpReceiver(WorkerEnd):
    """A worker's end.

    Raises:
        TransferAborted: the trainer cannot be reached, or has given up.
        InvalidInput: there is not enough shared memory.
    """

    once = True

    def __init__(self, channel: Mapping[str, Any], device: torch.device) -> None:
        super().__init__(channel, device)
        self._leads, self._members, self._why = channel["at"] == 0, channel["members"], ""
        self._mine = WORKERS + WORDS * channel["at"]
        self._file: SharedMemory | None = None
        self._link: TcpLink | None = None
        self._box: Any = None  # int64
        self._buffers: list[Tensor] = []
        self._bucket: Tensor | None = None
        self._unpin: Callable[[], object] | None = None
        self._thread: threading.Thread | None = None
        try:
            if self._leads:
                self._prepare(channel["shared"])  # before the trainer tells the others that it exists
            r, w = channel["place"]
            secret = bytes.fromhex(channel["secret"])
            self._link = link = reach(channel["address"], channel["port"], secret, (r, w))
            _answer(link, Kind.READY)
            if not self._leads:
                self._prepare(channel["shared"])
            box: Any = self._box
            box[self._mine + PID] = os.getpid()
            if self._file is not None and box[WORKERS + PID :: WORDS].all():
                self._file.hide()  # all have mapped it
            if device.type != "cpu":
                self._bucket = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        except BaseException:
            self.close()
            raise

    def _prepare(self, name: str) -> None:
        """Make the mailbox and the buffers, or map the leader's."""
        words, cuda = WORKERS + WORDS * self._members, self._device.type == "cuda"
        begin = -(-8 * words // _PAGE) * _PAGE
        if self._members == 1:
            self._box = torch.zeros(words, dtype=torch.int64, device="cpu").numpy()
            self._buffers = host_buffers(self._nbytes, pinned=cuda)
            return
        path = shared_path(name)
        self._file = SharedMemory(name if self._leads else path, begin + 2 * self._nbytes, create=self._leads)
        self._box = self._file.tensor[: 8 * words].view(torch.int64).numpy()
        data = self._file.tensor[begin:]
        if cuda:
            self._unpin = weakref.finalize(self, _pin(data))
        self._buffers = list(data.split(self._nbytes))

    def take(self, sizes: Mapping[int, int], apart: Container[int]) -> Iterator[Tensor]:
        link, box, due = self._link, self._box, list(sizes.values())
        if link is None:
            raise TransferAborted("this channel is closed; push again")
        try:
            link.send(Frame(Kind.WHICH))
            number = _answer(link, Kind.NOW).transfer
        except Exception as error:
            if self._leads:
                self._tell(error)
            raise
        if self._leads:
            self._thread = threading.Thread(target=self._receive, args=(link, number, due), daemon=True)
            self._thread.start()
        for index, size in enumerate(due):
            mark = _mark(number, index + 1)
            wait_until(lambda: box[FILLED] >= mark or box[ABORTED], self._check_leader)  # noqa: B023, called at once
            if box[FILLED] < mark:
                raise TransferAborted(self._why or _ABORTED[int(box[ABORTED])])
            data = self._buffers[index % 2]
            if self._bucket is None:
                yield data
            else:
                self._bucket[:size].copy_(data[:size], non_blocking=True)
                torch.cuda.current_stream(self._device).synchronize()
                box[self._mine + DONE] = mark
                yield self._bucket
            box[self._mine + DONE] = mark
        if self._thread is not None:
            self._thread.join()

    def leave(self) -> None:
        super().leave()
        if self._box is not None and self._leads:
            self._give_up(_FAILED)
        elif self._box is not None:
            self._box[self._mine + LEFT] = 1
        if self._link is not None:
            self._link.close()

    def close(self) -> None:
        """Free everything, without waiting for a bucket that is on its way."""
        self.leave()
        if self._thread is not None:
            self._thread.join()
        if self._unpin is not None:
            self._unpin()
        if self._file is not None:
            self._file.hide()
        self._box, self._buffers, self._bucket, self._file, self._link = None, [], None, None, None

    def _check_leader(self) -> None:
        """Raise `TransferAborted` if the worker that takes buckets for this host has died."""
        if not alive(int(self._box[WORKERS + PID])):
            raise TransferAborted(_ABORTED[_FAILED])

    # The leader's thread

    def _receive(self, link: TcpLink, number: int, sizes: Sequence[int]) -> None:
        """Ask for buckets when there is room, and publish them."""
        box, before = self._box, int(self._box[FILLED])
        try:
            for index, size in enumerate(sizes):
                self._wait_for_room(before if index < 2 else _mark(number, index - 1))
                frame = Frame(Kind.TAKE, number, index)
                link.send(frame)
                bucket = Frame(Kind.BUCKET, number, index, size)
                if _answer(link, Kind.BUCKET) != bucket:
                    raise TransferAborted("the trainer sends another bucket than the one that is due")
                link.receive_bucket(bucket, bytes_of(self._buffers[index % 2])[:size])
                box[FILLED] = _mark(number, index + 1)
        except BaseException as error:
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        """Tell the others on this host why no more comes, before `leave` reports that this worker failed."""
        self._why = str(error) if isinstance(error, TransferAborted) else error_text(error)
        self._give_up(_TRAINER if self._why == _GAVE_UP else _BROKE)

    def _wait_for_room(self, mark: int) -> None:
        """Wait until every worker on this host is done with the buffer of the next bucket."""
        box, ours = self._box, [WORKERS + WORDS * at for at in range(self._members)]

        def free() -> bool:
            return bool(box[ABORTED]) or all(box[at + DONE] >= mark or box[at + LEFT] for at in ours)

        def note_dead() -> None:
            for at in ours:
                if box[at + PID] and not alive(int(box[at + PID])):
                    box[at + LEFT] = 1

        wait_until(free, note_dead)
        if box[ABORTED]:
            raise TransferAborted(_ABORTED[int(box[ABORTED])])

    def _give_up(self, code: int) -> None:
        self._box[ABORTED] = self._box[ABORTED] or code


_TRAINER, _BROKE, _FAILED = 1, 2, 3
_ABORTED = {
    _TRAINER: _GAVE_UP,
    _BROKE: "the connection to the trainer broke in the middle of a push",
    _FAILED: "the worker that takes the buckets for this host failed, or died, in the middle of a push",
}
"""Why no more comes, by the word that the leader writes for the others."""


def _answer(link: TcpLink, wanted: Kind) -> Frame:
    """Return the trainer's answer; raise `TransferAborted` if it gives up, or answers something else than `wanted`."""
    answer = link.receive()
    if answer.kind == Kind.ABORT:
        raise TransferAborted(_GAVE_UP)
    if answer.kind != wanted:
        raise TransferAborted(f"the trainer says {answer.kind.name} instead of {wanted.name}")
    return answer


def _mark(number: int, count: int) -> int:
    """Return a count of buckets as a word of the mailbox: larger than any of the transfers before."""
    return number << 32 | count


def _pin(data: Tensor) -> Callable[[], object]:
    """Pin shared memory; return a function that undoes it."""
    runtime, address = torch.cuda.cudart(), data.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, data.numel(), 0))
    return partial(runtime.cudaHostUnregister, address)
