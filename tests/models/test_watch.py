"""A reading is done again when anything that it looked at is other than it was, and only then."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from lora_merge import InvalidInput, merged, names
from lora_merge.kernels.bindings import native
from lora_merge.models import snapshot
from lora_merge.models.peft.facts import _PROPERTIES
from lora_merge.models.snapshot import take
from lora_merge.models.watch import Look, Watch
from lora_merge.shards.layout import Layout
from tests.models.test_snapshot import BUILDS, CHANGES, UNKNOWN, looked_at, q_proj, read, set_on, two

pytestmark = pytest.mark.skipif(native.load_error() is not None, reason=str(native.load_error()))


class Linears(nn.Module):
    """A layer of many experts."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(count)])


def experts(count: int = 96) -> PeftModel:
    config = LoraConfig(r=2, target_modules=r"experts\.\d+", init_lora_weights=False)
    return get_peft_model(Linears(count), config)


def watched(model: nn.Module, *, adapters: bool = True) -> Any:
    """What is noted of a model that was read often enough."""
    for _ in range(3):
        take(model, None, adapters=adapters)
    noted = snapshot._noted[model][False, adapters]
    assert noted.watch is not None
    assert noted.again(model) is not None
    return noted


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("build", BUILDS)
def test_what_is_given_is_what_a_reading_gives(build: str, adapters: bool) -> None:
    model = BUILDS[build]()
    again = watched(model, adapters=adapters).again(model)
    snapshot._noted.clear()
    taken = take(model, None, adapters=adapters)
    assert again.facts == taken.facts
    assert again.kinds == taken.kinds
    for some, others in ((again.modules, taken.modules), (again.parameters, taken.parameters), (again[3], taken[3])):
        assert list(map(id, some)) == list(map(id, others))


@pytest.mark.parametrize("change", CHANGES.keys() - {"merged and unmerged by PEFT", *UNKNOWN})
def test_changes_are_seen(change: str) -> None:
    build, apply = CHANGES[change]
    model = build()
    noted = watched(model)
    apply(model)
    assert noted.again(model) is None


@pytest.mark.parametrize("build", BUILDS)
def test_all_that_reading_looks_at_is_watched(build: str) -> None:
    """Every attribute of every module, by what happens when it is another one: a new reader cannot forget it."""
    model = BUILDS[build]()
    noted, layout = watched(model), Layout(model)
    asked = looked_at(lambda: read(model, layout))
    modules = {id(module): module for module in model.modules()}
    missed = []
    for number, looked in asked.items():
        module = modules[number]
        inside, cls = vars(module), type(module)
        for name in looked - _PROPERTIES.keys():
            if callable(getattr(cls, name, None)) or isinstance(getattr(cls, name, None), property):
                continue  # of the class, which is watched
            before = inside.get(name)
            there = name in inside
            adapters = ("default", "one", "two")
            inside[name] = {key: object() for key in (*before, *adapters)} if isinstance(before, dict) else object()
            if noted.again(model) is not None:
                missed.append((cls.__name__, name))
            inside[name] = before
            if not there:
                del inside[name]
            if isinstance(before, dict) and name in ("_modules", "_parameters", "_buffers"):
                for key in list(before):
                    held = before[key]
                    before[key] = None if held is not None else nn.Linear(1, 1)
                    if noted.again(model) is not None:
                        missed.append((cls.__name__, f"{name}[{key}]"))
                    before[key] = held
    assert not missed
    assert noted.again(model) is not None


def layer(model: Any) -> Any:
    """One expert of many."""
    return model.base_model.model.experts[70]


class Told(nn.Linear):
    """What a property says of it is not what it holds."""

    @property
    def weight(self) -> Any:  # type: ignore[override]
        return self._parameters["weight"]

    @weight.setter
    def weight(self, value: Any) -> None:
        self.register_parameter("weight", value)


class Lying(nn.Linear):
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return {"_modules": {}, "_parameters": {}, "_buffers": {}}


class Keyed(OrderedDict[str, Any]):
    """A dict that a module's children are in."""


def moved(model: Any, name: str) -> None:
    part = getattr(layer(model), name)["default"]
    part.weight.data = part.weight.data.clone()


