"""A sync of merged weights as verl does it on FSDP2 (`lora.merge=True`), step by step after its source.

| step | verl |
|---|---|
| every base shard cloned to pageable CPU memory | `backup_base_model_weights`, verl/utils/fsdp_utils.py |
| unit by unit, PEFT's `merge`; the root unit is skipped | `fsdp_merge_unmerge`, there |
| `full_tensor()` of every parameter | `_merged_lora_per_tensor_param`, verl/workers/engine/fsdp/transformer_impl.py |
| tensors copied into one bucket of 2 GiB, larger ones handed over as they are; the worker on the same GPU loads a \
bucket while the sender waits | `BucketedWeightSender`, `BucketedWeightReceiver`, \
verl/workers/rollout/vllm_rollout/bucketed_weight_transfer.py; `update_weights_from_ipc`, utils.py beside it |
| every base shard copied back | `restore_base_model_weights`, verl/utils/fsdp_utils.py |

`fsdp_merge_unmerge` means to unshard a unit, merge and reshard it, but the call it makes (FSDP1's `summon_full_params`)
does nothing to FSDP2's units: PEFT merges DTensors, which gathers lora_A alone. That is what runs here too; unsharding
would take longer. Also in verl's favour: no Ray, no pause, no flush of caches, a pipe in place of ZeroMQ, no cast.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 2048 << 20
"""verl's `update_weights_bucket_megabytes`."""


def push(model: Any, engine: Any, folder: Path, workers: int, device: torch.device) -> dict[str, float]:
    """One sync. Collective.

    Args:
        model: a `PeftModel` under FSDP2.
        engine: a `vllm.LLM` with `Receiver` as `worker_extension_cls` on rank 0; None on the others.
        folder: for sockets, the same on every rank.
        workers: of the engine; the first ranks serve one each, on the same GPU.

    Returns:
        Seconds by step, on this rank.
    """
    seconds: dict[str, float] = {}

    def step(name: str, run: Callable[[], Any]) -> Any:
        dist.barrier()
        begin = time.perf_counter()
        value = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.barrier()
        seconds[name] = time.perf_counter() - begin
        return value

    with torch.no_grad():
        backup = step("backup", lambda: _backup(model))
        step("merge", lambda: _merge(model))
        step("send and load", lambda: _serve(model, engine, folder, workers, device))
        step("restore", lambda: _restore(model, backup))
    return seconds


def _backup(model: Any) -> dict[str, Tensor]:
    with model.disable_adapter():
        return {n: p.data.clone().cpu() for n, p in model.named_parameters() if "lora" not in n.lower()}


def _merge(model: nn.Module) -> None:
    from peft.tuners.lora import LoraLayer

    units: list[Any] = [module for name, module in model.named_modules() if name and isinstance(module, FSDPModule)]
    for unit in units:
        with FullyShardedDataParallel.summon_full_params(unit, writeback=True, with_grads=False):
            for layer in unit.modules():
                if isinstance(layer, LoraLayer) and not layer.merged:
                    layer.merge()


def _restore(model: nn.Module, backup: dict[str, Tensor]) -> None:
    from peft.tuners.lora import LoraLayer

    for name, parameter in model.named_parameters():
        if name in backup:
            parameter.data.copy_(backup[name].to(parameter.device))
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.merged_adapters = []


def _stream(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What verl's generator yields: names as in the checkpoint, whole tensors."""
    for name, value in model.state_dict().items():
        if "lora_" not in name:
            name = name.replace("base_model.model.", "").replace(".base_layer", "")
            yield name, value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()


def _serve(model: nn.Module, engine: Any, folder: Path, workers: int, device: torch.device) -> None:
    rank = dist.get_rank()
    if rank >= workers:
        dist.barrier()
        deque(_stream(model), maxlen=0)
        return
    torch.multiprocessing.set_sharing_strategy("file_system")
    with Listener(str(folder / str(rank)), "AF_UNIX") as listener, ThreadPoolExecutor(1) as pool:
        dist.barrier()
        loading = None
        if engine is not None:
            loading = pool.submit(engine.collective_rpc, "load_as_verl", args=(str(folder),))
        with listener.accept() as connection:
            _send(_stream(model), connection, sum(p.nbytes for p in model.parameters()), device)
        if loading is not None:
            loading.result()


def _send(stream: Iterator[tuple[str, Tensor]], connection: Connection, nbytes: int, device: torch.device) -> None:
    bucket = torch.empty(min(BUCKET_BYTES, nbytes), dtype=torch.uint8, device=device)
    _hand_over(bucket, connection, device)
    table: list[tuple[str, torch.dtype, torch.Size, int]] = []
    end = 0
    for name, tensor in stream:
        if table and end + tensor.nbytes > bucket.numel():
            _hand_over(table, connection, device)
            table, end = [], 0
        if tensor.nbytes > bucket.numel():
            _hand_over((name, tensor), connection, device)
            continue
        bucket[end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
        table.append((name, tensor.dtype, tensor.shape, end))
        end += tensor.nbytes
    _hand_over(table, connection, device)
    _hand_over(None, connection, device)
    del bucket
    if device.type == "cuda":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _hand_over(message: Any, connection: Connection, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    connection.send(message)  # tensors travel as handles
    connection.recv()


class Receiver:
    """`worker_extension_cls` of the engine."""

    rank: int
    device: torch.device
    model_runner: Any
    vllm_config: Any

    def load_as_verl(self, folder: str) -> None:
        """Load what the trainer rank of this worker's number sends."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        model, config = self.model_runner.model, self.vllm_config.model_config
        torch.multiprocessing.set_sharing_strategy("file_system")
        on_cpu = self.device.type == "cpu"  # where weights are prepacked, `load_weights` alone does not work
        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            if on_cpu:
                initialize_layerwise_reload(model)
            with Client(str(Path(folder, str(self.rank))), "AF_UNIX") as connection:
                self._receive(connection, model, clone=on_cpu)
            if on_cpu:
                finalize_layerwise_reload(model, config)
            else:
                process_weights_after_loading(model, config, self.device)

    def _receive(self, connection: Connection, model: Any, *, clone: bool) -> None:
        bucket: Tensor = connection.recv()
        connection.send(None)
        while (message := connection.recv()) is not None:
            if isinstance(message, tuple):
                weights = [message]
            else:
                weights = [
                    (name, bucket[at : at + dtype.itemsize * shape.numel()].view(dtype).view(shape))
                    for name, dtype, shape, at in message
                ]
            model.load_weights([(name, tensor.clone()) for name, tensor in weights] if clone else weights)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            del message, weights
            connection.send(None)
        connection.send(None)
