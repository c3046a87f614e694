"""The commands, as a user runs them: words, JSON, exit statuses, the progress bar."""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from checkpoints import assert_same, load, pair, tensors, write_adapter
from docs_code import names_of
from repository import ROOT
from safetensors.torch import load_file, save_file
from tqdm import tqdm

import lora_merge
from lora_merge import LoraMergeError, MergedWeights, MissingExtra, cli, verify
from lora_merge.commands import output
from lora_merge.commands.inspect import _targets
from lora_merge.saving.inspect import inspect_adapter


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    status = cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return status, out, "\n".join(line for line in err.splitlines() if line and "it/s]" not in line)


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    status, out, _ = said(capsys, *arguments, "--json")
    return status, json.loads(out)


def test_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = pair("bf16", tmp_path)
    status, out, err = said(capsys, "merge", base, adapter, "--out", tmp_path / "out", "--verify")
    assert status == 0
    assert f"{tmp_path / 'out'}: adapter merged into 14 of 27 tensors" in out
    assert "read back and compared" in out
    assert "%" not in err, "no bar where there is no terminal"
    assert_same(tensors(tmp_path / "out"), {n: t.clone() for n, t in MergedWeights(load(base, adapter))})
    status, _, err = said(capsys, "merge", base, adapter, "--out", tmp_path / "out")
    assert status == cli.REFUSED
    assert err.startswith("InvalidInput: ")
    assert "--force" in err


def test_merge_with_every_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = pair("qwen2", tmp_path)
    write_adapter(tmp_path / "second", base, models.qwen2, seed=1)
    line = ["merge", base, adapter, tmp_path / "second", "--out", tmp_path / "out", "--scale", "second=0.5"]
    line += ["--dtype", "bf16", "--rounding", "stochastic", "--seed", "3", "--device", "cpu"]
    line += ["--max-shard-size", "20KB"]
    status, told = as_json(capsys, *line)
    assert status == 0
    (output,) = told["outputs"]
    assert output["folder"] == str(tmp_path / "out")
    assert output["adapters"] == "adapter + 0.5 second"
    assert output["files"] > 1
    model = load(base, adapter, tmp_path / "second")
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["n1"] *= 0.5
    weights = MergedWeights(model, dtype=torch.bfloat16, rounding="stochastic")
    assert_same(tensors(tmp_path / "out"), {n: t.clone() for b in weights.buckets(seed=3) for n, t in b.tensors()})
    status, told = as_json(capsys, "merge", base, adapter, tmp_path / "second", "--each", "--out", tmp_path / "both")
    assert status == 0
    assert [Path(one["folder"]).name for one in told["outputs"]] == ["adapter", "second"]
    assert tensors(tmp_path / "both" / "second").keys() == tensors(base).keys()


def test_merge_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = pair("qwen2", tmp_path)
    for scale in ("adapter", "=3", "adapter=much", "adapter="):
        status, told = as_json(capsys, "merge", base, adapter, "--out", tmp_path / "out", "--scale", scale)
        assert (status, told["kind"]) == (cli.REFUSED, "InvalidInput"), scale
        assert "NAME=FACTOR" in told["error"]
    status, told = as_json(capsys, "merge", tmp_path / "nowhere", adapter, "--out", tmp_path / "out")
    assert (status, told["kind"]) == (cli.REFUSED, "InvalidInput")
    assert "base" in told["error"]
    long = tmp_path / ("x" * 300)
    for line in (["merge", base, adapter, "--out", long], ["merge", long, adapter, "--out", "x"], ["inspect", long]):
        status, told = as_json(capsys, *line)
        assert (status, told["kind"]) == (cli.REFUSED, "InvalidInput"), line
        assert "File name too long" in told["error"]
    for line in (
        ["merge", str(base), "--out", "x"],
        ["merge", str(base), str(adapter)],
        ["nothing"],
        ["bench", "--device", "grafics"],
        [],
    ):
        with pytest.raises(SystemExit) as raised:
            cli.main(line)
        assert raised.value.code == 2
    assert not (tmp_path / "out").exists()


