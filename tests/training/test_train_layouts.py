"""Training on the merged weight under every way to shard a model, beside PEFT's forward under the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from processes import spawn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lora_merge import InvalidInput, MergedWeights, UnsupportedAdapter, train_merged
from lora_merge.names import innermost, walk
from lora_merge.shards import here
from lora_merge.shards.layout import Layout
from lora_merge.training.layers import layers_of
from tests.shards.test_shards_merge import (
    Wrap,
    device,
    fsdp1,
    fsdp1_flat,
    fsdp1_one_unit,
    fsdp1_whole,
    fsdp2,
    fsdp2_columns,
    fsdp2_kept,
    fsdp2_mixed_precision,
    fsdp2_units,
    hsdp,
)
from tests.shards.test_shards_merge import (
    layers_of as blocks_of,
)
from tests.training.test_train import LINEARS
from tests.training.test_train import loss_of as plain_loss_of

pytestmark = pytest.mark.filterwarnings("ignore")
Step = Callable[[Any, Tensor], None]


def fsdp2_parts(model: Any) -> nn.Module:
    """Some layers are units, others lie in none."""
    fully_shard(blocks_of(model)[1])
    return model


def fsdp2_nested(model: Any) -> nn.Module:
    for block in blocks_of(model):
        fully_shard(block.mlp)
        fully_shard(block)
    return fully_shard(model)


def fsdp2_regathered(model: Any) -> nn.Module:
    """After a forward a unit stays gathered over some of the ranks."""
    for block in blocks_of(model):
        fully_shard(block, reshard_after_forward=2 if dist.get_world_size() > 2 else True)
    return fully_shard(model)


def fsdp2_offloaded(model: Any) -> nn.Module:
    for block in blocks_of(model):
        fully_shard(block, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    return models.with_lora(models.qwen2, dtype=dtype, target_modules=LINEARS).to(device())


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    tokens = models.tokens(seed=10 * step + rank).to(device())
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """What is here of them."""
    return {n: here(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


@contextmanager
def seen(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The weights of adapted layers as a forward computes with them."""
    found: dict[str, Tensor] = {}

    def look(name: str, module: Any, *_: Any) -> None:
        found[name] = module.weight.detach().clone()

    layers = [(name, innermost(layer)) for name, layer in layers_of(model)]
    hooks = [base.register_forward_hook(partial(look, f"{name}.weight"), prepend=True) for name, base in layers]
    yield found
    for hook in hooks:
        hook.remove()


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], what: str) -> None:
    """Gradients in float32: sums of some hundred products, whose order differs."""
    assert got.keys() == wanted.keys(), what
    for name, gradient in got.items():
        assert gradient.shape == wanted[name].shape, f"{what} {name}"
        if gradient.numel():
            error, most = (gradient - wanted[name]).abs().max(), wanted[name].abs().max()
            assert error <= 2e-5 * most + 1e-9, f"{what} {name}: {error} of {most}"


def bases(model: nn.Module) -> list[Tensor]:
    """What is here of the adapted weights."""
    layout = Layout(model)
    layout.check_idle()
    layout.reshard()
    shards = [layout.of(name, innermost(layer), "weight") for name, layer in layers_of(model)]
    return [piece.tensor.clone() for shard in shards if shard is not None for piece in shard.pieces]


def check(wrap: Wrap, rank: int, exact: bool = True) -> None:
    """Two steps of two micro-batches each, beside PEFT's; then what comes between."""
    what = f"{wrap.__name__} on rank {rank}"
    rank = 0 if wrap is fsdp2_parts else rank  # nobody sums gradients of what lies in no unit
    peft, model = wrap(build().train()), wrap(build().train())
    before = bases(model)
    training = train_merged(model)
    # Not Adam, whose first steps make as much of a small gradient's rounding as of a large one.
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (peft, model)]
    optimizers = [torch.optim.SGD(parameters, 0.1, foreach=False) for parameters in trained]
    for step in range(2):
        for micro in range(2):
            losses = []
            for one in (peft, model):
                loss = loss_of(one, rank, 2 * step + micro)
                loss.backward()
                losses.append(loss.detach())
            if exact:
                torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6, msg=what)
        if exact:
            assert_close(gradients(model), gradients(peft), f"{what}, step {step}")
        assert training.merges == step + 1, what
        for one in optimizers:
            one.step()
            one.zero_grad()
    with seen(model) as weights:
        loss_of(model, rank, 0).backward()
    if exact:
        streamed = dict(MergedWeights(model))
        for name, weight in weights.items():
            assert_same_bits(weight, streamed[name], f"{what} {name}")
    wanted = gradients(model)
    for one in optimizers:
        one.zero_grad()
    inner: Any = next(m for _, m in walk(model) if hasattr(m, "disable_adapter"))
    loss = loss_of(model, rank, 0)
    with torch.no_grad(), inner.disable_adapter():
        reference = loss_of(model, rank, 0)
    loss.backward()
    assert_close(gradients(model), wanted, f"{what}, after a forward of the reference policy")
    optimizers[1].zero_grad()
    inner.enable_input_require_grads()
    inner.gradient_checkpointing_enable({"use_reentrant": False})
    loss_of(model, rank, 0).backward()
    assert_close(gradients(model), wanted, f"{what}, checkpointed")
    training.close()
    for now, then in zip(bases(model), before, strict=True):
        assert_same_bits(now, then, f"{what}: a base weight")
    with torch.no_grad(), inner.disable_adapter():
        assert_same_bits(loss_of(model, rank, 0), reference, what)


