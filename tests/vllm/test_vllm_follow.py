"""Engines that follow a store: real ones, a real folder, and what they must answer after each version."""

from __future__ import annotations

import asyncio
import inspect
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import ask, assert_answers, engine, train
from processes import until
from torch import nn

from lora_merge import Follower, LoraMergeError, Publisher, PushRefused, VllmSync, save_merged
from lora_merge.cli import main
from lora_merge.engine.transport.sender import Sender
from lora_merge.engine.vllm import follow, follower_process
from lora_merge.publish.status import StoreStatus, status
from lora_merge.publish.store import Store
from tests.vllm.test_vllm_processes import Server, greedy

DENSE = {"target_modules": engines.LINEARS}
EXTENDED = {"worker_extension_cls": "weight_bits.Bits"}
KEY = "sixteen bytes or more"
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def bits(llm: Any) -> dict[str, str]:
    """A digest of each weight's bits."""
    (found,) = llm.collective_rpc("bits")
    return found


def test_an_engine_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions one after another, what is passed over, and back to one that is kept, bit for bit."""
    model, url, told = models.with_lora(engines.qwen2, **DENSE), tmp_path / "run7", list[str]()
    with engine(model, tmp_path / "base", load_format="auto", **EXTENDED) as llm:
        publisher = Publisher(model, url, keep=3, key=KEY)
        follower = Follower(llm, url, base=tmp_path / "base", key=KEY, name="one", told=told.append)
        assert follower.step() is None  # nothing is published, and the checkpoint is served
        weights = []
        for step in range(3):
            train(model, step)
            published = publisher.publish(pin=step == 0)
            report = follower.step()
            assert report is not None
            assert report.merge == "engine"
            assert follower.serves == published.name
            assert_answers(ask(llm), model)
            weights.append(bits(llm))
        assert follower.step() is None
        # A version that the store has once more.
        back = publisher.rollback(1)
        assert follower.step() is not None
        assert bits(llm) == weights[0]
        # What is torn, copied, or somebody else's is passed over by name, and the version before it is served on.
        versions = url / "versions"
        train(model, 9)
        broken = publisher.publish()
        file = versions / f"{broken.version:08d}" / "adapter_model.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        shutil.copytree(versions / f"{back.version:08d}", versions / "00000050")
        (versions / "00000051").mkdir()
        shutil.copytree(versions / f"{back.version:08d}", versions / "00000052")
        said = json.loads((versions / "00000052" / "manifest.json").read_text())
        (versions / "00000052" / "manifest.json").write_text(json.dumps(said | {"version": 52}))
        told.clear()
        assert follower.try_step()
        for what in (
            r"version 52: .*was changed, or signed with another key",
            r"version 51: .*has no manifest.json",
            r"version 50: .*is of version 4: somebody has copied it",
            rf"version {broken.version}: .*its checksum differs",
        ):
            assert any(re.search(what, line) for line in told), (what, told)
        assert follower.serves == back.name
        assert bits(llm) == weights[0]
        told.clear()
        follower._checked = 0.0
        assert follower.try_step()
        assert not told  # once is enough
        shown = status(Store(url, KEY))
        assert [engine.serves for engine in shown.engines] == [back.name]
        assert "checksum differs" in shown.engines[0].error
        monkeypatch.setenv("LORA_MERGE_STORE_KEY", KEY)
        assert main(["status", str(url)]) == 1  # the newest one that seems to be one is not served
        monkeypatch.delenv("LORA_MERGE_STORE_KEY")
        assert back.name in capsys.readouterr().out
        for number in (50, 51, 52, broken.version):
            shutil.rmtree(versions / f"{number:08d}")
        # An engine that somebody else has written to is brought back.
        with torch.no_grad():
            llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.get_model().model.norm.weight.mul_(2)
        follower._checked = 0.0
        assert follower.step() is not None
        assert bits(llm) == weights[0]
        # Another base of the same names and shapes is refused, before anything is changed.
        twin = models.with_lora(engines.qwen2, seed=5, **DENSE)
        Publisher(twin, tmp_path / "other").publish()
        other = Follower(llm, tmp_path / "other", base=tmp_path / "base", name="two")
        with pytest.raises(
            PushRefused, match=r"was started from another model than other@1-\w+ was trained on: its \S+ has"
        ):
            other.step()
        other.close()
        unsigned = Follower(llm, tmp_path / "other", base=tmp_path / "base", key=KEY)
        with pytest.raises(PushRefused, match=r"none of the versions .* is not signed"):
            unsigned.step()
        unsigned.close()
        assert bits(llm) == weights[0]
        follower.close()
        with closing(VllmSync(model, llm)) as sync:
            sync.push()  # a trainer may push over it at any time
            assert_answers(ask(llm), model)
            # A follower does not take its place, and says what is served.
            follower = Follower(llm, url, base=tmp_path / "base", key=KEY, name="one")
            with pytest.raises(PushRefused, match="which a trainer pushed over the checkpoint"):
                follower.step()
            (shown_now,) = status(Store(url, KEY)).engines
            assert (shown_now.serves, shown_now.newest) == (str(*sync.states()), False)
            assert_answers(ask(llm), model)
            follower.close()


def test_an_engine_follows_a_bucket(tmp_path: Path) -> None:
    """The same from a local S3, by a server that takes the store from its environment; needs requirements/s3.txt."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    from object_store import s3

    model, base = models.with_lora(engines.qwen2, **DENSE), tmp_path / "base"
    engines.save_base(model.get_base_model(), base)
    with s3() as bucket:
        url = f"{bucket}/run7"
        publisher, store = Publisher(model, url), Store(url)
        publisher.publish()
        with serving(base, tmp_path / "a.log", url) as server:
            server.wait()
            for step in range(3):
                until(lambda: status(store).engines and status(store).engines[0].newest)
                assert answers(server) == of_policy(model)
                train(model, step)
                publisher.publish()


