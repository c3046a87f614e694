"""`merged(model)`: what is inside, and that nothing is left of it after."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from backends import Backend
from helpers import assert_same_bits
from memory import Allocations
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lora_merge import (
    AlreadyMerged,
    InvalidInput,
    MergedWeights,
    NotRestored,
    UnsupportedAdapter,
    kept_merges,
    merged,
    merged_block,
    read_deltas,
)
from lora_merge.models.peft import live
from lora_merge.names import named_tensors
from lora_merge.restore import TrackedPlan

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


class Snapshot:
    """Everything of a model that must be as before: bits, identities, gradients, versions, PEFT's flags."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tensors = {
            name: (tensor, tensor.detach().clone(), tensor.data_ptr(), tensor.requires_grad, tensor.grad)
            for name, tensor in self._named()
        }
        self.versions = {name: t._version for name, t in self._named() if not t.is_inference()}
        self.gradients = {name: t.grad.clone() for name, t in self._named() if t.grad is not None}
        self.flags = self._flags()

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters(remove_duplicate=False)
        yield from self.model.named_buffers(remove_duplicate=False)

    def _flags(self) -> dict[str, Any]:
        """Every plain attribute of every module (`merged_adapters`, `_disable_adapters`, `scaling`, ...)."""
        hidden = {"_parameters", "_modules", "_buffers"}
        return {
            f"{name}:{key}": (id(value), repr(value) if isinstance(value, list | dict | str | bool) else None)
            for name, module in self.model.named_modules()
            for key, value in vars(module).items()
            if key not in hidden
        }

    def check(self) -> None:
        now = dict(self._named())
        assert list(now) == list(self.tensors)
        for name, (tensor, bits, address, requires_grad, grad) in self.tensors.items():
            assert now[name] is tensor, f"{name}: another object"
            assert tensor.data_ptr() == address, f"{name}: moved"
            assert tensor.requires_grad == requires_grad, name
            assert tensor.grad is grad, name
            assert_same_bits(tensor, bits, name)
        for name, version in self.versions.items():
            assert now[name]._version == version, f"{name}: version {now[name]._version}, before {version}"
        for name, gradient in self.gradients.items():
            assert_same_bits(now[name].grad, gradient, f"gradient of {name}")
        assert self._flags() == self.flags


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    before = Snapshot(model)
    try:
        yield
    finally:
        before.check()


def plant(model: nn.Module) -> None:
    """NaN with a payload, -infinity (NaN in fp16), -0.0 and a subnormal into every base weight."""
    special = {2: [0x7FC1, -0x80, -0x8000, 0x0001], 4: [0x7FC00123, -0x800000, -0x80000000, 1]}
    words = {2: torch.int16, 4: torch.int32}
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            flat, size = parameter.data.view(-1), parameter.element_size()
            flat[:4] = torch.tensor(special[size], dtype=words[size]).view(parameter.dtype)


def experts() -> PeftModel:
    return models.with_lora(models.qwen3_moe, target_modules=["q_proj"], target_parameters=EXPERTS)


SUBJECTS: dict[str, Callable[[], PeftModel]] = {
    "fp32": lambda: models.with_lora(models.qwen2),
    "bf16": lambda: models.with_lora(models.qwen2, dtype=torch.bfloat16),
    "fp16 dora": lambda: models.with_lora(models.qwen2, dtype=torch.float16, use_dora=True),
    "two adapters": lambda: models.with_lora(models.qwen2, adapters=("one", "two")),
    "conv1d, tied embedding": lambda: models.with_lora(models.gpt2, target_modules=["c_attn", "wte"]),
    "head and embedding tied": lambda: models.with_lora(
        lambda: models.qwen2(tied=True), target_modules=["lm_head", "embed_tokens", "q_proj"]
    ),
    "experts": experts,
    "convolutions": lambda: models.with_lora(models.Convolutions, target_modules=models.CONVOLUTIONS),
    "disabled": lambda: disabled(models.with_lora(models.qwen2)),
}


def disabled(model: PeftModel) -> PeftModel:
    model.base_model.disable_adapter_layers()
    return model


# ---- nothing is left -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", SUBJECTS)
def test_everything_comes_back(subject: str) -> None:
    """Bits (NaN payloads and -0.0 too), identities, gradients, versions, flags."""
    model = SUBJECTS[subject]()
    loss = model(models.tokens()).logits if subject != "convolutions" else model(torch.randn(2, 3, 7, 7, 7))
    if loss.requires_grad:
        loss.float().square().mean().backward()
    plant(model)
    with unchanged(model), merged(model) as inside:
        assert inside is model


