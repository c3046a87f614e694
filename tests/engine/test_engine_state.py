"""What a worker remembers of its model between calls, and that nothing stale is used when it was changed."""

from __future__ import annotations

import asyncio
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_merge.engine.control.base import Control
from lora_merge.engine.fingerprint import Sampler, facts
from lora_merge.engine.lease import SILENT_S, lease_of, under_way
from lora_merge.engine.push import heartbeat
from lora_merge.engine.push.sequence import EngineSequence
from lora_merge.engine.transport.liveness import born, host_id
from lora_merge.engine.vllm.core import install, lora_merge_calls
from lora_merge.engine.vllm.names import CALLS
from lora_merge.engine.worker.lease import Lease, LeaseLost, Stepped
from lora_merge.engine.worker.modules import Modules
from tests.models.test_steady import python_calls


class Method:
    """How a layer computes; what is known of a model may be what this says."""


def model() -> nn.Module:
    """Two blocks with a buffer, a tied weight, a module under two names, and a place for a module."""

    def block() -> nn.Module:
        made = nn.Module()
        made.lin, made.norm, made.empty = nn.Linear(8, 8), nn.BatchNorm1d(8), None
        made.register_buffer("scale", torch.ones(3))
        made.register_buffer("scratch", torch.ones(3), persistent=False)
        return made

    top = nn.Module()
    top.layers = nn.ModuleList([block(), block()])
    top.head = nn.Linear(8, 8)
    top.head.weight = top.layers[0].lin.weight
    top.again = top.layers[1]
    top.head.quant_method = Method()
    return top


def known(found: nn.Module) -> list[Tensor]:
    persistent = {id(t) for t in found.state_dict(keep_vars=True).values()}
    tensors = [*found.parameters(), *found.buffers()]
    return [t for t in tensors if id(t) in persistent and t.numel()]


def renamed(top: nn.Module) -> None:
    top._modules["other"] = top._modules.pop("again")


def moved(top: nn.Module) -> None:
    """The same modules and names in the same order, one level down."""
    top.layers[1]._modules["head"] = top._modules.pop("head")
    top._modules["again"] = top._modules.pop("again")


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "another module": lambda top: setattr(top, "head", nn.Linear(8, 8)),
    "a module more": lambda top: setattr(top.layers[0], "empty", nn.Linear(8, 8)),
    "a module less": lambda top: delattr(top, "head"),
    "the last layer gone": lambda top: top.layers.__delitem__(1),
    "a wrapper": lambda top: setattr(top, "head", nn.Sequential(top.head)),
    "renamed": renamed,
    "moved": moved,
    "two swapped": lambda top: top.layers._modules.update({"0": top.layers[1], "1": top.layers[0]}),
    "another method": lambda top: setattr(top.head, "quant_method", Method()),
    "a method less": lambda top: delattr(top.head, "quant_method"),
    "a scheme": lambda top: setattr(top.layers[0].lin, "scheme", Method()),
    "nothing": lambda top: None,
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_modules_that_changed_between_calls_are_found_again(change: str, watched: bool) -> None:
    top = model()
    modules, looked = Modules(top), []

    def count(found: Modules) -> int:
        looked.append(1)
        return len(list(found))

    for step in range(2):
        modules.doubt()
        assert modules.paths() == list(top.named_modules(remove_duplicate=False))
        assert list(modules) == list(top.modules())
        assert [id(t) for t in modules.tensors()] == [id(t) for t in known(top)]
        assert modules.kept(count) == modules.kept(count) == len(list(top.modules()))
        if not step:
            for _ in range(2 * watched):
                modules.doubt()
                modules.tensors()
            assert (modules._watched() is not None) == watched
            CHANGES[change](top)
    assert len(looked) == (1 if change == "nothing" else 2)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("put_back", [True, False])
def test_what_was_known_counts_again_after_modules_were_others(put_back: bool, watched: bool) -> None:
    """As of an engine whose LoRA wrappers are taken out for a load; if something stays another, it is found."""
    top = model()
    modules, looked = Modules(top), []

    def count(found: Modules) -> int:
        looked.append(1)
        return len(list(found))

    for _ in range(1 + 2 * watched):
        modules.doubt()
        modules.tensors()
    before, head = modules.kept(count), top.head
    with modules.others():
        top.head = nn.Sequential(head)
        assert modules.kept(count) == before + 1
        assert list(modules) == list(top.modules())
        if put_back:
            top.head = head
    assert modules.kept(count) == len(list(top.modules()))
    assert len(looked) == (2 if put_back else 3)
    assert list(modules) == list(top.modules())
    assert [id(t) for t in modules.tensors()] == [id(t) for t in known(top)]


def replaced(t: nn.Parameter) -> None:
    t.data = t.data.clone()


