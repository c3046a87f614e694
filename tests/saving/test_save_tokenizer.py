"""Whose tokenizer goes with merged weights: the base's and the adapter's are real ones, and the result's is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import models
import pytest

from lora_merge import InvalidInput, cli, merge_checkpoint

CALL = "<call>"


def tokenizer(words: int = 50) -> Any:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: n for n, word in enumerate(["<unk>", "<eos>", "<turn>", *(f"w{i}" for i in range(words))])}
    made = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", eos_token="<eos>")
    found.chat_template = "{{ messages }}"
    return found


def load(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base with a tokenizer, and an adapter without one."""
    base, adapter = checkpoints.pair("qwen2", tmp_path)
    tokenizer().save_pretrained(base)
    return base, adapter


def test_the_adapters_where_it_differs(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    (base / "vocab.json").write_text("{}")  # of a vocabulary alone, as slow tokenizers read it
    (base / "special_tokens_map.json").write_text('{"eos_token": "<eos>"}')
    trained = tokenizer()
    trained.add_special_tokens({"additional_special_tokens": [CALL]})
    trained.eos_token, trained.chat_template = "<turn>", "NEW {{ messages }}"
    trained.save_pretrained(adapter)
    (one,) = merge_checkpoint(base, adapter, tmp_path / "out")
    got = load(one.folder)
    assert got(f"w1 {CALL} w2")["input_ids"] == trained(f"w1 {CALL} w2")["input_ids"]
    assert (got.chat_template, got.eos_token) == (trained.chat_template, "<turn>")
    assert not (one.folder / "special_tokens_map.json").exists()
    assert (one.folder / "vocab.json").exists()
    told = next(note for note in one.notes if "tokenizer is that of adapter" in note)
    for what in ("chat template", f"added token ({CALL})", "eos_token <turn> for <eos>", "--tokenizer base"):
        assert what in told, told
    config = json.loads((one.folder / "config.json").read_text())
    generation = json.loads((one.folder / "generation_config.json").read_text())
    assert config["eos_token_id"] == got.eos_token_id == 2
    ends = generation["eos_token_id"]
    assert got.eos_token_id in (ends if isinstance(ends, list) else [ends])
    (kept,) = merge_checkpoint(base, adapter, tmp_path / "kept", tokenizer="base")
    assert load(kept.folder).eos_token == "<eos>"
    assert not kept.notes


def test_the_same_one_is_the_bases(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Saved again after training: other settings of the last call are no difference."""
    base, adapter = pair
    again = load(base)
    again.padding_side = "left"
    again("w1 w2", truncation=True, max_length=7)
    again.save_pretrained(adapter)
    (one,) = merge_checkpoint(base, adapter, tmp_path / "out")
    assert not one.notes
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (one.folder / name).read_bytes() == (base / name).read_bytes()
    (asked,) = merge_checkpoint(base, adapter, tmp_path / "asked", tokenizer="adapter")
    assert (asked.folder / "tokenizer.json").read_bytes() == (adapter / "tokenizer.json").read_bytes()


def test_a_template_alone(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    (adapter / "chat_template.jinja").write_text("MINE {{ messages }}")
    (one,) = merge_checkpoint(base, adapter, tmp_path / "out")
    assert load(one.folder).chat_template == "MINE {{ messages }}"
    assert load(one.folder)("w1 w2")["input_ids"] == tokenizer()("w1 w2")["input_ids"]
    assert "chat template" in one.notes[0]


def test_settings_of_a_processor(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """As older and as newer releases of transformers write them; a reader of either finds the adapter's."""
    base, adapter = pair
    mine = {"image_processor_type": "FastOne", "max_pixels": 100}
    (base / "preprocessor_config.json").write_text(json.dumps(mine | {"image_processor_type": "One", "size": 3}))
    (adapter / "processor_config.json").write_text(json.dumps({"image_processor": mine}))
    (one,) = merge_checkpoint(base, adapter, tmp_path / "same")
    assert not one.notes
    assert not (one.folder / "processor_config.json").exists()
    (adapter / "processor_config.json").write_text(json.dumps({"image_processor": mine | {"max_pixels": 64}}))
    (one,) = merge_checkpoint(base, adapter, tmp_path / "other")
    assert "image_processor (preprocessor_config.json)" in one.notes[0]
    old = json.loads((one.folder / "preprocessor_config.json").read_text())
    new = json.loads((one.folder / "processor_config.json").read_text())["image_processor"]
    assert (old["max_pixels"], new["max_pixels"], old["size"]) == (64, 64, 3)


def test_refused(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = pair
    out = tmp_path / "out"
    with pytest.raises(InvalidInput, match=r"tokenizer='adapter' \(--tokenizer adapter\): .* holds none"):
        merge_checkpoint(base, adapter, out, tokenizer="adapter")
    with pytest.raises(InvalidInput, match="tokenizer must be 'base' or 'adapter'"):
        merge_checkpoint(base, adapter, out, tokenizer="mine")
    trained = tokenizer()
    trained.add_tokens([f"<{n}>" for n in range(models.VOCABULARY - len(trained) + 1)])
    trained.save_pretrained(adapter)
    with checkpoints.nothing_left(tmp_path):
        assert cli.main(["merge", str(base), str(adapter), "--out", str(out)]) == cli.REFUSED
    assert f"as token {models.VOCABULARY} (1 such tokens), and the embedding has 101 rows" in capsys.readouterr().err
    assert cli.main(["merge", str(base), str(adapter), "--out", str(out), "--tokenizer", "base"]) == 0
    other = tmp_path / "other"
    checkpoints.write_adapter(other, base, models.qwen2)
    for folder, template in ((adapter, "one"), (other, "two")):
        words = tokenizer()
        words.chat_template = template
        words.save_pretrained(folder)
    with pytest.raises(InvalidInput, match="tokenizers of adapter and other differ"):
        merge_checkpoint(base, [adapter, other], tmp_path / "sum")
    merge_checkpoint(base, [adapter, other], tmp_path / "each", each=True)
    for folder, template in (("adapter", "one"), ("other", "two")):
        assert load(tmp_path / "each" / folder).chat_template == template
