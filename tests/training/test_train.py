"""Training on the merged weight: gradients, and that weights are what they have to be at each moment."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.save_and_load import get_peft_model_state_dict
from torch import Tensor, nn

from lora_merge import InvalidInput, MergedWeights, merged, save_merged, train_merged

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(build: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, **config: Any) -> PeftModel:
    """A model in `dtype` with adapters in float32 that add something."""
    torch.manual_seed(1)
    model: Any = get_peft_model(build().to(dtype), LoraConfig(**({"r": 4, "lora_alpha": 6} | config)))
    shake(model)
    return model.eval()


def shake(model: nn.Module, size: float = 0.1) -> None:
    """Train: change every adapter in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
                parameter.normal_(0, size)


def two_adapters() -> PeftModel:
    model = adapted(models.qwen2, target_modules=LINEARS)
    model.add_adapter("second", LoraConfig(r=3, lora_alpha=9, use_rslora=True, target_modules=["q_proj", "down_proj"]))
    model.base_model.set_adapter(["default", "second"])
    shake(model)
    return model


def loss_of(model: nn.Module) -> Tensor:
    """Of some fixed data."""
    if any(isinstance(m, models.Convolutions) for m in model.modules()):
        x = torch.randn(2, 3, 7, 7, 7, generator=torch.Generator().manual_seed(0))
        found = model(x.to(next(model.parameters()).dtype))
        return found.square().mean()
    found = model(input_ids=models.tokens(), labels=models.tokens())
    return found.loss


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Train so many steps; the loss of each."""
    losses = []
    for _ in range(count):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


MODELS: dict[str, Callable[[], PeftModel]] = {
    "linear": lambda: adapted(models.qwen2, target_modules=LINEARS),
    "rank-stabilised, some layers": lambda: adapted(models.qwen2, target_modules=["k_proj"], use_rslora=True),
    "Conv1D": lambda: adapted(models.gpt2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "embedding and head": lambda: adapted(models.qwen2, target_modules=["embed_tokens", "lm_head", "v_proj"]),
    "tied embedding": lambda: adapted(partial(models.qwen2, tied=True), target_modules=["embed_tokens", "q_proj"]),
    "convolutions": lambda: adapted(models.Convolutions, target_modules=models.CONVOLUTIONS),
    "two adapters": two_adapters,
    "trained bias": lambda: adapted(models.qwen2, target_modules=["q_proj"], lora_bias=True),
    "modules beside": lambda: adapted(models.qwen2, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]),
}


@contextmanager
def straight_through(model: nn.Module) -> Iterator[None]:
    """PEFT's own formula, in the forward's value W' alone: autograd of it is the truth for gradients."""
    layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
    wrappers: list[Any] = [layer for layer in layers if hasattr(layer, "parameter_name")]
    layers = [layer for layer in layers if layer not in wrappers]

    def through(layer: Any, forward: Any) -> Any:
        def call(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            base = layer.base_layer(x, *args, **kwargs)
            added = forward(x.detach(), *args, **kwargs) - base.detach()
            return base + (added - added.detach())

        return call

    def parametrised(layer: Any, forward: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            base, name = layer.get_base_layer(), layer.parameter_name
            delta = sum(layer.get_delta_weight(a) for a in layer.active_adapters if a in layer.lora_A)
            vars(base)[name] = base._parameters[name] + (delta - delta.detach())
            try:
                return layer.base_layer(*args, **kwargs)
            finally:
                del vars(base)[name]

        return call

    for layer in layers:
        layer.forward = through(layer, layer.forward)
    for layer in wrappers:
        layer.forward = parametrised(layer, layer.forward)
    try:
        yield
    finally:
        for layer in [*layers, *wrappers]:
            del layer.forward


def truth(model: PeftModel) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients in float64, of a forward with the merged weights as they are in the model now."""
    with merged(model):
        state = {name: tensor.double().clone() for name, tensor in model.state_dict().items()}
    exact: Any = copy.deepcopy(model).double()
    for module in exact.modules():  # the grouped product takes no float64
        if hasattr(module, "has_gate"):
            module.config._experts_implementation = "eager"
    head = getattr(exact.get_base_model(), "lm_head", None)
    if isinstance(head, nn.Linear):  # inside, tied ones are apart
        head.weight = nn.Parameter(head.weight.detach().clone(), head.weight.requires_grad)
    exact.load_state_dict(state)
    exact.zero_grad()
    with straight_through(exact):
        loss = loss_of(exact)
        loss.backward()
    return loss.item(), {n: p.grad for n, p in exact.named_parameters() if p.grad is not None}


def bits(model: nn.Module) -> dict[str, Tensor]:
    """As `state_dict`, which would bring the base back."""
    return {
        f"{path}.{key}".lstrip("."): tensor.detach().clone()
        for path, module in model.named_modules(remove_duplicate=False)
        for key, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and key not in module._non_persistent_buffers_set
    }


def assert_base(model: nn.Module, before: dict[str, Tensor]) -> None:
    for name, tensor in bits(model).items():
        if "lora_" not in name:
            assert_same_bits(tensor, before[name], name)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    """They are those of PEFT's formula at the merged weight; the base comes back bit for bit."""
    model = MODELS[name]()
    before = bits(model)
    wanted_loss, wanted = truth(model)
    with train_merged(model):
        loss = loss_of(model)
        loss.backward()
    assert abs(loss.item() - wanted_loss) < 1e-5
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert got.keys() == wanted.keys()
    for key, gradient in got.items():
        assert gradient.dtype == torch.float32
        error = (gradient.double() - wanted[key]).abs().max()
        assert error <= 2e-5 * wanted[key].abs().max() + 1e-9, f"{key}: {error} of {wanted[key].abs().max()}"
    assert_base(model, before)


def test_weights_of_16_bits_and_adapters_of_32() -> None:
    """Gradients in the adapters' dtype; their error is that of the forward's arithmetic."""
    model = adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS)
    _, wanted = truth(model)
    with train_merged(model):
        loss_of(model).backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            assert parameter.grad.dtype == torch.float32
            error = (parameter.grad.double() - wanted[name]).norm() / wanted[name].norm()
            assert error < 0.05, f"{name}: {error}"


def assert_fifty_steps_are_those_of_peft(first: nn.Module, second: nn.Module) -> None:
    """In float32, where rounding is no matter. The second of two equal models trains on merged weights."""
    losses: list[list[float]] = []
    for model, training in ((first, nullcontext()), (second, train_merged(second))):
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
        with training:
            losses.append(losses_of(model, optimizer, 50))
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-5)
    assert losses[0][-1] < losses[0][0] - 0.05


