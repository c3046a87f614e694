"""Faults in every phase of a push, in the trainer and in one and in all workers of engines that have several: the next
call is answered, the next push heals, and the answers are right."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import ask, assert_answers, engine, train
from strangers import HTML, JSON, Answer, answering

from lora_merge import LoraMergeError, PushFailed, PushRefused, VllmSync
from lora_merge.engine.control.base import OutOfStep, WorkerFailed
from lora_merge.engine.control.calls import drive
from lora_merge.engine.vllm.control import LlmControl
from lora_merge.stream.bucket_writer import BucketWriter
from lora_merge.verify import coverage

DENSE = {"target_modules": engines.LINEARS}
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
OPTIONS = {"enable_lora": True, "max_lora_rank": 8, "worker_extension_cls": "faulty.Faulty"}


def policy(seed: int = 0) -> Any:
    return models.with_lora(engines.qwen2, seed=seed, **DENSE)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of two tensor-parallel workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        folder = tmp_path_factory.mktemp("wide") / "base"
        with engine(policy(), folder, processes=True, tensor_parallel_size=2, **OPTIONS) as llm:
            yield llm


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of two pipeline stages (vLLM 0.32 cannot generate in a pipeline of CPUs)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        folder = tmp_path_factory.mktemp("long") / "base"
        options = OPTIONS | {"enable_lora": False}
        with engine(policy(), folder, processes=True, pipeline_parallel_size=2, **options) as llm:
            yield llm


# where -> in which mode, after how many times, what the push raises, whether the engine is dirty then
PHASES: dict[str, tuple[str, int, type[LoraMergeError], bool]] = {
    "hello": ("merged", 0, PushRefused, False),
    "dry_run": ("merged", 0, PushRefused, False),
    "connect": ("merged", 0, PushRefused, False),
    "note_pause": ("merged", 0, PushRefused, False),
    "begin_full": ("merged", 0, PushFailed, True),
    "receive": ("merged", 0, PushFailed, True),
    "bucket": ("merged", 0, PushFailed, True),
    "bucket n": ("merged", 3, PushFailed, True),
    "finish": ("merged", 0, PushFailed, True),
    "commit": ("merged", 0, PushFailed, True),
    "checksums": ("merged", 2, PushFailed, True),
    "received_checksums": ("merged", 0, PushFailed, True),
    "unserved_modules": ("adapter", 0, PushRefused, False),
    "receive_adapter": ("adapter", 0, PushFailed, True),
}
WORKERS = [[0], [1], [0, 1]]


def check_phase(llm: Any, sync: VllmSync, where: str, ranks: list[int], answers: Any) -> None:
    mode, after, error, dirty = PHASES[where]
    before = sync.states()
    name = where.partition(" ")[0]
    told = llm.collective_rpc("fail", args=(name, ranks, after))
    assert told == ["broken" if rank in ranks else "well" for rank in range(2)]
    if where == "hello":  # a push asks twice where engines slept; `states` asks too
        with pytest.raises(PushRefused, match="injected"):
            sync.states()
    if where in ("connect", "dry_run"):  # what stands is not asked for again
        sync = VllmSync(sync._weights.model, llm, bucket_bytes=1 << 17)
    with pytest.raises(LoraMergeError, match=f"injected into {name}") as raised:
        sync.push(mode=mode, verify=where in ("checksums", "received_checksums"))
    assert type(raised.value) is error, raised.value
    for rank in range(2):
        assert (f"worker {rank}: " in str(raised.value)) == (rank in ranks), "which worker failed"
    assert llm.collective_rpc("mend") == ["well"] * 2, "answers are to this call"
    (state,) = sync.states()
    assert (state.kind == "dirty") == dirty, state
    if not dirty:
        assert [state] == before, "the engine is as before"
        answers(sync)
    assert sync.push(mode=mode).version > before[0].version
    answers(sync)


@pytest.mark.parametrize("ranks", WORKERS, ids=str)
def test_one_or_all_workers_fail_in_each_phase(wide: Any, ranks: list[int]) -> None:
    """vLLM raised at the first worker's error and left the others' answers for the next call: the engine was lost."""
    model = policy()
    sync = VllmSync(model, wide, bucket_bytes=1 << 17)
    sync.push()

    def answers(sync: VllmSync) -> None:
        assert_answers(ask(wide, sync.lora_request()), model)

    for where in PHASES:
        check_phase(wide, sync, where, ranks, answers)
    sync.close()


@pytest.mark.parametrize("ranks", WORKERS, ids=str)
def test_stages_of_a_pipeline_fail(long: Any, ranks: list[int]) -> None:
    model = policy()
    sync = VllmSync(model, long, bucket_bytes=1 << 17)
    sync.push()

    def answers(sync: VllmSync) -> None:
        assert [c.complete for c in coverage(long)] == [True, True]
        assert sync.push(verify=True).mode == "merged"

    for where in (where for where, (mode, *_) in PHASES.items() if mode == "merged"):
        check_phase(long, sync, where, ranks, answers)
    sync.close()


@pytest.mark.parametrize("index", [0, 1, -1])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_trainer_fails_at_each_bucket(
    wide: Any, index: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = policy()
    sync = VllmSync(model, wide, bucket_bytes=1 << 17)
    sync.push()
    fill, at = BucketWriter.fill, index % len(sync._weights.bucket_writer().table)

    def broken(self: BucketWriter, number: int, *args: Any) -> None:
        if number == at:
            raise error("injected")
        fill(self, number, *args)

    monkeypatch.setattr(BucketWriter, "fill", broken)
    with pytest.raises(PushFailed if error is RuntimeError else KeyboardInterrupt):
        sync.push()
    monkeypatch.undo()
    assert sync.states()[0].kind == "dirty"
    train(model)
    sync.push(verify=True)
    assert_answers(ask(wide), model)
    sync.close()


def push_and_wait(sync: VllmSync) -> None:
    sync.push()
    time.sleep(5)  # the push was through before the signal came


def test_ctrl_c_in_the_middle(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal while buckets are filled, and one while the trainer waits for the workers."""
    model = policy()
    sync = VllmSync(model, wide, bucket_bytes=1 << 17)
    sync.push()
    fill = BucketWriter.fill
    for number in (0, 2, len(sync._weights.bucket_writer().table) - 1):

        def interrupted(self: BucketWriter, index: int, *args: Any, number: int = number) -> None:
            fill(self, index, *args)
            if index == number:
                threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGINT)).start()
                time.sleep(0.01 if number != 2 else 0)

        with monkeypatch.context() as patched:
            patched.setattr(BucketWriter, "fill", interrupted)
            with pytest.raises(KeyboardInterrupt):
                push_and_wait(sync)
        assert sync.states()[0].kind in ("dirty", "merged")
        train(model)
        sync.push()
        assert_answers(ask(wide), model)
    sync.close()


