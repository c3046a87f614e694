"""What base weights were merged from: tells whether they hold what the adapters are now."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..models.live import Live
from ..models.steps import stepped, steps
from ..shards import here
from .layers import Acting
from .values import Values

_VERSION = attrgetter("_version")


class MergedFrom(NamedTuple):
    """What the base weights were merged from.

    Args:
        facts: of the model's snapshot inside, and which parameters it lists: others may have taken their memory.
        adapters: parameters of the adapters that act.
        versions: of these.
        steps: how often optimizers had stepped.
        values: of adapters in larger buffers.
        weights: base parameters that hold them; their version counters outside and inside.
        seed: that their rounding was drawn with.
        number: the same for the same bits in the weights.
    """

    facts: tuple[list[Any], list[int]]
    adapters: list[Tensor]
    versions: list[int]
    steps: int
    values: Values
    weights: tuple[Tensor, ...]
    outside: tuple[int, ...]
    inside: tuple[int, ...]
    seed: int | None
    number: int

    @property
    def stepped(self) -> bool:
        """Whether an optimizer that holds the adapters has stepped since."""
        return self.have_stepped(self.adapters)

    def have_stepped(self, adapters: Sequence[Tensor]) -> bool:
        """Return True if an optimizer that holds some of these has stepped since."""
        return self.steps != steps() and stepped(self.steps, adapters)

    @property
    def written(self) -> bool:
        """Whether somebody has written to the adapters since."""
        changed = self.stepped or list(map(_VERSION, self.adapters)) != self.versions
        return changed or not self.values.same()

    @property
    def may_be_written(self) -> bool:
        """Whether somebody may have: an optimizer may hold other parameters, and write adapters by them."""
        changed = self.steps != steps() or list(map(_VERSION, self.adapters)) != self.versions
        return changed or not self.values.same()

    def same_bits(self, other: MergedFrom) -> bool:
        """Return True if the weights hold the same bits inside both times; asked where nobody has `written` since."""
        return (
            all(getattr(self, of) == getattr(other, of) for of in ("versions", "outside", "seed", "facts"))
            and self.places == other.places
            and self.values.equal(other.values)
        )

    @property
    def places(self) -> list[int]:
        """Where adapters and weights lie."""
        return [here(t).data_ptr() for t in (*self.adapters, *self.weights)]


def facts_of(found: Live) -> tuple[list[Any], list[int]]:
    """Return what tells whether a model is what it was, but for values."""
    snapshot = found.snapshot()
    return snapshot.facts, list(map(id, snapshot.parameters))


def merged_from(layers: dict[nn.Module, Acting], number: int, known: MergedFrom | None = None) -> MergedFrom:
    """Return what these layers are merged from now, before they are.

    Args:
        known: what they were merged from before, if they are the same.
    """
    if known is None:
        adapters = list({id(p): p for found in layers.values() for p in found.parameters}.values())
        bases = (w for found in layers.values() if found.adapters for w in found.weights if not w.is_inference())
        weights = tuple({id(w): w for w in bases}.values())
    else:
        adapters, weights = known.adapters, known.weights
    versions, outside = list(map(_VERSION, adapters)), tuple(map(_VERSION, weights))
    values = Values(map(here, adapters))
    return MergedFrom(([], []), adapters, versions, steps(), values, weights, outside, (), None, number)


def state_of(layers: dict[nn.Module, Acting]) -> tuple[Any, ...]:
    """Return what tells one state of the adapters from another."""
    facts: list[Any] = [(id(layer), found.adapters, found.scalings) for layer, found in layers.items()]
    return *facts, *((id(p), p._version) for found in layers.values() for p in found.parameters)
