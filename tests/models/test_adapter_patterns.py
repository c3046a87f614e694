"""Names of modules in an adapter's configuration that are no regular expressions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest

from lora_merge import InvalidInput, merge_checkpoint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target_modules", r".*\.((q|v)_proj"),
        ("exclude_modules", "(lm_head"),
        ("rank_pattern", {"q_proj[": 4}),
        ("alpha_pattern", {"*q_proj": 4}),
    ],
)
def test_refused_by_name(key: str, value: Any, tmp_path: Path) -> None:
    model = models.with_lora(models.qwen2, target_modules=["q_proj", "v_proj"])
    model.save_pretrained(tmp_path / "adapter")
    model.unload().save_pretrained(tmp_path / "base")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(InvalidInput, match=rf"adapter_config\.json says {key}=.* no regular expression"):
        merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
