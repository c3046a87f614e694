"""From the tensors that a transformers model holds at run time to those of its checkpoints.

transformers 5 fuses and renames parameters while loading (experts into one tensor, gate beside up) and undoes it when
saving. Here the undoing is run once on meta tensors, to learn which view of which parameter each checkpoint tensor
is; no weight is touched.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..names import lineage, named_tensors, walk

PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
TRAIN_AS_ONE = (
    "train an adapter on both with ensure_weight_tying=True. (Its factors are one as long as they share memory: that "
    "takes a PEFT that shares it, as 0.21 does, autocast_adapter_dtype=False where the base has 16 bits, and adapters "
    "that are put on after the model was moved or converted)"
)
"""What to do where adapters change tied weights apart."""


@dataclass(frozen=True, slots=True)
class Made:
    """One checkpoint tensor.

    Args:
        name: its checkpoint name.
        sources: HF module names of the parameters that it is made of.
        view: `(offset, shape, stride)` in its only source; None where values have to be computed.
    """

    name: str
    sources: tuple[str, ...]
    shape: torch.Size
    view: tuple[int, torch.Size, tuple[int, ...]] | None


class Conversion:
    """What transformers does to the weights of `root` when it saves them; nothing where `root` is None."""

    def __init__(self, root: Any | None, prefix: str) -> None:
        self._root, self._prefix = root, prefix
        self._shapes: dict[str, torch.Size] = {}
        self.square: tuple[str, ...] = ()
        """Checkpoint tensors of the last `outputs` whose shape does not say whether transformers turns them."""

    @property
    def turns(self) -> bool:
        """Whether transformers transposes some tensors while loading where their shape says so, and does not transpose
        them back when it saves them (Qwen3-VL-MoE's experts)."""
        return self._root is not None and any(map(_turning, _conversions_of(self._root) or ()))

    def outputs(self, metas: Mapping[str, Tensor], stored: Mapping[str, Sequence[int]] | None = None) -> list[Made]:
        """Return the checkpoint tensors that parameters and buffers, given as meta tensors, become.

        Args:
            stored: of a checkpoint whose layout the result is to have, the shapes by the parameters' names: experts
                lie there as published, or as transformers saves them. None: as published, which engines read.
        """
        self._shapes = {name.removeprefix(self._prefix): meta.shape for name, meta in metas.items()}
        storages = {_storage(meta): name for name, meta in metas.items()}
        with _ViewsOnly():
            made = self._revert(metas)
            if stored is not None and self.turns:
                made |= self._as_stored(made, metas, storages, stored)
        outputs, viewed = [], set()
        for name, tensor in made.items():
            source = storages.get(_storage(tensor))
            if source is not None:
                viewed.add(source)
                view = (int(tensor.storage_offset()), tensor.shape, tensor.stride())
                outputs.append(Made(name, (source,), tensor.shape, view))
        for group in self._groups({name: meta for name, meta in metas.items() if name not in viewed}):
            for name, tensor in self._revert({source: metas[source] for source in group}).items():
                outputs.append(Made(name, tuple(group), tensor.shape, None))
        place = {name: index for index, name in enumerate(metas)}
        return sorted(outputs, key=lambda m: place[m.sources[0]])

    def _as_stored(
        self,
        made: Mapping[str, Tensor],
        metas: Mapping[str, Tensor],
        storages: Mapping[int, str],
        stored: Mapping[str, Sequence[int]],
    ) -> dict[str, Tensor]:
        """Return those tensors that are not turned in a checkpoint: it has them in the parameter's own shape, or they
        are square, which transformers loads as they lie."""
        lying = self._revert(metas, turned=False)
        turned = {n: t for n, t in lying.items() if n in made and t.stride() != made[n].stride()}
        self.square = tuple(name for name, tensor in turned.items() if tensor.shape == made[name].shape)
        return {
            name: tensor
            for name, tensor in turned.items()
            if name in self.square or tuple(stored.get(storages[_storage(tensor)], ())) == tensor.shape
        }

    def compute(self, merged: Mapping[str, Tensor], name: str) -> Tensor:
        """Compute the checkpoint tensor `name` from the values of all its sources."""
        return self._revert(merged)[name]

    def _groups(self, metas: Mapping[str, Tensor]) -> list[Sequence[str]]:
        """Group parameters that go into the same checkpoint tensors."""
        groups: dict[str, list[str]] = {}
        for source, meta in metas.items():
            group = [source]
            for output in self._revert({source: meta}):
                other = groups.get(output, group)
                if other is not group:
                    group = other + group
                groups.update(dict.fromkeys([*(k for k, v in groups.items() if v is other), output], group))
        return list({id(group): group for group in groups.values()}.values())

    def _revert(self, tensors: Mapping[str, Tensor], *, turned: bool = True) -> dict[str, Tensor]:
        if self._root is None:
            return dict(tensors)
        from transformers.core_model_loading import revert_weight_conversion

        cut = len(self._prefix)
        inside = {name[cut:]: t for name, t in tensors.items() if name.startswith(self._prefix)}
        outside = {name: t for name, t in tensors.items() if not name.startswith(self._prefix)}
        shapes = self._shapes or {name: tensor.shape for name, tensor in inside.items()}
        converted = revert_weight_conversion(_Plain(self._root, shapes, turned), inside)
        return outside | {self._prefix + name: t[0] if isinstance(t, list) else t for name, t in converted.items()}


_CODES = {f"transformers.integrations.{method}" for method in ("bitsandbytes", "torchao")}


class _Plain:
    """A model as its conversions are to see it: without wrappers around its layers, and its parameters whole, whatever
    is here of them. Quantised weights count as what they stand for: those conversions are left out that read codes and
    scales out of a checkpoint, which none undoes.

    Args:
        shapes: of its parameters, by name.
        turned: experts that transformers turns round while loading where their shape says so (Qwen3-VL-MoE) are turned
            back, whatever their shape. Otherwise they stay as they lie, as in what transformers saves.
    """

    def __init__(self, root: Any, shapes: Mapping[str, torch.Size], turned: bool = True) -> None:
        self._root, self._shapes = root, shapes
        known = _conversions_of(root)
        if known:
            plain = [c for c in known if not any(map(_reads_codes, getattr(c, "operations", ())))]
            self._weight_conversions = [_always(c) if turned and _turning(c) else c for c in plain]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._root, name)

    def get_parameter(self, name: str) -> Tensor:
        """See `nn.Module`: some conversions ask it for shapes."""
        if name in self._shapes:
            return torch.empty(self._shapes[name], device="meta")
        found: Any = {t.name: t.tensor for t in named_tensors(self._root)}.get(name)
        return self._root.get_parameter(name) if found is None else found


