"""save_merged of live models, plain and sharded over real ranks: the bits of MergedWeights, in a folder that
transformers loads; the length of the stream; and adapters that are named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkpoints
import models
import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same, tensors
from peft import LoraConfig, get_peft_model
from processes import spawn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_merge import InvalidInput, MergedWeights, Saved, merge_checkpoint, merged, save_merged
from lora_merge.saving import writer
from tests.saving.test_save_tokenizer import load, tokenizer
from tests.shards.test_shards_merge import Wrap, fsdp1_one_unit, fsdp2, hsdp


def streamed(model: Any, **options: Any) -> dict[str, Tensor]:
    weights = MergedWeights(model, **{k: v for k, v in options.items() if k != "seed"})
    return {name: t.clone() for b in weights.buckets(seed=options.get("seed")) for name, t in b.tensors()}


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_it_is_the_stream(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    build, options = checkpoints.KINDS[kind]
    model = models.with_lora(build, **options)
    saved = save_merged(model, tmp_path / "out", max_shard_size="20KB", bucket_bytes=1 << 12, verify=True)
    assert isinstance(saved, Saved)
    wanted = streamed(model)
    assert_same(tensors(tmp_path / "out"), wanted)
    assert (saved.tensors, saved.verified) == (len(wanted), saved.nbytes)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").eval()
    assert type(loaded) is type(model.get_base_model())
    if "of a tied model" in kind:  # vLLM would load one of the two only
        tied = json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
        both = hasattr(model.get_base_model().get_output_embeddings(), "lora_A")  # one update, from PEFT 0.19 on
        assert tied is (kind.startswith("both") and both)
    if next(loaded.parameters()).dtype == torch.float32:
        a, b = models.outputs(model), loaded(models.tokens()).logits
        assert (a - b).abs().max() <= 1e-5 * a.abs().max()


@pytest.mark.parametrize("rounding", [{}, {"rounding": "stochastic", "seed": 5}])
def test_dtype_and_rounding(rounding: dict[str, Any], tmp_path: Path) -> None:
    model = models.with_lora(models.qwen2)
    save_merged(model, tmp_path / "out", dtype=torch.bfloat16, **rounding)
    assert_same(tensors(tmp_path / "out"), streamed(model, dtype=torch.bfloat16, **rounding))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_model_without_adapters(tmp_path: Path) -> None:
    saved = save_merged(model := models.qwen2(), tmp_path / "out")
    assert_same(tensors(tmp_path / "out"), streamed(model))
    assert f": no adapter in {len(streamed(model))} tensors, " in str(saved)


class Tokenizer:
    def __init__(self, more: Sequence[str] = ()) -> None:
        self._files = ["tokenizer.json", *more]

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir(exist_ok=True)
        for name in self._files:
            (Path(folder) / name).write_text('{"mine": true}')


def test_what_goes_along(tmp_path: Path) -> None:
    """The tokenizer that is given, or that of the folder which the model came from; and no model of transformers'."""
    base, adapter = checkpoints.pair("qwen2", tmp_path)
    (base / "tokenizer.json").write_text("{}")
    (base / "chat_template.jinja").write_text("{{ x }}")
    model = checkpoints.load(base, adapter)
    saved = save_merged(model, tmp_path / "a")
    assert saved is not None
    assert not saved.notes
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "a" / "chat_template.jinja").exists()
    save_merged(model, tmp_path / "b", tokenizer=Tokenizer())
    assert json.loads((tmp_path / "b" / "tokenizer.json").read_text()) == {"mine": True}
    model.get_base_model().config._name_or_path = ""
    model.get_base_model().name_or_path = ""
    saved = save_merged(model, tmp_path / "c")
    assert saved is not None
    assert "no tokenizer was saved" in saved.notes[0]
    config = json.loads((base / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16"}
    (base / "config.json").write_text(json.dumps(config | quantised | {"text_config": quantised}))
    (base / "hf_quant_config.json").write_text("{}")
    save_merged(nn.Linear(3, 2), tmp_path / "d", base=base)
    assert not (tmp_path / "d" / "hf_quant_config.json").exists()
    said = json.loads((tmp_path / "d" / "config.json").read_text())
    plain = {"torch_dtype": "bfloat16"}
    assert said == config | {"text_config": plain, "torch_dtype": "float32"}  # as the tensors are
    assert (tmp_path / "d" / "tokenizer.json").exists()
    assert load_file(tmp_path / "d" / "model.safetensors").keys() == {"weight", "bias"}


def test_nothing_of_the_bases_tokenizer_is_read_beside_the_one_that_is_given(tmp_path: Path) -> None:
    """transformers reads special_tokens_map.json, added_tokens.json and templates wherever they lie."""
    base, adapter = checkpoints.pair("qwen2", tmp_path)
    tokenizer().save_pretrained(base)
    (base / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    (base / "added_tokens.json").write_text('{"<theirs>": 53}')
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool.jinja").write_text("THEIRS")
    for name in ("configuration_own.py", "tokenization_own.py"):
        (base / name).touch()
    mine = tokenizer()
    mine.eos_token, mine.chat_template = "<turn>", None
    mine.add_tokens(["<mine>"])
    model = checkpoints.load(base, adapter)
    save_merged(model, tmp_path / "out", tokenizer=mine)
    got = load(tmp_path / "out")
    assert (got.eos_token, got.chat_template, got.get_vocab()) == ("<turn>", None, mine.get_vocab())
    assert all((tmp_path / "out" / name).exists() for name in ("configuration_own.py", "tokenization_own.py"))
    (base / "preprocessor_config.json").write_text("{}")
    of_processor = {"preprocessor_config.json", "chat_template.jinja"}  # stay if a tokenizer without a template came
    for number, (given, kept) in enumerate(
        [
            (Tokenizer(), of_processor),
            (Tokenizer(["chat_template.json"]), {"preprocessor_config.json"}),
            (Tokenizer(["processor_config.json"]), set()),
        ]
    ):
        save_merged(model, tmp_path / str(number), tokenizer=given)
        assert {name for name in of_processor if (tmp_path / str(number) / name).exists()} == kept


def test_the_bases_tokenizer_beside_more_rows(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base, _ = checkpoints.pair("qwen2", tmp_path)
    tokenizer().save_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(120)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    saved: Any = save_merged(model, tmp_path / "out")
    assert f"120 rows of embeddings, and {base}, whose tokenizer goes along, {models.VOCABULARY}" in saved.notes[0]
    saved = save_merged(model, tmp_path / "mine", tokenizer=tokenizer())
    assert not saved.notes


def test_refused(tmp_path: Path) -> None:
    model = models.with_lora(models.qwen2)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "theirs").write_text("kept")
    for options, match in [
        ({"out": tmp_path / "full"}, "not empty"),
        ({"out": tmp_path / "full" / "theirs"}, "is a file"),
        ({"seed": 1}, "belongs to"),
        ({"rounding": "stochastic"}, "pass seed="),
        ({"rounding": "up"}, "rounding must be"),
        ({"max_shard_size": 0}, "like 5GB"),
        ({"adapter_names": ["none"]}, "no adapter 'none'"),
        ({"base": tmp_path / "nowhere"}, "there is no such folder"),
    ]:
        with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match=match):
            save_merged(model, **{"out": tmp_path / "out", **options})
    save_merged(model, tmp_path / "full", force=True)
    assert not (tmp_path / "full" / "theirs").exists()
    base, adapter = checkpoints.pair("qwen2", tmp_path / "run")
    loaded = checkpoints.load(base, adapter)
    for out in (base, tmp_path / "run"):
        with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match=r"holds or is .*base, which"):
            save_merged(loaded, out, force=True)
    save_merged(loaded, base / "merged")
    with merged(model), pytest.raises(Exception, match="inside"):
        save_merged(model, tmp_path / "inside")


class Holder(nn.Module):
    """A module of somebody's own around a model."""

    def __init__(self, model: nn.Module, beside: nn.Module | None = None) -> None:
        super().__init__()
        self.policy, self.value = model, beside


def test_a_model_inside_of_another_module(tmp_path: Path) -> None:
    """Its config says how checkpoints of it are named: the module around it is no part of that."""
    from transformers import AutoModelForCausalLM

    model = models.with_lora(models.qwen2)
    save_merged(Holder(model), tmp_path / "out")
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match=r"value\.weight lies outside of the"):
        save_merged(Holder(model, nn.Linear(8, 1)), tmp_path / "more")


