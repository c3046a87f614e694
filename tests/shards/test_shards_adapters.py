"""What a pass over a sharded model gathers of adapters: bucket by bucket, as they are then, begun one bucket ahead, in
twice the memory of one bucket's adapters."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any
from unittest import mock

import models
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from processes import spawn
from torch import Tensor, nn

from lora_merge import MergedWeights
from lora_merge.kernels.plan import Plan
from lora_merge.shards.ranks import Ranks
from lora_merge.stream.bucket_writer import BucketWriter
from tests.shards.test_shards_merge import Wrap, device, fsdp1_one_unit, fsdp2, fsdp2_columns, hsdp

KINDS: dict[str, dict[str, Any]] = {
    "one": {"r": 64},
    "dora": {"r": 64, "use_dora": True},
    "two": {"r": 32, "adapters": ("one", "two")},
}
PADDING = 256
"""Bytes up to which each box of a factor may be padded."""


def deep() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**models._SIZES | {"num_hidden_layers": 4}))


def built(kind: str) -> nn.Module:
    return models.with_lora(deep, **KINDS[kind]).to(device())


def scaled_up(model: nn.Module) -> None:
    """Every number of every adapter, by a power of two."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.5)


def filled(writer: BucketWriter) -> Generator[Tensor]:
    """One pass into buffers of its own."""
    buffers = [torch.empty(writer.capacity, dtype=torch.uint8, device=writer.device) for _ in range(2)]
    with writer.passing():
        for _, buffer in writer.filled(buffers, {}):
            yield buffer


def alive() -> dict[int, int]:
    """Bytes of the memory of every tensor, by address; but for tables of plans, which are int64."""
    found = [getattr(t, "_local_tensor", t) for t in gc.get_objects() if issubclass(type(t), Tensor)]
    found = [t for t in found if t.dtype != torch.int64]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}


def halves(writer: BucketWriter, index: int) -> int:
    """Bytes of both halves, and magnitudes, of every adapter whose weight has a box in a bucket, padding included."""
    sources = {source for slot in writer.table[index] for source in writer.entries[slot.name].sources}
    deltas = [delta for source in sources if (delta := writer.source.parts[source].delta) is not None]
    shards = {id(s): s for d in deltas for s in (*d.shards(), d.magnitude) if s is not None}
    return sum(s.nbytes + PADDING * (dist.get_world_size() + 1) for s in shards.values())


def bounded(rank: int) -> None:
    for wrap in (fsdp2, fsdp2_columns, fsdp1_one_unit):
        for kind in KINDS:
            assert_bounded(wrap(built(kind)), several=kind == "two", what=f"{wrap.__name__} {kind}")


def assert_bounded(model: nn.Module, *, several: bool, what: str) -> None:
    weights = MergedWeights(model, bucket_bytes=8_000)
    gc.collect()
    before = alive()
    gc.freeze()  # what is there now need not be looked through again
    writer = weights.bucket_writer()
    with writer.passing():
        largest = max(halves(writer, index) for index in range(len(writer.table)))
        deltas = [part.delta for part in writer.source.parts.values() if part.delta is not None]
    assert len(writer.table) > 8, what
    allowed = (3 if several else 2) * largest  # packed and whole; several side by side as well
    rows = sum(12 * delta.shape[0] for delta in deltas if delta.magnitude is not None)  # norms and factors
    assert allowed < sum(shard.nbytes for delta in deltas for shard in delta.shards()), "else it bounds nothing"
    del deltas
    peak = 0
    for _ in filled(weights.bucket_writer()):
        peak = max(peak, sum(size for place, size in alive().items() if place not in before))
    gc.unfreeze()
    beside = peak - 2 * writer.capacity
    most = allowed + rows + largest // dist.get_world_size()  # what gloo sends is a copy
    assert 0 < beside <= most, f"{what}: {beside} bytes beside the buckets, not {most} at most"
    assert writer.operands.held <= allowed, what
    assert f"beside two buckets: {writer.operands.held:,} bytes" in weights.describe(), what


