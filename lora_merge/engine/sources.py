"""Around what is sent: checksums of it, and a fingerprint of the base."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..buckets import checksum
from ..weights import Filler, Source, double_buffered
from .state import Sampler


class Verified:
    """A source that notes the checksum of every tensor that it sends."""

    def __init__(self, inner: Source) -> None:
        self.inner, self.table, self.device = inner, inner.table, inner.device
        self.checksums: dict[str, int] = {}

    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any]) -> None:
        self.inner.fill(index, buffer, run)
        self.checksums.update({slot.name: checksum(slot.view(buffer)) for slot in self.table[index]})


class Fingerprint:
    """Fingerprint of a stream: names, shapes, dtypes and checksums of all its bytes; computed again when a parameter
    was written (by its version counter, or by what a sample of it shows)."""

    def __init__(self) -> None:
        self._sampler = Sampler()
        self._key: Any = None
        self._value = ""

    def __call__(self, filler: Filler) -> str:
        tensors = [part.tensor.detach() for entry in filler.entries for part in entry.parts]
        versions = [part.tensor._version for entry in filler.entries for part in entry.parts]
        key = (filler.key, versions, self._sampler(tensors))
        if key != self._key:
            digest = hashlib.blake2b(digest_size=16)
            with filler.buffers() as buffers:
                for index, data in double_buffered(filler, buffers, {}):
                    for slot in filler.table[index]:
                        digest.update(repr((slot.name, slot.dtype, slot.shape, checksum(slot.view(data)))).encode())
            self._key, self._value = key, digest.hexdigest()
        return self._value
