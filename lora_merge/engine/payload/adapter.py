"""Adapter mode: the engine holds the base as it is, and only the adapter is sent.

The trainer sends lora_A and lora_B of every adapted module in the rollout engine's LoRA dtype, the live scaling folded
into lora_B; the worker makes the engine's own kind of adapter of them, without a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedAdapter
from ...models.delta import Delta
from ...models.live import Live, live
from ...models.operands import Operands, Turn
from ...names import lineage
from ...shards.quantised import is_matrix
from ...stream.bucket_writer import BucketWriter
from ...stream.buckets import ALIGNMENT, Meta, Table, extent, lay_out, to_json
from ...stream.source import Entry
from ...stream.weights import MergedWeights
from ..transport.routing import Route
from .base import BucketPayload, Terms, WireSpecs, WorkerOp

ADAPTER_NAME = "lora_merge"
"""The one name of the adapter, in loading and in every request."""
_LINEAR = ("lora_A.weight", "lora_B.weight")
_EMBEDDING = ("lora_embedding_A", "lora_embedding_B")
_EXPERT = re.compile(r"((.+\.experts)\.\d+(\.\w+))\.weight")
_INSTEAD = '; push with mode="merged" instead'


class AdapterSource(BucketPayload):
    """The active adapters of a model as one bucket.

    Args:
        writer: its entries say which checkpoint tensor each delta belongs to.
        dtype: of the engine's LoRA weights.

    Raises:
        UnsupportedAdapter: something of the adapter that no engine serves beside its base; says what.
    """

    full = False

    def __init__(self, weights: MergedWeights, writer: BucketWriter, dtype: torch.dtype) -> None:
        _check_model(live(weights.model))
        super().__init__(writer.device, not writer.source.ranks.alone)
        parts = writer.source.parts
        adapted = {
            name: delta
            for name, entry in writer.entries.items()
            for source in entry.sources
            if (delta := parts[source].delta) is not None
        }
        for name, delta in adapted.items():
            _check_served(name, delta, writer.entries[name])
        deltas = list({delta.name: delta for delta in adapted.values()}.values())
        together = Turn(deltas, everything={delta.name for delta in deltas})
        self._operands = Operands([together], writer.source.ranks, self.device)
        pairs = [_factors(name, delta, writer.entries[name], self._operands) for name, delta in adapted.items()]
        self.rank = max((a.shape[0] for _, _, a, _, _ in pairs), default=0)
        self.modules = [name for name, _, _, _, _ in pairs]
        _check_experts({name: a.shape[0] for name, _, a, _, _ in pairs}, writer.entries)
        metas, self._plain, self._scaled, self._scaling = [], [], [], []
        for name, (a_name, b_name), a, b, scaling in pairs:
            metas += [Meta(f"{name}.{a_name}", dtype, tuple(a.shape)), Meta(f"{name}.{b_name}", dtype, tuple(b.shape))]
            self._plain.append(a)
            self._scaled.append(b)
            self._scaling.append(scaling)
        self.table: Table = lay_out(metas, sum(m.nbytes + ALIGNMENT for m in metas) + ALIGNMENT)
        self.capacity = extent(self.table[0]) if self.table else 0

    def fill(self, index: int, buffer: Tensor, run: Mapping[str, Any]) -> None:
        """Write the adapters as they are now, rounded to nearest whatever `run` says."""
        self._operands.refresh()
        views = [slot.view(buffer) for slot in self.table[index]]
        torch._foreach_copy_(views[::2], self._plain)
        torch._foreach_copy_(views[1::2], torch._foreach_mul([b.float() for b in self._scaled], self._scaling))

    def transfer_op(self, terms: Terms, route: Route, comes: WireSpecs | None) -> WorkerOp:
        state = terms.state.to_json()
        return WorkerOp("receive_adapter", {"table": to_json(self.table), "rank": self.rank, "state": state})


class AdapterBuilder:
    """Makes the adapter of a model; kept while it stays what it was.

    Args:
        weights: the stream of the model, of this builder alone.
    """

    def __init__(self, weights: MergedWeights) -> None:
        # All names: an engine has a module for each, tied or not.
        weights.as_it_lies, weights.keep_tied = False, True
        self._weights = weights
        self._known: tuple[BucketWriter, torch.dtype, AdapterSource] | None = None

    def __call__(self, dtype: torch.dtype, renames: Sequence[Sequence[str]] = ()) -> AdapterSource:
        """Return the adapter as it is now. Collective over the ranks of the model.

        Args:
            dtype: of the engines' LoRA weights.
            renames: with which the stream of its base fits the engines.
        """
        self._weights.renames = renames
        writer = self._weights.bucket_writer()
        if self._known is None or self._known[0] is not writer or self._known[1] != dtype:
            self._known = writer, dtype, AdapterSource(self._weights, writer, dtype)
        return self._known[2]

    def release(self) -> None:
        self._weights.release()


def _check_served(name: str, delta: Delta, entry: Entry) -> None:
    if delta.rows:
        raise UnsupportedAdapter(f"{name}: the engine cannot serve trainable tokens beside its base{_INSTEAD}")
    if delta.magnitude is not None:
        raise UnsupportedAdapter(f"{name}: the engine cannot serve DoRA as an adapter{_INSTEAD}")
    if len(delta.weight.shape) == 1 or name.endswith(".bias"):
        raise UnsupportedAdapter(f"{name}: the engine cannot serve lora_bias{_INSTEAD}")
    kind = type(delta.owner).__name__
    if delta.owner is not None and not is_matrix(delta.owner) and delta.experts is None:
        raise UnsupportedAdapter(f"{name}: the engine cannot serve an adapter on a {kind}{_INSTEAD}")
    out, into = _dims(delta)
    embedding = isinstance(delta.owner, nn.Embedding)
    if entry.window is None or entry.window.dims != ((into, out) if embedding else (out, into)):
        raise UnsupportedAdapter(f"{name}: its checkpoint layout cannot be adapted in parts{_INSTEAD}")


def _check_experts(ranks: Mapping[str, int], tensors: Iterable[str]) -> None:
    """Raise `UnsupportedAdapter` unless the adapters of a layer's experts can be stacked: every projection of every
    expert, each projection at one rank.

    Args:
        ranks: of the adapted modules, by name.
        tensors: names of the checkpoint's tensors.
    """
    found = [match.groups() for name in tensors if (match := _EXPERT.fullmatch(name))]
    adapted = {layer for module, layer, _ in found if module in ranks}
    first: dict[str, str] = {}
    for module, layer, projection in found:
        if layer not in adapted:
            continue
        if module not in ranks:
            raise UnsupportedAdapter(
                f"{module}: no adapter here, and engines take those of a layer's experts only all together{_INSTEAD}"
            )
        other = first.setdefault(layer + projection, module)
        if ranks[module] != ranks[other]:
            raise UnsupportedAdapter(
                f"{module}: rank {ranks[module]}, but {other} has {ranks[other]}, and engines take one for all"
                f"{_INSTEAD}"
            )


def _dims(delta: Delta) -> tuple[int, int]:
    """Return which dimensions of the parameter are `out` and `in` of its matrices."""
    lead = 0 if delta.experts is None else 1
    return (lead + 1, lead) if delta.transposed else (lead, lead + 1)


def _factors(
    name: str, delta: Delta, entry: Entry, operands: Operands
) -> tuple[str, tuple[str, str], Tensor, Tensor, float]:
    """Return module, names of the factors, lora_A, lora_B and scaling of a tensor; several adapters concatenated."""
    assert entry.window is not None
    lora_A, lora_B, scaling = operands.factors(delta)
    (out, into), (start, size) = _dims(delta), entry.window.box
    expert = 0 if delta.experts is None else start[0]
    a = lora_A[expert, :, start[into] : start[into] + size[into]]
    b = lora_B[start[out] : start[out] + size[out], :, expert]
    kinds = _EMBEDDING if isinstance(delta.owner, nn.Embedding) else _LINEAR
    return name.removesuffix(".weight"), kinds, a, b, scaling


def _check_model(model: Live) -> None:
    """Raise `UnsupportedAdapter` if parameters are trained that belong to no adapter."""
    for name, module in model.modules():
        kinds = lineage(type(module))
        for kind in ("ModulesToSaveWrapper", "TrainableTokensWrapper"):
            if f"peft.utils.other.{kind}" in kinds:
                raise UnsupportedAdapter(
                    f"{name}: the engine cannot serve {kind.removesuffix('Wrapper')} of PEFT{_INSTEAD}"
                )
