"""merge="engine" where workers hold different parts of a model: each host gets the adapters of what it holds."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
import torch.distributed as dist
from engines import engine, fail_at_each_bucket, train
from processes import spawn
from sharded_trainer import train_alike

from lora_merge import LoraMergeError, VllmSync
from lora_merge.engine.payload.update import UpdatePayload
from lora_merge.engine.push.replica import SyncReport
from lora_merge.engine.transport.routing import Route, WorkerId
from lora_merge.engine.transport.tcp_sender import TcpSender
from lora_merge.shards.parts import Parts
from tests.shards.test_shards_merge import fsdp2

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
EXPERTS = {"target_modules": engines.LINEARS[:4], "target_parameters": engines.EXPERTS}
PARALLEL = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "worker_extension_cls": "sliced_weights.Sliced"}
SHARED = ["one", "one"]
APART = ["one", "other"]


def policy(**options: Any) -> Any:
    return models.with_lora(engines.qwen3_moe, dtype=torch.bfloat16, **EXPERTS | options)


def adapters_alone(report: SyncReport, base: bool = False) -> None:
    assert (report.merge, report.base_sent) == ("engine", base), report


@contextmanager
def experts(folder: Path, anew: bool = False) -> Iterator[Any]:
    """An engine of two workers, each with half of the experts. (vLLM 0.32 cannot generate with it on CPUs.)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        patch.setenv("VLLM_HOST_IP", "127.0.0.1")
        patch.setenv("EXPERTS_ANEW", "1" if anew else "")
        with engine(policy(), folder / "base", processes=True, **PARALLEL) as llm:
            yield llm


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with experts(tmp_path_factory.mktemp("halves")) as llm:
        yield llm


@contextmanager
def counted() -> Iterator[Counter[WorkerId]]:
    """Bytes of buckets that go to each host, by the worker that takes them there."""
    went: Counter[WorkerId] = Counter()
    hand = TcpSender.hand

    def handing(self: TcpSender, turn: int, data: Any, recipients: Any, last: bool) -> None:
        hand(self, turn, data, recipients, last)
        went.update({place: data.numel() for place, member in self._members.items() if turn in member.due})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TcpSender, "hand", handing)
        yield went


def update_of(sync: VllmSync) -> UpdatePayload:
    """The one that was pushed last."""
    return sync._planner._update._updates._known[-1]  # type: ignore[index, no-any-return]


def halves_of(report: SyncReport, sync: VllmSync) -> tuple[int, int]:
    """Bytes of an update that all workers take, and of one half of the experts."""
    update = update_of(sync)
    sizes = {i: sum(slot.nbytes for slot in slots) for i, slots in enumerate(update.table)}
    one, other = (sum(sizes[i] for i, who in update.recipients.items() if who == {(0, at)}) for at in range(2))
    assert one == other > 0
    assert report.nbytes == sum(sizes.values())
    return report.nbytes - one - other, one


def merged_there(llm: Any, model: Any, sync: VllmSync) -> None:
    """The engine has the bits that a merge in the trainer brings; afterwards it holds the base of `sync` again."""
    bits = llm.collective_rpc("bits")
    with closing(VllmSync(model, llm, merge="trainer", bucket_bytes=1 << 17)) as here:
        here.push()
    assert llm.collective_rpc("bits") == bits
    adapters_alone(sync.push(), base=True)


@pytest.mark.parametrize("anew", [False, True], ids=["straight", "laid out anew"])
def test_experts_cross_to_the_hosts_that_hold_them(anew: bool, tmp_path: Path) -> None:
    """Each host gets what all take, and its experts; bits are those of a merge in the trainer."""
    model = policy()
    with experts(tmp_path, anew) as llm:
        for hosts in (None, SHARED, APART):
            if hosts:
                assert llm.collective_rpc("claim_hosts", args=(hosts,)) == hosts
            here = VllmSync(model, llm, merge="trainer", bucket_bytes=1 << 17)
            there = VllmSync(model, llm, merge="engine", bucket_bytes=1 << 15)
            for step in range(2):
                here.push()
                wanted = llm.collective_rpc("bits")
                adapters_alone(there.push(verify=step == 1), base=True)
                assert llm.collective_rpc("bits") == wanted, (hosts, step)
                train(model, step, size=0.5)
                with counted() as went:
                    adapters_alone(report := there.push(verify=step == 0))
                common, half = halves_of(report, there)
                assert report.transports == (("tcp",) if hosts else ("shm",))
                if hosts:
                    assert went.keys() == {(0, 0)} if hosts == SHARED else {(0, 0), (0, 1)}
                    for nbytes in went.values():
                        due = common + (2 * half if hosts == SHARED else half)
                        assert due <= nbytes < due + 64 * 256, "padding alone"
                moved, kept = llm.collective_rpc("bits"), llm.collective_rpc("kept")
                assert set(kept[0]) ^ set(kept[1]), "each its own experts"
                assert not [name for name in kept[0] if name not in kept[1] and name.split(".")[1] != "0"]
                here.push()
                assert llm.collective_rpc("bits") == moved != wanted
                train(model, 10 + step, size=0.5)
            here.close()
            there.close()


