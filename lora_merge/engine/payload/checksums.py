"""Checksums of what is sent, and a fingerprint of the base."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.packed import memory
from ...stream.bucket_writer import BucketWriter
from ...stream.buckets import Slot, checksum, combined
from ...stream.direct_targets import DirectTargets, Sent
from ..fingerprint import Sampler


def add_checksums(sums: dict[str, int], slots: Sequence[Slot], data: Tensor) -> None:
    """Add the slots of a bucket to the checksums of their tensors."""
    for slot in slots:
        sums[slot.name] = combined([sums.get(slot.name, 0), checksum(slot.view(data), slot.start, slot.whole)])


class Verified:
    """A `Sent` that makes a checksum of every tensor as it is filled."""

    def __init__(self, inner: Sent) -> None:
        self.inner, self.table, self.device, self.capacity = inner, inner.table, inner.device, inner.capacity
        self.shared, self.recipients, self.joins = inner.shared, inner.recipients, inner.joins
        self.collective = True  # checksums are of what was filled on this rank
        self.checksums: dict[str, int] = {}

    def alone(self, index: int) -> bool:
        return False  # each rank makes all checksums

    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any]) -> None:
        self.inner.fill(index, buffer, run)
        if index == 0:
            self.checksums = {}
        add_checksums(self.checksums, self.table[index], buffer)

    def direct_buckets(self, names: Container[str]) -> frozenset[int]:
        return self.inner.direct_buckets(names)

    def write_direct(self, index: int, targets: DirectTargets, run: Mapping[str, Any]) -> None:
        self.inner.write_direct(index, targets, run)


def _version(tensor: Tensor) -> int:
    # Tensors made in inference mode (HQQ's scales) have none: there the sample has to do.
    return 0 if tensor.is_inference() else tensor._version


class Fingerprint:
    """Fingerprint of a stream: of names, shapes, dtypes and checksums of all its bytes, however it is cut and sharded.
    Computed again when a parameter's version counter or a sample of it has changed."""

    def __init__(self) -> None:
        self._samplers: defaultdict[torch.device, Sampler] = defaultdict(Sampler)
        self._key: Any = None
        self._value = ""

    def __call__(self, writer: BucketWriter, without: Collection[str] = (), again: bool = False) -> str:
        """Return the fingerprint. Collective over the ranks of the stream.

        Args:
            without: names of tensors that do not count.
            again: compute it whatever the versions and the sample say: what writes through `.data` changes no version,
                and a sample misses most rows.
        """
        tensors: Sequence[Tensor] = writer.source.tensors
        if without:
            entries = [entry for name, entry in writer.entries.items() if name not in without]
            parts = dict.fromkeys(source for entry in entries for source in entry.sources)
            pieces = [piece for name in parts for piece in writer.source.parts[name].shard.pieces]
            tensors = [tensor for piece in pieces for tensor in memory(piece.tensor)]
        by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)  # offloaded weights, buffers on a GPU
        for tensor in tensors:
            by_device[tensor.device].append(tensor)
        samples = [self._samplers[device](some) for device, some in by_device.items()]
        key = (writer.key, without, list(map(_version, tensors)), samples)
        if writer.ranks.any(again or key != self._key):
            sums: dict[str, int] = {}
            source = writer.source
            with writer.buffers() as buffers:
                for index, data in writer.filled(buffers, {}):
                    add_checksums(sums, writer.table[index], data)
                buffers.clear()  # not needed again for long
            writer.adopt(source)
            lines = sorted(
                (name, str(entry.meta.dtype), entry.meta.shape, sums[name])
                for name, entry in writer.entries.items()
                if name not in without
            )
            digest = hashlib.blake2b(repr(lines).encode(), digest_size=16)
            self._key, self._value = key, digest.hexdigest()
        return self._value
