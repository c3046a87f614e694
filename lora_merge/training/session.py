"""`train_merged(model)`: between `merged` blocks that are entered and left by themselves, as training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..context import merged
from ..errors import InvalidInput
from ..kernels.plan import untraced
from ..models.claims import check_unread, let_read
from ..models.guards import guarded, refuse
from ..models.live import live
from ..models.pausing import note_training
from ..models.steps import stepped, steps
from .check import check_trainable, tops
from .layers import Acting, acting, layers_of

_VERSION = attrgetter("_version")


class _Merged(NamedTuple):
    """What the base weights were merged from.

    Args:
        facts: of the model's snapshot inside.
        adapters: parameters of the adapters that act.
        versions: of these.
        steps: how often optimizers had stepped.
        weights: base parameters that hold them; their version counters outside and inside.
    """

    facts: list[Any]
    adapters: list[Tensor]
    versions: list[int]
    steps: int
    weights: tuple[Tensor, ...]
    outside: tuple[int, ...]
    inside: tuple[int, ...]

    @property
    def may_differ(self) -> bool:
        """Whether the adapters may have been written since: an optimizer may hold others, and write these by them."""
        return self.steps != steps() or list(map(_VERSION, self.adapters)) != self.versions

    @property
    def stepped(self) -> bool:
        """Whether an optimizer that holds the adapters has stepped since."""
        return self.steps != steps() and stepped(self.steps, self.adapters)

    def same_bits(self, other: _Merged) -> bool:
        """Return True if the weights hold the same bits inside both times."""
        tensors = ([*map(id, one.adapters), *map(id, one.weights)] for one in (self, other))
        return (
            len({tuple(some) for some in tensors}) == 1
            and (self.versions, self.outside, self.facts) == (other.versions, other.outside, other.facts)
            and not self.stepped
        )


class Training:
    """Training of a model on its merged weights, from `train_merged` to `close`.

        with lora_merge.train_merged(model) as training:
            ...

    Attributes:
        merges: how often the adapters were merged since the beginning.
    """

    rounding = "nearest"

    def __init__(self, model: nn.Module) -> None:
        self.before_write: Callable[[], None] = _nothing
        self.merges = 0
        self._model = model
        self._merged: _Merged | None = None
        self._last: _Merged | None = None
        self._block = ExitStack()
        self._hooks: list[Any] = []
        self._layers: dict[nn.Module, Acting] = {}
        self._hooked: set[int] = set()
        self._depth = 0
        self._busy = False
        self._closed = False
        check_trainable(model)
        for module in tops(model, [layer for _, layer in layers_of(model)]):
            self._hooks.append(module.register_forward_pre_hook(self._enter_model, prepend=True))
            self._hooks.append(module.register_forward_hook(self._leave_model, always_call=True))
        for _, layer in layers_of(model):
            note_training(layer, self)

    # What users call

    def refresh(self) -> None:
        """Merge the adapters as they are now, where the base weights do not hold them. A forward of the model does so
        by itself; parts of it that are compiled and called by themselves do not.

        Raises:
            as `merged`; and InvalidInput: dropout, or an adapter that cannot be trained so.
        """
        if self._closed:
            raise InvalidInput("this training on merged weights was closed: call train_merged(model) again")
        if self._busy:
            return
        self._busy = True
        try:
            if not self._stands():
                if self._merged is not None:
                    check_unread(self._merged.weights)
                self._leave()
                if any(found.adapters for _, found in self._acting()):
                    self._enter()
        finally:
            self._busy = False

    def pause(self) -> None:
        """Bring the base back bit for bit until the next forward: before the model is read, saved or changed. What
        reads it in this package, and what PEFT saves or changes, does so by itself."""
        if not self._busy and self._merged is not None:
            check_unread(self._merged.weights)
            self._leave()

    def hold(self) -> bool:
        """Merge as `refresh` does, for a stream that reads the weights as they lie; return False where no adapter
        acts."""
        if self._closed:
            return False
        self.refresh()
        return self._merged is not None

    def close(self) -> None:
        """Bring the base back bit for bit, and let PEFT's own forward train from here on. May be called again."""
        try:
            self._leave()
        finally:
            self._closed = True
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            for _, layer in layers_of(self._model):
                note_training(layer, None)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Let copies of the model (copy.deepcopy, torch.save) train on by PEFT's own forward."""
        if self._merged is not None:
            raise InvalidInput(
                "a model that is trained on merged weights is copied or pickled: call training.pause() before, so that "
                "the copy has the base and not merged weights"
            )
        return _closed, ()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "merged" if self._merged else "paused"
        return f"<Training on merged weights: {state}, {len(self._layers)} layers, merged {self.merges} times>"

    # Merging

    def _acting(self) -> Iterator[tuple[nn.Module, Acting]]:
        for name, layer in layers_of(self._model):
            yield layer, acting(name, layer)

    def _stands(self) -> bool:
        """Return True if the base weights hold what acts in the model now, on all ranks."""
        now = self._merged
        same = now is not None and not now.may_differ
        found = live(self._model)
        if now is not None and same:
            same = found.snapshot().facts == now.facts
        return not found.ranks.any(not same)

    def _enter(self) -> None:
        self._layers = dict(self._acting())
        for layer in self._layers:
            if id(layer) not in self._hooked:
                self._hooked.add(id(layer))
                note_training(layer, self)
                self._hooks.append(layer.register_forward_pre_hook(self._before_layer, prepend=True))
                self._hooks.append(layer.register_forward_hook(self._after_layer, with_kwargs=True))
        adapters = list({id(p): p for found in self._layers.values() for p in found.parameters}.values())
        versions, count, weights = list(map(_VERSION, adapters)), steps(), tuple(_weights(self._layers))
        outside = tuple(map(_VERSION, weights))
        self.before_write()
        block = ExitStack()
        block.enter_context(merged(self._model))
        try:
            facts, inside = live(self._model).snapshot().facts, tuple(map(_VERSION, weights))
            now = _Merged(facts, adapters, versions, count, weights, outside, inside)
            if self._last is not None and self._last.same_bits(now):
                # A backward pass of a forward from before the pause may go on.
                now = now._replace(inside=self._last.inside)
                torch._C._autograd._unsafe_set_version_counter(weights, now.inside)
            self._guard()
            let_read(self._layers, self)
        except BaseException:
            block.close()
            raise
        self._block, self._merged = block, now
        self.merges += 1

    def _leave(self) -> None:
        if self._merged is not None:
            self.before_write()
            self._last, self._merged = self._merged, None
            self._block.close()

    def _guard(self) -> None:
        """Let what `merged` refuses go on, on the base: what saves the model, and PEFT's own merging."""
        guards: list[tuple[Sequence[nn.Module], Iterable[str]]] = [*guarded(list(self._model.modules()))]
        for modules, names in [*guards, (list(self._layers), ("merge", "unmerge"))]:
            for module in modules:
                inside = vars(module)
                inside.update({n: partial(self._on_base, module, n) for n in names if inside.get(n) is refuse})

    def _on_base(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a module once the base is back. PEFT's `unmerge` has nothing left to do then."""
        self._leave()
        return None if name == "unmerge" else getattr(module, name)(*args, **kwargs)

    # Forward and backward

    @untraced
    def _enter_model(self, module: nn.Module, args: Any) -> None:
        self._depth += 1
        if self._depth == 1 and not self._closed and not self._elsewhere():
            self.refresh()

    @untraced
    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)

    def _elsewhere(self) -> bool:
        """Return True inside a `merged` block of the user's, which leaves nothing to do here."""
        return self._merged is None and any(vars(layer).get("merged_adapters") for layer in self._layers)

    def _before_layer(self, layer: nn.Module, args: Any) -> None:
        """Merge where a part of the model is called by itself, after a change that no forward of the whole has seen."""
        if torch.compiler.is_compiling() or self._closed or self._busy or self._depth or self._elsewhere():
            return
        now = self._merged
        if now is None or now.may_differ:
            self.refresh()

    def _after_layer(self, layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        """Give the adapters of a layer their gradients."""
        if self._merged is None or not torch.is_grad_enabled():
            return None
        return self._layers[layer].attach(output, args[0] if args else next(iter(kwargs.values())), self._ready())

    def _ready(self) -> Callable[[], None]:
        """Return what a backward pass asks before it reads weights: that they hold what the forward computed with."""
        forward = self._merged

        def ready() -> None:
            assert forward is not None
            same = list(map(_VERSION, forward.adapters)) == forward.versions and not forward.stepped
            if self._merged is not forward and same and not self._closed:
                self.refresh()
            if self._merged is None or self._merged.inside != forward.inside or forward.stepped:
                raise InvalidInput(
                    "a backward pass of a forward that computed with other adapters than the model has now: with "
                    "train_merged call backward() before the optimizer steps and before set_adapter"
                )

        return ready


def _nothing() -> None:
    """Do nothing."""


def _closed() -> Training:
    """Return what the hooks of a copied model call: they do nothing."""
    training = Training.__new__(Training)
    training._closed, training._merged, training._depth, training._layers, training.merges = True, None, 0, {}, 0
    return training


def train_merged(model: nn.Module) -> Training:
    """Train on the merged weights from here on: forward and backward compute with the bits that are served.

        training = lora_merge.train_merged(model)    # after get_peft_model, fully_shard, DDP
        ...                                          # train as ever
        training.close()                             # the base is back, bit for bit

    The base weights hold `round(W + scaling * lora_B @ lora_A)`, adapted layers compute `x W'^T`, and gradients go
    straight through the rounding to the adapters. The first forward after an optimizer step merges anew; several
    forwards between two steps do not. `MergedWeights`, `VllmSync`, `SglangSync`, `save_merged`, `save_pretrained`,
    `disable_adapter()` and `set_adapter` get the base back by themselves, exactly, and the next forward merges again:
    what is pushed has the same bits as what the last forward computed with.

    `state_dict()` of the whole model holds merged values under the base's names, as inside `merged`.

    Args:
        model: a PEFT model with LoRA on Linear, Embedding or Conv layers; plain, under DDP or under FSDP2.

    Raises:
        InvalidInput: `lora_dropout` above 0 (a weight cannot express it), no LoRA layers, or a layout that cannot be
            trained so.
        UnsupportedAdapter: an adapter that cannot be trained so (DoRA, fused experts, trainable tokens), or not merged
            at all. Nothing was changed.
    """
    return Training(model)


def _weights(layers: dict[nn.Module, Acting]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for found in layers.values():
        for weight in found.weights if found.adapters else ():
            if id(weight) not in seen and not weight.is_inference():
                seen.add(id(weight))
                yield weight
