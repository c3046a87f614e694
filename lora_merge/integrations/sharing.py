"""What integrations need of `VllmSync(share=True)`: the trainer's model waits in the host's memory while the engine
starts, so that a GPU never holds the weights twice; and where the trainer puts the engine to sleep, the KV cache sleeps
alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..engine.vllm.stand_in import stands_in
from ..engine.vllm.sync import VllmSync


@contextmanager
def waiting(model: nn.Module) -> Iterator[None]:
    """Keep a model's tensors in the host's memory while the block runs, and afterwards: sharing brings them to the
    engine's device. If the block raises, they go back to theirs."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or next(iter(devices)).type in ("cpu", "meta"):
        yield
        return
    (device,) = devices
    model.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    try:
        yield
    except BaseException:
        model.to(device)
        raise


@stands_in
def then_waiting(start: Callable[[Any], Any], owner: Any) -> Any:
    """Start the engine of an object, whose `model` waits meanwhile."""
    with waiting(owner.model):
        return start(owner)


def how_sharded(accelerator: Any) -> str:
    """Return what shards a trainer's weights when training begins, in words; "" for nothing."""
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        return "DeepSpeed ZeRO-3"
    return "FSDP" if getattr(accelerator.state, "fsdp_plugin", None) is not None else ""


class SleepsShared:
    """Puts an engine's KV cache to sleep where a trainer puts the engine to sleep, whose weights it shares.

    Args:
        llm: the object that the trainer calls: an `LLM` or its `LLMEngine`.
        sync: shares its weights.
    """

    def __init__(self, llm: Any, sync: VllmSync) -> None:
        self._llm, self._sync = llm, sync
        llm.sleep, llm.wake_up = self.sleep, self.wake_up

    def sleep(self, level: int = 1, **options: Any) -> None:
        """Free the KV cache alone, at any level above 0."""
        if level >= 1:
            self._sync.sleep()
        else:
            type(self._llm).sleep(self._llm, level, **options)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wake the KV cache, where it is asked for. The weights are awake."""
        if tags is None or "kv_cache" in tags:
            self._sync.wake_up()
        elif "scheduling" in tags:
            type(self._llm).wake_up(self._llm, tags)

    def end(self) -> None:
        """Let the engine sleep as it does by itself."""
        for name in ("sleep", "wake_up"):
            vars(self._llm).pop(name, None)
