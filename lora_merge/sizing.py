"""How much memory a trainer and an engine take on a GPU, from a model's configuration alone: `lora-merge plan`.

What is counted follows from shapes: weights, adapters, their gradients, AdamW's two moments, and what this package
holds beside them. Without an adapter all weights are trained. Activations, CUDA contexts and the KV cache are not
counted: they get what is left.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from . import hub
from .errors import InvalidInput
from .extras import needed, root_of
from .kernels.tracked.one_pass import FIRST_ROOM
from .models.peft.folder import class_of
from .models.peft.read import read_deltas

__all__ = ["BUCKET", "Policy", "Row", "Setup", "check", "estimate", "host_bytes", "read_policy", "totals"]

BUCKET = 512 << 20
"""Bytes of a bucket, as `MergedWeights` has it."""
_CODE, _RECORD = 1 / 4, 16 / 1024
"""Bytes an element of what brings a merged weight back on a GPU: 2 bits, and a record for each 1024 elements."""
_STEPS = ("training", "push", "rollout")
_CODES = ("nf4", "int8")
"""Formats of bitsandbytes, which takes linear layers and leaves all else in 16 bits."""


@dataclass(frozen=True)
class Tensor:
    """One parameter of a model: its shape, and what counts of it.

    Attributes:
        block: name of the repeated layer that it belongs to; "": of none (embeddings, head, last norm).
        linear: it is a weight of a linear layer, or of experts, and no head: what quantisers take.
        experts: it is a weight of experts in one tensor, which bitsandbytes leaves as it is.
    """

    shape: tuple[int, ...]
    block: str
    linear: bool
    experts: bool

    @property
    def elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Policy:
    """What is known of a model and its adapter.

    Attributes:
        name: as the user gave it.
        tensors: parameters of the base; a tied one once.
        adapted: elements of the weights that the adapter changes.
        lora_A, lora_B: elements of the adapter's halves.
        modules: how many weights the adapter changes.
    """

    name: str
    tensors: tuple[Tensor, ...]
    adapted: int
    lora_A: int
    lora_B: int
    modules: int

    @property
    def parameters(self) -> int:
        return sum(t.elements for t in self.tensors)


@dataclass(frozen=True)
class Setup:
    """How trainer and engine are arranged.

    Attributes:
        gpus: of the trainer, which FSDP2 shards over.
        ddp: each of them holds the whole model instead.
        tp: GPUs that an engine is cut over.
        apart: the engine has GPUs of its own.
        base: dtype of the trainer's base: "bfloat16", "float16", "float32", "nf4" or "int8".
        adapters: dtype of the adapter.
        engine: dtype of the engine's weights: "bfloat16", "float16", "float32" or "fp8".
        merge: who merges.
        mode: what the engine holds.
        train_merged: the trainer computes with the merged weights.
        share: the engine's weights are the trainer's.
        sleep: level at which the engine sleeps while the model is trained; 0: it does not.
        offload: the trainer's weights go to the host during a rollout.
        bucket: bytes of a bucket.
    """

    gpus: int = 1
    ddp: bool = False
    tp: int = 1
    apart: bool = False
    base: str = "bfloat16"
    adapters: str = "float32"
    engine: str = "bfloat16"
    merge: Literal["trainer", "engine"] = "trainer"
    mode: Literal["merged", "adapter"] = "merged"
    train_merged: bool = False
    share: bool = False
    sleep: int = 0
    offload: bool = False
    bucket: int = BUCKET


@dataclass(frozen=True)
class Row:
    """Bytes on one GPU of one thing in each of three steps.

    Attributes:
        side: "trainer" or "engine".
        what: in words.
        training, push, rollout: bytes at that time.
    """

    side: str
    what: str
    training: int
    push: int
    rollout: int


def read_policy(
    model: str | Path, *, rank: int = 32, targets: str | Sequence[str] = "all-linear", parameters: Sequence[str] = ()
) -> Policy:
    """Read what a model is from its configuration, and put an adapter on it. No weight is loaded or fetched.

    Args:
        model: a config.json, the folder of one, or a name on the hub (owner/name).
        rank: of the adapter; 0: none, all weights are trained.
        targets: `target_modules` of PEFT's LoraConfig.
        parameters: `target_parameters` of PEFT's LoraConfig, for experts in one tensor.

    Raises:
        InvalidInput: the configuration cannot be read, or the adapter fits nothing in it.
        UnsupportedAdapter: the adapter has no exact merge.
        MissingExtra: PEFT or transformers is not installed.
    """
    if rank < 0:
        raise InvalidInput(f"rank {rank}: expected 1 or more, or 0 for training of all weights without an adapter")
    path = Path(model).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        raise InvalidInput(f"{path}: there is no config.json in this folder")
    if not path.exists() and not hub.is_name(str(model)):
        raise InvalidInput(f"{path}: there is no such file or folder")
    there = path.exists()
    cached = not there and not hub.answers("model", str(model))
    with needed("plan reads a model with transformers and PEFT", "'lora-merge[peft]'", "peft", "transformers"):
        import transformers
        from peft import LoraConfig, get_peft_model
    try:
        config = transformers.AutoConfig.from_pretrained(
            str(path if there else model), trust_remote_code=False, local_files_only=cached
        )
        kind = class_of(config)
        with torch.device("meta"):
            base: Any = kind.from_config(config) if hasattr(kind, "from_config") else kind(config)
    except Exception as error:
        if cached and isinstance(error, OSError):
            raise InvalidInput(f"{model}: there is no such folder here; {hub.absent()}") from error
        raise InvalidInput(
            f"{model}: cannot be read as a model of transformers ({root_of(error)}); pass a config.json, its folder, "
            "or a name on the hub; a model with code of its own cannot be planned"
        ) from error
    tensors = tuple(_tensors(base))
    if rank == 0:
        return Policy(str(model), tensors, 0, 0, 0, 0)
    options: dict[str, Any] = {"target_parameters": list(parameters)} if parameters else {}
    chosen = targets if isinstance(targets, str) else list(targets)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's, of patterns that it makes for fused experts itself
            adapted = get_peft_model(base, LoraConfig(r=rank, target_modules=chosen, **options))
    except Exception as error:
        raise InvalidInput(f"{model}: PEFT puts no adapter of these targets on it ({root_of(error)})") from error
    deltas = read_deltas(adapted)
    halves = [(prod(f.lora_A.shape), prod(f.lora_B.shape)) for delta in deltas for f in delta.factors]
    return Policy(
        str(model),
        tensors,
        sum(prod(delta.weight.shape) for delta in deltas),
        sum(a for a, _ in halves),
        sum(b for _, b in halves),
        len(deltas),
    )


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a model, a tied one once."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    lists = [(name, len(m)) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    blocks = [f"{name}.{i}." for name, many in lists for i in range(many)]  # outer ones first
    linear = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear) and m is not head}
    for name, parameter in model.named_parameters():
        block = next((prefix for prefix in blocks if name.startswith(prefix)), "")
        fused = parameter.ndim == 3
        yield Tensor(tuple(parameter.shape), block, id(parameter) in linear or fused, fused)


def estimate(policy: Policy, setup: Setup) -> list[Row]:
    """Return what lies on one GPU of the trainer, and on one of an engine, while a model is trained, pushed and asked.

    Raises:
        InvalidInput: the setup is one that lora_merge refuses; says which option to change.
    """
    check(setup)
    if policy.modules == 0:
        _check_full(setup)
    return [
        row for row in (*_trainer(policy, setup), *_engine(policy, setup)) if row.training or row.push or row.rollout
    ]


def host_bytes(policy: Policy, setup: Setup) -> int:
    """Return what an engine's process keeps in the host's memory while it sleeps at level 1."""
    return _engine_weights(policy, setup) if setup.sleep == 1 and not setup.share else 0


def check(s: Setup) -> None:
    """Raise `InvalidInput` for what lora_merge itself refuses."""
    if min(s.gpus, s.tp) < 1:
        raise InvalidInput(f"gpus={s.gpus}, tp={s.tp}: expected 1 or more of each")
    for dtype in (s.base, s.adapters, s.engine):
        if dtype not in (*_CODES, "fp8"):
            _itemsize(dtype)
    if not s.apart and s.gpus % s.tp:
        raise InvalidInput(
            f"tp={s.tp}: engines on the trainer's {s.gpus} GPUs need a tp that divides them, or apart=True"
        )
    if s.share and ((s.gpus > 1 and not s.ddp) or s.tp > 1 or s.apart):
        raise InvalidInput("share: the engine must lie in the trainer's process, with tp=1, and the trainer unsharded")
    if s.share and (s.offload or s.mode == "adapter" or s.merge == "engine"):  # asleep, it frees the KV cache alone
        raise InvalidInput("share: goes with mode merged, merge trainer and no offload")
    if s.share and s.base != s.engine:
        raise InvalidInput(f"share: base and engine must have one dtype, got {s.base} and {s.engine}")
    if (s.train_merged or s.share) and s.base in _CODES:
        raise InvalidInput(
            f"train_merged: a base in {s.base} cannot be trained so; expected bfloat16, float16 or float32"
        )
    if s.base == "int8" and s.gpus > 1 and not s.ddp:
        raise InvalidInput("base: LLM.int8 cannot be sharded; pass nf4, or ddp=True")
    if s.merge == "engine" and s.mode == "adapter":
        raise InvalidInput("merge: 'engine' goes with mode merged")
    plain = "bfloat16" if s.base == "nf4" else s.base
    if (s.merge == "engine" or s.mode == "adapter") and plain != _sent(s):
        raise InvalidInput(
            f"base: merge engine and mode adapter need the engine's own dtype, {_sent(s)}, got {s.base}: it would be "
            "rounded twice; pass merge trainer with mode merged"
        )


def _check_full(s: Setup) -> None:
    """Raise `InvalidInput` for what needs an adapter."""
    if s.base in _CODES:
        raise InvalidInput(f"base: {s.base} cannot be trained without an adapter; pass a rank of 1 or more")
    wrong = {"share": s.share, "train_merged": s.train_merged, "merge engine": s.merge == "engine"}
    wrong["mode adapter"] = s.mode == "adapter"
    if named := [name for name, asked in wrong.items() if asked]:
        raise InvalidInput(f"{', '.join(named)}: needs an adapter; leave it out, or pass a rank of 1 or more")


def _trainer(p: Policy, s: Setup) -> Iterator[Row]:
    over = 1 if s.ddp else s.gpus
    size = _itemsize(s.adapters)
    adapters = ceil((p.lora_A + p.lora_B) / over) * size
    weights = sum(ceil(t.shape[0] / over) / t.shape[0] * _nbytes(t, s.base) for t in p.tensors)
    at_rollout = 0 if s.offload else 1
    where = "" if over == 1 else f", 1/{over} of them"
    yield Row("trainer", f"base weights, {s.base}{where}", *_int(weights, weights, weights * at_rollout))
    yield Row("trainer", f"adapters, {s.adapters}{where}", *_int(adapters, adapters, adapters * at_rollout))
    trained = adapters if p.modules else weights
    yield Row("trainer", "their gradients, and AdamW", *_int(3 * trained, 2 * trained, 2 * trained * at_rollout))
    if over > 1:
        yield Row("trainer", "gathered by FSDP2: two layers, and what is in no layer", *_int(_gathered(p, s), 0, 0))
    if s.train_merged or s.share:
        kept = _way_back(p.adapted / over, _itemsize(s.base)) + 2 * adapters
        yield Row(
            "trainer", "lora_merge: way back to the base, copies of adapters", *_int(kept, kept, kept * at_rollout)
        )
    if _buckets(s):
        two = 2 * min(s.bucket, sum(t.elements for t in p.tensors) * _itemsize(_sent(s)))
        yield Row("trainer", "lora_merge: two buckets", 0, two, 0)


def _engine(p: Policy, s: Setup) -> Iterator[Row]:
    awake = 0 if s.sleep else 1
    weights = 0 if s.share else _engine_weights(p, s)
    yield Row(
        "engine", f"weights, {s.engine}{'' if s.tp == 1 else f', 1/{s.tp} of them'}", weights * awake, weights, weights
    )
    adapters = (p.lora_A + p.lora_B) * _itemsize(s.adapters)
    if s.merge == "engine":  # what restores the base stays on the GPU while the engine sleeps
        size = _itemsize(_sent(s))
        kept = _way_back(p.adapted / s.tp, size)
        if s.engine == "fp8":  # layers that are quantised anew are made of a copy of their base
            kept = sum(t.elements for t in p.tensors if t.linear) / s.tp * size
        kept += 2 * adapters
        yield Row("engine", "lora_merge: way back to the base, adapters of two updates", *_int(kept, kept, kept))
    if s.mode == "adapter":
        held = (p.lora_A + p.lora_B / s.tp) * _itemsize(_sent(s))
        yield Row("engine", "vLLM's LoRA layers, of one adapter", *_int(held * awake, held, held))
    if s.apart:
        yield Row(
            "engine",
            "lora_merge: two buckets",
            0,
            2 * s.bucket if s.mode == "merged" and s.merge == "trainer" else 0,
            0,
        )


def _engine_weights(p: Policy, s: Setup) -> int:
    """Vectors (norms, biases) are whole on each worker; matrices are cut."""
    return int(sum(_nbytes(t, s.engine) / (s.tp if len(t.shape) > 1 else 1) for t in p.tensors))


def _buckets(s: Setup) -> bool:
    """Return True if weights cross in buckets: to other GPUs over NCCL, and in the first push to memory that sleeps,
    which cannot be mapped; else the trainer writes straight into the engine."""
    return s.mode == "merged" and s.merge == "trainer" and not s.share and (s.apart or s.sleep > 0)


def _gathered(p: Policy, s: Setup) -> float:
    """Two layers, as the next one is gathered while one computes, and the root's parameters, which stay gathered."""
    blocks: dict[str, float] = {}
    for t in p.tensors:
        blocks[t.block] = blocks.get(t.block, 0) + _nbytes(t, s.base)
    return blocks.pop("", 0) + 2 * max(blocks.values(), default=0)


