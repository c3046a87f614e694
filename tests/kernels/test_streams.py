"""Plans on several streams: what is a plan's own on the device is waited for, and kept until it has run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from backends import GPU
from helpers import assert_same_bits, make_segment

from lora_merge import InvalidInput, Plan
from lora_merge.kernels.streams import Streams

BF16 = torch.bfloat16


class Driver:
    """A device's streams, as torch shows them; what is asked of them is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[tuple[str, str, str]] = []
        self.capturing = False
        self.now = self.stream("build")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.now)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "device", lambda index: self)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: self.now.cuda_stream, raising=False)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, cuda_stream=id(name), wait_stream=lambda other: self.said.append(("wait", name, other.name))
        )

    def tensor(self, name: str, numel: int = 4) -> SimpleNamespace:
        def record(stream: SimpleNamespace) -> None:
            self.said.append(("keep", name, stream.name))

        return SimpleNamespace(device=torch.device("cuda", 0), numel=lambda: numel, record_stream=record)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_a_run_waits_for_the_last_one(driver: Driver) -> None:
    streams = Streams(torch.device("cuda", 0), [driver.tensor("table"), driver.tensor("counter"), torch.zeros(3)])
    streams.join()
    assert driver.said == []
    driver.now = driver.stream("other")
    streams.join()
    streams.join()
    assert driver.said == [("wait", "other", "build"), ("keep", "table", "other"), ("keep", "counter", "other")]
    driver.said.clear()
    driver.now = driver.stream("third")
    streams.join()
    assert driver.said[0] == ("wait", "third", "other")


def test_arguments_need_no_order(driver: Driver) -> None:
    """A small table is an argument of the launch: nothing is the plan's own."""
    streams = Streams(torch.device("cuda", 0), [torch.zeros(3), driver.tensor("none", numel=0)])
    driver.now = driver.stream("other")
    streams.join()
    assert driver.said == []


def test_captured_runs_wait_for_nothing(driver: Driver) -> None:
    """Waiting for a stream outside of the capture would end it; and what is captured has not run."""
    streams = Streams(torch.device("cuda", 0), [driver.tensor("table")])
    driver.now, driver.capturing = driver.stream("capture"), True
    streams.join()
    assert driver.said == []
    driver.now, driver.capturing = driver.stream("other"), False
    streams.join()
    assert driver.said[0] == ("wait", "other", "build")


def test_a_plan_of_a_graph_runs_there_alone(driver: Driver) -> None:
    """Its counter is set by the graph, not before."""
    driver.capturing, driver.now = True, driver.stream("capture")
    streams = Streams(torch.device("cuda", 0), [driver.tensor("counter")])
    streams.join()
    driver.capturing, driver.now = False, driver.stream("other")
    with pytest.raises(InvalidInput, match="built while a CUDA graph was captured"):
        streams.join()


# ---- on a GPU --------------------------------------------------------------------------------------------------------

BACKENDS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "triton")]


def plan_of_many(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Plan, list[torch.Tensor]]:
    """A table on the device, units by a counter, and the results wanted."""
    monkeypatch.setenv("LORA_MERGE_BACKEND", name)
    segments = [make_segment(f"w{i}", 900 + i, 1032, 16, (BF16,) * 4, torch.device("cuda", 0)) for i in range(40)]
    plan = Plan(segments)
    plan.run()
    torch.cuda.synchronize()
    wanted = [s.destination.clone() for s in segments]
    for s in segments:
        s.destination.zero_()
    torch.cuda.synchronize()
    return plan, wanted


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", BACKENDS)
def test_two_streams_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs would share the counter of units, and each leave some out."""
    plan, wanted = plan_of_many(name, monkeypatch)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for _ in range(50):
        for s in plan.segments:
            s.destination.zero_()
        torch.cuda.synchronize()
        for stream in streams:
            with torch.cuda.stream(stream):
                plan.run()
        torch.cuda.synchronize()
        for s, result in zip(plan.segments, wanted, strict=True):
            assert_same_bits(s.destination, result)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", BACKENDS)
def test_freed_while_it_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was the plan's is not handed out again before it has run on the other stream."""
    plan, wanted = plan_of_many(name, monkeypatch)
    segments, stream = plan.segments, torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        plan.run()
    del plan
    rubbish = [torch.full((n,), -1, dtype=torch.int64, device="cuda") for n in (1, 64, 960, 4096) for _ in range(200)]
    torch.cuda.synchronize()
    assert len(rubbish) == 800
    for s, result in zip(segments, wanted, strict=True):
        assert_same_bits(s.destination, result)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", BACKENDS)
def test_built_on_a_busy_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter is set on the stream that the plan is built on; another one waits for that."""
    segments, wanted = (lambda p: (p[0].segments, p[1]))(plan_of_many(name, monkeypatch))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        plan = Plan(segments)
    plan.run()
    torch.cuda.synchronize()
    for s, result in zip(segments, wanted, strict=True):
        assert_same_bits(s.destination, result)


@pytest.mark.skipif(not GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", BACKENDS)
def test_eager_runs_beside_a_graph_of_the_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured on a side stream, run on others in between: each in its order."""
    plan, wanted = plan_of_many(name, monkeypatch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run()
    for stream in (torch.cuda.Stream(), torch.cuda.current_stream()):
        for replay in (False, True):
            for s in plan.segments:
                s.destination.zero_()
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                if replay:
                    graph.replay()
                else:
                    plan.run()
            torch.cuda.synchronize()
            for s, result in zip(plan.segments, wanted, strict=True):
                assert_same_bits(s.destination, result)
