"""Base modules with a forward of their own: merging must be what the adapter does, or be refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import models
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, PeftModel, XLoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

from lora_merge import UnsupportedAdapter, merged, read_deltas


def bitnet() -> nn.Module:
    from transformers.integrations.bitnet import AutoBitLinear

    return AutoBitLinear(8, 8, bias=False, online_quant=True)


def standardized() -> nn.Module:
    from transformers.models.bit.modeling_bit import WeightStandardizedConv2d

    return WeightStandardizedConv2d(4, 8, 3)


def positional() -> nn.Module:
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

    return OPTLearnedPositionalEmbedding(8, 8)


class HalvedConv(nn.Conv2d):
    """A convolution whose own forward is torch's."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight.round(), bias)


class NormedEmbedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.normalize(super().forward(input))


class ScaledNormedEmbedding(NormedEmbedding):
    """Scales what is not linear in the weight."""

    embed_scale = 2.0

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.embed_scale


class ScaledLinear(nn.Linear):
    """Scales as embeddings do; PEFT scales adapters of these alone."""

    embed_scale = 3.0

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * self.embed_scale


def unscaled() -> nn.Module:
    """An embedding whose forward leaves out what PEFT scales the adapter by."""
    embedding = nn.Embedding(8, 8)
    embedding.embed_scale = 3.0
    return embedding


def patched_convolution() -> nn.Module:
    conv = nn.Conv2d(4, 8, 3)
    conv._conv_forward = lambda x, weight, bias: nn.functional.conv2d(x, weight.sign(), bias)
    return conv


def patched() -> nn.Module:
    linear = nn.Linear(8, 8)
    linear.forward = lambda x: nn.functional.linear(x, linear.weight.sign(), linear.bias)
    return linear


def behind_accelerate(module: nn.Module) -> nn.Module:
    return add_hook_to_module(module, ModelHook())


def on(base: nn.Module, **options: bool) -> PeftModel:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False, **options)  # type: ignore[arg-type]
    return get_peft_model(nn.Sequential(base), config)


STRANGE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fake quantisation": (bitnet, "AutoBitLinear"),
    "weights standardised": (standardized, "WeightStandardizedConv2d"),
    "positions with an offset": (positional, "OPTLearnedPositionalEmbedding"),
    "rows normed": (lambda: NormedEmbedding(8, 8), "NormedEmbedding"),
    "rows normed, then scaled": (lambda: ScaledNormedEmbedding(8, 8), "NormedEmbedding"),
    "convolution": (lambda: HalvedConv(4, 8, 3), r"HalvedConv\._conv_forward"),
    "convolution of one module": (patched_convolution, r"patched_convolution\.<locals>\.<lambda>"),
    "a scaled linear layer": (lambda: ScaledLinear(8, 8), "ScaledLinear"),
    "embeddings that are not scaled": (unscaled, "Embedding.forward, which leaves out its embed_scale"),
    "forward of one module": (patched, r"patched\.<locals>\.<lambda>"),
    "behind accelerate": (lambda: behind_accelerate(patched()), r"patched\.<locals>\.<lambda>"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_bases_that_compute_otherwise_are_refused(case: str) -> None:
    """Adding to the weight is what the adapter does only where the forward is linear in it."""
    build, message = STRANGE[case]
    told = rf"0: the base, a .*, computes by .*{message}.*target_parameters"
    with pytest.raises(UnsupportedAdapter, match=told):
        read_deltas(on(build()))


def bart_scaled() -> nn.Module:
    from transformers.models.bart.modeling_bart import BartScaledWordEmbedding

    return BartScaledWordEmbedding(8, 8, 0, 3.0)


def gemma_scaled() -> nn.Module:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    return Gemma3TextScaledWordEmbedding(8, 8, 0, 3.0)


def falcon() -> nn.Module:
    from transformers.models.falcon.modeling_falcon import FalconLinear

    return FalconLinear(8, 8)


def idefics() -> nn.Module:
    from transformers.models.idefics.modeling_idefics import IdeficsDecoupledLinear

    return IdeficsDecoupledLinear(8, 8, 0)


def idefics_embedding() -> nn.Module:
    from transformers.models.idefics.modeling_idefics import IdeficsDecoupledEmbedding

    return IdeficsDecoupledEmbedding(8, 2, 8)


FAMILIAR: dict[str, Callable[[], nn.Module]] = {
    "scaled": bart_scaled,
    "scaled, cast": gemma_scaled,
    "falcon": falcon,
    "idefics": idefics,
    "idefics, embedding": idefics_embedding,
    "inherited": lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8),
    "behind accelerate": lambda: behind_accelerate(nn.Linear(8, 8)),
    "was behind accelerate": lambda: remove_hook_from_module(behind_accelerate(nn.Linear(8, 8))),
    "scaled behind accelerate": lambda: behind_accelerate(bart_scaled()),
}


@pytest.mark.parametrize("case", FAMILIAR)
def test_bases_that_are_linear_in_their_weight(case: str) -> None:
    base = FAMILIAR[case]()
    model = on(base).eval()
    embeds = isinstance(base, nn.Embedding)
    x = torch.arange(8).view(2, 4) if embeds else torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    adapter = model(x)
    with merged(model):
        torch.testing.assert_close(model(x), adapter)


