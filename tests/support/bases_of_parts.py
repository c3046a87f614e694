"""Tiny bases with images or sound, or of two halves, of which adapters are trained on a part."""

from __future__ import annotations

from typing import Any

import models
import torch
import transformers

TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
ROTARY = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
IMAGES = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_DEEP = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def llava_onevision() -> Any:
    text = transformers.Qwen2Config(**{k: v for k, v in TEXT.items() if k != "head_dim"})
    vision = transformers.SiglipVisionConfig(**CLIP)
    config = transformers.LlavaOnevisionConfig(
        text_config=text, vision_config=vision, image_token_index=60, video_token_index=61
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def paligemma() -> Any:
    config = transformers.PaliGemmaConfig(
        text_config=transformers.GemmaConfig(**TEXT),
        vision_config=transformers.SiglipVisionConfig(**CLIP),
        image_token_index=60,
        projection_dim=32,
        hidden_size=32,
    )
    return transformers.PaliGemmaForConditionalGeneration(config)


def internvl() -> Any:
    text = transformers.Qwen2Config(**{k: v for k, v in TEXT.items() if k != "head_dim"}, tie_word_embeddings=False)
    vision = transformers.InternVLVisionConfig(**CLIP | {"image_size": [8, 8], "patch_size": [4, 4]})
    config = transformers.InternVLConfig(text_config=text, vision_config=vision, image_token_id=60)
    return transformers.InternVLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    config = transformers.Qwen3VLConfig(text_config=TEXT | {"rope_parameters": ROTARY}, vision_config=_DEEP, **IMAGES)
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe() -> Any:
    config = transformers.Qwen3VLMoeConfig(
        text_config=TEXT | _MOE | {"rope_parameters": ROTARY}, vision_config=_DEEP, **IMAGES
    )
    return models.eager(transformers.Qwen3VLMoeForConditionalGeneration(config))


def qwen3_omni() -> Any:
    text = TEXT | _MOE | {"rope_parameters": ROTARY}
    audio = {"num_mel_bins": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    audio |= {"d_model": 32, "output_dim": 32, "n_window": 4, "max_source_positions": 32, "downsample_hidden_size": 8}
    talker = TEXT | _MOE | {"rope_parameters": ROTARY, "shared_expert_intermediate_size": 16}
    predictor = TEXT | {"num_code_groups": 4, "num_hidden_layers": 1}
    wav = {"codebook_size": 16, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    wav |= {"intermediate_size": 32, "num_hidden_layers": 1, "num_quantizers": 4, "decoder_dim": 32}
    codes = {"num_code_groups": 4, "thinker_hidden_size": 32, "spatial_merge_size": 2}
    config = transformers.Qwen3OmniMoeConfig(
        thinker_config={"text_config": text, "audio_config": audio, "vision_config": _DEEP},
        talker_config=codes | {"text_config": talker, "code_predictor_config": predictor},
        code2wav_config=wav,
        enable_audio_output=True,
    )
    model: Any = models.eager(transformers.Qwen3OmniMoeForConditionalGeneration(config))
    with torch.no_grad():
        for parameter in model.talker.parameters():  # of which transformers leaves some as they come
            parameter.normal_(std=0.02)
    return model


def t5() -> Any:
    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
