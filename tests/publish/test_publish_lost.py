"""Answers of a store that are lost: what was done is done."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import models
import pytest

from lora_merge import Publisher, PushRefused
from lora_merge.publish.manifest import MANIFEST
from lora_merge.publish.store import Store


def test_a_claim_whose_answer_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store's library asks once more, and hears that somebody has put it: that was itself."""
    url = f"memory://{tmp_path}/run7"
    publisher = Publisher(models.with_lora(models.qwen2), url)
    fs = publisher._store.fs
    pipe = fs.pipe_file

    def lost(path: str, *args: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        pipe(path, *args, mode=mode, **kwargs)
        if mode == "create":
            pipe(path, *args, mode=mode, **kwargs)

    monkeypatch.setattr(fs, "pipe_file", lost)
    assert [publisher.publish().version for _ in range(2)] == [1, 2]
    assert list(Store(url).newest()) == [2, 1]


def test_a_rename_whose_answer_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS asks once more, and hears that there is nothing to rename."""
    publisher, rename, before = Publisher(models.with_lora(models.qwen2), tmp_path), Path.rename, list[Path]()

    def lost(path: Path, target: Path) -> None:
        rename(path, target)
        for _ in before:  # somebody else's, in its place
            (target / MANIFEST).write_bytes(b"{}")
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", lost)
        assert [publisher.publish().version for _ in range(2)] == [1, 2]
        before.append(tmp_path)
        with pytest.raises(PushRefused, match="published by somebody else at the same time"):
            publisher.publish()
    assert Store(tmp_path).manifest(2).parent == 1


def test_what_is_no_version_overtakes_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher, commit = Publisher(models.with_lora(models.qwen2), tmp_path), Store.commit

    def beside(*args: Any) -> None:
        commit(*args)
        (tmp_path / "versions" / "00000009").mkdir()

    monkeypatch.setattr(Store, "commit", beside)
    assert publisher.publish().version == 1


@pytest.mark.parametrize("url", ["{}/run7", "memory://{}/run7"])
def test_a_publisher_that_was_overtaken_hears_of_it(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its version was removed as an old one, or what it had begun, and it took that for published, or for a lost file
    system."""
    url = url.format(tmp_path)
    model = models.with_lora(models.qwen2)
    slow = Publisher(model, url, keep=1)
    slow.publish()
    put, many = slow._store.fs.put_file, 3

    def overtaken(*args: Any) -> Any:
        nonlocal many
        here, many = many, 0
        other = Publisher(model, url, keep=1)
        for _ in range(here):
            other.publish()
        return put(*args) if "://" in url else commit(*args)

    commit = Store.commit
    monkeypatch.setattr(*((slow._store.fs, "put_file") if "://" in url else (Store, "commit")), overtaken)
    with pytest.raises(PushRefused, match=r"two trainers publish into one store.* make a new Publisher to go on"):
        slow.publish()
    with pytest.raises(PushRefused, match=r"is there, published \S+: another trainer"):
        slow.publish()
