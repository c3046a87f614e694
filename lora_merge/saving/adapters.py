"""What adapters from folders add to a base on disk: deltas by parameter, and which tensor of the checkpoint is which
part of which parameter. No value of the base is read.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput, UnsupportedAdapter
from ..models.brought import brought
from ..models.conversion import TRAIN_AS_ONE, Conversion, loading_names, read_conversion
from ..models.delta import Delta
from ..models.part import Part, learning_of
from ..models.peft.chosen import originals
from ..models.peft.folder import read_folder
from ..names import lineage, named_tensors
from ..shards import cut
from ..shards.bitsandbytes import CONV1D
from ..stream.source import Entry
from ..stream.weights import MergedWeights
from .base import check_plain
from .checkpoint import Checkpoint
from .chunks import rows_of


@dataclass(frozen=True, eq=False)
class Adapter:
    """One adapter, read.

    Args:
        name: of its folder.
        model: that it was read onto; its base holds no values.
        parts: what the model streams, by parameter's name, those of tied weights under each name.
        entries: the checkpoint's tensors, by name; those of tied weights under each name.
        ties: name of a tied tensor -> the name under which checkpoints hold it.
        whole: names of the parameters that the adapter brings whole.
        scale: factor of what it adds.
        folder: that it lies in.
        square: as of `Conversion`.
    """

    name: str
    model: nn.Module
    parts: Mapping[str, Part]
    entries: Mapping[str, Entry]
    ties: Mapping[str, str]
    whole: frozenset[str]
    scale: float = 1.0
    folder: Path = Path()
    square: tuple[str, ...] = ()

    def delta(self, parameter: str) -> Delta | None:
        """Return what it adds to a parameter."""
        delta = self.parts[parameter].delta
        if delta is None or self.scale == 1.0:
            return delta
        if delta.magnitude is not None:
            raise UnsupportedAdapter(
                f"{self.name}: a scale of {self.scale} on a DoRA adapter: its rows keep the norms that were "
                "trained, so that this is no smaller step; merge it with scale 1"
            )
        if delta.rows:
            raise UnsupportedAdapter(
                f"{self.name}: a scale of {self.scale} on rows that the adapter replaces (trainable_token_indices): "
                "they are what was trained, not what is added; merge it with scale 1"
            )
        factors = tuple(replace(f, scaling=f.scaling * self.scale) for f in delta.factors)
        return replace(delta, factors=factors)


def read_adapter(name: str, folder: Path, base: Checkpoint, dtype: torch.dtype, scale: float = 1.0) -> Adapter:
    """Read the adapter in a folder, on a base.

    Args:
        dtype: in which tensors are held that the adapter brings whole.

    Raises:
        InvalidInput, UnsupportedAdapter, MissingExtra: as `read_folder`; names the folder.
    """
    model: Any = read_folder(folder, base.folder, dtype)
    turned = {t.name for t in named_tensors(model) if t.attribute == "weight" and CONV1D in lineage(type(t.owner))}
    if turned:
        renamed = loading_names(model.get_base_model())
        base.turn({n for n in base.tensors if n in turned or renamed(n) in turned})
    weights, bare = MergedWeights(model), MergedWeights(model, adapters=False)
    weights.as_it_lies = False
    weights.keep_tied = bare.keep_tied = True
    weights.stored = bare.stored = shapes_of(base, model) if read_conversion(model).turns else None
    writer = weights.bucket_writer()
    with originals(model):
        plain = bare.bucket_writer()
    parts = dict(writer.source.parts)
    whole = learning_of(parts, brought(model), buffers=False)
    # PEFT saves embeddings along that an adapter targets: they are the base's own, and those of every such adapter.
    same = {_place(parts[n]) for n in whole if _is_the_bases(base, n, parts[n].shard.pieces[0].tensor)}
    whole = frozenset(n for n in whole if _place(parts[n]) not in same)
    square = writer.source.conversion.square
    adapter = Adapter(name, model, parts, dict(writer.entries), dict(plain.ties), whole, scale, folder, square)
    for stream in (weights, bare):
        stream.release()
    if not whole and not any(part.delta for part in parts.values()):
        raise InvalidInput(f"{folder}: the adapter changes nothing of its base: expected lora_A and lora_B in its file")
    return adapter


def shapes_of(base: Checkpoint, model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a base's tensors by the names of the parameters of its model, which may be PEFT's."""
    renamed = loading_names(model.get_base_model() if hasattr(model, "get_base_model") else model)
    return {renamed(name): tuple(stored.shape) for name, stored in base.tensors.items() if len(stored.shape) == 3}


