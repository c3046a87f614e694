"""examples/grpo.py with SGLang, short: every step of every run is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest
import sglang_engines  # noqa: F401 - SGLang runs on a CPU
from grpo_runs import break_off_and_go_on

WHO_MERGES = {
    "merged": (["--merge", "engine"], ["--merge", "trainer"]),
    "adapter": ([], []),
}


@pytest.mark.parametrize("mode", WHO_MERGES)
def test_every_token_of_every_step_comes_from_the_policy(mode: str, tmp_path: Path) -> None:
    before, after = WHO_MERGES[mode]
    break_off_and_go_on(tmp_path, ["--engine", "sglang", "--mode", mode], before, after, seeded=False)
