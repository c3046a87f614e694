"""Megatron-Bridge's own providers and loading for the models of `hf_kinds`, on CPUs: run by workers that have imported
no Megatron yet, as TransformerEngine's modules are stood in for (`te_cpu`), and so are the kernels of gated delta nets
and Mamba, which have no CPU build."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Any

import te_cpu

te_cpu.install()
os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = "0"

import cuda_cpu  # noqa: E402
import hf_kinds  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class _GatedNorm(nn.Module):
    """`y * silu(gate)`, normed by groups."""

    def __init__(self, size: int, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, y: Tensor, z: Tensor | None = None) -> Tensor:
        y = y if z is None else y * F.silu(z)
        grouped = y.float().unflatten(-1, (-1, self.group_size))
        normed = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed.flatten(-2)).to(y.dtype)


def _scan(
    zxBCdt: Tensor, weight: Tensor, bias: Tensor, dt_bias: Tensor, A: Tensor, *, D: Tensor, headdim: int, ngroups: int,
    **options: Any,
) -> Tensor:  # fmt: skip
    """Mamba-2 token by token (Dao and Gu, 2024, arXiv:2405.21060, eq. 2): `[b, l, z x B C dt]` to `[b, l, heads *
    headdim]`, gated by z."""
    heads = A.shape[0]
    inner, (batch, length, _) = heads * headdim, zxBCdt.shape
    state = (zxBCdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xBC, dt = zxBCdt.split([inner, inner + 2 * ngroups * state, heads], -1)
    conv = F.conv1d(xBC.transpose(1, 2), weight[:, None], bias, padding=weight.shape[1] - 1, groups=weight.shape[0])
    x, B, C = F.silu(conv[..., :length].transpose(1, 2)).split([inner, ngroups * state, ngroups * state], -1)
    x, dt = x.unflatten(-1, (heads, headdim)), F.softplus(dt.float() + dt_bias)
    B, C = (t.unflatten(-1, (ngroups, state)).repeat_interleave(heads // ngroups, 2) for t in (B, C))
    h, ys = x.new_zeros(batch, heads, headdim, state), []
    for t in range(length):
        h = h * (dt[:, t] * A).exp()[..., None, None]
        h = h + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        ys.append((h * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(ys, 1).flatten(2) * F.silu(z)


for _name in ("fla", "fla.modules", "fla.ops", "mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton"):
    te_cpu.stand_in(_name)
te_cpu.stand_in("fla.modules.l2norm", l2norm=_l2norm)
te_cpu.stand_in("fla.modules.convolution", causal_conv1d=None)
te_cpu.stand_in("fla.ops.gated_delta_rule", chunk_gated_delta_rule=None)
te_cpu.stand_in("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=_GatedNorm)
te_cpu.stand_in(
    "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=None, mamba_split_conv1d_scan_combined=_scan
)

cuda_cpu.be_a_gpu()
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *args: None

import megatron.core.fusions.fused_softmax as fused_softmax  # noqa: E402
import megatron_models as mm  # noqa: E402

with cuda_cpu.triton():  # which is not there where vLLM is a CPU's
    from megatron.bridge import AutoBridge
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping  # noqa: E402
from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import rope  # noqa: E402
from megatron.core import parallel_state as ps  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear  # noqa: E402
from megatron.core.tensor_parallel.random import initialize_rng_tracker  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron_peft import exported  # noqa: E402

from lora_merge import MergedWeights, merged  # noqa: E402
from lora_merge.errors import UnsupportedAdapter  # noqa: E402
from lora_merge.megatron import Chunks, bridge_names, read  # noqa: E402

mm._shim()
_scatter = MegatronParamMapping.scatter_to_tp_ranks
MegatronParamMapping.scatter_to_tp_ranks = lambda self, splits, *args, **options: (  # gloo takes them for contiguous
    _scatter(self, splits and [split.contiguous() for split in splits], *args, **options)
)
for _name in ("Qwen3VLTextRotaryEmbedding", "Qwen3VLMoETextRotaryEmbedding"):  # gone from transformers 5
    if not hasattr(rope, _name):
        continue  # Megatron-Bridge 0.5 has its own
    _rope = getattr(rope, _name)
    _rope.apply_interleaved_mrope = lambda self, freqs, section: freqs[0]  # the three positions of text are one
fused_softmax.get_sliding_window_causal_mask = lambda sq, sk, window: (  # makes it on "cuda"
    ~torch.ones(sq, sk, dtype=torch.bool).triu(sk - sq - window[0]).tril(sk - sq + window[1])
)
ON_CPU = {
    "use_cpu_initialization": True, "bias_activation_fusion": False, "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False,
    "moe_permute_fusion": False, "moe_router_fusion": False, "cross_entropy_loss_fusion": False,
    "moe_shared_expert_overlap": False, "persist_layer_norm": False, "recompute_granularity": None,
    "deterministic_mode": True, "parallel_output": False,
}  # fmt: skip
OLD = {
    "deepseek_v3": {"rope_scaling": None},
    "qwen3_next": {"full_attention_interval": 2, "partial_rotary_factor": 0.25},
}
"""What Megatron-Bridge 0.3.1 asks of a configuration, and transformers 5 calls something else."""
PROVIDED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"moe_router_score_function": "sigmoid", "rope_type": "yarn", "moe_router_dtype": "fp32"}
    | {"original_max_position_embeddings": hf_kinds.YARN["original_max_position_embeddings"]},
    "gpt_oss": {"attention_backend": AttnBackend.local},
}


def _cut_spec(config: Any, vp_stage: int | None = None) -> Any:
    """With projections to the latents that are cut over ranks, as those of megatron-core's local modules are; these
    themselves have no attention for latent heads."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = ColumnParallelLinear
    return spec


