"""A base and adapters on disk -> merged checkpoints on disk, the base read once, a chunk at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ..choices import DType, Rounding, Tokenizer
from ..errors import InvalidInput
from ..kernels.checks import check_device, check_dtype
from ..kernels.packed import Packed
from ..kernels.plan import check_rounding
from ..stream.buckets import dtype_name
from .adapters import Adapter, Sum, read_adapter
from .base import open_base
from .checkpoint import Checkpoint, find, readable
from .chunks import Ahead, Behind, Buffer, Buffers, Rows, rows_of
from .decoded import Decoded
from .format import as_bytes
from .notes import check_origins, notes_for
from .output import Output, Target
from .writer import SHARD_SIZE, absolute, check_target, size_of, together

Told = Callable[[int, int], None]
"""Is told the bytes that were written so far, and those of all."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that `merge_checkpoint` or `save_merged` has written; `print` it for a line.

    Args:
        folder: where the checkpoint is.
        adapters: what was merged, such as "a + 0.5 b".
        tensors, changed: number of its tensors, and of those that differ from the base's.
        nbytes: bytes of all tensors.
        files: number of weight files.
        seconds: how long it took; several outputs of one call share this time.
        verified: number of bytes that were read back and compared; None without `verify`.
        notes: warnings, such as an adapter that was trained on another base.
    """

    folder: Path
    adapters: str
    tensors: int
    changed: int
    nbytes: int
    files: int
    seconds: float
    verified: int | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        read_back = "" if self.verified is None else ", read back and compared"
        merged = f"{self.adapters} merged into {self.changed} of " if self.changed else "no adapter in "
        return (
            f"{self.folder}: {merged}{self.tensors} tensors, "
            f"{bytes_told(self.nbytes)} in {self.files} file{'s' * (self.files != 1)}, {self.seconds:.1f} s{read_back}"
        )


def bytes_told(nbytes: int) -> str:
    """Return a number of bytes in words."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def merge_checkpoint(
    base: str | Path,
    adapters: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    each: bool = False,
    scales: Mapping[str, float] | None = None,
    device: str | torch.device = "cpu",
    dtype: DType | None = None,
    rounding: Rounding = "nearest",
    seed: int | None = None,
    max_shard_size: int | str | None = None,
    tokenizer: Tokenizer | None = None,
    strict: bool = False,
    force: bool = False,
    verify: bool = False,
    progress: Told | None = None,
    shard_size: int | str | None = None,
) -> list[Saved]:
    """Merge adapters that PEFT has saved into a base on disk, and write the result as a checkpoint of its own.

        lora_merge.merge_checkpoint("Qwen/Qwen2.5-7B", "checkpoints/step-400", "merged")

    No model is loaded: the base's files are read a chunk at a time, merged with one rounding, and written. The result
    has the base's tensor names, files and config, and the adapter's tokenizer where that is another one. It is
    complete, or it is not there.

    Args:
        base: folder of a model in Hugging Face's layout, or the name of a repository on the hub (owner/name); one that
            is quantised, by bitsandbytes or as FP8 in blocks, is decoded, and the result is plain.
        adapters: folder or repository of an adapter, or a list of several, whose sum is merged.
        out: folder to write the checkpoint into.
        each: write one checkpoint for each adapter, `out`/<name of its folder>, instead of their sum.
        scales: name of an adapter's folder -> factor by which what it adds is multiplied; default: 1.
        device: device on which chunks are merged.
        dtype: dtype of floating-point parameters in the result: bfloat16, float16 or float32; default: the base's; of a
            quantised one what it was quantised from, or, where codes do not say, what its config says.
        rounding, seed: as in `merge`.
        max_shard_size: largest size of one weight file, in bytes or as "5GB"; default: the same files as the base; of a
            quantised base 5 GB.
        tokenizer: "base" or "adapter": whose tokenizer, chat template and processor go along; default: the adapter's
            where its folder has one that differs, and a note says in what.
        strict: refuse an adapter that, by what it says of its base and the base of itself, was trained on another one;
            default: warn (`DoubtfulBase`).
        force: replace everything that is in `out`.
        verify: read the result back from disk and compare checksums.
        progress: called with (bytes done, bytes in all) as it goes on.
        shard_size: the older name of max_shard_size.

    Returns:
        what was written: one entry, or one for each adapter with `each`.

    Raises:
        InvalidInput: something is missing, broken, does not fit, or cannot be written; nothing is left of the output.
        UnsupportedAdapter: an adapter has no exact merge; names the layer and the reason.
        MissingExtra: peft or transformers is not installed.
    """
    check_rounding(rounding, seed)
    dtype = check_dtype(dtype)
    device = check_device(device)
    if shard_size is not None and max_shard_size is not None:
        raise InvalidInput(f"max_shard_size={max_shard_size!r} got shard_size={shard_size!r}, its older name: pass one")
    largest = shard_size if max_shard_size is None else max_shard_size
    size = None if largest is None else size_of(largest)
    adapters = [adapters] if isinstance(adapters, str | Path) else adapters
    if not adapters:
        raise InvalidInput("adapters: expected at least one folder, got none")
    begin = time.perf_counter()
    folders = [find(adapter, "adapter") for adapter in adapters]
    names = _names(folders, adapters)
    factors = _scales(scales or {}, names)
    where = absolute(out)
    outs = [where / name for name in names] if each else [where]
    home = find(base, "base")
    for one in outs:
        check_target(one, force)
        check_apart(one, [home, *folders])
    checkpoint = open_base(home)
    if dtype is not None and checkpoint.packed:
        checkpoint.close()
        raise InvalidInput(
            f"dtype={dtype_name(dtype)} (--dtype): {home} is quantised ({checkpoint.packed}), and what "
            "is packed there goes along as it lies: leave dtype out, which keeps that of each weight"
        )
    if size is None and isinstance(checkpoint, Decoded):
        size = SHARD_SIZE  # its files were cut for weights of other sizes
    try:
        held = checkpoint.dtype if dtype in (None, checkpoint.dtype) else torch.float32
        read = [
            read_adapter(name, folder, checkpoint, held, factors[name])
            for name, folder in zip(names, folders, strict=True)
        ]
        check_origins(read, checkpoint, strict)
        sums = [Sum([adapter]) for adapter in read] if each else [Sum(read)]
        run = {"rounding": rounding} if seed is None else {"rounding": rounding, "seed": seed}
        outputs = [
            Output(checkpoint, adapters_, one, dtype, device, run, size, tokenizer, force, verify)
            for adapters_, one in zip(sums, outs, strict=True)
        ]
        together(output.writer for output in outputs)
        return _pass(checkpoint, outputs, read, begin, verify, progress or (lambda done, of: None))
    finally:
        checkpoint.close()


