"""A base that an adapter was not trained on: its layers have the same names and sizes, so what the adapter says of its
base is held against it."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import checkpoints
import models
import pytest
import torch
from huggingface_hub import constants
from torch import nn

from lora_merge import InvalidInput, cli, merge_checkpoint
from lora_merge.models.peft.folder import read_folder
from lora_merge.saving.origin import DoubtfulBase

TARGETS = ["q_proj", "up_proj"]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**models._SIZES))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2, an adapter of it, and a Llama of the same sizes."""
    home = tmp_path_factory.mktemp("origin")
    checkpoints.write_base(home / "qwen", models.qwen2, torch.float32)
    checkpoints.write_base(home / "llama", llama, torch.float32)
    checkpoints.write_adapter(home / "adapter", home / "qwen", models.qwen2, target_modules=TARGETS)
    return home


def telling(home: Path, folder: Path, card: str = "", **said: Any) -> Path:
    """The adapter, which says something else of its base."""
    shutil.copytree(home / "adapter", folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    (folder / "README.md").write_text(card)
    return folder


def test_another_family(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mapping = {"base_model_class": "Qwen2ForCausalLM", "parent_library": "transformers.models.qwen2.modeling_qwen2"}
    card = f"---\nbase_model: {home / 'qwen'}\nlibrary_name: peft\n---\n"
    for number, adapter in enumerate(
        [
            home / "adapter",
            telling(home, tmp_path / "by class", base_model_name_or_path="/gone", auto_mapping=mapping),
            telling(home, tmp_path / "by card", card, base_model_name_or_path=None),
        ]
    ):
        with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match=r"qwen.*llama.*without strict"):
            merge_checkpoint(home / "llama", adapter, tmp_path / "out", strict=True)
        with pytest.warns(DoubtfulBase, match=r"trained on .*[qQ]wen2.* merged into .*llama, a llama"):
            (one,) = merge_checkpoint(home / "llama", adapter, tmp_path / f"out{number}")
        assert "a llama" in one.notes[0]
    line = ["merge", str(home / "llama"), str(home / "adapter"), "--out", str(tmp_path / "cli")]
    assert cli.main([*line, "--strict"]) == cli.REFUSED
    capsys.readouterr()
    assert cli.main(line) == 0
    assert "note: adapter was trained on" in capsys.readouterr().err
    assert cli.main(["inspect", str(home / "adapter"), str(home / "llama")]) == 0
    assert "note: adapter was trained on" in capsys.readouterr().out


def test_no_false_alarm(home: Path, tmp_path: Path) -> None:
    """Another folder, another machine, a path of there, the hub's cache, another format of the same weights."""
    cached = tmp_path / "models--Qwen--Qwen2-0.5B" / "snapshots" / "abc"
    shutil.copytree(home / "qwen", cached)
    local = tmp_path / "qwen2-0.5b"
    shutil.copytree(home / "qwen", local)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DoubtfulBase)
        for number, (base, said, noted) in enumerate(
            [
                (home / "qwen", str(home / "qwen"), False),
                (cached, "Qwen/Qwen2-0.5B", False),
                (cached, "unsloth/Qwen2-0.5B-unsloth-bnb-4bit", False),
                (cached, "/data/models--Qwen--Qwen2-0.5B/snapshots/def", False),
                (local, "Qwen/Qwen2-0.5B", False),
                (home / "qwen", "Qwen/Qwen2-0.5B", True),
                (local, "/somewhere/else", True),
                (local, "../else", True),
                (local, "./else", True),
                (cached, "./else", True),
                (local, "runs--1/step..7", True),
            ]
        ):
            adapter = telling(home, tmp_path / f"a{number}", base_model_name_or_path=said)
            (one,) = merge_checkpoint(base, adapter, tmp_path / f"out{number}", strict=True)
            assert bool(one.notes) == noted, (said, one.notes)
    adapter = telling(home, tmp_path / "other", base_model_name_or_path="Qwen/Qwen2-1.5B")
    with pytest.raises(InvalidInput, match=r"says that it was trained on Qwen/Qwen2-1\.5B; merged into .*a qwen2"):
        merge_checkpoint(cached, adapter, tmp_path / "out", strict=True)


def test_another_revision(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--Qwen--Qwen2-0.5B"
    for ref, commit in (("main", "0123456789"), ("early", "abcdef0123")):
        shutil.copytree(home / "qwen", repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(commit)
    config = repository / "snapshots" / "abcdef0123" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.125}))
    newest, said = repository / "snapshots" / "0123456789", {"base_model_name_or_path": "Qwen/Qwen2-0.5B"}
    adapter = telling(home, tmp_path / "early", revision="early", **said)
    for base, revision, match in (
        (newest, "main", ""),
        (newest, "0123456", ""),
        (config.parent, "early", ""),
        (newest, "early", r"revision early of Qwen/Qwen2-0\.5B, and .*0123456789, by the hub's cache another"),
        (newest, "never-fetched", "by the hub's cache another one: fetch that revision"),
    ):
        adapter = telling(home, tmp_path / f"{base.name} {revision}", revision=revision, **said)
        if match:
            with pytest.raises(InvalidInput, match=match):
                merge_checkpoint(base, adapter, tmp_path / "none", strict=True)
        else:
            assert not merge_checkpoint(base, adapter, tmp_path / "out", strict=True, force=True)[0].notes
    shutil.copytree(newest, tmp_path / "qwen2-0.5b")
    (one,) = merge_checkpoint(tmp_path / "qwen2-0.5b", adapter, tmp_path / "out", strict=True, force=True)
    assert "does not say of which revision it is" in one.notes[0]
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model: Any = read_folder(tmp_path / "abcdef0123 early", None, torch.float32)
    assert model.config.rms_norm_eps == 0.125


def test_a_base_that_holds_an_adapter(home: Path, tmp_path: Path) -> None:
    """transformers loads such a folder with it, and a merge takes the weights alone."""
    shutil.copytree(home / "qwen", tmp_path / "base")
    shutil.copyfile(home / "adapter" / "adapter_config.json", tmp_path / "base" / "adapter_config.json")
    (one,) = merge_checkpoint(tmp_path / "base", home / "adapter", tmp_path / "out")
    assert "base holds an adapter, too (adapter_config.json)" in one.notes[0]
    assert not (one.folder / "adapter_config.json").exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_model_card_that_is_a_pipe(home: Path, tmp_path: Path) -> None:
    """Opening it would wait for a writer that never comes."""
    adapter = telling(home, tmp_path / "a", base_model_name_or_path=None)
    (adapter / "README.md").unlink(missing_ok=True)
    os.mkfifo(adapter / "README.md")
    merge_checkpoint(home / "qwen", adapter, tmp_path / "out")
