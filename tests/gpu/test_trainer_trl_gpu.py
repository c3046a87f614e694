"""TRL on a GPU: bfloat16, and an engine that sleeps between rollouts, which TRL wakes for each sync; and on two GPUs,
an engine that both ranks' processes hold half of.

`pytest -m gpu`, with TRL and datasets beside vLLM; each case starts an engine of its own in processes of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT, SUPPORT


def train(folder: Path, mode: str, sleeps: bool, tp: int) -> dict[str, Any]:
    """Three steps; what was logged, and how many elements of the base have other bits afterwards."""
    import trl_training
    from trl import GRPOTrainer

    import lora_merge.integrations.trl as lm

    # Of a cache of a given size vLLM measures no free memory, which other tests on this GPU change.
    options: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 32, "kv_cache_memory_bytes": 1 << 28}
    shares = mode == "shared"
    if mode == "adapter":
        options |= {"enable_lora": True, "max_lora_rank": 8}
    if shares:
        options |= {"share": True, "dtype": "bfloat16"}
    sizes: dict[str, Any] = {"vllm_gpu_memory_utilization": 0.1, "vllm_tensor_parallel_size": tp}
    sizes |= {"model_init_kwargs": {"dtype": "bfloat16"}} if shares else {}
    with lm.engine_options(**options):
        trainer = GRPOTrainer(
            model=str(folder / "base"),
            reward_funcs=trl_training.vowels,
            args=trl_training.arguments(
                folder / "out", use_cpu=False, bf16=True, vllm_enable_sleep_mode=sleeps, **sizes
            ),
            train_dataset=trl_training.prompts(),
            peft_config=trl_training.lora(),
        )
    before = {name: weight.cuda() for name, weight in trl_training.base_weights(trainer.model).items()}
    rollout = lm.attach(trainer, mode="merged" if shares else mode, check=True, verify=True, share=shares)
    trainer.train()
    assert rollout is not None
    assert rollout.report is not None
    names = ("ratio_mean", "ratio_min", "ratio_max", "seconds", "coverage", "merged")
    found: dict[str, Any] = {name: trl_training.logged(trainer, f"lora_merge/{name}") for name in names}
    engine = trainer.vllm_generation.llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size
    found |= {"shared": rollout.report.shared, "moved": rollout.report.nbytes}
    return found | {"changed": trl_training.changed(trainer.model, before), "engine": engine}


def run(folder: Path, mode: str, sleeps: bool, ranks: int) -> list[dict[str, Any]]:
    """What each rank has seen of a training, with an engine whose tensor-parallel size is the number of ranks."""
    import engines
    import trl_training

    trl_training.checkpoint(folder / "base", engines.qwen2(tied=False))
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), str(ROOT), os.environ.get("PYTHONPATH", "")])
    launched = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}"] if ranks > 1 else []
    command = [sys.executable, *launched, __file__, str(folder), mode, str(sleeps), str(ranks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"found.{rank}.json").read_text()) for rank in range(ranks)]


def check(found: dict[str, Any]) -> None:
    """The answers came from the policy, and the base is what it was."""
    assert found["changed"] == 0
    assert found["coverage"] == [1.0] * 3
    assert len(found["ratio_mean"]) == 3
    assert all(abs(ratio - 1) < 0.02 for ratio in found["ratio_mean"])


@pytest.mark.gpu
@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("mode", ["merged", "adapter", "shared"])
def test_grpo(mode: str, sleeps: bool, tmp_path: Path) -> None:
    (found,) = run(tmp_path, mode, sleeps, 1)
    print(f"{mode}, sleeps: {sleeps}: {found}")
    check(found)
    assert (found["shared"] > 0) == (mode == "shared")
    assert (found["moved"] == 0) == (mode == "shared")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(("mode", "sleeps"), [("merged", False), ("merged", True), ("adapter", False)])
def test_one_engine_over_both_ranks(mode: str, sleeps: bool, tmp_path: Path) -> None:
    """`vllm_tensor_parallel_size=2`: TRL gathers the prompts of both ranks, and each rank pushes to its worker."""
    first, second = run(tmp_path, mode, sleeps, 2)
    print(f"tensor parallel, {mode}, sleeps: {sleeps}: {first}")
    assert first["engine"] == second["engine"] == 2
    assert first["changed"] == second["changed"] == 0
    check(first)


if __name__ == "__main__":
    seen = train(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", int(sys.argv[4]))
    Path(sys.argv[1], f"found.{os.environ.get('RANK', '0')}.json").write_text(json.dumps(seen))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # vLLM and torch end the same process groups
