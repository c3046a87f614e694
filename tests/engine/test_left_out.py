"""Which tensors an engine's class leaves out by itself, told from those that would be missed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from peft import LoraConfig
from torch import Tensor, nn

from lora_merge import MergedWeights, train_merged
from lora_merge.engine.messages import NO_PART
from lora_merge.engine.push.left_out import refusal, sources_of, trained
from lora_merge.engine.vllm.loading.parts import language_model, left_out, plainly
from lora_merge.engine.vllm.loading.rest import differing
from lora_merge.engine.worker.dry_run import Copy, Record
from lora_merge.stream.window import Window


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
        self.hf_to_vllm_mapper = Mapper(("talker.", "lm_head"), ("model.", ""))
        self.tower = nn.Module()
        self.tower.hf_to_vllm_mapper = Mapper(("post_norm.",))  # type: ignore[assignment]
        self.tower.config = SimpleNamespace(num_hidden_layers=3)  # type: ignore[assignment]
        self.tower.head = self.tower.bias = None  # type: ignore[assignment]
        self.tower.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.language_model = nn.Module()
        self.language_model.config = SimpleNamespace(num_hidden_layers=3)  # type: ignore[assignment]
        self.language_model.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
        self.language_model.hf_to_vllm_mapper = Mapper(("lm_head",))  # type: ignore[assignment]

    def get_language_model(self) -> nn.Module:
        return self.language_model


CASES = {
    "talker.head.weight": True,
    "talker.lm_head.weight": True,
    "lm_head.weight": False,  # Cohere's takes the embedding for it
    "model.language_model.lm_head.weight": False,
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


def test_names_of_a_bare_model() -> None:
    """vLLM's classes of embeddings put `model.` before them, and BERT's drops its pooler there."""
    model: Any = nn.Module()
    model.model, model.pooler = nn.Module(), nn.Module()
    model.model.hf_to_vllm_mapper = Mapper(("pooler.", "lm_head."))
    assert left_out(model, ["pooler.dense.weight", "lm_head.weight", "extra.weight"]) == ["pooler.dense.weight"]


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
    """lora_B of zeros adds nothing yet; a parameter that requires a gradient is trained. It is the same inside of
    `train_merged`, and for adapters that are named and do not act."""
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
    model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.requires_grad_(False)
    with train_merged(model):
        weights = MergedWeights(model)
        before = {name: tensor.clone() for name, tensor in weights}
        writer = weights.bucket_writer()
        assert trained(weights, writer, sources) == names[1:]
        for name, tensor in weights:
            assert_same_bits(tensor, before[name], name)
    model.add_adapter("another", LoraConfig(target_modules=["k_proj"], init_lora_weights=False))
    model.set_adapter("another")
    weights = MergedWeights(model, adapter_names=["default"])
    assert trained(weights, weights.bucket_writer(), sources) == names[1:], "of the stream, not those that act"
    assert model.active_adapter == "another"
    assert refusal(names, "Engine").startswith(
        f"{names[0]} (and 1 more) is trained, and the engine's class (Engine) has"
    )
    assert "disable_talker" in refusal(["talker.head.weight"], "Engine")


def test_a_tower_that_another_push_has_changed() -> None:
    """Adapters on large linears change none of the small tensors."""
    stored = {"norm": torch.ones(8), "linear": torch.randn(512, 256)}
    held = {name: tensor.to(torch.bfloat16) for name, tensor in stored.items()}

    def record(name: str, tensor: Tensor) -> Record:
        window = Window((0,) * tensor.dim(), tuple(tensor.shape), tuple(range(tensor.dim())))
        return Record(name, f"tower.{name}", tensor.dtype, Copy(tensor, window, 0, tensor.stride()))

    records = [record(name, tensor) for name, tensor in held.items()]
    paths = {record.path for record in records}
    assert differing(records, paths, stored) == ""
    held["linear"][300, 7] += 1
    assert differing(records, paths, stored).startswith("tower.linear is not what the engine's checkpoint holds")
    assert differing(records, {"tower.norm"}, stored) == ""
    assert "none of its tensors" in differing(records, {"tower.packed"}, stored)
