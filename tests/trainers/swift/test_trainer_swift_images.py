"""ms-swift's GRPO with images in questions: the colocated engine holds the policy, tower and all; the base stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("torchvision") is None:
    pytest.skip("processors of images need torchvision", allow_module_level=True)

import images
import swift_runs
from computed import computed
from swift_runs import arguments, assert_untouched, before_answers, training
from torch import Tensor

from tests.trainers.swift.test_trainer_swift import assert_ratios, history

nothing_set = swift_runs.nothing_set
KINDS = ["qwen2_5_vl", "qwen3_vl", "qwen3_5"]


@pytest.fixture(scope="module", autouse=True)
def readable() -> Iterator[None]:
    with swift_runs.as_on_a_gpu():
        yield


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of few tokens, and the vocabulary of the tiny models: swift's templates have that of the hub's."""
    from swift.template.templates import qwen

    monkeypatch.setenv("MIN_PIXELS", str(56 * 56))
    monkeypatch.setenv("MAX_PIXELS", str(112 * 112))
    for template in (qwen.Qwen2VLTemplate, qwen.Qwen3_5Template):
        for kind in ("image", "video"):
            monkeypatch.setattr(template, f"{kind}_token_id", images.IDS[f"<|{kind}_pad|>"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by their kind, and questions with one image or two, of three in all."""
    made = tmp_path_factory.mktemp("swift")
    for kind in KINDS:
        images.checkpoint(kind, made / kind)
    for i, image in enumerate(images.images(3)):
        image.save(made / f"{i}.png")
    rows = [
        {"messages": [{"role": "user", "content": "<image>" * (1 + i % 2) + f"{i}?"}],
         "images": [str(made / f"{(i + j) % 3}.png") for j in range(1 + i % 2)]}
        for i in range(16)
    ]  # fmt: skip
    (made / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


LIMITS = {"vllm_limit_mm_per_prompt": '{"image": 2, "video": 0}', "vllm_max_model_len": "256", "max_length": "200"}
LANGUAGE: dict[str, str] = {}  # swift's default
TOWER = {"freeze_vit": "false", "freeze_aligner": "false"}
TOWER_ALONE = TOWER | {"freeze_llm": "true"}
EXAMPLE = {
    "torch_dtype": "bfloat16", "enable_thinking": "false", "lora_rank": "8", "lora_alpha": "32",
    "learning_rate": "1e-5", "lr_scheduler_type": "cosine", "warmup_ratio": "0.05",
    "gradient_accumulation_steps": "4", "beta": "0.001",
    "per_device_train_batch_size": "2", "log_completions": "true", "max_grad_norm": "1.0", "reward_weights": "1.0",
    "vllm_gpu_memory_utilization": "0.45", "temperature": "1.0",
}  # fmt: skip
"""Of swift's examples/train/grpo/geo3k_vlm/run_geo3k_qwen35_2b.sh, as far as no GPU and no dataset is asked for."""


@pytest.mark.parametrize("train", ["adapters", "merged"])
@pytest.mark.parametrize(("kind", "flags"), [
    ("qwen2_5_vl", LANGUAGE), ("qwen2_5_vl", TOWER), ("qwen2_5_vl", TOWER_ALONE), ("qwen3_vl", LANGUAGE),
    ("qwen3_vl", TOWER), ("qwen3_5", EXAMPLE), ("qwen3_5", EXAMPLE | TOWER),
])  # fmt: skip
def test_grpo(kind: str, flags: dict[str, str], train: str, folder: Path, tmp_path: Path,
              monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Adapters on the language model, on tower and aligner as well, on these alone; swift's own example."""
    for name in ("CHECK", "VERIFY"):
        monkeypatch.setenv(f"LORA_MERGE_{name}", "1")
    monkeypatch.setenv("LORA_MERGE_TRAIN", train)
    held: dict[str, Tensor] = {}
    looking: list[Any] = []

    def watch(trainer: Any) -> None:
        def look(trainer: Any) -> None:
            if train == "merged":
                stream = trainer._lora_merge._kept.sync._weights
                held.update(images.live_names(trainer.model, {name: tensor.clone() for name, tensor in stream}))

        before_answers(trainer, look)
        looking.append(computed(trainer.model, lambda: held))
        looking.append(looking[0].__enter__())

    line = arguments("grpo", folder / kind, tmp_path, model_type=kind, template=kind, max_steps="3", **LIMITS, **flags)
    with training(line, watch) as trainer:
        watched, seen = looking
        watched.__exit__(None, None, None)
        parts = {name.split(".layers.")[0].split(".blocks.")[0] for name, p in trainer.model.named_parameters()
                 if p.requires_grad}  # fmt: skip
        assert any("visual" in part for part in parts) == ("freeze_vit" in flags)
        assert any("language_model" in part for part in parts) == ("freeze_llm" not in flags)
        trained = {name: p for name, p in trainer.model.named_parameters() if "lora_B" in name}
        idle = [name for name, p in trained.items() if not p.abs().max()]
        assert not idle, "these were not trained"
        assert (seen["forward"] > seen["backward"] > 0) == (train == "merged")
        assert history(trainer, "lora_merge/version") == [1, 2, 3]
        assert history(trainer, "lora_merge/coverage") == [1, 1, 1]
        print(f"{kind} {flags} {train}: {assert_ratios(trainer, 3, exact=kind != 'qwen3_5')}, {seen}")
        assert_untouched(trainer.model, folder / kind)
        del trainer
