"""verl's FSDP engines on GPUs: each stream is the policy, as verl's own, and the base keeps its bits.

`pytest -m gpu`, with verl and what it needs beside vLLM's packages; Ray may be missing (`benchmarks/no_ray.py`).
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from processes import spawn
from repository import ROOT

if find_spec("verl") is None:
    pytest.skip("verl's tests run in an environment of their own", allow_module_level=True)
sys.path.append(str(ROOT / "benchmarks"))
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")


def work(rank: int, folder: Path, answer: Path, strategy: str) -> None:
    import no_ray  # noqa: F401
    import verl_ranks

    verl_ranks.steps_and_syncs(rank, folder, answer, strategy)


@pytest.mark.gpu
@pytest.mark.parametrize(("strategy", "world"), [
    ("fsdp", 1),
    ("fsdp2", 1),
    pytest.param("fsdp", 2, marks=TWO),
    pytest.param("fsdp2", 2, marks=TWO),
])  # fmt: skip
def test_streams(strategy: str, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import verl_model

    for name in ("VERL_PLATFORM", "VERL_USE_EXTERNAL_MODULES"):  # of the tests on CPUs
        monkeypatch.delenv(name, raising=False)
    verl_model.save_model(tmp_path / "model")
    spawn(world, work, tmp_path, tmp_path / "found.json", strategy, backend="cpu:gloo,cuda:nccl")
    found = json.loads((tmp_path / "found.json").read_text())
    print(f"{strategy} on {world}: verl's own stream beside ours: {found}")
    assert found["error"] > 0.999
    assert found["wrong"] == found["lacking"] == []
