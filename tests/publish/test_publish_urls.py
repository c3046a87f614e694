"""URLs of stores: what is refused in them, and what no line tells of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest

from lora_merge import Follower, InvalidInput, LoraMergeError, Publisher
from lora_merge.cli import main
from lora_merge.engine.control.http import checked_url
from lora_merge.logs import shown, words_of
from lora_merge.publish import follower as module
from lora_merge.publish.store import Store
from lora_merge.saving.writer import absolute
from tests.publish.test_follower import Loader

SECRET = "s3%40cret"


@pytest.mark.parametrize(
    ("url", "told"),
    [
        (f"sftp://bob:{SECRET}@host/run7", "sftp://***@host/run7"),
        (f"https://{SECRET}@host/run7", "https://***@host/run7"),
        (f"https://host/run7?token={SECRET}", "https://host/run7?***"),
        (f"simplecache::http://bob:{SECRET}@host/run7", "simplecache::http://***@host/run7"),
        (f"bob:{SECRET}@proxy:3128", "***@proxy:3128"),
        ("abfs://container@account/run7", "abfs://container@account/run7"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("/shared/a:b@c?d", "/shared/a:b@c?d"),
        ("file:///shared/run7?", "file:///shared/run7?"),
        ("run?7", "run?7"),
    ],
)
def test_no_secret_is_shown(url: str, told: str) -> None:
    assert shown(url) == told


def test_no_secret_is_told_of_a_librarys_error() -> None:
    url = f"ftp://bob:{SECRET}@host/run7"
    said = words_of(OSError(f"{url}: user bob with s3@cret as {SECRET}"), url)
    assert said == "OSError: ftp://***@host/run7: user bob with *** as ***"


def test_no_error_tells_a_password(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of stores, engines, proxies and folders; an engine's clients and whoever reads a log would have it."""
    for call in (
        lambda: Store(f"nosuch://bob:{SECRET}@host/run7"),
        lambda: Store(f"sftp://bob:{SECRET}@host/run7"),  # paramiko is not installed
        lambda: absolute(f"sftp://bob:{SECRET}@host/merged"),
        lambda: checked_url(f"ftp://bob:{SECRET}@host", "http://host:8000"),
        lambda: checked_url(f"http://host?token={SECRET}", "http://host:8000"),
    ):
        with pytest.raises(LoraMergeError) as refused:
            call()
        assert SECRET not in str(refused.value)
        assert "***" in str(refused.value)
    assert main(["status", f"ftp://bob:{SECRET}@127.0.0.1:9/run7"]) == 1
    said = capsys.readouterr().err
    assert "ftp://***@127.0.0.1:9/run7 cannot be read, or not be written to (ConnectionRefusedError" in said


def test_a_follower_tells_no_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AdapterLoader", Loader)
    told = list[str]()
    with mock.patch("fsspec.implementations.ftp.FTPFileSystem._connect"):
        follower = Follower("http://there:8000", f"ftp://bob:{SECRET}@host/run7", told=told.append)
    follower._store.fs.ftp = mock.Mock()
    fails: dict[str, Any] = {"side_effect": PermissionError(f"ftp://bob:{SECRET}@host/run7 refuses s3@cret")}
    with (
        mock.patch.object(follower._store.fs, "ls", **fails),
        mock.patch.object(follower._store.fs, "pipe_file", **fails),
    ):
        assert not follower.try_step()
    assert len(told) == 2
    assert "ftp://***@host/run7 refuses" in follower.error
    assert not any(secret in line for line in (*told, follower.error) for secret in (SECRET, "s3@cret"))


@pytest.mark.parametrize(
    "root", ["memory://exp*", "memory://exp[1]", "memory://exp?", "memory://runs/*/a", "memory://[::1]/a"]
)
def test_a_pattern_is_no_store(root: str) -> None:
    """fsspec would remove the versions of all stores that are like it."""
    with pytest.raises(InvalidInput, match=r"reads \*, \? and \[ in it as a pattern"):
        Store(root)


def test_links(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    publisher = Publisher(models.with_lora(models.qwen2), tmp_path / "link" / "run7")
    assert publisher.publish().version == 1
    assert Store(tmp_path / "real" / "run7").numbers() == [1]
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("nowhere", "loop"):
        with pytest.raises(InvalidInput, match=rf"is no store: .*/{name} is a link that leads nowhere"):
            Store(tmp_path / name / "run7")


def test_a_store_that_takes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A full disk takes names of files: a follower left one every ten seconds. Commands say what is wrong, without a
    trace."""
    url = str(tmp_path / "run7")
    Publisher(models.with_lora(models.qwen2), url).publish()
    full = OSError(28, "No space left on device")
    with mock.patch.object(Path, "write_bytes", lambda path, data: (path.touch(), (_ for _ in ()).throw(full))[1]):
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                Store(url).tell("one", {"serves": "nothing"})
    assert not list((tmp_path / "run7" / "engines").iterdir())
    with mock.patch.object(Path, "mkdir", side_effect=OSError(30, "Read-only file system")):
        assert main(["rollback", url, "1"]) == 1
        assert "run7 cannot be read, or not be written to (OSError: [Errno 30] Read-only" in capsys.readouterr().err
        assert main(["rollback", url, "1", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["kind"] == "InvalidInput"
