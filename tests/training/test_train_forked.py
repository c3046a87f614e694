"""Processes that are forked off while base weights are merged, and share their memory (`share_memory`)."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")

import models
import torch

from lora_merge import InvalidInput, merged, train_merged

processes = multiprocessing.get_context("fork")


def refused(act: Callable[[], object]) -> None:
    with pytest.raises(InvalidInput, match=r"shared with process \d+, which merged them and goes on with them"):
        act()


def in_a_fork(act: Callable[[], object]) -> None:
    child = processes.Process(target=refused, args=(act,))
    child.start()
    child.join(60)
    assert child.exitcode == 0


def test_a_forked_process_takes_no_merged_weights_from_the_one_that_trains(tmp_path: Path) -> None:
    """What it saved would be right, and the trainer would go on with the bare base."""
    model = models.with_lora(models.qwen2).share_memory()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    wanted = models.outputs(model)
    with train_merged(model) as training:
        inside = models.outputs(model)
        for act in (training.pause, training.close, lambda: model.save_pretrained(tmp_path)):
            in_a_fork(act)
            assert torch.equal(models.outputs(model), inside)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    block: Any = merged(model)
    with block:
        inside = models.outputs(model)
        in_a_fork(lambda: block.__exit__(None, None, None))
        assert torch.equal(models.outputs(model), inside)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(models.outputs(model), wanted)
