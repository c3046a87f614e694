"""Training on merged weights of fused experts and other parameters that PEFT targets by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import models
import peft
import pytest
import torch
from helpers import assert_same_bits
from packaging.version import Version
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lora_merge import InvalidInput, merged, save_merged, train_merged
from tests.training.test_train import (
    adapted,
    assert_base,
    assert_fifty_steps_are_those_of_peft,
    bits,
    loss_of,
    shake,
    truth,
)

SIZES: dict[str, Any] = {
    "vocab_size": models.VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "moe_num_experts": 4,
    "moe_k": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GATED = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_next": GATED,
    "qwen3_5_moe_text": GATED,
    "mixtral": {},
    "olmoe": {},
    "gpt_oss": {},
    "llama4_text": {},
    "deepseek_v3": LATENT,
    "glm4_moe": {},
    "granitemoe": {},
    "minimax_m2": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_moe": {},
    "phimoe": {},
}
BOTH = ["experts.gate_up_proj", "experts.down_proj"]
IMPLEMENTATIONS = ["eager", "grouped_mm", "batched_mm"]


def family(name: str) -> nn.Module:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind = CONFIG_MAPPING[name]
    known = set(vars(kind()))
    model: nn.Module = AutoModelForCausalLM.from_config(
        kind(**{key: value for key, value in (SIZES | FAMILIES[name]).items() if key in known})
    )
    return model


def experts(
    name: str = "qwen3_moe", dtype: torch.dtype = torch.float32, how: str = "grouped_mm", **config: Any
) -> PeftModel:
    """A tiny model of a family, with adapters on all experts and on q_proj."""
    config = {"target_modules": ["q_proj", "q_b_proj"], "target_parameters": BOTH} | config
    model: Any = adapted(partial(family, name), dtype, **config)
    base: Any = model.get_base_model()
    if base._can_set_experts_implementation():
        base.set_experts_implementation(how)
    return model


def two_adapters(name: str = "qwen3_moe") -> PeftModel:
    model = experts(name)
    second = LoraConfig(r=3, lora_alpha=9, use_rslora=True, target_modules=["v_proj"], target_parameters=BOTH)
    model.add_adapter("second", second)
    model.base_model.set_adapter(["default", "second"])
    shake(model)
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    loss_of(model).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_true(model: PeftModel) -> None:
    """Gradients are those of PEFT's formula at the merged weight, in float64; the base comes back."""
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
    assert any("q_proj" not in key and gradient.abs().max() > 0 for key, gradient in got.items())
    assert_base(model, before)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    assert_true(experts(name))


@pytest.mark.parametrize("how", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_implementations(name: str, how: str) -> None:
    assert_true(experts(name, how=how))


MODELS: dict[str, Callable[[], PeftModel]] = {
    "rank of 1, no multiple of anything": lambda: experts(r=1, use_rslora=True),
    "one parameter of two": lambda: experts(target_parameters=["experts.down_proj"]),
    "router": lambda: experts(target_parameters=[*BOTH, "mlp.gate.weight"]),
    "router with a bias": lambda: experts("gpt_oss", target_parameters=["router.weight"]),
    "weights of linear layers": lambda: experts(target_parameters=[*BOTH, "o_proj.weight"]),
    "modules beside": lambda: experts(modules_to_save=["lm_head"]),
}
if Version(peft.__version__) >= Version("0.19"):  # before, PEFT takes target_parameters for one adapter only
    MODELS |= {"two adapters": two_adapters, "two adapters, transposed": lambda: two_adapters("gpt_oss")}


@pytest.mark.parametrize("name", MODELS)
def test_adapters(name: str) -> None:
    assert_true(MODELS[name]())


@pytest.fixture
def all_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token goes to all experts: rounding then sends none elsewhere than float64."""
    monkeypatch.setitem(SIZES, "num_experts_per_tok", SIZES["num_experts"])


@pytest.mark.usefixtures("all_chosen")
def test_weights_of_16_bits_and_adapters_of_32() -> None:
    """Gradients in the adapters' dtype; no further from float64 than PEFT's own."""
    for name in ("qwen3_moe", "gpt_oss"):
        model = experts(name, torch.bfloat16)
        _, wanted = truth(model)
        own = gradients(model)
        with train_merged(model):
            got = gradients(model)
        for key, gradient in got.items():
            assert gradient.dtype == torch.float32
            errors = [(g.double() - wanted[key]).norm() / wanted[key].norm() for g in (gradient, own[key])]
            assert errors[0] < 0.03 or errors[0] < 1.5 * errors[1], f"{name} {key}: {errors}"


@pytest.mark.parametrize("how", ["eager", "grouped_mm"])
def test_fifty_steps_are_those_of_peft(how: str) -> None:
    assert_fifty_steps_are_those_of_peft(experts(how=how), experts(how=how))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4_text"])
def test_what_is_streamed_is_what_was_computed_with(name: str, tmp_path: Path) -> None:
    """Bit for bit, as transformers loads it; and the base comes back."""
    model = experts(name, torch.bfloat16)
    before = bits(model)
    base: Any = model.get_base_model()
    with train_merged(model):
        for step in range(2):
            shake(model)
            loss_of(model).backward()
            computed = {name_of(n): p.detach().clone() for n, p in base.named_parameters() if "lora_" not in n}
            save_merged(model, tmp_path / str(step))
            assert_base(model, before)
            loaded = type(base).from_pretrained(tmp_path / str(step), dtype=torch.bfloat16)
            for n, p in loaded.named_parameters():
                assert_same_bits(p, computed[n], n)
            with torch.no_grad():
                outputs = models.outputs(model)
                with merged(model):
                    assert_same_bits(models.outputs(model), outputs)


def name_of(name: str) -> str:
    return name.replace("base_layer.", "")


class Sizes(TorchDispatchMode):
    """Count tensors of the size of a model's experts that operations make, as many as are there at the same time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shapes: set[Any] = set()
        for p in model.parameters():
            if p.ndim == 3:
                self.shapes |= {p.shape, p.mT.shape}
        self.most = 0
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        found = func(*args, **(kwargs or {}))
        self._made = {where: storage for where, storage in self._made.items() if not storage.expired()}
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and tensor.shape in self.shapes:
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self._made[storage._cdata] = StorageWeakRef(storage)
        self.most = max(self.most, len(self._made))
        return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("how", "most"), [("eager", 0), ("grouped_mm", 0), ("batched_mm", 2)])
