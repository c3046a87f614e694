"""TransformerEngine's own modules as megatron-core builds on them, computed by PyTorch: `install()` puts them in place
of the package, and megatron-core, mcore-bridge and ms-swift are then the real ones.

Attributes, shapes and results are TransformerEngine's; of its speed, its 8-bit numbers and its overlap of communication
there is nothing.
"""

from __future__ import annotations

import contextlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _norm(x: Tensor, kind: str, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
    scale = weight + 1 if zero_centered else weight
    if kind == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], scale, eps)
    return F.layer_norm(x, x.shape[-1:], scale, bias, eps)


class _Base(nn.Module):
    def init_weight(
        self, shape: tuple[int, int], method: Any, dtype: torch.dtype, dim: int | None, device: Any = None
    ) -> nn.Parameter:
        from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes

        made = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        if method is not None:
            method(made)
        set_tensor_model_parallel_attributes(made, is_parallel=dim is not None, dim=dim or 0, stride=1)
        return made


class Linear(_Base):
    """`parallel_mode` is "column", "row" or None, and `in_features` and `out_features` are this rank's afterwards."""

    def __init__(
        self, in_features: int, out_features: int, *, sequence_parallel: bool = False, tp_group: Any = None,
        tp_size: int = 1, init_method: Any = None, bias: bool = True, return_bias: bool = False,
        parallel_mode: str | None = None, params_dtype: torch.dtype = torch.float32, device: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp_group, self.tp_size, self.parallel_mode = tp_group, tp_size, parallel_mode
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.sequence_parallel = sequence_parallel and tp_size > 1
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        dim = {"row": 1, "column": 0, None: None}[parallel_mode]
        shape = (self.out_features, self.in_features)
        self.weight = self.init_weight(shape, init_method, params_dtype, dim, device)
        made = torch.zeros(self.out_features if bias else 0, dtype=params_dtype, device=device)
        self.bias: Any = nn.Parameter(made) if bias else made

    def multiply(self, x: Tensor) -> Any:
        from megatron.core.tensor_parallel import mappings

        if self.parallel_mode == "column" and self.tp_size > 1:
            gather = mappings.gather_from_sequence_parallel_region
            x = gather(x) if self.sequence_parallel else mappings.copy_to_tensor_model_parallel_region(x)
        out = F.linear(x, self.weight)
        if self.parallel_mode == "row" and self.tp_size > 1:
            scatter = mappings.reduce_scatter_to_sequence_parallel_region
            out = scatter(out) if self.sequence_parallel else mappings.reduce_from_tensor_model_parallel_region(out)
        return out + self.bias if self.apply_bias else out

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        out = self.multiply(x)
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    """A linear that norms its input."""

    def __init__(
        self, in_features: int, out_features: int, *, eps: float = 1e-5, normalization: str = "LayerNorm",
        return_layernorm_output: bool = False, zero_centered_gamma: bool = False,
        params_dtype: torch.dtype = torch.float32, device: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, params_dtype=params_dtype, device=device, **options)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        self.return_layernorm_output = return_layernorm_output
        begin = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = nn.Parameter(begin(in_features, dtype=params_dtype, device=device))
        zeros = torch.zeros(in_features, dtype=params_dtype, device=device)
        self.layer_norm_bias = nn.Parameter(zeros) if normalization == "LayerNorm" else None

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Any:
        x = _norm(
            x, self.normalization, self.layer_norm_weight, self.layer_norm_bias, self.eps, self.zero_centered_gamma
        )
        out: Any = (self.multiply(x), self.bias) if self.return_bias else (self.multiply(x),)
        out += (x,) if self.return_layernorm_output else ()
        return out if len(out) > 1 else out[0]


class GroupedLinear(_Base):
    """One linear for each local expert: `weight0`, `weight1`, ..."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, *, tp_group: Any = None, tp_size: int = 1,
        init_method: Any = None, bias: bool = True, return_bias: bool = False, parallel_mode: str | None = None,
        params_dtype: torch.dtype = torch.float32, device: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_gemms, self.use_bias, self.tp_group, self.tp_size = num_gemms, bias, tp_group, tp_size
        self.in_features = in_features // (tp_size if parallel_mode == "row" else 1)
        self.out_features = out_features // (tp_size if parallel_mode == "column" else 1)
        self.parallel_mode, self.return_bias = parallel_mode, return_bias
        dim = {"row": 1, "column": 0, None: None}[parallel_mode]
        for i in range(num_gemms):
            shape = (self.out_features, self.in_features)
            self.register_parameter(f"weight{i}", self.init_weight(shape, init_method, params_dtype, dim, device))
            if bias:
                zeros = torch.zeros(self.out_features, dtype=params_dtype, device=device)
                self.register_parameter(f"bias{i}", nn.Parameter(zeros))

    def forward(self, x: Tensor, m_splits: Any, is_first_microbatch: bool | None = None) -> Any:
        parts, own = x.split(list(map(int, m_splits))), self._parameters
        biases = [own.get(f"bias{i}") for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.return_bias else biases
        out = torch.cat([F.linear(part, own[f"weight{i}"], added[i]) for i, part in enumerate(parts)])
        return (out, biases) if self.return_bias else out


class _Norm(nn.Module):
    kind = "RMSNorm"

    def __init__(
        self, normalized_shape: int = 0, eps: float = 1e-5, sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32, zero_centered_gamma: bool = False, hidden_size: int = 0,
        device: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        hidden_size = hidden_size or normalized_shape  # the older name is what megatron-core 0.16 says
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        begin = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = nn.Parameter(begin(hidden_size, dtype=params_dtype, device=device))
        zeros = torch.zeros(hidden_size, dtype=params_dtype, device=device)
        self.bias = nn.Parameter(zeros) if self.kind == "LayerNorm" else None
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return _norm(x, self.kind, self.weight, self.bias, self.eps, self.zero_centered_gamma)


class RMSNorm(_Norm):
    pass


class LayerNorm(_Norm):
    kind = "LayerNorm"


class DotProductAttention(nn.Module):
    """Causal attention, of whole sequences (`sbhd`) or of several one after another (`thd`)."""

    def __init__(
        self, num_attention_heads: int, kv_channels: Any, *, softmax_scale: Any = None, **options: Any
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, *,
        attn_mask_type: str = "causal", qkv_format: str = "sbhd", cu_seqlens_q: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        if qkv_format == "thd":
            assert cu_seqlens_q is not None
            sizes = cu_seqlens_q.diff().tolist()
            sequences = zip(query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
            causal = "causal" in attn_mask_type  # a tower sees all of an image
            return torch.cat([self.attend(*(t[:, None] for t in one), None, causal).squeeze(1) for one in sequences])
        return self.attend(query, key, value, attention_mask if attn_mask_type != "causal" else None)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None, causal: bool = True) -> Tensor:
        """`[s, b, heads, channels]` to `[s, b, heads * channels]`; masked: what is not seen, default: the future."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        allowed = None if masked is None else ~masked
        causal = causal and allowed is None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=allowed, is_causal=causal, scale=self.softmax_scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2)


