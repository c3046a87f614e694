"""`train_merged(model)`: between `merged` blocks that are entered and left by themselves, as training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from threading import RLock, get_ident
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..choices import Rounding
from ..errors import InvalidInput
from ..kernels.plan import untraced
from ..merged_block import MergedBlock
from ..models.claims import check_unread, is_read, let_read
from ..models.delta import Delta
from ..models.guards import guarded, refuse
from ..models.live import Live, live
from ..models.pausing import note_training
from ..models.peft.chosen import turn
from ..models.peft.layer import PARAMETER
from ..models.steps import tell
from ..names import path_of
from ..shards import here
from ..shards.layout import Layout
from ..shards.ranks import Ranks
from . import gathered
from .check import acting_layers, check_called, check_gradients, check_own, check_trainable, check_untransformed, tops
from .dora import with_rows, zero_rows
from .experts import Holders
from .forwards import Forward, others_compute
from .layers import Acting, acts_in, layers_of
from .merged_from import MergedFrom, facts_of, merged_from, state_of
from .states import before_states
from .straight import this_backward
from .through import Through

_VERSION = attrgetter("_version")
_STATES = 64
"""States of the adapters whose draws are remembered: those that act in turns between two steps."""
_MERGED_STATES = 4
"""States among them whose backward passes may go on when they are merged again: of a policy and its references."""


class Training:
    """Training of a model on its merged weights, from `train_merged` to `close`.

        with lora_merge.train_merged(model) as training:
            ...

    Attributes:
        merges: how often the adapters were merged since the beginning.
        rounding: of merged weights.
        before_write: called before the weights are written.
    """

    def __init__(self, model: nn.Module, rounding: Rounding = "nearest") -> None:
        self.merges, self.rounding = 0, rounding
        self.before_write: Callable[[], object] = _nothing
        self._model = model
        self._draws, self._drawn = 0, dict[int, int]()
        self._merged: MergedFrom | None = None
        self._memory: list[object] = []  # of the adapters that are merged: none that take their place lie there
        self._states: list[MergedFrom] = []  # that were merged since adapters were written last, the newest at the end
        self._block = MergedBlock(model, rounding=rounding)
        self._hooks: list[Any] = []
        self._guards: list[tuple[Sequence[nn.Module], Iterable[str]]] = []
        self._hooked = WeakSet[nn.Module]()
        self._around: dict[nn.Module, list[nn.Module]] = {}  # of a base, the layers that adapt it
        self._bases, self._holders = Through(), Holders(self._standing)
        self._forward, self._computing = Forward(), set[int]()
        self._raised = self._sharded = self._closed = False
        self._steps = False  # whether an optimizer has stepped on adapters
        self._mode: bool | None = None  # `training` of the model in its last forward
        # One thread merges or brings the base back; which one. It has the model's turn before, if it needs one.
        self._lock, self._busy = RLock(), 0
        self._layers = check_trainable(model, rounding)
        self._tops = tops(model, list(self._layers))
        for module in self._tops:
            note_training(module, self)
            enter = module.register_forward_pre_hook(self._enter_model, prepend=True)
            # Before what FSDP does with the output: what is hooked to it first is asked first in a backward pass.
            left = module.register_forward_hook(self._leave_model, prepend=True, always_call=True)
            self._hooks += [enter, left]
        self._hooks += before_states(model.modules(), self._before_state)
        tell(self, of_steps=True)
        self._hook(self._layers)  # parts may be called by themselves before the model is

    # What users call

    def refresh(self) -> None:
        """Merge the adapters as they are now, where the base weights do not hold them. A forward of the model does so
        by itself after a step of an optimizer, or a write that PyTorch counts. Call it after other writes (to `.data`,
        by kernels of others), and where parts of the model are compiled and called by themselves.

        Raises:
            as `merged`; and InvalidInput: dropout, or an adapter that cannot be trained so.
        """
        if self._closed:
            raise InvalidInput("this training on merged weights was closed: call train_merged(model) again")
        self._refresh(anew=True)

    def _refresh(self, *, anew: bool = False, mode: bool | None = None) -> None:
        """Merge as `refresh`.

        Args:
            anew: also where nothing is known to have changed.
            mode: `training` of the model that is called. Where it has switched, averages may have been put in or taken
                out through `.data`, which nothing counts: then the adapters' bits are compared.
        """
        if self._busy == get_ident():
            return
        with turn(self._model), self._lock:
            try:
                self._busy = get_ident()
                found, values, compared = live(self._model), False, False
                if mode is not None:
                    compared, self._mode = self._mode is (not mode) and not others_compute(self._computing), mode
                # What goes wrong on one rank alone is an error on all, before any of them waits for the others.
                with found.ranks.vote("train_merged") as ballot:
                    if self._merged is not None:
                        # Facts are those inside: everything but values of the adapters.
                        values = facts_of(found) == self._merged.facts
                    ballot.flag = self._merged is None or not values or anew or self._merged.may_be_written
                if ballot.flag or (compared and not self._stands()):
                    self._merge(found, values)
            finally:
                self._busy = 0

    def _stands(self) -> bool:
        """Return True if the adapters hold the bits that are merged, see `MergedBlock.stands`."""
        try:
            return self._block.stands()
        except BaseException:
            self._leave()
            raise

    def pause(self) -> None:
        """Bring the base back bit for bit until the next forward: before the model is read, saved or changed. What
        reads it in this package, and what PEFT saves or changes, does so by itself."""
        if self._busy == get_ident():
            return
        with self._lock:
            if self._merged is not None:
                check_unread(self._merged.weights)
                self._leave_still()

    def hold(self) -> bool:
        """Merge as `refresh` does, for a stream that reads the weights as they lie; return False where no adapter
        acts."""
        if self._closed:
            return False
        # What a pass reads stays as it lies; it asks again while it is under way.
        self._refresh(anew=self._merged is None or not is_read(self._merged.weights))
        return self._merged is not None

    def deltas(self) -> list[Delta]:
        """Return what the adapters add that are merged."""
        with self._lock:
            busy, self._busy = self._busy, get_ident()  # what reads the model brings no base back
            try:
                return [] if self._merged is None else self._block.deltas()
            finally:
                self._busy = busy

    def close(self) -> None:
        """Bring the base back bit for bit, and let PEFT's own forward train from here on. May be called again."""
        try:
            with self._lock:
                self._leave()
        finally:
            self._closed = True
            tell(self, of_steps=False)
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._bases.release()
            self._holders.release()
            layers = [layer for _, layer in layers_of(self._model)]
            for module in [*tops(self._model, layers), *layers]:
                note_training(module, None)

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

    def _seed(self, layers: dict[nn.Module, Acting], ranks: Ranks) -> int | None:
        """Return the seed to draw with: one for each state of the adapters, also where others act in between."""
        if self.rounding == "nearest" or not any(found.adapters for found in layers.values()):
            return None
        state, last = hash(state_of(layers)), self._states[-1:]
        seed = self._drawn.pop(state, None)
        if ranks.any(seed is None or any(one.stepped for one in last)):
            self._draws += 1
            seed = self._draws
        assert seed is not None
        self._drawn[state] = seed
        if len(self._drawn) > _STATES:
            self._drawn.pop(next(iter(self._drawn)))
        return seed

    def _merge(self, found: Live, values: bool) -> None:
        """Merge what acts in the model now, in the place of what is merged; collective over the ranks.

        Args:
            found: the model.
            values: whether nothing but values of the adapters has changed.
        """
        ranks, before = found.ranks, self._merged
        with ranks.vote("train_merged") as ballot:
            if before is not None:
                check_unread(before.weights)
            layers = self._layers if values else dict(acting_layers(self._model, found))
            for acts in layers.values() if values else ():
                acts.check()
            ballot.flag = any(acts.adapters for acts in layers.values())
        acts_here = ballot.flag
        if ranks.any(before is None) and before is not None:  # another rank has its base back: it saves by itself
            self._leave()
            before, values = None, False
        self._sharded = found.sharded
        if layers is not self._layers:
            self._hook(layers)
        now = merged_from(layers, self.merges, before if values else None)
        now = now._replace(seed=self._seed(layers, ranks) if acts_here else None)
        self._block.seed = now.seed
        try:
            if before is not None:
                self.before_write()
            if before is not None and self._block.remerge(values=values):
                now = now._replace(outside=before.outside)
            else:
                self._leave()
                if not acts_here:
                    return
                # Outside, tied weights are themselves again, and versions those of the base.
                layers = dict(acting_layers(self._model, live(self._model)))
                now = merged_from(layers, self.merges)._replace(seed=now.seed)
                zeros = zero_rows(self._model, layers)
                self.before_write()
                self._block = MergedBlock(self._model, rounding=self.rounding)
                self._block.seed = now.seed
                self._block.enter()
                layers = with_rows(layers, zeros)
                before = None
            facts = facts_of(live(self._model)) if before is None or not values else before.facts
            now = now._replace(facts=facts, inside=tuple(map(_VERSION, now.weights)))
            states = [one for one in self._states if not one.written]
            known = next((one for one in states if one.same_bits(now)), None)
            if not ranks.any(known is None):
                assert known is not None
                # A backward pass of a forward from before may go on.
                now = now._replace(inside=known.inside, number=known.number)
                torch._C._autograd._unsafe_set_version_counter(now.weights, now.inside)
            self._layers, self._merged = layers, now
            self._memory = [here(p).untyped_storage() for p in now.adapters]
            self._states = [*(one for one in states if one is not known), now][-_MERGED_STATES:]
            self._guard(values)
            let_read(layers, self)
        except BaseException:
            self._leave()
            raise
        self.merges += 1

    def _hook(self, layers: dict[nn.Module, Acting]) -> None:
        """Have layers look for changes before they are called, and bases give adapters their gradients."""
        self._holders.cover(layers.values())
        self._around = {}
        for layer, acts in layers.items():
            if layer not in self._hooked:
                note_training(layer, self)
                self._hooks.append(layer.register_forward_pre_hook(self._before_layer, prepend=True))
                self._hooked.add(layer)
            if path_of(type(layer)) != PARAMETER:  # which the holders see to
                self._around.setdefault(acts.base, []).append(layer)
                self._bases.take(acts.base, self._at_base)

    def _leave(self) -> None:
        if self._merged is not None:
            self.before_write()
        try:
            self._block.leave()
        except BaseException:  # an interrupt may come before the first line of a function
            self._block.leave()
            raise
        finally:
            self._merged, self._memory = None, []

    def _leave_still(self) -> None:
        """Bring the base back unless another thread computes with what is merged."""
        if self._merged is not None and others_compute(self._computing):
            raise InvalidInput(
                "another thread is in a forward of this model, which computes with merged weights, and the base was "
                "asked for (a save, state_dict, a stream of the base, pause()): do that when the forward is over"
            )
        self._leave()

    def _guard(self, values: bool) -> None:
        """Let what `merged` refuses go on, on the base: what saves the model, and PEFT's own merging."""
        if not values:
            self._guards = [*guarded(list(self._model.modules())), (list(self._layers), ("merge", "unmerge"))]
        for modules, names in self._guards:
            insides = list(map(vars, modules))
            for name in names:
                if refuse in map(dict.get, insides, repeat(name)):
                    for module, inside in zip(modules, insides, strict=True):
                        if inside.get(name) is refuse:
                            inside[name] = partial(self._on_base, module, name)

    def _before_state(self, *args: object) -> None:
        """Bring the base back before a module's state is read or loaded."""
        if not self._closed:
            self.pause()

    def before_step(self, optimizer: Optimizer) -> None:
        """Bring the base back where an optimizer trains some of what is merged: it steps on the base, by the gradients
        of the merged weights."""
        if self._merged is not None:
            self._steps = self._steps or check_gradients(optimizer, self._merged.adapters)
            merged = self._block.weights
            trained = {id(w) for w in self._merged.weights if w.requires_grad and any(here(w) is m for m in merged)}
            if trained and any(id(p) in trained for group in optimizer.param_groups for p in group["params"]):
                self.pause()

    def _on_base(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a module once the base is back. PEFT's `unmerge` has nothing left to do then."""
        with self._lock:
            self._leave_still()
        return None if name == "unmerge" else getattr(module, name)(*args, **kwargs)

    # Forward and backward

    @untraced
    def _enter_model(self, module: nn.Module, args: Any) -> None:
        # A module that is entered stands in no forward of those inside it: such a one was interrupted (Ctrl-C).
        here = self._forward
        if self._closed:
            return
        check_own(module, self._tops)
        if here.outermost in self._tops[: self._tops.index(module)]:
            return
        raised, here.outermost = self._raised or here.outermost is not None, module
        here.awaited.clear()
        if not self._elsewhere():
            check_untransformed()
            if raised:
                Layout(self._model).give_up_forward()
            self._refresh(mode=module.training)
        self._computing.add(get_ident())

    @untraced
    def _leave_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._forward.outermost:
            self._forward.outermost, self._raised = None, output is None
            self._computing.discard(get_ident())
            if output is not None:
                check_called(self._forward.awaited, self._layers)
        if self._sharded and self._merged is not None and torch.is_grad_enabled():
            # Once units are gathered for a backward pass, it is too late to merge for it.
            gathered.ask_first(output, self._ready())

    def _elsewhere(self) -> bool:
        """Return True inside a `merged` block of the user's, which leaves nothing to do here."""
        return self._merged is None and any(vars(layer).get("merged_adapters") for layer in self._layers)

    def _before_layer(self, layer: nn.Module, args: Any) -> None:
        """Merge where a part of the model is called by itself, after a change that no forward of the whole has seen."""
        if torch.compiler.is_compiling() or self._closed:
            return
        check_own(layer, self._layers)
        if self._busy != get_ident() and self._is_due(layer):
            self._refresh()
        if "forward" in vars(layer) and self._merged is not None and torch.is_grad_enabled():
            self._forward.awaited.add(layer)

    def _is_due(self, layer: nn.Module) -> bool:
        """Return True if the adapters have to be merged before a layer is called."""
        now = self._merged
        if self._forward.outermost is None:
            if self._elsewhere():
                return False
            # What gradient checkpointing calls again in a backward pass is to be what it was.
            return now is None or (this_backward() == -1 and (now.may_be_written or not self._layers[layer].stands))
        # In a forward of the model somebody has brought the base back: a hook that saves, or streams the base.
        left = now is None and acts_in(layer) and not self._elsewhere()
        if left and self._sharded:
            raise InvalidInput(
                "the base weights were brought back in the middle of a forward, by a save, a stream or pause(), and a "
                "sharded model cannot be merged again there: do that before or after the forward"
            )
        return left

    def _at_base(self, base: nn.Module, forward: Callable[..., Tensor], /, *args: Any, **kwargs: Any) -> Tensor:
        """Call a base's own forward, and give the adapters of the layers around it their gradients."""
        if self._closed or self._merged is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        layers = self._around.get(base, ())
        adapted = [self._layers[layer] for layer in layers if layer in self._layers]
        held: list[Any] = [()] * len(adapted)
        x, *rest = args or kwargs.values()
        if args and not torch.compiler.is_compiling():
            self._forward.awaited.difference_update(layers)
            # Where the way back to the adapters can begin at the input, it does.
            for number, acts in enumerate(adapted):
                x, held[number] = acts.attach_to_input(x)
            args = (x, *rest)
        y = forward(*args, **kwargs)
        for acts, some in zip(adapted, held, strict=True):
            y = acts.attach(y, x, self._ready(acts), some)
        return y

    def _standing(self) -> Callable[[], None] | None:
        """Return `_ready` of a forward that begins now; None where it has no merged weights or no gradients."""
        return self._ready() if self._merged is not None and torch.is_grad_enabled() else None

    def _ready(self, acts: Acting | None = None) -> Callable[[], None]:
        """Return what a backward pass asks before it reads weights: that they hold what the forward computed with.

        Args:
            acts: in the layer that it comes to: optimizers that step inside of the pass may have stepped others by
                then. None: it comes to all.
        """
        forward = self._merged

        def ready() -> None:
            assert forward is not None
            if self._closed:
                raise InvalidInput(
                    "a backward pass of a forward that computed with merged weights, which training.close() has taken "
                    "back meanwhile: call backward() before close()"
                )
            if self._merged is None or self._merged.number != forward.number:
                self._refresh()
            stepped = forward.have_stepped(forward.adapters if acts is None else acts.parameters)
            if self._merged is None or self._merged.number != forward.number or stepped:
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
    training._closed, training._merged, training._layers, training.merges = True, None, {}, 0
    training._forward, training._raised, training._sharded = Forward(), False, False
    return training


def train_merged(model: nn.Module, *, rounding: Rounding = "nearest") -> Training:
    """Train on the merged weights from here on: forward and backward compute with the bits that are served.

        training = lora_merge.train_merged(model)    # after get_peft_model, fully_shard, DDP
        ...                                          # train as ever
        training.close()                             # the base is back, bit for bit

    The base weights hold `round(W + scaling * lora_B @ lora_A)`, adapted layers compute `x W'^T`, and gradients go
    straight through the rounding to the adapters. The first forward after an optimizer step merges anew; several
    forwards between two steps do not. `MergedWeights`, `VllmSync` and `SglangSync` read the weights as they lie;
    `save_merged`, `save_pretrained`, `state_dict`, `disable_adapter()` and `set_adapter` get the base back by
    themselves, exactly, and the next forward merges again. What is pushed has the same bits as what the last forward
    computed with.

    Args:
        model: a PEFT model with LoRA or DoRA on Linear, Embedding or Conv layers, LoRA on parameters (fused experts) or
            trainable tokens; plain, under DDP, FSDP, DeepSpeed's ZeRO (the engine) or tensor parallelism by
            `parallelize_module`: docs/training.md. Where it is sharded, making it and its forwards are collective.
        rounding: "nearest", or "stochastic", which keeps updates below half a step on average. What pushes or streams
            the model needs the same one, and has the trainer's draw: one for each version of the adapters. It takes
            several passes over the weights, see docs/training.md.

    Raises:
        InvalidInput: float32 weights with rounding="stochastic", which rounds none of theirs; `lora_dropout` above 0 (a
            weight cannot express it); no LoRA layers; or a layout that cannot be trained so.
        UnsupportedAdapter: an adapter that cannot be trained so, or not merged at all. Nothing was changed.
    """
    return Training(model, rounding)
