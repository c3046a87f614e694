"""What cannot be taken over is refused by name, and what breaks on the way is noticed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bitsandbytes as bnb
import engines
import pytest
import torch
import trl.generation.vllm_generation
import trl_training
from engines import ask, assert_answers
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOTrainer
from trl.experimental.online_dpo import OnlineDPOTrainer
from trl.generation.vllm_generation import VLLMGeneration
from trl_training import arguments, kept, lora, policy, prompts, vowels

import lora_merge.integrations.trl as lm
from lora_merge import AlreadyMerged, InvalidInput, PushFailed, PushRefused
from lora_merge.engine.vllm import plugin
from lora_merge.engine.vllm.loading.loader import Loader
from lora_merge.integrations.compat import TrainerRefused
from lora_merge.integrations.metrics import PolicyGap
from lora_merge.integrations.trl.attach import attached
from lora_merge.integrations.trl.switch import _attached_first, _prepare_engine, max_lora_rank

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
base, engine = trl_training.base, trl_training.engine
TrainerOf = Callable[..., GRPOTrainer]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture
def trainer_of(base: Path, out: Path) -> Iterator[TrainerOf]:
    with trl_training.letting_go() as note:

        def make(model: Path = base, peft: Any = None, **changes: Any) -> GRPOTrainer:
            trainer = GRPOTrainer(
                model=str(model),
                reward_funcs=vowels,
                args=arguments(out, **changes),
                train_dataset=prompts(),
                peft_config=lora() if peft is None else peft,
            )
            return note(trainer)

        yield make


def assert_refused(trainer: Any, error: type[Exception], *words: str, **options: Any) -> None:
    """Attaching fails with these words, and TRL's way is in place."""
    with pytest.raises(error, match=".*".join(re.escape(word) for word in words)) as caught:
        lm.attach(trainer, **options)
    print(caught.value)
    generation = getattr(trainer, "vllm_generation", None)
    for owner, name in ((generation, "sync_weights"), (getattr(generation, "llm", None), "generate")):
        assert owner is None or name not in vars(owner)


