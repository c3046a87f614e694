"""Adapters of experts as releases of PEFT have written them: their layouts by release and by shape, and the scaling of
those that PEFT fuses while it loads them. Expected values are float64 products of the file's tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import models
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_merge import InvalidInput, UnsupportedAdapter, merge_checkpoint, read_deltas
from lora_merge.models.peft.folder import read_folder

RANK, EXPERTS, WIDTH = 2, 4, 32
MODULE = "base_model.model.model.layers.0.mlp.experts"


def moe(inner: int) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = models._SIZES | models._EXPERTS
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=EXPERTS, moe_intermediate_size=inner))


def write(folder: Path, base: Path, tensors: dict[str, Tensor], **said: Any) -> None:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 6, "target_modules": []}
    config |= {"base_model_name_or_path": str(base)} | said
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


@pytest.mark.parametrize("inner", [24, WIDTH // 2], ids=["shapes differ", "shapes are the same"])
def test_layouts_of_releases(inner: int, tmp_path: Path) -> None:
    """The same update, written as each release lays it out."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    held = checkpoints.write_base(base, lambda: moe(inner), torch.float32).state_dict()
    weight = held["model.layers.0.mlp.experts.gate_up_proj"].double()
    rows, cols = 2 * inner, WIDTH
    A, B = torch.randn(EXPERTS, RANK, cols) * 0.1, torch.randn(EXPERTS, rows, RANK) * 0.1
    wanted = weight + 3.0 * B.double() @ A.double()

    def stored(first: Tensor, second: Tensor) -> dict[str, Tensor]:
        """first `[E, r, n]`, second `[E, m, r]`."""
        lora_A = first.reshape(EXPERTS * RANK, -1).contiguous()
        lora_B = second.permute(1, 2, 0).reshape(second.shape[1], -1).contiguous()
        return {f"{MODULE}.lora_A.weight": lora_A, f"{MODULE}.lora_B.weight": lora_B}

    new, old = stored(A, B), stored(B.mT, A.mT)
    same = rows == cols
    for number, (tensors, version) in enumerate(
        [(old, None), (old, "0.17.1"), (old, "0.18.1"), (old, "0.19.0"), (new, "0.19.1"), (new, "0.21.2")]
        + ([] if same else [(old, "0.21.2"), (new, None), (new, "0.18.2.dev0@abc")])
    ):
        write(adapter, base, tensors, peft_version=version, target_parameters=["mlp.experts.gate_up_proj"])
        merge_checkpoint(base, adapter, tmp_path / f"out{number}")
        got = checkpoints.tensors(tmp_path / f"out{number}")
        for expert in range(EXPERTS):
            for name, half in zip(("gate_proj", "up_proj"), wanted[expert].split(inner), strict=True):
                mine = got[f"model.layers.0.mlp.experts.{expert}.{name}.weight"].double()
                assert (mine - half).abs().max() < 1e-6, (version, name)
    if same:
        write(adapter, base, new, peft_version="0.19.1.dev0@abc", target_parameters=["mlp.experts.gate_up_proj"])
        with pytest.raises(InvalidInput, match=r"peft_version is '0.19.1.dev0@abc', and .* two layouts"):
            read_folder(adapter, base, torch.float32)


def apart(ranks: dict[str, int]) -> dict[str, Tensor]:
    """An adapter of Mixtral's experts under transformers 4: a linear layer each."""
    found = {}
    for expert in range(3):
        for name, (rows, cols) in {"w1": (16, 32), "w3": (16, 32), "w2": (32, 16)}.items():
            key = f"base_model.model.model.layers.0.block_sparse_moe.experts.{expert}.{name}"
            found[f"{key}.lora_A.weight"] = torch.randn(ranks[name], cols) * 0.1
            found[f"{key}.lora_B.weight"] = torch.randn(rows, ranks[name]) * 0.1
    return found


@pytest.mark.parametrize(
    ("said", "scaling"),
    [
        ({"use_rslora": True}, 6 / 2**0.5),
        ({}, 3.0),
        ({"alpha_pattern": {r".*\.w[13]": 10, "w2": 10}}, 5.0),
        ({"alpha_pattern": {"w1": 10}}, None),
    ],
    ids=["rslora", "plain", "alpha_pattern", "two scalings"],
)
def test_scaling_of_what_peft_fuses(said: dict[str, Any], scaling: float | None, tmp_path: Path) -> None:
    pytest.importorskip("peft.utils.transformers_weight_conversion")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    checkpoints.write_base(base, models.mixtral, torch.float32)
    tensors = apart({"w1": RANK, "w2": RANK, "w3": RANK})
    write(adapter, base, tensors, target_modules=["w1", "w2", "w3"], **said)
    if scaling is None:
        with pytest.raises(UnsupportedAdapter, match=r"w1 was trained with scaling 5, and .*w3 with 3"):
            read_folder(adapter, base, torch.float32)
        return
    merge_checkpoint(base, adapter, tmp_path / "out")
    before, got = checkpoints.tensors(base), checkpoints.tensors(tmp_path / "out")
    for key, lora_A in tensors.items():
        if "lora_A" in key:
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            delta = tensors[key.replace("lora_A", "lora_B")].double() @ lora_A.double()
            assert (got[name].double() - before[name].double() - scaling * delta).abs().max() < 1e-6, name
    assert len(read_deltas(read_folder(adapter, base, torch.float32))) == 2
