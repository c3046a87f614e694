"""One copy of the weights for a trainer and an engine in its process: the trainer's parameters become views of the
engine's.

A parameter that is frozen, and that the engine keeps as a rectangle of one of its own in the same dtype, gives its
memory back and lies in the engine's from then on. What does not stays where it is, and is pushed as ever.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import eq, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...choices import Merge, Mode, Rounding
from ...errors import InvalidInput, PushRefused
from ...kernels.segments import raw
from ...models.live import check_model
from ...shards.layout import Layout
from ...stream.bucket_writer import BucketWriter
from ...training.check import check_trainable
from ...training.layers import layers_of
from ...training.session import Training
from ..control.base import Control
from ..transport.lent import Lent
from .places import Apart, Place, places
from .replica import Replica

IN_TRAINING = (
    "its weights are those of a trainer that shares them, and that trains; push() brings them into a known state"
)
_CHUNK = 1 << 26
"""Bytes that are compared at once where trainer and engine are on different devices."""
_HALVES = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


class _Held(NamedTuple):
    """A parameter that lies in the engine.

    Args:
        place: where.
        parameter: the trainer's, since.
        before: the parameter that it replaced, on meta; else None.
        data: what the parameter held before, until all is laid.
    """

    place: Place
    parameter: Tensor
    before: Tensor | None
    data: Tensor | None


class Sharing:
    """A model whose base weights lie in an engine of this process, and which is trained on its merged weights there.

    Args:
        model: a PEFT model; its base on the engine's device, on another one, or on meta. All that is not shared moves
            to the engine's device. Adapters on meta are made as PEFT makes them.
        writer: the stream of its base, as it fits the engine.
        lent: what the engine's worker lends of it.
        rounding: of merged weights.
        replaced: what the engine holds instead of the weights that it started with, in words that follow its name: it
            gets the trainer's. "": it holds those, which have to be the trainer's.

    Attributes:
        shared: bytes that both hold once, as of the last push.
        apart: bytes that the trainer holds by itself, by the reason.
        ends: called, last first, when the sharing ends.

    Raises:
        InvalidInput: the engine holds other weights than the trainer, or none of them can be shared.
        InvalidInput, UnsupportedAdapter: the model cannot be trained on merged weights.
            In both cases the model is as it was.
    """

    def __init__(
        self, model: nn.Module, writer: BucketWriter, lent: Lent, rounding: Rounding, *, replaced: str = ""
    ) -> None:
        check_trainable(model, rounding)  # before anything is moved
        self.apart: Counter[str] = Counter()
        self.ends = ExitStack()
        apart: dict[int, Apart] = {}
        found = list(places(model, writer, lent.targets, apart))
        for nbytes, why in apart.values():
            self.apart[why] += nbytes
        if not found:
            raise InvalidInput(
                f"share=True: the engine keeps no weight as the trainer has it: {self._reasons}. Load the model in the "
                "engine's dtype, start the engine unquantised, or leave share out"
            )
        _check_values(model, found, apart, replaced)
        if replaced:
            lent.loan.overwritten(IN_TRAINING)
        for place in found:
            (_write if replaced else _compare)(place)
        self._held: list[_Held] = []
        try:
            self._held += map(_lay, found)
            _bring(model, found)
            self.training = Training(model, rounding)
        except BaseException:
            lent.loan.end()
            for held in self._held:
                _put_back(held)
            raise
        self._held = [held._replace(data=None) for held in self._held]
        self.shared = self._whole = sum(place.view.nbytes for place in found)
        # An engine that is dirty already hears nothing new by this.
        self._loan, self._returns = lent.loan, not replaced and not self.apart
        self.training.before_write = partial(lent.loan.overwritten, IN_TRAINING)

    @property
    def written(self) -> bool:
        """Whether the trainer has written to the weights since its last push: a reference pass, or a new merge."""
        return self._loan.written

    def pushed(self) -> None:
        """Note that a push has ended well."""
        self._loan.written = False

    def lay_again(self) -> None:
        """Let parameters lie in the engine again that were moved since, as trainers do when they wrap a model. One
        whose base was changed, or that was replaced, stays where it is."""
        moved = [] if _all_stand(self._held) else [held for held in self._held if not _stands(held)]
        if moved:
            self.training.pause()
            for held in moved:
                if held.place.parameter is held.parameter and not held.parameter.is_meta and _same(held.place):
                    held.parameter.data = held.place.view
        self.shared = sum(held.place.view.nbytes for held in self._held if _stands(held)) if moved else self._whole

    def close(self, meta: bool = False) -> None:
        """Give the trainer memory of its own, with the base in it. May be called again, and goes on where it failed.

        Args:
            meta: leave the parameters on meta instead, without values.
        """
        self.training.close()
        while self._held:
            held = self._held[-1]
            if _stands(held):
                _end(held, meta)
            else:  # what was pushed from elsewhere stays
                self._returns = False
            self._held.pop()
        self._loan.end(self._returns)
        self.ends.close()

    @property
    def _reasons(self) -> str:
        return ", ".join(f"{nbytes / 1e6:.1f} MB {why}" for why, nbytes in self.apart.items()) or "nothing"

    def __str__(self) -> str:
        return f"{self.shared / 1e6:.1f} MB shared with the engine; by itself: {self._reasons}"


# Before anything is changed


def _check_values(model: nn.Module, found: Sequence[Place], apart: Mapping[int, Apart], replaced: str) -> None:
    """Raise `InvalidInput` if a tensor on meta would have no values when all is laid."""
    shared = {id(place.parameter) for place in found}
    adapters = {id(p) for _, container in _made_anew(model) for p in container.parameters()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta or id(tensor) in adapters:
            continue
        if id(tensor) not in shared:
            why = apart[id(tensor)].why if id(tensor) in apart else "no checkpoint has it"
            raise InvalidInput(
                f"share=True: {name} is on meta, and the engine does not keep it as the trainer has it ({why}): load "
                "it first. (accelerate.init_empty_weights() makes parameters on meta, and buffers with their values; "
                "call the model's tie_weights() after it.)"
            )
        if replaced:
            raise InvalidInput(
                f"share=True: {name} is on meta, to take what the engine has, which {replaced} and not what it started "
                "with: load the model, or start the engine anew"
            )
    for _, container in _made_anew(model):
        for name in container.keys():  # noqa: SIM118 - PEFT's containers
            init = _init_of(model, name)
            if not isinstance(init, bool) and init != "gaussian":
                raise InvalidInput(
                    f"share=True: adapter '{name}' is on meta, and init_lora_weights={init!r} makes it of the base's "
                    "values: pass True or 'gaussian', or make the adapter on a base that is loaded"
                )


def _compare(place: Place) -> None:
    tensor = place.parameter
    # One on meta takes what the engine has.
    if tensor is not None and not tensor.is_meta and not _same(place):
        raise InvalidInput(
            f"share=True: {place.name}: the engine holds other values than the trainer's base. Start it on the "
            "checkpoint that the trainer was loaded from, in the same dtype, without load_format='dummy'"
        )


def _same(place: Place) -> bool:
    """Return True if the engine holds the bits of the trainer's parameter."""
    tensor = place.parameter
    assert tensor is not None
    if (tensor.shape, tensor.dtype) != (place.view.shape, place.view.dtype):
        return False
    pieces = _chunks(tensor.detach(), place.view)
    return all(torch.equal(raw(mine.to(theirs.device)), raw(theirs)) for mine, theirs in pieces)