def test_the_bar(tmp_path: Path) -> None:
    """On a terminal: bytes, speed, time left; then nothing but the result."""
    base, adapter = pair("qwen2", tmp_path)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"TERM": "xterm", "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    slow = "import time, sys\nfrom lora_merge.saving import writer\nfrom lora_merge import cli\n"
    slow += "written = writer.write_from\ndef w(*a):\n    time.sleep(0.03)\n    written(*a)\nwriter.write_from = w\n"
    here, there = pty.openpty()
    command = [sys.executable, "-c", slow + "sys.exit(cli.main())", "merge", str(base), str(adapter)]
    process = subprocess.Popen(
        [*command, "--out", str(tmp_path / "out")], env=environment, stdout=subprocess.PIPE, stderr=there, text=True
    )
    os.close(there)
    seen = b""
    while True:
        try:
            piece = os.read(here, 1 << 16)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        seen += piece
    out, _ = process.communicate(timeout=60)
    os.close(here)
    assert process.returncode == 0, seen
    assert "merged into 14 of 27 tensors" in out
    assert b"merging" in seen, seen
    assert b"/s" in seen, seen


def test_no_bar_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with output.progress("merging") as told:
        assert told is not None
    monkeypatch.setitem(sys.modules, "rich", None)
    with output.progress("merging") as told:
        assert told is None


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = pair("patterns", tmp_path)
    status, out, _ = said(capsys, "inspect", adapter)
    assert status == 0
    for line in ("4 to 7, 6", "q_proj", "(14 modules)", "float32", "rank_pattern", str(base)):
        assert line in out, line
    status, told = as_json(capsys, "inspect", adapter)
    held = load_file(adapter / "adapter_model.safetensors")
    assert told["parameters"] == sum(t.numel() for t in held.values())
    assert told["nbytes"] == sum(t.nbytes for t in held.values())
    assert told["ranks"] == [4, 7]
    status, out, _ = said(capsys, "inspect", adapter, base)
    assert status == 0
    assert "it fits" in out
    assert "model.layers.1.mlp.up_proj.weight" in out
    assert "all 14" in out


@pytest.mark.parametrize("kind", ["bf16", "gpt2", "mixtral", "dora", "lora_bias", "embeddings", "whole"])
def test_inspect_against_the_loaded_model(kind: str, tmp_path: Path) -> None:
    """What rounding loses is what verify.rounding_loss says of the loaded model; sizes against float64."""
    base, adapter = pair(kind, tmp_path, shard="1KB")
    found = inspect_adapter(adapter, base)
    assert not found.problems
    model = load(base, adapter)
    dtype = next(model.get_base_model().parameters()).dtype
    losses = {one.name: one for one in verify.rounding_loss(model, dtype)}
    assert {one.name for one in found.updates} == losses.keys()
    for one in found.updates:
        assert one.loss == pytest.approx(losses[one.name].loss, rel=1e-12)
        assert one.cosine == pytest.approx(losses[one.name].cosine, rel=1e-12)
    merged = {n: t.double() for n, t in MergedWeights(model, dtype=torch.float32)}
    bare = {n: t.double() for n, t in MergedWeights(model, adapters=False, dtype=torch.float32)}
    for one in found.updates:
        if one.name in bare:
            assert one.weight == pytest.approx(float(bare[one.name].norm()), rel=1e-6)
            assert one.update == pytest.approx(float((merged[one.name] - bare[one.name]).norm()), rel=1e-3)
            assert one.weight == 0 or one.relative == pytest.approx(one.update / one.weight)


