"""Which bases on disk can be merged into: plain ones, and quantised ones whose codes are read here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from ..models.plain import remedy
from . import bitsandbytes, fp8
from .checkpoint import CONFIG, Checkpoint, open_checkpoint
from .decoded import QUANTIZED, Decoded

_READERS: Mapping[str, Callable[[Checkpoint], Decoded]] = {"bitsandbytes": bitsandbytes.read, "fp8": fp8.read}
"""By `quant_method` of a quantization_config."""
_PACKED = ("qweight", "qzeros", "weight_packed")
_READ = "read are plain bases, and bitsandbytes (4-bit, LLM.int8) and fp8 in blocks"


def open_base(folder: Path) -> Checkpoint:
    """Look at a base: names, dtypes, shapes and places of its tensors. Of a quantised one those of the plain checkpoint
    that it stands for, and what says what its codes stand for is checked; no weight is read.

    Raises:
        InvalidInput: as `open_checkpoint`; or it is quantised in a way that is not read here, or not whole; says which.
    """
    raw = open_checkpoint(folder)
    read = _reader(folder, raw.config)
    if read is not None:
        try:
            return read(raw)
        except BaseException:
            raw.close()
            raise
    for name, stored in raw.tensors.items():
        if name.rpartition(".")[2] in _PACKED:
            raise InvalidInput(f"{folder}: the base is quantised ({name} holds packed integers); {_READ}; {remedy()}")
        if stored.dtype.is_floating_point and stored.dtype.itemsize == 1:
            raise InvalidInput(f"{folder}: the base is quantised ({name} is {stored.dtype}); {_READ}; {remedy()}")
        if bitsandbytes.STATE in name:
            raise InvalidInput(
                f"{folder}: the base is quantised ({name} is there) and {CONFIG} has no {QUANTIZED}; save or fetch it "
                "again"
            )
    return raw


def _reader(folder: Path, config: Mapping[str, Any]) -> Callable[[Checkpoint], Decoded] | None:
    """Who reads a base that its config says is quantised; None for one of which it does not say so."""
    found = None
    for where, said in [("", config), *((f"{k}.", v) for k, v in config.items() if isinstance(v, dict))]:
        method = said.get(QUANTIZED) or said.get("compression_config")
        if not method:
            continue
        kind = method.get("quant_method", "of an unknown method") if isinstance(method, dict) else method
        found = _READERS.get(str(kind)) if said is config and QUANTIZED in said else None
        if found is None:
            raise InvalidInput(
                f"{folder}: the base is quantised ({CONFIG} says {where}{QUANTIZED}: {kind}); {_READ}; "
                f"{remedy(str(kind))}"
            )
    return found