def test_fifty_steps_are_those_of_peft() -> None:
    assert_fifty_steps_are_those_of_peft(MODELS["linear"](), MODELS["linear"]())


def test_what_is_streamed_is_what_was_computed_with(tmp_path: Path) -> None:
    """Bit for bit, also where a stream and a save come between; and each time as trained by then."""
    model = adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS)
    before = bits(model)
    training = train_merged(model)
    for step in range(2):
        shake(model)
        loss_of(model).backward()
        computed = {n.replace("base_model.model.", "").replace(".base_layer", ""): t for n, t in bits(model).items()}
        streamed = dict(MergedWeights(model))
        assert all(torch.equal(tensor, computed[name]) for name, tensor in streamed.items())
        training.pause()
        assert_base(model, before)
        assert all(torch.equal(tensor, streamed[name]) for name, tensor in MergedWeights(model))
        save_merged(model, tmp_path / str(step))
        assert_base(model, before)
    with pytest.raises(InvalidInput, match="trained on merged weights already"):
        train_merged(model)
    training.close()
    training.close()
    with pytest.raises(InvalidInput, match="was closed"):
        training.refresh()


def test_merged_once_between_two_steps() -> None:
    model = MODELS["linear"]()
    with train_merged(model) as training:
        for steps in range(1, 4):
            for _ in range(3):
                loss_of(model).backward()
                with torch.no_grad():
                    loss_of(model)
            assert training.merges == steps
            shake(model)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {}], ids=str)
def test_optimizers_that_leave_version_counters(options: dict[str, Any]) -> None:
    """Fused ones do. The next forward, and the next stream, have what was trained. Another model's step is no matter to
    a backward pass."""
    model = MODELS["linear"]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, **options)
    other = nn.Linear(2, 2)
    others = torch.optim.SGD(other.parameters(), 0.1, fused=True)
    with train_merged(model) as training:
        for step in range(3):
            loss = loss_of(model)
            other(torch.ones(2)).sum().backward()
            others.step()
            training.pause()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with merged(model):
                wanted = bits(model)
            with torch.no_grad():
                loss_of(model)
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in bits(model).items()), step
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises((InvalidInput, RuntimeError), match=r"other adapters|modified by an inplace operation"):
            loss.backward()
    stream = iter(MergedWeights(model))
    next(stream)
    optimizer.step()
    with pytest.raises(InvalidInput, match="while the model was streamed"):
        list(stream)


