"""Versions of an adapter, as far as no engine is needed: their names, and the door in front of a scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from workers import worker

from lora_merge import PushRefused
from lora_merge.engine.adapter_versions import CONSTANT_PATH, name_of, path_of, version_of
from lora_merge.engine.control.base import Call, Control, NotOurs, Unheard
from lora_merge.engine.control.calls import drive
from lora_merge.engine.control.http import Answered, NoRoute
from lora_merge.engine.push.channels import Trainer
from lora_merge.engine.push.planner import Planner
from lora_merge.engine.push.replica import Replica
from lora_merge.engine.push.versions import VersionPusher
from lora_merge.engine.state import State, change
from lora_merge.engine.tenants import PATHS, tenant_id
from lora_merge.engine.vllm import kept_requests
from lora_merge.engine.vllm.control import LlmControl, _allowing
from lora_merge.engine.vllm.core import install
from lora_merge.engine.vllm.kept_requests import guard, guard_in_front, lora_merge_adapters, put_door
from lora_merge.engine.vllm.url import HttpControl
from lora_merge.shards.ranks import Ranks

FIRST, SECOND = (State("adapter", number, "base", trainer="t") for number in (1, 2))


def lora(path: str, name: str = "") -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path, lora_int_id=7)


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        (SimpleNamespace(lora_request=lora("", name_of(17))), 17),
        (SimpleNamespace(lora_request=lora("", "somebody's")), None),
        (SimpleNamespace(lora_request=None), None),
        (SimpleNamespace(model=name_of(3)), 3),
        ({"model": name_of(3), "choices": []}, 3),
        ({"model": "Qwen/Qwen2.5-7B"}, None),
        ({}, None),
        (name_of(5), 5),
        ("lora_merge@5b", None),
        (None, None),
    ],
)
def test_answers_say_their_version(answer: Any, version: int | None) -> None:
    assert version_of(answer) == version


def test_a_version_is_the_newest_of_its_base_and_is_taken_back() -> None:
    assert change(FIRST, "switch", brought=SECOND) == SECOND
    assert change(SECOND, "switch", brought=FIRST) == FIRST
    for kind in ("merged", "dirty", "nothing"):
        with pytest.raises(RuntimeError, match="'switch' cannot happen"):
            change(State(kind), "switch", brought=SECOND)


class Core:
    """Of vLLM's engine core: what the door uses."""

    def __init__(self) -> None:
        self.scheduler = SimpleNamespace(requests={})
        self.refused: list[Any] = []
        self.called: list[Any] = []
        self.step_fn = lambda: ({}, False)

    def add_request(self, request: Any, request_wave: int = 0) -> None:
        self.scheduler.requests[request.request_id] = request

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        self.called.append((method, timeout, args, kwargs))
        return ["workers"]

    def _send_error_outputs_to_client(self, names: list[str], client: int) -> None:
        self.refused.append((names, client))


