"""Tiny models that see images, and their processors, made from scratch: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from families import EXPERTS, FEW, GDN, ROPE35, SHARED, SIZES, Architecture

SPECIAL = (
    "<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|AUDIO|>", "<|IMAGE|>",
    "<|VIDEO|>", "<|vision_bos|>", "<|vision_eos|>", "<|audio_bos|>", "<|audio_eos|>", "<image>", "<video>",
    "<start_of_image>", "<end_of_image>", "<image_soft_token>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<IMG_CONTEXT>",
    "<img>", "</img>", "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
    "<|end_of_video|>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    "\n", "\n\n", "\n\n\n", "\n\n\n\n",
)  # fmt: skip
ID = {token: 256 + number for number, token in enumerate(SPECIAL)}
T: dict[str, Any] = SIZES | {"vocab_size": 320, "max_position_embeddings": 512}
MROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
MROPE3: dict[str, Any] = MROPE | {"mrope_interleaved": True}
CLIP: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
PIXTRAL: dict[str, Any] = CLIP | {"model_type": "pixtral", "head_dim": 32, "image_size": 112}
VISION25: dict[str, Any] = {
    "depth": 2, "hidden_size": 128, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
    "fullatt_block_indexes": [1],
}  # fmt: skip
VISION35: dict[str, Any] = {
    "depth": 3, "hidden_size": 128, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
    "num_position_embeddings": 64, "patch_size": 16,
}  # fmt: skip
VISION3: dict[str, Any] = VISION35 | {"deepstack_visual_indexes": [0, 1]}
QWEN: dict[str, Any] = {f"{kind}_token_id": ID[f"<|{token}|>"] for kind, token in (
    ("vision_start", "vision_start"), ("vision_end", "vision_end"), ("image", "image_pad"), ("video", "video_pad"),
)}  # fmt: skip
QWEN_PROMPT = "<|vision_start|><|image_pad|><|vision_end|>what"
AUDIO: dict[str, Any] = {
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "d_model": 128, "output_dim": 128,
    "n_window": 50,
}  # fmt: skip
_OMNI_IDS = {"audio": "AUDIO", "image": "IMAGE", "video": "VIDEO"}
OMNI: dict[str, Any] = {f"{kind}_token_index": ID[f"<|{token}|>"] for kind, token in _OMNI_IDS.items()}
OMNI_ALL: dict[str, Any] = OMNI | {f"{kind}_token_id": ID[f"<|{token}|>"] for kind, token in (
    *_OMNI_IDS.items(), ("vision_start", "vision_bos"), ("vision_end", "vision_eos"), ("audio_start", "audio_bos"),
    ("audio_end", "audio_eos"),
)}  # fmt: skip
OMNI_TOKENS = {f"{token.strip('<|>')}_token": token for token in SPECIAL[8:12]} | {
    f"{kind}_token": f"<|{token}|>" for kind, token in _OMNI_IDS.items()
}
OMNI_PROMPT = "<|vision_bos|><|IMAGE|><|vision_eos|>what"


def tokenizer(**tokens: str) -> Any:
    """Bytes as tokens, and special ones behind them."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2TokenizerFast

    vocabulary = {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))} | ID
    made: Any = Qwen2TokenizerFast(vocab=vocabulary, merges=[], extra_special_tokens=tokens or list(SPECIAL))
    if tokens:
        made.add_tokens(list(SPECIAL), special_tokens=True)
    made.pad_token = "<|endoftext|>"
    return made


def model(name: str, config: str, **parts: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**parts))

    return make


def processor(name: str, *parts: tuple[str, Mapping[str, Any]], tokens: Mapping[str, str] = {}, **options: Any) -> Any:
    """Return what makes a processor: its parts' classes with their options, and `tokenizer` where one is called so."""

    def make() -> Any:
        import transformers

        made = [
            tokenizer(**tokens) if part == "tokenizer" else getattr(transformers, part)(**some) for part, some in parts
        ]
        return getattr(transformers, name)(*made, chat_template="", **options)

    return make


TOKENIZER: tuple[str, Mapping[str, Any]] = ("tokenizer", {})
QWEN_IMAGES: dict[str, Any] = {
    "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 128 * 128},
}  # fmt: skip
QWEN3 = processor("Qwen3VLProcessor", ("Qwen2VLImageProcessor", QWEN_IMAGES), TOKENIZER, ("Qwen3VLVideoProcessor", {}))


