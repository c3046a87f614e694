"""Whole runs of verl's `main_ppo` with images in prompts: GRPO of a Qwen2.5-VL, as in `test_trainer_verl_ppo`."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import pytest

if find_spec("verl") is None or find_spec("torchvision") is None:
    pytest.skip("these tests need verl and torchvision", allow_module_level=True)

import images
import transformers
import verl_model
from helpers import assert_same_bits
from packaging.version import Version
from processes import spawn
from safetensors.torch import load_file
from vllm_name import folder as vllm_by_name

from tests.trainers.verl.test_trainer_verl import entry_points  # noqa: F401
from tests.trainers.verl.test_trainer_verl_ppo import (
    LIMIT_S,
    LOADED,
    PUSHED,
    assert_one_policy,
    saved_base,
    told,
    train,
)

pytestmark = pytest.mark.timeout(LIMIT_S + 60)
SEEN = (
    "data.max_prompt_length=64",
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.max_model_len=96",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt={image:2,video:0}",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, entry_points: Path) -> Path:  # noqa: F811
    """A checkpoint, and questions with one image or two, of three in all."""
    import pandas

    folder = tmp_path_factory.mktemp("images")
    verl_model.save_task(folder)
    images.checkpoint("qwen2_5_vl", folder / "model")
    vllm_by_name(entry_points)
    files = []
    for image in images.images(3):
        file = BytesIO()
        image.save(file, "png")
        files.append({"bytes": file.getvalue(), "path": None})
    rows = pandas.read_parquet(folder / "questions.parquet").to_dict("records")
    for i, row in enumerate(rows):
        row["images"] = [files[(i + j) % 3] for j in range(1 + i % 2)]
        row["prompt"] = [{"role": "user", "content": "<image>" * (1 + i % 2) + f"say {i}"}]
    pandas.DataFrame(rows).to_parquet(folder / "questions.parquet")
    return folder


def trained(rank: int, folder: Path) -> None:
    import verl_images

    verl_images.trains(rank, folder)


def test_two_ranks(place: Path, entry_points: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """verl's FSDP2 engine on batches with images: its stream, and training on what was sent, tower and all."""
    monkeypatch.syspath_prepend(str(vllm_by_name(entry_points)))
    monkeypatch.setenv("LORA_MERGE_TRAIN", "merged")
    spawn(2, trained, place / "model")


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.16.1"), reason="vLLM 0.32 asks for it to read images"
)
def test_streams_then_pushes(place: Path, entry_points: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """verl's buckets carry our stream; then, from verl's checkpoint, pushes of a policy that trains on merged weights.
    Adapters are on the tower, too (verl's default, all linear layers)."""
    printed = train(place, 2, LOADED, *SEEN, entry_points=entry_points, LORA_MERGE_DTYPE="float32")
    assert len(re.findall(r"lora_merge: merged@\d over verl's rollout: 57 tensors", printed)) == 3
    assert_one_policy(place, range(1, 3), capsys)
    settings = {"LORA_MERGE_VERIFY": "1", "LORA_MERGE_DTYPE": "float32", "LORA_MERGE_TRAIN": "merged"}
    printed = train(place, 4, PUSHED, *SEEN, entry_points=entry_points, **settings)
    assert printed.count("lora_merge trains the policy of verl 0.9.1 on its merged weights") == 1
    assert len(re.findall(r"lora_merge: merged@\d over shm: 57 tensors", printed)) == 3
    assert_one_policy(place, range(3, 5), capsys)
    assert told(place, 4, "coverage") == {3: 1.0, 4: 1.0}
    before, after = saved_base(place, 2), saved_base(place, 4)
    assert before.keys() == after.keys()
    for name, shard in before.items():
        assert_same_bits(after[name], shard, name)
    assert sum("visual" in name for name in before) > 2
    adapter = place / "checkpoints" / "global_step_4" / "actor" / "lora_adapter" / "adapter_model.safetensors"
    tower = [t for name, t in load_file(adapter).items() if "visual" in name and "lora_B" in name]
    assert tower
    assert all(t.abs().max() > 0 for t in tower), "the tower was not trained"
    assert json.loads((place / "4.jsonl").read_text().splitlines()[-1])["step"] == 4
