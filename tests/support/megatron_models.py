"""Real megatron-core models on the CPU (gloo), loaded from HF models, with adapters.

The loader is written from Megatron's own description of its layouts, with reshapes and chunks of whole tensors, and
shares nothing with `lora_merge.models.megatron.read`.

The layers of mcore-bridge need TransformerEngine, which has no CPU build; `LoraParallelLinear` here has its attributes
(PEFT's `LoraLayer`, lora_A and lora_B as parallel or replicated linears) and its forward. Megatron-Bridge's own modules
are the real ones where its wheel is unpacked on the path (`bridge()`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_merge.names import innermost

# ---- models ----------------------------------------------------------------------------------------------------------


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Grid:
    """Sizes of the parallel groups, and whether activations outside of the linears are cut over `tp` by sequence."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None
    cp: int = 1
    sp: bool = False


def _shim() -> None:
    """Let megatron-core believe in a CPU device, where there is no other."""
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 asks whether it is None, and does not say so without TE
        moe_utils.te_general_gemm = None
    if torch.cuda.is_available():
        return

    class Stream:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: self

    Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.Stream = Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *args, **kwargs: Stream()  # type: ignore[assignment]
    torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()  # type: ignore[assignment]
    # Megatron refuses PyTorch's norm under sequence parallelism, for its gradients; its forward is right on any token.
    torch_norm.WrappedTorchNorm.__new__ = staticmethod(  # type: ignore[assignment]
        lambda cls, config, hidden_size, eps: nn.RMSNorm(hidden_size, eps)
    )
    if importlib.util.find_spec("megatron.core.transformer.moe.grouped_gemm_util"):  # not in 0.18
        from megatron.core.transformer.moe import grouped_gemm_util

        grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
        grouped_gemm_util.ops = types.SimpleNamespace(gmm=_grouped_gemm)
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
    )


def _grouped_gemm(x: Tensor, weights: Tensor, sizes: Tensor, trans_b: bool = False) -> Tensor:
    parts = zip(x.split(sizes.tolist()), weights, strict=True)
    return torch.cat([part @ (w.t() if trans_b else w) for part, w in parts])


def hf_model(
    kind: str,
    *,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (8, 4),
    layers: int = 2,
    head_dim: int = 8,
) -> Any:
    """A tiny transformers model with random weights; `heads` are attention heads and query groups."""
    import transformers as t

    sizes = {
        "vocab_size": 101,
        "hidden_size": 8 * head_dim,
        "intermediate_size": 6 * head_dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    moe = sizes | {"moe_intermediate_size": 3 * head_dim, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    match kind:
        case "llama":
            model = t.LlamaForCausalLM(t.LlamaConfig(**sizes))
        case "qwen2":
            model = t.Qwen2ForCausalLM(t.Qwen2Config(**sizes))
        case "qwen3":
            model = t.Qwen3ForCausalLM(t.Qwen3Config(**sizes))
        case "qwen3_moe":
            model = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**moe, num_experts=4, norm_topk_prob=True))
        case "qwen2_moe":
            config = t.Qwen2MoeConfig(**moe, num_experts=4, shared_expert_intermediate_size=32, norm_topk_prob=True)
            model = t.Qwen2MoeForCausalLM(config)
        case "mixtral":
            model = t.MixtralForCausalLM(t.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
        case _:
            raise ValueError(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms and biases that are not all ones and zeros
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape))
            elif "gate.weight" in name:
                parameter.normal_(std=1.0)
            else:
                parameter.normal_(std=0.08)
    model.config._experts_implementation = "eager"
    return model.to(dtype).eval()


def with_weights(model: Any, weights: dict[str, Tensor]) -> Any:
    """A model like this one with the tensors of a checkpoint, rounded to its dtype."""
    tensors = {name: tensor.to(model.dtype).contiguous() for name, tensor in weights.items()}
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        save_file(tensors, f"{folder}/model.safetensors", {"format": "pt"})
        loaded = type(model).from_pretrained(folder, dtype=model.dtype).eval()
    loaded.config._experts_implementation = "eager"
    return loaded


