"""For `swift rollout` on a CPU, by --external_plugins: what swift does with NCCL goes over its store, and vLLM's linear
layers keep the layout in which swift loads weights."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import vllm.model_executor.layers.utils as layers
from swift.arguments import deploy_args
from swift.pipelines.infer import rollout
from swift.rlhf_trainers import vllm_client
from torch import Tensor, nn


class OverStore:
    """Broadcasts between a trainer and a server's workers, as `PyNcclCommunicator` does between their GPUs."""

    def __init__(self, group: Any, device: Any) -> None:
        self.group, self.device, self.rank = group, torch.device("cpu"), group.rank

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        got = self.group.broadcast_obj(tensor if self.rank == src else None, src)
        if self.rank != src:
            tensor.copy_(got)


def plain(layer: nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = nn.functional.linear  # type: ignore[assignment]


rollout.PyNcclCommunicator = vllm_client.PyNcclCommunicator = OverStore
layers.dispatch_cpu_unquantized_gemm = plain
deploy_args.get_device_count = lambda: 1
torch.cpu.device = nullcontext  # type: ignore[attr-defined]  # swift asks every device module for one
rollout.synchronize = vllm_client.synchronize = lambda device=None: None
