"""What a follower makes of a store that changes while it looks, with an engine that only notes what is loaded."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

import models
import pytest

from lora_merge import Follower, Publisher, PushRefused
from lora_merge.cli import main
from lora_merge.engine.push.replica import SyncReport
from lora_merge.engine.state import OWN, State
from lora_merge.publish import follower as module
from lora_merge.publish.manifest import MANIFEST, Manifest
from lora_merge.publish.status import status
from lora_merge.publish.store import Store


class Loader:
    """An engine that takes whatever it gets."""

    def __init__(self, engine: Any, pause: str, cache: str) -> None:
        self.loaded, self.held = list[str](), State()

    def state(self) -> State:
        if self.held.kind == "gone":
            raise PushRefused("the engine does not answer")
        return self.held

    def load(self, folder: Path, *, name: str, **options: Any) -> SyncReport:
        assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        self.loaded.append(name)
        self.held = State("merged", len(self.loaded), OWN, trainer="it", adapter=name)
        return SyncReport(len(self.loaded), "merged")

    def close(self) -> None: ...


@pytest.fixture
def following(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AdapterLoader", Loader)


def loaded(follower: Follower) -> list[str]:
    return [name.partition("-")[0] for name in follower._loader.loaded]  # type: ignore[attr-defined]


pytestmark = pytest.mark.usefixtures("following")


@pytest.mark.parametrize("url", ["{}/run7", "memory://{}/run7"])
def test_a_version_that_is_removed_while_it_is_read_brings_no_older_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url.format(tmp_path)
    publisher, follower = Publisher(models.with_lora(models.qwen2), url, keep=1), Follower("http://there:8000", url)
    publisher.publish(pin=True)
    publisher.publish()
    fetch, manifest, many = Store.fetch, Store.manifest, 1

    def late(store: Store, found: Manifest, into: Path) -> Path:
        nonlocal many
        for _ in range(many):
            many -= 1
            publisher.publish()
        return fetch(store, found, into)

    monkeypatch.setattr(Store, "fetch", late)
    assert follower.step() is not None
    assert loaded(follower) == ["run7@3"]

    def later(store: Store, version: int, **options: Any) -> Manifest:
        nonlocal many
        if many and store is follower._store and version > 1:
            many -= 1
            publisher.publish()
        return manifest(store, version, **options)

    many = 1
    monkeypatch.setattr(Store, "fetch", fetch)
    monkeypatch.setattr(Store, "manifest", later)
    publisher.publish()
    assert follower.step() is not None
    assert loaded(follower) == ["run7@3", "run7@5"]
    # Where that does not end it is said, and nothing older is loaded.
    many = 100
    publisher.publish()
    with pytest.raises(PushRefused, match=r"version 8 of \S+ was removed while it was read"):
        follower.step()
    assert loaded(follower) == ["run7@3", "run7@5"]
    follower.close()


def test_a_store_that_is_gone_is_an_error(tmp_path: Path) -> None:
    told = list[str]()
    follower = Follower("http://there:8000", tmp_path / "run7", told=told.append)
    assert follower.try_step()
    assert [line for line in told if "has no version yet; the engine holds nothing" in line] == told != []
    Publisher(models.with_lora(models.qwen2), tmp_path / "run7").publish()
    assert follower.try_step()
    (tmp_path / "run7").rename(tmp_path / "elsewhere")
    assert not follower.try_step()
    assert "has no versions any more" in follower.error
    assert follower.serves.startswith("run7@1-")
    # Also for a follower that is started anew, beside an engine that serves one.
    again = Follower("http://there:8000", tmp_path / "run7")
    again._loader.held = follower._loader.state()  # type: ignore[attr-defined]
    assert not again.try_step()
    shutil.rmtree(tmp_path / "run7")  # what they said of their engines
    (tmp_path / "elsewhere").rename(tmp_path / "run7")
    assert follower.try_step()
    assert again.try_step()
    assert not follower.error
    assert loaded(again) == []


def test_status_says_what_an_engine_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes the steps, and where something else is served by now than the follower has brought."""
    url = str(tmp_path / "run7")
    Publisher(models.with_lora(models.qwen2), url).publish()

    def shown() -> tuple[str, bool, bool, int]:
        found = status(Store(url))
        (engine,) = found.engines
        return engine.serves.partition("-")[0], engine.newest, bool(engine.error), main(["status", url])

    assert main(["follow", "http://there:8000", url, "--once"]) == 0
    assert shown() == ("run7@1", True, False, 0)
    assert "1 engines" in capsys.readouterr().out
    follower = Follower("http://there:8000", url)
    assert follower.step() is not None
    brought = follower._loader.state()
    assert shown() == ("run7@1", True, False, 0)

    def refuses(loader: Loader, folder: Path, **options: Any) -> SyncReport:
        raise PushRefused("a trainer has pushed here")

    monkeypatch.setattr(Loader, "load", refuses)
    for held, serves in (
        (State("merged", 9, "0123", trainer="another"), "merged@9"),
        (State("dirty", reason="something wrote to it"), "dirty (something wrote to it)"),
        (State("gone"), ""),
    ):
        follower._loader.held, follower._checked = held, 0.0  # type: ignore[attr-defined]
        with pytest.raises(PushRefused):
            follower.step()
        assert (follower.serves, *shown()[1:]) == (serves, False, True, 1)
    assert "serves what is not known" in capsys.readouterr().out
    follower._loader.held = brought  # type: ignore[attr-defined]
    assert follower.try_step()
    assert shown() == ("run7@1", True, False, 0)
    follower.close()


