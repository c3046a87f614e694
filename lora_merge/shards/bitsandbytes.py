"""bitsandbytes: weights that are codes of 4 bits (NF4, FP4) or of 8 (LLM.int8), as shards of what they stand for.

Values are those of bitsandbytes' own `dequantize_4bit`, in the quantisation state's dtype, and of
`int8_vectorwise_dequant`, which are float32. bitsandbytes is not imported: a model that holds its layers has done so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput
from ..kernels.packed import Codes, Nested
from ..kernels.segments import FLOATS
from ..names import lineage
from . import Piece, Shard, flat_pieces, fsdp2, whole, zero3

_NN = "bitsandbytes.nn.modules."
_KINDS = {"Linear4bit": 4, "Embedding4bit": 4, "Linear8bitLt": 8, "Embedding8bit": 8}
CONV1D = "transformers.pytorch_utils.Conv1D"


def bits(module: nn.Module) -> int | None:
    """Return how many bits a code of the weight of one of bitsandbytes' modules has; None for other modules."""
    kind: type = type(module)
    return _bits_of(kind)


@cache
def _bits_of(cls: type) -> int | None:
    found = (_KINDS.get(path.removeprefix(_NN)) for path in lineage(cls) if path.startswith(_NN))
    return next((n for n in found if n is not None), None)


def dtypeless(module: nn.Module) -> bool:
    """Return True if a module's weight does not say which dtype it was quantised from: LLM.int8's layers."""
    return bits(module) == 8 and not isinstance(getattr(module, "dtype", None), torch.dtype)


def turned(module: nn.Module) -> bool:
    """Return True if a module's weight is the transposed one of the checkpoint: transformers makes a Conv1D a linear
    layer."""
    cls = None if bits(module) is None else module.__dict__.get("source_cls")
    return isinstance(cls, type) and CONV1D in lineage(cls)


def shard_of(name: str, owner: Any, tensor: Any) -> Shard:
    """Return what this rank holds of the weight of one of bitsandbytes' modules, laid out as in the checkpoint.

    Raises:
        InvalidInput: it is not quantised (yet), or in a way, or sharded in a way, that cannot be read here.
    """
    found = _shard_of(name, owner, tensor)
    if not turned(owner):
        return found
    pieces = tuple(Piece(piece.start[::-1], piece.tensor.t()) for piece in found.pieces)
    return replace(found, shape=found.shape[::-1], pieces=pieces)