def transposed(t: nn.Parameter) -> None:
    t.data = t.data.t().contiguous().t()


@pytest.mark.parametrize("alike", [False, True], ids=["other values", "the same values"])
@pytest.mark.parametrize("change", [replaced, transposed])
def test_a_sample_is_of_the_tensors_as_they_are_now(change: Callable[[nn.Parameter], None], alike: bool) -> None:
    """Where memory was replaced, the old one is not read."""
    top, sampler = model(), Sampler()
    modules = Modules(top)
    before = sampler(modules.tensors())
    assert sampler(modules.tensors()) == before
    change(top.head.weight)
    if not alike:
        with torch.no_grad():
            top.head.weight.add_(1)
    assert (sampler(modules.tensors()) == before) == alike or change is transposed
    assert sampler(modules.tensors()) == Sampler()(modules.tensors())


def test_a_sample_tells_shapes_and_dtypes() -> None:
    tensors = [torch.zeros(4, 8), torch.zeros(8, 4), torch.zeros(32), torch.zeros(4, 8, dtype=torch.int32)]
    assert len({Sampler()([t]) for t in tensors}) == len(tensors)
    sampler = Sampler()
    assert [sampler([t]) for t in tensors] == [Sampler()([t]) for t in tensors]
    unbuilt = torch.empty(3, device="meta")  # of a part that an engine was started without
    assert sampler([tensors[0], unbuilt]) == sampler([tensors[0]])


class Seeing(nn.Parameter):
    """As vLLM's parameters: Python sees every call."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_look_takes_no_python_for_each_module_and_tensor() -> None:
    """It stands in the way of every push, several times, between its last byte and its end as well."""
    calls = []
    for depth in (2, 40):
        top = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
        for module in top:
            module.weight = Seeing(module.weight.detach())
        modules, sampler = Modules(top), Sampler()

        def look(modules: Modules = modules, sampler: Sampler = sampler) -> str:
            modules.doubt()
            return sampler(modules.tensors())

        look()
        calls.append(python_calls(look))
    assert calls[0] == calls[1]


def test_an_engine_is_in_the_middle_of_one_push_at_a_time() -> None:
    claim, here = Lease(), (host_id(), os.getpid())
    assert not claim.take("first", *here)
    assert str(os.getpid()) in claim.take("second", *here)
    with pytest.raises(RuntimeError, match="another trainer holds it"):
        claim.check("second")
    assert not claim.end("second"), "whoever was refused ends nothing"
    claim.check("first")
    assert not claim.take("first", *here, "its next push"), "its own, which did not end"
    claim.check("first", "its next push")
    with pytest.raises(RuntimeError, match="left behind by a push that was broken off"):
        claim.check("first", "the one before")
    assert not claim.end("first", "the one before"), "what was left behind ends nothing"
    claim.check("first", "its next push")
    assert claim.end("first")
    assert not claim.take("second", *here)
    with pytest.raises(RuntimeError, match="not in the middle of this trainer's push"):
        claim.check("first")


def test_nobody_waits_for_a_trainer_that_died_in_a_push(monkeypatch: pytest.MonkeyPatch) -> None:
    claim, gone = Lease(), subprocess.Popen(["true"])
    # Ended, but not waited for: nobody else is given its process id.
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    assert not claim.take("dead", host_id(), gone.pid)
    assert not claim.take("elsewhere", "another host", 1)
    assert claim.take("second", host_id(), os.getpid()), "nobody can look it up from here"
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 0.9 * SILENT_S)
    claim.check("elsewhere")
    monkeypatch.setattr(time, "monotonic", lambda: now + 1.8 * SILENT_S)
    assert claim.take("second", host_id(), os.getpid()), "it was heard of since"
    monkeypatch.setattr(time, "monotonic", lambda: now + 2 * SILENT_S)
    assert not claim.take("second", host_id(), os.getpid())
    gone.wait()


def test_a_push_of_this_process_that_is_over_holds_no_engine() -> None:
    """Its end was never heard: the object that made it may be gone, and nobody else would ever push again."""
    claim = Lease()
    with under_way("first"):
        assert not claim.take(**lease_of("first", "a push"))
        with under_way("second"):
            assert claim.take(**lease_of("second", "another"))
    with under_way("second"):
        said = lease_of("second", "another")
        with under_way("first"):
            assert not claim.take(**lease_of("first", "its next"))
            assert claim.take(**said), "it was written before the first began, and comes after"
        assert not claim.take(**lease_of("second", "another"))
    with pytest.raises(LeaseLost):
        claim.check("first", "a push")


def test_a_process_that_was_given_the_number_of_a_dead_one_is_another_one() -> None:
    claim = Lease()
    assert born(os.getpid()) > 0
    assert not claim.take("dead", host_id(), os.getpid(), born=born(os.getpid()) - 1, living=["dead"])
    with under_way("second"):
        assert not claim.take(**lease_of("second", "a push"))
    assert born(1 << 22) == 0, "no process has this number"


def test_parent_and_forked_child_are_two_trainers() -> None:
    from lora_merge.engine.push.channels import Trainer
    from lora_merge.shards.ranks import Ranks

    claim, trainer, (reads, writes) = Lease(), Trainer([], Ranks()), os.pipe()
    with under_way(trainer.name):
        assert not claim.take(**lease_of(trainer.name, "the parent's"))
        if not (child := os.fork()):
            with under_way(trainer.name):
                os.write(writes, json.dumps(lease_of(trainer.name, "the child's")).encode())
                time.sleep(60)
            os._exit(0)
        theirs = json.loads(os.read(reads, 1 << 16))
        assert claim.take(**theirs), "the parent lives, and is in a push"
        claim.check(trainer.name, "the parent's")
        assert not claim.end(theirs["owner"])
        assert claim.end(trainer.name)
        assert not claim.take(**theirs)
        assert claim.take(**lease_of(trainer.name, "the parent's next")), "the child lives"
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert not claim.take(**lease_of(trainer.name, "the parent's next"))


class Far(Control):
    """An engine whose workers are on another host."""

    def __init__(self, suspends: bool) -> None:
        super().__init__(object())
        self.far, self._suspends, self.heard = True, suspends, queue.SimpleQueue[str]()

    @property
    def suspends(self) -> bool:
        return self._suspends

    async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
        self.heard.put(op)
        raise OSError("no answer")


def test_engines_elsewhere_hear_that_a_trainer_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread, or in the event loop; a call that fails is not the last, and nothing comes behind the end."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    steps, threads = EngineSequence("mine", "keep"), threading.active_count()
    called, awaited, near = Far(False), Far(True), Far(True)
    near.far = False

    async def work() -> None:
        beats = heartbeat.Heartbeat(steps.beat)
        for _ in range(2):
            beats.begin([called, awaited, near])
        for far in (called, awaited):
            for _ in range(3):
                assert await asyncio.to_thread(far.heard.get, timeout=10) == "renew_lease"
        await beats.end()
        for far in (called, awaited):
            while not far.heard.empty():
                far.heard.get()
        await asyncio.sleep(0.05)
        assert all(far.heard.empty() for far in (called, awaited, near))

    asyncio.run(work())
    assert threading.active_count() <= threads


def test_an_engine_that_hangs_keeps_no_sign_of_life_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another trainer could take their lease in the middle of a push."""
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.01)
    over = threading.Event()

    class Hung(Far):
        async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
            self.heard.put(op)
            over.wait(10)
            return []

    hung, other = Hung(False), Far(False)
    beats = heartbeat.Heartbeat(EngineSequence("mine", "keep").beat)
    beats.begin([hung, other])
    assert hung.heard.get(timeout=10) == "renew_lease"
    for _ in range(3):
        assert other.heard.get(timeout=5) == "renew_lease"
    over.set()
    asyncio.run(beats.end())


