"""Which part of a base an adapter's file belongs to: the names in the file, held against the base's own.

An adapter has the names of the model that it was trained on. That may be the text part of a base with images, its
encoder, its thinker; and wrappers or an older transformers may have named its modules otherwise. Each such model is
built around the base's own modules here, so that PEFT reads the adapter as it did in training. A place is taken where
every tensor of the file has one there, of the right size, and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InvalidInput
from ...names import lineage, unwrapped
from ..conversion import PRETRAINED, loading_names
from .tying import target_tied

_FRONT = "base_model.model."
_INNER = ("base_layer", "modules_to_save", "token_adapter", "original_module")
"""Children of PEFT's layers that stand in keys between a module's name and a tensor's."""
_CLASSES = {
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
"""Task of an adapter -> the class of transformers' that it is trained on, whatever wrote the base."""
_OF_ENCODERS = (None, "FEATURE_EXTRACTION")
"""Tasks of adapters that are trained on an encoder of a base, under the base's own names."""
_EVERY = "all-linear"
"""What PEFT calls all linear modules but the head."""
_HEADS = {"unembed_tokens"}
"""What others call the module that transformers' models have as output embeddings."""


@dataclass(frozen=True, eq=False)
class View:
    """A model that an adapter may have been trained on: the base, or one around some of its modules.

    Args:
        root: the model; its modules are the base's.
        parts: names of modules in it -> the base's names of the same.
        loaded: a name in a checkpoint -> that in the model, as transformers renames it when it loads.
    """

    root: nn.Module
    parts: Mapping[str, str]
    loaded: Callable[[str], str]

    def in_base(self, path: str) -> str | None:
        """Return the base's name of one of its modules; None where the base has no such module."""
        for inner, outer in self.parts.items():
            if path == inner or not inner or path.startswith(f"{inner}."):
                return ".".join(filter(None, (outer, path[len(inner) :].removeprefix("."))))
        return None

    def named(self) -> str:
        """Return what this part of the base is, in words."""
        return f"the {type(self.root).__name__} around {', '.join(filter(None, self.parts.values()))}"

    def give_back(self, base: nn.Module) -> None:
        """Put what PEFT has set in the place of modules of this model into the base, too."""
        for inner, outer in self.parts.items():
            if inner and outer and base.get_submodule(outer) is not self.root.get_submodule(inner):
                base.set_submodule(outer, self.root.get_submodule(inner))


@dataclass(eq=False)
class Match:
    """A file's names, held against a view.

    Args:
        view: that they are held against.
        tensors: by the keys that they have there, as PEFT saves them.
        moved: path of an adapted module in the file -> that on the view, where they differ.
        targets: paths of adapted modules on the view.
        places: key in the file -> the base's name of its module.
        lost: keys in the file that have no module on the view.
        misfits: those whose module is of another size.
    """

    view: View
    tensors: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)
    targets: set[str] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether each tensor has a place of its size."""
        return not self.lost and not self.misfits


def match(folder: Path, base: nn.Module, held: Mapping[str, Tensor], config: Any) -> Match:
    """Return where an adapter belongs in a base; the base itself if it fits nowhere, for PEFT to say why.

    Args:
        folder: of the adapter, for errors.
        base: the whole model.
        held: what its file holds.
        config: its configuration; names that it has by other names than the base are replaced by the base's.

    Raises:
        InvalidInput: the names fit two places, or two of them are one.
    """
    first = _Places(View(base, {"": ""}, loading_names(base))).of_all(folder, held)
    if first.fits and getattr(config, "ensure_weight_tying", False):
        target_tied(base, config, first.targets)
    mapping = getattr(config, "auto_mapping", None)
    named = mapping.get("base_model_class") if isinstance(mapping, Mapping) else None
    exact = first.fits and not first.moved
    whole = exact and _brings_all(config, first)
    if whole and named in (None, type(base).__name__):
        return first
    found = [first, *(_Places(view).of_all(folder, held) for view in _parts(base))]
    fitting = [one for one in found if one.fits]
    trained_on = [one for one in fitting if type(one.view.root).__name__ == named]
    if exact and not trained_on:
        encoders = [] if whole or config.task_type not in _OF_ENCODERS else fitting
        fitting = [one for one in encoders if one.places == first.places and _brings_all(config, one)][:1] or [first]
    fitting = trained_on or fitting
    if not fitting:
        return first
    for other in fitting[1:]:
        if other.places != fitting[0].places:
            key, place = next((k, p) for k, p in fitting[0].places.items() if other.places[k] != p)
            raise InvalidInput(
                f"{folder}: {key} is {place} or {other.places[key]} of the base, and names and sizes of all its "
                "tensors fit both: name the tensors in its file as those of the whole base"
            )
    chosen = min(fitting, key=lambda one: len(one.moved))
    _retarget(config, chosen)
    return chosen


class _Places:
    """Finds keys' modules on a view."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._modules: dict[str, nn.Module] = dict(view.root.named_modules())

    def of_all(self, folder: Path, held: Mapping[str, Tensor]) -> Match:
        found = Match(self._view)
        given: dict[str, str] = {}
        for key, tensor in held.items():
            path, tail = _split(key)
            there = self._module(path)
            if there is None:
                bare, tail = _split(unwrapped(key))
                there = self._module(bare)
            tail = _without_adapter(tail)
            new = key if there is None else f"{_FRONT}{there}.{tail}"
            if new in found.tensors:
                raise InvalidInput(
                    f"{folder}: {given[new]} and {key} are two names of {new}: its file holds two adapters, or one "
                    "twice; save it again"
                )
            given[new] = key
            found.tensors[new] = tensor
            place = None if there is None else self._view.in_base(there)
            if there is None or place is None:
                found.lost.append(key)
                continue
            if not _fits(self._modules.get(there), tail, tensor):
                found.misfits.append(key)
            found.places[key] = place
            if "lora_" in tail:
                found.targets.add(there)
                if there != path:
                    found.moved[path.rpartition(_FRONT)[2]] = there
        return found

    def _module(self, path: str) -> str | None:
        """Return the name on the view of the module that a file calls so: its own name, that of an older transformers,
        or one of the experts that are one tensor now."""
        if path in self._modules:
            return path
        renamed = self._view.loaded(f"{path}.weight").removesuffix(".weight")
        if renamed in self._modules:
            return renamed
        if path.rpartition(".")[2] in _HEADS and (head := _head(self._view.root)):
            return head
        at = re.match(r"(.*\.experts)\.\d+\.", renamed)
        if at is not None and at[1] in self._modules and not list(self._modules[at[1]].children()):
            return path  # PEFT finds its place
        return None


