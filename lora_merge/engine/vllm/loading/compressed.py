"""Engines on quantised checkpoints: what a push makes of merged weights before vLLM loads them.

Such an engine is loaded with values of 8 bits and their scales, under two names (`q_proj.weight`,
`q_proj.weight_scale`). The stream is merged weights in the engine's own dtype. Each worker quantises its tensors as the
checkpoint's own tools do, and gives vLLM's `load_weights` both, unless a trainer in its process writes the layer
(direct.py). Layers with calibrated scales of activations, which cannot be made of weights alone, are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ....kernels.bindings.layout import SCALED_BLOCK
from ....kernels.plan import Plan
from ....kernels.scaled.weights import LARGEST, SCALED_FROM, Group, Scaled, quantise
from ....kernels.segments import FLOATS, FP8, Segment
from ...worker.dry_run import Capture, Record
from .. import internals

_COMPRESSED = {
    "CompressedTensorsW8A8Fp8",
    "CompressedTensorsW8A16Fp8",
    "CompressedTensorsW8A8Int8",
    "CompressedTensorsW8A8Fp8MoEMethod",
    "CompressedTensorsW8A8Int8MoEMethod",
}
"""vLLM's classes for layers of compressed-tensors whose values are 8 bits."""
_DEEPSEEK = {"Fp8LinearMethod", "Fp8MoEMethod"}
"""Those for `quant_method: fp8`."""
_NOT_OF_WEIGHTS = {
    "input_scale": "a static scale of activations, which was calibrated for the weights of this checkpoint and would "
    "have to be calibrated again for each push: quantise the checkpoint with dynamic activations",
    "zero_point": "of an asymmetric format, and merged weights are quantised symmetrically: quantise the checkpoint "
    "with symmetric weights and dynamic activations",
}
"""Parts of a checkpoint that cannot be made of a weight's largest elements, and why they are refused."""
_INSTEAD = (
    "or start the engine on the unquantised checkpoint, without quantization or with vLLM quantising as it loads "
    '(quantization="fp8_per_block", "fp8_per_channel" and their like)'
)
_KNOWN = (
    "use one of FP8 or INT8 with scales of tensors, channels or blocks of 128 x 128 and dynamic activations "
    "(compressed-tensors), or of FP8 by blocks (weight_scale_inv)"
)
_HALF_RANGE = {FP8: LARGEST, torch.int8: 127.5}
_ENDS = {FP8: (-LARGEST, LARGEST), torch.int8: (-128.0, 127.0)}
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class Scheme:
    """The format of a layer's weights in a quantised checkpoint.

    Args:
        values: dtype of the values: e4m3 or int8.
        group: what shares a scale: a matrix, a row, or a block of 128 x 128.
        suffix: what the name of a weight gets for that of its scales: `_scale`, `_scale_inv`.
    """

    values: torch.dtype
    group: Group
    suffix: str

    def pair(self, name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
        """Return what the checkpoint holds of a weight: values and scales, each with its name.

        Args:
            weight: `[rows, cols]`, in a dtype of 16 or 32 bits; on any device, "meta" too.
        """
        values, scales = _deepseek(weight) if self.by_kernel else self._symmetric(weight)
        return [(name, values), (f"{name}{self.suffix}", scales)]

    @property
    def by_kernel(self) -> bool:
        """Return True if the kernel that scales merged weights makes these bits: it computes in float32, and
        compressed-tensors in the weight's dtype."""
        return self.suffix == "_scale_inv"

    def _symmetric(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return symmetric values and scales with the bits of compressed-tensors: `largest / 127.5` or `/ 448` and `x /
        scale`, both in the weight's dtype; a scale of zero is the dtype's epsilon."""
        rows, cols = x.shape
        if self.group == "tensor":
            ends = x.amin().reshape(1), x.amax().reshape(1)
        elif self.group == "channel":
            ends = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
        else:
            down, across = -(-rows // SCALED_BLOCK), -(-cols // SCALED_BLOCK)
            padded = x.new_zeros(down * SCALED_BLOCK, across * SCALED_BLOCK)
            padded[:rows, :cols] = x
            x = padded.view(down, SCALED_BLOCK, across, SCALED_BLOCK)
            ends = x.amin((1, 3), keepdim=True), x.amax((1, 3), keepdim=True)
        # By a tensor: of a number, a GPU would multiply by the inverse.
        scale = torch.maximum(ends[0].neg(), ends[1]) / torch.full((), _HALF_RANGE[self.values], device=x.device)
        scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
        y = (x / scale).add_(0.0).clamp_(*_ENDS[self.values])  # a zero point of 0 is added, which takes -0's sign
        made = (y.round_() if self.values == torch.int8 else y).to(self.values)
        if self.group == "block":
            return made.view(padded.shape)[:rows, :cols].contiguous(), scale.squeeze(3).squeeze(1)
        return made, scale


def _deepseek(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and float32 scales of blocks, made by the kernel that quantises merged weights (kernels/scaled)."""
    if weight.is_meta:
        return quantise(weight, "block")
    grid = [-(-size // SCALED_BLOCK) for size in weight.shape]
    dtype = weight.dtype if weight.dtype in SCALED_FROM else torch.bfloat16
    made = Scaled(torch.empty_like(weight, dtype=FP8), weight.new_empty(grid, dtype=torch.float32), "block", dtype)
    Plan([Segment("weight", weight, made.weight)], [made]).run()
    return made.weight, made.scales


def scheme_of(path: str, layer: Any) -> Scheme | str | None:
    """Return how the weights of a layer are quantised in its checkpoint; None where it is loaded with plain weights; or
    why merged ones cannot be quantised so, in words that follow the engine's name."""
    loaded, _ = internals.get_layerwise_info(layer).restore_metadata
    other = next(((name, t.dtype) for name, t in loaded.items() if t.dtype not in FLOATS), None)
    if other is None:
        return None
    method = getattr(layer, "scheme", None) or layer.quant_method
    kind = type(method).__name__
    unsuitable = f"was started on a checkpoint that is quantised: {path}.{other[0]} is loaded as {other[1]} ({kind})"
    for part, why in _NOT_OF_WEIGHTS.items():
        if found := next((name for name in loaded if part in name), None):
            return f"{unsuitable} with {found}, {why}; {_INSTEAD}"
    found = _scheme(method, kind, loaded)
    return found or f"{unsuitable}, and merged weights are not quantised to that format: {_KNOWN}; {_INSTEAD}"


def _scheme(method: Any, kind: str, loaded: Mapping[str, Tensor]) -> Scheme | None:
    """Return how the weights of a layer are quantised, where that is known here.

    Args:
        method: vLLM's, or its scheme.
        kind: its class name.
        loaded: tensors that the layer is loaded with.
    """
    if kind not in _COMPRESSED | _DEEPSEEK:
        return None
    suffix = "_scale" if kind in _COMPRESSED else "_scale_inv"
    values = {name: t.dtype for name, t in loaded.items() if t.dtype in _ENDS}
    scales = {f"{name}{suffix}" for name in values}
    if {name for name in loaded.keys() - values if not name.endswith("bias")} != scales:
        return None
    if len(set(values.values())) != 1 or any(loaded[name].dtype != torch.float32 for name in scales):
        return None
    arguments = getattr(method, "weight_quant", None)
    block = getattr(method, "weight_block_size", None)
    strategy = "block" if block else getattr(method, "strategy", getattr(arguments, "strategy", None))
    group: Group | None = next((g for g in get_args(Group) if g == getattr(strategy, "value", strategy)), None)
    if group is None or (group == "block" and list(block or ()) != [SCALED_BLOCK] * 2):
        return None
    symmetric = getattr(arguments, "symmetric", True)
    return Scheme(next(iter(values.values())), group, suffix) if symmetric else None


def schemes_of(
    records: Sequence[Record], owners: Mapping[str, nn.Module], fed: Mapping[str, Tensor]
) -> tuple[dict[str, Scheme], dict[str, str]]:
    """Return the schemes of a stream's tensors that go to layers with a quantised checkpoint; and which cannot be
    quantised, with the reason.

    Args:
        records: what loading copies of the stream as it is.
        owners: of the engine's parameters, by path.
        fed: the stream.
    """
    known: dict[int, Scheme | str | None] = {}
    found: dict[str, set[Scheme | None]] = {}
    for record in records:
        layer, scheme = owners.get(record.path), None
        if layer is not None and getattr(layer, "quant_method", None) is not None:
            if id(layer) not in known:
                known[id(layer)] = scheme_of(record.path.rpartition(".")[0], layer)
            scheme = known[id(layer)]
        fits = isinstance(scheme, Scheme) and record.dtype == scheme.values
        found.setdefault(record.name, set()).add(scheme if isinstance(scheme, Scheme) and fits else None)
    schemes: dict[str, Scheme] = {}
    unfit: dict[str, str] = {}
    for name, some in found.items():
        if some == {None}:
            continue
        if len(some) > 1 or (scheme := next(iter(some))) is None:
            unfit[name] = "the engine holds it quantised in one place and otherwise in another, and it is one tensor"
        elif not name.endswith(_WEIGHT) or fed[name].dim() != 2:
            unfit[name] = (
                f"the engine's checkpoint is quantised, and what scales it has for a tensor {list(fed[name].shape)} "
                f"of this name is not known: push to an engine on an unquantised one"
            )
        else:
            schemes[name] = scheme
    return schemes, unfit


def as_in_checkpoint(tensors: Sequence[tuple[str, Tensor]], schemes: Mapping[str, Scheme]) -> list[tuple[str, Tensor]]:
    """Return a stream's tensors as the engine's checkpoint holds them: those with a scheme as values and scales."""
    found: list[tuple[str, Tensor]] = []
    for name, tensor in tensors:
        found += schemes[name].pair(name, tensor) if name in schemes else [(name, tensor)]
    return found


def named_back(
    capture: Capture, refused: Mapping[str, str], schemes: Mapping[str, Scheme], dtype: torch.dtype
) -> tuple[dict[str, str], list[Record]]:
    """Rename what was recorded of pairs to the stream's names, with the stream's dtype.

    Args:
        refused: reasons of `load_weights` for what it does not take, by name.
        schemes: of the stream's tensors that were fed as pairs.
        dtype: in which the engine wants them.

    Returns:
        `refused` by the stream's names; and the records of scales, under their own names, removed from the capture.
    """
    of_scales = weights_of(schemes)
    scales = [record for record in capture.records if record.name in of_scales]
    capture.records = [
        replace(record, dtype=dtype) if record.name in schemes else record
        for record in capture.records
        if record.name not in of_scales
    ]
    capture.made = [(frozenset(of_scales.get(n, n) for n in names), tensor) for names, tensor in capture.made]
    why = {of_scales[name]: f"{name}: {reason}" for name, reason in refused.items() if name in of_scales}
    return why | {name: reason for name, reason in refused.items() if name not in of_scales}, scales


def weights_of(schemes: Mapping[str, Scheme]) -> dict[str, str]:
    """Return names of scales -> names of the stream's tensors."""
    return {f"{name}{scheme.suffix}": name for name, scheme in schemes.items()}
