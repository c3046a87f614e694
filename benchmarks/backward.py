"""Gradients of lora_A and lora_B in a backward pass: time, memory and error of each way to compute them.

    python benchmarks/backward.py --device cuda
    python benchmarks/backward.py --device cuda --json backward.json

Linear layers of Qwen2.5-7B, 8,192 tokens in bf16, at several ranks, adapters in float32 (PEFT's default) and in bf16:

- cast: activations cast to the dtype of the factors first, as PEFT does and `train_merged` did
- torch: float32 factors in three bf16 parts, made by torch's operations; bf16 ones as they are
- own: what `train_merged` does, with a kernel of its own that makes the parts
- dx: the gradient of the layer's input, `dy W'`, which every way takes beside

Milliseconds, bytes at the peak above what is there before, and errors of lora_A's and lora_B's gradients against
float64, as parts of their norms.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lora_merge.bench import report, timing
from lora_merge.kernels.cuda import backend
from lora_merge.training import products

SHAPES = [(3584, 3584), (3584, 18944), (18944, 3584), (3584, 512)]
"""In and out of the layers."""
Pair = tuple[Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--shrink", type=int, default=1, help="divide the sizes of layers by this")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    device = torch.device(args.device)
    record = report.provenance(device) | {"tokens": args.tokens, "runs": []}
    for columns, rows in SHAPES:
        columns, rows = columns // args.shrink, rows // args.shrink
        x, dy, weight = (
            normal(*size, device) for size in ((args.tokens, columns), (args.tokens, rows), (rows, columns))
        )
        note(
            record, args, {"in": columns, "out": rows, "way": "dx", "ms": typical(partial(torch.mm, dy, weight), args)}
        )
        for rank in args.ranks:
            factors = [torch.randn(*size, device=device) for size in ((rank, columns), (rows, rank))]
            for dtype in (torch.float32, torch.bfloat16):
                lora_A, lora_B = (f.to(dtype) for f in factors)
                wanted = exact(x, dy, lora_A, lora_B)
                for way, call in ways(x, dy, lora_A, lora_B, device).items():
                    found = {"in": columns, "out": rows, "rank": rank, "adapters": str(dtype).removeprefix("torch.")}
                    note(record, args, found | {"way": way} | measured(call, wanted, args))
                del wanted
    print(f"{'in':>6} {'out':>6} {'rank':>5} {'adapters':>9}   ms: cast, torch, own")
    for key in dict.fromkeys(_key(run) for run in record["runs"] if "rank" in run):
        spent = [f"{run['ms']:.3f}" for run in record["runs"] if "rank" in run and _key(run) == key]
        print(f"{key[0]:>6} {key[1]:>6} {key[2]:>5} {key[3]:>9}  ", *spent)


def ways(x: Tensor, dy: Tensor, lora_A: Tensor, lora_B: Tensor, device: torch.device) -> dict[str, Callable[[], Pair]]:
    own = partial(products.factor_gradients, x, dy, lora_A, lora_B, (True, True))
    found: dict[str, Callable[[], Any]] = {"cast": partial(cast, x, dy, lora_A, lora_B), "torch": partial(plain, own)}
    return found | ({"own": own} if backend.unavailable(device) is None else {})


def plain(call: Callable[[], Any]) -> Any:
    """Call without kernels of this package."""
    with mock.patch.object(backend, "unavailable", return_value="switched off"):
        return call()


def cast(x: Tensor, dy: Tensor, lora_A: Tensor, lora_B: Tensor) -> Pair:
    x, dy = x.to(lora_A.dtype), dy.to(lora_B.dtype)
    return (dy @ lora_B).t() @ x, dy.t() @ (x @ lora_A.t())


def exact(x: Tensor, dy: Tensor, lora_A: Tensor, lora_B: Tensor) -> Pair:
    return cast(x, dy, lora_A.double(), lora_B.double())


def measured(call: Callable[[], Pair], wanted: Pair, args: argparse.Namespace) -> dict[str, Any]:
    errors = [float((got - truth).norm() / truth.norm()) for got, truth in zip(call(), wanted, strict=True)]
    peak = timing.observe(call, torch.device(args.device)).peak_bytes
    return {"ms": typical(call, args), "peak_bytes": peak, "error_A": errors[0], "error_B": errors[1]}


def typical(call: Callable[[], object], args: argparse.Namespace) -> float:
    """Milliseconds of a call; on a GPU of one among several in a row, so that the host's launches hide."""
    device = torch.device(args.device)
    many = 10 if device.type == "cuda" else 1

    def several() -> None:
        for _ in range(many):
            call()

    several()
    return statistics.median(timing.milliseconds(several, device) for _ in range(args.repeats)) / many


def note(record: dict[str, Any], args: argparse.Namespace, found: dict[str, Any]) -> None:
    record["runs"].append(found)
    print(json.dumps(found), flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def normal(rows: int, columns: int, device: torch.device) -> Tensor:
    return torch.empty(rows, columns, dtype=torch.bfloat16, device=device).normal_()


def _key(run: dict[str, Any]) -> tuple[Any, ...]:
    return run["in"], run["out"], run["rank"], run["adapters"]


if __name__ == "__main__":
    main()
