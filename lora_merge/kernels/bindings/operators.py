"""The compiled functions on tensors: what is checked of a tensor before its address goes to C++.

Internal: they write memory behind a table's addresses. `layout.OPERATORS` describes the functions that are called;
`ops.py` has the public operators.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import native
from .layout import MAP_BYTES, ROUNDED_WORDS, WORDS

CPU = -1
"""Device index of the CPU; GPUs are 0, 1, ..."""


def _addresses(device: int, *wanted: tuple[Tensor, str, torch.dtype, int]) -> list[int]:
    """Return where tensors begin; raise RuntimeError unless each is contiguous and on the device.

    One call for all, as Python's frames are what a launch costs.

    Args:
        wanted: of each tensor a name for messages, the dtype, and the fewest elements.
    """
    found = []
    for t, label, dtype, numel in wanted:
        if t.dtype != dtype or t.get_device() != device or t.is_meta or not t.is_contiguous():
            raise RuntimeError(
                f"lora_merge: {label} must be contiguous {dtype} on {_named(device)}, got {t.dtype} {list(t.shape)} "
                f"with strides {list(t.stride())} on {t.device}"
            )
        if t.numel() < numel:
            raise RuntimeError(f"lora_merge: {label} must have {numel} elements or more, got {t.numel()}")
        found.append(t.data_ptr())
    return found


def _words(table: Tensor, device: int) -> tuple[int, int]:
    """Return address and number of a table's segments. C++ checks their words where the CPU can read them."""
    if (
        table.dtype != torch.int64
        or table.dim() != 2
        or table.shape[1] != WORDS
        or not table.is_contiguous()
        or table.get_device() != device
        or table.is_meta
    ):
        raise RuntimeError(
            f"lora_merge: a segment table must be contiguous int64 [segments, {WORDS}] on {_named(device)}, got "
            f"{table.dtype} {list(table.shape)} on {table.device}"
        )
    return table.data_ptr(), table.shape[0]


def _journal(device: int, codes: Tensor, records: Tensor, arena: Tensor, mark: int, asked: Tensor) -> tuple[int, ...]:
    """Return the fields of `layout.STRUCTS["Journal"]`."""
    a, b, c, d = _addresses(
        device,
        (codes, "codes", torch.uint8, 0),
        (records, "records", torch.int64, 0),
        (arena, "arena", torch.uint8, 0),
        (asked, "counter", torch.int64, 3),
    )
    return a, codes.numel(), b, records.numel(), c, arena.numel(), mark, d


def _named(device: int) -> str:
    return "the CPU" if device == CPU else f"cuda:{device}"


# ---- CPU -------------------------------------------------------------------------------------------------------------


def launch_cpu(table: Tensor, stochastic: bool, seed: int) -> bool:
    """Execute every segment; whether all results of float16 that were computed are finite."""
    return native.compiled.launch_cpu(*_words(table, CPU), stochastic, seed)


def row_norms_cpu(table: Tensor, out: Tensor) -> None:
    """Write the squared norm of every row to `out`, float64."""
    (address,) = _addresses(CPU, (out, "out", torch.float64, 0))
    native.compiled.row_norms_cpu(*_words(table, CPU), address, out.numel())


def tracked_sizes_cpu(table: Tensor) -> tuple[Tensor, int]:
    """Return the number of each segment's first unit, and of all units, int64 `[segments + 1]`; bytes of the codes."""
    words = _words(table, CPU)
    first = torch.empty(words[1] + 1, dtype=torch.int64, device="cpu")
    return first, native.compiled.tracked_sizes_cpu(*words, first.data_ptr())


def track_cpu(table: Tensor, codes: Tensor, records: Tensor, arena: Tensor, mark: int, asked: Tensor) -> None:
    """Merge in place every unit that is not merged and finds room in the arena."""
    native.compiled.track_cpu(*_words(table, CPU), *_journal(CPU, codes, records, arena, mark, asked))


def untrack_cpu(table: Tensor, codes: Tensor, records: Tensor, arena: Tensor, mark: int, asked: Tensor) -> None:
    """Put back every bit of the units whose place is in this arena."""
    native.compiled.untrack_cpu(*_words(table, CPU), *_journal(CPU, codes, records, arena, mark, asked))


def retrack_cpu(
    table: Tensor, table_before: Tensor, codes: Tensor, records: Tensor, arena: Tensor, mark: int, asked: Tensor,
    before: Tensor,
) -> None:  # fmt: skip
    """Put back the units that a table before merged, whose places are in the arena before, and merge them as this one
    says where they find room."""
    (arena_before,) = _addresses(CPU, (before, "the arena before", torch.uint8, 0))
    native.compiled.retrack_cpu(
        *_words(table, CPU), *_words(table_before, CPU), *_journal(CPU, codes, records, arena, mark, asked),
        arena_before,
    )  # fmt: skip


# ---- GPU -------------------------------------------------------------------------------------------------------------


