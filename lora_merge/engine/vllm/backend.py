"""vLLM's weight-transfer backend `lora_merge`: a name for `weight_transfer_config`, by which an engine is started for
pushes (vLLM then picks layouts that can be loaded again).

Pushes go through the worker method of the same name. vLLM's own methods return nothing, and an error that one worker
raises through them leaves the other workers' answers to be read by the next call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from .session import session_of


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing: `VllmSync` connects by itself."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: `VllmSync` sends by itself."""


def _refuse(*arguments: Any, **options: Any) -> NoReturn:
    raise NotImplementedError(
        "weights of the backend lora_merge come from lora_merge.VllmSync(model, engine).push(), not through vLLM's own "
        "weight-transfer calls"
    )


class LoraMergeWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Lets an engine be started with `WeightTransferConfig(backend="lora_merge")`; `VllmSync` does the rest."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    init_transfer_engine = start_weight_update = receive_weights = finish_weight_update = _refuse
    trainer_send_weights = staticmethod(_refuse)  # vLLM 0.26 asks for it

    def shutdown(self) -> None:
        session_of(self.model, self.model_config, self.device).disconnect()
