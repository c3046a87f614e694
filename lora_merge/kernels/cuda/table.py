"""Tables of the compiled CUDA kernels: what products of a segment are made of, which shape a launch of the kernel for
any GPU has, and where the table lies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..bindings import native
from ..bindings.layout import CHUNK, INLINE_SEGMENTS, MAX_RANK, PAIRS, WARP_COLS
from ..segments import BF16, COLS, DTYPES, FP16, FP32, RANK, ROWS, Segment

PARTS_RANK = 32
"""Float32 adapters up to this rank are split while they are merged, which hides behind memory; above it pairs save more
than it takes to make them in front of a merge (H200: rank 32 1.05 copies, with pairs 1.21; rank 64 1.77 and 1.53)."""

Whole = TypeVar("Whole", int, np.ndarray)


class BlockShape(NamedTuple):
    """How a block of the kernel for any GPU works: `Launch` in csrc/cuda/launch.h."""

    col_warps: int
    stages: int
    staged_B: bool
    pad: int


def index_of(device: torch.device) -> int:
    """Return the number of a GPU; "cuda" alone is the current one."""
    return torch.cuda.current_device() if device.index is None else device.index


def place(table: np.ndarray, units: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the table and the segment of every unit: on the device, or a small one on the CPU (a kernel argument)."""
    if len(table) <= INLINE_SEGMENTS:
        return torch.from_numpy(table), torch.empty(0, dtype=torch.int32, device="cpu")
    unit_segment = np.repeat(np.arange(len(table), dtype=np.int32), units)
    return torch.from_numpy(table).to(device), torch.from_numpy(unit_segment).to(device)


class Memory(NamedTuple):
    """Shared memory of a GPU, in bytes: what a block may have, and what blocks on a multiprocessor share."""

    per_block: int
    per_processor: int


def memory(device: torch.device) -> Memory:
    properties = torch.cuda.get_device_properties(device)
    per_block: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Memory(per_block, properties.shared_memory_per_multiprocessor)


def block_shape(
    max_rank: int, adapters: int, element_bytes: int, narrowest: int, widest: int, device: torch.device
) -> BlockShape | None:
    """Return the best shape with so many warps side by side; None where there is no room for so many ranks.

    Args:
        element_bytes: of the larger one of W and the result.
    """
    if max_rank > MAX_RANK:
        return None
    return _shape(max_rank, planes(adapters), element_bytes, narrowest, widest, memory(device))


def most_ranks(narrowest: int, device: torch.device) -> np.ndarray:
    """Return the largest ranks that have one, by what products are made of and whether elements are of four bytes."""
    return _most_ranks(narrowest, memory(device))


def no_room(rest: Sequence[Segment], device: torch.device) -> str:
    """Return why segments run elsewhere."""
    ranks = ", ".join(map(str, sorted({s.rank for s in rest})))
    return (
        f"adapters of rank {ranks} that are not bf16 take more shared memory than the "
        f"{memory(device).per_block >> 10} KiB that a block has on this {torch.cuda.get_device_properties(device).name}"
    )


def products(table: np.ndarray) -> np.ndarray:
    """Return what the products of each segment are made of, `[segments]`.

    BF16 where both halves of the adapter are, or there is none; FP16 where all is fp16. For other adapters PAIRS (of
    fp16) above rank `PARTS_RANK` where weights and results have 16 bits, else FP32 (three bf16 parts).
    """
    rank, dtypes = table[:, RANK], table[:, DTYPES]
    source, destination, lora_A, lora_B = (dtypes >> shift & 0xFF for shift in (0, 8, 16, 24))
    bf16 = (rank == 0) | (lora_A == BF16) & (lora_B == BF16)
    fp16 = (source == FP16) & (destination == FP16) & (lora_A == FP16) & (lora_B == FP16)
    parts = (source == FP32) | (destination == FP32) | (rank <= PARTS_RANK)
    return np.where(bf16, BF16, np.where(fp16, FP16, np.where(parts, FP32, PAIRS)))


def planes(adapters: int) -> int:
    """Return how many 16-bit parts of each number products are made of."""
    return {FP32: 3, PAIRS: 2}.get(adapters, 1)


def ceil(x: Whole, y: Whole | int) -> Whole:
    return -(-x // y)


@cache
def _shape(
    max_rank: int, planes: int, element_bytes: int, narrowest: int, widest: int, room: Memory
) -> BlockShape | None:
    """Return the best shape (csrc/cuda/shapes.h, where launches check it); None if the rank leaves no room."""
    numbers = native.compiled.merge_shape(max_rank, planes, element_bytes, narrowest, widest, *room)
    return BlockShape(numbers[0], numbers[1], bool(numbers[2]), numbers[3]) if numbers else None


@cache
def _most_ranks(narrowest: int, room: Memory) -> np.ndarray:
    def most(planes: int, element_bytes: int) -> int:
        ranks = range(CHUNK, MAX_RANK + 1, CHUNK)
        return max((r for r in ranks if _shape(r, planes, element_bytes, narrowest, narrowest, room)), default=0)

    return np.array([[most(planes(adapters), size) for size in (2, 4)] for adapters in range(PAIRS + 1)])


def widest(merges: np.ndarray) -> int:
    """Return the widest strip, in warps, of which less than an eighth would lie beyond the last columns."""
    real = (merges[:, ROWS] * merges[:, COLS]).sum()

    def covered(n: int) -> int:
        return int((merges[:, ROWS] * ceil(merges[:, COLS], WARP_COLS * n)).sum()) * WARP_COLS * n

    return next((n for n in (4, 2) if covered(n) * 7 <= real * 8), 1)
