"""What the user of a merged checkpoint is told beside its numbers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from ..errors import InvalidInput
from ..models.peft.folder import notes_of
from .adapters import Adapter
from .base import packed_notes
from .checkpoint import Checkpoint
from .origin import DoubtfulBase, origin_of


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
    found = [*base.notes, *packed_notes(base), *along]
    for adapter in adapters:
        origin = origin_of(adapter.name, adapter.folder, adapter.model, base)
        found += (*notes_of(adapter.model), *origin.doubts, *origin.notes)
        if adapter.scale != 1.0 and adapter.whole:
            found.append(
                f"the scale {adapter.scale:g} of {adapter.name} is not that of tensors which it brings whole: "
                f"{min(adapter.whole)} and {len(adapter.whole) - 1} more"
            )
    return tuple(found)
