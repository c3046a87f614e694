"""Experts that the hub has `[experts, in, out]` and transformers reads the other way round where their shape says so
(Qwen3-VL-MoE). It saves them as it holds them. Square ones it does not turn, and engines turn all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tensors
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_merge import MergedWeights, merge_checkpoint, save_merged

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 3, "num_experts_per_tok": 2,
}  # fmt: skip
WIDTHS = {"none": 24, "down": 32, "gate and up": 16}
"""Which experts are square -> their width."""
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def policy(width: int) -> Any:
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
              "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0, "mrope_interleaved": True}
    text = SIZES | {"moe_intermediate_size": width, "rope_parameters": rope}
    torch.manual_seed(0)
    return Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision)).eval()


def adapted(model: nn.Module) -> Any:
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], target_parameters=EXPERTS)
    trained: Any = get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    return trained


def turned(held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.transpose(1, 2).contiguous() if ".experts." in name else t for name, t in held.items()}


@pytest.mark.parametrize("published", [True, False], ids=["as on the hub", "as transformers saves"])
@pytest.mark.parametrize("square", WIDTHS)
def test_the_layout_of_the_base_is_kept(square: str, published: bool, tmp_path: Path) -> None:
    """What transformers loads of the result is the merged model, and of a base as on the hub the result is so, too."""
    from transformers import Qwen3VLMoeForConditionalGeneration as Policy

    policy(WIDTHS[square]).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    if published:
        save_file(turned(load_file(file)), file, {"format": "pt"})
    before = {name: t.shape for name, t in load_file(file).items()}
    model = adapted(Policy.from_pretrained(tmp_path / "base", dtype=torch.float32))
    model.save_pretrained(tmp_path / "adapter")
    live = save_merged(model, tmp_path / "live")
    (disk,) = merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "disk")
    streamed = {name: t.clone() for name, t in MergedWeights(model)}
    wanted = model.merge_and_unload().state_dict()
    for folder, saved in (("live", live), ("disk", disk)):
        held = tensors(tmp_path / folder)
        assert {name: t.shape for name, t in held.items()} == before
        loaded = Policy.from_pretrained(tmp_path / folder, dtype=torch.float32).state_dict()
        for name, value in wanted.items():
            torch.testing.assert_close(loaded[name], value, atol=1e-6, rtol=1e-6)
        assert any("is square" in note for note in saved.notes) == (square != "none"), saved.notes
    for name, value in wanted.items():  # engines read what the hub has, whatever the base of this model had
        stream = streamed[name].transpose(1, 2) if ".experts." in name else streamed[name]
        torch.testing.assert_close(stream, value, atol=1e-6, rtol=1e-6)


def test_a_model_that_was_not_loaded(tmp_path: Path) -> None:
    """Without a base the result is as the hub has it, which transformers reads."""
    from transformers import Qwen3VLMoeForConditionalGeneration as Policy

    model = policy(WIDTHS["none"])
    assert save_merged(model, tmp_path / "saved") is not None
    held = tensors(tmp_path / "saved")
    assert held["model.language_model.layers.0.mlp.experts.down_proj"].shape == (3, 24, 32)
    loaded = Policy.from_pretrained(tmp_path / "saved", dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())
