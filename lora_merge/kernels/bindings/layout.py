"""What Python and C++ must agree on: the words of a segment, codes, constants, and the operators between them.

This is the one description of it. `python lora_merge/kernels/bindings/layout.py` writes `csrc/layout.h` from it, with
`HASH`; the compiled extension tells the hash it was built with, and `native.py` refuses one that is not this file's.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import NamedTuple


class Field(NamedTuple):
    """A field of a struct: 64-bit words."""

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
    Field("dtypes", 1, "source | destination << 8 | lora_A << 16 | lora_B << 24 | format of the source << 32"),
    Field("key", 1, "hash of the weight's name: stochastic rounding", "uint64_t"),
    Field("first", 1, "index in the whole weight of element (0, 0)"),
    Field("pitch", 2, "what a row and a column add to that index"),
    Field("unit_begin", 1, "first work unit of this segment within its launch (set by the backend)"),
    Field("units_across", 1, "work units side by side in a row of units (set by the backend)"),
    Field("parts_A", 1, "lora_A as pairs of fp16, and its factors: csrc/parts.h (set by the backend), 0 = none"),
    Field("parts_B", 1, "lora_B likewise"),
    Field("scale", 1, "float32: of the first group, where the result has 8 bits (set by the backend), 0 = none; ..."),
    Field("largest", 1, "... uint32: bits of the first group's largest magnitude; ..."),
    Field("scales_across", 1, "... and groups side by side in the whole weight"),
    Field(
        "place", 1, "of a packed source: number among the weight's codes of element (0, 0); `source` is where 0 lies"
    ),
    Field("code", 1, "float32 [16]: what codes of 4 bits stand for"),
    Field("absmax", 1, "float32, or bytes where absmax_code is not 0: one a block"),
    Field("block", 1, "codes that share one"),
    Field("absmax_code", 1, "float32 [256]: what a byte of absmax stands for, ..."),
    Field("absmax_scale", 1, "... float32: times this, one for each ..."),
    Field("absmax_block", 1, "... so many bytes, ..."),
    Field("absmax_offset", 1, "... plus this float32"),
)
WORDS = sum(field.words for field in SEGMENT)
OFFSET = {field.name: sum(f.words for f in SEGMENT[:i]) for i, field in enumerate(SEGMENT)}
"""Where a field begins in a row of the table."""

ROUNDED = (
    Field("source", 1, "addresses: numbers of 16 bits, columns side by side,"),
    Field("destination", 1, "what becomes of them, e4m3, likewise,"),
    Field("scale", 1, "float32: of the first group, and those after it,"),
    Field("largest", 1, "and uint32: bits of the largest magnitude, where groups are tensors"),
    Field("rows", 1, ""),
    Field("cols", 1, ""),
    Field("source_pitch", 1, "elements from one row to the next"),
    Field("destination_pitch", 1, ""),
    Field("across", 1, "groups side by side in the whole weight"),
    Field("unit_begin", 1, "its first unit of work within the launch (set in C++)"),
)
"""Whole groups of numbers that become 8 bits and share scales: 64-bit words."""
ROUNDED_WORDS = sum(field.words for field in ROUNDED)

DTYPES = {"BFloat16": 0, "Float16": 1, "Float32": 2, "Raw1": 3, "Raw2": 4, "Raw4": 5, "Raw8": 6}
"""dtype codes; Raw<n> moves bits of n bytes an element."""
FORMATS = {"Plain": 0, "Codes4": 1, "Int8": 2}
"""What lies at a source: elements of its dtype, two codes a byte, or int8 codes, which stand for such elements
(packed.py)."""

GROUPS = {"Tensor": 0, "Channel": 1, "Block": 2, "Compiled": 3}
"""What shares a scale where results have 8 bits: the whole weight, a row, a square of `SCALED_BLOCK`, whose inverse is
rounded right, or as Triton compiles it."""

PAIRS = 3
"""What products are made of, where it is no dtype code: float32 numbers as pairs of fp16."""

MAX_RANK = 512
MAX_SIDE = 2**31 - 2**12
"""Rows and columns of one rectangle that is computed, so that kernels count them in 32 bits; elements are unlimited."""
PACKED_SOURCE = 0x100
"""Added to a dtype code: a launch reads codes that stand for such elements."""
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
PART_VECTORS = 256
"""Columns of lora_A, or rows of lora_B, of a unit that becomes pairs of fp16."""
RAW_ROWS, RAW_COLS, RAW_COLS_1 = 64, 2048, 128 * 1024
"""Rows, and bytes (or elements) side by side, of a unit of a copy; the last where there is one row."""

# The kernel for compute capability 9.
TILE_ROWS, BOX_COLS = 64, 64
"""A tile is a strip's columns by so many rows, in boxes of so many columns."""
HOPPER_COLS = 2**25
"""Columns of a segment at most: elements of a tile's rows up to a column are counted in 32 bits."""
MAP_BYTES = 512
"""Tensor maps of a segment."""

