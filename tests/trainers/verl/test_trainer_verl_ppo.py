"""Whole runs of verl's `main_ppo`: GRPO of two workers under Ray, with verl's vLLM servers, on CPUs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

if find_spec("verl") is None:
    pytest.skip("verl's tests run in an environment of their own", allow_module_level=True)

import verl_model
from helpers import assert_same_bits
from vllm_name import folder as vllm_by_name

from tests.trainers.verl.test_trainer_verl import entry_points, environment  # noqa: F401

FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"
PUSHED = "+actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config={backend:lora_merge}"
LOADED = "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_worker.Unpacked"

# Dozens of processes are started, each of which imports PyTorch, verl and vLLM: minutes, where another suite runs, too.
LIMIT_S = 1200
pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def arguments(place: Path, steps: int, *more: str) -> list[str]:
    """A run of two workers, each with a server of its own; everything in float32, so that each token's ratio is 1."""
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    return [
        f"data.train_files={place}/questions.parquet",
        f"data.val_files={place}/questions.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        f"{model}.path={place}/model",
        f"+{model}.override_config.attn_implementation=eager",
        f"{model}.use_remove_padding=False",
        f"{model}.enable_gradient_checkpointing=False",
        f"{model}.lora_rank=8",
        f"{model}.lora_alpha=32",
        f"{model}.lora.merge=True",
        f"{actor}.strategy=fsdp2",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"+{actor}.fsdp_config.mixed_precision={FLOAT32}",
        f"{actor}.optim.lr=1e-2",
        f"{actor}.ppo_mini_batch_size=8",
        f"{actor}.ppo_micro_batch_size_per_gpu=8",
        f"{rollout}.name=vllm",
        f"{rollout}.dtype=float32",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.n=2",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.enforce_eager=True",
        f"{rollout}.free_cache_engine=True",  # verl's default; vLLM is asked to sleep, and CPUs do not
        f"+{rollout}.enable_sleep_mode=False",
        f"{rollout}.max_model_len=64",
        f"{rollout}.max_num_seqs=16",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=64",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={place}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "algorithm.adv_estimator=grpo",
        "trainer.logger=[console,file]",
        "trainer.n_gpus_per_node=2",
        "trainer.val_before_train=False",
        "trainer.test_freq=2",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={place}/checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.num_gpus=2",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "ray_kwargs.ray_init.num_cpus=12",
        *more,
    ]