def _shard_of(name: str, owner: Any, tensor: Any) -> Shard:
    if zero3.is_managed(tensor):
        raise InvalidInput(
            f"{name}: quantised by bitsandbytes, and partitioned by ZeRO-3: its codes cannot be read from "
            "there; use FSDP2 and 4 bits (bnb_4bit_quant_storage), or ZeRO-2"
        )
    if bits(owner) == 8:
        return whole(_int8(name, owner, tensor).tensor(tuple(tensor.shape)))
    state = _state(name, owner, tensor)
    shape, count = tuple(state.shape), prod(state.shape)
    if tensor.device.type == "cpu" and not _decodes_rows(shape[-1], state.blocksize, state.quant_type):
        raise InvalidInput(
            f"{name}: bitsandbytes decodes rows of {shape[-1]} codes in blocks of {state.blocksize} with the scales of "
            "other blocks on this CPU (its kernel for AVX-512 wants blocks that divide a row), so that the policy "
            "multiplies with other weights than these codes stand for; quantise it with a blocksize that divides its "
            "rows, or move the model to a GPU"
        )
    stored = fsdp2.shard_of(name, tensor) if hasattr(tensor, "_local_tensor") else None
    if stored is None:
        packed = _codes4(name, state, _plain(tensor), 0)
        if packed.data.numel() != -(-count // 2):
            raise InvalidInput(f"{name}: {packed.data.numel()} bytes hold no {count} codes of 4 bits; load it again")
        return whole(packed.tensor(shape))
    if stored.shape[1:] != (1,) or prod(stored.shape) * stored.dtype.itemsize != -(-count // 2):
        raise InvalidInput(
            f"{name}: sharded codes of 4 bits of shape {stored.shape}; expected those of {shape}, [n, 1]"
        )
    pieces: list[Piece] = []
    for piece in stored.pieces:
        begin = piece.start[0] * stored.dtype.itemsize * 2
        codes = _codes4(name, state, piece.tensor, begin)
        flat = codes.tensor((min(codes.count, count - begin),))
        pieces += flat_pieces(shape, begin, flat)
    return Shard(shape, state.dtype, stored.device, tuple(pieces), stored.whole)


def facts(modules: Iterable[nn.Module], kinds: Iterable[type]) -> tuple[list[Any], list[Tensor]]:
    """Return all that reading bitsandbytes' weights among modules depends on beside the parameters: values to be
    compared, and tensors (what scales the codes).

    Args:
        kinds: the classes of the modules.
    """
    if not any(map(_bits_of, set(kinds))):
        return [], []
    values: list[Any] = []
    tensors: list[Tensor] = []
    for module in modules:
        kind = bits(module)
        if kind is None:
            continue
        weight: Any = module._parameters.get("weight")
        values += [turned(module), getattr(module, "dtype", None)]
        if kind == 8:
            found = _statistics(module, weight)
            values += [t is None for t in found]
            tensors += [t for t in found if isinstance(t, Tensor)]
            values.append(_trained_plain(module, weight))
            continue
        state = _quant_state(module, weight)
        if state is None:
            values.append(None)
            continue
        inner = state.state2 if getattr(state, "nested", False) else None
        values += [state.quant_type, state.blocksize, state.dtype, state.shape, getattr(inner, "blocksize", None)]
        values.append(getattr(state, "packing_format_for_cpu", False))
        held = [state.absmax, state.code, *([] if inner is None else [inner.absmax, inner.code, state.offset])]
        tensors += [t for t in held if isinstance(t, Tensor)]
    return values, tensors


# ---- 4 bits ----------------------------------------------------------------------------------------------------------


def _quant_state(owner: Any, weight: Any) -> Any:
    """Return the quantisation state of a weight: a sharded parameter has lost it; the module keeps it."""
    state = getattr(weight, "quant_state", None)
    return owner.__dict__.get("quant_state") if state is None else state


def _state(name: str, owner: Any, weight: Any) -> Any:
    state = _quant_state(owner, weight)
    if state is None:
        raise InvalidInput(
            f"{name}: a 4-bit weight of bitsandbytes that is not quantised yet; move it to its device first "
            "(module.to(device) quantises)"
        )
    if getattr(state, "packing_format_for_cpu", False):
        raise InvalidInput(
            f"{name}: bitsandbytes has packed its codes anew and rounded its scales to bfloat16, as a forward on the "
            "CPU in eval mode without gradients does; load the base again, and keep the model in train mode"
        )
    features = (
        ("num_embeddings", "embedding_dim") if hasattr(owner, "num_embeddings") else ("out_features", "in_features")
    )
    shape = tuple(getattr(owner, dim) for dim in features)
    if state.shape is None or tuple(state.shape) != shape:
        raise InvalidInput(
            f"{name}: quantised from a weight of shape {state.shape}, in a layer of {shape}; quantise it from its "
            "[out, in] weight"
        )
    if state.quant_type not in ("nf4", "fp4") or state.dtype not in FLOATS:
        raise InvalidInput(
            f"{name}: codes of type {state.quant_type} for {state.dtype}; expected nf4 or fp4 for bfloat16, "
            "float16 or float32"
        )
    dtype = getattr(owner, "dtype", None)
    if isinstance(dtype, torch.dtype) and dtype not in (state.dtype, torch.float32):
        raise InvalidInput(
            f"{name}: an embedding of {dtype} that was quantised from {state.dtype}, so that its rows are rounded "
            f"twice; make it of {state.dtype}"
        )
    return state


@cache
def _decodes_rows(cols: int, blocksize: int, quant_type: str) -> bool:
    """Return True if bitsandbytes itself decodes a weight of rows of `cols` codes with the right scales on this CPU.

    Its kernel for AVX-512 counts `cols // blocksize` blocks in each row, also where blocks reach over the end of a row
    (`dequantizeBlockwise4bitCpu`, releases up to 0.50). Tried on a small weight, whose scales are all different.
    """
    if cols % blocksize == 0:
        return True
    rows = 2 * (blocksize // cols + 2)  # more than two blocks, of an even number of codes
    scales = torch.arange(1.0, -(-rows * cols // blocksize) + 1, device="cpu")
    codes = torch.full((rows * cols // 2, 1), 0xFF, dtype=torch.uint8, device="cpu")
    got = _decode(codes, scales, blocksize, quant_type, (rows, cols))
    wanted = got.flatten()[0] * scales.repeat_interleave(blocksize)[: rows * cols]  # one code, times each scale
    return torch.equal(got.flatten(), wanted)


def _decode(codes: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: tuple[int, ...]) -> Tensor:
    return torch.ops.bitsandbytes.dequantize_4bit(codes, absmax, blocksize, quant_type, shape, torch.float32)


def _codes4(name: str, state: Any, stored: Tensor, begin: int) -> Codes:
    device = stored.device
    inner = state.state2 if state.nested else None
    nested = None
    if inner is not None:
        nested = Nested(
            _part(name, "state2.code", inner.code, 256, device),
            _part(name, "state2.absmax", inner.absmax, -(-state.absmax.numel() // inner.blocksize), device),
            inner.blocksize,
            _part(name, "offset", state.offset, 1, device),
        )
    blocks = -(-prod(state.shape) // state.blocksize)
    absmax = _part(name, "absmax", state.absmax, blocks, device, torch.float32 if inner is None else torch.uint8)
    code = _part(name, "code", state.code, 16, device)
    return Codes(_flat(name, stored).view(torch.uint8), state.dtype, absmax, state.blocksize, code, nested, begin)


def _part(
    name: str, what: str, found: Any, count: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a tensor of a quantisation state, 1-D."""
    if not isinstance(found, Tensor) or found.dtype != dtype or found.numel() < count or found.device != device:
        got = f"{found.dtype} {list(found.shape)} on {found.device}" if isinstance(found, Tensor) else repr(found)
        raise InvalidInput(
            f"{name}: {what} of its quantisation state must be {dtype} of {count} elements on {device}, got {got}; "
            "load the base again, and do not convert it (.half(), .to(dtype))"
        )
    return _flat(f"{name}: {what}", found)


def _flat(name: str, found: Tensor) -> Tensor:
    if not found.is_contiguous():
        raise InvalidInput(f"{name}: must be contiguous, got strides {found.stride()}")
    return _plain(found).view(-1)


def _plain(tensor: Tensor) -> Tensor:
    """Return the codes themselves, without bitsandbytes' class around them."""
    return tensor.detach().as_subclass(Tensor)


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


def _statistics(owner: Any, weight: Any) -> tuple[Any, Any]:
    """Return the codes with which the next forward multiplies, and the largest value of each row: a first forward moves
    them from the parameter to the layer's state."""
    state, CB, SCB = owner.__dict__.get("state"), getattr(weight, "CB", None), getattr(weight, "SCB", None)
    if CB is None and state is not None and state.CB is not None:
        return state.CB, state.SCB
    return weight if CB is None else CB, SCB


def _trained_plain(owner: Any, weight: Any) -> bool:
    return bool(
        getattr(weight, "has_fp16_weights", False) or getattr(owner.__dict__.get("state"), "has_fp16_weights", False)
    )


def _int8(name: str, owner: Any, weight: Any) -> Codes:
    if _trained_plain(owner, weight) and hasattr(owner, "state"):
        raise InvalidInput(
            f"{name}: has_fp16_weights=True: each forward quantises the weight anew, and the policy multiplies with no "
            "fixed weight; make the layer with has_fp16_weights=False"
        )
    if hasattr(weight, "_local_tensor"):
        raise InvalidInput(
            f"{name}: LLM.int8 weights that are sharded cannot be read; shard 4-bit weights (FSDP2), or none"
        )
    CB, SCB = _statistics(owner, weight)
    if not isinstance(CB, Tensor) or CB.dtype != torch.int8 or SCB is None:
        raise InvalidInput(
            f"{name}: an 8-bit weight of bitsandbytes that is not quantised yet; move it to its device first "
            "(module.to(device) quantises)"
        )
    if CB.data_ptr() != weight.data_ptr() or CB.shape != weight.shape or CB.dim() != 2:
        raise InvalidInput(
            f"{name}: the layer multiplies with other codes than those of its weight {list(weight.shape)}: it was "
            "moved after it was quantised, or loaded after a forward; make it anew, on its device"
        )
    rows, cols = CB.shape
    dtype = torch.float32 if dtypeless(owner) else owner.dtype
    if dtype not in FLOATS:
        raise InvalidInput(f"{name}: of {dtype}; expected bfloat16, float16 or float32")
    return Codes(_flat(name, CB), dtype, _part(name, "SCB", SCB, rows, CB.device), max(cols, 1))
