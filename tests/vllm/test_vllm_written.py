"""Engines in other processes whose tensors the trainer has mapped: merged weights are written straight into them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
import torch.distributed as dist
from engines import ask, assert_answers, engine, train
from processes import spawn
from sharded_trainer import check_answers, train_alike

from lora_merge import LoraMergeError, PushFailed, VllmSync
from lora_merge.engine.push.replica import SyncReport
from lora_merge.stream.bucket_writer import BucketWriter
from lora_merge.verify import coverage
from tests.shards.test_shards_merge import fsdp1, fsdp2, fsdp2_columns

DENSE = {"target_modules": engines.LINEARS}
EXTENDED = {"worker_extension_cls": "shared_weights.Shared"}
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
KINDS = ["qwen2", "llama", "qwen3"]


def policy(seed: int = 0, build: Any = engines.qwen2) -> Any:
    return models.with_lora(build, seed=seed, **DENSE)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of two tensor-parallel workers, whose weights can be mapped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        folder = tmp_path_factory.mktemp("wide") / "base"
        options = EXTENDED | {"enable_lora": True, "max_lora_rank": 8}
        with engine(policy(), folder, processes=True, tensor_parallel_size=2, **options) as llm:
            llm.collective_rpc("share")
            yield llm


def written(report: SyncReport) -> None:
    assert report.transports == ("write",), report
    assert not report.buckets
    assert report.coverage == 1.0


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_in_another_process_is_written_to(kind: str, tmp_path: Path) -> None:
    """What lies there is what comes by buckets, bit for bit; and no buckets are made."""
    model = policy(build=getattr(engines, kind))
    with engine(model, tmp_path / "base", processes=True, **EXTENDED) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        report = sync.push()
        assert report.transports == ("shm",)
        assert ": it lies in memory of its own process" in report.buckets
        assert report.buckets in str(report)
        by_buckets = llm.collective_rpc("bits")
        llm.collective_rpc("share")
        assert sync.states()[0].kind == "merged", "moved, and the bits are the same"
        for step in range(3):
            written(sync.push())
            assert step or llm.collective_rpc("bits") == by_buckets
            assert_answers(ask(llm), model)
            assert all(c.complete for c in coverage(llm))
            train(model, step)
        assert sync.push(verify=True).transports == ("shm", "write"), "what is compared comes both ways"
        assert_answers(ask(llm), model)
        train(model, 7)
        written(sync.push())
        assert_answers(ask(llm), model)
        sync.close()


def test_weights_that_move_are_mapped_anew(tmp_path: Path) -> None:
    model = policy()
    with engine(model, tmp_path / "base", processes=True, **EXTENDED) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step, share in enumerate([True, True, False, True]):
            llm.collective_rpc("move", args=(share,))
            report = sync.push()
            assert report.transports == (("write",) if share else ("shm",)), step
            assert_answers(ask(llm), model)
            train(model, step)
        sync.close()
        assert "/torch_" not in Path("/proc/self/maps").read_text(), "unmapped"
        other = policy(seed=5)
        with closing(VllmSync(other, llm, bucket_bytes=1 << 17)) as theirs:
            written(theirs.push())
            assert_answers(ask(llm), other)


def test_two_workers_adapters_and_layers_that_are_laid_out_anew(wide: Any) -> None:
    """Each worker has its slices written; an adapter goes through a bucket, and its base straight."""
    model = policy()
    sync = VllmSync(model, wide, bucket_bytes=1 << 17)
    for step, (mode, transports) in enumerate(
        [("merged", ("write",)), ("adapter", ("shm", "write")), ("adapter", ("shm",)), ("merged", ("write",))]
    ):
        report = sync.push(mode=mode)
        assert report.transports == transports
        assert_answers(ask(wide, sync.lora_request()), model)
        train(model, step)
    sync.close()


def test_stochastic_rounding_has_the_same_bits_both_ways(wide: Any) -> None:
    model = models.with_lora(engines.qwen2, dtype=torch.float32, **DENSE)
    sync = VllmSync(model, wide, rounding="stochastic", bucket_bytes=1 << 17)
    assert sync.push(verify=True).transports == ("shm", "write"), "compared bit for bit in each worker"
    written(sync.push())
    assert_answers(ask(wide), model)
    sync.close()


def test_experts_go_through_buckets_and_what_lies_beside_them_straight(tmp_path: Path) -> None:
    """vLLM lays experts out anew on a CPU."""
    experts = {"target_modules": engines.LINEARS[:4], "target_parameters": engines.EXPERTS}
    model = models.with_lora(engines.qwen3_moe, **experts)
    with engine(model, tmp_path / "base", processes=True, **EXTENDED) as llm:
        llm.collective_rpc("share")
        sync = VllmSync(model, llm, bucket_bytes=1 << 16)
        for step in range(2):
            report = sync.push(verify=step == 1)
            assert report.transports == ("shm", "write")
            assert report.coverage == 1.0
            assert_answers(ask(llm), model)
            train(model, step)
        sync.close()


# where -> after how many times, whether the engine is dirty then
PHASES = {
    "dry_run": (0, False),
    "export_memory": (0, False),
    "begin_full": (0, True),
    "finish": (0, True),
    "commit": (0, True),
}


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
def test_one_or_all_workers_fail_in_each_phase(wide: Any, ranks: list[int]) -> None:
    model = policy()
    for where, (after, dirty) in PHASES.items():
        sync = VllmSync(model, wide, bucket_bytes=1 << 17)  # nothing is mapped yet
        before = sync.states()
        wide.collective_rpc("fail", args=(where, ranks, after))
        with pytest.raises(LoraMergeError, match=f"injected into {where}"):
            sync.push()
        assert wide.collective_rpc("mend") == ["well"] * 2
        (state,) = sync.states()
        assert (state.kind == "dirty") == dirty
        assert dirty or [state] == before
        written(sync.push())
        assert_answers(ask(wide), model)
        train(model)
        sync.close()


@pytest.mark.parametrize("at", [0, 1, "last"])
def test_a_trainer_that_breaks_while_it_writes(wide: Any, at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    sync = VllmSync(model, wide, bucket_bytes=1 << 17)
    written(sync.push())
    train(model)
    place = BucketWriter.write_direct

    def broken(self: BucketWriter, index: int, *args: Any) -> None:
        place(self, index, *args)
        if index == (len(self.table) - 1 if at == "last" else at):
            raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(BucketWriter, "write_direct", broken)
        with pytest.raises(PushFailed, match="injected"):
            sync.push()
    assert sync.states()[0].kind == "dirty"
    written(sync.push())
    assert_answers(ask(wide), model)
    sync.close()


def test_a_replica_that_fails_before_is_not_written_to(wide: Any, tmp_path: Path) -> None:
    """It may be another trainer's by now. The other one gets everything, and the next push both."""
    model = policy()
    with engine(model, tmp_path / "base", processes=True, **EXTENDED) as llm:
        llm.collective_rpc("share")
        sync = VllmSync(model, [wide, llm], bucket_bytes=1 << 17)
        written(sync.push())
        for number, failing in enumerate([llm, wide]):
            train(model, number)
            workers = 1 if failing is llm else 2
            failing.collective_rpc("fail", args=("begin_full", [0], 0))
            before = failing.collective_rpc("bits")
            with pytest.raises(PushFailed, match="injected into start"):
                sync.push()
            assert failing.collective_rpc("mend") == ["well"] * workers
            assert failing.collective_rpc("bits") == before, "nothing was written to it"
            kinds = [state.kind for state in sync.states()]
            assert kinds == (["merged", "dirty"] if failing is llm else ["dirty", "merged"])
            assert_answers(ask(wide if failing is llm else llm), model)
            written(sync.push())
            for one in (wide, llm):
                assert_answers(ask(one), model)
        sync.close()