def test_inspect_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = pair("qwen2", tmp_path)
    file = adapter / "adapter_model.safetensors"
    held = load_file(file)
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    save_file(held | {key: torch.zeros(4, 31)}, file, {"format": "pt"})
    status, told = as_json(capsys, "inspect", adapter, base)
    assert status == cli.REFUSED
    assert "model.layers.0.mlp.up_proj: lora_A [4, 31]" in told["problems"][0]
    assert "[48, 32]" in told["problems"][0]
    assert len(told["problems"]) == 1, "not PEFT's words for it once more"
    status, out, _ = said(capsys, "inspect", adapter, base)
    assert status == cli.REFUSED
    assert "it does not fit" in out
    strange = {n.replace("layers.1", "layers.7"): t for n, t in held.items()}
    save_file(strange, file, {"format": "pt"})
    status, told = as_json(capsys, "inspect", adapter, base)
    assert "model.layers.7.self_attn.q_proj: base holds no" in "\n".join(told["problems"])
    for folder, match in ((base, "holds no adapter"), (tmp_path / "none", "no such folder")):
        status, told = as_json(capsys, "inspect", folder)
        assert status == cli.REFUSED
        assert match in told["error"]


def test_targets_of_all_linear_layers() -> None:
    """Of a 7B model PEFT saves 196 names."""
    names = [f"model.layers.{layer}.{name}" for layer in range(28) for name in ("mlp.up_proj", "self_attn.q_proj")]
    assert _targets(names) == ["q_proj", "up_proj"]
    assert _targets(["v_proj", "q_proj"]) == ["q_proj", "v_proj"]


def test_inspect_takes_no_library(tmp_path: Path) -> None:
    """Of an adapter alone: neither PEFT nor transformers nor safetensors is imported."""
    _, adapter = pair("qwen2", tmp_path)
    code = "import sys\nfrom lora_merge import cli\nassert cli.main(['inspect', sys.argv[1]]) == 0\n"
    code += "assert not {'peft', 'transformers', 'safetensors', 'rich'} & sys.modules.keys()"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", code, str(adapter)], env=environment, check=True, stdout=subprocess.DEVNULL)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    status, told = as_json(capsys, "doctor")
    assert {"rows", "todo"} <= told.keys()
    assert status == (cli.REFUSED if told["todo"] else 0)
    assert dict(told["rows"])["torch"].startswith(torch.__version__)


def test_bench(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The main job without the repository: a table, JSON, a picture; it makes its model in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    line = ["bench", "--shape", "tiny", "--repeat", "1", "--rank", "4"]
    status, out, _ = said(capsys, *line)
    assert status == 0
    assert all(name in out for name in ("lora_merge in place", "peft", "addmm_"))
    picture, figures = tmp_path / "out.png", tmp_path / "out.json"
    status, told = as_json(capsys, *line, "--plot", picture, "--save", figures)
    assert status == 0
    assert told["methods"]["lora_merge in place"]["max_ulp"] <= 1
    assert json.loads(figures.read_text())["methods"].keys() == told["methods"].keys()
    assert picture.read_bytes().startswith(b"\x89PNG")
    from lora_merge.bench.options import cache

    assert cache() == tmp_path / "cache" / "lora_merge"
    for more, match in ((["--model", tmp_path], "come together"), (["--device", "cuda"], "torch sees no GPU")):
        if torch.cuda.is_available() and "cuda" in more:
            continue
        status, told = as_json(capsys, "bench", *more)
        assert status == cli.REFUSED
        assert match in told["error"]


def test_bench_of_what_has_no_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine swapped; hours of measuring ended at a file that could not be written."""
    status, told = as_json(capsys, "bench", "--shape", "like-kimi-k2")
    assert status == cli.REFUSED
    assert re.search(r"like-kimi-k2 in bf16 takes [\d.]+ GB, and [\d.]+ GB are free", told["error"])
    line = ["bench", "--shape", "tiny", "--repeat", "1", "--rank", "4"]
    (tmp_path / "file").write_text("")
    for option, file in (("--save", tmp_path / "file" / "x.json"), ("--plot", tmp_path)):
        status, told = as_json(capsys, *line, option, file)
        assert (status, told["kind"]) == (cli.REFUSED, "InvalidInput")
        assert f"{file} cannot be written" in told["error"]
    for folder, match in ((tmp_path / "none", "with config.json"), (tmp_path, "cannot be loaded")):
        for name in ("config.json", "adapter_config.json"):
            (tmp_path / name).write_text("{}")
        status, told = as_json(capsys, "bench", "--model", folder, "--adapter", tmp_path)
        assert (status, told["kind"]) == (cli.REFUSED, "InvalidInput")
        assert match in told["error"]

    from lora_merge.bench import room

    left = iter([1 << 30])  # the model has room, a second copy of its weights has not
    monkeypatch.setattr(room, "free", lambda device: next(left, 500_000))
    status, told = as_json(capsys, *line)
    assert status == 0
    assert "takes" in told["skipped"]["lora_merge out of place"]
    assert told["methods"].keys() >= {"lora_merge in place", "peft"}


def test_files_of_an_adapter_that_cannot_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No permission is told as such, and not as a file that is cut short; numbers that are text, without a trace."""
    base, adapter = pair("qwen2", tmp_path)
    there = Path.open

    def closed(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "adapter_model.safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return there(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", closed)
        status, told = as_json(capsys, "merge", base, adapter, "--out", tmp_path / "out")
        assert status == cli.REFUSED
        assert "cannot be read (Permission denied)" in told["error"]
        assert "LFS" not in told["error"]
    config = json.loads((adapter / "adapter_config.json").read_text())
    for value in ("eight", [8]):
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"r": value}))
        status, told = as_json(capsys, "inspect", adapter)
        assert status == cli.REFUSED
        assert f"expected a number for r, got {value!r}" in told["error"]