def checkpoint(model: Any) -> dict[str, Tensor]:
    """The tensors that `save_pretrained` writes."""
    # Where torch.distributed runs, only rank 0 would write.
    alone = mock.patch("torch.distributed.is_initialized", return_value=False)
    with tempfile.TemporaryDirectory() as folder, alone:
        model.save_pretrained(folder)
        return {k: v for file in sorted(Path(folder).glob("*.safetensors")) for k, v in load_file(file).items()}


def megatron(kind: str, hf: Any, grid: Grid, *, form: str = "local", padded: int = 128) -> list[Any]:
    """This rank's chunks of a GPTModel with the weights of a HF model.

    Args:
        form: "local", the spec of that name; "grouped", the same with GroupedMLP; "te", the parameters of the
            TransformerEngine spec.
        padded: rows of vocabulary.
    """
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    _shim()
    ps.initialize_model_parallel(
        grid.tp,
        grid.pp,
        grid.vpp,
        context_parallel_size=grid.cp,
        expert_model_parallel_size=grid.ep,
        expert_tensor_parallel_size=grid.etp,
    )
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(1)
    else:
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    c, dtype, grouped = hf.config, hf.dtype, form == "grouped"
    experts = getattr(c, "num_local_experts", None) or getattr(c, "num_experts", None)
    ffn = getattr(c, "moe_intermediate_size", None) or c.intermediate_size
    moe: dict[str, Any] = {}
    if experts:
        moe = {
            "num_moe_experts": experts,
            "moe_ffn_hidden_size": ffn,
            "moe_router_topk": c.num_experts_per_tok,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather" if grid.ep == 1 else "alltoall",
            "moe_router_pre_softmax": False,
            "expert_model_parallel_size": grid.ep,
            "expert_tensor_parallel_size": grid.etp or grid.tp,
            "moe_grouped_gemm": grouped,
        }
    if kind == "qwen2_moe":
        moe |= {
            "moe_shared_expert_intermediate_size": c.shared_expert_intermediate_size,
            "moe_shared_expert_gate": True,
        }
    config = TransformerConfig(
        num_layers=c.num_hidden_layers,
        hidden_size=c.hidden_size,
        ffn_hidden_size=c.intermediate_size,
        num_attention_heads=c.num_attention_heads,
        num_query_groups=c.num_key_value_heads,
        kv_channels=c.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=c.rms_norm_eps,
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=kind.startswith("qwen2"),
        qk_layernorm=kind.startswith("qwen3"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=grid.tp,
        pipeline_model_parallel_size=grid.pp,
        virtual_pipeline_model_parallel_size=grid.vpp,
        sequence_parallel=grid.sp,
        use_cpu_initialization=True,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **moe,
    )
    chunks = []
    for stage in range(grid.vpp or 1):
        first = ps.is_pipeline_first_stage(ignore_virtual=True) and stage == 0
        last = ps.is_pipeline_last_stage(ignore_virtual=True) and stage == (grid.vpp or 1) - 1
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(
                num_experts=experts, moe_grouped_gemm=grouped, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
            ),
            vocab_size=padded,
            max_sequence_length=64,
            pre_process=first,
            post_process=last,
            parallel_output=False,
            share_embeddings_and_output_weights=c.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=10000,
            vp_stage=stage if grid.vpp else None,
        )
        # Attention without TransformerEngine takes whole sequences only: context-parallel ranks are replicas here.
        chunk.rotary_pos_emb.cp_group = None
        load(chunk, checkpoint(hf), grid, padded)
        if form == "te":
            import megatron_te

            megatron_te.convert(chunk)
        chunks.append(chunk.to(DEVICE, dtype).eval())
    return chunks