# where -> whether the engine is dirty then
PHASES = {"receive_update": False, "remerge": True, "products": True, "merge": True, "received_checksums": True}


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
def test_one_or_all_workers_fail_in_each_phase(halves: Any, ranks: list[int]) -> None:
    """Until every worker has its own part nothing has changed, on any host."""
    halves.collective_rpc("claim_hosts", args=(APART,))
    model = policy()
    with closing(VllmSync(model, halves, merge="engine", bucket_bytes=1 << 15)) as sync:
        sync.push()
        for number, (where, dirty) in enumerate(PHASES.items()):
            train(model, number, size=0.02)
            before, bits = sync.states(), halves.collective_rpc("bits")
            halves.collective_rpc("fail", args=(where, ranks, 0))
            with pytest.raises(LoraMergeError, match=f"injected into {where}") as raised:
                sync.push(verify=where == "received_checksums")
            for rank in range(2):
                assert (f"worker {rank}: " in str(raised.value)) == (rank in ranks), "which worker failed"
            assert halves.collective_rpc("mend") == ["well"] * 2
            (state,) = sync.states()
            assert (state.kind == "dirty") == dirty, where
            assert dirty or ([state] == before and halves.collective_rpc("bits") == bits), where
            adapters_alone(sync.push(), base=dirty)
        merged_there(halves, model, sync)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_trainer_fails_at_each_bucket(halves: Any, error: type[BaseException]) -> None:
    """Of all, and of one host alone."""
    halves.collective_rpc("claim_hosts", args=(APART,))
    model = policy()
    with closing(VllmSync(model, halves, merge="engine", bucket_bytes=1 << 15)) as sync:
        sync.push()
        assert len(update_of(sync).recipients) < len(update_of(sync).table)
        for report in fail_at_each_bucket(sync, halves, model, error):
            adapters_alone(report)
        merged_there(halves, model, sync)


