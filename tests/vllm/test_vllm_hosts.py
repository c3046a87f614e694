"""A trainer on one host, and a real `vllm serve` on another: two namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engines
import hosts
import models
import pytest
from engines import train
from hosts import Other, run_on_two

from lora_merge import LoraMergeError, PushFailed, PushRefused, VllmSync
from lora_merge.engine.lease import SILENT_S
from lora_merge.engine.payload.update import UpdatePayload
from lora_merge.engine.transport import tcp_link as links
from lora_merge.engine.transport.sender import Sender
from lora_merge.stream.bucket_writer import BucketWriter
from tests.vllm.test_vllm_processes import Server, greedy, push_and_die

DENSE = {"target_modules": engines.LINEARS}
SOON_S = 4 * links.SILENT_S
"""A few calls in turn may each find out that the other host is gone: far less than a control call's limit."""


@pytest.mark.parametrize("workers", [1, 2])
def test_pushes_to_another_host(workers: int, tmp_path: Path) -> None:
    """Every bucket crosses once, however many workers take it there; where the engine merges, adapters alone do."""
    run_on_two(two_workers if workers == 2 else one_worker, tmp_path, 400)


def test_experts_cross_to_the_hosts_that_hold_them(tmp_path: Path) -> None:
    """Of two workers there, each with half of the experts, that take what they need as if on a host each: the cable
    carries the adapters of each half once."""
    run_on_two(halves_of_experts, tmp_path, 540)


def test_faults_between_hosts(tmp_path: Path) -> None:
    """A cable that is pulled in the middle of a push, a trainer and a server that are killed there: the push fails,
    nothing hangs, and the next one heals what is left."""
    run_on_two(faults, tmp_path, 540)


def test_a_server_that_is_started_anew(tmp_path: Path) -> None:
    """It comes with its checkpoint's weights, and the next push brings it to the current version. Pushes go on without
    another one, which never comes."""
    run_on_two(started_anew, tmp_path, 540)


def one_worker(other: Other, folder: Path) -> None:
    with serving(other, folder) as server:
        pushes(server, 1, knocking)


def two_workers(other: Other, folder: Path) -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    with serving(other, folder, "--tensor-parallel-size", "2") as server:
        pushes(server, 2, contextlib.nullcontext)


def pushes(server: Server, count: int, beside: Callable[[], Any]) -> None:
    model = models.with_lora(engines.qwen2, **DENSE)
    for merge in ("trainer", "auto"):
        sync = VllmSync(model, server.url, merge=merge, bucket_bytes=1 << 17)
        with beside():  # here the trainer listens
            assert sync.push().base_sent == (merge == "auto")
        check(server, model)
        for step in range(2):
            train(model, step, size=0.02)
            hosts.pushed(sync, merge, verify=step == 1)
            check(server, model)
        if merge == "trainer":
            sync.close()
    hosts.are_elsewhere(sync, count)
    sync.close()


def halves_of_experts(other: Other, folder: Path) -> None:
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "CLAIMED_HOSTS": "one,other"}
    flags = [
        "--tensor-parallel-size",
        "2",
        "--enable-expert-parallel",
        "--worker-extension-cls",
        "sliced_weights.Sliced",
    ]
    experts = {"target_modules": engines.LINEARS[:4], "target_parameters": engines.EXPERTS, "r": 64}
    model = models.with_lora(engines.qwen3_moe, **experts)
    with serving(other, folder, *flags, build=engines.qwen3_moe) as server:
        sync = VllmSync(model, server.url, bucket_bytes=1 << 17)
        assert sync.push().base_sent
        for step in range(2):
            train(model, step, size=0.02)
            before = hosts.sent()
            report = sync.push(verify=step == 1)
            went = hosts.sent() - before
            assert (report.merge, report.base_sent, report.transports) == ("engine", False, ("tcp",)), report
            update = sync._planner._update._updates._known[-1]  # type: ignore[index]
            sizes = [sum(slot.nbytes for slot in slots) for slots in update.table]
            assert {len(who) for who in update.recipients.values()} == {1}
            common = sum(size for index, size in enumerate(sizes) if index not in update.recipients)
            own = sum(sizes) - common
            assert own > common > 0
            assert 2 * common + own < went < 1.1 * (2 * common + own) + 100_000, (went, common, own)
            assert went < 1.8 * (common + own), "what both took would have crossed twice"
        sync.close()


@contextlib.contextmanager
def knocking() -> Iterator[None]:
    """Somebody connects to whatever port the trainer opens, and says nonsense, or nothing."""
    listen, ports = socket.socket.listen, list[int]()
    held: list[socket.socket] = []

    def listening(self: socket.socket, *args: Any) -> None:
        listen(self, *args)
        ports.append(self.getsockname()[1])
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096)):
            held.append(socket.create_connection((hosts.OURS, ports[-1])))
            held[-1].sendall(said)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "listen", listening)
        yield
    assert ports
    for connection in held:
        connection.close()


def check(server: Server, model: Any) -> None:
    for prompt in engines.prompts():
        assert server.generate(prompt) == greedy(model, prompt)


