"""Whether an adapter was trained on the base that it is merged into, as far as both say.

Sizes cannot tell: models of other families have layers of the same names and sizes. What an adapter says of its base is
a name, or a folder of the machine that it was trained on, so that another name alone is no proof.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..models.peft.files import CONFIG as ADAPTER_CONFIG
from .checkpoint import CONFIG, Checkpoint

_TEXT = ("text_config", "thinker_config", "llm_config", "language_config", "decoder")
"""Parts of a configuration that adapters are trained on by themselves."""
_HUB = re.compile(r"\w[\w.-]*/[\w.-]*\w")
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_VARIANT = re.compile(r"([-_.](unsloth|bnb|[48]bit|int[48]|awq|gptq|fp8|nf4|dynamic|hf|bf16))+$")
"""How names end of the same model in another format."""
_CARD = re.compile(r"\A---\n.*?^base_model:\s*(?:\n\s*-\s*)?['\"]?([\w./-]+)", re.DOTALL | re.MULTILINE)


class DoubtfulBase(UserWarning):
    """An adapter is merged into a base that, by what both say, it was not trained on."""


class Origin(NamedTuple):
    """What is known of an adapter's base.

    Args:
        doubts: why it is another one than the adapter is merged into.
        notes: what is no reason to think so, but worth a look.
    """

    doubts: tuple[str, ...]
    notes: tuple[str, ...]


def origin_of(name: str, folder: Path, model: nn.Module, base: Checkpoint) -> Origin:
    """Compare what an adapter says of its base with the base.

    Args:
        name, folder: of the adapter.
        model: the adapter on the base.
        base: that it is merged into.
    """
    said = _config_in(folder / ADAPTER_CONFIG)
    trained_on = str(said.get("base_model_name_or_path") or "") or _card(folder / "README.md")
    doubts = list(_doubts(name, said, trained_on, model, base))
    if doubts or not trained_on:
        return Origin(tuple(doubts), ())
    if _same(trained_on, base.folder):
        return _of_revision(name, str(said.get("revision") or ""), trained_on, base.folder)
    kind = base.config.get("model_type", "model of no named type")
    note = f"{name} says that it was trained on {trained_on}; merged into {base.folder}, a {kind}"
    on_hub = _HUB.fullmatch(trained_on) and not Path(trained_on).is_dir()
    return Origin((note,), ()) if on_hub and _cached_as(base.folder) else Origin((), (note,))


def _doubts(name: str, said: Mapping[str, Any], trained_on: str, model: nn.Module, base: Checkpoint) -> Iterator[str]:
    other = _config(trained_on)
    theirs, ours = _types(other), _types(base.config)
    kind = base.config.get("model_type", "model of no named type")
    if theirs and ours and not theirs & ours:
        yield (
            f"{name} was trained on {trained_on}, a {other.get('model_type')}, and is merged into {base.folder}, a "
            f"{kind}: names and sizes of the layers are the same, the weights are not"
        )
        return
    library = str((said.get("auto_mapping") or {}).get("parent_library") or "")
    families = {type(module).__module__ for module in model.modules()}
    if library.startswith("transformers.models.") and library not in families:
        yield (
            f"{name} was trained on a {said['auto_mapping'].get('base_model_class')} ({library}), and is merged into "
            f"{base.folder}, a {kind}"
        )


def _of_revision(name: str, revision: str, trained_on: str, base: Path) -> Origin:
    """Compare the revision that an adapter says of its base with that of a folder in the hub's cache."""
    if revision in ("", "main"):
        return Origin((), ())
    begin = f"{name} was trained on revision {revision} of {trained_on}, and is merged into {base}"
    repository = base.parent.parent
    if not _CACHED.fullmatch(repository.name):
        return Origin((), (f"{begin}, which does not say of which revision it is",))
    with suppress(OSError, ValueError):  # it was never fetched by this name
        if (repository / "refs" / revision).read_text(encoding="utf-8").strip() == base.name:
            return Origin((), ())
    if base.name.startswith(revision):
        return Origin((), ())
    return Origin((f"{begin}, by the hub's cache another one: fetch that revision, and pass its folder",), ())


def _types(config: Mapping[str, Any]) -> set[str]:
    """Return what a configuration calls its model, and the part that reads text."""
    parts = [config, *(part for key in _TEXT if isinstance(part := config.get(key), dict))]
    parts += [part for one in parts[1:] for key in _TEXT if isinstance(part := one.get(key), dict)]
    return {str(kind) for part in parts if (kind := part.get("model_type"))}


def _config(trained_on: str) -> dict[str, Any]:
    """Return the configuration of a base that an adapter names, if it lies on this machine."""
    if not trained_on:
        return {}
    if Path(trained_on).is_dir():
        return _config_in(Path(trained_on) / CONFIG)
    if not _HUB.fullmatch(trained_on):
        return {}
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return {}
    try:
        found = try_to_load_from_cache(trained_on, CONFIG)
    except ValueError:  # no name of a repository: a folder of the machine that it was trained on
        return {}
    return _config_in(Path(found)) if isinstance(found, str) else {}


def _config_in(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def _card(file: Path) -> str:
    """Return the base that a model card names."""
    try:
        found = _CARD.match(file.read_text(encoding="utf-8")) if file.is_file() else None  # a pipe would be waited for
    except (OSError, ValueError):
        return ""
    return found[1] if found else ""


def _cached_as(folder: Path) -> str:
    """Return the name on the hub of a folder in its cache; "" for other folders."""
    found = [_CACHED.fullmatch(part) for part in (*folder.parts, *folder.resolve().parts)]
    return next((f"{one[1]}/{one[2]}" for one in found if one is not None), "")


def _same(trained_on: str, base: Path) -> bool:
    """Return True if a base has the name that an adapter says, in whatever folder and format."""
    if Path(trained_on).is_dir() and Path(trained_on).resolve() == base.resolve():
        return True
    cached = _CACHED.search(trained_on)  # a folder in the hub's cache
    wanted = _plain(cached[2] if cached else Path(trained_on).name)
    parts = {*base.parts, *base.resolve().parts, _cached_as(base).rpartition("/")[2], str(_known(base))}
    return wanted in {_plain(part) for part in parts}


def _known(base: Path) -> str:
    return Path(str(_config_in(base / CONFIG).get("_name_or_path") or "")).name


def _plain(name: str) -> str:
    return _VARIANT.sub("", name.lower())