def _placed(
    table: Tensor, unit_segment: Tensor, device: int, counter: Tensor | None = None, maps: Tensor | None = None
) -> tuple[int, ...]:
    """Return the fields of `layout.STRUCTS["Placed"]`.

    Args:
        table: on the device, with `unit_segment`, the segment of each unit; or a small one on the CPU.
        counter: two zeros on the device; empty: there are none.
        maps: tensor maps, which lie where the table does; empty: there are none.
    """
    there, units, counts, mapped = CPU if table.is_cpu else device, 0, 0, 0
    if not table.is_cpu:
        (units,) = _addresses(device, (unit_segment, "unit_segment", torch.int32, 0))
    if counter is not None and counter.numel():
        (counts,) = _addresses(device, (counter, "counter", torch.int32, 2))
    if maps is not None and maps.numel():
        (mapped,) = _addresses(there, (maps, "maps", torch.uint8, table.shape[0] * MAP_BYTES))
    return *_words(table, there), not table.is_cpu, units, units and unit_segment.numel(), counts, mapped


def _where(device: int) -> tuple[int, int]:
    """Return a GPU and the stream that is current on it."""
    return device, torch._C._cuda_getCurrentRawStream(device)


class Launcher:
    """A function of the compiled module that launches a kernel on the current stream.

    Attributes:
        name: in `layout.CUDA_OPERATORS`, which names the numbers that it takes.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, table: Tensor, unit_segment: Tensor, counter: Tensor, maps: Tensor, device: int, *numbers: int
    ) -> None:
        """Launch it; see `_placed` for the tensors. `numbers`: those between these and the device, in order."""
        placed = _placed(table, unit_segment, device, counter, maps)
        getattr(native.compiled, self.name)(*placed, *numbers, *_where(device))


launch_cuda, track_cuda = Launcher("launch_cuda"), Launcher("track_cuda")
"""The kernel for any GPU: a merge; and a tracked one, its way back, or both at once."""
launch_hopper, track_hopper = Launcher("launch_hopper"), Launcher("track_hopper")
"""The same by the kernel for compute capability 9."""
launch_hopper_scaled = Launcher("launch_hopper_scaled")
"""And for results of 8 bits."""


def journal_cuda(
    device: int, codes: Tensor, records: Tensor, arena: Tensor, mark: int, asked: Tensor, chunk: int, before: Tensor
) -> tuple[int, ...]:
    """Return the last numbers of `track_cuda` and `track_hopper`; `before` is the arena of what was.

    For both ways at once the table has its segments twice, as they are merged and as they were.
    """
    (arena_before,) = _addresses(device, (before, "the arena before", torch.uint8, 0))
    return *_journal(device, codes, records, arena, mark, asked), chunk, arena_before, before.numel()


def scale_cuda(jobs: Tensor, dtype: int, group: int, part: int, device: int, *_: object) -> None:
    """Convert numbers of 16 bits to 8 and scales. `part`: `layout.SCALE_MEASURE` or `SCALE_CONVERT`.

    Args:
        jobs: int64 `[jobs, ROUNDED_WORDS]` on the CPU.
    """
    (address,) = _addresses(CPU, (jobs, "jobs", torch.int64, 0))
    native.compiled.scale_cuda(address, jobs.numel() // ROUNDED_WORDS, dtype, group, part, *_where(device))


def tensor_maps(table: Tensor, adapters: int) -> Tensor:
    """Return tensor maps of a table on the CPU, uint8 `[segments, 512]`."""
    maps = torch.empty((table.shape[0], MAP_BYTES), dtype=torch.uint8, device="cpu")
    native.compiled.tensor_maps(*_words(table, CPU), adapters, maps.data_ptr())
    return maps


def thirds_cuda(source: Tensor, planes: int, out: Tensor) -> None:
    """Write each float32 number as three bf16 ones whose sum it is.

    Args:
        source: `[rows, planes * columns]`, with any strides; planes are summed.
        out: `[rows, 3 * columns]`: first thirds of a row, second, third ones.
    """
    device, (rows, wide) = source.get_device(), source.shape
    if source.dtype != torch.float32 or wide % planes:
        raise RuntimeError(f"lora_merge: thirds of {source.dtype} {list(source.shape)} in {planes} planes")
    columns = wide // planes
    (address,) = _addresses(device, (out, "thirds", torch.bfloat16, 3 * rows * columns))
    native.compiled.thirds_cuda(source.data_ptr(), rows, columns, planes, *source.stride(), address, *_where(device))


def split_adapters(table: Tensor, unit_segment: Tensor, device: int, n_units: int, *_: object) -> None:
    """Make pairs of fp16 of the halves of adapters that a table has for segments; rounding plays no part."""
    native.compiled.split_adapters(*_placed(table, unit_segment, device), n_units, *_where(device))


def row_norms_cuda(
    table: Tensor, unit_segment: Tensor, source_dtype: int, n_units: int, max_rank: int, out: Tensor
) -> None:
    """Write squared norms of rows to `out`, float64 on the GPU."""
    device = out.get_device()
    if device == CPU:
        raise RuntimeError(f"lora_merge: out must be on a GPU, got {out.device}")
    (address,) = _addresses(device, (out, "out", torch.float64, 0))
    native.compiled.row_norms_cuda(
        *_placed(table, unit_segment, device), source_dtype, n_units, max_rank, address, *_where(device)
    )
