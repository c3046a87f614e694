"""Where a rank stands in Megatron's parallel groups, and which ranks hold a whole model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from ...errors import InvalidInput
from ...extras import needed


@dataclass(frozen=True, slots=True)
class Groups:
    """Where this rank stands: `(rank, size)` in its group of each kind; and the ranks it needs for a whole model.

    Args:
        tp, expert_tp: tensor parallel, of experts.
        ep: expert parallel.
        model: global ranks of its TP x PP group, which hold the dense weights.
        experts: global ranks of its expert-TP x EP x PP group, which hold the experts.
    """

    tp: tuple[int, int]
    expert_tp: tuple[int, int]
    ep: tuple[int, int]
    model: tuple[int, ...]
    experts: tuple[int, ...]


class ProcessGroups(NamedTuple):
    """The process groups behind `Groups`."""

    tp: Any
    expert_tp: Any
    model: Any
    experts: Any


def replica(groups: Sequence[tuple[Sequence[int], Sequence[int]]], rank: int) -> tuple[int, ...]:
    """Return the smallest set of ranks around one that holds a whole model, dense weights and experts.

    Args:
        groups: `Groups.model` and `Groups.experts` of every rank in the world.
        rank: a global one.
    """
    found, new = set[int](), {rank}
    while new:
        found |= new
        new = {peer for r in new for peers in groups[r] for peer in peers} - found
    return tuple(sorted(found))


def groups_of(model: Any) -> tuple[Groups, ProcessGroups]:
    """Return where this rank is, for an unwrapped GPTModel or MambaModel.

    Raises:
        InvalidInput: torch.distributed or Megatron's parallel groups are not initialised.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidInput("a Megatron model, but torch.distributed is not initialised: init_process_group first")
    pg: Any = getattr(model, "pg_collection", None)
    if any(getattr(pg, name, None) is None for name in ("tp", "expt_tp", "ep", "mp", "tp_ep_pp")):
        with needed("a Megatron model takes megatron-core", "'lora-merge[megatron]'", "megatron"):
            from megatron.core import parallel_state
            from megatron.core.process_groups_config import ProcessGroupCollection
        if not parallel_state.model_parallel_is_initialized():
            raise InvalidInput("the parallel groups of Megatron are not initialised: initialize_model_parallel first")
        pg = ProcessGroupCollection.use_mpu_process_groups()

    def place(group: Any) -> tuple[int, int]:
        return dist.get_rank(group), dist.get_world_size(group)

    model_ranks, expert_ranks = (tuple(dist.get_process_group_ranks(group)) for group in (pg.mp, pg.tp_ep_pp))
    groups = Groups(place(pg.tp), place(pg.expt_tp), place(pg.ep), model_ranks, expert_ranks)
    return groups, ProcessGroups(pg.tp, pg.expt_tp, pg.mp, pg.tp_ep_pp)