def test_clients_hear_why_nothing_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a real server that came late, of which the store holds nothing that it trusts; vLLM tells clients nothing of
    most errors."""
    model, url, base = models.with_lora(engines.qwen2, **DENSE), tmp_path / "run7", tmp_path / "base"
    engines.save_base(model.get_base_model(), base)
    Publisher(model, url).publish()
    monkeypatch.setenv("LORA_MERGE_STORE_KEY", KEY)
    with serving(base, tmp_path / "a.log", url) as server:
        server.wait()
        with pytest.raises(urllib.error.HTTPError) as refused:
            answers(server)
        said = refused.value.read().decode()
        assert refused.value.code == 503, said
        assert "serves no version of it yet: none of the versions of" in said
        assert "is not signed" in said
        train(model, 0)
        Publisher(model, url).publish()
        until(lambda: all(engine.newest for engine in status(Store(url)).engines))
        assert answers(server) == of_policy(model)


def test_requests_wait_after_a_sleep_that_threw_weights_away() -> None:
    """Whoever wakes the engine finds whatever the memory holds, until the follower has looked. (CPUs have no sleep
    mode: what comes of it is told as the process beside tells it.)"""

    class Engine:
        async def sleep(self, level: int = 1, mode: str = "abort") -> None:
            slept.append((level, mode))

    async def waits(ready: Any) -> bool:
        await asyncio.sleep(0.01)
        return not ready.done()

    async def check() -> None:
        engine, sleep = Engine(), follow._losing(Engine.sleep)
        following = engine.__dict__[follow._ATTRIBUTE] = follow.Following(engine, "file:///there")
        following._loop = asyncio.get_running_loop()
        following._asked = True  # as at its first look
        following._note(None)
        await following.ready()
        await sleep(engine)
        await following.ready()
        await sleep(engine, 2, mode="keep")
        following._note(None)  # of a look at the store alone
        ready = asyncio.ensure_future(following.ready())
        assert await waits(ready)
        following._asked = True
        following._note("the engine sleeps")
        with pytest.raises(Exception, match="serves no version of it yet: the engine sleeps"):
            await ready
        following._note(None)
        await following.ready()
        following._note("the store is gone")  # what it serves is right
        await following.ready()
        following._note(follow._ENDED)
        await sleep(engine, level=2)
        with pytest.raises(Exception, match=r"yet: the store is gone; .* has ended"):
            await following.ready()

    slept = list[tuple[int, str]]()
    asyncio.run(check())
    assert slept == [(1, "abort"), (2, "keep"), (2, "abort")]


def test_a_store_that_no_follower_can_be_made_for_is_told() -> None:
    """Log and clients heard that the process had ended, and not why."""
    here, there = multiprocessing.Pipe()
    here.send((f"nosuch://bob:{KEY}@there/run7", "base", "one"))
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    try:
        follower_process.main(os.dup(there.fileno()))
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
            signal.signal(number, handler)
    why = "InvalidInput: nosuch://***@there/run7 is no URL of a store: ValueError: Protocol not known: nosuch"
    assert [here.recv(), here.recv()] == [("told", f"one: {why}"), ("tried", why)]


def test_what_is_wrapped_is_there() -> None:
    """The names of vLLM's on which `LORA_MERGE_FOLLOW` relies."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    assert "client_count" in inspect.signature(AsyncLLM.__init__).parameters
    assert inspect.iscoroutinefunction(AsyncLLM.add_request)
    assert inspect.isfunction(AsyncLLM.shutdown)
    assert list(inspect.signature(AsyncLLM.sleep).parameters)[:2] == ["self", "level"]
    assert "self.add_request(" in inspect.getsource(AsyncLLM.generate)
    assert "self.add_request(" in inspect.getsource(AsyncLLM.encode)
    assert inspect.isfunction(LLMEngine.__init__)


