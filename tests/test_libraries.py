"""Models in the hands of libraries that trainers bring: DeepSpeed, bitsandbytes, torchao (`make test-libraries`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits
from peft import LoraConfig, get_peft_model
from processes import spawn
from torch import nn

from lora_merge import InvalidInput, MergedWeights, UnsupportedAdapter, merged, read_deltas

pytestmark = pytest.mark.filterwarnings("ignore")
os.environ["DS_ACCELERATOR"] = "cpu"

# ---- DeepSpeed -------------------------------------------------------------------------------------------------------


def engine(rank: int, model: nn.Module, stage: int) -> Any:
    import deepspeed

    os.environ["LOCAL_RANK"] = str(rank)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def zero(rank: int) -> None:
    """What is partitioned is refused by name; what is gathered streams as the plain model does."""
    import deepspeed

    plain = models.with_lora(models.qwen2)
    wanted = dict(MergedWeights(plain))
    three = engine(rank, models.with_lora(models.qwen2), 3)
    peft_model = three.module
    attempts: list[Callable[[], Any]] = [
        lambda: read_deltas(three),
        lambda: merged(three).__enter__(),
        lambda: list(MergedWeights(three)),
        lambda: MergedWeights(three).metadata(),
        lambda: list(MergedWeights(peft_model, adapters=False)),
        lambda: list(MergedWeights(peft_model.get_base_model().model.norm)),  # no adapter in it
    ]
    for attempt in attempts:
        with pytest.raises(InvalidInput, match=r"DeepSpeed ZeRO-3 has partitioned.*zero.GatheredParameters"):
            attempt()
    everything = list(three.parameters())
    some = [p for name, p in three.named_parameters() if "layers.1" not in name]
    with deepspeed.zero.GatheredParameters(some), pytest.raises(InvalidInput, match=r"layers.1.*partitioned"):
        list(MergedWeights(three))
    with deepspeed.zero.GatheredParameters(everything):
        streamed = dict(MergedWeights(three))
        # Its forward gathers every weight anew, and would free the merged one.
        with pytest.raises(InvalidInput, match="ZeRO-3 gathers this parameter anew"), merged(three):
            pass
    assert streamed.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(streamed[name], tensor, name)
    with pytest.raises(InvalidInput, match="partitioned"):
        list(MergedWeights(three))


def zero_one(rank: int) -> None:
    """Stage 1 keeps parameters whole: the engine is a wrapper like others."""
    plain = models.with_lora(models.qwen2)
    wanted, outputs = dict(MergedWeights(plain)), models.outputs(plain)
    one = engine(rank, models.with_lora(models.qwen2), 1)
    streamed = dict(MergedWeights(one))
    assert streamed.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(streamed[name], tensor, name)
    with merged(one):
        torch.testing.assert_close(models.outputs(one), outputs)


def both_stages(rank: int) -> None:
    zero(rank)
    zero_one(rank)


@pytest.mark.parametrize("world", [1, 2])
def test_deepspeed(world: int) -> None:
    spawn(world, both_stages)


# ---- quantised bases -------------------------------------------------------------------------------------------------


def bitsandbytes(folder: Path, **options: Any) -> nn.Module:
    from transformers import BitsAndBytesConfig, Qwen2ForCausalLM

    config = BitsAndBytesConfig(**options)
    models.qwen2().save_pretrained(folder)
    return Qwen2ForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu", dtype=torch.bfloat16)


def torchao(_: Path) -> nn.Module:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = models.qwen2().bfloat16()
    quantize_(model.model, Int8WeightOnlyConfig())
    return model


QUANTISED: dict[str, Callable[[Path], nn.Module]] = {
    "4 bits": lambda folder: bitsandbytes(folder, load_in_4bit=True),
    "4 bits in bfloat16": lambda folder: bitsandbytes(folder, load_in_4bit=True, bnb_4bit_quant_storage=torch.bfloat16),
    "8 bits": lambda folder: bitsandbytes(folder, load_in_8bit=True),
    "torchao": torchao,
}


@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_bases(case: str, tmp_path: Path) -> None:
    """Refused with or without adapters, and the message says what to do; what it says to do helps."""
    base = QUANTISED[case](tmp_path)
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
    if case != "torchao":
        plain = QUANTISED[case](tmp_path).dequantize()
        assert all(tensor.dtype == torch.bfloat16 for _, tensor in MergedWeights(plain))


def test_adapters_on_what_is_not_quantised(tmp_path: Path) -> None:
    """In place only the adapted weights matter; a stream would send the others too."""
    base = bitsandbytes(tmp_path, load_in_8bit=True)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    with torch.no_grad():
        wanted = model(models.tokens()).logits
        with merged(model):
            torch.testing.assert_close(model(models.tokens()).logits, wanted, rtol=2e-2, atol=2e-2)
    with pytest.raises(InvalidInput, match=r"q_proj.weight: the base is quantised .8-bit, bitsandbytes"):
        list(MergedWeights(model))