def stand_in(name: str, **content: Any) -> None:
    """Let `import name` find a package of this content."""
    made = ModuleType(name)
    made.__path__, made.__spec__ = [], ModuleSpec(name, None, is_package=True)
    vars(made).update(content)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, made)


def install() -> None:
    """Let `import transformer_engine` find what is here; before megatron-core is imported."""
    if "transformer_engine" in sys.modules:
        return
    pytorch = {"Linear": Linear, "LayerNormLinear": LayerNormLinear, "GroupedLinear": GroupedLinear,
               "RMSNorm": RMSNorm, "LayerNorm": LayerNorm, "DotProductAttention": DotProductAttention,
               "ops": SimpleNamespace(Sequential=nn.Sequential, FusibleOperation=nn.Module)}  # fmt: skip
    no_fp8 = {"fp8_autocast": lambda *args, **kwargs: contextlib.nullcontext(),
              "fp8_model_init": lambda *args, **kwargs: contextlib.nullcontext(),
              "FP8GlobalStateManager": SimpleNamespace(is_fp8_enabled=lambda: False)}  # fmt: skip
    contents: dict[str, dict[str, Any]] = {
        "transformer_engine": {"__version__": "2.2.0"},
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {"DelayedScaling": type("DelayedScaling", (), {})},
        "transformer_engine.pytorch": pytorch,
        "transformer_engine.pytorch.fp8": no_fp8,
        "transformer_engine.pytorch.distributed": {
            "CudaRNGStatesTracker": type("CudaRNGStatesTracker", (), {}),
            "activation_recompute_forward": contextlib.nullcontext,
        },
        "transformer_engine.pytorch.attention": {},
        "transformer_engine.pytorch.tensor": {"QuantizedTensor": type("QuantizedTensor", (), {})},
    }
    for name, content in contents.items():
        stand_in(name, **content)
