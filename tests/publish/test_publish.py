"""Versions in a store: what is in them, when they are visible, what is refused, and which rank writes what."""

from __future__ import annotations

import copy
import dataclasses
import json
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from processes import spawn
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_merge import InvalidInput, LoraMergeError, Publisher, PushRefused, UnsupportedAdapter, train_merged
from lora_merge.cli import main
from lora_merge.publish import base, contents
from lora_merge.publish.manifest import MANIFEST, Manifest
from lora_merge.publish.publisher import rollback
from lora_merge.publish.status import status
from lora_merge.publish.store import Store
from lora_merge.shards.ranks import Ranks
from tests.shards.test_shards_merge import fsdp1_flat, fsdp2, fsdp2_columns, hsdp

KEY = "sixteen bytes or more"
FILES = {"adapter_config.json", "adapter_model.safetensors"}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)), name


def saved(model: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(model).items()}


def held(store: Store, version: int, into: Path) -> dict[str, Tensor]:
    return load_file(store.fetch(store.manifest(version), into) / "adapter_model.safetensors")


KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "rsLoRA, patterns": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"layers.1.*v_proj": 32}},
    "DoRA": {"use_dora": True},
    "biases": {"bias": "all"},
    "a head": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [3, 5]},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_version_is_what_peft_saves(kind: str, tmp_path: Path) -> None:
    model = models.with_lora(models.qwen2, **KINDS[kind])
    model.save_pretrained(tmp_path / "saved")
    published = Publisher(model, tmp_path / "run7").publish()
    folder = tmp_path / "run7" / "versions" / "00000001"
    assert {file.name for file in folder.iterdir()} == {*FILES, MANIFEST}
    same(load_file(folder / "adapter_model.safetensors"), load_file(tmp_path / "saved" / "adapter_model.safetensors"))
    config, wanted = (json.loads((f / "adapter_config.json").read_text()) for f in (folder, tmp_path / "saved"))
    assert config.pop("base_model_name_or_path") == (wanted.pop("base_model_name_or_path") or None)  # "" in old ones
    assert config == wanted
    assert published.name == Store(tmp_path / "run7").manifest(1).name
    assert published.nbytes == sum((folder / name).stat().st_size for name in FILES)
    # PEFT reads it as it lies.
    again = PeftModel.from_pretrained(models.with_lora(models.qwen2).unload(), folder)
    same(saved(again), saved(model))


@pytest.mark.parametrize("url", ["{}/run7", "file://{}/run7", "memory://{}/run7"])
def test_versions(url: str, tmp_path: Path) -> None:
    model = models.with_lora(models.qwen2)
    url = url.format(tmp_path)
    publisher, store, policies = Publisher(model, url, keep=2), Store(url), dict[int, dict[str, Tensor]]()
    for step in range(5):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.01 * (step + 1))
        published = publisher.publish(pin=step == 1)
        policies[published.version] = saved(model)
    assert list(store.newest()) == [5, 4, 2]
    manifests = [store.manifest(version) for version in (5, 4, 2)]
    assert [m.parent for m in manifests] == [4, 3, 1]
    assert len({m.base.fingerprint for m in manifests}) == 1
    for version in (5, 4, 2):
        same(held(store, version, tmp_path / "cache"), policies[version])
    # A version once more, by the publisher and by somebody else.
    assert publisher.rollback(2).version == 6
    same(held(store, 6, tmp_path / "cache"), policies[2])
    assert store.manifest(6).copy_of == 2
    publisher.publish()
    made = rollback(store, 6)
    assert (made.version, made.copy_of, made.parent) == (8, 6, 7)
    with pytest.raises(PushRefused, match=rf"from here into \S+ was 7, and {made.name} is there.*a rollback"):
        publisher.publish()
    # Another process goes on from what is there.
    assert Publisher(model, url).publish().version == 9
    store.pin(2, False)
    Publisher(model, url, keep=1).publish()
    assert store.numbers() == [10]
    if not url.startswith("memory"):
        assert {path.name for path in (tmp_path / "run7" / "versions").iterdir()} == {"00000010"}  # no drafts


