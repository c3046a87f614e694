"""What happens between two steps: one merge takes the place of the one before, and the base comes back whenever it is
asked for."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import models
import pytest
import torch
from backends import Backend
from helpers import assert_same_bits
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from lora_merge import InvalidInput, MergedWeights, NotRestored, merged, train_merged
from lora_merge.kernels import cpu
from lora_merge.kernels.tracked.plan import TrackedPlan
from lora_merge.merged_block import MergedBlock
from tests.training.test_train import LINEARS, adapted, assert_base, bits, loss_of, shake, two_adapters

TRAINED: dict[str, Callable[[], PeftModel]] = {
    "bfloat16": lambda: adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS),
    "float16": lambda: adapted(models.qwen2, torch.float16, target_modules=LINEARS),
    "float32": lambda: adapted(models.qwen2, target_modules=LINEARS),
    "two adapters": two_adapters,
    "embedding and head": lambda: adapted(models.qwen2, torch.bfloat16, target_modules=["embed_tokens", "lm_head"]),
    "Conv1D": lambda: adapted(models.gpt2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True),
    "convolutions": lambda: adapted(models.Convolutions, target_modules=models.CONVOLUTIONS),
    "modules beside": lambda: adapted(models.qwen2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    "tied, a user apart": lambda: adapted(partial(models.qwen2, tied=True), target_modules=["embed_tokens", "q_proj"]),
    "tied, both apart": lambda: adapted(partial(models.qwen2, tied=True), target_modules=["embed_tokens", "lm_head"]),
}
IN_TWO_PASSES = {"tied, both apart"}
"""What has tensors of one block only is entered anew each time."""


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Count launches of tracked kernels."""
    seen = dict.fromkeys(("track", "untrack", "retrack"), 0)

    def counts(name: str) -> Any:
        real = getattr(cpu._Tracked, name)

        def call(self: Any, *args: Any) -> Any:
            seen[name] += 1
            return real(self, *args)

        return call

    with monkeypatch.context() as patch:
        for name in seen:
            patch.setattr(cpu._Tracked, name, counts(name))
        yield seen


def plant(model: nn.Module) -> None:
    """Give base weights bits that no arithmetic brings back."""
    with torch.no_grad():
        for layer in (m for m in model.modules() if isinstance(m, LoraLayer)):
            flat = layer.get_base_layer().weight.view(-1)
            flat[:4] = torch.tensor([float("nan"), float("inf"), -0.0, -float("inf")])


def wanted(model: nn.Module, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the weights have to hold now: those of a model of its own, merged once."""
    alone: Any = copy.deepcopy(model)
    alone.load_state_dict({n: t for n, t in base.items() if "lora_" not in n} | adapters_of(model))
    with merged(alone):
        return bits(alone)


def adapters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t for n, t in bits(model).items() if "lora_" in n or "modules_to_save" in n}


def assert_holds(model: nn.Module, want: dict[str, torch.Tensor]) -> None:
    for name, tensor in bits(model).items():
        assert_same_bits(tensor, want[name], name)


@pytest.mark.parametrize("name", TRAINED)
def test_each_step_takes_the_place_of_the_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass, with the bits of a merge of the base; the base comes back with NaN and infinities in it."""
    model = TRAINED[name]()
    plant(model)
    base, alone = bits(model), copy.deepcopy(model)
    training = train_merged(model)
    with counted(monkeypatch) as launches:
        for step in range(6):
            shake(model, 0.1 if step % 2 else 1.0)
            training.refresh()
            got = bits(model)
            alone.load_state_dict(adapters_of(model), strict=False)
            with merged(alone):
                for key, tensor in alone.state_dict().items():
                    assert_same_bits(got[key], tensor, f"{key}, step {step}")
        mine = 6 if name in IN_TWO_PASSES else 1
        assert launches["retrack"] == 6 - mine
        assert launches["track"] >= 6 + mine  # those of the other model, and what found no room at first
    assert training.merges == 6
    training.close()
    assert_base(model, base)


def test_every_backend(backend: Backend) -> None:
    """Where one pass is not to be had it is two, with the same bits."""
    model = adapted(models.qwen2, torch.bfloat16, target_modules=["q_proj", "v_proj"]).to(backend.device)
    base, alone = bits(model), copy.deepcopy(model)
    with train_merged(model) as training:
        for _ in range(3):
            shake(model)
            training.refresh()
            got = bits(model)
            alone.load_state_dict(adapters_of(model), strict=False)
            with merged(alone):
                assert_holds(alone, got)
    assert_base(model, base)


def scale(value: float, model: nn.Module) -> None:
    for layer in (m for m in model.modules() if isinstance(m, LoraLayer)):
        if "default" in layer.scaling:
            layer.set_scale("default", value)


def written(model: nn.Module) -> None:
    list(MergedWeights(model))


def referred(model: Any) -> None:
    with torch.no_grad(), model.disable_adapter():
        loss_of(model)


@pytest.mark.parametrize("seed", range(3))
def test_fifty_steps_with_whatever_comes_between(seed: int) -> None:
    """Pauses, streams, reference policies, other adapters and scalings, evaluation, errors, a move to other memory."""
    model: Any = adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS)
    model.add_adapter("second", LoraConfig(r=3, lora_alpha=9, target_modules=["q_proj", "down_proj"]))
    model.add_adapter("twin", LoraConfig(r=4, lora_alpha=6, target_modules=LINEARS))
    shake(model)
    plant(model)
    base, alone, rng = bits(model), copy.deepcopy(model), random.Random(seed)
    training = train_merged(model)

    def moved() -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    def failed() -> None:
        with pytest.raises(IndexError):
            model(input_ids=torch.tensor([[models.VOCABULARY + 1]]))

    def activated(names: Any) -> None:
        model.base_model.set_adapter(names)
        alone.base_model.set_adapter(names)

    between: list[Callable[[], object]] = [
        training.pause,
        partial(written, model),
        partial(referred, model),
        lambda: activated("default"),
        lambda: activated("twin"),
        lambda: activated(["default", "second"]),
        lambda: [scale(value, one) for value in [rng.choice([0.5, 1.5, 2.0])] for one in (model, alone)],
        moved,
        failed,
        lambda: None,
    ]
    for step in range(50):
        shake(model, rng.choice([1e-3, 0.1, 1.0]))
        for _ in range(rng.randrange(3)):
            rng.choice(between)()
            if rng.random() < 0.3:
                training.refresh()
        training.refresh()
        got = bits(model)
        alone.load_state_dict(adapters_of(model), strict=False)
        with merged(alone):
            for key, tensor in alone.state_dict().items():
                assert_same_bits(got[key], tensor, f"{key}, step {step}")
        loss = model(input_ids=models.tokens(), labels=models.tokens()).loss
        loss.backward()
    training.close()
    assert_base(model, base)


