"""What Python and C++ must agree on: the words of a segment, codes, constants, and the operators between them.

This is the one description of it. `python lora_merge/kernels/layout.py` writes `csrc/layout.h` from it, with `HASH`;
the compiled extension tells the hash it was built with, and `native.py` refuses one that is not this file's.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import NamedTuple


class Field(NamedTuple):
    """Of a segment: 64-bit words."""

    name: str
    words: int
    comment: str
    type: str = "int64_t"


SEGMENT = (
    Field("source", 1, "addresses"),
    Field("destination", 1, ""),
    Field("lora_A", 1, "[rank, cols]"),
    Field("lora_B", 1, "[rows, rank]"),
    Field("row_scale", 1, "float32 [rows] (DoRA), 0 = none"),
    Field("rows", 1, ""),
    Field("cols", 1, ""),
    Field("rank", 1, "0 = a copy; a raw dtype copies bits, the others convert"),
    Field("source_stride", 2, "in elements: per row, per column"),
    Field("destination_stride", 2, ""),
    Field("lora_A_stride", 2, "per rank, per column"),
    Field("lora_B_stride", 2, "per row, per rank"),
    Field("scaling", 1, "", "double"),
    Field("dtypes", 1, "source | destination << 8 | lora_A << 16 | lora_B << 24"),
    Field("key", 1, "hash of the weight's name: stochastic rounding", "uint64_t"),
    Field("first", 1, "index in the whole weight of element (0, 0)"),
    Field("pitch", 2, "what a row and a column add to that index"),
    Field("unit_begin", 1, "first work unit of this segment within its launch (set by the backend)"),
    Field("units_across", 1, "work units side by side in a row of units (set by the backend)"),
)
WORDS = sum(field.words for field in SEGMENT)
OFFSET = {field.name: sum(f.words for f in SEGMENT[:i]) for i, field in enumerate(SEGMENT)}
"""Where a field begins in a row of the table."""

DTYPES = {"BFloat16": 0, "Float16": 1, "Float32": 2, "Raw1": 3, "Raw2": 4, "Raw4": 5, "Raw8": 6}
"""dtype codes; Raw<n> moves bits of n bytes an element."""

MAX_RANK = 512
MAX_SIDE = 2**31 - 2**12
"""Rows and columns of one rectangle that is computed, so that kernels count them in 32 bits; elements are unlimited."""
CHUNK = 32
"""Ranks that a kernel takes at a time."""

# The kernel for any GPU.
INLINE_SEGMENTS = 8
"""A table this small travels as a kernel argument: no copy, no allocation."""
WARPS = 8
"""Of a block."""
WARP_COLS = 64
"""Columns of a warp: a unit is as wide as warps stand side by side."""
NORM_ROWS = 64
"""Rows of a unit of row norms."""
RAW_ROWS, RAW_COLS, RAW_COLS_1 = 64, 2048, 128 * 1024
"""Rows, and bytes (or elements) side by side, of a unit of a copy; the last where there is one row."""

# The kernel for compute capability 9.
TILE_ROWS, BOX_COLS = 64, 64
"""A tile is a strip's columns by so many rows, in boxes of so many columns."""
HOPPER_COLS = 2**25
"""Columns of a segment at most: elements of a tile's rows up to a column are counted in 32 bits."""
MAP_BYTES = 512
"""Tensor maps of a segment."""

# Tracked merges.
UNIT_ELEMENTS = 1024
"""Of a unit of the journal, which is a warp's: a tile has a unit of each warp of a block, a box four of them."""
RECORD_BYTES, CODE_BYTES = 16, UNIT_ELEMENTS // 4
"""Of such a unit: its place and checksum, and its codes."""

_CONSTANTS = [
    "MAX_RANK",
    "MAX_SIDE",
    "CHUNK",
    "INLINE_SEGMENTS",
    "WARPS",
    "WARP_COLS",
    "NORM_ROWS",
    "RAW_ROWS",
    "RAW_COLS",
    "RAW_COLS_1",
    "TILE_ROWS",
    "BOX_COLS",
    "HOPPER_COLS",
    "MAP_BYTES",
    "UNIT_ELEMENTS",
    "RECORD_BYTES",
    "CODE_BYTES",
]

