"""Merge a saved adapter into a running engine, and take it off again exactly. No trainer is needed.

The engine's workers add lora_B @ lora_A to the weights that they have, and keep what brings these back bit for bit. One
adapter is served at a time, at base-model speed; requests carry no LoRA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .choices import Cache, Pause
from .engine.control.calls import drive
from .engine.load_adapter import check_blocking, load, unload
from .engine.push.replica import SyncReport

__all__ = ["aload_adapter", "aunload_adapter", "load_adapter", "unload_adapter"]


def load_adapter(
    engine: Any,
    folder: str | Path,
    *,
    base: str | Path | None = None,
    name: str | None = None,
    device: str | torch.device = "cpu",
    pause: Pause = "keep",
    cache: Cache = "reset",
    verify: bool = False,
) -> SyncReport:
    """Merge an adapter that PEFT has saved into a running engine.

        print(load_adapter("http://localhost:8000", "checkpoints/step-400"))

    An adapter that was loaded before is taken off in the same step. Everything that can be checked is checked before
    the first byte is written, and requests go on meanwhile; all workers have the adapter before any of them changes a
    weight.

    Args:
        engine: a running `vllm.LLM`, `LLMEngine`, Ray actor around one, or the URL of a `vllm serve` that was started
            with `VLLM_SERVER_DEV_MODE=1`; or a list of these. lora-merge has to be installed where its workers run. For
            an `AsyncLLM` await `aload_adapter`.
        folder: as `save_pretrained` of a `PeftModel` wrote it: adapter_config.json and the tensors beside it.
        base: folder or hub name of the model that the adapter was trained on; only its configuration is read (for DoRA
            also its weights). Default: what adapter_config.json names. Names, shapes and dtypes are checked against the
            engine; that the values are the same is your word.
        name: name of the adapter in the engine's answers and states; default: the folder's name.
        device: device from which the adapter is sent; "cuda" uses CUDA IPC or NCCL.
        pause: what happens to requests in flight: "keep", "wait" or "abort", as for `VllmSync`.
        cache: what happens to the KV cache of requests that go on: "reset" or "keep", as for `VllmSync`.
        verify: compare checksums of the adapter on both sides.

    Returns:
        what was done.

    Raises:
        PushRefused: it does not fit the engine; every engine is as before.
        InvalidInput: an argument or the folder does not fit; as above.
        UnsupportedAdapter: the adapter has no exact merge; as above.
        PushFailed: it broke off half-way in some engines, which are dirty; names them. Loading again heals them if vLLM
            can read their checkpoint again.
        MissingExtra: peft or transformers is not installed.
    """
    check_blocking(engine)
    return drive(load(engine, folder, base=base, name=name, device=device, pause=pause, cache=cache, verify=verify))


async def aload_adapter(
    engine: Any,
    folder: str | Path,
    *,
    base: str | Path | None = None,
    name: str | None = None,
    device: str | torch.device = "cpu",
    pause: Pause = "keep",
    cache: Cache = "reset",
    verify: bool = False,
) -> SyncReport:
    """Merge an adapter that PEFT has saved into a running `AsyncLLM`, in its event loop.

        print(await aload_adapter(engine, "checkpoints/step-400"))

    Arguments, result and errors are those of `load_adapter`.
    """
    return await load(engine, folder, base=base, name=name, device=device, pause=pause, cache=cache, verify=verify)


def unload_adapter(engine: Any, *, pause: Pause = "keep") -> SyncReport:
    """Take off the adapter that `load_adapter` merged: bit for bit, the weights are those that the engine was started
    with.

        unload_adapter("http://localhost:8000")

    Args:
        engine, pause: as for `load_adapter`.

    Returns:
        what was done.

    Raises:
        PushRefused: there is no such adapter, or a trainer has pushed over it; every engine is as before.
        InvalidInput: an argument does not fit; as above.
        PushFailed: it broke off half-way in some engines, which are dirty; names them.
    """
    check_blocking(engine)
    return drive(unload(engine, pause=pause))


async def aunload_adapter(engine: Any, *, pause: Pause = "keep") -> SyncReport:
    """Take off the adapter that `aload_adapter` merged, in the event loop of an `AsyncLLM`.

        await aunload_adapter(engine)

    Arguments, result and errors are those of `unload_adapter`.
    """
    return await unload(engine, pause=pause)
