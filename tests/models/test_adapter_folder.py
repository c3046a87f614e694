"""A saved adapter, read by PEFT onto a base without values, is what it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import models
import pytest
import torch
from torch import nn

from lora_merge import InvalidInput, MissingExtra, UnsupportedAdapter, cli, read_deltas
from lora_merge.models.peft.folder import needs_values, read_folder
from lora_merge.stream.weights import MergedWeights

EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (models.qwen2, {}),
    "tied": (lambda: models.qwen2(tied=True), {"use_rslora": True}),
    "patterns": (models.qwen2, {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"up_proj": 32}}),
    "fan_in_fan_out": (models.gpt2, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "bf16": (models.qwen2, {"dtype": torch.bfloat16, "adapter_dtype": torch.bfloat16}),
    "mixtral": (models.mixtral, EXPERTS),
    "gpt_oss": (models.gpt_oss, EXPERTS),
    "whole": (models.qwen2, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "bias": "all"}),
}


def saved(kind: str, folder: Path) -> Any:
    build, options = KINDS[kind]
    model = models.with_lora(build, **options)
    base = model.get_base_model()
    base.config.architectures = [type(base).__name__]
    base.config.save_pretrained(folder / "base")
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_it_reads_as_it_was(kind: str, tmp_path: Path) -> None:
    model = saved(kind, tmp_path)
    dtype = next(model.get_base_model().parameters()).dtype
    read: Any = read_folder(tmp_path / "adapter", None, dtype)
    wanted, got = read_deltas(model), read_deltas(read)
    assert [delta.name for delta in got] == [delta.name for delta in wanted]
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.experts, a.transposed, a.weight.dtype) == (b.shape, b.experts, b.transposed, b.weight.dtype)
        for mine, theirs in zip(a.factors, b.factors, strict=True):
            assert mine.scaling == theirs.scaling
            for one, other in ((mine.lora_A, theirs.lora_A), (mine.lora_B, theirs.lora_B)):
                assert torch.equal(one.pieces[0].tensor.float(), other.pieces[0].tensor.float())
    assert MergedWeights(read, adapters=False).metadata() == MergedWeights(model, adapters=False).metadata()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    here = {n: p for n, p in read.named_parameters() if p.requires_grad}
    assert here.keys() == trained.keys()
    for name, parameter in here.items():
        assert torch.equal(parameter.float(), trained[name].float()), name


@pytest.mark.parametrize("offline", [True, False])
def test_a_base_of_another_machine(offline: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub is asked for what cannot be a repository's name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
    saved("plain", tmp_path)
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    said = rf"there is no folder '{tmp_path}/base' here, and it is no name of a repository"
    with pytest.raises(InvalidInput, match=f"^the adapter's base_model_name_or_path: {said}"):
        read_folder(tmp_path / "adapter", None, torch.float32)
    with pytest.raises(InvalidInput, match=f"^base: {said}"):
        read_folder(tmp_path / "adapter", tmp_path / "base", torch.float32)


def test_the_base_takes_no_memory(tmp_path: Path) -> None:
    """A base of 30 GB, in a process that may not have them."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 9, "num_attention_heads": 64}
    LlamaConfig(**sizes, num_key_value_heads=8, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "base")
    script = f"""
import resource, torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, LlamaForCausalLM
with torch.device("meta"):
    model = LlamaForCausalLM(AutoConfig.from_pretrained({str(tmp_path / "base")!r}))
from lora_merge.models.peft.folder import _placed
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = get_peft_model(_placed(model), LoraConfig(target_modules=["q_proj"], r=2))
model.save_pretrained({str(tmp_path / "adapter")!r}, save_embedding_layers=False)
from lora_merge.models.peft.folder import read_folder
from lora_merge.stream.weights import MergedWeights
read = read_folder({str(tmp_path / "adapter")!r}, {str(tmp_path / "base")!r}, torch.bfloat16)
writer = MergedWeights(read, adapters=False).bucket_writer()
assert writer.nbytes > 15e9, writer.nbytes
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def rewrite(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_what_does_not_belong_together(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    saved("plain", tmp_path)
    folder = tmp_path / "adapter"
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    first = next(iter(tensors))
    for changed, match in [
        ({k: t for k, t in tensors.items() if k != first}, "1 of its tensors are not in the file"),
        (tensors | {first.replace("layers.0", "layers.9"): tensors[first].clone()}, "1 of the file's have no place"),
        (tensors | {first: torch.zeros(3, 5)}, "size mismatch"),
        (tensors | {"base_model.model.model.strange.weight": torch.zeros(3)}, r"no place|no such parameter"),
    ]:
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(InvalidInput, match=match):
            read_folder(folder, None, torch.float32)
    save_file(tensors, file, {"format": "pt"})
    read_folder(folder, None, torch.float32)
    rewrite(folder, bias="all")
    with pytest.raises(InvalidInput, match=r"says that .*bias was trained, and its file does not hold it"):
        read_folder(folder, None, torch.float32)
    rewrite(folder, bias="none", init_lora_weights="olora")
    with pytest.raises(UnsupportedAdapter, match="changes the base that the adapter belongs to"):
        read_folder(folder, None, torch.float32)
    rewrite(folder, init_lora_weights=True, use_what_is_new=True, of_no_use=None)
    with pytest.raises(UnsupportedAdapter, match="use_what_is_new=True, which the PEFT here does not know"):
        read_folder(folder, None, torch.float32)
    rewrite(folder, use_what_is_new=False, peft_type="LOHA")
    with pytest.raises((UnsupportedAdapter, InvalidInput)):
        read_folder(folder, None, torch.float32)


def test_what_is_said_of_it(tmp_path: Path) -> None:
    """What the configuration says is refused for what it is, before PEFT reads it: loftq's takes scipy."""
    saved("plain", tmp_path)
    folder = tmp_path / "adapter"
    told = (folder / "adapter_config.json").read_text()
    for changes, kind, match in [
        ({"trainable_token_indices": [1, 5]}, InvalidInput, "does not fit the base"),
        ({"layer_replication": [[0, 2], [1, 2]]}, UnsupportedAdapter, "layer_replication: .* more layers"),
        ({"init_lora_weights": "loftq"}, UnsupportedAdapter, "init_lora_weights='loftq' changes the base"),
        ({"peft_type": None}, UnsupportedAdapter, "an adapter of type None"),
        ({"r": "four"}, InvalidInput, "cannot be read by the PEFT here|does not fit"),
        ({"r": 9}, InvalidInput, r"has a place of its size in the base: its adapter_config.json says something else"),
    ]:
        rewrite(folder, **changes)
        with pytest.raises(kind, match=match):
            read_folder(folder, None, torch.float32)
        (folder / "adapter_config.json").write_text(told)
    for text, match in (("{", "cannot be read"), ("[]", "must hold a JSON object, got a list")):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(InvalidInput, match=match):
            read_folder(folder, None, torch.float32)


