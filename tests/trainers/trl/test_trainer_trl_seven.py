"""The other trainers of TRL that share its engine's class, and what is derived from GRPO: each trains for real, and the
engine then answers as the policy does."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import engines
import pytest
import trl_training
from datasets import Dataset
from engines import ask, assert_answers
from transformers import AutoModelForCausalLM
from trl_training import arguments, base_weights, changed, kept, logged, lora, policy, prompts, vowels

import lora_merge.integrations.trl as lm
from lora_merge.integrations.compat import TrainerRefused

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
base, engine = trl_training.base, trl_training.engine


def conversations() -> Any:
    chats = [
        [{"role": "user", "content": "abc"[i % 3 :]}, {"role": "assistant", "content": "de"[i % 2 :]}]
        for i in range(16)
    ]
    return Dataset.from_dict({"messages": chats})


def with_context() -> Any:
    return prompts().add_column("privileged_context", ["xyz"] * 16)


TRAINERS: dict[str, tuple[str, dict[str, Any], Any]] = {
    # name: module, configuration, dataset
    "RLOO": ("trl", {}, prompts),
    "Distillation": ("trl", {}, prompts),
    "SDPO": ("trl.experimental.sdpo", {"max_reprompt_len": 32}, prompts),
    "SDFT": ("trl.experimental.sdft", {}, with_context),
    "GOLD": ("trl.experimental.gold", {"lmbda": 1.0, "max_length": 32}, conversations),
    "IWOPD": ("trl.experimental.iw_opd", {"lmbda": 1.0, "max_length": 32}, conversations),
    "GMPO": ("trl.experimental.gmpo", {}, prompts),
}


def trainer_of(kind: str, base: Path, out: Path) -> Any:
    module, changes, data = TRAINERS[kind]
    found = importlib.import_module(module)
    config = arguments(out, getattr(found, f"{kind}Config"), max_steps=2, **changes)
    made: dict[str, Any] = {"reward_funcs": vowels} if kind in ("RLOO", "SDPO", "GMPO") else {}
    if kind in ("Distillation", "GOLD", "IWOPD"):
        made["teacher_model"] = AutoModelForCausalLM.from_pretrained(base)
    if kind in ("GOLD", "IWOPD"):
        made["processing_class"] = trl_training.tokenizer(base)
    return getattr(found, f"{kind}Trainer")(
        model=str(base), args=config, train_dataset=data(), peft_config=lora(), **made
    )


@pytest.mark.parametrize("kind", TRAINERS)
def test_it_trains(kind: str, base: Path, tmp_path: Path) -> None:
    with trl_training.letting_go() as note:
        trainer = note(trainer_of(kind, base, tmp_path))
        if kind != "GMPO":
            with pytest.raises(TrainerRefused, match=f"{kind}Trainer does not keep the log-probs of the engine"):
                lm.attach(trainer, check=True)
        before = base_weights(trainer.model)
        rollout = lm.attach(trainer, verify=True, check=kind == "GMPO")
        assert rollout is not None
        trainer.train()
        assert changed(trainer.model, before) == 0
        versions = logged(trainer, "lora_merge/version")
        assert [version - versions[0] for version in versions] == [0, 1]
        rollout.sync_weights()
        trained = {name: p for name, p in trainer.model.state_dict().items() if "teacher" not in name}
        assert_answers(ask(kept[0]), policy(base, trained, lora()))
