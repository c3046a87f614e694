"""Which boxes a rank holds, under real FSDP2 and FSDP1 on gloo; and bringing whole tensors together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from processes import spawn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from lora_merge.errors import InvalidInput
from lora_merge.shards import Piece, flat_boxes, overlap
from lora_merge.shards import Shard as Held
from lora_merge.shards.exchange import Exchange
from lora_merge.shards.fsdp2 import runs_here, shard_of
from lora_merge.shards.layout import Layout
from lora_merge.shards.owners import apart, divide
from lora_merge.shards.ranks import _SMALL, Ranks, even


class Model(nn.Module):
    """Rows that do not divide, a unit of a few numbers, frozen and trained, bf16 and float32 in one model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(20, 53), nn.Linear(53, 20)) for _ in range(2))
        self.tiny = nn.Linear(1, 3, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 5, 7))
        self.kernel = nn.Conv2d(3, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum() + self.tiny.weight.sum() + self.experts.sum() + self.kernel.weight.sum() + self.kernel.bias.sum()


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model()
    return model, {name: p.detach().clone() for name, p in model.named_parameters()}


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp2_kept(model: nn.Module) -> nn.Module:
    return fully_shard(model, reshard_after_forward=False)


def fsdp2_columns(model: nn.Module) -> nn.Module:
    return fully_shard(model, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] == 20 else None)


def hsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(model, mesh=mesh)


def tensor_parallel_fsdp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    return model


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), use_orig_params=True, device_id=torch.device("cpu")
    )


def fsdp1_one_unit(model: nn.Module) -> nn.Module:
    strategy = ShardingStrategy.SHARD_GRAD_OP
    return FullyShardedDataParallel(
        model, sharding_strategy=strategy, use_orig_params=True, device_id=torch.device("cpu")
    )


def fsdp1_flat(model: nn.Module) -> nn.Module:
    policy = ModuleWrapPolicy({nn.Sequential})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))


WRAPS = [fsdp2, fsdp2_kept, fsdp2_columns, hsdp, tensor_parallel_fsdp, fsdp1, fsdp1_one_unit, fsdp1_flat]


def shards_of(model: nn.Module, whole: dict[str, Tensor]) -> tuple[Layout, dict[str, Any]]:
    layout, found = Layout(model), {}
    for path, module in model.named_modules():
        path = path.replace("_fsdp_wrapped_module.", "").replace("_fsdp_wrapped_module", "")
        for key, _ in layout.parameters(module):
            name = f"{path}.{key}" if path else key
            if name in whole:
                found[name] = layout.of(name, module, key)
    return layout, found


def assert_holds(shard: Held, whole: Tensor, what: str) -> None:
    for piece in shard.pieces:
        at = tuple(slice(s, s + n) for s, n in zip(*piece.box, strict=True))
        assert torch.equal(piece.tensor, whole[at]), (what, piece.box)


