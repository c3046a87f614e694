"""vLLM's own weight-transfer backends on a machine without a GPU: its classes of both sides, as they are, with what
they ask of CUDA, NCCL, CUDA IPC, Ray and NIXL put in the place of these.

Streams do nothing, as work on a CPU is done when a call returns. A communicator is vLLM's own store. An IPC handle is
the tensor itself, by value. An actor is an object of the process that made it, called over a socket.
"""

from __future__ import annotations

import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from multiprocessing.managers import BaseManager
from types import SimpleNamespace
from typing import Any

import ray
import ray.experimental
import torch
import torch.multiprocessing.reductions as reductions
import vllm.distributed.weight_transfer as api
import vllm.distributed.weight_transfer.base as base
import vllm.distributed.weight_transfer.ipc_engine as ipc
import vllm.distributed.weight_transfer.nccl_engine as nccl
import vllm.distributed.weight_transfer.packed_tensor as packed
import vllm.distributed.weight_transfer.sharded_rdt_engine as rdt
import vllm.distributed.weight_transfer.sharded_rdt_trainer as rdt_trainer
from vllm.config import WeightTransferConfig
from vllm.distributed.utils import StatelessProcessGroup
from weight_bits import Bits

_RANK = 0
"""Of this trainer's process; a worker is on the GPU of the first."""


class _Stream:
    """Of a device that does everything at once."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def _nothing(self, *args: Any) -> None: ...

    synchronize = wait_event = wait_stream = record = _nothing


class _Torch:
    """torch, with a CUDA device that is the CPU."""

    cuda = SimpleNamespace(
        Stream=_Stream,
        Event=_Stream,
        current_stream=_Stream,
        stream=lambda stream: nullcontext(),
        device=lambda device: nullcontext(),
        set_device=lambda device: None,
        synchronize=lambda *args: None,
        ipc_collect=lambda: None,
        is_available=lambda: True,
        get_device_properties=lambda index: SimpleNamespace(uuid=f"GPU-{_RANK}"),
    )
    accelerator = SimpleNamespace(
        current_device_index=lambda: 0, synchronize=lambda *args: None, device_index=lambda index: nullcontext()
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: Any, index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def empty(self, *shape: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.empty(*shape, device="meta" if str(device) == "meta" else "cpu", **options)


class _Communicator:
    """Broadcasts through vLLM's store."""

    device = torch.device("cpu")

    def __init__(self, address: str, port: int, rank: int, world: int) -> None:
        self._group = StatelessProcessGroup.create(host=address, port=port, rank=rank, world_size=world)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        found = self._group.broadcast(tensor, src)
        if found is not tensor:
            tensor.copy_(found)

    def destroy(self) -> None: ...


class _Handle:
    """An IPC handle, which is equal to itself alone."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Manager(BaseManager): ...


class _Method:
    """A method of an actor: of this process, or behind a socket."""

    _pool = ThreadPoolExecutor(32)

    def __init__(self, call: Any) -> None:
        self._call = call

    def remote(self, *args: Any, **options: Any) -> Future[Any]:
        return self._pool.submit(self._call, *args, **options)


class _Actor:
    """What `ray.get_actor` gives."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def __getattr__(self, name: str) -> _Method:
        return _Method(getattr(self._server, name))


class Producer(rdt_trainer._RDTProducerServer):
    """vLLM's server of one trainer rank."""

    def pull(self, specs: list[Any], consumer_id: int, seq: int) -> bytes:
        """What a consumer reads over NIXL."""
        (blob,) = self.rdt_produce_weights_batched(specs, consumer_id, seq)
        return bytes(blob.numpy().tobytes())


class RDTTrainer(rdt_trainer.ShardedRDTTrainerWeightTransferEngine):
    """vLLM's trainer engine; its server is a thread of this process."""

    def _spawn_server(self, served_names: list[str]) -> None:
        info = self._init_info
        server = Producer(
            served_names=served_names,
            num_rdt_buffers=info.num_rdt_buffers,
            buffer_presize_gb=info.buffer_presize_gb,
            gather_lookahead=info.gather_lookahead,
            stall_timeout_s=info.stall_timeout_s,
            workers_per_replica=info.workers_per_replica,
        )
        self._server, self.served = _Actor(server), served_names
        _Manager.register("producer", callable=lambda: server, exposed=["pull", "free_group", "reserve_serve_buffer"])
        self._server_name = tempfile.mktemp(prefix="producer", dir=info.trainer_actor_namespace)
        manager = _Manager(address=self._server_name, authkey=b"test")
        _Method._pool.submit(manager.get_server().serve_forever)

    def _await_publish(self, ref: Any) -> None:
        ref.result()


