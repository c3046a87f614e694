"""Writes a checkpoint so that it is there whole or not at all.

Everything goes into a hidden folder beside the target, is brought to the disk, and is renamed at the end. config.json
and the index come last, so that not even what a killed run leaves there can be loaded. The next run to the same target
removes it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import IO, Any

from ..errors import InvalidInput, LoraMergeError
from ..leftovers import LOCK, locked, remove_leftovers
from ..logs import shown
from ..stream.buckets import Meta
from .checkpoint import CONFIG, INDEX, SINGLE, readable
from .format import Stored, make_header, read_header, read_into, write_from

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MINE = ".lora-merge-"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
SHARD_SIZE = 5 * 10**9
"""Bytes of a shard where no base says how it is cut; as transformers."""
_READ = 1 << 24
_HERE, _EXCHANGE = -100, 2
"""AT_FDCWD and RENAME_EXCHANGE."""
_FLUSHED = 1 << 28
"""Bytes after which what was written is brought to the disk: so that this goes on beside the work, not after it."""


def absolute(path: str | Path) -> Path:
    """Return a path from the root, without `..`; links stay.

    Raises:
        InvalidInput: it is a URL, of which a folder of that name would be made.
    """
    if "://" in str(path):
        raise InvalidInput(
            f"{shown(str(path))} is a URL, expected a folder of this machine: write there, and upload the result"
        )
    return Path(os.path.normpath(Path(path).expanduser().absolute()))


def size_of(text: str | int) -> int:
    """Return the bytes of a number or of "5GB", "500MB", "2GiB"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B?)\s*", str(text), flags=re.IGNORECASE)
    unit = "" if found is None else found[2].upper().removesuffix("B") and found[2].upper()
    if found is None or unit not in _UNITS or float(found[1]) * _UNITS[unit] < 1:
        raise InvalidInput(f"a shard's size must be a number of bytes, or like 5GB or 500MiB; got {text!r}")
    return int(float(found[1]) * _UNITS[unit])


def shards_of(tensors: Sequence[Meta], size: int) -> dict[str, list[Meta]]:
    """Divide tensors into files of up to `size` bytes (or one tensor), named as transformers names them."""
    groups: list[list[Meta]] = []
    room = 0
    for tensor in tensors:
        if not groups or (tensor.nbytes > room and groups[-1]):
            groups.append([])
            room = size
        groups[-1].append(tensor)
        room -= tensor.nbytes
    if len(groups) <= 1:
        return {SINGLE: groups[0] if groups else []}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, start=1)}


