"""What others hang on layers that are trained on merged weights, and backward passes that are no ordinary ones."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from lora_merge import InvalidInput, merged, train_merged
from tests.training.test_formulas import assert_close, gradients

X = torch.linspace(-1, 1, 24).view(4, 6)


class Three(nn.Module):
    """Three layers, the one in the middle called twice."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.checkpointed = checkpointed

    def rest(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.middle(x)))))
        return y

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        return checkpoint(self.rest, x, use_reentrant=False) if self.checkpointed else self.rest(x)


def adapted(checkpointed: bool = False) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(Three(checkpointed), LoraConfig(r=2, target_modules=["first", "middle", "last"]))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def layer_of(model: Any, name: str) -> nn.Module:
    layer: nn.Module = model.base_model.model.get_submodule(name)
    return layer


def assert_as_peft(run: Callable[[Any], None], checkpointed: bool = False) -> None:
    """Check that gradients are those of PEFT's forward."""
    model, plain = adapted(checkpointed), adapted(checkpointed)
    run(plain)
    with train_merged(model):
        run(model)
    assert_close(gradients(model), {n: g.double() for n, g in gradients(plain).items()}, 1e-4)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("change", [lambda x: 3 * x, lambda x: x.detach(), lambda x: x.detach().requires_grad_()])
def test_hooks_that_change_an_input(change: Callable[[Tensor], Tensor], checkpointed: bool) -> None:
    """Adapters get the gradients of the input that the layer has computed with."""

    def run(model: Any) -> None:
        layer_of(model, "middle").register_forward_pre_hook(lambda module, args: (change(args[0]),))
        model(X).square().sum().backward()

    assert_as_peft(run, checkpointed)


