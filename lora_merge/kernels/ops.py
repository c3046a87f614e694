"""The operators: merging on tensors, registered with torch.library.

Each public function is a thin wrapper around an operator `torch.ops.lora_merge.*` with a schema and a fake
implementation, so it can be traced by torch.compile and captured in a CUDA graph. All operators build segments and
run a `Plan`; which kernels execute it is decided in `lora_merge.kernels.backend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..choices import DType, Rounding
from ..errors import InvalidInput
from .checks import check_dense, check_dtype, check_scaling, check_word
from .plan import Plan, check_rounding
from .segments import FLOATS, Segment

_LIBRARY = torch.library.Library("lora_merge", "DEF")
_LIBRARY.define(
    "merge_(Tensor(a!) weight, Tensor lora_A, Tensor lora_B, float scaling, str rounding='nearest', "
    "int? seed=None) -> ()"
)
_LIBRARY.define(
    "merge(Tensor weight, Tensor lora_A, Tensor lora_B, float scaling, ScalarType? dtype=None, "
    "str rounding='nearest', int? seed=None) -> Tensor"
)
_LIBRARY.define(
    "merge_out(Tensor weight, Tensor lora_A, Tensor lora_B, float scaling, str rounding='nearest', int? seed=None, *, "
    "Tensor(a!) out) -> ()"
)
_LIBRARY.define(
    "run_segments(Tensor(a!)[] destinations, Tensor?[] sources, Tensor?[] lora_A, Tensor?[] lora_B, float[] scaling, "
    "str[] names, int[] first, int[] pitch, str rounding='nearest', int? seed=None) -> ()"
)


def merge_(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """Add an adapter to a weight in place: `weight = round(weight + scaling * lora_B @ lora_A)`; returns the weight.

        lora_merge.merge_(layer.weight, lora_A, lora_B, alpha / r)

    One pass: products accumulate in float32, the sum is rounded once (to nearest, ties to even). No temporary tensor.
    Formula: Hu et al., LoRA, arXiv 2106.09685, section 4.1.

    Args:
        weight: `[out, in]`, bf16, fp16 or fp32, any strides.
        lora_A: `[r, in]`, any of the three dtypes, 1 <= r <= 512.
        lora_B: `[out, r]`, any of the three dtypes.
        scaling: finite factor (`alpha / r` in PEFT).

    Raises:
        InvalidInput: something does not fit; nothing was written.
    """
    factor = _check_arguments(scaling, weight=weight, lora_A=lora_A, lora_B=lora_B)
    _check_written("weight", weight)
    torch.ops.lora_merge.merge_(weight.detach(), *_resolved(lora_A, lora_B), factor)
    return weight


def unmerge_(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> Tensor:
    """Subtract an adapter in place: `weight = round(weight - scaling * lora_B @ lora_A)`; returns the weight.

        lora_merge.unmerge_(layer.weight, lora_A, lora_B, alpha / r)

    The arithmetic inverse of `merge_`. It is **not exact**: rounding at the merge lost bits that a subtraction cannot
    bring back. `merged(model)` and `TrackedPlan` restore weights bit for bit.

    Args:
        weight, lora_A, lora_B, scaling: as in `merge_`.

    Raises:
        InvalidInput: something does not fit; nothing was written.
    """
    return merge_(weight, lora_A, lora_B, -check_scaling(scaling))


def merge(
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    *,
    out: Tensor | None = None,
    dtype: DType | None = None,
    rounding: Rounding = "nearest",
    seed: int | None = None,
) -> Tensor:
    """Return `round(weight + scaling * lora_B @ lora_A)`, computed in one pass; the weight is only read.

        rollout = lora_merge.merge(weight, lora_A, lora_B, 2.0, dtype=torch.bfloat16)

    Args:
        weight: `[out, in]`, bf16, fp16 or fp32, any strides.
        lora_A: `[r, in]`, any of the three dtypes, 1 <= r <= 512.
        lora_B: `[out, r]`, any of the three dtypes.
        scaling: finite factor (`alpha / r` in PEFT).
        out: `[out, in]` tensor to write, any strides; apart from `weight`, or `weight` itself.
        dtype: of the result where `out` is not given, also by name ("bfloat16"); default: the weight's.
        rounding: "nearest" (ties to even), or "stochastic", whose mean is the unrounded value.
        seed: of stochastic rounding, needed there and only there; the same seed draws the same bits.

    Returns:
        `out`, or a new contiguous tensor.

    Raises:
        InvalidInput: something does not fit; nothing was written.
    """
    check_rounding(rounding, seed)
    given = {} if out is None else {"out": out}
    factor = _check_arguments(scaling, weight=weight, lora_A=lora_A, lora_B=lora_B, **given)
    dtype = check_dtype(dtype)
    weight, lora_A, lora_B = _resolved(weight, lora_A, lora_B)
    if out is None:
        return torch.ops.lora_merge.merge(weight, lora_A, lora_B, factor, dtype, rounding, seed)
    _check_written("out", out)
    if dtype is not None and dtype != out.dtype:
        raise InvalidInput(f"out has dtype {out.dtype}, but dtype={dtype} was asked for; pass one of the two")
    torch.ops.lora_merge.merge_out(weight, lora_A, lora_B, factor, rounding, seed, out=out.detach())
    return out


def run_segments(
    destinations: list[Tensor],
    sources: list[Tensor | None],
    lora_A: list[Tensor | None],
    lora_B: list[Tensor | None],
    scaling: list[float],
    names: list[str],
    *,
    first: list[int] | None = None,
    pitch: list[tuple[int, int]] | None = None,
    rounding: Rounding = "nearest",
    seed: int | None = None,
) -> None:
    """Merge many rectangles in one launch: `destinations[i] = round(sources[i] + scaling[i] * lora_B[i] @ lora_A[i])`.

        lora_merge.run_segments([slot], [weight], [lora_A], [lora_B], [2.0], ["q_proj.weight"])

    The operator form of a `Plan`, for graphs that are traced. Code that runs the same segments every step is better
    served by a `Plan`. Captured in a CUDA graph it is one launch for every 8 segments.

    Args:
        destinations: `[rows, cols]` views that are written; no two may overlap.
        sources: views of the bases, of the same shapes; None merges in place.
        lora_A: `[r, cols]` views; None copies.
        lora_B: `[rows, r]` views; None copies.
        scaling: a finite factor for each rectangle.
        names: names of the whole weights, for messages and for the bits of stochastic rounding.
        first: index of each rectangle's first element in its whole weight; default 0. See `Segment`.
        pitch: what a row and a column add to that index; default: the rectangle is the whole weight.
        rounding, seed: as in `merge`.

    Raises:
        InvalidInput: lists differ in length, or a segment does not fit; nothing was written.
    """
    _check_lists(destinations, sources=sources, lora_A=lora_A, lora_B=lora_B)
    check_rounding(rounding, seed)
    scaling = [check_scaling(scale) for scale in scaling]
    for name in names:
        if not isinstance(name, str):
            raise InvalidInput(f"names must be strings, got {name!r}")
    first = [0] * len(destinations) if first is None else first
    pitch = [(d.shape[-1], 1) for d in destinations] if pitch is None else pitch
    if not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in pitch):
        raise InvalidInput(f"pitch must have two numbers a destination, got {pitch!r}")
    flat = [step for pair in pitch for step in pair]
    for label, numbers in (("first", first), ("pitch", flat)):
        for number in numbers:
            check_word(label, number)
    torch.ops.lora_merge.run_segments(
        destinations, sources, lora_A, lora_B, scaling, names, first, flat, rounding, seed
    )


def _check_arguments(scaling: Any, **tensors: Any) -> float:
    """Return the factor; raise `InvalidInput`, naming the argument, unless these are tensors and it is one number."""
    for label, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            hint = "; pass its .weight" if isinstance(getattr(tensor, "weight", None), Tensor) else ""
            raise InvalidInput(f"{label} must be a tensor, got a {type(tensor).__name__}{hint}")
        if tensor.is_nested:
            check_dense(label, tensor)
    return check_scaling(scaling)


def _check_written(label: str, tensor: Tensor) -> None:
    """Refuse what cannot be written as it lies, such as a view that is negated as it is read."""
    if not torch.compiler.is_compiling():  # which traces no question for a lazy view, and makes none
        check_dense(label, tensor)


def _resolved(*tensors: Tensor) -> list[Tensor]:
    """Return what is read, as it lies in memory: a lazily negated view is copied."""
    if torch.compiler.is_compiling():
        return [t.detach() for t in tensors]
    return [(t.resolve_neg() if t.is_neg() else t).detach() for t in tensors]


def _check_lists(destinations: Any, **lists: Any) -> None:
    """Raise `InvalidInput`, naming the argument, unless these are lists of tensors, of matrices the first one."""
    for label, values in {"destinations": destinations, **lists}.items():
        if not isinstance(values, (list, tuple)):
            raise InvalidInput(f"{label} must be a list of tensors, got a {type(values).__name__}")
        for index, value in enumerate(values):
            if not isinstance(value, Tensor) and (value is not None or label == "destinations"):
                raise InvalidInput(f"{label}[{index}] must be a tensor, got a {type(value).__name__}")
    for index, value in enumerate(destinations):
        if value.dim() != 2:
            raise InvalidInput(f"destinations[{index}] must have 2 dimensions, got shape {tuple(value.shape)}")


def _merge_(
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    rounding: Rounding = "nearest",
    seed: int | None = None,
) -> None:
    _merge_out(weight, lora_A, lora_B, scaling, rounding, seed, out=weight)


def _merge(
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    dtype: torch.dtype | None = None,
    rounding: Rounding = "nearest",
    seed: int | None = None,
) -> Tensor:
    out = _new(weight, dtype)
    _merge_out(weight, lora_A, lora_B, scaling, rounding, seed, out=out)
    return out


def _merge_out(
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    rounding: Rounding = "nearest",
    seed: int | None = None,
    *,
    out: Tensor,
) -> None:
    Plan([Segment("weight", weight, out, lora_A, lora_B, scaling)]).run(rounding=rounding, seed=seed)
    _written(out)


def _run_segments(
    destinations: list[Tensor],
    sources: list[Tensor | None],
    lora_A: list[Tensor | None],
    lora_B: list[Tensor | None],
    scaling: list[float],
    names: list[str],
    first: list[int],
    pitch: list[int],
    rounding: Rounding = "nearest",
    seed: int | None = None,
) -> None:
    lists: dict[str, Sequence[object]] = {
        "sources": sources,
        "lora_A": lora_A,
        "lora_B": lora_B,
        "scaling": scaling,
        "names": names,
        "first": first,
    }
    for label, values in lists.items():
        if len(values) != len(destinations):
            raise InvalidInput(f"{label} must have {len(destinations)} entries, as destinations, got {len(values)}")
    if len(pitch) != 2 * len(destinations):
        raise InvalidInput(f"pitch must have two numbers a destination, got {len(pitch)} for {len(destinations)}")
    pitches = list(zip(pitch[::2], pitch[1::2], strict=True))
    segments = [
        Segment(name, d if s is None else s, d, a, b, scale, None, start, steps)
        for name, s, d, a, b, scale, start, steps in zip(
            names, sources, destinations, lora_A, lora_B, scaling, first, pitches, strict=True
        )
    ]
    Plan(segments).run(rounding=rounding, seed=seed)
    _written(*destinations)


def _written(*tensors: Tensor) -> None:
    """Tell autograd, so that a backward pass that needs the old values raises instead of using the new ones."""
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def _new(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    dtype = dtype or weight.dtype
    if dtype not in FLOATS:
        raise InvalidInput(f"weight: the result must be bfloat16, float16 or float32, got dtype={dtype}")
    return torch.empty(weight.shape, dtype=dtype, device=weight.device)


def _fake_merge_(weight: Tensor, lora_A: Tensor, lora_B: Tensor, *_: object, out: Tensor | None = None) -> None:
    """Check only: in-place operators change values, not shapes."""
    _refuse_meta(weight=weight, lora_A=lora_A, lora_B=lora_B, out=out)


def _fake_merge(
    weight: Tensor,
    lora_A: Tensor,
    lora_B: Tensor,
    scaling: float,
    dtype: torch.dtype | None = None,
    rounding: Rounding = "nearest",
    seed: int | None = None,
) -> Tensor:
    _refuse_meta(weight=weight, lora_A=lora_A, lora_B=lora_B)
    check_rounding(rounding, seed)
    return _new(weight, dtype)


def _fake_run_segments(
    destinations: list[Tensor],
    sources: list[Tensor | None],
    lora_A: list[Tensor | None],
    lora_B: list[Tensor | None],
    *_: object,
) -> None:
    lists: dict[str, Sequence[Tensor | None]] = {
        "destinations": destinations,
        "sources": sources,
        "lora_A": lora_A,
        "lora_B": lora_B,
    }
    _refuse_meta(**{f"{label}[{i}]": tensor for label, tensors in lists.items() for i, tensor in enumerate(tensors)})


def _refuse_meta(**tensors: Tensor | None) -> None:
    """Refuse meta tensors, for which PyTorch takes a fake implementation, too: they must not pass for merged."""
    for label, tensor in tensors.items():
        if tensor is not None and tensor.device.type == "meta":
            raise InvalidInput(
                f"{label} is a meta tensor of shape {tuple(tensor.shape)}: it holds no values; load it first"
            )


for _name, _kernel, _fake in (
    ("merge_", _merge_, _fake_merge_),
    ("merge", _merge, _fake_merge),
    ("merge_out", _merge_out, _fake_merge_),
    ("run_segments", _run_segments, _fake_run_segments),
):
    # Every device, so that sparse and quantised tensors reach the checks as well.
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _LIBRARY._register_fake(_name, _fake)
