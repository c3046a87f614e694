"""A platform of verl's own registry for machines without an accelerator: `VERL_PLATFORM=cpu`, and this module among
`VERL_USE_EXTERNAL_MODULES`. To Ray its devices are GPUs, of which a test may declare as many as it likes.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform import PlatformBase, PlatformRegistry

_info = logging.Logger.info


def info(self: logging.Logger, message: object, *args: object, flush: bool = False, **options: Any) -> None:
    """verl 0.9.1 logs with `flush=True`, which `print` takes, in trainer_separate_async.py (`hybrid_engine=False`)."""
    _info(self, message, *args, **options)


logging.Logger.info = info  # type: ignore[assignment]

NOTHING = ("empty_cache", "synchronize", "ipc_collect", "reset_peak_memory_stats", "set_device")
NOUGHT = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")


class Device(ModuleType):
    """`torch.cpu`, and what verl asks of `torch.cuda` besides."""

    def __init__(self) -> None:
        super().__init__("verl_cpu.device")
        for name in NOTHING:
            setattr(self, name, lambda *args, **kwargs: None)
        for name in NOUGHT:
            setattr(self, name, lambda *args, **kwargs: 0)
        self.mem_get_info = lambda *args: (0, 1)
        self.get_rng_state, self.set_rng_state = torch.get_rng_state, torch.set_rng_state
        self.get_device_name = lambda *args: "CPU"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "nobody"
    device_module = Device()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        """verl asks for it when it initialises a group of "cpu:gloo,cpu:gloo", which torch takes for a mistake; where
        there is a group, it goes on with that one."""
        if "MASTER_PORT" in os.environ and not dist.is_initialized():
            rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method=os.environ.get("DIST_INIT_METHOD"), rank=rank, world_size=world)
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None
