"""Weights that lie on another device than the buckets: staged in memory that buckets share, and that is freed.

Of the devices of a machine without a GPU, "cpu" and "cpu:0" are two names that torch takes for different ones, though
tensors of both lie side by side: a stream on "cpu:0" stages every weight, and the kernels really run. That they read no
weight where it lies is looked at apart.
"""

from __future__ import annotations

import copy
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from memory import Allocations, assert_nobody_holds_weights
from processes import spawn
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lora_merge import MergedWeights, read_deltas
from lora_merge.engine.payload.factors import GatheredFactors
from lora_merge.engine.payload.recipients import Share
from lora_merge.kernels import plan
from lora_merge.kernels.segments import Segment
from lora_merge.models import row_scales
from lora_merge.models.peft.live import Peft
from lora_merge.models.staging import Staging
from lora_merge.shards import here
from lora_merge.shards.layout import Layout
from lora_merge.shards.ranks import Ranks
from lora_merge.stream.bucket_plans import BucketPlans
from tests.shards.test_shards_merge import fsdp2, fsdp2_columns

BUCKET = 1 << 13
CONFIG = {"target_modules": ["q_proj", "down_proj", "embed_tokens"]}


def elsewhere(monkeypatch: pytest.MonkeyPatch, device: str = "cpu:0", model: Any = None) -> None:
    """Models compute on this device, wherever their weights lie. Kernels must not read those of `model`."""
    monkeypatch.setattr(Layout, "device", lambda self: torch.device(device))
    check = plan.check_segment

    def checked(s: Segment) -> None:
        weights = {here(p).untyped_storage().data_ptr() for n, p in model.named_parameters() if "lora_" not in n}
        assert s.source.untyped_storage().data_ptr() not in weights, f"{s.name} was not brought"
        check(s)

    if model is not None:
        monkeypatch.setattr(plan, "check_segment", checked)


def assert_streams(weights: MergedWeights, wanted: dict[str, torch.Tensor]) -> None:
    streamed = {name: tensor.cpu() for name, tensor in weights}
    assert streamed.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(streamed[name], tensor, name)


def largest(weights: MergedWeights) -> int:
    return max(sum(slot.nbytes for slot in slots) for slots in weights.bucket_writer(whole=True).table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("options", [{}, {"adapters": False}, {"dtype": torch.bfloat16}], ids=str)
def test_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, dora: bool, options: dict[str, Any]
) -> None:
    """Pass after pass, with weights that training changed, moved or replaced between them."""
    model = models.with_lora(models.qwen2, dtype=dtype, use_dora=dora, **CONFIG)
    plain = MergedWeights(model, bucket_bytes=BUCKET, **options)

    first = dict(plain)
    elsewhere(monkeypatch, model=model)
    weights = MergedWeights(model, bucket_bytes=BUCKET, **options)
    assert_streams(weights, first)
    assert weights.bucket_writer(whole=True)._plans.staging._nbytes
    changes = [
        lambda: None,
        lambda: [p.data.mul_(1.5) for p in model.parameters()],
        lambda: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
        lambda: setattr(model.base_model.model.model.norm, "weight", nn.Parameter(torch.randn(32, dtype=dtype))),
    ]
    for change in changes:
        change()
        monkeypatch.undo()
        now = dict(plain)
        elsewhere(monkeypatch, model=model)
        assert_streams(weights, now)


def sharded(rank: int) -> None:
    """DoRA's norms of offloaded shards, some at a time: those of the weights that lie where the kernels are."""
    for wrap in (fsdp2, fsdp2_columns):
        model = wrap(models.with_lora(models.qwen2, use_dora=True, **CONFIG))
        deltas, ranks = read_deltas(model), Ranks(dist.group.WORLD)
        shares = [Share(number, 0, 1, None) for number in range(len(deltas))]
        stream = MergedWeights(model, bucket_bytes=BUCKET)
        for _ in range(2):
            with pytest.MonkeyPatch.context() as patch:
                plain = GatheredFactors(deltas, shares, None, ranks, torch.device("cpu"))
                plain.refresh()
                wanted = dict(MergedWeights(model))
                patch.setattr(row_scales, "_BROUGHT", 1 << 12)
                elsewhere(patch, model=model)
                brought = GatheredFactors(deltas, shares, None, ranks, torch.device("cpu:0"))
                brought.refresh()
                for name, tensor in plain.tensors.items():
                    assert_same_bits(brought.tensors[name], tensor, name)
                assert_streams(stream, wanted)
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        here(parameter).mul_(-1.25)


