"""Brings an engine to the newest version of a store, and keeps it there."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

from ..choices import Cache, Pause
from ..engine.load_adapter import AdapterLoader
from ..engine.push.replica import SyncReport
from ..engine.state import State
from ..errors import InvalidInput, LoraMergeError, PushRefused, UnsupportedAdapter
from ..leftovers import Scratch
from .manifest import Manifest
from .store import Store, now

INTERVAL_S = 1.0
"""Seconds between two looks at a store."""
_CHECK_S = 5.0
"""Seconds between two looks at an engine that serves the newest version: it may have been started anew."""
_TELL_S = 10.0
"""Seconds between two signs of life in the store."""
_LONGEST_S = 30.0
"""Seconds between two tries, where several have failed."""
_AGAIN_S = 60.0
"""Seconds after which a version that could not be read is read again: a base that was missing may have come."""
_LOOKS = 3
"""Looks at a store in one step, where versions are removed while they are read."""
_FORGET_S = 86400.0
"""Seconds after which the last words of an engine that has gone are removed from the store."""


class _Removed(PushRefused):
    """A version was removed while it was read: newer ones have come, and no older one is to be served."""


class Follower:
    """Brings an engine to the newest version of a store.

        follower = lora_merge.Follower("http://localhost:8000", "file:///shared/run7")
        follower.run()                    # as `lora-merge follow` does; or `step()` where you like

    The engine receives a version while it generates, and is paused only to merge it. What cannot be trusted (torn,
    somebody else's, wrongly signed) is passed over, and said.

    Args:
        engine: as for `serve.load_adapter`; one engine. An `AsyncLLM` follows by itself, with `LORA_MERGE_FOLLOW`.
        url: of the store, as for `Publisher`.
        base: folder or hub name of the model that the engine serves, of which the configuration is read here; default:
            the one that each version names.
        key: as for `Publisher`; with one, versions have to be signed.
        pause, cache: as for `serve.load_adapter`.
        name: of the engine, in what is written to the store; default: host and port of its URL, or host, process, and
            a random part.
        told: called with a line for each change; default: nobody is told.

    Raises:
        InvalidInput: an argument does not fit.
        MissingExtra: as for `Publisher`.
    """

    def __init__(
        self,
        engine: Any,
        url: str | os.PathLike[str],
        *,
        base: str | Path | None = None,
        key: str | bytes | None = None,
        pause: Pause = "keep",
        cache: Cache = "reset",
        name: str | None = None,
        told: Callable[[str], None] | None = None,
    ) -> None:
        if isinstance(engine, list | tuple):
            raise InvalidInput("a Follower has one engine: make one for each")
        self._store, self._loader = Store(url, key), AdapterLoader(engine, pause=pause, cache=cache)
        self._base, self._told = base, told or (lambda line: None)
        self._name, self._pause = name or _name_of(engine), pause
        self._cache = Scratch()
        self._held: State | None = None
        self._seen: list[int] = []
        self._newer: list[int] = []  # versions that were begun, and were not visible yet
        self._any = False  # whether the store has ever had versions
        self._checked = self._spoken = 0.0
        self._refused: dict[str, tuple[float, str]] = {}  # of versions that cannot be read, by name: when, and why
        self._notes: dict[int, str] = {}  # why versions are passed over, by number
        self._said: dict[str, Any] = {"engine": self._name, "serves": "", "version": None, "since": now(), "error": ""}
        self._silent = False  # whether the store takes no words of ours

    def step(self) -> SyncReport | None:
        """Bring the engine to the newest version, if it does not serve that.

        Returns:
            what was done; None where there was nothing to do.

        Raises:
            PushRefused: the engine does not answer, or does not take the version, or there are versions, and none can
                be served, or the store has lost all; the engine is as before.
            PushFailed: as for `serve.load_adapter`.
            OSError, and what else the store's library raises: the store cannot be read.
        """
        try:
            report = self._looks()
        except Exception as error:  # a store's library has errors of its own
            self._serving(self._held_now())
            self._speak(str(error) if isinstance(error, LoraMergeError) else self._store.told(error))
            raise
        self._speak("; ".join(self._notes.values()))
        return report

    def _looks(self) -> SyncReport | None:
        """Make a step, and make it again where versions are removed meanwhile."""
        for _ in range(_LOOKS - 1):
            with suppress(_Removed):
                return self._look()
        return self._look()

    def _look(self) -> SyncReport | None:
        numbers = self._store.numbers()
        due = self._held is None or time.monotonic() - self._checked > _CHECK_S
        if not due and numbers == self._seen and not any(map(self._store.has, self._newer)):
            return None
        self._held, self._seen = None, []  # unless all goes well
        held = self._loader.state()
        self._any = self._any or bool(numbers) or held.adapter.startswith(f"{self._store.run}@")
        if self._any and not numbers:
            raise PushRefused(
                f"{self._store.url} has no versions any more: they were removed, or it is not mounted here. The engine "
                f"holds {held.adapter or held}"
            )
        newest = next(self._store.newest(), 0)
        self._newer = [number for number in numbers if number > newest]
        report, serves = None, None
        for manifest in self._newest(held):
            if (held.kind, held.adapter) != ("merged", manifest.name):
                self._note_other(held, manifest)
                try:
                    report = self._load(manifest)
                except (InvalidInput, UnsupportedAdapter) as error:
                    self._check_there(manifest.version, error)
                    self._refused[manifest.name] = time.monotonic(), str(error)
                    self._pass_over(manifest.version, str(error))
                    continue
                held = self._loader.state()
            serves = manifest
            break
        if serves is None and self._notes:
            raise PushRefused(f"none of the versions of {self._store.url} can be served: {_first(self._notes)}")
        self._tell_of(serves, held, report)
        self._held, self._seen, self._checked = held, numbers, time.monotonic()
        return report

    def run(
        self,
        stop: threading.Event | None = None,
        *,
        interval: float = INTERVAL_S,
        tried: Callable[[bool], None] = lambda well: None,
    ) -> None:
        """Follow until `stop` is set. Errors are told, and tried again.

        Args:
            interval: seconds between two looks at the store.
            tried: called after each step with whether it went well.
        """
        stop, failed = stop or threading.Event(), 0
        self._forget_others()
        try:
            while not stop.is_set():
                well = self.try_step()
                tried(well)
                failed = 0 if well else failed + 1
                stop.wait(min(interval * 2.0**failed, max(_LONGEST_S, interval)) if failed else interval)
        finally:
            self._tell(None)
            self.close()

    def try_step(self) -> bool:
        """Make a step; tell an error, and return False, where it fails."""
        said = self.error
        try:
            self.step()
        except Exception:
            if self.error != said:
                self._told(f"{self._name}: {self.error}")
            return False
        return True

    def close(self) -> None:
        """Free buffers, and remove what was copied from the store."""
        with suppress(Exception):  # an engine that is gone holds nothing
            self._loader.close()
        self._cache.close()

    @property
    def serves(self) -> str:
        """What the engine serves: the name of a version, or what else it holds; "" before the first step, and where the
        engine does not say."""
        return str(self._said["serves"])

    @property
    def error(self) -> str:
        """What is wrong at the moment; "" for nothing."""
        return str(self._said["error"])

    def _newest(self, held: State) -> Iterator[Manifest]:
        """Yield the versions that may be served, the newest first."""
        self._notes = {}
        for version in self._visible(held):
            try:
                manifest = self._store.manifest(version)
            except InvalidInput as error:
                self._check_there(version, error)
                self._pass_over(version, str(error))
                continue
            at, why = self._refused.get(manifest.name, (0.0, ""))
            if why and time.monotonic() - at < _AGAIN_S:
                self._pass_over(version, why)
                continue
            yield manifest

    def _visible(self, held: State) -> Iterator[int]:
        """Yield the versions that are visible, the newest first: some stores list late, also what an engine holds."""
        run, _, rest = held.adapter.rpartition("@")
        number = rest.partition("-")[0]
        listed = list(self._store.newest())
        known = int(number) if run == self._store.run and number.isdecimal() else 0
        if known > max(listed, default=0) and self._store.has(known):
            yield known
        yield from listed

    def _check_there(self, version: int, error: Exception) -> None:
        """Raise `_Removed` if a version that could not be read is no longer in the store."""
        if not self._store.has(version):
            raise _Removed(f"{self._store.where(version)} was removed while it was read: {error}") from error

    def _note_other(self, held: State, manifest: Manifest) -> None:
        """Tell what else has brought an adapter into the engine: two followers of two stores go on for ever."""
        other = held.adapter if held.kind == "merged" else ""
        if self.serves and other and not other.startswith(f"{manifest.run}@"):
            self._told(
                f"{self._name}: something else has loaded {other} into the engine (a follower of another store, or "
                f"load_adapter); {manifest.name} takes its place"
            )

    def _load(self, manifest: Manifest) -> SyncReport:
        folder = self._store.fetch(manifest, self._cache.path)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                report = self._loader.load(
                    folder, base=self._base, name=manifest.name, trained_on=manifest.base.samples
                )
        finally:
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
        for text in dict.fromkeys(str(warning.message) for warning in caught if warning.category is UserWarning):
            self._told(f"{self._name}: note: {text}")
        return report

    def _held_now(self) -> str:
        """Return what the engine says that it holds, after a step that failed; "" where it says nothing."""
        with suppress(Exception):
            return _words(self._loader.state())
        return ""

    def _serving(self, serves: str, version: int | None = None) -> bool:
        """Note what the engine serves now; return True if it was something else before."""
        if changed := serves != self._said["serves"]:
            self._said |= {"serves": serves, "version": None, "since": now()}
            self._spoken = 0.0
        if version is not None:
            self._said["version"] = version
        return changed

    def _tell_of(self, manifest: Manifest | None, held: State, report: SyncReport | None) -> None:
        """Note, and tell, what the engine serves now."""
        serves = _words(held)
        if self._serving(serves, None if manifest is None else manifest.version) and manifest is None:
            self._told(f"{self._name}: {self._store.url} has no version yet; the engine holds {serves}")
        if report is not None and manifest is not None:
            stood = waited(report, self._pause)
            self._said |= {"nbytes": manifest.nbytes, "waited": stood}
            staged = sum(report.seconds.values())
            self._told(
                f"{self._name} serves {manifest.name}: {manifest.nbytes / 1e6:.1f} MB, {staged:.2f} s, "
                f"{stood:.3f} of which requests waited"
            )

    def _pass_over(self, version: int, why: str) -> None:
        if why != self._notes.get(version) and why not in self._said["error"]:
            self._told(f"{self._name} passes over version {version}: {why}")
        self._notes[version] = why

    def _speak(self, error: str) -> None:
        """Say in the store what the engine serves: when that changes, and now and then."""
        if error != self._said["error"]:
            self._said["error"], self._spoken = error, 0.0
        if time.monotonic() - self._spoken > _TELL_S:
            self._tell(self._said | {"at": now()})
            self._spoken = time.monotonic()

    def _tell(self, said: dict[str, Any] | None) -> None:
        try:
            self._store.tell(self._name, said)
        except Exception as error:  # it may be read-only here, and goes on being followed
            if not self._silent:
                self._told(f"{self._name}: lora-merge status will not show this engine, as {self._store.told(error)}")
            self._silent = True

    def _forget_others(self) -> None:
        """Remove the last words of engines that have been silent for a day."""
        with suppress(Exception):
            for name, silent in self._store.silent(self._store.engines()).items():
                if silent > _FORGET_S:
                    self._store.tell(name, None)


def _words(held: State) -> str:
    """Return what an engine holds: the name of a version, or what else."""
    return held.adapter or str(held)


def _first(notes: dict[int, str]) -> str:
    return notes[max(notes)] + (f" (and {len(notes) - 1} more)" if len(notes) > 1 else "")


def waited(report: SyncReport, pause: Pause = "keep") -> float:
    """Return the seconds in which an engine stood still for a version. Where requests are waited for, or ended, that
    comes before it receives the version."""
    phases = ("pause", "finish", "resume") if pause == "keep" else ("pause", "transfer", "finish", "resume")
    return sum(report.seconds.get(phase, 0.0) for phase in phases)


def _name_of(engine: Any) -> str:
    """Return a name that no other engine's follower has: host and port, or as of `name_here`."""
    if not isinstance(engine, str):
        return name_here()
    url = urlsplit(engine if "://" in engine else f"http://{engine}")
    host = url.hostname or ""
    local = host in ("localhost", "::1", "0.0.0.0") or host.startswith("127.")
    return f"{socket.gethostname() if local else host}-{url.port or url.scheme}"


def name_here() -> str:
    """Return a name for an engine of this process: containers that share a host's name may share process ids, too."""
    return f"{socket.gethostname()}-{os.getpid()}-{token_hex(2)}"


def to_stderr(line: str) -> None:
    """Tell a line on standard error."""
    sys.stderr.write(f"lora-merge: {line}\n")
    sys.stderr.flush()
