"""Threads that compute with one model in training, and one that asks for its base meanwhile."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor

from lora_merge import InvalidInput, train_merged
from lora_merge.merged_block import MergedBlock
from tests.training.test_train import LINEARS, Interrupted, adapted, loss_of


def gradients_of(model: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss_of(model), [p for p in model.parameters() if p.requires_grad])


def test_threads_that_compute_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them merges, the others wait for it; each has the gradients of its own forward."""
    model: Any = adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS)
    with train_merged(model):
        wanted, last = loss_of(model), gradients_of(model)
    enter = MergedBlock.enter

    def slow(self: MergedBlock) -> None:
        time.sleep(0.3)
        enter(self)

    monkeypatch.setattr(MergedBlock, "enter", slow)
    both = threading.Barrier(2)

    def meet(*_: Any) -> None:
        both.wait(10)

    layers = [m for m in model.modules() if hasattr(m, "lora_A")]
    with train_merged(model) as training, ThreadPoolExecutor(2) as pool:
        for loss in pool.map(lambda _: loss_of(model), range(2)):
            assert_same_bits(loss, wanted)
        hooks = [layer.base_layer.register_forward_hook(meet) for layer in layers]
        for found in pool.map(lambda _: gradients_of(model), range(2)):
            for gradient, one in zip(found, last, strict=True):
                torch.testing.assert_close(gradient, one)
        for hook in hooks:
            hook.remove()
        assert training.merges == 1


def test_the_base_while_another_thread_computes() -> None:
    """The forward goes on as it began. One that was interrupted is over."""
    model: Any = adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS)
    block: Any = model.get_base_model().model.layers[0].mlp
    inside, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        inside.set()
        assert go_on.wait(10)

    with train_merged(model) as training, ThreadPoolExecutor(1) as pool:
        wanted = loss_of(model)
        hook = block.register_forward_hook(wait)
        other = pool.submit(loss_of, model)
        assert inside.wait(10)
        for ask in (model.state_dict, training.pause, lambda: model.save_pretrained("never")):
            with pytest.raises(InvalidInput, match="another thread is in a forward of this model"):
                ask()
        go_on.set()
        assert_same_bits(other.result(), wanted)
        hook.remove()
        block.act_fn, act = Interrupted(), block.act_fn
        with pytest.raises(KeyboardInterrupt):
            loss_of(model)
        block.act_fn = act
        pool.submit(training.pause).result()
        assert_same_bits(loss_of(model), wanted)
