"""A live model -> a merged checkpoint on disk, bucket by bucket."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..choices import DType, Rounding
from ..errors import InvalidInput
from ..kernels.plan import check_rounding
from ..models.conversion import pretrained
from ..models.live import live
from ..models.peft.chosen import originals
from ..shards.ranks import noted
from ..stream.buckets import Meta, dtype_name
from ..stream.weights import MergedWeights
from .adapters import shapes_of, untied_config
from .checkpoint import CONFIG, Checkpoint, find, holds_weights, json_of, open_checkpoint
from .decoded import QUANTIZED
from .format import as_bytes
from .merge import Saved, check_apart
from .notes import draft_notes, square_notes
from .rest import Rest, rest_of
from .tokenizer import with_saved
from .writer import SHARD_SIZE, Writer, absolute, shards_of, size_of

_BUCKET = 64 << 20
_OF_CODES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files that say how a base is quantised where its config.json does not: engines read the first, too."""
_NO_TOKENIZER = "no tokenizer was saved: pass tokenizer=, or base=, the folder of the base"


def save_merged(
    model: Any,
    out: str | Path,
    *,
    max_shard_size: int | str = SHARD_SIZE,
    dtype: DType | None = None,
    rounding: Rounding = "nearest",
    seed: int | None = None,
    adapter_names: Sequence[str] | None = None,
    tokenizer: Any = None,
    base: str | Path | None = None,
    force: bool = False,
    verify: bool = False,
    write: bool | None = None,
    bucket_bytes: int = _BUCKET,
) -> Saved | None:
    """Write the merged weights of a model in memory as a checkpoint that `from_pretrained` loads.

        lora_merge.save_merged(model, "merged", tokenizer=tokenizer)

    The model is only read. Memory: two buckets, or two of its largest tensor. A sharded model (FSDP2, FSDP1, ZeRO-3,
    Megatron) is saved by a call on every rank; one of them writes. The folder is complete, or it is not there.

    Args:
        model: as for `MergedWeights`.
        out: folder to write the checkpoint into.
        max_shard_size: largest size of one weight file, in bytes or as "5GB".
        dtype: dtype of floating-point parameters: bfloat16, float16 or float32; default: as they are.
        rounding, seed: as in `merge`.
        adapter_names: as for `MergedWeights`.
        tokenizer: anything with `save_pretrained`; default: the tokenizer's files in `base`.
        base: folder (or repository in the cache) from which tokenizer, chat templates and code are copied, tensors that
            the model's class does not build (MTP heads), and, for a model without a config of transformers'
            (Megatron's), config.json; default: the model's `name_or_path`, if that is a folder.
        force: replace everything that is in `out`; never the base's folder, on which saved adapters are put again.
        verify: read the result back from disk and compare checksums.
        write: whether this rank writes; default: rank 0 of the world does. Pass True on another rank if rank 0 does not
            hold the model.
        bucket_bytes: as for `MergedWeights`.

    Returns:
        what was written; None on ranks that did not write.

    Raises:
        InvalidInput: `out` cannot be written (it is not empty, no room, no permission), or an argument does not fit.
            Nothing is left there. On all ranks.
        UnsupportedAdapter, AlreadyMerged: as `MergedWeights`; also where adapters change tied tensors apart
            that the model's class cannot hold apart.
    """
    begin = time.perf_counter()
    size = size_of(max_shard_size)
    check_rounding(rounding, seed)
    weights = MergedWeights(
        model, bucket_bytes=bucket_bytes, dtype=dtype, rounding=rounding, adapter_names=adapter_names
    )
    weights.as_it_lies = False
    ranks = live(model).ranks
    mine = _writes() if write is None else write
    if not ranks.any(mine):
        return None
    if live(model).conversion().turns:
        weights.stored = next(filter(None, ranks.gather(_shapes(model, base) if mine else {})), {})
    tensors = weights.metadata()
    changed, square = _changed(weights)
    apart = _apart(model, weights, {wanted.name for wanted in tensors})
    if apart:  # a config that unties some unties all
        weights.keep_tied = True
        tensors = weights.metadata()
    around = _around(model, tensors)
    tensors = [wanted._replace(name=wanted.name.removeprefix(around)) for wanted in tensors]
    apart = {name.removeprefix(around): kept.removeprefix(around) for name, kept in apart.items()}
    built = [wanted.name for wanted in tensors]
    rest = Rest()
    errors: list[Exception] = []
    saved: Saved | None = None
    with ExitStack() as stack:
        with ranks.vote("save_merged"):
            writer: Writer | None = None
            if mine:
                folder, (_, inside) = _home(model, base), _pretrained(model)
                check_apart(absolute(out), [] if folder is None else [folder], inside=True)
                names = {wanted.name for wanted in tensors}
                rest = rest_of(inside, class_of(model if inside is None else inside), folder, base is not None, names)
                stack.callback(rest.close)
                tensors += rest.tensors
                along = stack.enter_context(_beside(model, tokenizer, folder, rest, apart, tensors))
                file = along.pop(Path(CONFIG), None)
                config = None if file is None else json_of(file)
                resized = () if tokenizer is not None else _resized(folder, config)
                writer = Writer(
                    out,
                    shards := shards_of(tensors, size),
                    metadata={"format": "pt"},
                    index={} if len(shards) > 1 else None,
                    config=config,
                    along=along,
                    force=force,
                    check=verify,
                )
                stack.enter_context(_left(writer, errors))
        for bucket in weights.buckets(seed=seed):
            for name, tensor in bucket.tensors():
                if writer is not None and not errors:
                    with noted(errors):
                        writer.write(name.removeprefix(around), 0, as_bytes(tensor.detach().cpu().contiguous()))
                        continue
                if errors and ranks.alone:
                    raise errors[0]
        with ranks.vote("save_merged"):
            if errors:
                raise errors[0]
            if writer is not None:
                rest.write(writer)
                compared = writer.verify() if verify else None
                stack.close()
                saved = Saved(
                    folder=writer.out,
                    adapters=" + ".join(adapter_names or ["the model's adapters"]),
                    tensors=len(tensors),
                    changed=changed,
                    nbytes=writer.nbytes,
                    files=len(shards),
                    seconds=time.perf_counter() - begin,
                    verified=compared,
                    notes=(
                        *rest.notes,
                        *draft_notes(built, (wanted.name for wanted in rest.tensors)),
                        *square_notes(square),
                        *(() if any("tokeniz" in path.name for path in along) else (_NO_TOKENIZER,)),
                        *resized,
                    ),
                )
    return saved


