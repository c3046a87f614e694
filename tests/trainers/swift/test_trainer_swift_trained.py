"""ms-swift's trainers that train on merged weights: LORA_MERGE_TRAIN=merged."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import swift_runs
import torch
from computed import computed
from helpers import assert_same_bits
from safetensors.torch import load_file
from swift_runs import arguments, assert_untouched, before_answers, engine_weights, training
from torch import Tensor

from lora_merge.integrations.compat import TrainerRefused
from tests.trainers.swift.test_trainer_swift import assert_ratios, history

nothing_set = swift_runs.nothing_set
STEPS, SAVED = 4, 2


@pytest.fixture(scope="module", autouse=True)
def readable() -> Iterator[None]:
    with swift_runs.as_on_a_gpu():
        yield


@pytest.fixture(autouse=True)
def switched_on(nothing_set: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_MERGE_TRAIN", "merged")
    monkeypatch.setenv("LORA_MERGE_CHECK", "1")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return swift_runs.checkpoint(swift_runs.qwen2(tied=False), tmp_path_factory.mktemp("swift") / "base")


class Watch:
    """Reads what the engine holds before each answer, and seeds it: what it answers depends on its weights alone."""

    def __init__(self, trainer: Any) -> None:
        self.held: dict[str, Tensor] = {}
        before_answers(trainer, self.look)

    def look(self, trainer: Any) -> None:
        self.held = {name: t.clone() for name, t in engine_weights(trainer.engine.inner_model).items()}
        torch.manual_seed(trainer.state.global_step)


@pytest.mark.parametrize(("kind", "flags"), [
    ("grpo", {"beta": "0.1", "gradient_accumulation_steps": "2"}),
    ("grpo", {"torch_dtype": "bfloat16", "gradient_checkpointing": "true"}),
    ("gkd", {"teacher_model_type": "qwen2"}),
])  # fmt: skip
def test_what_answers_is_what_is_trained(
    kind: str, flags: dict[str, Any], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Bit for bit, in each forward and each backward pass until the optimizer steps; a reference policy computes with
    the exact base, which is back at the end."""
    monkeypatch.setenv("LORA_MERGE_VERIFY", "1")
    watched: list[Any] = []
    saved = load_file(base / "model.safetensors")
    if kind == "gkd":
        teacher = swift_runs.qwen2(tied=False)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(1.3)
        flags = flags | {"teacher_model": str(swift_runs.checkpoint(teacher, tmp_path / "teacher"))}

    def watch(trainer: Any) -> None:
        watch = Watch(trainer)
        looking = computed(trainer.model, lambda: watch.held, saved)
        watched.extend([looking, looking.__enter__()])

    line = arguments(kind, base, tmp_path, max_steps="3", **flags)
    with training(line, watch) as trainer:
        looking, seen = watched
        looking.__exit__(None, None, None)
        assert trainer.state.global_step == 3
        assert trainer._lora_merge_trains.training is None
        assert_untouched(trainer.model, base)
        assert seen["forward"] >= seen["backward"] >= 3 * 2 * 7, seen
        assert bool(seen["reference"]) == ("beta" in flags), seen
        assert history(trainer, "lora_merge/version") == [1, 2, 3]
        print(f"{kind} {flags}: {assert_ratios(trainer, 3, exact='torch_dtype' not in flags)}, {seen}")
        trained = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        assert all(p.abs().max() > 0 for p in trained), "nothing was trained"
        del trainer
    assert len(re.findall("lora_merge trains the policy of ms-swift 4.6.0 on its merged", capfd.readouterr().err)) == 1


def run(base: Path, out: Path, **flags: str) -> None:
    """Four steps, of which every second one is saved."""
    line = arguments("grpo", base, out, max_steps=f"{STEPS}", save_strategy="steps", save_steps=f"{SAVED}", **flags)
    with training(line, Watch) as trainer:
        assert trainer.state.global_step == STEPS
        assert_ratios(trainer, STEPS)
        assert_untouched(trainer.model, base)
        del trainer