def _names(folders: Sequence[Path], given: Sequence[str | Path]) -> list[str]:
    """Return what adapters are called: by the last part of what was given (a folder of a hub's cache has a hash's
    name)."""
    names = [absolute(one).name if Path(one).expanduser().is_dir() else Path(one).name for one in given]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InvalidInput(
                f"adapters: {given[names.index(name)]} and {given[number]} are both called {name!r}; names of their "
                "folders must differ"
            )
    return names


def _scales(scales: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    for name, scale in scales.items():
        if name not in names:
            raise InvalidInput(f"scale: there is no adapter {name!r}; there are {', '.join(names)}")
        if not isinstance(scale, int | float) or not abs(scale) < float("inf"):
            raise InvalidInput(f"scale of {name}: expected a finite number, got {scale!r}")
    return {name: float(scales.get(name, 1.0)) for name in names}


def check_apart(out: Path, sources: Sequence[Path], *, inside: bool = False) -> None:
    """Raise `InvalidInput` if the output would replace a folder that it is made from, or what links in it lead to.

    Args:
        inside: it may lie in one.
    """
    for source in map(Path.resolve, sources):
        if out.resolve() in (source, *source.parents) or (source in out.resolve().parents and not inside):
            raise InvalidInput(
                f"out: {out} {'holds or is' if inside else 'holds, is or lies in'} {source}, which is read: name "
                "another folder"
            )
        with readable(source):
            links = {path: Path(os.path.realpath(path)) for path in source.iterdir()}  # a link to itself stays
        for path, leads in links.items():
            if out.resolve() in leads.parents:
                raise InvalidInput(f"out: {out} holds {leads}, which {path} is a link to: name another folder")


@dataclass(eq=False)
class _Work:
    """Rows of one of the base's tensors, and what is made of them."""

    name: str
    rows: Rows
    targets: list[tuple[Output, Target]] = field(default_factory=list)


def _pass(
    base: Checkpoint, outputs: Sequence[Output], adapters: Sequence[Adapter], begin: float, verify: bool, progress: Told
) -> list[Saved]:
    """Read the base once, and write every output."""
    total = sum(output.writer.nbytes for output in outputs)
    done = 0
    incoming, outgoing = Buffers(4), Buffers(3)
    behind = Behind()

    def read(work: _Work) -> Buffer | None:
        if not any(output.reads(target) for output, target in work.targets):
            return None
        return base.chunk(work.name, work.rows, incoming.take)

    def written(output: Output, name: str, at: int, buffer: Buffer) -> Callable[[], None]:
        def write() -> None:
            nonlocal done
            try:
                output.writer.write(name, at, as_bytes(buffer.tensor))
                done += buffer.tensor.nbytes
            finally:
                buffer.release()
            progress(done, total)

        return write

    with ExitStack() as stack:
        for output in outputs:
            stack.enter_context(output.writer)
        stack.callback(behind.stop)  # before the writers close their files
        ahead = Ahead(read)
        stack.callback(ahead.stop)
        stack.callback(incoming.stop)  # for which it may wait
        for output, name, tensor in _wholes(base, outputs):
            behind.put(written(output, name, 0, Buffer(tensor, lambda: None)), most=1)
        for work, chunk in ahead.over(_works(base, outputs)):
            for output, target in work.targets:
                place = output.writer.places[target.name]
                at = work.rows.begin * (place.nbytes // place.shape[0] if place.shape else 0)
                packed = chunk is not None and isinstance(chunk.tensor, Packed)
                same = chunk is not None and place.dtype == chunk.tensor.dtype and not output.changes(target)
                if same and chunk is not None and not packed:
                    behind.put(written(output, target.name, at, chunk.share()))
                    continue
                shape = (work.rows.end - work.rows.begin, *place.shape[1:]) if place.shape else ()
                out = outgoing.take(shape, place.dtype)
                output.make(target, work.rows, None if chunk is None else chunk.tensor, out.tensor)
                behind.put(written(output, target.name, at, out))
            if chunk is not None:
                chunk.release()
        behind.end()
        compared = [output.writer.verify() if verify else None for output in outputs]
    seconds = time.perf_counter() - begin
    return [
        Saved(
            folder=output.writer.out,
            adapters=output.adapters.name,
            tensors=len(output.writer.places),
            changed=output.changed,
            nbytes=output.writer.nbytes,
            files=len({place.file for place in output.writer.places.values()}),
            seconds=seconds,
            verified=bytes_,
            notes=notes_for(base, output.adapters.adapters, output.along.notes),
        )
        for output, bytes_ in zip(outputs, compared, strict=True)
    ]


def _works(base: Checkpoint, outputs: Sequence[Output]) -> Iterator[_Work]:
    """Yield the base's tensors, in the order of its files, in chunks."""
    for names in base.files.values():
        for name in names:
            stored = base.tensors[name]
            targets = [(o, t) for o in outputs for t in o.targets[name] if not o.wholly(t)]
            for rows in rows_of(stored.shape, stored.dtype.itemsize) if targets else ():
                yield _Work(name, rows, targets)


def _wholes(base: Checkpoint, outputs: Sequence[Output]) -> Iterator[tuple[Output, str, Tensor]]:
    for output in outputs:
        groups: dict[tuple[str, ...], dict[str, tuple[str, Target]]] = {}
        for name, targets in output.targets.items():
            for target in targets:
                if output.wholly(target):
                    assert target.entry is not None
                    groups.setdefault(target.entry.sources, {})[target.name] = name, target
        for group in groups.values():
            for name, tensor in output.make_wholly(group):
                yield output, name, tensor