def train(place: Path, steps: int, *more: str, entry_points: Path, **changes: str) -> str:  # noqa: F811
    """What a run prints."""
    changes |= {
        "LORA_MERGE_CHECK": "1",
        "VERL_FILE_LOGGER_PATH": str(place / f"{steps}.jsonl"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "lora_merge",
        "RAY_DEDUP_LOGS": "0",
        "RAY_prestart_worker_first_driver": "0",  # one for each of `num_cpus`, which are not there
        "HYDRA_FULL_ERROR": "1",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments(place, steps, *more)]
    return printed_by(command, place / f"{steps}.log", place, environment(entry_points, **changes))


def printed_by(command: list[str], log: Path, folder: Path, found: dict[str, str]) -> str:
    """What a run of `main_ppo` prints, kept in a file.

    Args:
        folder: where it runs.
        found: its environment.
    """
    with (
        log.open("w") as printed,
        subprocess.Popen(
            command, cwd=folder, env=found, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        ) as running,
    ):
        try:
            status: int | str = running.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired as expired:
            status = str(expired)[-30:]
        finally:
            running.kill()
    text = log.read_text()
    assert status == 0, f"{status}: {text[-9000:]}"
    return text


def validated(place: Path, steps: int) -> dict[int, float]:
    """The score of greedy answers by step, of a run."""
    lines = [json.loads(line) for line in (place / f"{steps}.jsonl").read_text().splitlines()]
    found = {line["step"]: [v for n, v in line["data"].items() if n.startswith("val-core/")] for line in lines}
    return {step: values[0] for step, values in found.items() if values}


def told(place: Path, steps: int, name: str) -> dict[int, float]:
    """A metric of this package by step, as verl's loggers get it."""
    lines = [json.loads(line) for line in (place / f"{steps}.jsonl").read_text().splitlines()]
    metric = f"actor/lora_merge/{name}"
    return {line["step"]: line["data"][metric] for line in lines if metric in line["data"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, entry_points: Path) -> Path:  # noqa: F811
    folder = tmp_path_factory.mktemp("ppo")
    verl_model.save_task(folder)
    verl_model.save_model(folder / "model")
    vllm_by_name(entry_points)  # what this environment's own wheel does not say
    return folder


def assert_one_policy(place: Path, steps: range, capsys: pytest.CaptureFixture[str]) -> None:
    """In float32 each token's ratio is 1 within rounding, in every step: not only on average."""
    low, high = (told(place, steps[-1], f"ratio_{end}") for end in ("min", "max"))
    with capsys.disabled():
        print(f"\nratios by step: {low} to {high}; seconds of a sync: {told(place, steps[-1], 'seconds')}")
    assert list(low) == list(high) == list(steps)
    assert all(0.9999 < value <= 1 for value in low.values())
    assert all(1 <= value < 1.0001 for value in high.values())


@pytest.fixture(scope="module")
def streamed(place: Path, entry_points: Path) -> str:  # noqa: F811
    """What a run of two steps prints that streams; its checkpoint is where another run goes on."""
    return train(place, 2, LOADED, entry_points=entry_points, LORA_MERGE_DTYPE="float32")


def test_streams_into_verl(place: Path, streamed: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Switched on by verl's own flag alone: verl's buckets carry our stream into its servers, and every step's
    answers are the policy's."""
    assert streamed.count("lora_merge takes over the merged weights of FSDPEngineWithLMHead") == 1
    assert len(re.findall(r"lora_merge: merged@\d over verl's rollout: 27 tensors", streamed)) == 3
    assert_one_policy(place, range(1, 3), capsys)
    assert told(place, 2, "tensors") == {1: 27, 2: 27}


def saved_base(place: Path, steps: int) -> dict[str, torch.Tensor]:
    """The base in a checkpoint of verl's, each rank's share."""
    found = {}
    for rank in range(2):
        file = place / "checkpoints" / f"global_step_{steps}" / "actor" / f"model_world_size_2_rank_{rank}.pt"
        for name, shard in torch.load(file, weights_only=False).items():
            if "lora_" not in name:
                found[f"{rank} {name}"] = getattr(shard, "_local_tensor", shard)
    return found


@pytest.mark.usefixtures("streamed")
def test_pushes_and_resumes(place: Path, entry_points: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """verl goes on from its own checkpoint, of the run before, with whole pushes into its servers: the adapter is there
    once, and every element of the engines was written. It trains on merged weights, beside a reference policy; a
    checkpoint of it has the bits of the base."""
    assert (place / "checkpoints" / "global_step_2").exists(), "the run before left no checkpoint"
    settings = {"LORA_MERGE_VERIFY": "1", "LORA_MERGE_DTYPE": "float32", "LORA_MERGE_TRAIN": "merged"}
    reference = "actor_rollout_ref.actor.use_kl_loss=True"
    first = "trainer.val_before_train=True"
    printed = train(place, 4, PUSHED, reference, first, entry_points=entry_points, **settings)
    assert printed.count("lora_merge trains the policy of verl 0.9.1 on its merged weights") == 1
    before, after = saved_base(place, 2), saved_base(place, 4)
    assert before.keys() == after.keys()
    for name, shard in before.items():
        assert_same_bits(after[name], shard, name)
    lines = [json.loads(line) for line in (place / "4.jsonl").read_text().splitlines()]
    assert all(line["data"]["actor/kl_loss"] > 0 for line in lines if line["step"] > 2), "the reference is the policy"
    assert len(re.findall(r"lora_merge: merged@\d over shm: 27 tensors", printed)) == 3
    # Rollouts begin with dummy weights: what is validated before the first step is what was, when the run ended. (verl
    # takes the mean of the rewards in the order in which they come.)
    assert validated(place, 4)[2] == pytest.approx(validated(place, 2)[2], rel=1e-9)
    assert validated(place, 4).keys() == {2, 4}
    assert_one_policy(place, range(3, 5), capsys)
    assert told(place, 4, "coverage") == {3: 1.0, 4: 1.0}
