"""Delta: what the active adapters add to one parameter; and how deltas become segments and a plan.

`lora.py` reads deltas out of a live model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from .plan import Plan
from .segments import Segment

Address: TypeAlias = tuple[int, torch.device]


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """The two matrices of one adapter and its factor, live: what they hold is read at every run.

    Args:
        lora_A: `[r, in]`; expert-major `[E*r, in]` for fused experts; `[r, in, *kernel]` for a convolution.
        lora_B: `[out, r]`; expert-minor `[out, r*E]` for fused experts; `[out, r, 1, ...]` for a convolution.
        scaling: `layer.scaling[adapter]` as it stands.
    """

    lora_A: Tensor
    lora_B: Tensor
    scaling: float


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """What the active adapters add to one parameter: `sum(scaling * lora_B @ lora_A)`, once for each expert.

    A parameter is one or `experts` matrices, each `[out, in]` seen logically.

    Args:
        name: HF checkpoint name of the parameter (`model.layers.0.self_attn.q_proj.weight`).
        owner, attribute: the module that holds the live parameter, and under which name.
        factors: one for each active adapter; never empty.
        experts: None for one matrix (a bias counts as `[out, 1]`, a convolution as `[out, in*kernel]`), else the
            number of matrices along the parameter's first dimension.
        transposed: a matrix is stored `[in, out]` (`fan_in_fan_out`, Embedding, transposed experts).
        magnitude: DoRA's magnitude vector, any shape with `out` elements; rows are scaled to that norm.
    """

    name: str
    owner: nn.Module
    attribute: str
    factors: tuple[Factors, ...]
    experts: int | None = None
    transposed: bool = False
    magnitude: Tensor | None = None

    @property
    def parameter(self) -> Tensor:
        """The live parameter, `requires_grad` and all."""
        parameter = self.owner._parameters[self.attribute]
        assert parameter is not None, self.name
        return parameter

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)` of one matrix, from the parameter's shape."""
        lead = 0 if self.experts is None else 1
        shape = self.parameter.shape
        rows, cols = shape[lead], shape[lead + 1 :].numel()
        return (cols, rows) if self.transposed else (rows, cols)

    def matrices(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Logical `[out, in]` views, one for each expert, of a tensor laid out as the parameter."""
        out, cols = reversed(self.shape) if self.transposed else self.shape
        views = tensor.detach().view(self.experts or 1, out, cols).unbind(0)
        return tuple(view.t() for view in views) if self.transposed else views

    def operands(self, factors: Factors) -> Factors:
        """lora_A as `[E, r, in]` and lora_B as `[out, r, E]` views (E = 1 where there are no experts)."""
        (out, cols), experts = self.shape, self.experts or 1
        rank = factors.lora_A.shape[0] // experts
        lora_A = factors.lora_A.detach().view(experts, rank, cols)
        return Factors(lora_A, factors.lora_B.detach().view(out, rank, experts), factors.scaling)

    def key(self) -> tuple[Any, ...]:
        """Everything that a plan depends on; a plan serves as long as keys stay equal."""
        adapters = tuple((*_place(f.lora_A), *_place(f.lora_B), f.scaling) for f in self.factors)
        magnitude = () if self.magnitude is None else _place(self.magnitude)
        return self.name, self.experts, self.transposed, _place(self.parameter), adapters, magnitude


def address(t: Tensor) -> Address:
    """Where a tensor begins; of a DTensor, where this rank's part does. Tensors that share memory have one address."""
    return getattr(t, "_local_tensor", t).data_ptr(), t.device


def _place(t: Tensor) -> tuple[Any, ...]:
    return address(t), t.shape, t.stride(), t.dtype


def segments_for(
    delta: Delta, operands: Factors, source: Tensor, destination: Tensor, row_scale: Tensor | None = None
) -> list[Segment]:
    """The segments that add a delta to a whole weight on its way from `source` to `destination`; one an expert.

    Args:
        operands: `[E, R, in]` and `[out, R, E]`, from `Delta.operands` or `Operands`.
        source, destination: tensors laid out as the parameter; the same one merges in place.
        row_scale: float32 `[out]`, for DoRA.
    """
    # Strides and offset of the views of a contiguous tensor are the indices in the whole weight.
    index = delta.matrices(torch.empty(delta.parameter.shape, device="meta"))
    parts = zip(
        delta.matrices(source),
        delta.matrices(destination),
        operands.lora_A.unbind(0),
        operands.lora_B.unbind(2),
        index,
        strict=True,
    )
    return [
        Segment(
            delta.name, w, out, a, b, operands.scaling, row_scale, int(i.storage_offset()), (i.stride(0), i.stride(1))
        )
        for w, out, a, b, i in parts
    ]


class Operands:
    """What the kernels read of each delta: the adapter itself, or several of them with their ranks side by side.

    Several adapters lie in float32 buffers of adapter size, their scaling folded into lora_B, so that their sum is
    rounded once. `refresh` fills the buffers from the live adapters.
    """

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self._to: list[Tensor] = []
        self._from: list[Tensor] = []
        self._scaled: list[Tensor] = []
        self._scaling: list[float] = []
        self.factors = [self._of(delta) for delta in deltas]

    def _of(self, delta: Delta) -> Factors:
        parts = [delta.operands(factors) for factors in delta.factors]
        if len(parts) == 1:
            return parts[0]
        ranks = [part.lora_A.shape[1] for part in parts]
        a, b = parts[0].lora_A, parts[0].lora_B
        lora_A = torch.empty(a.shape[0], sum(ranks), a.shape[2], dtype=torch.float32, device=a.device)
        lora_B = torch.empty(b.shape[0], sum(ranks), b.shape[2], dtype=torch.float32, device=a.device)
        b_slots = lora_B.split(ranks, dim=1)
        self._to += [*lora_A.split(ranks, dim=1), *b_slots]
        self._from += [part.lora_A for part in parts] + [part.lora_B for part in parts]
        self._scaled += b_slots
        self._scaling += [part.scaling for part in parts]
        return Factors(lora_A, lora_B, 1.0)

    def refresh(self) -> None:
        """Read the live adapters again."""
        if self._to:
            torch._foreach_copy_(self._to, self._from)
            torch._foreach_mul_(self._scaled, self._scaling)


class MergePlan:
    """Deltas added to weights on their way from source to destination: checked and laid out once, run every step.

    Args:
        jobs: `(delta, source, destination)`, tensors laid out as the parameter and all on one device.
        copies: further segments of the same launch (what has no adapter).

    Raises:
        InvalidInput: something does not fit; nothing was written.
    """

    def __init__(self, jobs: Sequence[tuple[Delta, Tensor, Tensor]], copies: Sequence[Segment] = ()) -> None:
        self._operands = Operands([delta for delta, _, _ in jobs])
        self._magnitudes = [delta.magnitude for delta, _, _ in jobs if delta.magnitude is not None]
        device = jobs[0][1].device if jobs else torch.device("cpu")
        rows = [magnitude.numel() for magnitude in self._magnitudes]
        self._row_scale = torch.ones(sum(rows), dtype=torch.float32, device=device)
        row_scales = iter(self._row_scale.split(rows))
        segments, scaled = list(copies), []
        for (delta, source, destination), operands in zip(jobs, self._operands.factors, strict=True):
            row_scale = None if delta.magnitude is None else next(row_scales)
            parts = segments_for(delta, operands, source, destination, row_scale)
            segments += parts
            scaled += parts if row_scale is not None else []
        self.plan = Plan(segments)
        self._norms = Plan(scaled) if scaled else None

    def release(self) -> None:
        """As `Plan.release`."""
        self._operands.factors = []
        self.plan.release()
        if self._norms is not None:
            self._norms.release()

    def run(self, *, rounding: str = "nearest", seed: int | None = None) -> None:
        """Merge, with the adapters as they are now, on the current stream; arguments as in `Plan.run`."""
        self._operands.refresh()
        if self._norms is not None:
            # DoRA (Liu et al. 2024, eq. 5): rows of W + D keep their direction and get the magnitude as their norm.
            norms = torch.cat(self._norms.row_norms()).sqrt_()
            magnitudes = torch.cat([magnitude.detach().flatten() for magnitude in self._magnitudes])
            self._row_scale.copy_(magnitudes.double().div_(norms))
        self.plan.run(rounding=rounding, seed=seed)