def faults(other: Other, folder: Path) -> None:
    model = models.with_lora(engines.qwen2, **DENSE)
    with serving(other, folder) as server:
        sync = VllmSync(model, server.url, merge="trainer", bucket_bytes=1 << 17)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_HOST_IP", "127.0.0.1")  # where the engine reaches itself
            with pytest.raises(PushRefused, match=r"Set VLLM_HOST_IP \(or SGLANG_HOST_IP\) where the trainer runs"):
                sync.push()
        assert sync.states()[0].kind == "nothing"
        sync.push()
        check(server, model)

        def failing(then: Callable[[], object], word: str) -> None:
            train(model)
            began = time.monotonic()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BucketWriter, "fill", interrupted(then))
                with pytest.raises(PushFailed, match=word):
                    sync.push()
            print(f"{then.__name__}: {time.monotonic() - began:.1f} s", flush=True)
            assert time.monotonic() - began < SOON_S

        failing(other.cut, "engine 0 (is dirty|does not answer any more)")
        began = time.monotonic()
        with pytest.raises(LoraMergeError):
            sync.push()
        assert time.monotonic() - began < SOON_S
        other.plug()
        heals(sync, server, model)

        failing(broken, "injected")
        heals(sync, server, model)

        stop = Stopped()
        failing(stop, "cancelled")
        heals(sync, server, model)

        trainer = multiprocessing.get_context("spawn").Process(target=push_and_die, args=(server.url,))
        trainer.start()
        trainer.join(400)
        assert trainer.exitcode == -signal.SIGKILL
        began = time.monotonic()
        while (state := sync.states()[0]).kind != "dirty" and time.monotonic() - began < SOON_S:
            time.sleep(0.1)
        assert state.kind == "dirty", state
        # It cannot be looked up from there, and counts as dead when it has not been heard of for a while.
        with pytest.raises(PushRefused, match="in the middle of another trainer's push"):
            sync.push()
        time.sleep(SILENT_S + 1)
        heals(sync, server, model)

        with contextlib.closing(VllmSync(model, server.url, bucket_bytes=1 << 17)) as alone:
            cut_while_adapters_cross(other, alone, server, model)
        sync.push()
        failing(lambda: os.killpg(server.process.pid, signal.SIGKILL), "engine 0 (is dirty|does not answer any more)")
        began = time.monotonic()
        sync.close()
        assert time.monotonic() - began < SOON_S
    assert not [t for t in threading.enumerate() if "_meet" in t.name or "_accept" in t.name]


def cut_while_adapters_cross(other: Other, sync: VllmSync, server: Server, model: Any) -> None:
    """Nothing of the engine has changed by then; the next push says where it goes on."""
    assert sync.push().merge == "engine"
    check(server, model)
    (before,), fill = sync.states(), UpdatePayload.fill
    train(model, size=0.02)

    def filling(self: UpdatePayload, *args: Any) -> None:
        other.cut()
        fill(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdatePayload, "fill", filling)
        with pytest.raises(LoraMergeError):
            sync.push()
    other.plug()
    assert sync.states() == [before]
    report = sync.push()
    assert not report.base_sent, report
    check(server, model)


def started_anew(other: Other, folder: Path) -> None:
    model = models.with_lora(engines.qwen2, **DENSE)
    with serving(other, folder) as server:
        never = server.url.rpartition(":")[0] + ":1"
        with contextlib.closing(VllmSync(model, [server.url, never], bucket_bytes=1 << 17, lost="skip")) as sync:
            brought(sync, server, model, base_sent=True)
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
            with pytest.raises(PushRefused, match=r"no engine can be reached: engine 0: (nothing listens at|.*closes)"):
                sync.push()
            server.start()
            server.wait()
            with pytest.raises(PushRefused, match=r"engine 1: nothing listens at"):
                sync.check()
            brought(sync, server, model, base_sent=True)
            brought(sync, server, model, base_sent=False)


def brought(sync: VllmSync, server: Server, model: Any, *, base_sent: bool) -> None:
    """A push that goes on without the second engine."""
    train(model, size=0.02)
    report = sync.push(verify=not base_sent)
    assert (set(report.skipped), report.merge, report.base_sent) == ({1}, "engine", base_sent), report
    check(server, model)


def heals(sync: VllmSync, server: Server, model: Any) -> None:
    assert sync.states()[0].kind == "dirty"
    assert sync.push(verify=True).transports == ("tcp",)
    check(server, model)


def interrupted(then: Callable[[], object]) -> Callable[..., None]:
    """`BucketWriter.fill`, but for what happens at the fourth bucket."""
    fill = BucketWriter.fill

    def filling(self: BucketWriter, index: int, *args: Any) -> None:
        if index == 3:
            then()
        fill(self, index, *args)

    return filling


def broken() -> None:
    raise RuntimeError("injected")


class Stopped:
    """As a cancelled `apush` does."""

    __name__ = "a stop"

    def __init__(self) -> None:
        serve = Sender.serve

        def serving(sender: Sender, *args: Any, **kwargs: Any) -> None:
            self.sender = sender
            serve(sender, *args, **kwargs)

        Sender.serve = serving  # type: ignore[method-assign]

    def __call__(self) -> None:
        self.sender.stop()


@contextlib.contextmanager
def serving(other: Other, folder: Path, *flags: str, build: Callable[[], Any] = engines.qwen2) -> Iterator[Server]:
    engines.save_base(build(), folder / "base")
    server = Server(folder / "base", folder / "server.log", *flags, elsewhere=other.command, host=hosts.THEIRS)
    try:
        server.wait()
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.close()