class Processor:
    """Of vLLM's input processor: what the door uses."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def _validate_lora(self, lora: Any) -> None:
        self.seen.append(lora)


def request(name: str, path: str | None) -> Any:
    return SimpleNamespace(request_id=name, client_index=4, lora_request=None if path is None else lora(path))


def test_the_door_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    class Guarded(Core):
        pass

    for add in (guard, install):
        add(Guarded)
        once = Guarded.add_request, Guarded.collective_rpc
        add(Guarded)
        assert (Guarded.add_request, Guarded.collective_rpc) == once
    core = Guarded()
    core.add_request(request("of an engine that was started anew", CONSTANT_PATH))
    assert core.refused.pop() == (["of an engine that was started anew"], 4)
    core.collective_rpc("lora_merge_adapters", None, (_allowing([CONSTANT_PATH], False),))
    core.add_request(request("before any version", CONSTANT_PATH))
    message = _allowing([path_of(FIRST)], False)
    assert core.collective_rpc("lora_merge_adapters", None, (message,)) == ['{"in_use": ["/lora_merge/in-memory"]}']
    paths = {"kept": path_of(FIRST), "gone": path_of(SECOND), "constant": CONSTANT_PATH, "theirs": "/a/b", "base": None}
    for name, path in paths.items():
        core.add_request(request(name, path), 0)
    assert core.refused == [(["gone"], 4), (["constant"], 4)]
    assert list(core.scheduler.requests) == ["before any version", "kept", "theirs", "base"]
    assert core.collective_rpc("lora_merge", args=("{}",)) == ["workers"]
    assert core.called == [("lora_merge", None, ("{}",), None)]
    ended: list[str] = []
    core.scheduler.finish_requests = lambda names, status: ended.extend(names) or []
    words = SimpleNamespace(RequestStatus=SimpleNamespace(FINISHED_ABORTED="aborted"))
    monkeypatch.setattr(kept_requests, "internals", words)  # of vLLM
    found = lora_merge_adapters(core, _allowing([path_of(SECOND)], True))
    assert json.loads(found) == {"in_use": []}
    assert ended == ["before any version", "kept"]


def test_tenants_that_are_served_no_longer_do_not_come_in() -> None:
    class Guarded(Core):
        pass

    guard(Guarded)
    install(Guarded)
    core = Guarded()

    def ask(name: str, tenant: str) -> None:
        one = request(name, f"{PATHS}{tenant}")
        one.lora_request.lora_int_id = tenant_id(tenant)
        core.add_request(one)

    ask("of an engine that was started anew", "a")
    assert core.collective_rpc("lora_merge_tenants", None, (False, [], [tenant_id("a")])) == [None]
    ask("served", "a")
    ask("another", "b")
    core.collective_rpc("lora_merge_adapters", None, (_allowing([path_of(FIRST)], False),))
    core.add_request(request("a version", path_of(FIRST)))
    core.collective_rpc("lora_merge_tenants", args=(False, [], []))
    ask("gone", "a")
    assert [name for [name], _ in core.refused] == ["of an engine that was started anew", "another", "gone"]
    assert list(core.scheduler.requests) == ["served", "a version"]
    engine: Any = SimpleNamespace(input_processor=Processor())
    asked = SimpleNamespace(lora_name="lora_merge/a", lora_int_id=tenant_id("a"), lora_path=f"{PATHS}a")
    put_door(engine, tenants=[tenant_id("a")])
    engine.input_processor._validate_lora(asked)
    engine.input_processor._validate_lora(lora(CONSTANT_PATH))
    put_door(engine, allowed=[])
    engine.input_processor._validate_lora(asked)
    put_door(engine, tenants=[])
    with pytest.raises(ValueError, match=r"lora_merge/a is no tenant of this engine \(any more\)"):
        engine.input_processor._validate_lora(asked)
    assert len(engine.input_processor.seen) == 3


def test_the_door_stays_as_it_is_where_a_push_breaks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers with what it held, to requests for what it held."""
    engine: Any = SimpleNamespace(input_processor=Processor(), engine_core=SimpleNamespace(call_utility=None))
    control = LlmControl(engine)
    control.workers = [1]
    put_door(engine, allowed=[path_of(FIRST)], tenants=[tenant_id("a")])
    door: Any = engine.input_processor._validate_lora
    came, failed = ["[]"], "work: it broke"

    async def of_core(method: str, *arguments: Any) -> str:
        return json.dumps({"returned": came, "failed": failed})

    monkeypatch.setattr(control, "_core", of_core)
    calls = [
        Call("reset_media_caches"),
        Call("allow_adapters", ([], True)),
        Call("end_tenants_requests", (True, [], [])),
    ]
    with pytest.raises(RuntimeError, match="it broke"):
        drive(control.chain(calls))
    assert (door.served.allowed, door.served.tenants) == ({path_of(FIRST)}, {tenant_id("a")})
    came += ['{"in_use": []}']
    with pytest.raises(RuntimeError, match="it broke"):
        drive(control.chain(calls))
    assert (door.served.allowed, door.served.tenants) == (set(), {tenant_id("a")})
    failed = ""
    with pytest.raises(Unheard, match="of 3 calls 2 were answered, and none of these ended them"):
        drive(control.chain(calls))


