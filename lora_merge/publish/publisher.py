"""Publishes the adapter of a model that is being trained, for engines that nobody holds a handle of."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch.distributed as dist
from torch import nn

from ..errors import InvalidInput, PushRefused
from ..models.megatron.live import is_megatron
from ..models.peft.chosen import turn
from ..models.peft.files import CONFIG, TENSORS
from ..shards.ranks import Ranks
from .base import BaseSamples, other_than
from .contents import Contents, TensorFile
from .manifest import Base, Manifest, entry_of
from .megatron import MegatronContents
from .store import Store, now

KEEP = 8
"""Versions that stay by default."""


@dataclass(frozen=True, slots=True)
class Published:
    """A version that was published.

    Args:
        version: its number.
        name: under which engines serve it: what their states and answers say.
        nbytes: of its files.
        seconds: that publishing took.
    """

    version: int
    name: str
    nbytes: int
    seconds: float


class Publisher:
    """Publishes the adapter of a model as versions in a store, from which engines take them by themselves.

        publisher = lora_merge.Publisher(model, "file:///shared/run7")
        publisher.publish()
        # elsewhere: lora-merge follow http://localhost:8000 file:///shared/run7

    A version is a folder that PEFT and vLLM read, too. Each rank of a sharded model writes what it owns of it, where
    the store is a file system; into an object store the first one does. Every call is collective over all ranks.

    Args:
        model: a `PeftModel`, plain, under FSDP2, FSDP1 or ZeRO-3, with one active adapter; or Megatron's list of
            chunks, whose adapters are published under the names that PEFT gives those of the HF model.
        url: a path, or a URL of fsspec's: file://, s3://, gs://, ...
        keep: how many versions stay; pinned ones do besides.
        key: signs each version (HMAC-SHA256), for followers that have the same one; default: `LORA_MERGE_STORE_KEY` of
            the environment, or no signature.

    Raises:
        InvalidInput: an argument does not fit.
        MissingExtra: peft, fsspec, or what it needs for this URL is not installed.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        url: str | os.PathLike[str],
        *,
        keep: int = KEEP,
        key: str | bytes | None = None,
    ) -> None:
        if not isinstance(keep, int) or keep < 1:
            raise InvalidInput(f"keep must be at least 1, a whole number, got {keep!r}")
        self._model, self._keep = model, keep
        self._contents: Contents | MegatronContents = MegatronContents(model) if is_megatron(model) else Contents(model)
        self._store = Store(url, key)
        self._world = Ranks(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
        self._known_as, self._process = token_hex(8), os.getpid()
        self._last: int | None = None
        self._samples: BaseSamples | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_samples": None}  # buffers and locks

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make a copy, or what was pickled, another publisher: what it publishes is another's to this one."""
        vars(self).update(state, _known_as=token_hex(8), _process=os.getpid())

    @property
    def _me(self) -> str:
        """The name under which versions have this publisher. One in a process that was forked off is another one."""
        here = os.getpid()
        return self._known_as if here == self._process else f"{self._known_as}-{here}"

    def publish(self, *, pin: bool = False) -> Published:
        """Publish the adapter as it is now.

        Args:
            pin: keep this version whatever comes after it.

        Returns:
            which version it is.

        Raises:
            PushRefused: somebody else has published into the store since this publisher's last version.
            InvalidInput: something is trained that PEFT's format does not hold; a tensor of the adapter holds NaN or
                infinity; the store holds versions of another base.
            UnsupportedAdapter, AlreadyMerged: as for `MergedWeights`.
            OSError, and what else the store's library raises: the store cannot be read, or not be written to.
        """
        begin = time.perf_counter()
        with self._world.vote("publish"), turn(self._model):
            shards, ranks = self._contents.tensors()
            config = self._contents.config()
        done: Manifest | None = None
        with self._world.vote(
            "publish"
        ):  # ranks that hold another copy of the model hear what became of the first one's
            if _has_first(ranks):
                done = self._write(shards, ranks, config, pin)
        manifest = self._world.spread(done, 0)
        self._last = manifest.version
        return Published(manifest.version, manifest.name, manifest.nbytes, time.perf_counter() - begin)

    def rollback(self, version: int) -> Published:
        """Publish a kept version once more, as the newest one: engines then serve it, bit for bit. The model is not
        changed.

        Raises:
            InvalidInput: there is no such version.
            PushRefused: as of `publish`.
        """
        begin, manifest = time.perf_counter(), None
        with self._world.vote("rollback"):
            if self._world.rank == 0:
                self._check_last()
                manifest = rollback(self._store, version, self._me)
        manifest = self._world.spread(manifest, 0)
        self._last = manifest.version
        return Published(manifest.version, manifest.name, manifest.nbytes, time.perf_counter() - begin)

    def pin(self, version: int, pinned: bool = True) -> None:
        """Keep a version whatever comes after it, or no longer."""
        with self._world.vote("pin"):
            if self._world.rank == 0:
                self._store.pin(version, pinned)

    def _write(self, shards: Any, ranks: Ranks, config: Any, pin: bool) -> Manifest | None:
        """Write a version; collective over the ranks of the model. Returns its manifest on the first."""
        samples = self._base_samples(shards, ranks)
        file = TensorFile(shards, ranks)
        first, draft = ranks.rank == 0, None
        manifest: Manifest | None = None
        try:
            with ranks.vote("publish"):
                if first:
                    base = Base(self._contents.base_name(), samples)
                    version, parent = self._next(base)
                    draft = self._store.draft(version)
                    config.save_pretrained(str(draft))
                    file.begin(draft)
            if self._store.folder is None:
                file.write_all(draft)
            else:
                folder = ranks.spread(draft, 0)
                with ranks.vote("publish"):
                    file.write_own(folder)
            with ranks.vote("publish"):
                if first:
                    assert draft is not None
                    files = {name: entry_of(draft / name) for name in (CONFIG, TENSORS)}
                    made = Manifest(self._store.run, version, parent, self._me, now(), base, files)
                    manifest = made.signed(self._store.key)
                    self._store.commit(draft, manifest)
                    if pin:
                        self._store.pin(version)
                    self._retain(version)
        finally:
            if draft is not None:
                shutil.rmtree(draft, ignore_errors=True)  # where it has become no version
        return manifest

    def _retain(self, version: int) -> None:
        """Remove old versions; warn where that fails, as the new one is there. Raise `PushRefused` where it is not the
        newest: somebody else was faster, and engines have theirs."""
        newest = version
        try:
            if self._store.retain(self._keep) > version and (other := newest_of(self._store)) is not None:
                newest = other.version  # else what lies there is none
        except Exception as error:  # a store's library has errors of its own
            warnings.warn(
                f"old versions of {self._store.url} could not be removed, and stay: {self._store.told(error)}",
                stacklevel=4,
            )
        if newest > version:
            raise PushRefused(
                f"version {newest} of {self._store.url} came while version {version} was published: two trainers "
                "publish into one store, and engines serve that one. Give each one of its own, or stop one, and make a "
                "new Publisher to go on from there"
            )

    def _base_samples(self, shards: Any, ranks: Ranks) -> dict[str, dict[str, str]]:
        """Return samples of the base, as of `BaseSamples`."""
        self._samples = self._samples or BaseSamples(self._model)
        return self._samples(shards, ranks)

    def _next(self, base: Base) -> tuple[int, int | None]:
        """Return the number of the next version, and its parent."""
        newest = self._check_last()
        if newest is not None and (differs := other_than(newest.base, base)):
            raise InvalidInput(
                f"{self._store.url} holds versions that were trained on another base ({newest.base.name}, fingerprint "
                f"{newest.base.fingerprint}) than this model has now ({base.name}, {base.fingerprint}): {differs} is "
                "not the same. If it is to be another base, publish into a store of its own; if not, give the model "
                "the base that it had: PEFT's merge_adapter() and unmerge_adapter() round it"
            )
        _check_key(self._store, newest)
        number = max(_free_number(self._store), (self._last or 0) + 1)  # stores may list the last one late
        return number, None if newest is None else newest.version

    def _check_last(self) -> Manifest | None:
        """Return the newest version's manifest; raise `PushRefused` unless it is one of this publisher's, be it one of
        which an error has said that it may not be there."""
        newest = newest_of(self._store)
        if self._last is not None and (newest is None or newest.publisher != self._me):
            what = "that is gone" if newest is None else f"{newest.name} is there, published {newest.created}"
            raise PushRefused(
                f"the last version that was published from here into {self._store.url} was {self._last}, and {what}: "
                "another trainer or a rollback. Make a new Publisher to go on from what is there"
            )
        return newest


def newest_of(store: Store) -> Manifest | None:
    """Return the manifest of the newest version that is one; None where there is none. Whatever key it is signed with:
    one of a trainer with another key is another trainer's."""
    for version in store.newest():
        try:
            return store.manifest(version, signed=False)
        except InvalidInput:
            continue
    return None


def rollback(store: Store, version: int, publisher: str = "") -> Manifest:
    """Publish a kept version once more, as the newest; see `Publisher.rollback`."""
    old, newest = store.manifest(version), newest_of(store)
    _check_key(store, old)
    number = _free_number(store)
    made = Manifest(
        run=store.run,
        version=number,
        parent=None if newest is None else newest.version,
        publisher=publisher or token_hex(8),
        created=now(),
        base=old.base,
        files=old.files,
        copy_of=version,
    ).signed(store.key)
    draft: Path = store.draft(number)
    try:
        store.copy(version, draft, old)
        store.commit(draft, made)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return made


def _check_key(store: Store, beside: Manifest | None) -> None:
    """Raise `InvalidInput` where a version would be unsigned beside one that is signed: no follower that has the key
    would take it."""
    if store.key is None and beside is not None and beside.signature:
        raise InvalidInput(
            f"the versions of {store.url} are signed, and followers that have the key take no others: give the key "
            "(LORA_MERGE_STORE_KEY, key= or --key-file)"
        )


def _free_number(store: Store) -> int:
    return max(store.numbers(), default=0) + 1


def _has_first(ranks: Ranks) -> bool:
    """Return True if the first rank of all is among those that hold a model together with this one."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    if ranks.group is None:
        return dist.get_rank() == 0
    return 0 in dist.get_process_group_ranks(ranks.group)
