"""Adapters read out of live PEFT models: what is merged, against PEFT in float64; and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import models
import peft
import pytest
import torch
from helpers import PRODUCT_ERROR, SUM_ERROR, assert_same_bits, most_misrounded, ulp
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import layer as lora_layers
from peft.tuners.lora import variants
from torch import Tensor, nn

from lora_merge import AlreadyMerged, InvalidInput, UnsupportedAdapter, merge, merged, read_deltas
from lora_merge.kernels import reference
from lora_merge.models.delta import whole_job
from lora_merge.models.operands import Operands, Turn
from lora_merge.names import named_tensors
from lora_merge.shards.ranks import Ranks

Build = Callable[[], nn.Module]

EXPERTS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
CONV1D = {"target_modules": ["c_attn", "c_fc", "c_proj"]}
CONVOLUTIONS = {"target_modules": models.CONVOLUTIONS}
TWO = {"adapters": ("one", "two")}
CASES: dict[str, tuple[Build, dict[str, Any]]] = {
    "linear": (models.qwen2, {}),
    "linear bf16 adapters": (models.qwen2, {"adapter_dtype": torch.bfloat16}),
    "linear fp16 adapters": (models.qwen2, {"adapter_dtype": torch.float16}),
    "rslora": (models.qwen2, {"use_rslora": True, "r": 7}),
    "lora_bias": (models.qwen2, {"target_modules": ["q_proj", "k_proj", "v_proj"], "lora_bias": True}),
    "dora": (models.qwen2, {"use_dora": True}),
    "embedding and head": (models.qwen2, {"target_modules": ["embed_tokens", "lm_head", "up_proj"]}),
    "embedding dora": (models.qwen2, {"target_modules": ["embed_tokens", "up_proj"], "use_dora": True}),
    "conv1d": (models.gpt2, CONV1D),
    "conv1d lora_bias": (models.gpt2, CONV1D | {"lora_bias": True}),
    "conv1d dora": (models.gpt2, CONV1D | {"use_dora": True}),
    "experts": (models.qwen3_moe, EXPERTS),
    "experts, router and modules": (
        models.qwen3_moe,
        {
            "target_modules": ["q_proj", "o_proj"],
            "target_parameters": [*EXPERTS["target_parameters"], "mlp.gate.weight"],
        },
    ),
    "square experts": (models.mixtral, EXPERTS),
    "transposed experts": (models.gpt_oss, EXPERTS),
    "convolutions": (models.Convolutions, CONVOLUTIONS),
    "convolutions lora_bias": (models.Convolutions, CONVOLUTIONS | {"lora_bias": True}),
    "convolutions dora": (models.Convolutions, CONVOLUTIONS | {"use_dora": True}),
    "two adapters": (models.qwen2, TWO),
    "two adapters bf16": (models.qwen2, TWO | {"adapter_dtype": torch.bfloat16}),
    "two adapters conv1d lora_bias": (models.gpt2, CONV1D | TWO | {"lora_bias": True}),
    "two adapters embedding": (models.qwen2, TWO | {"target_modules": ["embed_tokens", "lm_head"]}),
    "two adapters convolutions": (models.Convolutions, CONVOLUTIONS | TWO),
}
if Version(peft.__version__) >= Version("0.19"):  # before, PEFT takes target_parameters for one adapter only
    CASES["two adapters experts"] = (models.qwen3_moe, EXPERTS | TWO)
    CASES["two adapters transposed experts"] = (models.gpt_oss, EXPERTS | TWO)
if hasattr(variants, "MiCALinearVariant"):
    CASES["mica"] = (models.qwen2, {"init_lora_weights": "mica", "target_modules": ["q_proj", "embed_tokens"]})
if hasattr(variants, "VeloraLinearVariant"):
    CASES["velora"] = (models.qwen2, {"velora_config": peft.tuners.lora.config.VeloraConfig(num_groups=4)})


def lora_layers_of(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, lora_layers.LoraLayer)}


def acting(layer: Any) -> list[str]:
    there = set(layer.lora_A) | set(layer.lora_embedding_A)
    return [name for name in layer.active_adapters if name in there]


def base_weight(layer: Any) -> nn.Parameter:
    return layer.get_param() if isinstance(layer, lora_layers.ParamWrapper) else layer.get_base_layer().weight


def in_float64(model: PeftModel, *, absolute: bool = False) -> PeftModel:
    double = copy.deepcopy(model).double()
    if absolute:
        for parameter in double.parameters():
            parameter.data.abs_()
    return double


def expected(model: PeftModel) -> dict[int, tuple[str, Tensor, Tensor]]:
    """Address of each adapted parameter -> name, its merged value in float64 as PEFT computes it, the error allowed
    beside half an ulp of the output (see helpers.py)."""
    one, magnitudes, whole = in_float64(model), in_float64(model, absolute=True), in_float64(model)
    whole.merge_adapter()
    found = {}
    triples = zip(*(lora_layers_of(m).values() for m in (model, one, magnitudes, whole)), strict=True)
    for name, (live, double, absolute, done) in zip(lora_layers_of(model), triples, strict=True):
        weight, out = base_weight(double), base_weight(done)
        update = sum(double.get_delta_weight(a) for a in acting(live))
        products = sum(absolute.get_delta_weight(a) for a in acting(live))
        factor = 1.0 if not live.lora_magnitude_vector else (out / (weight + update)).abs()  # DoRA scales rows
        allowed = (SUM_ERROR * weight.abs() + PRODUCT_ERROR * products) * factor + 2 * SUM_ERROR * out.abs()
        found[base_weight(live).data_ptr()] = (name, out.detach(), allowed.detach())
        if any(live.lora_bias[a] for a in acting(live)):
            bias = done.get_base_layer().bias.detach()
            found[live.get_base_layer().bias.data_ptr()] = (name + " bias", bias, 4 * SUM_ERROR * bias.abs() + 1e-6)
    return found


def assert_merged(model: PeftModel, wanted: dict[int, tuple[str, Tensor, Tensor]], before: dict[str, Tensor]) -> None:
    """Adapted parameters are within the bound, all others keep their bits."""
    seen = 0
    for name, parameter in model.named_parameters():
        if parameter.data_ptr() not in wanted:
            assert_same_bits(parameter, before[name], name)
            continue
        seen += 1
        layer, exact, allowed = wanted[parameter.data_ptr()]
        error = (parameter.double() - exact).abs()
        worst = (error - allowed - 0.5 * ulp(parameter, parameter.dtype)).max().item()
        assert worst <= 0, f"{layer}: error {error.max().item():.3g}, {worst:.3g} above what is allowed"
        assert not torch.equal(parameter, before[name]), f"{layer}: nothing was added"
    assert seen == len(wanted)


def state(model: nn.Module) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_merged_values(case: str, dtype: torch.dtype) -> None:
    """Against PEFT's own merge in float64, element by element."""
    build, settings = CASES[case]
    model = models.with_lora(build, dtype=dtype, **settings)
    wanted, before = expected(model), state(model)
    with merged(model):
        assert_merged(model, wanted, before)
    for name, tensor in state(model).items():
        assert_same_bits(tensor, before[name], name)