def test_the_door_of_the_process_that_asks() -> None:
    engine: Any = SimpleNamespace(input_processor=Processor())
    for allowed in ([path_of(FIRST)], [path_of(SECOND)]):
        put_door(engine, allowed=allowed)
        check = engine.input_processor._validate_lora
        for passes in (lora(allowed[0]), lora("/a/b"), None):
            check(passes)
        other = path_of(SECOND if allowed == [path_of(FIRST)] else FIRST)
        with pytest.raises(ValueError, match=r"lora_merge@9 is not kept in this engine \(any more\): ask for a newer"):
            check(lora(other, name_of(9)))
    put_door(engine, allowed=[], coming=[path_of(FIRST)])
    check(lora(path_of(FIRST)))  # which waits in its core
    assert len(engine.input_processor.seen) == 7
    seen: list[Any] = []
    wrapped = SimpleNamespace(input_processor=SimpleNamespace(_validate_lora=seen.append))  # by somebody else
    put_door(wrapped, allowed=[path_of(FIRST)])
    wrapped.input_processor._validate_lora(lora(path_of(FIRST)))
    assert len(seen) == 1
    put_door("http://host:8000", allowed=[])  # a handle through which this process makes no requests


def test_an_engine_that_its_owner_steps_has_a_door_from_its_start_on() -> None:
    """What its core refuses, vLLM has noted before, and waits for. Whoever pushes opens the core's; none of them keeps
    an engine alive."""

    class Guarded(Core):
        pass

    class Stepped:
        def __init__(self, lora: object, **core: object) -> None:
            self.vllm_config = SimpleNamespace(lora_config=lora)
            self.input_processor, self.engine_core = Processor(), SimpleNamespace(**core)

    guard(Guarded)
    install(Guarded)
    for _ in range(2):
        guard_in_front(Stepped)
    core = Guarded()
    engine = Stepped(object(), engine_core=core)
    asked = [lora(path) for path in (CONSTANT_PATH, path_of(FIRST), f"{PATHS}a")]
    for one in asked:
        with pytest.raises(ValueError, match=r"\(any more\)"):
            engine.input_processor._validate_lora(one)
    core.collective_rpc("lora_merge_adapters", None, (_allowing([CONSTANT_PATH], False),))
    core.collective_rpc("lora_merge_tenants", None, (False, [], [asked[2].lora_int_id]))
    passing = [asked[0], asked[2], lora("/a/b"), None]
    for one in passing:
        engine.input_processor._validate_lora(one)
    assert engine.input_processor.seen == passing
    put_door(engine, allowed=[])
    engine.input_processor._validate_lora(asked[0])
    assert engine.input_processor.seen.pop() is asked[0], "the core is asked, whatever this process has pushed"
    core.collective_rpc("lora_merge_adapters", None, (_allowing([], False, [CONSTANT_PATH]),))
    with pytest.raises(ValueError, match="is not in this engine"):
        engine.input_processor._validate_lora(asked[0])
    core.scheduler.pause_state = SimpleNamespace(name="PAUSED_ALL")
    engine.input_processor._validate_lora(asked[0])
    for other in (Stepped(object()), Stepped(None, engine_core=core)):
        other.input_processor._validate_lora(asked[1])
    left = ref(core), ref(engine.input_processor)
    del engine, core, other
    assert [one() for one in left] == [None, None]


class Kept(Control):
    """An engine of this trainer's, or one that another trainer has by now."""

    def __init__(self, taken: bool) -> None:
        super().__init__(object())
        self.asked, self._taken = list[str](), taken

    async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
        self.asked.append(op)
        if self._taken:
            raise NotOurs("another trainer holds it now")
        return []

    async def allow_adapters(self, paths: Sequence[str], end: bool, coming: Sequence[str] = ()) -> list[str]:
        self.asked.append("allow_adapters")
        return []


