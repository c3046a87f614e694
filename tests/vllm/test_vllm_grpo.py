"""examples/grpo.py, short, and the vLLM block of docs/trl.md.

A peer's rollout broke from the second batch on, and after a resume: so every step of every run is looked at.
"""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from docs_code import names_of
from engines import GREEDY, assert_answers, train
from grpo_runs import ROOT, break_off_and_go_on, grpo, records
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

WHO_MERGES = {
    "merged": (["--merge", "engine"], ["--merge", "trainer"]),
    "adapter": ([], []),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first run teaches it, the others start from it."""
    return tmp_path_factory.mktemp("grpo") / "base"


@pytest.mark.parametrize("mode", WHO_MERGES)
def test_every_token_of_every_step_comes_from_the_policy(mode: str, base: Path, tmp_path: Path) -> None:
    if base.exists():
        shutil.copytree(base, tmp_path / "base")
    before, after = WHO_MERGES[mode]
    break_off_and_go_on(tmp_path, ["--mode", mode], before, after, seeded=True)
    if not base.exists():
        shutil.copytree(tmp_path / "base", base)


def test_an_engine_that_quantises_and_truncated_importance_sampling(tmp_path: Path) -> None:
    """Ratios leave the band of 0.02, which ends no run in bf16, and are weighed. (Blocks of 128 divide the base.)"""
    options = ("--dtype", "bfloat16", "--quantization", "fp8_per_channel", "--truncated-importance-sampling", "2")
    grpo(tmp_path, *options, "--hidden", "128", "--pretrain", "40", "--steps", "2")
    for step in records(tmp_path):
        assert step["ratio_off"] > 0.02, step
        assert abs(step["ratio_mean"] - 1) < 0.1, "it is the policy that is trained, a little off"


def test_four_ways_beside_each_other(tmp_path: Path) -> None:
    """benchmarks/grpo.py: the same rewards in each way, and a resume in the middle of each."""
    data = tmp_path / "grpo.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "grpo.py"), "--steps", "2", "--json", str(data)]
    done = subprocess.run([*command, "--options", "--prompts", "4", "--pretrain", "20"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ways = json.loads(data.read_text())["ways"]
    assert ways.keys() == {"merged", "engine", "adapter", "trained"}
    for way in ways.values():
        assert [(entry["step"], entry["resumed"]) for entry in way["log"]] == [(0, False), (1, True)]
        assert [entry["reward"] for entry in way["log"]] == [entry["reward"] for entry in ways["merged"]["log"]]
        assert max(entry["ratio_off"] for entry in way["log"]) < 0.02


def test_tokens_weigh_what_the_engine_undersampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location("grpo", ROOT / "examples" / "grpo.py")
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    sys.modules["grpo"] = example  # dataclasses look there
    spec.loader.exec_module(example)
    own, theirs = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -1.5, -3.0]])
    before, weights = example.correction(own, theirs, None)
    assert torch.equal(before, theirs)
    assert torch.equal(weights, torch.ones(1, 3))
    before, weights = example.correction(own, theirs, 2.0)
    assert torch.equal(before, own)
    assert torch.allclose(weights, torch.tensor([[1.0, math.exp(0.5), 2.0]]))


def test_trl_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block of docs/trl.md, with a real engine."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    engines.save_base(model.get_base_model(), tmp_path / "base")
    options = engines.engine_options(model)
    del options["weight_transfer_config"]
    generation = names_of("trl.md", vllm=True)["Generation"](model, str(tmp_path / "base"), **options)
    try:
        for step in range(2):
            train(model, step)
            generation.sync_weights()
            assert_answers(generation.generate(engines.prompts(), GREEDY), model)
    finally:
        generation.sync.close()
        generation.llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
