"""The main job, end to end: `python benchmarks/merge.py` on small weights, as a user runs it."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from docs_code import fenced
from repository import ROOT

import lora_merge
from lora_merge.bench import checkpoint, job, report

METHODS = ["lora_merge in place", "lora_merge out of place", "merged() enter+exit", "peft", "addmm_"]
FIELDS = {"ms", "x_copy", "gb_s", "extra_bytes", "max_ulp", "misrounded", "restored"}

# Elements that float32 accumulation rounds to the other side, where updates are up to a tenth of the weights.
MISROUNDED = {"bf16": 1e-4, "fp16": 1e-3}


def bench(*arguments: str | Path) -> str:
    """Run the benchmark, here; returns what it prints."""
    line = ["merge.py", "--repeat", "2", *map(str, arguments)]
    with mock.patch.object(sys, "argv", line), redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(ROOT / "benchmarks" / "merge.py"), run_name="__main__")
    return printed.getvalue()


def by_command(*arguments: str | Path) -> str:
    """Run the benchmark in a process of its own; returns what it prints."""
    command = [sys.executable, "benchmarks/merge.py", "--repeat", "2", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def check(record: dict, dtype: str) -> None:
    """The names, and what holds for our methods whatever the machine."""
    assert {"device", "torch", "shape", "rank", "dtype", "bytes", "copy_ms"} <= record.keys()
    assert record["device"] == "cpu"
    assert record["torch"] == torch.__version__
    assert record["dtype"] == dtype
    into = ["lora_merge into bf16"] if dtype == "fp32" else []
    assert list(record["methods"]) == METHODS + into
    for name, figures in record["methods"].items():
        assert figures.keys() >= FIELDS, name
        assert figures["ms"] > 0, name
        traffic = 0.75 if name in into else 1.0  # four bytes read and two written, instead of four
        assert {figures[key] for key in ("x_copy", "of_copy", "of_products")} == {None}, f"{name}: it is too small"
        assert figures["gb_s"] == pytest.approx(2 * traffic * record["bytes"] / figures["ms"] / 1e6), name
        assert figures["elements"] * (4 if dtype == "fp32" else 2) == record["bytes"], (
            f"{name}: every element is looked at"
        )
        assert figures["restored"] is (name in ("lora_merge out of place", "merged() enter+exit", *into)), name
    ours = [record["methods"][name] for name in METHODS[:3]]
    for figures in ours:
        assert figures["of_bound"] <= 1
        assert figures["misrounded"] <= MISROUNDED.get(dtype, 1)
        accuracy = {key: figures[key] for key in ("max_ulp", "misrounded", "of_bound")}
        assert accuracy == {key: ours[0][key] for key in accuracy}, (
            "in place, out of place and merged() give the same bits"
        )


@pytest.mark.parametrize(
    ("dtype", "adapter_dtype", "rank"), [("bf16", "fp32", 32), ("fp16", "bf16", 5), ("fp32", "fp32", 8)]
)
def test_shape(tmp_path: Path, dtype: str, adapter_dtype: str, rank: int) -> None:
    """Random weights of a known shape: JSON, table and picture."""
    data, picture = tmp_path / "out.json", tmp_path / "deeper" / "out.png"
    options = ("--dtype", dtype, "--adapter-dtype", adapter_dtype, "--rank", str(rank))
    run = by_command if dtype == "fp16" else bench
    printed = run("--shape", "tiny", *options, "--json", data, "--plot", picture)
    record = json.loads(data.read_text())
    check(record, dtype)
    assert (record["shape"], record["rank"], record["adapter_dtype"]) == ("tiny", rank, adapter_dtype)
    assert f"1 of {len(record['methods'])}: {METHODS[0]}" in printed
    assert re.search(rf"^{len(record['methods'])} methods: about \d+ (s|minutes)$", printed, re.MULTILINE)
    columns = ("ms", "extra MiB", "error", "misrounded", "restored")
    assert "these times are mostly those of calls" in " ".join(printed.split())
    assert "limit: " not in printed
    assert "x copy" not in printed
    for name in (*columns, *METHODS):
        assert re.search(rf"^{re.escape(name)}  +[a-zA-Z]", printed, re.MULTILINE), f"the legend says what {name} is"
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_every_column_and_method_has_a_legend() -> None:
    assert report.LEGEND.keys() == report.COLUMNS.keys()
    assert report.ROWS.keys() == {*METHODS, "lora_merge into bf16"}


@pytest.mark.parametrize(
    ("seconds", "told"), [(0.1, "5 s"), (42, "40 s"), (89, "90 s"), (100, "2 minutes"), (400, "7 minutes")]
)
def test_times_in_words(seconds: float, told: str) -> None:
    assert report.words_of(seconds) == f"about {told}"


def test_a_first_check_makes_no_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts threads and allocates; as the share of one small matrix that was an hour for a run of three minutes."""
    took = iter([1000.0, 2.0, 1.0])
    monkeypatch.setattr(job.timing, "milliseconds", lambda call, device: next(took))
    small, large = (SimpleNamespace(weight=torch.empty(size)) for size in (1, 999))
    args = argparse.Namespace(device=torch.device("cpu"), repeat=9)
    assert 0 < job.seconds_of(["peft"], [small, large], args, [1e-3]) < 2


