"""A real SGLang server over HTTP, trainers that come and go, and replicas."""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import models
import policies
import pytest
import sglang_engines
import sglang_faulty
from sglang_engines import ask, assert_answers, do, engine, spans
from strangers import HTML, JSON, Answer, answering, in_front

from lora_merge import LoraMergeError, PushFailed, PushRefused, SglangSync
from lora_merge.engine.sglang.control import HttpControl

DENSE = {"target_modules": policies.LINEARS}
START_S = 400
no_leftovers = sglang_engines.no_leftovers


def policy(seed: int = 0) -> Any:
    return models.with_lora(policies.qwen3, seed=seed, **DENSE)


def post(url: str, route: str, body: Any) -> Any:
    request = urllib.request.Request(f"{url}/{route}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL."""
    with serving(tmp_path_factory.mktemp("server") / "base") as url:
        yield url


@contextmanager
def serving(
    folder: Path, model: Any = None, *, elsewhere: Sequence[str] = (), host: str = "127.0.0.1", **options: Any
) -> Iterator[str]:
    """A server of its own for a checkpoint; where there is none, a policy's base is saved there. Its URL.

    Args:
        elsewhere: the command that runs it on another host.
        host: address at which it listens.
        options: its arguments, beside those of every engine here.
    """
    model = policy() if model is None else model
    if not folder.exists():
        policies.save_base(model.get_base_model(), folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags: list[str] = []
    for name, value in (sglang_engines.arguments(model, folder) | options).items():
        flags += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    sglang_engines.bind(options.get("tp_size", 1))
    command = [*elsewhere, sys.executable, "-m", "sglang.launch_server", "--skip-server-warmup"]
    command += ["--host", host, "--port", str(port), *flags]
    process = subprocess.Popen(command, start_new_session=True)
    url, end = f"http://{host}:{port}", time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None, "the server did not start"
            assert time.monotonic() < end, "the server does not answer"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        from sglang.srt.utils import kill_process_tree

        kill_process_tree(process.pid)
        process.wait(60)


def answers(url: str) -> Any:
    sampling = sglang_engines.GREEDY
    return post(url, "generate", {"input_ids": policies.prompts(), "sampling_params": sampling, "return_logprob": True})


def act(url: str, name: str, *given: Any) -> Any:
    """An action of sglang_faulty.py in the server's scheduler; its answer."""
    answer = post(url, "weights_checker", {"action": sglang_faulty.PREFIX + json.dumps([name, *given])})
    return json.loads(answer["message"])


def trainer(url: str, seed: int, merge: str, told: Any) -> None:
    """A trainer's process: pushes once, and ends."""
    model = policy()
    policies.train(model, seed)
    sync = SglangSync(model, url, merge=merge)
    before = [str(state) for state in sync.states()]
    report = sync.push(verify=True)
    told.put((before, report.version, report.base_sent))


def run_trainer(url: str, seed: int, merge: str) -> tuple[list[str], int, bool]:
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=trainer, args=(url, seed, merge, told))
    process.start()
    found = told.get(timeout=120)
    process.join(60)
    assert process.exitcode == 0
    return found


def test_trainers_that_come_and_go(server: str) -> None:
    """The state is the engine's: a second trainer's process finds the base there, and pushes its adapter alone."""
    before, version, base_sent = run_trainer(server, 1, "engine")
    assert before == ["nothing@0"]
    assert (version, base_sent) == (1, True)
    model = policy()
    policies.train(model, 1)
    assert_answers(answers(server), model)
    assert run_trainer(server, 2, "engine") == (["merged@1"], 2, False)
    model = policy()
    policies.train(model, 2)
    outputs = answers(server)
    assert_answers(outputs, model)
    assert outputs[0]["meta_info"]["weight_version"] == "merged@2"
    assert run_trainer(server, 3, "trainer")[:2] == (["merged@2"], 3)


def test_over_http(server: str) -> None:
    model = policy()
    sync = SglangSync(model, server)
    for pause in ("keep", "wait", "abort"):
        sync = SglangSync(model, server, pause=pause)
        sync.push()
        assert_answers(answers(server), model)
        policies.train(model)
        sync.close()
    bad = policies.qwen3()
    del bad.model.layers[1].self_attn.k_proj
    sync = SglangSync(model, server)
    sync.push()
    with pytest.raises(PushRefused, match="nothing would fill"):
        SglangSync(bad, server).push()
    assert_answers(answers(server), model)
    held = sync.states()
    with pytest.raises(PushRefused, match=r'does not know adapters that a scheduler loaded.*push with mode="merged"'):
        sync.push(mode="adapter")
    assert sync.states() == held
    assert_answers(answers(server), model)
    sync.close()


ROUTES = {
    "pause_generation": (PushRefused, "holds what it held before", "merged"),
    "update_weight_version": (PushFailed, "is dirty", "dirty"),
    "continue_generation": (PushFailed, r"holds merged@\d+, but going on with it failed", "merged"),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_call_that_fails(server: str, route: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it reaches the server, or when only its answer is lost."""
    model = policy()
    sync = SglangSync(model, server)
    sync.push()
    held, before = sync.states(), copy.deepcopy(model)
    policies.train(model)
    control = sync._trainer.controls[0]
    assert isinstance(control, HttpControl)
    works, (raised, why, kind) = control._server.post, ROUTES[route]

    def failing(at: str, **given: Any) -> Any:
        if at != route:
            return works(at, **given)
        if late:
            works(at, **given)
        raise OSError("injected")

    with monkeypatch.context() as patched:
        patched.setattr(control._server, "post", failing)
        with pytest.raises(raised, match=f"{why}.*injected"):
            sync.push()
    (state,) = sync.states()
    assert [state] == held if route == "pause_generation" else state.kind == kind
    if route == "pause_generation":
        assert_answers(answers(server), before)
    sync.push(verify=True)
    assert_answers(answers(server), model)
    sync.close()


LIES = {
    "pause_generation": (
        '{"status": "ok"}',
        "holds what it held before.*says that it has paused, and its",
    ),
    "continue_generation": ("{}", r"holds merged@\d+, but going on with it failed.*answered 200 and \{\}, where an"),
    "update_weight_version": ('{"success": true}', "is dirty.*answered 200 and .*, where an engine that has done it"),
}
"""What something in front answers in the engine's place, and what a push says of it."""


@pytest.mark.parametrize("route", LIES)
def test_what_was_not_done(server: str, route: str) -> None:
    model, (answer, match) = policy(), LIES[route]
    with (
        in_front(lambda path: (200, JSON, answer) if path == f"/{route}" else server) as (url, _),
        contextlib.closing(SglangSync(model, url)) as sync,
        pytest.raises(LoraMergeError, match=match),
    ):
        sync.push()
    with contextlib.closing(SglangSync(model, server)) as sync:
        sync.push()
    assert_answers(answers(server), model)


def test_nobody_listens() -> None:
    with pytest.raises(PushRefused, match="nothing listens"):
        SglangSync(policy(), "http://127.0.0.1:9").push()


NONE = (404, HTML, "<html>no such page</html>")
UNSUPPORTED = (400, JSON, '{"success": false, "message": "Unsupported action=lora_merge:"}')
STRANGERS: dict[str, tuple[dict[str, Answer], str]] = {
    "knows no such page": ({"other": NONE}, r"weights_checker answered 404 \(text/html from .*URL of an SGLang server"),
    "takes no POST": ({"other": (501, HTML, "<html/>")}, r"answered 501 .*is this the URL of an SGLang server"),
    "gives a page": (
        {"other": (200, HTML, "<html>welcome</html>")},
        r"weights_checker answers with text/html from .*, which is not JSON: is this the URL of an SGLang server",
    ),
    "gives other JSON": ({"other": (200, JSON, '{"status": "ok"}')}, r'JSON of something else \(\{"status": "ok"\}\)'),
    "gives a list": ({"other": (200, JSON, "[1]")}, r"JSON of something else \(\[1\]\): is this the URL"),
    "gives a message": ({"other": (200, JSON, '{"message": "hi"}')}, r'JSON of something else \(\{"message": "hi"\}\)'),
    "gives no workers": ({"other": (200, JSON, '{"message": "5"}')}, r'JSON of something else \(\{"message": "5"\}\)'),
    "is broken": ({"other": (502, HTML, "<html/>")}, r"answered 502 \(text/html from .*is this the URL of an SGLang"),
    "fails": ({"other": (500, "text/plain", "Internal")}, r"answered 500: Internal"),
    "hangs up": ({"other": None}, r"does not answer and closes the connection: is this the URL of an SGLang server"),
    "is an SGLang too old": (
        {"get_server_info": (200, JSON, '{"version": "0.4.9"}'), "other": NONE},
        r"runs SGLang 0\.4\.9, which does not offer /weights_checker; 0\.5\.17 and 0\.5\.23 are supported",
    ),
    "is an SGLang that has moved things": (
        {"weights_checker": UNSUPPORTED, "server_info": (200, JSON, '{"version": "0.9.0"}'), "other": NONE},
        r"SGLang 0\.9\.0 itself answers \(Unsupported .*0\.5\.17 and 0\.5\.23 are supported.*Failed to apply hooks",
    ),
    "is an SGLang without the plugin": (
        {"weights_checker": UNSUPPORTED, "server_info": (200, JSON, '{"version": "0.5.17"}'), "other": NONE},
        r"SGLang 0\.5\.17 itself answers \(Unsupported action=.*does SGLANG_PLUGINS allow it\?$",
    ),
}
"""What something else answers, and what a push says of it."""


@pytest.mark.parametrize("what", STRANGERS)
def test_a_server_of_something_else(what: str) -> None:
    """It is asked who it is, and nothing more."""
    given, words = STRANGERS[what]
    with answering(**given) as (url, asked):
        with pytest.raises(PushRefused, match=words):
            SglangSync(policy(), url).push()
        assert set(asked) <= {"/weights_checker", "/server_info", "/get_server_info"}


def test_something_that_does_not_speak_http() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with listening.accept()[0] as one:
                        one.recv(1 << 16)
                        one.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=greet, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(PushRefused, match=r"does not answer in HTTP .*is this the URL of an SGLang server"):
            SglangSync(policy(), url).push()
        listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("keys", [{"api_key": "abc"}, {"admin_api_key": "abc"}, {"api_key": "a", "admin_api_key": "b"}])
def test_a_server_that_asks_for_a_key(keys: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own server, without an engine behind it: it asks for the key first."""
    import uvicorn
    from fastapi import FastAPI
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import add_api_key_middleware

    locked = FastAPI(routes=app.router.routes)
    add_api_key_middleware(locked, **{"api_key": None, "admin_api_key": None} | keys)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(locked, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            words = r"weights_checker answered 401 .*Unauthorized.*asks for an API key, and pushes have none to give"
            with pytest.raises(PushRefused, match=words):
                SglangSync(policy(), url).push()
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize("pause", ["keep", "wait", "abort"])
def test_requests_in_flight(server: str, pause: str) -> None:
    model = policy()
    sync = SglangSync(model, server, pause=pause)
    before, old = sync.push().version, copy.deepcopy(model)
    policies.train(model, size=0.2)
    act(server, "slow", 0.03)
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    asked = {"input_ids": policies.prompts(), "sampling_params": sampling, "return_logprob": True}
    with ThreadPoolExecutor(1) as pool:
        flying = pool.submit(post, server, "generate", asked)
        time.sleep(0.6)
        assert not flying.done(), "the scenario has requests in flight"
        sync.push()
        act(server, "slow", 0)
        outputs = flying.result(60)
    for prompt, output in zip(policies.prompts(), outputs, strict=True):
        assert output["meta_info"]["weight_version"] == f"merged@{before + (pause == 'keep')}", "that at its end"
        if pause == "abort":
            assert output["meta_info"]["finish_reason"]["type"] == "abort"
        else:
            mine = spans(output, prompt, old, model)
            assert mine == 40 if pause == "wait" else mine < 40
    assert_answers(answers(server), model)
    sync.close()


def test_a_scheduler_that_dies_in_the_middle(tmp_path: Path) -> None:
    """And the server with it: the trainer hears of it soon, and leaves nothing behind."""
    model = policy()
    with serving(tmp_path / "base") as url:
        sync = SglangSync(model, url, bucket_bytes=1 << 16)
        sync.push()
        act(url, "fail", "bucket", [0], 2, True)
        began = time.monotonic()
        with pytest.raises(PushFailed, match=r"engine 0 (is dirty|does not answer any more)"):  # it ends just now
            sync.push()
        with pytest.raises(PushRefused, match=r"does not answer|nothing listens"):  # it is ending, or has ended
            sync.push()
        assert time.monotonic() - began < 60
        sync.close()


def with_an_engine(folder: Path, told: Any) -> None:
    """A trainer's process that has started an engine, whose scheduler dies in the middle of a push."""
    os.setsid()
    model = policy()
    with engine(model, folder) as started:
        sync = SglangSync(model, started, bucket_bytes=1 << 16)
        sync.push()
        do(started, "fail", "bucket", [0], 2, True)
        told.put("begins")
        with contextlib.suppress(Exception):
            sync.push()
        time.sleep(60)
        told.put("lives")


def test_a_process_whose_scheduler_dies_in_the_middle(tmp_path: Path) -> None:
    """SGLang ends the process that started the engine; nothing of it stays in shared memory."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=with_an_engine, args=(tmp_path / "base", told))
    process.start()
    assert told.get(timeout=START_S) == "begins"
    process.join(40)
    assert process.exitcode not in (0, None)


def test_two_replicas(server: str, tmp_path: Path) -> None:
    """One over HTTP, one in this process. Where one fails in the middle the other has the new weights, and the next
    push heals it."""
    model = policy()
    with engine(model, tmp_path / "base") as started:
        sync = SglangSync(model, [server, started])
        for _ in range(2):
            sync.push(verify=True)
            assert_answers(answers(server), model)
            assert_answers(ask(started), model)
            policies.train(model)
        sync.close()
        for merge in ("trainer", "engine"):
            for failing in (0, 1):
                one_of_two_fails(model, server, started, merge, failing)


def one_of_two_fails(model: Any, url: str, started: Any, merge: str, failing: int) -> None:
    """In the middle of a push.

    Args:
        url, started: two engines.
        merge: as of `SglangSync`.
        failing: which of them.
    """
    sync = SglangSync(model, [url, started], merge=merge, bucket_bytes=1 << 16)
    sync.push()
    policies.train(model, failing)
    acts = [partial(act, url), partial(do, started)]
    acts[failing]("fail", *(("products", [0]) if merge == "engine" else ("bucket", [0], 1)))
    with pytest.raises(PushFailed, match=rf"engine {failing} is dirty: .*injected.*engine {1 - failing} is valid"):
        sync.push()
    acts[failing]("mend")
    kinds = [state.kind for state in sync.states()]
    assert kinds == (["dirty", "merged"] if failing == 0 else ["merged", "dirty"])
    assert_answers(ask(started) if failing == 0 else answers(url), model)
    policies.train(model, 2)
    sync.push(verify=True)
    assert_answers(answers(url), model)
    assert_answers(ask(started), model)
    sync.close()
