"""Buckets from the ranks of a trainer to the workers of engines: which kinds of transport there are, and which rank
serves which worker over which of them.

| transport | where | how |
|---|---|---|
| local | same process | merged straight into the engine's tensors; the rest in buckets (local.py) |
| write | same host, if the engine's memory can be mapped | merged straight into the engine's tensors (peer_memory.py) |
| pull | same host, if the trainer's memory can be mapped, not the engine's | workers read and merge (worker/pull.py) |
| shm | CPU, same host | two buffers in POSIX shared memory (mailbox.py) |
| ipc | same GPU, other process | two buffers of a cudaMalloc of their own, opened by the worker (mailbox.py) |
| nccl | other GPUs | a broadcast a bucket, from a rank to its workers of a replica, or sends to some (nccl.py) |
| tcp | all else | over a socket to one worker a host, from there in shared memory to the others (tcp_*.py) |

Engines on hosts without a trainer rank are served by all trainer ranks side by side, over the network cards of all of
them: an engine's workers on a host by the same rank, so that what all take crosses to a host once; or GPUs by a rank
each, if most of what they take is their own.

Every trainer rank fills every bucket (that may take all of them) and hands it to the workers assigned to it; it fills a
buffer while workers load the other one.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from itertools import cycle
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...stream.direct_targets import DirectTargets, Sent
from .base import TrainerEnd, WorkerEnd
from .base import WorkerId as WorkerId
from .liveness import host_id
from .local import LocalReceiver, LocalSender
from .mailbox import IpcSender, MailboxReceiver, ShmSender
from .nccl import NcclReceiver, NcclSender
from .peer_memory import WriteSender
from .tcp_receiver import TcpReceiver
from .tcp_sender import TcpSender

_CUMEM = "NCCL_CUMEM_ENABLE"


class Transport(NamedTuple):
    """A kind of transport, by its two ends."""

    trainer: type[TrainerEnd]
    worker: type[WorkerEnd]


TRANSPORTS = {
    "nccl": Transport(NcclSender, NcclReceiver),
    "tcp": Transport(TcpSender, TcpReceiver),
    "local": Transport(LocalSender, LocalReceiver),
    "shm": Transport(ShmSender, MailboxReceiver),
    "ipc": Transport(IpcSender, MailboxReceiver),
    "write": Transport(WriteSender, WorkerEnd),
}
"""All that have ends, by name. `assign` takes the first one that reaches a worker: of those that share memory with it,
else of the others. A bucket is handed over in this order: first to those that only enqueue it. (A pull needs no end, as
the worker has mapped what it reads.)"""


def in_process(kind: str) -> bool:
    """Return True if a kind of transport serves workers of the trainer's own process."""
    return TRANSPORTS[kind].trainer.in_process


def without_buckets() -> str:
    """Return the kind of transport that workers of other processes have where no bucket is sent to them."""
    return next(kind for kind, transport in TRANSPORTS.items() if not transport.trainer.takes_buckets)


def worker_end(channel: Mapping[str, Any], device: torch.device) -> WorkerEnd:
    """Make a worker's end, by its `Sender.channel`."""
    return TRANSPORTS[channel["kind"]].worker(channel, device)


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
        """Return which buckets come to a worker if not all take everything: those `sent` to it, its `own` of these, and
        those of its own that come `apart`.

        Args:
            served: every worker's trainer rank, and transport.
            hosts: of workers that are reached over a network.
        """
        rank, kind = served[place]
        end = TRANSPORTS[kind].trainer
        peers = {at: how for at, (by, how) in served.items() if by == rank and in_process(how) == end.in_process}
        own, group = self.by({place}), end.group(place, peers)
        apart = [i for i in own if i in self.recipients and not group <= self.recipients[i]]
        return {"sent": self.by(end.shared_with(place, peers, hosts)), "own": own, "apart": apart}

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


def introduction(device: torch.device) -> dict[str, Any]:
    """Return what `assign` needs of a process: host, process id, a GPU's UUID ("cpu" for the CPU), and how its NCCL
    allocates memory."""
    name = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type
    return {"host": host_id(), "pid": os.getpid(), "device": name, "cumem": os.environ.get(_CUMEM, "")}


def clash(
    trainer: Mapping[str, Any], workers: Sequence[Sequence[Mapping[str, Any]]], places: Mapping[WorkerId, str]
) -> str:
    """Return why NCCL would not connect some worker; "" if nothing is known against it.

    On one host, members of an NCCL group open each other's memory, and all of them have to export it in the same one of
    two ways.

    Args:
        trainer: the `introduction` of the rank that broadcasts.
        workers: as for `assign`.
        places: the transport to each of them.
    """
    for (r, w), kind in places.items():
        worker = workers[r][w]
        cumem = [f"{_CUMEM}={one.get('cumem') or '(not set: 1)'}" for one in (trainer, worker)]
        old = [one.get("cumem") == "0" for one in (trainer, worker)]
        if kind == "nccl" and worker["host"] == trainer["host"] and old[0] != old[1]:
            return (
                f"NCCL cannot connect the trainer ({cumem[0]}) and worker {w} of engine {r} ({cumem[1]}; SGLang sets 0 "
                f"where nothing is set): start both with the same {_CUMEM}, 0 or 1"
            )
    return ""


def assign(
    trainers: Sequence[Mapping[str, Any]], workers: Sequence[Sequence[Mapping[str, Any]]], apart: bool = False
) -> dict[WorkerId, tuple[int, str]]:
    """Choose for every worker the trainer rank that serves it, and the transport. Ranks of neither side are compared.

    Args:
        trainers: the `introduction` of every trainer rank.
        workers: for each replica those of its workers, in rank order.
        apart: most of what comes goes to one worker alone, so that each GPU on another host gets it over a card of its
            own.
    """
    places: dict[WorkerId, tuple[int, str]] = {}
    turns = cycle(_side_by_side(trainers))
    far = [name for name, transport in TRANSPORTS.items() if not transport.trainer.shares_memory]
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
                group = members.setdefault(rank, {trainers[rank]["device"]})
                kind = next(kind for kind in far if TRANSPORTS[kind].trainer.reaches(trainers[rank], worker, group))
                group.add(worker["device"])
                place = rank, kind
            places[r, w] = place
    return places


def _in_memory(near: Sequence[tuple[int, Mapping[str, Any]]], worker: Mapping[str, Any]) -> tuple[int, str] | None:
    """Return the rank of a worker's host that shares memory with it, and the transport; None if none does."""
    for kind, transport in TRANSPORTS.items():
        for rank, trainer in near if transport.trainer.shares_memory else ():
            if transport.trainer.reaches(trainer, worker, ()):
                return rank, kind
    return None


def _side_by_side(trainers: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return all ranks in the order in which they begin to serve other hosts: first one of each host, as each host has
    a network card of its own."""
    before: dict[str, int] = {}
    order = []
    for rank, trainer in enumerate(trainers):
        before[trainer["host"]] = before.get(trainer["host"], -1) + 1
        order.append((before[trainer["host"]], rank))
    return [rank for _, rank in sorted(order)]