def build(
    kind: str, folder: str, grid: mm.Grid, dtype: torch.dtype, *, cut: bool = False, **options: Any
) -> tuple[Any, list[Any]]:
    """The bridge of a checkpoint, and this rank's chunk of the model, loaded by it; with options of the provider's, as
    it begins.

    Args:
        cut: see `_cut_spec`.
    """
    ps.initialize_model_parallel(
        grid.tp, grid.pp, expert_model_parallel_size=grid.ep, expert_tensor_parallel_size=grid.etp
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    bridge = AutoBridge.from_hf_pretrained(folder)
    config = bridge.hf_pretrained.config
    text = config.get_text_config()
    text.rope_theta = text.rope_parameters["rope_theta"]
    text.rope_scaling = text.rope_parameters
    text.torch_dtype = dtype
    for name, value in (OLD.get(kind, {}) | (text.to_dict() if kind == "qwen2_5_vl" else {})).items():
        if not hasattr(config, name):
            setattr(config, name, value)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # megatron-core sets them for one kind of attention
    provider = bridge.to_megatron_provider(load_weights=False)
    sizes = {
        "tensor_model_parallel_size": grid.tp, "pipeline_model_parallel_size": grid.pp, "sequence_parallel": grid.sp,
        "expert_model_parallel_size": grid.ep, "expert_tensor_parallel_size": grid.etp or grid.tp,
        "params_dtype": dtype, "pipeline_dtype": dtype, "bf16": dtype == torch.bfloat16, "fp16": False,
        "moe_token_dispatcher_type": "allgather" if grid.ep == 1 else "alltoall",
    }  # fmt: skip
    sizes |= {name: value for name, value in text.rope_parameters.items() if name == "mrope_section"}
    if kind == "nemotron_h":
        which = "hybrid_layer_pattern" if hasattr(provider, "hybrid_layer_pattern") else "hybrid_override_pattern"
        sizes |= {which: config.hybrid_override_pattern, "num_layers": config.num_hidden_layers}
    for name, value in (ON_CPU | sizes | PROVIDED.get(kind, {}) | options).items():
        setattr(provider, name, value)
    if cut:
        provider.transformer_layer_spec = _cut_spec
    provider.finalize()
    from megatron.core.process_groups_config import ProcessGroupCollection

    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
    first, last = ps.is_pipeline_first_stage(), ps.is_pipeline_last_stage()
    chunk = provider.provide(pre_process=first, post_process=last)
    for module in chunk.modules():
        if type(module).__name__ == "Qwen3VLVisionPatchMerger":
            module.activation_func = F.gelu  # as transformers'; Megatron-Bridge 0.5 takes the tower's approximation
    if hasattr(chunk, "language_model") and last:
        chunk.language_model.output_layer.gather_output = True  # as `parallel_output` says, which towers' models drop
    if not options:
        bridge.load_hf_weights([chunk], folder)
    return bridge, [chunk.eval()]


def logits(kind: str, chunks: list[Any], tokens: Tensor = hf_kinds.TOKENS) -> Tensor:
    """What the (language) model says on every rank."""
    if "vl" not in kind:
        return mm.logits(chunks, tokens)
    positions = torch.arange(tokens.shape[1]).expand(3, *tokens.shape)
    return mm.logits([chunk.language_model for chunk in chunks], tokens, positions)


def log_probs(kind: str, chunks: list[Any], prompts: Tensor, answers: Tensor, vocabulary: int) -> Tensor:
    """Return of each answer's tokens, a row a prompt, the log-probs on every rank."""
    said = logits(kind, chunks, torch.cat([prompts, answers], 1))[:, prompts.shape[1] - 1 : -1, :vocabulary]
    return said.float().log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1)


