"""Adapters whose names are not the base's: trained on a part of it, under an older transformers, or inside wrappers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from checkpoints import tensors
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_merge import InvalidInput, merge_checkpoint, save_merged
from lora_merge.models.peft.folder import read_folder
from lora_merge.saving.inspect import inspect_adapter

transformers = pytest.importorskip("transformers", minversion="5")
_TEXT = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0},
}
_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_DELTA = {
    **{"layer_types": ["full_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
}
_QWEN_VISION = {
    **{"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32},
    **{"patch_size": 4, "num_position_embeddings": 16},
}
_IMAGES = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
_CLIP = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 8, "patch_size": 4},
}


def qwen3_5() -> Any:
    config = transformers.Qwen3_5Config(text_config=_TEXT | _DELTA, vision_config=_QWEN_VISION, **_IMAGES)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def qwen3_5_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16}
    config = transformers.Qwen3_5MoeConfig(text_config=_TEXT | _DELTA | experts, vision_config=_QWEN_VISION, **_IMAGES)
    return models.eager(transformers.Qwen3_5MoeForConditionalGeneration(config))


def qwen2_vl() -> Any:
    text = {k: v for k, v in _TEXT.items() if k != "head_dim"} | {"rope_parameters": _ROTARY}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **_IMAGES)
    return transformers.Qwen2VLForConditionalGeneration(config)


def llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**_CLIP),
        text_config=transformers.LlamaConfig(**_TEXT),
        image_token_index=60,
    )
    return transformers.LlavaForConditionalGeneration(config)


def gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**_TEXT, query_pre_attn_scalar=16),
        vision_config=transformers.SiglipVisionConfig(**_CLIP),
        mm_tokens_per_image=1,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def mllama() -> Any:
    text = {k: v for k, v in _TEXT.items() if k != "head_dim"} | {"cross_attention_layers": [1]}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_output_dim": 64}
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=60)
    return transformers.MllamaForConditionalGeneration(config)


def omni() -> Any:
    text = {k: v for k, v in _TEXT.items() if k != "head_dim"} | {"rope_parameters": _ROTARY}
    audio = {"num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    audio |= {"d_model": 32, "output_dim": 32, "n_window": 4, "max_source_positions": 32}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "fullatt_block_indexes": [0], "window_size": 8}
    dit = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ff_mult": 2, "emb_dim": 16}
    dit |= {"head_dim": 16, "enc_dim": 16, "enc_emb_dim": 16, "enc_channels": [16] * 4 + [48], "num_embeds": 64}
    dit |= {"enc_attention_channels": 8, "enc_se_channels": 8, "mel_dim": 16}
    config = transformers.Qwen2_5OmniConfig(
        thinker_config={"text_config": text, "audio_config": audio, "vision_config": vision},
        talker_config=text | {"embedding_size": 32, "head_dim": 16, "pad_token_id": 0},
        token2wav_config={"dit_config": dit, "bigvgan_config": {"mel_dim": 16, "upsample_initial_channel": 32}},
        enable_audio_output=True,
    )
    return transformers.Qwen2_5OmniForConditionalGeneration(config)


def qwen3() -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_TEXT))


def masked(kind: str) -> Any:
    sizes = {k: v for k, v in _TEXT.items() if k not in ("head_dim", "num_key_value_heads")}
    if kind == "ModernBert":
        sizes |= {"cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
    return getattr(transformers, f"{kind}ForMaskedLM")(getattr(transformers, f"{kind}Config")(**sizes))


def around(head: type, text: Callable[[Any], nn.Module]) -> Callable[[Path], Any]:
    """A language model around the text model of a base, as those have who take it out of there."""

    def load(folder: Path) -> Any:
        config = transformers.AutoConfig.from_pretrained(folder)
        whole = getattr(transformers, config.architectures[0]).from_pretrained(folder)
        model: Any = head(config.text_config)
        model.model.load_state_dict(text(whole).state_dict())
        model.lm_head.load_state_dict(whole.lm_head.state_dict())
        return model

    return load


def auto(kind: str) -> Callable[[Path], Any]:
    return lambda folder: getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)


@dataclass(frozen=True)
class Part:
    """What an adapter is trained on: a base, how the model is taken out of its folder, and PEFT's options."""

    build: Callable[[], Any]
    load: Callable[[Path], Any]
    options: dict[str, Any]


_SOME = {"target_modules": ["q_proj", "down_proj"]}
_BERT = {"target_modules": ["query", "dense"], "task_type": "FEATURE_EXTRACTION"}
PARTS = {
    "text": Part(qwen3_5, auto("AutoModelForCausalLM"), _SOME | {"modules_to_save": ["lm_head"]}),
    "text, all linear": Part(qwen3_5, auto("AutoModelForCausalLM"), {"target_modules": "all-linear"}),
    "text and head": Part(qwen3_5, auto("AutoModelForCausalLM"), {"target_modules": ["o_proj", "lm_head"]}),
    "experts": Part(
        qwen3_5_moe,
        auto("AutoModelForCausalLM"),
        {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    "text of Gemma": Part(gemma3, around(transformers.Gemma3ForCausalLM, lambda m: m.model.language_model), _SOME),
    "text of LLaVA": Part(
        llava, around(transformers.LlamaForCausalLM, lambda m: m.model.language_model), _SOME | {"bias": "all"}
    ),
    "text of Mllama": Part(mllama, auto("AutoModelForCausalLM"), _SOME),
    "thinker": Part(omni, auto("Qwen2_5OmniThinkerForConditionalGeneration"), _SOME),
    "encoder": Part(qwen3, auto("AutoModel"), _SOME | {"task_type": "FEATURE_EXTRACTION", "use_dora": True}),
    "BERT": Part(lambda: masked("Bert"), auto("AutoModel"), _BERT),
    "ModernBERT": Part(
        lambda: masked("ModernBert"), auto("AutoModel"), {"target_modules": ["Wqkv", "Wo"], "bias": "lora_only"}
    ),
    "images": Part(qwen3_5, auto("AutoModel"), {"target_modules": ["qkv", "q_proj"]}),
}


def trained(model: Any, **options: Any) -> Any:
    torch.manual_seed(5)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options))
    with torch.no_grad():
        for parameter in peft.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return peft.eval()


def answers(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 5, 9, 3]]))[0].double()


def written(build: Callable[[], Any], folder: Path) -> dict[str, Tensor]:
    torch.manual_seed(3)
    build().save_pretrained(folder)
    return tensors(folder)


@pytest.mark.parametrize("kind", PARTS)
def test_trained_on_a_part(kind: str, tmp_path: Path) -> None:
    """The part of the merged checkpoint answers as it did in training; the rest of it is the base's, byte for byte."""
    part, base, adapter, out = PARTS[kind], tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    held = written(part.build, base)
    model = trained(part.load(base), **part.options)
    model.save_pretrained(adapter, save_embedding_layers=False)
    wanted = answers(model)
    (saved,) = merge_checkpoint(base, adapter, out)
    merged = tensors(out)
    assert merged.keys() == held.keys()
    assert sum(not torch.equal(merged[name], held[name]) for name in held) == saved.changed
    assert (answers(part.load(out).eval()) - wanted).abs().max() < 1e-4
    inspected = inspect_adapter(adapter, base)
    assert not inspected.problems
    assert len(inspected.updates) >= 4
    assert json.loads((out / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    save_merged(model, tmp_path / "live")
    again = type(model.get_base_model()).from_pretrained(tmp_path / "live").eval()
    assert (answers(again) - wanted).abs().max() < 1e-4