def test_a_listing_that_is_late_brings_no_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = tmp_path / "run7"
    publisher, follower = Publisher(models.with_lora(models.qwen2), url), Follower("http://there:8000", url)
    for _ in range(2):
        publisher.publish()
    assert follower.step() is not None
    listed = follower._store.numbers()[:-1]
    with monkeypatch.context() as patched:
        patched.setattr(follower._store, "numbers", lambda: listed)
        assert follower.step() is None
    shutil.rmtree(url / "versions" / "00000002")  # what is gone is not served
    follower._checked = 0.0
    assert follower.step() is not None
    assert loaded(follower) == ["run7@2", "run7@1"]
    follower.close()


@pytest.mark.parametrize("name", [MANIFEST, "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a loop", "without an end"])
def test_what_is_no_file_is_passed_over(name: str, kind: str, tmp_path: Path) -> None:
    """Reading it would wait for ever, or fill the disk."""
    publisher, follower = Publisher(models.with_lora(models.qwen2), tmp_path), Follower("http://there:8000", tmp_path)
    for _ in range(2):
        publisher.publish()
    file = tmp_path / "versions" / "00000002" / name
    file.unlink()
    {
        "a folder": file.mkdir,
        "a pipe": lambda: os.mkfifo(file),
        "a loop": lambda: file.symlink_to(file),
        "without an end": lambda: file.symlink_to("/dev/zero"),
    }[kind]()
    assert follower.step() is not None
    assert name in follower.error
    assert publisher.publish().version == 3
    assert follower.step() is not None
    assert [name.partition("@")[2] for name in loaded(follower)] == ["1", "3"]
    follower.close()


def test_a_version_is_taken_as_soon_as_it_is_all_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an object store its number is taken before."""
    url = f"memory://{tmp_path}/run7"
    publisher, follower = Publisher(models.with_lora(models.qwen2), url), Follower("http://there:8000", url)
    publisher.publish()
    follower.step()
    pipe, seen = publisher._store.fs.pipe_file, list[Any]()

    def put(path: str, *args: Any, **kwargs: Any) -> None:
        if path.endswith(MANIFEST):
            seen.append(follower.step())
        pipe(path, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(publisher._store.fs, "pipe_file", put)
        publisher.publish()
    assert seen == [None]
    assert follower.step() is not None
    assert follower.step() is None
    assert loaded(follower) == ["run7@1", "run7@2"]


def test_an_engine_with_two_stores_is_noted(tmp_path: Path) -> None:
    told, model = list[str](), models.with_lora(models.qwen2)
    one, other = (Follower("http://there:8000", tmp_path / name, told=told.append) for name in ("run7", "run8"))
    other._loader = one._loader
    for name in ("run7", "run8"):
        Publisher(model, tmp_path / name).publish()
    for follower in (one, other):
        assert follower.step() is not None
    assert not [line for line in told if "something else" in line]  # the second one was started just now
    one._checked = 0.0
    assert one.step() is not None
    assert [line for line in told if "something else has loaded run8@1-" in line]


@pytest.mark.parametrize("url", ["run7", "memory://run7"])
def test_what_killed_processes_have_copied_is_removed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The version that a follower was reading, or a publisher was writing for a bucket; not of one that lives, nor
    what is somebody else's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lives = Follower("http://there:8000", tmp_path / "run7")
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        store = Store(url if "://" in url else tmp_path / url)
        follower = None if store.folder is None else Follower("http://there:8001", store.url)
        copied = store.draft(1) if follower is None else follower._cache.path
        (copied / "adapter_model.safetensors").write_bytes(b"large")
        os.write(writer, b"1")
        signal.pause()
    os.read(reader, 1)
    made = set(tmp_path.glob("lora_merge-*"))
    assert len(made) == 2
    Follower("http://there:8002", tmp_path / "run7").close()
    assert set(tmp_path.glob("lora_merge-*")) == made
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for name in ("lora_merge-other", "lora_merge-linked"):
        (tmp_path / name).mkdir()
    (tmp_path / "lora_merge-link").symlink_to(lives._cache.path)
    following = Follower("http://there:8002", tmp_path / "run7")
    names = {path.name for path in tmp_path.glob("lora_merge-*")} - {"lora_merge-other", "lora_merge-linked"}
    assert names == {lives._cache.path.name, following._cache.path.name, "lora_merge-link"}
    following.close()
    lives.close()
    assert not lives._cache.path.exists()
