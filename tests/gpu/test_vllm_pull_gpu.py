"""Pull on NVIDIA GPUs: engines in sleep mode, whose memory cannot be mapped, read the trainer's over CUDA IPC."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
import torch.distributed as dist
import weight_bits
from engines import ask, engine, train
from peft import LoraConfig
from policies import SIZES
from processes import spawn
from sharded_trainer import check_answers, train_alike
from torch import nn

from lora_merge import MergedWeights, PushFailed, VllmSync
from lora_merge.engine.payload.pull import MOVED, PullSource
from lora_merge.engine.push import negotiators as offer
from lora_merge.engine.push.replica import SyncReport
from tests.gpu.test_vllm_gpu import BF16, DENSE, ENGINE, MOE, TOLERANCE, needs, policy
from tests.shards.test_shards_merge import fsdp2, fsdp2_columns

pytestmark = pytest.mark.gpu
assert_answers = partial(engines.assert_answers, tolerance=TOLERANCE, greedy=False)
SLEEPY: dict[str, Any] = BF16 | {"enable_sleep_mode": True, "worker_extension_cls": "weight_bits.Bits"}


def larger() -> nn.Module:
    """Of sizes that every kernel takes as it takes a real model's."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | sizes | {"vocab_size": 4096}, tie_word_embeddings=False))