def test_no_tensor_of_a_parameters_size(how: str, most: int, checkpointing: bool) -> None:
    """None is made where products are known; else as many as one layer's gradients need, of many layers."""
    sizes: dict[str, Any] = {}
    for kind in ("merged", "peft"):
        model = experts(how=how)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        with train_merged(model) if kind == "merged" else nullcontext():
            with torch.no_grad():
                loss_of(model)  # merges
            with Sizes(model) as sizes[kind]:
                loss_of(model).backward()
    assert sizes["merged"].most <= most
    assert sizes["merged"].most <= sizes["peft"].most


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = experts(name)
    with train_merged(model) as training:
        wanted = gradients(model)
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        for key, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, wanted[key])
        assert training.merges == 1


def test_reference_policies() -> None:
    """`disable_adapter()` computes with the exact base, also between a forward and its backward (DPO)."""
    model, alone = experts(), experts()
    with torch.no_grad(), alone.disable_adapter():
        reference = models.outputs(alone)
    with train_merged(model):
        wanted = gradients(model)
        loss = loss_of(model)
        with torch.no_grad(), model.disable_adapter():
            assert_same_bits(models.outputs(model), reference)
        loss.backward()
        for name, gradient in wanted.items():
            assert_same_bits(model.get_parameter(name).grad, gradient, name)


def test_a_backward_pass_of_other_adapters_is_refused() -> None:
    model = experts(target_modules=[])
    with train_merged(model):
        loss = loss_of(model)
        shake(model)
        loss_of(model)
        with pytest.raises((InvalidInput, RuntimeError), match=r"other adapters|modified by an inplace operation"):
            loss.backward()


@pytest.mark.usefixtures("all_chosen")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    """As near to float64 as PEFT's own forward."""
    for how in ("eager", "grouped_mm"):
        model = experts(dtype=dtype, how=how)
        _, wanted = truth(model)
        with torch.autocast("cpu", torch.bfloat16):
            own = gradients(model)
            with train_merged(model):
                got = gradients(model)
        for key, gradient in got.items():
            errors = [(g.double() - wanted[key]).norm() / wanted[key].norm() for g in (gradient, own[key])]
            assert gradient.dtype == torch.float32
            assert errors[0] < 0.03 or errors[0] < 1.5 * errors[1], f"{how} {key}: {errors}"


def test_the_parameter_is_nobody_elses() -> None:
    """It never requires a gradient nor gets one, and modules hold it alone once a forward is over, also one that fails
    or is interrupted."""
    model = experts()
    holder = next(m for m in model.modules() if "gate_up_proj" in m._parameters)
    before, own = holder.gate_up_proj, vars(holder).get("forward")
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    with train_merged(model):
        loss_of(model).backward()
        for kind in (KeyboardInterrupt, RuntimeError):
            holder.act_fn, act = Failing(kind), holder.act_fn
            with pytest.raises(kind):
                loss_of(model)
            holder.act_fn = act
            assert holder.gate_up_proj is before
            assert "gate_up_proj" not in vars(holder)
        assert not before.requires_grad
        assert before.grad is None
        assert {id(p) for p in model.parameters() if p.requires_grad} == trained
    assert vars(holder).get("forward") is own


class Failing(nn.Module):
    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        raise self.kind("now")


def test_copies() -> None:
    """After a pause a copy is PEFT's own model, and computes with its own weights."""
    model = experts()
    with train_merged(model) as training:
        loss = loss_of(model)
        training.pause()
        other = copy.deepcopy(model)
        torch.testing.assert_close(loss_of(other), loss)
        shake(other)
        alone = gradients(other)
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        for key, gradient in gradients(other).items():
            assert_same_bits(gradient, alone[key], key)


def test_a_parameter_that_is_trained_itself() -> None:
    """It gets its whole gradient, the adapters theirs."""
    model = experts()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.endswith("down_proj"))
    own = gradients(model)
    with train_merged(model):
        for key, gradient in gradients(model).items():
            torch.testing.assert_close(gradient, own[key], rtol=1e-4, atol=1e-6)


def test_compiled_models_see_each_step() -> None:
    model, plain = experts(), experts()
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    with train_merged(model) as training, train_merged(plain):
        for step in range(1, 3):
            compiled(input_ids=models.tokens(), labels=models.tokens()).loss.backward()
            for name, gradient in gradients(plain).items():
                torch.testing.assert_close(model.get_parameter(name).grad, gradient)
            model.zero_grad()
            assert training.merges == step
            for one in (model, plain):
                torch.manual_seed(step)
                shake(one)
