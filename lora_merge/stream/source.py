"""What a stream is made from, as one reading of a live model found it, and which tensors it is made into."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

import torch
from torch import Tensor, nn

from ..kernels.ranges import Made
from ..models.conversion import Conversion
from ..models.delta import Delta
from ..models.part import Part
from ..shards import Box, cut
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
        made: its name in the model's own checkpoints.
    """

    meta: Meta
    sources: tuple[str, ...]
    window: Window | None
    tied: str = ""
    made: str = ""


class LazyParts(Mapping[str, Part]):
    """Parts that are read when somebody asks for the first of them: a pass over plans that stand asks for none."""

    def __init__(self, read: Callable[[], Mapping[str, Part]]) -> None:
        self._all = cache(read)

    def __getitem__(self, name: str) -> Part:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


@dataclass(frozen=True, eq=False)
class Source:
    """What a stream is made from, read off a live model for one pass, which holds it.

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
        reader: as of `Live`.
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
    reader: object | None = None

    @cached_property
    def storages(self) -> Mapping[int, torch.UntypedStorage]:
        """The memory of the model by address."""
        return {storage.data_ptr(): storage for storage in self.held}

    def views(self, entry: Entry, box: Box) -> list[tuple[tuple[int, ...], Box, Tensor]]:
        """Return the live parameter's views that make up a box of a tensor of the stream; see `Shard.views`."""
        assert entry.window is not None
        views = self.parts[entry.sources[0]].shard.views(entry.window.outer(box))
        assert sum(view.numel() for _, _, view in views) == prod(box[1]), entry.meta.name
        return views

    def rectangles(
        self, entries: Mapping[str, Entry], targets: Iterable[tuple[str, Box, Tensor, int]]
    ) -> Iterator[tuple[str, Delta | None, tuple[int, ...], Tensor, Tensor, int]]:
        """Yield what is merged from where to where: name, delta, start in the whole parameter, base, result, bucket.

        Args:
            entries: of the stream, by name.
            targets: boxes of its tensors, where they go, and the bucket that each is in.
        """
        for name, box, target, turn in targets:
            entry = entries[name]
            assert entry.window is not None
            delta, unfolded = self.parts[entry.sources[0]].delta, entry.window.unfold(target)
            for start, inner, view in self.views(entry, box):
                yield name, delta, start, view, cut(unfolded, inner), turn

    def made(self, entries: Mapping[str, Entry], targets: Iterable[tuple[str, Box, Tensor, int]]) -> Iterator[Made]:
        """Yield what was merged of what; arguments as of `rectangles`."""
        for name, delta, _, view, result, _ in self.rectangles(entries, targets):
            yield Made(name, view, result, delta is not None and delta.magnitude is not None)
