"""What cannot be merged on shards is one clear error on every rank, and nothing is changed.

Here for `merged` and `MergedWeights`; pushes are held to the same in test_vllm_shards.py.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from peft import LoraConfig, get_peft_model
from processes import spawn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from lora_merge import InvalidInput, LoraMergeError, MergedWeights, merged
from lora_merge.engine.transport.sender import Sender
from lora_merge.shards.exchange import Exchange
from lora_merge.shards.ranks import RankLost, Ranks
from tests.shards.test_shards_merge import Odd, fsdp1_one_unit, local_bits, odd


def enter(model: nn.Module, **options: Any) -> None:
    with merged(model, **options):
        raise AssertionError("the body ran")


def stream(model: nn.Module, **options: Any) -> None:
    for _ in MergedWeights(model, **{"bucket_bytes": 512} | options):
        raise AssertionError("something came out")


USES: tuple[Callable[..., None], ...] = (enter, stream)


def assert_refused(model: nn.Module, message: str, uses: tuple[Callable[..., None], ...] = USES) -> None:
    for use in uses:
        with pytest.raises(LoraMergeError, match=message):
            use(model)


def refused_between_steps(model: nn.Module, message: str, inside: AbstractContextManager[object]) -> None:
    """Refused inside; afterwards as before, and merged again."""
    before = local_bits(model)
    with inside:
        assert_refused(model, message)
    for now, then in zip(local_bits(model), before, strict=True):
        assert_same_bits(now, then)
    with merged(model):
        pass


def in_a_forward(rank: int) -> None:
    for wrap in (fully_shard, fsdp1_one_unit):
        model = wrap(odd())
        inner = next(module for module in model.modules() if isinstance(module, Odd))
        inner.register_forward_pre_hook(lambda *_, m=model: assert_refused(m, "forward"))
        model(torch.randn(4, 20))


def gathered(rank: int) -> None:
    """FSDP1's summon_full_params, and FSDP2's unshard with a write that resharding would forget."""
    model = fsdp1_one_unit(odd())
    refused_between_steps(model, "SUMMON_FULL_PARAMS", FullyShardedDataParallel.summon_full_params(model))
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model = fully_shard(odd(), mp_policy=policy)
        before = local_bits(model)
        model.unshard()
        with torch.no_grad():
            model.base_model.model.narrow.base_layer.weight[-1].add_(1)
        refused_row = rank == dist.get_world_size() - 1  # the last row is the last rank's; the others say which rank
        assert_refused(model, "weight of an FSDP2 unit .* written to" if refused_row else "rank 1 failed.*written to")
        model.reshard()
        for now, then in zip(local_bits(model), before, strict=True):
            assert_same_bits(now, then)
        model.unshard()  # nothing was written since
        with merged(model):
            pass


def raising(*_: object) -> None:
    raise RuntimeError("injected")


def fsdp1_kept(model: nn.Module) -> nn.Module:
    return fsdp1_one_unit(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def raised_inside(rank: int) -> None:
    """A forward that raises inside leaves units gathered, in the middle of it: they go back to the base all the same,
    and are merged again."""
    x = torch.ones(4, 20)
    for wrap in (fully_shard, fsdp1_one_unit, fsdp1_kept):
        with torch.no_grad():
            model = wrap(odd())
            before, wanted = local_bits(model), model(x)
            inner = next(module for module in model.modules() if isinstance(module, Odd))
            for _ in range(2):
                hook = inner.narrow.register_forward_pre_hook(raising)
                with pytest.raises(RuntimeError, match="injected"), merged(model):
                    model(x)
                hook.remove()
            for now, then in zip(local_bits(model), before, strict=True):
                assert_same_bits(now, then, wrap.__name__)
            for _ in range(2):
                assert torch.equal(model(x), wanted), f"{wrap.__name__}: a forward after it"


def gathering(rank: int) -> None:
    """An all-gather that is under way at either end holds what is not to be computed with any more."""
    x = torch.ones(4, 20)
    with torch.no_grad():
        model = fully_shard(odd())
        wanted = model(x)
        with merged(model):
            inside = model(x)
        model.reshard()
        model.unshard(async_op=True)
        with merged(model):
            assert torch.equal(model(x), inside), "inside, after one that was begun outside"
            model.reshard()
            model.unshard(async_op=True)
        assert torch.equal(model(x), wanted), "outside, after one that was begun inside"


def summoned_inside(rank: int) -> None:
    """What leaves summon_full_params after merged() would write merged values to the shards."""
    model = fsdp1_one_unit(odd())
    summon = FullyShardedDataParallel.summon_full_params(model, writeback=False)
    with pytest.raises(LoraMergeError, match="summon_full_params was entered inside of merged"), merged(model):
        summon.__enter__()
    summon.__exit__(None, None, None)


def unmapped(rank: int) -> None:
    policy = {"use_orig_params": True, "device_id": torch.device("cpu")}
    inner = odd()
    inner.base_model.model.narrow.base_layer.weight.data = torch.randn(53, 7).t()
    assert_refused(fsdp1_one_unit(inner), r"narrow\.base_layer\.weight of an FSDP1 unit .* not contiguous")
    inner, mesh = odd(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    parallelize_module(inner.base_model.model, mesh["tp"], {"wide.base_layer": ColwiseParallel()})
    model = FullyShardedDataParallel(inner, device_mesh=mesh["dp"], **policy)
    assert_refused(model, r"wide\.base_layer\.weight of an FSDP1 unit .* DTensor .* use FSDP2")
    model = fsdp1_one_unit(odd())
    if rank == 1:
        del model._handle.flat_param._shard_param_infos
    assert_refused(model, "has no map of its parts" if rank else "rank 1 failed, nothing was changed.* no map of its")


def disagreeing(rank: int) -> None:
    model = fully_shard(odd())
    message = "(?s)disagree.*rank 1: strategy='unshard'"
    assert_refused(model, message, (partial(enter, strategy="unshard" if rank else None),))
    assert_refused(model, message, (partial(stream, strategy="unshard" if rank else None),))
    assert_refused(model, "(?s)disagree.*bucket_bytes=1024", (partial(stream, bucket_bytes=512 * (1 + rank)),))
    inner = odd()
    if rank == 1:
        inner.base_model.model.extra = nn.Linear(2, 2)
    assert_refused(fully_shard(inner), "(?s)disagree.*rank 1: extra.weight", (stream,))
    model = fully_shard(odd())
    if rank == 1:
        model.base_model.model.wide.set_adapter([])
    assert_refused(model, "(?s)disagree.*rank 0: wide.weight")


def offloaded_and_cast(rank: int) -> None:
    """Shards in float32 that roll out in bf16: one rounding, as without shards. Offloaded ones too."""
    wanted = dict(MergedWeights(odd(), dtype=torch.bfloat16))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for options in ({"mp_policy": policy}, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model = fully_shard(odd(), **options)
        model(torch.randn(4, 20))
        for name, tensor in MergedWeights(model, dtype=torch.bfloat16, bucket_bytes=512):
            assert_same_bits(tensor, wanted[name], name)


def beyond_float16(rank: int) -> None:
    """Finite weights and adapters whose sum float16 does not hold, merged by rank and merged whole."""
    model = fully_shard(odd().half())
    factors = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    for options in ({}, {"strategy": "unshard"}):
        wanted = dict(MergedWeights(model, **options))
        with torch.no_grad():
            torch._foreach_mul_(factors, 2.0**10)
        before = local_bits(model)
        for use in (enter, to_the_end_of):
            assert_refused(model, "expected merged values up to 65504", (partial(use, **options),))
        for now, then in zip(local_bits(model), before, strict=True):
            assert_same_bits(now, then, str(options))
        with torch.no_grad():
            torch._foreach_mul_(factors, 2.0**-10)
        for name, tensor in MergedWeights(model, **options):
            assert_same_bits(tensor, wanted[name], name)


def after_the_end(rank: int, folder: Path) -> None:
    """Without process groups; and with new ones again for whoever comes after."""
    models = [fully_shard(odd()), fsdp1_one_unit(odd())]
    world = dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    for model in models:
        assert_refused(model, "torch.distributed is not initialised")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)


def two_ranks(rank: int, folder: Path) -> None:
    for case in (
        in_a_forward,
        gathered,
        raised_inside,
        gathering,
        summoned_inside,
        unmapped,
        disagreeing,
        offloaded_and_cast,
        beyond_float16,
        partial(after_the_end, folder=folder),
    ):
        try:
            case(rank)
        except Exception as error:
            raise AssertionError(f"{case} on rank {rank}") from error


def test_bad_input_is_one_error_on_every_rank(tmp_path: Path) -> None:
    spawn(2, two_ranks, tmp_path)


def out_of_memory(*args: object, **kwargs: object) -> None:
    raise torch.OutOfMemoryError("injected")


def fails_on_one_rank(rank: int) -> None:
    for where, use, options in FAULTS:
        model = fully_shard(odd(("one", "two")))
        before = local_bits(model)
        with (
            mock.patch(where, out_of_memory) if rank == 1 else nullcontext(),
            pytest.raises(torch.OutOfMemoryError if rank == 1 else LoraMergeError),
        ):
            use(model, **options)
        for now, then in zip(local_bits(model), before, strict=True):
            assert_same_bits(now, then, where)
        with merged(model):
            pass
        dict(MergedWeights(model))


def to_the_end_of(model: nn.Module, **options: Any) -> None:
    for _ in MergedWeights(model, **{"bucket_bytes": 512} | options):
        pass


def to_the_end_of_layers(model: nn.Module, **options: Any) -> None:
    """Nothing of a layer in which a rank failed is handed on, anywhere."""
    for _ in MergedWeights(model, **options).iter_groups():
        raise AssertionError("the layer in which a rank failed")


def written_on_one_rank(rank: int) -> None:
    """In the middle of a pass, as an optimizer's step in another thread may do it; the others hear of it."""
    config = LoraConfig(r=3, target_modules=["wide", "narrow", "tiny"], init_lora_weights=False)
    torch.manual_seed(0)
    model = fully_shard(get_peft_model(nn.ModuleDict({"layers": nn.ModuleList([Odd(), Odd()])}), config))
    for begin in (lambda: iter(MergedWeights(model, bucket_bytes=512)), lambda: MergedWeights(model).iter_groups()):
        stream: Any = begin()
        next(stream)
        if rank == 1:
            with torch.no_grad():
                next(p for name, p in model.named_parameters() if "lora_B" in name).mul_(2)
        with pytest.raises(InvalidInput, match="while the model was streamed" if rank == 1 else ""):
            next(stream), list(stream)
    dict(MergedWeights(model))


