"""What an engine holds, and every event that changes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

OWN = "the engine's own checkpoint"
"""Stands for the fingerprint of the weights that the engine loaded when it started."""


@dataclass(frozen=True, slots=True)
class State:
    """What the weights of one engine are.

    Args:
        kind: "nothing" (what the engine started with), "base", "adapter" (base + adapter@version), "merged"
            (merged@version) or "dirty".
        version: number of the push that brought it, counted by the engine; 0 before the first.
        base: fingerprint of the base weights, for "base" and "adapter"; `OWN` for those that the engine started with.
        reason: why it is dirty.
        trainer: name of the trainer (`VllmSync`, `SglangSync`) that pushed it: engines count versions for all of them.
        adapter: name of the one that was loaded from a folder, for "merged".
        tenants: for "merged", names of adapters that are all served: the first one is merged, the others lie beside it,
            relative to it (payload/tenants.py); empty where there is the merged policy alone.
    """

    kind: str = "nothing"
    version: int = 0
    base: str = ""
    reason: str = ""
    trainer: str = ""
    adapter: str = ""
    tenants: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "tenants", tuple(self.tenants))  # JSON has lists

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}  # `asdict` takes ten times as long

    def __str__(self) -> str:
        adapter = f" (adapter {self.adapter})" if self.adapter else ""
        beside = f" (merged: {self.tenants[0]}; beside it: {', '.join(self.tenants[1:])})" if self.tenants else ""
        return f"dirty ({self.reason})" if self.kind == "dirty" else f"{self.kind}@{self.version}{adapter}{beside}"


WEIGHTS = frozenset({"base", "adapter", "merged"})
"""Kinds of engines that hold what a push brought."""
_ANY = WEIGHTS | {"nothing", "dirty"}
_CHANGES: dict[str, tuple[frozenset[str], str]] = {
    # event: from which kinds, to which one ("brought": to what the push brings)
    "begin": (_ANY, "dirty"),  # the next byte of a push may change the weights, or the adapter
    "end": (frozenset({"dirty"}), "brought"),  # all of it is there
    "break": (_ANY, "dirty"),  # a push failed after it began
    "overwrite": (WEIGHTS, "dirty"),  # something else wrote to the weights: a sleep, a reload
    "switch": (frozenset({"base", "adapter"}), "brought"),  # a version of an adapter is the newest from now on
    "evict": (frozenset({"adapter"}), "base"),  # the engine dropped the adapter
    "return": (_ANY, "nothing"),  # who shared its weights has brought back those that it started with
}


def change(held: State, event: str, *, reason: str = "", brought: State | None = None) -> State:
    """Return what an engine holds after an event.

    Args:
        event: "begin", "end", "break", "overwrite", "switch", "evict" or "return".
        reason: why it is dirty from now on.
        brought: by the push that ends, or the version that is switched to.

    Raises:
        RuntimeError: this cannot happen to an engine that holds `held`.
    """
    kinds, to = _CHANGES[event]
    if held.kind not in kinds:
        raise RuntimeError(f"{event!r} cannot happen to an engine that holds {held}")
    if to == "dirty":
        return State("dirty", held.version, reason=reason)
    if to == "nothing":
        return State(version=held.version)
    if to == "base":
        return replace(held, kind="base")
    assert brought is not None
    return brought
