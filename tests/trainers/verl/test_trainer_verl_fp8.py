"""verl's own update of an FP8 engine, beside which benchmarks/quantised_engines.py times pushes: `make test-verl`."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed import kernel_for_blocks
from repository import ROOT
from vllm_name import folder as vllm_by_name

if find_spec("verl") is None:
    pytest.skip("verl's tests run in an environment of their own", allow_module_level=True)
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu"}
BENCHMARKS = ROOT / "benchmarks"


def test_both_updates_of_an_engine_on_a_checkpoint_of_fp8_blocks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They leave the same weights: verl divides by 448 where the checkpoint's tools multiply, so that scales may be
    apart in their last bit, and values by one step of e4m3 in few places."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.syspath_prepend(str(vllm_by_name(tmp_path)))
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    import quantised_engines as engines
    import sync

    found: dict[str, dict[str, torch.Tensor]] = {}
    served = engines.served
    way = ""

    def noted(llm: Any) -> Any:
        model = served(llm)
        found[way] = {name: p.detach().float().clone() for name, p in model.named_parameters()}
        return model

    monkeypatch.setattr(engines, "served", noted)
    # Blocks divide each of the matrices that are fused.
    monkeypatch.setitem(sync.SHAPES, "blocks", sync.SHAPES["tiny"] | {"hidden_size": 256})
    args = argparse.Namespace(device="cpu", time="blocks", shape="blocks", rank=8, repeats=1, gpu_memory=0.3)
    model = sync.build_policy("blocks", 8, "cpu")
    with kernel_for_blocks():
        for way, run in (("lora_merge", engines.times_of), ("verl", engines.verls_times)):  # noqa: B007
            record = run(model, engines.CHECKPOINT, "written", args)
            assert record["x_copy"] > 0
            assert record["bytes"] > record["held_bytes"]
    ours, theirs = found["lora_merge"], found["verl"]
    assert ours.keys() == theirs.keys()
    quantised = [name for name in ours if name.endswith("weight_scale_inv")]
    assert len(quantised) == 4 * 2
    for name, one in ours.items():
        torch.testing.assert_close(one, theirs[name], rtol=2**-3 if "proj" in name else 0, atol=0)
        apart = float((one != theirs[name]).float().mean())
        assert apart < 0.01 or name in quantised, (name, apart)