def test_streams_of_a_model_in_training() -> None:
    """After several steps that followed one another in one pass, a stream has the bits that were computed with."""
    model = adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS)
    weights = MergedWeights(model)
    with train_merged(model):
        for _ in range(3):
            for _ in range(3):
                shake(model)
                loss_of(model).backward()
            computed = {
                n.replace("base_model.model.", "").replace(".base_layer", ""): t for n, t in bits(model).items()
            }
            streamed = dict(weights)
            assert all(torch.equal(tensor, computed[name]) for name, tensor in streamed.items())


def test_a_weight_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named; all others are the base, and training can go on."""
    model = adapted(models.qwen2, torch.bfloat16, target_modules=["q_proj", "v_proj"])
    base = bits(model)
    layers = [m for m in model.modules() if isinstance(m, LoraLayer)]
    with train_merged(model) as training:
        loss_of(model)
        shake(model)
        loss_of(model)
        layers[0].get_base_layer().weight.data.view(-1)[3] = 7.0
        shake(model)
        with pytest.raises(NotRestored, match=r"layers.0.self_attn.q_proj.weight: written while merged"):
            loss_of(model)
        hit = next(n for n, p in model.named_parameters() if p is layers[0].get_base_layer().weight)
        with torch.no_grad():
            model.get_parameter(hit).copy_(base[hit])
        assert_base(model, base)
        loss_of(model).backward()
        assert training.merges == 3
    assert_base(model, base)


def test_beyond_float16() -> None:
    """Refused by name with the base back; smaller values merge again."""
    model = adapted(models.qwen2, torch.float16, target_modules=["q_proj"])
    base = bits(model)
    with train_merged(model):
        for _ in range(2):
            loss_of(model)
            shake(model)
            loss_of(model)
            shake(model, 1e3)
            with pytest.raises(InvalidInput, match=r"q_proj.weight: expected merged values up to 65504"):
                loss_of(model)
            assert_base(model, base)
            shake(model)
    assert_base(model, base)


STEPS: list[tuple[Any, str]] = [
    (TrackedPlan, "remerge"),
    (cpu._Tracked, "retrack"),
    (MergedBlock, "remerge"),
    (MergedBlock, "_outside"),
    (MergedBlock, "_prepare"),
]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
@pytest.mark.parametrize("scaled", [False, True], ids=["values", "scaling"])
def test_what_ends_a_remerge(
    owner: Any, step: str, after: bool, error: type[BaseException], scaled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, no memory, a launch that fails: the base is back at once or at the next step, and training goes on."""
    model = adapted(models.qwen2, torch.bfloat16, target_modules=["q_proj", "v_proj"])
    plant(model)
    base, alone, real = bits(model), copy.deepcopy(model), getattr(owner, step)

    def ends(self: Any, *args: Any, **kwargs: Any) -> Any:
        if after:
            real(self, *args, **kwargs)
        raise error("mine")

    training = train_merged(model)
    training.refresh()
    shake(model)
    if scaled:
        scale(3.0, model)
        scale(3.0, alone)
    with monkeypatch.context() as patch:
        patch.setattr(owner, step, ends)
        if step == "_outside" and error is not KeyboardInterrupt:
            training.refresh()  # in two passes
        else:
            with pytest.raises(error, match="mine"):
                training.refresh()
            if owner is not MergedBlock or step != "remerge":
                assert_base(model, base)
    for _ in range(3):
        training.refresh()
        got = bits(model)
        alone.load_state_dict(adapters_of(model), strict=False)
        with merged(alone):
            assert_holds(alone, got)
        shake(model)
    training.close()
    assert_base(model, base)


def test_memory_of_a_second_set() -> None:
    """One copy of the adapters more, built once; nothing of the weights' size."""
    model = adapted(models.qwen2, torch.bfloat16, target_modules=LINEARS)
    with train_merged(model) as training:
        sets = []
        for _ in range(5):
            shake(model)
            training.refresh()
            known = training._block._known
            assert known is not None
            sets.append({id(merge) for merge in [*known.merges, *(known.others or ())]})
        assert len(sets[0]) == 1
        assert sets[1] == sets[2] == sets[3] == sets[4]
        assert len(sets[1]) == 2
        training.pause()
        shake(model)
        training.refresh()
        shake(model)
        training.refresh()
        assert {id(merge) for merge in [*known.merges, *(known.others or ())]} == sets[1]
