"""verl's FSDP engines (actor strategies fsdp and fsdp2), with a stream that touches no base weight."""

from __future__ import annotations

from verl.utils.fsdp_utils import offload_fsdp_model_to_cpu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from .stream import Pass
from .trained import Trained


class MergedFSDP(Trained):
    """Mixed in before an FSDP engine of verl's: its merged weights come from `MergedWeights`. Parameters that verl
    offloads are loaded by it before it asks for them, and offloaded again when the last one was taken."""

    def _merged_lora_per_tensor_param(self) -> Pass:
        return self.stream().begin(after=self._offload)

    def _offload(self) -> None:
        if self._is_offload_param:
            self._pause()
            offload_fsdp_model_to_cpu(self.module)


class LoraMergeFSDPEngine(MergedFSDP, FSDPEngineWithLMHead):
    """verl's FSDP engine of language models, with merged weights from this package."""
