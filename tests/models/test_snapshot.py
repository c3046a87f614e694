"""A live model that changed is read again, whatever changed; one that did not is not."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, PeftModel
from peft.utils import PeftType
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lora_merge import InvalidInput, LoraMergeError, MergedWeights, kept_merges, merged
from lora_merge.kernels.segments import raw
from lora_merge.models import snapshot
from lora_merge.models.peft.facts import _PROPERTIES
from lora_merge.models.peft.read import read_adapters
from lora_merge.models.snapshot import take
from lora_merge.names import named_tensors, walk
from lora_merge.shards.layout import Layout

Change = Callable[[Any], object]
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def two() -> PeftModel:
    return models.with_lora(models.qwen2, adapters=("one", "two"))


def dora() -> PeftModel:
    return models.with_lora(models.qwen2, use_dora=True)


def saved() -> PeftModel:
    return models.with_lora(models.qwen2, adapters=("one",), modules_to_save=["lm_head"])


def tied() -> PeftModel:
    return models.with_lora(lambda: models.qwen2(tied=True), target_modules=["q_proj"])


def experts() -> PeftModel:
    return models.with_lora(models.mixtral, **EXPERTS)


def conv() -> PeftModel:
    return models.with_lora(models.Convolutions, target_modules=models.CONVOLUTIONS)


def embedding() -> PeftModel:
    return models.with_lora(models.qwen2, target_modules=["embed_tokens", "q_proj"])


def base(model: Any) -> Any:
    """The transformers model."""
    return model.base_model.model


def q_proj(model: Any) -> Any:
    """A square linear `[32, 32]` with a bias."""
    return base(model).model.layers[1].self_attn.q_proj


def mlp(model: Any) -> Any:
    return base(model).model.layers[0].mlp


def parameter(like: Tensor, *, rows: int | None = None, cols: int | None = None) -> nn.Parameter:
    shape = (rows or like.shape[0], *((cols or n) for n in like.shape[1:]))
    return nn.Parameter(torch.randn(shape, dtype=like.dtype), like.requires_grad)


def add(model: PeftModel) -> None:
    model.add_adapter("three", LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False))
    model.base_model.set_adapter(["two", "three"])


def delete(model: PeftModel) -> None:
    model.base_model.set_adapter(["two"])
    model.delete_adapter("one")


def rename(model: PeftModel) -> None:
    """The adapter "one" is called "uno" in every layer."""
    for layer in model.modules():
        if hasattr(layer, "lora_variant"):
            for part in (layer.lora_A, layer.lora_B, layer.lora_dropout, layer.scaling):
                part["uno"] = part.pop("one")
            layer._active_adapter = ["uno", "two"]


def another_rank(model: PeftModel) -> None:
    layer = q_proj(model)
    layer.lora_A["one"].weight = parameter(layer.lora_A["one"].weight, rows=7)
    layer.lora_B["one"].weight = parameter(layer.lora_B["one"].weight, cols=7)


def to_swap(children: dict[str, Any], one: str, other: str) -> None:
    children[one], children[other] = children[other], children[one]


def set_data(tensor: Tensor, data: Tensor) -> None:
    tensor.data = data


def set_on(owner: Any, **attributes: Any) -> None:
    for name, value in attributes.items():
        setattr(owner, name, value)


CHANGES: dict[str, tuple[Callable[[], PeftModel], Change]] = {
    "scaling by PEFT": (two, lambda m: q_proj(m).set_scale("one", 2.0)),
    "scaling by hand": (two, lambda m: q_proj(m).scaling.update(two=-0.5)),
    "scaling not finite": (two, lambda m: q_proj(m).scaling.update(two=float("nan"))),
    "adapter switched": (two, lambda m: m.set_adapter("two")),
    "adapters in another order": (two, lambda m: m.base_model.set_adapter(["two", "one"])),
    "adapter switched in one layer": (two, lambda m: q_proj(m).set_adapter(["two"])),
    "adapter added": (two, add),
    "adapter deleted": (two, delete),
    "adapter renamed": (two, rename),
    "adapter of another rank": (two, another_rank),
    "lora_A replaced": (two, lambda m: set_on(q_proj(m).lora_A["one"], weight=nn.Parameter(torch.randn(4, 32)))),
    "lora_B moved": (two, lambda m: set_data(q_proj(m).lora_B["two"].weight, torch.randn(32, 5))),
    "lora_A's module replaced": (two, lambda m: q_proj(m).lora_A.update({"one": nn.Linear(32, 4, bias=False)})),
    "adapters disabled": (two, lambda m: m.base_model.disable_adapter_layers()),
    "adapters disabled in one layer": (two, lambda m: q_proj(m).enable_adapters(False)),
    "merged by PEFT": (two, lambda m: m.merge_adapter()),
    "merged by PEFT in one layer": (two, lambda m: q_proj(m).merge()),
    "merged and unmerged by PEFT": (two, lambda m: (m.merge_adapter(), m.unmerge_adapter())),
    "base replaced": (two, lambda m: set_on(q_proj(m).base_layer, weight=parameter(q_proj(m).base_layer.weight))),
    "base moved": (two, lambda m: set_data(q_proj(m).base_layer.weight, torch.randn(32, 32))),
    "base of another dtype": (two, lambda m: m.to(torch.bfloat16)),
    "base stored by columns": (two, lambda m: set_data(q_proj(m).base_layer.weight, torch.randn(32, 32).t())),
    "base transposed where it lies": (two, lambda m: set_data(q_proj(m).weight, q_proj(m).weight.data.t())),
    "base reshaped where it lies": (
        two, lambda m: set_data(base(m).model.embed_tokens.weight, base(m).model.embed_tokens.weight.data.view(32, -1))
    ),
    "other bits of a dtype where they lie": (
        two, lambda m: set_data(base(m).model.norm.weight, base(m).model.norm.weight.data.view(torch.int32))
    ),
    "fan_in_fan_out": (two, lambda m: set_on(q_proj(m), fan_in_fan_out=True)),
    "bias removed": (two, lambda m: set_on(q_proj(m).base_layer, bias=None)),
    "bias added": (two, lambda m: set_on(mlp(m).up_proj.base_layer, bias=nn.Parameter(torch.randn(48)))),
    "buffer added": (two, lambda m: mlp(m).register_buffer("kept", torch.ones(3))),
    "buffer not persistent": (
        lambda: two_with_buffer(), lambda m: mlp(m)._non_persistent_buffers_set.add("kept")
    ),
    "buffer moved": (lambda: two_with_buffer(), lambda m: set_data(mlp(m).kept, torch.zeros(3))),
    "buffer replaced": (lambda: two_with_buffer(), lambda m: set_on(mlp(m), kept=torch.zeros(2))),
    "adapter layer replaced by its base": (two, lambda m: set_on(mlp(m), up_proj=mlp(m).up_proj.base_layer)),
    "base computes otherwise": (two, lambda m: set_on(mlp(m).up_proj.base_layer, forward=lambda x: 2 * x)),
    "base module replaced": (two, lambda m: set_on(mlp(m).up_proj, base_layer=nn.Linear(32, 48, bias=False))),
    "layer replaced": (
        two, lambda m: base(m).model.layers.__setitem__(0, copy.deepcopy(base(m).model.layers[1]))
    ),
    "layer removed": (two, lambda m: base(m).model.layers.pop(1)),
    "modules renamed": (two, lambda m: set_on(mlp(m), other=mlp(m)._modules.pop("up_proj"))),
    "modules swapped": (two, lambda m: to_swap(mlp(m)._modules, "up_proj", "gate_proj")),
    "parameters renamed": (two, lambda m: set_on(base(m).model.norm, w=base(m).model.norm._parameters.pop("weight"))),
    "head tied": (two, lambda m: set_on(base(m).lm_head, base_layer=base(m).model.embed_tokens)),
    "head untied": (tied, lambda m: set_on(base(m).lm_head, weight=parameter(base(m).lm_head.weight))),
    "tied by address only": (
        two, lambda m: set_data(base(m).model.layers[0].input_layernorm.weight, base(m).model.norm.weight.data)
    ),
    "two modules are one": (
        two, lambda m: set_on(base(m).model.layers[0].self_attn, q_proj=q_proj(m).base_layer)
    ),
    "two modules with shared weights are one": (
        lambda: two_with_shared_weights(),
        lambda m: set_on(base(m).model.layers[0].self_attn, q_proj=q_proj(m).base_layer),
    ),
    "a parameter moved to the next module": (lambda: two_with_one_bias(), lambda m: move_bias(m)),
    "a parameter moved to another name": (
        lambda: two_with_a_place(),
        lambda m: to_swap(base(m).model.norm._parameters, "weight", "other"),
    ),
    "buffer renamed": (
        lambda: two_with_buffer(),
        lambda m: mlp(m)._buffers.update(renamed=mlp(m)._buffers.pop("kept")),
    ),
    "DoRA switched off": (dora, lambda m: q_proj(m).lora_variant.clear()),
    "DoRA's magnitude replaced": (
        dora, lambda m: set_on(q_proj(m).lora_magnitude_vector["default"], weight=nn.Parameter(torch.rand(32) + 1))
    ),
    "unknown variant": (two, lambda m: q_proj(m).lora_variant.update(one=object())),
    "quantised": (two, lambda m: set_on(q_proj(m), quantization_backend=object())),
    "tensor parallel": (two, lambda m: set_on(q_proj(m).base_layer, _hf_device_mesh=object())),
    "another PEFT method": (two, lambda m: set_on(m.peft_config["one"], peft_type=PeftType.IA3)),
    "copy of another adapter": (saved, lambda m: (m.add_adapter("two", m.peft_config["one"]), m.set_adapter("two"))),
    "copy not used": (saved, lambda m: m.base_model.disable_adapter_layers()),
    "copy replaced": (saved, lambda m: base(m).lm_head.modules_to_save.update({"one": nn.Linear(32, 101, bias=False)})),
    "experts the other way": (experts, lambda m: [setattr(e, "_did_swap_in_out_features", False) for e in m.modules()
                                                  if hasattr(e, "_did_swap_in_out_features")]),
    "another parameter": (
        experts, lambda m: set_on(base(m).model.layers[0].mlp.experts, parameter_name="gate_up_proj")
    ),
    "stride of a convolution": (conv, lambda m: set_on(base(m).wide1.base_layer, stride=(1,))),
    "stride of lora_A": (conv, lambda m: set_on(base(m).wide1.lora_A["default"], stride=(1,))),
    "groups of a convolution": (conv, lambda m: set_on(base(m).narrow2.base_layer, groups=2)),
    "max_norm": (embedding, lambda m: set_on(base(m).model.embed_tokens.base_layer, max_norm=1.0)),
    "embedding's adapter replaced": (
        embedding,
        lambda m: base(m).model.embed_tokens.lora_embedding_A.update({"default": nn.Parameter(torch.randn(4, 101))}),
    ),
}  # fmt: skip


def two_with_buffer() -> PeftModel:
    model = two()
    mlp(model).register_buffer("kept", torch.ones(3))
    return model


def two_with_shared_weights() -> PeftModel:
    """A bare linear beside an adapted one, with the same parameters."""
    model, linear = two(), nn.Linear(32, 32)
    linear.weight, linear.bias = q_proj(model).base_layer.weight, q_proj(model).base_layer.bias
    base(model).model.layers[0].self_attn.q_proj = linear
    return model


def two_with_one_bias() -> PeftModel:
    model = two()
    mlp(model).gate_proj.base_layer.bias = nn.Parameter(torch.randn(48))
    del mlp(model).up_proj.base_layer._parameters["bias"]
    return model


def move_bias(model: PeftModel) -> None:
    """From one linear to the next, where it comes first: all parameters of all modules in a row are what they were."""
    gate, up = mlp(model).gate_proj.base_layer, mlp(model).up_proj.base_layer
    up._parameters = {"bias": gate._parameters.pop("bias"), **up._parameters}


def two_with_a_place() -> PeftModel:
    model = two()
    base(model).model.norm.register_parameter("other", None)
    return model


def outcome(work: Callable[[], Any]) -> Any:
    """What comes of it: tensors bit by bit, or an error."""
    try:
        return {name: (t.dtype, t.shape, raw(t.detach().clone()).flatten().tolist()) for name, t in work()}
    except LoraMergeError as error:
        return type(error), str(error)


def inside(model: nn.Module) -> list[tuple[str, Tensor]]:
    with merged(model):
        return [(t.name, t.tensor.detach().clone()) for t in named_tensors(model)]


UNKNOWN = [] if any(hasattr(module, "_did_swap_in_out_features") for module in experts().modules()) else [
    "experts the other way"  # PEFT 0.18 does not know of it
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_push_and_the_next_entry_see_a_change(change: str) -> None:
    """What has run before does after the change what something new does."""
    build, apply = CHANGES[change]
    model = build()
    weights, bare = (MergedWeights(model, bucket_bytes=1 << 13, adapters=adapters) for adapters in (True, False))
    before = outcome(lambda: weights), outcome(lambda: bare)
    assert (outcome(lambda: weights), outcome(lambda: bare)) == before
    entered = outcome(lambda: inside(model))
    assert outcome(lambda: inside(model)) == entered
    facts = take(model, Layout(model)).facts
    apply(model)
    streamed = outcome(lambda: weights), outcome(lambda: bare)
    assert streamed[0] == outcome(lambda: MergedWeights(model))
    assert streamed[1] == outcome(lambda: MergedWeights(model, adapters=False))
    assert (outcome(lambda: weights), outcome(lambda: bare)) == streamed
    entered = outcome(lambda: inside(model))
    kept_merges._kept.clear()
    snapshot._indices.clear()
    assert entered == outcome(lambda: inside(model))
    if change not in ("merged and unmerged by PEFT", *UNKNOWN):
        assert take(model, Layout(model)).facts != facts


def test_what_trains_is_not_read_again() -> None:
    """Values, gradients, modes and what does not act may change from step to step."""
    model = two()
    facts = take(model, Layout(model)).facts
    model.train()
    model(models.tokens()).logits.sum().backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    model.requires_grad_(False)
    model.add_adapter("idle", LoraConfig(r=3, target_modules=["q_proj"]))
    q_proj(model).scaling["idle"] = 3.0
    model.base_model.set_adapter(["one", "two"])
    assert take(model, Layout(model)).facts == facts
    bare = take(model, Layout(model), adapters=False).facts
    assert bare != facts
    q_proj(model).set_scale("one", 3.0)
    model.base_model.set_adapter("two")
    assert take(model, Layout(model)).facts != facts
    assert take(model, Layout(model), adapters=False).facts == bare


def test_a_pass_holds_the_memory_that_its_plans_read() -> None:
    """A consumer that moves weights between two buckets: the pass goes on with the old ones, and then lets go of them.
    What would have to be planned anew in its midst is refused."""
    model = two()
    weights = MergedWeights(model, bucket_bytes=1 << 12)
    list(weights.buckets())
    wanted = {slot.name: slot.view(bucket.data).clone() for bucket in weights.buckets() for slot in bucket.slots}
    moved = q_proj(model).base_layer.weight
    old = StorageWeakRef(moved.untyped_storage())
    passing = weights.buckets()
    got = {slot.name: slot.view(bucket.data).clone() for bucket in [next(passing)] for slot in bucket.slots}
    moved.data = torch.zeros(32, 32)
    assert not old.expired()
    got |= {slot.name: slot.view(bucket.data).clone() for bucket in passing for slot in bucket.slots}
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
    assert old.expired()
    list(weights.buckets())
    passing, held = iter(weights), []
    held.append(next(passing))
    moved.data = torch.ones(32, 32)
    with pytest.raises(InvalidInput, match="changed while it was being streamed"):
        held.extend(passing)
    assert [name for name, _ in weights] == list(wanted)


class Recorded(dict[str, Any]):
    """A module's `__dict__` that notes what is asked of it."""

    def __init__(self, inside: dict[str, Any], names: set[str]) -> None:
        super().__init__(inside)
        self._names = names

    def __getitem__(self, name: str) -> Any:
        self._names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._names.add(name)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._names.add(str(name))
        return super().__contains__(name)