@dataclass(frozen=True, eq=False)
class Sum:
    """Adapters that are added up in one output.

    Args:
        adapters: at least one, of one base.
    """

    adapters: Sequence[Adapter]

    @property
    def name(self) -> str:
        return " + ".join(a.name if a.scale == 1.0 else f"{a.scale:g} {a.name}" for a in self.adapters)

    @property
    def entries(self) -> Mapping[str, Entry]:
        """As of `Adapter`."""
        return self.adapters[0].entries

    @property
    def rows(self) -> int | None:
        """Rows of the embedding; None where the model does not say which it is."""
        try:
            return int(self.adapters[0].model.get_base_model().get_input_embeddings().weight.shape[0])  # type: ignore[operator]
        except (AttributeError, NotImplementedError):
            return None

    @property
    def conversion(self) -> Conversion:
        return read_conversion(self.adapters[0].model)

    def part(self, parameter: str) -> Part:
        """Return a parameter as the base has it."""
        return self.adapters[0].parts[parameter]

    def delta(self, parameter: str) -> Delta | None:
        """Return what they add to a parameter together; rounded once when it is merged."""
        found = [d for a in self.adapters if (d := a.delta(parameter)) is not None]
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        rows = tuple(some for d in found for some in d.rows)
        return replace(found[0], factors=tuple(f for d in found for f in d.factors), rows=rows)

    def whole(self, parameter: str) -> Tensor | None:
        """Return the values of a parameter that one of them brings whole; None where the base's are taken."""
        for adapter in self.adapters:
            if parameter in adapter.whole:
                return adapter.parts[parameter].shard.pieces[0].tensor
        return None

    def changes(self, parameter: str) -> bool:
        return any(parameter in a.whole or a.parts[parameter].delta is not None for a in self.adapters)

    def check(self) -> None:
        """Raise `UnsupportedAdapter` where their sum is not defined."""
        for parameter in self.adapters[0].parts:
            found = [(a, d) for a in self.adapters if (d := a.delta(parameter)) is not None]
            wholes = [a for a in self.adapters if parameter in a.whole]
            others = [a for a, _ in found if a not in wholes[:1]] + wholes[1:]
            if wholes and others:
                raise UnsupportedAdapter(
                    f"{parameter}: {wholes[0].name} brings it whole (modules_to_save, or trained biases), and "
                    f"{others[0].name} changes it too: there is no sum of these; merge them apart (--each)"
                )
            self._check_rows(parameter, [(a, d) for a, d in found if d.rows], found)
            dora = next((a for a, d in found if d.magnitude is not None), None)
            if dora is not None and len(found) > 1:
                raise UnsupportedAdapter(
                    f"{parameter}: DoRA adapter {dora.name} beside others: their result depends on the order; merge "
                    "them apart (--each), or one after another"
                )

    def _check_rows(
        self, parameter: str, replaced: Sequence[tuple[Adapter, Delta]], found: Sequence[tuple[Adapter, Delta]]
    ) -> None:
        """Raise where adapters replace rows that another one changes too."""
        if replaced and len(replaced) < len(found):
            other = next(a for a, d in found if not d.rows)
            raise UnsupportedAdapter(
                f"{parameter}: {replaced[0][0].name} replaces rows of it (trainable_token_indices), and {other.name} "
                "changes it too: there is no sum of these; merge them apart (--each)"
            )
        taken: dict[int, str] = {}
        for adapter, delta in replaced:
            for index in (index for rows in delta.rows for index in rows.indices):
                if index in taken:
                    raise UnsupportedAdapter(
                        f"{parameter}: {taken[index]} and {adapter.name} both replace row {index} of it "
                        "(trainable_token_indices): there is no sum of these; merge them apart (--each)"
                    )
                taken[index] = adapter.name

    def apart(self) -> dict[str, str]:
        """Return the names of tied tensors that differ once merged -> the names under which the base has them."""
        found = {}
        for name, kept in self.adapters[0].ties.items():
            one, other = (self.entries[n].sources[0] for n in (name, kept))
            keys = [
                [None if (d := a.parts[n].delta) is None else d.update() for a in self.adapters] for n in (one, other)
            ]
            wholes = [[_place(a.parts[n]) if n in a.whole else None for a in self.adapters] for n in (one, other)]
            if keys[0] != keys[1] or wholes[0] != wholes[1]:
                found[name] = kept
        return found


