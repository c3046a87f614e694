"""What verl adds to vLLM's workers, for CPUs: verl calls `load_weights` on the running model, and vLLM's linear layers
on CPUs keep their weights repacked by oneDNN, which nothing can be loaded into. Here they keep them as they come.
"""

from __future__ import annotations

import first_calls  # noqa: F401
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm import _custom_ops

_custom_ops._supports_onednn = False


class Unpacked(vLLMColocateWorkerExtension):
    """verl's own, in a process whose linear layers are not repacked."""