def test_an_engine_stands_still_from_the_first_call_behind_the_pause() -> None:
    claim = Lease()
    claim.take("mine", host_id(), os.getpid(), "a push")
    for _ in range(2):
        claim.check_still(7)
    with pytest.raises(Stepped, match="somebody has resumed it"):
        claim.check_still(8)
    claim.take("mine", host_id(), os.getpid(), "the next")
    claim.check_still(8)


class Core:
    """As vLLM's engine core: some calls end later."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.later: Future[Any] = Future()

    def say(self, what: Any) -> Any:
        self.made.append(str(what))
        return what

    def fail(self) -> None:
        raise ValueError("no")

    def wait(self) -> Future[Any]:
        return self.later


def say(what: Any, *wanted: Any, unless: int | None = None) -> list[Any]:
    return ["say", [what], wanted, unless]


SAY, FAIL, ANSWERS = say("on"), ["fail", [], [], None], say(['{"rank": 0}'])
ERRORS = say(['{"rank": 0}', '{"rank": 1, "error": "x"}'])


@pytest.mark.parametrize(
    ("calls", "returned", "failed"),
    [
        ([SAY, ANSWERS, SAY], ["on", ['{"rank": 0}'], "on"], ""),
        ([say(False, False), SAY], [False, "on"], ""),
        ([say(True, False), SAY], [True], ""),
        ([say(False), say("a", unless=0), say("b", unless=1)], [False, "a", None], ""),
        ([say(True), say("a", unless=0), SAY], [True, None, "on"], ""),
        ([say(True), say("a", "b", unless=0), SAY], [True, None, "on"], ""),
        ([["say?", ["on"], [], None], ["lacks?", [1], [], None], SAY], ["on", None, "on"], ""),
        ([ERRORS, SAY], [['{"rank": 0}', '{"rank": 1, "error": "x"}']], ""),
        ([SAY, FAIL, SAY], ["on"], "fail: no"),
        ([SAY, ["unknown", [], [], None], SAY], ["on"], "unknown: 'Core' object has no attribute 'unknown'"),
    ],
)  # fmt: skip
def test_calls_in_one_message_end_with_the_first_one_that_fails(calls: Any, returned: Any, failed: str) -> None:
    core = Core()
    found = lora_merge_calls(core, calls)
    assert isinstance(found, str)
    assert json.loads(found) == {"returned": returned, "failed": failed}
    assert core.made == [str(one) for one in returned if one is not None]


def test_calls_that_come_again_are_not_made_again() -> None:
    """As a proxy repeats a POST, also while they are under way: their resume would fall into another push."""
    core = Core()
    assert [lora_merge_calls(core, [SAY], "a") for _ in range(2)] == 2 * ['{"returned": ["on"], "failed": ""}']
    late = [lora_merge_calls(core, [["wait", [], [], None], SAY], "b") for _ in range(2)]
    core.later.set_result("late")
    late.append(lora_merge_calls(core, [], "b"))
    assert [one.result() if isinstance(one, Future) else one for one in late] == (
        3 * ['{"returned": ["late", "on"], "failed": ""}']
    )
    assert core.made == ["on", "on"]


def test_calls_of_workers_reach_the_core() -> None:
    class Installed(Core):
        def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
            return [method, timeout, args, kwargs]

    install(Installed)
    core, calls = Installed(), [["wait", [], [], None], SAY]
    late = core.collective_rpc(CALLS, None, (calls, "a"))
    assert isinstance(late, Future)
    assert not late.done()
    core.later.set_result("late")
    found = ['{"returned": ["late", "on"], "failed": ""}']
    assert late.result() == found
    assert core.collective_rpc(CALLS, args=(calls, "a"), kwargs={}) == found
    assert core.collective_rpc("lora_merge", 1.0, ("{}",)) == ["lora_merge", 1.0, ("{}",), None]
    assert core.collective_rpc(len) == [len, None, (), None]
    with pytest.raises(AttributeError, match="lora_merge_of_another_release"):
        core.collective_rpc("lora_merge_of_another_release")


def test_an_engine_is_woken_after_calls_that_came_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends a pause where it is about to wait for a message: requests that a resume there let go on stood still."""
    engine = SimpleNamespace(EngineCoreRequestType=SimpleNamespace(WAKEUP="wake up"))
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", engine)
    for calls, late in (([SAY], False), ([["wait", [], [], None], SAY], True)):
        core = Core()
        core.input_queue = queue.SimpleQueue()  # type: ignore[attr-defined]
        lora_merge_calls(core, calls)
        assert core.input_queue.empty()  # type: ignore[attr-defined]
        core.later.set_result(None)
        assert core.input_queue.empty() != late  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [None, ValueError("gone")])