def _is_the_bases(base: Checkpoint, name: str, tensor: Tensor) -> bool:
    """Return True if a tensor has the values that the base has under this name; read a chunk at a time."""
    stored = base.tensors.get(name)
    if stored is None or stored.shape != tuple(tensor.shape):
        return False
    each = stored.nbytes // max(stored.shape[0], 1) if stored.shape else 0
    for rows in rows_of(stored.shape, stored.dtype.itemsize):
        shape = (rows.end - rows.begin, *stored.shape[1:]) if stored.shape else ()
        chunk = torch.empty(shape, dtype=stored.dtype, device="cpu")
        base.read(name, rows.begin * each, chunk)
        if not torch.equal(chunk.to(tensor.dtype), tensor[rows.begin : rows.end] if tensor.dim() else tensor):
            return False
    return True


def _place(part: Part) -> int:
    return part.shard.pieces[0].tensor.data_ptr()


def names_in(base: Checkpoint, adapters: Sum) -> dict[str, Entry]:
    """Return the base's tensors, by their names in its files -> what transformers makes of them. Tensors that the
    model's class does not know are left out: they are copied.

    Raises:
        InvalidInput: an adapter changes a tensor that the base does not hold, holds in another shape, or under two
            names.
    """
    entries, found = adapters.entries, dict[str, Entry]()
    model: Any = adapters.adapters[0].model
    renamed = loading_names(model.get_base_model())
    by_source = {entry.sources[0]: entry for entry in entries.values() if len(entry.sources) == 1}
    for name in base.tensors:
        entry = entries.get(name)
        if entry is None:
            entry = by_source.get(renamed(name))
            # Only a parameter that is one tensor of the checkpoint can be told by its name alone.
            if entry is not None and entry.meta.name in base.tensors and any(map(adapters.changes, entry.sources)):
                raise InvalidInput(
                    f"{base.folder}: {name} and {entry.meta.name} are two names of one weight, which {adapters.name} "
                    "changes, and which of the two is loaded is not said: fetch the base again, or save it anew with "
                    "transformers' save_pretrained"
                )
            if entry is not None and (entry.meta.name in base.tensors or _count(entries, entry.sources) > 1):
                entry = None
        if entry is not None:
            found[name] = entry
    there = {entry.meta.name for entry in found.values()}
    ties = adapters.adapters[0].ties
    for name, entry in entries.items():
        changed = [source for source in entry.sources if adapters.changes(source)]
        if changed and name not in there and base.packed and not _tied_there(name, ties, there):
            check_plain(base, name, adapters.name)
        if changed and name not in there and ties.get(name, name) not in there and not _tied_there(name, ties, there):
            raise InvalidInput(
                f"{base.folder} holds no {name}, which {adapters.name} changes: it is another model than the adapter "
                "was trained on, or its tensors have other names than transformers writes; then load the model, put "
                "the adapter on with PeftModel.from_pretrained, and use lora_merge.save_merged"
            )
    for name, entry in list(found.items()):
        stored = base.tensors[name]
        if any(adapters.changes(s) for s in entry.sources):
            check_plain(base, name, adapters.name)
        elif base.packed and (stored.shape != entry.meta.shape or stored.dtype not in _FLOATS):
            del found[name]  # codes under the weight's own name, which go along as they lie
            continue
        if stored.shape != entry.meta.shape:
            raise InvalidInput(
                f"{base.folder}: {name} is {list(stored.shape)} in {stored.file.name}, and {list(entry.meta.shape)} by "
                "its config.json: they do not belong together; fetch the base again"
            )
        counts = stored.dtype == entry.meta.dtype  # of integers, as a norm's number of batches, which come whole
        if any(adapters.changes(s) for s in entry.sources) and stored.dtype not in _FLOATS and not counts:
            raise InvalidInput(
                f"{base.folder}: {name} is {stored.dtype}, and {adapters.name} changes it: expected bfloat16, float16 "
                "or float32"
            )
    return found


_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def _tied_there(name: str, ties: Mapping[str, str], there: set[str]) -> bool:
    """Return True if the tensor is there under another name that it is tied to."""
    kept = ties.get(name, name)
    return any(other in there for other, one in ties.items() if one == kept)


def _count(entries: Mapping[str, Entry], sources: tuple[str, ...]) -> int:
    return sum(entry.sources == sources for entry in entries.values())


