"""TRL on a GPU: bfloat16, and an engine that sleeps between rollouts, which TRL wakes for each sync.

`pytest -m gpu`, with TRL and datasets beside vLLM; each case starts an engine of its own in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


def train(folder: Path, mode: str, sleeps: bool) -> dict[str, Any]:
    """Three steps; what was logged, and how many elements of the base have other bits afterwards."""
    import engines
    import trl_training
    from trl import GRPOTrainer

    import lora_merge.integrations.trl as lm

    base = trl_training.checkpoint(folder / "base", engines.qwen2(tied=False))
    options: dict[str, Any] = {"enforce_eager": True, "max_num_seqs": 32}
    if mode == "adapter":
        options |= {"enable_lora": True, "max_lora_rank": 8}
    with lm.engine_options(**options):
        trainer = GRPOTrainer(
            model=str(base),
            reward_funcs=trl_training.vowels,
            args=trl_training.arguments(
                folder / "out", use_cpu=False, bf16=True, vllm_enable_sleep_mode=sleeps, vllm_gpu_memory_utilization=0.1
            ),
            train_dataset=trl_training.prompts(),
            peft_config=trl_training.lora(),
        )
    before = trl_training.base_weights(trainer.model)
    lm.attach(trainer, mode=mode, check=True, verify=True)
    trainer.train()
    names = ("ratio_mean", "ratio_min", "ratio_max", "seconds", "coverage", "merged")
    found: dict[str, Any] = {name: trl_training.logged(trainer, f"lora_merge/{name}") for name in names}
    return found | {"changed": trl_training.changed(trainer.model, before)}


@pytest.mark.gpu
@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_grpo(mode: str, sleeps: bool, tmp_path: Path) -> None:
    code = "import sys, json, pathlib, test_trainer_trl_gpu as t; "
    code += "found = t.train(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3] == 'True'); "
    code += "pathlib.Path(sys.argv[1], 'found.json').write_text(json.dumps(found))"
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", code, str(tmp_path), mode, str(sleeps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    print(f"{mode}, sleeps: {sleeps}: {found}")
    assert found["changed"] == 0
    assert found["coverage"] == [1.0] * 3
    assert len(found["ratio_mean"]) == 3
    assert all(abs(ratio - 1) < 0.02 for ratio in found["ratio_mean"])