def load(chunk: Any, hf: dict[str, Tensor], grid: Grid, padded: int) -> None:
    """Fill a chunk with its shards of a HF checkpoint. Rows of padding hold NaN: nobody may read them."""
    from megatron.core import parallel_state as ps

    t, e = ps.get_tensor_model_parallel_rank(), ps.get_expert_model_parallel_rank()
    et, etp = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
    c = chunk.config

    def rows(w: Tensor, rank: int = t, size: int = grid.tp) -> Tensor:
        return w.chunk(size, 0)[rank]

    def columns(w: Tensor, rank: int = t, size: int = grid.tp) -> Tensor:
        return w.chunk(size, 1)[rank]

    def pad(w: Tensor) -> Tensor:
        return torch.cat([w, w.new_full((padded - w.shape[0], w.shape[1]), float("nan"))])

    def qkv(at: str, kind: str) -> Tensor:
        q, k, v = (hf[f"{at}.self_attn.{p}_proj.{kind}"].unflatten(0, (c.num_query_groups, -1)) for p in "qkv")
        return torch.cat([q, k, v], 1).flatten(0, 1)

    def gated(gate: Tensor, up: Tensor, rank: int = t, size: int = grid.tp) -> Tensor:
        return torch.cat([rows(gate, rank, size), rows(up, rank, size)])

    def put(name: str, value: Tensor) -> None:
        parameter = parameters.pop(name)
        assert parameter.shape == value.shape, (name, parameter.shape, value.shape)
        parameter.data.copy_(value)

    parameters = dict(chunk.named_parameters())
    head = "model.embed_tokens.weight" if chunk.share_embeddings_and_output_weights else "lm_head.weight"
    if chunk.pre_process:
        put("embedding.word_embeddings.weight", rows(pad(hf["model.embed_tokens.weight"])))
    if "output_layer.weight" in parameters:
        put("output_layer.weight", rows(pad(hf[head])))
    if chunk.post_process:
        put("decoder.final_layernorm.weight", hf["model.norm.weight"])
    for i, layer in enumerate(chunk.decoder.layers):
        m, h = f"decoder.layers.{i}", f"model.layers.{layer.layer_number - 1}"
        put(f"{m}.input_layernorm.weight", hf[f"{h}.input_layernorm.weight"])
        put(f"{m}.pre_mlp_layernorm.weight", hf[f"{h}.post_attention_layernorm.weight"])
        put(f"{m}.self_attention.linear_qkv.weight", rows(qkv(h, "weight")))
        if c.add_qkv_bias:
            put(f"{m}.self_attention.linear_qkv.bias", rows(qkv(h, "bias")))
        put(f"{m}.self_attention.linear_proj.weight", columns(hf[f"{h}.self_attn.o_proj.weight"]))
        if c.qk_layernorm:
            for p in "qk":
                put(f"{m}.self_attention.{p}_layernorm.weight", hf[f"{h}.self_attn.{p}_norm.weight"])
        if not c.num_moe_experts:
            gate, up = (hf[f"{h}.mlp.{p}_proj.weight"] for p in ("gate", "up"))
            put(f"{m}.mlp.linear_fc1.weight", gated(gate, up))
            put(f"{m}.mlp.linear_fc2.weight", columns(hf[f"{h}.mlp.down_proj.weight"]))
            continue
        mlp, (g, u, d) = (
            ("mlp", ("gate_proj", "up_proj", "down_proj"))
            if f"{h}.mlp.gate.weight" in hf
            else ("block_sparse_moe", ("w1", "w3", "w2"))
        )
        put(f"{m}.mlp.router.weight", hf[f"{h}.{mlp}.gate.weight"])
        if f"{h}.mlp.shared_expert_gate.weight" in hf:
            gate, up, down = (hf[f"{h}.mlp.shared_expert.{p}_proj.weight"] for p in ("gate", "up", "down"))
            put(f"{m}.mlp.shared_experts.linear_fc1.weight", gated(gate, up))
            put(f"{m}.mlp.shared_experts.linear_fc2.weight", columns(down))
            put(f"{m}.mlp.shared_experts.gate_weight", hf[f"{h}.mlp.shared_expert_gate.weight"])
        local = c.num_moe_experts // grid.ep
        fc1, fc2 = [], []
        for n in range(e * local, (e + 1) * local):
            gate, up, down = (hf[f"{h}.{mlp}.experts.{n}.{p}.weight"] for p in (g, u, d))
            fc1.append(gated(gate, up, et, etp))
            fc2.append(columns(down, et, etp))
        if f"{m}.mlp.experts.weight1" in parameters:
            put(f"{m}.mlp.experts.weight1", torch.stack([w.t() for w in fc1]).view(c.hidden_size, -1))
            put(f"{m}.mlp.experts.weight2", torch.cat([w.t() for w in fc2]))
        for n in range(local):
            if parameters and f"{m}.mlp.experts.local_experts.{n}.linear_fc1.weight" in parameters:
                put(f"{m}.mlp.experts.local_experts.{n}.linear_fc1.weight", fc1[n])
                put(f"{m}.mlp.experts.local_experts.{n}.linear_fc2.weight", fc2[n])
    assert not parameters, f"not loaded: {sorted(parameters)}"