def advice(found: Match, said: Mapping[str, Any], *, given: bool) -> str:
    """Return what to do about an adapter that PEFT cannot read onto a base.

    Args:
        found: its names, held against it.
        said: what its configuration says.
        given: the base was named by the user, not by the adapter.
    """
    kind, cls = type(found.view.root).__name__, _CLASSES.get(str(said.get("task_type")))
    other = "name the base that it was trained on" if given else "pass base= if it was trained on another one"
    if not found.lost and not found.misfits:
        if said.get("ensure_weight_tying"):
            return (
                "its adapter_config.json says ensure_weight_tying, for which PEFT before 0.19 ties no factors of LoRA: "
                "if one of them trained it, set that to false there; else save the adapter again"
            )
        return (
            "every tensor of the file has a place of its size in the base: its adapter_config.json says something else "
            "(r, target_modules); save the adapter again"
        )
    if not found.lost:
        return f"{found.misfits[0]} was trained on a weight of another size: {other}"
    if cls is not None and not kind.endswith(cls.removeprefix("AutoModel")):
        return (
            f"it was trained for {said['task_type']}, and the base here is a {kind}: load the base "
            f"with transformers.{cls}, put the adapter on with PeftModel.from_pretrained, and use "
            "lora_merge.save_merged"
        )
    modules = dict(found.view.root.named_modules())
    fronts = {_front(_split(unwrapped(key))[0], modules) for key in found.lost}
    if len(fronts) == 1 and (front := fronts.pop()):
        return (
            f"the names of modules differ from the base's by {front!r} in front of them, which is no name that a "
            "wrapper known here adds: take it off the names in the adapter's file"
        )
    return (
        f"the base, a {kind}, has no module of the name {_split(found.lost[0])[0]}: {other}; if it was trained on "
        "another class of the same base, load that, put the adapter on with PeftModel.from_pretrained, and use "
        "lora_merge.save_merged"
    )


