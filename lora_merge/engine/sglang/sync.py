"""SglangSync: one call brings what is being trained into the SGLang engines that roll it out."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidInput
from ..adapter import ADAPTER_NAME
from ..control import Control
from ..sync import EngineSync
from .control import EngineControl, control_of


class SglangSync(EngineSync):
    """Keeps one or several SGLang engines at the policy that is being trained.

    As `VllmSync`, where not said otherwise: collective over all ranks where torch.distributed is initialised, and an
    engine's handle is any rank's.

    Args:
        model: what is trained: a PEFT model, or any module; sharded by FSDP2, FSDP1 or ZeRO-3, or whole. Or Megatron's
            chunks.
        engine: an `sglang.Engine`, the URL of an `sglang.launch_server`, or a list of these (replicas). lora-merge has
            to be installed where its schedulers run, no more. None where other ranks hold all handles.
        mode: "merged" (the engine serves merged weights) or "adapter" (base and adapter apart, SGLang's LoRA path; of
            an `sglang.Engine` alone).
        merge: who adds the adapters to the base; see `VllmSync`.
        rounding: of merged weights, "nearest" or "stochastic" (seeded by the version).
        pause: what becomes of requests in flight: "keep" them (they go back to the queue with the tokens that they
            have, and go on with the new weights), "wait" for those that are in flight when the push begins, or "abort"
            them.
        bucket_bytes: of each of two buffers. Tensors that are larger are cut.
        strategy: see `MergedWeights`.

    Raises:
        InvalidInput: an argument that does not fit.
        PushRefused: an engine that no push can reach, as far as can be told before the first one.
        MissingExtra: an engine that is not SGLang's was given, and SGLang is not installed.
    """

    awaited = "an engine whose event loop is running"

    @staticmethod
    def _control_of(engine: Any) -> Control:
        return control_of(engine)

    def lora_path(self) -> str | None:
        """What to pass to `generate` as `lora_path`: one constant name in adapter mode, None in merged mode."""
        return None if self._mode == "merged" else ADAPTER_NAME

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the (only) `sglang.Engine`, with the right `lora_path`.

        Raises:
            PushRefused: as `check`.
        """
        controls = self._trainer.controls
        if len(controls) != 1 or not isinstance(controls[0], EngineControl):
            raise InvalidInput("generate() is for one sglang.Engine; pass lora_path() to other engines yourself")
        self.check()
        return controls[0].handle.generate(*args, lora_path=self.lora_path(), **kwargs)