@contextmanager
def serving(folder: Path, log: Path, follows: str | Path | None = None, *flags: str) -> Iterator[Server]:
    """A `vllm serve` on a checkpoint, which follows a store by itself, or is left to somebody else."""
    before = os.environ.get("LORA_MERGE_FOLLOW")
    if follows is not None:
        os.environ["LORA_MERGE_FOLLOW"] = str(follows)
    try:
        server = Server(folder, log, *flags, load_format="auto")
    finally:
        os.environ.pop("LORA_MERGE_FOLLOW", None)
        if before is not None:
            os.environ["LORA_MERGE_FOLLOW"] = before
    try:
        yield server
    finally:
        with suppress(ProcessLookupError):  # it was killed
            server.close()
        server.reserved.close()


def kill(server: Server) -> None:
    os.killpg(server.process.pid, signal.SIGKILL)


def answers(server: Server) -> list[list[int]]:
    return [server.generate(prompt) for prompt in engines.prompts()]


def of_policy(model: nn.Module) -> list[list[int]]:
    return [greedy(model, prompt) for prompt in engines.prompts()]


def test_a_fleet_converges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are killed, come late, follow by themselves or by a process beside them, of one worker or of two.
    Nobody holds a handle."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model, url, base = models.with_lora(engines.qwen2, **DENSE), tmp_path / "run7", tmp_path / "base"
    engines.save_base(model.get_base_model(), base)
    publisher, store = Publisher(model, url), Store(url)
    train(model, 0)
    first = publisher.publish(pin=True)
    expected = {first.version: of_policy(model)}

    def converged(many: int) -> bool:
        shown: StoreStatus = status(store)
        return shown.converged and sum(engine.newest and engine.silent < 30 for engine in shown.engines) == many

    two = "--tensor-parallel-size", "2"
    with serving(base, tmp_path / "a.log", url) as a, serving(base, tmp_path / "b.log", None, *two) as b:
        a.wait()
        assert answers(a) == expected[1]  # also the first request is answered by the version
        # The same as a checkpoint of it answers.
        save_merged(model, tmp_path / "merged", base=base)
        from transformers import AutoModelForCausalLM

        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert of_policy(merged) == expected[1]
        b.wait()
        command = [
            sys.executable,
            "-m",
            "lora_merge",
            "follow",
            b.url,
            str(url),
            "--base",
            str(base),
            "--interval",
            "0.2",
        ]
        beside = subprocess.Popen(command, stderr=(tmp_path / "beside.log").open("w"))
        try:
            until(lambda: converged(2))
            assert answers(b) == expected[1]
            for step in (1, 2):
                train(model, step)
                version = publisher.publish().version
                expected[version] = of_policy(model)
                until(lambda: converged(2))
                assert answers(a) == answers(b) == expected[version]
            assert re.findall(r" serves run7@(\d)", (tmp_path / "a.log").read_text()) == ["1", "2", "3"], (
                "operators see it"
            )
            # One dies, a version comes that is torn, one more that is not, and a new engine is started.
            kill(a)
            torn = url / "versions" / "00000004"
            shutil.copytree(url / "versions" / "00000003", torn)
            (torn / "manifest.json").write_text((torn / "manifest.json").read_text()[:100])
            train(model, 3)
            version = publisher.publish().version
            assert version == 5
            expected[version] = of_policy(model)
            with serving(base, tmp_path / "c.log", url) as c:
                until(lambda: b_serves(store, b) == f"run7@{version}")
                assert answers(b) == expected[version]
                c.wait()
                assert answers(c) == expected[version]
                # Back to the first, while requests are in flight.
                stop, seen = threading.Event(), list[list[int]]()
                asking = threading.Thread(target=lambda: keep_asking(b, stop, seen))
                asking.start()
                publisher.rollback(1)
                until(lambda: converged(2) or beside.poll() is not None)
                stop.set()
                asking.join()
                assert answers(b) == answers(c) == expected[1]
                assert {tuple(one) for one in seen} <= mixtures(engines.prompts()[0], expected[version][0], merged)
        finally:
            beside.terminate()
            beside.wait(20)
        assert beside.returncode == 0
        assert f"{socket.gethostname()}-{b.port}" not in store.engines()  # it has said that it ends
        check_staging(b, url, base, model, publisher, monkeypatch)


