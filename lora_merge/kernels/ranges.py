"""Whether merged values fit their dtype: float16 ends at 65504, where float32 sums do not.

bfloat16 and float32 reach as far as the sums do, so nothing is looked at there. Results of 8 bits share scales that are
made of their largest element: an infinite one shows there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ..errors import InvalidInput
from .packed import Packed
from .scaled import Scaled
from .segments import FP8, Segment

NARROW = torch.float16
"""dtype of which finite weights and adapters can give infinite results."""


def narrows(source: torch.dtype, destination: torch.dtype, adapted: bool) -> bool:
    """Return whether such a result can be infinite where what it is made of is not."""
    return destination == NARROW and (adapted or source != destination)


def check_range(
    results: Iterable[tuple[str, Tensor]],
    sources: Callable[[str], Iterable[Tensor]] = lambda name: (),
    scaled: Mapping[str, Sequence[Scaled]] = MappingProxyType({}),
) -> None:
    """Raise `InvalidInput`, naming the first, where a result of float16 is infinite and what it is made of is not.

    It takes one pass over the results of float16, and waits for the device once; it does nothing where there are none.

    Args:
        results: names and merged values, views of any strides.
        sources: of a name, the weights before; asked for only where a result is not finite.
        scaled: by name, the weights of 8 bits of which results of 8 bits are rectangles.
    """
    looked_at: list[tuple[str, Tensor]] = []
    for name, made in results:
        if made.dtype == FP8:
            looked_at += [(name, some.scales) for some in scaled.get(name, ()) if some.dtype == NARROW]
        elif made.dtype == NARROW and made.numel():
            looked_at.append((name, made.detach()))
    if not looked_at or _finite([made for _, made in looked_at]):
        return
    for name, made in looked_at:
        if bool(made.isinf().any()) and not any(_infinite(source) for source in sources(name)):
            raise InvalidInput(
                f"{name}: expected merged values up to 65504, the largest number of float16, got larger ones: write "
                "bfloat16 or float32 instead (dtype=, --dtype bf16; an engine's own dtype), or lower the scaling"
            )


def made_of(*sources: Tensor) -> Callable[[str], Iterable[Tensor]]:
    """Return what `check_range` takes as sources, where they are at hand."""
    return lambda name: sources


def check_segments_range(segments: Sequence[Segment]) -> None:
    """As `check_range`, of segments that have just been run."""
    narrow = [s for s in segments if narrows(s.source.dtype, s.destination.dtype, s.rank > 0)]
    sources: dict[str, list[Tensor]] = {}
    for s in narrow:
        if s.source is not s.destination:  # in place nothing is left of it
            sources.setdefault(s.name, []).append(s.source)
    check_range([(s.name, s.destination) for s in narrow], lambda name: sources.get(name, ()))


def _finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all elements are finite; a NaN is not."""
    if tensors[0].device.type == "cpu":
        return all(_finite_on_cpu(t) for t in tensors)
    largest = torch._foreach_norm(list(tensors), float("inf"))  # a few launches for all of them
    return bool(torch.isfinite(torch.stack([norm.float() for norm in largest])).all())


def _finite_on_cpu(t: Tensor) -> bool:
    if not t.is_contiguous() or t.dtype != NARROW:
        return bool(torch.isfinite(torch.stack(torch.aminmax(t))).all())
    # Without the sign, bits of infinity and NaN are the largest. A part that stays in the cache is faster than any
    # reduction that PyTorch has for float16.
    part = torch.empty(min(_PART, t.numel()), dtype=torch.int16)
    return all(
        int(torch.bitwise_and(bits, 0x7FFF, out=part[: bits.numel()]).amax()) < _INFINITE
        for bits in t.view(torch.int16).view(-1).split(_PART)
    )


_PART, _INFINITE = 1 << 18, 0x7C00


def _infinite(source: Tensor) -> bool:
    return not isinstance(source, Packed) and source.is_floating_point() and bool(source.isinf().any())