def _shapes(model: Any, base: str | Path | None) -> dict[str, tuple[int, ...]]:
    """Return the shapes in the base's files, by the names of parameters; of a base that cannot be read none."""
    name, inside = _pretrained(model)
    try:
        folder = _home(model, base)
        if folder is None or inside is None or not holds_weights(folder):
            return {}
        with closing(open_checkpoint(folder)) as stored:
            return {f"{name}.{n}" if name else n: shape for n, shape in shapes_of(stored, inside).items()}
    except InvalidInput:  # which is raised where it is opened to be read
        return {}


def _writes() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


@contextmanager
def _left(writer: Writer, errors: list[Exception]) -> Iterator[None]:
    """Enter the writer's block, which counts as broken off after an error that was noted."""
    with writer:
        yield
        if errors:
            raise errors[0]


def _changed(weights: MergedWeights) -> tuple[int, tuple[str, ...]]:
    """Return how many tensors of a stream have an adapter, and `Conversion.square`."""
    writer = weights.bucket_writer(whole=True)
    with writer.passing():
        parts = writer.source.parts
        changed = sum(any(parts[s].delta is not None for s in entry.sources) for entry in writer.entries.values())
        return changed, writer.source.conversion.square


def _resized(folder: Path | None, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Say where the base's tokenizer goes with an embedding of another size."""
    if folder is None or config is None or not (folder / CONFIG).is_file():
        return ()
    now, before = (
        said.get("vocab_size", (said.get("text_config") or {}).get("vocab_size"))
        for said in (config, json_of(folder / CONFIG))
    )
    if None in (now, before) or now == before:  # configs leave out what is usual
        return ()
    return (
        f"the model has {now} rows of embeddings, and {folder}, whose tokenizer goes along, {before}: pass tokenizer= "
        "if it was trained with another one",
    )


def _apart(model: Any, weights: MergedWeights, names: set[str]) -> dict[str, str]:
    """Return tied parameters that adapters change in different ways -> those that they are tied to.

    Args:
        names: of the tensors that a checkpoint needs.
    """
    bare = MergedWeights(model, adapters=False, bucket_bytes=weights.bucket_bytes)
    bare.keep_tied = True
    with originals(model):
        writer = bare.bucket_writer()
        pairs = {name: kept for name, kept in writer.ties.items() if name in names and kept in names}
        sources = {name: writer.entries[name].sources[0] for name in (*pairs, *pairs.values())}
    bare.release()
    return {sources[name]: sources[kept] for name, kept in pairs.items()}


def _around(model: Any, tensors: Sequence[Meta]) -> str:
    """Return what names have in front where a module of somebody's own holds the model of transformers, whose config
    says how checkpoints of it are named.

    Raises:
        InvalidInput: that module holds more than it.
    """
    name, _ = _pretrained(model)
    if name and (others := [wanted.name for wanted in tensors if not wanted.name.startswith(f"{name}.")]):
        raise InvalidInput(
            f"model: {others[0]} lies outside of the model of transformers ({name}), whose config.json has no place "
            f"for it: pass {name} alone"
        )
    return f"{name}." if name else ""


def _pretrained(model: Any) -> tuple[str, Any]:
    """Return the name of the model of transformers in a model, and it; None where there is none."""
    return pretrained(model) if isinstance(model, nn.Module) else ("", None)


def class_of(model: nn.Module) -> type:
    """Return the class under the one that FSDP2 made of it."""
    return next(cls for cls in type(model).__mro__ if not cls.__module__.startswith("torch.distributed"))


def _home(model: Any, base: str | Path | None) -> Path | None:
    """Return the folder of the base; None where it is not known."""
    if base is not None:
        return find(base, "base")
    _, inside = _pretrained(model)
    named = str(getattr(getattr(inside, "config", None), "_name_or_path", "") or "")
    return Path(named) if named and Path(named).is_dir() else None


@contextmanager
def _beside(
    model: Any, tokenizer: Any, folder: Path | None, rest: Rest, apart: Mapping[str, str], tensors: list[Meta]
) -> Iterator[dict[Path, Path]]:
    """Collect what goes with the weights for a block: where it is to lie, and where it lies now."""
    _, inside = _pretrained(model)
    with tempfile.TemporaryDirectory() as made:
        found: dict[Path, Path] = {}
        if folder is not None:
            beside = rest.base or Checkpoint(folder, {}, {}, {}, None, {})
            found |= {path: folder / path for path in beside.along() if path.name not in _OF_CODES}
        said = None
        if inside is not None:
            said = _config(inside, apart)
        elif folder is not None and (folder / CONFIG).is_file():
            said = json_of(folder / CONFIG)
        if said is not None:
            (Path(made) / CONFIG).write_text(json.dumps(_of_plain(said, tensors)), encoding="utf-8")
            found[Path(CONFIG)] = Path(made) / CONFIG
        if inside is not None:
            generation = getattr(inside, "generation_config", None)
            if generation is not None and getattr(inside, "can_generate", lambda: False)():
                file = Path(made) / "generation_config.json"
                file.write_text(generation.to_json_string(), encoding="utf-8")
                found[Path(file.name)] = file
        if tokenizer is not None:
            to = Path(made) / "tokenizer"
            tokenizer.save_pretrained(str(to))
            saved = {file.relative_to(to): file for file in sorted(to.rglob("*")) if file.is_file()}
            found = with_saved(found, saved)
        yield found


def _config(inside: Any, apart: Mapping[str, str]) -> dict[str, Any]:
    """Return what config.json says of a model of transformers', as it is saved."""
    cls, config = class_of(inside), inside.config
    if apart:
        config = untied_config(cls, config, apart, "an adapter")
    said: dict[str, Any] = json.loads(config.to_json_string())
    said["architectures"] = [cls.__name__]
    return said


def _of_plain(said: dict[str, Any], tensors: list[Meta]) -> dict[str, Any]:
    """Return a config of plain tensors, which are streamed of a quantised base, too: it names their dtype."""
    said = _unquantised(said)
    floats: dict[torch.dtype, int] = {}
    for wanted in tensors:
        if wanted.dtype.is_floating_point:
            numel = torch.Size(wanted.shape).numel()
            floats[wanted.dtype] = floats.get(wanted.dtype, 0) + numel
    if floats:
        key = "torch_dtype" if "torch_dtype" in said else "dtype"
        said[key] = dtype_name(max(floats, key=lambda d: floats[d]))
    return said


def _unquantised(said: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in said.items() if key not in (QUANTIZED, "compression_config")}
    return {key: _unquantised(value) if isinstance(value, dict) else value for key, value in kept.items()}
