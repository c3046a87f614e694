"""verl's worker extension, for a vLLM engine's process that has no Ray."""

from __future__ import annotations

import no_ray  # noqa: F401
import torch

if torch.cuda.is_available():
    from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension as Extension
else:
    from verl_worker import Unpacked as Extension

__all__ = ["Extension"]
