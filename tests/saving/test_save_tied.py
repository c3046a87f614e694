"""Adapters that change one of two tied weights, saved: the config that holds these apart unties all others, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from lora_merge import InvalidInput, UnsupportedAdapter, merge_checkpoint, save_merged

BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
BART = {"d_model": 32, "vocab_size": 99, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}  # fmt: skip
SWITCH = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
          "num_experts": 2, "vocab_size": 99, "decoder_start_token_id": 0}  # fmt: skip
ZAMBA = BERT | {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid"] * 2, "mamba_d_state": 8,
                "n_mamba_heads": 2, "num_key_value_heads": 2, "attention_head_dim": 16,
                "use_mamba_kernels": False}  # fmt: skip
GEMMA = {"text_config": BERT | {"num_key_value_heads": 2, "head_dim": 8},
         "vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48,
                           "image_size": 28, "patch_size": 14}, "mm_tokens_per_image": 4}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2, "vocab_size": 99,
      "decoder_start_token_id": 0}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bert, head": ("BertForMaskedLM", BERT, {"target_modules": ["cls.predictions.decoder"]}),
    "roberta, embedding": ("XLMRobertaForMaskedLM", BERT, {"target_modules": ["word_embeddings"]}),
    "bert, both": ("BertForMaskedLM", BERT, {"target_modules": ["word_embeddings"], "ensure_weight_tying": True}),
    "bart, head": ("BartForConditionalGeneration", BART, {"target_modules": ["lm_head"]}),
    "m2m, embedding": ("M2M100ForConditionalGeneration", BART, {"target_modules": ["decoder.embed_tokens"]}),
    "bart, shared whole": ("BartForConditionalGeneration", BART,
                           {"target_modules": ["q_proj"], "modules_to_save": ["shared"]}),
    "zamba, a shared block": ("ZambaForCausalLM", ZAMBA, {"target_modules": ["q_proj"]}),
    "t5, all that is tied": ("T5ForConditionalGeneration", T5,
                             {"target_modules": ["q", "embed_tokens"], "ensure_weight_tying": True}),
    "gemma 3, head": ("Gemma3ForConditionalGeneration", GEMMA, {"target_modules": ["lm_head"]}),
}  # fmt: skip


def policy(name: str, sizes: dict[str, Any], adapter: dict[str, Any], folder: Path) -> Any:
    """A model with an adapter, whose base and adapter are in the folder."""
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    base = cls(cls.config_class(**sizes))
    for parameter in base.parameters():
        if parameter.dim() < 2:  # a bias that was trained is not zero
            parameter.data.add_(torch.randn_like(parameter) * 0.05)
    base.save_pretrained(folder / "base")
    model = get_peft_model(cls.from_pretrained(folder / "base"), LoraConfig(r=2, init_lora_weights=False, **adapter))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key:
                parameter.mul_(1.25)
    model.save_pretrained(folder / "adapter")
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    model.config.use_cache = False
    ids = torch.randint(3, 90, (1, 8), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        return model.double().eval()(input_ids=ids, **more).logits


def save(live: bool, model: Any, folder: Path) -> None:
    if live:
        save_merged(model, folder / "out", verify=True)
    else:
        merge_checkpoint(folder / "base", [folder / "adapter"], folder / "out", verify=True)


@pytest.mark.parametrize("live", [True, False], ids=["live", "files"])
@pytest.mark.parametrize("case", CASES)
def test_every_tied_name_is_written(case: str, live: bool, tmp_path: Path) -> None:
    """Names that were left out were initialised anew when the checkpoint was loaded."""
    name, sizes, adapter = CASES[case]
    model = policy(name, sizes, adapter, tmp_path)
    save(live, model, tmp_path)
    loaded, told = getattr(transformers, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    wanted = logits(model)
    assert (logits(loaded) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("live", [True, False], ids=["live", "files"])
def test_a_class_that_computes_otherwise_where_they_are_two_is_refused(live: bool, tmp_path: Path) -> None:
    adapter = {"target_modules": ["lm_head"]}
    model = policy("SwitchTransformersForConditionalGeneration", SWITCH, adapter, tmp_path)
    with pytest.raises(UnsupportedAdapter, match="computes otherwise where they are two"):
        save(live, model, tmp_path)
    assert not (tmp_path / "out").exists()


def test_the_file_of_tied_adapters_is_whole(tmp_path: Path) -> None:
    """PEFT's configuration names one of T5's four tied modules, and a file that lacks another layer is not taken."""
    adapter = {"target_modules": ["q", "embed_tokens"], "ensure_weight_tying": True}
    policy("T5ForConditionalGeneration", T5, adapter, tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({k: t for k, t in load_file(file).items() if "decoder.block.0.layer.1" not in k}, file)
    with pytest.raises(InvalidInput, match="2 of its tensors are not in the file"):
        save(False, None, tmp_path)


def test_the_file_of_a_peft_that_ties_no_factors(tmp_path: Path) -> None:
    """PEFT 0.18 takes ensure_weight_tying, for modules_to_save, and trains an adapter on the embedding alone."""
    sizes = BERT | {"num_key_value_heads": 2, "tie_word_embeddings": True}
    model = policy("Qwen2ForCausalLM", sizes, {"target_modules": ["q_proj", "embed_tokens"]}, tmp_path)
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"ensure_weight_tying": True}))
    if Version(peft.__version__) < Version("0.19"):
        pytest.skip("this is one of them")
    with pytest.raises(InvalidInput, match=r"ensure_weight_tying, for which PEFT before .* set that to false there"):
        save(False, None, tmp_path)
    file.write_text(json.dumps(config | {"ensure_weight_tying": False}))
    save(False, None, tmp_path)
    loaded = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / "out")
    wanted = logits(model)
    assert (logits(loaded) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("tied", [False, True])
def test_a_base_without_a_head_is_noted(tied: bool, tmp_path: Path) -> None:
    """Where its config does not tie it, transformers makes random numbers of one."""
    sizes = BERT | {"num_key_value_heads": 2, "tie_word_embeddings": tied}
    policy("Qwen2ForCausalLM", sizes, {"target_modules": ["q_proj"]}, tmp_path)
    file = tmp_path / "base" / "model.safetensors"
    save_file({k: t for k, t in load_file(file).items() if k != "lm_head.weight"}, file, {"format": "pt"})
    (merged,) = merge_checkpoint(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")
    notes = [note for note in merged.notes if "holds no lm_head.weight, and neither does the result" in note]
    assert len(notes) == (0 if tied else 1)
