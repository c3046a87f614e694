"""The files that PEFT saves an adapter in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ...errors import InvalidInput

CONFIG = "adapter_config.json"
TENSORS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
FILES = (TENSORS, PICKLED)
"""What the adapter's own tensors may be in; PEFT reads the first that is there."""


def file_of(folder: Path) -> Path | None:
    """Find the file of an adapter's own tensors; None where there is none.

    Raises:
        InvalidInput: there are two, and they do not hold the same; names both and a tensor.
    """
    found = [folder / name for name in FILES if (folder / name).is_file()]
    if len(found) == 2:
        _check_same(folder)
    return found[0] if found else None


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are of one dtype and shape, and hold the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    pair = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*pair)


def _check_same(folder: Path) -> None:
    """Raise `InvalidInput` unless the two files of an adapter hold the same tensors."""
    from safetensors.torch import load_file

    one: Mapping[str, Tensor] = {}
    other: Mapping[str, Tensor] = {}
    try:
        one = load_file(folder / TENSORS, device="cpu")
    except Exception:  # the caller reads this one, too, and says what is wrong with it
        return
    leave = "two trainings may have saved there: move the file that is not meant out of the folder"
    try:
        other = torch.load(folder / PICKLED, map_location="cpu", weights_only=True, mmap=True)
        differs = next((k for k in sorted({*one, *other}) if k not in one or k not in other), None)
        differs = differs or next((key for key in one if not same_bits(one[key], other[key])), None)
    except Exception as error:
        raise InvalidInput(
            f"{folder} holds {TENSORS}, and {PICKLED}, which cannot be read ({type(error).__name__}): {leave}"
        ) from error
    if differs is None:
        return
    lacks = next((name for name, held in ((TENSORS, one), (PICKLED, other)) if differs not in held), "")
    what = f"{lacks} does not hold {differs}" if lacks else f"{differs} has other bits in the second"
    raise InvalidInput(f"{folder} holds {TENSORS} and {PICKLED}, and {what}: {leave}")
