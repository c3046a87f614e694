"""A trainer of two ranks under DeepSpeed's ZeRO-3, and a real engine in a process of its own (`make test-vllm`)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from processes import spawn
from sharded_trainer import pushes
from torch import nn

from tests.libraries.test_libraries_zero3 import engine

pytestmark = [pytest.mark.usefixtures("no_leftovers"), pytest.mark.filterwarnings("ignore")]
no_leftovers = engines.no_leftovers


def some_persist(model: Any) -> nn.Module:
    """Small parameters, adapters among them, are whole on every rank between uses; others are not."""
    return engine(model, stage3_param_persistence_threshold=1100)


def test_pushes_of_a_trainer_under_zero3(tmp_path: Path) -> None:
    spawn(2, pushes, some_persist, tmp_path, torch.float32, [""], {}, 12e-6, timeout=timedelta(minutes=8))