def test_answers_to_an_earlier_call_are_not_taken_for_those_of_this_one(
    wide: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user's own failing `collective_rpc` does to an engine of several workers shows, and is named."""
    control, late = LlmControl(wide), []
    works = control._ask

    async def one_late(request: str) -> Any:
        late.append(await works(request))
        return late[-2] if len(late) > 1 else late[-1]

    monkeypatch.setattr(control, "_ask", one_late)
    drive(control.rpc("coverage"))
    with pytest.raises(OutOfStep, match="start this engine anew"):
        drive(control.rpc("coverage"))


def test_an_unknown_call_is_an_answer(wide: Any) -> None:
    for request in ("no json", '{"op": "format"}', '{"op": "dry_run"}', '{"op": "hello", "trainer": "nobody"}'):
        answers = wide.collective_rpc("lora_merge", args=(request,))
        assert all('"error"' in answer for answer in answers), answers
    with pytest.raises(WorkerFailed, match=r"worker 0: .*worker 1: "):
        drive(LlmControl(wide).rpc("format"))
    assert wide.collective_rpc("mend") == ["well"] * 2


def test_workers_let_go_of_a_closed_trainers_buckets(wide: Any) -> None:
    """They kept them mapped, in plans, for as long as they lived."""
    model = policy()
    sync = VllmSync(model, wide, bucket_bytes=1 << 17)
    sync.push(verify=True)
    assert min(wide.collective_rpc("mapped")) >= 2, "the mailbox and the buckets"
    sync.close()
    assert wide.collective_rpc("mapped") == [0, 0]
    with pytest.raises(ValueError, match="closed: make a new one"):
        sync.push()
    with torch.no_grad():
        VllmSync(model, wide).push()
    assert_answers(ask(wide), model)


def test_a_worker_that_is_killed_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives the whole engine up then: the push ends with an error, and so does every later one, at once."""
    model = policy()
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    with engine(model, tmp_path / "base", processes=True, tensor_parallel_size=2, **OPTIONS) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        sync.push()
        pids = llm.collective_rpc("process")
        fill = BucketWriter.fill

        def killing(self: BucketWriter, index: int, *args: Any) -> None:
            if index == 2:
                os.kill(pids[1], signal.SIGKILL)
            fill(self, index, *args)

        with monkeypatch.context() as patched:
            patched.setattr(BucketWriter, "fill", killing)
            with pytest.raises(PushFailed, match=r"engine 0 (is dirty|does not answer any more)"):  # it ends just now
                sync.push()
        with pytest.raises(PushRefused, match=r"does not answer|has died, start it anew"):
            sync.push()
        sync.close()


STRANGERS: dict[str, tuple[Answer, str]] = {
    "no such page": ((404, JSON, "{}"), r"collective_rpc answered 404 .*started with VLLM_SERVER_DEV_MODE=1"),
    "a page": ((200, HTML, "<html/>"), r"text/html from .*, which is not JSON: is this the URL of a vLLM server"),
    "other JSON": ((200, JSON, '{"a": 1}'), r'JSON of something else \(\{"a": 1\}\): is this the URL of a vLLM server'),
    "a key": ((401, JSON, '{"error": "Unauthorized"}'), r"answered 401 .*Unauthorized.*it asks for an API key"),
    "nothing": (None, r"does not answer and closes the connection: is this the URL of a vLLM server"),
}
"""What something else answers, and what a push says of it."""


@pytest.mark.parametrize("what", STRANGERS)
def test_a_server_of_something_else(what: str) -> None:
    """It is asked who it is, and nothing more."""
    given, words = STRANGERS[what]
    with answering(other=given) as (url, asked):
        with pytest.raises(PushRefused, match=words):
            VllmSync(models.with_lora(engines.qwen2, **DENSE), url).push()
        assert set(asked) == {"/collective_rpc"}
