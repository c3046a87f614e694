"""Merging into a base that bitsandbytes quantised: what PEFT's own merge loses, which quantises the sum again, and how
long it takes beside a copy of as many bytes, and beside decoding first.

    python benchmarks/quantised.py --json FILE
    python benchmarks/quantised.py --device cuda --shape qwen2.5-7b --layers 28

Weights are normal, of standard deviation 0.02, and an adapter's update is `--update` of their RMS. Errors are of
weights, against float64 `dequantised(W) + scaling * lora_B @ lora_A`: relative to its RMS, and to the update's.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import bitsandbytes as bnb
import torch
from rich.table import Table
from torch import Tensor

from lora_merge import Plan, Segment
from lora_merge.bench import accuracy, report, shapes
from lora_merge.bench.timing import milliseconds, typical
from lora_merge.kernels.packed import Packed, read_bytes
from lora_merge.shards.bitsandbytes import shard_of

FORMATS: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "nf4 double": {"quant_type": "nf4", "compress_statistics": True},
    "fp4": {"quant_type": "fp4", "compress_statistics": False},
    "fp4 double": {"quant_type": "fp4", "compress_statistics": True},
    "int8": {},
}
"""Options of bitsandbytes' layers for 4 bits."""


class Matrix(NamedTuple):
    """A quantised layer and its adapter."""

    name: str
    layer: Any
    lora_A: Tensor
    lora_B: Tensor
    scaling: float

    @property
    def source(self) -> Packed:
        """Its weight."""
        packed = shard_of(self.name, self.layer, self.layer.weight).pieces[0].tensor
        assert isinstance(packed, Packed)
        return packed

    def decoded(self) -> Tensor:
        """By bitsandbytes."""
        weight = self.layer.weight
        if isinstance(self.layer, bnb.nn.Linear4bit):
            return bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        return bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)

    def again(self, weight: Tensor, options: dict[str, Any]) -> Tensor:
        """A weight quantised as this one, and decoded: what a layer computes with after PEFT's merge."""
        return self._replace(layer=layer_of(weight, options)).decoded()


def layer_of(weight: Tensor, options: dict[str, Any]) -> Any:
    """A layer of bitsandbytes that holds a weight, quantised."""
    rows, cols = weight.shape
    if not options:
        layer: Any = bnb.nn.Linear8bitLt(cols, rows, bias=False, has_fp16_weights=False, device="meta")
        layer.weight = bnb.nn.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
    else:
        layer = bnb.nn.Linear4bit(cols, rows, bias=False, device="meta", **options)
        layer.weight = bnb.nn.Params4bit(weight, module=layer, **options)
    return layer.to(weight.device)


def matrices(args: argparse.Namespace, options: dict[str, Any]) -> Iterator[Matrix]:
    shape = dataclasses.replace(shapes.SHAPES[args.shape], layers=args.layers)
    draw = torch.Generator(args.device).manual_seed(0)
    for name, rows, cols in shape.matrices():
        if "embed" in name or "lm_head" in name:  # which nobody quantises
            continue
        normal = [
            torch.randn(*size, generator=draw, device=args.device)
            for size in ((rows, cols), (args.rank, cols), (rows, args.rank))
        ]
        weight, lora_A, lora_B = normal[0] * 0.02, normal[1], normal[2] * (args.update * 0.02 / args.rank**0.5)
        yield Matrix(name, layer_of(weight.bfloat16(), options), lora_A.bfloat16(), lora_B.bfloat16(), 1.0)


def fidelity(m: Matrix, options: dict[str, Any]) -> dict[str, float]:
    """RMS errors of one layer."""
    exact = m.decoded().double()
    update = m.scaling * (m.lora_B.double() @ m.lora_A.double())
    exact += update
    ours = torch.empty(exact.shape, dtype=torch.bfloat16, device=exact.device)
    Plan([Segment(m.name, m.source, ours, m.lora_A, m.lora_B, m.scaling)]).run()
    peft = m.again(m.decoded() + (m.lora_B @ m.lora_A) * m.scaling, options)
    best = accuracy.round_once(exact, torch.bfloat16)
    rms = lambda x: float(x.double().square().mean().sqrt())  # noqa: E731
    found = {"update": rms(update) / rms(exact)}
    for who, got in (("ours", ours), ("peft", peft)):
        found[f"{who} of weight"] = rms(got - exact) / rms(exact)
        found[f"{who} of update"] = rms(got - exact) / rms(update)
        found[f"{who} differing"] = float((got != best).double().mean())
    return found


