"""Adapters whose names are not the base's: trained on a part of it, under an older transformers, or inside wrappers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bases_of_parts as bases
import models
import peft
import pytest
import torch
from bases_of_parts import CLIP, IMAGES, ROTARY, TEXT
from checkpoints import tensors
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_merge import InvalidInput, merge_checkpoint, save_merged
from lora_merge.models.peft.folder import read_folder
from lora_merge.saving.inspect import inspect_adapter

transformers = pytest.importorskip("transformers", minversion="5")
_DELTA = {
    "layer_types": ["full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def qwen3_5() -> Any:
    config = transformers.Qwen3_5Config(text_config=TEXT | _DELTA, vision_config=_QWEN_VISION, **IMAGES)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def qwen3_5_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts |= {"shared_expert_intermediate_size": 16}
    config = transformers.Qwen3_5MoeConfig(text_config=TEXT | _DELTA | experts, vision_config=_QWEN_VISION, **IMAGES)
    return models.eager(transformers.Qwen3_5MoeForConditionalGeneration(config))


def qwen2_vl() -> Any:
    text = {k: v for k, v in TEXT.items() if k != "head_dim"} | {"rope_parameters": ROTARY}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **IMAGES)
    return transformers.Qwen2VLForConditionalGeneration(config)


def llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**CLIP),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=60,
    )
    return transformers.LlavaForConditionalGeneration(config)


def gemma3() -> Any:
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**TEXT, query_pre_attn_scalar=16),
        vision_config=transformers.SiglipVisionConfig(**CLIP),
        mm_tokens_per_image=1,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def mllama() -> Any:
    text = {k: v for k, v in TEXT.items() if k != "head_dim"} | {"cross_attention_layers": [1]}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 8, "patch_size": 4, "vision_output_dim": 64}
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1}
    config = transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=60)
    return transformers.MllamaForConditionalGeneration(config)


def omni() -> Any:
    text = {k: v for k, v in TEXT.items() if k != "head_dim"} | {"rope_parameters": ROTARY}
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
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT))


def masked(kind: str) -> Any:
    sizes = {k: v for k, v in TEXT.items() if k not in ("head_dim", "num_key_value_heads")}
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


def text_of(whole: Any) -> Any:
    return whole.model.language_model


@dataclass(frozen=True)
class Part:
    """What an adapter is trained on: a base, how the model is taken out of its folder, and PEFT's options."""

    build: Callable[[], Any]
    load: Callable[[Path], Any]
    options: dict[str, Any]