def tower(kind: str, chunks: list[Any]) -> Tensor | None:
    """What a model's tower makes of an image; None where it has none, and on other stages than the first."""
    found = getattr(chunks[0], "visual", getattr(chunks[0], "vision_model", None))
    return None if found is None else hf_kinds.features(kind, found)


LATENT = ["linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"]
TARGETS = {
    "deepseek_v3": [*LATENT, "linear_proj", "linear_fc1", "linear_fc2", "router"],
    "qwen3_next": ["in_proj", "out_proj", *mm.LINEARS],
    "nemotron_h": ["in_proj", "out_proj", *mm.LINEARS],
    "gpt_oss": mm.LINEARS,
    "qwen2_5_vl": [*mm.LINEARS, "*visual.blocks.*.attn.qkv", "*visual.blocks.*.mlp.gate_proj", "*visual.merger.mlp.2"],
    "qwen3_vl": [*mm.LINEARS, "*vision_model.blocks.*.attn.proj"],
    "qwen3_vl_moe": mm.LINEARS,
}


def adapt(kind: str, chunks: list[Any], targets: list[str] | None = None, **options: Any) -> None:
    """Put Megatron-Bridge's LoRA on its layers (default: `TARGETS`), with an effect, and with replicas that agree."""
    from megatron.bridge.peft import lora, lora_layers

    router, forward = lora_layers.LoRATopKRouter, lora_layers.LoRATopKRouter.__dict__["forward"]
    if forward.__code__.co_argcount == 2:  # see `megatron_models.bridge`
        router.forward = lambda self, x, padding_mask=None: forward(self, x)
    for i, chunk in enumerate(chunks):
        chunks[i] = lora.LoRA(target_modules=targets or TARGETS[kind], dim=4, alpha=6, **options)(chunk, training=False)
        for name, parameter in chunks[i].named_parameters():
            if ".linear_in." in name or ".linear_out." in name:
                cut, expert = getattr(parameter, "tensor_model_parallel", False), ".experts." in name
                at = ps.get_expert_tensor_parallel_rank() if expert else ps.get_tensor_model_parallel_rank()
                rank = (at if cut else 0) + (10 * ps.get_expert_model_parallel_rank() if expert else 0)
                torch.manual_seed(1000 * mm.hash_of(name) + rank)
                parameter.data.copy_(torch.randn(parameter.shape) * 0.1)


class PerExpert(nn.Module):
    """A linear for each local expert, in one parameter."""

    def __init__(self, experts: int, into: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out, into))

    def forward(self, x: Tensor, splits: Any) -> tuple[Tensor, None]:
        parts = zip(x.split(list(map(int, splits))), self.weight, strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts]), None


