"""Engines whose memory cannot be mapped, and a trainer whose can: the workers read its weights where they lie, and
merge them into their own slices."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
import torch.distributed as dist
from engines import ask, assert_answers, engine, train
from peft import LoraConfig, get_peft_model
from processes import spawn
from sharded_trainer import check_answers, train_alike
from torch import nn

from lora_merge import LoraMergeError, MergedWeights, PushFailed, PushRefused, VllmSync
from lora_merge.engine.payload.pull import MOVED, PullBuilder, PullSource
from lora_merge.engine.push import negotiators as offer
from lora_merge.engine.push.replica import SyncReport
from lora_merge.engine.push.transfer import TransferRun
from lora_merge.shards import here
from lora_merge.verify import coverage
from tests.shards.test_shards_merge import fsdp1, fsdp2, fsdp2_columns

DENSE = {"target_modules": engines.LINEARS}
EXTENDED = {"worker_extension_cls": "shared_weights.Shared"}
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def policy(seed: int = 0, build: Any = engines.qwen2, **options: Any) -> Any:
    return models.with_lora(build, seed=seed, **DENSE | options)


def shared(model: nn.Module, *, adapters: bool = True) -> Any:
    """A model whose weights other processes can map.

    Args:
        adapters: and its adapters, which otherwise go in buckets.
    """
    for name, parameter in model.named_parameters():
        if adapters or "lora_" not in name:
            here(parameter).share_memory_()
    return model


def begun(sync: VllmSync) -> VllmSync:
    """After a first push, which shows where the weights lie."""
    assert MOVED in sync.push().buckets
    return sync


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of two tensor-parallel workers, whose own weights cannot be mapped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        folder = tmp_path_factory.mktemp("wide") / "base"
        options = EXTENDED | {"enable_lora": True, "max_lora_rank": 8}
        with engine(policy(), folder, processes=True, tensor_parallel_size=2, **options) as llm:
            yield llm


def pulled(report: SyncReport, *others: str) -> None:
    assert report.transports == tuple(sorted({"pull", *others})), report
    assert not report.buckets
    assert report.coverage == 1.0


def digests(llm: Any, model: Any, **options: Any) -> Any:
    """The engine's bits after a push in buckets: from a copy of the model whose memory is its own."""
    again = policy(build=lambda: model.get_base_model().__class__(model.config), **options)
    again.load_state_dict(model.state_dict())
    with closing(VllmSync(again, llm, bucket_bytes=1 << 17)) as sync:
        report = sync.push()
        assert report.transports == ("shm",)
        assert "the engine's weights cannot be mapped: " in report.buckets
        assert MOVED in report.buckets
        report = sync.push()
        assert report.transports == ("shm",)
        assert "the trainer's weights cannot be mapped: model." in report.buckets
    return llm.collective_rpc("bits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma2"])
