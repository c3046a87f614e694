"""merge="engine" on NVIDIA GPUs that hold different experts."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import engines
import pytest
from engines import ask, engine, train

from lora_merge import VllmSync
from tests.gpu.test_vllm_gpu import BF16, MOE, assert_answers, needs, policy

pytestmark = pytest.mark.gpu


@needs(2)
def test_experts_on_the_workers_that_hold_them(tmp_path: Path) -> None:
    """Each worker gets and keeps its own; the bits are those of a merge in the trainer."""
    model = policy(engines.qwen3_moe, **MOE)
    options = BF16 | {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    extended = {"worker_extension_cls": "sliced_weights_gpu.Sliced"}
    with engine(model, tmp_path / "base", processes=True, **options | extended) as llm:
        here = VllmSync(model, llm, merge="trainer", bucket_bytes=1 << 17)
        with closing(here), closing(VllmSync(model, llm, merge="engine", bucket_bytes=1 << 17)) as there:
            there.push()
            for step in range(20):
                train(model, step, size=0.02)
                report = there.push(verify=step == 10)
                assert (report.merge, report.base_sent, report.transports) == ("engine", False, ("ipc", "nccl")), report
            assert_answers(ask(llm), model)
            one, other = llm.collective_rpc("kept")
            assert set(one) - set(other)
            assert set(other) - set(one)
            assert set(one) & set(other), "attention is everybody's"
            bits = llm.collective_rpc("bits")
            here.push()
            assert llm.collective_rpc("bits") == bits