def qwen(release: str) -> Any:
    return processor(
        f"{release}Processor", ("Qwen2VLImageProcessor", {}), TOKENIZER, ("Qwen2VLVideoProcessor", {})
    )  # fmt: skip


def thinker(moe: bool) -> dict[str, Any]:
    text = T | {"tie_word_embeddings": False, "rope_parameters": MROPE3 if moe else MROPE}
    bins = {"num_mel_bins": 128, "downsample_hidden_size": 32, "n_window_infer": 100} if moe else {"num_mel_bins": 80}
    vision = VISION3 | {"image_size": 128, "apply_vit_abs_pos_embed": True} if moe else VISION25
    experts = EXPERTS | FEW | {"head_dim": 32} if moe else {}
    return {"text_config": text | experts, "vision_config": vision, "audio_config": AUDIO | bins, **OMNI_ALL}


TALKER: dict[str, Any] = {k: v for k, v in T.items() if k != "pad_token_id"} | OMNI | {
    "embedding_size": 128, "rope_parameters": MROPE, "head_dim": 32,
}  # fmt: skip
VOICE: dict[str, Any] = {
    "dit_config": {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "ff_mult": 1, "emb_dim": 32,
        "head_dim": 32, "num_embeds": 64, "mel_dim": 16, "enc_emb_dim": 32, "enc_dim": 32,
        "enc_channels": [32, 32, 32, 32, 96], "enc_attention_channels": 32, "enc_se_channels": 32,
    },
    "bigvgan_config": {
        "mel_dim": 16, "upsample_initial_channel": 32, "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]], "upsample_rates": [2], "upsample_kernel_sizes": [4],
    },
}  # fmt: skip
_EVERY: dict[str, Any] = {"limit_mm_per_prompt": {"image": 1, "video": 1, "audio": 1}}


def seen(
    title: str, name: str, make: Callable[[], Any], see: Callable[[], Any] | None, prompt: str, **more: Any
) -> Architecture:
    """Return a family that sees images; `limit_mm_per_prompt` of 0 where there is no processor."""
    engine = {"limit_mm_per_prompt": {"image": int(see is not None), "video": 0}, "skip_mm_profiling": True}
    engine |= more.pop("engine", {})
    return Architecture(
        name, label=title, kind="image", make=make, processor=see, prompt=prompt, engine=engine, **more
    )  # fmt: skip


def generating(family: str, **parts: Any) -> tuple[str, Callable[[], Any]]:
    """Return the class `{family}ForConditionalGeneration`, and what makes one."""
    name = f"{family}ForConditionalGeneration"
    return name, model(name, f"{family}Config", **parts)


def omni(moe: bool, talks: bool) -> Callable[[], Any]:
    family = "Qwen3OmniMoe" if moe else "Qwen2_5Omni"
    voice = {"talker_config": TALKER, "token2wav_config": VOICE} if talks else {}
    parts = {"thinker_config": thinker(moe), "enable_audio_output": talks, **voice}
    return generating(family, **parts)[1]


def heard(name: str, moe: bool) -> Any:
    images = ("Qwen2VLImageProcessor", QWEN_IMAGES if moe else {})
    sound = ("WhisperFeatureExtractor", {"feature_size": 128 if moe else 80})
    return processor(name, images, ("Qwen2VLVideoProcessor", {}), sound, TOKENIZER, tokens=OMNI_TOKENS)


def qwen3_vl(title: str, moe: bool = False, tied: bool = False) -> Architecture:
    text = T | {"head_dim": 32, "rope_parameters": MROPE3, "tie_word_embeddings": tied} | (EXPERTS | FEW if moe else {})
    name, make = generating(
        "Qwen3VLMoe" if moe else "Qwen3VL", text_config=text, vision_config=VISION3, tie_word_embeddings=tied, **QWEN
    )
    return seen(title, name, make, QWEN3, QWEN_PROMPT, experts=moe, gpu=True)


