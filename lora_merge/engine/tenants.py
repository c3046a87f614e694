"""Several adapters of one model that an engine serves at once: one is merged into its weights, the others lie beside it
in the engine's LoRA slots, relative to it (payload/tenants.py)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from ..errors import AlreadyMerged, InvalidInput, PushRefused, UnsupportedAdapter
from ..models.pausing import training_of
from ..stream.weights import MergedWeights

PATHS = "/lora_merge/tenants/"
"""Begins the paths of tenants in requests, which name no files."""
_FIRST_ID, _IDS = 1 << 30, 1 << 29
"""Ids of tenants in engines: a range in which nobody counts, below the id of adapter mode."""


def tenant_id(name: str) -> int:
    """Return the id of a tenant in every engine: a function of its name alone, so that its requests stay its own
    whichever tenant is merged."""
    return _FIRST_ID + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % _IDS


class StaleRequests(NamedTuple):
    """Requests that could not go on with what a push brings.

    Args:
        merged: whether those that name no adapter are: they were made for another merged tenant.
        ids: of the adapters of others, whose tenants are served no longer.
    """

    merged: bool
    ids: list[int]


def stale_requests(before: Sequence[str], after: Sequence[str]) -> StaleRequests | None:
    """Return which requests go stale where an engine's tenants change; None for none.

    Args:
        before, after: as `State.tenants`.
    """
    merged = bool(before and after) and before[0] != after[0]
    ids = [tenant_id(name) for name in before if name not in after]
    return StaleRequests(merged, ids) if merged or ids else None


class Tenants:
    """The tenants of one trainer: which there are, and which one its engines have merged.

    Args:
        names: PEFT's, each once; the first one is merged at first.
        model: has these adapters.

    Raises:
        InvalidInput: no such list; or a model that is trained on merged weights.
    """

    def __init__(self, names: Any, model: nn.Module | Sequence[nn.Module]) -> None:
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
            raise InvalidInput(f"tenants must be a list of names of adapters, got {names!r}")
        if not names or len(set(names)) < len(names):
            raise InvalidInput(f"tenants must be at least one name, each once, got {list(names)}")
        ids: dict[int, str] = {}
        for name in names:
            other = ids.setdefault(tenant_id(name), name)
            if other != name:
                raise InvalidInput(f"tenants {other!r} and {name!r} would have one id in engines: rename one of them")
        self._model = model
        self.check_model()
        self.names = tuple(names)
        self.merged = self.names[0]
        self._settled = self._pushed = False

    @property
    def order(self) -> tuple[str, ...]:
        """All names, that of the merged one first."""
        return self.merged, *(name for name in self.names if name != self.merged)

    def check_model(self) -> None:
        """Raise `InvalidInput` if the model is trained on merged weights (now)."""
        if training_of(self._model) is not None:
            raise InvalidInput(
                "train_merged(model) trains on the weights of the adapters that act, and tenants want each adapter by "
                "itself: leave tenants out, or close() the training"
            )

    def check(self, name: Any, argument: str) -> None:
        """Raise `InvalidInput` if an argument names no tenant."""
        if name not in self.names:
            raise InvalidInput(f"{argument}={name!r} is no tenant; there are {', '.join(self.names)}")

    def bare(self, name: str) -> bool:
        """Return True if requests of a tenant need no adapter now, as all engines have merged this one. Requests that
        name its id are right at any time.

        Raises:
            PushRefused: nothing was pushed yet.
        """
        if not self._pushed:
            raise PushRefused("no engine has these tenants yet: push() first")
        return self._settled and name == self.merged

    @contextmanager
    def pushing(self, hottest: str | None, weights: MergedWeights) -> Iterator[None]:
        """Merge a tenant in the pushes of a block.

        Until a push that merges another one is through, requests of all tenants name their ids: those that name none
        would be answered by either.

        Args:
            hottest: its name; None for the one before.
            weights: the stream of what is merged.
        """
        before, settled = self.merged, self._settled
        self.merged = before if hottest is None else hottest
        self._settled = settled and self.merged == before
        weights.adapter_names = (self.merged,)
        try:
            yield
        except (PushRefused, InvalidInput, UnsupportedAdapter, AlreadyMerged):  # every engine is as before
            self._settled = settled
            raise
        except BaseException:
            # Where some engines have taken it, the next push brings it to the others.
            before = self.merged
            raise
        else:
            before, self._settled, self._pushed = self.merged, True, True
        finally:
            self.merged = before
            weights.adapter_names = (before,)
