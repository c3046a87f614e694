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

from lora_merge import PushFailed, PushRefused, SglangSync
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


def test_a_server_of_something_else() -> None:
    with pytest.raises(PushRefused, match="nothing listens"):
        SglangSync(policy(), "http://127.0.0.1:9").push()


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
        with pytest.raises(PushFailed, match="engine 0 is dirty"):
            sync.push()
        with pytest.raises(PushRefused, match="does not answer"):
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