def test_what_lies_there_is_what_comes_by_buckets(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Bit for bit; also where the trainer's weights are float32 and the engine's bf16, one head or two."""
    model = shared(policy(build=getattr(engines, kind)))
    options = EXTENDED | {"dtype": str(dtype).removeprefix("torch.")}
    with engine(model, tmp_path / "base", processes=True, **options) as llm:
        sync = begun(VllmSync(model, llm, bucket_bytes=1 << 17))
        for step in range(2):
            pulled(sync.push())
            bits = llm.collective_rpc("bits")
            assert bits == digests(llm, model)
            train(model, step)
        report = sync.push(verify=True)
        pulled(report)
        assert report.nbytes > 6e5, "what was read counts"
        assert all(c.complete for c in coverage(llm))
        if dtype == torch.float32:
            assert_answers(ask(llm), model)
        sync.close()


def test_adapters_of_many_kinds(tmp_path: Path) -> None:
    """DoRA's row factors, several adapters, and modules that train whole, all of which a push changes."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=engines.LINEARS, use_dora=True, modules_to_save=["lm_head"])
    model = get_peft_model(engines.qwen2(tied=False), config)
    for name, rank in (("second", 6), ("third", 1)):
        model.add_adapter(name, LoraConfig(r=rank, target_modules=["q_proj", "down_proj"], use_rslora=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    shared(model)
    with engine(model, tmp_path / "base", processes=True, **EXTENDED) as llm:
        sync = begun(VllmSync(model, llm, bucket_bytes=1 << 17))
        for step, active in enumerate([["default"], ["second", "third"], ["third"], ["default"]]):
            model.base_model.set_adapter(active)
            if step in (1, 3):
                begun(sync)  # another copy of the head than at the push before
            report = sync.push(verify=step == 1)
            pulled(report, *(("shm",) if active == ["default"] else ()))  # what DoRA scales rows by lies in no file
            assert_answers(ask(llm), model)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name or "modules_to_save" in name:
                        parameter.mul_(1.05)
        sync.close()


def test_experts_come_in_buckets_and_what_lies_beside_them_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lays experts out anew on a CPU. Weights that move leave nothing behind of what was made for them."""
    experts = {"target_modules": engines.LINEARS[:4], "target_parameters": engines.EXPERTS}
    model = shared(models.with_lora(engines.qwen3_moe, **experts))
    sums: list[set[str]] = []
    check = TransferRun._check_arrived

    async def checked(self: TransferRun, replica: Any, sent: Any) -> None:
        sums.append(set(sent.checksums))
        await check(self, replica, sent)

    monkeypatch.setattr(TransferRun, "_check_arrived", checked)
    with engine(model, tmp_path / "base", processes=True, **EXTENDED) as llm:
        sync = begun(VllmSync(model, llm, bucket_bytes=1 << 16))
        plans = []
        for step in range(5):
            pulled(sync.push(verify=step == 1), "shm")
            assert_answers(ask(llm), model)
            train(model, step)
            plans += llm.collective_rpc("plans")
            for parameter in model.parameters() if step > 1 else ():
                parameter.data = parameter.detach().clone().share_memory_()
            if step > 1:
                begun(sync)
        names = {name for name, _ in MergedWeights(model)}
        experts_alone = {name for name in names if ".experts." in name}
        assert len(sums) == 2, "of what came in buckets, and of everything"
        assert experts_alone <= sums[0]
        assert names <= sums[1] | {"lm_head.weight"}
        assert plans[0] > 0
        assert plans[1:] == plans[:1] * 4
        sync.close()


def test_weights_that_move_are_mapped_anew(wide: Any) -> None:
    """Offloaded and brought back, say; or to memory that cannot be mapped. What the worker read before is let go of at
    once, and nothing is mapped of weights that move each time."""
    model = policy()
    sync = VllmSync(model, wide, bucket_bytes=1 << 17)
    for step, share in enumerate([True, True, None, None, False, None, None, True, None]):
        for parameter in model.parameters() if share is not None else ():
            moved = parameter.detach().clone()
            parameter.data = moved.share_memory_() if share else moved
        report = sync.push()
        pulls = step in (2, 3, 8)
        assert report.transports == (("pull",) if pulls else ("shm",)), step
        assert (MOVED in report.buckets) == (step in (0, 1, 4, 7)), step
        assert all(wide.collective_rpc("mapped", args=(os.getpid(), True))) == pulls, step
        assert any(wide.collective_rpc("mapped", args=(os.getpid(), True))) == pulls, step
        assert_answers(ask(wide), model)
        train(model, step)
    sync.close()
    assert sum(wide.collective_rpc("mapped", args=(os.getpid(),))) == 0, "unmapped"


def test_weights_that_lie_elsewhere_at_the_same_address(wide: Any) -> None:
    """Another file is mapped there, and the workers still have the one before."""
    model = shared(policy())
    parameter = model.get_base_model().model.norm.weight
    with closing(VllmSync(model, wide, bucket_bytes=1 << 17)) as sync:
        begun(sync)
        for _ in range(4):
            pulled(sync.push())
            values = parameter.detach() * 1.5
            parameter.data = torch.empty(0)
            parameter.data = values.share_memory_()
            begun(sync)
            assert_answers(ask(wide), model)
            parameter.data.mul_(1.5)
            pulled(sync.push())
            assert_answers(ask(wide), model)


def test_the_weights_of_a_trainer_that_is_gone_are_let_go_of(wide: Any) -> None:
    gone, model = shared(policy(seed=3)), policy()
    left = begun(VllmSync(gone, wide, bucket_bytes=1 << 17))
    pulled(left.push())  # and no close(), as of a process that was killed
    assert all(wide.collective_rpc("mapped", args=(os.getpid(),)))
    with closing(VllmSync(model, wide, bucket_bytes=1 << 17)) as sync:
        assert sync.push().transports == ("shm",)
        assert not any(wide.collective_rpc("mapped", args=(os.getpid(),)))
        assert_answers(ask(wide), model)
    pulled(left.push())  # it lives, after all
    assert_answers(ask(wide), gone)
    left.close()


def test_an_adapter_follows_a_base_that_was_read(wide: Any) -> None:
    model = shared(policy())
    sync = begun(VllmSync(model, wide, bucket_bytes=1 << 17))
    for step, (mode, transports) in enumerate(
        [("merged", ("pull",)), ("adapter", ("pull", "shm")), ("adapter", ("shm",)), ("merged", ("pull",))]
    ):
        assert sync.push(mode=mode).transports == transports
        assert_answers(ask(wide, sync.lora_request()), model)
        train(model, step)
    sync.close()


def test_the_engine_merges_onto_a_base_that_was_read(wide: Any) -> None:
    model = shared(policy())
    with closing(VllmSync(model, wide, merge="engine", bucket_bytes=1 << 17)) as sync:
        for step in range(4):
            if step == 1:
                wide.collective_rpc("forget")
            report = sync.push()
            assert report.transports == (("pull", "shm") if step == 1 else ("shm",))
            assert report.base_sent == (step < 2)
            assert_answers(ask(wide), model)
            train(model, step)


def test_adapters_that_transformers_added(wide: Any) -> None:
    """`model.add_adapter`: PEFT's layers without its wrapper; merged here, in the engine, and beside the base."""
    torch.manual_seed(7)
    model = engines.qwen2().eval()
    model.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **DENSE))
    ways: tuple[dict[str, Any], ...] = ({"merge": "trainer"}, {"merge": "engine"}, {"mode": "adapter"})
    for step, options in enumerate(ways):
        with closing(VllmSync(model, wide, **options)) as sync:
            for again in range(2):
                train(model, 2 * step + again)
                sync.push()
                outputs = ask(wide, sync.lora_request())
                assert_answers(outputs, model)
    model.disable_adapters()
    with pytest.raises(AssertionError):
        assert_answers(outputs, model)


def test_stochastic_rounding_has_the_same_bits_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of tensors without an adapter, of which each worker reads a part."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = shared(policy())
    options = EXTENDED | {"dtype": "bfloat16", "tensor_parallel_size": 2}
    with engine(model, tmp_path / "base", processes=True, **options) as llm:
        sync = begun(VllmSync(model, llm, rounding="stochastic", bucket_bytes=1 << 17))
        pulled(sync.push(verify=True))  # compared bit for bit in the worker
        train(model)
        pulled(sync.push(verify=True))
        sync.close()


# where -> after how many times, whether the engine is dirty then
PHASES = {
    "blocked_tensors": (0, False),
    "map_source": (0, False),
    "pull": (0, True),
    "finish": (0, True),
    "commit": (0, True),
}


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
def test_one_or_all_workers_fail_in_each_phase(wide: Any, ranks: list[int]) -> None:
    model = shared(policy())
    for where, (after, dirty) in PHASES.items():
        sync = begun(VllmSync(model, wide, bucket_bytes=1 << 17))  # nothing is mapped yet
        before = sync.states()
        wide.collective_rpc("fail", args=(where, ranks, after))
        with pytest.raises(LoraMergeError, match=f"injected into {where}"):
            sync.push()
        assert wide.collective_rpc("mend") == ["well"] * 2
        (state,) = sync.states()
        assert (state.kind == "dirty") == dirty
        assert dirty or [state] == before
        pulled(sync.push())
        assert_answers(ask(wide), model)
        train(model)
        sync.close()


def test_a_trainer_that_breaks_while_adapters_come(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared(policy(), adapters=False)
    sync = begun(VllmSync(model, wide, bucket_bytes=1 << 17))
    pulled(sync.push(), "shm")
    train(model)

    def broken(*args: Any) -> None:
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(PullSource, "fill", broken)
        with pytest.raises(PushFailed, match="injected"):
            sync.push()
    assert sync.states()[0].kind == "dirty"
    pulled(sync.push(), "shm")
    assert_answers(ask(wide), model)
    before = sync.states()
    with monkeypatch.context() as patch:
        patch.setattr(PullSource, "settle", broken)
        with pytest.raises(PushRefused, match="injected"):
            sync.push()
    assert sync.states() == before
    pulled(sync.push(), "shm")
    assert_answers(ask(wide), model)
    sync.close()


def test_an_interrupt_while_adapters_come(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shared(policy(), adapters=False)
    sync = begun(VllmSync(model, wide, bucket_bytes=1 << 17))
    fill = PullSource.fill

    def slow(self: PullSource, index: int, *args: Any) -> None:
        fill(self, index, *args)
        threading.Timer(0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        time.sleep(0.5)

    with monkeypatch.context() as patch:
        patch.setattr(PullSource, "fill", slow)
        with pytest.raises(KeyboardInterrupt):
            sync.push()
    assert sync.states()[0].kind == "dirty"
    train(model)
    pulled(sync.push(), "shm")
    assert_answers(ask(wide), model)
    sync.close()


def test_workers_that_forgot_are_told_again(wide: Any) -> None:
    """Another trainer came between, or an engine was started anew: then nothing is dirty, and nothing stale is read."""
    model, other = shared(policy()), shared(policy(seed=3))
    with closing(begun(VllmSync(model, wide, bucket_bytes=1 << 17))) as sync:
        pulled(sync.push())
        with closing(begun(VllmSync(other, wide, bucket_bytes=1 << 17))) as theirs:
            pulled(theirs.push())
            assert_answers(ask(wide), other)
            train(model)
            pulled(sync.push())
            assert_answers(ask(wide), model)
            pulled(theirs.push())
            assert_answers(ask(wide), other)
        wide.collective_rpc("forget")
        pulled(sync.push())
        assert_answers(ask(wide), model)


def test_what_is_no_shared_memory_is_not_mapped(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A description is not taken at its word: the stream goes through buckets then, and says why."""
    told = PullSource.offer

    def forged(self: PullSource, trainer: str, sources: Any) -> Any:
        views = next(iter(sources[0]["views"].values()))
        views[0][3] = sources[0]["memory"][views[0][2]]["nbytes"]
        return told(self, trainer, sources)

    def elsewhere(self: PullSource, trainer: str, sources: Any) -> Any:
        sources[0]["memory"][0]["path"] = f"/proc/{os.getpid()}/fd/1"
        return told(self, trainer, sources)

    def without(self: PullSource, trainer: str, sources: Any) -> Any:
        sources[0]["views"].pop(next(name for name in sources[0]["views"] if "q_proj.weight" in name))
        return told(self, trainer, sources)

    model = shared(policy())
    why = {
        forged: "is not inside of",
        elsewhere: "is not shared memory of process",
        without: "elements that this worker",
    }
    for number, (forge, reason) in enumerate(why.items()):
        with monkeypatch.context() as patch:
            patch.setattr(PullSource, "offer", forge)
            sync = begun(VllmSync(model, wide, bucket_bytes=1 << 17))
            report = sync.push()
        assert report.transports == ("shm",)
        assert reason in report.buckets
        assert_answers(ask(wide), model)
        train(model, number)
        sync.close()


def test_two_trainers_of_one_model_take_turns(wide: Any) -> None:
    """What the one has offered is not the other's, though it is the same memory."""
    model = shared(policy())
    pushers = [VllmSync(model, wide), VllmSync(model, wide)]
    for step, number in enumerate((0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1)):
        train(model, step, 0.02)
        pushers[number].push()
        assert_answers(ask(wide), model)
    for sync in pushers:
        sync.close()


def shards(rank: int, folder: Path) -> None:
    """Both workers read what each rank owns; a rank that fails leaves the engine dirty, and the others free; all ranks
    hear of a worker that fails to let go."""
    build = {"dtype": torch.float32, **DENSE}
    plain = models.with_lora(engines.qwen2, **build)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    llms = []
    manager: Any = None
    if rank == 0:
        manager = engine(plain, folder / "base", processes=True, tensor_parallel_size=2, **EXTENDED)
        llms.append(manager.__enter__())
    try:
        dist.barrier()
        for wrap in (fsdp2, fsdp2_columns, fsdp1):
            model = shared(wrap(models.with_lora(engines.qwen2, **build)))
            again = models.with_lora(engines.qwen2, **build)
            sync = begun(VllmSync(model, llms or None, bucket_bytes=1 << 17))
            for step in range(2):
                train_alike(model)
                train_alike(again)
                pulled(sync.push(verify=step == 1), "shm")
                for llm in llms:
                    check_answers(llm, sync, again, 12e-6, True)

            def broken(*args: Any, rank: int = rank) -> None:
                if rank == 1:
                    raise RuntimeError("injected")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PullSource, "fill", broken)
                with pytest.raises(PushFailed, match="injected"):
                    sync.push()
            assert [state.kind for state in sync.states()] == ["dirty"] * len(llms)
            train_alike(model)
            train_alike(again)
            pulled(sync.push(), "shm")
            for llm in llms:
                check_answers(llm, sync, again, 12e-6, True)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PullBuilder, "serves", lambda *args: False)
                patch.setattr(offer, "unreadable", lambda stream: "not to be read from now on")
                for llm in llms:
                    llm.collective_rpc("fail", args=("unmap_source", [1], 0))
                with pytest.raises(PushRefused, match="injected into let_go"):  # on every rank
                    sync.push()
                for llm in llms:
                    llm.collective_rpc("mend")
                assert sync.push().transports == ("shm",)
            sync.close()
    finally:
        if manager is not None:
            manager.__exit__(None, None, None)


def test_ranks_of_a_sharded_trainer_are_read(tmp_path: Path) -> None:
    spawn(2, shards, tmp_path, timeout=timedelta(minutes=8))
