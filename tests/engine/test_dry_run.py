"""The dry run of `load_weights`, in threads in which torch would not call its mode."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import thread_state
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_merge.engine.worker.dry_run import Capture, feed


class Model(nn.Module):
    """With a parameter of two tensors of a checkpoint, as vLLM's linears have."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.ones(6, 4))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.qkv.data[{"q": slice(4), "kv": slice(4, 6)}[name]].copy_(tensor)


class Other(TorchDispatchMode):
    """A mode of somebody else."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def left_behind() -> Iterator[None]:
    """A mode that somebody has left on the stack, without the key by which torch calls it."""
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    other = Other()
    with other, torch._C._ForceDispatchKeyGuard(*keys):
        yield
        torch.zeros(2).add_(1)
    assert other.calls == 0, "nor does torch call it afterwards"


@pytest.mark.parametrize("around", [nullcontext, torch._C._DisableTorchDispatch, left_behind, Other])
def test_copies_are_recorded_whatever_modes_a_thread_is_in(around: Any, caplog: pytest.LogCaptureFixture) -> None:
    """In one of CI's runs torch called no mode any more: a push was refused, as no copy was recorded."""
    model, meta = Model(), torch.device("meta")
    fed = [("q", torch.empty(4, 4, device=meta)), ("kv", torch.empty(2, 4, device=meta))]
    with around() as mode, torch.no_grad():
        capture = Capture({"qkv": model.qkv}, fed, [("qkv", model.qkv)])
        before = getattr(mode, "calls", 0)
        refused = feed(model, capture, fed)
        assert getattr(mode, "calls", 0) == before, "a dry run is nothing that others count"
    assert not refused
    assert [(r.name, r.path, r.copy is not None) for r in capture.records] == [("q", "qkv", True), ("kv", "qkv", True)]
    assert torch.equal(model.qkv, torch.ones(6, 4))
    assert ("torch calls none" in caplog.text) == (around in (torch._C._DisableTorchDispatch, left_behind))


def test_an_interrupt_leaves_no_mode_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python raises it wherever it comes, so also before a mode has left: writes after it were recorded, not made."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    model, fed = Model(), [("q", torch.empty(4, 4, device="meta"))]
    capture = Capture({"qkv": model.qkv}, fed, [("qkv", model.qkv)])
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(Capture, "__exit__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            feed(model, capture, fed)
    assert torch._C._len_torch_dispatch_stack() == 0
    with torch.no_grad():
        model.qkv.zero_()
    assert not model.qkv.any()


keep: list[Any] = []
"""What was entered and never left: torch leaves it where it is freed."""


def _without_keys() -> Any:
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    keys = torch._C.DispatchKey
    for key in (keys.Python, keys.PythonTLSSnapshot, keys.AutogradCPU, keys.ADInplaceOrView):
        exclude = exclude.add(key)
    return torch._C._ForceDispatchKeyGuard(include, exclude)


@pytest.mark.parametrize("left", [_without_keys, torch.no_grad, torch.inference_mode, Other])
def test_tests_after_one_that_leaves_the_thread_otherwise_have_what_it_began_with(left: Any) -> None:
    guard = left()
    keep.append(guard)
    guard.__enter__()
    with pytest.warns(UserWarning, match="^it left this thread's torch with"):
        thread_state.restore("it")
    with warnings.catch_warnings(action="error"):
        thread_state.restore("nothing")
    factor = torch.ones(2, requires_grad=True)
    (2 * factor).sum().backward()
    with Other() as mode:
        torch.zeros(2).add_(1)
    assert factor.grad is not None
    assert mode.calls