class SharedOuter(nn.Module):
    """As `SharedOuterGroupedExpertAdapter` of Megatron-Bridge 0.6 (issue 3981): of fc1 lora_A is one for all experts,
    of fc2 lora_B; the other half is of each expert."""

    def __init__(self, base: Any, dim: int, alpha: int) -> None:
        super().__init__()
        column = type(base).__name__ == "TEColumnParallelGroupedLinear"
        made = {"config": base.config, "bias": False, "init_method": nn.init.zeros_, "is_expert": True}
        if column:
            self.linear_in: Any = ColumnParallelLinear(base.in_features, dim, gather_output=True, **made)
            self.linear_out: Any = PerExpert(base.num_gemms, dim, base.out_features)
        else:
            self.linear_in = PerExpert(base.num_gemms, base.in_features, dim)
            row = {"input_is_parallel": True, "skip_bias_add": True}
            self.linear_out = RowParallelLinear(dim, base.out_features, **row, **made)
        self.dim, self.alpha, self.activation, self.column = dim, alpha, nn.Identity(), column
        base.register_forward_pre_hook(lambda module, args: setattr(self, "splits", args[1]))

    def forward(self, x: Tensor) -> Tensor:
        down = self.linear_in(x)[0] if self.column else self.linear_in(x, self.splits)[0]
        up = self.linear_out(down, self.splits)[0] if self.column else self.linear_out(down)[0]
        return up * (self.alpha / self.dim)


SharedOuter.__module__, SharedOuter.__qualname__ = "megatron.bridge.peft.utils", "SharedOuterGroupedExpertAdapter"


def _own_shared_outer(adapter: Any, name: str, base: Any) -> Any:
    row = type(base).__name__ == "TERowParallelGroupedLinear"
    return adapter(
        base.in_features, base.out_features, 4, num_local_experts=base.num_gemms, base_linear_name=name, alpha=6,
        activation="identity", input_is_parallel=row, model_parallel_config=base.config,
        params_dtype=base.weight0.dtype,
    )  # fmt: skip


def share_outer(chunks: list[Any]) -> None:
    """Put such adapters on all experts: what is shared is the same on all ranks."""
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.lora_layers import LoRALinear

    for chunk in chunks:
        for name, module in list(chunk.named_modules()):
            if name.endswith((".experts.linear_fc1", ".experts.linear_fc2")):
                own = getattr(utils, "SharedOuterGroupedExpertAdapter", None)  # Megatron-Bridge's, since 0.5
                adapter = SharedOuter(module, 4, 6) if own is None else _own_shared_outer(own, name, module)
                for key, parameter in adapter.named_parameters():
                    rank = ps.get_expert_model_parallel_rank() if parameter.dim() == 3 else 0
                    torch.manual_seed(1000 * mm.hash_of(name + key) + rank)
                    parameter.data.copy_(torch.randn(parameter.shape) * 0.1)
                parent, _, key = name.rpartition(".")
                setattr(chunk.get_submodule(parent), key, LoRALinear(module, adapter))


def stock_merges() -> bool:
    """Megatron-Bridge's own export merges DeepSeek-V3 in float32, since 0.5. Of the others 0.5.1 merges some layers
    otherwise than their forwards add (Mamba's in_proj over ranks, towers), or ends in an error."""
    return tuple(map(int, version("megatron-bridge").split(".")[:2])) >= (0, 5)


def boxes(shard: Any) -> dict[str, Any]:
    return {"shape": shard.shape, "whole": shard.whole, "pieces": [(p.start, p.tensor.clone()) for p in shard.pieces]}


