"""Tenants: adapters that an engine serves beside the one that is merged into its weights.

The engine holds W + s_h B_h A_h of the merged adapter h. A request of another tenant t wants W + s_t B_t A_t, so its
LoRA slot has what is between the two, as one adapter of ranks side by side:

    s_t B_t A_t - s_h B_h A_h = [s_t B_t, -s_h B_h] [A_t; A_h]

The trainer sends each adapter's own factors once (`AdapterSource`: scalings are in lora_B, all in the engine's LoRA
dtype); workers put them side by side. Negating and stacking round nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ...stream.buckets import Slot, Table, extent, from_json, to_json
from ..transport.routing import Route
from .adapter import AdapterSource
from .base import BucketPayload, Terms, WireSpecs, WorkerOp

_A = ("lora_A.weight", "lora_embedding_A")


class TenantsSource(BucketPayload):
    """Several adapters, a bucket each.

    Args:
        names: of the tenants; the first one is merged.
        sources: of each.
    """

    full = False

    def __init__(self, names: Sequence[str], sources: Sequence[AdapterSource]) -> None:
        super().__init__(sources[0].device, sources[0].collective)
        self.names, self._sources = tuple(names), tuple(sources)
        self.table: Table = tables([source.table for source in sources])
        self.capacity = max(map(extent, self.table))
        # Tenants of one kind share a layout, which is said once.
        layouts = list(dict.fromkeys(source.table for source in sources))
        self._layouts = [to_json(layout) for layout in layouts]
        self._which = [layouts.index(source.table) for source in sources]

    def made_of(self, names: Sequence[str], sources: Sequence[AdapterSource]) -> bool:
        """Return True if it was made of these."""
        same = len(self._sources) == len(sources) and all(map(is_, self._sources, sources))
        return self.names == tuple(names) and same

    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any]) -> None:
        """Write the adapter of one tenant as it is now."""
        self._sources[index].fill(0, buffer, run)

    def transfer_op(self, terms: Terms, route: Route, comes: WireSpecs | None) -> WorkerOp | None:
        message = {"layouts": self._layouts, "which": self._which, "state": terms.state.to_json()}
        return WorkerOp("receive_tenants", message)


def tables(own: Sequence[Table]) -> Table:
    """Join the tables of several adapters, which are one bucket each, into one; names then say whose adapter it is."""
    return tuple(
        tuple(replace(slot, name=f"{index}:{slot.name}") for slot in slots) for index, [slots] in enumerate(own)
    )


def tables_of(layouts: Sequence[Any], which: Sequence[int]) -> Table:
    """Return the table of what `TenantsSource.transfer_op` says of it."""
    read = [from_json(layout) for layout in layouts]
    return tables([read[index] for index in which])


def own_name(slot: Slot) -> str:
    """Return the name of a factor within its adapter."""
    return slot.name.partition(":")[2]


def module_of(name: str) -> str:
    """Return the module that a factor belongs to."""
    return name.rpartition(".lora_")[0]


def rank_of(adapter: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the rank of each module of an adapter.

    Args:
        adapter: shapes of its factors, by name.
    """
    return {module_of(name): shape[0] for name, shape in adapter.items() if name.endswith(_A)}


def side_by_side(own: Mapping[str, int], merged: Mapping[str, int]) -> int:
    """Return the largest rank of a module where an adapter lies beside the merged one.

    Args:
        own, merged: see `rank_of`.
    """
    return max((own.get(module, 0) + merged.get(module, 0) for module in {**own, **merged}), default=0)


def nothing(merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the merged adapter relative to itself, as zeros of rank 1: vLLM takes no adapter without modules."""
    return {name: torch.zeros_like(one[:1] if name.endswith(_A) else one[:, :1]) for name, one in merged.items()}


def relative(own: Mapping[str, Tensor], merged: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter relative to another one, which is merged: lora_A `[r_t + r_h, in]` and lora_B
    `[out, r_t + r_h]` of each module that one of them adapts.

    Args:
        own, merged: lora_A `[r, in]` and lora_B `[out, r]` of both by name, scalings in lora_B.
    """
    made = {}
    for name in {**own, **merged}:
        is_a = name.endswith(_A)
        parts = [own[name]] if name in own else []
        if name in merged:
            parts.append(merged[name] if is_a else -merged[name])
        made[name] = torch.cat(parts, dim=0 if is_a else 1)
    return made
