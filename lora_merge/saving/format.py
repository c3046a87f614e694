"""The safetensors format: eight bytes with the length of a header, the header in JSON, and the tensors' bytes.

Read and written here by position, a chunk at a time, so that neither takes memory for a file or for a whole tensor.
(https://github.com/huggingface/safetensors#format)
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInput
from ..stream.buckets import Meta

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
if hasattr(torch, "float8_e8m0fnu"):  # from torch 2.7 on
    DTYPES["F8_E8M0"] = torch.float8_e8m0fnu
"""Code in a header -> torch's dtype."""
CODES = {dtype: code for code, dtype in DTYPES.items()}
_LENGTH = 8
_LONGEST = 100_000_000
"""Bytes of a header that the safetensors library accepts."""
_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file.

    Args:
        dtype, shape: of its values.
        begin: first byte in the file.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    begin: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself.

    Args:
        tensors: in the order of their bytes.
        metadata: texts by name, mostly `{"format": "pt"}`.
    """

    tensors: tuple[Stored, ...]
    metadata: Mapping[str, str]


def read_header(file: Path) -> Header:
    """Read the header of a safetensors file.

    Raises:
        InvalidInput: it is no such file, it is cut short, or it holds a dtype that torch does not have; says which.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH), "little")
        if size < _LENGTH or not 2 <= length <= min(_LONGEST, size - _LENGTH):
            raise InvalidInput(
                f"{file}: expected a safetensors file, whose first {_LENGTH} bytes are the length of its header; got "
                f"{length} in a file of {size} bytes: it is cut short or something else (a Git LFS pointer?); fetch "
                "it again"
            )
        try:
            told = json.loads(opened.read(length), object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{file}: its header is no JSON ({error}); fetch the file again") from None
    if not isinstance(told, dict):
        raise InvalidInput(f"{file}: its header is a {type(told).__name__}, expected an object; fetch the file again")
    metadata = told.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise InvalidInput(f"{file}: __metadata__ of its header is {metadata!r}, expected texts by name")
    found = [_stored(file, name, said, _LENGTH + length) for name, said in told.items()]
    found.sort(key=lambda stored: (stored.begin, stored.nbytes))
    end = _LENGTH + length
    for stored in found:
        if stored.begin != end:
            raise InvalidInput(
                f"{file}: {stored.name} should begin at byte {end}, behind what lies before it, and its header says "
                f"{stored.begin}; fetch the file again"
            )
        end += stored.nbytes
    if end > size:
        raise InvalidInput(
            f"{file} is cut short: {found[-1].name} should end at byte {end}, and the file has {size} bytes; fetch it "
            "again"
        )
    if size > end:
        raise InvalidInput(f"{file} has {size} bytes, and its last tensor ends at byte {end}; fetch the file again")
    return Header(tuple(found), metadata)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, none of whose names is there twice."""
    names = [name for name, _ in pairs]
    if len(names) > len(set(names)):
        raise ValueError(f"{max(names, key=names.count)!r} is there twice")
    return dict(pairs)


def _stored(file: Path, name: str, said: Any, data: int) -> Stored:
    try:
        code, shape, offsets = str(said["dtype"]), said["shape"], said["data_offsets"]
        numbers = [*shape, *offsets]
        whole = len(offsets) == 2 and all(isinstance(n, int) and n >= 0 for n in numbers)
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise InvalidInput(
            f"{file}: its header says of {name} {said!r}, expected dtype, shape and data_offsets; fetch the file again"
        )
    if code not in DTYPES:
        raise InvalidInput(
            f"{file}: {name} is of dtype {code}, expected one of {', '.join(DTYPES)}: save it as one of these"
        )
    stored = Stored(name, DTYPES[code], tuple(shape), file, data + offsets[0])
    if stored.nbytes != offsets[1] - offsets[0]:
        raise InvalidInput(
            f"{file}: {name}: {stored.dtype} {list(shape)} takes {stored.nbytes} bytes, its header gives it "
            f"{offsets[1] - offsets[0]}; fetch the file again"
        )
    return stored


def make_header(file: Path, tensors: Sequence[Meta], metadata: Mapping[str, str]) -> tuple[bytes, list[Stored]]:
    """Return the first bytes of a file of these tensors, in this order, and where each will lie."""
    said: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end, begins = 0, []
    for tensor in tensors:
        name, dtype, shape = tensor
        if dtype not in CODES:
            raise InvalidInput(
                f"{name}: expected a dtype that safetensors files hold ({', '.join(DTYPES)}), got {dtype}: leave it "
                "out (register_buffer(..., persistent=False)), or convert it"
            )
        said[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [end, end + tensor.nbytes]}
        begins.append(end)
        end += tensor.nbytes
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    first = _LENGTH + len(text)
    places = [
        Stored(name, dtype, tuple(shape), file, first + begin)
        for (name, dtype, shape), begin in zip(tensors, begins, strict=True)
    ]
    return len(text).to_bytes(_LENGTH, "little") + text, places


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, of which they are a view."""
    flat: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def read_into(descriptor: int, begin: int, buffer: memoryview, what: str) -> None:
    """Fill a buffer with the bytes of a file from `begin` on.

    Raises:
        InvalidInput: the file ends before that.
    """
    done = 0
    while done < len(buffer):
        got = os.preadv(descriptor, [buffer[done:]], begin + done)
        if got == 0:
            raise InvalidInput(f"{what} ended {len(buffer) - done} bytes early while it was read: was it changed?")
        done += got


def write_from(descriptor: int, begin: int, buffer: memoryview) -> None:
    """Write a buffer to a file from byte `begin` on."""
    done = 0
    while done < len(buffer):
        done += os.pwrite(descriptor, buffer[done:], begin + done)
