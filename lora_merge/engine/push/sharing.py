"""One copy of the weights for a trainer and an engine in its process: the trainer's parameters become views of the
engine's.

A parameter that is frozen, and that the engine keeps as a rectangle of one of its own in the same dtype, gives its
memory back and lies in the engine's from then on. What does not stays where it is, and is pushed as ever.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...choices import Merge, Mode, Rounding
from ...errors import InvalidInput, PushRefused
from ...kernels.segments import raw
from ...names import named_tensors
from ...stream.bucket_writer import BucketWriter
from ...stream.direct_targets import DirectTargets
from ...training.session import Training
from ..control.base import Control
from ..transport.lent import Lent
from .replica import Replica

IN_TRAINING = (
    "its weights are those of a trainer that shares them, and that trains; push() brings them into a known state"
)


class Place(NamedTuple):
    """Where a parameter of the trainer's may lie in the engine.

    Args:
        name: of the tensor of the stream.
        owner, attribute: of the parameter.
        view: of the engine's memory, laid out as the parameter.
    """

    name: str
    owner: nn.Module
    attribute: str
    view: Tensor


class Sharing:
    """A model whose base weights lie in an engine of this process, and which is trained on its merged weights there.

    Args:
        model: a PEFT model.
        writer: the stream of its base, as it fits the engine.
        lent: what the engine's worker lends of it.
        rounding: of merged weights.

    Attributes:
        shared: bytes that both hold once.
        apart: bytes that the trainer holds by itself, by the reason.

    Raises:
        InvalidInput: the engine holds other weights than the trainer, or none of them can be shared. Nothing was
            changed.
    """

    def __init__(self, model: nn.Module, writer: BucketWriter, lent: Lent, rounding: Rounding) -> None:
        self.apart: Counter[str] = Counter()
        places = list(self._places(model, writer, lent.targets))
        if not places:
            reasons = "; ".join(f"{why} ({nbytes / 1e6:.1f} MB)" for why, nbytes in self.apart.items())
            raise InvalidInput(f"share=True: the engine keeps no weight as the trainer has it: {reasons}")
        for place in places:
            self._compare(place)
        self.training = Training(model, rounding)
        self._held = [(place.owner._parameters[place.attribute], place) for place in places]
        self.shared = sum(place.view.nbytes for place in places)
        for parameter, place in self._held:
            assert parameter is not None
            parameter.data = place.view
        # Of an engine that is dirty already it says nothing new.
        self.training.before_write = partial(lent.overwritten, IN_TRAINING)

    def _places(self, model: nn.Module, writer: BucketWriter, targets: DirectTargets) -> Iterator[Place]:
        entries = {entry.sources: entry for entry in writer.entries.values() if len(entry.sources) == 1}
        seen: set[int] = set()
        for name, owner, attribute, tensor in named_tensors(model):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            entry = entries.get((name,))
            view: Tensor | None = None
            if attribute in owner._buffers:
                why = "buffers"
            elif tensor.requires_grad:
                why = "trained by itself"
            elif entry is None or entry.window is None or entry.window.box != _whole(tensor):
                why = "converted on its way"
            else:
                view, why = _view(entry.meta.name, entry.meta.shape, tensor.dtype, targets)
            if view is None:
                self.apart[why] += tensor.nbytes
                continue
            assert entry is not None
            assert entry.window is not None
            view = entry.window.unfold(view)
            if view.device != tensor.device or (view.ndim > 1 and view.stride(-1) != 1):
                self.apart["on another device, or laid out by columns"] += tensor.nbytes
                continue
            yield Place(entry.meta.name, owner, attribute, view)

    def _compare(self, place: Place) -> None:
        tensor = place.owner._parameters[place.attribute]
        assert tensor is not None
        if not torch.equal(raw(tensor.detach()), raw(place.view)):
            raise InvalidInput(
                f"share=True: {place.name}: the engine holds other values than the trainer's base. Start it on the "
                "checkpoint that the trainer was loaded from, in the same dtype, without load_format='dummy'"
            )

    def close(self) -> None:
        """Give the trainer memory of its own, with the base in it."""
        self.training.close()
        for parameter, place in self._held:
            if parameter is not None and parameter.data_ptr() == place.view.data_ptr():
                parameter.data = place.view.clone()
        self._held = []

    def __str__(self) -> str:
        apart = ", ".join(f"{why} {nbytes / 1e6:.1f} MB" for why, nbytes in self.apart.items())
        return f"{self.shared / 1e6:.1f} MB shared with the engine; by itself: {apart or 'nothing'}"


def _whole(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (0,) * tensor.ndim, tuple(tensor.shape)


def _view(name: str, shape: Sequence[int], dtype: torch.dtype, targets: DirectTargets) -> tuple[Tensor | None, str]:
    """Return where the engine keeps a tensor of the stream, or None and why it does not keep it so."""
    found = targets.views.get(name, ())
    if name in targets.scaled or not found:
        return None, "laid out anew by the engine, converted or not held"
    (start, size), view = found[0]
    if len(found) > 1 or any(start) or tuple(size) != tuple(shape):
        return None, "held by the engine in parts"
    if view.dtype != dtype:
        return None, f"{dtype} in the trainer, {view.dtype} in the engine"
    # Outside of inference mode, or no backward pass could keep it.
    with torch.inference_mode(False):
        here = torch.empty(0, dtype=dtype, device=view.device)
        return here.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride()), ""


def check_shared_arguments(controls: Sequence[Control], ranks: int, merge: Merge, mode: Mode) -> None:
    """Raise `InvalidInput` unless arguments are such that a trainer can share its weights."""
    if mode != "merged" or merge == "engine":
        raise InvalidInput(
            f"share=True got mode={mode!r}, merge={merge!r}: what is shared holds merged weights; pass mode='merged' "
            "and merge='trainer'"
        )
    if len(controls) != 1 or controls[0].suspends or ranks != 1:
        raise InvalidInput(
            f"share=True got {len(controls)} engines on {ranks} trainer ranks: expected one LLM in the process of one "
            "trainer"
        )


def check_shareable(replica: Replica) -> None:
    """Raise `PushRefused` unless a trainer of this process can share an engine's weights."""
    workers = replica.workers
    if len(workers) != 1 or workers[0].pid != os.getpid():
        pids = ", ".join(str(worker.pid) for worker in workers)
        raise PushRefused(
            f"share=True: the engine has {len(workers)} workers, in processes {pids}; expected one worker in this "
            "process: an LLM with tensor_parallel_size=1 and VLLM_ENABLE_V1_MULTIPROCESSING=0"
        )
    config: Any = getattr(replica.handle, "config", dict)()
    if getattr(getattr(config, "model_config", None), "enable_sleep_mode", False):
        raise PushRefused(
            "share=True: the engine was started with enable_sleep_mode=True, and its sleep would take the trainer's "
            "weights along: start it without"
        )
