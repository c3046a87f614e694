"""merged() and MergedWeights on real FSDP2 and FSDP1 models over gloo: bit-equal to the unsharded model's merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from held import assert_held
from helpers import assert_same_bits
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import fsdp_auto_wrap_policy
from processes import spawn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from lora_merge import LoraMergeError, MergedWeights, UnsupportedAdapter, merged, read_deltas
from lora_merge.shards import cut
from lora_merge.shards.layout import Layout

Wrap = Callable[[Any], nn.Module]
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2": lambda: models.with_lora(models.qwen2, dtype=torch.bfloat16),
    "qwen2 float32": lambda: models.with_lora(models.qwen2),
    "qwen2 head and embeddings": lambda: models.with_lora(
        models.qwen2, target_modules=["embed_tokens", "q_proj", "lm_head", "down_proj"]
    ),
    "dora": lambda: models.with_lora(models.qwen2, use_dora=True),
    "two adapters": lambda: models.with_lora(models.qwen2, adapters=("one", "two")),
    "lora_bias": lambda: models.with_lora(models.qwen2, target_modules=["q_proj"], lora_bias=True),
    "experts": lambda: models.with_lora(models.qwen3_moe, **ATTENTION, target_parameters=EXPERTS),
    "gpt2": lambda: models.with_lora(models.gpt2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
}


def device() -> torch.device:
    """Where this rank's model lives: on its GPU, where the ranks talk over NCCL."""
    return torch.device("cuda", dist.get_rank()) if "nccl" in str(dist.get_backend_config()) else torch.device("cpu")


def layers_of(model: Any) -> Any:
    base = model.get_base_model()
    return base.model.layers if hasattr(base, "model") else base.transformer.h


def fsdp2(model: Any) -> nn.Module:
    for layer in layers_of(model):
        fully_shard(layer)
    return fully_shard(model)


def fsdp2_kept(model: Any) -> nn.Module:
    return fully_shard(model, reshard_after_forward=False)


def fsdp2_units(model: Any) -> nn.Module:
    """Each layer with an adapter is a unit of its own: torch makes another class of PEFT's."""
    for module in reversed(list(model.modules())):  # of nested ones the inner one first
        if isinstance(module, BaseTunerLayer):
            fully_shard(module)
    return fully_shard(model)


def fsdp2_columns(model: Any) -> nn.Module:
    even = 4 * dist.get_world_size()
    return fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1) if p.shape[-1] % even == 0 else None)


