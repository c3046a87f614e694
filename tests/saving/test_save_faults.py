"""What is broken, missing or does not belong together is refused by name, and nothing is left of the output; nor is it
after a kill or on a full disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import models
import pytest
import torch
from checkpoints import assert_same, pair, tensors, write_adapter, write_base
from repository import ROOT
from safetensors.torch import load_file, save_file

from lora_merge import InvalidInput, LoraMergeError, MissingExtra, UnsupportedAdapter, merge_checkpoint, save_merged
from lora_merge.saving import chunks, writer


def _index(base: Path) -> dict[str, Any]:
    return json.loads((base / "model.safetensors.index.json").read_text())


def _rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _absent(base: Path, adapter: Path) -> None:
    index = _index(base)
    index["weight_map"]["model.layers.7.gone.weight"] = next(iter(index["weight_map"].values()))
    (base / "model.safetensors.index.json").write_text(json.dumps(index))


def _cut_short(base: Path, adapter: Path) -> None:
    file = base / "model-00002-of-00005.safetensors"
    os.truncate(file, file.stat().st_size - 5)


def _twice(base: Path, adapter: Path) -> None:
    one, other = (base / f"model-0000{i}-of-00005.safetensors" for i in (2, 3))
    first, value = next(iter(load_file(one).items()))
    save_file(load_file(other) | {first: value + 1}, other, {"format": "pt"})


def _moved(base: Path, adapter: Path) -> None:
    index = _index(base)
    files = index["weight_map"]
    name = next(name for name, file in files.items() if "00002" in file)
    index["weight_map"] = files | {name: "model-00003-of-00005.safetensors"}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))


def _pointer(base: Path, adapter: Path) -> None:
    (base / "model-00002-of-00005.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:12\n"
    )


def _packed(base: Path, adapter: Path) -> None:
    file = base / "model-00002-of-00005.safetensors"
    held = load_file(file)
    save_file(
        held | {"model.layers.0.self_attn.q_proj.qweight": torch.zeros(3, dtype=torch.int32)}, file, {"format": "pt"}
    )


def _float8(base: Path, adapter: Path) -> None:
    file = base / "model-00002-of-00005.safetensors"
    held = load_file(file)
    first = next(iter(held))
    save_file(held | {first: held[first].to(torch.float8_e4m3fn)}, file, {"format": "pt"})


def _without_a_tensor(base: Path, adapter: Path) -> None:
    for file in sorted(base.glob("*.safetensors")):
        held = load_file(file)
        held.pop("model.layers.1.mlp.up_proj.weight", None)
        save_file(held, file, {"format": "pt"})
    index = _index(base)
    index["weight_map"].pop("model.layers.1.mlp.up_proj.weight")
    (base / "model.safetensors.index.json").write_text(json.dumps(index))


def _with_another_shape(base: Path, adapter: Path) -> None:
    for file in sorted(base.glob("*.safetensors")):
        held = load_file(file)
        if "model.norm.weight" in held:
            save_file(held | {"model.norm.weight": torch.ones(31)}, file, {"format": "pt"})


def _adapter_keys(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Any:
    def do(base: Path, adapter: Path) -> None:
        file = adapter / "adapter_model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})

    return do


def _elsewhere(base: Path, adapter: Path) -> None:
    """Files with the base's names are written: not outside of the output."""
    index = _index(base)
    moved = index["weight_map"]["lm_head.weight"]
    (base / moved).rename(base.parent / moved)
    index["weight_map"] = {n: f"../{file}" if file == moved else file for n, file in index["weight_map"].items()}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))


