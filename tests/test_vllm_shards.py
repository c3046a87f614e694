"""A sharded trainer of two real processes, and a real engine in a process of its own."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import engines
import pytest
import torch
from processes import spawn
from sharded_trainer import pushes
from test_shards_merge import fsdp1, fsdp2

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


@pytest.mark.parametrize("wrap", [fsdp2, fsdp1])
def test_pushes_of_a_sharded_trainer(wrap: object, tmp_path: Path) -> None:
    spawn(2, pushes, wrap, tmp_path, torch.float32, [""], {}, 5e-6, timeout=timedelta(minutes=4))
