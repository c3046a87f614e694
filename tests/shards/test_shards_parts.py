"""Parts: what each rank wants of sharded tensors comes to it, to the bit; and the factors of an update by it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from processes import spawn
from torch import Tensor

from lora_merge import InvalidInput, read_deltas
from lora_merge.engine.payload.factors import GatheredFactors, slots_of
from lora_merge.engine.payload.recipients import Share
from lora_merge.shards import Box, Piece, Shard, cut
from lora_merge.shards.parts import Parts
from lora_merge.shards.ranks import Ranks
from tests.shards.test_shards_merge import EXPERTS, device, fsdp2, fsdp2_columns, hsdp

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
WORLD = 4


def cut_up(whole: Tensor, way: str, draw: random.Random) -> list[list[Box]]:
    """Boxes of each rank."""
    world = dist.get_world_size()
    boxes: list[list[Box]] = [[] for _ in range(world)]
    if way == "replicated":
        return [[((0,) * whole.dim(), tuple(whole.shape))] for _ in boxes]
    if way == "on one rank":
        boxes[draw.randrange(world)] = [((0,) * whole.dim(), tuple(whole.shape))]
        return boxes
    dim = draw.randrange(whole.dim())
    ends = sorted(draw.randint(0, whole.shape[dim]) for _ in range(2 * world - 1))
    for number, (begin, end) in enumerate(zip([0, *ends], [*ends, whole.shape[dim]], strict=True)):
        start, size = [0] * whole.dim(), list(whole.shape)
        start[dim], size[dim] = begin, end - begin
        if begin < end:
            boxes[number % world if way == "in turns" else number // 2].append((tuple(start), tuple(size)))
    return boxes


def any_box(whole: Tensor, draw: random.Random) -> Box:
    """Of at least one element."""
    start = [draw.randrange(n) for n in whole.shape]
    return tuple(start), tuple(draw.randint(1, n - s) for n, s in zip(whole.shape, start, strict=True))


def everything(rank: int, seed: int) -> None:
    draw = random.Random(seed)  # alike on every rank
    torch.manual_seed(seed)
    wholes: list[Tensor] = []
    held: list[list[Box]] = []
    for dtype in DTYPES * 2:
        shape = [draw.randint(1, 9) for _ in range(draw.randint(1, 3))]
        wholes.append(torch.randint(0, 100, shape).to(device(), dtype))
        way = draw.choice(["replicated", "on one rank", "in turns", "one after another"])
        held.append(cut_up(wholes[-1], way, draw)[rank])
    wanted = [
        [(n, any_box(wholes[n], draw)) for n in draw.choices(range(len(wholes)), k=draw.choice([0, 1, 12]))]
        for _ in range(dist.get_world_size())
    ]
    live = [[cut(whole, box).clone() for box in boxes] for whole, boxes in zip(wholes, held, strict=True)]
    shards = [
        Shard(
            tuple(whole.shape),
            whole.dtype,
            whole.device,
            tuple(Piece(box[0], tensor) for box, tensor in zip(boxes, tensors, strict=True)),
        )
        for whole, boxes, tensors in zip(wholes, held, live, strict=True)
    ]
    parts = Parts([f"tensor {n}" for n in range(len(wholes))], shards, wanted[rank], Ranks(dist.group.WORLD), device())
    for step in range(3):
        parts.run()
        for (number, box), tensor in zip(wanted[rank], parts.tensors, strict=True):
            assert torch.equal(tensor, cut(wholes[number], box) + step), (seed, step, number, box)
        parts.release()
        for tensor in (tensor for tensors in live for tensor in tensors):
            tensor += 1


def many(rank: int) -> None:
    for seed in range(60):
        everything(rank, seed)
    broken(rank)


def test_boxes_of_all_kinds_of_shards() -> None:
    """Rows, columns, pieces that go round, replicas, tensors of one rank; ranks that want nothing, or one box twice;
    one that fails."""
    spawn(WORLD, many)


def test_one_rank_by_itself() -> None:
    whole = torch.arange(12.0).view(3, 4)
    parts = Parts(["w"], [Shard((3, 4), whole.dtype, whole.device, (Piece((0, 0), whole),))], [(0, ((1, 1), (2, 2)))],
                  Ranks(), whole.device)  # fmt: skip
    parts.run()
    assert torch.equal(parts.tensors[0], whole[1:, 1:3])


def broken(rank: int) -> None:
    """A rank that fails as it packs is in the collective all the same; the others have what they wanted."""
    mine = torch.full((2, 3), float(rank), device=device())
    shard = Shard((2 * dist.get_world_size(), 3), mine.dtype, mine.device, (Piece((2 * rank, 0), mine),))
    parts = Parts(["w"], [shard], [(0, shard.box)], Ranks(dist.group.WORLD), mine.device)
    parts.run()
    before = parts.tensors[0].clone()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(parts._pack, "run", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                parts.run()
        else:
            parts.run()
    parts.run()
    assert torch.equal(parts.tensors[0], before)
    lacking = Shard((shard.shape[0] + 1, 3), mine.dtype, mine.device, shard.pieces)
    with pytest.raises(InvalidInput, match=r"w: the ranks hold .* elements"):
        Parts(["w"], [lacking], [(0, lacking.box)], Ranks(dist.group.WORLD), mine.device)


def experts_of(rank: int, wrap: Any, options: dict[str, Any]) -> None:
    """What workers that hold a quarter of the experts each take comes to their rank; the same bits as of the whole."""
    model, world = wrap(models.with_lora(models.qwen3_moe, **options).to(device())), dist.get_world_size()
    deltas = read_deltas(model)
    ranks = Ranks(dist.group.WORLD)
    shares: list[Share] = []
    for number, delta in enumerate(deltas):
        if delta.experts and delta.magnitude is None:
            assert delta.experts % world == 0
            many = delta.experts // world
            shares += [Share(number, at * many, many, frozenset([(0, at)])) for at in range(world)]
        elif number % 3 == 0:
            shares.append(Share(number, 0, delta.experts or 1, frozenset([(0, number % world)])))
        else:
            shares.append(Share(number, 0, delta.experts or 1, None))
    slots = [meta for _, meta in slots_of(deltas, shares)]
    whole = GatheredFactors(deltas, shares, None, ranks, device())
    mine = GatheredFactors(deltas, shares, {(0, rank)}, ranks, device())
    nobodys = GatheredFactors(deltas, shares, (), ranks, device())
    assert whole.tensors.keys() == {meta.name for meta in slots}
    own = {meta.name for who, meta in slots_of(deltas, shares) if who is None or (0, rank) in who}
    for step in range(2):
        for brought in (whole, mine, nobodys):
            brought.refresh()
        check(slots, whole.tensors, mine.tensors, own)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5 + step)
    if any(delta.magnitude is not None for delta in deltas):
        return  # gathered
    assert nobodys.nbytes <= mine.nbytes
    if wrap is fsdp2_columns and any(delta.experts for delta in deltas):
        return  # a rank has some columns of lora_B, which are no box of its experts: gathered
    received = ranks.gather((mine.nbytes, whole.nbytes))
    assert sum(some for some, _ in received) < sum(every for _, every in received)
    sizes = {meta.name: meta.nbytes for meta in slots}
    common = sum(sizes[meta.name] for who, meta in slots_of(deltas, shares) if who is None)
    assert mine.nbytes < sum(sizes[name] for name in own) + common + 256 * 4 * len(slots), "and that once"


def check(slots: Sequence[Any], whole: dict[str, Tensor], mine: dict[str, Tensor], own: set[str]) -> None:
    assert own <= mine.keys(), own - mine.keys()
    for meta in slots:
        assert whole[meta.name].numel() == whole[meta.name].new_empty(meta.shape).numel(), meta
        assert whole[meta.name].dtype == meta.dtype
        if meta.name in own:
            wanted = whole[meta.name].reshape(meta.shape)
            assert_same_bits(mine[meta.name].reshape(meta.shape), wanted, meta.name)


CASES: dict[str, dict[str, Any]] = {
    "experts": {"target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS},
    "bf16": {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS, "dtype": torch.bfloat16},
    "two adapters": {"target_modules": ["q_proj", "v_proj"], "adapters": ("one", "two")},
    "dense": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    "DoRA": {"target_modules": ["q_proj", "v_proj", "o_proj"], "use_dora": True},
}
if not version("peft").startswith("0.18."):  # which has one adapter on a parameter
    CASES["on experts, too"] = {"target_modules": ["q_proj"], "target_parameters": EXPERTS, "adapters": ("one", "two")}


def several(rank: int, wraps: Sequence[Any]) -> None:
    for options in CASES.values():
        for wrap in wraps:
            experts_of(rank, wrap, options)


def test_factors_come_to_the_ranks_that_send_them() -> None:
    spawn(WORLD, several, (fsdp2, fsdp2_columns, hsdp))
