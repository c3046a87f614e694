"""SglangSync: one call brings what is being trained into the SGLang engines that roll it out."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidInput
from ..control.base import Control
from ..payload.adapter import ADAPTER_NAME
from ..sync import EngineSync
from .control import EngineControl, control_of


class SglangSync(EngineSync):
    """Updates SGLang engines with the model that is being trained: `push()` brings it as it is now into each of them.

        sync = lora_merge.SglangSync(model, sglang.Engine(model_path="base"))
        print(sync.push())

    lora-merge has to be installed where SGLang's schedulers run; SGLang finds it through its entry point.
    `with SglangSync(...) as sync:` closes it at the end of the block.

    Several trainer ranks: as for `VllmSync`; any rank may hold an engine's handle.

    Args:
        model: a PEFT model or any module; whole, or sharded by FSDP2, FSDP1 or ZeRO-3; or Megatron's list of chunks.
        engine: an `sglang.Engine`, the URL of an `sglang.launch_server`, or a list of these (replicas); None on ranks
            without a handle.
        mode: "merged": the engine holds merged weights. "adapter": it holds the base, and the adapter beside it in
            SGLang's own LoRA path (an `sglang.Engine` only).
        merge: who adds the adapters to the base; see `VllmSync`.
        rounding: of merged weights: "nearest" or "stochastic" (seeded by the version).
        pause: what happens to requests in flight: "keep" returns them to the queue with their tokens so far, from where
            they go on with the new weights; "wait" lets those that are in flight when the push begins end first;
            "abort" ends them.
        cache: "reset"; "keep", which `VllmSync` has, is refused.
        bucket_bytes: size in bytes of each of two buckets, where buckets are needed; larger tensors are cut.
        strategy: as for `MergedWeights`.
        adapter_names: as for `VllmSync`.
        lost: what a push does about an engine that cannot be reached: "refuse" or "skip"; see `VllmSync`.

    Raises:
        InvalidInput: an argument that does not fit.
        PushRefused: an engine that no push can reach, as far as that is known before the first push.
        MissingExtra: SGLang is not installed, and `engine` is no URL.
    """

    awaited = "an engine whose event loop is running"
    without_tenants = "SGLang's adapters have no ids that outlive a push; VllmSync serves tenants"
    unkept = (
        "SGLang keeps it (pause_generation in_place) only where nothing is dropped (flush_cache=False), so that new "
        "requests would find keys and values of the old weights, and an answer names the version of its end alone"
    )
    unshared = "SGLang's schedulers, which hold its weights, run in processes of their own"

    @staticmethod
    def _control_of(engine: Any) -> Control:
        return control_of(engine)

    def lora_path(self) -> str | None:
        """Return what to pass to SGLang's `generate` as `lora_path`: a constant name in adapter mode, None in merged
        mode.

            outputs = engine.generate(prompts, sampling, lora_path=sync.lora_path())

        `generate` of this object sets it by itself.
        """
        return None if self._mode == "merged" else ADAPTER_NAME

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Check that the engine holds what was pushed last, then call `generate` of the `sglang.Engine`.

            outputs = sync.generate(prompts, {"max_new_tokens": 16})

        Args:
            args: as for `Engine.generate`.
            kwargs: as for `Engine.generate`; `lora_path` is set here.

        Raises:
            InvalidInput: there is not exactly one engine, or it is not an `sglang.Engine` in this process;
                or `lora_path` was given.
            PushRefused: the engine holds something else; see `check`.
        """
        if "lora_path" in kwargs:
            raise InvalidInput("generate() sets lora_path by itself; for another adapter call generate() of the engine")
        controls = self._trainer.controls
        if len(controls) != 1 or not isinstance(controls[0], EngineControl):
            raise InvalidInput("generate() is for one sglang.Engine; pass lora_path() to other engines yourself")
        self.check()
        return controls[0].handle.generate(*args, lora_path=self.lora_path(), **kwargs)
