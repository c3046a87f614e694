"""Which tensors an engine's class leaves out by itself, told from those that would be missed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lora_merge import MergedWeights
from lora_merge.engine.messages import NO_PART
from lora_merge.engine.push.left_out import refusal, sources_of, trained
from lora_merge.engine.vllm.loading.parts import language_model, left_out, plainly


class Mapper:
    """As vLLM's: names that begin with some are dropped, others renamed."""

    def __init__(self, dropped: tuple[str, ...], renamed: tuple[str, str] = ("", "")) -> None:
        self._dropped, self._renamed = dropped, renamed

    def _map_name(self, name: str) -> str | None:
        if name.startswith(self._dropped):
            return None
        return self._renamed[1] + name.removeprefix(self._renamed[0]) if name.startswith(self._renamed[0]) else name


class Seeing(nn.Module):
    """A tower that is computed to the last but one of three layers, and a language model of two."""

    def __init__(self) -> None:
        super().__init__()
        self.hf_to_vllm_mapper = Mapper(("talker.",), ("model.", ""))
        self.tower = nn.Module()
        self.tower.hf_to_vllm_mapper = Mapper(("post_norm.",))  # type: ignore[assignment]
        self.tower.config = SimpleNamespace(num_hidden_layers=3)  # type: ignore[assignment]
        self.tower.head = self.tower.bias = None  # type: ignore[assignment]
        self.tower.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.language_model = nn.Module()
        self.language_model.config = SimpleNamespace(num_hidden_layers=3)  # type: ignore[assignment]
        self.language_model.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))

    def get_language_model(self) -> nn.Module:
        return self.language_model


CASES = {
    "talker.head.weight": True,
    "model.tower.post_norm.weight": True,
    "model.tower.head.weight": True,
    "model.tower.bias": False,
    "model.tower.layers.2.weight": True,
    "model.tower.layers.3.weight": False,  # of a larger tower than the engine's
    "model.tower.other.weight": False,
    "model.language_model.layers.2.weight": False,  # of a deeper language model
    "model.language_model.layers.0.bias": False,  # which vLLM passes over without a word
    "elsewhere.weight": False,
}


@pytest.mark.parametrize("name", CASES)
def test_what_the_class_leaves_out(name: str) -> None:
    assert left_out(Seeing(), [name]) == [name] * CASES[name]


def test_a_model_without_towers() -> None:
    model: Any = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    model.config = SimpleNamespace(num_hidden_layers=3)
    assert language_model(model) is None
    assert left_out(model, ["layers.2.weight"]) == []


def test_reasons_without_lists() -> None:
    why = (
        "ValueError: There is no module or parameter named 'model' in Gemma. The available parameters belonging to  "
        "(Gemma) are: {'a', 'b'}"
    )
    assert plainly(why) == f"{NO_PART}'model' in Gemma"
    assert plainly("ValueError: too wide") == "ValueError: too wide"


def test_what_of_it_is_trained() -> None:
    """lora_B of zeros adds nothing yet; a parameter that requires a gradient is trained."""
    from models import qwen2, with_lora

    model: Any = with_lora(qwen2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and "layers.0" in name:
                parameter.zero_()
    weights = MergedWeights(model)
    writer = weights.bucket_writer()
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    sources = sources_of(writer, [*names, "no.such.weight"])
    assert list(sources) == names
    assert trained(weights, writer, sources) == names[1:]
    model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.requires_grad_(True)
    writer = weights.bucket_writer()
    assert trained(weights, writer, sources) == names
    assert refusal(names, "Engine").startswith(
        f"{names[0]} (and 1 more) is trained, and the engine's class (Engine) has"
    )
    assert "disable_talker" in refusal(["talker.head.weight"], "Engine")