def test_experts_whose_conversion_asks_for_shapes(tmp_path: Path) -> None:
    """Of parameters, by their names in the model without adapters."""
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "vocab_size": 99, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "intermediate_size": 48}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "out_hidden_size": 32,
              "deepstack_visual_indexes": [0]}  # fmt: skip
    base = Qwen3VLMoeForConditionalGeneration(Qwen3VLMoeConfig(text_config=text, vision_config=vision))
    experts = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
    model = get_peft_model(base, config)
    save_merged(model, tmp_path / "out")
    loaded, told = type(base).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    wanted = model.merge_and_unload().state_dict()
    for name, tensor in loaded.state_dict().items():
        assert (tensor - wanted[name]).abs().max() < 1e-5, name


def _sharded(rank: int, wrap: Wrap, kind: str, folder: Path) -> None:
    build, options = checkpoints.KINDS[kind]
    whole = models.with_lora(build, **options)
    wanted = streamed(whole)
    model = wrap(models.with_lora(build, **options))
    saved = save_merged(model, folder / "out", max_shard_size="20KB", bucket_bytes=1 << 14)
    assert (saved is not None) == (rank == 0)
    dist.barrier()
    assert_same(tensors(folder / "out"), wanted)
    config = json.loads((folder / "out" / "config.json").read_text())
    assert config["architectures"] == [type(whole.get_base_model()).__name__]
    with pytest.raises(InvalidInput, match=r"not empty|other copy"):  # on every rank of rank 0's copy
        _saved(model, folder / "out")
    _break_off(rank, model, folder)
    dist.barrier()


