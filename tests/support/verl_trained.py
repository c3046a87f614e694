"""What a rank does with an engine of verl's that trains on merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from computed import computed
from helpers import assert_same_bits
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
from verl.workers.engine.fsdp import transformer_impl
from verl_engines import engine_of
from verl_ranks import assert_is_merge, batch, float64_merge, is_base, log_probs, step, taken, whole

from lora_merge.integrations.compat import TrainerRefused

STEPS = 4
SAVED = 2
CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "computes in bf16": {"mixed_precision": None},
    "bf16, offloaded": {
        "model_dtype": "bf16",
        "mixed_precision": None,
        "param_offload": True,
        "optimizer_offload": True,
        "enable_gradient_checkpointing": True,
    },
}


def on_this_machine() -> None:
    """Let FSDP1 do without a GPU, as in `verl_ranks.steps_and_syncs`."""
    if not torch.cuda.is_available():
        _init_utils._check_module_states_for_sync_module_states = lambda module: None
        transformer_impl.load_fsdp_model_to_gpu = lambda model: None


def assert_base(engine: Any, base: dict[str, Tensor], when: str) -> None:
    for name, p in whole(engine).items():
        if is_base(name):
            assert_same_bits(p, base[name], f"{name} {when}")


def failing(*args: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


def steps(engine: Any, numbers: Sequence[int]) -> dict[str, Tensor]:
    """Sync and train: what was pushed is what is computed with, until the optimizer steps; the last stream."""
    for number in numbers:
        pushed = taken(engine)
        with computed(engine.module, partial(dict, pushed)) as seen:
            step(engine, number)
        layers = sum(hasattr(module, "base_layer") for module in engine.module.modules())
        assert seen["forward"] >= seen["backward"] == 2 * layers, "two micro-batches"
    return taken(engine)


def trains(rank: int, folder: Path, place: Path, cases: Sequence[str], strategy: str = "fsdp2") -> None:
    """From the beginning to the end, with a checkpoint half-way."""
    import lora_merge.integrations.verl  # noqa: F401

    on_this_machine()
    for case in cases:
        changes = CASES[case] | {"strategy": strategy}
        engine = engine_of(folder / "model", **changes)
        assert engine.training is not None
        assert isinstance(engine.module, FullyShardedDataParallel) == (strategy == "fsdp")
        base = {name: p for name, p in whole(engine).items() if is_base(name)}
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("LORA_MERGE_TRAIN")
            plain = engine_of(folder / "model", **changes)
        assert plain.training is None
        with plain.disable_adapter():
            reference = log_probs(plain, 9).values()
        steps(engine, range(SAVED))
        log_probs(engine, 9)  # merged now
        engine.save_checkpoint(str(place / case), global_step=SAVED)
        assert_base(engine, base, "after a checkpoint")
        log_probs(engine, 9)
        with engine.disable_adapter():
            assert_same_bits(log_probs(engine, 9).values(), reference, "of the reference policy")
        merges = engine.training.merges
        log_probs(engine, 9)
        log_probs(engine, 9)
        assert engine.training.merges == merges + (2 if engine.is_param_offload_enabled else 1)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), engine.train_mode():
                engine.train_batch(batch(engine.rank, 5), failing)
            assert_base(engine, base, "after an interrupt")
        last = steps(engine, range(SAVED, STEPS))
        engine.training.pause()  # a sync leaves the weights merged
        assert_is_merge({n: t.bfloat16() for n, t in last.items()}, float64_merge(engine))
        assert_base(engine, base, "after training")
        if rank == 0:
            torch.save(last, place / f"{case}.pt")


def resumes(rank: int, folder: Path, place: Path, cases: Sequence[str], strategy: str = "fsdp2") -> None:
    """In another process: what goes on from the checkpoint comes out where the run that was not interrupted did."""
    import lora_merge.integrations.verl  # noqa: F401

    on_this_machine()
    for case in cases:
        engine = engine_of(folder / "model", **CASES[case], strategy=strategy)
        base = {name: p for name, p in whole(engine).items() if is_base(name)}
        log_probs(engine, 9)  # merged when the checkpoint comes
        engine.load_checkpoint(str(place / case), del_local_after_load=False)
        assert_base(engine, base, "after a checkpoint was loaded")
        last = steps(engine, range(SAVED, STEPS))
        if rank == 0:
            for name, tensor in torch.load(place / f"{case}.pt").items():
                assert_same_bits(last[name], tensor, f"{case}: {name} after a resume")


def refused(rank: int, folder: Path) -> None:
    """By name, on all ranks."""
    import lora_merge.integrations.verl  # noqa: F401

    for changes in ({"lora": {"merge": False}}, {"lora_rank": 0}):
        with pytest.raises(
            TrainerRefused, match=r"LORA_MERGE_TRAIN=merged .*set actor_rollout_ref\.model\.lora\.merge"
        ):
            engine_of(folder / "model", **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORA_MERGE_ROUNDING", "stochastic")
        with pytest.raises(TrainerRefused, match="float32, which rounding='stochastic' does not round"):
            engine_of(folder / "model")
