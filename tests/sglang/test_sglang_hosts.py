"""A trainer on one host, and a real SGLang server on another: two namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import policies
import pytest
from hosts import Other, run_on_two
from sglang_engines import assert_answers

from lora_merge import LoraMergeError, PushFailed, PushRefused, SglangSync
from lora_merge.engine.payload.update import UpdatePayload
from lora_merge.engine.transport import tcp_link as links
from lora_merge.stream.bucket_writer import BucketWriter
from tests.sglang.test_sglang_server import act, answers, policy, serving

BUCKET = 1 << 17
SOON_S = 4 * links.SILENT_S
"""A few calls in turn may each find out that the other host is gone."""


@pytest.mark.parametrize("schedulers", [1, 2])
def test_pushes_to_another_host(schedulers: int, tmp_path: Path) -> None:
    """Every bucket crosses once, however many schedulers take it there; where the engine merges, adapters alone do."""
    run_on_two(two_schedulers if schedulers == 2 else one_scheduler, tmp_path, 540)


def test_faults_between_hosts(tmp_path: Path) -> None:
    """An address that the engine does not reach, a cable that is pulled in the middle of a push, a scheduler that is
    killed there: the push fails soon, nothing hangs, and the next one heals what is left."""
    run_on_two(faults, tmp_path, 540)


def one_scheduler(other: Other, folder: Path) -> None:
    pushes(other, folder, 1)


def two_schedulers(other: Other, folder: Path) -> None:
    pushes(other, folder, 2)


def pushes(other: Other, folder: Path, count: int) -> None:
    options = {"tp_size": 2} if count == 2 else {}
    with serving(folder / "base", elsewhere=other.command, host=hosts.THEIRS, **options) as url:
        model = policy()
        for merge in ("trainer", "auto"):
            sync = SglangSync(model, url, merge=merge, bucket_bytes=BUCKET)
            assert sync.push().base_sent == (merge == "auto")
            assert_answers(answers(url), model)
            for step in range(2):
                policies.train(model, step, size=0.02)
                hosts.pushed(sync, merge, verify=step == 1)
                assert_answers(answers(url), model)
            if merge == "trainer":
                sync.close()
        hosts.are_elsewhere(sync, count)
        sync.close()


def faults(other: Other, folder: Path) -> None:
    model = policy()
    with serving(folder / "base", elsewhere=other.command, host=hosts.THEIRS) as url:
        sync = SglangSync(model, url, merge="trainer", bucket_bytes=BUCKET)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SGLANG_HOST_IP", "127.0.0.1")  # where the engine reaches itself
            with pytest.raises(PushRefused, match=r"Set VLLM_HOST_IP \(or SGLANG_HOST_IP\) where the trainer runs"):
                sync.push()
        assert sync.states()[0].kind == "nothing"
        sync.push()
        assert_answers(answers(url), model)

        failing(sync, model, BucketWriter, 3, other.cut)
        other.plug()
        assert sync.states()[0].kind == "dirty"
        assert sync.push(verify=True).transports == ("tcp",)
        assert_answers(answers(url), model)

        # While adapters cross nothing of the engine has changed yet; nobody could tell it to go on.
        with contextlib.closing(SglangSync(model, url, merge="engine", bucket_bytes=BUCKET)) as alone:
            assert alone.push().base_sent
            (held,) = alone.states()
            failing(alone, model, UpdatePayload, 0, other.cut)
            other.plug()
            assert alone.states() == [held]
            assert not alone.push().base_sent
            assert_answers(answers(url), model)

        sync.push()
        process = act(url, "process")
        assert isinstance(process, int), "a number of its own host's"
        act(url, "fail", "bucket", [0], 2, True)
        began = time.monotonic()
        policies.train(model)
        with pytest.raises(PushFailed, match=r"engine 0 (is dirty|does not answer any more)"):  # it ends just now
            sync.push()
        assert time.monotonic() - began < SOON_S
        sync.close()


def failing(sync: SglangSync, model: Any, source: Any, at: int, then: Callable[[], object]) -> None:
    """A push of a policy that was trained on, in which something happens as a bucket is filled."""
    policies.train(model, size=0.02)
    fill, began = source.fill, time.monotonic()

    def filling(self: Any, index: int, *args: Any) -> None:
        if index == at:
            then()
        fill(self, index, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "fill", filling)
        with pytest.raises(LoraMergeError):
            sync.push()
    assert time.monotonic() - began < SOON_S
