"""Versions in a real S3's protocol: moto's server, s3fs. Needs the packages of requirements/s3.txt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import models
import pytest

pytest.importorskip("s3fs")
pytest.importorskip("moto")

import fsspec
from object_store import s3

from lora_merge import Follower, InvalidInput, Publisher, PushRefused
from lora_merge.publish import follower as module
from lora_merge.publish.manifest import MANIFEST, Manifest
from lora_merge.publish.status import status
from lora_merge.publish.store import Store
from tests.publish.test_follower import Loader, loaded
from tests.publish.test_publish import KEY, held, same, saved


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3() as url:
        yield url


def test_versions(bucket: str, tmp_path: Path) -> None:
    model, url = models.with_lora(models.qwen2), f"{bucket}/run7"
    publisher, store = Publisher(model, url, keep=2, key=KEY), Store(url, KEY)
    for step in range(4):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.01)
        publisher.publish(pin=step == 0)
        assert next(store.newest()) == step + 1  # also where listings are cached
    assert list(store.newest()) == [4, 3, 1]
    same(held(store, 4, tmp_path), saved(model))
    assert publisher.rollback(1).version == 5
    same(held(store, 5, tmp_path), held(store, 1, tmp_path))
    store.tell("an engine", {"serves": store.manifest(5).name, "at": "2026-01-01T00:00:00Z"})
    assert [engine.newest for engine in status(store).engines] == [True]
    store.tell("an engine", None)
    store.tell("an engine", None)
    assert not status(store).engines


def test_a_version_without_its_manifest_is_not_there(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{bucket}/torn"
    publisher, store = Publisher(models.with_lora(models.qwen2), url, keep=1), Store(url)
    publisher.publish()
    put, puts = store.fs.put_file, list[Any]()

    def fails(*args: Any, **kwargs: Any) -> None:
        puts.append(args)
        if len(puts) == 2:
            raise OSError("the connection was lost")
        put(*args, **kwargs)

    monkeypatch.setattr(publisher._store.fs, "put_file", fails)
    with pytest.raises(OSError, match="connection"):
        publisher.publish()
    monkeypatch.undo()
    assert list(store.newest()) == [1]
    assert store.numbers() == [1, 2]
    with pytest.raises(InvalidInput, match=r"version 2 of \S+ has no manifest.json"):
        store.manifest(2)
    assert publisher.publish().version == 3
    assert store.numbers() == [3]
    # A file that is lost, and one that is another.
    fs = fsspec.filesystem("s3")
    file = f"{url}/versions/00000003/adapter_model.safetensors"
    data = fs.cat_file(file)
    fs.pipe_file(file, data[:-1] + b"x")
    with pytest.raises(InvalidInput, match="its checksum differs"):
        store.fetch(store.manifest(3), tmp_path)
    fs.rm_file(file)
    with pytest.raises(InvalidInput, match=r"lacks adapter_model\.safetensors"):
        store.fetch(store.manifest(3), tmp_path)


def test_two_publishers_at_the_same_time(bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    url = f"{bucket}/two"
    one, other = (Publisher(models.with_lora(models.qwen2), url) for _ in range(2))
    one.publish()
    commit = Store.commit

    def both(store: Store, draft: Path, manifest: Manifest) -> None:
        monkeypatch.setattr(Store, "commit", commit)
        other.publish()
        commit(store, draft, manifest)

    monkeypatch.setattr(Store, "commit", both)
    with pytest.raises(PushRefused, match="published by somebody else at the same time"):
        one.publish()
    store = Store(url)
    assert list(store.newest()) == [2, 1]
    store.fetch(store.manifest(2), tmp_path)
    assert store.fs.exists(f"{url}/versions/00000002/{MANIFEST}")


class Failing(SimpleHTTPRequestHandler):
    """Serves a folder, and answers 503 to what ends with one of `fails`."""

    fails: tuple[str, ...] = ()

    def do_GET(self) -> None:
        if self.path.endswith(self.fails):
            self.send_error(503)
        else:
            super().do_GET()

    do_HEAD = do_GET

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def web(folder: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Failing, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_store_that_does_not_answer_brings_no_older_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec says of some stores that a file is not there where they only do not answer. A web server's folder, with a
    password that no line tells."""
    monkeypatch.setattr(module, "AdapterLoader", Loader)
    publisher = Publisher(models.with_lora(models.qwen2), tmp_path / "run7")
    publisher.publish()
    with web(tmp_path) as address:
        follower = Follower("http://there:8000", f"http://bob:s3cret@{address}/run7")
        assert follower.step() is not None
        for _ in range(2):
            publisher.publish()
        for fails in ("00000003/manifest.json", "adapter_model.safetensors", "/versions/"):
            monkeypatch.setattr(Failing, "fails", (fails,))
            follower._checked = 0.0
            assert not follower.try_step()
            assert "503" in follower.error
            assert "s3cret" not in follower.error
            assert loaded(follower) == ["run7@1"]
        monkeypatch.setattr(Failing, "fails", ())
        assert follower.step() is not None
        monkeypatch.setattr(Failing, "fails", ("00000003/manifest.json",))
        follower._checked = 0.0
        assert not follower.try_step()
        assert loaded(follower) == ["run7@1", "run7@3"]
        follower.close()