def speed(some: list[Matrix], args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of all matrices together."""
    out = [torch.empty(m.source.shape, dtype=torch.bfloat16, device=args.device) for m in some]
    plain = [m.source.decoded().bfloat16() for m in some]

    def plan(sources: Sequence[Tensor], dtype: torch.dtype) -> Plan:
        return Plan(
            [
                Segment(m.name, source, o, m.lora_A.to(dtype), m.lora_B.to(dtype), m.scaling)
                for m, source, o in zip(some, sources, out, strict=True)
            ]
        )

    def decode() -> None:
        for m in some:
            m.decoded()

    def decode_first() -> None:
        for m, to in zip(some, out, strict=True):
            torch.addmm(m.decoded().to(to.dtype), m.lora_B, m.lora_A, alpha=m.scaling, out=to)

    moved = sum(read_bytes(m.source) + o.nbytes for m, o in zip(some, out, strict=True))
    buffers = torch.ones(2, moved // 2, dtype=torch.uint8, device=args.device)
    codes = [m.source for m in some]
    ways: dict[str, Callable[[], object]] = {
        "lora_merge": plan(codes, torch.bfloat16).run,
        "lora_merge, float32 adapters": plan(codes, torch.float32).run,
        "lora_merge, bf16 base": plan(plain, torch.bfloat16).run,
        "lora_merge, bf16 base, float32 adapters": plan(plain, torch.float32).run,
        "dequantize": decode,
        "dequantize, addmm": decode_first,
        "copy of as many bytes": lambda: buffers[0].copy_(buffers[1]),
    }
    found: dict[str, float] = {"bytes an element": moved / sum(o.numel() for o in out)}
    for name, call in ways.items():
        call()
        found[name] = typical(args.device)([milliseconds(call, args.device) for _ in range(args.repeat)])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="default %(default)s")
    parser.add_argument("--shape", choices=shapes.SHAPES, default="qwen2.5-0.5b", help="default %(default)s")
    parser.add_argument("--layers", type=int, default=1, help="default %(default)s")
    parser.add_argument("--rank", type=int, default=32, help="default %(default)s")
    parser.add_argument("--update", type=float, default=0.01, help="RMS of the weights (default %(default)s)")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="default: all")
    parser.add_argument("--repeat", type=int, default=10, help="timed runs (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    record: dict[str, Any] = report.provenance(args.device) | {
        "shape": args.shape, "layers": args.layers, "rank": args.rank, "update": args.update, "formats": {},
    }  # fmt: skip
    record["versions"]["bitsandbytes"] = bnb.__version__
    for name in args.formats:
        options = FORMATS[name]
        some = list(matrices(args, options))
        layers = {m.name: fidelity(m, options) for m in some[: len(some) // args.layers]}
        record["formats"][name] = {"layers": layers, "ms": speed(some, args)}
        report.save(record, args.json)
    for table in (fidelity_table(record), speed_table(record)):
        report.console().print(table)
    report.save(record, args.json)


def fidelity_table(record: dict[str, Any]) -> Table:
    table = Table(
        "base", "layer", "exact merge:\nof weight", "of update", "PEFT's merge:\nof weight", "of update", "differing"
    )
    for name, found in record["formats"].items():
        for layer, f in found["layers"].items():
            table.add_row(
                name, layer.removeprefix("model.layers.0."), f"{f['ours of weight']:.2%}", f"{f['ours of update']:.1%}",
                f"{f['peft of weight']:.2%}", f"{f['peft of update']:.0%}", f"{f['peft differing']:.1%}",
            )  # fmt: skip
    return table


def speed_table(record: dict[str, Any]) -> Table:
    table = Table(
        "base", "bytes an\nelement", "lora_merge\nms", "x copy", "float32\nadapters", "x copy", "of a bf16\nbase",
        "dequantize", "and\naddmm",
    )  # fmt: skip
    for name, found in record["formats"].items():
        ms = found["ms"]
        table.add_row(
            name, f"{ms['bytes an element']:.3f}", f"{ms['lora_merge']:.3f}",
            f"{ms['lora_merge'] / ms['copy of as many bytes']:.2f}", f"{ms['lora_merge, float32 adapters']:.3f}",
            f"{ms['lora_merge, float32 adapters'] / ms['copy of as many bytes']:.2f}",
            f"{ms['lora_merge, bf16 base']:.3f}", f"{ms['dequantize']:.3f}", f"{ms['dequantize, addmm']:.3f}",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