def _header(said: Any) -> Any:
    def do(base: Path, adapter: Path) -> None:
        text = json.dumps(said).encode()
        (base / "model-00002-of-00005.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"0" * 8)

    return do


def _linked(base: Path, adapter: Path) -> None:
    (base / "tokenizer.json").symlink_to(base / "blobs" / "gone")


_TWICE = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'


def _raw(text: bytes) -> Any:
    def do(base: Path, adapter: Path) -> None:
        (base / "model-00002-of-00005.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"0" * 8)

    return do


def _pair_of(first: list[int], second: list[int]) -> dict[str, Any]:
    return {n: {"dtype": "F32", "shape": [1], "data_offsets": at} for n, at in (("x", first), ("y", second))}


BROKEN: dict[str, tuple[Any, str]] = {
    "a name twice in a header": (_raw(_TWICE), "'x' is there twice"),
    "tensors over one another": (_header(_pair_of([0, 4], [2, 6])), "y should begin at byte"),
    "bytes of nobody": (_header(_pair_of([0, 4], [8, 12])), "y should begin at byte"),
    "bytes behind the last one": (_header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "ends at"),
    "a link that leads nowhere": (_linked, "tokenizer.json is a link that leads nowhere"),
    "an adapter of whole numbers": (
        _adapter_keys(lambda t: {n: s.to(torch.int8) for n, s in t.items()}),
        "is torch.int8, expected floating-point numbers",
    ),
    "an adapter that float32 cannot hold": (
        _adapter_keys(lambda t: {n: s.double().fill_(1e300) for n, s in t.items()}),
        "holds NaN or infinity",
    ),
    "an adapter of 8 bits that has diverged": (
        _adapter_keys(lambda t: {n: s.clone().fill_(float("nan")).to(torch.float8_e4m3fn) for n, s in t.items()}),
        "holds NaN or infinity",
    ),
    "the index has no map": (
        lambda b, a: (b / "model.safetensors.index.json").write_text("{}"),
        r"index\.json has no weight_map",
    ),
    "the index is a list": (
        lambda b, a: (b / "model.safetensors.index.json").write_text("[]"),
        r"index\.json must hold a JSON object, got a list",
    ),
    "the index leads elsewhere": (_elsewhere, r"weights are in '\.\./model-.*: expected names of files beside it"),
    "the config is a list": (
        lambda b, a: (b / "config.json").write_text("[]"),
        r"config\.json must hold a JSON object",
    ),
    "a header is a list": (_header([]), "its header is a list"),
    "a tensor without a shape": (_header({"x": {"dtype": "F32"}}), "its header says of x .*expected dtype, shape and"),
    "a tensor before the first byte": (
        _header({"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}),
        "its header says of x ",
    ),
    "a model with code of its own": (
        lambda b, a: _rewrite(
            b / "config.json", model_type="own", architectures=["Own"], auto_map={"AutoConfig": "own.OwnConfig"}
        ),
        "cannot be read as a model of transformers .*code of its own: load it, .*save_merged",
    ),
    "no config": (lambda b, a: (b / "config.json").unlink(), r"holds no config\.json"),
    "no weights": (
        lambda b, a: [f.unlink() for f in b.glob("model*")],
        r"holds no weights: expected model\.safetensors",
    ),
    "config is no JSON": (lambda b, a: (b / "config.json").write_text("{"), r"config\.json cannot be read"),
    "a shard is missing": (
        lambda b, a: (b / "model-00002-of-00005.safetensors").unlink(),
        r"model-00002-of-00005\.safetensors is missing \(1 of 5 files\), which the index says holds \d+ tensors",
    ),
    "the index names what is not there": (
        _absent,
        r"says that model\.layers\.7\.gone\.weight is in .*does not hold it",
    ),
    "a shard is cut short": (_cut_short, r"model-00002-of-00005\.safetensors is cut short: .* should end at byte"),
    "a tensor is there twice": (
        _twice,
        r"is in model-0000[23]-of-00005\.safetensors and, with other bits, in model-0000[23]",
    ),
    "the index names another shard": (
        _moved,
        r"in model-00003-of-00005\.safetensors, which does not hold it; model-00002.* does \(1 such",
    ),
    "a pointer of Git LFS": (_pointer, "Git LFS pointer"),
    "quantised by its config": (
        lambda b, a: _rewrite(b / "config.json", quantization_config={"quant_method": "gptq"}),
        "the base is quantised .*gptq.*load the base in bfloat16",
    ),
    "quantised inside": (
        lambda b, a: _rewrite(b / "config.json", text_config={"quantization_config": {"quant_method": "fp8"}}),
        "text_config.quantization_config: fp8",
    ),
    "packed": (_packed, "quantised .*qweight holds packed integers"),
    "float8": (_float8, "quantised .*float8_e4m3fn"),
    "a weight is missing": (
        _without_a_tensor,
        r"holds no model\.layers\.1\.mlp\.up_proj\.weight, which adapter changes",
    ),
    "another size than its config": (_with_another_shape, r"model\.norm\.weight is \[31\] in .*and \[32\] by"),
    "no adapter": (lambda b, a: (a / "adapter_config.json").unlink(), r"expected adapter_config\.json there"),
    "the adapter is no LoRA": (
        lambda b, a: _rewrite(a / "adapter_config.json", peft_type="LOHA"),
        "LOHA|LoHa|size|fit",
    ),
    "an adapter of a newer PEFT": (lambda b, a: _rewrite(a / "adapter_config.json", use_new=True), "use_new=True"),
    "a config that contradicts itself": (
        lambda b, a: _rewrite(b / "config.json", num_hidden_layers=7),
        r"cannot be read as a model of transformers .*: .*num_hidden_layers.*7",
    ),
    "an adapter that adds nothing": (
        lambda b, a: _rewrite(a / "adapter_config.json", lora_alpha=0),
        r"adapter_config\.json says lora_alpha=0, by which the adapter adds nothing",
    ),
    "another base was meant": (
        lambda b, a: _rewrite(a / "adapter_config.json", init_lora_weights="olora"),
        "changes the base that the adapter belongs to",
    ),
    "another base was meant, which no conversion brings back": (
        lambda b, a: _rewrite(a / "adapter_config.json", init_lora_weights="loftq"),
        r"changes the base .*no conversion .*save_merged",
    ),
    "an initialisation that is not known": (
        lambda b, a: _rewrite(a / "adapter_config.json", init_lora_weights="new", auto_mapping=5),
        r"is not known here, and may change the base .*save_merged",
    ),
    "keys that have no place": (
        _adapter_keys(lambda t: t | {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 32)}),
        "1 of the file's have no place",
    ),
    "keys that are missing": (
        _adapter_keys(lambda t: dict(list(t.items())[1:])),
        "1 of its tensors are not in the file",
    ),
    "an adapter without its tensors": (
        lambda b, a: (a / "adapter_model.safetensors").unlink(),
        r"holds no adapter_model\.safetensors",
    ),
    "an adapter that is a pointer of Git LFS": (
        lambda b, a: (a / "adapter_model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "its tensors cannot be read .*Git LFS pointer",
    ),
    "an adapter whose training has diverged": (
        _adapter_keys(lambda t: {n: s.clone().fill_(float("nan")) if "k_proj" in n else s for n, s in t.items()}),
        "k_proj.* holds NaN or infinity",
    ),
    "a config that nests without end": (
        lambda b, a: (b / "config.json").write_text("[" * 200_000),
        r"config\.json cannot be read: maximum recursion depth",
    ),
    "an adapter's config that nests without end": (
        lambda b, a: (a / "adapter_config.json").write_text("[" * 200_000),
        r"adapter_config\.json cannot be read: maximum recursion depth",
    ),
    "an adapter of another size": (
        _adapter_keys(lambda t: {n: torch.ones(s.shape[0] + 1, s.shape[1]) for n, s in t.items()}),
        "does not fit the base .*size mismatch",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken(kind: str, tmp_path: Path) -> None:
    base, adapter = pair("qwen2", tmp_path, shard="20KB")
    assert len(list(base.glob("*.safetensors"))) == 5
    change, match = BROKEN[kind]
    change(base, adapter)
    with checkpoints.nothing_left(tmp_path), pytest.raises((InvalidInput, UnsupportedAdapter), match=match):
        merge_checkpoint(base, [adapter], tmp_path / "out")


def test_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is misspelt; a repository, without a network: one that is in the cache, and one that is not."""
    base, adapter = pair("qwen2", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for name, folder in (("there", base), ("style", adapter)):
        cached = tmp_path / "hub" / "hub" / f"models--owner--{name}"
        shutil.copytree(folder, cached / "snapshots" / "0123")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("0123")
    code = """
import sys
from lora_merge import InvalidInput, merge_checkpoint
(saved,) = merge_checkpoint("owner/there", ["owner/style"], sys.argv[2] + "-cached", scales={"style": 1.0})
assert saved.adapters == "style", saved
try:
    merge_checkpoint("owner/base", [sys.argv[1]], sys.argv[2])
except InvalidInput as error:
    assert "HF_HUB_OFFLINE is set, and it is not in the cache" in str(error), error
    assert "owner/base" in str(error)
else:
    raise SystemExit("it was found")
"""
    unreached = """
import sys, time
from lora_merge import InvalidInput, merge_checkpoint
from lora_merge.models.peft.folder import read_folder
from lora_merge.saving.inspect import inspect_adapter
from lora_merge.sizing import read_policy
import torch
begin = time.monotonic()
(saved,) = merge_checkpoint("owner/there", ["owner/style"], sys.argv[2] + "-unreached", scales={"style": 1.0})
read_policy("owner/there")
for call in (
    lambda: merge_checkpoint("owner/base", [sys.argv[1]], sys.argv[2]),
    lambda: inspect_adapter("owner/adapter"),
    lambda: read_policy("owner/base"),
    lambda: read_folder(sys.argv[1], "owner/base", torch.float32),
):
    try:
        call()
    except InvalidInput as error:
        assert "http://127.0.0.1:9 does not answer, and it is not in the cache" in str(error), error
        assert "pass a folder" in str(error) and "HF_HUB_OFFLINE=1" in str(error) and "owner/" in str(error), error
    else:
        raise SystemExit("it was found")
assert time.monotonic() - begin < 120, "the hub's own retries take half a minute for each name"
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", code, str(adapter), str(tmp_path / "out")], env=environment, check=True)
    environment |= {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    told = subprocess.run(
        [sys.executable, "-c", unreached, str(adapter), str(tmp_path / "out")],
        env=environment, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    for line in ("looking for base 'owner/there' on http://127.0.0.1:9\n", "looking for model 'owner/base' on"):
        assert line in told.stderr
    merge_checkpoint(base, [adapter], tmp_path / "here")
    for out in ("out-cached", "out-unreached"):
        assert_same(tensors(tmp_path / out), tensors(tmp_path / "here"))
    for named in ("./nowhere", "/no/such/folder", "~/no-such-folder-here", "a/b/c"):
        with pytest.raises(InvalidInput, match="no such folder here"):
            merge_checkpoint(named, [adapter], tmp_path / "out")
    with pytest.raises(InvalidInput, match="is a file; expected a folder"):
        merge_checkpoint(base / "config.json", [adapter], tmp_path / "out")
    with pytest.raises(InvalidInput, match="the base comes first, then the adapters"):
        merge_checkpoint(adapter, [base], tmp_path / "out")
    with pytest.raises(InvalidInput, match=r"expected adapter_config\.json"):
        merge_checkpoint(base, [base], tmp_path / "out")
    shutil.copytree(adapter, tmp_path / "step-3" / "style")  # as PEFT saves one that is not called "default"
    with pytest.raises(InvalidInput, match=r"; there is one in .*step-3/style$"):
        merge_checkpoint(base, [tmp_path / "step-3"], tmp_path / "out")


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, adapter = pair("qwen2", tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'lora-merge\[peft\]'"):
        merge_checkpoint(base, [adapter], tmp_path / "out")


def test_what_is_there_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output that is not empty is refused, unless it is to be replaced; then it is there until the new one is."""
    base, adapter = pair("qwen2", tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    merge_checkpoint(base, [adapter], out)  # into an empty folder
    before = tensors(out)
    with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match=r"there and not empty.*--force"):
        merge_checkpoint(base, [adapter], out)
    _adapter_keys(lambda t: t | {"base_model.model.strange.lora_A.weight": torch.ones(4, 32)})(base, adapter)
    with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match="no place"):
        merge_checkpoint(base, [adapter], out, force=True)
    assert_same(tensors(out), before)
    _adapter_keys(lambda t: {n: v for n, v in t.items() if "strange" not in n})(base, adapter)
    for exchanges in (True, False):  # in one step, where the system can
        if not exchanges:
            monkeypatch.setattr(writer, "_exchange", lambda one, other: False)
        (out / "theirs").write_text("goes")
        merge_checkpoint(base, [adapter], out, force=True)
        assert_same(tensors(out), before)
        assert not (out / "theirs").exists()
        assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "out"]
    link = tmp_path / "link"
    link.symlink_to(out)
    with pytest.raises(InvalidInput, match="is a link to"):
        merge_checkpoint(base, [adapter], link, force=True)


def test_permissions(tmp_path: Path) -> None:
    base, adapter = pair("qwen2", tmp_path)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    # Root may write anywhere, unless it is without these.
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    command += [sys.executable, "-m", "lora_merge", "merge", str(base), str(adapter), "--out", str(closed / "out")]
    with checkpoints.nothing_left(tmp_path):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "you may not write there" in done.stderr


FAULTS = {
    28: "the disk is full: make room",
    122: "your quota is used up",
    13: "you may not write there",
    30: "the file system is read-only",
    5: "Input/output error",
}


@pytest.mark.parametrize("number", FAULTS)
@pytest.mark.parametrize("call", ["first", "later"])
def test_the_disk_fails(number: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of writing, in the thread that writes: nothing is left, and no thread waits for ever."""
    base, adapter = pair("qwen2", tmp_path, shard="20KB")
    monkeypatch.setattr(chunks, "CHUNK", 1 << 9)
    written, calls = writer.write_from, 0

    def fails(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (1 if call == "first" else 60):
            raise OSError(number, os.strerror(number))
        written(*arguments)

    monkeypatch.setattr(writer, "write_from", fails)
    threads = threading.active_count()
    with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match=FAULTS[number]):
        merge_checkpoint(base, [adapter], tmp_path / "out", each=call == "first")
    end = time.monotonic() + 30
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == threads


def test_the_base_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short after it was looked at."""
    base, adapter = pair("qwen2", tmp_path)
    monkeypatch.setattr(chunks, "CHUNK", 1 << 9)
    from lora_merge.saving import merge as module

    passed = module._pass

    def cut_short(*arguments: Any) -> Any:
        os.truncate(base / "model.safetensors", 30_000)
        return passed(*arguments)

    monkeypatch.setattr(module, "_pass", cut_short)
    with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match="bytes early while it was read"):
        merge_checkpoint(base, [adapter], tmp_path / "out")


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen before the first byte; also where there is room for one output, but not for all."""
    base, adapter = pair("qwen2", tmp_path)
    write_adapter(tmp_path / "second", base, models.qwen2, seed=1)
    usage = shutil.disk_usage(tmp_path)
    size = sum(t.nbytes for t in tensors(base).values())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match=r"GB free, and .* GB: make room"):
        merge_checkpoint(base, [adapter], tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size * 3 // 2))
    with checkpoints.nothing_left(tmp_path), pytest.raises(InvalidInput, match="all outputs take"):
        merge_checkpoint(base, [adapter, tmp_path / "second"], tmp_path / "out", each=True)


def test_verify_finds_what_the_disk_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that flips between writing and reading back."""
    base, adapter = pair("qwen2", tmp_path)
    flushed = writer.Writer._flush

    def flips(self: writer.Writer) -> None:
        flushed(self)
        place = self.places["model.norm.weight"]
        with (self.folder / place.file).open("r+b") as file:
            file.seek(place.begin + 2)
            byte = file.read(1)[0]
            file.seek(place.begin + 2)
            file.write(bytes([byte ^ 4]))

    monkeypatch.setattr(writer.Writer, "_flush", flips)
    with (
        checkpoints.nothing_left(tmp_path),
        pytest.raises(LoraMergeError, match=r"model\.norm\.weight reads back with checksum"),
    ):
        merge_checkpoint(base, [adapter], tmp_path / "out", verify=True)


SLOW = """
import sys, time
from lora_merge import merge_checkpoint
from lora_merge.saving import chunks, writer
chunks.CHUNK = 1 << 9
written = writer.write_from
def slow(*arguments):
    written(*arguments)
    print("wrote", flush=True)
    time.sleep(0.05)
writer.write_from = slow
merge_checkpoint(sys.argv[1], [sys.argv[2]], sys.argv[3], force=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "Ctrl-C"])
def test_broken_off(how: signal.Signals, tmp_path: Path) -> None:
    """Killed in the middle: what was there is there, nothing looks whole, and the next run clears up. Ctrl-C leaves
    nothing by itself."""
    from transformers import AutoModelForCausalLM

    base, adapter = pair("qwen2", tmp_path, shard="20KB")
    out = tmp_path / "out"
    out.mkdir()
    (out / "theirs").write_text("kept")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", SLOW, str(base), str(adapter), str(out)]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    for _ in range(5):
        assert process.stdout.readline(), process.communicate()[1]
    process.send_signal(how)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert [p.name for p in out.iterdir()] == ["theirs"]
    left = [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert len(left) == (1 if how == signal.SIGKILL else 0)
    for folder in left:
        assert not (folder / "config.json").exists()
        with pytest.raises((OSError, ValueError)):
            AutoModelForCausalLM.from_pretrained(folder)
    merge_checkpoint(base, [adapter], out, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "out"]


LAST = """
import os, signal, sys
from lora_merge import merge_checkpoint
from lora_merge.saving import writer
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
def exchanged(*args):
    real(*args), die()
real = writer._exchange
if sys.argv[4] == "renamed": writer.Writer._put = die
else: writer._exchange = exchanged
merge_checkpoint(sys.argv[1], [sys.argv[2]], sys.argv[3], force=True)
"""


@pytest.mark.parametrize("before", ["renamed", "removed"])
def test_killed_in_the_last_steps(before: str, tmp_path: Path) -> None:
    """When all is written, before the folder has its name, or before what it replaces is removed: the next run clears
    up."""
    base, adapter = pair("qwen2", tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "theirs").write_text("kept")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", LAST, str(base), str(adapter), str(out), before]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode == -signal.SIGKILL
    assert (out / "theirs").exists() == (before == "renamed")
    assert sum(p.name.startswith(".") for p in tmp_path.iterdir()) == 1
    merge_checkpoint(base, [adapter], out, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "out"]
    assert not [p for p in out.iterdir() if p.name.startswith(".")]


def test_what_links_of_the_base_lead_to_stays(tmp_path: Path) -> None:
    """As in the cache of the hub: a folder of links, and one of what they lead to."""
    base, adapter = pair("qwen2", tmp_path)
    blobs = tmp_path / "blobs"
    base.rename(blobs)
    base.mkdir()
    for file in blobs.iterdir():
        (base / file.name).symlink_to(file)
    with pytest.raises(InvalidInput, match="is a link to: name another folder"):
        merge_checkpoint(base, [adapter], blobs, force=True)
    merge_checkpoint(base, [adapter], tmp_path / "out")


def test_an_index_whose_metadata_is_nothing(tmp_path: Path) -> None:
    base, adapter = pair("qwen2", tmp_path, shard="20KB")
    _rewrite(base / "model.safetensors.index.json", metadata=None)
    _rewrite(base / "config.json", dtype="float32", torch_dtype="float32")
    merge_checkpoint(base, [adapter], tmp_path / "out", dtype=torch.bfloat16)
    assert _index(tmp_path / "out")["metadata"]["total_size"] > 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")


def test_two_runs_to_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither takes the other's folder for a leftover; the second to end finds the place taken."""
    base, adapter = pair("qwen2", tmp_path)
    completed = writer.Writer._complete

    def race(self: writer.Writer) -> None:
        monkeypatch.setattr(writer.Writer, "_complete", completed)
        merge_checkpoint(base, [adapter], tmp_path / "out")
        completed(self)

    monkeypatch.setattr(writer.Writer, "_complete", race)
    with pytest.raises(InvalidInput, match="not empty"):
        merge_checkpoint(base, [adapter], tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "out"]
    tensors(tmp_path / "out")


def test_two_forced_runs_to_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From two threads, both ready to put their folder there: each took the other's lock for its own, and one that had
    replaced the folder said that nothing was there."""
    base, adapter = pair("qwen2", tmp_path)
    merge_checkpoint(base, [adapter], tmp_path / "out")
    ready, put = threading.Barrier(2, timeout=60), writer.Writer._put
    errors: list[Exception] = []

    def slow(self: writer.Writer) -> None:
        put(self)
        time.sleep(0.3)  # the other one comes between

    def flush(self: writer.Writer) -> None:
        ready.wait()

    def run() -> None:
        try:
            merge_checkpoint(base, [adapter], tmp_path / "out", force=True)
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(writer.Writer, "_flush", flush)
    monkeypatch.setattr(writer.Writer, "_put", slow)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "base", "out"]
    assert not list((tmp_path / "out").glob(".*"))
    tensors(tmp_path / "out")


def test_a_note_on_another_base(tmp_path: Path) -> None:
    write_base(tmp_path / "base", models.qwen2, torch.float32)
    write_adapter(tmp_path / "adapter", Path("owner/another-model"), models.qwen2)
    (saved,) = merge_checkpoint(tmp_path / "base", [tmp_path / "adapter"], tmp_path / "out")
    assert "adapter says that it was trained on owner/another-model" in saved.notes[0]


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])  # adapted, and not
def test_numbers_beyond_float16(name: str, tmp_path: Path) -> None:
    """A checkpoint of float16 has no infinities that its base has not."""
    base, adapter = pair("qwen2", tmp_path)
    (file,) = base.glob("*.safetensors")
    values = load_file(file)
    values[name].view(-1)[5] = 1e5
    save_file(values, file, {"format": "pt"})
    with pytest.raises(InvalidInput, match=f"{name}: expected merged values up to 65504"):
        merge_checkpoint(base, [adapter], tmp_path / "out", dtype=torch.float16)
    with pytest.raises(InvalidInput, match="expected merged values up to 65504"):
        save_merged(checkpoints.load(base, adapter), tmp_path / "out", dtype=torch.float16)
    assert not (tmp_path / "out").exists()
    values[name].view(-1)[5] = torch.inf
    save_file(values, file, {"format": "pt"})
    merge_checkpoint(base, [adapter], tmp_path / "out", dtype=torch.float16)
    assert tensors(tmp_path / "out")[name].isinf().any()