def _get_actor(name: str, namespace: str | None = None) -> _Actor:
    """The server of a rank, from the engine's process."""

    class Remote(BaseManager): ...

    Remote.register("producer", exposed=["pull", "free_group", "reserve_serve_buffer"])
    manager = Remote(address=name, authkey=b"test")
    manager.connect()
    server: Any = manager.producer()  # type: ignore[attr-defined]
    return _Actor(
        SimpleNamespace(
            rdt_produce_weights_batched=server.pull,
            free_group=server.free_group,
            reserve_serve_buffer=server.reserve_serve_buffer,
        )
    )


_TARGETS: dict[int, torch.Tensor] = {}


def _get(refs: Any) -> Any:
    if isinstance(refs, list):
        return [_get(ref) for ref in refs]
    found = refs.result()
    target = _TARGETS.pop(id(refs), None)
    if target is not None:
        target.copy_(torch.frombuffer(bytearray(found), dtype=torch.uint8))
    return found


class RDTWorker(rdt.ShardedRDTWeightTransferEngine):
    """vLLM's worker engine; its worker is no actor of Ray's."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any) -> None:
        parallel = vllm_config.parallel_config
        executor, parallel.distributed_executor_backend = parallel.distributed_executor_backend, "ray"
        try:
            super().__init__(config, vllm_config, *args)
        finally:
            parallel.distributed_executor_backend = executor


def settle(rank: int = 0) -> None:
    """Put a CPU in the place of a GPU in vLLM's modules, in this process."""
    global _RANK
    _RANK = rank
    for module in (base, ipc, nccl, packed, rdt, rdt_trainer):
        vars(module)["torch"] = _Torch()
    for module in (ipc, packed, rdt_trainer):
        vars(module)["reduce_tensor"] = lambda tensor: (None, (0, 0, 0, 0, 0, 0, 0, _Handle(tensor)))
        vars(module)["rebuild_cuda_tensor"] = lambda *args: args[-1].tensor
    reductions.rebuild_cuda_tensor = lambda *args: args[-1].tensor  # type: ignore[assignment]
    vars(nccl)["worker_init_process_group"] = lambda info, config: _Communicator(
        info.master_address, info.master_port, info.rank_offset + config.rank, info.world_size
    )
    vars(nccl)["open_trainer_endpoint"] = lambda info: _Communicator(
        info.master_address, info.master_port, 0, info.world_size
    )
    for module in (rdt, rdt_trainer):
        vars(module)["register_nixl_memory"] = lambda tensor: None
    torch.Tensor.cuda = lambda self, *args, **options: self  # type: ignore[method-assign]
    ray.get_actor, ray.get = _get_actor, _get
    ray.experimental.set_target_for_ref = lambda ref, targets: _TARGETS.__setitem__(id(ref), targets[0])


class Switched(Bits):
    """Extends vLLM's workers: any backend, one after another in one engine."""

    def use(self, backend: str) -> None:
        settle()
        worker: Any = self
        if worker.weight_transfer_engine is not None:
            worker.weight_transfer_engine.shutdown()
        if backend == "sharded_rdt":
            made: Any = RDTWorker
        else:
            made = api.WeightTransferEngineFactory._registry[backend]()
        config = WeightTransferConfig(backend=backend)
        worker.weight_transfer_engine = made(config, worker.vllm_config, worker.device, worker.get_model())


class Engine:
    """A `VLLMWeightSyncClient` of an `LLM`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.calls: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.calls.append("start")
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self.calls.append("update")
        self._llm.update_weights({"update_info": _json_safe_update_payload(update_info)})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append("finish")
        self._llm.finish_weight_update(weight_version)
