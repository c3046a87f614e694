"""Compiles the Triton kernels without a GPU, as real tables need them: for Hopper, or for AMD's GPUs with a name of
theirs, `compile_triton.py gfx942`. Run by test_triton.py."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from helpers import make_segment, pairwise
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

AMD = sys.argv[1] if len(sys.argv) > 1 else None
if AMD is not None:
    torch.version.hip = "6.4"  # type: ignore[assignment]  # before the kernels are imported

from lora_merge import Segment  # noqa: E402
from lora_merge.kernels.triton import backend, merge_kernels, tracked_kernels  # noqa: E402
from lora_merge.kernels.triton.tracked import TritonTracked  # noqa: E402

CPU = torch.device("cpu")
F, H, B = torch.float32, torch.float16, torch.bfloat16
TARGET = GPUTarget("cuda", 90, 32) if AMD is None else GPUTarget("hip", AMD, 32 if AMD.startswith("gfx1") else 64)
MATRIX = ("mma",) if AMD is None else ("mfma", "wmma")
"""What names of instructions of the matrix unit have."""
AMD_SHARED = 64 << 10
"""Bytes of a block, of all of its GPUs that are compiled for."""


def assembly(kernel: Any, options: dict[str, Any], **types: str) -> str:
    """PTX of a kernel, after ptxas took it too; or what AMD's assembler took."""
    names = kernel.arg_names
    types |= {"table": "*i64", "unit_segment": "*i32", "units": "i64" if "codes" in names else "i32"}
    signature = {name: types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in options.items() if name in names}
    compiler_options = {name: value for name, value in options.items() if name not in names}
    source = ASTSource(kernel, signature, constants, {})
    made = triton.compile(source, target=TARGET, options=compiler_options)
    if AMD is None:
        assert made.asm["cubin"]
        return str(made.asm["ptx"])
    assert made.asm["hsaco"]
    assert made.metadata.shared <= AMD_SHARED, f"{made.metadata.shared} bytes are shared by a block"
    return str(made.asm["amdgcn"])


def tracked_assembly(segments: list[Segment]) -> list[tuple[dict[str, Any], str]]:
    """Constants and PTX of both kernels of a tracked merge, for each launch."""
    in_place = [replace(s, destination=s.source) for s in segments]
    types = {"codes": "*i32", "records": "*i64", "counter": "*i64"} | dict.fromkeys(("first", "room", "chunk"), "i64")
    made = []
    for group in TritonTracked(in_place, CPU)._groups:
        word = f"*i{group.word.itemsize * 8}"
        for kernel in (tracked_kernels.track, tracked_kernels.untrack):
            made.append((group.variant.options, assembly(kernel, group.variant.options, arena=word, **types)))
    return made


def check_weights(ptx: str) -> None:
    """They go by 16 bytes at a time."""
    if AMD is not None:
        assert "load_b128" in ptx or "load_dwordx4" in ptx, "not 16 bytes at a time"
        return
    weights = [line for line in ptx.splitlines() if "evict_first" in line and ".global" in line]
    assert weights, "no access to weights found"
    assert all(".v4.b32" in line for line in weights), f"not 16 bytes at a time: {weights}"


def main() -> None:
    aligned = [
        make_segment("bf16", 64, 256, 16, (B, B, B, B), CPU),
        make_segment("float32 adapters", 64, 256, 64, (B, B, F, F), CPU),
        make_segment("conversion", 64, 256, 16, (F, B, F, H), CPU),
        Segment("copy", torch.zeros(64, 256), torch.zeros(64, 256)),
    ]
    for number, variant in enumerate(backend.prepare(aligned, CPU).variants):
        ptx = assembly(merge_kernels.run_table, {**variant.options, "STOCHASTIC": number % 2 == 0}, seed="i64")
        check_weights(ptx)
        used = any(name in ptx for name in MATRIX)
        assert used == (variant.options["RANK_BLOCKS"] > 0), "the products do not use the matrix unit"
    ragged = [make_segment("ragged", 9, 37, 5, pairwise(index), CPU) for index in (1, 5)]
    ragged.append(Segment("strided copy", torch.zeros(9, 8)[:, ::2], torch.zeros(9, 4)))
    for number, variant in enumerate(backend.prepare(ragged, CPU).variants):
        assembly(merge_kernels.run_table, {**variant.options, "STOCHASTIC": number % 2 == 0}, seed="i64")
    for options, ptx in tracked_assembly([s for s in aligned if s.rank and s.source.dtype == s.destination.dtype]):
        check_weights(ptx)
        assert any(name in ptx for name in MATRIX), options
        assert ("prefetch.global.L2" in ptx) == (AMD is None), options
    tracked_assembly([make_segment(str(t), 9, 37, 5, (t, t, t, t), CPU) for t in (B, F)])
    s = aligned[1]
    dora = Segment(s.name, s.source, s.destination, s.lora_A, s.lora_B, 1.0, torch.ones(64))
    for variant in backend.prepare([dora], CPU)._norm_variants[0]:
        assembly(merge_kernels.row_norms, variant.options, out="*fp64")
    tracked_assembly([dora])


if __name__ == "__main__":
    main()
