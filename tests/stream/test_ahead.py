"""One ahead: nothing is filled or freed while somebody reads it, also by consumers that stop early or raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor

from lora_merge import MergedWeights
from lora_merge.stream.double_buffer import DoubleBuffer

COUNT = 5


class Stream:
    """Orders work as CUDA does: in turn on one stream, across streams only where one waits for another."""

    current: Stream

    def __init__(self, *_: Any) -> None:
        self.before: frozenset[Any] = frozenset()
        """All that is done when what is enqueued next begins."""

    def enqueue(self, work: Any) -> frozenset[Any]:
        before, self.before = self.before, self.before | {work}
        return before

    def record_event(self) -> frozenset[Any]:
        return self.before

    def wait_event(self, event: frozenset[Any]) -> None:
        self.before |= event

    def wait_stream(self, other: Stream) -> None:
        self.before |= other.before


@contextlib.contextmanager
def on(stream: Stream) -> Iterator[None]:
    outer, Stream.current = Stream.current, stream
    try:
        yield
    finally:
        Stream.current = outer


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    Stream.current = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Stream.current)
    monkeypatch.setattr(torch.cuda, "stream", on)


def consume(ahead: DoubleBuffer, run: int, stops: int, ends: str) -> None:
    """One run, read where it is consumed; checked against everything that was enqueued in this and earlier runs."""
    enqueued: set[Any] = set(Stream.current.before)

    def fill(index: int) -> int:
        before = Stream.current.enqueue(("fill", run, index))
        others = {work for work in enqueued if work[0] != "fill" and (work[1] < run or work[2] <= index - 2)}
        assert others <= before, f"{('fill', run, index)} does not wait for {others - before}"
        enqueued.add(("fill", run, index))
        if ends == "fails" and index == stops:
            raise RuntimeError("injected")
        return index

    def free(index: int) -> None:
        assert ahead.stream is not Stream.current, "memory belongs to the stream of who reads it"

    with contextlib.suppress(RuntimeError):
        for index in ahead(free, fill, COUNT):
            before = Stream.current.enqueue(("read", run, index))
            assert ("fill", run, index) in before, f"{index} is read while it is being filled"
            enqueued.add(("read", run, index))
            if index == stops and ends == "stops":
                break
            if index == stops and ends == "raises":
                raise RuntimeError("consumer")
    assert enqueued <= Stream.current.before, f"{enqueued - Stream.current.before} may go on beside what comes next"


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("ends", ["by itself", "stops", "raises", "fails"])
@pytest.mark.parametrize("stops", [0, 2, COUNT - 1])
def test_fills_and_reads_wait_for_each_other(ends: str, stops: int) -> None:
    """Also from run to run, each consumed on another stream."""
    ahead = DoubleBuffer(torch.device("cuda"))
    consume(ahead, 0, stops, ends)
    before = {work for work in Stream.current.before if work[0] == "read"}
    with on(Stream()):
        for _ in ahead(lambda index: None, lambda index: None, 1):
            assert before <= Stream.current.before, "filled again while the run before is still read on its stream"
    consume(ahead, 1, stops, ends)


@pytest.mark.usefixtures("streams")
def test_buffers_that_are_read_on_several_streams() -> None:
    """As vLLM packs what it broadcasts: each buffer on the stream at hand, the next one begun in the middle of it."""
    ahead, turns, read = DoubleBuffer(torch.device("cuda")), [Stream(), Stream()], set[Any]()

    def fill(index: int) -> int:
        before = Stream.current.enqueue(("fill", index))
        old = {work for work in read if work[1] <= index - 2}
        assert old <= before, f"{index} is filled while {old - before} may be under way"
        return index

    with contextlib.closing(ahead.handed(lambda index: None, fill, COUNT)) as handed:
        with on(turns[0]):
            first = next(handed)
        for index, fill_next, reads in (first, *_each_on(handed, turns)):
            for part, stream in enumerate(turns):
                with on(stream):
                    reads()
                    before = stream.enqueue(("read", index, part))
                    assert ("fill", index) in before, f"{index} is read on stream {part} while it may be being filled"
                    read.add(("read", index, part))
                    if part == 0:
                        fill_next()
    assert {("read", COUNT - 1, part) for part in range(2)} <= ahead.stream.before  # type: ignore[union-attr, attr-defined]


def _each_on(handed: Iterator[Any], turns: list[Stream]) -> Iterator[Any]:
    """What follows, asked for on one stream after another."""
    for at in range(1, COUNT):
        with on(turns[at % 2]):
            yield next(handed)


@pytest.mark.gpu
def test_tensors_that_are_packed_on_two_streams_on_a_gpu() -> None:
    """`packed_nccl_broadcast_producer` of vLLM: chunks are copied on two streams in turns, each waits for itself alone.
    Copies come late, so that what does not wait for them is seen."""
    model = models.with_lora(models.qwen2, dtype=torch.bfloat16).cuda()
    wanted = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for bucket_bytes in (4096, 40_000, 1 << 20):
        source, packed, turn = (
            iter(MergedWeights(model, bucket_bytes=bucket_bytes)),
            list[tuple[list[str], Tensor]](),
            0,
        )
        while True:
            stream = streams[turn % 2]
            stream.synchronize()
            with torch.cuda.stream(stream):
                names, parts = list[str](), list[Tensor]()
                for name, tensor in source:
                    names.append(name)
                    parts.append(tensor.reshape(-1).view(torch.uint8))
                    if sum(part.numel() for part in parts) > 30_000:
                        break
                if not parts:
                    break
                torch.cuda._sleep(20_000_000)
                packed.append((names, torch.cat(parts)))
                del parts, tensor
            turn += 1
        torch.cuda.synchronize()
        for names, data in packed:
            sizes = [wanted[name].nbytes for name in names]
            for name, part in zip(names, data.split(sizes), strict=True):
                assert_same_bits(part.view(wanted[name].dtype).view(wanted[name].shape), wanted[name], name)


@pytest.mark.gpu
@pytest.mark.parametrize("ends", ["by itself", "stops", "raises"])
def test_slow_readers_on_a_gpu(ends: str) -> None:
    """Each bucket is read long after it was handed over; each pass is consumed on a stream of its own."""
    model = models.with_lora(models.qwen2, dtype=torch.bfloat16).cuda()
    wanted, weights = dict(MergedWeights(model)), MergedWeights(model, bucket_bytes=4096)
    torch.cuda.synchronize()
    read: list[tuple[str, Tensor]] = []

    def consume(stops: int) -> None:
        for number, bucket in enumerate(weights.buckets()):
            torch.cuda._sleep(20_000_000)
            read.extend((name, tensor.clone()) for name, tensor in bucket.tensors())
            if number == stops and ends == "stops":
                return
            if number == stops and ends == "raises":
                raise RuntimeError("consumer")

    for stops in range(4):
        with torch.cuda.stream(torch.cuda.Stream()), contextlib.suppress(RuntimeError):
            consume(stops)
    torch.cuda.synchronize()
    for name, got in read:
        assert_same_bits(got, wanted[name], name)
