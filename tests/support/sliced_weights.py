"""Extends vLLM's workers on a CPU, as `shared_weights`: experts keep their weights as they were loaded, too, as on a
GPU, unless `EXPERTS_ANEW` says otherwise; and each worker can say that it is on a host of its own, from the beginning
where `CLAIMED_HOSTS` says so."""

from __future__ import annotations

import os

import shared_weights
import sliced_weights_gpu
import torch.distributed as dist

from lora_merge.engine.transport import routing as transport
from lora_merge.engine.vllm.loading.loader import Loader

if not os.environ.get("EXPERTS_ANEW"):
    Loader._laid_anew = lambda self: []  # type: ignore[method-assign]


if claimed := os.environ.get("CLAIMED_HOSTS"):
    transport.host_id = lambda: claimed.split(",")[dist.get_rank()]


class Sliced(sliced_weights_gpu.Sliced, shared_weights.Shared):
    """Methods for `collective_rpc`."""

    def claim_hosts(self, hosts: list[str]) -> str:
        """From now on this worker is on the host of its rank, as it says of itself."""
        transport.host_id = lambda: hosts[self.parallel_config.rank]  # type: ignore[attr-defined]
        return transport.host_id()