def logits(chunks: list[Any], tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """`[batch, sequence, padded vocabulary]` on every rank; activations go from stage to stage by hand."""
    from megatron.core import parallel_state as ps

    group, me, ranks = ps.get_pipeline_model_parallel_group(), ps.get_pipeline_model_parallel_rank(), []
    ranks = dist.get_process_group_ranks(group)
    tokens = tokens.to(DEVICE)
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=DEVICE).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], device=DEVICE).triu(1).bool()
    config = innermost(chunks[0]).config
    rows = tokens.shape[1] // (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    x = torch.empty(rows, tokens.shape[0], config.hidden_size, dtype=config.params_dtype, device=DEVICE)
    with torch.no_grad():
        for chunk in chunks:
            for stage, rank in enumerate(ranks):
                if stage == me:
                    innermost(chunk).set_input_tensor(x)
                    out = chunk(tokens, positions, mask)
                if chunk is chunks[-1] and rank == ranks[-1]:
                    x = x.new_empty(*tokens.shape, innermost(chunk).vocab_size)
                if stage == me:
                    x = out.contiguous()
                dist.broadcast(x, rank, group=group)
    return x


# ---- adapters --------------------------------------------------------------------------------------------------------


@functools.cache
def bridge() -> Any:
    """Megatron-Bridge's `peft` package, with our stand-ins where it looks for TransformerEngine's layers."""
    import megatron_preload  # noqa: F401 - megatron.core, before it sees what stands in for TransformerEngine
    import megatron_te

    spec = importlib.util.find_spec("megatron")
    places = [Path(p) / "bridge" for p in spec.submodule_search_locations or ()] if spec else []
    found = [str(place) for place in places if (place / "peft" / "lora.py").exists()]
    assert found, "Megatron-Bridge is not installed"
    package = types.ModuleType("megatron.bridge")
    package.__path__ = found
    sys.modules["megatron.bridge"] = package
    with mock.patch.dict(sys.modules, stand_ins()):
        from megatron.bridge.peft import canonical_lora, dora, lora, lora_layers, utils

        kept = {name: module for name, module in sys.modules.items() if name.startswith("megatron.bridge.")}
    sys.modules.update(kept)  # what is imported of it later shares these classes

    # megatron-core 0.16.1 hands its routers a padding mask too, which Megatron-Bridge 0.3.1 does not take.
    router, forward = lora_layers.LoRATopKRouter, lora_layers.LoRATopKRouter.__dict__["forward"]
    if forward.__code__.co_argcount == 2:
        router.forward = lambda self, x, padding_mask=None: forward(self, x)

    utils.HAVE_TE = True
    utils.TELayerNormColumnParallelLinear = megatron_te.TELayerNormColumnParallelLinear
    utils.TECL = (megatron_te.TELayerNormColumnParallelLinear, megatron_te.TEColumnParallelGroupedLinear)
    utils.TERL = (megatron_te.TERowParallelLinear, megatron_te.TERowParallelGroupedLinear)
    utils.TELinear = type("TELinear", (nn.Module,), {})
    return types.SimpleNamespace(LoRA=lora.LoRA, CanonicalLoRA=canonical_lora.CanonicalLoRA, DoRA=dora.DoRA)