ONE_OF_MANY: dict[str, Callable[[Any], object]] = {
    "base replaced": lambda m: set_on(layer(m), base_layer=nn.Linear(4, 4, bias=False)),
    "the layer": lambda m: m.base_model.model.experts.__setitem__(70, nn.Linear(4, 4, bias=False)),
    "weight replaced": lambda m: set_on(layer(m).base_layer, weight=nn.Parameter(torch.ones(4, 4))),
    "weight moved": lambda m: set_on(layer(m).base_layer.weight, data=torch.ones(4, 4)),
    "weight transposed": lambda m: set_on(layer(m).base_layer.weight, data=layer(m).base_layer.weight.data.t()),
    "weight of another dtype": lambda m: set_on(
        layer(m).base_layer.weight, data=layer(m).base_layer.weight.data.view(torch.int32)
    ),
    "weight freed": lambda m: layer(m).base_layer.weight.untyped_storage().resize_(0),
    "lora_A moved": lambda m: moved(m, "lora_A"),
    "lora_B moved": lambda m: moved(m, "lora_B"),
    "scaling": lambda m: layer(m).scaling.update(default=3.0),
    "scaling by a tensor": lambda m: layer(m).scaling.update(default=torch.tensor(2.0)),
    "adapter added": lambda m: layer(m).lora_A.update({"more": nn.Linear(4, 2, bias=False)}),
    "active adapters in place": lambda m: layer(m)._active_adapter.append("default"),
    "merged in place": lambda m: layer(m).merged_adapters.append("default"),
    "disabled": lambda m: set_on(layer(m), _disable_adapters=True),
    "forward": lambda m: set_on(layer(m).base_layer, forward=lambda x: x),
    "forward of old": lambda m: set_on(layer(m).base_layer, _old_forward=lambda x: x),
    "variant": lambda m: layer(m).lora_variant.update(default=object()),
    "backend": lambda m: set_on(layer(m), quantization_backend="x"),
    "mesh": lambda m: set_on(layer(m).base_layer, _hf_device_mesh=object()),
    "buffer": lambda m: layer(m).base_layer.register_buffer("b", torch.ones(1)),
    "child": lambda m: layer(m).base_layer.register_module("c", nn.Linear(1, 1)),
    "parameter": lambda m: layer(m).base_layer.register_parameter("p", None),
    "class": lambda m: set_on(layer(m).base_layer, __class__=Told),
    "a dict of another class": lambda m: set_on(layer(m).base_layer, _parameters=Keyed(vars(layer(m).base_layer))),
    "parameters gone": lambda m: vars(layer(m).base_layer).pop("_parameters"),
}  # fmt: skip


@pytest.mark.parametrize("change", ONE_OF_MANY)
def test_one_of_many_is_seen(change: str) -> None:
    model = experts()
    noted = watched(model)
    ONE_OF_MANY[change](model)
    assert noted.again(model) is None


def test_what_only_looks_new_is_read_again_at_no_time() -> None:
    """Other objects for the same values: PEFT makes such ones wherever adapters are switched there and back."""
    model = two()
    noted = watched(model)
    for part in ("one", "two"):
        q_proj(model).scaling[part] = float(str(q_proj(model).scaling[part]))
    model.base_model.set_adapter(["one", "two"])
    with model.disable_adapter():
        assert noted.again(model) is None
    model.train()
    model.requires_grad_(False)
    assert noted.again(model) is not None


def test_a_number_that_comes_to_lie_where_another_was() -> None:
    """Python hands out the memory of a number that is gone to the next one at once."""
    model = experts(4)
    scaling = model.base_model.model.experts[2].scaling
    noted = watched(model)
    for _ in range(100):
        scaling["default"] = scaling["default"] + 1
        assert noted.again(model) is None


UNWATCHED: dict[str, Callable[[Any], object]] = {
    "children in a dict of another class": lambda base: set_on(base, _modules=Keyed(base._modules)),
    "a parameter of another class": lambda base: set_on(
        base, _parameters={"weight": nn.Parameter(torch.ones(4, 4).as_subclass(Named))}
    ),
    "a module that says it holds others": lambda base: set_on(base, __class__=Lying),
}