def _conversions_of(root: Any) -> list[Any] | None:
    """Return the conversions with which a model was loaded; of one that was not loaded, and has tensors that are
    turned, those that transformers undoes when it saves the model."""
    known = getattr(root, "_weight_conversions", None)
    if known is not None:
        return list(known)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping

        made = get_model_conversion_mapping(root, add_legacy=False)
    except (ImportError, TypeError):  # an older one
        return None
    # Nobody knows whether a prefix was there.
    return [c for c in made if type(c).__name__ != "PrefixChange"] if any(map(_turning, made)) else None


def _turning(conversion: Any) -> bool:
    """Return True if a conversion transposes a tensor on loading only where its shape is not the parameter's own."""
    return any(getattr(operation, "check_dims", False) for operation in getattr(conversion, "operations", ()))


def _always(conversion: Any) -> Any:
    """Return a conversion that transposes whatever the shape, as engines do."""
    again = copy.deepcopy(conversion)
    for operation in again.operations:
        if getattr(operation, "check_dims", False):
            operation.check_dims = False
    return again


def _reads_codes(operation: Any) -> bool:
    return type(operation).__module__ in _CODES


class _ViewsOnly(TorchFunctionMode):
    """Leaves out the copies that only change the layout, so that chunks of a tensor stay views of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.contiguous, Tensor.clone, torch.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def pretrained(model: nn.Module) -> tuple[str, Any]:
    """Return the name of the model of transformers that `model` is, wraps or contains, and it; None where there is
    none."""
    return next((found for found in walk(model) if PRETRAINED in lineage(type(found[1]))), ("", None))


def read_conversion(model: nn.Module) -> Conversion:
    """Return the conversion of the transformers model that `model` is, wraps or contains."""
    name, module = pretrained(model)
    if module is not None:
        try:
            from transformers.core_model_loading import revert_weight_conversion  # noqa: F401
        except ImportError:  # transformers 4 converts nothing
            return Conversion(None, "")
    return Conversion(module, f"{name}." if name else "")


def loading_names(model: Any) -> Callable[[str], str]:
    """Return a function from a name in a checkpoint to the parameter's, as transformers loads a model."""
    prefix = getattr(model, "base_model_prefix", "") or None
    names = {t.name: True for t in named_tensors(model)}
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        renamings = [t for t in get_model_conversion_mapping(model) if isinstance(t, WeightRenaming)]
        return lambda name: str(rename_source_key(name, renamings, [], prefix, names)[0])
    except ImportError:  # transformers 4

        def renamed(name: str) -> str:
            if prefix is None or name in names:
                return name
            inner = name.removeprefix(f"{prefix}.")
            return inner if inner != name and inner in names else f"{prefix}.{name}"

        return renamed


def tied_keys(model: nn.Module) -> list[str]:
    """Return patterns of the names that transformers leaves out of a checkpoint and ties to another on loading: of
    classes that tie, where their config says so."""
    keys = (
        (name, getattr(module, "_tied_weights_keys", None) or ())
        for name, module in walk(model)
        if getattr(getattr(module, "config", None), "tie_word_embeddings", True)
    )
    return [f"{name}.{key}" if name else key for name, patterns in keys for key in patterns]


def saved_names(names: Sequence[str], patterns: Iterable[str]) -> list[str]:
    """Return those names of one tensor under which a checkpoint needs it, in the model's order: all but those that are
    tied to another on loading. What is shared otherwise (replicated layers, a module at two places) is needed under
    each name."""
    patterns = tuple(patterns)
    kept = [name for name in names if not any(re.search(pattern, name) for pattern in patterns)]
    return kept or [max(names)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
