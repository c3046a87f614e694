"""Weights that are computed whenever they are read: refused where a stream would hold their parts in their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import parametrizations, prune

from lora_merge import InvalidInput, MergedWeights, UnsupportedAdapter, merged, save_merged

Make = Callable[[nn.Module], object]
WAYS: dict[str, tuple[Make, Callable[[Any], object]]] = {
    "pruned": (lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda m: prune.remove(m, "weight")),
    "hooked": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "spectral": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "parametrised": (
        parametrizations.weight_norm,
        lambda m: nn.utils.parametrize.remove_parametrizations(m, "weight"),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_checkpoint_would_lack_is_refused(way: str, tmp_path: Path) -> None:
    """Beside the adapters; transformers would load the rest and draw the weight at random."""
    model = models.with_lora(models.qwen2, target_modules=["v_proj"])
    layer = model.get_base_model().model.layers[1].self_attn.q_proj
    make, plain = WAYS[way]
    weights = MergedWeights(model)
    list(weights)  # before, it is a plain one
    make(layer)
    told = (
        r"model\.layers\.1\.self_attn\.q_proj\.weight: it is computed from .*make it one first, with torch\.nn\.utils"
    )
    with pytest.raises(InvalidInput, match=told):
        list(weights)
    with pytest.raises(InvalidInput, match=told):
        save_merged(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    before = models.outputs(model)
    with merged(model):  # is not asked for names
        assert torch.allclose(models.outputs(model), before, atol=1e-5)
    plain(layer)
    save_merged(model, tmp_path / "out")
    held = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(held["model.layers.1.self_attn.q_proj.weight"], layer.weight)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("part", "told"), [("base_layer", "Linear has"), ("lora_B", "Linear of its adapter has")])
def test_with_an_adapter_on_it(part: str, told: str, way: str) -> None:
    model = models.with_lora(models.qwen2, target_modules=["v_proj"])
    layer = model.get_base_model().model.layers[1].self_attn.v_proj
    WAYS[way][0](layer.base_layer if part == "base_layer" else layer.lora_B["default"])
    for call in (lambda: list(MergedWeights(model)), lambda: merged(model).__enter__()):
        with pytest.raises(UnsupportedAdapter, match=rf"v_proj\.weight: \w*{told} no plain parameter .*prune\.remove"):
            call()
    if part == "base_layer":  # the base alone, beside which an engine may be given the adapter
        with pytest.raises(InvalidInput, match="it is computed from"):
            list(MergedWeights(model, adapters=False))


def test_a_class_that_is_built_so_is_saved(tmp_path: Path) -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=32,
        conv_dim=(16,),
        conv_kernel=(4,),
        conv_stride=(2,),
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    model = get_peft_model(
        Wav2Vec2ForCTC(config).eval(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    )
    save_merged(model, tmp_path / "out")
    loaded = Wav2Vec2ForCTC.from_pretrained(tmp_path / "out").eval()
    sound = torch.linspace(-1, 1, 400)[None] ** 3
    with torch.no_grad():
        assert torch.allclose(loaded(sound).logits, model(sound).logits, atol=1e-5)
