"""merge="engine": the base crosses once, then adapters alone; workers merge them, and take them off again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
import torch.distributed as dist
from engines import ask, assert_answers, engine, fail_at_each_bucket, train
from processes import spawn
from sharded_trainer import check_answers, train_alike
from torch import nn

from lora_merge import InvalidInput, LoraMergeError, PushFailed, PushRefused, VllmSync
from lora_merge.engine.payload.update import UpdatePayload
from lora_merge.engine.push.replica import SyncReport
from lora_merge.kernels.tracked.plan import TrackedPlan
from lora_merge.verify import coverage
from tests.shards.test_shards_merge import fsdp2, fsdp2_columns

DENSE = {"target_modules": engines.LINEARS}
EXTENDED = {"worker_extension_cls": "shared_weights.Shared"}
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def policy(seed: int = 0, build: Any = engines.qwen2, **options: Any) -> Any:
    return models.with_lora(build, seed=seed, **DENSE | options)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine of two tensor-parallel workers, which keep their weights as they are loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        folder = tmp_path_factory.mktemp("wide") / "base"
        options = EXTENDED | {"enable_lora": True, "max_lora_rank": 8}
        with engine(policy(), folder, processes=True, tensor_parallel_size=2, **options) as llm:
            yield llm


def adapters_alone(report: SyncReport, base: bool = False) -> None:
    assert report.merge == "engine", report.merge_why
    assert report.base_sent == base


EXPERTS = {"target_modules": engines.LINEARS[:4], "target_parameters": engines.EXPERTS}
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": DENSE,
    "llama": DENSE,
    "qwen3": DENSE | {"use_rslora": True},
    "gemma2": DENSE | {"use_dora": True},
    "olmo2": DENSE,
    "phi": {"target_modules": ["q_proj", "fc1", "fc2"], "bias": "lora_only"},
    "mixtral": EXPERTS,
    "qwen3_moe": EXPERTS,
    "gpt_oss": EXPERTS,
    "deepseek_v3": {"target_modules": ["q_proj", "kv_b_proj", "o_proj", "down_proj"]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_laid_out_anew(kind: str, tmp_path: Path) -> None:
    """As vLLM has them on CPUs: they are made again of a copy of their base."""
    model = models.with_lora(getattr(engines, kind), **KINDS[kind])
    # vLLM's CPU backend of multi-head latent attention is not exact: there it has to say what it says after a merge in
    # the trainer. Its Transformers backend changes classes of the process that it is in.
    options = {"attention_backend": "CPU_MLA"} if kind == "deepseek_v3" else {"processes": kind in ("olmo2", "phi")}

    def answers(llm: Any) -> None:
        if kind != "deepseek_v3":
            assert_answers(ask(llm), model, greedy=kind != "olmo2")  # which has two tokens that are all but as likely
            return
        there = [[output.outputs[0].token_ids, output.outputs[0].cumulative_logprob] for output in ask(llm)]
        with closing(VllmSync(model, llm, merge="trainer")) as here:
            here.push()
        assert [[o.outputs[0].token_ids, o.outputs[0].cumulative_logprob] for o in ask(llm)] == there

    with engine(model, tmp_path / "base", **options) as llm:
        with closing(VllmSync(model, llm, merge="engine", bucket_bytes=1 << 16)) as sync:
            for step in range(4):
                report = sync.push(verify=step == 2)
                adapters_alone(report, base=step == 0 or kind == "deepseek_v3")
                assert "by the engine" in str(report)
                answers(llm)
                assert all(c.complete for c in coverage(llm))
                train(model, step, size=0.02)
        with model.disable_adapter(), closing(VllmSync(model, llm)) as sync:
            sync.push()
            answers(llm)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "gemma2", "qwen3_moe"])
def test_the_bits_are_those_of_a_merge_in_the_trainer(kind: str, tmp_path: Path) -> None:
    model = models.with_lora(getattr(engines, kind), dtype=torch.bfloat16, **KINDS[kind])
    with engine(model, tmp_path / "base", processes=True, **EXTENDED) as llm:
        here = VllmSync(model, llm, merge="trainer", bucket_bytes=1 << 17)
        there = VllmSync(model, llm, merge="engine", bucket_bytes=1 << 17)
        for step in range(3):
            assert here.push().merge == "trainer"
            wanted = llm.collective_rpc("bits")
            adapters_alone(there.push(), base=True)
            assert llm.collective_rpc("bits") == wanted, step
            train(model, step, size=0.5)
            adapters_alone(there.push())
            moved = llm.collective_rpc("bits")
            here.push()
            assert llm.collective_rpc("bits") == moved != wanted
            train(model, 10 + step, size=0.5)
        here.close()
        there.close()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("pushes", [300, 10_000])
def test_many_pushes_leave_no_trace(wide: Any, pushes: int) -> None:
    """After hundreds of updates the bits are those of a fresh merge, and the workers' memory is what it was."""
    model = policy()
    with (
        closing(VllmSync(model, wide, merge="engine")) as there,
        closing(VllmSync(model, wide, merge="trainer")) as here,
    ):
        there.push()
        used: list[list[int]] = []
        for step in range(1, pushes + 1):
            train(model, step, size=0.2)
            adapters_alone(there.push())
            if step % 100 == 0:
                bits = wide.collective_rpc("bits")
                used.append(wide.collective_rpc("resident"))
                here.push()
                assert wide.collective_rpc("bits") == bits, step
                adapters_alone(there.push(), base=True)
                assert wide.collective_rpc("bits") == bits, step
        for first, last in zip(used[len(used) // 10], used[-1], strict=True):
            assert last - first < 8 << 20, used
    assert_answers(ask(wide), model)


def test_what_training_changes_by_itself_goes_whole(tmp_path: Path) -> None:
    """A head that is trained and a bias; a head of which training has stopped comes with its base again."""
    model = policy(build=lambda: engines.qwen2(tied=False), bias="all", modules_to_save=["lm_head"])

    def step(seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_((torch.randn(parameter.shape, generator=g) * 0.01).to(parameter))

    for extension in ({}, EXTENDED):
        with engine(model, tmp_path / "base", processes=True, **extension) as llm:
            sync = VllmSync(model, llm, merge="engine", bucket_bytes=1 << 16)
            for number in range(4):
                adapters_alone(sync.push(verify=number == 3), base=number == 0)
                assert_answers(ask(llm), model)
                step(number)
            for module in model.modules():
                if type(module).__name__ == "ModulesToSaveWrapper":
                    module.enable_adapters(False)  # its original is the base's
            adapters_alone(sync.push(), base=True)
            assert_answers(ask(llm), model)
            for module in model.modules():
                if type(module).__name__ == "ModulesToSaveWrapper":
                    module.enable_adapters(True)
            sync.push()
            assert_answers(ask(llm), model)
            sync.close()


def scaled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)


CHANGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    # what -> whether the base has to come again where layers are laid out anew (only some of them are kept)
    "both": (lambda model: model.base_model.set_adapter(["default", "other"]), False),
    "the other": (lambda model: model.set_adapter("other"), False),
    "the first": (lambda model: model.set_adapter("default"), False),
    "a factor": (scaled, False),
    "another rank and fewer modules": (lambda model: model.set_adapter("small"), False),
    "more modules": (lambda model: model.set_adapter("default"), False),
}


@pytest.mark.parametrize("extension", [{}, EXTENDED], ids=["laid out anew", "as loaded"])
def test_other_adapters(extension: dict[str, Any], tmp_path: Path) -> None:
    from peft import LoraConfig

    model = policy(adapters=("default", "other"))
    model.add_adapter("small", LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model.set_adapter("default")
    model.requires_grad_(False)  # adapters need not be trained to be served
    with engine(model, tmp_path / "base", processes=True, **extension) as llm:
        sync = VllmSync(model, llm, merge="engine", bucket_bytes=1 << 16)
        adapters_alone(sync.push(), base=True)
        for what, (change, base) in CHANGES.items():
            change(model)
            adapters_alone(sync.push(), base)
            assert_answers(ask(llm), model), what
        with model.disable_adapter(), pytest.raises(PushRefused, match="no active adapter"):
            sync.push()
        assert_answers(ask(llm), model)
        sync.close()


def test_an_adapter_on_more_layers_than_were_kept(tmp_path: Path) -> None:
    """What is laid out anew is kept where updates change it; an update that changes more needs the base."""
    from peft import LoraConfig

    model = models.with_lora(engines.qwen2, target_modules=["v_proj"])
    model.add_adapter("wide", LoraConfig(r=2, target_modules=engines.LINEARS, init_lora_weights=False))
    with engine(model, tmp_path / "base") as llm, closing(VllmSync(model, llm, merge="engine")) as sync:
        adapters_alone(sync.push(), base=True)
        model.set_adapter("wide")
        adapters_alone(sync.push(), base=True)
        assert_answers(ask(llm), model)
        model.set_adapter("default")
        adapters_alone(sync.push())
        assert_answers(ask(llm), model)


def test_two_workers_modes_and_trainers(wide: Any) -> None:
    model, other = policy(seed=11), policy(seed=7)
    sync, theirs = VllmSync(model, wide, merge="engine"), VllmSync(other, wide, merge="engine")
    adapters_alone(sync.push(), base=True)
    assert_answers(ask(wide), model)
    for mode, base in [("adapter", True), ("merged", True), ("merged", False)]:
        report = sync.push(mode=mode)
        assert report.base_sent == base, mode
        assert report.merge == ("engine" if mode == "merged" else "")
        assert_answers(ask(wide, sync.lora_request()), model)
        train(model, int(base))
    adapters_alone(theirs.push(), base=True)
    assert_answers(ask(wide), other)
    with pytest.raises(PushRefused, match="of another trainer"):
        sync.check()
    adapters_alone(sync.push(), base=True)
    assert_answers(ask(wide), model)
    # A trainer that begins anew from a checkpoint of its adapter: the engine's base is known to be the same one.
    again = VllmSync(model, wide, merge="engine")
    adapters_alone(again.push())
    assert_answers(ask(wide), model)
    with torch.no_grad():
        model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight.mul_(1.5)
    adapters_alone(again.push(), base=True)
    assert_answers(ask(wide), model)
    for one in (sync, theirs, again):
        one.close()


def test_weights_that_something_else_has_changed(wide: Any) -> None:
    model = policy(seed=12)
    sync = VllmSync(model, wide, merge="engine")
    sync.push()
    for change in ("scale", "reload"):
        wide.collective_rpc(change) if change == "scale" else wide.collective_rpc("move", args=(False,))
        kinds = [state.kind for state in sync.states()]
        assert kinds == ["dirty" if change == "scale" else "merged"]
        train(model)
        adapters_alone(sync.push(), base=True)  # what moved is none of what is remembered
        assert_answers(ask(wide), model)
    sync.close()


# where -> after how many times, whether the engine is dirty then
PHASES = {
    "hello": (0, False),
    "note_pause": (0, False),
    "receive_update": (0, False),
    "remerge": (0, True),
    "products": (0, True),
    "finish": (0, True),
    "merge": (0, False),
    "received_checksums": (0, True),
}


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
def test_one_or_all_workers_fail_in_each_phase(wide: Any, ranks: list[int]) -> None:
    """Until all workers have the update nothing has changed."""
    model = policy()
    sync = VllmSync(model, wide, merge="engine")
    sync.push()
    for number, (where, (after, dirty)) in enumerate(PHASES.items()):
        train(model, number, size=0.02)
        before, bits = sync.states(), wide.collective_rpc("bits")
        wide.collective_rpc("fail", args=(where, ranks, after))
        with pytest.raises(LoraMergeError, match=f"injected into {where}") as raised:
            sync.push(verify=where == "received_checksums")
        for rank in range(2):
            assert (f"worker {rank}: " in str(raised.value)) == (rank in ranks), "which worker failed"
        assert wide.collective_rpc("mend") == ["well"] * 2
        (state,) = sync.states()
        alone = where == "merge" and ranks != [0, 1]  # the other worker has merged
        assert (state.kind == "dirty") == (dirty or where == "merge"), where
        assert dirty or where == "merge" or ([state] == before and wide.collective_rpc("bits") == bits), where
        adapters_alone(sync.push(), base=dirty or alone or where == "merge")
        assert_answers(ask(wide), model)
    sync.close()


@pytest.mark.parametrize("where", ["check_update"])
def test_workers_that_cannot_say_whether_it_fits(wide: Any, where: str) -> None:
    model = policy(seed=13)
    sync = VllmSync(model, wide, merge="engine")
    before = sync.states()
    wide.collective_rpc("fail", args=(where, [1], 0))
    with pytest.raises(PushRefused, match=f"injected into {where}"):
        sync.push()
    wide.collective_rpc("mend")
    assert sync.states() == before
    adapters_alone(sync.push(), base=True)
    assert_answers(ask(wide), model)
    sync.close()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_trainer_fails_at_each_bucket(wide: Any, error: type[BaseException]) -> None:
    model = policy()
    sync = VllmSync(model, wide, merge="engine", bucket_bytes=1 << 15)
    sync.push()
    for report in fail_at_each_bucket(sync, wide, model, error):
        adapters_alone(report)
        assert_answers(ask(wide), model)
    sync.close()


def test_a_replica_that_dies_and_one_that_lives(wide: Any, tmp_path: Path) -> None:
    model = policy()
    with engine(model, tmp_path / "base", processes=True, **EXTENDED) as llm:
        sync = VllmSync(model, [wide, llm], merge="engine")
        sync.push()
        train(model)
        pid, fill = llm.collective_rpc("process")[0], UpdatePayload.fill

        def killing(self: UpdatePayload, *args: Any) -> None:
            os.kill(pid, signal.SIGKILL)
            fill(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UpdatePayload, "fill", killing)
            with pytest.raises(LoraMergeError, match="engine 1"):
                sync.push()
        with closing(VllmSync(model, wide, merge="engine")) as alone:
            alone.push()
            assert_answers(ask(wide), model)


def test_auto(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine merges where it is on another host and nothing speaks against it; and not again after it failed."""
    model = policy(seed=14)
    with closing(VllmSync(model, wide)) as sync:
        assert sync.push().merge == "trainer", "one host"
        sync._trainer.hosts = frozenset(["elsewhere"])
        adapters_alone(sync.push(), base=True)
        train(model)
        adapters_alone(sync.push())
        assert_answers(ask(wide), model)
        wide.collective_rpc("fail", args=("products", [1], 0))
        with pytest.raises(PushFailed, match="injected"):
            sync.push()
        wide.collective_rpc("mend")
        report = sync.push()
        assert report.merge == "trainer"
        assert "injected into products" in report.merge_why
        assert_answers(ask(wide), model)
    with closing(VllmSync(model, wide, rounding="stochastic")) as sync:
        sync._trainer.hosts = frozenset(["elsewhere"])
        report = sync.push()
        assert report.merge == "trainer"
        assert "drawn where the trainer merges" in report.merge_why


def test_what_only_the_trainer_can_merge(wide: Any) -> None:
    with pytest.raises(InvalidInput, match="merge must be one of"):
        VllmSync(policy(), wide, merge="worker")
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (policy(), {"rounding": "stochastic"}, "round to nearest"),
        (policy(dtype=torch.bfloat16), {}, "rounded twice"),
        (policy(target_modules=["embed_tokens"]), {}, "changes tied tensors apart.*ensure_weight_tying"),
    ]
    for model, options, why in cases:
        with closing(VllmSync(model, wide, merge="engine", **options)) as sync:
            before = sync.states()
            with pytest.raises(PushRefused, match=why):
                sync.push()
            assert sync.states() == before
        with closing(VllmSync(model, wide, **options)) as sync:
            sync._trainer.hosts = frozenset(["elsewhere"])
            if "tied" not in why:  # which the trainer cannot serve either
                assert why in sync.push().merge_why


TIED: dict[str, dict[str, Any]] = {
    "one update": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": list(range(0, 256, 3))}},
}


@pytest.mark.parametrize("kind", TIED)
def test_tied_weights_that_change_alike(kind: str, wide: Any) -> None:
    """One tensor for the engine, whoever merges."""
    model = policy(**TIED[kind])
    for merge in ("trainer", "engine"):
        with closing(VllmSync(model, wide, merge=merge, bucket_bytes=1 << 17)) as sync:
            for step in range(2):
                train(model, step, size=0.05)
                assert sync.push(verify=step == 1).merge == merge
                assert_answers(ask(wide), model)
                assert all(c.complete for c in coverage(wide))


def test_tokens_of_an_untied_model(tmp_path: Path) -> None:
    rows = {"embed_tokens": list(range(0, 256, 3)), "lm_head": list(range(1, 256, 5))}
    model = policy(build=lambda: engines.qwen2(tied=False), target_modules=["q_proj"], trainable_token_indices=rows)
    with engine(model, tmp_path / "base") as llm:
        for merge in ("trainer", "engine"):
            with closing(VllmSync(model, llm, merge=merge)) as sync:
                train(model, 3, size=0.05)
                assert sync.push().merge == merge
                assert_answers(ask(llm), model)


def shards(rank: int, folder: Path) -> None:
    """Whole factors out of what the ranks hold; each rank serves the workers that it would serve anyway."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    llms, manager = [], None
    build: dict[str, Any] = {"dtype": torch.float32, **DENSE, "use_dora": True}
    plain = models.with_lora(engines.qwen2, **build)
    if rank == 0:
        manager = engine(plain, folder / "base", processes=True, tensor_parallel_size=2, **EXTENDED)
        llms.append(manager.__enter__())
    try:
        dist.barrier()
        for turn, wrap in enumerate((fsdp2, fsdp2_columns)):
            model, again = wrap(models.with_lora(engines.qwen2, **build)), models.with_lora(engines.qwen2, **build)
            sync = VllmSync(model, llms or None, merge="engine", bucket_bytes=1 << 17)
            for step in range(3):
                train_alike(model)
                train_alike(again)
                adapters_alone(sync.push(verify=step == 1), base=turn == 0 and step == 0)
                for llm in llms:
                    check_answers(llm, sync, again, 12e-6, True)
            fill = UpdatePayload.fill

            def broken(self: UpdatePayload, *args: Any, fill: Any = fill) -> None:
                fill(self, *args)
                if rank == 1:
                    raise RuntimeError("injected")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(UpdatePayload, "fill", broken)
                with pytest.raises(LoraMergeError, match="injected"):
                    sync.push()
            adapters_alone(sync.push())
            for llm in llms:
                check_answers(llm, sync, again, 12e-6, True)
            sync.close()
    finally:
        if manager is not None:
            manager.__exit__(None, None, None)


def test_ranks_of_a_sharded_trainer(tmp_path: Path) -> None:
    spawn(2, shards, tmp_path, timeout=timedelta(minutes=8))


def test_tracked_plans_that_keep_their_memory() -> None:
    """`keep`: bits and errors as without, and nothing is taken anew."""
    from lora_merge.kernels.segments import Segment

    weight, base = torch.randn(300, 200).bfloat16(), torch.empty(0)
    lora_A, lora_B = torch.randn(4, 200), torch.randn(300, 4)
    base = weight.clone()
    plan = TrackedPlan([Segment("w", weight, weight, lora_A, lora_B, 0.5)], keep=True)
    for seed in range(3):
        lora_A.normal_(generator=torch.Generator().manual_seed(seed))
        plan.merge()
        assert not torch.equal(weight, base)
        assert plan.nbytes
        plan.unmerge()
        assert torch.equal(weight.view(torch.int16), base.view(torch.int16))
