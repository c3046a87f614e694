"""What a stream is made from, as one reading of a live model found it, and which tensors it is made into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..models.conversion import Conversion
from ..models.part import Part
from ..shards.ranks import Ranks
from .buckets import Meta
from .window import Window


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One tensor of the stream.

    Args:
        meta: what goes out.
        sources: names of the parts that it is made of; one, except where a conversion joins several.
        window: what it is of its part; None where it has to be computed from whole parts.
        tied: name of the tensor of the stream that has the same values, and that checkpoints hold; "" if none has.
    """

    meta: Meta
    sources: tuple[str, ...]
    window: Window | None
    tied: str = ""


class LazyParts(Mapping[str, Part]):
    """Parts that are read when somebody asks for the first of them: a pass over plans that stand asks for none."""

    def __init__(self, read: Callable[[], Mapping[str, Part]]) -> None:
        self._read: Callable[[], Mapping[str, Part]] | None = read
        self._parts: Mapping[str, Part] = {}

    def _all(self) -> Mapping[str, Part]:
        if self._read is not None:
            self._parts, self._read = self._read(), None
        return self._parts

    def __getitem__(self, name: str) -> Part:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """What a stream is made from, read off a live model.

    Args:
        parts: by name, in the same order on every rank.
        tensors: all that reading them depended on, live.
        counted: tensors whose version counters tell of writes to these: an in-place operation on a DTensor counts its
            own, not that of the part which is here.
        modules: of the model, the model itself first, live.
        held: the memory that they lie in, so that the addresses in plans stay what they are for a pass.
        ranks: that hold them together.
        merging: the ranks among them whose adapters' halves make up whole ones (Megatron's tensor-parallel group).
        device: on which buckets are filled.
        conversion: computes what no window expresses.
    """

    parts: Mapping[str, Part]
    tensors: Sequence[Tensor]
    counted: Sequence[Tensor]
    modules: Sequence[nn.Module]
    held: Sequence[torch.UntypedStorage]
    ranks: Ranks
    merging: Ranks
    device: torch.device
    conversion: Conversion
