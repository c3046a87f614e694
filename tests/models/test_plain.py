"""Models whose tensors are not plain weights are refused by name, adapters or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lora_merge import InvalidInput, MergedWeights, UnsupportedAdapter, save_merged
from lora_merge.models.plain import remedy


def head(change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = models.qwen2()
    model.lm_head.weight = nn.Parameter(change(model.lm_head.weight.detach()), requires_grad=False)
    return model


def packed(**tensors: Tensor) -> nn.Module:
    """A layer as GPTQ, AWQ, EETQ and others hold it, in buffers."""
    model = models.qwen2()
    layer = model.model.layers[1].mlp.up_proj = nn.Module()
    for name, tensor in tensors.items():
        layer.register_buffer(name, tensor)
    return model


def dynamic() -> nn.Module:
    """torch's own, whose weights are in no parameter."""
    return torch.ao.quantization.quantize_dynamic(models.qwen2(), {nn.Linear}, dtype=torch.qint8)


def noted(model: nn.Module, method: str = "vptq") -> nn.Module:
    """Of a format that transformers says."""
    quantizer = type("Quantizer", (), {"quantization_config": type("Config", (), {"quant_method": method})()})
    model.hf_quantizer = quantizer()
    return model


EXPONENTS = getattr(torch, "float8_e8m0fnu", torch.float8_e5m2)  # from torch 2.7 on
CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fp8": (lambda: head(lambda w: w.to(torch.float8_e4m3fn)), r"lm_head.weight: .*quantised .*float8_e4m3fn"),
    "int8": (lambda: head(lambda w: w.to(torch.int8)), r"lm_head.weight: .*quantised .*int8.*; load the base in"),
    "uint8": (lambda: head(lambda w: w.to(torch.uint8)[:, :16]), r"lm_head.weight: .*quantised .*uint8 .101, 16."),
    "a tensor subclass": (lambda: head(lambda w: TwoTensor(w, w)), r"lm_head.weight: .*quantised .*TwoTensor"),
    "gptq": (
        lambda: packed(qweight=torch.ones(4, 48, dtype=torch.int32), scales=torch.ones(1, 48)),
        r"layers.1.mlp.up_proj.qweight: .*quantised",
    ),
    "compressed-tensors": (
        lambda: packed(weight_packed=torch.ones(48, 4, dtype=torch.int32)),
        r"up_proj.weight_packed: .*quantised",
    ),
    "an int8 buffer": (lambda: packed(weight=torch.ones(48, 32, dtype=torch.int8)), r"up_proj.weight: .*quantised"),
    "mxfp4": (
        lambda: packed(blocks=torch.ones(48, 16, dtype=torch.uint8), exponents=torch.ones(48, 1).to(EXPONENTS)),
        r"up_proj.exponents: .*quantised .*torch.float8_e",
    ),
    "scales of 8 bits": (
        lambda: packed(scales=torch.ones(48, 1).to(EXPONENTS)),
        r"up_proj.scales: .*quantised .*torch.float8_e",
    ),
    "torch's own": (dynamic, r"layers.0.self_attn.q_proj: the base is quantised"),
    "said by transformers": (
        lambda: noted(models.qwen2()),
        r"the model: .* .vptq.; load .* from a checkpoint that is not",
    ),
    "said, and shown": (
        lambda: noted(head(lambda w: w.to(torch.float8_e4m3fn)), "fp8"),
        r"lm_head.weight: .*quantization_config=FineGrainedFP8Config.dequantize=True",
    ),
    "sparse": (lambda: head(Tensor.to_sparse), r"lm_head.weight: expected a dense tensor, got .*sparse_coo"),
    "sparse, by rows": (lambda: head(Tensor.to_sparse_csr), r"lm_head.weight: expected a dense tensor, .*sparse_csr"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), r"0.weight: .*run a forward first"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_refused(case: str) -> None:
    build, message = CASES[case]
    model = build()
    for attempt in (lambda: list(MergedWeights(model)), lambda: MergedWeights(model, adapters=False).metadata()):
        with pytest.raises(InvalidInput, match=message):
            attempt()


def test_integers_that_are_values() -> None:
    """Counters and masks are streamed as they are."""
    model = packed(
        mask=torch.ones(3, 3, dtype=torch.bool),
        count=torch.tensor(7),
        ids=torch.arange(9, dtype=torch.int32),
        tril=torch.ones(3, 3, dtype=torch.uint8),
    )
    streamed = dict(MergedWeights(model))
    for name, tensor in model.model.layers[1].mlp.up_proj.named_buffers():
        assert torch.equal(streamed[f"model.layers.1.mlp.up_proj.{name}"], tensor)


BYTES = ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3fn", "float8_e5m2")
BYTES = tuple(name for name in BYTES if hasattr(torch, name))  # the first one from torch 2.7 on


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
@pytest.mark.parametrize("name", BYTES)
def test_numbers_of_8_bits_that_are_values(name: str, kind: str, tmp_path: Path) -> None:
    """Tables that no adapter touches and that scale nothing: every bit is streamed and saved, whatever dtype weights
    become."""
    model = models.with_lora(models.qwen2, target_modules=["q_proj"])
    layer, every = model.base_model.model.model.layers[0], torch.arange(256).to(torch.uint8)
    table = every.view(getattr(torch, name))
    if kind == "buffer":
        layer.register_buffer("table", table.view(16, 16))
    else:
        layer.table = nn.Parameter(table, requires_grad=False)
    for dtype in (None, torch.float16):
        got = dict(MergedWeights(model, dtype=dtype))["model.layers.0.table"]
        assert got.dtype == table.dtype
        assert torch.equal(got.view(torch.uint8).flatten(), every)
    save_merged(model, tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.table"]
    assert saved.dtype == table.dtype
    assert torch.equal(saved.view(torch.uint8).flatten(), every)


class OtherLinear(nn.Linear):
    """A LoRA layer as other libraries have it: factors are modules, or parameters, of a linear layer."""

    def __init__(self, factors: str) -> None:
        super().__init__(8, 8, bias=False)
        if factors == "modules":
            self.lora_A, self.lora_B = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        else:
            self.lora_a, self.lora_b = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(8, 2))


@pytest.mark.parametrize("factors", ["modules", "parameters"])
@pytest.mark.parametrize("adapters", [True, False])
def test_lora_layers_of_other_libraries(factors: str, adapters: bool) -> None:
    """They were streamed as a base and two tensors more: served, the base alone."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(OtherLinear(factors)))
    with pytest.raises(UnsupportedAdapter, match=r"1\.0 holds lora_[Aa], and is no LoRA layer of PEFT's"):
        list(MergedWeights(model, adapters=adapters))


@pytest.mark.parametrize("method", ["bitsandbytes", "higgs"])
def test_what_transformers_dequantises_when_it_is_loaded(method: str) -> None:
    assert "model.dequantize()" in remedy(method)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_what_transformers_dequantises_while_it_loads_it(method: str) -> None:
    assert "(dequantize=True)" in remedy(method)


@pytest.mark.parametrize("method", ["gptq", "awq", "aqlm", "eetq", "hqq", "torchao", "quanto", "", "unheard of"])
def test_what_transformers_does_not_dequantise(method: str) -> None:
    assert "dequantize" not in remedy(method)
