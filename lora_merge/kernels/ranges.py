"""Whether merged values fit their dtype: float16 ends at 65504, where float32 sums do not.

An element that is finite in the base is finite in the result, or the merge is refused. bfloat16 and float32 reach as
far as the sums do, so nothing is looked at there. Results of 8 bits share scales that are made of their largest
element: an infinite one shows there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidInput
from .scaled.weights import Scaled
from .segments import FP8

if TYPE_CHECKING:
    from .plan import Plan

NARROW = torch.float16
"""dtype of which finite weights and adapters can give infinite results."""


class Made(NamedTuple):
    """Some elements of a tensor, before and after.

    Args:
        name: of the tensor.
        base: the elements before, on any device.
        result: the same elements, merged.
        rows: they are scaled by the norms of rows (DoRA), so that a NaN of the base is in all of its row.
    """

    name: str
    base: Tensor
    result: Tensor
    rows: bool = False


def narrows(source: torch.dtype, destination: torch.dtype, adapted: bool) -> bool:
    """Return whether such a result can be infinite where what it is made of is not."""
    return destination == NARROW and (adapted or source != destination)


def check_range(
    results: Iterable[tuple[str, Tensor]],
    made: Callable[[], Iterable[Made]],
    scaled: Mapping[str, Sequence[Scaled]] = MappingProxyType({}),
) -> None:
    """Raise `InvalidInput`, naming the first, where an element of float16 is not finite and the base's is.

    It takes one pass over the results of float16, and waits for the device once; it does nothing where there are none.

    Args:
        results: names and merged values, views of any strides.
        made: the same with what they are made of; asked for only where a result is not finite.
        scaled: by name, the weights of 8 bits of which results of 8 bits are rectangles.
    """
    looked_at: list[Tensor] = []
    for name, result in results:
        if result.dtype == FP8:
            looked_at += [some.scales for some in scaled.get(name, ()) if some.dtype == NARROW]
        elif result.dtype == NARROW and result.numel():
            looked_at.append(result.detach())
    if not looked_at or finite(looked_at):
        return
    sharing: dict[int, tuple[Scaled, list[Made]]] = {}
    for some in made():
        if some.result.dtype == NARROW:
            _Beyond.of(some.result).refuse(some.name, some.base, some.rows)
        for of_it in scaled.get(some.name, ()):
            if of_it.dtype == NARROW:
                sharing.setdefault(id(of_it), (of_it, []))[1].append(some)
    for of_it, all_of_it in sharing.values():
        if all(bool(torch.isfinite(some.base).all()) for some in all_of_it):
            _Beyond.of(of_it.scales).refuse(all_of_it[0].name)


def run_in_range(plan: Plan, run: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Run a plan that holds its segments, none of them in place; raise as `check_range` does.

    Args:
        run: arguments of `Plan.run`.
    """
    if plan.run(**run):
        return
    adapted = ((s, s.rank > 0 or s.row_scale is not None) for s in plan.segments)
    narrow = [s for s, changed in adapted if narrows(s.source.dtype, s.destination.dtype, changed)]
    made = (Made(s.name, s.source, s.destination, s.row_scale is not None) for s in narrow)
    check_range([(s.name, s.destination) for s in narrow], lambda: made)


def check_in_place(
    results: Iterable[tuple[str, Tensor, bool]], back: Callable[[], object], again: Callable[[], object]
) -> None:
    """Do `check_range` on weights that were merged in place: the base comes back to tell what was not finite before.
    What raises leaves the base there.

    Args:
        results: names and merged weights, live, views of any strides; and `rows` as of `Made`.
        back: brings the base back.
        again: merges as before; called where nothing is refused.
    """
    narrow = [Made(name, w.detach(), w.detach(), rows) for name, w, rows in results if w.dtype == NARROW and w.numel()]
    if finite([some.result for some in narrow]):
        return
    beyond = [(some, _Beyond.of(some.result)) for some in narrow if not finite([some.result])]
    back()
    for some, where in beyond:
        where.refuse(some.name, some.base, some.rows)
    again()


class _Beyond(NamedTuple):
    """Which elements of a result are infinite, and which are NaN."""

    infinite: Tensor
    nan: Tensor

    @classmethod
    def of(cls, result: Tensor) -> _Beyond:
        return cls(result.isinf(), result.isnan())

    def refuse(self, name: str, base: Tensor | None = None, rows: bool = False) -> None:
        """Raise `InvalidInput` where the base of some of them is finite; None stands for one that is.

        Args:
            rows: as of `Made`. Which row a NaN comes from is not looked for: others may hold parts of it.
        """
        held = None if base is None else torch.isfinite(base).to(self.nan.device)
        infinite, nan = (bool((some if held is None else some & held).any()) for some in self)
        if rows and held is not None and not bool(held.all()):
            nan = False
        if infinite:
            raise InvalidInput(
                f"{name}: expected merged values up to 65504, the largest number of float16, got larger ones: write "
                "bfloat16 or float32 instead (dtype=, --dtype bf16; an engine's own dtype), or lower the scaling"
            )
        if nan:
            raise InvalidInput(
                f"{name}: expected merged values that are numbers, got NaN where the base holds numbers: the adapter "
                "of this weight holds NaN or infinities, or products beyond float32; look at its factors (and at "
                "DoRA's magnitudes)"
            )


def finite(tensors: Sequence[Tensor]) -> bool:
    """Return whether all elements are finite; a NaN is not. Waits for the device once."""
    if not tensors:
        return True
    if tensors[0].device.type == "cpu":
        return all(_finite_on_cpu(t) for t in tensors)
    largest = torch._foreach_norm(list(tensors), float("inf"))  # a few launches for all of them
    return bool(torch.isfinite(torch.stack([norm.float() for norm in largest])).all())


def _finite_on_cpu(t: Tensor) -> bool:
    if not t.is_contiguous() or t.dtype != NARROW:
        return bool(torch.isfinite(torch.stack(torch.aminmax(t))).all())
    # Bits of infinity and NaN are the largest there are of either sign. NumPy finds a largest one at the speed of the
    # memory, and a part that stays in the cache is there for the second look.
    bits = t.detach().view(torch.int16).view(-1).numpy()
    parts = (bits[begin : begin + _PART] for begin in range(0, bits.size, _PART))
    return all(part.max() < _INFINITE and part.view(np.uint16).max() < _INFINITE + _SIGN for part in parts)


_PART, _INFINITE, _SIGN = 1 << 17, 0x7C00, 0x8000