def goes_wrong_on_one_rank(rank: int) -> None:
    fails_on_one_rank(rank)
    written_on_one_rank(rank)


FAULTS: list[tuple[str, Callable[..., None], dict[str, Any]]] = [
    ("lora_merge.merge_in_place.TrackedPlan", enter, {}),
    ("lora_merge.models.operands.Operands._made_private", enter, {}),
    ("lora_merge.models.operands._Beside.run", enter, {}),
    ("lora_merge.shards.exchange._Turn.lie_in", enter, {}),
    ("lora_merge.merge_in_place.InPlaceMerge.merge", enter, {}),
    ("lora_merge.merge_in_place.UnshardedMerge._merge_wholes", enter, {"strategy": "unshard"}),
    ("lora_merge.stream.bucket_plans.BucketPlans._make", to_the_end_of, {}),
    ("lora_merge.stream.bucket_writer.BucketWriter._turns", to_the_end_of, {}),
    ("lora_merge.shards.exchange._Turn.lie_in", to_the_end_of, {"strategy": "unshard"}),
    ("lora_merge.stream.bucket_writer.BucketWriter._merged", to_the_end_of, {"strategy": "unshard"}),
    ("lora_merge.models.operands._Beside.run", to_the_end_of, {}),
    ("lora_merge.stream.bucket_plans.BucketPlans._make", to_the_end_of_layers, {}),
    ("lora_merge.stream.held.HeldWriter._unpack", to_the_end_of_layers, {}),
    ("lora_merge.models.operands._Beside.run", to_the_end_of_layers, {}),
    ("lora_merge.stream.bucket_writer.BucketWriter._merged", to_the_end_of_layers, {"strategy": "unshard"}),
]


