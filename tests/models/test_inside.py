"""What users do inside `merged` beside generating: autocast around it, copies, other modules, many interrupts."""

from __future__ import annotations

import copy
import gc
import io
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch._inductor.config
from helpers import assert_same_bits
from peft import LoraConfig, PeftModel, get_peft_model
from processes import spawn
from repository import ROOT
from torch import Tensor, nn

import lora_merge
from lora_merge import AlreadyMerged, NotRestored, merged, signals
from lora_merge.models import claims
from lora_merge.shards.layout import Layout
from tests.shards.test_shards_merge import forward, fsdp1, fsdp2, local_bits

# ---- autocast --------------------------------------------------------------------------------------------------------


def trained_whole(bias: bool = False) -> PeftModel:
    """Base weights, or biases, that require a gradient: autocast keeps its casts of them."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    whole: dict[str, Any] = {"bias": "all", "lora_bias": True} if bias else {}
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False, **whole))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B.default.bias"):
                parameter.fill_(2.0)
    return model if bias else model.requires_grad_()


def autocast() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True], ids=["weights", "biases"])
def test_autocast_around_a_block(bias: bool) -> None:
    """It went on with casts of the weights before: off by several units."""
    model, x = trained_whole(bias), torch.randn(4, 32)
    with torch.no_grad():
        wanted = model(x)
    outputs: dict[str, Tensor] = {}

    def see(when: str) -> None:
        outputs[when] = model(x).float()

    with torch.no_grad(), autocast():
        see("before")
        with merged(model):
            see("inside")
            with autocast():
                see("nested")
        see("after")
        with pytest.raises(ValueError, match="mine"), autocast(), merged(model):  # noqa: PT012
            see("inside again")
            raise ValueError("mine")
        see("after an error")
        for parameter in (p for name, p in model.named_parameters() if "lora_B" in name):
            parameter.zero_()
        with merged(model):
            see("of zeros")
    with model.disable_adapter(), torch.no_grad():
        base = model(x)
    for when, output in outputs.items():
        torch.testing.assert_close(output, base if when == "of zeros" else wanted, atol=0.1, rtol=0, msg=when)


def _tracked(weight: Tensor, lora_A: Tensor, lora_B: Tensor) -> None:
    lora_merge.restore.TrackedPlan([lora_merge.Segment("w", weight, weight, lora_A, lora_B, 1.0)]).merge()


WRITERS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    "merge_": lambda w, a, b: lora_merge.merge_(w, a, b, 1.0),
    "merge, out": lambda w, a, b: lora_merge.merge(w.clone(), a, b, 1.0, out=w),
    "Plan": lambda w, a, b: lora_merge.Plan([lora_merge.Segment("w", w, w, a, b, 1.0)]).run(),
    "TrackedPlan": _tracked,
    "another thread": lambda w, a, b: _in_a_thread(lambda: lora_merge.merge_(w, a, b, 1.0)),
}


def _in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.parametrize("writer", WRITERS)
def test_autocast_around_what_writes_in_place(writer: str) -> None:
    linear, x = nn.Linear(16, 16), torch.randn(2, 16)
    lora_A, lora_B = torch.randn(2, 16), torch.randn(16, 2)
    with torch.no_grad(), autocast():
        linear(x)
        WRITERS[writer](linear.weight.detach(), lora_A, lora_B)
        seen = linear(x)
    torch.testing.assert_close(seen.float(), linear(x), atol=0.2, rtol=0)


# ---- other modules, and copies ---------------------------------------------------------------------------------------

REPLACED: dict[str, Callable[[nn.Module], object]] = {
    "base layer": lambda layer: setattr(layer.q_proj, "base_layer", again(layer.q_proj.base_layer)),
    "layer": lambda layer: setattr(layer, "q_proj", again(layer.q_proj.base_layer)),
}


def again(linear: nn.Linear) -> nn.Linear:
    """Another module with the values that this one has now."""
    other = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    other.load_state_dict(linear.state_dict())
    return other


@pytest.mark.parametrize("later", [False, True], ids=["first entry", "later entry"])
@pytest.mark.parametrize("what", REPLACED)
def test_another_module_inside(what: str, later: bool) -> None:
    """It would go on holding merged values."""
    model = models.with_lora(models.qwen2)
    if later:
        with merged(model):
            pass
    layer = model.base_model.model.model.layers[1].self_attn
    weight = layer.q_proj.base_layer.weight
    bits = weight.detach().clone()
    with pytest.raises(NotRestored, match=r"layers\.1\.self_attn\.q_proj\.weight: another module"), merged(model):
        REPLACED[what](layer)
    assert_same_bits(weight, bits, "the weight that was there before")


def replaced_on_shards(rank: int) -> None:
    """The same where ranks hold parts; what is wrapped, or was gathered inside, is no other one."""
    for wrap in (fsdp2, fsdp1):
        model = wrap(models.with_lora(models.qwen2))
        Layout(model).reshard()
        before = local_bits(model)
        _, layer = (module for module in model.modules() if type(module).__name__.endswith("DecoderLayer"))
        for strategy in (None, None, "unshard"):
            with merged(model, strategy=strategy):
                forward(model)
                layer.mlp.up_proj = nn.Sequential(layer.mlp.up_proj)
            layer.mlp.up_proj = layer.mlp.up_proj[0]
            there = layer.self_attn.q_proj
            expected = pytest.raises(NotRestored, match=r"layers\.1\.self_attn\.q_proj\.weight: another module")
            with expected, merged(model, strategy=strategy):
                layer.self_attn.q_proj = nn.Linear(32, 32)
            layer.self_attn.q_proj = there
            with merged(model), pytest.raises(AlreadyMerged, match="Copy it before or after"):
                copy.deepcopy(there)
            Layout(model).reshard()
            for now, then in zip(local_bits(model), before, strict=True):
                assert_same_bits(now, then, f"{wrap.__name__}, {strategy}")


def test_another_module_inside_a_model_that_is_sharded() -> None:
    spawn(2, replaced_on_shards)


def test_a_module_that_is_wrapped_inside() -> None:
    """What computes with the same module is no other one."""
    model = models.with_lora(models.qwen2)
    attention = model.base_model.model.model.layers[1].self_attn
    weight = attention.q_proj.base_layer.weight
    bits = weight.detach().clone()
    with merged(model):
        attention.o_proj = torch.compile(attention.o_proj, backend="eager")
        attention.q_proj.base_layer = nn.Sequential(attention.q_proj.base_layer)
    assert_same_bits(weight, bits, "the weight")


COPIES: dict[str, Callable[[Any], object]] = {
    "deepcopy": copy.deepcopy,
    "copy": lambda model: copy.copy(model.base_model.model.model.layers[0].self_attn.q_proj),
    "torch.save": lambda model: torch.save(model, io.BytesIO()),
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(how: str) -> None:
    """One that was made inside held merged weights, and refused everything for good."""
    model = models.with_lora(models.qwen2)
    wanted = models.outputs(model)
    for _ in range(2):
        with merged(model):
            with pytest.raises(AlreadyMerged, match="Copy it before or after"):
                COPIES[how](model)
            plain = copy.deepcopy(model.state_dict())  # tensors may be
        assert plain
        COPIES[how](model)
    twin = copy.deepcopy(model)
    with merged(model), merged(twin):
        torch.testing.assert_close(models.outputs(twin), wanted)
    twin.merge_and_unload()


# ---- interrupts ------------------------------------------------------------------------------------------------------


class Again(KeyboardInterrupt):
    """Of a handler of a test's own."""


