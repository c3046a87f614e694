"""verl's FSDP2 engine of a Qwen2.5-VL on batches with images. (Images in rollouts want a newer transformers
for vLLM 0.32 than verl 0.9.1 takes.)"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("verl") is None or find_spec("torchvision") is None:
    pytest.skip("these tests need verl and torchvision", allow_module_level=True)

import images
from processes import spawn
from vllm_name import folder as vllm_by_name

from tests.trainers.verl.test_trainer_verl import entry_points  # noqa: F401


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