def pieces_and_wholes(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model, values = build()
    wrapped = wrap(model)
    for step in range(2):
        if step:
            if wrap is not tensor_parallel_fsdp:  # its root has parameters outside of every mesh
                wrapped(torch.ones(2, 20)).backward()  # leaves units gathered, and allocates gradients
            Layout(wrapped).reshard()
        layout, shards = shards_of(wrapped, values)
        assert shards.keys() == values.keys()
        ranks = layout.ranks()
        for name, shard in shards.items():
            assert shard.shape == tuple(values[name].shape), name
            assert_holds(shard, values[name], f"{name} on rank {rank}")
        exchange = Exchange(list(shards), list(shards.values()), ranks, torch.device("cpu"))
        for name, gathered in zip(shards, exchange.run(), strict=True):
            assert torch.equal(gathered, values[name]), (rank, name)
    # Pieces are live: what is written to them is what the next forward computes with.
    for shard in shards.values():
        for piece in shard.pieces:
            piece.tensor.zero_()
    if wrap is not tensor_parallel_fsdp:
        assert float(wrapped(torch.ones(2, 20))) == 0.0


def of_groups(tensor: Tensor, mesh: Any, dim: int, groups: int) -> DTensor:
    """Packed weights under tensor parallelism: of each of the groups every rank has a part."""
    rank, size = mesh.get_local_rank(), mesh.size()
    local = torch.cat([group.chunk(size, dim)[rank] for group in tensor.chunk(groups, dim)], dim)
    placements = [_StridedShard(dim, split_factor=groups)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def in_groups(rank: int) -> None:
    """Packed weights, with and without FSDP2 over what tensor parallelism has left of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for shards_too in (False, True):
        torch.manual_seed(0)
        model = nn.ParameterDict(
            {"rows": torch.randn(12, 6), "experts": torch.randn(3, 8, 7), "columns": torch.randn(5, 12)}
        )
        values = {name: p.detach().clone() for name, p in model.items()}
        for name, dim, groups in (("rows", 0, 3), ("experts", 1, 2), ("columns", 1, 2)):
            model[name] = nn.Parameter(of_groups(values[name], mesh["tp"], dim, groups))
            assert torch.equal(model[name].full_tensor(), values[name]), "what torch makes of it"
        if shards_too:
            fully_shard(model, mesh=mesh["dp"])
        layout, shards = shards_of(model, values)
        assert max(len(shard.pieces) for shard in shards.values()) > 1
        for name, shard in shards.items():
            assert_holds(shard, values[name], f"{name} on rank {rank}")
        exchange = Exchange(list(shards), list(shards.values()), layout.ranks(), torch.device("cpu"))
        for name, gathered in zip(shards, exchange.run(), strict=True):
            assert torch.equal(gathered, values[name]), (rank, name, shards_too)


def every_wrap(rank: int) -> None:
    world = dist.get_world_size()
    for wrap in WRAPS:
        if world % 2 == 0 or wrap in (fsdp2, fsdp1, fsdp1_flat):  # the others need meshes or columns in halves
            try:
                pieces_and_wholes(rank, wrap)
            except Exception as error:
                raise AssertionError(f"{wrap.__name__} on {world} ranks, rank {rank}") from error
    if world == 4:
        in_groups(rank)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_pieces_hold_the_values_and_wholes_come_back(world: int) -> None:
    spawn(world, every_wrap)


def raise_on_rank_0(rank: int, ranks: Ranks) -> None:
    with ranks.vote("reading"):
        if rank == 0:
            raise KeyError("mine")


def bad_input(rank: int) -> None:
    ranks = Ranks(dist.group.WORLD)
    with pytest.raises(InvalidInput if rank else KeyError, match=r"rank 0 failed|mine"):
        raise_on_rank_0(rank, ranks)
    with pytest.raises(InvalidInput, match=r"disagree(.|\n)*rank 1: lora r=8"):
        ranks.same(rank, lambda: ["base", f"lora r={8 if rank else 4}"])
    mesh = init_device_mesh("cpu", (2,))
    outside = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False)
    held = shard_of("w", outside)
    lost = held if rank == 0 else type(held)(held.shape, held.dtype, held.device, ())
    with pytest.raises(InvalidInput, match=r"w: the ranks hold 6 of 12 elements"):
        Exchange(["w"], [lost], ranks, torch.device("cpu"))
    boxes = [((0,), (2,)), ((4,), (2,))] if rank == 0 else [((1,), (2,))]  # as many elements as there are, one twice
    pieces = tuple(Piece(start, torch.zeros(size)) for start, size in boxes)
    with pytest.raises(InvalidInput, match=r"t: the ranks hold .* that overlap"):
        divide(["t"], [Held((6,), torch.float32, torch.device("cpu"), pieces)], ranks)
    replicated = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    assert shard_of("r", replicated).whole


def test_bad_input_is_one_error_on_every_rank() -> None:
    spawn(2, bad_input)


def values_of_any_size(rank: int) -> None:
    """Short ones, and such that go on in a second collective, of some ranks or of all."""
    ranks = Ranks(dist.group.WORLD)
    for size in (0, _SMALL - 40, *range(_SMALL - 24, _SMALL + 8), 3 * _SMALL):
        wanted = ["x" * (size + other) for other in range(ranks.size)]
        assert ranks.gather(wanted[rank]) == wanted
        assert ranks.gather(wanted[rank] if rank == 1 else None) == [None, wanted[1], *[None] * (ranks.size - 2)]
    for flags in ((), (0,), (1, 2)):
        with ranks.vote("flags") as ballot:
            ballot.flag = rank in flags
        assert ballot.flag is bool(flags)


def test_values_of_any_size_reach_all_ranks() -> None:
    spawn(3, values_of_any_size)


def one_long_value(rank: int) -> None:
    """The ranks without one send nothing for it."""
    ranks, summed, add = Ranks(dist.group.WORLD), list[int](), Ranks.sum_

    def sum_(self: Ranks, tensor: Tensor) -> Tensor:
        summed.append(tensor.nbytes)
        return add(self, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "sum_", sum_)
        for long in range(ranks.size):
            values = ranks.gather(bytes(range(256)) * 400 if rank == long else b"short")
            assert values == [bytes(range(256)) * 400 if other == long else b"short" for other in range(ranks.size)]
    assert len(summed) == ranks.size
    assert max(summed) < 256 * 400, "the bytes of one value, less its head"


def test_one_long_value() -> None:
    spawn(4, one_long_value)


def test_which_boxes_are_apart() -> None:
    rows = [((i, 0), (1, 4)) for i in range(3)]
    assert apart([*rows, ((3, 0), (2, 2)), ((3, 2), (2, 2))])
    assert not apart([*rows, ((2, 3), (2, 2))])
    assert apart([((), ())])
    assert apart([])


def chunk(numbers: Tensor, parts: int, index: int) -> Tensor:
    """As torch.chunk, where there are fewer chunks than parts too."""
    chunks = numbers.chunk(parts)
    return chunks[index] if index < len(chunks) else numbers[:0]


@hypothesis.given(st.integers(0, 60), st.integers(2, 6), st.integers(1, 6))
@hypothesis.example(7, 2, 3)  # to go by the order of the placements is wrong here
@hypothesis.settings(max_examples=100, deadline=None)
def test_fully_shard_cuts_what_tensor_parallelism_has_left(size: int, tp: int, dp: int) -> None:
    for across, along in itertools.product(range(tp), range(dp)):
        placements = [_StridedShard(0, split_factor=tp), Shard(0)]
        (runs,) = runs_here((size,), placements, (dp, tp), (along, across))
        assert [i for run in runs for i in run] == chunk(chunk(torch.arange(size), tp, across), dp, along).tolist()
        assert len(runs) <= 1, "one box a rank"


@hypothesis.given(st.integers(1, 60), st.integers(2, 6), st.integers(1, 6))
@hypothesis.settings(max_examples=100, deadline=None)
def test_groups_are_cut_as_torch_cuts_them(size: int, groups: int, parts: int) -> None:
    placement = _StridedShard(0, split_factor=groups)
    wanted, _ = placement._split_tensor(torch.arange(size), parts, with_padding=False)
    for index in range(parts):
        (runs,) = runs_here((size,), [placement], (parts,), (index,))
        assert [i for run in runs for i in run] == wanted[index].tolist()


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=200, deadline=None)
def test_boxes_of_a_flat_range(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    begin = data.draw(st.integers(0, numbers.numel()))
    end = data.draw(st.integers(begin, numbers.numel()))
    found: list[int] = []
    boxes = list(flat_boxes(shape, begin, end))
    for (start, size), first in boxes:
        view = numbers[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))].reshape(-1)
        assert view[0] == first
        found += view.tolist()
    assert found == list(range(begin, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_overlap_and_even_parts() -> None:
    assert overlap(((0, 2), (4, 4)), ((3, 0), (2, 3))) == ((3, 2), (1, 1))
    assert overlap(((0,), (4,)), ((4,), (2,))) is None
    assert even([100, 96]) == [100, 100]
    assert even([100, 10]) == [100, 10]