class Writer:
    """One checkpoint that is being written. `with Writer(...) as writer`: it is there after the block, or, if the block
    raised, nothing is.

    Args:
        out: the folder that is to be there at the end.
        files: its weight files, and the tensors of each, in order.
        metadata: of the files.
        index: further entries of the index; None where a single file needs none.
        config: of config.json; None for none.
        along: files to be copied: where each goes, relative to the folder, and where it comes from.
        made: files of JSON to be written, by where each goes; instead of one that would be copied.
        force: replace what is in `out`.
        check: keep checksums of what is written, for `verify`.

    Raises:
        InvalidInput: `out` holds something and `force` is not set, it cannot be written to, or the disk has no room.
            Nothing was written then.
    """

    def __init__(
        self,
        out: str | Path,
        files: Mapping[str, Sequence[Meta]],
        *,
        metadata: Mapping[str, str],
        index: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        along: Mapping[Path, Path] | None = None,
        made: Mapping[Path, Mapping[str, Any]] | None = None,
        force: bool = False,
        check: bool = False,
    ) -> None:
        self.out = absolute(out)
        self._index, self._config = index, config
        self._along, self._made_files, self._force, self._check = along or {}, made or {}, force, check
        self._made = {name: make_header(Path(name), tensors, metadata) for name, tensors in files.items()}
        self.places: dict[str, Stored] = {}
        for name, (_, places) in self._made.items():
            for place in places:
                if place.name in self.places:
                    raise InvalidInput(f"{place.name} would be in {self.places[place.name].file} and in {name}")
                self.places[place.name] = place
        self.nbytes = sum(place.nbytes for place in self.places.values())
        self._sums: dict[str, int] = {}
        self._left = {name: place.nbytes for name, place in self.places.items()}
        self._open: dict[Path, IO[bytes]] = {}
        self._unflushed: dict[Path, int] = {}
        self._folder: Path | None = None
        self._lock: IO[bytes] | None = None
        self._parents: list[Path] = []
        check_target(self.out, force)

    @property
    def folder(self) -> Path:
        """Where the files are now."""
        assert self._folder is not None, "with Writer(...)"
        return self._folder

    def __enter__(self) -> Writer:
        try:
            self._begin()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def _begin(self) -> None:
        with _told(self.out):
            self._parents = [path for path in self.out.parents if not path.exists()]
            self.out.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self.out.parent.glob(f".{escape(self.out.name)}{_MINE}*"))
            self._check_room()
            self._folder = Path(tempfile.mkdtemp(prefix=f".{self.out.name}{_MINE}", dir=self.out.parent))
            self._lock = locked(self._folder)
            self._folder.chmod(0o777 & ~_umask())
            for name, (first, places) in self._made.items():
                opened = self._open[Path(name)] = (self._folder / name).open("wb", buffering=0)
                opened.write(first)
                opened.truncate(places[-1].begin + places[-1].nbytes if places else len(first))

    def _check_room(self) -> None:
        sizes = (source.stat().st_size for source in self._along.values())
        needed = self.nbytes + sum(len(first) for first, _ in self._made.values()) + sum(sizes)
        free = shutil.disk_usage(self.out.parent).free
        if free < needed:
            raise InvalidInput(
                f"{self.out.parent} has {free / 1e9:.2f} GB free, and {self.out.name} takes {needed / 1e9:.2f} GB: "
                "make room, or write elsewhere"
            )

    def write(self, name: str, begin: int, data: memoryview) -> None:
        """Write bytes of a tensor from its byte `begin` on. Each byte is written once, those of a tensor in order."""
        place = self.places[name]
        assert begin == place.nbytes - self._left[name], f"{name}: byte {begin} out of order"
        opened = self._open[place.file]
        with _told(self.out):
            write_from(opened.fileno(), place.begin + begin, data)
            if self._check:
                self._sums[name] = zlib.crc32(data, self._sums.get(name, 0))
            self._left[name] -= len(data)
            self._unflushed[place.file] = self._unflushed.get(place.file, 0) + len(data)
            if self._unflushed[place.file] >= _FLUSHED:
                os.fdatasync(opened.fileno()) if hasattr(os, "fdatasync") else os.fsync(opened.fileno())
                self._unflushed[place.file] = 0

    def verify(self) -> int:
        """Read all tensors back, from the disk where the system lets go of what it has in memory; returns the number of
        bytes that were compared.

        Raises:
            LoraMergeError: some are not what was written; names the first.
        """
        assert self._check
        compared = 0
        self._flush()
        buffer = memoryview(bytearray(_READ))
        for name, (_, places) in self._made.items():
            file = self.folder / name
            header = {stored.name: stored for stored in read_header(file).tensors}
            descriptor = os.open(file, os.O_RDONLY)
            try:
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                for place in places:
                    there, got = header.get(place.name), 0
                    if there is None or (there.dtype, there.shape) != (place.dtype, place.shape):
                        raise LoraMergeError(f"{file}: its header says of {place.name} {there}, expected {place}")
                    for begin in range(0, place.nbytes, _READ):
                        part = buffer[: min(_READ, place.nbytes - begin)]
                        read_into(descriptor, there.begin + begin, part, f"{file}: {place.name}")
                        got = zlib.crc32(part, got)
                    if got != self._sums.get(place.name, 0):
                        raise LoraMergeError(
                            f"{place.name} reads back with checksum {got:08x}, and {self._sums.get(place.name, 0):08x} "
                            f"was written: the disk of {self.out.parent} does not keep what it is given; nothing is "
                            "left there"
                        )
                    compared += place.nbytes
            finally:
                os.close(descriptor)
        return compared

    def _flush(self) -> None:
        with _told(self.out):
            for opened in self._open.values():
                os.fsync(opened.fileno())

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._complete()
        finally:
            for opened in self._open.values():
                opened.close()
            if self._lock is not None:
                self._lock.close()
            self._remove()

    def _remove(self) -> None:
        """Remove what is not finished, and folders that were made for it."""
        if self._folder is not None and self._folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)
        for path in self._parents:
            with suppress(OSError):  # something is in it
                path.rmdir()

    def _complete(self) -> None:
        """Write everything that is missing, then the folder's name."""
        short = [name for name, left in self._left.items() if left]
        assert not short, f"{short[0]} was not written whole"
        self._flush()
        with _told(self.out):
            for to, source in self._along.items():
                with readable(source):
                    source.open("rb").close()
                (self.folder / to).parent.mkdir(exist_ok=True)
                shutil.copyfile(source, self.folder / to)  # what a link leads to; not its permissions
                _sync(self.folder / to)
            for to, said in self._made_files.items():
                _write_json(self.folder / to, said)
            if self._index is not None:
                names = {place.name: str(place.file) for place in self.places.values()}
                index = dict(self._index)
                more = index.get("metadata")
                index["metadata"] = {**(more if isinstance(more, dict) else {}), "total_size": self.nbytes}
                index["weight_map"] = dict(sorted(names.items()))
                _write_json(self.folder / INDEX, index)
            if self._config is not None:
                _write_json(self.folder / CONFIG, self._config)
            _sync(self.folder)
            with _alone(self.out.parent):
                check_target(self.out, self._force)  # somebody may have been faster
                self._put()
                # Up to here a run that is killed leaves a lock, so that the next one removes what it left.
                (self.out / LOCK).unlink()
            _sync(self.out)
            _sync(self.out.parent)

    def _put(self) -> None:
        """Put the finished folder where it belongs."""
        if not self.out.exists() or not any(self.out.iterdir()):
            self.folder.rename(self.out)  # over an empty folder, too
            return
        (self.out / LOCK).touch()
        if _exchange(self.folder, self.out):
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            before = Path(tempfile.mkdtemp(prefix=f".{self.out.name}{_MINE}", dir=self.out.parent))
            self.out.rename(before)
            try:
                self.folder.rename(self.out)
            except BaseException:
                before.rename(self.out)
                raise
            shutil.rmtree(before, ignore_errors=True)