def move(model: nn.Module, step: int) -> None:
    """There and back again: where `train` goes on and on, the adapters of `larger` soon are so large that two bf16
    forwards of one policy are 0.25 apart (measured on a CPU)."""
    train(model, step // 2, size=0.02 if step % 2 else -0.02)


def begun(sync: VllmSync) -> VllmSync:
    """After a first push, which shows where the weights lie."""
    report = sync.push()
    assert "sleep mode" in report.buckets
    assert MOVED in report.buckets
    return sync


def pulled(report: SyncReport, *others: str) -> None:
    assert report.transports == tuple(sorted({"pull", *others})), report
    assert not report.buckets


def bits_of_buckets(llm: Any, model: Any) -> Any:
    """The engine's bits after a push in buckets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offer, "unreadable", lambda stream: "a test wants buckets")
        with closing(VllmSync(model, llm)) as sync:
            report = sync.push()
            assert "a test wants buckets" in report.buckets, report
    return llm.collective_rpc("bits")


def compare(llm: Any, model: Any) -> None:
    """What lies in the engine is what buckets bring, and what the trainer merges by itself."""
    bits = llm.collective_rpc("bits")
    first = {name.replace(".base_layer.", "."): value for name, value in bits[0].items()}
    merged = {name: weight_bits.bits_of(tensor) for name, tensor in MergedWeights(model)}
    names = [name for name in merged if name in first]
    assert any("down_proj" in name for name in names)
    assert {name: merged[name] for name in names} == {name: first[name] for name in names}
    assert bits_of_buckets(llm, model) == bits


def used() -> int:
    """Bytes in use on this GPU, by everybody."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_an_engine_that_sleeps(tmp_path: Path) -> None:
    """Bits, 20 pushes with flat memory, both levels of sleep, weights that move."""
    model = policy(larger, **DENSE, r=32, lora_alpha=64)
    with engine(model, tmp_path / "base", processes=True, **SLEEPY) as llm:
        sync = begun(VllmSync(model, llm))
        pulled(sync.push())
        compare(llm, model)
        train(model)
        pulled(sync.push(verify=True))
        assert_answers(ask(llm), model)

        memory = []
        for step in range(20):
            move(model, step)
            pulled(sync.push())
            memory.append((torch.cuda.memory_allocated(), *llm.collective_rpc("allocated")))
        for of_one in zip(*memory, strict=True):
            assert max(of_one[10:]) <= max(of_one[2:10]) + 4096, memory
        assert_answers(ask(llm), model)

        for step, level in enumerate([1, 2, 1]):
            llm.sleep(level=level)
            move(model, step)
            pulled(sync.push(verify=step == 2))
            assert_answers(ask(llm), model)
        llm.sleep(level=1)
        llm.wake_up()
        assert sync.states()[0].kind == "merged"
        assert_answers(ask(llm), model)
        llm.sleep(level=2)
        llm.wake_up()
        assert sync.states()[0].kind == "dirty", "the weights were discarded behind our back"
        pulled(sync.push())
        assert_answers(ask(llm), model)
        weights_that_move(model, llm, sync)
        compare(llm, model)
        sync.close()


def weights_that_move(model: Any, llm: Any, sync: VllmSync) -> None:
    """A trainer that offloads: what it frees is free, as nobody has it mapped from the first move on."""
    for step in range(3):
        before = used()
        model.cpu()
        torch.cuda.empty_cache()
        freed = before - used()
        assert step == 0 or freed > sum(p.nbytes for p in model.parameters()) / 2, (step, freed)
        model.cuda()
        report = sync.push()
        assert report.transports == ("ipc",)
        assert MOVED in report.buckets, step
        assert_answers(ask(llm), model)
        move(model, step)
    pulled(sync.push())


def test_merged_values_beyond_float16(tmp_path: Path) -> None:
    """A worker that merges what it reads refuses infinite results by name; the next push heals the engine."""
    model = policy(larger, **DENSE, r=32, lora_alpha=64).half()
    with engine(model, tmp_path / "base", processes=True, **SLEEPY | {"dtype": "float16"}) as llm:
        sync = begun(VllmSync(model, llm))
        pulled(sync.push())
        factors = [p for name, p in model.named_parameters() if "layers.1.mlp.up_proj.lora_" in name]
        with torch.no_grad():
            kept = [factor.clone() for factor in factors]
            for factor in factors:
                factor.fill_(200)  # their product is 2 * 32 * 200 * 200
            with pytest.raises(PushFailed, match=r"layers\.1\.mlp\.up_proj.*up to 65504"):
                sync.push()
            assert sync.states()[0].kind == "dirty"
            for factor, values in zip(factors, kept, strict=True):
                factor.copy_(values)
        sync.push()
        assert_answers(ask(llm), model)
        sync.close()


def test_other_adapters(tmp_path: Path) -> None:
    """DoRA, several at a time, and a head that trains whole; and adapter mode onto a base that was read."""
    model = policy(larger, **DENSE, r=8, lora_alpha=16)
    options = SLEEPY | {"enable_lora": True, "max_lora_rank": 8}
    targets = {"target_modules": engines.LINEARS, "init_lora_weights": False}
    with engine(model, tmp_path / "base", processes=True, **options) as llm:
        sync = begun(VllmSync(model, llm))
        for step, mode in enumerate(("merged", "adapter", "adapter", "merged")):
            move(model, step)
            report = sync.push(mode=mode)
            assert mode == "adapter" or report.transports == ("pull",), report
            assert mode == "merged" or not report.base_sent or "pull" in report.transports, report
            engines.assert_answers(ask(llm, sync.lora_request()), model, tolerance=3 * TOLERANCE, greedy=False)
        with torch.device("cuda"):
            model.add_adapter("dora", LoraConfig(r=12, use_dora=True, **targets))
            model.add_adapter("more", LoraConfig(r=5, use_rslora=True, **targets))
            # No engine serves adapters of a model with another head as such.
            model.add_adapter("head", LoraConfig(r=4, modules_to_save=["lm_head"], **targets))
        for active in (["dora"], ["default", "more"], ["head"], ["default"]):
            model.base_model.set_adapter(active)
            sync.push()
            train(model, size=0.02)
            pulled(sync.push())
            if active[0] != "head":
                compare(llm, model)
        sync.close()


def test_experts(tmp_path: Path) -> None:
    model = policy(engines.qwen3_moe, **MOE)
    with engine(model, tmp_path / "base", processes=True, **SLEEPY) as llm, closing(VllmSync(model, llm)) as sync:
        begun(sync)
        for step in range(3):
            train(model, step)
            report = sync.push(verify=step == 1)
            assert "pull" in report.transports, report
            assert_answers(ask(llm), model)
            bits = llm.collective_rpc("bits")
            assert bits_of_buckets(llm, model) == bits
        sync.push()
        llm.sleep(level=2)
        sync.push()
        assert_answers(ask(llm), model)


def test_a_worker_that_is_killed_when_it_is_to_read(tmp_path: Path) -> None:
    """The trainer is told, lives on, has its weights, and pushes to the next engine."""
    model = policy(larger, **DENSE)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sync: Any = None
    for life in range(2):
        with engine(
            model, tmp_path / "base", processes=True, **SLEEPY | {"worker_extension_cls": "faulty.Faulty"}
        ) as llm:
            sync = begun(VllmSync(model, llm))
            pulled(sync.push())
            assert_answers(ask(llm), model)
            if life:
                sync.close()
                break
            (pid,) = llm.collective_rpc("process")
            settle = PullSource.settle

            def killing(self: PullSource, pid: int = pid, settle: Any = settle) -> None:
                settle(self)
                os.kill(pid, signal.SIGKILL)
                time.sleep(0.5)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PullSource, "settle", killing)
                with pytest.raises(PushFailed):
                    sync.push()
            with contextlib.suppress(Exception):
                sync.close()
    torch.cuda.synchronize()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_trainer_of_expandable_segments(tmp_path: Path) -> None:
    """Nothing of it can be exported either: buckets, and the report says why."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        model = policy(larger, **DENSE)
        with engine(model, tmp_path / "base", processes=True, **SLEEPY) as llm:
            sync = begun(VllmSync(model, llm))
            for step in range(2):
                train(model, step)
                report = sync.push(verify=step == 1)
                assert report.transports == ("ipc",)
                assert re.search("the trainer's weights cannot be mapped: [^ ]+: an allocator made it", report.buckets)
                assert_answers(ask(llm), model)
            sync.close()
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def test_captured_graphs(tmp_path: Path) -> None:
    """What was captured before a push reads the addresses that workers merge to; after a sleep, too."""
    model = policy(engines.qwen2, **DENSE, r=8)
    with engine(model, tmp_path / "base", processes=True, **SLEEPY | {"enforce_eager": False}) as llm:
        sync = begun(VllmSync(model, llm))
        for step in range(3):
            train(model, step)
            pulled(sync.push(verify=step == 1))
            assert_answers(ask(llm), model)
            llm.sleep(level=1 + step % 2)
        pulled(sync.push())
        assert_answers(ask(llm), model)
        sync.close()


@needs(2)
@pytest.mark.parametrize("name", ["larger", "qwen3_moe"])
def test_two_workers_of_which_one_is_on_another_gpu(name: str, tmp_path: Path) -> None:
    """That one reads a peer's memory by plain loads."""
    model = policy(larger, **DENSE, r=32) if name == "larger" else policy(engines.qwen3_moe, **MOE)
    with engine(model, tmp_path / "base", processes=True, tensor_parallel_size=2, **SLEEPY) as llm:
        sync = begun(VllmSync(model, llm))
        for step in range(4):
            move(model, step)
            report = sync.push(verify=step == 1)
            assert "pull" in report.transports, report
            assert_answers(ask(llm), model)
        bits = llm.collective_rpc("bits")
        assert bits_of_buckets(llm, model) == bits
        sync.push()
        llm.sleep(level=2)
        train(model)
        assert "pull" in sync.push().transports
        assert_answers(ask(llm), model)
        sync.close()


