"""`merged(model)`: the adapters in the base weights for the time of a `with` block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import compress, count
from math import prod
from operator import attrgetter, ne
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .errors import InvalidInput, NotRestored
from .kernels import backend as kernels
from .merge_in_place import InPlaceMerge, UnshardedMerge, copy_bits
from .models.claims import Look, merging, to_the_end
from .models.delta import Delta, Job, LazyList
from .models.frozen import warn_if_frozen
from .models.live import Live, live
from .models.peft.chosen import check_names, chosen
from .models.snapshot import Layed, Owners
from .shards import Address, here
from .shards.exchange import check_strategy
from .shards.ranks import noted

Model = TypeVar("Model")

_VERSION = attrgetter("_version")
_FIRST_VERSION = 1 << 31
_VERSIONS = 64
"""Version counters inside a block begin at a multiple of `_VERSIONS` beyond `_FIRST_VERSION`, half of their range."""
_entries = count()
_merges: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


class _Known(NamedTuple):
    """The merges of a model, one a device, and what they were made for.

    Args:
        facts: of its snapshot.
        strategy: see `merged`.
        backends: of the devices.
    """

    facts: list[Any]
    strategy: str | None
    backends: dict[torch.device, kernels.Backend]
    merges: list[InPlaceMerge]

    def stand(self, facts: list[Any], strategy: str | None) -> bool:
        same = all(kernels.pick(device) is backend for device, backend in self.backends.items())
        return same and self.strategy == strategy and (self.facts is facts or self.facts == facts)


@contextmanager
def merged(
    model: Model,
    *,
    adapter_names: Sequence[str] | None = None,
    restore: str = "exact",
    strategy: str | None = None,
) -> Iterator[Model]:
    """Merge the active adapters into the base weights for the time of a `with` block, and restore every bit after it.

        with lora_merge.merged(model):
            model.generate(input_ids=prompt, max_new_tokens=16)

    Inside the block the base weights hold `round(W + scaling * lora_B @ lora_A)` and the adapters add nothing on top.
    After the block, also when it raises, every parameter and buffer is bit for bit what it was. Adapters are merged as
    they stand: live scalings, several at once (rounded once), DoRA, `lora_bias`, fused experts. Weights stay at their
    addresses, so compiled modules stay valid, and CUDA graphs that were captured inside a block. `requires_grad`,
    gradients, optimizer state and PEFT's flags are not touched.

    What recorded the forward before the block (a CUDA graph, `torch.jit.trace`, `torch.export`) has the adapters in it
    and adds them once more inside; docs/compile.md. Let no forward run in another thread while a block is entered or
    left.

    Train outside of the block, or keep forward and backward both inside: autograd refuses a backward pass that crosses
    the border. `save_pretrained` and the like are refused inside, on the model and on its parts; `state_dict()` is not,
    and holds merged values under the adapted model's names.

    Sharded models (FSDP2, FSDP1, DeepSpeed ZeRO-3, Megatron): call it on every rank. Each rank merges what it holds,
    and only parts of adapters cross between ranks. Units that are gathered at the moment are resharded at entry and
    exit.

    Time: a merge at entry and one at exit; each waits once for the device (of float16 twice at entry: values beyond
    65504 are refused). Memory while inside: 2 bits for each element
    of the adapted weights, and what rounding moved further than one step; together 0.15 of the bytes of a bf16 weight
    and 0.08 of a float32 one for updates up to a tenth of the weights, 0.25 of a bf16 one for updates of their size, at
    most 1.14. From the first entry on also a copy of the adapters, so that they may be trained or replaced inside. A
    tied weight takes one or two copies of itself. How it works: docs/restore.md.

    Do not write to merged weights inside. Such a write is found by a checksum at exit (`NotRestored`). A parameter that
    was moved (`parameter.data = ...`) gets the base where it is now. Work on merged weights by other CUDA streams must
    be waited for before the block ends.

    Args:
        model: a `PeftModel`, any module that holds PEFT's LoRA layers, a `DeepSpeedEngine`, or the list of chunks of a
            megatron-core model (or `lora_merge.megatron.Chunks`).
        adapter_names: of PEFT's adapters: exactly these are merged, and the others do not act inside. Default: those
            that act (`set_adapter`).
        restore: "exact", the only way.
        strategy: None merges weights where they lie. "unshard" gathers sharded weights, merges them whole and cuts them
            again, bucket by bucket: the same bits, for their bytes over the network; and it keeps a plain copy of the
            weights instead of 2 bits an element.

    Yields:
        `model`.

    Raises:
        InvalidInput: an unknown option or adapter, no LoRA layers, a weight that does not fit, ranks that disagree, or
            a stream (`MergedWeights`, `VllmSync`) of these weights that is under way. On every rank, before anything is
            written. Or merged values of float16 that are infinite or NaN where the base is not: on every rank, once the
            base is back.
        UnsupportedAdapter: an adapter without an exact merge; names the module and the reason. As above.
        AlreadyMerged: the weights hold adapters already, or the model is inside `merged` now. As above.
        NotRestored: at exit, on the rank that finds it: merged weights were written inside, their memory was given
            back, or another Parameter took their place. Names them; all others are restored.
    """
    if restore != "exact":
        raise InvalidInput(f"restore must be 'exact', got {restore!r}")
    check_strategy(strategy)
    names = check_names(adapter_names)
    warn_if_frozen()
    undo = ExitStack()
    try:
        undo.enter_context(chosen(model, names))
        found = live(model)
        with found.ranks.vote("merged"):
            with Look() as left:
                layers, deltas = found.adapters()
                weights = found.weights(deltas)
                if not isinstance(deltas, LazyList):  # else they are what was merged before
                    _check(weights, deltas)
                undo.enter_context(merging(layers, weights, left))
            for _ in range(2):  # An interrupt may come where the stack has let go of a step but not yet begun it.
                undo.callback(to_the_end, found.on)
            way_back = _Restore(found, weights)
            undo.push(way_back)
            undo.enter_context(way_back)
            jobs = undo.enter_context(found.jobs(deltas, way_back.copy))
        undo.callback(found.reshard)
        found.reshard()  # here, where every rank does: what some have gathered and others not, no forward gathers
        way_back.merges = _merges_for(found, bool(layers), deltas, jobs, strategy)
        errors: list[Exception] = []
        with torch.inference_mode():
            for merge in way_back.merges:
                with noted(errors):
                    merge.gather(way_back.note)
            with found.ranks.vote("merged"):
                if errors:
                    raise errors[0]
                way_back.merge()
        yield model
    finally:
        try:
            to_the_end(lambda: undo.__exit__(*sys.exc_info()))
        except BaseException:  # an interrupt may come before the first line of a function
            to_the_end(lambda: undo.__exit__(*sys.exc_info()))
            raise


def _check(weights: dict[Address, Tensor], deltas: Sequence[Delta]) -> None:
    for delta in deltas if any(weight.is_meta for weight in weights.values()) else ():
        if delta.weight.device.type == "meta":
            raise InvalidInput(f"{delta.name}: the weight is a meta tensor and holds no values; load it first")


class _Restore:
    """Brings weights back when the block is left.

    Version counters are at a number inside that no other block and nothing outside has, and go back with the bits:
    autograd then refuses a backward pass that crosses the border of a block, and allows one that starts and ends
    outside.
    """

    def __init__(self, model: Live, weights: dict[Address, Tensor]) -> None:
        self._model, self._weights = model, weights
        self._storages: list[torch.UntypedStorage] = []
        self._places: list[int] = []
        self._found: list[int] = []
        self._sizes: list[int] = []
        self._counted: tuple[Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._owners = Owners([], [], [])
        self._layouts: Sequence[Layed] = []
        self._copies: dict[Address, Tensor] = {}
        self._errors: list[Exception] = []
        self._left = True
        self._noted = False
        self.merges: list[InPlaceMerge] = []

    def copy(self, where: Address) -> Tensor:
        """Return a copy of the base of a weight: for users of a tied one that must not see it merged."""
        if where not in self._copies:
            with torch.inference_mode(False):
                self._copies[where] = torch.empty_like(self._weights[where].data)
            copy_bits(self._copies[where], self._weights[where].data)
        return self._copies[where]

    def __enter__(self) -> _Restore:
        self._left = False
        return self

    def merge(self) -> None:
        """Merge all. While a device works, note what the way back needs and switch PEFT's layers off."""
        for merge in self.merges:
            merge.merge(self.note, self._weights.values())
        self.note()

    def note(self) -> None:
        """Note what the way back needs, and switch PEFT's layers off; the first call does it."""
        if self._noted:
            return
        weights = list(self._weights.values())
        # This memory is what is merged and what is restored, wherever the parameters go meanwhile.
        storages = list(map(Tensor.untyped_storage, weights))
        places = list(map(torch.UntypedStorage.data_ptr, storages))
        sizes = list(map(torch.UntypedStorage.nbytes, storages))
        layouts, owners = self._model.layouts(self._weights), self._model.owners(self._weights)
        if any(map(Tensor.is_inference, weights)):
            weights = [weight for weight in weights if not weight.is_inference()]
        counted = tuple(weights)
        versions = tuple(map(_VERSION, counted))
        inside = (_FIRST_VERSION + next(_entries) % (_FIRST_VERSION // _VERSIONS) * _VERSIONS,) * len(counted)
        # All or nothing, also where an interrupt comes.
        self._storages, self._places, self._found, self._sizes = storages, places, places, sizes
        self._layouts, self._owners = layouts, owners
        self._counted, self._versions = counted, versions
        torch._C._autograd._unsafe_set_version_counter(counted, inside)
        self._model.off()
        self._noted = True

    def __exit__(self, *exception: object) -> None:
        if not self._left:
            to_the_end(self._leave)

    def _leave(self) -> None:
        """Put everything back. May be begun again after an interrupt."""
        self._check_memory()
        found: list[tuple[list[bool], list[Tensor | str], list[Tensor | str]]] = []

        def look() -> None:
            with noted(self._errors):
                self._model.on()
                found[:] = [(self._moved(), self._owners.lost(), self._owners.cut_off())]

        aside = cache(look)  # a merge may call it while the device works
        for merge in self.merges:
            with noted(self._errors):
                merge.unmerge(aside)
        aside()
        for moved, lost, cut_off in found:
            self._put(moved)
            with noted(self._errors):
                self._check_places(lost, "Parameter", "parameters")
            with noted(self._errors):
                self._check_places(cut_off, "module", "modules")
        if self._errors:
            _merges.pop(self._model.key, None)  # what could not be unmerged is merged for good
            self._left = True
            raise NotRestored("; ".join(map(str, self._errors))) from self._errors[0]
        torch._C._autograd._unsafe_set_version_counter(self._counted, self._versions)
        self._left = True

    def _check_memory(self) -> None:
        """Check that the memory is where it was. What became shared memory (a weight was sent to another process) is
        found there; nothing is restored by address if an address is no longer what it was."""
        now = list(map(torch.UntypedStorage.data_ptr, self._storages))
        if now == self._found:
            return
        sizes = list(map(torch.UntypedStorage.nbytes, self._storages))
        moves = [
            (range(place, place + size), there - place)
            for place, size, there in zip(self._found, sizes, now, strict=True)
            if place != there
        ]
        there = all(place or not size for place, size in zip(now, sizes, strict=True))
        if there and sizes == self._sizes and all(merge.moved(moves) for merge in self.merges):
            self._found = now
            return
        gone = [
            range(begin, begin + prod(shape) * dtype.itemsize)
            for (begin, _), (shape, _, dtype), place, there in zip(
                self._weights, self._layouts, self._places, now, strict=True
            )
            if place != there
        ]
        _merges.pop(self._model.key, None)  # they are merged for good
        self._left = True
        names = self._names(lambda place: any(place in addresses for addresses in gone))
        raise NotRestored(
            f"{names}: the memory of these weights was resized or given back inside merged(), so that "
            "no weight of the model could be restored; load the base again"
        )

    def _check_places(self, lost: Sequence[Tensor | str], what: str, those: str) -> None:
        """Refuse another Parameter in the place of the restored one, or a module with one: what it does in the model is
        not known here."""
        if lost:
            ids = set(map(id, lost))
            spans = [
                range(begin, begin + prod(shape) * dtype.itemsize)
                for ((begin, _), w), (shape, _, dtype) in zip(self._weights.items(), self._layouts, strict=True)
                if id(w) in ids
            ]
            told = {name for name in lost if isinstance(name, str)}
            names = self._names(lambda place: any(place in span for span in spans)) or ", ".join(sorted(told))
            raise NotRestored(
                f"{names}: another {what} took their place inside merged() and holds what "
                "was there then, merged or not; the base came back to those that were there before. Load these weights "
                f"again, and replace {those} outside of the block"
            )

    def _names(self, there: Callable[[int], bool]) -> str:
        """Return the names of what is merged at some addresses."""
        places = (place for merge in self.merges for place in merge.places)
        return ", ".join(dict.fromkeys(name for name, place in places if there(place)))

    def _moved(self) -> list[bool]:
        """Return for each weight whether it is elsewhere now; nothing where none is."""
        now = list(map(Tensor.data_ptr, self._weights.values()))
        begins = [begin for begin, _ in self._weights]
        return [] if now == begins or not self._storages else list(map(ne, now, begins))

    def _put(self, moved: Sequence[bool]) -> None:
        """Copy the base to where the parameters are now."""
        if not moved:
            return
        everything = zip(self._weights.items(), self._storages, self._places, self._layouts, strict=True)
        pairs = []
        for ((begin, device), weight), storage, place, (shape, strides, dtype) in compress(everything, moved):
            memory = torch.empty(0, dtype=dtype, device=device)
            memory.set_(storage, (begin - place) // dtype.itemsize, shape, strides)
            pairs.append((weight.data, memory))
        # Where some have changed places, what one is copied over is the base of another.
        written = {here(weight).untyped_storage().data_ptr() for weight, _ in pairs}
        bases = [m.clone() if m.untyped_storage().data_ptr() in written else m for _, m in pairs]
        for (weight, _), base in zip(pairs, bases, strict=True):
            copy_bits(weight, base)


def _merges_for(
    model: Live, adapted: bool, deltas: Sequence[Delta], jobs: Sequence[Job], strategy: str | None
) -> list[InPlaceMerge]:
    """Return the merges of an earlier entry if nothing that they depend on has changed on any rank, or new ones."""
    known, ranks, facts = _merges.get(model.key), model.ranks, model.snapshot().facts
    if not ranks.any(known is None or not known.stand(facts, strategy)):
        assert known is not None
        return known.merges
    if not ranks.any(adapted):
        raise InvalidInput("the model has no LoRA layers; pass the PeftModel, not its bare base")
    deltas = model.everyones(deltas)
    lines = [f"strategy={strategy!r}", *(delta.describe() for delta in deltas)]
    ranks.same(lines, lambda: lines)
    make = UnshardedMerge if strategy == "unshard" and not ranks.alone else InPlaceMerge
    with ranks.vote("merged"):
        merges = {
            device: make(
                [delta for delta in deltas if delta.weight.device == device],
                [job for job in jobs if job.source.device == device],
                model.merging if make is InPlaceMerge else ranks,
                device,
            )
            for device in sorted({delta.weight.device for delta in deltas}, key=str)
        }
    if make is InPlaceMerge and all(job.source is job.destination for job in jobs):  # no tensors of this entry only
        for merge in merges.values():
            merge.release()  # what the model lets go of between entries (offloading, a sleep) is freed
        backends = {device: kernels.pick(device) for device in merges}
        _merges[model.key] = _Known(facts, strategy, backends, list(merges.values()))
    return list(merges.values())