@pytest.fixture
def alarms() -> Any:
    """SIGALRM raises, in whatever line it comes."""

    def handler(*_: object) -> None:
        raise Again

    before = signal.signal(signal.SIGALRM, handler)
    yield handler
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert signal.signal(signal.SIGALRM, before) is handler, "the handler did not come back"


def test_many_interrupts_of_one_cleanup(alarms: Any) -> None:
    """Each waits; what is raised comes after the step, which runs once."""
    ran = []

    def step() -> None:
        for _ in range(50):
            signal.raise_signal(signal.SIGALRM)
        claims.to_the_end(inner)
        ran.append("step")

    def inner() -> None:
        signal.raise_signal(signal.SIGALRM)
        ran.append("inner")

    with pytest.raises(Again):
        claims.to_the_end(step)
    assert ran == ["inner", "step"]
    assert signal.getsignal(signal.SIGALRM) is alarms
    with pytest.raises(Again):
        signal.raise_signal(signal.SIGALRM)


def test_an_interrupt_while_signals_come_back(alarms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that could not be put back passes on what comes."""
    deferred = signals.Deferred()
    deferred.defer()

    def interrupted(*_: Any) -> Any:
        raise Again

    with monkeypatch.context() as patch:
        patch.setattr(signals._signal, "signal", interrupted)
        with pytest.raises(Again):
            deferred.deliver()
    with pytest.raises(Again):
        signal.raise_signal(signal.SIGALRM)
    claims.to_the_end(lambda: None)
    deferred.deliver()


def test_in_another_thread_and_of_a_real_error(alarms: Any) -> None:
    done = []
    _in_a_thread(lambda: claims.to_the_end(lambda: done.append(1)))
    assert done == [1]

    def fails() -> None:
        signal.raise_signal(signal.SIGALRM)
        raise ValueError("mine")

    with pytest.raises(Again) as caught:
        claims.to_the_end(fails)
    assert isinstance(caught.value.__context__, ValueError)


def test_a_claim_ends_with_its_holder() -> None:
    """Where an interrupt kept it from being given back, too."""
    weight = nn.Linear(2, 2).weight
    held = claims.merging([], {(weight.data_ptr(), weight.device): weight})
    held.__enter__()
    storage = [weight.untyped_storage()]
    with pytest.raises(AlreadyMerged):
        claims.check_readable(storage)
    (claim,) = list(claims._merged.values())
    del held
    gc.collect()
    claims._merged[id(claim)] = claim
    del claim
    claims.check_readable(storage)


def test_a_claim_ends_where_garbage_is_collected() -> None:
    """Also in the thread that makes or looks at another claim meanwhile."""
    weight = nn.Linear(2, 2).weight
    held = [claims.merging([], {(weight.data_ptr(), weight.device): weight})]
    held[0].__enter__()

    def collect() -> None:
        with claims._lock:
            held.clear()
            gc.collect()

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    claims.check_readable([weight.untyped_storage()])


def floods() -> None:
    """Interrupt blocks at all times, and again while they clean up."""
    model = models.with_lora(models.qwen2, dtype=torch.bfloat16)
    bits = {name: p.detach().clone() for name, p in model.named_parameters()}
    left = [0]

    def handler(*_: object) -> None:
        left[0] -= 1
        signal.setitimer(signal.ITIMER_REAL, 2e-4 if left[0] > 0 else 0)
        if left[0] >= 0:
            raise Again

    def enter(number: int) -> None:
        left[0] = 1 + number % 4
        signal.setitimer(signal.ITIMER_REAL, 1e-4 + number * 2e-5)
        with merged(model):
            pass

    def survive(number: int, levels: int = 6) -> None:
        """More levels than interrupts: the outermost sees none."""
        try:
            survive(number, levels - 1) if levels else enter(number)
            while left[0] > 0:
                time.sleep(1e-3)
        except Again:
            pass

    before = signal.signal(signal.SIGALRM, handler)
    for number in range(300):
        survive(number)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.view(torch.uint8), bits[name].view(torch.uint8)), name
    claims.to_the_end(lambda: None)  # puts back what the last interrupt may have left
    assert signal.signal(signal.SIGALRM, before) is handler
    with merged(model):
        pass


def test_floods_of_interrupts() -> None:
    """Whatever they end, the base comes back, and the next block can be entered.

    In a process of its own: one may end torch's way back from `no_grad`, or pytest's report of another.
    """
    code = "from tests.models.test_inside import floods; floods()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def test_compiled_code_that_freezes_weights_is_told() -> None:
    """Its constants are the weights of its first call, in any later block."""
    model = models.with_lora(models.qwen2)
    with torch._inductor.config.patch(freezing=True), pytest.warns(UserWarning, match="FREEZING"), merged(model):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with merged(model):
            pass