def nearby(model: PeftModel) -> list[Tensor]:
    """In float64, outputs of PEFT's own merge with every merged value somewhere within its bound."""
    wanted, whole, found = expected(model), in_float64(model), []
    whole.merge_adapter()
    for _ in range(4):
        for live, done in zip(lora_layers_of(model).values(), lora_layers_of(whole).values(), strict=True):
            _, exact, allowed = wanted[base_weight(live).data_ptr()]
            base_weight(done).data.copy_(exact + allowed * (2 * torch.rand_like(exact) - 1))
        found.append(models.outputs(whole))
    return found


@pytest.mark.parametrize("case", CASES)
def test_forward(case: str) -> None:
    """Inside, the adapters count once: as in the adapter's forward, and as in a model without PEFT.

    How much a rounding moves the output differs from model to model by orders of magnitude. So the output may be off,
    against float64, by what moving the merged weights within their bounds makes of it, and as much again, with 2^-22 of
    the largest output, for the float32 of the forward itself. (The error of the adapter's forward is no measure: it is
    a single draw, and may be small by luck.)
    """
    build, settings = CASES[case]
    model = models.with_lora(build, **settings)
    exact, adapter = models.outputs(in_float64(model)), models.outputs(model)
    moved = max((output - exact).abs().max().item() for output in nearby(model))
    allowed = 2 * moved + 2.0**-22 * exact.abs().max().item()
    with merged(model):
        inside = models.outputs(model)
        plain = build().eval()
        plain.load_state_dict({t.name: t.tensor for t in named_tensors(model)})
    with model.disable_adapter():
        base = models.outputs(model)
    error = (inside - exact).abs().max().item()
    assert error <= allowed, f"off by {error:.3g}, allowed {allowed:.3g}"
    assert (adapter - base).abs().max().item() > 10 * allowed, "the adapter has no effect to see"
    assert torch.equal(inside, models.outputs(plain)), "a model with the merged weights computes something else"
    assert torch.equal(models.outputs(model), adapter), "the adapter's forward has changed"