_VL = "AutoModelForImageTextToText"
_SOME = {"target_modules": ["q_proj", "down_proj"]}
_EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
_HALF = {"target_modules": ["q", "wo"]}
_BERT = {"target_modules": r"encoder.*\.(query|dense)", "task_type": "FEATURE_EXTRACTION"}
PARTS = {
    "text": Part(qwen3_5, auto("AutoModelForCausalLM"), _SOME | {"modules_to_save": ["lm_head"]}),
    "text, all linear": Part(qwen3_5, auto("AutoModelForCausalLM"), {"target_modules": "all-linear"}),
    "text and head": Part(qwen3_5, auto("AutoModelForCausalLM"), {"target_modules": ["o_proj", "lm_head"]}),
    "experts": Part(qwen3_5_moe, auto("AutoModelForCausalLM"), _EXPERTS),
    "text of Gemma": Part(gemma3, around(transformers.Gemma3ForCausalLM, text_of), _SOME),
    "text of LLaVA": Part(llava, around(transformers.LlamaForCausalLM, text_of), _SOME | {"bias": "all"}),
    "text of Mllama": Part(mllama, auto("AutoModelForCausalLM"), _SOME),
    "thinker": Part(omni, auto("Qwen2_5OmniThinkerForConditionalGeneration"), _SOME),
    "encoder": Part(qwen3, auto("AutoModel"), _SOME | {"task_type": "FEATURE_EXTRACTION", "use_dora": True}),
    "BERT": Part(lambda: masked("Bert"), auto("AutoModel"), _BERT),
    "ModernBERT": Part(
        lambda: masked("ModernBert"), auto("AutoModel"), {"target_modules": ["Wqkv", "Wo"], "bias": "lora_only"}
    ),
    "images": Part(qwen3_5, auto("AutoModel"), {"target_modules": ["qkv", "q_proj"]}),
    "text of LLaVA-OneVision": Part(bases.llava_onevision, around(transformers.Qwen2ForCausalLM, text_of), _SOME),
    "text of PaliGemma": Part(bases.paligemma, around(transformers.GemmaForCausalLM, text_of), _SOME),
    "text of InternVL": Part(bases.internvl, around(transformers.Qwen2ForCausalLM, text_of), _SOME),
    "text of Qwen3-VL": Part(bases.qwen3_vl_moe, lambda folder: text_of(auto(_VL)(folder)), _EXPERTS),
    "images of Qwen3-VL": Part(bases.qwen3_vl, auto("AutoModel"), {"target_modules": ["qkv", "q_proj"]}),
    "thinker of Qwen3": Part(bases.qwen3_omni, auto("Qwen3OmniMoeThinkerForConditionalGeneration"), _EXPERTS),
    "T5": Part(bases.t5, auto("T5EncoderModel"), _HALF),
    "T5, by its task": Part(bases.t5, auto("T5EncoderModel"), _HALF | {"task_type": "FEATURE_EXTRACTION"}),
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
    assert len(inspected.updates) >= 3
    assert json.loads((out / "config.json").read_text()) == json.loads((base / "config.json").read_text())
    save_merged(model, tmp_path / "live")
    again = type(model.get_base_model()).from_pretrained(tmp_path / "live").eval()
    assert (answers(again) - wanted).abs().max() < 1e-4


def renamed(adapter: Path, change: Callable[[str], str]) -> None:
    """Give the tensors of an adapter's file other names."""
    file = adapter / "adapter_model.safetensors"
    save_file({change(key): tensor.clone() for key, tensor in load_file(file).items()}, file, {"format": "pt"})


_INSIDE = "base_model.model."
_TEXTS = {"qwen2_vl": "model.", "llava": "language_model.model."}


@pytest.mark.parametrize("kind", _TEXTS)
def test_names_of_an_older_transformers(kind: str, tmp_path: Path) -> None:
    """Keys and what the configuration says of modules are those of the release that trained it; files are the hub's."""
    base, adapter, then = tmp_path / "base", tmp_path / "adapter", _TEXTS[kind]
    held = written({"qwen2_vl": qwen2_vl, "llava": llava}[kind], base)
    now = "model.language_model."
    assert any(name.startswith(then) for name in held)
    assert not any(name.startswith(now) for name in held)
    model = trained(
        auto("AutoModelForImageTextToText")(base),
        target_modules=rf"{re.escape(now)}.*\.(q_proj|down_proj)",
        rank_pattern={rf"{re.escape(now)}layers\.1\..*": 2},
        alpha_pattern={f"{now}layers.0.self_attn.q_proj": 32},
    )
    model.save_pretrained(adapter)
    renamed(adapter, lambda key: key.replace(f"{_INSIDE}{now}", f"{_INSIDE}{then}"))
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = rf"{re.escape(then)}.*\.(q_proj|down_proj)"
    config["rank_pattern"] = {rf"{re.escape(then)}layers\.1\..*": 2}
    config["alpha_pattern"] = {f"{then}layers.0.self_attn.q_proj": 32}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (saved,) = merge_checkpoint(base, adapter, tmp_path / "out")
    assert saved.changed == 4
    assert tensors(tmp_path / "out").keys() == held.keys()
    out = auto("AutoModelForImageTextToText")(tmp_path / "out").eval()
    assert (answers(out) - answers(model)).abs().max() < 1e-4
    file = adapter / "adapter_model.safetensors"
    save_file({k: t for k, t in load_file(file).items() if "layers.0.self_attn" not in k}, file, {"format": "pt"})
    with pytest.raises(InvalidInput, match=r"2 of its tensors are not in the file"):
        read_folder(adapter, base, torch.float32)


WRAPPED: dict[str, Callable[[str], str]] = {
    "compiled": lambda key: f"_orig_mod.{key}",
    "compiled inside": lambda key: key.replace(_INSIDE, f"{_INSIDE}_orig_mod."),
    "compiled layers": lambda key: re.sub(r"(layers\.\d+\.)", r"\1_orig_mod.", key),
    "checkpointed": lambda key: re.sub(r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", key),
    "FSDP": lambda key: "_fsdp_wrapped_module." + re.sub(r"(layers\.\d+\.)", r"\1_fsdp_wrapped_module.", key),
    "DDP": lambda key: f"module.{key}",
    "DDP of compiled": lambda key: f"module._orig_mod.{key}",
    "DDP inside": lambda key: key.replace(_INSIDE, f"{_INSIDE}module."),
    "the adapter's name": lambda key: re.sub(r"(lora_[AB])\.weight", r"\1.mine.weight", key),
    "no PEFT": lambda key: key.removeprefix(_INSIDE),
    "tinker": lambda key: key.replace(f"{_INSIDE}lm_head", f"{_INSIDE}model.unembed_tokens"),
}


def test_names_in_wrappers(tmp_path: Path) -> None:
    """Every key of the file finds its place, whatever is around it; what finds two, or none, is refused by name."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    written(qwen3, base)
    model = trained(auto("AutoModelForCausalLM")(base), target_modules=["q_proj", "lm_head"])
    model.save_pretrained(adapter, save_embedding_layers=False)
    file = adapter / "adapter_model.safetensors"
    plain, said = file.read_bytes(), (adapter / "adapter_config.json").read_text()
    merge_checkpoint(base, adapter, tmp_path / "out")
    wanted = tensors(tmp_path / "out")
    for kind, change in WRAPPED.items():
        renamed(adapter, change)
        if kind == "tinker":
            told = json.loads(said) | {"target_modules": ["q_proj", "unembed_tokens"]}
            (adapter / "adapter_config.json").write_text(json.dumps(told))
        merge_checkpoint(base, adapter, tmp_path / "out", force=True)
        merged = tensors(tmp_path / "out")
        assert all(torch.equal(merged[name], wanted[name]) for name in wanted), kind
        assert not inspect_adapter(adapter, base).problems, kind
        file.write_bytes(plain)
    (adapter / "adapter_config.json").write_text(said)
    held = load_file(file)
    first = next(iter(held))
    for change, match in [
        (held | {f"_orig_mod.{first}": held[first].clone()}, "are two names of"),
        ({k.replace(_INSIDE, f"{_INSIDE}actor.policy."): t for k, t in held.items()}, r"by 'actor\.policy\.' in front"),
        ({k.replace("q_proj", "query"): t for k, t in held.items()}, r"no module of the name .*query: name the base"),
        ({k: torch.zeros(4, 9) if "lora_A" in k else t for k, t in held.items()}, "a weight of another size: name"),
        (held | {f"{_INSIDE}score.weight": torch.zeros(2, 32)}, "no module of the name score"),
    ]:
        save_file(change, file, {"format": "pt"})
        with pytest.raises(InvalidInput, match=match):
            read_folder(adapter, base, torch.float32)
    (adapter / "adapter_config.json").write_text(json.dumps(json.loads(said) | {"task_type": "SEQ_CLS"}))
    with pytest.raises(InvalidInput, match=r"trained for SEQ_CLS, .*Qwen3ForCausalLM: .*SequenceClassification"):
        read_folder(adapter, base, torch.float32)


def test_a_part_that_there_is_twice(tmp_path: Path) -> None:
    """Names and sizes fit an encoder and a decoder: nobody can tell which was trained."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"vocab_size": 64, "d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    written(lambda: T5ForConditionalGeneration(T5Config(**sizes)), base)
    whole = auto("AutoModelForSeq2SeqLM")(base)
    model = trained(whole.encoder, target_modules=["q"], task_type="FEATURE_EXTRACTION")
    model.save_pretrained(adapter)
    with pytest.raises(InvalidInput, match=r"is encoder\.block\.0\.\S+ or decoder\.block\.0\.\S+ of the base"):
        read_folder(adapter, base, torch.float32)


def test_half_of_a_file(tmp_path: Path) -> None:
    """An adapter of the encoder alone is one, and what a file of the whole model has lost is missed."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    written(bases.t5, base)
    # PEFT 0.18 asks T5 for a method that transformers has no longer, where there is a task.
    task = {"task_type": "SEQ_2_SEQ_LM"} if not peft.__version__.startswith("0.18.") else {}
    for options, lost in [({}, "decoder"), (task, "decoder"), ({}, "encoder.block.1")]:
        kind = "T5EncoderModel" if lost.startswith("encoder") else "AutoModelForSeq2SeqLM"
        trained(auto(kind)(base), **_HALF, **options).save_pretrained(adapter)
        file = adapter / "adapter_model.safetensors"
        save_file({k: t for k, t in load_file(file).items() if lost not in k}, file, {"format": "pt"})
        with pytest.raises(InvalidInput, match="of its tensors are not in the file"):
            read_folder(adapter, base, torch.float32)