def test_free_memory_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_merge.bench import room

    assert room._of_container(tmp_path) is None
    for name, value in (("memory.max", "max"), ("memory.current", "700"), ("memory.stat", "anon 5\ninactive_file 50")):
        (tmp_path / name).write_text(f"{value}\n")
    assert room._of_container(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert room._of_container(tmp_path) == 350
    monkeypatch.setattr(room, "_of_container", lambda: 350)
    assert room.free(torch.device("cpu")) == 350


def test_what_is_installed_and_fails_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchvision of another torch breaks transformers' imports: "pip install" does not help."""
    from lora_merge.extras import needed

    extra = ("a test takes it", "it", "no_it")
    with pytest.raises(MissingExtra, match=r"^a test takes it: pip install it$"), needed(*extra):
        import no_it  # noqa: F401
    lazy = ModuleNotFoundError("Could not import module 'PreTrainedModel'")
    lazy.__cause__ = RuntimeError("operator torchvision::nms does not exist")
    for error in (RuntimeError("operator torchvision::nms does not exist"), lazy):
        match = r"installed here but fails to import \(RuntimeError: operator torchvision"
        with pytest.raises(MissingExtra, match=match), needed(*extra):
            raise error
    with pytest.raises(MissingExtra, match=r"fails to import.*No module named 'other'"), needed(*extra):
        raise ModuleNotFoundError("No module named 'other'", name="other")


def test_bench_without_its_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_merge import bench

    there = bench.find_spec
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name in ("rich", "matplotlib") else there(name))
    status, told = as_json(capsys, "bench", "--shape", "tiny")
    assert (status, told["kind"]) == (cli.REFUSED, "MissingExtra")
    assert told["error"] == "bench takes rich: pip install 'lora-merge[bench]'"
    _, told = as_json(capsys, "bench", "--shape", "tiny", "--plot", "x.png")
    assert "rich, matplotlib" in told["error"]


def test_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("lora_merge.saving.merge_checkpoint", interrupted)
    line = ["merge", "base", "adapter", "--out", str(tmp_path / "out")]
    assert cli.main(line) == 130
    assert "interrupted" in capsys.readouterr().err
    assert as_json(capsys, *line) == (130, {"error": "interrupted", "kind": "KeyboardInterrupt"})


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit) as raised:
            cli.main([name, "--help"])
        assert raised.value.code == 0
        out = capsys.readouterr().out
        assert "--json" in out
        assert "Exit status" in out


