"""The tiny models that `architectures.py` tries: of transformers' classes, with configurations as the hub's have."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD: dict[str, Any] = {"head_dim": 32}
FEW: dict[str, Any] = {"num_experts_per_tok": 2}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 64,
}
LATENT: dict[str, Any] = MLA | {
    "q_lora_rank": 32, "n_shared_experts": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
CPU_MLA: dict[str, Any] = {"attention_backend": "CPU_MLA"}
GPU_MLA: dict[str, Any] = {"qk_nope_head_dim": 128, "v_head_dim": 128}
"""On GPUs vLLM's kernels have the sizes of real checkpoints alone: of DeepSeek and Kimi, and of GLM."""
GLM_MLA: dict[str, Any] = {"qk_nope_head_dim": 192, "v_head_dim": 256}


def yarn(mscale: float) -> dict[str, Any]:
    """Return the positions of DeepSeek's checkpoints. With plain ones, as of GLM-4.7-Flash, vLLM 0.32's kernel for CPUs
    takes the heads of latent attention for tokens (tests/vllm/test_vllm_megatron_kinds.py)."""
    scales = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": mscale, "mscale_all_dim": mscale}
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "beta_fast": 32, "beta_slow": 1} | scales}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A tiny model of transformers.

    Args:
        name: its class is `{name}ForCausalLM`, or `name`; its configuration `{config or name}Config`.
        sizes: beside `SIZES`, or in their place.
        experts: whether PEFT adapts fused experts, and vLLM has no LoRA layers for them on a CPU.
        engine: options of the engine.
        dtype: of weights on a CPU. vLLM computes linear attention there in bfloat16 alone.
        kind: "text", "image" (a tower beside the language model) or "hybrid" (layers without attention, or with
            another).
        make: the model, where sizes do not say all.
        processor: of its images; None where it is asked with text alone.
        prompt: text with one image.
        gpu: tried on a GPU: CPUs cannot run it, or do so otherwise.
        cpu: tried on a CPU.
        why: what vLLM lacks on a CPU, where it is tried on a GPU alone.
        bare: pattern of the layers that get no adapter: no answer depends on them, or transformers reads their weights
            past PEFT's layer.
        own: why vLLM's answers on a CPU are others than transformers', before any push.
        large: made on the GPU: random numbers of a CPU take minutes.
    """

    name: str
    sizes: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    experts: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    dtype: str = "float32"
    kind: str = "text"
    make: Callable[[], Any] | None = None
    processor: Callable[[], Any] | None = None
    prompt: str = ""
    gpu: bool = False
    cpu: bool = True
    why: str = ""
    bare: str = "talker|token2wav|code2wav"
    own: str = ""
    large: bool = False

    @property
    def title(self) -> str:
        return self.label or self.name


def build(architecture: Architecture) -> Any:
    """Make the model, with no parameter at the value that it starts with: a bias of zeros would be right by
    accident."""
    if architecture.large:
        with torch.device("cuda"):
            return build(replace(architecture, large=False))
    import transformers

    torch.manual_seed(0)
    if architecture.make is not None:
        model = architecture.make()
    else:
        name = architecture.name
        model_class = getattr(transformers, name, None) or getattr(transformers, f"{name}ForCausalLM")
        config_class = getattr(transformers, f"{architecture.config or name}Config")
        # Gemma 2's soft cap is in the eager attention only.
        model = model_class(config_class(**SIZES | architecture.sizes, attn_implementation="eager"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return _eager(model)


def _eager(model: Any) -> Any:
    """Return a model whose experts are computed by plain code, which adapters on them take part in."""
    for part in (model.config, *(getattr(model.config, key, None) for key in ("text_config", "thinker_config"))):
        if part is not None:
            part._experts_implementation = "eager"
    return model.eval()


def published(model: Any, folder: Path) -> Any:
    """Save a model as the hub has it, and return it as transformers loads it from there: then what it saves and streams
    has the hub's names."""
    save(model, folder)
    return _eager(type(model).from_pretrained(folder, dtype=model.dtype))