def test_a_failure_on_one_rank_leaves_nobody_waiting() -> None:
    """It is an error on every rank, wherever it comes up on one, and changes nothing."""
    spawn(2, goes_wrong_on_one_rank)


def interrupts(works: Callable[..., Any]) -> Callable[..., Any]:
    """Ctrl-C comes once, before some work is done."""
    left = [signal.SIGINT]

    def call(*args: Any, **options: Any) -> Any:
        if left:
            signal.raise_signal(left.pop())
        return works(*args, **options)

    return call


def interrupted_on_one_rank(rank: int) -> None:
    """In the middle of a bucket, whose collectives the other rank is in."""
    for where, name, strategy in ((Exchange, "wait", None), (Exchange, "__init__", "unshard")):
        model = fully_shard(odd(("one", "two")))
        writer, source = MergedWeights(model, bucket_bytes=512, strategy=strategy)._read_writer(False, False)
        sender = Sender({}, writer.capacity, torch.device("cpu"))
        with pytest.MonkeyPatch.context() as patch, writer.passing(source):
            if rank == 1:
                patch.setattr(where, name, interrupts(getattr(where, name)))
            with pytest.raises(KeyboardInterrupt) if rank == 1 else nullcontext():
                sender.serve(writer, {})
        sender.close()
        dict(MergedWeights(model))