@pytest.mark.parametrize("case", CASES)
def test_segments_know_their_place(case: str) -> None:
    """Random bits hang on the element's index in the whole parameter, whatever view a segment has of it."""
    build, settings = CASES[case]
    deltas = read_deltas(models.with_lora(build, **settings))
    operands = Operands([Turn(deltas)], Ranks(), torch.device("cpu"))
    for delta in deltas:
        weight = delta.weight.pieces[0].tensor
        index = torch.arange(weight.numel()).view(weight.shape)
        segments = operands.segments(whole_job(delta, weight, weight))
        assert sum(s.source.numel() for s in segments) == weight.numel()
        for segment, part in zip(segments, delta.matrices(index), strict=True):
            rows, cols = (torch.arange(n) for n in segment.source.shape)
            assert segment.pitch is not None
            known = segment.first + rows[:, None] * segment.pitch[0] + cols * segment.pitch[1]
            assert torch.equal(known, part), f"{delta.name}, from {segment.first}"


def test_pointwise_conv3d() -> None:
    """PEFT's merge takes it for a Conv2d and fails; its forward is fine."""
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Conv3d(3, 5, 1)), LoraConfig(target_modules=["0"], init_lora_weights=False))
    x = torch.randn(2, 3, 4, 4, 4)
    adapter = model(x)
    with merged(model):
        torch.testing.assert_close(model(x), adapter)


def test_one_way_through() -> None:
    """`merged` computes what `lora_merge.merge` computes, to the bit."""
    model = models.with_lora(models.qwen2, dtype=torch.bfloat16)
    layers = lora_layers_of(model)
    wanted = {
        name: merge(layer.base_layer.weight, layer.lora_A.default.weight, layer.lora_B.default.weight, 1.5)
        for name, layer in layers.items()
    }
    with merged(model):
        for name, layer in layers.items():
            assert_same_bits(layer.base_layer.weight, wanted[name], name)


def test_several_adapters_round_once() -> None:
    """PEFT rounds after each adapter; the sum must be rounded once.

    As `assert_correctly_rounded` has it: small updates, and what a small sample may miss by chance is allowed.
    """
    model = models.with_lora(models.qwen2, dtype=torch.bfloat16, adapters=("one", "two", "three"))
    for layer in lora_layers_of(model).values():
        for adapter in acting(layer):
            layer.set_scale(adapter, 0.01)
    wanted = expected(model)
    theirs = copy.deepcopy(model)
    theirs.merge_adapter()
    pairs = zip(lora_layers_of(model).values(), lora_layers_of(theirs).values(), strict=True)
    with merged(model):
        ours_off = theirs_off = elements = 0
        for mine, other in pairs:
            right = reference.round_once(wanted[base_weight(mine).data_ptr()][1], torch.bfloat16)
            ours_off += int((base_weight(mine) != right).sum())
            theirs_off += int((base_weight(other) != right).sum())
            elements += right.numel()
    most = most_misrounded(torch.bfloat16, elements)
    assert ours_off <= most, f"{ours_off} of {elements} elements are not correctly rounded, at most {most:.1f}"
    assert theirs_off > 100 * most, "PEFT rounds once too? then this test shows nothing"


