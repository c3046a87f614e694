"""Samples of a base's tensors, by which the checkpoint of an engine is told from the base that an adapter was trained
on: names, shapes and dtypes of both are mostly the same, values are not.

Of up to `TENSORS` tensors `BLOCKS` blocks are compared, in the dtype in which the trainer holds them: what a checkpoint
stores in another one is rounded to that, as it is when a model is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from .buckets import dtype_name, dtype_of

TENSORS = 256
"""Tensors that are sampled at most; spread evenly over the names in order."""
BLOCKS, ELEMENTS = 4, 256
"""Blocks of a tensor, the first and the last elements among them, and elements of each."""
Samples: TypeAlias = Mapping[str, Mapping[str, str]]
"""By name: `dtype` of the trainer's tensor, and `digest` of its shape and sampled values."""


def sampled_names(names: Collection[str]) -> list[str]:
    """Return those of some names of which samples are taken."""
    ordered = sorted(names)
    many = min(len(ordered), TENSORS)
    return [ordered[i * (len(ordered) - 1) // max(many - 1, 1)] for i in range(many)]


def samples_of(tensors: Iterable[tuple[str, Tensor]], names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return samples of those of some tensors that have one of the names."""
    wanted = set(names)
    return {
        name: {"dtype": dtype_name(tensor.dtype), "digest": _digest(tensor, tensor.dtype)}
        for name, tensor in tensors
        if name in wanted
    }


def difference(samples: Samples, found: Mapping[str, Tensor]) -> str:
    """Return, in words, the first tensor that is not what its sample says; "" for none."""
    for name, sample in samples.items():
        if name not in found:
            return f"it holds no {name}"
        if _digest(found[name], dtype_of(sample["dtype"])) != sample["digest"]:
            return f"its {name} has other values, or another shape ({list(found[name].shape)})"
    return ""


def _digest(tensor: Tensor, dtype: torch.dtype) -> str:
    flat = tensor.detach().reshape(-1)
    last = max(flat.numel() - ELEMENTS, 0)
    blocks = [flat[last * i // (BLOCKS - 1) :][:ELEMENTS] for i in range(BLOCKS)]
    values = torch.cat(blocks).to(dtype).cpu().contiguous()
    digest = hashlib.blake2b(f"{tuple(tensor.shape)} {dtype_name(dtype)}".encode(), digest_size=8)
    digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
