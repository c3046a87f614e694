"""A sharded trainer of two real processes, and a real engine in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
import torch.distributed as dist
from engines import engine
from processes import spawn
from repository import ROOT
from sharded_trainer import every_layout, pushes, train_alike
from torch import nn

from lora_merge import VllmSync
from lora_merge.engine.payload.pull import MOVED
from lora_merge.engine.transport import routing as transport
from lora_merge.shards import here
from tests.shards.test_shards_merge import fsdp1, fsdp1_flat, fsdp2, hsdp

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


@pytest.mark.parametrize("wrap", [fsdp2, fsdp1])
def test_pushes_of_a_sharded_trainer(wrap: object, tmp_path: Path) -> None:
    spawn(2, pushes, wrap, tmp_path, torch.float32, [""], {}, 12e-6, timeout=timedelta(minutes=8))


def test_every_layout_and_what_is_refused(tmp_path: Path) -> None:
    spawn(4, every_layout, tmp_path, timeout=timedelta(minutes=8))


def with_engine(work: Any, rank: int, folder: Path, build: Any, options: dict[str, Any]) -> None:
    """`work(llms)` on every rank, with rank 0's engine of two workers, whose experts lie as they were loaded."""
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_HOST_IP": "127.0.0.1"}
    options = {"tensor_parallel_size": 2, "worker_extension_cls": "sliced_weights.Sliced", **options}
    with engine(build(), folder / "base", processes=True, **options) if rank == 0 else nullcontext() as llm:
        work([llm] if llm is not None else [])


def check_ways(model: nn.Module, plain: nn.Module, llms: list[Any], looks: Any = None) -> None:
    """A push in buckets, one that the workers pull and one that the ranks write, each of other adapters and onto other
    bits: all bring what the same model brings that is not sharded, in buckets.

    Args:
        looks: at what has been mapped, after a push in such a `way`.
    """
    sync = VllmSync(model, llms or None, merge="trainer", bucket_bytes=1 << 17)
    for ways in (("shm",), ("pull", "shm"), ("write",)):
        for one in (model, plain):
            train_alike(one)
        if "pull" in ways:
            for parameter in model.parameters():
                here(parameter).share_memory_()
            report = sync.push()
            assert MOVED in report.buckets, report
        for llm in llms:
            if "write" in ways:
                llm.collective_rpc("share")
            llm.collective_rpc("scale")
        report = sync.push()
        assert (report.transports, report.coverage) == (ways, 1.0), report
        assert not report.buckets or ways == ("shm",)
        if "pull" in ways:  # what comes in buckets is adapters alone
            assert not sync._planner._pulls[sync._planner._weights]._last.whole_names
        if looks is not None:
            looks(ways[0], sync)
        bits = [llm.collective_rpc("bits") for llm in llms]
        with closing(VllmSync(plain, llms or None, merge="trainer", bucket_bytes=1 << 17)) as buckets:
            buckets.push()
        assert [llm.collective_rpc("bits") for llm in llms] == bits, ways
    sync.close()


def flat_ranges(rank: int, folder: Path, wrap: Any) -> None:
    def build() -> Any:
        experts = {"target_modules": engines.LINEARS[:4], "target_parameters": engines.EXPERTS}
        return models.with_lora(engines.qwen3_moe, dtype=torch.bfloat16, adapter_dtype=torch.bfloat16, **experts)

    def work(llms: list[Any]) -> None:
        check_ways(wrap(build()), build(), llms)

    with_engine(work, rank, folder, build, {"enable_expert_parallel": True})


@pytest.mark.parametrize("wrap", [fsdp1, fsdp1_flat])
def test_workers_pull_flat_ranges_and_ranks_write_them(wrap: Any, tmp_path: Path) -> None:
    """FSDP1 with and without `use_orig_params`, into two workers that have half of the experts each."""
    spawn(2, flat_ranges, tmp_path, wrap, timeout=timedelta(minutes=8))


def groups(rank: int, folder: Path) -> None:
    """Ranks 0 and 1 hold a copy of the model between them, 2 and 3 another, on another host, as they say."""
    hosts = ["one", "other"]
    transport.host_id = lambda: hosts[rank // 2]

    def build() -> Any:
        return models.with_lora(engines.qwen2, dtype=torch.bfloat16, target_modules=engines.LINEARS)

    def looks(way: str, sync: VllmSync) -> None:
        """Each worker reads, and is written to by, the ranks of its host."""
        pids: list[Any] = [None] * 4
        dist.all_gather_object(pids, os.getpid())
        for control in sync._trainer.controls:
            for number, pid in enumerate(pids if way == "pull" else ()):
                mapped = control.engine.collective_rpc("mapped", args=(pid,))
                assert [bool(count) for count in mapped] == [number < 2, number > 1], (number, mapped)
        if way == "write":
            (mapping,) = sync._trainer._mapped.values()
            assert set(mapping.mapped) == {(0, rank // 2)}

    def work(llms: list[Any]) -> None:
        for llm in llms:
            llm.collective_rpc("claim_hosts", args=(hosts,))
        check_ways(hsdp(build()), build(), llms, looks)

    with_engine(work, rank, folder, build, {})


def test_each_worker_meets_the_copy_of_the_model_on_its_host(tmp_path: Path) -> None:
    spawn(4, groups, tmp_path, timeout=timedelta(minutes=8))


def test_the_benchmark(tmp_path: Path) -> None:
    """Pushes of benchmarks/fsdp.py and of the peer beside it, into one engine."""
    root, data = ROOT, tmp_path / "fsdp.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(root / "benchmarks" / "fsdp.py"), "--device", "cpu", "--shape", "tiny", "--tp", "1"]
    command += ["--parts", "push", "peer", "--bucket-bytes", "200000", "--repeats", "1", "--json", str(data)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    record = json.loads(data.read_text())
    assert record["push"]["tensors"] == 27
    assert record["push"]["phases_ms"].keys() == {"check", "pause", "transfer", "finish", "resume"}
    assert record["peer"]["phases_ms"].keys() == {"backup", "merge", "send and load", "restore"}
    assert record["peer"]["times_faster"] == record["peer"]["total_ms"] / record["push"]["total_ms"]