@pytest.mark.parametrize("build", [models.qwen3_moe, models.mixtral, models.gpt_oss])
def test_expert_packing_order(build: Build) -> None:
    """A peer's bug: lora_A lies expert after expert, lora_B rank after rank with the experts side by side."""
    model = models.with_lora(build, **EXPERTS)
    for delta in read_deltas(model):
        (factors,), experts = delta.factors, delta.experts
        assert experts == model.config.get_text_config().num_local_experts or experts == model.config.num_experts
        rank = factors.lora_A.shape[0] // experts
        lora_A, lora_B = (shard.pieces[0].tensor for shard in (factors.lora_A, factors.lora_B))
        weight = delta.weight.pieces[0].tensor
        by_hand = [factors.scaling * lora_B[:, e::experts] @ lora_A[e * rank : (e + 1) * rank] for e in range(experts)]
        before = weight.clone()
        with merged(model):
            for e, (after, was) in enumerate(zip(delta.matrices(weight), delta.matrices(before), strict=True)):
                torch.testing.assert_close(after, was + by_hand[e].detach(), msg=f"{delta.name}, expert {e}")


@pytest.mark.parametrize("active", [["one"], ["two"], ["two", "one"], []], ids=str)
def test_active_adapters(active: list[str]) -> None:
    """Only active adapters count."""
    model = models.with_lora(models.qwen2, adapters=("one", "two"))
    if active:
        model.base_model.set_adapter(active)
    else:
        model.base_model.disable_adapter_layers()
    assert [len(delta.factors) for delta in read_deltas(model)] == [len(active)] * (14 if active else 0)
    adapter = models.outputs(model)
    before = state(model)
    with merged(model):
        torch.testing.assert_close(models.outputs(model), adapter)
    assert all(torch.equal(before[name], tensor) for name, tensor in state(model).items())


def test_live_scaling() -> None:
    """`scaling` is read as it stands, not computed from alpha and r; no plan is run with an old one."""
    model = models.with_lora(models.qwen2)
    for change in (
        lambda layer: layer.set_scale("default", 3.0),
        lambda layer: layer.scale_layer(0.25),
        lambda layer: layer.scaling.update(default=0.0),
    ):
        for layer in lora_layers_of(model).values():
            change(layer)
        adapter = models.outputs(model)
        with merged(model):
            torch.testing.assert_close(models.outputs(model), adapter)


