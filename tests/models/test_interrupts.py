"""Where Ctrl-C ends a push, and what becomes of calls that it has left behind."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from workers import hello

from lora_merge import PushFailed
from lora_merge.engine.control.calls import drive
from lora_merge.engine.messages import WorkerInfo
from lora_merge.engine.push.channels import Trainer
from lora_merge.engine.push.pusher import Pusher
from lora_merge.engine.push.replica import Replica
from lora_merge.engine.state import State
from lora_merge.engine.transport.base import Expected
from lora_merge.engine.transport.liveness import host_id
from lora_merge.engine.transport.sender import Sender
from lora_merge.engine.worker.commands import OPERATIONS
from lora_merge.engine.worker.loader import Loader
from lora_merge.engine.worker.modules import Modules
from lora_merge.engine.worker.rpc import respond
from lora_merge.engine.worker.session import WorkerSession
from lora_merge.shards.ranks import Ranks
from lora_merge.stream.buckets import Meta, lay_out
from tests.engine.test_steps import Engine

OLD, NEW = State("adapter", 6, "base", trainer="x"), State("adapter", 7, "base", trainer="x")
DIRTY = State("dirty", 6, reason="half of it")


class Halted(Engine):
    """An engine that a push has paused, and that was interrupted.

    Args:
        states: what its workers hold.
        world: how many it has, also elsewhere.
    """

    def __init__(self, states: Mapping[int, State], world: int = 1, **more: Any) -> None:
        super().__init__(paused=True, **more)
        self.states, self.world = states, world

    async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
        return [asked | self.about(rank) for rank, asked in zip(self.states, await super().rpc(op), strict=False)]

    def about(self, rank: int) -> dict[str, Any]:
        where = {"host": host_id(), "pid": os.getpid(), "rank": rank, "world": self.world, "launcher": self.world > 1}
        return hello(**where, paused=True, served="adapter", state=self.states[rank].to_json())

    def info(self, rank: int) -> WorkerInfo:
        return WorkerInfo.read(self.about(rank))


def after_ctrl_c(engine: Halted, replicas: list[Replica]) -> list[str]:
    """What the engine is asked then."""
    pushes = Pusher(Trainer([engine], Ranks()), SimpleNamespace(), pause="keep", mode="adapter")  # type: ignore[arg-type]
    pushes._sequence.begin(pushes._trainer.name)
    drive(pushes._back(replicas, dict.fromkeys(range(len(replicas)), OLD), NEW, "lora_merge"))
    return [name for message in engine.messages for name in message]


def test_an_engine_with_new_weights_forgets_what_it_cached_of_the_old_ones() -> None:
    """Its workers had the adapter, and Ctrl-C came before its prefix cache was reset: answers were of both."""
    engine = Halted({0: NEW})
    asked = after_ctrl_c(engine, [Replica(0, engine, [engine.info(0)])])
    assert asked == [
        "hello",
        "renew_lease",
        *["reset_prefix_cache", "label", "name_adapter"],
        "renew_lease",
        "resume",
        "end",
    ]
    assert not engine.still
    engine = Halted({0: OLD})
    assert after_ctrl_c(engine, [Replica(0, engine, [engine.info(0)])]) == ["hello", "renew_lease", "resume", "end"]


@pytest.mark.parametrize("more", [{"forgets": False}, {"broken": "reset_prefix_cache"}, {"broken": "label"}])
def test_one_that_cannot_stays_paused(more: dict[str, Any]) -> None:
    engine = Halted({0: NEW}, **more)
    asked = after_ctrl_c(engine, [Replica(0, engine, [engine.info(0)])])
    assert "resume" not in asked
    assert engine.still


@pytest.mark.parametrize("state", [OLD, NEW, DIRTY])
def test_a_piece_of_an_engine_does_not_go_on_by_itself(state: State) -> None:
    """Under vLLM's external_launcher each rank has a worker of its own, and nobody knows what the others hold."""
    engine = Halted({0: state}, world=2)
    replicas = [Replica(rank, None if rank else engine, [replace(engine.info(0), rank=rank)]) for rank in (0, 1)]
    asked = after_ctrl_c(engine, replicas)
    assert "resume" not in asked
    assert engine.still


def test_who_could_not_be_told_of_the_end_is_told_when_the_trainer_closes() -> None:
    """Else a living process would hold the engine against its own next trainer."""

    def broken(*_: Any, **__: Any) -> Any:
        raise PushFailed("injected")

    engine = Halted({0: OLD}, broken="end")
    passes = SimpleNamespace(known=broken, release=lambda: None)
    pushes = Pusher(Trainer([engine], Ranks()), passes, pause="keep", mode="adapter")  # type: ignore[arg-type]
    with pytest.raises(PushFailed, match="injected"):
        drive(pushes._push(None, False))
    engine.broken, engine.messages = "", []
    pushes.close()
    assert [name for message in engine.messages for name in message] == ["end"]


# ---- what is left behind ---------------------------------------------------------------------------------------------


class Source:
    """Buckets of one tensor each, that holds its number."""

    device, capacity, recipients = torch.device("cpu"), 4096, dict[int, Any]()
    collective = shared = joins = False
    table = lay_out([Meta(f"t{i}", torch.float32, (1024,)) for i in range(8)], 4096)

    def alone(self, index: int) -> bool:
        return True

    def direct_buckets(self, names: Any) -> frozenset[int]:
        return frozenset()

    def fill(self, index: int, buffer: Tensor, run: Any) -> None:
        buffer.view(torch.float32)[:1024] = float(index)

    def write_direct(self, index: int, places: Any, run: Any) -> None:
        raise NotImplementedError


class Worker:
    """The worker of an engine that holds a layer."""

    rank, device = 0, Source.device

    def __init__(self) -> None:
        self._side = WorkerSession(Loader(Modules(nn.Linear(4, 4)), self.device), lambda: 0, lambda: False)

    def session(self) -> WorkerSession:
        return self._side

    def working(self, op: str) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.mark.parametrize("op", ["receive_update", "receive", "pull", "receive_adapter"])
def test_a_refused_call_leaves_the_transfer_of_the_next_push_alone(op: str) -> None:
    """It told the trainer not to wait for the worker: buckets that were being read got the next ones' bytes."""
    worker: Any = Worker()
    sender = Sender({(0, 0): "shm"}, 4096, Source.device)
    worker.session().lease.take("trainer", host_id(), os.getpid(), "this push")
    worker.session().connect(sender.channel(0, 0))
    sender.opened()
    sender.begin(Source())
    stale = {"op": op, "trainer": "trainer", "push": "the one before", "sessions": [sender.session]}
    assert "error" in json.loads(respond(worker, OPERATIONS, json.dumps(stale)))
    serving = threading.Thread(target=sender.serve, args=(Source(), {}), daemon=True)
    serving.start()
    got = []
    for received in worker.session().receiver.receive(Expected(dict.fromkeys(range(8), 4096))):
        time.sleep(0.02)  # it is loaded
        got.append(received.data.view(torch.float32)[0].item())
    serving.join(10)
    sender.close()
    assert got == list(range(8))