def _saved(model: Any, out: Path) -> None:
    """Save; a copy of the model that does not write has nothing to raise."""
    if save_merged(model, out, bucket_bytes=1 << 12) is None:
        raise InvalidInput("this is the other copy")


def _break_off(rank: int, model: Any, folder: Path) -> None:
    """The disk is full in the middle: every rank of the copy raises, and nothing is there."""
    written = writer.write_from
    calls = 0

    def full(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise OSError(28, "No space left on device")
        written(*arguments)

    writer.write_from = full
    try:
        with pytest.raises(InvalidInput, match=r"disk is full|other copy"):
            _saved(model, folder / "second")
    finally:
        writer.write_from = written
    dist.barrier()
    assert sorted(p.name for p in folder.iterdir()) == ["out"], rank


@pytest.mark.parametrize(
    ("wrap", "world"), [(fsdp2, 2), (fsdp1_one_unit, 2), (hsdp, 4)], ids=["fsdp2", "fsdp1", "hsdp"]
)
def test_sharded(wrap: Wrap, world: int, tmp_path: Path) -> None:
    spawn(world, _sharded, wrap, "bf16 adapters", tmp_path)


def test_the_length_of_the_stream() -> None:
    for build, options in (checkpoints.KINDS[kind] for kind in ("tied, rslora", "mixtral", "whole")):
        weights = MergedWeights(models.with_lora(build, **options))
        assert len(weights) == len(list(weights)) == len(weights.metadata())
        assert weights
    assert MergedWeights(nn.Identity())


def test_adapters_by_name(tmp_path: Path) -> None:
    """Exactly these, in any order, whatever acts; after it all is as before, requires_grad too."""
    model = models.with_lora(models.qwen2, adapters=("one", "two", "three"), target_modules=["q_proj", "embed_tokens"])
    for names in (["one"], ["three", "two"], ["two", "three"], ["one", "two", "three"]):
        model.base_model.set_adapter(names)
        logits, wanted = models.outputs(model), streamed(model)
        model.base_model.set_adapter(["one"])
        flags = [p.requires_grad for p in model.parameters()]
        before = models.outputs(model)
        assert_same(streamed(model, adapter_names=names), wanted)
        with merged(model, adapter_names=names):
            inside = models.outputs(model)
        assert (inside - logits).abs().max() <= 1e-5 * logits.abs().max()
        with model.disable_adapter():
            assert_same(streamed(model, adapter_names=names), wanted)
        save_merged(model, tmp_path / "-".join(names), adapter_names=names)
        assert_same(tensors(tmp_path / "-".join(names)), wanted)
        assert model.active_adapters == ["one"]
        assert torch.equal(models.outputs(model), before)
        assert [p.requires_grad for p in model.parameters()] == flags
    weights = MergedWeights(model, adapter_names=["two"])
    first = {n: t.clone() for n, t in weights}
    model.base_model.set_adapter("three")  # it is none of its business
    assert_same({n: t.clone() for n, t in weights}, first)


def test_adapters_by_name_with_copies_of_modules() -> None:
    """The named one's copy is streamed and computed with; two copies of one module have no sum."""
    model: Any = models.with_lora(models.qwen2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("plain", LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False))
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    head = model.base_model.model.lm_head
    with torch.no_grad():
        for number, name in enumerate(("default", "other"), start=1):
            head.modules_to_save[name].weight.add_(number)
    for name in ("default", "plain", "other"):
        model.set_adapter(name)
        wanted, logits = streamed(model), models.outputs(model)
        model.set_adapter("default")
        assert_same(streamed(model, adapter_names=[name]), wanted)
        with merged(model, adapter_names=[name]):
            assert (models.outputs(model) - logits).abs().max() <= 1e-4 * logits.abs().max()
    assert torch.equal(streamed(model, adapter_names=["plain", "other"])["lm_head.weight"], wanted["lm_head.weight"])
    with pytest.raises(InvalidInput, match="default and other each have a copy"):
        streamed(model, adapter_names=["default", "other"])


def test_names_that_are_none() -> None:
    model = models.with_lora(models.qwen2, adapters=("one", "two"))
    for names, match in [
        (["three"], "no adapter 'three'; there are one, two"),
        ("one", "must be a list of names"),
        ([], "at least one name"),
        (["one", "one"], "each once"),
        ([1], "must be a list of names"),
    ]:
        with pytest.raises(InvalidInput, match=match):
            list(MergedWeights(model, adapter_names=names))  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match=match), merged(model, adapter_names=names):  # type: ignore[arg-type]
            pass
    with pytest.raises(InvalidInput, match="adapters=False"):
        MergedWeights(model, adapters=False, adapter_names=["one"])
    with pytest.raises(InvalidInput, match="expected a model with adapters of PEFT's"):
        list(MergedWeights(models.qwen2(), adapter_names=["one"]))
    assert model.active_adapters == ["one", "two"]