def test_what_is_torn_or_foreign_is_refused_by_name(tmp_path: Path) -> None:
    model = models.with_lora(models.qwen2)
    Publisher(model, tmp_path / "run7", key=KEY).publish()
    versions, store = tmp_path / "run7" / "versions", Store(tmp_path / "run7", KEY)
    good = versions / "00000001"
    manifest = json.loads((good / MANIFEST).read_text())

    def changed(change: Callable[[Path], object]) -> Path:
        shutil.rmtree(versions / "00000002", ignore_errors=True)
        shutil.copytree(good, versions / "00000002")
        change(versions / "00000002")
        return versions / "00000002"

    def said(**values: Any) -> Callable[[Path], object]:
        return lambda folder: (folder / MANIFEST).write_text(json.dumps(manifest | {"version": 2} | values))

    weights = "adapter_model.safetensors"
    entry = manifest["files"][weights]
    for change, message in (
        (lambda folder: (folder / MANIFEST).unlink(), r"version 2 of \S+ has no manifest.json: .* torn"),
        (lambda folder: (folder / MANIFEST).write_text("{"), r"is no JSON object .*torn"),
        (lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe"), r"is no JSON object"),
        (lambda folder: (folder / MANIFEST).write_text("[]"), r"is no JSON object \(a list\)"),
        (lambda folder: (folder / MANIFEST).write_text("[" * 100000), r"is no JSON object"),
        (lambda folder: None, r"is of version 1: somebody has copied it"),
        (said(), r"was changed, or signed with another key"),
        (said(signature=""), r"is not signed"),
        (said(signature="\u00e9" * 64), r"was changed, or signed with another key"),
        (said(format="somebody's"), r"is not lora_merge's: its format is \"?'?somebody's"),
        (said(layout=2), r"has layout 2, and this lora_merge reads 1"),
        (said(files={"../../etc/passwd": entry}), r"names the files \['../../etc/passwd'\], and a version has"),
        (said(run="../../x"), r"names a run '../../x', which is no name of a store"),
        (said(files=manifest["files"] | {weights: {"nbytes": "many", "blake2b": ""}}), r"says no size and digest"),
        (said(files={**manifest["files"], "adapter_model.bin": entry}), r"names the files .*adapter_model.bin"),
        (said(files=[]), r"lacks something, or has it in another form"),
        (said(base={"name": "x"}), r"lacks something, or has it in another form"),
        (said(base={"name": "x", "samples": {"norm": 5}}), r"values of other types"),
        (said(base={"name": "x", "samples": {"norm": {"dtype": "nosuch", "digest": ""}}}), r"values of other types"),
        (said(version=2.0), r"values of other types"),
        (said(parent={}), r"values of other types"),
    ):
        changed(change)
        with pytest.raises(InvalidInput, match=message):
            store.manifest(2)
    shutil.rmtree(versions / "00000002")
    config = "adapter_config.json"
    nbytes = manifest["files"][config]["nbytes"]
    for change, message in (
        (lambda folder: (folder / weights).unlink(), rf"version 1 of \S+ lacks {weights}: torn"),
        (lambda folder: os.truncate(folder / weights, 1000), rf"{weights} has 1000 bytes, .* says \d+: torn"),
        (lambda folder: (folder / config).write_bytes(b" " * nbytes), rf"{config} is not what its manifest says"),
    ):
        kept = shutil.copytree(good, tmp_path / "kept")
        change(good)
        with pytest.raises(InvalidInput, match=message):
            store.fetch(store.manifest(1), tmp_path / "cache")
        assert not list((tmp_path / "cache").iterdir())  # nothing is left of it
        shutil.rmtree(good)
        kept.rename(good)
    store.fetch(store.manifest(1), tmp_path / "cache")
    # Whoever has no key takes signed versions, too; a key that is too short is none.
    assert Store(tmp_path / "run7").manifest(1).signature
    with pytest.raises(InvalidInput, match="at least 16 bytes, got 5"):
        Store(tmp_path / "run7", "short")
    # What cannot be trusted is nobody's parent, and its number is not given again.
    shutil.copytree(good, versions / "00000007")
    again = Publisher(model, tmp_path / "run7", key=KEY).publish()
    assert again.version == 8
    assert store.manifest(8).parent == 1


def test_what_cannot_be_published_is_refused(tmp_path: Path) -> None:
    def refused(model: Any, message: str, kind: type[LoraMergeError] = InvalidInput, **options: Any) -> None:
        with pytest.raises(kind, match=message):
            Publisher(model, tmp_path / "run7", **options).publish()
        assert not (tmp_path / "run7").exists() or not Store(tmp_path / "run7").numbers()

    refused(models.qwen2(), "must be a PeftModel, .* got Qwen2ForCausalLM")
    refused("model", "must be a PeftModel")
    for keep in (0, 2.5, "3"):
        refused(models.with_lora(models.qwen2), "keep must be at least 1", keep=keep)
    model = models.with_lora(models.qwen2)
    with model.disable_adapter():
        refused(model, r"layers.0.self_attn.q_proj computes without its adapter 'default'.* leave disable_adapter\(\)")
    model.base_model.model.model.layers[1].mlp.up_proj.set_adapter([])
    refused(model, r"layers.1.mlp.up_proj computes without its adapter")
    model = models.with_lora(models.qwen2)
    model.base_model.model.model.norm.weight.requires_grad_()
    refused(model, r"base_model.model.model.norm.weight is trained .*PEFT does not save it")
    model = models.with_lora(models.qwen2)
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    layer.set_scale("default", 3)
    refused(model, r"layers.1.self_attn.q_proj has rank 4 and scales by 4.5.*set_scale")
    refused(models.with_lora(models.qwen2, adapters=("default", "more")), r"holds one adapter, and 2 are active")
    refused(models.with_lora(models.qwen2, init_lora_weights="olora"), "olora", UnsupportedAdapter)
    model = models.with_lora(models.qwen2, dtype=torch.bfloat16)
    with train_merged(model, rounding="stochastic"):
        refused(model, "rounding='stochastic', and engines round what is published to nearest")
    (tmp_path / "file").touch()
    for url in (tmp_path / "file", tmp_path / "file" / "in"):
        with pytest.raises(InvalidInput, match=r"is no store: .*/file is a file, expected a folder"):
            Store(url)
    with pytest.raises(InvalidInput, match="the URL of the store is empty"):
        Store("")
    with pytest.raises(InvalidInput, match=r"nosuch://there is no URL of a store"):
        Publisher(models.with_lora(models.qwen2), "nosuch://there")


OTHER_BASE = r"trained on another base .* than this model has now .*: {} is not the same.* publish into a store of its"


def test_versions_of_one_store_have_one_base(tmp_path: Path) -> None:
    """Also where bases differ in what no adapter changes, as after a training of the rest; whatever is adapted."""
    url, numbers = tmp_path / "run7", Store(tmp_path / "run7").numbers
    Publisher(models.with_lora(models.qwen2), url).publish()
    with pytest.raises(InvalidInput, match=OTHER_BASE.format(r"lm_head\.weight")):
        Publisher(models.with_lora(models.qwen2, seed=3), url).publish()
    narrow = models.with_lora(models.qwen2, target_modules=["q_proj"])
    assert Publisher(narrow, url).publish().version == 2
    narrow.base_model.model.model.norm.weight.data.mul_(2)
    with pytest.raises(InvalidInput, match=OTHER_BASE.format(r"model\.norm\.weight")):
        Publisher(narrow, url).publish()
    assert numbers() == [1, 2]


@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}], ids=str)
def test_a_base_that_changes_while_it_is_trained_on(options: dict[str, Any], tmp_path: Path) -> None:
    """Engines would merge what was trained on the new base into the one that they have. What a version holds whole is
    no base, and each base is read once."""
    model = models.with_lora(models.qwen2, **options)
    publisher, store = Publisher(model, tmp_path / "run7"), Store(tmp_path / "run7")

    def trained() -> int:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.add_(0.01)
        return publisher.publish().version

    with mock.patch.object(base, "samples_of", wraps=base.samples_of) as reads:
        assert [trained() for _ in range(3)] == [1, 2, 3]
    assert reads.call_count == 1
    layer = model.base_model.model.model.layers[1].self_attn.q_proj
    before = layer.base_layer.weight.detach().clone()
    for change in (
        lambda: layer.base_layer.weight.data.mul_(2),
        lambda: layer.base_layer.load_state_dict({"weight": before + 1}, strict=False, assign=True),
    ):
        change()
        with pytest.raises(InvalidInput, match=OTHER_BASE.format(r"\S+layers\.1\.self_attn\.q_proj\.weight")):
            trained()
    assert store.numbers() == [1, 2, 3]
    layer.base_layer.weight.data.copy_(before)
    assert trained() == 4
    assert len({store.manifest(version).base.fingerprint for version in store.numbers()}) == 1