def test_calls_go_on_when_one_has_ended_that_takes_its_time(error: Exception | None) -> None:
    core = Core()
    found = lora_merge_calls(core, [SAY, ["wait", [], [], None], say("not", unless=0), SAY, FAIL])
    assert isinstance(found, Future)
    assert not found.done()
    assert core.made == ["on"]
    if error is None:
        core.later.set_result(None)
        assert json.loads(found.result()) == {"returned": ["on", None, None, "on"], "failed": "fail: no"}
    else:
        core.later.set_exception(error)
        assert json.loads(found.result()) == {"returned": ["on"], "failed": "wait: gone"}


LATER: dict[str, Callable[[nn.Module], object]] = {
    **CHANGES,
    "other memory": lambda top: replaced(top.head.weight),
    "another layout": lambda top: transposed(top.head.weight),
    "another parameter": lambda top: setattr(top.head, "weight", nn.Parameter(torch.ones(8, 8))),
    "a buffer more": lambda top: top.head.register_buffer("more", torch.ones(3)),
}


@pytest.mark.parametrize("change", LATER)
def test_tensors_that_are_watched_are_found_again_when_they_change(change: str) -> None:
    top = model()
    modules = Modules(top)
    for _ in range(3):
        modules.doubt()
        before = modules.look()
    assert before.facts is modules.look().facts
    LATER[change](top)
    modules.doubt()
    found = modules.look()
    assert list(map(id, found.tensors)) == list(map(id, Modules(top).tensors()))
    assert found.facts == facts(found.tensors)
    assert (found.facts is before.facts) == (change == "nothing")