STEPS = [
    (merged_block._Restore, "_check_memory"),
    (TrackedPlan, "unmerge"),
    (merged_block._Restore, "_put"),
    (live.Peft, "on"),
    (live.Peft, "reshard"),
]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
def test_an_interrupt_on_the_way_out(owner: type, step: str, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C waits until everything is back."""
    model = models.with_lora(lambda: models.qwen2(tied=True), target_modules=["lm_head", "q_proj"])
    real, due = getattr(owner, step), [False]

    def interrupted(self: Any, *arguments: Any) -> Any:
        result = real(self, *arguments) if after else None
        if due.pop():
            due.append(False)
            raise KeyboardInterrupt(step)
        due.append(False)
        return result if after else real(self, *arguments)

    monkeypatch.setattr(owner, step, interrupted)
    with unchanged(model):
        with pytest.raises(KeyboardInterrupt, match=step), merged(model):
            due[0] = True
        with merged(model):
            pass


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_exception_inside(error: type[BaseException]) -> None:
    model = models.with_lora(models.qwen2)
    with unchanged(model):
        with pytest.raises(error, match="mine"), merged(model):
            raise error("mine")
        adapter = models.outputs(model)
    with unchanged(model), merged(model):
        torch.testing.assert_close(models.outputs(model), adapter)


@pytest.mark.parametrize("tied", [False, True])
def test_failure_while_merging(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch fails after it has written: all is put back."""
    model = models.with_lora(lambda: models.qwen2(tied=tied), target_modules=["lm_head", "q_proj"])
    merge = TrackedPlan.merge

    def fails(plan: TrackedPlan, *arguments: Any) -> None:
        merge(plan, *arguments)
        raise RuntimeError("the launch failed")

    monkeypatch.setattr(TrackedPlan, "merge", fails)
    with unchanged(model), pytest.raises(RuntimeError, match="the launch failed"), merged(model):
        raise AssertionError("the body ran")
    monkeypatch.undo()
    with unchanged(model), merged(model):
        pass


def test_out_of_memory_while_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever allocation of the way back fails: nothing is changed, and the next entry works."""
    model = models.with_lora(models.qwen2)
    with merged(model):
        pass
    empty, calls = torch.empty, [0]

    def failing(*args: Any, **kwargs: Any) -> Tensor:
        calls[0] -= 1
        if calls[0] == 0:
            raise torch.OutOfMemoryError("no room")
        return empty(*args, **kwargs)

    for fails_at in (1, 2):
        with unchanged(model), monkeypatch.context() as patch:
            calls[0] = fails_at
            patch.setattr(torch, "empty", failing)
            with pytest.raises(torch.OutOfMemoryError), merged(model):
                raise AssertionError("the body ran")
        with unchanged(model), merged(model):
            pass


def test_a_thousand_entries() -> None:
    """A peer's bug: weights drift when adapters are merged and subtracted again, cycle after cycle."""
    model = models.with_lora(models.qwen2, dtype=torch.bfloat16, target_modules=["q_proj", "down_proj"])
    adapter = models.outputs(model)
    with unchanged(model):
        with merged(model):
            first = models.outputs(model)
        for _ in range(1000):
            with merged(model):
                pass
        with merged(model):
            assert torch.equal(models.outputs(model), first)
    assert torch.equal(models.outputs(model), adapter)


def test_training_goes_on_as_if_nothing_happened() -> None:
    """Steps with `merged` between them equal steps without, optimizer state included."""

    def train(between: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
        model = models.with_lora(models.qwen2, lora_dropout=0.1, modules_to_save=["lm_head"]).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(3):
            torch.manual_seed(step)
            loss = model(models.tokens(step)).logits.square().mean()
            if between:  # a graph is waiting for its backward pass
                with torch.random.fork_rng(), merged(model):
                    models.outputs(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        moments = [value for state in optimizer.state.values() for value in state.values()]
        return model.state_dict(), moments

    (plain, plain_moments), (between, between_moments) = train(False), train(True)
    assert list(plain) == list(between)
    for name, tensor in plain.items():
        assert_same_bits(between[name], tensor, name)
    for mine, theirs in zip(between_moments, plain_moments, strict=True):
        assert_same_bits(mine, theirs, "optimizer state")


# ---- inside ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_modes(mode: Callable[[], Any], train: bool) -> None:
    """Entered in any grad mode; in train mode the merged weights have no adapter dropout."""
    model = models.with_lora(models.qwen2, lora_dropout=0.5)
    adapter = models.outputs(model)
    model.train(train)
    with unchanged(model), mode(), merged(model):
        torch.testing.assert_close(models.outputs(model), adapter)
        torch.testing.assert_close(model(models.tokens()).logits.detach(), adapter)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_every_backend(backend: Backend, dora: bool) -> None:
    model = models.with_lora(models.qwen2, target_modules=["q_proj", "v_proj"], use_dora=dora).to(backend.device)
    x = models.tokens().to(backend.device)
    with torch.no_grad(), unchanged(model):
        adapter = model(x).logits
        with merged(model):
            torch.testing.assert_close(model(x).logits, adapter)


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = models.with_lora(models.qwen2)
        adapter = models.outputs(model)
    with unchanged(model), merged(model):
        torch.testing.assert_close(models.outputs(model), adapter)
    with torch.inference_mode(), unchanged(model), merged(model):
        torch.testing.assert_close(models.outputs(model), adapter)


def test_weights_moved_inside() -> None:
    """The saved bits go to where the parameters are."""
    model = models.with_lora(models.qwen2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with merged(model):
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, before[name], name)


@pytest.mark.parametrize("how", ["data", "swap_tensors"])
def test_weights_that_change_places_inside(how: str) -> None:
    """Each parameter gets its own base, where it is then: that of one is not written over the other's, yet unread."""
    model = models.with_lora(models.qwen2, target_modules=["q_proj"])
    weights = [p for name, p in model.named_parameters() if name.endswith("q_proj.base_layer.weight")]
    one, two = (weight.detach().clone() for weight in weights)
    first, second = weights
    with merged(model):
        if how == "data":
            first.data, second.data = second.data, first.data
        else:
            torch.utils.swap_tensors(first, second)
    for weight, base in zip(weights, (one, two), strict=True):
        assert_same_bits(weight, base, how)


def test_adapters_changed_inside() -> None:
    """The way back reads the adapters as they were on entry, whatever becomes of them."""
    for subject in (experts(), *(models.with_lora(models.qwen2, **options) for options in (
        {"use_dora": True}, {"adapters": ("one", "two")}, {"target_modules": ["q_proj"], "lora_bias": True}
    ))):  # fmt: skip
        base = {name: p.clone() for name, p in subject.named_parameters() if "lora_" not in name}
        with merged(subject):
            inside = {name: p.clone() for name, p in subject.named_parameters() if "lora_" not in name}
            for name, p in subject.named_parameters():
                if "lora_" in name:
                    p.data.normal_()  # a training step, or another adapter loaded into the same tensors
                    p.data = torch.full_like(p, torch.nan)  # and into new ones
            for module in subject.modules():
                if isinstance(module, LoraLayer):
                    module.scaling = dict.fromkeys(module.scaling, 1e3)
            for name, p in subject.named_parameters():
                if name in inside:
                    assert_same_bits(p, inside[name], name)
        for name, p in subject.named_parameters():
            if name in base:
                assert_same_bits(p, base[name], name)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "an optimizer": lambda p: torch.optim.SGD([p], lr=0.1).step(lambda: p.square().sum().backward()),
    "through .data": lambda p: p.data[0].zero_(),
    "through numpy": lambda p: p.detach().numpy().view("int32").__setitem__((1, 3), 1),
    "negated": lambda p: p.data.neg_(),
    "rows exchanged": lambda p: p.data.copy_(p.data.flip(0)),
    "all NaN": lambda p: p.data.fill_(torch.nan),
}


@pytest.mark.parametrize("write", WRITES)
def test_weights_written_inside(write: str) -> None:
    """The base of what was written is lost: that is an error which names it, and all other weights are restored."""
    model = models.with_lora(models.qwen2)
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    weight = layer.base_layer.weight.requires_grad_()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    saved, left = weight.square().sum(), []

    def damage() -> None:
        WRITES[write](weight)
        left.append(weight.detach().clone())

    with (
        pytest.raises(NotRestored, match=r"^model\.layers\.1\.mlp\.down_proj\.weight: written while merged"),
        merged(model),
    ):
        damage()
    assert_same_bits(weight, left[0], "what was written stays")
    for name, p in model.named_parameters():
        if p is not weight:
            assert_same_bits(p, before[name], name)
    # Nor does autograd take it for the base.
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
    weight.data.copy_(before["base_model.model.model.layers.1.mlp.down_proj.base_layer.weight"])
    with unchanged(model), merged(model):
        pass


def test_written_inside_and_an_error_of_the_body() -> None:
    model = models.with_lora(models.qwen2)
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight

    def body() -> None:
        weight.data.zero_()
        raise ValueError("mine")

    with pytest.raises(NotRestored, match="q_proj") as caught, merged(model):
        body()
    assert isinstance(caught.value.__context__, ValueError)


REPLACED: dict[str, Callable[[nn.Module, nn.Linear], object]] = {
    "assigned": lambda model, linear: setattr(linear, "weight", nn.Parameter(linear.weight.clone())),
    "load_state_dict": lambda model, linear: model.load_state_dict(
        {name: t.clone() for name, t in model.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("way", REPLACED)
@pytest.mark.parametrize("again", [False, True], ids=["first entry", "later entry"])
def test_another_parameter_inside(way: str, again: bool) -> None:
    """It would go on holding merged values, and the adapter would count twice from there on."""
    model = models.with_lora(models.qwen2)
    if again:
        with merged(model):
            pass
    linear = model.base_model.model.model.layers[1].mlp.down_proj.base_layer
    before, bits = linear.weight, linear.weight.detach().clone()
    with pytest.raises(NotRestored, match=r"layers\.1\.mlp\.down_proj\.weight.*another Parameter"), merged(model):
        REPLACED[way](model, linear)
    assert_same_bits(before, bits, "the parameter that was there before")


def test_a_parameter_inside_that_shares_its_memory_or_is_gone() -> None:
    """What is said fits: values in the same memory are the base's again, and of none there is nothing to load."""
    for other in (lambda weight: nn.Parameter(weight.data), lambda weight: None):
        model = models.with_lora(models.qwen2)
        linear = model.base_model.model.model.layers[1].mlp.down_proj.base_layer
        before, bits = linear.weight, linear.weight.detach().clone()
        told = (
            r"another Parameter, or none, took their place .*only those that were there before get the base back\. "
            r"What lies in memory of its own was put there inside, merged or not: load that again\. "
        )
        with pytest.raises(NotRestored, match=told), merged(model):
            linear.weight = other(linear.weight)
        for there in (before, linear.weight):
            assert_same_bits(before if there is None else there, bits, "what holds the memory")


def test_memory_given_back_inside() -> None:
    """Nothing is written to an address that is somebody else's now."""
    model = models.with_lora(models.qwen2)
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    base = weight.detach().clone()
    with pytest.raises(NotRestored, match=r"^model\.layers\.0\.self_attn\.q_proj\.weight: the memory"), merged(model):
        weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(base.nbytes)
    weight.data.copy_(base)
    with unchanged(model), merged(model):
        pass


def test_generate() -> None:
    """Greedy tokens of the adapter, with the cache."""
    model = models.with_lora(models.qwen2)
    options = {"max_new_tokens": 12, "do_sample": False}
    wanted = model.generate(models.tokens(), **options)
    with merged(model):
        assert torch.equal(model.generate(models.tokens(), **options), wanted)


@pytest.mark.parametrize("whole", [True, False], ids=["model compiled", "layers compiled"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_compiled_modules(whole: bool, tied: bool) -> None:
    """One graph outside and one inside; entries after that compile nothing."""
    torch._dynamo.reset()
    model = models.with_lora(lambda: models.qwen2(tied), target_modules=["q_proj", "lm_head"])
    adapter = models.outputs(model)
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    called = model
    if whole:
        called = torch.compile(model, backend=backend)
    else:
        layers = model.base_model.model.model.layers
        for index, layer in enumerate(layers):
            layers[index] = torch.compile(layer, backend=backend)
    with unchanged(model):
        compiled = []
        for _ in range(3):
            torch.testing.assert_close(models.outputs(called), adapter)
            with merged(called):
                torch.testing.assert_close(models.outputs(called), adapter)
            compiled.append(len(graphs))
    assert compiled[0] == compiled[1] == compiled[2], f"graphs after each round: {compiled}"


def test_lazily_read_tensors() -> None:
    """A peer's bug: a generator of weights that is consumed after the restore sends the base without the adapter.

    Read inside, it yields merged values; what is read after is the base, which is what `MergedWeights` is for.
    """
    model = models.with_lora(models.qwen2)
    base = {t.name: t.tensor.detach().clone() for t in named_tensors(model)}
    with merged(model):
        inside = {t.name: t.tensor.detach().clone() for t in named_tensors(model)}
        late = named_tensors(model)
        next(late)
    changed = {name for name, tensor in inside.items() if not torch.equal(tensor, base[name])}
    assert changed == {delta.name for delta in read_deltas(model)}
    assert all(torch.equal(t.tensor, base[t.name]) for t in late)


def test_backward_does_not_cross_the_border() -> None:
    """Gradients of other weights than the forward saw would be silently wrong: autograd refuses."""
    model = models.with_lora(models.qwen2)

    def loss() -> Tensor:
        embeddings = model.get_input_embeddings()(models.tokens()).detach().requires_grad_()
        return model(inputs_embeds=embeddings).logits.square().mean()

    outside = loss()
    with merged(model):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            outside.backward()
        loss().backward()
        inside = loss()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        inside.backward()
    loss().backward()
    # Nor into the next block, nor where a step on the base has moved its version on as far as a block does.
    with merged(model):
        inside, other = loss(), loss()
    with merged(model), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        inside.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


# ---- tied weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]], ids="+".join)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_tied_weights(targets: list[str], dora: bool) -> None:
    """Bug of the peers: the head not updated, or updated with the embedding's adapter."""
    model = models.with_lora(lambda: models.qwen2(tied=True), target_modules=[*targets, "q_proj"], use_dora=dora)
    base = model.base_model.model

    def weights() -> dict[str, Tensor]:
        found = {t.name: t.tensor for t in named_tensors(model)}
        return {"lm_head": found["lm_head.weight"], "embed_tokens": found["model.embed_tokens.weight"]}

    adapter, before = models.outputs(model), weights()["lm_head"].detach().clone()
    assert weights()["lm_head"] is weights()["embed_tokens"], "the model is not tied; then this test shows nothing"
    with unchanged(model):
        with merged(model):
            torch.testing.assert_close(models.outputs(model), adapter)
            assert weights()["lm_head"].data_ptr() != weights()["embed_tokens"].data_ptr()
            for name, weight in weights().items():
                assert torch.equal(weight, before) == (name not in targets), name
        assert weights()["lm_head"] is weights()["embed_tokens"]
        assert base.get_input_embeddings().weight is base.get_output_embeddings().weight
        assert torch.equal(models.outputs(model), adapter)


def test_tied_weights_without_an_adapter_stay_tied() -> None:
    model = models.with_lora(lambda: models.qwen2(tied=True), target_modules=["q_proj"])
    with unchanged(model), merged(model):
        assert model.base_model.model.lm_head.weight is model.base_model.model.model.embed_tokens.weight


def test_weights_tied_by_address() -> None:
    """Two parameters on one memory, as some loaders leave them."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))
    net[2].weight.data = net[0].weight.data
    model = get_peft_model(net, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    x = torch.randn(3, 6)
    adapter = model(x)
    with unchanged(model), merged(model):
        torch.testing.assert_close(model(x), adapter)


def linear(weight: Tensor) -> nn.Linear:
    """On memory that something else may have too."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    module.weight.data = weight.data
    return module


def two_on_one_memory(view: Callable[[Tensor], Tensor], adapted: int) -> PeftModel:
    torch.manual_seed(0)
    whole = linear(torch.randn(6, 6))
    net = nn.Sequential(whole, linear(view(whole.weight)))
    return get_peft_model(net, LoraConfig(r=2, target_modules=[str(adapted)], init_lora_weights=False))


@pytest.mark.parametrize("adapted", [0, 1])
@pytest.mark.parametrize(
    "view",
    [lambda w: w[:4].t(), Tensor.t, lambda w: w[:4], lambda w: w[2:], lambda w: w[:, 3:]],
    ids=["other shape", "transposed", "first rows", "last rows", "last columns"],
)
def test_memory_shared_in_another_view(view: Callable[[Tensor], Tensor], adapted: int) -> None:
    """What cannot be held apart is refused, wherever in the memory it begins."""
    model = two_on_one_memory(view, adapted)
    told = rf"{1 - adapted}\.weight, .*in the memory of .*{adapted}\.weight.* of its own"
    with unchanged(model), pytest.raises(UnsupportedAdapter, match=told), merged(model):
        pass


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_in_the_memory_of_a_weight(persistent: bool) -> None:
    model = two_on_one_memory(Tensor.clone, 1)
    net = model.base_model.model
    net.register_buffer("row", net[1].base_layer.weight.data[3], persistent=persistent)
    with unchanged(model), pytest.raises(UnsupportedAdapter, match=r"row, .*in the memory of 1\.weight"), merged(model):
        pass


def test_weights_side_by_side_in_one_memory() -> None:
    """As fused ones are: their bytes take turns, and no element is in both."""
    torch.manual_seed(0)
    both = torch.randn(6, 12)
    net = nn.Sequential(linear(both[:, :6]), linear(both[:, 6:]))
    model = get_peft_model(net, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    x = torch.randn(3, 6)
    adapter = model(x)
    with unchanged(model), merged(model):
        torch.testing.assert_close(model(x), adapter)


# ---- plans, memory ---------------------------------------------------------------------------------------------------


def test_plan_serves_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steady entries build nothing; an adapter that was reloaded, a moved weight, another scaling do."""
    built = []
    init = TrackedPlan.__init__
    monkeypatch.setattr(TrackedPlan, "__init__", lambda *args, **given: (built.append(1), init(*args, **given))[1])
    model = models.with_lora(models.qwen2, adapters=("one", "two"))
    layers = model.base_model.model.model.layers
    layer = layers[1].mlp.up_proj

    def step() -> int:
        before = len(built)
        adapter = models.outputs(model)
        with unchanged(model), merged(model):
            torch.testing.assert_close(models.outputs(model), adapter)
        return len(built) - before

    assert [step(), step()] == [1, 0]
    layer.lora_B["one"].weight.data.mul_(2)  # a training step: values, not addresses
    assert step() == 0
    changes: dict[str, Callable[[], object]] = {
        "scaling": lambda: layer.set_scale("one", 2.0),
        "active adapters": lambda: model.set_adapter("two"),
        "adapter replaced": lambda: setattr(layer.lora_A["two"], "weight", nn.Parameter(torch.randn(5, 32))),
        "base moved": lambda: setattr(layer.base_layer.weight, "data", layer.base_layer.weight.data.clone()),
        "base converted": lambda: setattr(
            layer.base_layer.weight, "data", layer.base_layer.weight.data.double().float()
        ),
        "module removed": lambda: setattr(layers[0].mlp, "up_proj", layers[0].mlp.up_proj.base_layer),
    }
    kept = []  # freed memory would come back under the same address, which a plan may well serve
    for what, change in changes.items():
        kept.append([parameter.data for parameter in model.parameters()])
        change()
        assert step() == 1, what
        assert step() == 0, what


def test_offloaded_weights_are_freed() -> None:
    """Between entries nothing holds the weights: a trainer that moves them away gets the memory back."""
    model = models.with_lora(models.qwen2)
    with merged(model):
        pass
    old = [StorageWeakRef(delta.weight.pieces[0].tensor.untyped_storage()) for delta in read_deltas(model)]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    gc.collect()
    assert all(reference.expired() for reference in old)
    with unchanged(model), merged(model):
        pass


def test_model_is_freed() -> None:
    model = models.with_lora(models.qwen2)
    with merged(model):
        pass
    assert len(kept_merges._kept) >= 1
    old = StorageWeakRef(read_deltas(model)[0].weight.pieces[0].tensor.untyped_storage())
    del model
    gc.collect()
    assert old.expired()


@pytest.mark.parametrize("tied", [False, True])
def test_memory(tied: bool) -> None:
    """Inside, two bits an element and what escapes, and a copy of a tied weight; after, nothing of that size."""
    targets = ["embed_tokens", "q_proj", "down_proj"]
    model = models.with_lora(lambda: models.qwen2(tied=tied), dtype=torch.bfloat16, target_modules=targets)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            parameter.data.mul_(1e-3)  # updates of less than a tenth of the weights
    shards = {delta.name: delta.weight for delta in read_deltas(model)}
    weights, apart = sum(w.nbytes for w in shards.values()), tied * shards["model.embed_tokens.weight"].nbytes
    # Codes are of whole panels, 32 columns with AVX-512.
    padded = sum(w.nbytes // w.shape[1] * -(-w.shape[1] // 32) * 32 for w in shards.values())
    with merged(model):
        pass
    with Allocations() as allocations:
        assert allocations.held() == 0
        with merged(model):
            inside = allocations.held()
        after = allocations.held()
    known = {p.untyped_storage()._cdata for p in model.parameters()}
    views = sum(size for key, (_, size) in allocations.seen.items() if key in known)
    held = inside - views - apart
    assert 0.125 * weights <= held <= 0.15 * padded, f"{held} of {weights} bytes, and {apart} of a tied weight"
    assert after - views <= 1024


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_options() -> None:
    model = models.with_lora(models.qwen2)
    with unchanged(model):
        with (
            pytest.raises(InvalidInput, match="restore must be one of exact, got 'fast'"),
            merged(model, restore="fast"),
        ):  # type: ignore[arg-type]
            pass
        with pytest.warns(DeprecationWarning, match="leave it out") as told, merged(model, restore="exact"):
            pass
        assert told[0].filename == __file__
        with (
            pytest.raises(InvalidInput, match=r"strategy must be None.*got 'gather'"),
            merged(model, strategy="gather"),
        ):
            pass


def test_bare_model() -> None:
    """A peer's bug: the adapter is never delivered, and nobody notices."""
    with pytest.raises(InvalidInput, match="no LoRA layers"), merged(models.qwen2()):
        pass


@pytest.mark.parametrize("again", ["itself", "its base", "in another thread", "with adapters off"])
def test_entering_twice(again: str) -> None:
    model = models.with_lora(models.qwen2)
    if again == "with adapters off":
        model.base_model.disable_adapter_layers()
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            with merged(model.base_model.model if again == "its base" else model):
                pass
        except BaseException as error:
            errors.append(error)

    with unchanged(model), merged(model):
        if again == "in another thread":
            thread = threading.Thread(target=enter)
            thread.start()
            thread.join()
        else:
            enter()
        assert [type(error) for error in errors] == [AlreadyMerged]
        assert "merged()" in str(errors[0])
        if again != "with adapters off":
            with pytest.raises(AlreadyMerged):  # nor can the adapters be read, and added a second time
                read_deltas(model)
    with unchanged(model), merged(model):
        pass


def test_models_that_share_weights() -> None:
    """The second would merge on top of the first."""
    base = models.qwen2()
    one = models.with_lora(lambda: base)
    two = models.with_lora(models.qwen2)
    two.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight = base.model.layers[0].mlp.up_proj.weight
    with merged(one), unchanged(two), pytest.raises(AlreadyMerged, match="shares weights"), merged(two):
        pass


def test_a_stream_and_a_block_exclude_each_other() -> None:
    """The stream would go on with merged weights, to which its plans add the adapters once more."""
    model = models.with_lora(models.qwen2)
    wanted = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    begun = iter(MergedWeights(model, bucket_bytes=4096))
    next(begun)
    with unchanged(model), pytest.raises(InvalidInput, match=r"is under way.*before merged"), merged(model):
        raise AssertionError("the body ran")
    for (name, tensor), _ in zip(begun, range(3), strict=False):
        assert_same_bits(tensor, wanted[name], name)
    begun.close()
    for adapters in (True, False):
        weights = MergedWeights(model, adapters=adapters)
        for _ in range(2):  # the second time with plans that stand
            with merged(model), pytest.raises(AlreadyMerged):
                dict(weights)
            for name, tensor in weights:
                assert not adapters or torch.equal(tensor, wanted[name]), name
        model.merge_adapter()
        with pytest.raises(AlreadyMerged, match="unmerge_adapter"):
            dict(weights)
        model.unmerge_adapter()
        wanted = {name: tensor.clone() for name, tensor in MergedWeights(model)}


def test_a_stream_beside_a_thread_that_merges() -> None:
    """Each stream is right or refused, and so is each block."""
    model = models.with_lora(models.qwen2)
    wanted = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    over, refused = threading.Event(), 0

    def merge() -> None:
        while not over.is_set():
            with suppress(InvalidInput), merged(model):
                pass

    thread = threading.Thread(target=merge)
    thread.start()
    try:
        for _ in range(40):
            try:
                found = {name: tensor.clone() for name, tensor in MergedWeights(model, bucket_bytes=1 << 14)}
            except (AlreadyMerged, InvalidInput):
                refused += 1
            else:
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    finally:
        over.set()
        thread.join()
    with unchanged(model), merged(model):
        pass


USES: dict[str, tuple[str, Callable[[PeftModel, MergedWeights], object]]] = {
    "a stream": ("parts", lambda model, weights: dict(weights)),
    "a block": ("adapters", lambda model, weights: merged(model).__enter__()),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("targets", [["lm_head"], ["lm_head", "embed_tokens"]], ids="+".join)
def test_a_model_that_is_looked_at_while_a_thread_merges(
    use: str, targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied weights are apart then; the thread has left its block by the time that a claim is made."""
    model = models.with_lora(lambda: models.qwen2(tied=True), target_modules=[*targets, "q_proj"])
    wanted = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    weights, apart, seen = MergedWeights(model), threading.Event(), threading.Event()
    merges_for, (method, begin) = merged_block.merges_for, USES[use]
    look = getattr(live.Peft, method)

    def waiting(*args: Any) -> Any:
        apart.set()
        assert seen.wait(60)
        return merges_for(*args)

    def merge() -> None:
        with merged(model):
            pass

    def looking(self: live.Peft, **options: Any) -> Any:
        monkeypatch.setattr(live.Peft, method, look)
        thread = threading.Thread(target=merge)
        thread.start()
        assert apart.wait(60)
        found = look(self, **options)
        seen.set()
        thread.join()
        return found

    monkeypatch.setattr(merged_block, "merges_for", waiting)
    monkeypatch.setattr(live.Peft, method, looking)
    with unchanged(model), pytest.raises(AlreadyMerged):
        begin(model, weights)
    for _ in range(2):  # nor is anything kept of what was seen
        with merged(model):
            pass
        for name, tensor in weights:
            assert_same_bits(tensor, wanted[name], name)


def test_peft_cannot_merge_inside(tmp_path: Path) -> None:
    """PEFT would add the adapter again, or subtract it from weights that it did not merge."""
    model = models.with_lora(models.qwen2, adapters=("one", "two"))
    model.set_adapter("one")

    def forward_without_adapter() -> None:
        with model.disable_adapter():
            models.outputs(model)

    actions: dict[str, Callable[[], object]] = {
        "merge_adapter": model.merge_adapter,
        "merge another": lambda: model.merge_adapter(["two"]),
        "unmerge_adapter": model.unmerge_adapter,
        "set_adapter": lambda: model.base_model.set_adapter("two"),
        "disable_adapter": forward_without_adapter,
        "save_pretrained": lambda: model.save_pretrained(tmp_path),
        "of the base": lambda: model.get_base_model().save_pretrained(tmp_path),
        "of a part": lambda: model.base_model.model.model.save_pretrained(tmp_path),
        "of a compiled one": lambda: torch.compile(model.get_base_model()).save_pretrained(tmp_path),
        "push_to_hub": lambda: model.get_base_model().push_to_hub("nobody/nothing"),
        "merge_and_unload": lambda: model.merge_and_unload(),
        "unload": lambda: model.unload(),
        "unload of LoraModel": lambda: model.base_model.unload(),
        "add_adapter": lambda: model.add_adapter("three", LoraConfig(target_modules=["k_proj"])),
        "load_adapter": lambda: model.load_adapter(str(tmp_path), "three"),
        "add_weighted_adapter": lambda: model.base_model.add_weighted_adapter(["one", "two"], [1.0, 1.0], "three"),
        "inject_adapter": lambda: model.base_model.inject_adapter(model.get_base_model(), "one"),
    }
    adapter = models.outputs(model)
    for name, action in actions.items():
        with merged(model):
            with pytest.raises(AlreadyMerged, match="leave the block before"):
                action()
            model.base_model.enable_adapter_layers()
            torch.testing.assert_close(models.outputs(model), adapter, msg=name)
        assert torch.equal(models.outputs(model), adapter), name
    assert list(model.peft_config) == ["one", "two"]
    assert not list(tmp_path.iterdir())
    model.get_base_model().save_pretrained(tmp_path)  # after the block
    model.merge_adapter()  # PEFT's own merging works again
    torch.testing.assert_close(models.outputs(model), adapter)
    model.unmerge_adapter()


def test_a_base_that_adapters_were_injected_into_cannot_be_saved_inside(tmp_path: Path) -> None:
    """As transformers does it; and a part of a model that is no PeftModel."""
    model = inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False), models.qwen2())
    for entered in (model, nn.ModuleList([model])):
        with merged(entered):
            for saver in (model.save_pretrained, model.model.save_pretrained):
                with pytest.raises(AlreadyMerged, match="save_pretrained"):
                    saver(tmp_path)
    assert not list(tmp_path.iterdir())
    model.save_pretrained(tmp_path)


def test_attributes_that_a_model_has_itself_stay() -> None:
    """A save_pretrained of a trainer's own, on the instance: it is back after a block, and after a refused one."""
    model = models.with_lora(models.qwen2)
    model.save_pretrained = own = print
    with unchanged(model):
        with merged(model):
            assert model.save_pretrained is not own
            with pytest.raises(AlreadyMerged), merged(model):
                pass
            with pytest.raises(AlreadyMerged, match="leave the block"):
                model.save_pretrained("nowhere")
        begun = iter(MergedWeights(model))
        next(begun)
        with pytest.raises(InvalidInput, match="stream"), merged(model):
            pass
        begun.close()
    assert model.save_pretrained is own


def test_an_error_late_in_the_model_changes_nothing() -> None:
    """Everything is checked before the first byte is written."""
    model = models.with_lora(models.qwen2)
    layer = model.base_model.model.model.layers[1].mlp.down_proj
    layer.base_layer.weight = nn.Parameter(layer.base_layer.weight.data.to(torch.int8), requires_grad=False)
    with unchanged(model), pytest.raises(UnsupportedAdapter, match=r"layers\.1\.mlp\.down_proj"), merged(model):
        pass


@pytest.mark.parametrize("subject", SUBJECTS)
def test_nothing_is_left_to_the_garbage_collector(subject: str) -> None:
    """What an entry holds goes when the block is left, not when Python next looks for circles: that is memory."""
    model = SUBJECTS[subject]()
    for _ in range(2):
        with merged(model):
            pass

    def held() -> int:
        plain = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.layout == torch.strided]
        tensors = [t for t in plain if t.device.type == "cpu"]  # not those of other tests that have no memory
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    gc.collect()
    gc.disable()
    try:
        before = held()
        for _ in range(3):
            with merged(model):
                pass
        assert held() == before
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("subject", SUBJECTS)
def test_on_the_gpu(subject: str) -> None:
    model = SUBJECTS[subject]().to("cuda")
    plant(model)
    held = [delta.weight.pieces[0].tensor for delta in read_deltas(model)]
    weights = sum(t.nbytes for t in {t.data_ptr(): t for t in held}.values())
    with merged(model):
        pass
    with unchanged(model):
        before = torch.cuda.memory_allocated()
        with merged(model):
            inside = torch.cuda.memory_allocated() - before
        after = torch.cuda.memory_allocated() - before
    # Tiles of 4096 elements, and 512 bytes the allocator's least: small models take more than their share.
    assert inside <= 2 * weights + 2048 * len(list(model.parameters()))
    assert after == 0


@pytest.mark.gpu
def test_memory_on_the_gpu() -> None:
    """A layer of a size that counts: 2 bits an element, 1/64 and the words of each tile."""
    model = get_peft_model(
        nn.Sequential(nn.Linear(4096, 4096, dtype=torch.bfloat16)), LoraConfig(r=16, target_modules=["0"])
    ).to("cuda")
    weight = model.base_model.model[0].base_layer.weight
    model.base_model.model[0].lora_B["default"].weight.data.normal_(std=1e-3)
    with merged(model):
        pass
    with unchanged(model):
        before = torch.cuda.memory_allocated()
        with merged(model):
            inside = torch.cuda.memory_allocated() - before
        assert torch.cuda.memory_allocated() == before
    assert inside <= 0.15 * weight.nbytes


@pytest.mark.gpu
def test_weights_written_inside_on_the_gpu() -> None:
    model = models.with_lora(models.qwen2).to("cuda")
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for write in (lambda: weight.data[3, 5].add_(1e-3), lambda: weight.data.neg_(), lambda: weight.data.zero_()):
        with pytest.raises(NotRestored, match=r"q_proj\.weight: written while merged"), merged(model):
            write()
        for name, p in model.named_parameters():
            if p is not weight:
                assert_same_bits(p, before[name], name)
        weight.data.copy_(before["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"])
    with unchanged(model), merged(model):
        pass


def sum_of(queue: Any, answers: Any) -> None:
    answers.put(float(queue.get().double().sum()))


def test_a_weight_that_is_sent_to_another_process_inside() -> None:
    """It lies in shared memory from then on, and comes back there; the others where they are."""
    model = models.with_lora(models.qwen2, target_modules=["q_proj", "down_proj"])
    weight = model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    context = torch.multiprocessing.get_context("spawn")
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=sum_of, args=(queue, answers))
    process.start()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(2):
        with merged(model):
            wanted, before = float(weight.double().sum()), weight.data_ptr()
            if process.is_alive():
                queue.put(weight.data)
                assert answers.get(timeout=120) == wanted
                assert weight.data_ptr() != before
                process.join()
        for name, tensor in model.state_dict().items():
            assert_same_bits(tensor, base[name], name)
    assert process.exitcode == 0


def test_weights_of_one_memory_that_becomes_shared() -> None:
    """Each moves once."""
    model = models.with_lora(models.qwen2, target_modules=["q_proj", "k_proj", "down_proj"])
    attention = model.base_model.model.model.layers[0].self_attn
    flat = torch.cat([part.base_layer.weight.data.flatten() for part in (attention.q_proj, attention.k_proj)])
    begin = 0
    for part in (attention.q_proj, attention.k_proj):
        weight = part.base_layer.weight
        weight.data = flat[begin : begin + weight.numel()].view(weight.shape)
        begin += weight.numel()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = flat.data_ptr()
    with merged(model):
        flat.share_memory_()
        assert attention.k_proj.base_layer.weight.untyped_storage().data_ptr() == flat.data_ptr() != before
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, base[name], name)


def test_another_default_device() -> None:
    """What is the host's own stays on the CPU."""
    model = models.with_lora(models.qwen2, target_modules=["q_proj"])
    adapter = models.outputs(model)
    torch.set_default_device("meta")
    try:
        with unchanged(model), merged(model):
            inside = dict(model.named_parameters())
            streamed = {name: inside[name] for name in inside}
        merges = dict(MergedWeights(model))
    finally:
        torch.set_default_device(None)
    assert streamed
    assert all(tensor.device.type == "cpu" for tensor in merges.values())
    torch.testing.assert_close(models.outputs(model), adapter)