def test_a_trained_model_is_published_in_training(tmp_path: Path) -> None:
    """Also while its base holds the adapters, and an adapter of another name."""
    model = models.with_lora(models.qwen2, adapters=("policy",))
    publisher = Publisher(model, tmp_path / "run7")
    fingerprint = []
    for _ in range(2):
        publisher.publish()
        fingerprint.append(Store(tmp_path / "run7").manifest(publisher.publish().version).base.fingerprint)
        with train_merged(model):
            assert model(models.tokens()).logits.sum().isfinite()
            wanted = {n: t.detach().clone() for n, t in get_peft_model_state_dict(model, adapter_name="policy").items()}
            version = Publisher(model, tmp_path / "run7").publish().version
        same(held(Store(tmp_path / "run7"), version, tmp_path / "cache"), wanted)
        publisher = Publisher(model, tmp_path / "run7")
    assert len(set(fingerprint)) == 1


def die_in_the_middle(rank: int, folder: Path) -> None:
    """Publish, and die when the second version is all there, but for its name."""
    publisher = Publisher(models.with_lora(models.qwen2), folder)
    publisher.publish()
    with mock.patch.object(Path, "rename", side_effect=lambda *_: os._exit(3)):
        publisher.publish()


def test_a_publisher_that_dies_leaves_no_version(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="exit code 3"):
        spawn(1, die_in_the_middle, tmp_path / "run7")
    store = Store(tmp_path / "run7")
    assert list(store.newest()) == [1]
    publisher = Publisher(models.with_lora(models.qwen2), tmp_path / "run7", keep=1)
    assert publisher.publish().version == 2
    assert publisher.publish().version == 3
    assert {path.name for path in (tmp_path / "run7" / "versions").iterdir()} == {"00000003"}


