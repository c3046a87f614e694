"""One update of a tied embedding and head (`ensure_weight_tying=True` of real PEFT): merged once, streamed and saved as
tied. Where PEFT gives the two memory of their own they train apart, and stay apart here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import peft
import pytest
import torch
from checkpoints import tensors, write_base
from helpers import assert_same_bits
from packaging.version import Version
from peft import LoraConfig, PeftModel, get_peft_model
from processes import spawn
from torch import Tensor, nn

from lora_merge import MergedWeights, UnsupportedAdapter, merge_checkpoint, merged, read_deltas, save_merged
from lora_merge.models.peft.folder import read_folder
from tests.shards.test_shards_merge import fsdp2

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tied() -> nn.Module:
    return models.qwen2(tied=True)


def policy(dtype: torch.dtype = torch.float32, autocast: bool = False, **config: Any) -> Any:
    """PEFT shares the factors of both while it does not convert them."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True}
    model: Any = get_peft_model(
        tied().to(dtype), LoraConfig(**options | config), autocast_adapter_dtype=autocast
    ).eval()
    trained(model)
    return model


def trained(model: Any, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def streamed(model: Any, **options: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in MergedWeights(model, **options)}


def shares(model: Any) -> bool:
    """Whether this PEFT ties by memory; 0.18 does not."""
    base = model.get_base_model()
    head = base.lm_head
    return hasattr(head, "lora_A") and base.model.embed_tokens.lora_embedding_A["default"].data_ptr() == (
        head.lora_B["default"].weight.data_ptr()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("r", [4, 1])
def test_it_is_merged_once(dtype: torch.dtype, r: int, tmp_path: Path) -> None:
    model = policy(dtype, r=r)
    if not shares(model):
        pytest.skip("this PEFT does not tie them")
    one, other = (d for d in read_deltas(model) if d.name in (EMBEDDING, HEAD))
    assert one.update() == other.update()
    assert one.key()[1:] != other.key()[1:]
    embedding, head = (
        m.base_layer for m in (model.get_base_model().model.embed_tokens, model.get_base_model().lm_head)
    )
    base, wanted = embedding.weight.detach().clone(), models.outputs(model)
    stream = streamed(model)
    assert HEAD not in stream
    for _ in range(3):  # read, watched, unchanged
        with merged(model):
            assert head.weight is embedding.weight
            assert_same_bits(embedding.weight.detach(), stream[EMBEDDING])
            near = 1e-5 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(models.outputs(model), wanted, atol=near, rtol=near)
        assert_same_bits(embedding.weight.detach(), base)
    layer = model.get_base_model().lm_head
    a, b = (getattr(layer, which)["default"].weight.detach().double() for which in ("lora_A", "lora_B"))
    exact = base.double() + layer.scaling["default"] * b @ a
    assert ((stream[EMBEDDING].double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-6).all()
    both = MergedWeights(model)
    both.keep_tied = True
    got = dict(both)
    assert_same_bits(got[HEAD], got[EMBEDDING])
    trained(model, 2)
    assert not torch.equal(streamed(model)[EMBEDDING], stream[EMBEDDING])
    # A scaling of one of them makes two of it.
    layer.scaling["default"] *= 2
    stream = streamed(model)
    assert not torch.equal(stream[HEAD], stream[EMBEDDING])
    with merged(model):
        assert head.weight is not embedding.weight
    assert head.weight is embedding.weight
    assert_same_bits(embedding.weight.detach(), base)


SAVED: dict[str, dict[str, Any]] = {
    "embedding": {},
    "both": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "embedding whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "both whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", SAVED)
def test_saved_as_tied(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """By both ways, also where PEFT loads the two into memory of their own."""
    from transformers import AutoModelForCausalLM

    model = policy(dtype, **SAVED[kind])
    if kind == "both whole" and Version(peft.__version__) < Version("0.19"):
        pytest.skip("this PEFT trains two copies, which part")
    if "whole" not in kind and not shares(model):
        pytest.skip("this PEFT does not tie them")
    write_base(tmp_path / "base", tied, dtype)
    torch.manual_seed(0)
    tied().to(dtype).save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    save_merged(model, tmp_path / "live")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "disk")
    live, disk = tensors(tmp_path / "live"), tensors(tmp_path / "disk")
    assert live.keys() == disk.keys() == tensors(tmp_path / "base").keys()
    for name, tensor in live.items():
        assert_same_bits(disk[name], tensor, name)
    for folder in ("live", "disk"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["tie_word_embeddings"] is True
        if dtype == torch.float32:
            loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
            torch.testing.assert_close(models.outputs(loaded), models.outputs(model), rtol=1e-5, atol=1e-5)
    read = read_folder(tmp_path / "adapter", tmp_path / "base", dtype)
    assert HEAD not in [meta.name for meta in MergedWeights(read).metadata()]


def test_two_updates_stay_two(tmp_path: Path) -> None:
    """PEFT converts the factors of a 16-bit base to float32, each into memory of its own: they train apart."""
    model = policy(torch.bfloat16, autocast=True)
    stream = streamed(model)
    assert not torch.equal(stream[HEAD], stream[EMBEDDING])
    save_merged(model, tmp_path / "live")
    assert json.loads((tmp_path / "live" / "config.json").read_text())["tie_word_embeddings"] is False
    write_base(tmp_path / "base", tied, torch.bfloat16)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "disk")
    assert json.loads((tmp_path / "disk" / "config.json").read_text())["tie_word_embeddings"] is False
    assert HEAD in tensors(tmp_path / "disk")


def sharded(rank: int) -> None:
    """Sharding copies each factor, so that they train apart: refused in place, and streamed apart."""
    model = policy()
    if not shares(model):
        return
    wanted = streamed(model)[EMBEDDING]
    for parameter in model.parameters():  # neither of torch's takes views the other way round
        parameter.data = parameter.data.contiguous()
    model = fsdp2(model)
    got = streamed(model)
    assert_same_bits(got[EMBEDDING], wanted)
    assert_same_bits(got[HEAD], wanted)
    with pytest.raises(UnsupportedAdapter, match=r"tied weight .* that is sharded.*memory of their own"), merged(model):
        raise AssertionError("the body ran")


def test_sharded() -> None:
    spawn(2, sharded)


def test_loaded_for_serving(tmp_path: Path) -> None:
    """A PeftModel that loads what was trained as one, in the dtype that it was trained in."""
    trained_model = policy()
    if not shares(trained_model):
        pytest.skip("this PEFT does not tie them")
    trained_model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    torch.manual_seed(0)
    loaded = PeftModel.from_pretrained(tied(), tmp_path / "adapter")
    assert_same_bits(streamed(loaded)[EMBEDDING], streamed(trained_model)[EMBEDDING])
    assert HEAD not in streamed(loaded)
