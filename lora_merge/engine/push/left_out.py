"""What an engine's class has no part for (a talker, layers of a tower that are not computed) is left out of a stream,
and refused where it is trained: nobody would ever see what it has learnt."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...models.brought import brought
from ...models.delta import Delta
from ...models.live import live
from ...models.part import Learning
from ...stream.bucket_writer import BucketWriter
from ...stream.weights import MergedWeights


def sources_of(writer: BucketWriter, names: Collection[str]) -> dict[str, str]:
    """Return the parameters that some tensors of a stream are made of -> the name of the tensor."""
    entries = ((name, writer.entries.get(name)) for name in names)
    return {source: name for name, entry in entries if entry is not None for source in entry.sources}


def trained(weights: MergedWeights, writer: BucketWriter, sources: Collection[str]) -> list[str]:
    """Return which of some parameters training changes: the stream's adapters add something to them, or they require a
    gradient. Collective over the ranks of the model."""
    with weights.choice():
        model = live(weights.model, as_it_lies=weights.as_it_lies)
        deltas = model.adapters()[1] if model.reader is None else model.reader.deltas()
        adapted = {delta.name for delta in deltas if delta.name in sources and _adds(delta)}
    parts = {name: part for name, part in writer.source.parts.items() if name in sources}
    learning = Learning((module for _, module in model.modules()), brought(weights.model))
    found = learning.names(parts, writer.ranks, buffers=False)
    return sorted(found.union(*writer.ranks.gather(adapted)))


def _adds(delta: Delta) -> bool:
    """Return True unless all factors here are as they begin: lora_B of zeros, and what DoRA and replaced rows bring is
    taken for something."""
    if delta.rows or delta.magnitude is not None:
        return True
    return any(bool(piece.tensor.any()) for factors in delta.factors for piece in factors.lora_B.pieces)


def refusal(names: Sequence[str], serves: str) -> str:
    """Return the error for parameters that are trained, and that no engine of this class has."""
    others = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    talker = ", or take it off (model.disable_talker())" if names[0].startswith("talker.") else ""
    return (
        f"{names[0]}{others} is trained, and the engine's class ({serves}) has no part for it, so that what it learns "
        "would never be served: leave it out of target_modules and modules_to_save, freeze it "
        f"(requires_grad_(False)){talker}"
    )
