"""ms-swift's GRPO and GKD in one process with its colocated engine: the engine holds the policy, the base stays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import swift_runs
import torch
from safetensors.torch import load_file
from swift_runs import Stock, arguments, assert_is, assert_untouched, before_answers, engine_weights, policy, training

from lora_merge import PushFailed, PushRefused, VllmSync
from lora_merge.engine.vllm.loading.loader import Loader
from lora_merge.integrations.metrics import PolicyGap

nothing_set, said = swift_runs.nothing_set, swift_runs.said
EXACT = 1e-4
"""Of importance ratios in float32: some ten roundings of 2^-24 in a log-prob of a few units, on either side."""


@pytest.fixture(scope="module", autouse=True)
def readable() -> Iterator[None]:
    with swift_runs.as_on_a_gpu():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: `tied`, `untied`, and another one to learn from."""
    made = tmp_path_factory.mktemp("swift")
    for tied in (True, False):
        swift_runs.checkpoint(swift_runs.qwen2(tied), made / ("tied" if tied else "untied"))
    teacher = swift_runs.qwen2(tied=True)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.3)
    swift_runs.checkpoint(teacher, made / "teacher")
    return made


class Watch:
    """Looks at an engine each time before it answers, with swift's own way beside it."""

    def __init__(self, trainer: Any) -> None:
        self.stock, self.looks, self.worst, self.apart = Stock(trainer), 0, 0.0, 0.0
        before_answers(trainer, self.look)

    def look(self, trainer: Any) -> None:
        wanted = policy(trainer.model)
        self.worst = max(self.worst, assert_is(engine_weights(trainer.engine.inner_model), wanted))
        self.stock.turn(trainer)
        for name, tensor in self.stock.sent.items():
            self.apart = max(self.apart, float((tensor.double() - wanted[name].value).abs().max()))
        self.looks += 1


def history(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


def assert_ratios(trainer: Any, steps: int, *, exact: bool = True) -> str:
    """Of each step; in words."""
    low, high, mean = (history(trainer, f"lora_merge/ratio_{kind}") for kind in ("min", "max", "mean"))
    assert len(low) == steps
    if exact:
        assert 1 - EXACT < min(low) <= max(high) < 1 + EXACT, (low, high)
    assert all(abs(one - 1) < 0.02 for one in mean), mean
    return f"ratios {min(low):.7f} to {max(high):.7f}"


@pytest.mark.parametrize(("kind", "base", "flags"), [
    ("grpo", "tied", {"use_dora": "true", "move_model_batches": "2"}),
    ("grpo", "untied", {"target_modules": ["q_proj", "down_proj"], "modules_to_save": "lm_head", "use_rslora": "true"}),
    ("grpo", "untied", {"torch_dtype": "bfloat16"}),
    ("gkd", "untied", {"teacher_model": "teacher", "teacher_model_type": "qwen2"}),
])  # fmt: skip
def test_each_answer_comes_from_the_policy(
    kind: str, base: str, flags: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str], said: swift_runs.Said,
) -> None:  # fmt: skip
    """Its weights, each element rounded once; the base is bit for bit what it was, and what is logged says so."""
    monkeypatch.setenv("LORA_MERGE_CHECK", "1")
    monkeypatch.setenv("LORA_MERGE_VERIFY", "1")
    watched: list[Watch] = []
    if "teacher_model" in flags:
        flags = flags | {"teacher_model": str(folder / flags["teacher_model"])}
    line = arguments(kind, folder / base, tmp_path, max_steps="3", **flags)
    with training(line, lambda trainer: watched.append(Watch(trainer))) as trainer:
        (watch,) = watched
        assert watch.looks == 3
        assert_untouched(trainer.model, folder / base)
        trained = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        assert all(p.abs().max() > 0 for p in trained), "nothing was trained"
        assert history(trainer, "lora_merge/version") == [1, 2, 3]
        assert history(trainer, "lora_merge/coverage") == [1, 1, 1]
        ratios = assert_ratios(trainer, 3, exact="torch_dtype" not in flags)
        printed = capfd.readouterr().err
        print(
            f"{kind} {flags}: {ratios}; engine: {watch.worst:.2f} of what rounding allows; swift's own tensors lie "
            f"{watch.apart:.1e} from the policy, and leave {watch.stock.drift()}"
        )
    assert len(re.findall(r"lora_merge takes over \w+Trainer._move_model_to_vllm: merged pushes", printed)) == 1
    assert len(re.findall(r"lora_merge: merged@[123] over local", said.text)) == 3