def work(
    kind: str, folder: str, grid: mm.Grid, dtype: torch.dtype, bucket_bytes: int, cut: bool, experts: str = ""
) -> dict[str, Any]:
    """On each rank: what the forwards say with adapters, inside `merged` and after it; streams; the adapters as they
    lie; what Megatron-Bridge's mappings make of the names, and its own export; and what adapter mode sends.

    Args:
        experts: "": all of a rank under one adapter; "outer": see `share_outer`; "each": under one of its own.
    """
    bridge, chunks = build(kind, folder, grid, dtype, cut=cut)
    plain = logits(kind, chunks)
    if experts == "outer":
        share_outer(chunks)
    else:
        adapt(kind, chunks, **({"share_expert_adapters": False, "normalize_moe_lora": True} if experts else {}))
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    before = [p.detach().clone() for p in parameters]
    answer: dict[str, Any] = {"plain": plain, "adapters": logits(kind, chunks), "tower": tower(kind, chunks)}
    model = Chunks(chunks)
    for _ in range(2):  # the second time with the plans of the first
        with merged(model):
            answer["merged"], answer["tower merged"] = logits(kind, chunks), tower(kind, chunks)
    answer["after"] = logits(kind, chunks)
    stream = MergedWeights(model, bucket_bytes=bucket_bytes)
    answer["stream"] = {name: tensor.clone() for name, tensor in stream}
    for name, tensor in stream:
        assert torch.equal(tensor, answer["stream"][name]), f"{name}, the second time"
    assert [name for name, _, _ in stream.metadata()] == list(answer["stream"])
    named = Chunks(chunks, names=bridge_names(bridge._model_bridge.mapping_registry()))
    answer["bridge"] = {name: tensor.clone() for name, tensor in MergedWeights(named)}
    if kind == "deepseek_v3" and stock_merges():
        stock = bridge.export_hf_weights(chunks, cpu=True, show_progress=False)
        answer["stock"] = {weight.param_name: weight.weight.clone() for weight in stock}
    for p, was in zip(parameters, before, strict=True):
        assert torch.equal(p.detach(), was), "a shard after everything"
    found = read(chunks)
    answer["deltas"] = {
        name: [(boxes(f.lora_A), boxes(f.lora_B), f.scaling) for f in factors] for name, factors in found.deltas.items()
    }
    try:
        answer["exported"] = exported(model)
    except UnsupportedAdapter as error:
        answer["refused"] = str(error)
    return answer


def refused(kind: str, folder: str, damage: str) -> str:
    """What reading a damaged model says."""
    if damage == "mtp":
        _, chunks = build(kind, folder, mm.Grid(), torch.float32, mtp_num_layers=1)
    else:
        _, chunks = build(kind, folder, mm.Grid(), torch.float32)
    first = chunks[0]
    attention = [
        layer.self_attention for layer in mm.innermost(first).decoder.layers if hasattr(layer, "self_attention")
    ]
    match damage:
        case "norms less one":
            first.config.layernorm_zero_centered_gamma = True
        case "one norm":
            attention[0].out_norm.zero_centered_gamma = False
            norm = attention[0].out_norm.weight
            found = {name: tensor.clone() for name, tensor in MergedWeights(chunks)}
            assert torch.equal(found["model.layers.0.linear_attn.norm.weight"], norm)
            first.decoder.final_layernorm.zero_centered_gamma = False
        case "another delta net" | "another attention":
            which = attention[damage == "another attention"]
            which.__class__ = type("Another", (type(which),), {"__module__": "mine"})
        case "heads of the delta net":
            first.config.linear_num_value_heads = 2
        case "groups of Mamba":
            first.config.mamba_num_groups = 4
        case "another model with a tower":
            first.__class__ = type("AnotherVL", (nn.Module,), {"__module__": "mine"})
        case "latent rank":
            first.config.kv_lora_rank = 32
        case "value heads":
            first.config.v_head_dim = 24
        case "q alone" | "gate and up":
            from megatron.bridge.peft.canonical_lora import CanonicalLoRA

            targets = ["linear_fc1_gate", "linear_fc1_up"]
            targets = ["linear_q", "linear_k", "linear_v"] if damage == "q alone" else targets
            chunks = [CanonicalLoRA(target_modules=targets, dim=4, alpha=6)(first, training=False)]
    try:
        read(chunks)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"
