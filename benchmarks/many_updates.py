"""Thousands of updates that an engine merges, one in the place of the other: bits against a fresh merge, and memory.

    python benchmarks/many_updates.py --json benchmarks/results/many-updates-cpu.json          # 10,000 pushes, one core
    python benchmarks/many_updates.py --pushes 300

A tiny policy in bf16 and a real vLLM engine in this process, on a CPU, with layers as they were loaded. The base
crosses once; then every push sends an adapter that has changed, and every tenth another one, of another rank, acts, or
two at a time. Nothing is ever loaded anew, so what each update leaves behind would add up. Every `--every` pushes each
parameter of the engine is compared (torch.equal) with what merging in the trainer gives.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lora_merge import MergedWeights, VllmSync
from lora_merge.bench import report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""What vLLM keeps in one parameter."""
ACTING = (["default"], ["narrow"], ["default", "narrow"])
TURN = 10
"""Pushes after which others act."""


def resident() -> int:
    """Bytes of memory that this process has in use."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wanted(name: str, merged: Mapping[str, Tensor]) -> Tensor:
    """A parameter of the engine, made of what the trainer merges."""
    for fused, parts in FUSED.items():
        if f".{fused}." in name:
            return torch.cat([merged[name.replace(fused, part)] for part in parts])
    return merged[name]


def differing(engine: torch.nn.Module, model: torch.nn.Module) -> list[str]:
    """Names of the engine's parameters that are not what a fresh merge gives."""
    merged = dict(MergedWeights(model))
    named = dict(engine.named_parameters())
    return [name for name, there in named.items() if not torch.equal(there, wanted(name, merged))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=100, help="pushes between two comparisons")
    parser.add_argument("--json", type=Path, help="where the record goes")
    args = parser.parse_args()
    import engines  # type: ignore[import-not-found]
    import models  # type: ignore[import-not-found]
    import peft
    import transformers
    import vllm

    torch.set_num_threads(1)
    model: Any = models.with_lora(engines.qwen2, dtype=torch.bfloat16, target_modules=engines.LINEARS)
    narrow = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    model.add_adapter("narrow", narrow)
    model.requires_grad_(False)  # what requires a gradient would go whole
    with tempfile.TemporaryDirectory() as folder:
        extension = {"worker_extension_cls": "shared_weights.Shared"}
        with engines.engine(model, Path(folder) / "base", **extension) as llm:
            sync = VllmSync(model, llm, merge="engine")
            inside = llm.apply_model(lambda engine: engine)[0]
            held, compared, bases, begin = [], 0, 0, time.perf_counter()
            for push in range(1, args.pushes + 1):
                if push % TURN == 1:
                    model.base_model.set_adapter(ACTING[push // TURN % len(ACTING)])
                    model.requires_grad_(False)
                engines.train(model, push, size=0.02)
                done = sync.push()
                assert done.merge == "engine", done.merge_why
                bases += done.base_sent
                if push % args.every == 0:
                    if wrong := differing(inside, model):
                        raise SystemExit(f"after {push} pushes {', '.join(wrong)} differ from a fresh merge")
                    compared += 1
                    held.append(resident())
                    print(f"{push} pushes, {held[-1] / 1e6:.1f} MB", file=sys.stderr, flush=True)
            seconds = time.perf_counter() - begin
            sync.close()
    made = report.provenance(torch.device("cpu"))
    versions = {m.__name__: m.__version__ for m in (vllm, transformers)}
    record = made | {
        "versions": made["versions"] | versions,
        "pushes": args.pushes,
        "bases_sent": bases,
        "compared": compared,
        "equal": compared,
        "seconds": round(seconds, 1),
        "resident_bytes": {"start": held[0], "middle": held[len(held) // 2], "end": held[-1]},
    }
    print(json.dumps(record, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
