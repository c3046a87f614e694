"""Extends vLLM's workers on a CPU, as `sliced_weights`, and computes experts without a gate by PyTorch: vLLM has
kernels for these on GPUs alone, and refuses them elsewhere (`FusedMoEConfig.__post_init__`)."""

from __future__ import annotations

from typing import Any

import sliced_weights
import torch
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_SQUARED = MoEActivation.RELU2_NO_MUL


def _apply(
    self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor,
    activation: MoEActivation, *args: Any, **options: Any,
) -> None:  # fmt: skip
    """Squared ReLU between an expert's two linears."""
    assert activation == _SQUARED, activation
    output.zero_()
    for expert in range(len(w1)):
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        found = torch.relu(hidden_states[token] @ w1[expert].t()).square() @ w2[expert].t()
        output.index_add_(0, token, found * topk_weights[token, place, None].to(found.dtype))


def _as_loaded(self: Any, layer: nn.Module) -> None:
    """Leave out vLLM's own layout, which is that of its kernels."""


_checks = FusedMoEConfig.__post_init__


def _checked(self: Any) -> None:
    """Pass over vLLM's last check, and no other."""
    try:
        _checks(self)
    except NotImplementedError as error:
        if "is_act_and_mul=False" not in str(error):
            raise


FusedMoEConfig.__post_init__ = _checked  # type: ignore[method-assign]
CPUUnquantizedExperts.apply = _apply  # type: ignore[method-assign, assignment]
CPUUnquantizedExperts.process_weights_after_loading = _as_loaded  # type: ignore[method-assign]
CPUUnquantizedExperts._supports_no_act_and_mul = staticmethod(lambda: True)  # type: ignore[method-assign, assignment]
CPUUnquantizedExperts._supports_activation = staticmethod(  # type: ignore[method-assign]
    lambda activation: activation == _SQUARED
)


class Gateless(sliced_weights.Sliced):
    """Methods for `collective_rpc`."""
