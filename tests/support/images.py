"""Tiny models that see images, with processors made from scratch, and images: what trainers train in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from policies import SIZES
from torch import Tensor, nn

TEXT = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SEEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IDS = {token: 256 + i for i, token in enumerate([*TEXT, *SEEN])}
OMNI = ["<|vision_bos|>", "<|vision_eos|>", "<|IMAGE|>", "<|VIDEO|>", "<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
OMNI_IDS = {token: 256 + i for i, token in enumerate([*TEXT, *OMNI])}
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}" + IMAGE + "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TOKENS = {"image_token_id": IDS["<|image_pad|>"], "video_token_id": IDS["<|video_pad|>"],
           "vision_start_token_id": IDS["<|vision_start|>"], "vision_end_token_id": IDS["<|vision_end|>"]}  # fmt: skip
_TEXT = SIZES | {"vocab_size": len(IDS) + 256, "bos_token_id": None, "eos_token_id": IDS["<|im_end|>"],
                 "pad_token_id": IDS["<|endoftext|>"], "tie_word_embeddings": False}  # fmt: skip
_ROPE = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
_VISION = {"hidden_size": 128, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128}


def _qwen2_5_vl() -> nn.Module:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = _TEXT | {"rope_parameters": _ROPE}
    vision = _VISION | {"depth": 2, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_TOKENS)
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl() -> nn.Module:
    """Features of two layers of the tower are added after the first layers of the language model (DeepStack)."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    text = _TEXT | {"head_dim": 32, "num_hidden_layers": 3, "rope_parameters": _ROPE | {"mrope_interleaved": True}}
    vision = _VISION | {"depth": 3, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64, "patch_size": 16}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **_TOKENS)
    return Qwen3VLForConditionalGeneration(config)


def _qwen3_5() -> nn.Module:
    """A layer of linear attention and one of the usual kind; vLLM serves it in bfloat16 on CPUs."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25}  # fmt: skip
    text = _TEXT | {
        "head_dim": 32, "rope_parameters": rope, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    vision = _VISION | {"depth": 2, "num_position_embeddings": 64, "patch_size": 16}
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False, **_TOKENS)
    return Qwen3_5ForConditionalGeneration(config)


def _qwen2_5_omni() -> nn.Module:
    """A tower that sees, one that hears, and a language model: the thinker, without what talks."""
    from transformers import Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration

    kinds = {"image": "IMAGE", "video": "VIDEO", "audio": "AUDIO"}
    ids = {f"{kind}_token_{key}": OMNI_IDS[f"<|{t}|>"] for kind, t in kinds.items() for key in ("id", "index")}
    starts = {f"{kind}_{end}_token_id": OMNI_IDS[f"<|{kind}_{token}|>"]
              for kind in ("vision", "audio") for end, token in (("start", "bos"), ("end", "eos"))}  # fmt: skip
    audio = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128, "d_model": 128,
             "output_dim": 128, "n_window": 50}  # fmt: skip
    text = _TEXT | {"vocab_size": 256 + len(OMNI_IDS), "rope_parameters": _ROPE}
    thinker = {"text_config": text, "audio_config": audio,
               "vision_config": _VISION | {"depth": 2, "fullatt_block_indexes": [1]}}  # fmt: skip
    config = Qwen2_5OmniConfig(thinker_config=thinker | ids | starts, enable_audio_output=False)
    return Qwen2_5OmniForConditionalGeneration(config)


_MODELS: dict[str, Callable[[], nn.Module]] = {
    "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl, "qwen3_5": _qwen3_5, "qwen2_5_omni": _qwen2_5_omni,
}  # fmt: skip


def tokenizer(ids: Mapping[str, int] = IDS, **more: str) -> Any:
    """Return one of bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2TokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))} | dict(ids)
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": "<|endoftext|>"} | more
    return Qwen2TokenizerFast(vocab=vocabulary, merges=[], extra_special_tokens=list(ids), **names)


def processor(kind: str) -> Any:
    """Return one that makes few patches of an image; needs torchvision."""
    import transformers

    pixels: dict[str, Any] = {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}
    if kind == "qwen2_5_omni":
        names = {f"{token.strip('<|>').lower()}_token": token for token in OMNI}
        return transformers.Qwen2_5OmniProcessor(
            transformers.Qwen2VLImageProcessor(**pixels), transformers.Qwen2VLVideoProcessor(),
            transformers.WhisperFeatureExtractor(feature_size=128), tokenizer(OMNI_IDS, **names), chat_template=CHAT,
        )  # fmt: skip
    if kind == "qwen2_5_vl":
        made, video = transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor()
    else:
        made, video = transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor()
        pixels |= {"patch_size": 16}
    return made(transformers.Qwen2VLImageProcessor(**pixels), tokenizer(), video, chat_template=CHAT)


def model(kind: str) -> nn.Module:
    """Return one whose weights are random and large enough to have opinions. It never says a token that stands for a
    part of an image: no trainer could go on from there."""
    torch.manual_seed(0)
    made = _MODELS[kind]()
    said = getattr(made, "thinker", made)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1 and "visual" not in name and "audio" not in name:
                parameter *= 8
        # One feature is the same for all tokens, larger than what layers and adapters add, and tells the head so.
        said.get_input_embeddings().weight[:, 0] = 30
        said.get_output_embeddings().weight[256 + len(TEXT) :, 0] = -6
    return made


def checkpoint(kind: str, folder: Path, dtype: torch.dtype | None = None) -> Path:
    """Save a model and its processor."""
    made = model(kind)
    made.to(dtype or (torch.bfloat16 if kind == "qwen3_5" else torch.float32)).save_pretrained(folder)
    processor(kind).save_pretrained(folder)
    if kind == "qwen2_5_omni":
        torch.save({}, folder / "spk_dict.pt")  # transformers reads voices from there, whether it talks or not
    return folder


def live_names(model: nn.Module, stream: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a checkpoint under the names of a live model, PEFT's own parts of these left out."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    there = {
        name.replace(".base_layer", "").replace(".modules_to_save.default", "")
        for name, _ in [*inner.named_parameters(), *inner.named_buffers()]
    }
    found = {}
    for name, tensor in stream.items():
        names = (name, f"model.language_model.{name.removeprefix('model.')}", f"model.{name}")
        found[next(one for one in names if one in there)] = tensor
    return found


def images(count: int) -> Sequence[Any]:
    """Return different ones, of several sizes."""
    from PIL import Image

    sizes = ((112, 112), (84, 112), (56, 84))
    return [
        Image.effect_mandelbrot(sizes[i % len(sizes)], (-2 + i / 10, -1.5, 1, 1.5 - i / 20), 50).convert("RGB")
        for i in range(count)
    ]