def patched(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    before = module.forward
    module.forward = wraps(before)(lambda x: change(before(change(x))))


class Changes(ModelHook):
    """accelerate's hooks replace `forward`, too."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (self.change(args[0]), *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return self.change(output)


def hooked(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    add_hook_to_module(module, Changes(change))


@pytest.mark.parametrize("when", ["before", "after", "between two forwards"])
@pytest.mark.parametrize("patch", [patched, hooked])
def test_forwards_that_were_replaced(patch: Callable[..., None], when: str) -> None:
    """Adapters get the gradients of what the base has computed with and given, whatever is around it."""
    model, plain = adapted(), adapted()
    with pytest.warns(UserWarning, match="make sure") if patch is patched else nullcontext():
        patch(layer_of(plain, "middle"), lambda x: 3 * x)
        if when == "before":
            patch(layer_of(model, "middle"), lambda x: 3 * x)
        with train_merged(model):
            if when == "between two forwards":
                model(X)
            if when != "before":
                patch(layer_of(model, "middle"), lambda x: 3 * x)
            for one in (model, plain):
                one(X).square().sum().backward()
    assert_close(gradients(model), {n: g.double() for n, g in gradients(plain).items()}, 1e-4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_accelerate_on_a_base(when: str) -> None:
    """They are of the merged weight: it has the gradient of what comes in behind them. Each training gives bases their
    own forwards back."""
    model: Any = adapted()
    base: Any = layer_of(model, "last").base_layer
    own, outcome = base.forward, list[dict[str, Tensor]]()
    if when == "before":
        hooked(base, lambda x: 3 * x)
    for _ in range(2):
        model.zero_grad()
        with train_merged(model):
            if when == "after" and not outcome:
                hooked(base, lambda x: 3 * x)
            model(X).square().sum().backward()
            outcome.append(gradients(model))
    weights = {n.replace(".base_layer", ""): p for n, p in plain_weights(model).items()}
    plain = Three()
    plain.load_state_dict(weights)
    hooked(plain.last, lambda x: 3 * x)
    plain(X).square().sum().backward()
    lora_A, lora_B = (layer_of(model, "last").get_parameter(f"lora_{half}.default.weight").double() for half in "AB")
    whole = plain.last.weight.grad.double() * layer_of(model, "last").scaling["default"]  # type: ignore
    wanted = {"lora_A": lora_B.t() @ whole, "lora_B": whole @ lora_A.t()}
    for found in outcome:
        assert_close({h: found[f"base_model.model.last.{h}.default.weight"] for h in wanted}, wanted, 1e-4)
    remove_hook_from_module(base)
    assert base.forward == own


def plain_weights(model: Any) -> dict[str, Tensor]:
    with merged(model):
        return {n: p.detach().clone() for n, p in model.base_model.model.named_parameters() if "lora_" not in n}


GLOBAL: dict[str, Callable[[], Any]] = {
    "input of a layer": lambda: register_module_forward_pre_hook(
        lambda module, args: (3 * args[0],) if isinstance(module, LoraLayer) else None  # type: ignore[arg-type]
    ),
    "output of a layer": lambda: register_module_forward_hook(
        lambda module, args, output: 3 * output if isinstance(module, LoraLayer) else None
    ),
}


@pytest.mark.parametrize("name", GLOBAL)
def test_global_hooks(name: str) -> None:
    """They come before those of any module."""

    def run(model: Any) -> None:
        hook = GLOBAL[name]()
        model(X).square().sum().backward()
        hook.remove()

    assert_as_peft(run)


def test_a_forward_that_computes_by_itself() -> None:
    """It reads merged weights, and adapters would be added once more, without gradients."""
    model = adapted()
    layer: Any = layer_of(model, "middle")

    def forward(x: Tensor) -> Tensor:
        y: Tensor = nn.functional.linear(x, layer.base_layer.weight) + layer.lora_B.default(layer.lora_A.default(x))
        return y

    with train_merged(model):
        layer.forward = forward
        with (
            pytest.warns(UserWarning, match="make sure"),
            pytest.raises(InvalidInput, match=r"^middle: its forward was replaced by one that does not call"),
        ):
            model(X)
        del layer.forward
        model(X).sum().backward()


def test_layers_that_are_not_called() -> None:
    """What computes with their weights by itself, as Unsloth's kernels do, trains nothing."""
    model, x = adapted(), X.clone().requires_grad_()
    inner = model.base_model.model
    inner.forward = lambda x: nn.functional.linear(x, inner.first.weight)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3)
    with train_merged(model):
        model(x).sum().backward()
        with pytest.warns(UserWarning, match="none of them has a gradient"):
            optimizer.step()
        del inner.forward
        model(x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("before", ["nothing", "all of it", "the end"])
def test_hooks_that_keep_an_input(before: str) -> None:
    """It is differentiated without the layer's output, perhaps after a backward pass through that."""

    def run(model: Any) -> None:
        kept: list[Tensor] = []
        layer_of(model, "last").register_forward_hook(lambda module, args, output: kept.extend((args[0], output)))
        loss = model(X).square().sum()
        if before == "all of it":
            loss.backward(retain_graph=True)
        elif before == "the end":
            torch.autograd.grad(loss, kept[1], retain_graph=True)
        kept[0].square().sum().backward()

    assert_as_peft(run)


def test_gradients_of_some_tensors() -> None:
    def run(model: Any) -> None:
        x = X.clone().requires_grad_()
        loss = model(x).square().sum()
        for tensor in (x, *(p for p in model.parameters() if p.requires_grad)):
            (tensor.grad,) = torch.autograd.grad(loss, tensor, retain_graph=True)
        loss.backward()

    assert_as_peft(run)


def test_a_backward_pass_is_not_differentiated() -> None:
    """It would lack that merged weights depend on adapters."""
    model, x = adapted(), X.clone().requires_grad_()
    with train_merged(model):
        loss = model(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.square().sum().backward()


CALLED: dict[str, Callable[[Any], Tensor]] = {
    "the model": lambda model: model(X),
    "the model compiled": lambda model: torch.compile(model, backend="eager")(X),
    "the layer": lambda model: layer_of(model, "middle")(X[:, :1].expand(4, 8)),
}


@pytest.mark.parametrize("what", CALLED)
def test_a_hook_before_that_of_the_training(what: str) -> None:
    """It changes an output, and was put first (`prepend`) after training on merged weights had begun."""

    def run(model: Any) -> None:
        layer = layer_of(model, "middle")
        layer.register_forward_hook(lambda module, args, output: 3 * output, prepend=True)
        torch._dynamo.reset()
        CALLED[what](model).square().sum().backward()

    assert_as_peft(run)


@pytest.mark.parametrize("fused", [True, False])
def test_optimizers_that_step_inside_of_a_backward_pass(fused: bool) -> None:
    """One for each parameter, which steps as soon as its gradient is there."""

    def run(model: Any) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizers = {p: torch.optim.SGD([p], 1e-3, fused=fused) for p in trained}
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        for _ in range(3):
            model(X).square().sum().backward()

    assert_as_peft(run)
    assert_as_peft(run, checkpointed=True)


def test_what_data_parallel_makes_of_a_model() -> None:
    """Its copies for each GPU share the hooks, and hold what was merged before their forward."""
    model = adapted()
    with train_merged(model):
        for part in (model, layer_of(model, "middle")):
            copied: Any = part._replicate_for_data_parallel()
            with pytest.raises(InvalidInput, match=r"is a shallow copy of one .* as nn.DataParallel makes"):
                copied(X)
        model(X).sum().backward()


def test_a_backward_pass_after_the_end() -> None:
    model = adapted()
    with train_merged(model):
        loss = model(X).sum()
    with pytest.raises(InvalidInput, match=r"call backward\(\) before close\(\)"):
        loss.backward()


def test_torch_func() -> None:
    """`functional_call` gives gradients to what it is given; transforms are refused, and change nothing."""
    model, plain = adapted(), adapted()
    trained = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters() if p.requires_grad}

    def loss_of(model: Any, parameters: Any) -> Tensor:
        loss: Tensor = functional_call(model, parameters, X).square().sum()
        return loss

    with train_merged(model):
        model(X)
        got = torch.autograd.grad(loss_of(model, trained), list(trained.values()))
        for transform in (torch.func.grad, torch.func.jacrev):
            with pytest.raises(InvalidInput, match=r"inside of torch\.func\.grad, vmap or another transform"):
                transform(partial(loss_of, model))({name: p.detach() for name, p in trained.items()})
        wanted = torch.autograd.grad(loss_of(plain, trained), list(trained.values()))
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model(X), plain(X))
