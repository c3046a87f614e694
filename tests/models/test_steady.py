"""A steady step stays cheap: launches, allocations and Python calls of one more run of what has run before.

The numbers are upper bounds, taken on CPython 3.11; whoever needs more has to raise them here and say why.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import qwen2
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lora_merge
from lora_merge.kernels import cpu
from lora_merge.shards import Shard

# step -> (launches, bytes of new tensors in multiples of the adapted weights, Python calls), measured: 11, 507 and
# 419 calls and those of `stream/unwritten.py`, a dozen whatever the model's size
# (none for a linear adapter layer or module, see `models/snapshot.py`; two or three for a compiled call,
# which check its tensors; one for autocast's cache; some 20 for each cleanup that holds signals back, of which `merged`
# has four; two for whether float16 was finite); the rest is exact.
LIMITS = {
    "plan": (1, 0.0, 13),
    "merged": (1, 0.08, 540),
    "buckets": (2, 0.0, 470),
}


class Allocations(TorchDispatchMode):
    """Sums the bytes of tensors that operators make: outputs whose memory is none of the inputs'."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        new = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.nbytes += sum(t.nbytes for t in new if t.untyped_storage().data_ptr() not in known)
        return out


def held(shard: Shard) -> torch.Tensor:
    return shard.pieces[0].tensor


def python_calls(step: Callable[[], object]) -> int:
    """Of the step itself: a collection in the middle of it would call finalizers of what other tests have left."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()
    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("name", LIMITS)
def test_steady(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch a plan or bucket, no memory of the model's size, no new Python per step."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(qwen2(), config)
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            parameter.data.mul_(1e-3)  # updates of less than a tenth of the weights: what escapes is counted too
    size = sum(delta.weight.nbytes for delta in lora_merge.read_deltas(model))
    plan = lora_merge.Plan(
        [
            lora_merge.Segment(d.name, held(d.weight), torch.empty_like(held(d.weight)), held(f.lora_A), held(f.lora_B),
                               f.scaling)
            for d in lora_merge.read_deltas(model) for f in d.factors
        ]
    )  # fmt: skip
    weights = lora_merge.MergedWeights(model, bucket_bytes=sum(p.nbytes for p in model.base_model.parameters()) // 2)

    def merged() -> None:
        with lora_merge.merged(model):
            pass

    def buckets() -> None:
        for _ in weights.buckets():
            pass

    step = {"plan": plan.run, "merged": merged, "buckets": buckets}[name]
    step()
    step()

    launches = 0
    launch = cpu._Launch.__call__

    def counted(self: Any, *arguments: Any) -> None:
        nonlocal launches
        launches += 1
        launch(self, *arguments)

    monkeypatch.setattr(cpu._Launch, "__call__", counted)
    with Allocations() as allocations:
        step()
    monkeypatch.undo()
    calls = python_calls(step)
    most_launches, most_bytes, most_calls = LIMITS[name]
    # What is left are a few words, not weights.
    assert allocations.nbytes <= most_bytes * size + 1024, f"{name}: {allocations.nbytes} bytes of {size}"
    assert launches <= most_launches, f"{name}: {launches} launches"
    assert calls <= most_calls, f"{name}: {calls} Python calls"
