"""What a saved adapter is; and, with its base, how much it changes of which weight, and whether it fits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidInput, UnsupportedAdapter
from ..kernels.segments import FLOATS
from ..models.peft.files import CONFIG, PICKLED, TENSORS, file_of
from ..models.peft.folder import config_of, notes_of
from ..models.peft.tokens import TRAINED, WRAPPED
from ..names import hf_name
from ..shards import whole
from ..stream.buckets import dtype_name
from ..stream.source import Entry
from ..verify import Change, change_of
from .adapters import Sum, assembled, names_in, read_adapter
from .base import open_base, packed_notes
from .checkpoint import Checkpoint, find, readable
from .format import read_header
from .origin import origin_of

_FACTOR = re.compile(r"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight|\.bias)?$")


@dataclass(frozen=True, slots=True)
class Module:
    """A module that an adapter targets.

    Args:
        name: of the module in its model.
        rank: of its lora_A and lora_B; of fused experts, of all of them together.
        parameters: elements of them.
        shapes: of each tensor.
    """

    name: str
    rank: int
    parameters: int
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Update:
    """What an adapter does to one weight.

    Args:
        name: of the parameter.
        shape: of it.
        weight, update: Frobenius norms of the weight and of what is added.
        loss, cosine: as of `verify.RoundingLoss`, in the base's dtype.
    """

    name: str
    shape: tuple[int, ...]
    weight: float
    update: float
    loss: float
    cosine: float

    @property
    def relative(self) -> float:
        """Size of the update against the weight."""
        return self.update / self.weight if self.weight else float("inf")


@dataclass(frozen=True, slots=True)
class Inspected:
    """A saved adapter.

    Args:
        folder: of it.
        kind: PEFT's type.
        trained_on: the base that its configuration names.
        rank, alpha: of the configuration.
        ranks: of its modules.
        targets: as of the configuration.
        options: what else says how it is merged (use_dora, use_rslora, rank_pattern, ...).
        parameters, nbytes: elements and bytes of its tensors.
        dtypes: of them.
        modules: that it targets.
        whole: names of tensors that it brings whole.
        replaced: names of weights of which it replaces rows (`trainable_token_indices`) -> how many.
        base: folder of the base that it was held against; None for none.
        dtype: of the base.
        updates: of each parameter.
        problems: why it does not fit the base.
        notes: what is worth a look: a base that it was not trained on, files beside it that are not read.
    """

    folder: Path
    kind: str
    trained_on: str
    rank: int
    alpha: float
    ranks: tuple[int, ...]
    targets: Any
    options: Mapping[str, Any]
    parameters: int
    nbytes: int
    dtypes: tuple[str, ...]
    modules: tuple[Module, ...]
    whole: tuple[str, ...]
    base: Path | None = None
    dtype: str = ""
    updates: tuple[Update, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    replaced: Mapping[str, int] = field(default_factory=dict)


_TOLD = [
    *("use_dora", "use_rslora", "lora_bias", "bias", "rank_pattern", "alpha_pattern", "modules_to_save"),
    *("target_parameters", "layers_to_transform", "fan_in_fan_out"),
]
_USUAL: tuple[Any, ...] = (None, False, {}, [], "none")


def inspect_adapter(adapter: str | Path, base: str | Path | None = None) -> Inspected:
    """Look at an adapter that PEFT has saved. Of the base one weight at a time is in memory.

    Args:
        adapter: its folder, or the name of a repository.
        base: folder or name of its base; None: the adapter alone, for which no library is needed.

    Raises:
        InvalidInput: one of them is not there, or cannot be read. That they do not fit is no error, but told.
    """
    folder = find(adapter, "adapter")
    alone = _alone(folder)
    if base is None:
        return alone
    checkpoint = open_base(find(base, "base"))
    try:
        return _held_against(alone, checkpoint)
    finally:
        checkpoint.close()


def _alone(folder: Path) -> Inspected:
    config = config_of(folder)
    tensors = _tensors(folder)
    grouped: dict[str, dict[str, tuple[int, ...]]] = {}
    wholes, replaced = [], {}
    for key, (_, shape) in tensors.items():
        found = _FACTOR.search(key)
        if key.endswith(f".{TRAINED}"):
            module = key.removesuffix(f".{TRAINED}").removesuffix(f".{WRAPPED}")
            replaced[f"{hf_name(module)}.weight"] = shape[0]
        elif found is None:
            wholes.append(hf_name(key))
        else:
            grouped.setdefault(hf_name(key[: found.start()]), {})[key[found.start() + 1 :]] = shape
    modules = tuple(
        Module(name, _rank(shapes), sum(map(prod, shapes.values())), shapes) for name, shapes in sorted(grouped.items())
    )
    return Inspected(
        folder=folder,
        kind=str(config.get("peft_type", "unknown")),
        trained_on=str(config.get("base_model_name_or_path") or ""),
        rank=int(_number(folder, config, "r")),
        alpha=_number(folder, config, "lora_alpha"),
        ranks=tuple(sorted({module.rank for module in modules})),
        targets=config.get("target_modules"),
        options={key: config[key] for key in _TOLD if key in config and config[key] not in _USUAL},
        parameters=sum(prod(shape) for _, shape in tensors.values()),
        nbytes=sum(prod(shape) * dtype.itemsize for dtype, shape in tensors.values()),
        dtypes=tuple(sorted({dtype_name(dtype) for dtype, _ in tensors.values()})),
        modules=modules,
        whole=tuple(sorted(wholes)),
        replaced=replaced,
    )


def _number(folder: Path, config: Mapping[str, Any], key: str) -> float:
    """Return a number of an adapter's configuration; 0 where it is not there."""
    value = config.get(key) or 0
    if not isinstance(value, int | float):
        raise InvalidInput(f"{folder / CONFIG}: expected a number for {key}, got {value!r}")
    return float(value)