def save(model: Any, folder: Path) -> None:
    """Save a model as the hub has it."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    turned = type(model).__name__ == "Qwen3VLMoeForConditionalGeneration"
    deep = getattr(getattr(model.config, "vision_config", None), "model_type", "") in _DEEP
    for file in folder.glob("*.safetensors") if turned or deep else ():
        held = load_file(file)
        if turned:  # transformers saves them the other way
            held = {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in held.items()}
        if deep:
            held = {
                re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", n): t for n, t in held.items()
            }
        save_file(held, file, {"format": "pt"})


_DEEP = ("clip_vision_model", "siglip_vision_model")
"""Towers that lie one level deeper on the hub than in a model that transformers 5 has made."""


HEADLESS = "its head is the embedding: an untied one has no place"
ROTARY = "its rotary kernel takes heads for tokens"


def tied(name: str, tie: bool, own: str = "", **sizes: Any) -> Architecture:
    title = f"{name}, {'tied' if tie else 'untied'}"
    return Architecture(name, sizes | {"tie_word_embeddings": tie}, label=title, own=own)


def moe(name: str, own: str = "", **sizes: Any) -> Architecture:
    return Architecture(name, FEW | sizes, experts=True, own=own)


TEXT: tuple[Architecture, ...] = (
    tied("Qwen2", True),
    tied("Qwen2", False),
    tied("Llama", True),
    tied("Llama", False),
    tied("Qwen3", False, **HEAD),
    tied("Mistral", False),
    tied("Gemma", True, **HEAD),
    tied("Gemma2", True, **HEAD, query_pre_attn_scalar=32),
    tied("Gemma2", False, HEADLESS, **HEAD, query_pre_attn_scalar=32),
    Architecture("Gemma3", HEAD | {"query_pre_attn_scalar": 32}, config="Gemma3Text"),
    Architecture("Gemma4", HEAD | {
        "global_head_dim": 32, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 0,
    }, config="Gemma4Text"),
    tied("Cohere", True),
    tied("Cohere", False, HEADLESS),
    tied("Cohere2", True),
    Architecture("Phi"),
    Architecture("Phi3"),
    Architecture("Olmo"),
    Architecture("Olmo2"),
    Architecture("Olmo3"),
    Architecture("Granite"),
    Architecture("StableLm"),
    Architecture("Starcoder2"),
    Architecture("Nemotron"),
    Architecture("Apertus", own="xIELU's parameters are bfloat16 in any engine"),
    Architecture("Exaone4", {"sliding_window": 64, "sliding_window_pattern": 4}),
    Architecture("Ernie4_5", HEAD),
    Architecture("Glm", HEAD),
    Architecture("Glm4", HEAD),
    Architecture("SmolLM3"),
    Architecture("Helium", HEAD),
    Architecture("Arcee"),
    Architecture("SeedOss", HEAD),
    Architecture("GPT2LMHeadModel", config="GPT2"),
    Architecture("GPTNeoX", {"num_key_value_heads": 4}),
    Architecture("GPTJ", {"rotary_dim": 32}),
    Architecture("Bloom"),
    Architecture("OPT", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    Architecture("Falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": False}),
    moe("Mixtral", num_local_experts=4),
    moe("Qwen2Moe", num_experts=4, moe_intermediate_size=64, shared_expert_intermediate_size=64),
    moe("Qwen3Moe", **HEAD, num_experts=4, moe_intermediate_size=64),
    moe("Olmoe", num_experts=4),
    moe("GptOss", **HEAD, num_local_experts=4),
    moe("GraniteMoe", num_local_experts=4),
    moe("Ernie4_5_Moe", "its router leaves `e_score_correction_bias` out", moe_num_experts=4, moe_k=2,
        moe_intermediate_size=64, moe_num_shared_experts=1),
    moe("Glm4Moe", **HEAD, n_routed_experts=4, moe_intermediate_size=64, first_k_dense_replace=1,
        n_group=1, topk_group=1),
    moe("FlexOlmo", num_experts=4),
    Architecture("DeepseekV2", FEW | MLA | yarn(0.707), experts=True, engine=CPU_MLA),
    Architecture("DeepseekV3", FEW | LATENT | yarn(1.0), experts=True, engine=CPU_MLA),
    moe("HunYuanMoEV1", **HEAD, num_experts=4, moe_topk=2),
    moe("GraniteMoeShared", num_local_experts=4, shared_intermediate_size=64),
)  # fmt: skip


GDN: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Gated delta nets, in the sizes that their kernels have."""
EXPERTS: dict[str, Any] = {"norm_topk_prob": True, "num_experts": 4, "moe_intermediate_size": 96}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 64}
ROPE35: dict[str, Any] = {
    "rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
NEMOTRON: dict[str, Any] = {
    "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4,
    "chunk_size": 64, "num_hidden_layers": 3,
}  # fmt: skip
BLOCKS: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "conv_dim": 128, "block_dim": 128}


TRITON = "its layers call Triton (`triton.set_allocator`)"
GATELESS = "experts without a gate (`is_act_and_mul=False is supported only for CUDA, XPU and ROCm`)"
SCAN = "Mamba-1 (`selective_scan_fwd` has no kernel)"