def test_parameters_may_have_any_forward() -> None:
    """`target_parameters`: PEFT adds to the weight itself."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=[], target_parameters=["0.weight"], init_lora_weights=False)
    model = get_peft_model(nn.Sequential(NormedEmbedding(8, 8)), config).eval()
    adapter = model(torch.arange(8))
    with merged(model):
        torch.testing.assert_close(model(torch.arange(8)), adapter)


@pytest.mark.parametrize("change", ["convolution", "scale", "factor"])
def test_what_changes_after_a_merge_is_seen(change: str) -> None:
    base = (
        nn.Conv2d(4, 8, 3) if change == "convolution" else nn.Embedding(8, 8) if change == "scale" else nn.Linear(8, 8)
    )
    model = on(base).eval()
    for _ in range(2):
        with merged(model):
            pass
    if change == "convolution":
        base._conv_forward = patched_convolution()._conv_forward
    elif change == "scale":
        base.embed_scale = 3.0
    else:
        layer = model.base_model.model[0]
        layer.lora_A["default"] = ScaledLinear(8, 2, bias=False)
    with pytest.raises(UnsupportedAdapter, match="computes by"), merged(model):
        pass


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
def test_factors_that_compute_otherwise_are_refused(half: str) -> None:
    model = on(nn.Linear(8, 8))
    getattr(model.base_model.model[0], half)["default"] = ScaledLinear(8, 8, bias=False)
    with pytest.raises(UnsupportedAdapter, match=rf"0: {half} of 'default', a .*ScaledLinear, computes by"):
        read_deltas(model)


@pytest.mark.parametrize("half", ["lora_A", "lora_B"])
@pytest.mark.parametrize("before", [0, 2], ids=["first", "later"])
def test_a_factor_with_a_forward_of_its_own_is_refused(half: str, before: int) -> None:
    """Also where the model was read before, and is watched; accelerate's forward, around the one there was, is none."""
    model = on(nn.Linear(8, 8))
    part = getattr(model.base_model.model[0], half)["default"]
    for _ in range(before):
        read_deltas(model)
        with merged(model):
            pass
    add_hook_to_module(part, ModelHook())
    with merged(model):
        pass
    remove_hook_from_module(part)
    inner = part.forward
    part.forward = lambda x: 2 * inner(x)
    with pytest.raises(UnsupportedAdapter, match=rf"0: {half} of 'default', a .*Linear, computes by"), merged(model):
        pass
    del part.forward
    with merged(model):
        pass


def test_a_layer_of_pefts_with_a_forward_of_its_own_is_told() -> None:
    """What merging would make of it nobody knows: some replace it by a faster one, and X-LoRA by one that scales."""
    model = on(nn.Linear(8, 8))
    layer = model.base_model.model[0]
    add_hook_to_module(layer, ModelHook())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            read_deltas(model)
    remove_hook_from_module(layer)
    inner = layer.forward
    layer.forward = lambda x: 2 * inner(x)
    with pytest.warns(UserWarning, match=f"a peft.tuners.lora.layer.Linear computes by {__name__}"), merged(model):
        pass


@pytest.mark.parametrize("of", ["model", "inside"])
def test_mixed_adapters_are_refused(of: str, tmp_path: Path) -> None:
    """X-LoRA scales LoRA adapters, which act under names of their own, by what it makes of each token."""
    for name in ("a", "b"):
        models.with_lora(models.qwen2, target_modules=["q_proj"]).save_pretrained(tmp_path / name)
    base = models.qwen2()
    base.config.use_cache = False
    adapters = {"0": str(tmp_path / "a"), "1": str(tmp_path / "b")}
    config = XLoraConfig(task_type="CAUSAL_LM", hidden_size=base.config.hidden_size, adapters=adapters)
    mixed = get_peft_model(base, config).eval()
    with pytest.raises(UnsupportedAdapter, match=r"XLORA|X-LoRA"), merged(mixed if of == "model" else base):
        pass


@pytest.mark.parametrize("how", ["prune", "parametrise"])
def test_biases_that_are_no_parameters_are_refused(how: str) -> None:
    model = on(nn.Linear(8, 8), lora_bias=True)
    lora_B = model.base_model.model[0].lora_B["default"]
    if how == "prune":
        prune.l1_unstructured(lora_B, "bias", 0.5)
    else:
        register_parametrization(lora_B, "bias", nn.Tanh())
    with pytest.raises(UnsupportedAdapter, match=r"0: the bias of lora_B of 'default' is no parameter"):
        read_deltas(model)


def _mamba() -> nn.Module:
    from transformers import MambaConfig, MambaForCausalLM

    sizes = {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 32, "time_step_rank": 2}
    return MambaForCausalLM(MambaConfig(**sizes)).eval()


class _Wrapped(nn.Module):
    """Reads weights in all ways that are no computation, and one that is; calls its children under a decorator."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.looked_at, self.read = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def inside() -> torch.Tensor:
            return self.called(x) + x @ self.called.weight

        if isinstance(self.looked_at.weight, torch.Tensor) and x.dtype != self.looked_at.weight.dtype:
            x = x.to(self.looked_at.weight.dtype)
        return self.looked_at(inside()) + x @ self.read.weight.T


CALLED = {
    "mamba's dt_proj": (_mamba, "dt_proj", "MambaMixer"),
    "mamba's in_proj": (_mamba, "in_proj", ""),
    "attention of torch's": (lambda: nn.TransformerEncoderLayer(8, 2, 8), "out_proj", "MultiheadAttention"),
    "read": (_Wrapped, "read", "_Wrapped"),
    "called in a function inside": (_Wrapped, "called", ""),
    "looked at": (_Wrapped, "looked_at", ""),
}


@pytest.mark.parametrize("case", CALLED)
def test_modules_that_are_not_called(case: str) -> None:
    """Mamba multiplies by `dt_proj.weight` itself: the adapter did nothing in training, and was served all the same."""
    build, target, reader = CALLED[case]
    model = get_peft_model(build(), LoraConfig(r=2, target_modules=[target], init_lora_weights=False))
    if not reader:
        assert read_deltas(model)
        return
    with pytest.raises(UnsupportedAdapter, match=rf"{target}: .*{reader} computes with this module's weight itself"):
        read_deltas(model)