def fsdp2_mixed_precision(model: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in layers_of(model):
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def hsdp(model: Any) -> nn.Module:
    mesh = init_device_mesh(device().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in layers_of(model):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Any) -> nn.Module:
    """The base cut by rows and columns over one dimension of the mesh, all of it by rows over the other."""
    mesh = init_device_mesh(device().type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for layer in layers_of(model):
        styles = {"q_proj": ColwiseParallel(), "v_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
        present = {f"{name}.base_layer": style for name, style in styles.items()
                   if hasattr(getattr(layer.self_attn, name, None), "base_layer")}  # fmt: skip
        parallelize_module(layer.self_attn, mesh["tp"], present)
        fully_shard(layer, mesh=mesh["dp"])
    return model


def fsdp1(model: Any) -> nn.Module:
    policy = ModuleWrapPolicy({type(layers_of(model)[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True, device_id=device())


def fsdp1_one_unit(model: Any, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=device(), **options)


def fsdp1_whole(model: Any) -> nn.Module:
    return fsdp1_one_unit(model, sharding_strategy=ShardingStrategy.NO_SHARD)


def fsdp1_flat(model: Any) -> nn.Module:
    return FullyShardedDataParallel(
        model, auto_wrap_policy=fsdp_auto_wrap_policy(model), use_orig_params=False, device_id=device()
    )


WRAPS: list[Wrap] = [fsdp2, fsdp2_kept, fsdp2_units, fsdp2_columns, fsdp2_mixed_precision, hsdp, tensor_parallel, fsdp1,
                     fsdp1_one_unit, fsdp1_whole, fsdp1_flat]  # fmt: skip
FSDP1 = (fsdp1, fsdp1_one_unit, fsdp1_whole, fsdp1_flat)
"""A unit of FSDP1 holds one dtype."""
ODD: list[Wrap] = [fsdp2, fsdp2_columns, fsdp1, fsdp1_one_unit, fsdp1_flat]
"""Wraps that need no even number of ranks."""
NO_FORWARD = (tensor_parallel,)
"""PEFT's forward knows no tensor-parallel base: only weights are looked at."""


def local_bits(model: nn.Module) -> list[Tensor]:
    layout = Layout(model)
    tensors = []
    for module in model.modules():
        for key, parameter in layout.parameters(module):
            shard = layout.of(key, module, key)
            assert shard is not None, parameter
            tensors += [piece.tensor.clone() for piece in shard.pieces]
    return tensors


def forward(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12, device=device()).view(2, 6)).logits.clone()


def held_inside(plain: nn.Module) -> dict[str, Tensor]:
    """The merged weights of a model that is not sharded, by name."""
    with merged(plain):
        return {d.name: d.weight.pieces[0].tensor.clone() for d in read_deltas_merged(plain)}


def check(build: Callable[[], nn.Module], wrap: Wrap, what: str) -> None:
    """One model in one wrapping: merged in place and streamed, both strategies."""
    plain = build().to(device())
    streamed = {name: t.clone() for name, t in MergedWeights(plain)}
    held = {kind: held_inside(build().to(kind)) for kind in {device().type, "cpu"}}  # what is offloaded is merged there
    model = wrap(build().to(device()))
    # Nor does FSDP1 know the parametrisation with which PEFT runs adapted experts.
    runs = wrap not in NO_FORWARD and not (wrap in FSDP1 and "experts" in what)
    if runs:
        adapter = forward(model)  # leaves units gathered
    Layout(model).reshard()
    before = local_bits(model)
    for strategy in (None, "unshard"):
        for _ in range(2):
            if runs:
                forward(model)
            with merged(model, strategy=strategy):
                for delta in read_deltas_merged(model):
                    for piece in delta.weight.pieces:
                        wanted = cut(held[piece.tensor.device.type][delta.name], piece.box)
                        assert_same_bits(piece.tensor, wanted, f"{what} {delta.name}")
                if runs:
                    inside = forward(model)
        weights = MergedWeights(model, bucket_bytes=10_000, strategy=strategy)
        for _ in range(2):
            got = dict(weights)
            assert got.keys() == streamed.keys(), what
            for name, tensor in got.items():
                assert_same_bits(tensor, streamed[name], f"{what} {strategy} {name}")
        assert weights.metadata() == [(name, t.dtype, tuple(t.shape)) for name, t in got.items()]
        assert_held(weights, streamed, Layout(model).ranks(), f"{what} {strategy}")
        assert Layout(model).ranks().alone or "base weights" in weights.describe()
        Layout(model).reshard()
        for now, then in zip(local_bits(model), before, strict=True):
            assert_same_bits(now, then, f"{what}: a shard after merging")
    if runs:
        assert torch.equal(forward(model), adapter), f"{what}: the adapter's forward has changed"
        assert not torch.equal(inside, adapter), what
        assert (inside - adapter).abs().max() <= 0.05 * adapter.abs().max(), f"{what}: merged is another policy"


def read_deltas_merged(model: Any) -> Any:
    """Deltas of a model that is inside `merged`: its layers say that they are merged, so ask them as if not."""
    layers = [module for module in model.modules() if "merged_adapters" in module.__dict__]
    saved = [layer.__dict__.pop("merged_adapters") for layer in layers]
    for layer in layers:
        layer.__dict__["merged_adapters"] = []
    try:
        return read_deltas(model)
    finally:
        for layer, names in zip(layers, saved, strict=True):
            layer.__dict__["merged_adapters"] = names


class Odd(nn.Module):
    """Rows that do not divide by anything, a unit of a few numbers; frozen and trained parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(20, 53), nn.Linear(53, 7)
        self.tiny = nn.Linear(7, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.tiny(self.narrow(self.wide(x)))


def odd(adapters: Sequence[str] = ("default",)) -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=3, target_modules=["wide", "narrow", "tiny"], init_lora_weights=False)
    model = get_peft_model(Odd(), config, adapter_name=adapters[0])
    for name in adapters[1:]:
        model.add_adapter(name, config)
    model.base_model.set_adapter(list(adapters))
    return model


def training(rank: int) -> None:
    """Merging in the gap between backward and step, and streaming after it: the run is that which never merged."""
    for wrap in (fully_shard, fsdp1_one_unit):
        runs = []
        for merges in (False, True):
            model = wrap(odd())
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
            for step in range(3):
                g = torch.Generator().manual_seed(10 * step + rank)
                model(torch.randn(4, 20, generator=g)).square().sum().backward()
                if merges:
                    with merged(model, strategy=(None, "unshard")[step % 2]):
                        pass
                    dict(MergedWeights(model, bucket_bytes=512))
                optimizer.step()
                optimizer.zero_grad()
                if merges:
                    with merged(model):
                        pass
            Layout(model).reshard()
            runs.append(local_bits(model))
        for one, other in zip(*runs, strict=True):
            assert_same_bits(one, other, f"{wrap.__name__} on rank {rank}")


def test_training_goes_on_as_if_nobody_had_merged() -> None:
    spawn(4, training)


def disagreements(rank: int) -> None:
    """What is wrong on one rank only is an error on every rank, before anything is written or waited for."""
    changes: dict[str, Callable[[Any], object]] = {
        "rank 1 failed, nothing was changed: UnsupportedAdapter": lambda m: setattr(
            m.base_model.model.wide, "quantization_backend", "x"
        ),
        "disagree on the model or its adapters.*rank 1: wide.weight": lambda m: m.base_model.model.wide.set_scale(
            "default", 7.0
        ),
        "no LoRA layers": lambda m: None,
    }
    for message, change in changes.items():
        model = fully_shard(odd() if "LoRA" not in message else Odd())
        before = local_bits(model)
        if rank == 1:
            change(model)
        # The rank itself raises what it found; the others say which rank it was.
        other = "(?s)" + ("quantised" if rank == 1 and "failed" in message else message)
        with pytest.raises(LoraMergeError, match=other), merged(model):
            raise AssertionError("the body ran")
        for now, then in zip(local_bits(model), before, strict=True):
            assert_same_bits(now, then)


def test_one_rank_that_disagrees_fails_on_all() -> None:
    spawn(2, disagreements)


def tied(rank: int) -> None:
    model = fully_shard(models.with_lora(lambda: models.qwen2(tied=True), target_modules=["lm_head", "q_proj"]))
    with pytest.raises(UnsupportedAdapter, match="tied weight"), merged(model):
        pass
    plain = models.with_lora(lambda: models.qwen2(tied=True), target_modules=["lm_head", "q_proj"])
    wanted = dict(MergedWeights(plain))
    for name, tensor in MergedWeights(model):
        assert_same_bits(tensor, wanted[name], name)


def test_an_adapter_on_one_of_two_tied_weights() -> None:
    """In place it is refused under FSDP; the stream holds the two apart."""
    spawn(2, tied)


def replicated(model: nn.Module) -> nn.Module:
    """DTensors that every rank holds whole."""
    mesh, made = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None:  # tied ones stay tied
                made[p] = made.get(p, nn.Parameter(distribute_tensor(p.data, mesh, [Replicate()]), p.requires_grad))
                module._parameters[key] = made[p]
    return model


def packed(model: nn.Module) -> nn.Module:
    """Tensor parallelism that cuts each third of the rows, and each half of the columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer, dim, groups in ((model.base_model.model.fused, 0, 3), (model.base_model.model.back, 1, 2)):
        weight = layer.base_layer.weight.data
        parts = [group.chunk(mesh.size(), dim)[mesh.get_local_rank()] for group in weight.chunk(groups, dim)]
        options: Any = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
        cut_alike = [_StridedShard(dim, split_factor=groups)]
        layer.base_layer.weight = nn.Parameter(DTensor.from_local(torch.cat(parts, dim), mesh, cut_alike, **options))
    return model


def even(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ModuleDict({"fused": nn.Linear(8, 12), "back": nn.Linear(12, 8)})
    return get_peft_model(model, LoraConfig(r=3, target_modules=["fused", "back"], init_lora_weights=False, **options))


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    named = [(name, p) for name, p in model.named_parameters() if "base_layer.weight" in name]
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for name, p in named}


def other_dtensors(rank: int) -> None:
    for wrap in (replicated, packed):
        for dora in (False, True):
            plain, model = even(use_dora=dora), wrap(even(use_dora=dora))
            before, streamed = whole_weights(plain), dict(MergedWeights(plain))
            with merged(plain):
                held = whole_weights(plain)
            for strategy in (None, "unshard"):
                for _ in range(2):
                    with merged(model, strategy=strategy):
                        inside = whole_weights(model)
                    after, got = whole_weights(model), dict(MergedWeights(model, bucket_bytes=512, strategy=strategy))
                    for wanted, found in ((held, inside), (before, after), (streamed, got)):
                        assert wanted.keys() == found.keys()
                        for name, tensor in wanted.items():
                            assert_same_bits(found[name], tensor, f"{wrap.__name__} {strategy} {name}, dora={dora}")
    model = replicated(models.with_lora(lambda: models.qwen2(tied=True), target_modules=["lm_head"]))
    with pytest.raises(UnsupportedAdapter, match="tied weight"), merged(model):
        pass


def test_dtensors_that_fsdp_does_not_make() -> None:
    """Whole on every rank, and cut group by group."""
    spawn(2, other_dtensors)


def every_wrap(rank: int, wraps: list[Wrap], names: list[str]) -> None:
    for wrap in wraps:
        for name in names:
            if name == "qwen2" and wrap in FSDP1:
                name = "qwen2 float32"
            if wrap is fsdp1_flat and name in ("two adapters", "experts", "qwen2 head and embeddings"):
                continue  # PEFT's policy does not make units of one requires_grad here
            check(MODELS[name], wrap, f"{wrap.__name__} {name} on rank {rank}")


def test_every_wrap() -> None:
    spawn(2, every_wrap, WRAPS, ["qwen2"])


def test_one_rank() -> None:
    """On which torch shards nothing, whatever FSDP1 is told."""
    spawn(1, every_wrap, [fsdp1, fsdp1_whole, fsdp1_flat], ["qwen2"])


def test_four_ranks() -> None:
    spawn(4, every_wrap, [fsdp2, hsdp, tensor_parallel, fsdp1_one_unit], ["qwen2"])


def test_every_model_on_two_ranks() -> None:
    names = [name for name in MODELS if "qwen2" not in name or "head" in name]
    spawn(2, every_wrap, [fsdp2, fsdp1_one_unit], names)
    # PEFT's own forward of experts does not run where they are a unit of their own.
    spawn(2, every_wrap, [fsdp2_units], [name for name in names if name != "experts"])


def test_rows_that_do_not_divide() -> None:
    spawn(3, every_wrap, ODD, ["qwen2", "experts"])