def _tensors(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    file = file_of(folder)
    if file is not None and file.name == PICKLED:
        try:
            loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            raise InvalidInput(f"{file} cannot be read: {type(error).__name__}: {error}") from error
        return {name: (t.dtype, tuple(t.shape)) for name, t in loaded.items() if isinstance(t, Tensor)}
    if file is not None:
        with readable(file):
            return {stored.name: (stored.dtype, stored.shape) for stored in read_header(file).tensors}
    raise InvalidInput(f"{folder} holds no {TENSORS}, which the adapter's tensors are in; save it again")


def _rank(shapes: Mapping[str, tuple[int, ...]]) -> int:
    first = next((shape for key, shape in shapes.items() if key.endswith(("_A", "_A.weight"))), ())
    return first[0] if first else 0


def _held_against(alone: Inspected, base: Checkpoint) -> Inspected:
    alone = replace(alone, base=base.folder, dtype=dtype_name(base.dtype))
    try:
        one = read_adapter(alone.folder.name, alone.folder, base, base.dtype)
        adapter = Sum([one])
        adapter.check()
        origin = origin_of(one.name, one.folder, one.model, base)
        alone = replace(alone, notes=(*origin.doubts, *origin.notes, *notes_of(one.model), *packed_notes(base)))
        found = names_in(base, adapter)
        updates = tuple(_updates(base, adapter, found))
    except (InvalidInput, UnsupportedAdapter) as error:
        problems = _misfits(alone, base) or [f"{type(error).__name__}: {error}"]
        return replace(alone, problems=tuple(problems))
    return replace(alone, updates=updates)


def _updates(base: Checkpoint, adapter: Sum, found: Mapping[str, Entry]) -> list[Update]:
    """Return the update of every parameter that the adapter adds to."""
    groups: dict[tuple[str, ...], dict[str, Entry]] = {}
    for name, entry in found.items():
        groups.setdefault(entry.sources, {})[name] = entry
    updates = []
    for sources, entries in groups.items():
        deltas = {source: delta for source in sources if (delta := adapter.delta(source)) is not None}
        values = assembled(base, adapter, sources, entries) if deltas else {}
        for source, delta in deltas.items():
            mine = adapter.whole(source)
            weight = values[source] if mine is None else mine
            kept = base.kept(next(iter(entries)))
            dtype = kept if kept in FLOATS else torch.float32
            change: Change = change_of(replace(delta, weight=whole(weight)), dtype)
            updates.append(
                Update(
                    delta.name,
                    tuple(weight.shape),
                    change.weight**0.5,
                    change.update**0.5,
                    change.loss,
                    change.cosine,
                )
            )
    return updates


def _misfits(alone: Inspected, base: Checkpoint) -> list[str]:
    """Return modules of which the base has no weight, or one of another size, as far as names and shapes tell."""
    problems = []
    for module in alone.modules:
        first = module.shapes.get("lora_A.weight")
        second = module.shapes.get("lora_B.weight")
        stored = base.tensors.get(f"{module.name}.weight")
        if first is None or second is None or len(first) != 2 or len(second) != 2:
            continue
        if stored is None:
            problems.append(f"{module.name}: {base.folder.name} holds no {module.name}.weight")
        elif stored.shape not in ((second[0], first[1]), (first[1], second[0])):
            problems.append(
                f"{module.name}: lora_A {list(first)} and lora_B {list(second)} are for a weight of "
                f"[{second[0]}, {first[1]}], the base's is {list(stored.shape)}"
            )
    return problems
