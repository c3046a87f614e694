"""Buckets from the ranks of a trainer to the workers of engines.

| transport | where | how |
|---|---|---|
| local | same process | merged straight into the engine's tensors; buckets that the worker pulls for the rest |
| write | same host, where the engine's memory can be mapped | merged straight into the engine's tensors (mapped.py) |
| pull | same host, where the trainer's memory can be mapped, the engine's not | workers read and merge (pull.py) |
| shm | CPU, same host | two buffers in POSIX shared memory |
| ipc | same GPU, other process | two buffers of a cudaMalloc of their own, opened by the worker |
| nccl | other GPUs | one broadcast a bucket, from a trainer rank to its workers of a replica, or sends to some |
| tcp | all else | over a socket to one worker a host, from there in shared memory to the others (outbox.py, inbox.py) |

Engines on hosts without a trainer rank are served by all trainer ranks side by side, over the network cards of all of
them: an engine's workers on a host by the same rank, so that what all take crosses to a host once; or GPUs by a rank
each, where most of what they take is their own.

Every trainer rank fills every bucket (that may take all of them) and hands it to the workers assigned to it; it fills a
buffer while workers load the other one. Who may touch which is settled in a mailbox, a small piece of shared memory:
the trainer counts buckets filled, each worker counts buckets done with. Over NCCL the broadcast is the hand-over; over
sockets workers ask.

Processes of one GPU take turns at it, and half as many buckets of twice the size took 0.4 ms less for each one saved
(H200): there both buffers change hands together.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...stream.direct_targets import DirectTargets, Sent
from .liveness import host_id

WorkerId = tuple[int, int]
"""Replica, and position of the worker in it."""
BUCKETS_TOGETHER = {"shm": 1, "ipc": 2}
"""Buckets that change hands together."""
_CUMEM = "NCCL_CUMEM_ENABLE"
# Words of a mailbox: the trainer's, then those of each worker.
FILLED, ABORTED, WORKERS = 0, 1, 2
DONE, LEFT, PID, WORDS = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class Received:
    """A bucket on the worker's side.

    Args:
        data: uint8; None where it was placed and nobody asked for the bucket, too.
        placed: whether it lies in the engine's tensors already.
    """

    index: int
    data: Tensor | None
    placed: bool


class Route(NamedTuple):
    """How the buckets of a transfer reach the workers; the same on every rank.

    Args:
        placed: buckets that the trainer merges straight into the engines' tensors.
        sent: buckets that are handed over, in order. A bucket may be both, to be compared.
        targets: the tensors that this rank writes to.
        recipients: for buckets that not all workers take: which workers do.
    """

    placed: frozenset[int]
    sent: tuple[int, ...]
    targets: DirectTargets | None = None
    recipients: Mapping[int, frozenset[WorkerId]] = MappingProxyType({})

    @classmethod
    def of_buckets(cls, source: Sent) -> Route:
        """Hand over every bucket."""
        return cls(frozenset(), tuple(range(len(source.table))), None, source.recipients)

    def by(self, workers: Container[WorkerId]) -> list[int]:
        """Return the buckets that at least one of these workers takes."""
        return [i for i in self.sent if i not in self.recipients or any(one in workers for one in self.recipients[i])]

    def wire_spec(
        self, place: WorkerId, served: Mapping[WorkerId, tuple[int, str]], hosts: Mapping[WorkerId, str]
    ) -> dict[str, list[int]]:
        """What comes to a worker where not all take everything: `sent` to it, `own` of these, and which come `apart`.

        Args:
            served: every worker's trainer rank, and transport.
            hosts: of workers that are reached over a network.
        """
        rank, kind = served[place]
        beside = {at for at, (by, how) in served.items() if by == rank and (how == "local") == (kind == "local")}
        own = self.by({place})
        if kind == "nccl":
            group = {at for at in beside if at[0] == place[0] and served[at][1] == kind}
            apart = [i for i in own if i in self.recipients and not group <= self.recipients[i]]
            return {"sent": own, "own": own, "apart": apart}
        if kind == "tcp":  # a bucket comes to a host once
            beside = {at for at in beside if (at[0], hosts.get(at)) == (place[0], hosts.get(place))}
        return {"sent": self.by(beside), "own": own, "apart": []}

    @classmethod
    def to(cls, source: Sent, names: Container[str], targets: DirectTargets, compare: bool) -> Route:
        """Write tensors straight to their targets, and hand over the other buckets.

        Args:
            names: of the tensors that engines take straight.
            compare: hand every bucket over, too.
        """
        placed = source.direct_buckets(names)
        sent = (index for index in range(len(source.table)) if compare or index not in placed)
        return cls(placed, tuple(sent), targets, source.recipients)


def nobody() -> set[int]:
    """Return the empty set: no replica's control call has ended."""
    return set()


