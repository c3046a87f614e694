"""What a version holds of a Megatron model: its adapters, as PEFT would save those of the HF model. Each rank has boxes
of their tensors, views of the live parameters; nothing is gathered."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from ..errors import InvalidInput, UnsupportedAdapter
from ..extras import needed
from ..models.delta import Factors
from ..models.live import Live, live
from ..models.megatron.conversion import tensor_of
from ..models.part import Part
from ..shards import Shard
from ..shards.ranks import Ranks

_Number = TypeVar("_Number", int, float)
_WEIGHT = ".weight"
_EXPERT = re.compile(r"(.+\.experts)\.\d+\.(\w+)")


class MegatronContents:
    """Reads what a version holds of a Megatron model; the same methods as of `Contents`.

    Args:
        model: the list of chunks, one chunk, or `Chunks`.

    Raises:
        MissingExtra: peft is not installed.
    """

    def __init__(self, model: Any) -> None:
        with needed("Publisher writes PEFT's format", "'lora-merge[publish]'", "peft"):
            import peft  # noqa: F401
        self._model = model
        self._config: Any = None

    def base_name(self) -> str:
        """Return "": Megatron does not know of which checkpoint its weights are."""
        return ""

    def config(self) -> Any:
        """Return PEFT's configuration of the tensors that `tensors` returned last."""
        return self._config

    def tensors(self) -> tuple[dict[str, Shard], Ranks]:
        """Return the adapter's tensors by PEFT's names, and the ranks that hold them together. Collective over these.

        Raises:
            InvalidInput: something is trained besides, or nothing is adapted.
            UnsupportedAdapter: PEFT's format does not hold an adapter; names the weight.
        """
        model = live(self._model)
        with model.ranks.vote("publish"):
            here = model.parts(adapters=True, keep_tied=False)
            _check_trained(model, here.values())
        parts = model.united(here)  # from here on the same on every rank, errors too
        adapted = {name.removesuffix(_WEIGHT): _one(part) for name, part in parts.items() if part.delta is not None}
        if not adapted:
            raise InvalidInput("no adapter is active in this model, so there is nothing to publish")
        _check_experts(adapted, parts)
        found: dict[str, Shard] = {}
        for module in sorted(adapted):
            found[f"base_model.model.{module}.lora_A.weight"] = adapted[module].lora_A
            found[f"base_model.model.{module}.lora_B.weight"] = adapted[module].lora_B
        self._config = _config(adapted, parts)
        return found, model.ranks


def _one(part: Part) -> Factors:
    """Return the adapter of a weight; raise `UnsupportedAdapter` where PEFT's format has none like it."""
    delta = part.delta
    assert delta is not None
    module = part.name.removesuffix(_WEIGHT)
    if tensor_of(part.name) != part.name:
        why = "is part of a tensor of all experts, for which PEFT has other adapters"
    elif module == part.name or len(part.shard.shape) != 2 or "embed" in module.rpartition(".")[2]:
        why = "is no weight of a linear layer"
    elif len(delta.factors) != 1:
        why = f"is adapted {len(delta.factors)} times, and a version holds one adapter"
    else:
        return delta.factors[0]
    raise UnsupportedAdapter(f"{part.name} {why}: push with VllmSync instead")


def _check_experts(adapted: Mapping[str, Factors], parts: Mapping[str, Part]) -> None:
    """Raise `UnsupportedAdapter` unless PEFT can stack the adapters of a layer's experts: every projection of every
    expert, each projection at one rank."""
    modules = [name.removesuffix(_WEIGHT) for name in parts if name.endswith(_WEIGHT)]
    experts = {module: (found[1], found[2]) for module in modules if (found := _EXPERT.fullmatch(module))}
    layers = {layer for module, (layer, _) in experts.items() if module in adapted}
    first: dict[tuple[str, str], str] = {}
    for module, projection in experts.items():
        if projection[0] not in layers:
            continue
        other = first.setdefault(projection, module)
        if module not in adapted or other not in adapted:
            why = "has no adapter, and others of its layer have"
        elif (rank := adapted[module].lora_A.shape[0]) != (wanted := adapted[other].lora_A.shape[0]):
            why = f"has an adapter of rank {rank}, and {other} of {wanted}"
        else:
            continue
        raise UnsupportedAdapter(
            f"{module} {why}: PEFT saves the adapters of a layer's experts all together. Push with VllmSync instead"
        )


def _check_trained(model: Live, parts: Iterable[Part]) -> None:
    """Raise `InvalidInput` where something of this rank is trained that is in no adapter."""
    shards = (shard for part in parts if part.delta is not None for shard in part.delta.shards())
    begins = sorted({piece.tensor.data_ptr() for shard in shards for piece in shard.pieces})
    for name, module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or not parameter.numel():
                continue
            at = bisect_left(begins, parameter.data_ptr())
            if at == len(begins) or begins[at] >= parameter.data_ptr() + parameter.nbytes:
                raise InvalidInput(
                    f"{name}.{key} is trained (requires_grad), and it is of no adapter that acts: freeze it, or push "
                    "with VllmSync"
                )


def _config(adapted: Mapping[str, Factors], parts: Mapping[str, Part]) -> Any:
    from peft import LoraConfig

    ranks = {module: factors.lora_A.shape[0] for module, factors in adapted.items()}
    alphas = {module: _alpha(module, factors.scaling, ranks[module]) for module, factors in adapted.items()}
    rank, alpha = _usual(ranks), _usual(alphas)
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        rank_pattern={module: one for module, one in ranks.items() if one != rank},
        alpha_pattern={module: one for module, one in alphas.items() if one != alpha},
        target_modules=_targets(adapted, parts),
        task_type="CAUSAL_LM",
        inference_mode=True,
    )


def _usual(values: Mapping[str, _Number]) -> _Number:
    """Return the value that most modules have."""
    return Counter(values.values()).most_common(1)[0][0]


def _targets(adapted: Mapping[str, Factors], parts: Mapping[str, Part]) -> list[str]:
    """Return the modules by the last of their names, where all that have it are adapted; else by their whole names."""
    last = {module.rpartition(".")[2] for module in adapted}
    plain = {name.removesuffix(_WEIGHT) for name in parts if name.endswith(_WEIGHT)}
    others = {module.rpartition(".")[2] for module in plain.difference(adapted)}
    return sorted(last if last.isdisjoint(others) else adapted)


def _alpha(module: str, scaling: float, rank: int) -> float:
    """Return the `lora_alpha` of which PEFT makes exactly this scaling."""
    alpha = scaling * rank
    for found in (round(alpha), alpha, math.nextafter(alpha, math.inf), math.nextafter(alpha, -math.inf)):
        if found / rank == scaling:
            return found
    raise UnsupportedAdapter(
        f"{module}: no lora_alpha gives the scaling {scaling} at rank {rank}, and PEFT's format holds no scaling: push "
        "with VllmSync"
    )
