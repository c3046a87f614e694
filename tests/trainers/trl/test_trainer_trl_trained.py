"""TRL's trainers that train on merged weights: `attach(trainer, train="merged")`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
import trl_training
from computed import computed
from engines import ask, assert_answers
from helpers import assert_same_bits
from safetensors.torch import load_file
from torch import Tensor
from trl import GRPOTrainer
from trl_training import (
    arguments,
    assert_all_ratios,
    base_weights,
    changed,
    kept,
    logged,
    lora,
    policy,
    prompts,
    vowels,
)

import lora_merge.integrations.trl as lm
from lora_merge import InvalidInput, VllmSync, train_merged

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
engine = trl_training.engine
TrainerOf = Callable[..., GRPOTrainer]
STEPS, SAVED = 4, 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trl_training.checkpoint(tmp_path_factory.mktemp("trl") / "base", engines.qwen2(tied=False))


def made(base: Path, out: Path, peft: Any = None, **changes: Any) -> GRPOTrainer:
    return GRPOTrainer(
        model=str(base),
        reward_funcs=vowels,
        args=arguments(out, **changes),
        train_dataset=prompts(),
        peft_config=lora() if peft is None else peft,
    )


@pytest.fixture
def trainer_of(base: Path, tmp_path: Path) -> Iterator[TrainerOf]:
    with trl_training.letting_go() as note:
        yield lambda *args, **changes: note(made(base, tmp_path, *args, **changes))


def pushed_by(rollout: Any) -> dict[str, Tensor]:
    """What each sync sends is written down, and the engine is seeded: its answers depend on its weights alone."""
    held: dict[str, Tensor] = {}
    push = rollout.sync_weights

    def pushed() -> None:
        push()
        held.update({name: tensor.clone() for name, tensor in lm_stream(rollout)})
        torch.manual_seed(rollout.trainer.state.global_step)

    rollout.generation.sync_weights = pushed
    return held


def lm_stream(rollout: Any) -> Iterator[tuple[str, Tensor]]:
    """The stream of the push, whose bytes `verify=True` compares with the engine's."""
    return iter(rollout._kept.sync._weights)


@pytest.mark.parametrize("kind", ["beta", "bf16"])
def test_grpo(kind: str, base: Path, trainer_of: TrainerOf, capfd: pytest.CaptureFixture[str]) -> None:
    """The trainer computes with what is served, bit for bit: ratios stay at 1. A reference policy computes with the
    exact base, which is back when training ends."""
    changes: dict[str, Any] = {"beta": 0.1, "gradient_accumulation_steps": 2}
    if kind == "bf16":
        changes = {"model_init_kwargs": {"dtype": torch.bfloat16}, "gradient_checkpointing": True}
    trainer = trainer_of(**changes)
    before = base_weights(trainer.model)
    rollout = lm.attach(trainer, train="merged", check=True, verify=True)
    assert rollout is not None
    held = pushed_by(rollout)
    plain = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): tensor for name, tensor in before.items()
    }
    with computed(trainer.model, lambda: held, plain) as seen:
        trainer.train()
    assert seen["forward"] >= seen["backward"] >= 3 * 2 * 7, seen
    assert bool(seen["reference"]) == (kind == "beta"), seen
    assert changed(trainer.model, before) == 0
    if kind == "beta":
        assert_all_ratios(trainer, 3)
    else:
        assert all(abs(ratio - 1) < 0.02 for ratio in logged(trainer, "lora_merge/ratio_mean"))
    assert logged(trainer, "lora_merge/merged") == 3 * [1.0]
    assert capfd.readouterr().err.count("lora_merge trains the policy of TRL 1.16.0 on its merged weights") == 1
    if kind == "beta":
        rollout.sync_weights()
        assert_answers(ask(kept[0]), policy(base, trainer.model.state_dict(), lora()))


def run(base: Path, out: Path, checkpoint: Path | None = None) -> None:
    """Four steps, of which every second one is saved."""
    with trl_training.letting_go() as note:
        trainer = note(made(base, out, max_steps=STEPS, save_strategy="steps", save_steps=SAVED))
        before = base_weights(trainer.model)
        rollout = lm.attach(trainer, train="merged", check=True)
        pushed_by(rollout)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        assert trainer.state.global_step == STEPS
        assert_all_ratios(trainer, STEPS)
        assert changed(trainer.model, before) == 0


def go_on(base: Path, out: Path, checkpoint: Path) -> None:
    """In a process of its own."""
    with trl_training.one_engine():
        run(base, out, checkpoint)


def test_resume(base: Path, tmp_path: Path) -> None:
    """What goes on from a checkpoint in another process ends, bit for bit, where the run that was not interrupted did;
    a checkpoint holds the adapter and nothing of the base."""
    run(base, tmp_path / "whole")
    given = (base, tmp_path / "second", tmp_path / "whole" / f"checkpoint-{SAVED}")
    process = multiprocessing.get_context("spawn").Process(target=go_on, args=given)
    process.start()
    process.join(240)
    assert process.exitcode == 0
    first, second = (
        load_file(tmp_path / name / f"checkpoint-{STEPS}" / "adapter_model.safetensors") for name in ("whole", "second")
    )
    assert first.keys() == second.keys()
    assert all("lora_" in name for name in first)
    for name, tensor in first.items():
        assert_same_bits(second[name], tensor, name)


def test_an_interrupt(trainer_of: TrainerOf) -> None:
    """Where weights are merged: the base is back, and so it is after the training that follows."""
    trainer = trainer_of(max_steps=2)
    before = base_weights(trainer.model)
    rollout = lm.attach(trainer, train="merged")
    assert rollout is not None

    def interrupt(*args: Any) -> None:
        if trainer.state.global_step == 1 and torch.is_grad_enabled():
            assert changed(trainer.model, before) > 0
            raise KeyboardInterrupt

    hook = trainer.model.get_base_model().lm_head.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert changed(trainer.model, before) == 0
    hook.remove()
    trainer.train()
    assert trainer.state.global_step == 2
    assert changed(trainer.model, before) == 0
    rollout.detach()
    assert "train" not in vars(trainer)


def test_what_is_refused(trainer_of: TrainerOf) -> None:
    """What cannot be trained so; pushes that would serve another policy than the one that is trained."""
    trainer = trainer_of(peft=lora(lora_dropout=0.05))
    with pytest.raises(InvalidInput, match="lora_dropout"):
        lm.attach(trainer, train="merged")
    assert "train" not in vars(trainer)
    trainer = trainer_of()
    with pytest.raises(InvalidInput, match="train='merged' trains the policy that mode='merged'"):
        lm.attach(trainer, train="merged", mode="adapter")
    for options in ({"mode": "adapter"}, {"rounding": "stochastic"}):
        sync = VllmSync(trainer.model, kept[0], **options)
        with train_merged(trainer.model):
            (name,) = options
            with pytest.raises(InvalidInput, match=rf"train_merged\(model\) .*{name}='{options[name]}'"):
                sync.push()
        sync.close()