def hands_over(index: int, together: int, count: int) -> bool:
    """Whether buckets change hands after this one of `count`."""
    return (index + 1) % together == 0 or index + 1 == count


def introduction(device: torch.device) -> dict[str, Any]:
    """Return what `assign` needs of a process: host, process id, a GPU's UUID ("cpu" for the CPU), and how its NCCL
    allocates memory."""
    name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    return {"host": host_id(), "pid": os.getpid(), "device": name, "cumem": os.environ.get(_CUMEM, "")}


def clash(
    trainer: Mapping[str, Any], workers: Sequence[Sequence[Mapping[str, Any]]], places: Mapping[WorkerId, str]
) -> str:
    """Why NCCL would not connect some worker; "" where nothing is known against it.

    On one host its members open each other's memory, and do not understand each other where one of them hands it out in
    the new way and one in the old.

    Args:
        trainer: the `introduction` of the rank that broadcasts.
        workers: as of `assign`.
        places: the transport to each of them.
    """
    for (r, w), kind in places.items():
        worker = workers[r][w]
        told = [f"{_CUMEM}={one.get('cumem') or '(not set: 1)'}" for one in (trainer, worker)]
        old = [one.get("cumem") == "0" for one in (trainer, worker)]
        if kind == "nccl" and worker["host"] == trainer["host"] and old[0] != old[1]:
            return (
                f"NCCL cannot connect the trainer ({told[0]}) and worker {w} of engine {r} ({told[1]}; SGLang sets 0 "
                f"where nothing is set): start both with the same {_CUMEM}, 0 or 1"
            )
    return ""


def assign(
    trainers: Sequence[Mapping[str, Any]], workers: Sequence[Sequence[Mapping[str, Any]]], apart: bool = False
) -> dict[WorkerId, tuple[int, str]]:
    """For every worker the trainer rank that serves it, and over which transport. Ranks of neither side are compared.

    Args:
        trainers: the `introduction` of every trainer rank.
        workers: for each replica those of its workers, in rank order.
        apart: most of what comes goes to one worker alone, so that each GPU on another host gets it over a card of its
            own.
    """
    places: dict[WorkerId, tuple[int, str]] = {}
    turns = cycle(_side_by_side(trainers))
    away: dict[tuple[int, str | int], int] = {}  # which rank serves an engine, or one worker, on a host that has none
    for r, replica in enumerate(workers):
        members: dict[int, set[str]] = {}
        for w, worker in enumerate(replica):
            near = [(rank, trainer) for rank, trainer in enumerate(trainers) if trainer["host"] == worker["host"]]
            place = _in_memory(near, worker)
            if place is None:
                unit = (r, w if apart and "cpu" not in (trainers[0]["device"], worker["device"]) else worker["host"])
                rank = near[0][0] if near else away.get(unit, -1)
                if rank < 0:
                    rank = away[unit] = next(turns)
                # NCCL takes every GPU once in a group: whoever shares one, and no memory with its process, is left out.
                group = members.setdefault(rank, {trainers[rank]["device"]})
                unfit = worker["device"] in group or "cpu" in (trainers[rank]["device"], worker["device"])
                group.add(worker["device"])
                place = rank, "tcp" if unfit else "nccl"
            places[r, w] = place
    return places


def _in_memory(near: Sequence[tuple[int, Mapping[str, Any]]], worker: Mapping[str, Any]) -> tuple[int, str] | None:
    """Which rank of a worker's host shares memory with it, and how; None where none does."""
    for rank, trainer in near:
        if trainer["pid"] == worker["pid"]:
            return rank, "local"
    for rank, trainer in near:
        if trainer["device"] == worker["device"]:
            return rank, "shm" if worker["device"] == "cpu" else "ipc"
    return None


def _side_by_side(trainers: Sequence[Mapping[str, Any]]) -> list[int]:
    """All ranks, in the order in which they begin to serve other hosts: first one of each host, as each has a network
    card of its own."""
    before: dict[str, int] = {}
    order = []
    for rank, trainer in enumerate(trainers):
        before[trainer["host"]] = before.get(trainer["host"], -1) + 1
        order.append((before[trainer["host"]], rank))
    return [rank for _, rank in sorted(order)]