def test_an_interrupt_of_one_rank_leaves_no_collective_out() -> None:
    """It met this rank's next one, and both hung, or gloo ended them."""
    spawn(2, interrupted_on_one_rank, timeout=timedelta(seconds=60))


def left_by_one_rank(rank: int) -> None:
    """It ends in the middle of something; each collective of the other says so, and a merged model comes back."""
    model = fully_shard(odd(("one", "two")))
    before, ranks = local_bits(model), Ranks(dist.group.WORLD)
    with merged(model):
        if rank == 1:
            os._exit(0)
        with pytest.raises(RankLost, match=r"has died, has left, or has not come in time \(RuntimeError: "):
            ranks.any(True)
    for now, then in zip(local_bits(model), before, strict=True):
        assert_same_bits(now, then)
    few = torch.zeros(4, dtype=torch.uint8)
    works: list[Callable[[], object]] = [
        lambda: ranks.any(True),
        lambda: ranks.gather("x"),
        lambda: ranks.spread("x", 1),
        lambda: ranks.sum_(torch.zeros(2)),
        lambda: ranks.all_gather_parts(few, [2, 2])(),
        lambda: ranks.all_gather_parts(few, [1, 3])(),
        lambda: ranks.all_to_all(few, [2, 2], few.clone(), [2, 2]),
        lambda: dict(MergedWeights(model)),
    ]
    for work in works:
        with pytest.raises(RankLost):
            work()
    os._exit(0)  # no barrier: nobody is there


def test_a_rank_that_has_left_is_named_by_every_collective() -> None:
    spawn(2, left_by_one_rank)


def distributed(*, uncovered: str) -> nn.Module:
    """DTensors by rows over all ranks, but over the first two alone where names begin with `uncovered`."""
    model = odd()
    everybody, two = (DeviceMesh("cpu", list(range(size))) for size in (dist.get_world_size(), 2))
    for path, module in model.named_modules():
        mesh = two if path.removeprefix("base_model.model.").startswith(uncovered) else everybody
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(distribute_tensor(parameter.data, mesh, [Shard(0)]))
    return model


def partly_covered(rank: int) -> None:
    assert_refused(distributed(uncovered="narrow"), "not in the tensor's mesh")  # on every rank
    model = distributed(uncovered="")  # whole between the first two, who merge it
    if rank == 2:
        assert_refused(model, "rank 2 is not in the mesh")
        return
    wanted = dict(MergedWeights(odd()))
    for name, tensor in MergedWeights(model):
        assert_same_bits(tensor, wanted[name], name)


def other_adapters(rank: int) -> None:
    """Which adapters are active is compared by name, though shapes and scalings are the same; their order is free."""
    build = partial(models.with_lora, models.qwen2, adapters=("math", "chat"))
    plain = build()
    wanted = {name: tensor.clone() for name, tensor in MergedWeights(plain)}
    for wrap in (fully_shard, fsdp1_one_unit):
        model = build()
        model.base_model.set_adapter(["math", "chat"] if rank else ["chat", "math"])
        model = wrap(model)
        for name, tensor in MergedWeights(model, bucket_bytes=4096):
            assert_same_bits(tensor, wanted[name], name)
        with merged(model):
            pass
        model = build()
        model.base_model.set_adapter(["math"] if rank else ["chat"])
        assert_refused(wrap(model), r"(?s)ranks disagree.*'(math|chat)': lora_A")


def other_dtypes(rank: int) -> None:
    """Of the base, also where the stream has one of its own."""
    model = fully_shard(models.with_lora(models.qwen2, dtype=torch.bfloat16 if rank else torch.float32))
    for options in ({}, {"strategy": "unshard"}):
        assert_refused(
            model, "ranks disagree", (partial(enter, **options), partial(stream, dtype=torch.bfloat16, **options))
        )


def test_ranks_with_other_adapters() -> None:
    spawn(2, other_adapters)


def test_ranks_with_bases_of_other_dtypes() -> None:
    spawn(2, other_dtypes)


def test_a_mesh_that_does_not_cover_all_ranks() -> None:
    spawn(3, partly_covered)
