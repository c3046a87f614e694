"""A store of versions: a folder, or a bucket of an object store, behind fsspec.

    STORE/versions/00000017/manifest.json, adapter_config.json, adapter_model.safetensors
    STORE/pins/00000012          versions that are kept whatever comes after them
    STORE/engines/NAME.json      what the follower of an engine says of it

In a folder a version is written under another name and becomes visible by one rename. Object stores have no rename:
there a version's number is claimed by a conditional put (`claim`), and it becomes visible with its manifest, the last
file that is put. Two publishers never write the same version: the second one's rename, or its claim, fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any

from ..errors import InvalidInput, PushRefused
from ..extras import needed
from ..leftovers import Scratch
from ..logs import shown, words_of
from .keys import key_of
from .manifest import MANIFEST, Manifest, check_file

_DIGITS = 8
_VERSION = re.compile(rf"\d{{{_DIGITS},}}")
_CLAIM, _DRAFT = "claim", ".draft-"
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


class Store:
    """Versions at a URL, newest last.

    Args:
        url: a path, or any URL of fsspec's: file://, s3://, gs://, memory://, ...
        key: with which manifests are signed and have to be; as of `key_of`.

    Attributes:
        url: as lines and errors have it: without a password, or a query.
        run: name of the store: the last part of its URL.
        folder: where it is in this machine's file system; None for object stores.

    Raises:
        InvalidInput: no such kind of URL, or a file lies there.
        MissingExtra: fsspec, or what it needs for this URL, is not installed.
    """

    def __init__(self, url: str | os.PathLike[str], key: str | bytes | None = None) -> None:
        self._given, self.key = os.fspath(url), key_of(key)
        self.url = shown(self._given)
        with needed("a store of versions needs fsspec", "'lora-merge[publish]'", "fsspec"):
            import fsspec
            from fsspec.implementations.local import LocalFileSystem
        try:
            self.fs, root = fsspec.core.url_to_fs(self._given)
        except ValueError as error:
            raise InvalidInput(f"{self.url} is no URL of a store: {self.told(error)}") from error
        except ImportError as error:
            with needed(f"{self.url} needs a package of fsspec's ({error})", "'lora-merge[s3]', or that one", ""):
                raise ModuleNotFoundError(str(error), name="") from error
        self.folder = Path(root) if isinstance(self.fs, LocalFileSystem) else None
        self.root = root.rstrip("/")
        if not self._given:
            raise InvalidInput("the URL of the store is empty: expected a folder or a URL of fsspec's")
        above = () if self.folder is None else (self.folder, *self.folder.parents)
        if file := next((p for p in above if p.is_file() or (p.is_symlink() and not p.exists())), None):
            what = "a link that leads nowhere" if file.is_symlink() else "a file"
            raise InvalidInput(f"{self.url} is no store: {file} is {what}, expected a folder")
        if self.folder is None and re.search(r"[*?[]", re.sub(r"^\w+://\[[\w:.]+\]", "", root)):
            # Also what is removed: versions of other stores, as if they were this one's. (IPv6 is none, but "::" in it
            # is fsspec's sign for one file system in another.)
            raise InvalidInput(
                f"{self.url} is no URL of a store: fsspec reads *, ? and [ in it as a pattern, of which other stores "
                "may be, and a query is part of no store's; leave them out (and :: of an IPv6 address: write its zeros)"
            )
        if "://" not in root and shown(root) != root:
            raise InvalidInput(
                f"{self.url} is no URL of a store: {self.url.partition(':')[0]}:// takes no user or password in it; "
                "set them as its library reads them, in the environment or in a configuration"
            )
        self._scratch: Scratch | None = None
        self.run = _NAME.sub("-", self.root.rpartition("/")[2]) or "store"

    # ---- reading -----------------------------------------------------------------------------------------------------

    def numbers(self) -> list[int]:
        """Return the numbers of all versions that are there or were begun, in order."""
        names = self._names("versions")
        return sorted(int(name) for name in names if _VERSION.fullmatch(name))

    def newest(self) -> Iterator[int]:
        """Yield the versions that are visible, the newest first."""
        for number in reversed(self.numbers()):
            if self.folder is not None or self.has(number):
                yield number

    def has(self, version: int) -> bool:
        """Return True while a version is visible."""
        if self.folder is not None:
            return Path(self._path(version)).exists()
        path = self._path(version, MANIFEST)
        # `exists` of some stores is also False, and `info` finds nothing, where they do not answer.
        for look in (self.fs.info, self.fs.cat_file):
            with suppress(FileNotFoundError):
                look(path)
                return True
        return False

    def manifest(self, version: int, *, signed: bool = True) -> Manifest:
        """Return the manifest of a version.

        Args:
            signed: whether it has to be signed with the key, if there is one.

        Raises:
            InvalidInput: there is no such version, or it is torn or somebody else's; as of `Manifest.read`.
        """
        try:
            data = self.fs.cat_file(self._file(version, MANIFEST))
        except (FileNotFoundError, NotADirectoryError) as error:
            if version not in (there := self.numbers()):
                raise InvalidInput(
                    f"there is no {self.where(version)}, or no longer: it has {', '.join(map(str, there)) or 'none'}"
                ) from error
            raise InvalidInput(f"{self.where(version)} has no {MANIFEST}: it is torn, or somebody else's") from error
        return Manifest.read(data, self.where(version), version, self.key if signed else None)

    def fetch(self, manifest: Manifest, into: Path) -> Path:
        """Copy the files of a version into a new folder, checked, and return it.

        Args:
            into: a folder on this machine, in which the new one is made.

        Raises:
            InvalidInput: a file is missing, or is not what the manifest says.
        """
        folder = into / manifest.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            for name, entry in manifest.files.items():
                try:
                    self.fs.get_file(self._file(manifest.version, name), str(folder / name))
                except (FileNotFoundError, NotADirectoryError) as error:
                    raise InvalidInput(f"{self.where(manifest.version)} lacks {name}: torn, or just removed") from error
                check_file(folder / name, entry, self.where(manifest.version))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def told(self, error: Exception) -> str:
        """Return an error of the store's library in words, without the secrets of its URL."""
        return words_of(error, self._given)

    def where(self, version: int) -> str:
        """Return a version in words, for errors."""
        return f"version {version} of {self.url}"

    def pinned(self) -> set[int]:
        """Return the versions that are kept whatever comes after them."""
        return {int(name) for name in self._names("pins") if _VERSION.fullmatch(name)}

    def engines(self) -> dict[str, dict[str, Any]]:
        """Return what followers say of their engines, by name."""
        found: dict[str, dict[str, Any]] = {}
        for name in self._names("engines"):
            if not name.endswith(".json"):
                continue
            with suppress(FileNotFoundError, IsADirectoryError, ValueError, RecursionError):  # gone, or no follower's
                said = json.loads(self.fs.cat_file(f"{self.root}/engines/{name}"))
                if isinstance(said, dict):
                    found[name.removesuffix(".json")] = said
        return found

    def silent(self, engines: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
        """Return the seconds for which followers have said nothing, by the clock of the store where that tells one, as
        those of hosts differ: a file is written to ask it what time it is.

        Args:
            engines: as of `engines`.
        """
        folder = f"{self.root}/engines"
        asked, here = f"{folder}/.now-{token_hex(4)}", datetime.now(UTC)
        with suppress(Exception):  # one that cannot be written to: this host's clock has to do
            self.fs.pipe_file(asked, b"")
            here = self.fs.modified(asked)
        with suppress(Exception):
            self.fs.rm_file(asked)
        found = {}
        for name, said in engines.items():
            try:
                silent = here - self.fs.modified(f"{folder}/{name}.json")
            except Exception:  # not every store of fsspec's says when
                silent = _since(said)
            found[name] = max(silent.total_seconds(), 0.0)
        return found

    # ---- writing -----------------------------------------------------------------------------------------------------

    def draft(self, version: int) -> Path:
        """Return a new empty folder in which a version is written: in the store itself, if that is a folder."""
        if self.folder is None:
            self._scratch = self._scratch or Scratch()
            return Path(tempfile.mkdtemp(dir=self._scratch.path))
        draft = self.folder / "versions" / f"{_DRAFT}{version}-{token_hex(4)}"
        draft.mkdir(parents=True)
        return draft

    def commit(self, draft: Path, manifest: Manifest) -> None:
        """Make what lies in a draft visible as a version.

        Raises:
            PushRefused: somebody else has published this version.
        """
        try:
            (draft / MANIFEST).write_bytes(manifest.to_bytes())
        except FileNotFoundError as error:  # another publisher has removed the draft, with what is older than its own
            raise self._taken(manifest) from error
        if self.folder is not None:
            self._rename(draft, manifest)
        else:
            self._put(draft, manifest)

    def copy(self, version: int, draft: Path, manifest: Manifest) -> None:
        """Copy a version's files into a draft, checked."""
        folder = self.fetch(manifest, draft)
        for name in manifest.files:
            (folder / name).rename(draft / name)
        folder.rmdir()

    def pin(self, version: int, pinned: bool = True) -> None:
        """Keep a version whatever comes after it, or no longer."""
        path = f"{self.root}/pins/{version:0{_DIGITS}d}"
        if pinned:
            self.manifest(version)
            self.fs.makedirs(f"{self.root}/pins", exist_ok=True)
            self.fs.pipe_file(path, b"")
        elif self.fs.exists(path):
            self.fs.rm_file(path)

    def retain(self, keep: int) -> int:
        """Remove all but the newest `keep` versions and the pinned ones, and what is left of some that were never
        completed before these. Returns the newest version; 0 where there is none."""
        visible = list(self.newest())
        kept = {*visible[:keep], *self.pinned()}
        oldest = min(visible[:keep], default=0)
        for number in self.numbers():
            if number < oldest and number not in kept:
                self._remove(number)
        if self.folder is not None:
            for draft in (self.folder / "versions").glob(f"{_DRAFT}*"):
                begun = draft.name.removeprefix(_DRAFT).partition("-")[0]
                if begun.isdecimal() and int(begun) < oldest:  # else somebody else's
                    shutil.rmtree(draft, ignore_errors=True)
        return max(visible, default=0)

    def tell(self, engine: str, said: dict[str, Any] | None) -> None:
        """Write what a follower says of its engine; None: nothing any more."""
        path = f"{self.root}/engines/{_NAME.sub('-', engine)}.json"
        if said is None:
            with suppress(FileNotFoundError):
                self.fs.rm_file(path)
            return
        data = json.dumps(said).encode()
        if self.folder is None:
            self.fs.pipe_file(path, data)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        written = Path(f"{path}.{token_hex(4)}")
        try:
            written.write_bytes(data)
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)  # a full disk takes its name, if not what is in it

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _path(self, version: int, name: str = "") -> str:
        return f"{self.root}/versions/{version:0{_DIGITS}d}/{name}".rstrip("/")

    def _file(self, version: int, name: str) -> str:
        """Return the path of a version's file; raise `FileNotFoundError` for a pipe, a device, ..."""
        path = self._path(version, name)
        if self.folder is not None and not Path(path).is_file():
            raise FileNotFoundError(path)
        return path

    def _names(self, what: str) -> list[str]:
        path = f"{self.root}/{what}"
        self.fs.invalidate_cache(path)
        try:
            return [entry.rstrip("/").rpartition("/")[2] for entry in self.fs.ls(path, detail=False)]
        except FileNotFoundError:
            return []

    def _rename(self, draft: Path, manifest: Manifest) -> None:
        for file in (*draft.iterdir(), draft):
            _sync(file)
        there = Path(self._path(manifest.version))
        try:
            draft.rename(there)
        except OSError as error:
            if not there.exists():
                raise
            # NFS asks once more where an answer was lost, and hears then that there is nothing to rename.
            if draft.exists() or (there / MANIFEST).read_bytes() != manifest.to_bytes():
                raise self._taken(manifest) from error
        _sync(draft.parent)

    def _put(self, draft: Path, manifest: Manifest) -> None:
        # The claim is read back: not every store of fsspec's knows conditional puts, and where an answer was lost the
        # second try finds what the first one has put.
        claim = self._path(manifest.version, _CLAIM)
        mine = f"{manifest.publisher} {token_hex(8)}".encode()
        with suppress(FileExistsError):
            self.fs.pipe_file(claim, mine, mode="create")
        if self.fs.cat_file(claim) != mine:
            raise self._taken(manifest)
        for name in manifest.files:
            self.fs.put_file(str(draft / name), self._path(manifest.version, name))
        self.fs.pipe_file(self._path(manifest.version, MANIFEST), (draft / MANIFEST).read_bytes())
        shutil.rmtree(draft, ignore_errors=True)

    def _taken(self, manifest: Manifest) -> PushRefused:
        return PushRefused(
            f"{self.where(manifest.version)} was published by somebody else at the same time: two trainers publish "
            "into one store. Give each one of its own, or stop one, and make a new Publisher to go on from there"
        )

    def _remove(self, version: int) -> None:
        # Its manifest first: what has none is no version, and is removed by the next call if this one is interrupted.
        with suppress(FileNotFoundError):
            if self.folder is None:
                with suppress(FileNotFoundError):
                    self.fs.rm_file(self._path(version, MANIFEST))
                self.fs.rm(self._path(version), recursive=True)
            else:
                gone = self.folder / "versions" / f"{_DRAFT}{version}-{token_hex(4)}"
                Path(self._path(version)).rename(gone)
                shutil.rmtree(gone, ignore_errors=True)


def now() -> str:
    """Return the time in UTC, as manifests have it."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _since(said: Mapping[str, Any]) -> timedelta:
    """Return the time since a follower has said something, by its clock and this host's."""
    try:
        return datetime.now(UTC) - datetime.fromisoformat(str(said.get("at", "")).replace("Z", "+00:00"))
    except (ValueError, TypeError, OverflowError):  # no time, or one without its zone
        return timedelta.max


def _sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