@pytest.mark.parametrize("what", UNWATCHED)
def test_what_cannot_be_watched_is_read_each_time(what: str) -> None:
    model = experts(4)
    UNWATCHED[what](model.base_model.model.experts[1].base_layer)
    facts = [take(model, None).facts for _ in range(4)]
    assert all(fact == facts[0] for fact in facts)
    assert snapshot._noted[model][False, True].watch is None
    model.base_model.model.experts[1].scaling["default"] = 9.0
    assert take(model, None).facts != facts[0]


def test_a_property_that_stands_for_a_parameter() -> None:
    model = experts(4)
    base = model.base_model.model.experts[1].base_layer
    base.__class__ = Told
    noted = watched(model)
    base.weight = nn.Parameter(torch.zeros(4, 4))
    assert noted.again(model) is None


class Named(torch.Tensor):
    """A tensor of a class of its own."""


def test_scaling_that_is_a_tensor_is_read_each_time() -> None:
    """Its value can change where it is."""
    model = experts(4)
    scaling = torch.tensor(0.5)
    model.base_model.model.experts[1].scaling["default"] = scaling
    weight = model.base_model.model.experts[1].base_layer.weight
    found = []
    for value in (0.5, 0.5, 0.5, 2.0):
        scaling.fill_(value)
        with merged(model):
            found.append(weight.detach().clone())
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[2], found[3])


def test_a_new_wrapper_class_is_looked_through() -> None:
    model = two()
    noted = watched(model)
    names.register_wrapper("somebody.Else", "inside")
    try:
        assert noted.again(model) is None
    finally:
        del names._WRAPPERS["somebody.Else"]
        names._kinds.clear()


def test_nothing_is_kept_alive_and_nothing_gone_is_touched() -> None:
    """Whatever goes away, in whatever order; and the memory is used for something else."""
    model: Any = experts(64)
    noted = watched(model)
    gone = weakref.ref(model.base_model.model.experts[5])
    for at in (63, 5, 0, 31):
        del model.base_model.model.experts[at]
        gc.collect()
        others = [nn.Linear(4, 4) for _ in range(200)]
        assert noted.again(model) is None
        del others
    assert gone() is None
    model.base_model.model = nn.Linear(2, 2)
    gc.collect()
    assert noted.again(model) is None
    assert noted.again(nn.Linear(2, 2)) is None
    there = weakref.ref(model)
    del model
    gc.collect()
    assert there() is None


def test_only_what_was_reached_can_be_noted() -> None:
    """Else it might be gone when it is looked at."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    children = Look([model], ("_modules",), "n")
    for looks in (
        [Look([model[0]], ("_parameters",), "n")],
        [children, Look([nn.Linear(1, 1)], ("_parameters",), "n")],
    ):
        watch = Watch(model)
        watch.look(*looks)
        assert not watch.done()
    watch = Watch(model)
    watch.look(children)
    watch.tensors([model[0].weight])
    assert not watch.done()
    watch = Watch(model)
    watch.look(children, Look(list(model), ("_parameters",), "n"))
    watch.tensors(list(model.parameters()))
    assert watch.done(list(model.parameters()))
    assert watch.again(model) == [list(model.parameters())]
    with pytest.raises(TypeError, match=r"Watch\.add takes 4 arguments, got 1"):
        native.compiled.Watch(model, torch.Tensor.__dlpack_c_exchange_api__).add([])


def test_without_compiled_code_all_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load_error", lambda: "none")
    model = experts(8)
    facts = [take(model, None).facts for _ in range(4)]
    assert all(fact == facts[0] for fact in facts)
    assert snapshot._noted[model][False, True].watch is None


def test_a_model_that_cannot_be_read_any_more_says_so() -> None:
    """Though there is a watch, which says nothing."""
    model = experts(8)
    for _ in range(3):
        with merged(model):
            pass
    assert snapshot._noted[model][False, True].watch is not None
    model.base_model.model.experts[3].scaling["default"] = float("inf")
    with pytest.raises(InvalidInput, match=r"experts\.3.*scaling must be finite"), merged(model):
        pass
