"""verl: merged weights for its rollouts out of `actor_rollout_ref.model.lora.merge=True`, without a clone of the base.

Importing this registers engines with verl's `EngineRegistry`, in front of verl's own, for the accelerator of this
process: by `actor_rollout_ref.model.external_lib=lora_merge.integrations.verl`, which verl imports in every worker, or
without a word through verl's plugins (`verl_engines.plugin`).
"""

from .verl_engines.check import check_batch
from .verl_engines.registry import take_over

__all__ = ["check_batch", "take_over"]

take_over()
