"""Gradients of every kind of adapter that is trained on merged weights, beside float64 autograd of PEFT's forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import models
import peft
import pytest
import torch
from helpers import assert_same_bits
from packaging.version import Version
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from torch import Tensor, nn

from lora_merge import InvalidInput, merged, train_merged
from lora_merge.training import products
from tests.training.test_train import LINEARS, bits, loss_of

ADAPTERS = ("lora_", "trainable_tokens_delta")


def adapted(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, **config: Any) -> PeftModel:
    """A model in `dtype` with adapters in float32 that add something."""
    torch.manual_seed(1)
    return shaken(get_peft_model(build().to(dtype), LoraConfig(**({"r": 4, "lora_alpha": 6} | config))))


def shaken(model: Any) -> PeftModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not any(part in name for part in ADAPTERS):
                continue
            parameter.data = parameter.data.float()
            if "magnitude" in name:
                parameter *= 1 + 0.3 * torch.randn_like(parameter)
            else:
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


class Scaled(nn.Module):
    """An embedding with a factor (as Gemma's), a padding row, gradients by frequency; a head of its own."""

    def __init__(self, by_frequency: bool = False) -> None:
        super().__init__()
        from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

        self.embed = Gemma3TextScaledWordEmbedding(models.VOCABULARY, 24, 5, embed_scale=4.0)
        self.embed.scale_grad_by_freq = by_frequency
        self.head = nn.Linear(24, models.VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = self.head(torch.tanh(self.embed(input_ids))).flatten(0, 1).float()
        return type("Output", (), {"loss": nn.functional.cross_entropy(logits, labels.flatten())})


class Changed(nn.Module):
    """What changes the outputs of its layers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCABULARY, 24)
        self.inner = nn.Linear(24, 24)
        self.head = nn.Linear(24, models.VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        x *= 2
        x = self.inner(x).relu_()
        logits = self.head(x).flatten(0, 1).float()
        return type("Output", (), {"loss": nn.functional.cross_entropy(logits, labels.flatten())})


def two_of_tokens() -> PeftModel:
    model = get_peft_model(models.qwen2(), TrainableTokensConfig(token_indices=[9, 4], target_modules=["embed_tokens"]))
    model.add_adapter("second", TrainableTokensConfig(token_indices=[7, 50], target_modules=["embed_tokens"]))
    model.base_model.set_adapter(["default", "second"])
    return shaken(model)


def beside_dora() -> PeftModel:
    """A DoRA adapter on some layers, a plain one on others."""
    model = adapted(models.qwen2, target_modules=["q_proj", "v_proj"], use_dora=True)
    model.add_adapter("second", LoraConfig(r=3, lora_alpha=9, target_modules=["down_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return shaken(model)


DORA: dict[str, Any] = {"use_dora": True}
MODELS: dict[str, Callable[[torch.dtype], PeftModel]] = {
    "dora": lambda dtype: adapted(models.qwen2, dtype, target_modules=LINEARS, **DORA),
    "dora, Conv1D": lambda dtype: adapted(
        models.gpt2, dtype, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **DORA
    ),
    "dora, embedding and head": lambda dtype: adapted(
        models.qwen2, dtype, target_modules=["embed_tokens", "lm_head", "v_proj"], **DORA
    ),
    "dora, tied embedding": lambda dtype: adapted(
        partial(models.qwen2, tied=True), dtype, target_modules=["embed_tokens", "q_proj"], **DORA
    ),
    "dora, convolutions": lambda dtype: adapted(models.Convolutions, dtype, target_modules=models.CONVOLUTIONS, **DORA),
    "dora, scaled embedding": lambda dtype: adapted(Scaled, dtype, target_modules=["embed", "head"], **DORA),
    "dora, modules beside": lambda dtype: adapted(
        models.qwen2, dtype, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"], **DORA
    ),
    "scaled embedding": lambda dtype: adapted(Scaled, dtype, target_modules=["embed"]),
    "embedding by frequency": lambda dtype: adapted(partial(Scaled, True), dtype, target_modules=["embed"]),
    "bias": lambda dtype: adapted(models.qwen2, dtype, target_modules=["q_proj", "v_proj"], lora_bias=True),
    "changed in place": lambda dtype: adapted(Changed, dtype, target_modules=["embed", "inner"]),
    "tokens": lambda dtype: adapted(
        models.qwen2, dtype, target_modules=LINEARS, trainable_token_indices={"embed_tokens": [50, 3, 4, 8, 100]}
    ),
    "tokens, tied": lambda dtype: adapted(
        partial(models.qwen2, tied=True), dtype, target_modules=["q_proj"], trainable_token_indices=[50, 3, 4, 8]
    ),
    "tokens, scaled": lambda dtype: adapted(
        Scaled, dtype, target_modules=["head"], trainable_token_indices={"embed": [5, 8, 9, 50, 51, 52]}
    ),
    "tokens by frequency": lambda dtype: adapted(
        partial(Scaled, True), dtype, target_modules=["head"], trainable_token_indices={"embed": list(range(5, 60))}
    ),
    "tokens, bias, modules beside": lambda dtype: adapted(
        models.qwen2,
        dtype,
        target_modules=["q_proj"],
        lora_bias=True,
        modules_to_save=["norm"],
        trainable_token_indices={"embed_tokens": [50, 3, 4, 8], "lm_head": [3, 9]},
    ),
    "tokens, dora": lambda dtype: adapted(
        models.qwen2, dtype, target_modules=LINEARS, trainable_token_indices={"embed_tokens": [50, 3, 4, 8]}, **DORA
    ),
    "beside dora": lambda dtype: beside_dora().to(dtype),
}
if Version(peft.__version__) >= Version("0.19"):  # before, PEFT cannot copy such a model
    MODELS["tokens of two"] = lambda dtype: two_of_tokens().to(dtype)


def layers_of(model: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if hasattr(m, "base_layer") and hasattr(m, "merged_adapters")}


@contextmanager
def on_merged(model: nn.Module, bases: dict[str, dict[str, Tensor]]) -> Iterator[None]:
    """Let layers compute what `bases` give, and have the gradients of PEFT's own forward on their own base."""
    layers = layers_of(model)

    def through(layer: Any, forward: Any, base: nn.Module) -> Any:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            added = forward(x.detach(), *args, **kwargs)
            return base(x, *args, **kwargs) + (added - added.detach())

        return call

    for name, layer in layers.items():
        base = copy.deepcopy(layer.base_layer)
        for key, value in bases[name].items():
            getattr(base, key).data = value.double()
        layer.forward = through(layer, layer.forward, base.requires_grad_(False))
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward


def truth(model: PeftModel) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients in float64, of a forward with the merged weights as they are in the model now."""
    with merged(model):
        bases = {
            n: {k: p.detach().clone() for k, p in layer.base_layer.named_parameters()}
            for n, layer in layers_of(model).items()
        }
    exact: Any = copy.deepcopy(model).double()
    exact.zero_grad()
    with on_merged(exact, bases):
        loss = loss_of(exact)
        loss.backward()
    return loss.item(), gradients(exact)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(got: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        error = (gradient.double() - wanted[name]).norm() / wanted[name].norm().clamp_min(1e-30)
        assert error <= tolerance, f"{name}: {error}"


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    """They are those of PEFT's formula at the merged weight; the base comes back bit for bit."""
    model = MODELS[name](torch.float32)
    before = bits(model)
    wanted_loss, wanted = truth(model)
    with train_merged(model):
        loss = loss_of(model)
        loss.backward()
        if not name.startswith("tokens of"):
            assert any(any(part in n for part in ADAPTERS) for n in gradients(model))
    assert abs(loss.item() - wanted_loss) < 1e-5
    assert_close(gradients(model), wanted, 2e-5)
    for key, tensor in bits(model).items():
        if not any(part in key for part in ADAPTERS):
            assert_same_bits(tensor, before[key], key)


SITUATIONS = ["dora", "dora, convolutions", "tokens, tied", "beside dora", "bias", "dora, scaled embedding"]


@pytest.mark.parametrize("name", [name for name in SITUATIONS if name not in ("bias", "dora, convolutions")])
def test_weights_of_16_bits(name: str) -> None:
    """Gradients in the adapters' dtype; their error is that of the forward's arithmetic."""
    model = MODELS[name](torch.bfloat16)
    for parameter_name, parameter in model.named_parameters():
        if any(part in parameter_name for part in ADAPTERS):
            parameter.data = parameter.data.float()
    _, wanted = truth(model)
    with train_merged(model):
        loss_of(model).backward()
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}
    assert_close(gradients(model), wanted, 0.06)


@pytest.mark.parametrize("name", ["dora", "beside dora", "tokens, tied", "bias"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = MODELS[name](torch.float32)
    _, wanted = truth(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with train_merged(model.train()) as training:
        loss_of(model).backward()
        assert training.merges == 1
    assert_close(gradients(model), wanted, 2e-5)


@pytest.mark.parametrize("name", ["dora", "tokens, tied", "bias"])
@pytest.mark.parametrize("inside", [False, True], ids=["forward", "and backward"])
def test_autocast(name: str, inside: bool) -> None:
    """Layers compute in bf16; what the adapters get of that is not rounded once more, in float32."""
    model = MODELS[name](torch.float32)
    _, wanted = truth(model)
    with train_merged(model):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
    assert {gradient.dtype for gradient in gradients(model).values()} == {torch.float32}
    assert_close(gradients(model), wanted, 0.06)


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_base_between_forward_and_backward(name: str) -> None:
    """A reference policy's forward, a pause, and another merge of the same adapters change no bit of the gradients."""
    model = MODELS[name](torch.float32)
    with train_merged(model) as training:
        loss_of(model).backward()
        wanted = gradients(model)
        model.zero_grad()
        loss = loss_of(model)
        with torch.no_grad(), model.disable_adapter():
            loss_of(model)
        loss.backward()
        assert training.merges == 2
    for key, gradient in gradients(model).items():
        assert_same_bits(gradient, wanted[key], key)


@pytest.mark.parametrize(
    "name", [n for n in ("dora", "dora, scaled embedding", "tokens, tied", "bias", "tokens of two") if n in MODELS]
)
def test_changed_adapters_are_refused(name: str) -> None:
    """Every parameter of an adapter counts, magnitudes and rows too."""
    model = MODELS[name](torch.float32)
    names = [n for n, _ in model.named_parameters() if any(part in n for part in ADAPTERS)]
    kinds = {n.split(".default")[0].rpartition(".")[2]: n for n in names}
    with train_merged(model):
        for key in kinds.values():
            loss = loss_of(model)
            with torch.no_grad():
                model.get_parameter(key).mul_(1.5)
            loss_of(model)
            with pytest.raises((InvalidInput, RuntimeError), match=r"other adapters|modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("name", ["dora", "dora, Conv1D", "dora, convolutions", "dora, scaled embedding"])
def test_magnitudes_of_zero(name: str) -> None:
    """Their rows are zeros in the merged weight, and their gradients are those of PEFT's formula all the same."""
    model = MODELS[name](torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "magnitude" in key:
                parameter.flatten()[::3] = 0
    _, wanted = truth(model)
    with train_merged(model):
        loss_of(model).backward()
    assert_close(gradients(model), wanted, 2e-5)


class Alone(nn.Module):
    """One layer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(6, 9), nn.Conv2d(3, 5, 3, padding=1)


@pytest.mark.parametrize("kind", ["lora", "dora", "bias"])
@pytest.mark.parametrize("size", [(0,), (4, 0), (2, 3), (), (1,)], ids=str)
def test_shapes_of_inputs(kind: str, size: tuple[int, ...]) -> None:
    """Zero rows, one row, no row dimension; inputs that need gradients get those of the merged weight."""
    if (kind, size) == ("dora", ()):
        pytest.skip("PEFT's DoRA gives outputs another shape")
    config: dict[str, Any] = {"lora": {}, "dora": DORA, "bias": {"lora_bias": True}}[kind]
    model = adapted(Alone, target_modules=["linear"], **config)
    layer: Any = model.get_base_model().linear
    x, dy = torch.randn(*size, 6, requires_grad=True), torch.randn(*size, 9)
    with merged(model):
        weight = layer.base_layer.weight.detach().clone()
    wanted = torch.autograd.grad(layer(x), list(parameters_of(layer)), dy)
    with train_merged(model):
        layer(x).backward(dy)
        torch.testing.assert_close(x.grad, dy @ weight)
    for parameter, gradient in zip(parameters_of(layer), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_images_without_a_batch() -> None:
    model = adapted(Alone, target_modules=["conv"], use_dora=True)
    layer: Any = model.get_base_model().conv
    x, dy = torch.randn(1, 3, 5, 4), torch.randn(1, 5, 5, 4)
    wanted = torch.autograd.grad(layer(x), list(parameters_of(layer)), dy)
    for batched in (False, True):
        model.zero_grad()
        with train_merged(model):
            layer(x if batched else x[0]).backward(dy if batched else dy[0])
        for parameter, gradient in zip(parameters_of(layer), wanted, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def parameters_of(layer: nn.Module) -> Iterator[nn.Parameter]:
    return (p for n, p in layer.named_parameters() if "lora_" in n)


# ---- products --------------------------------------------------------------------------------------------------------


def in_float32(a: Tensor, b: Tensor, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    """`torch.mm` with float32 sums, as a GPU has it."""
    if out is not None:
        return out.copy_(a @ b)
    assert (a.dtype, b.dtype, out_dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    return a.float() @ b.float()


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("shape", [(300, 70, 5), (1, 9, 1), (0, 4, 3), (6, 0, 2)], ids=str)
def test_products_of_16_bits_with_float32(
    shape: tuple[int, int, int], turned: bool, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As exact as PEFT's, which casts to float32."""
    monkeypatch.setattr(products, "BLOCK", 500)
    if split:
        monkeypatch.setattr(products, "_on_matrix_units", lambda x: x.numel() > 0)
        monkeypatch.setattr(torch, "mm", in_float32)
    rows, k, r = shape
    x = torch.randn(k, rows).t().to(torch.bfloat16) if turned else torch.randn(rows, k).to(torch.bfloat16)
    factor = torch.randn(k, r) * 10.0 ** torch.randint(-6, 3, (k, r))
    exact, peft = x.double() @ factor.double(), x.float() @ factor
    size = x.double().abs() @ factor.double().abs()
    found = products.times(x, factor)
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= (k + 3) * 2**-24 * size).all()
    if found.numel() > 100:
        assert (found - exact).norm() <= 1.5 * (peft - exact).norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("turned", [True, False])
def test_parts_make_the_whole(turned: bool, device: str) -> None:
    values = (torch.randn(10000, 7) * 10.0 ** torch.randint(-25, 30, (10000, 7))).to(device)
    values = values.t().contiguous().t() if turned else values
    assert torch.equal(products.parts(values).double().view(10000, 3, 7).sum(1), values.double())
    planes = torch.cat([values, values, 2 * values], 1)
    assert torch.equal(products.parts(planes, 3), products.parts(4 * values))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(70, 40, 100, 5), (130, 70, 33, 17), (3, 5, 2, 250), (1, 3, 2, 1)], ids=str)
def test_gradients_of_float32_factors_on_a_gpu(sizes: tuple[int, int, int, int]) -> None:
    """As exact as float32, for activations of any strides."""
    tokens, columns, rows, rank = sizes
    x, dy = (torch.randn(n, tokens, device="cuda").bfloat16().t() for n in (columns, rows))
    lora_A, lora_B = torch.randn(rank, columns, device="cuda"), torch.randn(rows, rank, device="cuda")
    X, D, A, R = (t.double() for t in (x, dy, lora_A, lora_B))
    wanted = ((D @ R).t() @ X, D.t() @ (X @ A.t()))
    for some in ((x, dy), (x.contiguous(), dy.contiguous())):
        for got, one in zip(products.factor_gradients(*some, lora_A, lora_B, (True, True)), wanted, strict=True):
            assert got is not None
            assert got.dtype == torch.float32
            assert (got - one).norm() <= 1e-6 * one.norm()


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (700, 3)], ids=str)
def test_sums_of_products(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "BLOCK", 100)
    one, other, minus = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16(), torch.randn(shape[1])
    wanted = (one.double() * (other.double() - minus.double())).sum(0)
    torch.testing.assert_close(products.dots(one, other, minus).double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_frozen_magnitude_gets_no_gradient() -> None:
    model = MODELS["dora"](torch.float32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    _, wanted = truth(model)
    with train_merged(model):
        loss_of(model).backward()
    assert_close(gradients(model), wanted, 2e-5)


@pytest.mark.parametrize("name", ["dora", "tokens, tied", "bias", "dora, embedding and head"])
def test_compiled_models(name: str) -> None:
    """The same gradients, step after step."""
    model, plain = MODELS[name](torch.float32), MODELS[name](torch.float32)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    with train_merged(model), train_merged(plain):
        for step in range(2):
            for one, call in ((model, compiled), (plain, plain)):
                one.zero_grad()
                call(input_ids=models.tokens(), labels=models.tokens()).loss.backward()
                torch.manual_seed(step)
            assert_close(gradients(model), {n: g.double() for n, g in gradients(plain).items()}, 1e-5)
            for one in (model, plain):
                torch.manual_seed(step)
                shaken(one)


def test_scalings_are_those_of_the_merge() -> None:
    """A layer that is called by itself after `set_scale`: forward and backward have the new one, as in a new training.
    A forward before `set_scale` keeps to what was merged then."""
    model = MODELS["bias"](torch.float32)
    layer: Any = next(iter(layers_of(model).values()))
    x = torch.randn(3, layer.in_features)

    def called() -> dict[str, Tensor]:
        model.zero_grad()
        result = layer(x)
        result.sum().backward()
        return {"result": result.detach()} | gradients(model)

    with train_merged(model):
        loss_of(model)
        before = called()
        model.zero_grad()
        early = layer(x)
        layer.set_scale("default", 9.0)
        early.sum().backward()
        for name, gradient in gradients(model).items():
            assert_same_bits(gradient, before[name], name)
        got = called()
    with train_merged(model):
        loss_of(model)
        for name, wanted in called().items():
            assert_same_bits(got[name], wanted, name)
    assert not torch.equal(got["result"], before["result"])
