"""The manifest of a version: what it is, which files it has, what it was trained on, and who vouches for it.

    {"format": "lora_merge version", "layout": 1,
     "version": 17, "parent": 16, "copy_of": null, "run": "run7",
     "publisher": "9f1c...", "created": "2026-11-28T19:47:44Z",
     "base": {"name": "Qwen/Qwen2.5-7B", "samples": {"model.layers.0.self_attn.q_proj.weight": {...}, ...}},
     "files": {"adapter_config.json": {"nbytes": 931, "blake2b": "..."}, "adapter_model.safetensors": {...}},
     "signature": "..."}

A manifest is checked before anything that it names is read, and files before anything in them is used.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidInput
from ..models.peft.files import CONFIG, TENSORS

FORMAT, LAYOUT = "lora_merge version", 1
MANIFEST = "manifest.json"
_RUN = re.compile(r"[A-Za-z0-9._-]+")
_LONGEST = 4 << 20
"""Bytes of a manifest that are read at most."""
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file of a version: its size in bytes, and the BLAKE2b digest (32 bytes, hex) of what is in it."""

    nbytes: int
    blake2b: str


@dataclass(frozen=True, slots=True)
class Base:
    """The model that an adapter was trained on.

    Args:
        name: folder or hub name, as the trainer knows it.
        samples: as of `samples_of`.
    """

    name: str
    samples: Mapping[str, Mapping[str, str]]

    @property
    def fingerprint(self) -> str:
        """A digest of the samples, for people and for comparisons: 16 hex digits."""
        return _digest(self.samples)[:16]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a version says of itself.

    Args:
        run: name of the store that it was published in.
        version: its number, from 1 on.
        parent: the version before it, as its publisher knew it; None for the first.
        copy_of: the version that a rollback brought back; None for others.
        publisher: which one wrote it; a random name.
        created: when, in UTC (ISO 8601).
        files: by name.
        signature: HMAC-SHA256 over all the rest, hex; "" where it was not signed.
    """

    run: str
    version: int
    parent: int | None
    publisher: str
    created: str
    base: Base
    files: Mapping[str, FileEntry]
    copy_of: int | None = None
    signature: str = field(default="")

    @property
    def name(self) -> str:
        """The name under which engines serve it, which no other contents have: run, version, and 8 hex digits."""
        return f"{self.run}@{self.version}-{_digest(self._said())[:8]}"

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.files.values())

    def _said(self) -> dict[str, Any]:
        """All but the signature, as JSON values."""
        return {"format": FORMAT, "layout": LAYOUT, **{k: v for k, v in asdict(self).items() if k != "signature"}}

    def signed(self, key: bytes | None) -> Manifest:
        """Return it with a signature; without a key as it is."""
        if key is None:
            return self
        values = {name: getattr(self, name) for name in self.__slots__}
        return Manifest(**values | {"signature": _mac(key, self._said())})

    def to_bytes(self) -> bytes:
        return json.dumps(self._said() | {"signature": self.signature}, indent=1, sort_keys=True).encode()

    @classmethod
    def read(cls, data: bytes, where: str, version: int, key: bytes | None) -> Manifest:
        """Read what a store holds as the manifest of a version.

        Args:
            where: in words, for errors.
            version: whose folder it lies in.
            key: with which it has to be signed; None for any, or none.

        Raises:
            InvalidInput: it is no manifest, of another version, or its signature is wrong or missing.
        """
        said = _json(data, where)
        try:
            manifest = cls(
                **{name: said[name] for name in ("run", "version", "parent", "publisher", "created", "copy_of")},
                base=Base(**said["base"]),
                files={name: FileEntry(**entry) for name, entry in said["files"].items()},
                signature=said["signature"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"{where}: {MANIFEST} lacks something, or has it in another form: {error}") from error
        for wrong in manifest._problems(version):
            raise InvalidInput(f"{where}: {MANIFEST} {wrong}")
        # `compare_digest` takes of text ASCII alone, and raises of other signatures.
        if key is not None and not hmac.compare_digest(_plain(_mac(key, manifest._said())), _plain(manifest.signature)):
            what = "was changed, or signed with another key" if manifest.signature else "is not signed"
            raise InvalidInput(
                f"{where}: {MANIFEST} {what}, and only versions that are signed with the key here are taken"
            )
        return manifest

    def _problems(self, version: int) -> Iterator[str]:
        if self.version != version:
            yield f"is of version {self.version}: somebody has copied it"
        kinds = (self.run, self.publisher, self.created, self.base.name, self.signature)
        numbers = (self.version, *(n for n in (self.parent, self.copy_of) if n is not None))
        if (
            not all(isinstance(value, str) for value in kinds)
            or not all(type(number) is int for number in numbers)
            or not isinstance(self.base.samples, dict)
            or not all(map(_is_sample, self.base.samples.values()))
        ):
            yield "has values of other types than this lora_merge writes"
        if _RUN.fullmatch(str(self.run)) is None:
            yield f"names a run {self.run!r}, which is no name of a store"
        if self.files.keys() != {CONFIG, TENSORS}:
            yield f"names the files {sorted(self.files)}, and a version has {CONFIG} and {TENSORS}"
        for name, entry in self.files.items():
            if type(entry.nbytes) is not int or not isinstance(entry.blake2b, str):
                yield f"says no size and digest of {name}"


def entry_of(file: Path) -> FileEntry:
    """Return what a manifest says of a file."""
    digest, nbytes = hashlib.blake2b(digest_size=32), 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            nbytes += len(chunk)
    return FileEntry(nbytes, digest.hexdigest())


def check_file(file: Path, entry: FileEntry, where: str) -> None:
    """Raise `InvalidInput` unless a file is what the manifest says."""
    found = entry_of(file)
    if found.nbytes != entry.nbytes:
        raise InvalidInput(f"{where}: {file.name} has {found.nbytes} bytes, and its manifest says {entry.nbytes}: torn")
    if found != entry:
        raise InvalidInput(f"{where}: {file.name} is not what its manifest says: its checksum differs")


def _is_sample(said: Any) -> bool:
    """Return True for what `samples_of` returns of a tensor, of a dtype that is known here."""
    if not isinstance(said, dict) or said.keys() != {"dtype", "digest"} or not isinstance(said["digest"], str):
        return False
    return isinstance(said["dtype"], str) and isinstance(getattr(torch, said["dtype"], None), torch.dtype)


def _json(data: bytes, where: str) -> dict[str, Any]:
    try:
        if len(data) > _LONGEST:
            raise ValueError(f"{len(data)} bytes")
        said = json.loads(data)
        if not isinstance(said, dict):
            raise TypeError(f"a {type(said).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInput(f"{where}: {MANIFEST} is no JSON object ({error}): torn, or somebody else's") from error
    if said.get("format") != FORMAT:
        raise InvalidInput(f"{where}: {MANIFEST} is not lora_merge's: its format is {said.get('format')!r}")
    if said.get("layout") != LAYOUT:
        raise InvalidInput(
            f"{where}: {MANIFEST} has layout {said.get('layout')!r}, and this lora_merge reads {LAYOUT}: install the "
            "version that wrote it"
        )
    return said


def _mac(key: bytes, said: Mapping[str, Any]) -> str:
    return hmac.new(key, _plain(said), hashlib.sha256).hexdigest()


def _digest(said: Any) -> str:
    return hashlib.blake2b(_plain(said), digest_size=16).hexdigest()


def _plain(said: Any) -> bytes:
    """Return JSON values as bytes that do not depend on the order of keys."""
    return json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
