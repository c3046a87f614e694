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
TrainerOf = Callable[..., GRPOTrainer]
STEPS, SAVED = 4, 2


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    with trl_training.one_engine(plain=True):
        yield


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
        if not rollout.options.share:  # reading the model merges it again, in the engine then
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


def run(base: Path, out: Path, checkpoint: Path | None = None, **options: Any) -> None:
    """Four steps, of which every second one is saved."""
    with trl_training.letting_go() as note:
        trainer = note(made(base, out, max_steps=STEPS, save_strategy="steps", save_steps=SAVED))
        before = base_weights(trainer.model)
        rollout = lm.attach(trainer, check=True, **options or {"train": "merged"})
        pushed_by(rollout)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        assert trainer.state.global_step == STEPS
        assert_all_ratios(trainer, STEPS)
        assert changed(trainer.model, before) == 0


def go_on(base: Path, out: Path, checkpoint: Path) -> None:
    """In a process of its own."""
    with trl_training.one_engine(plain=True):
        run(base, out, checkpoint)


def test_resume(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on from a checkpoint in another process ends, bit for bit, where the run that was not interrupted did;
    a checkpoint holds the adapter and nothing of the base."""
    run(base, tmp_path / "whole")
    given = (base, tmp_path / "second", tmp_path / "whole" / f"checkpoint-{SAVED}")
    for place in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # of the trainer in this process
        monkeypatch.delenv(place, raising=False)
    process = multiprocessing.get_context("spawn").Process(target=go_on, args=given)
    process.start()
    process.join(240)
    assert process.exitcode == 0
    # So does one that shares its weights with the engine, in whose memory products may round otherwise.
    run(base, tmp_path / "shared", share=True)
    run(base, tmp_path / "on", tmp_path / "shared" / f"checkpoint-{SAVED}", share=True)
    for whole, resumed in (("whole", "second"), ("shared", "on")):
        first, second = (
            load_file(tmp_path / name / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
            for name in (whole, resumed)
        )
        assert first.keys() == second.keys()
        assert all("lora_" in name for name in first)
        for name, tensor in first.items():
            assert_same_bits(second[name], tensor, name)


def apart(model: Any, llm: Any) -> list[str]:
    """The base weights that are not memory of the engine's."""
    theirs = {p.untyped_storage().data_ptr() for p in llm.apply_model(lambda model: list(model.parameters()))[0]}
    found = [name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() not in theirs]
    return [name for name in found if "lora_" not in name]


def test_one_copy(trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Trainer and engine hold the weights once; reference passes see the base, which is back when training ends."""
    monkeypatch.setenv("LORA_MERGE_SHARE", "1")
    trainer = trainer_of(beta=0.1, gradient_accumulation_steps=2)
    before = base_weights(trainer.model)
    rollout = lm.attach(trainer, check=True, verify=True)
    assert rollout is not None
    assert "compute with what is pushed (in the engine's memory: " in (printed := capfd.readouterr().err)
    assert " MB shared with the engine; by itself: " in printed
    assert not apart(trainer.model, kept[0])
    trainer.train()
    assert_all_ratios(trainer, 3)
    assert rollout.report is not None
    assert rollout.report.nbytes == 0
    assert rollout.report.shared == sum(p.nbytes for p in trainer.model.parameters() if not p.requires_grad)
    assert changed(trainer.model, before) == 0
    trainer.evaluate(prompts(4))
    (ratio,) = logged(trainer, "eval_lora_merge/ratio_max")
    assert abs(ratio - 1) < 1e-4
    trainer.train()  # once more
    assert changed(trainer.model, before) == 0
    state = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    rollout.sync_weights()
    assert_answers(ask(kept[0]), policy(base_of(trainer), state, lora()))
    rollout.detach()
    assert apart(trainer.model, kept[0])
    assert changed(trainer.model, before) == 0


def test_one_copy_evaluates(trainer_of: TrainerOf) -> None:
    """Between two steps TRL asks the engine several times after one sync; reference passes, and what follows an
    evaluation, have the base in between."""
    trainer = trainer_of(beta=0.1, max_steps=2, per_device_eval_batch_size=4)
    trainer.eval_dataset, trainer.args.eval_strategy, trainer.args.eval_steps = prompts(4), "steps", 1
    rollout = lm.attach(trainer, share=True, check=True)
    assert rollout is not None
    trainer.train()
    assert_all_ratios(trainer, 2)
    rollout.detach()


def base_of(trainer: GRPOTrainer) -> Path:
    return Path(trainer.model.get_base_model().config._name_or_path)


def test_one_copy_sleeps(trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where TRL puts its engine to sleep at level 2, the KV cache sleeps alone."""
    trainer = trainer_of(max_steps=2)
    before = base_weights(trainer.model)
    generation = trainer.vllm_generation
    generation.enable_sleep_mode = True
    told = engines.Sleeping(kept[0], monkeypatch)
    rollout = lm.attach(trainer, share=True, check=True)
    assert rollout is not None
    trainer.train()
    assert told.calls == ["discard", "wake_up", "discard"]
    assert_all_ratios(trainer, 2)
    assert changed(trainer.model, before) == 0
    rollout.detach()
    assert {"sleep", "wake_up"}.isdisjoint(vars(kept[0]))
    assert not told.tags


@pytest.mark.parametrize("share", [False, True])
def test_an_interrupt(share: bool, trainer_of: TrainerOf) -> None:
    """Where weights are merged: the base is back, and so it is after the training that follows."""
    trainer = trainer_of(max_steps=2)
    before = base_weights(trainer.model)
    rollout = lm.attach(trainer, train="merged", share=share)
    assert rollout is not None

    def interrupt(*args: Any) -> None:
        if trainer.state.global_step == 1 and torch.is_grad_enabled():
            assert changed(trainer.model, before) > 0
            raise KeyboardInterrupt

    hook = trainer.model.get_base_model().model.layers[-1].register_forward_hook(interrupt)
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
    with pytest.raises(InvalidInput, match="share=True trains on merged weights, and train='adapters' does not"):
        lm.attach(trainer, train="adapters", share=True)
    with pytest.raises(InvalidInput, match="share=True shares merged weights, got mode='adapter'"):
        lm.attach(trainer, mode="adapter", share=True)
    for options in ({"mode": "adapter"}, {"rounding": "stochastic"}):
        sync = VllmSync(trainer.model, kept[0], **options)
        with train_merged(trainer.model):
            (name,) = options
            with pytest.raises(InvalidInput, match=rf"train_merged\(model\) .*{name}='{options[name]}'"):
                sync.push()
        sync.close()
