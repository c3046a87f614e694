"""For tests of several ranks, by --external_plugins: each keeps what its engine held before each answer, in
$SWIFT_KEPT."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import swift_runs
import torch
import vllm.model_executor.layers.utils as layers
from swift_server import plain

from lora_merge.integrations.ms_swift.delivery import Colocated

layers.dispatch_cpu_unquantized_gemm = plain
push = Colocated.push


def kept(self: Colocated, model: Any) -> Any:
    report = push(self, model)
    print("partitioned:", all(hasattr(parameter, "ds_id") for parameter in model.parameters()), flush=True)
    weights = {name: tensor.clone() for name, tensor in swift_runs.engine_weights(self._engine.inner_model).items()}
    where = Path(os.environ["SWIFT_KEPT"])
    torch.save(weights, where / f"{os.environ['RANK']}-{report.version}.pt")
    return report


Colocated.push = kept  # type: ignore[method-assign]
