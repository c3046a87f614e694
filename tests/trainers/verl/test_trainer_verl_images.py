"""verl and a Qwen2.5-VL: its FSDP2 engine on batches with images, and a whole run with images in the rollout."""

from __future__ import annotations

import io
import json
import os
import re
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("verl") is None or find_spec("torchvision") is None:
    pytest.skip("these tests need verl and torchvision", allow_module_level=True)

import images
import verl_model
from processes import spawn
from vllm_name import folder as vllm_by_name

from tests.trainers.verl.test_trainer_verl import entry_points  # noqa: F401
from tests.trainers.verl.test_trainer_verl_ppo import LIMIT_S, PUSHED, told, train

WORDS = 25
"""Tokens of the longest prompt, without its images."""
SHOWN = [
    "data.max_prompt_length=64",
    "actor_rollout_ref.rollout.max_model_len=128",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt={image:2,video:0}",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return images.checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("images") / "model")


def trained(rank: int, folder: Path) -> None:
    import verl_images

    verl_images.trains(rank, folder)


def test_two_ranks(base: Path, entry_points: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """verl's FSDP2 engine on batches with images: its stream, and training on what was sent, tower and all."""
    monkeypatch.syspath_prepend(str(vllm_by_name(entry_points)))
    monkeypatch.setenv("LORA_MERGE_TRAIN", "merged")
    spawn(2, trained, base)


def save_questions(folder: Path) -> None:
    """Write questions with one image or two, of three in all, and a reward function."""
    import pandas

    verl_model.save_task(folder)
    seen = []
    for image in images.images(3):
        image.save(file := io.BytesIO(), "PNG")
        seen.append({"bytes": file.getvalue()})
    questions = pandas.read_parquet(folder / "questions.parquet")
    counts = [1 + i % 2 for i in range(len(questions))]
    questions["prompt"] = [
        [{"role": "user", "content": "<image>" * count + f"say {i}"}] for i, count in enumerate(counts)
    ]
    questions["images"] = [[seen[(i + j) % 3] for j in range(count)] for i, count in enumerate(counts)]
    questions.to_parquet(folder / "questions.parquet")


@pytest.mark.timeout(LIMIT_S + 60)
def test_pushes_with_images_in_the_rollout(
    tmp_path: Path,
    entry_points: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two workers train on merged weights, tower and all, and push them into two servers: every answer to a question
    with images is the policy's. Every process has vLLM's transformers: with verl's, vLLM's processor fails."""
    save_questions(tmp_path)
    images.checkpoint("qwen2_5_vl", tmp_path / "model")
    vllm_by_name(entry_points)
    newer = sysconfig.get_path("purelib")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([newer, os.environ["PYTHONPATH"]]))
    settings = {"LORA_MERGE_TRAIN": "merged", "LORA_MERGE_DTYPE": "float32", "LORA_MERGE_VERIFY": "1"}
    printed = train(tmp_path, 2, PUSHED, *SHOWN, entry_points=entry_points, **settings)
    assert len(re.findall(r"lora_merge: merged@\d over shm", printed)) == 3
    low, high = (told(tmp_path, 2, f"ratio_{end}") for end in ("min", "max"))
    with capsys.disabled():
        print(f"\nratios by step: {low} to {high}; seconds of a sync: {told(tmp_path, 2, 'seconds')}")
    assert list(low) == list(high) == [1, 2]
    assert all(0.999 < value <= 1 for value in low.values())
    assert all(1 <= value < 1.001 for value in high.values())
    assert told(tmp_path, 2, "coverage") == {1: 1.0, 2: 1.0}
    logged = [json.loads(line)["data"] for line in (tmp_path / "2.jsonl").read_text().splitlines()]
    assert all(step["prompt_length/min"] > WORDS for step in logged), "a prompt had no image"
