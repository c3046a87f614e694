"""Real TRL trainers on one rank, with the engine that TRL starts beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import trl_training
from engines import ask, assert_answers
from trl import GRPOTrainer
from trl_training import arguments, base_weights, changed, lora, prompts, vowels

import lora_merge.integrations.trl as lm

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
FLOAT32 = {"dtype": "float32", "enforce_eager": True}


@pytest.fixture(scope="module", autouse=True)
def in_process() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        for name in [name for name in os.environ if name.startswith("LORA_MERGE")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trl_training.checkpoint(tmp_path_factory.mktemp("trl") / "base")


def grpo(base: Path, out: Path, *, peft: Any = None, **changes: Any) -> GRPOTrainer:
    return GRPOTrainer(
        model=str(base),
        reward_funcs=vowels,
        args=arguments(out, **changes),
        train_dataset=prompts(),
        peft_config=lora() if peft is None else peft,
    )


def test_grpo(base: Path, tmp_path: Path) -> None:
    with lm.engine_options(**FLOAT32):
        trainer = grpo(base, tmp_path)
    before = base_weights(trainer.model)
    rollout = lm.attach(trainer, check=True, verify=True)
    trainer.train()
    assert changed(trainer.model, before) == 0
    assert trl_training.logged(trainer, "lora_merge/version") == [1, 2, 3]
    for name in ("lora_merge/ratio_min", "lora_merge/ratio_max"):
        assert all(abs(ratio - 1) < 1e-4 for ratio in trl_training.logged(trainer, name))
    rollout.sync_weights()
    assert_answers(ask(trainer.vllm_generation.llm), trainer.model.eval())
    trl_training.shut(trainer.vllm_generation.llm)