def sharded(rank: int, folder: Path) -> None:
    """FSDP2 on two GPUs, TP=2 on the same: each worker reads boxes of both ranks. One fails, and pushes go on."""
    build = {"dtype": torch.bfloat16, "target_modules": engines.LINEARS}
    device = torch.device("cuda", rank)
    plain = models.with_lora(larger, **build).to(device)
    llms: list[Any] = []
    manager: Any = None
    if rank == 0:
        manager = engine(plain, folder / "base", processes=True, tensor_parallel_size=2, **SLEEPY)
        llms.append(manager.__enter__())
    try:
        dist.barrier()
        for wrap in (fsdp2, fsdp2_columns):
            again = models.with_lora(larger, **build).to(device)
            model: Any = wrap(models.with_lora(larger, **build).to(device))
            sync = begun(VllmSync(model, llms or None))
            for step in range(3):
                train_alike(model)
                train_alike(again)
                report = sync.push(verify=step == 1)
                assert "pull" in report.transports, report
                for llm in llms:
                    check_answers(llm, sync, again, TOLERANCE, False)

            def broken(*args: Any, rank: int = rank) -> None:
                if rank == 1:
                    raise RuntimeError("injected")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PullSource, "settle", broken)
                with pytest.raises(Exception, match="injected"):
                    sync.push()
            train_alike(model)
            train_alike(again)
            assert "pull" in sync.push().transports
            bits = [llm.collective_rpc("bits") for llm in llms]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(offer, "unreadable", lambda stream: "a test wants buckets")
                other = VllmSync(model, llms or None)
                assert "a test wants buckets" in other.push().buckets
                assert [llm.collective_rpc("bits") for llm in llms] == bits
                other.close()
            sync.close()
    finally:
        if manager is not None:
            manager.__exit__(None, None, None)


@needs(2)
def test_ranks_of_a_sharded_trainer_are_read(tmp_path: Path) -> None:
    spawn(2, sharded, tmp_path, backend="cpu:gloo,cuda:nccl", timeout=ENGINE)


def with_one_gpu(folder: str) -> None:
    """A trainer that sees one GPU, and an engine on the other one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    model = policy(larger, **DENSE)
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # of the engine's processes; this one has begun
    with engine(model, Path(folder) / "base", processes=True, **SLEEPY) as llm:
        sync = begun(VllmSync(model, llm))
        for step in range(2):
            train(model, step)
            report = sync.push()
            assert report.transports == (("nccl",) if report.buckets else ("pull",)), report
            print(report, flush=True)
            assert_answers(ask(llm), model)
        sync.close()


@needs(2)
def test_a_gpu_that_the_worker_does_not_see(tmp_path: Path) -> None:
    process = torch.multiprocessing.get_context("spawn").Process(target=with_one_gpu, args=(str(tmp_path),))
    process.start()
    process.join(240)
    assert process.exitcode == 0
