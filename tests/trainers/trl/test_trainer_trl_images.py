"""TRL's GRPO with images in prompts, rolled out by a real engine: what it is given is the policy, tower and all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torchvision") is None:
    pytest.skip("processors of images need torchvision", allow_module_level=True)

import engines
import images
import trl_training
from computed import computed
from torch import Tensor
from trl import GRPOTrainer
from trl_training import arguments, assert_all_ratios, base_weights, changed, logged, lora, vowels
from vllm import SamplingParams

import lora_merge.integrations.trl as lm
from lora_merge import MergedWeights
from lora_merge.integrations.metrics import PolicyGap
from lora_merge.integrations.trl.prompts import Prompts

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
OPTIONS = {"limit_mm_per_prompt": {"image": 2, "video": 0}, "enable_tower_connector_lora": True}
POLICIES: dict[str, dict[str, Any]] = {
    "language": {"target_modules": r".*language_model.*_proj"},
    "all": {"target_modules": "all-linear"},
    "merger": {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["merger"]},
}


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with trl_training.one_engine(**OPTIONS):
        yield images.checkpoint(request.param, tmp_path_factory.mktemp("trl") / request.param)


def questions() -> Any:
    """Each with one image or two, of three in all: what a tower made of one before a push is no answer after it. (A
    batch in which one question has none fails in TRL itself, with any sync.)"""
    from datasets import Dataset

    seen = images.images(3)
    rows = [
        {"prompt": [{"role": "user", "content": f"say {i}"}], "images": [seen[(i + j) % 3] for j in range(1 + i % 2)]}
        for i in range(8)
    ]
    return Dataset.from_list(rows)


def letters(completions: Any, **kwargs: Any) -> list[float]:
    return vowels([message["content"] for (message,) in completions])


@pytest.fixture
def trainer_of(base: Path, tmp_path: Path) -> Iterator[Callable[..., GRPOTrainer]]:
    with trl_training.letting_go() as note:

        def make(peft: Any, **changes: Any) -> GRPOTrainer:
            args = arguments(tmp_path, vllm_max_model_length=128, **changes)
            trainer = GRPOTrainer(str(base), letters, args, questions(), peft_config=peft)
            return note(trainer)

        yield make


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("way", ["merged", "adapter", "trained"])
def test_grpo(way: str, policy: str, trainer_of: Callable[..., GRPOTrainer]) -> None:
    """Adapters on the language model, on the tower, too, and a part of the tower trained whole."""
    if way == "adapter" and policy == "merger":
        pytest.skip("no adapter holds modules_to_save")
    trainer = trainer_of(lora(lora_alpha=2, **POLICIES[policy]))
    before = base_weights(trainer.model)
    mode, train = ("adapter" if way == "adapter" else "merged"), ("merged" if way == "trained" else "adapters")
    rollout = lm.attach(trainer, mode=mode, train=train, check=True, verify=True)
    assert rollout is not None
    held: dict[str, Tensor] = {}
    push = rollout.sync_weights

    def pushed() -> None:
        push()
        if way == "trained":
            held.update(images.live_names(trainer.model, {n: t.clone() for n, t in MergedWeights(trainer.model)}))

    rollout.generation.sync_weights = pushed
    with computed(trainer.model, lambda: held) as seen:
        trainer.train()
    assert changed(trainer.model, before) == 0
    assert_all_ratios(trainer, 3)
    assert logged(trainer, "lora_merge/coverage") == 3 * [1.0]
    assert logged(trainer, "lora_merge/merged") == 3 * [float(mode == "merged")]
    layers = sum(hasattr(module, "base_layer") for module in trainer.model.modules())
    assert way != "trained" or seen["forward"] >= seen["backward"] >= 3 * (layers - 3) > 0, (seen, layers)
    moved = [name for name, p in trainer.model.named_parameters() if "visual" in name and p.requires_grad]
    assert bool(moved) == (policy != "language")
    print(seen, layers, logged(trainer, "lora_merge/ratio_min"), logged(trainer, "lora_merge/ratio_max"))


def test_prompts_that_are_expanded_already(trainer_of: Callable[..., GRPOTrainer]) -> None:
    """TRL hands vLLM prompts in which images have all their tokens, and left so, vLLM expands them again. (When this
    fails, a new release of either does not, and integrations/trl/prompts.py can go.) Others are refused."""
    trainer = trainer_of(lora(), max_steps=1)
    rollout = lm.attach(trainer, check=True)
    assert rollout is not None
    llm, rows = trainer.vllm_generation.llm, []
    generate = llm.generate

    def noted(prompts: Any, *args: Any, **kwargs: Any) -> Any:
        rows.extend(prompts)
        return generate(prompts, *args, **kwargs)

    llm.generate = noted
    trainer.train()
    row, once = rows[0], SamplingParams(max_tokens=1)
    (output,) = type(llm).generate(llm, [row], once, use_tqdm=False)
    assert len(output.prompt_token_ids) > len(row["prompt_token_ids"])
    unknown = row | {"prompt_token_ids": row["prompt_token_ids"][1:]}
    with pytest.raises(PolicyGap, match="huggingface/trl#6294"):
        generate([unknown], once, use_tqdm=False)
    longer = row | {"prompt_token_ids": [*row["prompt_token_ids"], 65]}  # after a tool's answer, for one
    (output,) = generate([longer], once, use_tqdm=False)
    assert output.prompt_token_ids == longer["prompt_token_ids"]
    rollout.detach()
    assert "_tokenize_prompts" not in vars(trainer)
    assert "apply_chat_template" not in vars(trainer.processing_class)


def test_a_template_of_a_users_own() -> None:
    """A method that somebody has put on the processor is there after prompts were noted."""

    class Processor:
        tokenizer = None

        def apply_chat_template(self, *args: Any, **options: Any) -> str:
            return "own"

    class Trainer:
        _is_vlm = True
        processing_class = Processor()

        def _tokenize_prompts(self, prompts: Any) -> Any:
            return [self.processing_class.apply_chat_template(prompt) for prompt in prompts], None

    trainer: Any = Trainer()
    noted = Prompts(trainer, None)
    noted.install()
    assert trainer._tokenize_prompts(["a"]) == (["own"], None)
    assert not vars(trainer.processing_class)
    trainer.processing_class.apply_chat_template = users = lambda *args, **options: "user's"
    assert trainer._tokenize_prompts(["a"]) == (["user's"], None)
    assert trainer.processing_class.apply_chat_template is users
