"""verl's checkpoint engine `lora_merge`: pushes into rollouts that have GPUs of their own.

    actor_rollout_ref.rollout.checkpoint_engine.backend=lora_merge
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=lora_merge.integrations.verl

verl's trainers with separate rollouts (`separate_async`, one-step-off, fully asynchronous) make one engine in each
worker of both sides, and a topology of them for each sync. What travels through it here is which servers there are: the
trainer's ranks then push into these by `VllmSync`, and the rollouts' workers wait. A replica that is new to the sync is
given all it lacks by that same push.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ...engine.vllm.names import BACKEND
from ...engine.vllm.sync import VllmSync
from ..compat import TrainerRefused
from ..pushing import KeptSync
from .server import ServerControl
from .stream import FLAG, Pass

NAME = f"actor_rollout_ref.rollout.checkpoint_engine.backend={BACKEND}"
LIMIT = timedelta(minutes=30)
"""How long one side waits for the other: as long as a push may take."""


class Receiving:
    """What a rollout's worker has in the place of weights: its adapter tells which server it speaks for, and waits."""

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name

    def __iter__(self) -> NoReturn:
        reason = f"{NAME} is for rollouts of vLLM: set actor_rollout_ref.rollout.name=vllm, or another backend"
        self._store.set(self._name, _packed(reason))
        raise TrainerRefused(reason)

    async def end(self, server: Any) -> None:
        """Tell the trainer of this rank's server, and wait for the push.

        Args:
            server: a handle; None if another rank of the replica has it.

        Raises:
            RuntimeError: the push has failed, in the trainer's words.
        """
        await asyncio.to_thread(self._wait, server)

    def _wait(self, server: Any) -> None:
        self._store.set(self._name, _packed(server))
        self._store.wait(["done"], LIMIT)
        if error := self._store.get("done").decode():
            raise RuntimeError(f"the trainer's push failed: {error}")


@CheckpointEngineRegistry.register(BACKEND)
class LoraMergeCheckpointEngine(CheckpointEngine):
    """Of one worker, of a trainer or a rollout.

    Args:
        bucket_size: bytes of a bucket, as verl configures them (`update_weights_bucket_megabytes`).
        is_master: of the trainer's first rank, which keeps the list of servers.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._bucket_bytes, self._is_master = bucket_size, is_master
        self._own: TCPStore | None = None
        self._store: Store | None = None
        self._rank, self._actors, self._rollouts = 0, 0, 0
        self._kept, self._names = KeptSync(), tuple[str, ...]()

    def prepare(self) -> tuple[str, int] | None:
        """Return where the list of servers is kept; the master's alone."""
        if not self._is_master:
            return None
        import ray

        address = ray.util.get_node_ip_address()
        self._own = TCPStore(address, 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        return address, self._own.port

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """See `CheckpointEngine.build_topology`."""
        (master,) = (found for found in metadata if found is not None)

        def same(size: int) -> dict[str, list[Any]]:
            everywhere = {"master": master, "actors": actor_wg_world_size, "rollouts": rollout_world_size}
            return {"rank": list(range(size))} | {name: [value] * size for name, value in everywhere.items()}

        return same(actor_wg_world_size), same(rollout_world_size)

    def init_process_group(self, rank: int, master: tuple[str, int], actors: int, rollouts: int) -> None:
        """Connect to the list of servers of this sync."""
        self._rank, self._actors, self._rollouts = rank, actors, rollouts
        self._store = self._own or TCPStore(*master, is_master=False, wait_for_workers=False, timeout=LIMIT)

    def finalize(self) -> None:
        """Close the list. The master's goes last: verl finalizes when all have been through the sync."""
        self._store = self._own = None

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Push the trainer's weights into the rollouts' servers. Collective over the trainer's ranks.

        Raises:
            TrainerRefused: the weights are not merged ones, or the rollouts are not vLLM's.
            PushFailed, PushRefused: as `VllmSync.push`.
        """
        assert self._store is not None
        error = "a rank of the trainer ended"
        try:
            if not isinstance(weights, Pass):
                raise TrainerRefused(f"{NAME} is for merged weights: set {FLAG}, or another backend")
            weights.push(self._sync_of(weights, await self._servers()))
            error = ""
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            if isinstance(weights, Pass):
                weights.close()  # where it did not come to a push
            if error or self._rank == 0:
                self._store.set("done", error)

    def receive_weights(self, global_steps: int | None = None) -> Any:  # verl's own is a generator
        """Return what the rollout's adapter (`LoraMergeServerAdapter`) waits with."""
        assert self._store is not None
        return Receiving(self._store, f"server/{self._rank}")

    async def _servers(self) -> list[Any]:
        """Return the handles of all servers, as soon as every rollout's worker has told of its own."""
        assert self._store is not None
        found = [f"server/{rank}" for rank in range(self._rollouts)]
        await asyncio.to_thread(self._store.wait, found, LIMIT)
        told = [pickle.loads(base64.b64decode(self._store.get(name))) for name in found]
        if refused := [reason for reason in told if isinstance(reason, str)]:
            raise TrainerRefused(refused[0])
        return [server for server in told if server is not None]

    def _sync_of(self, weights: Pass, servers: list[Any]) -> VllmSync:
        """Return the sync, kept as long as the model and the servers are the same. Collective."""
        names = tuple(server._actor_id.hex() for server in servers)
        if names != self._names:
            self._kept.close()
            self._names = names
        mine = [ServerControl(server) for server in servers[self._rank :: self._actors]]
        stream = weights.stream
        return self._kept.of(stream.weights.model, mine or None, stream.options, bucket_bytes=self._bucket_bytes)


def _packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()
