"""Tensors that two files of a base hold, and two models in one folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, load, pair, tensors
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lora_merge import InvalidInput, MergedWeights, merge_checkpoint


@pytest.mark.parametrize("pickled", [True, False], ids=["bin", "safetensors"])
def test_a_tensor_in_two_shards(pickled: bool, tmp_path: Path) -> None:
    """It is taken once if it is the same; which of two is meant, nobody knows."""
    base, adapter = pair("qwen2", tmp_path)
    wanted = {name: tensor.clone() for name, tensor in MergedWeights(load(base, adapter))}
    held = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    stem, ending = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    one, other = (f"{stem}-0000{i}-of-00002.{ending}" for i in (1, 2))
    half = sorted(held)[: len(held) // 2]
    again = half[:3]  # in both; the index says of the first that it is in the one, of others that it is in the other
    files = {n: one if n in half and n not in again[1:] else other for n in sorted(held)}
    (base / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    save = torch.save if pickled else save_file
    second = {n: t.clone() for n, t in held.items() if n not in half or n in again}
    save({n: held[n] for n in half}, base / one)
    save(second, base / other)
    merge_checkpoint(base, [adapter], tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), wanted)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        n: f"model-0000{1 + (file == other)}-of-00002.safetensors" for n, file in files.items()
    }
    for changed in (second[again[2]] + 1, second[again[2]].double()):
        save(second | {again[2]: changed}, base / other)
        with pytest.raises(InvalidInput, match=f"{again[2]} is in {one} and, with other bits, in {other}"):
            merge_checkpoint(base, [adapter], tmp_path / "none")


@pytest.mark.parametrize("pickled", [True, False], ids=["bin", "safetensors"])
def test_shards_beside_one_file(pickled: bool, tmp_path: Path) -> None:
    """transformers leaves the one file where it saves shards, and reads it then; vLLM reads the shards."""
    base, adapter = pair("qwen2", tmp_path)
    (wanted,) = merge_checkpoint(base, [adapter], tmp_path / "wanted")
    model = AutoModelForCausalLM.from_pretrained(base)
    model.save_pretrained(base, max_shard_size="20KB")
    shards = sorted(base.glob("model-*"))
    if pickled:
        torch.save(load_file(base / "model.safetensors"), base / "pytorch_model.bin")
        index = json.loads((base / "model.safetensors.index.json").read_text())
        for path in [*shards, base / "model.safetensors", base / "model.safetensors.index.json"]:
            if path in shards:
                torch.save(load_file(path), base / f"{path.stem}.bin")
            path.unlink()
        index["weight_map"] = {n: file.replace("safetensors", "bin") for n, file in index["weight_map"].items()}
        (base / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        shards = sorted(base.glob("model-*"))
    merge_checkpoint(base, [adapter], tmp_path / "same")
    assert_same(tensors(tmp_path / "same"), tensors(wanted.folder))
    held = torch.load(shards[1]) if pickled else load_file(shards[1])
    name = sorted(held)[0]
    held[name] = held[name] + 1
    (torch.save if pickled else save_file)(held, shards[1])
    one = "pytorch_model.bin" if pickled else "model.safetensors"
    with pytest.raises(InvalidInput, match=f"{name} is in {one} and, with other bits, in {shards[1].name}, which"):
        merge_checkpoint(base, [adapter], tmp_path / "none")
    shards[0].unlink()  # what is left is no model
    merge_checkpoint(base, [adapter], tmp_path / "left")
