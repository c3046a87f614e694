"""One layer of PEFT's, read: its parameters as shards, its factors and scalings; and PEFT's names for what is read."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from ...errors import InvalidInput, UnsupportedAdapter
from ...names import innermost, lineage, path_of
from ...shards import Shard
from ...shards.bitsandbytes import turned
from ...shards.layout import Layout
from ..delta import Delta, Factors
from .forwards import strange_factor

PeftLayer: TypeAlias = Any
"""A layer of PEFT's, whose attributes differ from class to class."""

TUNER_LAYER = "peft.tuners.tuners_utils.BaseTunerLayer"
PEFT_MODEL = "peft.peft_model.PeftModel"
LAYERS = "peft.tuners.lora.layer."
LINEAR, EMBEDDING, PARAMETER = LAYERS + "Linear", LAYERS + "Embedding", LAYERS + "ParamWrapper"
CODED = tuple(
    f"peft.tuners.lora.{name}"
    for name in ("bnb.Linear4bit", "bnb.Linear8bitLt", "hqq.HqqLoraLinear", "torchao.TorchaoLoraLinear")
)
"""Layers over bases in codes."""
BACKEND = "quantization_backend"
"""Attribute of PEFT's layers over quantised bases."""
MESH = "_hf_device_mesh"
"""Attribute of modules that transformers' tensor parallelism has sharded."""
SWAPPED = "_did_swap_in_out_features"
"""Attribute of a `ParamWrapper` whose parameter is `[E, out, in]`."""
GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "padding_mode")


class LayerReader(NamedTuple):
    """One layer that is being read.

    Args:
        base: the module inside it.
        active: its adapters that act in the forward.
    """

    name: str
    layer: PeftLayer
    base: PeftLayer
    active: list[str]
    layout: Layout

    def shard(self, owner: nn.Module, attribute: str) -> Shard:
        found = self.layout.of(self.name, owner, attribute)
        if found is None:
            which = "" if owner is self.base else " of its adapter"
            raise UnsupportedAdapter(
                f"{self.name}.{attribute}: {type(owner).__name__}{which} has no plain parameter '{attribute}' (a "
                "quantised, parametrised or offloaded one cannot be merged here; torch.nn.utils.prune.remove, "
                "remove_weight_norm and parametrize.remove_parametrizations make plain what was pruned or parametrised)"
            )
        return found

    def delta(
        self, attribute: str, factors: tuple[Factors, ...], experts: int | None = None, transposed: bool = False
    ) -> Delta:
        weight = self.shard(self.base, attribute)
        name = f"{self.name}.{attribute}"
        transposed ^= attribute == "weight" and turned(self.base)
        return Delta(name, weight, factors, experts, transposed, None, self.base, attribute)

    def factors(self) -> tuple[Factors, ...]:
        found = []
        for adapter in self.active:
            lora_A, lora_B = (part_of(self.layer, kind, adapter) for kind in ("lora_A", "lora_B"))
            for half, part in (("lora_A", lora_A), ("lora_B", lora_B)):
                if (forward := strange_factor(part)) is not None:
                    raise UnsupportedAdapter(
                        f"{self.name}: {half} of '{adapter}', a {path_of(type(part))}, computes by {forward}; expected "
                        "the forward of torch's own layer: merging is not what another one does"
                    )
            if getattr(lora_A, "bias", None) is not None:
                raise UnsupportedAdapter(f"{self.name}: lora_A of '{adapter}' has a bias, which no weight can express")
            halves = self.shard(lora_A, "weight"), self.shard(lora_B, "weight")
            found.append(Factors(*halves, self.scaling(adapter), adapter))
        return tuple(found)

    def scaling(self, adapter: str) -> float:
        scaling = self.layer.scaling[adapter]
        try:
            return float(scaling)
        except (TypeError, ValueError):
            told = f"the scaling of '{adapter}' must be a number, got {scaling!r}"
            raise InvalidInput(f"{self.name}: {told}; call set_scale('{adapter}', 1.0)") from None


def part_of(layer: PeftLayer, kind: str, adapter: str) -> nn.Module:
    """Return `layer.kind[adapter]`. Reads the dicts: for thousands of layers, `__getattr__` would take longest."""
    return innermost(layer._modules[kind]._modules[adapter])


@cache
def peft_class(cls: type) -> str | None:
    """Return the path of the base class of PEFT's that a class descends from: TUNER_LAYER, PEFT_MODEL or None."""
    return next((path for path in lineage(cls) if path in (TUNER_LAYER, PEFT_MODEL)), None)
