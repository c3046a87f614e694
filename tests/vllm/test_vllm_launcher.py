"""Two ranks of a trainer, each with an engine of its own in its process."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import engines
import launched
import pytest
from processes import spawn

from tests.shards.test_shards_merge import fsdp2

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


@pytest.mark.parametrize("wrap", [launched.plain, launched.ddp, fsdp2])
def test_each_rank_pushes_to_its_own_engine(wrap: object, tmp_path: Path) -> None:
    """Channels were looked up by the rank of the process among all: any run with more than one rank failed."""
    spawn(2, launched.colocated, wrap, tmp_path, launched.free_port(), timeout=timedelta(minutes=5))
