"""Pushes of float16: what merges beyond 65504 never comes to serve, whichever side merges; the next push heals."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import engines
import models
import pytest
import torch
from engines import ask, engine

from lora_merge import PushFailed, VllmSync
from tests.kernels.test_range import scale_up

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def test_numbers_beyond_float16(tmp_path: Path) -> None:
    """By buckets, written straight into the worker, and merged by the worker onto its own base."""
    model = models.with_lora(engines.qwen2, dtype=torch.float16, target_modules=engines.LINEARS)
    with engine(model, tmp_path / "base", processes=True, worker_extension_cls="shared_weights.Shared") as llm:
        for way, transport in (("trainer", "shm"), ("trainer", "write"), ("engine", "")):
            if transport == "write":
                llm.collective_rpc("share")
            with closing(VllmSync(model, llm, merge=way, bucket_bytes=1 << 14)) as sync:
                report = sync.push()
                assert transport in ("", *report.transports), report
                assert report.merge == way
                served = [output.outputs[0].token_ids for output in ask(llm)]
                scale_up(model, 2.0**20)
                with pytest.raises(PushFailed, match=r"q_proj.*expected merged values up to 65504"):
                    sync.push()
                assert sync.states()[0].kind == "dirty"
                scale_up(model, 2.0**-20)
                sync.push()
                assert [output.outputs[0].token_ids for output in ask(llm)] == served