def test_the_new_state_is_noted_when_all_is_written(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the trainer writes: what a worker takes a sample of then changes behind its back."""
    model = policy()
    place = BucketWriter.write_direct

    def slow(self: BucketWriter, index: int, *args: Any) -> None:
        time.sleep(0.3)
        place(self, index, *args)

    monkeypatch.setattr(BucketWriter, "write_direct", slow)
    with closing(VllmSync(model, wide, bucket_bytes=1 << 17)) as sync:
        for step in range(2):
            train(model, step)
            assert sync.push().transports == ("write",)
            assert sync.states()[0].kind == "merged"


def test_an_interrupt_while_it_writes(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    sync = VllmSync(model, wide, bucket_bytes=1 << 17)
    place = BucketWriter.write_direct

    def slow(self: BucketWriter, index: int, *args: Any) -> None:
        place(self, index, *args)
        if index == 1:
            threading.Timer(0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            time.sleep(0.5)

    with monkeypatch.context() as patch:
        patch.setattr(BucketWriter, "write_direct", slow)
        with pytest.raises(KeyboardInterrupt):
            sync.push()
    assert sync.states()[0].kind == "dirty"
    train(model)
    written(sync.push())
    assert_answers(ask(wide), model)
    sync.close()


def test_what_leads_out_of_a_worker_s_memory_is_not_mapped(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A description is not taken at its word: it goes through buckets then, and says why."""
    from lora_merge.engine.push.channels import Trainer

    asked = Trainer.ask

    def forged(worker: Any) -> None:
        views = next(iter(worker["views"].values()))
        views[0][3] = worker["memory"][views[0][2]]["nbytes"]

    def elsewhere(worker: Any) -> None:
        worker["memory"][0]["path"] = f"/proc/{os.getpid()}/fd/1"

    model = policy()
    for number, (forge, why) in enumerate([(forged, "is not inside of"), (elsewhere, "is not shared memory of")]):
        with monkeypatch.context() as patch:

            async def told(self: Any, replicas: Any, op: str, *args: Any, forge: Any = forge, **options: Any) -> Any:
                answers = await asked(self, replicas, op, *args, **options)
                for worker in chain.from_iterable(answers.values()) if op == "export_memory" else ():
                    forge(worker)
                return answers

            patch.setattr(Trainer, "ask", told)
            sync = VllmSync(model, wide, bucket_bytes=1 << 17)
            report = sync.push()
        assert report.transports == ("shm",)
        assert why in report.buckets
        assert_answers(ask(wide), model)
        train(model, number)
        sync.close()


def shards(rank: int, folder: Path) -> None:
    """Each rank writes what it owns into both workers; one that fails leaves the engine dirty, and the others free."""
    build = {"dtype": torch.float32, **DENSE}
    plain = models.with_lora(engines.qwen2, **build)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    llms = []
    manager: Any = None
    if rank == 0:
        manager = engine(plain, folder / "base", processes=True, tensor_parallel_size=2, **EXTENDED)
        llms.append(manager.__enter__())
        llms[0].collective_rpc("share")
    try:
        dist.barrier()
        for wrap in (fsdp2, fsdp2_columns, fsdp1):
            model = wrap(models.with_lora(engines.qwen2, **build))
            again = models.with_lora(engines.qwen2, **build)
            sync = VllmSync(model, llms or None, bucket_bytes=1 << 17)
            place = BucketWriter.write_direct
            for _ in range(2):
                train_alike(model)
                train_alike(again)
                written(sync.push())
                for llm in llms:
                    check_answers(llm, sync, again, 12e-6, True)

            def broken(self: BucketWriter, index: int, *args: Any, place: Any = place) -> None:
                place(self, index, *args)
                if index == 1 and rank == 1:
                    raise RuntimeError("injected")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BucketWriter, "write_direct", broken)
                with pytest.raises(PushFailed, match="injected"):
                    sync.push()
            assert [state.kind for state in sync.states()] == ["dirty"] * len(llms)
            train_alike(model)
            train_alike(again)
            assert sync.push(verify=True).transports == ("shm", "write")
            written(sync.push())
            for llm in llms:
                check_answers(llm, sync, again, 12e-6, True)
            sync.close()
    finally:
        if manager is not None:
            manager.__exit__(None, None, None)


def test_ranks_of_a_sharded_trainer_write_what_they_own(tmp_path: Path) -> None:
    spawn(2, shards, tmp_path, timeout=timedelta(minutes=8))