# Results of 8 bits.
SCALED_BLOCK = 128
"""Rows and columns of a block that shares a scale."""
INLINE_ROUNDED = 32
"""What a launch takes, as kernel arguments."""
SCALE_MEASURE, SCALE_CONVERT, SCALE_WHOLE = 0, 1, 2
"""What a launch does: it finds largest magnitudes; or converts, by what was found (what has whole groups finds them
itself); or merges, and does both in one pass."""

# Tracked merges.
UNIT_ELEMENTS = 1024
"""Of a unit of the journal, which is a warp's: a tile has a unit of each warp of a block, a box four of them."""
RECORD_BYTES, CODE_BYTES = 16, UNIT_ELEMENTS // 4
"""Of such a unit: its place and checksum, and its codes."""
TRACK_MERGE, TRACK_UNMERGE, TRACK_REMERGE = 0, 1, 2
"""What a launch does."""
SECOND_ARENA = 2**62
"""Added to places in every other arena, so that those of a plan and of the one that follows it differ."""

# The type Watch, which notes what a reading of a live model saw.
WATCH_ADD, WATCH_TENSORS = 4, 2
"""How many arguments these methods take."""

_CONSTANTS = [name for name, value in globals().items() if isinstance(value, int) and not name.endswith("WORDS")]

STRUCTS = {
    "Placed": "const Segment* table, int64_t segments, bool on_device, const int32_t* unit_segment, "
    "int64_t n_unit_segment, int32_t* counter, const uint8_t* maps",
    "Units": "int64_t n_units, int64_t n_raw_units, int64_t rows_per_unit",
    "Blocks": "int64_t col_warps, int64_t stages, bool staged_B, int64_t pad, int64_t max_rank",
    "Tiles": "int64_t strip_cols, int64_t held, int64_t stages, int64_t max_rank",
    "Rounding": "bool stochastic, int64_t seed",
    "Journal": "uint8_t* codes, int64_t n_codes, int64_t* records, int64_t n_records, uint8_t* arena, int64_t room, "
    "int64_t mark, int64_t* asked",
    "Arena": "uint8_t* before, int64_t room_before",
    "Where": "int64_t device, void* stream",
}
"""Arguments that go together: a struct in C++, so that each has its name there. Python passes them one by one."""
_CPU_TABLE = "const Segment* table, int64_t segments"
_LAUNCH = "Placed placed, int64_t dtype, int64_t adapters, Units units"
_TRACK = "int64_t way, Journal journal, int64_t chunk, Arena before, Where where"
OPERATORS = {
    "layout_hash": ("std::string", ""),
    "cuda_architectures": ("std::vector<std::string>", ""),
    "cpu_isas": ("std::vector<std::string>", ""),
    "use_threads": ("void", "void* parallel_for, void* num_threads"),
    "launch_cpu": ("bool", f"{_CPU_TABLE}, Rounding rounding"),
    "row_norms_cpu": ("void", f"{_CPU_TABLE}, double* out, int64_t n_out"),
    "tracked_sizes_cpu": ("int64_t", f"{_CPU_TABLE}, int64_t* first_unit"),
    "track_cpu": ("void", f"{_CPU_TABLE}, Journal journal"),
    "untrack_cpu": ("void", f"{_CPU_TABLE}, Journal journal"),
    "retrack_cpu": (
        "void", f"{_CPU_TABLE}, const Segment* table_before, int64_t segments_before, Journal journal, uint8_t* before",
    ),
    "merge_shape": (
        "std::vector<int64_t>", "int64_t max_rank, int64_t planes, int64_t element_bytes, int64_t narrowest, "
        "int64_t widest, int64_t per_block, int64_t per_processor",
    ),
    "accepts_shape": ("bool", "Blocks blocks, int64_t planes, int64_t element_bytes, int64_t per_block"),
    "hopper_tiles": (
        "std::vector<int64_t>", "int64_t max_rank, int64_t planes, int64_t extra, int64_t per_block, bool ahead",
    ),
    "accepts_tiles": (
        "bool",
        "int64_t strip_cols, int64_t held, int64_t stages, int64_t max_rank, int64_t planes, int64_t extra, "
        "bool ahead, int64_t per_block",
    ),
}  # fmt: skip
CUDA_OPERATORS = {
    "cuda_problem": ("std::string", ""),
    "launch_cuda": (
        "void",
        "Placed placed, int64_t source_dtype, int64_t destination_dtype, int64_t adapters, Units units, Blocks blocks, "
        "Rounding rounding, Where where",
    ),
    "scale_cuda": (
        "void", "const Rounded* jobs, int64_t n_jobs, int64_t dtype, int64_t group, int64_t part, Where where",
    ),
    "launch_hopper": ("void", f"{_LAUNCH}, Tiles tiles, Rounding rounding, Where where"),
    "launch_hopper_scaled": (
        "void", f"{_LAUNCH}, Tiles tiles, int64_t group, int64_t part, Rounding rounding, Where where",
    ),
    "tensor_maps": ("void", f"{_CPU_TABLE}, int64_t adapters, uint8_t* maps"),
    "split_adapters": ("void", "Placed placed, int64_t n_units, Where where"),
    "thirds_cuda": (
        "void", "const float* source, int64_t rows, int64_t columns, int64_t planes, int64_t row_stride, "
        "int64_t column_stride, uint16_t* destination, Where where",
    ),
    "row_norms_cuda": (
        "void", "Placed placed, int64_t source_dtype, int64_t n_units, int64_t max_rank, double* out, Where where",
    ),
    "track_cuda": ("void", f"{_LAUNCH}, Blocks blocks, {_TRACK}"),
    "track_hopper": ("void", f"{_LAUNCH}, Tiles tiles, {_TRACK}"),
}  # fmt: skip
"""What the compiled module offers, as C++ declares it: functions of numbers and addresses. `operators.py` calls them,
and checks the tensors behind the addresses. Those of GPUs are there where it was built with nvcc."""