COLUMNS, ROWS = LINEARS[:3] + LINEARS[4:6], [LINEARS[3], LINEARS[6]]


def mesh_of(dp: int = 1) -> Any:
    if dp == 1:
        return init_device_mesh(device().type, (dist.get_world_size(),))
    return init_device_mesh(device().type, (dp, dist.get_world_size() // dp), mesh_dim_names=("dp", "tp"))


def by_base(model: Any, mesh: Any = None) -> nn.Module:
    """The plan cuts the bases alone: PEFT's own forward would not run."""
    plan = {f"*.{name}.base_layer": ColwiseParallel() for name in COLUMNS}
    return _cut(model, plan | {f"*.{name}.base_layer": RowwiseParallel() for name in ROWS}, mesh)


def by_sequence(model: Any, mesh: Any = None) -> nn.Module:
    """Between the linears each rank has a part of the sequence."""
    part = Shard(1)
    plan: dict[str, Any] = {f"*.{name}.base_layer": ColwiseParallel(input_layouts=part) for name in COLUMNS}
    plan |= {f"*.{name}.base_layer": RowwiseParallel(output_layouts=part) for name in ROWS}
    plan |= {name: SequenceParallel() for name in ("*.input_layernorm", "*.post_attention_layernorm")}
    model = _cut(model, plan, mesh)
    whole = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "norm": SequenceParallel(),
    }
    base = model.get_base_model()
    parallelize_module(base.model, mesh or mesh_of(), whole)
    head = ColwiseParallel(input_layouts=part, output_layouts=Replicate())
    parallelize_module(base, mesh or mesh_of(), {"lm_head": head})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)  # norms were made anew
    return model


def by_peft(model: Any, mesh: Any = None) -> nn.Module:
    """The plan cuts the adapters so that PEFT's own forward runs."""
    plan = {f"*.{name}.{half}": ColwiseParallel() for name in COLUMNS for half in ("base_layer", "lora_B.default")}
    plan |= {f"*.{name}.{half}": RowwiseParallel() for name in ROWS for half in ("base_layer", "lora_A.default")}
    return _cut(model, plan, mesh)


def by_tensors(model: Any, mesh: Any = None) -> nn.Module:
    """The adapters are DTensors, and nothing calls their modules."""
    model = by_base(model, mesh)
    for number, (_, layer) in enumerate(layers_of(model)):
        for half, cut in ((layer.lora_A.default, Shard(number % 2)), (layer.lora_B.default, Replicate())):
            half.weight = nn.Parameter(distribute_tensor(half.weight.data, mesh or mesh_of(), [cut]))
    return model


def _cut(model: Any, plan: dict[str, Any], mesh: Any) -> Any:
    for block in blocks_of(model):
        found = {key.removeprefix("*."): style for key, style in plan.items()}
        for part in (block.self_attn, block.mlp, block):
            here_too = {key: style for key, style in found.items() if hasattr(part, key.partition(".")[0])}
            parallelize_module(part, mesh or mesh_of(), here_too)
    return model


def with_fsdp2(wrap: Wrap) -> Wrap:
    def both(model: Any) -> nn.Module:
        mesh = mesh_of(2)
        model = wrap(model, mesh["tp"])  # type: ignore[call-arg]
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh["dp"])
        return fully_shard(model, mesh=mesh["dp"])

    both.__name__ = f"{wrap.__name__} and fsdp2"
    return both


def full(t: Any) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def even_loss(model: Any, step: int) -> Tensor:
    tokens, places = models.tokens(seed=step)[:, :8].to(device()), torch.arange(8, device=device())[None]
    loss: Tensor = model(input_ids=tokens, labels=tokens, position_ids=places).loss
    return loss