def check_staging(
    server: Server, url: Path, base: Path, model: nn.Module, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine generates while it receives a version, with the one before; a transfer that breaks off changes
    nothing, and the next look goes on from there."""
    before, serve, during = answers(server), Sender.serve, list[list[list[int]]]()
    follower = Follower(server.url, url, base=base)
    assert follower.step() is None  # what another follower has left
    train(model, 8)
    publisher.publish()

    def breaks(sender: Sender, source: Any, *args: Any) -> None:
        raise OSError("no more")

    def asks(sender: Sender, source: Any, *args: Any) -> None:
        during.append(answers(server))  # all workers wait for buckets meanwhile
        serve(sender, source, *args)

    monkeypatch.setattr(Sender, "serve", breaks)
    with pytest.raises(LoraMergeError, match=r"no more|gave up"):
        follower.step()
    assert answers(server) == before
    monkeypatch.setattr(Sender, "serve", asks)
    report = follower.step()
    assert report is not None
    assert during == [before]
    assert answers(server) == of_policy(model)
    follower.close()


def b_serves(store: Store, server: Server) -> str:
    """Without its digest."""
    said = store.engines().get(f"{socket.gethostname()}-{server.port}", {})
    return str(said.get("serves", "")).partition("-")[0]


def keep_asking(server: Server, stop: threading.Event, seen: list[list[int]]) -> None:
    while not stop.is_set():
        seen.append(server.generate(engines.prompts()[0]))


def mixtures(prompt: list[int], before: Sequence[int], after: nn.Module) -> set[tuple[int, ...]]:
    """What one switch may answer: some tokens of the policy before, and then those of the one after."""
    found = set()
    for many in range(len(before) + 1):
        kept = list(before[:many])
        found.add((*kept, *greedy(after, prompt + kept)[: len(before) - many]))
    return found


def memory_of(group: int) -> int:
    """Bytes that the processes of a group hold, what several share counted once."""
    total = 0
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError, ProcessLookupError):
            if os.getpgid(int(folder.name)) == group:
                rows = (folder / "smaps_rollup").read_text().splitlines()
                total += sum(int(row.split()[1]) * 1024 for row in rows if row.startswith("Pss:"))
    return total


def test_many_versions(tmp_path: Path) -> None:
    """A hundred versions a minute for some minutes, while requests are answered: memory stays flat, and each answer is
    of one policy up to a token, and of the next ones from there on."""
    minutes, prompt = float(os.environ.get("LORA_MERGE_TEST_MINUTES", "4")), engines.prompts()[0]
    policies = [models.with_lora(engines.qwen2, **DENSE) for _ in range(3)]
    for seed, policy in enumerate(policies):
        train(policy, seed, 0.2)
    url, base = tmp_path / "run7", tmp_path / "base"
    engines.save_base(policies[0].get_base_model(), base)
    alone = [greedy(policy, prompt) for policy in policies]
    assert len({tuple(answer) for answer in alone}) == 3
    allowed = set().union(*(mixtures(prompt, answer, after) for answer in alone for after in policies))
    Publisher(policies[0], url).publish()
    with serving(base, tmp_path / "a.log", url) as server:
        server.wait()
        assert server.generate(prompt) == alone[0]
        stop, seen, held = threading.Event(), list[list[int]](), list[int]()
        asking = threading.Thread(target=keep_asking, args=(server, stop, seen))
        asking.start()
        store, begin, version = Store(url), time.monotonic(), 1
        try:
            while time.monotonic() - begin < 60 * minutes:
                version += 1
                policy = policies[version % 3]
                # A publisher of its own each time: what a trainer that is started anew leaves counts, too.
                Publisher(policy, url, keep=4).publish()
                if version % 50 == 0:
                    held.append(memory_of(server.process.pid))
                time.sleep(max(0.0, begin + 0.6 * (version - 1) - time.monotonic()))
            until(lambda: served(store).startswith(f"run7@{version}-"))
        finally:
            stop.set()
            asking.join()
        assert server.generate(prompt) == alone[version % 3]
        strange = [answer for answer in seen if tuple(answer) not in allowed]
        assert not strange, (len(strange), len(seen), strange[0])
        assert len({tuple(answer) for answer in seen}) >= 3
        assert len(held) > 2
        assert max(held[1:]) < 1.03 * held[1], held
        assert len(list((url / "versions").iterdir())) == 4
        print(f"{version} versions, {len(seen)} answers, MB: {[size >> 20 for size in held]}")


def served(store: Store) -> str:
    return next((str(said["serves"]) for said in store.engines().values()), "")
