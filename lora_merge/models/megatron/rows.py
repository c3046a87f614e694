"""Which rows of a Megatron parameter are which rows of the checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from ...errors import InvalidInput
from ...shards import Piece, Shard

HF: TypeAlias = str | Mapping[str, str]
"""A checkpoint tensor; or the ones that Megatron fuses by rows: keys q, k, v or gate, up; of a gated delta net qkvz, ba
or qkv, z, b, a."""
Block: TypeAlias = tuple[int, int, int]
"""Rows that follow each other: the first one in the parameter over all ranks, the first one in the tensor, how many."""

CONCATENATED = "[qkv]"
"""What the name of a checkpoint tensor ends with that has q, then k, then v, where Megatron has query groups."""
INTERLEAVED = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
"""Options of megatron-core, newer than 0.16, that order the rows of fc1 otherwise."""
_FC1 = re.compile(r"linear_fc1\.(?:weight|bias)")
_DELTA = re.compile(r"\.self_attention\.(in_proj|conv1d)\.(?:weight|bias)")
_MAMBA = re.compile(r"\.mixer\.(in_proj|conv1d)\.(?:weight|bias)")


def row_blocks(name: str, hf: HF, rows: int, ranks: int, config: Any) -> dict[str, list[Block]]:
    """Return which rows of a Megatron parameter are which of the checkpoint's tensors: by key in `HF`, "" if there is
    one.

    Args:
        rows: of the whole parameter.
        ranks: over which its rows are cut; 1 where they are not.

    Raises:
        InvalidInput: the rows do not fit the configuration, or what it does to fc1.
    """
    keys = set() if isinstance(hf, str) else set(hf)
    if _FC1.search(name) or keys == {"gate", "up"}:
        _check_fc1(name, hf, ranks, config)
    if found := _DELTA.search(name):
        return _delta_net(name, found[1], hf, rows, ranks, config)
    if found := _MAMBA.search(name):
        return _mamba(name, found[1], hf, rows, ranks, config)
    if isinstance(hf, str):
        return {"": list(_joined(_qkv(name, rows, config))) if hf.endswith(CONCATENATED) else [(0, 0, rows)]}
    if keys == {"gate", "up"}:  # each rank holds its rows of gate above its rows of up
        half, rest = divmod(rows, 2 * ranks)
        if rest:
            raise InvalidInput(f"{name}: {rows} rows over {ranks} ranks do not halve into gate and up")
        return _apart({"gate": half * ranks, "up": half * ranks}, ranks)
    if keys != {"q", "k", "v"}:
        raise InvalidInput(f"{name}: fused tensors must be q, k, v or gate, up; got {', '.join(hf)}")
    return _qkv(name, rows, config)


def place(tensor: Tensor, cut: int | None, grid: tuple[int, int], blocks: Sequence[Block]) -> Shard:
    """Return this rank's part of one checkpoint tensor, which is these rows of a parameter over all ranks.

    Args:
        tensor: `[rows]` or `[rows, columns]`, cut evenly over the ranks of a group along dimension `cut`.
        grid: `(rank, size)` in that group.
    """
    (rank, size), (count, *columns) = grid, tensor.shape
    begin = rank * count if cut == 0 else 0
    first, shape = [0] * len(columns), list(columns)
    if cut == 1:
        first, shape = [rank * n for n in columns], [n * size for n in columns]
    pieces, rows = [], 0
    for at, start, length in blocks:
        lower, upper = max(at, begin), min(at + length, begin + count)
        rows += length
        if lower < upper and all(columns):
            view = tensor if upper - lower == count else tensor[lower - begin : upper - begin]
            pieces.append(Piece((start + lower - at, *first), view))
    whole = len(pieces) == 1 and pieces[0].tensor.shape[0] == rows and (cut != 1 or size == 1)
    return Shard((rows, *shape), tensor.dtype, tensor.device, tuple(pieces), whole)


def _qkv(name: str, rows: int, config: Any) -> dict[str, list[Block]]:
    """Return the rows of q, k and v. Where attention has an output gate, HF's q_proj has the gate of each head below
    the head."""
    heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
    gated = bool(getattr(config, "attention_output_gate", False))
    wanted = (heads * (1 + gated) + 2 * groups) * dim
    if rows != wanted:
        raise InvalidInput(
            f"{name}: {rows} rows, but num_attention_heads={heads}, num_query_groups={groups}, kv_channels={dim} and "
            f"attention_output_gate={gated} make {wanted} of q, k and v"
        )
    per_group = heads // groups
    q = per_group * dim  # a query group: its heads of q, then their gates, then one head of k, then one of v
    group = q * (1 + gated) + 2 * dim
    blocks: dict[str, list[Block]] = {
        key: [(g * group + at, g * dim, dim) for g in range(groups)]
        for key, at in (("k", group - 2 * dim), ("v", group - dim))
    }
    if not gated:
        return {"q": [(g * group, g * q, q) for g in range(groups)]} | blocks
    blocks["q"] = [
        (g * group + turn * q + h * dim, (2 * (g * per_group + h) + turn) * dim, dim)
        for g in range(groups)
        for h in range(per_group)
        for turn in range(2)
    ]
    return blocks


def _joined(blocks: Mapping[str, Sequence[Block]]) -> Iterator[Block]:
    """Yield the rows of tensors that become one, each below the one before: q, k, v."""
    begin = 0
    for key in "qkv":
        yield from ((at, begin + start, count) for at, start, count in blocks[key])
        begin += sum(count for _, _, count in blocks[key])


def _delta_net(name: str, linear: str, hf: HF, rows: int, ranks: int, config: Any) -> dict[str, list[Block]]:
    """Return the rows of a gated delta net: a rank has its heads of q, k, v, z, b and a one below the other, its
    convolution those of q, k and v."""
    heads_k, heads_v = config.linear_num_key_heads, config.linear_num_value_heads
    dim_k, dim_v = config.linear_key_head_dim, config.linear_value_head_dim
    said = (
        f"linear_num_key_heads={heads_k}, linear_num_value_heads={heads_v}, linear_key_head_dim={dim_k} and "
        f"linear_value_head_dim={dim_v}"
    )
    if heads_k % ranks or heads_v % heads_k:
        raise InvalidInput(f"{name}: expected whole heads on each of {ranks} ranks, got {said}")
    qkv = {"q": heads_k * dim_k, "k": heads_k * dim_k, "v": heads_v * dim_v}
    sizes = qkv if linear == "conv1d" else qkv | {"z": heads_v * dim_v, "b": heads_v, "a": heads_v}
    _check_sections(name, sizes, rows, ranks, said)
    if isinstance(hf, str):
        if linear == "in_proj":
            raise InvalidInput(f"{name}: it becomes qkvz and ba, or qkv, z, b and a; got the one name {hf!r}")
        return {"": list(_below(sizes, ranks))}
    apart = _apart(sizes, ranks)
    if set(hf) == {"qkv", "z", "b", "a"}:
        return {"qkv": list(_below(sizes, ranks, "qkv"))} | {key: apart[key] for key in "zba"}
    if set(hf) != {"qkvz", "ba"}:
        raise InvalidInput(f"{name}: it becomes qkvz and ba, or qkv, z, b and a; got {', '.join(hf)}")
    return {"qkvz": _by_head(apart, "qkvz", heads_k), "ba": _by_head(apart, "ba", heads_k)}


def _mamba(name: str, linear: str, hf: HF, rows: int, ranks: int, config: Any) -> dict[str, list[Block]]:
    """Return the rows of a Mamba-2 mixer: a rank has its parts of z, x, B, C and dt one below the other, its
    convolution those of x, B and C."""
    if not isinstance(hf, str):
        raise InvalidInput(f"{name}: it becomes one tensor, got {', '.join(hf)}")
    dim = config.mamba_head_dim
    heads = config.mamba_num_heads or 2 * config.hidden_size // dim
    state = config.mamba_state_dim * config.mamba_num_groups
    said = (
        f"mamba_num_heads={config.mamba_num_heads}, mamba_head_dim={dim}, mamba_num_groups={config.mamba_num_groups} "
        f"and mamba_state_dim={config.mamba_state_dim}"
    )
    sizes = {"x": heads * dim, "B": state, "C": state}
    if linear == "in_proj":
        sizes = {"z": heads * dim, **sizes, "dt": heads}
    _check_sections(name, sizes, rows, ranks, said)
    return {"": list(_below(sizes, ranks))}


def _check_sections(name: str, sizes: Mapping[str, int], rows: int, ranks: int, said: str) -> None:
    wanted = sum(sizes.values())
    if rows != wanted or any(size % ranks for size in sizes.values()):
        raise InvalidInput(f"{name}: {rows} rows over {ranks} ranks, but {said} make {wanted} of {', '.join(sizes)}")


def _apart(sizes: Mapping[str, int], ranks: int) -> dict[str, list[Block]]:
    """Return the rows of sections that become a tensor each; a rank holds its part of each below that of the one
    before."""
    local, at = sum(sizes.values()) // ranks, 0
    blocks: dict[str, list[Block]] = {}
    for key, size in sizes.items():
        part = size // ranks
        blocks[key] = [(rank * local + at, rank * part, part) for rank in range(ranks)]
        at += part
    return blocks


def _below(sizes: Mapping[str, int], ranks: int, keys: Sequence[str] | None = None) -> Iterator[Block]:
    """Yield the rows of sections (default: all) that become one tensor, one below the other."""
    apart, begin = _apart(sizes, ranks), 0
    for key in sizes if keys is None else keys:
        for at, start, count in apart[key]:
            yield at, begin + start, count
        begin += sizes[key]


def _by_head(apart: Mapping[str, Sequence[Block]], keys: str, heads: int) -> list[Block]:
    """Return the rows of sections that become one tensor, head by head: of each head its rows of the first, then of the
    second, ..."""
    per_head = {key: sum(count for _, _, count in apart[key]) // heads for key in keys}
    blocks, below, whole = list[Block](), 0, sum(per_head.values())
    for key in keys:
        size = per_head[key]
        for at, start, count in apart[key]:
            blocks += [(at + first, (start + first) // size * whole + below, size) for first in range(0, count, size)]
        below += size
    return blocks


def _check_fc1(name: str, hf: HF, ranks: int, config: Any) -> None:
    """Check fc1: where it is gated, each rank holds its rows of gate above its rows of up; where not, it is one
    tensor."""
    gated, fused = getattr(config, "gated_linear_unit", True), not isinstance(hf, str)
    if not gated and fused:
        raise InvalidInput(
            f"{name}: gated_linear_unit=False, so that it is one tensor and not gate and up; pass names= that give it "
            "one HF name"
        )
    for option in INTERLEAVED:
        if gated and getattr(config, option, None):
            raise InvalidInput(
                f"{name}: {option}={getattr(config, option)} lays gate and up in turns, which is not known here; train "
                "with None"
            )
    if gated and not fused and ranks > 1:
        raise InvalidInput(
            f"{name}: gate and up over {ranks} ranks, each with its part of both: expected names of the two, got "
            f"{hf!r}; pass names= that give {{'gate': ..., 'up': ...}}"
        )