@pytest.mark.parametrize("other", ["forked", "copied", "pickled"])
def test_what_comes_of_a_publisher_is_another_one(other: str, tmp_path: Path) -> None:
    """Versions of two models would follow one another, and neither trainer would hear of it."""
    one = Publisher(models.with_lora(models.qwen2), tmp_path / "run7")
    one.publish()
    if other == "forked":
        # Python's own start of a process; a bare fork would run the tests' end twice.
        child = multiprocessing.get_context("fork").Process(target=publish_as_another, args=(one,))
        child.start()
        child.join(60)
        assert child.exitcode == 0
    else:
        publish_as_another(copy.deepcopy(one) if other == "copied" else pickle.loads(pickle.dumps(one)))
    with pytest.raises(PushRefused, match=r"was 1, and run7@2-\w+ is there.*another trainer"):
        one.publish()


def publish_as_another(publisher: Publisher) -> None:
    """The version before is not this one's; who makes a new one, as the error says, goes on from there."""
    with pytest.raises(PushRefused, match=r"another trainer or a rollback\. Make a new Publisher"):
        publisher.publish()
    publisher._last = None
    publisher.publish()


def test_two_publishers_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for url in (str(tmp_path / "run7"), f"memory://{tmp_path}/run7"):
        one, other = (Publisher(models.with_lora(models.qwen2), url) for _ in range(2))
        one.publish()
        commit = Store.commit

        def both(store: Store, draft: Path, manifest: Manifest, other: Publisher = other, commit: Any = commit) -> None:
            monkeypatch.setattr(Store, "commit", commit)
            other.publish()  # between this one's look at the store and its end
            commit(store, draft, manifest)

        monkeypatch.setattr(Store, "commit", both)
        with pytest.raises(PushRefused, match="published by somebody else at the same time"):
            one.publish()
        store = Store(url)
        assert list(store.newest()) == [2, 1]
        store.fetch(store.manifest(2), tmp_path / "cache")
        with pytest.raises(PushRefused, match=r"was 1, and run7@2-\w+ is there"):
            one.publish()


