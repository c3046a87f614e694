"""verl's Megatron engine (actor strategy megatron), with a stream that merges shards where they lie."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from verl.utils.megatron_utils import load_megatron_model_to_gpu
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from ..megatron_bridge import chunks_of
from .merging import Merging
from .stream import Stream


class MergedMegatron(Merging):
    """Mixed in before a Megatron engine of verl's: its merged weights come from `MergedWeights`, under the names of its
    bridge. As in verl's own way, parameters that it offloads are loaded here, and offloaded by who asked for them."""

    rank_setting = "lora.rank"

    def get_per_tensor_param(self, base_sync_done: bool = False, **options: Any) -> tuple[Any, dict[str, Any] | None]:
        if not self.merging:
            return super().get_per_tensor_param(base_sync_done=base_sync_done, **options)
        load_megatron_model_to_gpu(self.module, load_grad=False)
        return self.stream().begin(), None

    def _make_stream(self) -> Stream:
        return Stream(chunks_of(self.bridge, self.module), dist.get_rank(), dtype=None)


class LoraMergeMegatronEngine(MergedMegatron, MegatronEngineWithLMHead):
    """verl's Megatron engine of language models, with merged weights from this package."""