def parameters(name: str) -> list[str]:
    """Return the names of the numbers and addresses that Python passes to an operator, in order."""
    taken = _split((OPERATORS | CUDA_OPERATORS)[name][1])
    return [field for kind, label in taken for _, field in _split(STRUCTS.get(kind, f"{kind} {label}"))]


def _split(declared: str) -> list[tuple[str, str]]:
    """Return type and name of each part of a C++ declaration."""
    return [(part.rpartition(" ")[0], part.rpartition(" ")[2]) for part in declared.split(", ") if part]


def _struct(name: str, declared: str) -> str:
    fields = ", ".join(field for _, field in _split(declared))
    return f"struct {name} {{ {declared.replace(',', ';')}; auto all() {{ return std::tie({fields}); }} }};"


def _type(name: str) -> str:
    return "int" if globals()[name] < 2**31 else "int64_t"


def _body() -> str:
    fields, rounded = (
        [
            f"  {f.type} {f.name}{f'[{f.words}]' if f.words > 1 else ''};{f'  // {f.comment}' if f.comment else ''}"
            for f in words
        ]
        for words in (SEGMENT, ROUNDED)
    )
    groups = ", ".join(f"k{name} = {code}" for name, code in GROUPS.items())
    dtypes = ", ".join(f"k{name} = {code}" for name, code in DTYPES.items())
    formats = ", ".join(f"k{name} = {code}" for name, code in FORMATS.items())
    return "\n".join(
        [
            f"enum Dtype : int {{ {dtypes} }};",
            f"enum Format : int {{ {formats} }};",
            f"enum Groups : int {{ {groups} }};",
            "",
            "struct Segment {",
            *fields,
            "};",
            f'static_assert(sizeof(Segment) == {WORDS} * 8, "a segment is {WORDS} words");',
            "",
            "struct Rounded {",
            *rounded,
            "};",
            f'static_assert(sizeof(Rounded) == {ROUNDED_WORDS} * 8, "what is scaled is {ROUNDED_WORDS} words");',
            "",
            *(f"constexpr {_type(name)} k{name.title().replace('_', '')} = {globals()[name]};" for name in _CONSTANTS),
            "",
            "namespace operators {",
            *(_struct(name, declared) for name, declared in STRUCTS.items()),
            *(f"{result} {name}({taken});" for name, (result, taken) in (OPERATORS | CUDA_OPERATORS).items()),
            "}  // namespace operators",
            f"#define LORA_MERGE_OPERATORS(X) {' '.join(f'X({name})' for name in OPERATORS)}",
            f"#define LORA_MERGE_CUDA_OPERATORS(X) {' '.join(f'X({name})' for name in CUDA_OPERATORS)}",
        ]
    )


HASH = hashlib.blake2b(_body().encode(), digest_size=8).hexdigest()
"""Of all the above."""


def header() -> str:
    """Return the text of csrc/layout.h."""
    return f"""\
// What Python and C++ must agree on. Written by `python lora_merge/kernels/bindings/layout.py`: change it there.
// clang-format off
#pragma once
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace lora_merge {{

{_body()}

constexpr const char* kLayoutHash = "{HASH}";

}}  // namespace lora_merge
"""


if __name__ == "__main__":
    target = Path(__file__).resolve().parents[3] / "csrc" / "layout.h"
    target.write_text(header())
    sys.stdout.write(f"{target}: {HASH}\n")
