"""Models in the hands of libraries that trainers bring: bitsandbytes, torchao (`make test-libraries`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn

from lora_merge import InvalidInput, MergedWeights, UnsupportedAdapter, merged, read_deltas
from lora_merge.models.plain import remedy

pytestmark = pytest.mark.filterwarnings("ignore")


def bitsandbytes(folder: Path, **options: Any) -> nn.Module:
    from transformers import BitsAndBytesConfig, Qwen2ForCausalLM

    config = BitsAndBytesConfig(**options)
    models.qwen2(hidden_size=64, intermediate_size=128).save_pretrained(folder)  # whole blocks in each row
    return Qwen2ForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu", dtype=torch.bfloat16)


def unknown() -> nn.Module:
    """Quantised by a class that nobody has read."""
    from torchao.quantization import Int8Tensor, Int8WeightOnlyConfig, quantize_

    class Other(Int8Tensor):
        pass

    model = models.qwen2().bfloat16()
    quantize_(model.model, Int8WeightOnlyConfig())
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            held: Any = module.weight
            made = Other(held.qdata, held.scale, held.block_size, held.dtype, zero_point=held.zero_point)
            module.weight = nn.Parameter(made, requires_grad=False)
    return model


def test_quantised_bases() -> None:
    """Of what cannot be read: refused with or without adapters, and the message says what to do."""
    base = unknown()
    message = r"q_proj.*the base is quantised \(a tests.*unknown.*Other.*from a checkpoint that is not quantised"
    for attempt in (lambda: list(MergedWeights(base)), lambda: MergedWeights(base, adapters=False).metadata()):
        with pytest.raises(InvalidInput, match=message):
            attempt()
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    with pytest.raises(InvalidInput, match=message):
        read_deltas(model)
    with pytest.raises(InvalidInput, match=message), merged(model):
        pass
    with pytest.raises(InvalidInput, match=message):
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


def fp8_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Blocks of 32 x 32 in FP8; returns what they stand for."""
    models.qwen2(hidden_size=64, intermediate_size=128).save_pretrained(folder)
    file, saved = folder / "model.safetensors", folder / "config.json"
    tensors, stand_for = load_file(file), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name]
        scale = weight.abs().amax() / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        blocks = -(-weight.shape[0] // 32), -(-weight.shape[1] // 32)
        tensors[f"{name}_scale_inv"] = scale.expand(blocks).contiguous()
        stand_for[name] = tensors[name].float() * scale
    save_file(tensors, file, {"format": "pt"})
    said = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"quantization_config": said}))
    return stand_for


def test_what_a_message_says_of_an_fp8_checkpoint(tmp_path: Path) -> None:
    """Loaded as it says, the base is a plain one."""
    from transformers import FineGrainedFP8Config, Qwen2ForCausalLM

    stand_for = fp8_checkpoint(tmp_path)
    assert "quantization_config=FineGrainedFP8Config(dequantize=True)" in remedy("fp8")
    base = Qwen2ForCausalLM.from_pretrained(
        tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))  # lora_B is zero
    streamed = dict(MergedWeights(model))
    for name, wanted in stand_for.items():
        assert torch.equal(streamed[name], wanted), name


def test_adapters_on_what_is_not_quantised(tmp_path: Path) -> None:
    """In place only the adapted weights matter; a stream sends what the others stand for, too."""
    base = bitsandbytes(tmp_path, load_in_8bit=True)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    with torch.no_grad():
        wanted = model(models.tokens()).logits
        with merged(model):
            torch.testing.assert_close(model(models.tokens()).logits, wanted, rtol=2e-2, atol=2e-2)
    assert {name: tensor.dtype for name, tensor in MergedWeights(model)}.keys() == models.qwen2().state_dict().keys()