def untied(base: Checkpoint, adapters: Sum, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the base's config for tied tensors that differ once merged: it says that they are two.

    Raises:
        UnsupportedAdapter: the model's class ties them whatever the config says.
    """
    model: Any = adapters.adapters[0].model
    plain = model.get_base_model()
    pairs = {_source(adapters, name): _source(adapters, kept) for name, kept in names.items()}
    untied_config(type(plain), plain.config, pairs, adapters.name)
    config = copy.deepcopy(dict(base.config))
    for said in (config, config.get("text_config")):
        if isinstance(said, dict) and (said is config or "tie_word_embeddings" in said):
            said["tie_word_embeddings"] = False
    return config


def untied_config(cls: type, config: Any, pairs: Mapping[str, str], adapter: str) -> Any:
    """Return a config of transformers' under which tensors that are tied otherwise are two. (It unties all that the
    class ties, so a checkpoint beside it needs every name.)

    Args:
        pairs: names of parameters that an adapter makes two.

    Raises:
        UnsupportedAdapter: the class ties them whatever its config says, or computes otherwise where they are two.
    """
    config = copy.deepcopy(config)
    for part in (config, getattr(config, "text_config", None)):
        if part is not None:
            part.tie_word_embeddings = False
    try:
        with torch.device("meta"):
            model: Any = cls(config)
        there = {t.name: t.tensor for t in named_tensors(model)}
        cannot = any(there[a] is there[b] for a, b in pairs.items())
        reads = any(_reads_flag(kind) for kind in set(map(type, model.modules())))
    except Exception:  # a class of its own, with arguments of its own
        cannot, reads = True, False
    if cannot or reads:
        name, kept = next(iter(pairs.items()))
        why = "computes otherwise where they are two (tie_word_embeddings)" if reads else "cannot hold them apart"
        raise UnsupportedAdapter(
            f"{name} is tied to {kept}, {adapter} does not change both alike, and a {cls.__name__} {why}: "
            f"{TRAIN_AS_ONE}"
        )
    return config


def _reads_flag(kind: type) -> bool:
    """Return True if a forward asks if weights are tied, as T5's, which scales what goes into a tied head."""
    try:
        return "tie_word_embeddings" in inspect.getsource(kind.forward)  # type: ignore[attr-defined]
    except (OSError, TypeError):  # compiled, or made at run time
        return False


def _source(adapters: Sum, name: str) -> str:
    return adapters.entries[name].sources[0]


def assembled(
    base: Checkpoint, adapters: Sum, sources: Sequence[str], entries: Mapping[str, Entry]
) -> dict[str, Tensor]:
    """Return whole parameters of the base, out of the tensors of its files that are made of them.

    Args:
        sources: names of the parameters.
        entries: all tensors that are made of these, by their names in the files.

    Raises:
        InvalidInput: transformers' conversion does more than move elements about.
    """
    parts = {source: adapters.part(source).shard for source in sources}
    dtypes = {base.tensors[name].dtype for name in entries}
    if len(dtypes) > 1:
        listed = ", ".join(sorted(map(str, dtypes)))
        raise InvalidInput(f"{sources[0]}: its tensors in {base.folder} are {listed}; expected one dtype")
    dtype = dtypes.pop()
    sizes = [prod(part.shape) for part in parts.values()]
    flat = torch.empty(sum(sizes), dtype=dtype, device="cpu")
    found = {s: t.view(p.shape) for (s, p), t in zip(parts.items(), flat.split(sizes), strict=True)}
    whole = any(e.window is None for e in entries.values())
    seen = torch.zeros(sum(sizes) if whole else 0, dtype=torch.bool, device="cpu")
    numbers: dict[str, Tensor] = {}
    if seen.numel():  # which element of which parameter comes where: told by sending their numbers through
        every = torch.arange(sum(sizes), device="cpu").split(sizes)
        numbers = {s: n.view(p.shape) for (s, p), n in zip(parts.items(), every, strict=True)}
    placed = 0
    for name, entry in entries.items():
        values = torch.empty(base.tensors[name].shape, dtype=dtype, device="cpu")
        base.read(name, 0, values)
        placed += values.numel()
        if entry.window is not None:
            cut(found[entry.sources[0]], entry.window.box).copy_(entry.window.unfold(values))
            continue
        at = adapters.conversion.compute(numbers, entry.meta.name).reshape(-1)
        flat[at] = values.reshape(-1)
        seen[at] = True
    if placed != sum(sizes) or not bool(seen.all()):
        raise InvalidInput(
            f"{sources[0]}: the tensors of {base.folder} do not hold each of its {sum(sizes)} elements once: what "
            "transformers makes of them is more than another order; load the model, and use lora_merge.save_merged"
        )
    return found