BUILDS = {build.__name__: build for build in (two, dora, saved, tied, experts, conv, embedding)} | {
    "gpt2": lambda: models.with_lora(models.gpt2),
    "lora_bias": lambda: models.with_lora(models.qwen2, lora_bias=True, target_modules=["q_proj"]),
    "compiled": lambda: torch.compile(two()),
    "bare": models.qwen2,
}


def looked_at(work: Callable[[], object]) -> dict[int, set[str]]:
    """The id of each module -> which attributes are asked for."""
    seen: defaultdict[int, set[str]] = defaultdict(set)
    get = object.__getattribute__

    def look(self: nn.Module, name: str) -> Any:
        if name == "__dict__":
            return Recorded(get(self, name), seen[id(self)])
        if not name.startswith("__"):
            inner = get(self, "__dict__")
            held = [d for d in ("_modules", "_parameters", "_buffers") if name in inner.get(d, ())]
            seen[id(self)].update(held or [name])
        return get(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "__getattribute__", look, raising=False)
        work()
    return seen


def read(model: nn.Module, layout: Layout) -> None:
    """All that a snapshot stands for."""
    read_adapters(model, layout)
    list(named_tensors(model, layout.parameters))


@pytest.mark.parametrize("build", BUILDS)
def test_a_snapshot_looks_at_all_that_reading_looks_at(build: str) -> None:
    """Every attribute of a module that reading asks for, so that a new reader cannot forget its place there."""
    model = BUILDS[build]()
    layout = Layout(model)

    read(model, layout), take(model, layout)  # what depends on classes is known from here on
    snapshot._noted.clear()
    taken = looked_at(lambda: take(model, layout))
    where = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    known = {*_PROPERTIES, "_old_forward"}  # which say what fields say; which is looked at where there is a `forward`
    missing = {
        where[module]: names - taken[module] - known for module, names in looked_at(lambda: read(model, layout)).items()
    }
    assert not {name: some for name, some in missing.items() if some}


def test_a_snapshot_keeps_nothing_alive() -> None:
    """Neither tensors nor modules: what is kept of a model between steps keeps no memory of it."""

    def held(value: Any) -> bool:
        nested = isinstance(value, list | tuple | dict | set | frozenset)
        return isinstance(value, Tensor | nn.Module) or (nested and any(map(held, value)))

    for build in BUILDS.values():
        model = build()
        assert not held(take(model, Layout(model)).facts)
        walked = [module for _, module in walk(model)]
        assert {id(module) for module in walked} <= {fact for fact in take(model, Layout(model)).facts
                                                     if isinstance(fact, int)}  # fmt: skip
