"""Bases that torchao or HQQ quantised: changes of them between passes, and what is refused (`make test-libraries`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same_bits
from processes import spawn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torchao.quantization import Int4Tensor

from lora_merge import InvalidInput, LoraMergeError, MergedWeights, UnsupportedAdapter, merged
from lora_merge.engine.payload.pull import Unmoved, unreadable
from tests.libraries.test_libraries_dequantised import ROW, assert_streams, base_of, in_format, with_lora

pytestmark = pytest.mark.filterwarnings("ignore")

# ---- changes between passes ------------------------------------------------------------------------------------------


CHANGES: dict[str, Callable[[Any], None]] = {
    "codes in place": lambda layer: layer.weight.qdata.add_(1),
    "scales in place": lambda layer: layer.weight.scale.mul_(2),
    "other scales": lambda layer: setattr(layer.weight, "scale", layer.weight.scale * 3),
    "another weight": lambda layer: setattr(
        layer, "weight", nn.Parameter(other("int8 in groups of 32", layer).weight, requires_grad=False)
    ),
    "another format": lambda layer: setattr(
        layer, "weight", nn.Parameter(other("fp8", layer).weight, requires_grad=False)
    ),
    "plain": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.dequantize() * 2)),
}


def other(case: str, layer: Any) -> Any:
    torch.manual_seed(5)
    return in_format(case, nn.Sequential(nn.Linear(layer.in_features, layer.out_features, dtype=torch.bfloat16)))[0]


@pytest.mark.parametrize("change", CHANGES)
def test_a_base_that_changes(change: str) -> None:
    model = with_lora(lambda: in_format("int8"))
    weights = MergedWeights(model)
    for _ in range(4):  # from the third one on a watch would do for a plain model
        before = assert_streams(model, stream=weights)["model.layers.1.mlp.up_proj.weight"]
    layer = model.get_base_model().model.layers[1].mlp.up_proj.base_layer
    with torch.no_grad():
        CHANGES[change](layer)
    assert not torch.equal(assert_streams(model, stream=weights)["model.layers.1.mlp.up_proj.weight"], before)


def test_a_layer_of_hqq_that_changes() -> None:
    model = with_lora(lambda: in_format("hqq 4 bits"))
    weights = MergedWeights(model)
    layer = model.get_base_model().model.layers[1].mlp.up_proj.base_layer
    for change in (
        lambda: layer.meta["scale"].mul_(2),
        lambda: layer.meta.update(zero=layer.meta["zero"] + 1),
        lambda: layer.W_q.data.bitwise_xor_(3),
        lambda: setattr(layer, "W_q", nn.Parameter(layer.W_q.data ^ 1, requires_grad=False)),
    ):
        for _ in range(4):
            before = assert_streams(model, stream=weights)["model.layers.1.mlp.up_proj.weight"]
        change()
        assert not torch.equal(assert_streams(model, stream=weights)["model.layers.1.mlp.up_proj.weight"], before)
    biased = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer
    biased.bias = biased.bias.detach() + 1
    assert_same_bits(dict(weights)["model.layers.0.self_attn.q_proj.bias"], biased.bias)


ODD_CASES = ["int8", "int8 in groups of 32", "int8 by tensor", "int4 in groups of 32", "fp8", "hqq 4 bits"]


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf, 0.0])
@pytest.mark.parametrize("case", [*ODD_CASES, "hqq 4 bits, by columns"])
def test_scales_that_are_no_scales(case: str, odd: float) -> None:
    """The stream has what the library's own call makes of them, and the adapter on top of what is a number."""
    model = with_lora(lambda: in_format(case))
    name, layer = "model.layers.1.mlp.up_proj.weight", model.get_base_model().model.layers[1].mlp.up_proj
    held = layer.base_layer
    scale = held.meta["scale"] if "hqq" in case else held.weight.scale
    with torch.no_grad():
        scale.view(-1)[scale.numel() // 2] = odd
    base = base_of(held).detach()
    assert (base == 0).any() if odd == 0 else not base.isfinite().all()
    torch.testing.assert_close(dict(MergedWeights(model, adapters=False))[name], base, rtol=0, atol=0, equal_nan=True)
    update = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    wanted = base.double() + layer.scaling["default"] * update.detach()
    got, numbers = dict(MergedWeights(model))[name], base.isfinite()
    torch.testing.assert_close(got[~numbers], base[~numbers], rtol=0, atol=0, equal_nan=True)
    # One rounding to bf16, and that of float32 sums.
    bound = 2.0**-8 * wanted[numbers].abs() + 2.0**-18 * update.abs().max()
    assert ((got[numbers].double() - wanted[numbers]).abs() <= bound).all()


def test_nothing_is_kept_between_passes() -> None:
    """A model of torchao's can be moved: that swaps its tensors, which nobody may hold."""
    model = with_lora(lambda: in_format("int8"))
    weights = MergedWeights(model)
    for _ in range(2):
        assert_streams(model, stream=weights)
        model.to("cpu", torch.bfloat16)
        model.float().bfloat16()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["int8", "int4 in groups of 32", "fp8", "hqq 4 bits"])