def qwen3_5(title: str, moe: bool = False) -> Architecture:
    text = T | GDN | {"rope_parameters": ROPE35} | (EXPERTS | FEW | SHARED if moe else {})
    name, make = generating("Qwen3_5Moe" if moe else "Qwen3_5", text_config=text, vision_config=VISION35, **QWEN)
    return seen(title, name, make, QWEN3, QWEN_PROMPT, experts=moe, gpu=True, dtype="bfloat16")


WHOLE: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "max_position_embeddings": 4096,
}  # fmt: skip
WHOLE_VISION: dict[str, Any] = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip


def qwen2_5_vl(title: str, text: dict[str, Any] = T, vision: dict[str, Any] = VISION25, **more: Any) -> Any:
    rope = {"rope_parameters": MROPE if text is T else MROPE | {"mrope_section": [16, 24, 24]}}
    said = T | text | rope | {"tie_word_embeddings": False}
    name, make = generating("Qwen2_5_VL", text_config=said, vision_config=vision, tie_word_embeddings=False, **QWEN)
    return seen(title, name, make, qwen("Qwen2_5_VL"), QWEN_PROMPT, gpu=True, **more)


def llava(title: str, see: Any, prompt: str, vision: Mapping[str, Any], text: str, **parts: Any) -> Architecture:
    said = T | {"model_type": text} | ({"head_dim": 32} if text == "mistral" else {})
    name, make = generating("Llava", text_config=said, vision_config=vision, **parts)
    last = r"vision_tower.*layers\.1\." if "vision_feature_layer" not in parts else "none"  # it takes the one before
    return seen(title, name, make, see, prompt, bare=last)


