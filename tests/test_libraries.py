"""Models in the hands of libraries that trainers bring: bitsandbytes, torchao (`make test-libraries`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from lora_merge import InvalidInput, MergedWeights, UnsupportedAdapter, merged, read_deltas

pytestmark = pytest.mark.filterwarnings("ignore")


def bitsandbytes(folder: Path, **options: Any) -> nn.Module:
    from transformers import BitsAndBytesConfig, Qwen2ForCausalLM

    config = BitsAndBytesConfig(**options)
    models.qwen2(hidden_size=64, intermediate_size=128).save_pretrained(folder)  # whole blocks in each row
    return Qwen2ForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu", dtype=torch.bfloat16)


def torchao() -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = models.qwen2().bfloat16()
    quantize_(model.model, Int8WeightOnlyConfig())
    return model


def test_quantised_bases() -> None:
    """Of what cannot be read: refused with or without adapters, and the message says what to do."""
    base = torchao()
    message = "q_proj.*the base is (quantised|a Int8Tensor).*dequantise it first"
    for attempt in (lambda: list(MergedWeights(base)), lambda: MergedWeights(base, adapters=False).metadata()):
        with pytest.raises(InvalidInput, match=message):
            attempt()
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(UnsupportedAdapter, match=message):
        read_deltas(model)
    with pytest.raises(UnsupportedAdapter, match=message), merged(model):
        pass
    with pytest.raises(UnsupportedAdapter, match=message):
        list(MergedWeights(model))


@pytest.mark.parametrize("bits", [4, 8])
def test_what_a_message_says_to_do(bits: int, tmp_path: Path) -> None:
    """In place a quantised base is refused; dequantised it is not."""
    base = bitsandbytes(tmp_path, load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(UnsupportedAdapter, match=r"q_proj.weight: the base is quantised .*dequantise"), merged(model):
        pass
    plain = bitsandbytes(tmp_path, load_in_4bit=bits == 4, load_in_8bit=bits == 8).dequantize()
    model = get_peft_model(plain, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with torch.no_grad(), merged(model):
        model(models.tokens())


def test_adapters_on_what_is_not_quantised(tmp_path: Path) -> None:
    """In place only the adapted weights matter; a stream sends what the others stand for, too."""
    base = bitsandbytes(tmp_path, load_in_8bit=True)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    with torch.no_grad():
        wanted = model(models.tokens()).logits
        with merged(model):
            torch.testing.assert_close(model(models.tokens()).logits, wanted, rtol=2e-2, atol=2e-2)
    assert {name: tensor.dtype for name, tensor in MergedWeights(model)}.keys() == models.qwen2().state_dict().keys()