def test_what_the_class_does_not_build(tmp_path: Path) -> None:
    """A head for several tokens at once comes from the base, bit for bit; data beside the weights, too."""
    base, adapter = checkpoints.pair("qwen2", tmp_path)
    more = {"mtp.fc.weight": torch.randn(5, 3).bfloat16(), "mtp.step": torch.tensor(7)}
    held = load_file(base / "model.safetensors")
    save_file(held | more, base / "model.safetensors", {"format": "pt"})
    torch.save({"speaker": torch.rand(3)}, base / "spk_dict.pt")
    torch.save({name: t.clone() for name, t in held.items()}, base / "copy.pt")
    (base / "optimizer.pt").write_text("of a trainer")
    model: Any = checkpoints.load(base, adapter)
    wanted = streamed(model) | more
    for number, options in enumerate(({"base": base}, {}, {"base": base, "max_shard_size": "20KB"})):
        saved = save_merged(model, tmp_path / f"{number}", verify=True, **options)
        assert_same(tensors(tmp_path / f"{number}"), wanted)
        assert saved is not None
        assert saved.verified == sum(t.nbytes for t in wanted.values())
        assert any("2 tensors of heads that draft further tokens (mtp.fc.weight" in note for note in saved.notes)
    (merged_there,) = merge_checkpoint(base, adapter, tmp_path / "disk")
    assert any("2 tensors of heads that draft further tokens (mtp.fc.weight" in note for note in merged_there.notes)
    assert_same(tensors(tmp_path / "disk"), wanted)
    for folder in ("0", "1", "disk"):
        assert (tmp_path / folder / "spk_dict.pt").read_bytes() == (base / "spk_dict.pt").read_bytes()
        assert not {p.name for p in (tmp_path / folder).iterdir()} & {"copy.pt", "optimizer.pt"}
    inside = model.get_base_model()
    inside.config._name_or_path = inside.name_or_path = ""
    inside.config.num_nextn_predict_layers = 1
    lacking = save_merged(model, tmp_path / "without")
    assert lacking is not None
    assert any("num_nextn_predict_layers" in note and "pass base=" in note for note in lacking.notes)
    config = json.loads((base / "config.json").read_text()) | {"architectures": ["Qwen2Model"]}
    (base / "config.json").write_text(json.dumps(config))
    other = save_merged(model, tmp_path / "other", base=base)
    assert other is not None
    assert "a Qwen2Model, holds 2 tensors that a Qwen2ForCausalLM does not build, mtp" in other.notes[0]
