"""TransformerEngine's linears as megatron-core uses them, on the CPU: the names, parameters and results of
`megatron.core.extensions.transformer_engine`, which needs a GPU to be imported."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn
from torch.nn import functional

MODULE = "megatron.core.extensions.transformer_engine"
_Class = TypeVar("_Class", bound=type)


def _as_there(cls: _Class) -> _Class:
    cls.__module__ = MODULE
    return cls


@_as_there
class TELayerNormColumnParallelLinear(ColumnParallelLinear):
    """A column-parallel linear that norms its input."""

    layer_norm_weight: nn.Parameter
    return_layernorm_output = False

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon)
        out, bias = super().forward(x, *args, **kwargs)
        return ((out, x), bias) if self.return_layernorm_output else (out, bias)


@_as_there
class TERowParallelLinear(RowParallelLinear):
    pass


@_as_there
class TEGroupedLinear(nn.Module):
    """One linear for each local expert; `parallel_mode=None`: whole on every rank."""

    def __init__(self, weights: list[Tensor], config: Any) -> None:
        super().__init__()
        self.config, self.num_gemms, self.is_expert = config, len(weights), True
        self.out_features, self.in_features = weights[0].shape
        for i, weight in enumerate(weights):
            self.register_parameter(f"weight{i}", nn.Parameter(weight.detach().clone()))

    def forward(self, x: Tensor, m_splits: list[int]) -> Any:
        parts = [functional.linear(part, self._parameters[f"weight{i}"]) for i, part in enumerate(x.split(m_splits))]
        return torch.cat(parts), None


@_as_there
class TEColumnParallelGroupedLinear(TEGroupedLinear):
    pass


@_as_there
class TERowParallelGroupedLinear(TEGroupedLinear):
    pass


class GroupedExperts(nn.Module):
    """What TEGroupedMLP computes, with its parameters' names."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        fc1, fc2 = ([getattr(e, name).weight for e in experts.local_experts] for name in ("linear_fc1", "linear_fc2"))
        self.linear_fc1 = TEColumnParallelGroupedLinear(fc1, experts.config)
        self.linear_fc2 = TERowParallelGroupedLinear(fc2, experts.config)

    def forward(self, x: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> Any:
        splits = tokens_per_expert.tolist()
        gate, up = self.linear_fc1(x, splits)[0].chunk(2, -1)
        hidden = functional.silu(gate) * up * probs.unsqueeze(-1)
        return self.linear_fc2(hidden.to(x.dtype), splits)[0], None


def convert(chunk: Any) -> None:
    """Give a model of the local spec the parameters that one of the TransformerEngine spec has."""
    for layer in chunk.decoder.layers:
        _fuse_norm(layer, "input_layernorm", layer.self_attention.linear_qkv)
        _row(layer.self_attention.linear_proj)
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = GroupedExperts(layer.mlp.experts)
        else:
            _fuse_norm(layer, "pre_mlp_layernorm", layer.mlp.linear_fc1)
            _row(layer.mlp.linear_fc2)


def _fuse_norm(layer: Any, norm: str, linear: Any) -> None:
    linear.__class__ = TELayerNormColumnParallelLinear
    linear.out_features, linear.in_features = linear.weight.shape
    linear.layer_norm_weight = getattr(layer, norm).weight
    setattr(layer, norm, nn.Identity())


def _row(linear: Any) -> None:
    linear.__class__ = TERowParallelLinear
    linear.out_features, linear.in_features = linear.weight.shape
