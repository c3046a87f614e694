"""Checkpoint tensors that are no boxes of Megatron's parameters: experts stacked into one tensor, and norms that
Megatron holds less one.

A part that goes into such a tensor is named after it, with its place: `...experts.gate_up_proj[3].even` is the gate of
expert 3 in every other column, `...experts.down_proj[3]` all of expert 3, `...linear_attn.norm.weight-1` a norm less
one. So every rank knows from names alone what is made of the parts of all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...errors import InvalidInput
from ..conversion import Conversion, Made

ONE_LESS = "-1"
_STACKED = re.compile(r"(.+)\[(\d+)\](?:\.(gate|up|even|odd))?")


def stacked(name: str, expert: int | str, place: str = "") -> str:
    """Return the name of the part that one expert has in a checkpoint tensor of all experts.

        stacked("model.layers.0.mlp.experts.gate_up_proj", 3, "gate")

    A weight `[out, in]` is stored as `[in, out]` there, a bias as it is.

    Args:
        name: of the checkpoint tensor.
        expert: global number.
        place: "gate" and "up": the first and the second half of its columns; "even" and "odd": every other column; "":
            all of them.
    """
    return f"{name}[{expert}]{place and '.' + place}"


def tensor_of(part: str) -> str:
    """Return the name of the checkpoint tensor that a part goes into."""
    found = _STACKED.fullmatch(part)
    return found[1] if found else part.removesuffix(ONE_LESS)


class MegatronConversion(Conversion):
    """What becomes of the parts of a Megatron model; see the top of this file."""

    def __init__(self) -> None:
        super().__init__(None, "")

    def outputs(self, metas: Mapping[str, Tensor], stored: Mapping[str, Sequence[int]] | None = None) -> list[Made]:
        """Return the checkpoint tensors that parts, given as meta tensors, become.

        Raises:
            InvalidInput: an expert's part of a stacked tensor is nowhere.
        """
        grouped: dict[str, list[str]] = {}
        for name in metas:
            grouped.setdefault(tensor_of(name), []).append(name)
        made = []
        for name, sources in grouped.items():
            if sources == [name]:
                meta = metas[name]
                made.append(Made(name, (name,), meta.shape, (0, meta.shape, meta.stride())))
                continue
            shape = _converted(name, {source: metas[source] for source in sources}).shape
            made.append(Made(name, tuple(sources), shape, None))
        return made

    def compute(self, merged: Mapping[str, Tensor], name: str) -> Tensor:
        """Compute a checkpoint tensor from the values of all its parts; a norm is rounded to their dtype."""
        return _converted(name, {part: tensor for part, tensor in merged.items() if tensor_of(part) == name})


def _converted(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    if name + ONE_LESS in parts:
        return parts[name + ONE_LESS] + 1
    experts: dict[int, dict[str, Tensor]] = {}
    for part, tensor in parts.items():
        found = _STACKED.fullmatch(part)
        assert found is not None, part
        experts.setdefault(int(found[2]), {})[found[3] or ""] = tensor.t() if tensor.dim() == 2 else tensor
    lacking = sorted(set(range(max(experts) + 1)) - set(experts))
    places = {place for places in experts.values() for place in places}
    if lacking or any(set(places_of) != places for places_of in experts.values()) or places not in _PLACES:
        raise InvalidInput(
            f"{name}: of the parts of {max(experts) + 1} experts some are on no rank ({len(parts)} are there, "
            f"{', '.join(sorted(parts)[:3])}, ...); do all ranks of the model take part?"
        )
    return torch.stack([_joined(experts[number]) for number in range(len(experts))])


_PLACES: Sequence[set[str]] = ({""}, {"gate", "up"}, {"even", "odd"})


def _joined(places: Mapping[str, Tensor]) -> Tensor:
    if "" in places:
        return places[""]
    if "gate" in places:
        return torch.cat([places["gate"], places["up"]], -1)
    return torch.stack([places["even"], places["odd"]], -1).flatten(-2)