_MERGE = "Tensor table, Tensor unit_segment, Tensor counter, int device, "
_HOPPER = "Tensor table, Tensor unit_segment, Tensor maps, Tensor counter, int device, "
_SHAPE = "int rows_per_unit, int col_warps, int stages, bool staged_B, int pad, int max_rank, "
_TILES = "int rows_per_unit, int strip_cols, int held, int stages, int max_rank, "
_JOURNAL = "bool undo, Tensor codes, Tensor records, Tensor arena, int chunk, Tensor asked"
_MEMORY = "int per_block, int per_processor"
OPERATORS = {
    "layout_hash": "() -> str",
    "cuda_architectures": "() -> str[]",
    "cpu_isas": "() -> str[]",
    "launch_cpu": "(Tensor table, bool stochastic, int seed) -> ()",
    "row_norms_cpu": "(Tensor table, Tensor out) -> ()",
    "tracked_sizes_cpu": "(Tensor table) -> (Tensor, int)",
    "track_cpu": "(Tensor table, Tensor codes, Tensor records, Tensor arena, Tensor counter) -> ()",
    "untrack_cpu": "(Tensor table, Tensor codes, Tensor records, Tensor arena, Tensor counter) -> ()",
    "merge_shape": f"(int max_rank, bool wide, int element_bytes, int widest, {_MEMORY}) -> int[]",
    "accepts_shape": "(int[] shape, int max_rank, bool wide, int element_bytes, int per_block) -> bool",
    "hopper_tiles": "(int max_rank, bool wide, int beside, int per_block) -> int[]",
    "accepts_tiles": "(int[] tiles, int max_rank, bool wide, int beside, int per_block) -> bool",
    "launch_cuda": f"({_MERGE}int source_dtype, int destination_dtype, bool wide, int n_units, int n_raw_units, "
    f"{_SHAPE}bool stochastic, int seed) -> ()",
    "launch_hopper": f"({_HOPPER}int dtype, bool wide, int n_units, int n_raw_units, {_TILES}bool stochastic, int seed)"
    " -> ()",
    "tensor_maps": "(Tensor table, bool wide) -> Tensor",
    "row_norms_cuda": "(Tensor table, Tensor unit_segment, int source_dtype, int n_units, int max_rank, Tensor out)"
    " -> ()",
    "track_cuda": f"({_MERGE}int dtype, bool wide, int n_units, {_SHAPE}{_JOURNAL}) -> ()",
    "track_hopper": f"({_HOPPER}int dtype, bool wide, int n_units, {_TILES}{_JOURNAL}) -> ()",
}
"""`torch.ops.lora_merge_native`: internal, as what they write is not in their schemas. Those of GPUs are there where
the extension was built with nvcc."""


def _camel(name: str) -> str:
    return "k" + name.title().replace("_", "")


def _body() -> str:
    fields = [
        f"  {f.type} {f.name}{f'[{f.words}]' if f.words > 1 else ''};{f'  // {f.comment}' if f.comment else ''}"
        for f in SEGMENT
    ]
    dtypes = ", ".join(f"k{name} = {code}" for name, code in DTYPES.items())
    return "\n".join(
        [
            f"enum Dtype : int {{ {dtypes} }};",
            "",
            "struct Segment {",
            *fields,
            "};",
            f'static_assert(sizeof(Segment) == {WORDS} * 8, "a segment is {WORDS} words");',
            "",
            *(f"constexpr int {_camel(name)} = {globals()[name]};" for name in _CONSTANTS),
            "",
            "namespace schema {",
            *(f'constexpr const char* {name} = "{name}{arguments}";' for name, arguments in OPERATORS.items()),
            "}  // namespace schema",
        ]
    )


HASH = hashlib.blake2b(_body().encode(), digest_size=8).hexdigest()
"""Of all the above."""


def header() -> str:
    """The text of csrc/layout.h."""
    return f"""\
// What Python and C++ must agree on. Written by `python lora_merge/kernels/layout.py`: change it there.
// clang-format off
#pragma once
#include <cstdint>

namespace lora_merge {{

{_body()}

constexpr const char* kLayoutHash = "{HASH}";

}}  // namespace lora_merge
"""


if __name__ == "__main__":
    target = Path(__file__).resolve().parents[2] / "csrc" / "layout.h"
    target.write_text(header())
    sys.stdout.write(f"{target}: {HASH}\n")