def test_after_the_embeddings_were_resized(tmp_path: Path) -> None:
    """PEFT saves them along, in another size than the base's; what the error says to do works."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from lora_merge import save_merged

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    checkpoints.write_base(base, models.qwen2, torch.float32)

    def resized() -> Any:
        model = AutoModelForCausalLM.from_pretrained(base)
        model.resize_token_embeddings(110)
        return model

    trained = models.with_lora(resized, target_modules=["q_proj"])
    trained.save_pretrained(adapter)
    with pytest.raises(
        InvalidInput, match=r"as \[110, 32\], and the base has \[101, 32\].*resize_token_embeddings\(110\)"
    ):
        read_folder(adapter, base, torch.float32)
    save_merged(PeftModel.from_pretrained(resized(), adapter), tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (models.outputs(merged) - models.outputs(trained)).abs().max() < 1e-5


def test_a_mica_adapter(tmp_path: Path) -> None:
    """Its values come from the file: the base, which is not there, is not taken apart for them."""
    checkpoints.write_base(tmp_path / "base", models.qwen2, torch.float32)
    options = {"target_modules": ["q_proj"], "init_lora_weights": "mica"}
    model = checkpoints.write_adapter(tmp_path / "adapter", tmp_path / "base", models.qwen2, **options)
    read = read_folder(tmp_path / "adapter", None, torch.float32)
    for mine, theirs in zip(read_deltas(read), read_deltas(model), strict=True):
        for a, b in zip(mine.shards(), theirs.shards(), strict=True):
            assert torch.equal(a.pieces[0].tensor, b.pieces[0].tensor)


def test_dora_takes_values(tmp_path: Path) -> None:
    model = models.with_lora(models.qwen2, use_dora=True)
    base: nn.Module = model.get_base_model()
    base.config.architectures = [type(base).__name__]  # type: ignore[union-attr]
    model.save_pretrained(tmp_path / "adapter")
    assert needs_values(tmp_path / "adapter")
    plain = models.qwen2()
    plain.config.architectures = ["Qwen2ForCausalLM"]  # type: ignore[union-attr]
    plain.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    read = read_folder(tmp_path / "adapter", tmp_path / "base", torch.float32, values=True)
    weight = read.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight  # type: ignore[operator, union-attr]
    assert torch.equal(weight, plain.model.layers[0].mlp.up_proj.weight)  # type: ignore[union-attr]


def test_without_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'lora-merge\[peft\]'"):
        read_folder(tmp_path, None, torch.float32)


def test_the_command_without_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["load", "http://127.0.0.1:9", str(tmp_path)]) == cli.REFUSED
    refused = capsys.readouterr().err
    assert "nothing listens at http://127.0.0.1:9 (connection refused): is the server running" in refused
    assert "plugin" not in refused.lower()
    assert cli.main(["unload", "http://nowhere.invalid:8000", "--json"]) == cli.REFUSED
    assert "the host of http://nowhere.invalid:8000 is not known" in json.loads(capsys.readouterr().out)["error"]
    assert cli.main(["unload", "nowhere", "--json"]) == cli.REFUSED
    assert "must be a URL" in json.loads(capsys.readouterr().out)["error"]
    with pytest.raises(SystemExit) as raised:
        cli.main(["load", "http://127.0.0.1:9"])
    assert raised.value.code == 2