def test_a_bar_that_is_cut_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = {"ms": 1.0, "extra_bytes": 1, "misrounded": 0.0, "restored": True}
    record = {"methods": {str(n): figures | {"x_copy": n} for n in (1, 29, 31, 500)}, "copy_ms": 1.0, "bytes": 1}
    record |= {"shape": "", "matrices": 1, "dtype": "", "rank": 1, "adapter_dtype": "", "device_name": "", "torch": ""}
    cut: list[float] = []
    monkeypatch.setattr(report, "_mark_cuts", lambda ax, bars: cut.extend(bar.get_y() for bar in bars))
    report.plot(record, tmp_path / "cut.png")
    assert [round(y) for y in cut] == [2, 3]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, `base`, and an `adapter` trained on it, the way the default job makes them."""
    folder = tmp_path_factory.mktemp("disk")
    sizes = {"hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4}
    checkpoint.write_checkpoint(folder / "base", checkpoint.QWEN2 | sizes, torch.bfloat16)
    losses = checkpoint.train_adapter(folder / "adapter", folder / "base", rank=4, steps=24)
    assert sum(losses[-8:]) < sum(losses[:8]), "training learns something"
    return folder


def test_checkpoint(disk: Path, tmp_path: Path) -> None:
    """A real checkpoint and a real adapter, read back from disk."""
    bench("--model", disk / "base", "--adapter", disk / "adapter", "--json", tmp_path / "out.json")
    record = json.loads((tmp_path / "out.json").read_text())
    check(record, "bf16")
    assert (record["shape"], record["rank"], record["matrices"]) == ("base", 4, 14)


def test_readme() -> None:
    """README's first example runs as it stands, and does what its comments say; so does the one for tensors."""
    first, _, tensors = fenced((ROOT / "README.md").read_text())
    made, block, used = first.partition("with lora_merge")
    names: dict[str, Any] = {}
    exec(made, names)
    before = {name: tensor.clone() for name, tensor in names["model"].state_dict().items()}
    exec(block + used, names)
    for name, tensor in names["model"].state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} is not what it was before the block"
    weight = "model.layers.0.self_attn.q_proj.weight"
    layer = names["model"].get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    lora_A, lora_B, scaling = layer.lora_A.default.weight, layer.lora_B.default.weight, layer.scaling["default"]
    assert names["answer"].shape[1] > 3, "it generated"
    base = layer.base_layer.weight.detach()
    merged = lora_merge.merge(base, lora_A, lora_B, scaling)
    assert not torch.equal(base, merged)
    assert torch.equal(dict(lora_merge.MergedWeights(names["model"]))[weight], merged)

    names = {"torch": torch, "lora_merge": lora_merge, "weight": base.clone(), "slot": torch.zeros_like(base)}
    exec(tensors, names | {"lora_A": lora_A, "lora_B": lora_B, "scaling": scaling})
    assert torch.equal(names["weight"], merged)
    assert torch.equal(names["slot"], lora_merge.merge(merged, lora_A, lora_B, scaling))
