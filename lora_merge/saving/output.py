"""One checkpoint that is made: what each tensor of the base becomes in it, and the values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..choices import Tokenizer
from ..kernels.packed import Packed, moved
from ..kernels.plan import Plan
from ..kernels.ranges import Made, check_range, narrows, run_in_range
from ..kernels.segments import FLOATS, Segment, copies
from ..models.delta import Delta, Factors, Job, whole_job
from ..models.operands import Operands, Turn, merge_plan
from ..shards import Shard, cut, whole
from ..shards.ranks import Ranks
from ..stream.buckets import Meta
from ..stream.source import Entry
from .adapters import Sum, assembled, names_in, untied
from .checkpoint import Checkpoint, with_dtype
from .chunks import Rows
from .tokenizer import aligned, along_with
from .writer import Writer, shards_of


class Target(NamedTuple):
    """A tensor of an output that is made of one of the base's.

    Args:
        name: of the output's tensor.
        entry: what transformers makes of it; None for one that it does not know.
    """

    name: str
    entry: Entry | None


class Output:
    """One checkpoint that is made: which tensor of the base becomes which tensors of it, and how."""

    def __init__(
        self,
        base: Checkpoint,
        adapters: Sum,
        out: Path,
        dtype: torch.dtype | None,
        device: torch.device,
        run: Mapping[str, Any],
        shard_size: int | None,
        tokenizer: Tokenizer | None,
        force: bool,
        verify: bool,
    ) -> None:
        adapters.check()
        self.base, self.adapters, self.device, self.run = base, adapters, device, dict(run)
        self._dtype = dtype
        found = names_in(base, adapters)
        self._names = {entry.meta.name: name for name, entry in found.items()}
        self.targets = {name: [Target(name, found.get(name))] for name in base.tensors}
        config = self._add_apart(adapters.apart())
        if dtype is not None:
            config = with_dtype(config, dtype)
        folders = [(adapter.name, adapter.folder) for adapter in adapters.adapters]
        self.along = along_with(base.folder, base.along(), folders, tokenizer, adapters.rows)
        self._deltas = {
            source: _on(delta, device)
            for targets in self.targets.values()
            for target in targets
            for source in (target.entry.sources if target.entry is not None else ())
            if (delta := adapters.delta(source)) is not None
        }
        plain = [delta for delta in self._deltas.values() if delta.magnitude is None]
        self._operands = Operands([Turn(plain, everything={d.name for d in plain})], Ranks(), device)
        self._operands.refresh()
        self.changed = sum(self.changes(t) for targets in self.targets.values() for t in targets)
        files = {
            file: [self._wanted(base_name, target) for base_name in names for target in self.targets[base_name]]
            for file, names in base.files.items()
        }
        if shard_size is not None:
            files = shards_of([wanted for group in files.values() for wanted in group], shard_size)
        several = len(files) > 1 or base.index is not None
        self.writer = Writer(
            out,
            files,
            metadata=base.metadata,
            index=(base.index or {}) if (several and shard_size is None) or len(files) > 1 else None,
            config=aligned(config, self.along.tokens),
            along=self.along.files,
            made=self.along.made,
            force=force,
            check=verify,
        )

    def _add_apart(self, apart: Mapping[str, str]) -> dict[str, Any]:
        """Write tied tensors that differ once merged under all their names, as a config that unties some unties all;
        return the config."""
        if not apart:
            return dict(self.base.config)
        config = untied(self.base, self.adapters, apart)
        groups: dict[str, list[str]] = {}
        for name, kept in self.adapters.adapters[0].ties.items():
            groups.setdefault(kept, [kept]).append(name)
        for names in groups.values():
            there = next((self._names[name] for name in names if name in self._names), None)
            if there is not None:
                absent = [name for name in names if name not in self._names]
                self.targets[there] += [Target(name, self.adapters.entries[name]) for name in absent]
        return config

    def _wanted(self, base_name: str, target: Target) -> Meta:
        return Meta(target.name, self.dtype_of(base_name, target), self.base.tensors[base_name].shape)

    def dtype_of(self, base_name: str, target: Target) -> torch.dtype:
        """Return the dtype of a tensor of the output."""
        kept = self.base.kept(base_name)
        trained = target.entry is not None and self.adapters.part(target.entry.sources[0]).trained
        return self._dtype if self._dtype is not None and trained and kept in FLOATS else kept

    def changes(self, target: Target) -> bool:
        return target.entry is not None and any(self.adapters.changes(source) for source in target.entry.sources)

    def reads(self, target: Target) -> bool:
        """Return True if the base's values are needed for it."""
        return target.entry is None or any(self.adapters.whole(s) is None for s in target.entry.sources)

    def wholly(self, target: Target) -> bool:
        """Return True if it is made of whole parameters: of DoRA, whose rows have norms, or computed by a
        conversion."""
        if target.entry is None or not self.changes(target):
            return False
        deltas = [self._deltas.get(source) for source in target.entry.sources]
        return target.entry.window is None or any(d is not None and d.magnitude is not None for d in deltas)

    def make(self, target: Target, rows: Rows, chunk: Tensor | None, out: Tensor) -> None:
        """Make rows of a tensor.

        Args:
            chunk: the same rows of the base's tensor; None where they were not read.
            out: where they go, on the CPU.
        """
        source = chunk
        entry = target.entry
        delta = None
        if entry is not None and self.changes(target):
            assert entry.window is not None
            delta = self._deltas.get(entry.sources[0])
            values = self.adapters.whole(entry.sources[0])
            if values is not None:
                source = entry.window.fold(cut(values, entry.window.box))
                source = (source[rows.begin : rows.end] if source.dim() else source).contiguous()
        assert source is not None
        there = out if self.device.type == "cpu" else torch.empty_like(out, device=self.device)
        source = moved(source, self.device)
        if delta is None or entry is None or entry.window is None:
            finite = self._copy(target.name, source, there, rows)
        else:
            shape = tuple(source.shape)
            start, _ = entry.window.outer(((rows.begin, *(0 for _ in shape[1:])), shape))
            job = Job(delta, start, entry.window.unfold(source), entry.window.unfold(there))
            finite = merge_plan([job], self._operands).run(**self.run)
        if not finite and narrows(source.dtype, there.dtype, delta is not None):
            made = Made(target.name, source, there)  # of DoRA whole tensors are made: see make_wholly
            check_range([(target.name, there)], lambda: [made])
        if there is not out:
            out.copy_(there)

    def _copy(self, name: str, source: Tensor, out: Tensor, rows: Rows) -> bool | None:
        """Copy rows to the output's dtype; return what `Plan.run` returns."""
        if isinstance(source, Packed):
            return Plan([Segment(name, source, out, first=rows.begin * source.shape[1])]).run(**self.run)
        if source.dtype == out.dtype or source.dtype not in FLOATS:
            out.copy_(source)
            return None
        first = rows.begin * (source.numel() // max(source.shape[0], 1)) if source.dim() else 0
        flat = Segment(name, source.reshape(1, -1), out.view(1, -1), first=first, pitch=(source.numel(), 1))
        return Plan([flat]).run(**self.run)

    def make_wholly(self, targets: Mapping[str, tuple[str, Target]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors that share their parameters, each whole.

        Args:
            targets: name -> the base's tensor, and the target; all tensors of these parameters.
        """
        entries = {name: target.entry for name, (_, target) in targets.items()}
        sources = next(e.sources for e in entries.values() if e is not None)
        base_name, first = next(iter(targets.values()))
        dtype = self.dtype_of(base_name, first)
        merged: dict[str, Tensor] = {}
        stored = {base_name: entry_ for base_name, target in targets.values() if (entry_ := target.entry) is not None}
        for source, values in assembled(self.base, self.adapters, sources, stored).items():
            mine = self.adapters.whole(source)
            values = (values if mine is None else mine).to(self.device)
            out = torch.empty(values.shape, dtype=dtype, device=self.device)
            delta = self._deltas.get(source)
            if delta is None:
                plan = Plan(copies(source, values, out))
            else:
                here = replace(delta, weight=whole(values))
                operands = Operands([Turn([here], everything={here.name})], Ranks(), self.device)
                operands.refresh()
                plan = merge_plan([whole_job(here, values, out)], operands)
            run_in_range(plan, self.run)
            merged[source] = out
        for name, entry in entries.items():
            assert entry is not None
            if entry.window is None:
                made = self.adapters.conversion.compute(merged, entry.meta.name)
            else:
                made = entry.window.fold(cut(merged[entry.sources[0]], entry.window.box))
            yield name, made.cpu().contiguous()


def _on(delta: Delta, device: torch.device) -> Delta:
    """Return a delta whose factors are read on a device."""

    def there(shard: Shard) -> Shard:
        return whole(shard.pieces[0].tensor.to(device))

    factors = tuple(Factors(there(f.lora_A), there(f.lora_B), f.scaling) for f in delta.factors)
    magnitude = None if delta.magnitude is None else there(delta.magnitude)
    rows = tuple(replace(some, values=there(some.values)) for some in delta.rows)
    return replace(delta, factors=factors, magnitude=magnitude, rows=rows)