def test_reference_policies() -> None:
    """`disable_adapter()` computes with the exact base, also between a forward and its backward (DPO)."""
    model, alone = MODELS["linear"](), MODELS["linear"]()
    with torch.no_grad(), alone.disable_adapter():
        wanted = models.outputs(alone)
    with train_merged(model):
        loss_of(model).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        loss = loss_of(model)
        with torch.no_grad(), model.disable_adapter():
            assert_same_bits(models.outputs(model), wanted)
        loss.backward()
        for name, gradient in gradients.items():
            assert_same_bits(model.get_parameter(name).grad, gradient, name)
        with merged(model), torch.no_grad():
            inside = models.outputs(model)
        with torch.no_grad():
            assert_same_bits(models.outputs(model), inside)


def test_a_backward_pass_of_other_adapters_is_refused() -> None:
    """Not computed with weights that the forward did not have."""
    model = MODELS["linear"]()
    with train_merged(model):
        loss = loss_of(model)
        shake(model)
        loss_of(model)
        with pytest.raises((InvalidInput, RuntimeError), match=r"other adapters|modified by an inplace operation"):
            loss.backward()


def test_what_changes_in_a_pause_between_forward_and_backward() -> None:
    """Another scaling, another adapter of the same shapes, another base: never the weights of that forward."""
    model = adapted(models.qwen2, target_modules=["q_proj"])
    model.add_adapter("twin", LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]))
    shake(model)
    layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
    changes: list[Callable[[], object]] = [
        lambda: [layer.set_scale("default", 5.0) for layer in layers],
        lambda: model.set_adapter("twin"),
        lambda: layers[0].base_layer.weight.mul_(2),
    ]
    with train_merged(model) as training:
        for change in changes:
            loss = loss_of(model)
            training.pause()
            with torch.no_grad():
                change()
            loss_of(model)
            with pytest.raises((InvalidInput, RuntimeError), match=r"other adapters|modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = MODELS["linear"]()
    with train_merged(model) as training:
        loss_of(model).backward()
        wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        loss_of(model).backward()
        for name, gradient in wanted.items():
            torch.testing.assert_close(model.get_parameter(name).grad, gradient)
        assert training.merges == 1


def test_checkpointing_computes_the_last_product_once() -> None:
    """What adapters keep for their gradients is known before it, as what the base keeps is."""
    model: Any = MODELS["linear"]()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    computed: list[Tensor] = []
    last = model.get_base_model().model.layers[-1].mlp.down_proj.base_layer
    last.register_forward_hook(lambda layer, args, y: computed.append(y.detach()))
    with train_merged(model):
        loss_of(model).backward()
    assert len(computed) == 1


def test_adapters_that_change_otherwise() -> None:
    """Scalings, the active adapter, loaded values, parts of the model that are called by themselves."""
    model = two_adapters()
    changes: list[Callable[[], object]] = [
        lambda: model.base_model.set_adapter("second"),
        lambda: model.base_model.set_adapter(["default", "second"]),
        lambda: [m.set_scale("default", 3.0) for m in model.modules() if isinstance(m, LoraLayer)],
        lambda: model.load_state_dict({n: t * 0.5 for n, t in bits(model).items() if "lora_" in n}, strict=False),
    ]
    with train_merged(model) as training:
        loss_of(model)
        for number, change in enumerate(changes):
            change()
            with torch.no_grad():
                got = models.outputs(model)
                training.pause()
                with merged(model):
                    assert_same_bits(got, models.outputs(model), f"change {number}")
        shake(model)
        layer = next(m for m in model.modules() if isinstance(m, LoraLayer))
        x = torch.randn(1, 3, layer.in_features)
        got = layer(x)
        training.pause()
        with merged(model):
            assert_same_bits(got, layer(x))


def test_parameters_that_take_the_place_of_others_are_merged_from_then_on() -> None:
    """What was merged is kept from one merge to the next, as long as nothing but values has changed."""
    model = adapted(models.qwen2)
    layer = next(m for m in model.modules() if isinstance(m, LoraLayer))
    half: Any = layer.lora_B["default"]
    with train_merged(model) as training, torch.no_grad():
        shake(model)
        for number in range(6):
            if number == 2:
                before, half.weight = half.weight, nn.Parameter(half.weight * 2)
            half.weight.mul_(1.5)
            got = models.outputs(model)
            if number > 2:
                before.mul_(2)  # no adapter any more
                assert_same_bits(got, models.outputs(model))
            training.pause()
            with merged(model):
                assert_same_bits(got, models.outputs(model), f"merge {number}")


def test_adapters_are_saved_at_any_time(tmp_path: Path) -> None:
    model = MODELS["linear"]()
    before = bits(model)
    with train_merged(model):
        loss_of(model)
        model.save_pretrained(tmp_path)
        assert_base(model, before)
        again = PeftModel.from_pretrained(models.qwen2(), tmp_path)
        assert get_peft_model_state_dict(again).keys() == get_peft_model_state_dict(model).keys()
        loss_of(model)
        model.add_adapter("another", LoraConfig(r=2, target_modules=["q_proj"]))
        loss_of(model)
    assert_base(model, before)


def test_copies() -> None:
    """Copied while weights are merged: an error that says what to do. After a pause a copy is PEFT's own model."""
    model = MODELS["linear"]()
    before = bits(model)
    with train_merged(model) as training:
        loss = loss_of(model)
        with pytest.raises(InvalidInput, match=r"call training.pause\(\) before"):
            copy.deepcopy(model)
        training.pause()
        other = copy.deepcopy(model)
        assert_base(other, before)
        torch.testing.assert_close(loss_of(other), loss)
        loss_of(other).backward()
        assert all(p.grad is not None for n, p in other.named_parameters() if "lora_" in n)
        loss_of(model).backward()
        assert training.merges == 2


def test_an_error_in_a_forward_changes_nothing() -> None:
    model = MODELS["linear"]()
    before = bits(model)
    with train_merged(model):
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[models.VOCABULARY + 1]]))
        shake(model)
        loss = loss_of(model)
        with merged(model):
            pass
    assert loss.isfinite()
    assert_base(model, before)