def stand_ins() -> dict[str, types.ModuleType]:
    """What Megatron-Bridge imports of TransformerEngine, by name: classes that no model here has."""
    te, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    for name in ("Linear", "LayerNormLinear", "GroupedLinear", "LayerNorm", "RMSNorm"):
        setattr(pytorch, name, type(name, (nn.Module,), {}))
    pytorch.ops = types.SimpleNamespace(Sequential=nn.Sequential)
    te.pytorch, te.__version__ = pytorch, "0"  # type: ignore[attr-defined]  # megatron-core 0.18 asks; older than all
    return {"transformer_engine": te, "transformer_engine.pytorch": pytorch}


def mcore_style() -> type[nn.Module]:
    """A class with the name, attributes and forward of mcore-bridge's layer, on megatron-core's own linears."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron_te import TEColumnParallelGroupedLinear, TEGroupedLinear, TERowParallelGroupedLinear
    from peft.tuners.lora.layer import LoraLayer

    class Replicated(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), None

    class LoraParallelLinear(nn.Module, LoraLayer):
        def __init__(self, base_layer: Any) -> None:
            nn.Module.__init__(self)
            LoraLayer.__init__(self, base_layer)
            self.config, self._active_adapter = base_layer.config, []
            base_layer.return_layernorm_output = True

        def add(self, name: str, r: int, alpha: int, *, rslora: bool) -> None:
            base = self.get_base_layer()
            made = {"config": self.config, "init_method": nn.init.normal_, "bias": False, "is_expert": base.is_expert}
            if isinstance(base, TEGroupedLinear):
                row, dtype = isinstance(base, TERowParallelGroupedLinear), base.weight0.dtype
                a, b = (
                    [torch.empty(*shape, dtype=dtype)] * base.num_gemms
                    for shape in ((r, base.in_features), (base.out_features, r))
                )
                kinds = (TERowParallelGroupedLinear, TEGroupedLinear, TEGroupedLinear, TEColumnParallelGroupedLinear)
                kind_A, kind_B = kinds[:2] if row else kinds[2:]
                lora_A, lora_B = kind_A(a, self.config), kind_B(b, self.config)
            elif isinstance(base, RowParallelLinear):
                lora_A = RowParallelLinear(base.input_size, r, input_is_parallel=True, skip_bias_add=True, **made)
                lora_B = Replicated(r, base.output_size, bias=False, dtype=base.weight.dtype)
            else:
                lora_A = Replicated(base.input_size, r, bias=False, dtype=base.weight.dtype)
                lora_B = ColumnParallelLinear(r, base.output_size, gather_output=False, **made)
            self.lora_A[name], self.lora_B[name] = lora_A, lora_B
            self.scaling[name] = alpha / (r**0.5 if rslora else r)
            self._active_adapter = [*self._active_adapter, name]

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            result, bias = self.base_layer(x, *args, **kwargs)
            if isinstance(result, tuple):
                result, x = result
            if not self.disable_adapters and not self.merged:
                for name in self.active_adapters:
                    product = self.lora_B[name](self.lora_A[name](x, *args)[0], *args)[0]
                    result = result + product * self.scaling[name]
            return result, bias

    LoraParallelLinear.__module__, LoraParallelLinear.__qualname__ = "mcore_bridge.tuners.lora", "LoraParallelLinear"
    return LoraParallelLinear


class DownUp(nn.Module):
    """A style of adapters that the library does not know; `docs/megatron.md` registers it."""

    def __init__(self, linear: Any, r: int) -> None:
        super().__init__()
        self.linear, self.on, self.scale = linear, True, 1.5
        (rows, columns), dtype = linear.weight.shape, linear.weight.dtype
        row = any(cls.__name__ == "RowParallelLinear" for cls in type(linear).__mro__)
        self.lora_down, self.lora_up = (
            nn.Parameter(torch.empty(r, columns, dtype=dtype)),
            nn.Parameter(torch.empty(rows, r, dtype=dtype)),
        )
        self.lora_down.tensor_model_parallel, self.lora_up.tensor_model_parallel = row, not row  # type: ignore[attr-defined]
        self.row = row

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        from megatron.core import parallel_state as ps

        result, bias = self.linear(x, *args, **kwargs)
        if self.on:
            down = nn.functional.linear(x, self.lora_down)
            if self.row:
                dist.all_reduce(down, group=ps.get_tensor_model_parallel_group())
            result = result + nn.functional.linear(down, self.lora_up) * self.scale
        return result, bias


def own_linear(linear: Any) -> Any:
    """A parallel linear of a class of somebody's own."""
    own = type("OwnLinear", (nn.Module,), {})()
    own.weight, own.config = linear.weight, linear.config
    return own


