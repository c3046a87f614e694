"""The sleep of an engine that shares its weights with a trainer: the memory of its KV cache is freed, and nothing else.

vLLM's sleep frees both at levels 1 and 2; freed alone, the KV cache is a state that `wake_up(tags=["kv_cache"])` knows.
vLLM 0.32 has a call for that, `release_kv_cache_memory`, but refuses it in an in-process engine that has not forgotten
the requests of its last `generate` yet; so its parts are called here, which 0.26 has, too, all but one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from ...errors import InvalidInput
from . import internals
from .session import cache_asleep

_TAG = "kv_cache"


class CacheSleep:
    """Puts the KV cache of an in-process engine to sleep, and refuses sleep that takes its weights along.

    Args:
        engine: an `LLMEngine` whose core is in this process.
    """

    def __init__(self, engine: Any) -> None:
        # Not by the engine's own methods: trainers' are replaced (integrations/sharing.py).
        self._engine, self._client, self._core = engine, engine.engine_core, engine.engine_core.engine_core

    def guard(self) -> None:
        """Refuse vLLM's own levels from now on, and wake nothing but the KV cache."""
        sleep, wake = self._core.sleep, self._core.wake_up

        def awake(level: int = 1, *args: Any, **kwargs: Any) -> Any:
            if level >= 1:
                raise InvalidInput(
                    f"sleep(level={level}) takes the engine's weights along, which a trainer shares (share=True): "
                    "call sleep() of the VllmSync, which frees the KV cache's memory alone"
                )
            return sleep(level, *args, **kwargs)

        def wakes(tags: list[str] | None = None) -> Any:
            # vLLM 0.26 maps what is mapped already once more, which fails.
            every = [_TAG] if self.asleep else ["scheduling"]
            wanted = every if tags is None else [tag for tag in tags if tag != "weights"]
            return wake(wanted) if wanted else not self.asleep

        self._core.sleep, self._core.wake_up = awake, wakes

    def release(self) -> None:
        """Let vLLM's own levels be, with the KV cache awake, and forget blocks of weights that are gone. May be called
        again."""
        with suppress(Exception):  # of an engine that has ended
            self.wake_up()
            self._client.reset_prefix_cache(True)
        for name in ("sleep", "wake_up"):
            vars(self._core).pop(name, None)

    @property
    def asleep(self) -> bool:
        """Whether the KV cache has no memory."""
        return cache_asleep()

    def sleep(self) -> None:
        """Free the KV cache's memory. Its contents are forgotten.

        Raises:
            InvalidInput: the engine has no sleep mode, or requests in flight.
        """
        if not self._engine.vllm_config.model_config.enable_sleep_mode:
            raise InvalidInput("sleep() needs an engine that was started with enable_sleep_mode=True")
        if self._engine.has_unfinished_requests():
            raise InvalidInput(
                "sleep() forgets what the KV cache holds, and requests are in flight: step until "
                "has_unfinished_requests() says False, or abort them"
            )
        if self.asleep:
            return
        self._client.sleep(0, "abort")
        try:
            self._client.reset_prefix_cache()
            self._free()
        except BaseException:
            self._client.wake_up(["scheduling"])
            raise

    def _free(self) -> None:
        executor = self._core.model_executor
        if hasattr(executor, "discard"):
            executor.discard((_TAG,))
            return
        # vLLM 0.26: what its allocator does at levels 1 and 2, for allocations with one tag; and what its executor
        # notes of these levels, by which it wakes.
        torch.cuda.synchronize()
        for data in internals.CuMemAllocator.instance.pointer_to_data.values():
            if data.tag == _TAG and not data.is_asleep:
                try:
                    internals.unmap_and_release(data.handle)
                finally:
                    data.is_asleep = True
        executor.sleeping_tags, executor.is_sleeping = {_TAG}, True

    def wake_up(self) -> None:
        """Give the KV cache memory again, empty, and let the engine go on. Nothing where it is awake."""
        if self.asleep:
            self._client.wake_up([_TAG])
