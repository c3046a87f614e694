"""What the user of a merged checkpoint is told beside its numbers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence

from ..errors import InvalidInput
from ..models.conversion import loading_names
from ..models.peft.files import CONFIG
from ..models.peft.folder import notes_of
from .adapters import Adapter
from .base import packed_notes
from .checkpoint import Checkpoint
from .origin import DoubtfulBase, origin_of

_DRAFTS = re.compile(r"(?:^|\.)(?:mtp|nextn|draft|eagle|medusa)")
"""Begins components of the names of heads that draft further tokens."""
_LAYER = re.compile(r"(.*\.layers)\.(\d+)\.")


def square_notes(names: Sequence[str]) -> tuple[str, ...]:
    """Say of tensors whose shape does not tell which way round they lie that engines read them the other way."""
    if not names:
        return ()
    return (
        f"{names[0]} (and {len(names) - 1} more) is square, and transformers does not turn such experts when it loads "
        "them: they are written as it reads them. Engines turn them always: push into an engine instead of starting "
        "one on this folder",
    )


def draft_notes(built: Iterable[str], others: Iterable[str]) -> tuple[str, ...]:
    """Say which tensors of a result are heads that draft further tokens (MTP): these are the base's own, as no model in
    training builds them.

    Args:
        built: names of the tensors that the model has.
        others: names of those that are copied.
    """
    last: dict[str, int] = {}
    for name in built:
        if found := _LAYER.match(name):
            last[found[1]] = max(last.get(found[1], 0), int(found[2]))

    def drafts(name: str) -> bool:
        found = _LAYER.match(name)
        beyond = found is not None and found[1] in last and int(found[2]) > last[found[1]]
        return beyond or _DRAFTS.search(name) is not None

    heads = sorted(filter(drafts, others))
    if not heads:
        return ()
    return (
        f"{len(heads)} tensors of heads that draft further tokens ({heads[0]} for one) are the base's, unchanged: an "
        "engine that drafts with them answers right, and has fewer of their tokens accepted than before the merge",
    )


def head_notes(base: Checkpoint, adapter: Adapter) -> tuple[str, ...]:
    """Say of a base without a head, whose configuration does not tie one, that loading it makes one up."""
    model = adapter.model.get_base_model()  # type: ignore[operator]
    get, renamed = getattr(model, "get_output_embeddings", lambda: None), loading_names(model)
    head, config = get(), f"{base.folder.name}'s config.json"
    path = next((path for path, module in model.named_modules() if module is head), None)
    tied = {*adapter.ties, *adapter.ties.values()}
    name = next((n for n, entry in adapter.entries.items() if entry.sources == (f"{path}.weight",)), None)
    if name is None or base.packed or name in tied or f"{path}.weight" in map(renamed, base.tensors):
        return ()
    return (
        f"{base.folder} holds no {name}, and neither does the result, and {config} does not tie it to the embedding: "
        "transformers loads random numbers there. If the head is the embedding, say tie_word_embeddings: true in the "
        "result's config.json; else fetch the base again",
    )


def check_origins(adapters: Sequence[Adapter], base: Checkpoint, strict: bool) -> None:
    """Warn of adapters that were trained on another base.

    Raises:
        InvalidInput: there is one, and `strict` is set.
    """
    for adapter in adapters:
        for doubt in origin_of(adapter.name, adapter.folder, adapter.model, base).doubts:
            if strict:
                raise InvalidInput(
                    f"{doubt}; name the base that the adapter was trained on, or merge without strict (--strict)"
                )
            warnings.warn(doubt, DoubtfulBase, stacklevel=3)


def notes_for(base: Checkpoint, adapters: Sequence[Adapter], along: Sequence[str]) -> tuple[str, ...]:
    """List what is worth a look.

    Args:
        base, adapters: that are merged.
        along: what there is to say of the tokenizer.
    """
    entries = adapters[0].entries
    renamed = loading_names(adapters[0].model.get_base_model())  # type: ignore[operator]
    found = [*base.notes, *packed_notes(base), *along, *square_notes(adapters[0].square)]
    found += head_notes(base, adapters[0])
    if (base.folder / CONFIG).is_file():
        found.append(
            f"{base.folder} holds an adapter, too ({CONFIG}), which transformers puts on what it loads from there: it "
            "is not in the result"
        )
    found += draft_notes(entries, (name for name in base.tensors if name not in entries and name == renamed(name)))
    for adapter in adapters:
        origin = origin_of(adapter.name, adapter.folder, adapter.model, base)
        found += (*notes_of(adapter.model), *origin.doubts, *origin.notes)
        if adapter.scale != 1.0 and adapter.whole:
            found.append(
                f"the scale {adapter.scale:g} of {adapter.name} is not that of tensors which it brings whole: "
                f"{min(adapter.whole)} and {len(adapter.whole) - 1} more"
            )
    return tuple(found)
