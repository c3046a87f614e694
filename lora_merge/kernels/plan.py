"""Plan: segments, checked once and laid out for a backend; run every step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ..choices import Rounding, check_choice
from ..errors import InvalidInput
from .backend import pick
from .checks import check_overlaps, check_segment, check_segments, only_norms
from .packed import Packed, read_bytes
from .scaled.weights import Scaled, check_scaled, is_scaled, place
from .segments import Segment, seed_key

_P = ParamSpec("_P")
_T = TypeVar("_T")


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Apply `torch.compiler.disable` once torch._dynamo is imported: importing it takes seconds, and nothing is traced
    before."""
    disabled: Callable[_P, _T] | None = None

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*args, **kwargs)
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return call


def writes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Mark what writes weights in place: after it, autocast's casts of them are forgotten.

    Inside `torch.autocast` torch keeps its casts of float32 parameters that require a gradient, by tensor and whatever
    the tensor holds, until the outermost block ends. A forward would go on with the old weights. All casts are dropped,
    those of enclosing blocks and of other threads too; they are made again when they are needed.
    """

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        finally:
            torch.clear_autocast_cache()

    return call


class Plan:
    """Segments that were checked and laid out once, to be run every step in one launch.

        plan = lora_merge.Plan([lora_merge.Segment("q_proj.weight", weight, slot, lora_A, lora_B, 2.0)])
        plan.run()

    On a GPU it is one launch for each combination of dtypes. The plan reads whatever its tensors hold at the time of
    `run`. It holds the memory that they have now, so addresses stay valid as long as it lives, or until `release`;
    if a parameter is replaced by another tensor, or moved (`.data = `, `module.to()`), build a new plan (`merged` and
    `MergedWeights` do so by themselves).

    Args:
        segments: the work; all tensors on one device, no two destinations overlapping.
        scaled: the weights of 8 bits that destinations of 8 bits are rectangles of.

    Raises:
        InvalidInput: a segment does not fit, or two of them overlap; nothing was written.
        BackendUnavailable: no backend runs on that device.
    """

    def __init__(self, segments: Sequence[Segment], scaled: Sequence[Scaled] = ()) -> None:
        self.segments = check_segments(segments)
        devices = {s.source.device for s in self.segments}
        if len(devices) > 1:
            raise InvalidInput(
                f"a plan runs on one device, got {', '.join(sorted(map(str, devices)))}; build one for each"
            )
        for segment in self.segments:
            check_segment(segment)
        check_overlaps(self.segments)
        self.device = devices.pop() if devices else torch.device("cpu")
        check_scaled(scaled)
        work = [s for s in self.segments if s.source.numel()]
        placed, work = place([s for s in work if is_scaled(s)], scaled), [s for s in work if not is_scaled(s)]
        # A plan without work has no device of its own, and none that a backend could refuse.
        backend = pick(self.device) if work or placed else None
        self._launch = backend.prepare(work, self.device) if backend and work else None
        self._scaled = backend.prepare_scaled(placed, self.device) if backend and placed else None
        self.bytes_moved = sum(read_bytes(s.source) + s.destination.nbytes for s in self.segments)
        """Bytes of bases read and of outputs written in one run; the adapters come on top."""
        self._rows = [(s.source.shape[0], s.source.numel() > 0) for s in self.segments]
        self._unwritten = next((s.name for s in self.segments if only_norms(s)), None)
        self._unscaled = next((s.name for s in self.segments if s.row_scale is None), None)
        # Memory, and not just the tensors: `parameter.data = other` lets go of what they had.
        held = [t for s in self.segments for t in s.tensors() if not isinstance(t, Packed)]
        held += [t for s in scaled for t in (s.weight, s.scales)]
        self._memory = [t.untyped_storage() for t in held]

    def release(self) -> None:
        """Drop the references to the tensors and keep their addresses, so that the plan keeps no memory alive.

        Only for an owner that compares the plan's addresses with those of live tensors before every run. (The reference
        backend has no table of addresses and goes on holding the tensors.)
        """
        self.segments, self._memory = (), []

    @untraced
    @writes
    def run(self, *, rounding: Rounding = "nearest", seed: int | None = None) -> bool | None:
        """Execute every segment, on the current stream; a run on another stream waits for the one before it.

        Captured in a CUDA graph, a run reads the plan's own tables at every replay: keep the plan as long as the graph,
        and let no replay overlap another run of the plan, or, if it has results of 8 bits, of any plan that has. A plan
        that is built during a capture runs in that graph alone.

        Args:
            rounding: "nearest" (ties to even), or "stochastic": up or down with the probability that makes the
                mean exact.
            seed: of stochastic rounding; needed there, and only there.

        Returns:
            whether all results of float16 that were computed (not copied) are finite; None where the backend does not
            see that on its way.

        Raises:
            InvalidInput: `rounding` and `seed` do not fit each other, or a destination cannot be written. Nothing was
                written.
        """
        check_rounding(rounding, seed)
        if self._unwritten is not None:
            raise InvalidInput(f"{self._unwritten}: a quantised weight cannot be written; pass another destination")
        launches = [launch for launch in (self._launch, self._scaled) if launch is not None]
        finite = [launch(rounding == "stochastic", seed_key(seed or 0)) for launch in launches]
        return None if None in finite else all(finite)

    @untraced
    def row_norms(self) -> list[Tensor]:
        """Compute squared norms of the rows of `source + scaling * lora_B @ lora_A`, before any `row_scale`.

            norms = plan.row_norms()[0].sqrt()

        Returns:
            float64 `[rows]` for each segment.

        Raises:
            InvalidInput: a segment without a `row_scale`, or with a result of 8 bits.
        """
        if self._unscaled is not None:
            raise InvalidInput(f"{self._unscaled}: row_norms needs segments with a row_scale")
        if self._scaled is not None:
            raise InvalidInput("row_norms need results of 16 bits or more; take them of another plan")
        sizes = [rows if some else 0 for rows, some in self._rows]
        out = torch.zeros(sum(sizes), dtype=torch.float64, device=self.device)
        if self._launch is not None:
            self._launch.row_norms(out)
        parts = zip(out.split(sizes), self._rows, strict=True)
        return [norms if some else out.new_zeros(rows) for norms, (rows, some) in parts]


def check_rounding(rounding: Rounding, seed: int | None) -> None:
    """Raise `InvalidInput` unless the pair means something."""
    if rounding == "nearest" and seed is None:
        return
    check_choice("rounding", rounding, Rounding)
    if rounding == "stochastic" and seed is None:
        raise InvalidInput("rounding='stochastic' got seed=None: pass seed=, a whole number that draws the bits")
    if rounding != "stochastic" and seed is not None:
        raise InvalidInput(f"rounding={rounding!r} got seed={seed}: a seed belongs to rounding='stochastic' only")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise InvalidInput(f"seed must be a whole number, got {seed!r}")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise InvalidInput(f"seed must fit in 64 bits, got {seed}")