def _front(path: str, modules: Mapping[str, nn.Module]) -> str:
    """Return what a module's name has in front of the longest name of a module that it ends with; "" where there is
    none."""
    parts = path.split(".")
    for at in range(1, len(parts)):
        if ".".join(parts[at:]) in modules:
            return ".".join(parts[:at]) + "."
    return ""


def _split(key: str) -> tuple[str, str]:
    """Return the module of a key, and what is behind it: a part of an adapter, or a tensor of the module's own."""
    parts = key.removeprefix(_FRONT).split(".")
    at = next((i for i, p in enumerate(parts) if p.startswith("lora_") or p in _INNER), len(parts) - 1)
    return ".".join(parts[:at]), ".".join(parts[at:])


def _without_adapter(tail: str) -> str:
    """Return what is behind a module in a key, without the adapter's name, which PEFT leaves out when it saves."""
    return re.sub(
        r"(^|\.)(lora_(?:A|B|magnitude_vector)\.)[^.]+\.(weight|bias)$|(^|\.)(lora_embedding_[AB])\.[^.]+$",
        lambda m: f"{m[1]}{m[2]}{m[3]}" if m[2] else f"{m[4]}{m[5]}",
        re.sub(r"^modules_to_save\.[^.]+\.(?=.)", "", tail),
    )


def _fits(module: nn.Module | None, tail: str, tensor: Tensor) -> bool:
    """Return True if a tensor has the size that its place has, as far as the module's weight tells."""
    weight = None if module is None else module._parameters.get("weight")
    if weight is None:
        return True
    part = tail.rpartition("base_layer.")[2].partition(".")[0]
    if part == "lora_A" or part == "lora_B":
        if weight.dim() != 2 or tensor.dim() != 2:
            return weight.dim() > 2 or tensor.dim() == weight.dim()
        sides = weight.shape if weight.shape[0] != weight.shape[1] else weight.shape[:1]
        return tensor.shape[1 if part == "lora_A" else 0] in sides
    if part in ("lora_embedding_A", "lora_embedding_B"):
        return tensor.shape[part == "lora_embedding_A"] == weight.shape[part == "lora_embedding_B"]
    mine = None if module is None or tail.count(".") else module._parameters.get(tail)
    return mine is None or mine.shape == tensor.shape


def _head(model: nn.Module) -> str:
    """Return the name of a model's output embeddings; "" where it has none."""
    found = _output(model)
    return next((name for name, module in model.named_modules() if module is found), "") if found is not None else ""


def _output(model: Any) -> nn.Module | None:
    try:
        found = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, nn.Module) else None


def _parts(base: nn.Module) -> Iterator[View]:
    """Yield the models that are trained on parts of a base: those in it, and language models around a text model in
    it."""
    for name, module in base.named_modules():
        if name and PRETRAINED in lineage(type(module)):
            yield View(module, {"": name}, loading_names(module))
    yield from _encoders(base)
    for head in _language_models(base):
        # Not by base_model_prefix: that of MllamaForCausalLM is no name in it.
        prefix, inner = next((c for c in head.named_children() if PRETRAINED in lineage(type(c[1]))), ("", None))
        for name, module in base.named_modules():
            if inner is None or type(module) is not type(inner) or _sizes(module) != _sizes(inner):
                continue
            around: Any = _language_model(type(head), head.config)
            if around is None:
                continue
            loaded = loading_names(around)
            setattr(around, prefix, module)
            parts = {prefix: name}
            output, mine = _output_around(base, name), _head(around)
            if output and mine and "." not in mine and _sizes(base.get_submodule(output)) == _sizes(_output(around)):
                setattr(around, mine, base.get_submodule(output))
                parts[mine] = output
            yield View(around, parts, loaded)


def _encoders(base: nn.Module) -> Iterator[View]:
    """Yield what AutoModelForTextEncoding makes of models of an encoder and a decoder: the encoder under its own
    name."""
    import transformers

    mapping = transformers.AutoModelForTextEncoding._model_mapping
    for name, module in base.named_modules():
        cls = mapping.get(type(getattr(module, "config", None)), None) if PRETRAINED in lineage(type(module)) else None
        if not isinstance(cls, type) or isinstance(module, cls):
            continue
        around: Any = _language_model(cls, module.config)
        mine = {} if around is None else dict(around.named_children())
        there = dict(module.named_children())
        if mine and mine.keys() < there.keys() and all(_sizes(mine[key]) == _sizes(there[key]) for key in mine):
            loaded = loading_names(around)
            for key in mine:
                setattr(around, key, there[key])
            yield View(around, {key: f"{name}.{key}" if name else key for key in mine}, loaded)