def test_norms_of_shards() -> None:
    spawn(2, sharded)


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_memory(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """During a pass a bucket's share, after it nothing: neither the staging memory, nor the weights."""
    model = models.with_lora(models.qwen2, **CONFIG | options)
    size = sum(tensor.nbytes for _, tensor in MergedWeights(model))
    monkeypatch.setattr(row_scales, "_BROUGHT", BUCKET)
    elsewhere(monkeypatch)
    weights = MergedWeights(model, bucket_bytes=BUCKET)
    with Allocations() as allocations:
        for _ in weights.buckets():
            writer = weights.bucket_writer(whole=True)
            staging = writer._plans.staging.memory
            assert staging is not None
            assert staging.nbytes <= 2 * largest(weights) < size / 3
            memory = StorageWeakRef(staging.untyped_storage())
            del staging
        assert memory.expired()
        adapters = sum(p.nbytes for name, p in model.named_parameters() if "lora_" in name)
        held = allocations.held()
        known = {p.untyped_storage()._cdata for p in model.parameters()}
        held -= sum(nbytes for key, (_, nbytes) in allocations.seen.items() if key in known)
        assert held <= 2 * writer.capacity + 4 * adapters + writer.operands.held < size
    assert_nobody_holds_weights(model)


def test_plans_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the staging memory comes back to its place, a steady pass makes no plan and reads no model."""
    elsewhere(monkeypatch)
    model = models.with_lora(models.qwen2, **CONFIG)
    weights = MergedWeights(model, bucket_bytes=BUCKET)
    block: list[torch.Tensor] = []
    release = Staging.release

    def back_in_its_place(staging: Staging) -> None:
        block.append(staging.memory)
        release(staging)
        staging._memory = block[0]

    monkeypatch.setattr(Staging, "release", back_in_its_place)
    first = {name: tensor.clone() for bucket in weights.buckets() for name, tensor in bucket.tensors()}
    made: list[str] = []
    for cls, method in ((BucketPlans, "_make"), (Peft, "parts")):
        plain = getattr(cls, method)
        monkeypatch.setattr(cls, method, lambda *a, f=plain, what=method, **k: (made.append(what), f(*a, **k))[1])
    for bucket in weights.buckets():
        for name, tensor in bucket.tensors():
            assert_same_bits(tensor, first.pop(name), name)
    assert not first
    assert not made


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_on_the_gpu(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Pinned weights, merged on the GPU: nothing of them stays there, and a pass has read them when it ends."""
    model = models.with_lora(models.qwen2, dtype=torch.bfloat16, **CONFIG | options)
    there = copy.deepcopy(model).cuda()
    wanted = {name: tensor.cpu() for name, tensor in MergedWeights(there, bucket_bytes=BUCKET)}
    del there
    for parameter in model.parameters():
        parameter.data = parameter.data.pin_memory()
    elsewhere(monkeypatch, "cuda:0")
    weights = MergedWeights(model, bucket_bytes=BUCKET)
    assert_streams(weights, wanted)
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        for _name, _tensor in weights:
            del _tensor
        with torch.no_grad():
            scales = [p.clone() for p in model.parameters()]
            for parameter in model.parameters():
                parameter.zero_()  # at once: no stream may still read the old values
            for parameter, scale in zip(model.parameters(), scales, strict=True):
                parameter.copy_(scale)
        assert torch.cuda.memory_allocated() <= before
    assert_streams(weights, wanted)
