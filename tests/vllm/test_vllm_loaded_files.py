"""An engine's own checkpoint is what it was started from: what has changed in its folder is never taken for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import pytest
from engines import ask, assert_answers, engine
from safetensors.torch import save_file
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from lora_merge import PushRefused
from lora_merge.engine import load_adapter as load
from lora_merge.engine.vllm.loading import loaded_files
from lora_merge.serve import load_adapter, unload_adapter
from tests.vllm.test_vllm_load import READ, assert_base, policy, saved, states

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


class Model(nn.Module):
    """Takes what vLLM's loader reads."""

    def load_weights(self, weights: Any) -> None:
        assert [name for name, _ in weights] == ["a", "b"]


class Config:
    """What the loader asks of vLLM's `ModelConfig`."""

    quantization, revision, multimodal_config, is_moe = None, None, None, False

    def __init__(self, folder: Path) -> None:
        self.model = str(folder)


def loader() -> Any:
    return DefaultModelLoader(LoadConfig(load_format="auto", use_tqdm_on_load=False))


def write(folder: Path, name: str, seed: int) -> Path:
    import torch

    generator = torch.Generator().manual_seed(seed)
    save_file({name: torch.randn(64, 64, generator=generator)}, folder / f"{name}.safetensors", {"format": "pt"})
    return folder / f"{name}.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files, in a snapshot that is named by a link, with links to blobs: as the hub's cache has it."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "one"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for seed, name in enumerate("ab"):
        (snapshot / f"{name}.safetensors").symlink_to(write(blobs, name, seed))
    (tmp_path / "main").symlink_to(snapshot)
    return tmp_path / "main"


def in_place(folder: Path) -> None:
    """Without another size or inode, and with the time of writing put back."""
    file = (folder / "a.safetensors").resolve()
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\0\0\0\0")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def anew(folder: Path) -> None:
    write(folder.parent / "blobs", "b", 7)


def copied(folder: Path) -> None:
    """As rsync and `cp -p` do: with the times of another file."""
    file = (folder / "b.safetensors").resolve()
    other = write(folder.parent, "b", 9)
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.rename(file)


def retargeted(folder: Path) -> None:
    """The link to the newest checkpoint."""
    other = folder.parent / "snapshots" / "two"
    shutil.copytree(folder, other)
    write(other, "a", 5)
    folder.unlink()
    folder.symlink_to(other)


def one_blob(folder: Path) -> None:
    link = folder / "a.safetensors"
    link.unlink()
    link.symlink_to(write(folder.parent, "a", 5))


def appended(folder: Path) -> None:
    write(folder, "c", 3)


def removed(folder: Path) -> None:
    (folder / "a.safetensors").unlink()


def no_folder(folder: Path) -> None:
    folder.unlink()


def cut(folder: Path) -> None:
    os.truncate((folder / "b.safetensors").resolve(), 100)


def indexed(folder: Path) -> None:
    """An index that leaves one out."""
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "a.safetensors"}}')


CHANGES: dict[Callable[[Path], None], str] = {
    in_place: r"a\.safetensors was replaced, or got another name, link or owner, at 20",
    anew: r"b\.safetensors was written at 20.*, and is of 20",
    copied: r"b\.safetensors was replaced",
    retargeted: r"a\.safetensors was written at",
    one_blob: r"a\.safetensors was written at",
    appended: r"c\.safetensors is new",
    removed: r"a\.safetensors is gone",
    no_folder: r"a\.safetensors is gone",
    cut: r"b\.safetensors had \d+ bytes, and has 100",
    indexed: r"b\.safetensors is gone",
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("starting", [False, True], ids=["served", "while it starts"])
def test_what_has_changed_is_named(change: Callable[[Path], None], starting: bool, folder: Path) -> None:
    """vLLM's own loader reads; what it read is known from the moment at which it found the files."""
    loaded_files.watch()
    loaded_files.watch()
    model = Model()
    if starting:

        def load_weights(weights: Any) -> None:
            next(iter(weights))
            change(folder)

        model.load_weights = load_weights  # type: ignore[method-assign]
    loads(model, folder)
    if not starting:
        change(folder)
    with pytest.raises(RuntimeError, match=f"the folder is not any more what .*{CHANGES[change]}.*; start the engine"):
        again(model, folder)


def loads(model: Model, folder: Path) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        loader().load_weights(model, Config(folder))


def again(model: Model, folder: Path) -> None:
    loaded_files.check_unchanged(model, "the folder")
    second = loader()
    assert list(second.get_all_weights(Config(folder), model))
    loaded_files.check_unchanged(model, "the folder", loaded_files.read_by(second))


def test_what_has_not(folder: Path) -> None:
    """Files beside them, and another snapshot of the same."""
    loaded_files.watch()
    model = Model()
    loads(model, folder)
    again(model, folder)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "a.safetensors").resolve().read_bytes()
    again(model, folder)
    two = folder.parent / "snapshots" / "two"
    shutil.copytree(folder, two, symlinks=True)
    folder.unlink()
    folder.symlink_to(two)
    again(model, folder)


def test_weights_of_which_nothing_is_known() -> None:
    with pytest.raises(RuntimeError, match="did not note at its start which files"):
        loaded_files.check_unchanged(Model(), "the folder")


def test_an_engine_whose_folder_goes_and_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of it serves on when it is moved away, and is given up when somebody writes into it."""
    model, other, base = policy(), policy(r=2), tmp_path / "base"
    with engine(model, base, **READ) as llm:
        first, second = saved(model, tmp_path / "first", base), saved(other, tmp_path / "second", base)
        load_adapter(llm, first)
        base.rename(tmp_path / "moved")
        engines.save_base(policy(seed=9).get_base_model(), base)
        load_adapter(llm, second)
        assert_answers(ask(llm), other)
        unload_adapter(llm)
        assert_base(llm, model)
        load_adapter(llm, first)
        before, read = states(llm), load._read

        def while_it_is_saved(*args: Any) -> Any:
            saved(other, tmp_path / "second", base)
            return read(*args)

        with monkeypatch.context() as patch:
            patch.setattr(load, "_read", while_it_is_saved)
            with pytest.raises(PushRefused, match=r"second was written to while it was read.*adapter_.*Load it when"):
                load_adapter(llm, second)
        with (tmp_path / "moved" / "model.safetensors").open("r+b") as file:
            file.write((base / "model.safetensors").read_bytes())
        for call in (lambda: unload_adapter(llm), lambda: load_adapter(llm, second)):
            with pytest.raises(PushRefused, match=r"is not any more what the engine was started from: .*start the en"):
                call()
            assert states(llm) == before
        assert_answers(ask(llm), model)
