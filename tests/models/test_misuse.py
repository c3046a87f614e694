"""What is called wrongly, or on a model that is not as its makers left it: the package's own errors name it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from torch import Tensor, nn

from lora_merge import InvalidInput, LoraMergeError, MergedWeights, merge, merge_, merged, read_deltas, unmerge_
from lora_merge.kernels.ops import run_segments

LINEAR, A, B = nn.Linear(8, 6), torch.zeros(2, 8), torch.zeros(6, 2)
WEIGHT = LINEAR.weight.detach()


def enter(model: Any) -> None:
    with merged(model):
        pass


USES: dict[str, Callable[[Any], object]] = {
    "read_deltas": read_deltas,
    "merged": enter,
    "MergedWeights": lambda model: list(MergedWeights(model)),
    "its metadata": lambda model: MergedWeights(model).metadata(),
}


@pytest.mark.parametrize(
    ("model", "told"),
    [("base", "'base'"), (None, "NoneType"), ([nn.Linear(2, 2)], "list"), ([], "list"), (nn.Linear, "type"),
     (nn.Linear(2, 2).state_dict(), "OrderedDict"), (torch.ones(2), "Tensor"), (print, "builtin")],
)  # fmt: skip
def test_what_is_no_model(model: Any, told: str) -> None:
    for use in USES.values():
        with pytest.raises(InvalidInput, match=rf"model must be a torch.nn.Module.*{told}"):
            use(model)
    with pytest.raises(InvalidInput, match="model must be"):
        MergedWeights(model)  # before anything is asked of it


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "a module": (lambda: merge_(LINEAR, A, B, 1.0), "weight must be a tensor, got a Linear; pass its .weight"),
    "a module out of place": (lambda: merge(LINEAR, A, B, 1.0), "weight must be a tensor, got a Linear"),
    "a module back": (lambda: unmerge_(LINEAR, A, B, 1.0), "weight must be a tensor, got a Linear"),
    "an array": (lambda: merge_(WEIGHT.numpy(), A, B, 1.0), "weight must be a tensor, got a ndarray"),
    "lora_A a module": (lambda: merge_(WEIGHT, LINEAR, B, 1.0), "lora_A must be a tensor, got a Linear"),
    "no lora_B": (lambda: merge_(WEIGHT, A, None, 1.0), "lora_B must be a tensor, got a NoneType"),
    "out a string": (lambda: merge(WEIGHT, A, B, 1.0, out="x"), "out must be a tensor, got a str"),
    "scaling a string": (lambda: merge_(WEIGHT, A, B, "1"), "scaling must be one real number, got '1'"),
    "scaling None": (lambda: merge_(WEIGHT, A, B, None), "scaling must be one real number, got None"),
    "scaling complex": (lambda: unmerge_(WEIGHT, A, B, 1j), "scaling must be one real number"),
    "two scalings": (lambda: merge_(WEIGHT, A, B, torch.ones(2)), "scaling must be one real number"),
    "dtype another word": (lambda: merge(WEIGHT, A, B, 1.0, dtype="int8"), "dtype must be bfloat16, .*'int8'"),
    "no seed": (lambda: merge(WEIGHT, A, B, 1.0, rounding="stochastic"), "pass seed="),
    "a seed of 1.5": (lambda: merge(WEIGHT, A, B, 1.0, rounding="stochastic", seed=1.5), "seed must be a whole .*1.5"),
    "a seed of text": (lambda: merge(WEIGHT, A, B, 1.0, rounding="stochastic", seed="x"), "seed must be a whole .*'x'"),
    "one destination": (lambda: run_segments(WEIGHT, [None], [A], [B], [1.0], ["w"]), "destinations must be a list"),
    "no destination": (lambda: run_segments([None], [None], [A], [B], [1.0], ["w"]), r"destinations\[0\] must be a t"),
    "a scalar": (lambda: run_segments([A[0, 0]], [None], [A], [B], [1.0], ["w"]), r"destinations\[0\] .* 2 dim"),
    "a name of 3": (lambda: run_segments([WEIGHT], [None], [A], [B], [1.0], [3]), "names must be strings, got 3"),
    "a scaling of x": (lambda: run_segments([WEIGHT], [None], [A], [B], ["x"], ["w"]), "scaling must be one real"),
    "a pitch of 1": (lambda: run_segments([WEIGHT], [None], [A], [B], [1.0], ["w"], pitch=[1]), "pitch must have two"),
}


@pytest.mark.parametrize("case", CALLS)
def test_operators(case: str) -> None:
    call, message = CALLS[case]
    before = WEIGHT.clone()
    with pytest.raises(InvalidInput, match=message):
        call()
    assert torch.equal(WEIGHT, before)


def test_scalings_that_are_numbers() -> None:
    for scaling in (1, 1.0, torch.tensor(1.0), torch.ones(1, 1), torch.ones(3).numpy()[0], True):
        merge_(WEIGHT.clone(), A, B, scaling)


@pytest.mark.parametrize("bucket_bytes", [0, -1, 255, 1e9, True, "512MB", None])
def test_bucket_bytes(bucket_bytes: Any) -> None:
    with pytest.raises(InvalidInput, match=rf"bucket_bytes must be a whole number of at least 256.*{bucket_bytes}"):
        MergedWeights(LINEAR, bucket_bytes=bucket_bytes)


@pytest.mark.parametrize("adapters", ["default", None, ["default"], 1])
def test_adapters_are_switched_not_chosen(adapters: Any) -> None:
    with pytest.raises(InvalidInput, match=r"adapters must be True or False.*set_adapter"):
        MergedWeights(LINEAR, adapters=adapters)


# ---- models that are not as PEFT or a loader makes them --------------------------------------------------------------


def layer(model: Any) -> Any:
    return model.base_model.model.model.layers[0].self_attn.q_proj


def set_on(module: nn.Module, tensor: Tensor) -> None:
    module.weight = nn.Parameter(tensor, requires_grad=False)


def lora_A(tensor: Tensor) -> Callable[[Any], object]:
    return lambda model: set_on(layer(model).lora_A["default"], tensor)


def base(tensor: Tensor) -> Callable[[Any], object]:
    return lambda model: set_on(layer(model).base_layer, tensor)


def norm(tensor: Tensor) -> Callable[[Any], object]:
    return lambda model: set_on(model.base_model.model.model.norm, tensor)


def buffer(tensor: Tensor) -> Callable[[Any], object]:
    return lambda model: model.base_model.model.model.register_buffer("extra", tensor)


def freed(module: Any) -> None:
    module.weight.data.untyped_storage().resize_(0)


IMAGINARY = torch.full((32,), 1j)
BROKEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "lora_A on meta": (lora_A(torch.empty(4, 32, device="meta")), "q_proj.weight: lora_A is a meta tensor"),
    "lora_A a scalar": (lora_A(torch.tensor(1.0)), r"q_proj.weight: lora_A \(\) .* do not fit"),
    "lora_A sparse": (lora_A(torch.zeros(4, 32).to_sparse()), "q_proj.weight: lora_A must be a dense tensor"),
    "lora_A freed": (lambda m: freed(layer(m).lora_A["default"]), "q_proj: its memory was freed"),
    "lora_A with a bias": (
        lambda m: layer(m).lora_A.update({"default": nn.Linear(32, 4)}),
        "q_proj: lora_A of 'default' has a bias",
    ),
    "no lora_A": (lambda m: layer(m).lora_A.pop("default"), "q_proj: this peft.*Linear cannot be read .KeyError"),
    "no lora_B": (lambda m: layer(m).lora_B.pop("default"), "q_proj: this peft.*Linear cannot be read .KeyError"),
    "base a scalar": (base(torch.tensor(1.0)), r"q_proj.weight: the base has shape \(\)"),
    "base sparse": (base(torch.zeros(32, 32).to_sparse()), "q_proj.weight: expected a dense tensor|q_proj.*sparse"),
    "base freed": (lambda m: freed(layer(m).base_layer), "q_proj: its memory was freed"),
    "no base": (lambda m: layer(m)._modules.pop("base_layer"), "Linear has no base_layer"),
    "base None": (lambda m: layer(m)._modules.update(base_layer=None), "Linear has no base_layer"),
    "scaling a string": (lambda m: layer(m).scaling.update(default="x"), "q_proj: the scaling of 'default' .*'x'"),
    "scaling None": (lambda m: layer(m).scaling.update(default=None), "q_proj: the scaling of 'default' .*None"),
    "two scalings": (lambda m: layer(m).scaling.update(default=torch.ones(2)), "q_proj: the scaling of 'default'"),
    "no active adapter": (lambda m: setattr(layer(m), "_active_adapter", None), "q_proj: .*cannot be read"),
    "no variants": (lambda m: setattr(layer(m), "lora_variant", None), "q_proj: .*cannot be read"),
    "no peft_config": (lambda m: m.peft_config.clear(), "the model: this peft.*cannot be read .KeyError: 'default'"),
    "a loop": (
        lambda m: m.base_model.model.model.norm.add_module("loop", m.base_model.model),
        "a module of the model contains itself",
    ),
}
UNREADABLE: dict[str, tuple[Callable[[Any], object], str]] = {
    "norm on meta": (norm(torch.empty(32, device="meta")), "model.norm.weight: a meta tensor"),
    "norm freed": (lambda m: freed(m.base_model.model.model.norm), "model.norm.weight: its memory was freed"),
    "norm conjugate": (norm(IMAGINARY.conj()), "model.norm.weight: a conjugate"),
    "norm negative": (norm(torch._neg_view(torch.ones(32))), "model.norm.weight: a conjugate or negative"),
    "sparse buffer": (buffer(torch.zeros(3).to_sparse()), "model.extra: expected a dense tensor"),
    "meta buffer": (buffer(torch.zeros(3, device="meta")), "model.extra: a meta tensor"),
    "quantised buffer": (buffer(torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)), "extra: .*quantised"),
    "nested buffer": (buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "extra: .*nested"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", BROKEN)
def test_broken_adapters(case: str) -> None:
    change, message = BROKEN[case]
    for use in USES.values():
        model = models.with_lora(models.qwen2)
        change(model)
        with pytest.raises(LoraMergeError, match=message):
            use(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", UNREADABLE)
def test_broken_bases(case: str) -> None:
    change, message = UNREADABLE[case]
    model = models.with_lora(models.qwen2)
    change(model)
    for options in ({}, {"adapters": False}):
        with pytest.raises(InvalidInput, match=message):
            list(MergedWeights(model, **options))


# ---- adapters that do nothing ----------------------------------------------------------------------------------------

IDLE: dict[str, tuple[Callable[[Any], object], str]] = {
    "disabled": (lambda m: m.base_model.disable_adapter_layers(), "'one', 'two' are disabled: .*enable_adapters"),
    "none chosen": (lambda m: m.base_model.set_adapter([]), "'one', 'two' are not active: call set_adapter.'one'."),
    "deleted": (lambda m: (m.delete_adapter("one"), m.delete_adapter("two")), "adapters were deleted"),
}


@pytest.mark.parametrize("use", ["merged", "MergedWeights"])
@pytest.mark.parametrize("case", IDLE)
def test_adapters_that_do_nothing_are_told_once(case: str, use: str) -> None:
    change, message = IDLE[case]
    model = models.with_lora(models.qwen2, adapters=("one", "two"))
    with warnings.catch_warnings(record=True):
        change(model)
    with pytest.warns(UserWarning, match=message):
        USES[use](model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        USES[use](model)


@pytest.mark.parametrize("use", ["merged", "MergedWeights"])
def test_an_adapter_beside_inactive_ones_is_no_matter(use: str) -> None:
    model = models.with_lora(models.qwen2, adapters=("one", "two"))
    model.set_adapter("two")
    disabled = models.with_lora(models.qwen2)
    disabled.base_model.disable_adapter_layers()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        USES[use](model)
        list(MergedWeights(disabled, adapters=False))
        list(MergedWeights(models.qwen2()))