def hybrid(
    name: str, config: str = "", label: str = "", *, why: str = "", own: str = "", bare: str = "none", **sizes: Any
) -> Architecture:
    experts = bool({"num_experts", "n_routed_experts", "num_local_experts"} & {k for k, v in sizes.items() if v})
    return Architecture(
        name, FEW | sizes if experts else sizes, config, experts, label=label or name, kind="hybrid", gpu=True,
        cpu=not why, why=why, dtype="bfloat16" if "linear_num_value_heads" in sizes else "float32", bare=bare,
        own=own,
    )  # fmt: skip


HYBRIDS: tuple[Architecture, ...] = (
    hybrid("Qwen3Next", **GDN, **EXPERTS, **SHARED, partial_rotary_factor=0.25),
    hybrid("Qwen3_5", "Qwen3_5Text", "Qwen3.5, text", **GDN, rope_parameters=ROPE35),
    hybrid("Qwen3_5Moe", "Qwen3_5MoeText", "Qwen3.5-MoE, text", **GDN, **EXPERTS, **SHARED,
           rope_parameters=ROPE35),
    hybrid("OlmoHybrid", why=TRITON, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4,
           linear_num_key_heads=4, linear_key_head_dim=32, linear_value_head_dim=32),
    hybrid("NemotronH", label="Nemotron-H", bare="out_proj", **NEMOTRON,
           layers_block_type=["mamba", "attention", "mlp"]),
    hybrid("NemotronH", label="Nemotron-H, MoE", why=GATELESS, bare="out_proj", **NEMOTRON,
           layers_block_type=["mamba", "attention", "moe"], n_routed_experts=4, moe_intermediate_size=64,
           moe_shared_expert_intermediate_size=64, n_shared_experts=1, n_group=1, topk_group=1),
    hybrid("GraniteMoeHybrid", label="Granite 4", **MAMBA2, layer_types=["mamba", "attention"],
           mamba_expand=2, num_local_experts=4, shared_intermediate_size=64),
    hybrid("FalconH1", label="Falcon-H1", why="not tried there", bare="out_proj", **HEAD, **MAMBA2, mamba_d_ssm=256,
           mamba_chunk_size=64),
    hybrid("Jamba", why=SCAN, bare="dt_proj", attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
           expert_layer_offset=1, num_experts=4, mamba_d_state=16, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=8,
           use_mamba_kernels=False),
    hybrid("Lfm2", own=ROTARY, **BLOCKS, block_ff_dim=256, block_multiple_of=64, block_ffn_dim_multiplier=1.0,
           block_auto_adjust_ff_dim=False),
    hybrid("Lfm2Moe", label="Lfm2-MoE", own=ROTARY, **BLOCKS, num_experts=4, moe_intermediate_size=64,
           num_dense_layers=1),
    hybrid("Mamba", why=SCAN, bare="out_proj|dt_proj", state_size=16),
    hybrid("KimiLinear", label="Kimi-Linear", why="not tried there", num_local_experts=4,
           **{k: v for k, v in (MLA | GPU_MLA).items() if "group" not in k},
           n_shared_experts=1, linear_num_heads=4, linear_head_dim=128, moe_layer_freq=1,
           layer_types=["linear_attention", "full_attention"], mla_use_nope=True, linear_attn_config={
               "kda_layers": [1], "full_attn_layers": [2], "head_dim": 128, "num_heads": 4, "short_conv_kernel_size": 4,
           }),
)  # fmt: skip
LATENT_ATTENTION: tuple[Architecture, ...] = tuple(
    Architecture(name, FEW | LATENT | heads, experts=True, label=label, gpu=True, cpu=False, why=why, engine=engine)
    for name, label, heads, why, engine in (
        ("DeepseekV3", "DeepSeek-V3", GPU_MLA, "its own kernels; a CPU's are the row DeepseekV3", {}),
        (
            "DeepseekV3",
            "DeepSeek-V3, FP8 cache",
            GPU_MLA,
            "a cache of FP8 for latent attention",
            {"kv_cache_dtype": "fp8"},
        ),
        ("Glm4MoeLite", "GLM-4.7-Flash", GLM_MLA, "its own kernels; a CPU's rotates plain positions wrongly", {}),
    )
)
SPARSE: tuple[Architecture, ...] = (
    Architecture("MiniMaxM2", FEW | HEAD | {
        "num_local_experts": 4, "intermediate_size": 64, "rotary_dim": 16, "partial_rotary_factor": 0.5,
        "scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True,
    }, experts=True, label="MiniMax-M2", gpu=True, cpu=False,
       why='a router of sigmoids without groups (`assert self.scoring_func == "softmax"`)'),
    Architecture("GptOss", FEW | HEAD | {"num_local_experts": 4}, experts=True, label="gpt-oss", gpu=True, cpu=False,
                 why="its own kernels; a CPU's are the row GptOss"),
)  # fmt: skip
