"""Whose tokenizer, chat template and processor go with merged weights: the base's, or those that lie beside an adapter.

Trainers save the tokenizer along. Most often it is the base's, written anew by another release; where it says something
else (another template, more tokens, another end of a turn), the adapter was trained on that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ..errors import InvalidInput
from .checkpoint import json_of

CHOICES = ("base", "adapter")
_JSON, _CONFIG, _GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_WORDS = (_JSON, _CONFIG, "special_tokens_map.json", "added_tokens.json", "tokenization_*.py")
_VOCABULARY = ("vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken", "tekken.json", "*.spm", "*.codes")
_TEMPLATES = ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*")
_NESTED = "processor_config.json"
_PROCESSORS = {"preprocessor_config.json": "image_processor", "video_preprocessor_config.json": "video_processor"}
"""File -> where newer releases of transformers keep the same, in processor_config.json."""
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_IDS = ("eos_token", "bos_token", "pad_token")
"""Tokens that config.json and generation_config.json name by number."""
_FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", "split_special_tokens")
_OF_RUNS = ("version", "truncation", "padding", "added_tokens")
"""What tokenizer.json says of the last call, or is compared apart."""
_MANY = 4


@dataclass(frozen=True, eq=False)
class Words:
    """What a folder's tokenizer is, as far as its files say.

    Args:
        files: of it, relative to the folder; its processors' among them.
        ids: token -> number, of the vocabulary and what was added.
        added: of these the ones that were added.
        special: eos_token and the like -> the token.
        flags: of its configuration.
        rules: what tokenizer.json says of how text is cut; None where it is not there.
        templates: name -> chat template; "" for the one that is used if none is named.
        processors: what processors' files say, by the part of processor_config.json.
    """

    files: tuple[Path, ...]
    ids: Mapping[str, int]
    added: Mapping[str, int]
    special: Mapping[str, str]
    flags: Mapping[str, Any]
    rules: Any
    templates: Mapping[str, str]
    processors: Mapping[str, Mapping[str, Any]]

    @property
    def whole(self) -> bool:
        """Whether it can stand for itself: a vocabulary and its configuration."""
        names = [path.as_posix() for path in self.files]
        return _CONFIG in names and (_JSON in names or any(_is(name, _VOCABULARY) for name in names))


@dataclass
class Along:
    """Files that go with merged weights.

    Args:
        files: where each is to lie, relative to the result, and where it lies now.
        made: files of JSON that are written anew.
        tokens: eos_token_id and the like, for config.json.
        notes: what may be worth a look.
    """

    files: dict[Path, Path]
    made: dict[Path, Any] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def along_with(
    base: Path, files: Iterable[Path], adapters: Sequence[tuple[str, Path]], choice: str | None, rows: int | None
) -> Along:
    """Return the files that go with merged weights.

    Args:
        base: folder of the base.
        files: of it, that would go along.
        adapters: name and folder of each adapter.
        choice: "base" or "adapter"; None: the adapter's where it differs from the base's.
        rows: of the embedding; None where it is not known.

    Raises:
        InvalidInput: the choice cannot be had, adapters differ from one another, or the adapter's tokenizer has tokens
            for which the embedding has no row.
    """
    along = Along({path: base / path for path in files})
    if choice not in (None, *CHOICES):
        raise InvalidInput(f"tokenizer must be 'base' or 'adapter' (--tokenizer), got {choice!r}")
    if choice == "base":
        return along
    mine = {name: (folder, words) for name, folder in adapters if (words := read_words(folder)).files}
    if choice == "adapter" and not mine:
        folders = ", ".join(str(folder) for _, folder in adapters)
        raise InvalidInput(f"tokenizer='adapter' (--tokenizer adapter): {folders} holds none; take the base's")
    if not mine:
        return along
    ours = read_words(base)
    differing = {name: one for name, one in mine.items() if choice == "adapter" or differences(ours, one[1])}
    if not differing:
        return along
    name, (folder, words) = next(iter(differing.items()))
    for other, (_, theirs) in differing.items():
        if told := differences(words, theirs) or differences(theirs, words):
            raise InvalidInput(
                f"tokenizer: the tokenizers of {name} and {other} differ ({'; '.join(told)}), and what they are merged "
                "into has one: take the base's with tokenizer='base' (--tokenizer base), or merge them apart (--each)"
            )
    _check_rows(name, ours, words, rows)
    told = differences(ours, words)
    _put(along, folder, ours, words)
    _align(along, ours, words, base)
    if told:
        along.notes.append(
            f"the tokenizer is that of {name}, which differs from the base's: {'; '.join(told)}; tokenizer='base' "
            "(--tokenizer base) takes the base's"
        )
    return along


def with_saved(files: Mapping[Path, Path], saved: Mapping[Path, Path]) -> dict[Path, Path]:
    """Return files that go along with a tokenizer or processor that was saved anew: what the one before it has under
    other names (added tokens, templates) would be read beside it.

    Args:
        files, saved: where each is to lie, and where it lies now.
    """
    of_processors = (_NESTED, *_PROCESSORS)
    processor, before = (any(_is(path.as_posix(), of_processors) for path in some) for some in (saved, files))
    template = any(_is(path.as_posix(), _TEMPLATES) for path in saved)
    gone = [*_WORDS, *_VOCABULARY, *(of_processors if processor else ())]
    gone += _TEMPLATES if processor or template or not before else ()  # else it may be the processor's that stays
    kept = {to: at for to, at in files.items() if to.suffix == ".py" or not _is(to.as_posix(), gone)}
    return kept | dict(saved)


def read_words(folder: Path) -> Words:
    """Read what a folder's tokenizer is.

    Raises:
        InvalidInput: a file of it is no JSON, or says something else than a tokenizer's does.
    """
    try:
        return _read(folder)
    except InvalidInput:  # which is a ValueError
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OSError) as error:
        raise InvalidInput(
            f"{folder}: the files of its tokenizer cannot be read ({type(error).__name__}: {error}); save it again, or "
            "take the base's without a look at either with tokenizer='base' (--tokenizer base)"
        ) from error


def _read(folder: Path) -> Words:
    files = tuple(_files(folder))
    there = {path.as_posix() for path in files}

    def said(name: str) -> dict[str, Any]:
        return json_of(folder / name) if name in there else {}

    whole, config, more = said(_JSON), said(_CONFIG), said("special_tokens_map.json")
    vocabulary = (whole.get("model") or {}).get("vocab") or said("vocab.json")
    ids = _numbered(vocabulary)
    added = {str(k): int(v) for k, v in said("added_tokens.json").items()}
    added |= {str(one["content"]): int(n) for n, one in (config.get("added_tokens_decoder") or {}).items()}
    added |= {str(one["content"]): int(one["id"]) for one in whole.get("added_tokens") or ()}
    special = {key: text for key in _SPECIAL if (text := _text(config.get(key)) or _text(more.get(key)))}
    nested = said(_NESTED)
    return Words(
        files=files,
        ids=ids | added,
        added=added,
        special=special,
        flags={key: config[key] for key in _FLAGS if config.get(key) is not None},
        rules=_plain({key: value for key, value in whole.items() if key not in _OF_RUNS}) if whole else None,
        templates=_templates(folder, there, config, said("chat_template.json")),
        processors={
            part: {**(nested.get(part) or {}), **({} if nested.get(part) else said(file))}
            for file, part in _PROCESSORS.items()
        },
    )


def differences(base: Words, mine: Words) -> list[str]:
    """Return what an adapter's tokenizer says otherwise than the base's, in words; what only the base's says is no
    difference."""
    found = []
    if any(base.templates.get(key) != text for key, text in mine.templates.items()):
        found.append("chat template")
    more = {token: n for token, n in mine.added.items() if base.ids.get(token) != n}
    if more:
        some = ", ".join(list(more)[:_MANY]) + (", ..." if len(more) > _MANY else "")
        found.append(f"{len(more)} added token{'s' * (len(more) > 1)} ({some})")
    changed = [k for k, text in mine.special.items() if base.special.get(k) != text]
    found += [f"{key} {mine.special[key]} for {base.special.get(key, 'none')}" for key in changed]
    plain = {token: n for token, n in mine.ids.items() if token not in mine.added}
    if plain and base.ids and any(base.ids.get(token) != n for token, n in plain.items()):
        found.append("vocabulary")
    elif mine.rules is not None and base.rules is not None and mine.rules != base.rules:
        found.append("how text is cut (tokenizer.json)")
    if mine.whole and not base.whole:
        found.append("the base has no whole one")
    found += [k for k, value in mine.flags.items() if k in base.flags and base.flags[k] != value]
    for file, part in _PROCESSORS.items():
        theirs, own = base.processors[part], mine.processors[part]
        if any(key in theirs and theirs[key] != value for key, value in own.items() if _counts(key)) or (
            own and not theirs
        ):
            found.append(f"{part} ({file})")
    return found


def _counts(key: str) -> bool:
    """Return True if a setting of a processor is one: names of classes differ from release to release."""
    return not key.startswith("_") and not key.endswith(("_type", "_class"))


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        inner = sorted(path.iterdir()) if path.is_dir() and path.name == "additional_chat_templates" else [path]
        for one in inner:
            name = one.relative_to(folder).as_posix()
            if one.is_file() and _is(name, (*_WORDS, *_VOCABULARY, *_TEMPLATES, _NESTED, *_PROCESSORS)):
                yield Path(name)


def _is(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _numbered(vocabulary: Any) -> dict[str, int]:
    """Return a vocabulary as token -> number, of any kind of tokenizer."""
    if isinstance(vocabulary, dict):
        return {str(token): n for token, n in vocabulary.items() if isinstance(n, int)}
    return {str(one[0] if isinstance(one, list) else one): n for n, one in enumerate(vocabulary)}


def _text(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _plain(value: Any) -> Any:
    """Return rules without what releases write differently: empty entries, and merges as text or as pairs."""
    if isinstance(value, dict):
        return {
            key: _merges(one) if key == "merges" else _plain(one)
            for key, one in value.items()
            if key != "vocab" and one not in (None, False, [], {}, "")
        }
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _merges(merges: Any) -> Any:
    return [one.split(" ") if isinstance(one, str) else one for one in merges]


def _templates(folder: Path, there: set[str], config: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, str]:
    said = config.get("chat_template") or beside.get("chat_template") or {}
    if isinstance(said, list):
        said = {one.get("name"): one.get("template") for one in said if isinstance(one, dict)}
    found = {"": said} if isinstance(said, str) else {str(k): str(v) for k, v in said.items()}
    found = {"" if name == "default" else name: text for name, text in found.items()}
    for name in sorted(there):
        if name.endswith(".jinja"):
            key = "" if name == _TEMPLATES[0] else Path(name).stem
            found[key] = (folder / name).read_text(encoding="utf-8")
    return found


def _check_rows(name: str, base: Words, mine: Words, rows: int | None) -> None:
    beyond = sorted(
        (n, token) for token, n in mine.ids.items() if rows is not None and n >= rows and base.ids.get(token) != n
    )
    if beyond:
        raise InvalidInput(
            f"tokenizer: {name} brings {beyond[0][1]!r} as token {beyond[0][0]} ({len(beyond)} such tokens), and the "
            f"embedding has {rows} rows: the adapter does not hold the rows that were added; take the base's tokenizer "
            "with tokenizer='base' (--tokenizer base)"
        )


def _put(along: Along, folder: Path, base: Words, mine: Words) -> None:
    vocabulary = {token: n for token, n in mine.ids.items() if token not in mine.added}
    same = not vocabulary or not base.ids or all(base.ids.get(token) == n for token, n in vocabulary.items())
    gone = [*_WORDS, *(() if same else _VOCABULARY)] if mine.whole else []
    gone += _TEMPLATES if mine.templates else ()
    along.files = {to: source for to, source in along.files.items() if not _is(to.as_posix(), gone)}
    own = [path for path in mine.files if not _is(path.as_posix(), (_NESTED, *_PROCESSORS))]
    processed = any(mine.processors[part] for part in _PROCESSORS.values())
    own += [path for path in mine.files if processed and path not in own]
    along.files |= {path: folder / path for path in own}
    config = Path(_CONFIG)
    apart = any(_is(path.as_posix(), _TEMPLATES) for path in along.files)
    if mine.whole and not mine.templates and "" in base.templates and not apart:  # it was in the base's configuration
        along.made[config] = {**json_of(folder / _CONFIG), "chat_template": base.templates[""]}
    for file, part in _PROCESSORS.items():
        nested = Path(_NESTED) in own and Path(file) not in own and Path(file) in along.files
        if nested and mine.processors[part]:  # older releases of transformers read the file, newer ones the part
            along.made[Path(file)] = {**base.processors[part], **mine.processors[part]}


def _align(along: Along, base: Words, mine: Words, home: Path) -> None:
    """Let the configs name the adapter's special tokens where they differ from the base's, as transformers' Trainer
    does before it trains: generation would not stop at a new end of a turn."""
    new = {
        f"{key}_id": number
        for key in _IDS
        if (text := mine.special.get(key)) is not None
        and (number := mine.ids.get(text)) is not None
        and base.ids.get(base.special.get(key, "")) != number
    }
    if not new:
        return
    along.tokens = new
    if Path(_GENERATION) in along.files:
        along.made[Path(_GENERATION)] = aligned(json_of(home / _GENERATION), new, every_end=True)
    along.notes.append(f"config.json has the adapter's special tokens: {', '.join(f'{k} {n}' for k, n in new.items())}")


def aligned(config: Mapping[str, Any], tokens: Mapping[str, int], *, every_end: bool = False) -> dict[str, Any]:
    """Return a config that names these special tokens; other ends that it lists stay.

    Args:
        every_end: keep one end that it names beside the new one, too, as a generation config can.
    """
    said = dict(config)
    text = said.get("text_config")
    if isinstance(text, dict):
        said["text_config"] = aligned(text, tokens)
    for key, number in tokens.items():
        before = said.get(key)
        if isinstance(text, dict) and key not in said:
            continue
        ends = before if isinstance(before, list) else [] if before is None or not every_end else [before]
        several = key == "eos_token_id" and any(one != number for one in ends)
        said[key] = [number, *(one for one in ends if one != number)] if several else number
    return said