def test_importing_takes_little() -> None:
    """Beside torch: under a second, and no library that an extra brings."""
    code = "import sys, time, torch\nbegin = time.process_time()\nimport lora_merge, lora_merge.cli\n"
    code += "extras = {'peft', 'transformers', 'rich', 'matplotlib', 'safetensors'} & sys.modules.keys()\n"
    code += "assert not extras, extras\nprint(time.process_time() - begin)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("bench --repeat 0", "argument --repeat: expected a whole number of 1 or more, got '0'"),
        ("bench --rank 0", "argument --rank: expected a whole number of 1 or more, got '0'"),
        ("bench --rank -3", "argument --rank: expected a whole number of 1 or more, got '-3'"),
        ("bench --rank many", "argument --rank: expected a whole number of 1 or more, got 'many'"),
        ("bench --device grafics", "argument --device: expected cpu or cuda, got 'grafics'"),
        ("merge BASE ADAPTER --out DIR --device grafics", "argument --device: expected cpu or cuda, got 'grafics'"),
        (
            "merge BASE ADAPTER --out DIR --shard-size 0",
            "argument --max-shard-size/--shard-size: a shard's size must be a number of bytes",
        ),
        ("merge BASE ADAPTER --out DIR --seed some", "argument --seed: invalid int value: 'some'"),
        ("load http://127.0.0.1:9 ADAPTER --device grafics", "argument --device: expected cpu or cuda, got 'grafics'"),
    ],
)
def test_wrong_values(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """argparse refuses them, with status 2."""
    with pytest.raises(SystemExit) as raised:
        cli.main(line.split())
    assert raised.value.code == 2
    assert said in capsys.readouterr().err


def test_every_option_is_explained() -> None:
    commands = next(a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    for name, command in commands.choices.items():
        for action in command._actions:
            assert len((action.help or "").split()) > 3, f"{name} {action.dest}: {action.help}"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        cli.main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"lora-merge {lora_merge.__version__}\n"


def test_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What this package does not raise on purpose is a bug, and shows where."""

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr("lora_merge.doctor.examine", broken)
    assert not issubclass(RuntimeError, LoraMergeError)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["doctor"])
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["doctor", "--json"])
    assert json.loads(capsys.readouterr().out) == {"error": "a bug", "kind": "RuntimeError"}


def test_the_page_says_what_there_is() -> None:
    """Every command line in docs/cli.md, docs/serve.md and docs/sizing.md is one that the parser takes."""
    seen = set()
    for page in ("cli.md", "serve.md", "sizing.md"):
        for line in (ROOT / "docs" / page).read_text().splitlines():
            if line.startswith("    lora-merge ") and "[" not in line:
                words = shlex.split(line.strip(), comments=True)[1:]
                seen.add(cli.parser().parse_args(words).command)
    assert seen == {"merge", "inspect", "bench", "load", "unload", "plan"}


def test_the_page_does_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its Python, on a real model."""
    names = names_of("cli.md")
    base, adapter = pair("qwen2", tmp_path)
    model = load(base, adapter)
    names["save"](model, None, tmp_path / "out")
    assert "read back and compared" in capsys.readouterr().out
    wanted = {n: t.clone() for n, t in MergedWeights(model)}
    assert_same(tensors(tmp_path / "out"), wanted)
    sent: dict[str, torch.Tensor] = {}
    names["export"](model, "n0", lambda n, t: sent.update({n: t.clone()}), lambda w: tqdm(w, disable=True))
    assert_same(sent, wanted)
    assert names["answer"](model, ["n0"], models.tokens()).shape[1] > models.tokens().shape[1]


def test_the_answer_on_saving_does_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, adapter = pair("qwen2", tmp_path)
    model = load(base, adapter)
    names_of("faq.md")["save"](model, None, tmp_path / "out")
    assert str(tmp_path / "out") in capsys.readouterr().out
    assert_same(tensors(tmp_path / "out"), {n: t.clone() for n, t in MergedWeights(model)})