def test_who_has_lost_an_engine_leaves_its_door_as_it_is() -> None:
    """What another trainer keeps there was refused from then on."""

    def asked(taken: bool, step: Callable[[VersionPusher, Replica], Coroutine[Any, Any, Any]]) -> list[str]:
        pusher = VersionPusher(Trainer([engine := Kept(taken)], Ranks()), Planner(), pause="keep", mode="adapter")
        pusher._keep = 1
        one = Replica(0, engine, [worker(state=FIRST.to_json(), kept=[FIRST.to_json()])])
        with pytest.raises(NotOurs) if taken else nullcontext():
            if stuck := drive(step(pusher, one)):
                raise NotOurs(stuck[0])
        return engine.asked

    def trim(pusher: VersionPusher, one: Replica) -> Coroutine[Any, Any, Any]:
        return pusher._trim(one, SECOND)

    def take_back(pusher: VersionPusher, one: Replica) -> Coroutine[Any, Any, Any]:
        return pusher._take_back([one], SECOND, switching=True)

    whole = ["renew_lease", "allow_adapters", "remove_versions"]
    assert asked(False, trim) == whole
    assert asked(False, take_back) == [*whole, "end"]
    assert asked(True, trim) == asked(True, take_back) == ["renew_lease"]


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        (Answered("http://host/v1/unload_lora_adapter", 400, "'lora_name' needs to be provided"), ""),
        (NoRoute("404"), r"takes no adapters at run time: .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.*private"),
        (None, "takes off an adapter without a name"),
    ],
)
def test_a_server_that_lets_nobody_name_adapters(answer: Any, refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    control = HttpControl("http://127.0.0.1:8000")
    asked: list[Any] = []

    def confirm(route: str, body: Any) -> None:
        asked.append((route, body))
        if answer is not None:
            raise answer

    monkeypatch.setattr(control._server, "confirm", confirm)
    with pytest.raises(PushRefused, match=refusal) if refusal else nullcontext():
        drive(control.check_versions())
    assert asked == [("v1/unload_lora_adapter", {"lora_name": ""})]


@pytest.mark.parametrize("stood", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_a_servers_front_hears_of_adapters_between_two_messages(
    monkeypatch: pytest.MonkeyPatch, stood: bool, forgets: bool
) -> None:
    """Whether the engine stood before is known from the first message; what ends the calls ends the next ones, too."""
    control, asked = HttpControl("http://127.0.0.1:8000"), list[Any]()
    control.chains = True
    said = {"lora_merge_still_paused": stood, "reset_prefix_cache": forgets}

    def post(route: str, body: Any) -> dict[str, Any]:
        if body["method"] != "lora_merge_calls":
            asked.append(body["method"])
            return {"results": ['{"in_use": []}']}
        [calls, _] = body["args"]
        asked.append([(name, unless) for name, _, _, unless in calls])
        found = [said.get(name) for name, *_ in calls]
        return {"results": [json.dumps({"returned": found[: 3 if forgets else 2], "failed": ""})]}

    monkeypatch.setattr(control._server, "post", post)
    monkeypatch.setattr(control._server, "get", lambda route: {"data": []})
    paused = Call("stands")
    reset, pause = Call("reset_prefix_cache", (True, False), wanted=(True,)), Call("pause", ("keep",), unless=paused)
    calls = [paused, reset, pause, Call("allow_adapters", ([], True)), Call("resume", unless=paused), Call("holders")]
    found = drive(control.chain(calls))
    first = [("lora_merge_still_paused", None), ("reset_prefix_cache", None), ("pause_scheduler", 0)]
    if not forgets:
        assert asked == [first]
        assert found == [stood, False]
        return
    resume = "nothing?" if stood else "resume_scheduler"
    assert asked == [first, "lora_merge_adapters", [(resume, None), ("lora_merge_holders", None)]]
    assert found == [stood, True, None, [], None, None]


def test_what_a_server_serves_is_unloaded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of others stay; what has gone from its front is told to its core after that."""
    control = HttpControl("http://127.0.0.1:8000")
    roots = {"base": "/models/base", name_of(1): path_of(FIRST), name_of(2): path_of(SECOND), "theirs": "/a/b"}
    cards = [{"id": name, "root": root} for name, root in roots.items()]
    asked: list[Any] = []
    server = control._server
    monkeypatch.setattr(server, "get", lambda route: {"data": cards})
    monkeypatch.setattr(server, "confirm", lambda route, body: asked.append((route, body["lora_name"])))

    def post(route: str, body: Any) -> dict[str, Any]:
        asked.append((route, body["method"], json.loads(body["args"][0])))
        return {"results": [json.dumps({"in_use": [path_of(FIRST)]})]}

    monkeypatch.setattr(server, "post", post)
    assert drive(control.allow_adapters([path_of(SECOND)], False)) == [path_of(FIRST)]
    assert asked == [
        ("v1/unload_lora_adapter", name_of(1)),
        ("collective_rpc", "lora_merge_adapters", {"allowed": [path_of(SECOND)], "end": False, "coming": []}),
    ]