def go_on(base: Path, out: Path, checkpoint: Path) -> None:
    """In a process of its own."""
    with swift_runs.as_on_a_gpu():
        run(base, out, resume_from_checkpoint=str(checkpoint))


def test_resume(base: Path, tmp_path: Path) -> None:
    """What goes on from a checkpoint in another process ends, bit for bit, where the run that was not interrupted did;
    a checkpoint holds the adapter and nothing of the base."""
    run(base, tmp_path / "whole")
    arguments_of = (base, tmp_path / "second", tmp_path / "whole" / f"checkpoint-{SAVED}")
    process = multiprocessing.get_context("spawn").Process(target=go_on, args=arguments_of)
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


def apart(model: Any, engine: Any) -> list[str]:
    """The base weights that are not memory of the engine's."""
    theirs = {p.untyped_storage().data_ptr() for p in engine.inner_model.parameters()}
    found = [name for name, p in model.named_parameters() if p.untyped_storage().data_ptr() not in theirs]
    return [name for name in found if "lora_" not in name]


def test_one_copy(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer and engine hold the weights once. (swift's sleep wants CUDA.)"""
    monkeypatch.delenv("LORA_MERGE_TRAIN")
    monkeypatch.setenv("LORA_MERGE_SHARE", "1")
    monkeypatch.setenv("LORA_MERGE_VERIFY", "1")
    engines.plain_layout(monkeypatch)

    def watch(trainer: Any) -> None:
        assert not apart(trainer.model, trainer.engine)

    steps = {"max_steps": "3", "beta": "0.1", "gradient_accumulation_steps": "2"}
    # swift syncs once between two steps, and reference passes have the base in between.
    evaluations = {"split_dataset_ratio": "0.5", "eval_strategy": "steps", "eval_steps": "1"}
    evaluations["per_device_eval_batch_size"] = "4"
    with training(arguments("grpo", base, tmp_path, **steps, **evaluations), watch) as trainer:
        assert trainer.state.global_step == 3
        assert not apart(trainer.model, trainer.engine)
        assert_untouched(trainer.model, base)
        assert_ratios(trainer, 3)
        del trainer


def test_what_cannot_share(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_MERGE_SHARE", "1")
    with pytest.raises(TrainerRefused, match="--offload_model true moves the model off while the engine answers"):
        swift_runs.train(arguments("grpo", base, tmp_path, offload_model="true"))


def test_an_interrupt(base: Path, tmp_path: Path) -> None:
    """Where weights are merged: the base is back."""
    kept: list[Any] = []

    def watch(trainer: Any) -> None:
        kept.append(trainer)

        def interrupt(*args: Any) -> None:
            if trainer.state.global_step == 1 and torch.is_grad_enabled():
                assert trainer._lora_merge_trains.training._merged is not None
                raise KeyboardInterrupt

        trainer.model.get_base_model().lm_head.register_forward_hook(interrupt)

    with pytest.raises(KeyboardInterrupt):
        swift_runs.train(arguments("grpo", base, tmp_path), watch)
    assert kept[0].state.global_step == 1
    assert_untouched(kept[0].model, base)
    kept.clear()


@pytest.mark.parametrize(("flags", "message"), [
    ({"lora_dropout": "0.05"}, r"LORA_MERGE_TRAIN=merged: .*lora_dropout=0\.05.*--lora_dropout 0"),
    ({"tuner_type": "full"}, r"LORA_MERGE_TRAIN=merged: .*no LoRA layers.*--tuner_type lora"),
    ({"vllm_enable_lora": "true"}, r"LORA_MERGE_TRAIN=merged .*--vllm_enable_lora true"),
])  # fmt: skip
def test_what_is_refused(flags: dict[str, str], message: str, base: Path, tmp_path: Path,
                         monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Before an engine is started."""
    monkeypatch.delenv("LORA_MERGE_CHECK")
    with pytest.raises(TrainerRefused, match=message):
        swift_runs.train(arguments("grpo", base, tmp_path, **flags))
