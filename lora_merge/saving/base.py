"""Which bases on disk can be merged into: plain ones, and quantised ones whose codes are read here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidInput
from ..kernels.segments import FLOATS
from ..models.plain import remedy
from . import bitsandbytes, fp8
from .checkpoint import CONFIG, Checkpoint, open_checkpoint
from .decoded import QUANTIZED, Decoded
from .format import Stored

_READERS: Mapping[str, Callable[[Checkpoint], Decoded]] = {"bitsandbytes": bitsandbytes.read, "fp8": fp8.read}
"""By `quant_method` of a quantization_config."""
_PACKED = ("qweight", "qzeros", "weight_packed")
_ENDS = (
    *("_blocks", "_scales", "_packed", "_scale", "_scale_inv", "_zero_point", "_shape", "_global_scale"),
    *("_bitmask", ".absmax", ".quant_map", "_qdata", ".compressed", ".bitmask"),
)
"""What follows a weight's name in that of what lies beside its codes, or holds them."""
_PARTS = ("qweight", "qzeros", "scales", "g_idx", "SCB", "_weight_qdata", "compressed", "bitmask")
"""Tensors of a module that is quantised."""
_READ = "decoded are bitsandbytes (4-bit, LLM.int8) and fp8 in blocks, and of others plain weights can be merged into"


def open_base(folder: Path) -> Checkpoint:
    """Look at a base: names, dtypes, shapes and places of its tensors. Of a quantised one those of the plain checkpoint
    that it stands for, and what says what its codes stand for is checked; no weight is read. One that is quantised in a
    way that is not read here is taken as it lies (`packed`): what is plain in it can be merged into.

    Raises:
        InvalidInput: as `open_checkpoint`; or what says what its codes stand for is not whole; says which.
    """
    raw = open_checkpoint(folder)
    method, where = _method(raw.config)
    read = _READERS.get(method) if where == QUANTIZED else None
    if read is not None:
        try:
            return read(raw)
        except BaseException:
            raw.close()
            raise
    packed = ""
    for name, stored in raw.tensors.items():
        if bitsandbytes.STATE in name and not method:
            raise InvalidInput(
                f"{folder}: the base is quantised ({name} is there) and {CONFIG} has no {QUANTIZED}; save or fetch it "
                "again"
            )
        packed = packed or _packed(name, stored)
    if method and not packed:
        raise InvalidInput(
            f"{folder}: the base is quantised ({CONFIG} says {where}: {method}), and no weight there lies in codes, so "
            f"that they are quantised while they are loaded, after the merge: if these are plain weights, take {where} "
            f"out of {CONFIG}; otherwise {remedy(method)}"
        )
    raw.packed = f"{CONFIG} says {where}: {method}" if method else packed
    return raw


def _packed(name: str, stored: Stored) -> str:
    """Return how a tensor is quantised, by its name and dtype; "" for a plain one."""
    if name.rpartition(".")[2] in _PACKED:
        return f"{name} holds packed integers"
    if stored.dtype.itemsize == 1 and stored.dtype != torch.bool:
        floating = stored.dtype.is_floating_point
        return f"{name} is {stored.dtype}" if floating or name.endswith(("weight", *_ENDS)) else ""
    return ""


def _method(config: Mapping[str, Any]) -> tuple[str, str]:
    """Return how a base's config says that it is quantised, and where it says so; "" where it does not."""
    for where, said in [("", config), *((f"{k}.", v) for k, v in config.items() if isinstance(v, dict))]:
        method = said.get(QUANTIZED) or said.get("compression_config")
        if method:
            kind = method.get("quant_method", "of an unknown method") if isinstance(method, dict) else method
            return str(kind), f"{where}{QUANTIZED if said.get(QUANTIZED) else 'compression_config'}"
    return "", ""


def check_plain(base: Checkpoint, name: str, changer: str) -> None:
    """Raise `InvalidInput` where a tensor that an adapter changes is no plain weight in a base of which some are
    packed: its dtype is of codes, or something beside it holds them or says what they stand for.

    Args:
        name: of the tensor, in the base or in the plain checkpoint that it stands for.
        changer: the adapter.
    """
    if not base.packed:
        return
    stored, stem = base.tensors.get(name), name.removesuffix(".weight")
    asked = [f"{name}{end}" for end in _ENDS] + [f"{stem}.{part}" for part in _PARTS if stem != name]
    codes = next((one for one in asked if one in base.tensors), None)
    if codes is not None or (stored is not None and stored.dtype not in FLOATS):
        method, _ = _method(base.config)
        what = "is not there" if stored is None else f"is {stored.dtype}"
        raise InvalidInput(
            f"{base.folder}: the base is quantised ({base.packed}), and {changer} changes {name}, which {what}"
            f"{f' beside {codes}' if codes else ''}; {_READ}; {remedy(method)}"
        )


def packed_notes(base: Checkpoint) -> tuple[str, ...]:
    """Say that tensors of a base go along as they lie."""
    if not base.packed:
        return ()
    return (
        f"the base is quantised ({base.packed}): what is packed goes along as it lies, and {CONFIG} still says how; "
        "the weights that the adapter changes are plain ones",
    )
