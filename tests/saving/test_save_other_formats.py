"""The base in another format beside its weights: of the result's folder it would be the unmerged model."""

from __future__ import annotations

from pathlib import Path

import models

from lora_merge import merge_checkpoint, save_merged

OTHERS = ["openvino_model.bin", "openvino_model.xml", "openvino_language_model.bin", "model.onnx_data", "model.tflite"]


def test_it_stays_behind(tmp_path: Path) -> None:
    model = models.with_lora(models.qwen2)
    model.save_pretrained(tmp_path / "adapter")
    models.qwen2().save_pretrained(tmp_path / "base")
    for name in [*OTHERS, "vocabulary.bin", "layout.xml"]:
        (tmp_path / "base" / name).write_bytes(b"1")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "files")
    save_merged(model, tmp_path / "live", base=tmp_path / "base")
    for out in ("files", "live"):
        there = {path.name for path in (tmp_path / out).iterdir()}
        assert there.isdisjoint(OTHERS)
        assert there >= {"vocabulary.bin", "layout.xml"}