def test_a_version_that_is_there_is_its_publishers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails once it is visible, the publisher goes on from it."""
    model, url = models.with_lora(models.qwen2), f"memory://{tmp_path}/run7"
    publisher = Publisher(model, url, keep=1)
    publisher.publish()
    pipe = publisher._store.fs.pipe_file

    def unheard(path: str, *args: Any, **kwargs: Any) -> None:
        pipe(path, *args, **kwargs)
        if path.endswith(MANIFEST):
            raise OSError("no answer came")

    with monkeypatch.context() as patched:
        patched.setattr(publisher._store.fs, "pipe_file", unheard)
        with pytest.raises(OSError, match="no answer came"):
            publisher.publish()
    assert publisher.publish().version == 3
    with monkeypatch.context() as patched:
        patched.setattr(Store, "_remove", mock.Mock(side_effect=PermissionError("nobody may remove")))
        with pytest.warns(UserWarning, match="could not be removed, and stay: PermissionError: nobody may"):
            assert publisher.publish().version == 4
    assert publisher.publish().version == 5
    assert Store(url).numbers() == [5]
    publisher.publish(pin=True)
    publisher.publish()
    listed = publisher._store.numbers()[:-1]
    with monkeypatch.context() as patched:
        patched.setattr(publisher._store, "numbers", lambda: listed)  # some stores list late
        assert publisher.publish().version == 8
    # What somebody else has put beside versions is left alone.
    other = Publisher(model, tmp_path / "run7", keep=1)
    other.publish()
    (tmp_path / "run7" / "versions" / ".draft-of-mine").mkdir()
    (tmp_path / "run7" / "engines" / "a.json").mkdir(parents=True)
    assert [other.publish().version, other.publish().version] == [2, 3]
    store = Store(tmp_path / "run7")
    store.tell("b", {"serves": "x", "at": "2026-01-01T00:00:00"})
    with mock.patch.object(store.fs, "modified", side_effect=NotImplementedError):  # as of some stores
        assert [engine.silent for engine in status(store).engines] == [timedelta.max.total_seconds()]


def test_nothing_unsigned_is_published_beside_what_is_signed(tmp_path: Path) -> None:
    model, url = models.with_lora(models.qwen2), tmp_path / "run7"
    Publisher(model, url, key=KEY).publish()
    with pytest.raises(InvalidInput, match=r"are signed, .*LORA_MERGE_STORE_KEY"):
        Publisher(model, url).publish()
    assert main(["rollback", str(url), "1"]) == 1
    assert Store(url).numbers() == [1]
    assert rollback(Store(url, KEY), 1).version == 2


def test_a_trainer_with_another_key_is_another_trainer(tmp_path: Path) -> None:
    """Engines without a key would go from one's versions to the other's and back; its base counts, too."""
    model, url = models.with_lora(models.qwen2), tmp_path / "run7"
    one = Publisher(model, url, key=KEY)
    one.publish()
    other = Publisher(model, url, key=KEY * 2)  # the store's new key
    assert other.publish().version == 2
    assert Store(url).manifest(2).parent == 1
    with pytest.raises(PushRefused, match=r"was 1, and run7@2-\w+ is there.*another trainer"):
        one.publish()
    for key in (KEY, KEY * 3):
        with pytest.raises(InvalidInput, match=r"trained on another base"):
            Publisher(models.with_lora(models.qwen2, seed=3), url, key=key).publish()
    assert Store(url).numbers() == [1, 2]


@pytest.mark.parametrize("url", ["{}/run7", "memory://{}/run7"])
@pytest.mark.parametrize("at", ["2000-01-01T00:00:00Z", "2100-01-01T00:00:00Z"])
def test_an_engines_clock_does_not_matter(url: str, at: str, tmp_path: Path) -> None:
    """One whose host's clock was behind did not count, whatever it served; one whose clock was ahead never fell
    silent."""
    store = Store(url.format(tmp_path))
    Publisher(models.with_lora(models.qwen2), store.url).publish()
    store.tell("there", {"serves": "an older one", "at": at})
    found = status(store)
    assert found.engines[0].silent < 60
    assert not found.converged
    assert list(store.engines()) == ["there"]
    assert [name for name in store._names("engines") if not name.endswith(".json")] == []
    if store.folder is not None:
        file = store.folder / "engines" / "there.json"
        os.utime(file, (0, file.stat().st_mtime - 100))
        assert status(store).engines[0].silent > 99
        assert status(store).converged
        with mock.patch.object(store.fs, "pipe_file", side_effect=PermissionError):  # then this host's clock has to do
            assert status(store).engines[0].silent > 99


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, key = str(tmp_path / "run7"), tmp_path / "key"
    key.write_text(f"{KEY}\n")
    publisher = Publisher(models.with_lora(models.qwen2), url, key=f" {KEY}\r\n")  # as some files and secrets have it
    for _ in range(2):
        publisher.publish()
    assert main(["rollback", url, "1", "--key-file", str(key)]) == 0
    assert main(["pin", url, "2", "--key-file", str(key)]) == 0
    for command in ("rollback", "pin"):
        assert main([command, url, "9"]) == 1
        assert f"there is no version 9 of {url}, or no longer: it has 1, 2, 3" in capsys.readouterr().err
    store = Store(url, KEY)
    store.tell("there:8000", {"serves": store.manifest(3).name, "since": "then", "at": "2026-01-01T00:00:00Z"})
    os.utime(tmp_path / "run7" / "engines" / "there-8000.json", (0, 0))
    capsys.readouterr()
    assert main(["status", url, "--key-file", str(key), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(v["version"], v["copy_of"], v["pinned"]) for v in said["versions"]] == [
        (3, 1, False),
        (2, None, True),
        (1, None, False),
    ]
    assert [(e["engine"], e["newest"]) for e in said["engines"]] == [("there-8000", True)]
    assert said["engines"][0]["silent"] > 60
    assert main(["status", url]) == 0
    assert "serves run7@3" in capsys.readouterr().out
    assert main(["status", url, "--key-file", str(tmp_path / "none")]) == 1
    assert status(Store(tmp_path / "empty")).versions == []


# ---- sharded ---------------------------------------------------------------------------------------------------------


def publish_sharded(rank: int, folder: Path, wraps: list[Callable[[Any], nn.Module]], options: dict[str, Any]) -> None:
    """What the ranks publish together is what the plain model's is, in a folder and in an object store."""
    wanted = saved(models.with_lora(models.qwen2, **options))
    for wrap in wraps:
        url = folder / wrap.__name__
        publisher = Publisher(wrap(models.with_lora(models.qwen2, **options)), url)
        wrote, write = [0], contents.write_from

        def counted(descriptor: int, begin: int, data: Any, wrote: list[int] = wrote, write: Any = write) -> None:
            wrote[0] += len(data)
            write(descriptor, begin, data)

        with mock.patch.object(contents, "write_from", counted), mock.patch.object(contents, "Exchange", None):
            assert publisher.publish().version == 1
        everyone = Ranks(dist.group.WORLD).gather(wrote[0])
        assert min(everyone) > 0  # each rank writes what it owns, nothing twice, and nothing is gathered
        assert sum(everyone) == sum(tensor.nbytes for tensor in wanted.values())
        same(held(Store(url), 1, folder / f"cache-{rank}"), wanted)
        assert publisher.publish(pin=True).version == publisher.rollback(1).version - 1 == 2
        objects = f"memory://{folder}/{wrap.__name__}"
        publisher = Publisher(wrap(models.with_lora(models.qwen2, **options)), objects)
        assert publisher.publish().version == 1
        if rank == 0:
            same(held(Store(objects), 1, folder / "cache-0"), wanted)
        dist.barrier()
        # What one rank finds wrong is an error on all, and nothing is visible.
        full = mock.patch.object(contents, "_write_box", side_effect=OSError("the disk is full"))
        with full, pytest.raises(Exception, match="the disk is full"):
            publisher.publish()
        dist.barrier()
        assert publisher.publish().version == 2
        dist.barrier()
        model = models.with_lora(models.qwen2, **options)
        if rank == 1:
            model.base_model.model.model.layers[1].self_attn.q_proj.set_scale("default", 3)
        with pytest.raises(InvalidInput, match="rank 1 failed.*set_scale" if rank == 0 else "set_scale"):
            Publisher(wrap(model), folder / "broken").publish()
        dist.barrier()
        assert not (folder / "broken").exists()


