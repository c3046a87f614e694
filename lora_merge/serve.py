"""Adapters from folders in running engines: merged onto what the engine was started from, at base-model speed, and off
again, exactly.

No trainer is needed: the engine's workers add lora_B @ lora_A to the weights that they have, and keep what brings these
back bit for bit. One adapter is served at a time; requests carry no LoRA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .engine.load import check_blocking, load, unload
from .engine.replica import SyncReport
from .engine.vllm.control import drive

__all__ = ["aload_adapter", "aunload_adapter", "load_adapter", "unload_adapter"]


def load_adapter(
    engine: Any,
    folder: str | Path,
    *,
    base: str | Path | None = None,
    name: str | None = None,
    device: str | torch.device = "cpu",
    pause: str = "keep",
    verify: bool = False,
) -> SyncReport:
    """Serve an adapter that PEFT has saved. One that was loaded before goes, in the same step.

    Everything that can be checked is checked before the first byte is written, and requests go on meanwhile; all
    workers have the adapter before any of them changes a weight.

    Args:
        engine: a running `vllm.LLM`, `LLMEngine`, Ray actor around one, or the URL of a `vllm serve` that was started
            with `VLLM_SERVER_DEV_MODE=1`; or a list of these. lora-merge is installed where its workers run. Of an
            `AsyncLLM`, await `aload_adapter`.
        folder: as `save_pretrained` of a `PeftModel` wrote it: adapter_config.json and the tensors beside it.
        base: folder or name of the model that the adapter was trained on, of which the configuration is read (of
            DoRA, its weights, too); default: what adapter_config.json names. That it is the engine's own model is your
            word: names, shapes and dtypes are checked.
        name: that the engine tells with its answers and states; default: the folder's.
        device: on which the adapter is laid out for its way. "cuda" goes over CUDA IPC or NCCL.
        pause: as of `VllmSync`.
        verify: compare checksums of what came.

    Returns:
        what it did.

    Raises:
        PushRefused, InvalidInput, UnsupportedAdapter: it does not fit; every engine is as before.
        PushFailed: it broke off half-way in some engines, which are dirty; names them. Loading again heals them where
            vLLM can read their checkpoint again.
        MissingExtra: peft or transformers is not installed.
    """
    check_blocking(engine)
    return drive(load(engine, folder, base=base, name=name, device=device, pause=pause, verify=verify))


async def aload_adapter(
    engine: Any,
    folder: str | Path,
    *,
    base: str | Path | None = None,
    name: str | None = None,
    device: str | torch.device = "cpu",
    pause: str = "keep",
    verify: bool = False,
) -> SyncReport:
    """As `load_adapter`, in the event loop of an `AsyncLLM`."""
    return await load(engine, folder, base=base, name=name, device=device, pause=pause, verify=verify)


def unload_adapter(engine: Any, *, pause: str = "keep") -> SyncReport:
    """Take the adapter off that `load_adapter` brought: every bit is what the engine was started with.

    Args:
        engine, pause: as of `load_adapter`.

    Raises:
        PushRefused: there is none, or a trainer has pushed over it; every engine is as before.
        PushFailed: it broke off half-way in some engines, which are dirty; names them.
    """
    check_blocking(engine)
    return drive(unload(engine, pause=pause))


async def aunload_adapter(engine: Any, *, pause: str = "keep") -> SyncReport:
    """As `unload_adapter`, in the event loop of an `AsyncLLM`."""
    return await unload(engine, pause=pause)
