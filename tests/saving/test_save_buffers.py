"""Buffers of modules that PEFT saves whole: they are trained without a gradient, and belong to the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import tensors
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from lora_merge import merge_checkpoint, save_merged
from lora_merge.models.brought import brought
from lora_merge.models.part import Learning
from lora_merge.models.peft.folder import read_folder
from lora_merge.shards.ranks import Ranks
from lora_merge.stream.weights import MergedWeights

DEEPSEEK = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4,
            "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
            "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 8}  # fmt: skip
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 3}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], set[str]]] = {
    "a router's bias": (
        "DeepseekV3ForCausalLM",
        DEEPSEEK,
        {"target_modules": ["q_b_proj"], "modules_to_save": ["gate"]},
        {"e_score_correction_bias"},
    ),
    "statistics of norms": (
        "ResNetForImageClassification",
        RESNET,
        {"target_modules": ["convolution"], "modules_to_save": ["normalization"]},
        {"running_mean", "running_var", "num_batches_tracked"},
    ),
}


def policy(case: str, folder: Path) -> tuple[Any, set[str]]:
    """A model whose buffers training has changed, with its base and adapter in the folder; and the kinds of buffers."""
    name, sizes, adapter, kinds = CASES[case]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    cls(cls.config_class(**sizes)).save_pretrained(folder / "base")
    model = get_peft_model(cls.from_pretrained(folder / "base"), LoraConfig(r=2, init_lora_weights=False, **adapter))
    for key, buffer in model.named_buffers():
        if "modules_to_save" in key:
            buffer.add_(3)
    model.save_pretrained(folder / "adapter")
    return model.eval(), kinds


@pytest.mark.parametrize("live", [True, False], ids=["live", "files"])
@pytest.mark.parametrize("case", CASES)
def test_trained_buffers_are_in_the_result(case: str, live: bool, tmp_path: Path) -> None:
    """The base's were written instead, or the merge broke off with torch's own error about integers."""
    model, kinds = policy(case, tmp_path)
    if live:
        save_merged(model, tmp_path / "out", verify=True)
    else:
        merge_checkpoint(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out", verify=True)
    base, got = tensors(tmp_path / "base"), tensors(tmp_path / "out")
    wanted = model.merge_and_unload().state_dict()
    assert got.keys() == base.keys()
    buffers = {name for name in got if name.rpartition(".")[2] in kinds}
    assert {name.rpartition(".")[2] for name in buffers} == kinds
    for name in buffers:
        assert torch.equal(got[name], wanted[name]), name
        assert not torch.equal(got[name], base[name]), name
    for name in got.keys() & wanted.keys():  # transformers holds experts otherwise than files do
        tensor = got[name]
        torch.testing.assert_close(tensor, wanted[name].to(tensor.dtype), atol=1e-6, rtol=1e-5, msg=name)


def test_a_server_is_sent_them(tmp_path: Path) -> None:
    """`load` sends whole what the folder brings whole; other buffers stay the engine's."""
    policy("statistics of norms", tmp_path)
    read = read_folder(tmp_path / "adapter", tmp_path / "base", torch.float32)
    parts = MergedWeights(read).bucket_writer().source.parts
    names = Learning(read.modules(), brought(read)).names(parts, Ranks(), buffers=False)
    buffers = {name for name, part in parts.items() if not part.trained}
    assert buffers
    assert buffers <= names


def test_buffers_beside_the_adapter(tmp_path: Path) -> None:
    name, sizes, _, kinds = CASES["statistics of norms"]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    cls(cls.config_class(**sizes)).save_pretrained(tmp_path / "base")
    model: Any = get_peft_model(cls.from_pretrained(tmp_path / "base"), LoraConfig(r=2, target_modules=["convolution"]))
    assert isinstance(model, PeftModel)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.add_(1)
    model.save_pretrained(tmp_path / "adapter")
    beside = {n: t + 2 for n, t in tensors(tmp_path / "base").items() if n.rpartition(".")[2] in kinds}
    save_file(beside, tmp_path / "adapter" / "others.safetensors")
    merge_checkpoint(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")
    got = tensors(tmp_path / "out")
    assert all(torch.equal(got[n], t) for n, t in beside.items())