DownUp.__module__ = "mytrainer.lora"
LINEARS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]


def adapt(chunks: list[Any], style: str, *, r: int = 4) -> None:
    """Put adapters on linears (see `wrap`), with an effect, and with replicas that agree."""
    wrap(chunks, style, r=r)
    from megatron.core import parallel_state as ps

    dense = ps.get_tensor_model_parallel_rank()
    expert = 100 * ps.get_expert_model_parallel_rank() + ps.get_expert_tensor_parallel_rank()
    for chunk in chunks:
        chunk.to(DEVICE)
        for name, parameter in chunk.named_parameters():
            if ".adapter." in name or ".lora_" in name:
                cut = getattr(parameter, "tensor_model_parallel", False)
                torch.manual_seed(hash_of(name) + (expert if ".experts." in name else dense if cut else 0))
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape) * 0.1)


def wrap(chunks: list[Any], style: str, *, r: int) -> None:
    """Put adapters on linears, as they begin.

    Args:
        style: "bridge" and "canonical", Megatron-Bridge's on every linear; "attention", "fc1", "router" and
            "output_layer", its LoRA on some; "dora", its DoRA; "mcore", mcore-bridge's on every linear; "several", two
            of them; "third", `DownUp` on every linear.
    """
    if style == "third":
        for chunk in chunks:
            for name, module in list(chunk.named_modules()):
                if name.rpartition(".")[2] in LINEARS:
                    parent, _, key = name.rpartition(".")
                    setattr(chunk.get_submodule(parent), key, DownUp(module, r))
    elif style in ("mcore", "several"):
        cls = mcore_style()
        for chunk in chunks:
            for name, module in list(chunk.named_modules()):
                if name.rpartition(".")[2] in LINEARS:
                    parent, _, key = name.rpartition(".")
                    layer: Any = cls(module)
                    layer.add("default", r, 6, rslora=True)
                    if style == "several" and key != "linear_fc2":
                        layer.add("other", 2 * r, 5, rslora=False)
                    setattr(chunk.get_submodule(parent), key, layer)
    else:
        kinds = bridge()
        some = {"attention": LINEARS[:2], "fc1": LINEARS[:3], "router": ["router"], "output_layer": ["output_layer"]}
        targets = some.get(style, LINEARS)
        made = {"dim": r, "alpha": 6}
        if style == "canonical":
            targets = [
                "linear_q",
                "linear_k",
                "linear_v",
                "linear_proj",
                "linear_fc1_up",
                "linear_fc1_gate",
                LINEARS[3],
            ]
        kind = {"canonical": kinds.CanonicalLoRA, "dora": kinds.DoRA}.get(style, kinds.LoRA)
        for i, chunk in enumerate(chunks):
            chunks[i] = kind(target_modules=targets, **made)(chunk, training=False)


def hash_of(name: str) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(name))