def test_qlora(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base in codes of 4 bits: the engine holds what they stand for and the adapters, and the codes stay."""
    monkeypatch.setenv("LORA_MERGE_VERIFY", "1")
    flags = {"quant_method": "bnb", "quant_bits": "4", "bnb_4bit_compute_dtype": "float32"}
    looks: list[float] = []
    codes: dict[str, torch.Tensor] = {}

    def look(trainer: Any) -> None:
        looks.append(assert_is(engine_weights(trainer.engine.inner_model), policy(trainer.model)))

    def watch(trainer: Any) -> None:
        found = {name: p for name, p in trainer.model.named_parameters() if p.dtype == torch.uint8}
        codes.update({name: p.detach().clone() for name, p in found.items()})
        before_answers(trainer, look)

    with training(arguments("grpo", folder / "untied", tmp_path, max_steps="2", **flags), watch) as trainer:
        assert len(looks) == 2
        assert len(codes) == 2 * 7
        now = dict(trainer.model.named_parameters())
        assert all(torch.equal(now[name], before) for name, before in codes.items())
        assert history(trainer, "lora_merge/coverage") == [1, 1]


def test_an_adapter_beside_its_base(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --vllm_enable_lora swift merges and unmerges all the same; here the adapter goes alone."""
    monkeypatch.setenv("LORA_MERGE_CHECK", "1")
    stocks: list[Stock] = []
    saved = load_file(folder / "tied" / "model.safetensors")

    def look(trainer: Any) -> None:
        for name, tensor in engine_weights(trainer.engine.inner_model).items():
            if not re.search("lora_[ab]_stacked", name):
                assert torch.equal(tensor, saved[name]), f"{name} is not the base's"
        assert trainer.engine.default_adapter_request.lora_name == "lora_merge"
        stocks[0].turn(trainer)

    def watch(trainer: Any) -> None:
        stocks.append(Stock(trainer))
        before_answers(trainer, look)

    line = arguments("grpo", folder / "tied", tmp_path, max_steps="3", vllm_enable_lora="true")
    with training(line, watch) as trainer:
        assert_untouched(trainer.model, folder / "tied")
        assert history(trainer, "lora_merge/merged") == [0, 0, 0]
        sent = history(trainer, "lora_merge/megabytes")
        print(f"adapter: {assert_ratios(trainer, 3)}, {sent} MB; swift's own way leaves {stocks[0].drift()}")
        assert sent[2] < sum(tensor.nbytes for tensor in saved.values()) / 1e6 / 4


def test_an_adapter_counts_once_after_a_resume(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the engine holds at the first answer is base and adapter of the files, merged in float64."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    monkeypatch.setenv("LORA_MERGE_CHECK", "1")
    flags = {"modules_to_save": "lm_head", "save_strategy": "steps", "save_steps": "1", "max_steps": "2"}
    with training(arguments("grpo", folder / "untied", tmp_path / "first", **flags)) as trainer:
        ratios = [assert_ratios(trainer, 2)]
    files = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "untied", dtype=torch.float32),
        tmp_path / "first" / "checkpoint-1",
    )
    wanted, looked = policy(files), []

    def look(trainer: Any) -> None:
        if not looked:
            assert trainer.state.global_step == 1
            looked.append(assert_is(engine_weights(trainer.engine.inner_model), wanted))

    resumed = {"resume_from_checkpoint": str(tmp_path / "first" / "checkpoint-1"), "max_steps": "3"}
    line = arguments("grpo", folder / "untied", tmp_path / "second", **flags | resumed)
    with training(line, lambda trainer: before_answers(trainer, look)) as trainer:
        assert len(looked) == 1
        assert trainer.state.global_step == 3
        ratios.append(assert_ratios(trainer, 3))  # the step before the resume is in its history
        assert_untouched(trainer.model, folder / "untied")
    print(f"before and after a resume: {ratios}")