def _write(place: Place) -> None:
    """Bring the trainer's values to where the engine has no longer those that it started with."""
    tensor = place.parameter
    assert tensor is not None
    with torch.no_grad():
        place.view.copy_(tensor)


def _chunks(tensor: Tensor, view: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two tensors of a shape in pieces, where one of them has to cross to another device."""
    if tensor.device == view.device or tensor.ndim == 0:
        yield tensor, view
        return
    rows = max(1, _CHUNK * len(tensor) // max(tensor.nbytes, 1))
    yield from zip(tensor.split(rows), view.split(rows), strict=True)


# The change, and the way back


def _lay(place: Place) -> _Held:
    """Let a parameter lie in the engine."""
    parameter = place.parameter
    assert parameter is not None
    if not parameter.is_meta:
        held = _Held(place, parameter, None, parameter.data)
        parameter.data = place.view
        return held
    made = nn.Parameter(place.view, requires_grad=False)
    place.put(made)
    return _Held(place, made, parameter, None)


def _put_back(held: _Held) -> None:
    if held.before is None:
        assert held.data is not None
        held.parameter.data = held.data
    else:
        held.place.put(held.before)


def _all_stand(held: Sequence[_Held]) -> bool:
    """Return True if `_stands` is true of all, with little Python for each: every push asks."""
    places, parameters = [one.place for one in held], [one.parameter for one in held]
    there = [owner._parameters.get(attribute) for owner, attribute in (place.owners[0] for place in places)]
    if not all(map(is_, there, parameters)):
        return False
    views = [place.view for place in places]
    return all(map(eq, map(Tensor.data_ptr, parameters), map(Tensor.data_ptr, views)))


def _stands(held: _Held) -> bool:
    """Return True if a parameter still lies in the engine."""
    return held.place.parameter is held.parameter and held.parameter.data_ptr() == held.place.view.data_ptr()


def _end(held: _Held, meta: bool) -> None:
    if meta:
        held.place.put(nn.Parameter(held.place.view.to("meta"), requires_grad=False))
    else:
        held.parameter.data = held.place.view.clone(memory_format=torch.contiguous_format)


def _bring(model: nn.Module, found: Sequence[Place]) -> None:
    """Bring all that is not shared to the engine's device, and make adapters that are on meta."""
    device = found[0].view.device
    for layer, container in _made_anew(model):
        container.to_empty(device=device)
        for parameter in container.parameters(recurse=False):  # of embeddings, which PEFT draws so where it makes them
            nn.init.normal_(parameter)
        for half in container.children():
            half.reset_parameters()
        # Only when both halves are made can PEFT give them their values.
        if not any(p.is_meta for half in _halves(layer) for p in half.parameters()):
            for name in {name for half in _halves(layer) for name in half.keys()}:  # noqa: SIM118
                layer.reset_lora_parameters(name, _init_of(model, name))
    for parameter in model.parameters():
        if parameter.device != device:
            parameter.data = parameter.data.to(device)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[key] = buffer.to(device)


def _halves(layer: Any) -> list[Any]:
    return [half for half in (getattr(layer, name, None) for name in _HALVES) if half is not None and len(half)]


def _made_anew(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the layers that have adapters on meta, with those of their halves that are wholly on meta."""
    for _, layer in layers_of(model):
        for half in _halves(layer):
            if all(p.is_meta for p in half.parameters()):
                yield layer, half


def _init_of(model: Any, adapter: str) -> Any:
    """Return how PEFT makes an adapter."""
    config = getattr(model, "peft_config", {}).get(adapter)
    return getattr(config, "init_lora_weights", True)


# What can be shared


def check_shared_arguments(
    model: Any, controls: Sequence[Control], ranks: int, merge: Merge, mode: Mode, refused: str
) -> None:
    """Raise `InvalidInput` unless arguments are such that a trainer can share its weights.

    Args:
        ranks: of the trainer.
        refused: why no engine of this kind can, in words; "" where some can.
    """
    if refused:
        raise InvalidInput(f"share=True: {refused}")
    if mode != "merged" or merge == "engine":
        raise InvalidInput(
            f"share=True got mode={mode!r}, merge={merge!r}: what is shared holds merged weights; pass mode='merged' "
            "and merge='trainer'"
        )
    if not check_model(model) and not layers_of(model):
        raise InvalidInput(
            "share=True: the model has no LoRA layers, and full fine-tuning shares no weights: leave share out. If an "
            "adapter is trained, pass the PeftModel, not its bare base"
        )
    if len(controls) != 1 or controls[0].suspends:
        raise InvalidInput(
            f"share=True got {len(controls)} engines on one of {ranks} trainer ranks, or an AsyncLLM: expected one LLM "
            "in the process of each trainer rank"
        )
    if not isinstance(model, nn.Module):
        raise InvalidInput(
            "share=True got a list of modules: Megatron's layers cannot be trained on merged weights yet"
        )
    if Layout(model).sharded:
        raise InvalidInput(
            "share=True: the trainer's weights are sharded over its ranks (FSDP, DeepSpeed ZeRO-3, tensor parallelism) "
            "and no rank holds a weight as its engine does: train under DDP, or leave share out"
        )


def check_shareable(replica: Replica) -> None:
    """Raise `PushRefused` unless a trainer of this process can share an engine's weights."""
    workers = replica.workers
    if len(workers) == 1 and workers[0].pid == os.getpid() and workers[0].world == 1:
        return
    pids = ", ".join(str(worker.pid) for worker in workers)
    raise PushRefused(
        f"share=True: the engine has {workers[0].world} workers, here those of processes {pids}; "
        f"expected one worker in this process ({os.getpid()}): an LLM with tensor_parallel_size=1 and "
        "VLLM_ENABLE_V1_MULTIPROCESSING=0. Memory of an engine in another process is not shared, on the same GPU either"
    )