def test_in_place(case: str) -> None:
    model = with_lora(lambda: in_format(case), target_modules=["q_proj"])
    message = r"q_proj.weight: the base is quantised \(.*(torchao|HQQ).*MergedWeights streams"
    with pytest.raises(UnsupportedAdapter, match=message), merged(model):
        pass
    other = with_lora(lambda: in_format(case), target_modules=["lm_head"])
    with torch.no_grad(), merged(other):  # only the adapted weights matter
        other(models.tokens())


def test_not_read_by_other_processes() -> None:
    model = with_lora(lambda: in_format("int8"))
    weights, stayed = MergedWeights(model), Unmoved()
    writer = weights.bucket_writer()
    with writer.passing():
        assert "is quantised" in unreadable(writer)
        stayed(writer)
        assert not writer.joins


def int4() -> nn.Module:
    """As CUDA machines have it, of arbitrary codes: torchao has no call that dequantises it."""
    made, (rows, cols) = nn.Linear(128, 96, bias=False, dtype=torch.bfloat16), (96, 128)
    codes = torch.zeros(rows, cols // 2, dtype=torch.int8)
    scales = torch.ones(cols // 32, rows, dtype=torch.bfloat16)
    made.weight = nn.Parameter(Int4Tensor(codes, scales, scales.clone(), [1, 32], torch.Size((rows, cols))), False)
    return made


def test_layouts_that_are_not_dequantised() -> None:
    with pytest.raises(InvalidInput, match=r"0.weight.*Int4Tensor.*not known.*Int8WeightOnlyConfig"):
        list(MergedWeights(nn.Sequential(int4())))


def test_inputs_that_are_scaled() -> None:
    model = with_lora(lambda: in_format("int8"))
    layer = model.get_base_model().model.layers[1].mlp.up_proj.base_layer
    layer.weight.act_pre_scale = torch.ones(ROW, dtype=torch.bfloat16)
    with pytest.raises(InvalidInput, match=r"layers.1.mlp.up_proj.*act_pre_scale"):
        list(MergedWeights(model))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: setattr(layer, "ready", False), "not quantised yet"),
        (lambda layer: layer.meta.update(quant_zero=True), "offload_meta"),
        (lambda layer: layer.meta.update(zero_scale=torch.ones(2)), "offload_meta"),
        (lambda layer: layer.meta.update(compute_dtype=torch.float32), "compute_dtype"),
        (lambda layer: layer.meta.update(scale=layer.meta["scale"].to("meta")), "scales are on meta"),
        (lambda layer: layer.meta.update(scale=layer.meta["scale"].double()), "compute_dtype"),
    ],
)
def test_layers_of_hqq_that_are_not_read(change: Callable[[Any], None], message: str) -> None:
    model = with_lora(lambda: in_format("hqq 4 bits"))
    change(model.get_base_model().model.layers[1].mlp.up_proj.base_layer)
    with pytest.raises(LoraMergeError, match=f"layers.1.mlp.up_proj.*{message}"):
        list(MergedWeights(model))


def test_memory_that_was_freed() -> None:
    model = with_lora(lambda: in_format("int8"))
    layer = model.get_base_model().model.layers[1].mlp.up_proj.base_layer
    layer.weight.qdata.untyped_storage().resize_(0)
    with pytest.raises(InvalidInput, match=r"layers.1.mlp.up_proj: its memory was freed"):
        list(MergedWeights(model))


def test_a_call_that_returns_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_lora(lambda: in_format("int8"))
    kind = type(model.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight)
    monkeypatch.setattr(kind, "dequantize", lambda self: self.qdata.float())
    with pytest.raises(InvalidInput, match=r"q_proj: its library dequantised rows 0 to .* to torch.float32"):
        list(MergedWeights(model))


def refused_under_fsdp2(rank: int) -> None:
    model = with_lora(lambda: in_format("hqq 4 bits"))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    with pytest.raises(LoraMergeError, match=r"q_proj: quantised by HQQ, and sharded.*FSDP2"):
        list(MergedWeights(fully_shard(model)))
    dist.barrier()


def test_hqq_under_fsdp2() -> None:
    spawn(2, refused_under_fsdp2)


def refused_as_a_dtensor(rank: int) -> None:
    """fully_shard of torch 2.13 cannot shard torchao's tensors yet: aten.split and new_zeros are missing."""
    model = in_format("fp8")
    with pytest.raises(NotImplementedError, match="Float8Tensor dispatch"):
        fully_shard(model)
    layer = model.model.layers[1].mlp.up_proj
    mesh = init_device_mesh("cpu", (2,))
    layer.weight = nn.Parameter(DTensor.from_local(layer.weight[:64], mesh, [Shard(0)]), requires_grad=False)
    with pytest.raises(LoraMergeError, match=r"up_proj.weight: quantised by torchao.*sharded"):
        list(MergedWeights(model))
    dist.barrier()


def test_torchao_as_dtensors() -> None:
    spawn(2, refused_as_a_dtensor)