def changing(rank: int, wraps: Sequence[Wrap] = (fsdp2, fsdp1_one_unit)) -> None:
    """Adapters change between passes, some of which stop early with a gather under way."""
    for wrap in wraps:
        for kind in KINDS:
            plain, model = built(kind), wrap(built(kind))
            reference, weights = MergedWeights(plain), MergedWeights(model, bucket_bytes=8_000)
            for step in range(2):
                begun = filled(weights.bucket_writer())
                for _ in range(1 + 2 * step):
                    next(begun)
                begun.close()
                wanted, got = dict(reference), dict(weights)
                assert wanted.keys() == got.keys()
                for name, tensor in wanted.items():
                    assert_same_bits(got[name], tensor, f"{wrap.__name__} {kind}, pass {step}: {name}")
                scaled_up(plain)
                scaled_up(model)


@contextlib.contextmanager
def listening() -> Iterator[list[int]]:
    """Bytes of all-gathers, in the order in which they are begun."""
    begun: list[int] = []
    through = Ranks.all_gather_parts

    def listen(ranks: Ranks, buffer: Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        begun.append(sum(sizes))
        return through(ranks, buffer, sizes)

    with mock.patch.object(Ranks, "all_gather_parts", listen):
        yield begun


def ahead(rank: int) -> None:
    """One collective a bucket for what it needs, begun before the bucket in front is filled."""
    writer = MergedWeights(fsdp2(built("one")), bucket_bytes=8_000).bucket_writer()
    gathered = [sum(turn.sizes) for turn in writer.operands._exchange._turns]
    wanted = gathered[:1]
    for index, sizes in enumerate(writer._sizes):
        wanted += [*gathered[index + 1 : index + 2], sum(sizes)]
    with listening() as begun:
        for _ in filled(writer):
            pass
    assert begun == [nbytes for nbytes in wanted if nbytes]
    assert sum(gathered) // 2 == writer.operands.nbytes


def failing(rank: int) -> None:
    """What fails on rank 1 alone is raised there; nobody waits for it, and the next pass is as ever."""

    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("injected")

    for kind, method in (("one", "run"), ("dora", "row_norms")):
        model = fsdp2_columns(built(kind))  # rows are split: norms are summed over ranks
        weights = MergedWeights(model, bucket_bytes=8_000)
        wanted = {name: t.clone() for name, t in weights}
        writer = weights.bucket_writer()
        operands, errors = writer.operands, []
        plans: list[Plan]
        if kind == "one":
            plans = [t.pack for t in operands._exchange._turns if t.sizes]
        else:
            assert operands._dora is not None
            plans = [one.plan for turn in operands._dora._turns if turn is not None for one in turn.rounds]
        buffer = torch.empty(writer.capacity, dtype=torch.uint8, device=writer.device)
        fault = mock.patch.object(plans[len(plans) // 2], method, fail) if rank else contextlib.nullcontext()
        with fault, writer.passing():
            for index in range(len(writer.table)):
                try:
                    writer.fill(index, buffer, {})
                except RuntimeError as error:
                    errors.append(str(error))
        assert errors == ["injected"] * rank, (kind, errors)
        for name, tensor in weights:
            assert_same_bits(tensor, wanted[name], f"{kind} {name}, after a pass that failed")


def two_ranks(rank: int, cases: Sequence[Callable[[int], None]] = (bounded, changing, ahead, failing)) -> None:
    for case in cases:
        try:
            case(rank)
        except Exception as error:
            raise AssertionError(f"{case.__name__} on rank {rank}") from error


def test_adapters_come_bucket_by_bucket() -> None:
    spawn(2, two_ranks)


def test_replicas_gather_the_adapters_as_they_are() -> None:
    spawn(4, changing, [hsdp])