def _way_back(elements: float, size: int) -> float:
    """Codes, records and the first arenas of two updates of so many elements of `size` bytes."""
    return elements * (_CODE + _RECORD + 2 * size / FIRST_ROOM)


def _nbytes(t: Tensor, kind: str) -> float:
    """Return the bytes of a parameter in a model that is held in `kind`: of codes with their scales in float32, one for
    64 elements (nf4) or for a row (int8)."""
    taken = t.linear and not (kind in _CODES and t.experts)
    if kind == "nf4":
        return t.elements / 2 + 4 * ceil(t.elements / 64) if taken else 2 * t.elements
    if kind == "int8":
        return t.elements + 4 * t.shape[0] if taken else 2 * t.elements
    if kind == "fp8":
        return t.elements if taken else 2 * t.elements
    return t.elements * _itemsize(kind)


def _sent(s: Setup) -> str:
    """Return the dtype in which weights are sent: that of the engine, bf16 to one that quantises."""
    return "bfloat16" if s.engine == "fp8" else s.engine


def _itemsize(name: str) -> int:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InvalidInput(f"dtype {name!r}: expected a name of torch's, such as bfloat16")
    return found.itemsize


def _int(*values: float) -> tuple[int, ...]:
    return tuple(map(int, values))


def totals(rows: Sequence[Row], setup: Setup) -> dict[str, dict[str, int]]:
    """Return the sum of each step for each kind of GPU: "trainer" and "engine" where these are apart, else "each"."""
    sides = ("trainer", "engine") if setup.apart else ("each",)
    return {
        side: {step: sum(getattr(row, step) for row in rows if side in (row.side, "each")) for step in _STEPS}
        for side in sides
    }
