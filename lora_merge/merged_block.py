"""`MergedBlock`, the steps of `merged`: entered, brought from one state of the adapters to the next, and left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from itertools import compress, count
from math import prod
from operator import attrgetter, ne
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .choices import Rounding, Strategy
from .errors import InvalidInput, NotRestored
from .kept_merges import KeptMerges, forget, make_merges, merges_for
from .kernels import backend as kernels
from .merge_in_place import InPlaceMerge, copy_bits
from .models.claims import Look, merging, to_the_end
from .models.delta import Delta, Job, LazyList
from .models.live import Live, live
from .models.peft.chosen import activated, turn
from .models.snapshot import Layed, Owners
from .shards import Address, here
from .shards.ranks import noted

_VERSION = attrgetter("_version")
_FIRST_VERSION = 1 << 31
_VERSIONS = 64
"""Version counters inside a block begin at a multiple of `_VERSIONS` beyond `_FIRST_VERSION`, half of their range."""
_entries = count()


class MergedBlock:
    """What `merged` does, in steps: a block that is entered, brought to what the adapters are now, and left.

        block = MergedBlock(model)
        try:
            block.enter()
            ...  # train the adapters
            if not block.remerge(values=True):
                block.leave()
                block = MergedBlock(model)
                block.enter()
        finally:
            block.leave()

    Args:
        model, adapter_names, strategy: as of `merged`.
        rounding: "nearest" or "stochastic", as of `Plan.run`.

    Attributes:
        seed: of stochastic rounding: the next merge draws with it. None for "nearest".
    """

    def __init__(
        self,
        model: Any,
        *,
        adapter_names: tuple[str, ...] | None = None,
        strategy: Strategy | None = None,
        rounding: Rounding = "nearest",
    ) -> None:
        self.seed: int | None = None
        self._model, self._names, self._strategy, self._rounding = model, adapter_names, strategy, rounding
        self._undo = ExitStack()
        self._found: Live | None = None
        self._layers: list[object] = []
        self._weights: dict[Address, Tensor] = {}
        self._way_back: _Restore | None = None
        self._known: KeptMerges | None = None

    @property
    def weights(self) -> Sequence[Tensor]:
        """What is merged, or what is here of it."""
        return list(self._weights.values())

    def enter(self) -> None:
        """Merge. `leave` has to follow, also where this raises, as `merged` does."""
        with turn(self._model, self._names):
            way_back = self._read()
        self._run(way_back.merges, way_back.note, way_back.merge)

    def _read(self) -> _Restore:
        """Read the model, claim what is to be merged, and plan it."""
        undo = self._undo
        undo.enter_context(activated(self._model, self._names))
        self._found = found = live(self._model)
        with found.ranks.vote("merged"):
            with Look() as left:
                self._layers, deltas = found.adapters()
                self._weights = weights = found.weights(deltas)
                if not isinstance(deltas, LazyList):  # else they are what was merged before
                    _check(weights, deltas)
                undo.enter_context(merging(self._layers, weights, left))
            for _ in range(2):  # An interrupt may come where the stack has let go of a step but not yet begun it.
                undo.callback(to_the_end, self._on)
            self._way_back = way_back = _Restore(found, weights)
            undo.push(way_back)
            undo.enter_context(way_back)
            jobs = undo.enter_context(found.jobs(deltas, way_back.copy))
        undo.callback(found.reshard)
        found.reshard()  # here, where every rank does: what some have gathered and others not, no forward gathers
        self._known = merges_for(found, bool(self._layers), deltas, jobs, self._strategy, self._rounding)
        way_back.merges = self._known.merges
        return way_back

    def leave(self) -> None:
        """Bring the base back, bit for bit. May be called again, and is where an interrupt has ended it.

        Raises:
            NotRestored: as `merged`.
        """
        to_the_end(lambda: self._undo.__exit__(*sys.exc_info()))

    def remerge(self, *, values: bool) -> bool:
        """Merge the adapters as they are now in the place of those that are merged: `leave` and `enter`, bit for bit,
        in one pass over the weights where the backend can (`TrackedPlan.remerge`). Version counters go on as by
        another block.

        It serves where the same layers change the same weights, each where it lies, and without DoRA, whose factors
        are made of the base. From the first time on a second copy of the adapters is held. Collective over the ranks.

        Args:
            values: whether nothing but values of the adapters has changed since the block was entered, or since the
                last time; False looks at the model.

        Returns:
            False where it does not serve, on some rank: nothing was changed.

        Raises:
            as `enter` and `leave`. The base is back then.
        """
        way_back, found = self._way_back, self._found
        assert way_back is not None
        assert found is not None
        try:
            known = self._with_others(values)
            if known is None:
                return False
            assert self._found is not None
            self._found.reshard()
            assert known.others is not None
            others = known.others
            self._run(others, kernels.idle, lambda: way_back.remerge(others))
            known.merges, known.others = others, known.merges
            if known is not self._known:  # those before were made for other scalings or adapters
                known.others = None
                self._known = known
                known.keep(found.key)
        except BaseException:
            self.leave()
            raise
        return True

    def stands(self) -> bool:
        """Return True if the adapters still hold the bits that are merged, where nothing but their values may have
        changed; False, too, where that cannot be told without a merge. Collective over the ranks."""
        known, found = self._with_others(values=True), self._found
        assert found is not None
        if known is None:
            return False
        assert known.others is not None
        errors: list[Exception] = []  # which the merge that follows raises anew
        with torch.inference_mode():
            for some in known.others:
                with noted(errors):
                    some.gather(kernels.idle)
            same = known is self._known and not errors
            same = same and all(map(InPlaceMerge.read_as, known.others, known.merges))
        return not found.ranks.any(not same)

    def _with_others(self, values: bool) -> KeptMerges | None:
        """Return the merges with those that come in their place; None where one pass does not serve, on some rank.

        Args:
            values: as for `remerge`.
        """
        found, known = self._found, self._known
        assert found is not None
        assert known is not None
        stands = known.kept and known.stand(known.facts, self._strategy, self._rounding)
        serves = stands and not any(merge.needs_base for merge in known.merges)
        if found.ranks.any(not (serves and values and known.others is not None)):
            outside: _Outside | None = None
            with suppress(Exception):  # `enter` says of what
                outside = self._outside(found) if serves else None
            if found.ranks.any(outside is None):
                return None
            assert outside is not None
            known = self._prepare(known, outside)
        return known

    def _outside(self, found: Live) -> _Outside | None:
        """Return the model as it is beside what is merged, where its adapters change the same weights in place."""
        found.on()
        try:
            now = live(self._model)
            layers, deltas = now.adapters()
            weights = now.weights(deltas)
            there, before = [*weights, *map(id, weights.values())], [*self._weights, *map(id, self._weights.values())]
            if there != before or set(map(id, layers)) != set(map(id, self._layers)):
                return None  # other weights, or weights that have changed places
            with now.jobs(deltas, _no_copy) as jobs:
                alone = all(job.source is job.destination and job.delta.magnitude is None for job in jobs)
                return _Outside(now, deltas, list(jobs)) if alone else None
        finally:
            found.off()

    def deltas(self) -> list[Delta]:
        """Return what the adapters add that are merged. Every rank calls it, as it reads the model."""
        found = self._found
        assert found is not None
        found.on()
        try:
            return list(live(self._model).adapters()[1])
        finally:
            found.off()

    def _prepare(self, known: KeptMerges, outside: _Outside) -> KeptMerges:
        """Return what `remerge` runs: `others` are what comes in the place of what is merged."""
        made = make_merges(outside.model, outside.deltas, outside.jobs, self._strategy, self._rounding)
        before, self._found = self._found, outside.model
        assert before is not None
        assert self._way_back is not None
        before.on()
        self._way_back.adopt(outside.model)
        if made.facts == known.facts:
            known.others = made.merges
            return known
        return replace(made, merges=known.merges, others=made.merges)

    def _on(self) -> None:
        if self._found is not None:
            self._found.on()

    def _run(self, merges: Sequence[InPlaceMerge], first: Callable[[], object], merge: Callable[[], object]) -> None:
        """Gather what merges read of the adapters, and merge, on every rank or on none."""
        assert self._found is not None
        errors: list[Exception] = []
        with torch.inference_mode():
            for some in merges:
                some.seed = self.seed
                with noted(errors):
                    some.gather(first)
            with self._found.ranks.vote("merged"):
                if errors:
                    raise errors[0]
                merge()


class _Outside(NamedTuple):
    """A model as it would be read outside of its block.

    Args:
        model: with its adapters read, to be switched off.
        deltas, jobs: what its adapters add, and where.
    """

    model: Live
    deltas: Sequence[Delta]
    jobs: Sequence[Job]


def _no_copy(where: Address) -> Tensor:
    raise InvalidInput("a tied weight that has to be separated")


def _check(weights: dict[Address, Tensor], deltas: Sequence[Delta]) -> None:
    for delta in deltas if any(weight.is_meta for weight in weights.values()) else ():
        if delta.weight.device.type == "meta":
            raise InvalidInput(f"{delta.name}: the weight is a meta tensor and holds no values; load it first")


def _count(weights: tuple[Tensor, ...]) -> None:
    """Set the version counters of weights to a number that they had never before."""
    number = _FIRST_VERSION + next(_entries) % (_FIRST_VERSION // _VERSIONS) * _VERSIONS
    torch._C._autograd._unsafe_set_version_counter(weights, (number,) * len(weights))


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
        self._process = os.getpid()
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

    def adopt(self, model: Live) -> None:
        """Go on with another reading of the model, and switch its layers off."""
        self._model = model
        model.off()

    def remerge(self, merges: list[InPlaceMerge]) -> None:
        """Merge these in the place of those that are merged."""
        self._check_process()
        before, self.merges = self.merges, [*merges, *self.merges]  # either may be merged when this is ended early
        _count(self._counted)
        try:
            for merge, last in zip(merges, before, strict=True):
                merge.remerge(last, self._weights.values())
        except NotRestored as error:  # the way back, which follows, says so
            self._errors.append(error)
            raise
        self.merges = merges

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
        # All or nothing, also where an interrupt comes.
        self._storages, self._places, self._found, self._sizes = storages, places, places, sizes
        self._layouts, self._owners = layouts, owners
        self._counted, self._versions = counted, versions
        _count(counted)
        self._model.off()
        self._noted = True

    def __exit__(self, *exception: object) -> None:
        if not self._left:
            to_the_end(self._leave)

    def _leave(self) -> None:
        """Put everything back. May be begun again after an interrupt."""
        self._check_process()
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
                self._check_places(lost, "Parameter, or none,", "parameters")
            with noted(self._errors):
                self._check_places(cut_off, "module", "modules")
        if self._errors:
            forget(self._model.key)  # what could not be unmerged is merged for good
            self._left = True
            raise NotRestored("; ".join(map(str, self._errors))) from self._errors[0]
        torch._C._autograd._unsafe_set_version_counter(self._counted, self._versions)
        self._left = True

    def _check_process(self) -> None:
        """Refuse to write to memory that is shared with the process which this one was forked from."""
        if os.getpid() != self._process and any(weight.is_shared() for weight in self._weights.values()):
            raise InvalidInput(
                f"the base weights of this model are merged, and lie in memory that is shared with process "
                f"{self._process}, which merged them and goes on with them: leave merged(), or pause() the training, "
                "there before this process is forked off, or do there what needs the base"
            )

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
        gone = self._spans(map(ne, self._places, now))
        forget(self._model.key)  # they are merged for good
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
            spans = self._spans(id(weight) in ids for weight in self._weights.values())
            told = {name for name in lost if isinstance(name, str)}
            names = self._names(lambda place: any(place in span for span in spans)) or ", ".join(sorted(told))
            raise NotRestored(
                f"{names}: another {what} took their place inside merged(), and only those that were there before get "
                "the base back. What lies in memory of its own was put there inside, merged or not: load that again. "
                f"What lies in theirs is as theirs. Replace {those} outside of the block"
            )

    def _spans(self, which: Iterable[bool]) -> list[range]:
        """Return the addresses of some of the weights, as they were."""
        places = compress(zip(self._weights, self._layouts, strict=True), which)
        return [range(begin, begin + prod(shape) * dtype.itemsize) for (begin, _), (shape, _, dtype) in places]

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