def check_parallel(wrap: Wrap, rank: int) -> None:
    """Beside PEFT's on one process, as its own forward does not run under every plan."""
    what = f"{wrap.__name__} on rank {rank}"
    peft, model = build().train(), wrap(build().train())
    before = bases(model)
    training = train_merged(model)
    trained = [[p for p in one.parameters() if p.requires_grad] for one in (peft, model)]
    optimizers = [torch.optim.SGD(parameters, 0.1, foreach=False) for parameters in trained]
    for step in range(2):
        for one in optimizers:
            one.zero_grad()
        losses = [even_loss(one, step) for one in (peft, model)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(full(losses[1].detach()), losses[0].detach(), rtol=1e-5, atol=1e-6, msg=what)
        for name, parameter in model.named_parameters():
            if "lora_" in name and hasattr(parameter, "placements"):
                assert parameter.grad.placements == parameter.placements, f"{what} {name}"  # type: ignore
        got = {n: full(p.grad) for n, p in model.named_parameters() if "lora_" in n}
        assert_close(got, gradients(peft), f"{what}, step {step}")
        for one in optimizers:
            one.step()
    assert training.merges == 2
    with seen(model) as weights, torch.no_grad():
        even_loss(model, 0)
    streamed = dict(MergedWeights(model))
    for name, weight in weights.items():
        assert_same_bits(full(weight), streamed[name], f"{what} {name}")
    training.close()
    for now, then in zip(bases(model), before, strict=True):
        assert_same_bits(now, then, f"{what}: a base weight")


def every_parallel(rank: int, wraps: list[Wrap]) -> None:
    for wrap in wraps:
        check_parallel(wrap, rank)


def every_2d(rank: int, wraps: list[Wrap]) -> None:
    for wrap in wraps:
        check_parallel(with_fsdp2(wrap), rank)


PARALLEL: list[Wrap] = [by_base, by_sequence, by_peft, by_tensors]


def test_tensor_parallel() -> None:
    spawn(2, every_parallel, PARALLEL)


def test_tensor_parallel_and_fsdp2() -> None:
    spawn(4, every_2d, [by_base, by_sequence, by_peft])


def every(rank: int, wraps: list[Wrap]) -> None:
    for wrap in wraps:
        check(wrap, rank, exact=wrap is not fsdp2_mixed_precision)


def one_rank(rank: int, wraps: list[Wrap]) -> None:
    """What is wrong on one rank is an error on all; after a forward that raised the next one runs."""
    for wrap in wraps:
        model = wrap(build().train())
        (_, layer), *_ = layers_of(model)
        if rank:
            layer.lora_dropout["default"] = nn.Dropout(0.5)
        with pytest.raises(InvalidInput, match="lora_dropout"):
            train_merged(model)
        layer.lora_dropout["default"] = nn.Identity()
        with train_merged(model):
            loss_of(model, rank, 0).backward()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        here(parameter).mul_(1.1)
            if rank:
                layer.lora_dropout["default"] = nn.Dropout(0.5)
            with pytest.raises(InvalidInput, match="lora_dropout"):
                loss_of(model, rank, 0)
            layer.lora_dropout["default"] = nn.Identity()

            def fail(*_: Any) -> None:
                raise ZeroDivisionError

            inner: Any = next(m for _, m in walk(model) if hasattr(m, "disable_adapter"))
            hook = blocks_of(inner)[1].mlp.register_forward_pre_hook(fail)
            for _ in range(2):
                with pytest.raises(ZeroDivisionError):
                    loss_of(model, rank, 0)
            hook.remove()
            loss_of(model, rank, 0).backward()


def refused(rank: int) -> None:
    """Before anything is changed."""
    mesh = mesh_of()
    head: Any = models.with_lora(models.qwen2, target_modules=["lm_head"], lora_bias=False)
    parallelize_module(head, mesh, {"base_model.model.lm_head.base_layer": ColwiseParallel()})
    with train_merged(head):
        pass
    embedding: Any = models.with_lora(models.qwen2, target_modules=["embed_tokens"])
    plan = {"base_model.model.model.embed_tokens.base_layer": RowwiseParallel(input_layouts=Replicate())}
    parallelize_module(embedding, mesh, plan)
    before = bases(embedding)
    with pytest.raises(UnsupportedAdapter, match="embed_tokens: tensor parallelism has cut the weight"):
        train_merged(embedding)
    for now, then in zip(bases(embedding), before, strict=True):
        assert_same_bits(now, then)


def test_what_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    spawn(2, one_rank, [fsdp2, fsdp1])


def test_what_tensor_parallelism_cannot_do_is_refused() -> None:
    spawn(2, refused)


class Past(torch.optim.SGD):
    """As fused kernels and flat buffers do, it writes past version counters."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.add_(parameter.grad, alpha=-0.1)


def test_optimizers_that_write_past_version_counters() -> None:
    model: Any = models.with_lora(models.qwen2, target_modules=LINEARS).train()
    optimizer = Past([p for p in model.parameters() if p.requires_grad], 0.1)
    with train_merged(model) as training:
        losses = []
        for step in range(3):
            loss = plain_loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            assert training.merges == step + 1
        assert losses[2] < losses[1] < losses[0]


TWO: list[Wrap] = [fsdp2, fsdp2_kept, fsdp2_units, fsdp2_parts, fsdp2_nested, fsdp2_offloaded, fsdp2_columns,
                   fsdp2_mixed_precision]  # fmt: skip
ONE: list[Wrap] = [fsdp1, fsdp1_one_unit, fsdp1_whole, fsdp1_flat]


def test_fsdp1() -> None:
    spawn(2, every, ONE)


def test_fsdp2() -> None:
    spawn(2, every, TWO)


def test_four_ranks() -> None:
    spawn(4, every, [hsdp, fsdp2_regathered, fsdp1])
