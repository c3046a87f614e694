"""merge="engine" on NVIDIA GPUs: bits, sleep mode, CUDA graphs, memory."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from engines import ask, engine, train

from lora_merge import VllmSync
from lora_merge.engine.push.replica import SyncReport
from tests.gpu.test_vllm_gpu import BF16, DENSE, MOE, assert_answers, policy

pytestmark = pytest.mark.gpu
BITS = {"worker_extension_cls": "weight_bits.Bits"}


def adapters_alone(report: SyncReport, base: bool = False) -> None:
    assert (report.merge, report.base_sent) == ("engine", base), report.merge_why


@pytest.mark.parametrize("processes", [False, True], ids=["same process", "cuda ipc"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_the_bits_are_those_of_a_merge_in_the_trainer(name: str, processes: bool, tmp_path: Path) -> None:
    """After many updates, too; and an engine that generates from captured graphs sees them."""
    model = policy(getattr(engines, name), **(DENSE if name == "qwen2" else MOE))
    options: dict[str, Any] = BF16 | BITS | {"enforce_eager": processes}
    with engine(model, tmp_path / "base", processes=processes, **options) as llm:
        here = VllmSync(model, llm, merge="trainer", bucket_bytes=1 << 17)
        with closing(here), closing(VllmSync(model, llm, merge="engine", bucket_bytes=1 << 17)) as there:
            there.push(verify=True)
            for step in range(31):  # there and back: what bf16 rounds away grows with the adapters
                train(model, step // 2, size=0.02 if step % 2 else -0.02)
                adapters_alone(there.push())
            assert_answers(ask(llm), model)
            bits = llm.collective_rpc("bits")
            here.push()
            assert llm.collective_rpc("bits") == bits
            adapters_alone(there.push(), base=True)
            assert llm.collective_rpc("bits") == bits


@pytest.mark.parametrize("processes", [False, True], ids=["same process", "cuda ipc"])
def test_a_sleeping_engine(processes: bool, tmp_path: Path) -> None:
    """Level 1 keeps the weights, and the way back on the GPU; level 2 throws the weights away."""
    model = policy(engines.qwen2, **DENSE)
    with engine(model, tmp_path / "base", processes=processes, **BF16 | BITS | {"enable_sleep_mode": True}) as llm:
        sync = VllmSync(model, llm, merge="engine")
        adapters_alone(sync.push(), base=True)
        for step, level in enumerate([1, 1, 2, 1]):
            llm.sleep(level=level)
            train(model, step)
            adapters_alone(sync.push(), base=level == 2)
            assert_answers(ask(llm), model)
        llm.sleep(level=1)
        llm.wake_up()
        assert sync.states()[0].kind == "merged"
        bits = llm.collective_rpc("bits")
        sync.close()
        with closing(VllmSync(model, llm, merge="trainer")) as here:
            here.push()
            assert llm.collective_rpc("bits") == bits


def test_memory_after_many_pushes(tmp_path: Path) -> None:
    model = policy(engines.qwen2, **DENSE)
    with engine(model, tmp_path / "base", **BF16 | BITS) as llm, closing(VllmSync(model, llm, merge="engine")) as sync:
        used = []
        for step in range(300):
            train(model, step // 2, size=0.02 if step % 2 else -0.02)  # what escapes the codes does not grow
            sync.push()
            used.append(torch.cuda.memory_allocated())
        assert max(used[-100:]) <= max(used[50:150]) + 4096, "flat"
        assert_answers(ask(llm), model)