def _sizes(module: nn.Module | None) -> dict[str, torch.Size]:
    return {} if module is None else {name: tensor.shape for name, tensor in module.named_parameters()}


def _output_around(base: nn.Module, name: str) -> str:
    """Return the output embeddings of the nearest model around a module that has some; "" where there are none."""
    modules = dict(base.named_modules())
    names = {id(module): path for path, module in modules.items()}
    while True:
        if (found := _output(modules[name])) is not None:
            return names.get(id(found), "")
        if not name:
            return ""
        name = name.rpartition(".")[0]


def _language_models(base: Any) -> Iterator[Any]:
    """Yield what AutoModelForCausalLM makes of a base's configuration, and of those in it; without values."""
    import transformers

    mapping = transformers.AutoModelForCausalLM._model_mapping
    for config in _configs(getattr(base, "config", None)):
        cls = mapping.get(type(config), None)
        if isinstance(cls, type) and cls is not type(base):
            made = _language_model(cls, config)
            if made is None and (text := getattr(config, "text_config", None)) is not None:
                made = _language_model(cls, text)
            if made is not None:
                yield made


def _language_model(cls: Any, config: Any) -> Any:
    try:
        with torch.device("meta"):
            return cls(config)
    except Exception:  # it takes the configuration of another part
        return None


def _configs(config: Any) -> Iterator[Any]:
    if config is None:
        return
    yield config
    for key in getattr(config, "sub_configs", None) or ():
        yield from _configs(getattr(config, key, None))


def _brings_all(config: Any, found: Match) -> bool:
    """Return True if a file has an adapter for every module of a view that its configuration names."""
    from peft.tuners.tuners_utils import check_target_module_exists

    if not config.target_modules or str(config.target_modules).lower() == _EVERY:
        return True
    weights = {name for name, module in found.view.root.named_modules() if "weight" in module._parameters}
    return all(name in found.targets for name in weights if check_target_module_exists(config, name))


def _retarget(config: Any, found: Match) -> None:
    """Have the configuration say by the view's names what it says by those in the file, so that PEFT finds the modules
    that were trained: those in the file, and others of the same names, which the file then lacks."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    modules = dict(found.view.root.named_modules())
    head = _head(found.view.root)
    every = str(config.target_modules).lower() == _EVERY

    def targeted(name: str, path: str) -> bool:
        if every:
            return path != head and type(modules.get(path)).__name__ in ("Linear", "Conv1D")
        return bool(check_target_module_exists(config, name))

    if not found.fits or not found.moved:
        return
    there = {path for path in found.targets if path in modules}
    old_names = {new: old for old, new in found.moved.items()}
    if not all(targeted(path, path) for path in there):
        fronts = {_fronts(old, new) for old, new in found.moved.items()}
        for path, module in modules.items():
            if path not in old_names and isinstance(module, nn.Linear | nn.Embedding):
                old = next((before + path[len(now) :] for before, now in fronts if path.startswith(now)), path)
                if targeted(old, path):
                    there.add(path)
                    old_names[path] = old
        config.target_modules = there
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    for patterns, usual in ((config.rank_pattern, config.r), (config.alpha_pattern, config.lora_alpha)):
        mine: dict[str, int] = {}
        for path in there if patterns else ():
            old = old_names.get(path, path)
            keys = (get_pattern_key(patterns, name) for name in (old, unwrapped(old)))
            mine[re.escape(path)] = next((patterns[key] for key in keys if key in patterns), usual)
        rest = dict(patterns)
        patterns.clear()
        patterns.update(mine | {key: value for key, value in rest.items() if key not in mine})  # the first one counts


def _fronts(old: str, new: str) -> tuple[str, str]:
    """Return what two names have in front of what is the same in both."""
    before, now = old.split("."), new.split(".")
    while before and now and before[-1] == now[-1]:
        before.pop()
        now.pop()
    return tuple("".join(f"{part}." for part in parts) for parts in (before, now))  # type: ignore[return-value]