def test_full_training_with_a_reference_that_follows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any adapter, over several turns a conversation, with an evaluation after each step."""
    monkeypatch.setenv("LORA_MERGE_CHECK", "1")
    answers: list[int] = []

    def look(trainer: Any) -> None:
        weights = dict(trainer.model.named_parameters())
        for name, tensor in engine_weights(trainer.engine.inner_model).items():
            assert torch.equal(tensor, weights[name]), f"{name} is not the trainer's"
        answers.append(trainer.state.global_step)

    swift_runs.dataset(folder / "few.jsonl", 8)
    flags = {"tuner_type": "full", "beta": "0.1", "sync_ref_model": "true", "ref_model_sync_steps": "1",
             "multi_turn_scheduler": "again", "max_turns": "2", "loss_scale": "default", "learning_rate": "1e-3",
             "val_dataset": str(folder / "few.jsonl"), "eval_strategy": "steps", "eval_steps": "1",
             "per_device_eval_batch_size": "32"}  # fmt: skip
    line = arguments("grpo", folder / "untied", tmp_path, **flags)
    before = load_file(folder / "untied" / "model.safetensors")
    with training(line, lambda trainer: before_answers(trainer, look)) as trainer:
        assert answers == sorted(answers)
        # Two turns a batch: one before each step, one in each evaluation.
        assert len(answers) >= 8
        assert set(answers) == {0, 1, 2}
        # A batch in which a first turn ended otherwise than by <|im_end|> has tokens that were never sampled.
        print(f"full, two turns: {assert_ratios(trainer, len(history(trainer, 'lora_merge/ratio_min')))}")
        # Training pushed before its first step; each evaluation comes first at its step.
        assert history(trainer, "lora_merge/version") == [1]
        assert history(trainer, "eval_lora_merge/version") == [2, 3]
        moved = [name for name, p in trainer.ref_model.named_parameters() if not torch.equal(p, before[name])]
        assert len(moved) == len(before), "the reference follows"


def test_prompts_that_the_engine_sees_cut_off(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """swift cuts what is longer than --max_length for the engine, and not for the trainer: two policies, which
    only the check of ratios tells."""
    monkeypatch.setenv("LORA_MERGE_CHECK", "1")
    with pytest.raises(PolicyGap, match="importance ratio"):
        swift_runs.train(arguments("grpo", folder / "tied", tmp_path, max_length="30"))


def test_whatever_happens_to_the_engine_shows(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another trainer's push, a push that breaks off: the engine answers no more, until a push has healed it."""

    def look(trainer: Any) -> None:
        if trainer.state.global_step == 0:
            return
        ask = type(trainer)._engine_infer
        trainer._lora_merge.check()
        other = VllmSync(trainer.model, trainer.engine.engine)
        other.push()
        with pytest.raises(PushRefused, match="of another trainer"):
            ask(trainer, [], None)
        other.close()
        with monkeypatch.context() as patch:
            patch.setattr(Loader, "finish", broken)
            with pytest.raises(PushFailed, match=r"engine 0 is dirty: .*injected"):
                trainer._move_model_to_vllm()
        with pytest.raises(PushRefused, match="dirty"):
            ask(trainer, [], None)
        trainer._move_model_to_vllm()
        assert_is(engine_weights(trainer.engine.inner_model), policy(trainer.model))

    with training(
        arguments("grpo", folder / "tied", tmp_path), lambda trainer: before_answers(trainer, look)
    ) as trainer:
        assert trainer.state.global_step == 2


def broken(*args: Any) -> None:
    raise RuntimeError("injected")


def test_switched_off(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LORA_MERGE=0 leaves swift's own trainers, also after a training that was taken over in the same process."""
    monkeypatch.setenv("LORA_MERGE", "0")
    with training(arguments("grpo", folder / "tied", tmp_path, max_steps="1")) as trainer:
        assert type(trainer).__module__ == "swift.rlhf_trainers.grpo_trainer"
        assert not [name for line in trainer.state.log_history for name in line if name.startswith("lora_merge")]
