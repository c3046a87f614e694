"""A rank of the trainer that ends in the middle of a push: it fails on the others, too, and says what engines hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import models
import policies
import pytest
import torch
from helpers import assert_same_bits
from processes import spawn

from lora_merge import PushFailed, VllmSync
from lora_merge.engine.payload.pull import PullSource
from lora_merge.engine.payload.update import UpdatePayload
from lora_merge.engine.push.channels import Trainer
from lora_merge.shards import here
from lora_merge.shards.ranks import RankLost
from lora_merge.stream.bucket_writer import BucketWriter
from tests.engine.test_repeated_calls import server
from tests.shards.test_shards_merge import fsdp2, local_bits


def ends(works: Callable[..., Any], at: int) -> Callable[..., Any]:
    """This process ends with a call of some number."""
    left = [at]

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            os._exit(0)
        return works(*args, **options)

    return call


WHERE: dict[str, tuple[Any, type, str, int, str, str]] = {
    # way -> merge, where the rank ends, the step that says so, what the engine holds then
    "met": ("trainer", Trainer, "everywhere", 0, " in the step 'check'", "merged@"),
    "buckets": ("trainer", BucketWriter, "fill", 2, " in the step 'transfer'", "dirty"),
    "pulled": ("trainer", PullSource, "settle", 0, " in the step 'transfer'", "merged@"),
    "merged there": ("engine", UpdatePayload, "fill", 0, " in the step 'transfer'", "merged@"),
    "through": ("trainer", Trainer, "share", 2, "", "merged@"),
}


def left_by_one_rank(rank: int, url: str, way: str) -> None:
    merge, where, name, at, step, holds = WHERE[way]
    model = fsdp2(models.with_lora(policies.qwen2, target_modules=policies.LINEARS))
    for parameter in model.parameters() if way == "pulled" else ():
        here(parameter).share_memory_()
    sync = VllmSync(model, url if rank == 0 else None, merge=merge, bucket_bytes=1 << 17, lost="skip")
    for _ in range(2):
        sync.push()
    with torch.no_grad():
        for name_of, parameter in model.named_parameters():
            if "lora_B" in name_of:
                here(parameter).neg_()
    before = [bits.clone() for bits in local_bits(model)]
    if rank == 1:
        setattr(where, name, ends(getattr(where, name), at))
    with pytest.raises(PushFailed, match=rf"the push broke off{step}, as .* engine 0: {holds}") as failed:
        sync.push()
    assert isinstance(failed.value.__cause__, RankLost)
    for now, then in zip(local_bits(model), before, strict=True):
        assert_same_bits(now, then)
    sync.close()
    os._exit(0)  # no barrier: nobody is there


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with server() as url:
        yield url


@pytest.mark.parametrize("way", WHERE)
def test_a_push_that_a_rank_leaves(url: str, way: str) -> None:
    spawn(2, left_by_one_rank, url, way)
    VllmSync(models.with_lora(policies.qwen2, target_modules=policies.LINEARS), url).push(verify=True)
