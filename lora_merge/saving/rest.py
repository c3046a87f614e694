"""Tensors of a base's files that the class of a live model does not build, as heads for several tokens at once (MTP): a
stream does not have them, and a checkpoint without them is no drop-in for the base."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidInput
from ..names import named_tensors, unsaved_buffers
from ..stream.buckets import Meta
from .base import open_base
from .checkpoint import Checkpoint, holds_weights
from .chunks import rows_of
from .format import as_bytes
from .writer import Writer

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_layers")
"""What configurations say of layers that predict further tokens."""
_PASSED_OVER = re.compile(r"mtp|nextn|layers\\?\.\d")


@dataclass(frozen=True)
class Rest:
    """What a base holds more than a stream.

    Args:
        base: that was looked at; None for none.
        tensors: of the result.
        notes: what may be lacking.
    """

    base: Checkpoint | None = None
    tensors: tuple[Meta, ...] = ()
    notes: tuple[str, ...] = ()

    def write(self, writer: Writer) -> None:
        """Copy them, a chunk at a time."""
        if self.base is None:
            return
        for wanted in self.tensors:
            stored = self.base.tensors[wanted.name]
            each = stored.nbytes // stored.shape[0] if stored.shape and stored.shape[0] else 0
            for rows in rows_of(stored.shape, stored.dtype.itemsize):
                shape = (rows.end - rows.begin, *stored.shape[1:]) if stored.shape else ()
                chunk = torch.empty(shape, dtype=wanted.dtype, device="cpu")
                self.base.read(wanted.name, rows.begin * each, chunk)
                wide = chunk.nbytes // max(shape[0], 1) if shape else 0
                writer.write(wanted.name, rows.begin * wide, as_bytes(chunk))

    def close(self) -> None:
        if self.base is not None:
            self.base.close()


def rest_of(inside: Any, cls: type, folder: Path | None, given: bool, names: Collection[str]) -> Rest:
    """Find what a base holds more than a stream of a model.

    Args:
        inside: the model of transformers'; None for another model.
        cls: its class.
        folder: of the base; None where it is not known.
        given: the user has named it.
        names: of the stream's tensors.

    Raises:
        InvalidInput: the folder that the user has named holds weights that cannot be read.
    """
    if inside is None:
        return Rest()
    if folder is None or not holds_weights(folder):
        return Rest(notes=_lacking(inside, cls, "no base= was given" if folder is None else f"{folder} has no weights"))
    try:
        base = open_base(folder)
    except InvalidInput as error:
        if given:
            raise
        return Rest(notes=_lacking(inside, cls, str(error)))
    if base.packed:
        return Rest(base, notes=_lacking(inside, cls, f"{folder} is quantised: {base.packed}"))
    builds = _builds(inside)
    more = [name for name in base.tensors if name not in names and not builds(name)]
    written = next(iter(base.config.get("architectures") or ()), "")
    if more and written != cls.__name__:
        note = f"{folder}, a {written or 'model of no named class'}, holds {len(more)} tensors that a {cls.__name__} "
        return Rest(base, notes=(f"{note}does not build, {more[0]} for one; they are not in the result",))
    return Rest(base, tuple(Meta(name, base.kept(name), base.tensors[name].shape) for name in more))


def _builds(inside: Any) -> Callable[[str], bool]:
    """Return a test of whether a tensor of a checkpoint, by its name there, becomes part of a model."""
    names = {t.name: True for t in named_tensors(inside)} | {t.name: True for t in unsaved_buffers(inside)}
    prefix = getattr(inside, "base_model_prefix", "") or None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # transformers 4, whose names are the model's, but for the prefix

        def there(name: str) -> bool:
            return any(one in names for one in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")))

        return there
    mapping = get_model_conversion_mapping(inside)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    return lambda name: name in names or rename_source_key(name, renamings, converters, prefix, names)[0] in names


def _lacking(inside: Any, cls: type, why: str) -> tuple[str, ...]:
    """Return what a checkpoint of the model may lack, where there is no base to look at."""
    configs = [config for config in (inside.config, getattr(inside.config, "text_config", None)) if config is not None]
    said = next((key for config in configs for key in _COUNTS if getattr(config, key, 0)), "")
    passed = [p for p in getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or () if _PASSED_OVER.search(str(p))]
    if not said and not passed:
        return ()
    what = f"config.json says {said}" if said else f"its class passes over {passed[0]}"
    return (
        f"tensors that a {cls.__name__} does not build ({what}) are not in the result, if the base has any ({why}): "
        "pass base=, the base's folder, to keep them",
    )
