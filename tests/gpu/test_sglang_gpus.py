"""SGLang on two GPUs: an engine on another one than the trainer's, and one on both, by CUDA IPC and by NCCL."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import policies
import pytest
import sglang_engines
import torch
from sglang_engines import ask, do, engine

from lora_merge import PushFailed, PushRefused, SglangSync
from lora_merge.stream.bucket_writer import BucketWriter
from tests.gpu.test_sglang_gpu import BUCKET, assert_answers, assert_bits, assert_told, policy, qwen3_moe
from tests.sglang.test_sglang_models import MOE
from tests.sglang.test_sglang_server import act, answers, serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
ELSEWHERE = {"base_gpu_id": 1}
UNMAPPED = {"enable_memory_saver": True}
"""Memory that no other process can map: where the trainer's cannot be mapped either (`unmapped`), buckets go."""
BOTH = {"tp_size": 2, "disable_custom_all_reduce": True}
no_leftovers = sglang_engines.no_leftovers


@contextlib.contextmanager
def unmapped() -> Iterator[None]:
    """What is allocated inside lies in expandable segments, which no worker can read."""
    gc.collect()
    torch.cuda.empty_cache()  # or it lies where an earlier test left room, which workers can read
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_an_engine_on_another_gpu(tmp_path: Path) -> None:
    """Written straight over NVLink; what is compared, and adapters alone, by NCCL."""
    model = policy()
    with engine(model, tmp_path / "base", **ELSEWHERE) as started:
        for merge in ("trainer", "engine"):
            sync = SglangSync(model, started, merge=merge, bucket_bytes=BUCKET)
            for step in range(3):
                report = sync.push(verify=step == 1)
                if merge == "trainer":
                    assert report.transports == (("nccl", "write") if step == 1 else ("write",)), report
                elif step:
                    assert (report.transports, report.base_sent) == (("nccl",), False), report
                assert_answers(ask(started), model)
                assert_bits(started, model, tmp_path)
                policies.train(model, step)
            sync.close()


def test_nccl(tmp_path: Path) -> None:
    """Every bucket by a broadcast; faults on either side end it for both, and the next push heals the engine."""
    with unmapped():
        model = policy()
    with engine(model, tmp_path / "base", **ELSEWHERE | UNMAPPED) as started:
        sync = SglangSync(model, started, merge="trainer", bucket_bytes=BUCKET)
        report = sync.push(verify=True)
        assert report.transports == ("nccl",), report
        assert "does not export" in report.buckets, report.buckets
        assert_answers(ask(started), model)
        assert_bits(started, model, tmp_path)

        for where in ("connect", "bucket", "finish"):
            policies.train(model)
            if where == "connect":  # which is known by now
                sync.close()
                sync = SglangSync(model, started, merge="trainer", bucket_bytes=BUCKET * 2)
            do(started, "fail", where, [0], 2 if where == "bucket" else 0)
            began = time.monotonic()
            with pytest.raises((PushFailed, PushRefused), match="injected"):
                sync.push()
            assert time.monotonic() - began < 60
            do(started, "mend")
            assert sync.states()[0].kind == ("merged" if where == "connect" else "dirty")
            assert sync.push(verify=True).transports == ("nccl",)
            assert_answers(ask(started), model)

        policies.train(model)
        fill = BucketWriter.fill

        def breaks(self: BucketWriter, index: int, *args: Any) -> None:
            if index == 3:
                raise MemoryError("injected")
            fill(self, index, *args)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(BucketWriter, "fill", breaks)
            with pytest.raises(PushFailed, match="injected"):
                sync.push()
        assert sync.states()[0].kind == "dirty"
        sync.push(verify=True)
        assert_answers(ask(started), model)
        assert_bits(started, model, tmp_path)
        sync.close()


@pytest.mark.parametrize("options", [{}, UNMAPPED], ids=["mapped", "buckets"])
def test_tensor_parallel(options: dict[str, Any], tmp_path: Path) -> None:
    """One scheduler on the trainer's GPU, one on the other."""
    with unmapped() if options else contextlib.nullcontext():
        model = policy()
    with engine(model, tmp_path / "base", **BOTH | options) as started:
        for merge in ("trainer", "engine"):
            sync = SglangSync(model, started, merge=merge, bucket_bytes=BUCKET)
            for step in range(2):
                report = sync.push(verify=step == 0)
                if options and merge == "trainer":
                    assert report.transports == ("ipc", "nccl"), report
                elif merge == "trainer":
                    assert report.transports == (("ipc", "nccl", "write") if step == 0 else ("write",)), report
                assert_answers(ask(started), model)
                policies.train(model, step)
            sync.close()


def test_experts_on_both(tmp_path: Path) -> None:
    model = policy(qwen3_moe, **MOE)
    with engine(model, tmp_path / "base", **BOTH) as started:
        for merge in ("trainer", "engine"):
            sync = SglangSync(model, started, merge=merge, bucket_bytes=BUCKET)
            for step in range(2):
                sync.push(verify=step == 0)
                assert_answers(ask(started), model)
                policies.train(model, step)
            sync.close()


def test_a_scheduler_that_dies_in_a_broadcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer is told soon, and lives on."""
    with unmapped():
        model = policy()
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", os.environ.get("NCCL_CUMEM_ENABLE", "1"))  # else SGLang sets 0
    with serving(tmp_path / "base", model, **ELSEWHERE | UNMAPPED) as url:
        sync = SglangSync(model, url, merge="trainer", bucket_bytes=BUCKET)
        assert sync.push().transports == ("nccl",)
        assert_answers(answers(url), model)
        policies.train(model)
        assert_told(sync, act(url, "process"), "fill", 3)
    torch.cuda.synchronize()


def with_one_gpu(folder: str) -> None:
    """A trainer that sees one GPU, and an engine on the other one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    model = policy()
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # of the engine's processes; this one has begun
    with engine(model, Path(folder) / "base") as started:
        sync = SglangSync(model, started, merge="trainer", bucket_bytes=BUCKET)
        for step in range(2):
            report = sync.push()
            assert report.transports == (("nccl",) if report.buckets else ("write",)), report
            assert_answers(ask(started), model)
            policies.train(model, step)
        assert sync.push(verify=True).transports == ("nccl", "write")
        assert_answers(ask(started), model)
        sync.close()


def test_a_gpu_that_the_trainer_does_not_see(tmp_path: Path) -> None:
    """As in Ray's actors."""
    process = torch.multiprocessing.get_context("spawn").Process(target=with_one_gpu, args=(str(tmp_path),))
    process.start()
    process.join(240)
    assert process.exitcode == 0