def test_sharded(tmp_path: Path) -> None:
    wraps, whole = [fsdp2, fsdp2_columns, fsdp1_flat], {"use_dora": True, "modules_to_save": ["lm_head"]}
    spawn(2, publish_sharded, tmp_path, wraps, {})
    spawn(2, publish_sharded, tmp_path / "dora", [fsdp2], whole)
    # Whoever publishes alone goes on from that: the base has one fingerprint, however it is sharded.
    for wrap in wraps:
        assert Publisher(models.with_lora(models.qwen2), tmp_path / wrap.__name__).publish().version == 4
    assert Publisher(models.with_lora(models.qwen2, **whole), tmp_path / "dora" / "fsdp2").publish().version == 4


def publish_replicas(rank: int, folder: Path) -> None:
    """Of several copies of a model one is published."""
    for wrap in (nn.parallel.DistributedDataParallel, hsdp):
        url = folder / wrap.__name__
        published = Publisher(wrap(models.with_lora(models.qwen2)), url).publish()
        assert published == dataclasses.replace(published, version=1)
        same(held(Store(url), 1, folder / f"cache-{rank}"), saved(models.with_lora(models.qwen2)))
        dist.barrier()
        with pytest.raises(LoraMergeError, match="another base"):
            Publisher(wrap(models.with_lora(models.qwen2, seed=3)), url).publish()
        dist.barrier()
        assert Store(url).numbers() == [1]


def test_replicas(tmp_path: Path) -> None:
    spawn(4, publish_replicas, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_that_has_diverged_is_no_version(value: float, tmp_path: Path) -> None:
    """The engines would refuse it, too; the trainer hears of it, and its versions go on."""
    model = models.with_lora(models.qwen2)
    publisher = Publisher(model, tmp_path / "run7")
    publisher.publish()
    factor = next(p for name, p in model.named_parameters() if "lora_B" in name)
    kept = factor.detach().clone()
    with torch.no_grad():
        factor.view(-1)[3] = value
    with pytest.raises(InvalidInput, match=r"lora_B\.weight holds NaN or infinity: the run has diverged"):
        publisher.publish()
    assert Store(tmp_path / "run7").numbers() == [1]
    with torch.no_grad():
        factor.copy_(kept)
    assert publisher.publish().version == 2
    same(saved(model), held(Store(tmp_path / "run7"), 2, tmp_path / "into"))
