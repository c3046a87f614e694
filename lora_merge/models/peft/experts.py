"""Adapters of fused experts, from any release of PEFT: the layout of their factors, and the scaling of those that PEFT
fuses while it loads them.

A parameter of experts is `[E, d1, d2]`. Which of the two is lora_A's depends on the release that wrote the file:

    before 0.19            lora_A [E*r, d1], lora_B [d2, r*E]
    0.19.0                 that, or the other one where the module says is_transposed
    0.19.1 and later       lora_A [E*r, d2], lora_B [d1, r*E]; as before 0.19 where the module says is_transposed

Shapes tell them apart where d1 and d2 differ.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from ...errors import InvalidInput, UnsupportedAdapter
from ...names import lineage
from .layer import PARAMETER, SWAPPED

_APART = re.compile(r"^(?P<module>.*(?:\.experts\.\d+\.|\.)(?P<name>\w+))\.lora_A\.weight$")
_FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj", "w1", "w3"),
    "down_proj": ("down_proj", "w2"),
    "weight": ("gate",),
}
"""Parameter -> names of the linear layers that it was under transformers 4, for which the adapter was trained."""


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's layers for parameters that no linear layer holds."""
    for name, module in model.named_modules():
        if PARAMETER in lineage(type(module)):
            yield name, module


# ---- layout ----------------------------------------------------------------------------------------------------------


def as_laid_out_here(
    folder: object, said: Mapping[str, Any], model: nn.Module, held: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Turn the factors of fused experts to the layout of the PEFT that is installed.

    Args:
        folder: of the adapter, for errors.
        said: its configuration.
        model: the adapter's layers on the base, of the PEFT that is installed.
        held: tensors of the adapter's file.

    Raises:
        InvalidInput: shapes fit both layouts, and the configuration does not tell which release wrote them.
    """
    held = dict(held)
    for name, layer in _wrappers(model):
        keys = f"{name}.lora_A.weight", f"{name}.lora_B.weight"
        shape = tuple(layer.get_param().shape)
        if len(shape) != 3 or shape[0] == 1 or not all(key in held for key in keys):
            continue
        lora_A, lora_B = (held[key] for key in keys)
        sides = lora_A.shape[-1], lora_B.shape[0]
        fitting = [
            turned for turned in (False, True) if sides == (shape[2 if turned else 1], shape[1 if turned else 2])
        ]
        here = bool(getattr(layer, SWAPPED, False))
        there = fitting[0] if len(fitting) == 1 else here
        if len(fitting) == 2:
            there = _written(folder, said, name, bool(getattr(layer.get_base_layer(), "is_transposed", False)))
        if there != here:
            held[keys[0]], held[keys[1]] = _turned(lora_A, lora_B, shape[0])
    return held


def _turned(lora_A: Tensor, lora_B: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return the factors of the transposed products: the same elements in another order."""
    return (
        lora_B.reshape(lora_B.shape[0], -1, experts).permute(2, 1, 0).reshape(-1, lora_B.shape[0]).contiguous(),
        lora_A.reshape(experts, -1, lora_A.shape[-1]).permute(2, 1, 0).reshape(lora_A.shape[-1], -1).contiguous(),
    )


def _written(folder: object, said: Mapping[str, Any], name: str, is_transposed: bool) -> bool:
    """Return True if the PEFT that wrote an adapter's file has lora_A on the last dimension."""
    version = str(said.get("peft_version") or "0.17.0")  # PEFT has written its version from 0.18 on
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if found is None or "dev" in version:
        raise InvalidInput(
            f"{folder}: {name}: peft_version is {version!r}, and releases of PEFT have two layouts of these factors "
            "whose shapes are the same here: write the release into adapter_config.json that the adapter was trained "
            'with ("0.18.0" or older, or "0.19.1" or newer)'
        )
    number = tuple(int(part or 0) for part in found.groups())
    if number < (0, 19, 0):
        return False
    return is_transposed if number == (0, 19, 0) else not is_transposed


# ---- scaling ---------------------------------------------------------------------------------------------------------


def scale_as_trained(folder: object, said: Mapping[str, Any], model: nn.Module, held: Mapping[str, Tensor]) -> None:
    """Give layers that PEFT fuses out of an expert's linear layers the scaling that the adapter's file says. PEFT
    doubles rank and alpha for them, which is another scaling under rsLoRA, and leaves `alpha_pattern` out.

    Args:
        folder: of the adapter, for errors.
        said: its configuration, as it lies in the file.
        model: the adapter's layers on the base.
        held: tensors of its file.

    Raises:
        UnsupportedAdapter: the layers that become one parameter were trained with several scalings.
    """
    fused = [
        layer for name, layer in _wrappers(model) if f"{name}.lora_A.weight" not in held or _is_router(said, layer)
    ]
    if not fused:
        return
    found: dict[str, dict[float, str]] = {}
    for key, tensor in held.items():
        apart = _APART.match(key)
        parameter = next((p for p, names in _FUSED.items() if apart is not None and apart["name"] in names), None)
        if apart is not None and parameter is not None:
            module = apart["module"]
            found.setdefault(parameter, {}).setdefault(_scaling(said, module, tensor.shape[0]), module)
    for layer in fused:
        scalings = found.get(layer.parameter_name, {})
        if len(scalings) > 1:
            (one, first), (other, second) = list(scalings.items())[:2]
            raise UnsupportedAdapter(
                f"{folder}: {first} was trained with scaling {one:g}, and {second} with {other:g}: PEFT makes one "
                f"parameter of them, {layer.parameter_name}, which has one; merge with transformers 4, where they are "
                "apart"
            )
        for scaling in scalings:
            layer.scaling["default"] = scaling


def _is_router(said: Mapping[str, Any], layer: Any) -> bool:
    """Return True if a router's weight is targeted by a name of transformers 4, where it was a linear layer."""
    return layer.parameter_name == "weight" and not any(
        str(target).endswith("weight") for target in said.get("target_parameters") or ()
    )


def _scaling(said: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the scaling of a linear layer by the adapter's configuration."""
    from peft.utils.other import get_pattern_key

    patterns = said.get("alpha_pattern") or {}
    name = module.removeprefix("base_model.model.")
    alpha = float(patterns.get(get_pattern_key(list(patterns), name), said.get("lora_alpha", 8)))
    return alpha / (math.sqrt(rank) if said.get("use_rslora") else rank)
