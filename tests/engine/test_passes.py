"""Who gets what in a push: what training changes beside an adapter, and ranks that fail while it is planned."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import models
import pytest
import torch
from processes import spawn
from torch.distributed.fsdp import fully_shard
from workers import worker

from lora_merge import MergedWeights, UnsupportedAdapter
from lora_merge.engine.control.calls import drive
from lora_merge.engine.push.channels import Trainer
from lora_merge.engine.push.planner import PushPlanner
from lora_merge.engine.push.replica import Replica, SyncReport
from lora_merge.shards.ranks import Ranks


def planner(model: Any, merge: str, controls: list[Any], ranks: Ranks) -> PushPlanner:
    weights, base = MergedWeights(model), MergedWeights(model, adapters=False)
    return PushPlanner(Trainer(controls, ranks), weights, base, merge)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.k_proj.bias", "lm_head.weight"])
def test_what_is_trained_beside_an_adapter_is_refused(name: str) -> None:
    """An optimizer that writes through `.data` bumps no version, and a sample of a tensor misses most updates: engines
    kept what they had."""
    model = models.with_lora(models.qwen2)
    passes = planner(model, "trainer", [], Ranks())
    stream = passes._base.bucket_writer()
    before = passes._of_frozen(stream, verify=False)
    parameter = model.get_base_model().get_parameter(name.replace("k_proj.", "k_proj.base_layer."))
    parameter.requires_grad_(True)
    with pytest.raises(UnsupportedAdapter, match=f"{name} is trained beside the adapter"):
        passes._of_frozen(stream, verify=False)
    parameter.requires_grad_(False)
    assert passes._of_frozen(stream, verify=False) == before


def out_of_memory_on_one(rank: int) -> None:
    """One rank has no memory for the buckets of the fingerprint: its own error is of another kind than the others'."""
    control = SimpleNamespace(suspends=False, elsewhere=False)
    model = fully_shard(models.with_lora(models.qwen2))
    passes: Any = planner(model, "auto", [] if rank else [control], Ranks(torch.distributed.group.WORLD))
    fitted = []

    async def fit(weights: MergedWeights, *_: Any) -> Any:
        fitted.append(weights)
        return weights.bucket_writer()

    async def update(*_: Any) -> Any:
        return SimpleNamespace(whole_names=frozenset(), digest="", changed=frozenset())

    fit.recipients, fit.kept = (lambda: None), ()  # type: ignore[attr-defined]
    passes._check, passes._update, empty = fit, update, torch.empty

    def short(*args: Any, **options: Any) -> Any:
        if rank and sys._getframe(1).f_code.co_name == "room":
            raise torch.OutOfMemoryError("injected")
        return empty(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", short)
        with pytest.raises(Exception, match="injected"):
            drive(passes([Replica(0, None, [worker(host="elsewhere")])], SyncReport(1, "merged"), False, None))
    assert fitted == [passes._base], "a rank went on alone"
    assert torch.distributed.is_initialized()
    torch.distributed.barrier()


def test_all_ranks_give_up_or_none() -> None:
    spawn(2, out_of_memory_on_one)