def test_modules_to_save() -> None:
    """The active adapter's copy takes part, under the module's own name."""
    model = models.with_lora(models.qwen2, modules_to_save=["lm_head", "norm"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter += 0.1
    adapter = models.outputs(model)
    with merged(model):
        inside = models.outputs(model)
        plain = models.qwen2().eval()
        plain.load_state_dict({t.name: t.tensor for t in named_tensors(model)})
    torch.testing.assert_close(inside, adapter)
    assert torch.equal(models.outputs(plain), inside)


def test_names_are_hf_names() -> None:
    """Whatever wraps the model: `state_dict` names of the bare one."""
    bare = models.qwen3_moe()
    wanted = set(bare.state_dict())
    model = models.with_lora(models.qwen3_moe, **(EXPERTS | {"target_modules": ["q_proj", "lm_head"]}))
    layer = model.base_model.model.model.layers
    layer[0] = torch.compile(layer[0])
    for wrapped in (model, model.base_model, torch.compile(model), nn.ModuleDict({"policy": model})):
        prefix = "policy." if isinstance(wrapped, nn.ModuleDict) else ""
        assert {t.name for t in named_tensors(wrapped)} == {prefix + name for name in wanted}
        assert {delta.name for delta in read_deltas(wrapped)} == {
            f"{prefix}{name}"
            for name in wanted
            if name.endswith(("q_proj.weight", "experts.gate_up_proj", "experts.down_proj", "lm_head.weight"))
        }


def test_layers_without_a_peft_model() -> None:
    """`inject_adapter_in_model` leaves no PeftModel around the layers."""
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
    assert [delta.name for delta in read_deltas(model)] == ["0.weight", "2.weight"]
    x = torch.randn(4, 5)
    adapter = model(x)
    with merged(model):
        torch.testing.assert_close(model(x), adapter)


# ---- what is refused -------------------------------------------------------------------------------------------------


def small(**config: Any) -> PeftModel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    return get_peft_model(net, LoraConfig(**({"r": 2, "target_modules": ["1"], "init_lora_weights": False} | config)))


def small_with(change: Callable[[Any], object], **config: Any) -> PeftModel:
    """A small model whose only LoRA layer was changed."""
    model = small(**config)
    change(model.base_model.model[1])
    return model


def convolution(**options: Any) -> PeftModel:
    net = nn.Sequential(nn.Identity(), nn.Conv2d(4, 8, 3, **options))
    return get_peft_model(net, LoraConfig(r=2, target_modules=["1"]))


def set_weight(weight: Tensor) -> Callable[[Any], object]:
    return lambda layer: setattr(layer.base_layer, "weight", nn.Parameter(weight, requires_grad=False))


class Quantised(torch.Tensor):
    """Stands for the tensor subclasses of torchao and others."""


class OtherLinear(lora_layers.Linear):
    """A layer class that nobody here has heard of."""


def shared_module() -> PeftModel:
    linear = nn.Linear(8, 8)
    model = get_peft_model(nn.Sequential(nn.Identity(), linear), LoraConfig(r=2, target_modules=["1"]))
    model.base_model.model.append(linear)
    return model


def adapted_twice() -> PeftModel:
    model = small()
    layer, inner = model.base_model.model[1], small().base_model.model[1]
    inner.base_layer, layer.base_layer = layer.base_layer, inner
    return model


def no_plain_parameter(layer: Any) -> None:
    nn.utils.parametrizations.weight_norm(layer.base_layer)


def other_tuner(config: peft.PeftConfig) -> Callable[[], PeftModel]:
    return lambda: get_peft_model(models.qwen2(), config)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "quantised int8": (lambda: small_with(set_weight(torch.zeros(8, 8, dtype=torch.int8))), "1.weight.*int8"),
    "quantised fp8": (lambda: small_with(set_weight(torch.zeros(8, 8, dtype=torch.float8_e4m3fn))), "1.weight.*float8"),
    "tensor subclass": (
        lambda: small_with(set_weight(torch.zeros(8, 8).as_subclass(Quantised))),
        "1.weight.*Quantised",
    ),
    "float64": (lambda: small_with(set_weight(torch.zeros(8, 8, dtype=torch.float64))), "1.weight.*float64"),
    "sharded weight": (lambda: small_with(set_weight(torch.zeros(4, 8))), "1.weight.*do not fit.*sharded"),
    "parametrised weight": (lambda: small_with(no_plain_parameter), "1.weight.*no plain parameter"),
    "unknown layer": (lambda: small_with(lambda layer: setattr(layer, "__class__", OtherLinear)), "1: .*OtherLinear"),
    "unknown variant": (lambda: small_with(lambda layer: layer.lora_variant.update(default=object())), "1: .*unknown"),
    "lora_bias without bias": (
        lambda: get_peft_model(
            nn.Sequential(nn.Linear(4, 4, bias=False)), LoraConfig(target_modules=["0"], lora_bias=True)
        ),
        "0: .*no bias",
    ),
    "convolution groups": (lambda: convolution(groups=2), "1: .*2 groups"),
    "convolution dilation": (lambda: convolution(dilation=2), "1: .*dilation"),
    "convolution padding": (lambda: convolution(padding=1, padding_mode="circular"), "1: .*padding_mode"),
    "channels_last": (lambda: convolution().to(memory_format=torch.channels_last), "1: .*channels_last"),
    "max_norm": (
        lambda: get_peft_model(nn.Sequential(nn.Embedding(9, 4, max_norm=1.0)), LoraConfig(target_modules=["0"])),
        "0: .*max_norm",
    ),
    "MultiheadAttention": (
        lambda: get_peft_model(nn.Sequential(nn.MultiheadAttention(8, 2)), LoraConfig(target_modules=["0"])),
        "0: .*MultiheadAttention",
    ),
    "dora beside another": (
        lambda: models.with_lora(models.qwen2, adapters=("one", "two"), use_dora=True),
        "q_proj: DoRA adapter 'one' beside others .one, two.",
    ),
    "module used bare too": (shared_module, "1.weight: its module is also used as 2"),
    "parameter adapted twice": (adapted_twice, "1.weight: two adapter layers"),
    "IA3": (other_tuner(peft.IA3Config(target_modules=["v_proj"], feedforward_modules=[])), "IA3"),
    "LoHa": (other_tuner(peft.LoHaConfig(target_modules=["v_proj"])), "LOHA"),
    "AdaLoRA": (other_tuner(peft.AdaLoraConfig(target_modules=["v_proj"], total_step=10)), "ADALORA"),
    "prompt tuning": (
        other_tuner(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
        "PROMPT_TUNING",
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    """No adapter is passed over in silence: an error names the module and the reason, and nothing has changed."""
    build, message = REFUSED[case]
    model = build()
    before = state(model)
    with pytest.raises(UnsupportedAdapter, match=message):
        read_deltas(model)
    with pytest.raises(UnsupportedAdapter, match=message), merged(model):
        pass
    for name, tensor in state(model).items():
        assert_same_bits(tensor, before[name], name)


ALL_VARIANTS = [c for c in vars(variants).values() if isinstance(c, type) and issubclass(c, variants.LoraVariant)]
MERGED_VARIANTS = ("Dora", "MiCA", "Velora")
"""Variants that the cases above merge."""


@pytest.mark.parametrize("variant", [c for c in ALL_VARIANTS if not c.__name__.strip("_").startswith(MERGED_VARIANTS)])
def test_every_other_variant_is_refused(variant: type) -> None:
    """aLoRA, Arrow, QALoRA, block-diagonal, KaSA, ...: whatever this version of PEFT has."""
    model = small_with(lambda layer: layer.lora_variant.update(default=variant()))
    with pytest.raises(UnsupportedAdapter, match=rf"1: adapter 'default' cannot be merged here.*{variant.__name__}"):
        read_deltas(model)


def test_alora_as_configured() -> None:
    config = LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[1, 2], task_type="CAUSAL_LM")
    with pytest.raises(UnsupportedAdapter, match=r"layers.0.self_attn.q_proj: .*aLoRA"):
        read_deltas(get_peft_model(models.qwen2(), config))


def test_inactive_adapters_of_other_kinds_are_no_matter() -> None:
    """Disabled, they add nothing; enabled, they are refused."""
    model = get_peft_model(models.qwen2(), peft.LoHaConfig(target_modules=["v_proj"]))
    bare = model.base_model.model
    model.base_model.disable_adapter_layers()
    assert read_deltas(bare) == []
    model.base_model.enable_adapter_layers()
    with pytest.raises(UnsupportedAdapter, match=r"layers.0.self_attn.v_proj: a peft\.tuners\.loha"):
        read_deltas(bare)


def test_double_counting_after_peft_merged() -> None:
    """A peer's bug: an adapter on top of a base that holds it already, after a resume."""
    model = models.with_lora(models.qwen2)
    model.merge_adapter()
    before = state(model)
    for attempt in (lambda: read_deltas(model), lambda: merged(model).__enter__()):
        with pytest.raises(AlreadyMerged, match=r"layers.0.self_attn.q_proj: .*default.*unmerge_adapter.*reload"):
            attempt()
    for name, tensor in state(model).items():
        assert_same_bits(tensor, before[name], name)


@pytest.mark.parametrize("scaling", [float("nan"), float("inf")])
def test_scaling_must_be_finite(scaling: float) -> None:
    model = small_with(lambda layer: layer.scaling.update(default=scaling))
    with pytest.raises(InvalidInput, match=r"1.weight: scaling must be finite"):
        read_deltas(model)


def test_meta_weights() -> None:
    """A model that was never loaded."""
    model = small().to("meta")
    with pytest.raises(InvalidInput, match=r"1.weight: .*meta"), merged(model):
        pass
