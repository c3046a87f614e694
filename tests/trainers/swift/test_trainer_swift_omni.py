"""ms-swift's GRPO of an Omni model's thinker, with images and sounds in questions.

No suite has the packages that it needs. To run it:

    make .venv-vllm/swift/done .venv-vllm/vision/done .venv-vllm/omni/done
    V=.venv-vllm; PYTHONPATH=$PWD/tests/support/vision:$V/swift:$V/vision:$V/omni $V/bin/python -m pytest \\
        tests/trainers/swift/test_trainer_swift_omni.py
"""

from __future__ import annotations

import json
import wave
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if lacking := [name for name in ("torchvision", "qwen_omni_utils", "librosa", "av") if find_spec(name) is None]:
    pytest.skip(f"{', '.join(lacking)}: not installed (requirements/omni.txt)", allow_module_level=True)

import images
import swift_runs
from swift_runs import arguments, assert_untouched, training

from tests.trainers.swift.test_trainer_swift import assert_ratios, history

nothing_set = swift_runs.nothing_set


@pytest.fixture(scope="module", autouse=True)
def readable() -> Iterator[None]:
    with swift_runs.as_on_a_gpu():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, and questions with an image or a sound, of three in all."""
    made = tmp_path_factory.mktemp("swift")
    images.checkpoint("qwen2_5_omni", made / "base")
    for i, image in enumerate(images.images(3)):
        image.save(made / f"{i}.png")
        with wave.open(str(made / f"{i}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes((np.sin(np.arange(4800 + 1600 * i) * (i + 1) / 20) * 9000).astype("<i2").tobytes())
    for kind, end in (("image", "png"), ("audio", "wav")):
        rows = [{"messages": [{"role": "user", "content": f"<{kind}>{i}?"}], f"{kind}s": [str(made / f"{i % 3}.{end}")]}
                for i in range(16)]  # fmt: skip
        (made / f"{kind}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


TOWERS = {"freeze_vit": "false", "freeze_aligner": "false"}


@pytest.mark.parametrize("flags", [{}, TOWERS], ids=["language", "towers"])
@pytest.mark.parametrize("kind", ["image", "audio"])
def test_grpo(kind: str, flags: dict[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The colocated engine holds the policy, with the towers as they were or trained, too; the base stays."""
    for name in ("CHECK", "VERIFY"):
        monkeypatch.setenv(f"LORA_MERGE_{name}", "1")
    monkeypatch.setenv("MIN_PIXELS", str(56 * 56))
    monkeypatch.setenv("MAX_PIXELS", str(112 * 112))
    limits = {"vllm_limit_mm_per_prompt": '{"image": 1, "video": 1, "audio": 1}', "vllm_max_model_len": "256",
              "vllm_engine_kwargs": '{"skip_mm_profiling": true}', "max_length": "200",
              "dataset": str(folder / f"{kind}.jsonl")}  # fmt: skip
    line = arguments("grpo", folder / "base", tmp_path, model_type="qwen2_5_omni", template="qwen2_5_omni", **limits,
                     **flags)  # fmt: skip
    with training(line) as trainer:
        trained: dict[str, Any] = {n: p for n, p in trainer.model.named_parameters() if "lora_B" in n}
        towers = {n for n in trained if "audio_tower" in n or "visual" in n}
        assert trained.keys() - towers
        assert bool(towers) == bool(flags)
        print(f"{kind} {flags}: {assert_ratios(trainer, 2)}, {len(towers)} of {len(trained)} in towers")
        assert history(trainer, "lora_merge/coverage") == [1, 1]
        assert_untouched(trainer.model, folder / "base")
        del trainer