@pytest.mark.parametrize("hosts", [SHARED, APART], ids=["one host", "a host each"])
def test_a_worker_that_lacks_an_adapter_says_so(halves: Any, hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the trainer believes that it takes: nothing is left as it was without a word."""
    halves.collective_rpc("claim_hosts", args=(hosts,))
    model = policy()
    by = Route.by

    def forgetful(self: Route, places: Any) -> list[int]:
        found = by(self, places)
        return found if len(places) > 1 else [i for i in found if self.recipients.get(i) != {(0, 1)}]

    with closing(VllmSync(model, halves, merge="engine", bucket_bytes=1 << 15)) as sync:
        sync.push()
        train(model)
        with monkeypatch.context() as patch:
            patch.setattr(Route, "by", forgetful)
            with pytest.raises(LoraMergeError, match="its adapter was not sent here"):
                sync.push()
        assert sync.states()[0].kind == "dirty"
        adapters_alone(sync.push(), base=True)
        merged_there(halves, model, sync)


def test_where_experts_are_changes(halves: Any) -> None:
    """Another trainer, several adapters, other layers with adapters: each time what the workers take is cut anew."""
    halves.collective_rpc("claim_hosts", args=(APART,))
    for model in (policy(), policy(adapters=("default", "second")), policy(target_parameters=engines.EXPERTS[:1])):
        with closing(VllmSync(model, halves, merge="engine", bucket_bytes=1 << 15)) as sync:
            sync.push()
            train(model, 1, size=0.5)
            adapters_alone(sync.push(verify=True))
            assert update_of(sync).recipients
            merged_there(halves, model, sync)


def fails_and_heals(sync: VllmSync, llms: list[Any], owner: type, method: str, broken: Any) -> None:
    """With a broken method a push fails on every rank, the engines are as before, and the next push gets through."""
    before, bits = sync.states(), [llm.collective_rpc("bits") for llm in llms]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, broken)
        with pytest.raises(LoraMergeError, match="injected"):
            sync.push()
    assert sync.states() == before
    assert [llm.collective_rpc("bits") for llm in llms] == bits
    adapters_alone(sync.push())


def shards(rank: int, folder: Path) -> None:
    """Two ranks of a sharded trainer, each on its way to one of two hosts."""
    llms, manager = [], None
    if rank == 0:
        manager = experts(folder)
        llms.append(manager.__enter__())
        llms[0].collective_rpc("claim_hosts", args=(APART,))
    os.environ["VLLM_HOST_IP"] = "127.0.0.1"
    try:
        dist.barrier()
        model = fsdp2(policy())
        sync = VllmSync(model, llms or None, merge="engine", bucket_bytes=1 << 15)
        here = VllmSync(model, llms or None, merge="trainer", bucket_bytes=1 << 15)
        for step in range(2):
            adapters_alone(sync.push(verify=step == 1), base=True)
            train_alike(model)
            with counted() as went:
                adapters_alone(report := sync.push(verify=step == 0))
            common, half = halves_of(report, sync)
            assert went.keys() == {(0, rank)}, "each rank serves a host"
            assert common + half <= went[0, rank] < common + half + 64 * 256
            if step:  # `verify` has every rank make everything
                assert update_of(sync)._gathered().nbytes < common + half, "it gets what it sends, and that once"
            bits = [llm.collective_rpc("bits") for llm in llms]
            here.push()
            assert [llm.collective_rpc("bits") for llm in llms] == bits
        adapters_alone(sync.push(), base=True)
        fill, count = UpdatePayload.fill, len(update_of(sync).table)
        for failing in range(2):
            own = [i for i in range(count) if update_of(sync).recipients.get(i, {(0, failing)}) == {(0, failing)}]
            assert len(own) < count, "others are not filled there"
            for at in {0, own[1], own[-1]}:
                train_alike(model)

                def broken(self: UpdatePayload, index: int, *args: Any, at: int = at, failing: int = failing) -> None:
                    fill(self, index, *args)
                    if rank == failing and index == at:
                        raise RuntimeError("injected")

                fails_and_heals(sync, llms, UpdatePayload, "fill", broken)
        lay_out = Parts._out
        for failing in range(2):
            adapters_alone(sync.push(verify=True))  # every rank makes everything: the next push lays it out anew

            def lacking(self: Parts, *args: Any, failing: int = failing) -> None:
                if rank == failing:
                    raise torch.OutOfMemoryError("injected")
                lay_out(self, *args)

            train_alike(model)
            fails_and_heals(sync, llms, Parts, "_out", lacking)
        bits = [llm.collective_rpc("bits") for llm in llms]
        here.push()
        assert [llm.collective_rpc("bits") for llm in llms] == bits
        sync.close()
        here.close()
    finally:
        if manager is not None:
            manager.__exit__(None, None, None)


def test_ranks_of_a_sharded_trainer_send_side_by_side(tmp_path: Path) -> None:
    spawn(2, shards, tmp_path, timeout=timedelta(minutes=15))


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    """Each stage gets the adapters of its layers; one may have none at all."""
    model = models.with_lora(engines.qwen2, dtype=torch.bfloat16, target_modules=engines.LINEARS)
    options: dict[str, Any] = {"target_modules": engines.LINEARS, "layers_to_transform": [0], "use_dora": True}
    first = models.with_lora(engines.qwen2, dtype=torch.bfloat16, **options)
    staged = {"pipeline_parallel_size": 2, "worker_extension_cls": "sliced_weights.Sliced"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        patch.setenv("VLLM_HOST_IP", "127.0.0.1")
        with engine(model, tmp_path / "base", processes=True, **staged) as llm:
            for hosts in (None, APART):
                if hosts:
                    llm.collective_rpc("claim_hosts", args=(hosts,))
                for policy in (model, first):
                    with closing(VllmSync(policy, llm, merge="engine", bucket_bytes=1 << 15)) as sync:
                        sync.push()
                        train(policy, 3, size=0.5)
                        adapters_alone(sync.push(verify=True))
                        who = set(update_of(sync).recipients.values())
                        assert who == {frozenset([(0, 0)])} | ({frozenset([(0, 1)])} if policy is model else set())
                        merged_there(llm, policy, sync)
