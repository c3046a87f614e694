"""Four backends that run a table of segments (cuda, triton, cpu, reference), and which of them to pick.

| name | where | what it is |
|---|---|---|
| cuda | GPU tensors | compiled kernels, `csrc/cuda` |
| triton | GPU tensors; CPU tensors under `TRITON_INTERPRET=1` | the portable second implementation |
| cpu | CPU tensors | compiled kernels, `csrc/cpu` |
| reference | any tensors | float64 in PyTorch: the truth in tests, the last resort elsewhere |

`pick(device)` takes the first that can run; `LORA_MERGE_BACKEND` forces one.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..errors import BackendUnavailable
from .segments import Segment

if TYPE_CHECKING:
    from .scaled.weights import Placed

ENVIRONMENT = "LORA_MERGE_BACKEND"
_MODULES = {"cuda": "cuda.backend", "triton": "triton.backend", "cpu": "cpu", "reference": "reference"}
NAMES = tuple(_MODULES)
_PREFERENCE = {"cuda": ("cuda", "triton", "reference"), "cpu": ("cpu", "reference")}


class Launch(Protocol):
    """A table made ready to run on a device."""

    def __call__(self, stochastic: bool, seed: int) -> bool | None:
        """Run all segments; `seed` is the word of `segments.seed_key`. GPU work goes to the current stream.

        Returns:
            whether all results of float16 that were computed are finite; None where that is not known without a look.
        """

    def row_norms(self, out: Tensor) -> None:
        """Write to `out`, float64 `[sum of rows]`, the squared norm of every row, segment after segment.

        That is `sum_j (source[i, j] + scaling * (B A)[i, j])^2`, accumulated in float64 in one fixed order.
        Nothing else is written; `row_scale` plays no part.
        """


Moves = Sequence[tuple[range, int]]
"""Addresses where memory was, and how many bytes further on it is now."""


class Tracked(Protocol):
    """Segments that are merged in place and restored bit for bit; `TrackedPlan` is the public class.

    Attributes:
        merged: whether they are merged, in part at least.
        nbytes: held for the way back.
        keep: whether the memory for it is kept from one merge to the next, where a backend can.
    """

    keep: bool

    @property
    def merged(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    def merge(self, meanwhile: Callable[[], object]) -> None:
        """Merge all, or raise with the weights as before.

        Args:
            meanwhile: called once the device has its work, before it is waited for.
        """

    def remerge(self, before: Tracked, meanwhile: Callable[[], object]) -> set[str]:
        """Do `before.unmerge()` and then `merge()`, in one pass where the backend can.

        Where units are found changed, or something raises, both are unmerged after it.

        Args:
            before: is merged, and this is not.
            meanwhile: as for `merge`; not called where units are found changed before it is due.

        Returns:
            the names of weights that were written meanwhile, as `unmerge` does; where there are any, nothing is merged.
        """

    def unmerge(self, meanwhile: Callable[[], object]) -> set[str]:
        """Restore everything; after an error, calling again continues.

        Args:
            meanwhile: as for `merge`.

        Returns:
            the names of weights that were written meanwhile; those units of work are left as they are.
        """

    def moved(self, moves: Moves) -> bool:
        """Tell that weights lie elsewhere now, with all their bits. Returns whether `unmerge` finds them there; if not,
        it must not be called."""


def idle() -> None:
    """Do nothing: the default for work done while the device is busy."""


def in_two_passes(tracked: Tracked, before: Tracked, meanwhile: Callable[[], object]) -> set[str]:
    """Do `Tracked.remerge` as `before.unmerge()` followed by `merge()`."""
    changed = before.unmerge(idle)
    if not changed:
        tracked.merge(meanwhile)
    return changed


class Backend(Protocol):
    """The functions that a backend module has."""

    def unavailable(self, device: torch.device) -> str | None:
        """Return why this backend cannot run on tensors of `device`; None if it can."""

    def prepare(self, segments: Sequence[Segment], device: torch.device) -> Launch:
        """Lay out the work of checked, non-empty segments; the caller keeps their tensors alive."""

    def prepare_scaled(self, placed: Sequence[Placed], device: torch.device) -> Launch:
        """Lay out segments whose results have 8 bits: whole groups of elements that share a scale."""

    def prepare_tracked(self, segments: Sequence[Segment], device: torch.device) -> Tracked:
        """Lay out a tracked merge: every segment in place, with an adapter or a row scale."""


def pick(device: torch.device) -> Backend:
    """Return the backend for tensors of `device`.

    Raises:
        BackendUnavailable: `LORA_MERGE_BACKEND` names none of `NAMES`, or one that cannot run there.
    """
    forced = os.environ.get(ENVIRONMENT)
    if forced:
        if forced not in NAMES:
            raise BackendUnavailable(f"{ENVIRONMENT}={forced}: expected one of {', '.join(NAMES)}")
        reason = _backend(forced).unavailable(device)
        if reason:
            raise BackendUnavailable(f"{ENVIRONMENT}={forced} cannot run on {device}: {reason}")
        return _backend(forced)
    return _default(device.type)


def name_of(backend: Backend) -> str:
    """Return the name by which `LORA_MERGE_BACKEND` asks for a backend."""
    return next(name for name in NAMES if _backend(name) is backend)


def next_after(name: str, device: torch.device, reason: str) -> Backend:
    """Return the backend for segments that this one has no room for, after one warning for each reason.

    Raises:
        BackendUnavailable: `LORA_MERGE_BACKEND` asks for this one, or there is none.
    """
    if os.environ.get(ENVIRONMENT):
        raise BackendUnavailable(f"{ENVIRONMENT}={name} cannot run here: {reason}; leave it unset, or take triton")
    others = _PREFERENCE[device.type]
    return _first(device.type, others[others.index(name) + 1 :], (f"{name}: {reason}",))


@cache
def _default(device_type: str) -> Backend:
    return _first(device_type, _PREFERENCE.get(device_type, ("reference",)), ())


@cache
def _first(device_type: str, names: tuple[str, ...], passed: tuple[str, ...]) -> Backend:
    """Return the first that can run; warn why others were passed over."""
    reasons = list(passed)
    for name in names:
        reason = _backend(name).unavailable(torch.device(device_type))
        if reason is None:
            if reasons:
                warnings.warn(
                    f"lora_merge runs on the slower {name} backend for {device_type} tensors: " + "; ".join(reasons),
                    RuntimeWarning,
                    stacklevel=3,
                )
            return _backend(name)
        reasons.append(f"{name}: {reason}")
    raise BackendUnavailable(f"no backend runs on {device_type} tensors: " + "; ".join(reasons))


@cache
def _backend(name: str) -> Backend:
    return import_module(f"{__package__}.{_MODULES[name]}")
