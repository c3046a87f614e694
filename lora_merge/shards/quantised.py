"""Weights that are quantised and can be read: which library holds a weight, and the shard of what it stands for.

A format is a file beside this one: `bitsandbytes` (kernels decode its codes), `torchao` and `hqq` (their own calls do,
in front of the kernels). Everything behind it works on shards whose pieces are `Packed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from ..errors import InvalidInput
from ..names import own_parameters
from . import Shard, bitsandbytes, hqq, torchao

METHODS = ("bitsandbytes", "torchao", "hqq")
"""What transformers calls them (`quant_method`)."""


def how(owner: nn.Module, attribute: str = "weight") -> str:
    """Return the format in which a module holds a tensor, in words; "" for what is not quantised, or not by one of
    these."""
    if attribute == "weight":
        if (bits := bitsandbytes.bits(owner)) is not None:
            return f"{bits}-bit, bitsandbytes"
        if hqq.is_layer(owner):
            return hqq.format_name(owner)
    tensor = owner._parameters.get(attribute)
    return torchao.format_name(tensor) if torchao.is_coded(tensor) else ""


def shard_of(name: str, owner: nn.Module, attribute: str) -> Shard | None:
    """Return what this rank holds of what a quantised tensor stands for; None for what `how` does not know.

    Raises:
        InvalidInput: it is quantised, or sharded, in a way that cannot be read here.
    """
    tensor = owner._parameters.get(attribute)
    if attribute == "weight":
        if tensor is not None and bitsandbytes.bits(owner) is not None:
            return bitsandbytes.shard_of(name, owner, tensor)
        if hqq.is_layer(owner):
            return hqq.shard_of(name, owner)
    return torchao.shard_of(name, tensor) if torchao.is_coded(tensor) else None


def is_matrix(module: nn.Module) -> bool:
    """Return True if a module is a linear layer or an embedding, whatever holds its weight."""
    return isinstance(module, nn.Linear | nn.Embedding) or hqq.is_layer(module)


def parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters that a module itself holds, by the names that a plain module has for them."""
    return hqq.parameters(module) if hqq.is_layer(module) else own_parameters(module)


def held_as(owner: nn.Module, attribute: str) -> str:
    """Return the name of its own under which a module holds a parameter."""
    return hqq.CODES if attribute == "weight" and hqq.is_layer(owner) else attribute


def check_flat(name: str, owner: nn.Module) -> None:
    """Raise `InvalidInput` for a weight that FSDP1 has flattened."""
    if found := how(owner):
        raise InvalidInput(
            f"{name}: quantised ({found}), and in a flat parameter of FSDP1: its codes cannot be read from there; use "
            "FSDP2 (fully_shard) and 4 bits of bitsandbytes, or hold the model whole on each rank (DDP)"
        )


def facts(modules: Iterable[nn.Module], kinds: Iterable[type]) -> tuple[list[Any], list[Tensor]]:
    """Return all that reading quantised weights among modules depends on beside the parameters: values to be compared,
    and tensors (what scales the codes).

    Args:
        kinds: the classes of the modules.
    """
    values, tensors = bitsandbytes.facts(modules, kinds)
    if any(map(hqq.of_hqq, set(kinds))):
        more, beside = hqq.facts(modules)
        return [*values, *more], [*tensors, *beside]
    return values, tensors


def opened(tensors: Sequence[Tensor], kinds: Iterable[type]) -> tuple[Sequence[Tensor], list[Any]]:
    """Return tensors, of those of torchao the plain ones in them; and what else these say, to be compared.

    Args:
        kinds: the classes of the tensors.
    """
    if not any(map(torchao.of_torchao, set(kinds))):
        return tensors, []
    inside = [torchao.parts_of(t)[1] if torchao.of_torchao(type(t)) else [t] for t in tensors]
    return list(chain.from_iterable(inside)), torchao.facts([t for t in tensors if torchao.of_torchao(type(t))])
