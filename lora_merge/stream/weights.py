"""MergedWeights: base + adapters as a stream of HF checkpoint tensors, merged bucket by bucket.

The training weights are read and never written. One launch fills a bucket, merged weights and plain copies alike.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..choices import DType, Rounding, Strategy, check_choice
from ..errors import InvalidInput
from ..inference import outside_inference_mode
from ..kernels.checks import check_dtype
from ..kernels.segments import FLOATS
from ..models.claims import Look, check_base, check_readable
from ..models.conversion import Conversion
from ..models.live import Live, check_model, live
from ..models.part import Part
from ..models.pausing import training_of
from ..models.peft.chosen import check_names, chosen
from ..models.snapshot import Snapshot
from ..names import renamed
from ..shards import Shard
from ..shards.exchange import check_strategy
from .assembly import assembled
from .bucket_writer import BucketWriter
from .buckets import BUCKET_BYTES, Bucket, Meta, check_bucket_bytes, extent
from .by_layer import by_layer
from .description import describe
from .double_buffer import Reads
from .held import HeldWriter, settle
from .source import Entry, LazyParts, Source
from .window import window_of


class MergedWeights:
    """The merged checkpoint as a stream of `(name, tensor)`, bucket by bucket; the model is only read.

        for name, tensor in lora_merge.MergedWeights(model):
            send(name, tensor)

    It yields every parameter and persistent buffer under its HF checkpoint name and in the checkpoint's layout,
    adapters merged, each element rounded once: `round(W + scaling * lora_B @ lora_A)`. It can be iterated again and
    again; plans are kept from pass to pass. Models without adapters stream their weights as they are. vLLM's own
    trainer engines take it as their `WeightSource`, the sharded one too (`iter_groups`).

    A tensor that was yielded stays valid as long as somebody holds it. A buffer whose tensors are still held is not
    written again: another one takes its place. So a plain loop needs two buffers, and `dict(MergedWeights(model))`
    needs memory for the whole model. A tensor is ready on the CUDA stream that is current when it is asked for; a
    consumer that reads it on another one holds it until it is done.

    `merged` refuses the model while a pass is under way, and a pass is refused inside `merged`. To end a pass early,
    `close()` the iterator or drop it. Train, load weights and call PEFT's `merge_adapter` between passes: a bucket is
    merged when it is asked for, and a pass in which weights or adapters were written ends in an error.

    Sharded models (FSDP2, FSDP1, ZeRO-3, Megatron): iterate on every rank, to the end; every method is collective. Each
    rank merges what it holds, and sees every tensor whole. Tensors come layer by layer.

    Several threads may iterate at once, each over a pass of its own; over a sharded model one thread.

    Args:
        model: any module, with or without PEFT adapters and wrappers, all weights on one device; or the list of chunks
            of a megatron-core model (or `lora_merge.megatron.Chunks`).
        bucket_bytes: size of a bucket in bytes; two are in use. Both grow to the largest tensor. Beside them a pass
            holds of one bucket the weights that are offloaded, or that only the library decodes that quantised them,
            and twice what one bucket needs of sharded adapters (`describe` says how much). A loop over a sharded
            model's whole tensors puts them together in memory beside that: as much as both buckets take.
        dtype: of floating-point parameters as they go out: bfloat16, float16 or float32; default: as they are. Buffers
            keep their dtype.
        rounding: "nearest" (ties to even) or "stochastic"; pass n then draws with seed n, unless `buckets` is
            told another.
        adapters: False streams the base without what the adapters add.
        adapter_names: of PEFT's adapters: exactly these are merged. Default: those that act (`set_adapter`). PEFT is
            told while the model is read, at the beginning of a pass: no forward of it may run just then.
        strategy: None: each rank merges what it holds, and only what no shard can express is gathered first. "unshard":
            every parameter is gathered and merged whole: the same bits, for more bytes over the network.

    Raises:
        InvalidInput: an argument that does not fit (at once). When the model is read: weights on several devices,
            quantised, sparse or without values; ranks that disagree. At the end of a pass: weights or adapters were
            written meanwhile, so that its tensors must not be used together. An error on one rank of a sharded model
            is raised on the others as `InvalidInput` after the last bucket; the tensors of that pass must not be used.
        UnsupportedAdapter: an adapter without an exact merge; names the module and the reason.
        AlreadyMerged: the weights hold adapters already; also with `adapters=False`.
    """

    def __init__(
        self,
        model: Any,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        dtype: DType | None = None,
        rounding: Rounding = "nearest",
        adapters: bool = True,
        adapter_names: Sequence[str] | None = None,
        strategy: Strategy | None = None,
    ) -> None:
        check_choice("rounding", rounding, Rounding)
        if not isinstance(adapters, bool):
            raise InvalidInput(f"adapters must be True or False, got {adapters!r}; set_adapter chooses which ones act")
        self._choice = _Choice(check_names(adapter_names))
        if self.adapter_names is not None and not adapters:
            raise InvalidInput(f"adapter_names={list(self.adapter_names)} with adapters=False, which merges none")
        check_strategy(strategy)
        check_bucket_bytes(bucket_bytes)
        check_model(model)
        self.model, self.bucket_bytes, self.dtype, self.rounding = model, bucket_bytes, check_dtype(dtype), rounding
        self.adapters, self.strategy = adapters, strategy
        self.keep_tied = False
        """Stream every name of a tied weight, for an engine that holds them apart."""
        self.dtypes: Mapping[str, torch.dtype] = {}
        """dtypes of single tensors, by name, before `dtype`."""
        self.left_out: frozenset[str] = frozenset()
        """Names of tensors that are not streamed, for engines that hold no such part of the model."""
        self.renames: Sequence[Sequence[str]] = ()
        """Beginnings of names, and what takes their place, for engines whose class is around the model's; see
        `names.renamed`."""
        self.stored: Mapping[str, Sequence[int]] | None = None
        """Shapes in a checkpoint whose layout the stream is to have; see `Conversion.outputs`."""
        self.as_it_lies = True
        """Read a model that is trained on merged weights as it lies: the adapters are in its base weights, and no part
        has a delta. Else its base comes back first."""
        self._passes = count(1)
        self._opening = threading.RLock()
        """One thread at a time reads the model: under `adapter_names` that changes which adapters act."""
        self._writers: dict[tuple[type[BucketWriter], bool, bool], BucketWriter] = {}
        self._known: tuple[Any, torch.device, Conversion] | None = None
        """The key of the last reading, and what is kept of it."""

    @property
    def adapter_names(self) -> tuple[str, ...] | None:
        """The adapters that are merged; None for those that act."""
        return self._choice.names

    @adapter_names.setter
    def adapter_names(self, names: Sequence[str] | None) -> None:
        self._choice.names = check_names(names)

    def __repr__(self) -> str:
        """Return the model's class and the options that differ from their defaults; the model is not read."""
        model = f"[{len(self.model)} chunks]" if isinstance(self.model, list | tuple) else type(self.model).__name__
        options = {
            "dtype": None if self.dtype is None else str(self.dtype).removeprefix("torch."),
            "rounding": None if self.rounding == "nearest" else self.rounding,
            "adapters": None if self.adapters else False,
            "adapter_names": self.adapter_names and list(self.adapter_names),
            "strategy": self.strategy,
            "bucket_bytes": None if self.bucket_bytes == BUCKET_BYTES else self.bucket_bytes,
        }
        told = (f"{name}={value!r}" for name, value in options.items() if value is not None)
        return f"{type(self).__name__}({', '.join([model, *told])})"

    def metadata(self) -> list[Meta]:
        """Return `(name, dtype, shape)` of every tensor that iteration yields, in its order; merges nothing.
        Collective.

            sizes = {name: shape for name, dtype, shape in weights.metadata()}

        Raises:
            LoraMergeError: as iteration.
        """
        writer, source = self._open(whole=True)
        with writer.passing(source):
            return [entry.meta for entry in writer.entries.values()]

    def held_names(self) -> list[str] | None:
        """Return the names of the tensors that `iter_groups` yields on this rank; None for all, where one process
        holds the model. Collective.

        Each tensor of a sharded model is brought to one rank, which owns much of it: those of a pipeline stage, or an
        expert, stay where they are; shards of FSDP and tensor parallelism are spread over the ranks.

        Raises:
            LoraMergeError: as iteration.
        """
        writer, source = self._open(held=True)
        with writer.passing(source):
            return writer.holds if isinstance(writer, HeldWriter) else None

    def groups(self) -> list[list[str]]:
        """Return the names of the tensors by layer, all of each layer of which this rank holds something. Collective.

        Raises:
            LoraMergeError: as iteration.
        """
        names, held = [meta.name for meta in self.metadata()], self.held_names()
        return [layer for layer in by_layer(names) if held is None or not set(held).isdisjoint(layer)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[Tensor | None]]]:
        """Yield names and tensors layer by layer, as `groups` has them: this rank's own (`held_names`), and None for
        the rest. Collective: each rank goes on to its last layer, which is the same on all.

            source = lora_merge.MergedWeights(model)  # vLLM's sharded transfer pulls from the rank that holds a tensor
            WeightTransferTrainerFactory.trainer_init(ShardedRDTTrainerInitInfo(...), client=client, source=source)

        A rank receives its own share of the merged weights, instead of all of them. An error of one rank is raised on
        all of them before a layer is handed on.

        Raises:
            LoraMergeError: as iteration.
        """
        (writer, source), run = self._open(held=True), self._run(None)
        if isinstance(writer, HeldWriter):
            yield from writer.groups(run, source)
            return
        layers = by_layer(writer.entries)
        with closing(self._iterate(writer, source, run)) as tensors:
            for index, layer in enumerate(layers):
                values: list[Tensor | None] = [next(tensors)[1] for _ in layer]
                if index + 1 == len(layers):
                    next(tensors, None)  # which says whether weights were written meanwhile
                settle(writer.device)
                yield layer, values

    def __len__(self) -> int:
        """Return how many tensors iteration yields: the total of a progress bar. Collective, as iteration is."""
        return len(self.metadata())

    def __bool__(self) -> bool:
        """Return True without reading the model: a stream is never empty in the sense of `if`."""
        return True

    def bucket_writer(self, *, whole: bool = False) -> BucketWriter:
        """Return the stream as it is now: laid out, with plans that are kept as long as the model's tensors stay.

        Args:
            whole: as tensors are yielded: none is cut, or the ranks of a sharded model send them one after another.
        """
        return self._open(whole=whole)[0]

    @outside_inference_mode
    def _open(self, *, whole: bool = False, held: bool = False) -> tuple[BucketWriter, Source]:
        """Return `bucket_writer`, and what it was read from, for one pass.

        Args:
            held: a `HeldWriter` of a model that several ranks hold, and for one that is here alone `whole`.
        """
        with self._opening:
            return self._read_writer(whole, held)

    def _live(self, as_it_lies: bool) -> Live:
        """Return the model as it is now."""
        as_it_lies = as_it_lies and self.adapters and self.adapter_names is None
        training = training_of(self.model) if as_it_lies else None
        if training is not None and training.rounding != self.rounding:
            raise InvalidInput(
                f"rounding={self.rounding!r} for a model that is trained on merged weights with "
                f"rounding={training.rounding!r}: what is served would not be what is trained; pass one rounding to "
                "train_merged and to what pushes or streams"
            )
        if training is not None and self.rounding == "stochastic" and self.strategy is not None:
            raise InvalidInput(
                f"strategy={self.strategy!r} for a model that is trained on merged weights with rounding='stochastic' "
                "would draw others than those that are trained; leave strategy out"
            )
        return live(self.model, as_it_lies=as_it_lies and self.strategy is None)

    def _read_writer(self, whole: bool, held: bool) -> tuple[BucketWriter, Source]:
        with chosen(self.model, self.adapter_names):
            model = self._live(self.as_it_lies)  # which looks at it already
        kind = HeldWriter if held and not model.ranks.alone else BucketWriter
        whole = whole or held
        form = kind, whole, model.reader is not None
        known = self._writers.get(form)
        with model.ranks.vote("MergedWeights") as ballot:
            source, key = self._read(model)
            ballot.flag = known is None or known.key != key
        if ballot.flag:
            source = replace(source, parts=model.united(source.parts))
            with model.ranks.vote("MergedWeights"):
                entries = self._entries(source.parts, source.conversion)
                lines = [f"strategy={self.strategy!r} bucket_bytes={self.bucket_bytes} rounding={self.rounding}"]
                lines += [_line(entry, source.parts) for entry in entries]
            model.ranks.same(lines, lambda: lines)
            unshard = self.strategy is not None
            with model.ranks.vote("MergedWeights"):
                known = kind(source, entries, key, self.bucket_bytes, lines, whole=whole, unshard=unshard)
            self._writers[form] = known
        assert known is not None
        return known, known.adopt(source)

    def buckets(self, *, seed: int | None = None) -> Iterator[Bucket]:
        """Yield the stream as filled buckets of whole tensors, for a sender that ships buckets.

            for bucket in weights.buckets():
                send([(slot.name, slot.dtype, slot.shape, slot.offset) for slot in bucket.slots], bucket.data)

        A `Bucket` has `slots` (name, dtype, shape, offset and bytes of each tensor) and `data` (uint8, on the model's
        device). It may be read until the next one is asked for, also by work that was enqueued on the current CUDA
        stream by then. Stopping early is fine: on all ranks of a sharded model, or on none.

        Args:
            seed: of stochastic rounding; default: the number of the pass.

        Yields:
            each bucket, when it is filled.

        Raises:
            LoraMergeError: as iteration.
        """
        (writer, source), run = self._open(whole=True), self._run(seed)
        with writer.buffers(source) as buffers:
            filled = writer.filled(buffers, run, source)
            if not writer.ranks.alone:
                yield from assembled(writer, filled)
                return
            for index, data in filled:
                yield Bucket(index, writer.table[index], data[: extent(writer.table[index])])

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        (writer, source), run = self._open(whole=True), self._run(None)
        yield from self._iterate(writer, source, run)

    def _iterate(
        self, writer: BucketWriter, source: Source, run: Mapping[str, Any]
    ) -> Generator[tuple[str, Tensor], None, None]:
        """Yield the tensors of a pass, which may be read on the stream that is current when they are asked for."""
        with writer.buffers(source) as buffers:
            if not writer.ranks.alone:
                for bucket in assembled(writer, writer.filled(buffers, run, source)):
                    reads = Reads.begun(writer.device)
                    for name, tensor in bucket.tensors():
                        reads(bucket.data)
                        yield name, tensor
                return
            with closing(writer.handed(buffers, run, source)) as handed:
                for index, buffer, fill_next, reads in handed:
                    data = writer.lend(buffer)
                    del buffer
                    for slot in writer.table[index]:
                        reads(buffers[index % 2])
                        yield slot.name, slot.view(data)
                        fill_next()  # only now: who loops over this held a tensor of the other buffer until it got one
                    del data

    @contextmanager
    def choice(self) -> Iterator[None]:
        """Activate exactly the adapters of this stream for the time of a block, which reads the model."""
        with self._opening, chosen(self.model, self.adapter_names):
            yield

    def beside(self, *, adapters: bool = True) -> MergedWeights:
        """Return another stream of the same model and choice of adapters, as it lies in the base; for what a push
        brings beside this one. Another choice for one of them is one for both.

        Args:
            adapters: False: the base alone, with the copies of whole modules (`modules_to_save`) that these adapters
                bring.
        """
        made = MergedWeights(self.model, bucket_bytes=self.bucket_bytes, adapters=adapters)
        made._choice = self._choice
        return made

    def release(self) -> None:
        """Free what is kept of the model between passes, unless a pass is under way; the next pass builds it again."""
        for writer in list(self._writers.values()):
            writer.release()

    def describe(self) -> str:
        """Return a text that says how every tensor is made, and what a pass holds and sends between ranks. Collective.

            print(weights.describe())

        Raises:
            LoraMergeError: as iteration.
        """
        writer, source = self._open()
        with writer.passing(source):
            return describe(writer, source)

    def _run(self, seed: int | None) -> dict[str, Any]:
        number = next(self._passes)
        if self.rounding == "nearest":
            return {"rounding": "nearest"}
        return {"rounding": "stochastic", "seed": number if seed is None else seed}

    def _read(self, model: Live) -> tuple[Source, Any]:
        """Return what the stream is made from, and a key of all that reading depends on: it changes whenever a plan
        would be wrong. Parts are read for a new key, and else for whoever asks for them."""
        with chosen(self.model, self.adapter_names), Look() as left:
            snapshot = model.snapshot(adapters=self.adapters)
            settings = self.keep_tied, tuple(self.dtypes.items()), self.left_out, self.renames
            key = (snapshot.facts, *settings, model.reader is not None)
            held = [tensor.untyped_storage() for tensor in snapshot.tensors]
            check_readable(held, reader=model.reader)
            if not self.adapters:
                check_base(snapshot.modules)
            known = self._known
            if known is not None and known[0] == key:
                parts: Mapping[str, Part] = LazyParts(lambda: self._read_again(snapshot, model.reader is not None))
            else:
                parts = model.parts(adapters=self.adapters, keep_tied=self.keep_tied)
                devices = {part.shard.device for part in parts.values()}
                empty = [part.name for part in parts.values() if part.shard.device.type == "meta"]
                if empty and len(devices) > 1:
                    raise InvalidInput(
                        f"{empty[0]}: a meta tensor, which holds no values, beside others that do (loaded in part, or "
                        "offloaded by accelerate); load it first"
                    )
                if len(devices) > 1 and not model.sharded:
                    raise InvalidInput(f"all weights must be on one device, got {', '.join(sorted(map(str, devices)))}")
                device = model.device or next(iter(devices), torch.device("cpu"))
                known = key, device, model.conversion()
            check_readable(held, left, model.reader)
        self._known = key, device, conversion = known
        tensors = snapshot.tensors
        counted = tensors if model.ranks.alone else [*tensors, *snapshot.parameters]
        seen = tensors, counted, snapshot.modules
        return Source(parts, *seen, held, model.ranks, model.merging, device, conversion, model.reader), key

    def _read_again(self, snapshot: Snapshot, as_it_lies: bool) -> Mapping[str, Part]:
        with self._opening, chosen(self.model, self.adapter_names), Look() as left:
            model = self._live(as_it_lies)
            now = model.snapshot(adapters=self.adapters)
            if now.facts != snapshot.facts:
                raise InvalidInput("the model was changed while it was being streamed: finish the pass first")
            parts = model.parts(adapters=self.adapters, keep_tied=self.keep_tied)
            check_readable([tensor.untyped_storage() for tensor in now.tensors], left, model.reader)
        return parts

    def _entries(self, parts: Mapping[str, Part], conversion: Conversion) -> list[Entry]:
        shapes = {name: _meta(part.shard) for name, part in parts.items()}
        entries = {}
        outputs = conversion.outputs(shapes, self.stored)
        named = {(made.sources, made.view): renamed(made.name, self.renames) for made in outputs}
        for made in outputs:
            name = renamed(made.name, self.renames)
            if name in self.left_out:
                continue
            first = parts[made.sources[0]]
            dtype = first.dtype or first.shard.dtype
            if dtype in FLOATS:
                dtype = self.dtypes.get(name) or (self.dtype if first.trained else None) or dtype
            meta, like = Meta(name, dtype, tuple(made.shape)), shapes[first.name]
            window = None if made.view is None else window_of(made.view, like.shape, like.stride())
            tied = named.get(((first.tied,), made.view), "") if len(made.sources) == 1 else ""
            entries[meta.name] = Entry(meta, made.sources, window, tied, made.name)
        return [entries[name] for layer in by_layer(entries) for name in layer]


@dataclass(slots=True)
class _Choice:
    """Which adapters several streams of a model merge, as of `adapter_names`."""

    names: tuple[str, ...] | None


def _meta(shard: Shard) -> Tensor:
    """Return a stand-in without values for a parameter; a sharded one counts as contiguous."""
    if shard.whole:
        like = shard.pieces[0].tensor
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return torch.empty(shard.shape, dtype=shard.dtype, device="meta")


def _line(entry: Entry, parts: Mapping[str, Part]) -> str:
    """Return as text what must be equal on every rank."""
    meta = entry.meta
    deltas = [delta.describe() for name in entry.sources if (delta := parts[name].delta) is not None]
    return f"{meta.name} {meta.dtype} {list(meta.shape)} from {', '.join(entry.sources)} {entry.window} {deltas}"