def test_flags_of_trl(trainer_of: TrainerOf) -> None:
    refused = TrainerRefused
    plain = trainer_of()
    assert_refused(plain, InvalidInput, "mode must be one of merged, adapter, got 'both'", mode="both")
    assert_refused(plain, InvalidInput, "check must lie between 0 and 1", check=2.0)
    for changes, words in (
        ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction=True (--vllm_importance"),
        ({"top_p": 0.9}, "top_p=0.9 samples from another: set top_p=1.0 (--top_p)"),
        ({"generation_kwargs": {"min_p": 0.1}}, "min_p=0.1 samples"),
    ):
        assert_refused(trainer_of(**changes), refused, words, check=True)
    dropping = trainer_of(peft=lora(lora_dropout=0.05))
    assert_refused(dropping, refused, "log-probs with dropout", "disable_dropout=True (--disable_dropout)", check=True)
    assert lm.attach(trainer_of(top_p=0.9)) is not None  # no check, no objection


def test_without_vllm(base: Path, out: Path) -> None:
    trainer = GRPOTrainer(
        model=str(base), reward_funcs=vowels, args=arguments(out, use_vllm=False), train_dataset=prompts()
    )
    assert_refused(trainer, TrainerRefused, "pass use_vllm=True in its configuration (--use_vllm)", "LORA_MERGE=0")


def test_a_trainer_with_code_of_its_own() -> None:
    trainer = object.__new__(OnlineDPOTrainer)
    assert_refused(trainer, TrainerRefused, "OnlineDPOTrainer brings its weights to vLLM", "GRPO, RLOO")
    # With LORA_MERGE=1, too, where the first of the methods that are wrapped comes to this.
    trainer.args = SimpleNamespace(use_vllm=True)
    with pytest.raises(TrainerRefused, match="OnlineDPOTrainer brings its weights to vLLM"):
        _attached_first(OnlineDPOTrainer.train)(trainer)


def test_an_asynchronous_trainer_that_lacks_names() -> None:
    trainer = object.__new__(AsyncGRPOTrainer)
    trainer.args = SimpleNamespace()
    assert_refused(trainer, TrainerRefused, "AsyncGRPOTrainer.weight_transfer", "args.vllm_server_base_url")
    with pytest.raises(TrainerRefused, match="does not offer"):
        _attached_first(AsyncGRPOTrainer.train)(trainer)


def test_switched_off(trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    monkeypatch.setenv("LORA_MERGE", "0")
    assert lm.attach(trainer) is None
    assert "sync_weights" not in vars(trainer.vllm_generation)
    monkeypatch.setenv("LORA_MERGE", "perhaps")
    assert_refused(trainer, InvalidInput, "LORA_MERGE must be 1 or 0")
    monkeypatch.setenv("LORA_MERGE", "1")
    monkeypatch.setenv("LORA_MERGE_MODE", "adapter")
    rollout = lm.attach(trainer)
    assert rollout is not None
    rollout.sync_weights()
    assert rollout.report is not None
    assert rollout.report.mode == "adapter"


def test_quantised(trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base in codes that are not read; an engine that holds codes."""
    trainer = trainer_of()
    with monkeypatch.context() as patch:
        patch.setattr(kept[0].model_config, "quantization", "bitsandbytes")
        words = ("quantises its weights by bitsandbytes", "LORA_MERGE=1", "engine_options(quantization=None)")
        assert_refused(trainer, TrainerRefused, *words)
    layer = trainer.model.get_base_model().model.layers[1].mlp.up_proj.base_layer
    layer.weight = torch.nn.Parameter(layer.weight.detach().to(torch.int8), requires_grad=False)
    assert_refused(trainer, InvalidInput, "up_proj", "the base is quantised", "--load_in_4bit")


def test_the_engine_of_a_quantised_policy(trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """LORA_MERGE=1 starts it unquantised, where TRL would have bitsandbytes quantise it; others as TRL does."""

    class Generation:
        mode = "colocate"

        def __init__(self, model: Any) -> None:
            self.model = model

        def _init_vllm(self) -> None:
            self.llm = trl.generation.vllm_generation.LLM(quantization="bitsandbytes", seed=3)

    monkeypatch.setattr(trl.generation.vllm_generation, "LLM", lambda **options: options)
    _prepare_engine(Generation)
    codes = torch.nn.Sequential(bnb.nn.Linear4bit(64, 64))
    for model, wanted in ((codes, None), (torch.nn.Linear(1, 1), "bitsandbytes")):
        generation = Generation(model)
        generation._init_vllm()
        assert generation.llm == {"quantization": wanted, "seed": 3}


def test_one_trainer_for_each_engine(trainer_of: TrainerOf) -> None:
    first, second = trainer_of(), trainer_of()
    rollout = lm.attach(first)
    assert rollout is not None
    with pytest.raises(TrainerRefused, match="this trainer was attached before"):
        lm.attach(first)
    with pytest.raises(TrainerRefused, match=r"serves the policy of another one \(GRPOTrainer\)"):
        lm.attach(second)
    rollout.detach()
    assert lm.attach(second) is not None


def test_a_trainer_that_was_given_back(trainer_of: TrainerOf) -> None:
    """LORA_MERGE=1 attaches before a method, but not what its user has detached."""
    trainer, seen = trainer_of(), []
    method = _attached_first(lambda self: seen.append(attached(self) is not None))
    method(trainer)
    rollout = attached(trainer)
    rollout.detach()
    method(trainer)
    again = lm.attach(trainer)
    method(trainer)
    again.detach()
    assert seen == [True, False, True]


def test_engine_without_adapters(trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of()
    monkeypatch.setattr(kept[0].llm_engine.vllm_config, "lora_config", None)
    words = ("enable_lora=True", "engine_options(enable_lora=True", "LORA_MERGE_MODE=adapter", "mode='merged'")
    assert_refused(trainer, TrainerRefused, *words, mode="adapter")


def test_server_takes_no_adapters(trainer_of: TrainerOf) -> None:
    trainer = trainer_of()
    trainer.vllm_generation.mode = "server"
    assert_refused(trainer, TrainerRefused, "mode='adapter' needs", "--vllm_mode colocate", mode="adapter")
    assert_refused(trainer, TrainerRefused, "verify=True needs", "verify=False", verify=True)
    assert_refused(trainer, TrainerRefused, "cache='keep' needs", "cache='reset'", cache="keep")


def test_another_release(trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """(Names are taken away from this one.)"""
    trainer = trainer_of()
    with monkeypatch.context() as patch:
        patch.delattr(VLLMGeneration, "_iter_named_params")
        assert_refused(trainer, TrainerRefused, "TRL 1.16.0 does not offer", "VLLMGeneration._iter_named_params")
    with monkeypatch.context() as patch:
        patch.delattr(trainer, "_metrics")
        assert_refused(trainer, TrainerRefused, "TRL 1.16.0 does not offer GRPOTrainer._metrics", "1.16.0")
    with monkeypatch.context() as patch:
        patch.delattr(trainer, "vllm_generation")
        assert_refused(trainer, TrainerRefused, "does not offer GRPOTrainer.vllm_generation")


def test_engine_of_another_model(trainer_of: TrainerOf, tmp_path: Path) -> None:
    """The first sync is refused, and the engine is as before."""
    other = trl_training.checkpoint(tmp_path / "other", engines.qwen3())
    rollout, before = lm.attach(trainer_of(other)), answers()
    with pytest.raises(PushRefused, match="q_norm"):
        rollout.sync_weights()
    rollout.detach()
    assert answers() == before


def test_merged_already(trainer_of: TrainerOf) -> None:
    trainer = trainer_of()
    rollout, before = lm.attach(trainer), answers()
    trainer.model.merge_adapter()
    with pytest.raises(AlreadyMerged):
        rollout.sync_weights()
    rollout.detach()
    assert answers() == before


def answers() -> list[list[int]]:
    """Of the engine, whatever it holds."""
    sampled = type(kept[0]).generate(
        kept[0], [{"prompt_token_ids": p} for p in engines.prompts()], engines.GREEDY, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in sampled]


def test_a_push_breaks_off(base: Path, trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training ends, nothing is generated with what is half there, and what is asked for next is pushed first."""
    trainer = trainer_of()
    rollout = lm.attach(trainer)
    rollout.sync_weights()
    with monkeypatch.context() as patch:
        patch.setattr(Loader, "finish", broken)
        for attempt in (trainer.train, lambda: ask(kept[0])):
            with pytest.raises(PushFailed, match="injected"):
                attempt()
    assert_answers(ask(kept[0]), policy(base, trainer.model.state_dict(), lora()))


def broken(*args: Any) -> None:
    raise RuntimeError("injected")


def test_something_else_writes_to_the_engine(trainer_of: TrainerOf) -> None:
    rollout = lm.attach(trainer_of())
    rollout.sync_weights()
    kept[0].apply_model(scramble)
    with pytest.raises(PushRefused, match="something else has written to its weights"):
        ask(kept[0])
    rollout.sync_weights()
    ask(kept[0])
    with pytest.raises(InvalidInput, match="leave lora_request out"):
        ask(kept[0], lora=object())


def scramble(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.normal_()


def test_the_check_notices_another_policy(trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained moves behind the engine's back, in the second step."""
    trainer = trainer_of()
    rollout = lm.attach(trainer, check=True)
    push = rollout.sync_weights

    def then_move() -> None:
        push()
        if trainer.state.global_step == 1:
            engines.train(trainer.model, size=0.2)

    trainer.vllm_generation.sync_weights = then_move
    with pytest.raises(PolicyGap, match=r"the engine does not answer as the policy .* allowed is 1 \+- 0.02"):
        trainer.train()
    assert trainer.state.global_step == 1


def test_never_synced(base: Path, trainer_of: TrainerOf) -> None:
    """The base that the engine starts with is never served in place of the policy."""
    trainer = trainer_of()
    lm.attach(trainer)
    assert_answers(ask(kept[0]), policy(base, trainer.model.state_dict(), lora()))


def test_engine_for_the_command_line(trainer_of: TrainerOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """The `max_lora_rank` of vLLM's that takes what is active, and an end where LORA_MERGE=1 cannot be done."""
    model = trainer_of(peft=lora(r=8, rank_pattern={"q_proj": 12})).model
    assert max_lora_rank(model) == 16
    model.add_adapter("more", lora(r=24))
    assert max_lora_rank(model) == 16  # the other one does not act
    model.base_model.set_adapter(["default", "more"])
    assert max_lora_rank(model) == 64
    model.add_adapter("wide", lora(r=600))
    model.base_model.set_adapter("wide")
    with pytest.raises(TrainerRefused, match=r"no adapter of rank 600: choose a lower --lora_r"):
        max_lora_rank(model)
    with pytest.raises(TrainerRefused, match=r"--use_peft"):
        max_lora_rank(torch.nn.Linear(1, 1))
    monkeypatch.setenv("LORA_MERGE", "perhaps")
    with pytest.raises(SystemExit, match="LORA_MERGE=1 cannot be done: LORA_MERGE must be 1 or 0"):
        plugin.early()


def test_what_trl_has_no_flag_for() -> None:
    """What the engine's start is changed for, in `engine_options` and by LORA_MERGE=1, cannot be said otherwise yet."""
    flags = [field.name for field in fields(GRPOConfig) if field.name.startswith("vllm")]
    assert flags
    new = [name for name in flags if re.search("lora|adapter|kwargs|weight_transfer", name)]
    assert not new, "engine_options and what LORA_MERGE_MODE=adapter wraps can go"