def check_target(out: Path, force: bool) -> None:
    """Raise `InvalidInput` unless a checkpoint may be put there."""
    with _told(out):
        out.exists()  # may not be asked of a name that is too long, or below what may not be looked into
    if out.is_symlink() and not out.exists():
        raise InvalidInput(f"{out} is a link that leads nowhere: remove it")
    if out.exists() and not out.is_dir():
        raise InvalidInput(f"{out} is a file, expected a folder that is to be made")
    if out.is_symlink():
        raise InvalidInput(f"{out} is a link to {out.resolve()}: name that folder itself")
    if not out.exists():
        return
    if out.is_mount():
        raise InvalidInput(f"{out} is where a volume is mounted, which cannot be replaced: name a folder inside it")
    if any(out.iterdir()) and not force:
        raise InvalidInput(
            f"{out} is there and not empty: name another folder, or replace it with force=True (--force)"
        )
    for where, what in ((Path.cwd(), "the folder that you are in"), (Path.home(), "your home")):
        if out.resolve() in (where.resolve(), *where.resolve().parents):
            raise InvalidInput(f"{out} is or holds {what}, which would be replaced: name a folder of its own")


_putting = threading.Lock()


@contextmanager
def _alone(parent: Path) -> Iterator[None]:
    """Be the only run, of this process and of others, that puts a folder there: of two that replace the same folder at
    once, each would take the other's lock for its own."""
    with _putting, ExitStack() as stack:
        if fcntl is not None:
            descriptor = os.open(parent, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            with suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system cannot (renameat2(2) is Linux's)."""
    call = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return call is not None and call(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


@contextmanager
def _told(out: Path) -> Any:
    """Turn what the system says of a disk into an error that says where, and what to do."""
    try:
        yield
    except OSError as error:
        what = {
            errno.ENOSPC: "the disk is full: make room, or write elsewhere",
            errno.EDQUOT: "your quota is used up: make room, or write elsewhere",
            errno.EACCES: "you may not write there: choose another folder, or change its permissions",
            errno.EPERM: "you may not write there: choose another folder, or change its permissions",
            errno.EROFS: "the file system is read-only: choose another folder",
        }.get(error.errno or 0, "")
        raise InvalidInput(
            f"{out} cannot be written ({error}){f': {what}' if what else ''}; nothing is left there"
        ) from error


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(file: Path, said: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _sync(file)


def together(writers: Iterable[Writer]) -> None:
    """Raise `InvalidInput` unless the disks have room for all of these at once."""
    needed: dict[int, tuple[int, Writer]] = {}
    for writer in writers:
        there = next(p for p in (writer.out.parent, *writer.out.parent.parents) if p.exists())
        device = there.stat().st_dev
        total, _ = needed.get(device, (0, writer))
        needed[device] = total + writer.nbytes, writer
    for total, writer in needed.values():
        there = next(p for p in (writer.out.parent, *writer.out.parent.parents) if p.exists())
        if shutil.disk_usage(there).free < total:
            raise InvalidInput(
                f"{there} has {shutil.disk_usage(there).free / 1e9:.2f} GB free, and all outputs take "
                f"{total / 1e9:.2f} GB: make room, or write elsewhere"
            )