class Interrupted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_an_interrupted_forward_is_over() -> None:
    """The next one computes with what was trained since, whichever part of the model is called."""
    model = MODELS["linear"]()
    block: Any = model.get_base_model().model.layers[0].mlp
    with train_merged(model) as training:
        for module in (model, model.base_model, model.get_base_model()):
            block.act_fn, act = Interrupted(), block.act_fn
            with pytest.raises(KeyboardInterrupt):
                module(input_ids=models.tokens())
            block.act_fn = act
            shake(model)
            with torch.no_grad():
                got = model(input_ids=models.tokens()).logits
                training.pause()
                with merged(model):
                    assert_same_bits(got, models.outputs(model))


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "dropout": (
        lambda: adapted(models.qwen2, target_modules=["q_proj"], lora_dropout=0.1),
        InvalidInput,
        r"q_proj: adapter 'default' has lora_dropout=0.1",
    ),
    "no adapters": (models.qwen2, InvalidInput, "no LoRA layers.*neither train_merged nor share=True"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_so_is_refused(name: str) -> None:
    make, kind, message = REFUSED[name]
    model = make()
    before = bits(model)
    with pytest.raises(kind, match=message):
        train_merged(model)
    assert_base(model, before)


def test_compiled_models_see_each_step() -> None:
    """The check of the adapters runs outside of what is compiled; layers compute with what was merged last."""
    from torch._dynamo.utils import counters

    model, plain = MODELS["linear"](), MODELS["linear"]()
    torch._dynamo.reset()
    counters.clear()
    compiled: Any = torch.compile(model, backend="eager")
    with train_merged(model) as training, train_merged(plain):
        for step in range(1, 3):
            for one, call in ((model, compiled), (plain, plain)):
                one.zero_grad()
                call(input_ids=models.tokens(), labels=models.tokens()).loss.backward()
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)
            assert training.merges == step
            for one in (model, plain):
                torch.manual_seed(step)
                shake(one)
    assert counters["stats"]["unique_graphs"] > 0
