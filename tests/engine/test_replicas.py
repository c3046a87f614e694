"""Four replicas, each on a host of its own: one slow, one late, one lost and started anew, one whose cable is pulled.

The hosts are namespaces of this machine (support/hosts.py), the replicas workers without an engine
(support/plain_engine.py); what crosses is what crosses to a `vllm serve`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import models
import plain_engine
import policies
import pytest
import torch
from hosts import Other, run_on_two

from lora_merge import PushFailed, PushRefused, VllmSync
from lora_merge.engine.payload.update import UpdatePayload
from lora_merge.engine.transport import tcp_link
from lora_merge.stream.bucket_writer import BucketWriter

PORT = 8000
GONE_S = 4
"""In the place of `tcp_link.SILENT_S`: a test has not half a minute for each cable."""
SLOW, BYTES_S, BURST = "4mbit", 5e5, 16 << 10
"""A slow link, by the name that `tc` has for it; its bytes a second, and those that pass at once (`Other.slow`)."""


@pytest.mark.parametrize("merge", ["engine", "trainer"])
def test_four_replicas(merge: str, tmp_path: Path) -> None:
    """Pushes end whatever one replica does, the others serve the new version, and one that is back is brought to it."""
    run_on_two(engines_merge if merge == "engine" else trainer_merges, tmp_path, 540)


class Replica:
    """A server on a host of its own.

    Args:
        other: that host.
    """

    def __init__(self, other: Other, log: Path) -> None:
        self.other, self._log, self._starts = other, log, 0
        self.url = f"http://{other.address}:{PORT}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with other weights at each time."""
        self._starts += 1
        command = [*self.other.command, sys.executable, plain_engine.__file__]
        command += [self.other.address, str(PORT), str(100 + self._starts), str(GONE_S)]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def wait(self) -> None:
        end = time.monotonic() + 200
        while time.monotonic() < end:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"it does not come up: {self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)  # `nsenter`, and what it started
        self._process.wait()
        end = time.monotonic() + 60
        while time.monotonic() < end:  # what it started goes a moment later
            try:
                socket.create_connection((self.other.address, PORT), 2).close()
            except ConnectionRefusedError:
                return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError("it does not end")

    def answer(self, prompt: list[int]) -> list[int]:
        request = urllib.request.Request(f"{self.url}/answer", json.dumps(prompt).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            tokens: list[int] = json.loads(response.read())["tokens"]
        return tokens


def engines_merge(other: Other, folder: Path) -> None:
    model, replicas = four(other, folder)
    lives(VllmSync(model, urls(replicas), merge="engine", bucket_bytes=1 << 17, lost="skip"), model, replicas)


def trainer_merges(other: Other, folder: Path) -> None:
    model, replicas = four(other, folder)
    lives(VllmSync(model, urls(replicas), merge="trainer", bucket_bytes=1 << 17, lost="skip"), model, replicas)
    refuses(VllmSync(model, urls(replicas), bucket_bytes=1 << 17), model, replicas)


def four(other: Other, folder: Path) -> tuple[Any, list[Replica]]:
    """Return a policy, and four replicas, of which the second has a slow link and the last is not started yet."""
    tcp_link.SILENT_S = GONE_S
    torch.set_num_threads(1)
    others = [other, *(Other(number) for number in (1, 2, 3))]
    replicas = [Replica(one, folder / f"{number}.log") for number, one in enumerate(others)]
    for one in replicas[:3]:
        one.start()
    for one in replicas[:3]:
        one.wait()
    others[1].slow(SLOW)
    return models.with_lora(policies.qwen2, target_modules=policies.LINEARS), replicas


def urls(replicas: list[Replica]) -> list[str]:
    return [one.url for one in replicas]


def lives(sync: VllmSync, model: Any, replicas: list[Replica]) -> None:
    """Pushes that go on without whoever is lost."""
    fourth = replicas[3]
    with pytest.warns(UserWarning, match=r"engine 3 is left out of this push \(nothing listens at"):
        report = pushed(sync, model, replicas[:3], {3})
    assert f"without engine 3: nothing listens at {fourth.url}" in str(report)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said once
        policies.train(model, size=0.02)
        began, asked = time.monotonic(), Asking(replicas[0])
        report = sync.push()
        spent, longest = time.monotonic() - began, asked.longest()
    for one in replicas[:3]:
        check(one, model)
    assert spent > (report.nbytes - BURST) / BYTES_S, "it goes over the slow link, too"
    print(f"{report.merge}: {spent:.2f} s with a slow one; longest answer of a fast one: {longest:.2f} s", flush=True)

    fourth.start()
    fourth.wait()
    with pytest.raises(PushRefused, match="engine 3 holds nothing@0"):
        sync.check()
    last = report.version
    report = pushed(sync, model, replicas, set())
    assert report.version == last + 1
    assert report.base_sent == (report.merge == "engine")
    assert not pushed(sync, model, replicas, set()).base_sent
    sync.check()

    replicas[2].kill()
    pushed(sync, model, [replicas[0], replicas[1], fourth], {2})
    with pytest.raises(PushRefused, match=f"engine 2: nothing listens at {replicas[2].url}"):
        sync.check()
    replicas[2].start()
    replicas[2].wait()
    pushed(sync, model, replicas, set())
    sync.check()

    # In the middle: of what is received, or read.
    cut = replicas[0].other.cut
    with interrupted(sync, cut):
        report = pushed(sync, model, replicas[1:], {0}, within=4 * GONE_S + 20)
    began = time.monotonic()
    again = pushed(sync, model, replicas[1:], {0})
    print(f"{report.merge}: {again} in {time.monotonic() - began:.1f} s, while a host takes no packet")
    replicas[0].other.plug()
    stale = [state.version for state in sync.states()]
    assert stale[0] < stale[1] == again.version
    report = pushed(sync, model, replicas, set())
    assert {(state.kind, state.version) for state in sync.states()} == {("merged", report.version)}
    with interrupted(sync, replicas[2].kill):
        pushed(sync, model, [replicas[0], replicas[1], fourth], {2})
    replicas[2].start()
    replicas[2].wait()
    pushed(sync, model, replicas, set())
    sync.close()


def refuses(sync: VllmSync, model: Any, replicas: list[Replica]) -> None:
    """Pushes of who wants all engines, or none: the default."""
    pushed(sync, model, replicas, set())
    before, answers = sync.states(), [one.answer(policies.prompts()[0]) for one in replicas]
    replicas[2].kill()
    policies.train(model, size=0.02)
    with pytest.raises(PushRefused, match=f"engine 2: nothing listens at {replicas[2].url}"):
        sync.push()
    assert [one.answer(policies.prompts()[0]) for one in [*replicas[:2], replicas[3]]] == [*answers[:2], answers[3]]
    replicas[2].start()
    replicas[2].wait()
    assert [str(state) for state in sync.states()] == [*map(str, before[:2]), "nothing@0", str(before[3])]
    pushed(sync, model, replicas, set())
    with (
        interrupted(sync, replicas[2].kill),
        pytest.raises(PushFailed, match=r"engine 2 (is dirty|does not answer any more)"),
    ):
        sync.push()
    for one in replicas[:2]:
        check(one, model)
    for one in (replicas[0], replicas[1], replicas[3]):
        one.kill()
    with pytest.raises(PushRefused, match="engine 0: nothing listens at"):
        sync.push()
    sync.close()
    with (
        VllmSync(model, urls(replicas), lost="skip") as alone,
        pytest.raises(PushRefused, match=r"no engine can be reached: engine 0: nothing .*engine 3: nothing listens"),
    ):
        alone.push()


def pushed(sync: VllmSync, model: Any, to: list[Replica], skipped: Collection[int], within: float = 60) -> Any:
    """A push after a step of training; all of these serve what it brought."""
    policies.train(model, size=0.02)
    began = time.monotonic()
    report = sync.push()
    assert time.monotonic() - began < within
    assert (set(report.skipped), report.transports) == (set(skipped), ("tcp",)), report
    for one in to:
        check(one, model)
    return report


def check(replica: Replica, model: Any) -> None:
    for prompt in policies.prompts():
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(plain_engine.TOKENS):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert replica.answer(prompt) == ids[len(prompt) :]


class Asking:
    """Asks a replica all the time."""

    def __init__(self, replica: Replica) -> None:
        self._longest, self._over = 0.0, False
        self._thread = threading.Thread(target=self._run, args=(replica,))
        self._thread.start()

    def _run(self, replica: Replica) -> None:
        while not self._over:
            began = time.monotonic()
            replica.answer(policies.prompts()[0])
            self._longest = max(self._longest, time.monotonic() - began)

    def longest(self) -> float:
        """Ask no more, and return the seconds of the answer that took longest."""
        self._over = True
        self._thread.join()
        return self._longest


class interrupted:
    """A block in which something happens once, when a bucket of a push is filled."""

    def __init__(self, sync: VllmSync, then: Callable[[], object]) -> None:
        self._kind: Any = UpdatePayload if sync._planner._who == "engine" else BucketWriter  # type: ignore[attr-defined]
        self._then, self._fill, self._patch = then, self._kind.fill, pytest.MonkeyPatch()

    def __enter__(self) -> None:
        happened = list[bool]()

        def filling(payload: Any, *args: Any) -> None:
            if not happened:
                happened.append(True)
                self._then()
            self._fill(payload, *args)

        self._patch.setattr(self._kind, "fill", filling)

    def __exit__(self, *error: object) -> None:
        self._patch.undo()