def _gemma() -> Architecture:
    text = T | {
        "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    ids = {"boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"}
    ids |= {"image_token_index": "<image_soft_token>"}
    name, make = generating(
        "Gemma3", text_config=text, vision_config=CLIP | {"vision_use_head": False}, mm_tokens_per_image=4,
        **{key: ID[token] for key, token in ids.items()},
    )  # fmt: skip
    tokens = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    see = processor(
        "Gemma3Processor", ("Gemma3ImageProcessor", {"size": {"height": 56, "width": 56}}), TOKENIZER, tokens=tokens,
        image_seq_length=4,
    )  # fmt: skip
    return seen("Gemma-3", name, make, see, "<start_of_image>what")


def _onevision() -> Architecture:
    pinpoints = {"image_grid_pinpoints": [[56, 56], [56, 112]]}
    vision = CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False}
    ids = {"image_token_index": ID["<image>"], "video_token_index": ID["<video>"]}
    name, make = generating(
        "LlavaOnevision", text_config=T | {"model_type": "qwen2"}, vision_config=vision, **ids, **pinpoints
    )
    see = processor(
        "LlavaOnevisionProcessor",
        ("LlavaOnevisionImageProcessor", {"size": {"height": 56, "width": 56}, **pinpoints}),
        TOKENIZER, ("LlavaOnevisionVideoProcessor", {}),
        tokens={"image_token": "<image>", "video_token": "<video>"}, num_image_tokens=16,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    return seen("LLaVA-OneVision", name, make, see, "<image>what")


def _pixtral(name: str, merge: int) -> Any:
    images = ("PixtralImageProcessor", {"size": {"longest_edge": 112}, "patch_size": 14})
    tokens = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
    return processor(name, images, TOKENIZER, tokens=tokens, patch_size=14, spatial_merge_size=merge)


def _mistral() -> Architecture:
    name, make = generating(
        "Mistral3", text_config=T | {"model_type": "mistral", "head_dim": 32}, vision_config=PIXTRAL,
        image_token_index=ID["[IMG]"], spatial_merge_size=2, projector_hidden_act="gelu",
    )  # fmt: skip
    return seen("Mistral Small 3", name, make, _pixtral("PixtralProcessor", 2), "[IMG]what")


def _internvl() -> Architecture:
    vision = CLIP | {"image_size": [56, 56], "patch_size": [14, 14]}
    ids = {"image_token_id": ID["<IMG_CONTEXT>"], "image_seq_length": 4, "downsample_ratio": 0.5}
    name, make = generating("InternVL", text_config=T | {"model_type": "qwen2"}, vision_config=vision, **ids)
    tokens = {
        "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }  # fmt: skip
    images = ("GotOcr2ImageProcessor", {"size": {"height": 56, "width": 56}, "crop_to_patches": False})
    see = processor(
        "InternVLProcessor", images, TOKENIZER, ("InternVLVideoProcessor", {}), tokens=tokens, image_seq_length=4
    )
    return seen("InternVL 3", name, make, see, "<IMG_CONTEXT>what")


def _glm(moe: bool) -> Architecture:
    kinds = ("image", "image"), ("video", "video")
    ids = {f"{kind}_token_id": ID[f"<|{token}|>"] for kind, token in kinds} | {
        f"{kind}_{end}_token_id": ID[f"<|{edge}_of_{kind}|>"]
        for kind in ("image", "video")
        for end, edge in (("start", "begin"), ("end", "end"))
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    vision = {
        "depth": 2, "hidden_size": 128, "intermediate_size": 256, "out_hidden_size": 128, "num_heads": 4,
        "image_size": 112, "patch_size": 14, "spatial_merge_size": 2,
    }  # fmt: skip
    text = T | {"rope_parameters": rope, "head_dim": 32, "attention_bias": True}
    text |= FEW | {
        "use_qk_norm": False, "n_routed_experts": 4, "moe_intermediate_size": 64, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    } if moe else {}  # fmt: skip
    name, make = generating("Glm4vMoe" if moe else "Glm4v", text_config=text, vision_config=vision, **ids)
    see = processor(
        "Glm4vProcessor", ("Glm4vImageProcessor", {"size": {"shortest_edge": 56 * 56, "longest_edge": 128 * 128}}),
        TOKENIZER, ("Glm4vVideoProcessor", {}), tokens={"image_token": "<|image|>", "video_token": "<|video|>"},
    )  # fmt: skip
    title = "GLM-4.5V" if moe else "GLM-4.1V"
    return seen(title, name, make, see, "<|begin_of_image|><|image|><|end_of_image|>what", experts=moe)


CLIP_PROCESSOR = processor(
    "LlavaProcessor",
    ("CLIPImageProcessor", {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}),
    TOKENIZER, tokens={"image_token": "<image>"}, patch_size=14, vision_feature_select_strategy="default",
    num_additional_image_tokens=1,
)  # fmt: skip

SEEN: Sequence[Architecture] = (
    seen("Qwen2-VL", *generating(
        "Qwen2VL", text_config=T | {"rope_parameters": MROPE}, vision_config={
            "depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 2,
        }, **QWEN,
    ), qwen("Qwen2VL"), QWEN_PROMPT),
    qwen2_5_vl("Qwen2.5-VL"),
    qwen3_vl("Qwen3-VL"),
    qwen3_vl("Qwen3-VL, tied", tied=True),
    qwen3_vl("Qwen3-VL-MoE", moe=True),
    qwen3_5("Qwen3.5"),
    qwen3_5("Qwen3.5-MoE", moe=True),
    seen("Qwen2.5-Omni, with its talker", "Qwen2_5OmniForConditionalGeneration", omni(False, True),
         heard("Qwen2_5OmniProcessor", False), OMNI_PROMPT, engine=_EVERY),
    seen("Qwen2.5-Omni, thinker", "Qwen2_5OmniForConditionalGeneration", omni(False, False),
         heard("Qwen2_5OmniProcessor", False), OMNI_PROMPT, engine=_EVERY),
    seen("Qwen3-Omni, thinker", "Qwen3OmniMoeForConditionalGeneration", omni(True, False),
         heard("Qwen3OmniMoeProcessor", True), OMNI_PROMPT, engine=_EVERY, experts=True),
    _gemma(),
    llava("LLaVA", CLIP_PROCESSOR, "<image>what", CLIP | {"model_type": "clip_vision_model", "projection_dim": 64},
          "llama", image_token_index=ID["<image>"], image_seq_length=16),
    _onevision(),
    llava("Pixtral", _pixtral("PixtralProcessor", 1), "[IMG]what", PIXTRAL, "mistral", image_token_index=ID["[IMG]"],
          vision_feature_layer=-1, vision_feature_select_strategy="full"),
    _mistral(),
    _internvl(),
    _glm(False),
    _glm(True),
    qwen2_5_vl("Qwen2.5-VL-7B, whole", WHOLE, WHOLE_VISION, cpu=False, why="8 billion weights",
        large=True),
)  # fmt: skip
