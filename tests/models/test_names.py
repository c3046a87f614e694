"""HF checkpoint names: by text, and by the types of a live model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from lora_merge.names import hf_name, innermost, named_tensors, walk


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("base_model.model.model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("base_model.model.score.modules_to_save.my_adapter.dense.bias", "score.dense.bias"),
        ("_orig_mod.model.layers.1._checkpoint_wrapped_module.mlp.weight", "model.layers.1.mlp.weight"),
        ("_fsdp_wrapped_module.model.norm.weight", "model.norm.weight"),
        ("base_model.model.mlp.experts.base_layer.base_layer.down_proj", "mlp.experts.down_proj"),
        # Whole path components only (a peer's bug: `.base_layer` stripped by a plain replace).
        ("model.base_layer_norm.weight", "model.base_layer_norm.weight"),
        ("model.my_base_layer.weight", "model.my_base_layer.weight"),
        ("encoder.base_model.model.weight", "encoder.base_model.model.weight"),
        ("model._orig_module.weight", "model._orig_module.weight"),
        ("model.modules_to_save_later.x", "model.modules_to_save_later.x"),
    ],
)
def test_by_text(path: str, name: str) -> None:
    assert hf_name(path) == name


class Tricky(nn.Module):
    """A user's module whose parts are called like PEFT's wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(4, 4)
        self.base_layer_norm = nn.LayerNorm(4)
        self.modules_to_save = nn.ModuleDict({"default": nn.Linear(4, 4)})
        self.proj = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("not_kept", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.base_layer_norm(self.base_layer(x))
        return self.head(self.proj(self.modules_to_save["default"](x)))


def test_by_type() -> None:
    """A user's own `base_layer` keeps its name; wrappers lose theirs, however they are stacked."""
    wanted = list(Tricky().state_dict())
    model = Tricky()
    model.proj = checkpoint_wrapper(model.proj)
    config = LoraConfig(r=2, target_modules=[r"proj._checkpoint_wrapped_module"], modules_to_save=["head"])
    model = torch.compile(get_peft_model(model, config))
    named = {t.name: t for t in named_tensors(model)}
    assert sorted(named) == sorted(wanted)
    for name, entry in named.items():
        assert getattr(entry.owner, entry.attribute) is entry.tensor, name
    tuner = model._orig_mod.base_model
    assert named["head.weight"].tensor is tuner.model.head.modules_to_save["default"].weight
    assert dict(walk(model))["proj"] is innermost(tuner.model.proj)
    tuner.disable_adapter_layers()
    disabled = {t.name: t.tensor for t in named_tensors(model)}
    assert disabled["head.weight"] is tuner.model.head.original_module.weight


def test_both_names_of_a_tied_weight() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert [t.name for t in named_tensors(model)] == list(model.state_dict())


def test_both_places_of_a_shared_module() -> None:
    shared = nn.Linear(3, 3)
    model = nn.ModuleDict({"one": shared, "two": shared})
    assert [t.name for t in named_tensors(model)] == list(model.state_dict())


def test_older_import_paths_stay() -> None:
    """docs/megatron.md named these before the package had wings."""
    from lora_merge import megatron
    from lora_merge.shards.megatron import Chunks, adapters_off, read
    from lora_merge.shards.megatron_adapters import Half, Pair, Style, cut_of, register
    from lora_merge.shards.megatron_names import bridge_names

    for found in (Chunks, adapters_off, read, Half, Pair, Style, cut_of, register, bridge_names):
        assert getattr(megatron, found.__name__) is found


@pytest.mark.parametrize("wrapper", [nn.DataParallel, AveragedModel])
def test_wrappers_that_call_it_module(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    """An `AveragedModel` counts its updates in a buffer of its own, which belongs to no checkpoint."""
    model = wrapper(nn.Sequential(nn.Linear(3, 3)))
    assert [t.name for t in named_tensors(model)] == ["0.weight", "0.bias"]
