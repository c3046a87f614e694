"""Samples of the base on which an adapter is trained, by which engines tell it from others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.fingerprint import spread
from ..kernels.packed import memory
from ..models.part import learning_of
from ..shards import Shard
from ..shards.ranks import Ranks
from ..stream.bucket_writer import BucketWriter
from ..stream.samples import sampled_names, samples_of
from ..stream.weights import MergedWeights
from .manifest import Base


class BaseSamples:
    """Samples of a model's base: of tensors that its adapter changes, and of others, as bases may differ in these
    alone; not of those that a version holds whole. Taken in a pass over the base, and again when it has changed.

    Args:
        model: as for `Publisher`.
    """

    def __init__(self, model: Any) -> None:
        self._bare, self._adapted = MergedWeights(model, adapters=False), MergedWeights(model)
        # Of a model that is trained on merged weights: with what adapters add to which.
        self._adapted.as_it_lies = False
        self._looked: Any = None
        self._saved: list[str] = []
        self._whole: frozenset[str] = frozenset()
        self._samples: dict[str, dict[str, str]] = {}

    def __call__(self, shards: Mapping[str, Shard], ranks: Ranks) -> dict[str, dict[str, str]]:
        """Return them. Collective over the ranks that hold the model together.

        Args:
            shards: of the tensors that a version holds, by name.
        """
        bare = self._bare.bucket_writer()
        if ranks.any(self._saved != list(shards)):
            held = [piece.tensor for shard in shards.values() for piece in shard.pieces]
            whole = learning_of(bare.source.parts, held, buffers=True)
            self._saved, self._whole = list(shards), frozenset().union(*ranks.gather(whole))
            self._samples = {}
        looked = _looks(self._tensors(bare))
        if ranks.any(not self._samples or looked != self._looked):
            writer = self._adapted.bucket_writer()
            parts = writer.source.parts
            changed = {n for n, e in writer.entries.items() if any(parts[s].delta is not None for s in e.sources)}
            others = {n for n, e in bare.entries.items() if self._whole.isdisjoint(e.sources)} - changed
            self._samples = samples_of(self._bare, {*sampled_names(changed), *sampled_names(others)})
            self._looked = looked
            self._adapted.release()
        return self._samples

    def _tensors(self, bare: BucketWriter) -> Sequence[Tensor]:
        """Return what this rank holds of the base."""
        if not self._whole:
            return bare.source.tensors
        shards = [part.shard for name, part in bare.source.parts.items() if name not in self._whole]
        return [tensor for shard in shards for piece in shard.pieces for tensor in memory(piece.tensor)]


def _looks(tensors: Sequence[Tensor]) -> tuple[list[int], bytes]:
    """Return version counters and some elements of tensors, by which changes are seen. Not by this package's kernels: a
    process that was forked off has none of their threads."""
    versions = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
    some = [spread(tensor.detach()).flatten().contiguous().view(torch.uint8) for tensor in tensors if tensor.numel()]
    devices = dict.fromkeys(piece.device for piece in some)
    joined = [torch.cat([piece for piece in some if piece.device == device]).cpu() for device in devices]
    return versions, b"".join(piece.numpy().tobytes() for piece in joined)


def other_than(base: Base, another: Base) -> str:
    """Return the name of a tensor by which two bases differ; "" where all that was sampled of both is the same."""
    common = base.samples.keys() & another.samples.keys()
    if not common:
        return min(another.samples, default="all that was sampled")
    return min((name for name in common if base.samples[name] != another.samples[name]), default="")
