"""The sweeps behind README's pictures, the model of large jobs, merging on shards, and the comparison with recorded
runs: `sweep.py`, `scale.py`, `fsdp.py` and `regress.py` of benchmarks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from repository import ROOT

from lora_merge.bench import report, shapes


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark as its own scripts do."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def by_name(name: str) -> ModuleType:
        return __import__(name)

    return by_name


def test_sweep(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every job of a grid with every method, as JSON and as a picture; and the picture again from the JSON alone."""
    sweep = load("sweep")
    data, picture, again = tmp_path / "sweep.json", tmp_path / "sweep.png", tmp_path / "again.png"
    run = ["sweep.py", "--grid", "tiny", "--repeat", "1", "--json", str(data), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", run)
    sweep.main()
    record = json.loads(data.read_text())
    grid = list(sweep.GRIDS["tiny"].points())
    assert [(p["sweep"], p["name"], p["rank"]) for p in record["points"]] == [(s, n, r) for s, n, _, r in grid]
    for p, (_, _, shape, _) in zip(record["points"], grid, strict=True):
        assert p["elements"] == sum(rows * cols for _, rows, cols in shape.matrices())
        assert list(p["methods"]) == list(sweep.METHODS), p["skipped"]
        assert all(m["x_copy"] == pytest.approx(m["ms"] / p["copy_ms"]) for m in p["methods"].values())
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--draw", str(data), "--plot", str(again)])
    sweep.main()
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert again.read_bytes() == picture.read_bytes()


@pytest.mark.parametrize("file", sorted((ROOT / "benchmarks" / "results").rglob("*.json")), ids=lambda file: file.stem)
def test_records_name_no_folder_of_a_machine(file: Path) -> None:
    command = json.loads(file.read_text()).get("command", [])
    assert not [part for part in command if Path(part).is_absolute()]


def test_a_command_is_recorded_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "merge.py"), "--json", "/a/b.json", "--shape", "x/y"])
    assert report.provenance(torch.device("cpu"))["command"] == [
        "python",
        "merge.py",
        "--json",
        "b.json",
        "--shape",
        "x/y",
    ]


def test_the_fastest_copy_of_the_same_bytes_counts(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = load("sweep")
    times = iter([1.2, 1.2, 1.0, 1.0, 1.3, 1.3])  # before and after each point
    monkeypatch.setattr(sweep.timing, "copies", lambda *_: [next(times)])
    monkeypatch.setitem(sweep.GRIDS, "tiny", sweep.Grid((2, 3, 4), "tiny", (), (), "tiny-moe"))
    monkeypatch.setattr(
        sys, "argv", ["sweep.py", "--grid", "tiny", "--repeat", "1", "--methods", "lora_merge in place"]
    )
    args = sweep.parse()
    with torch.no_grad():
        record = sweep.run(args)
    assert [p["own_copy_ms"] for p in record["points"]] == [1.2, 1.0, 1.3]
    assert [p["copy_ms"] for p in record["points"]] == [1.0] * 3
    assert all(m["x_copy"] == m["ms"] for p in record["points"] for m in p["methods"].values())


def test_the_table_of_both_engines(load: Any, tmp_path: Path) -> None:
    """Figures stand where their record is; what was not measured stays empty."""
    beside = load("beside_vllm")
    part = {"total_ms": 21.4, "phases_ms": {"check": 1.0, "transfer": 2.0, "finish": 3.04, "resume": 4.0}}
    record = {"device_name": "NVIDIA H200", "merged": part, "buckets": part, "peers": {"flattened_bucket_ms": 99.7}}
    (tmp_path / "sync-sglang.json").write_text(json.dumps(record))
    lines = beside.table(tmp_path).splitlines()
    assert "SGLang (H200)" in lines[0]
    assert all(line.count("|") == 6 for line in lines)
    filled = [line for line in lines[2:] if any(figure.isdigit() for figure in line.split("|")[4])]
    assert [line.split(" |", 1)[1] for line in filled] == [
        "  |  | 21 | 1.0, 2.0, 3.0 |",
        "  |  | 21 | 1.0, 2.0, 3.0 |",
        " | | 100 | |",
    ]
    both = beside.table(ROOT / "benchmarks" / "results").splitlines()
    assert all(line.split("|")[2].strip() for line in both[2 : 2 + len(beside.ROWS)]), "vLLM's records are all there"


def test_scale(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """7B to 1T on 1 to 1024 GPUs; every constant names its source; the formulas agree with what was measured."""
    scale = load("scale")
    data = tmp_path / "scale.json"
    monkeypatch.setattr(sys, "argv", ["scale.py", "--json", str(data)])
    scale.main()
    printed, record = capsys.readouterr().out, json.loads(data.read_text())
    assert set(record["machine"]) == set(scale.SOURCES)
    assert all(f"| {name} |" in printed for name in scale.SOURCES), "assumptions are printed"
    sizes = {p["model"]: p["gigabytes"] for p in record["predictions"]}
    assert min(sizes.values()) == pytest.approx(13.05, rel=1e-3), "bytes of the linears of Qwen2.5-7B in bf16"
    assert max(sizes.values()) > 2000, "a trillion weights"
    assert {p["gpus"] for p in record["predictions"]} == set(scale.GPUS)
    networks = [[p for p in record["predictions"] if p["network"] == network] for network in scale.NETWORKS]
    for same in zip(*networks, strict=True):
        assert len({(p["model"], p["layout"], p["gpus"]) for p in same}) == 1
        for mode, slowest in same[-1]["ms"].items():
            assert same[0]["ms"][mode] <= same[1]["ms"][mode] <= slowest, "NVLink, 400 Gb/s, 25 Gb/s"
    kept = json.loads((ROOT / "benchmarks/results/scale.json").read_text())
    assert kept["predictions"] == record["predictions"], "taken anew: scale.py --json benchmarks/results/scale.json"
    assert kept["targets"] == record["targets"]
    page = (ROOT / "docs" / "several_machines.md").read_text()
    for target in record["targets"]:
        if target["network"] == "400 Gb/s":
            for ms in target["ms"].values():
                assert f"{ms / 1e3:.2f} s |" in page, "the page's table is of this record"
            assert f"| {target['seconds']} s |" in page
    merges = [c for c in record["checks"] if c["what"].startswith("merge: qwen3")]
    assert merges, "merges of another model than the one that the constants come from"
    assert all(0.9 < c["predicted_ms"] / c["measured_ms"] < 1.1 for c in merges), merges

    # The fits return what they were fitted to.
    machine = scale.fitted(scale.Machine())
    same, other = (scale.recorded("sync-qwen2.5-7b.json")[part] for part in ("same", "other"))
    within = same["merge_only_ms"] + machine.tensor_us * same["tensors"] / 1e3
    assert within == pytest.approx(same["merge_and_load_ms"])
    size = other["bytes"] / 1e9
    between = same["merge_only_ms"] + machine.load_ms(size, other["tensors"]) + machine.hand_ms(size)
    assert between == pytest.approx(other["merge_and_load_ms"])
    assert between + machine.fixed_ms == pytest.approx(other["total_ms"])


def test_more_gpus_and_wires(load: Any) -> None:
    """What must hold of the formulas whatever the constants are."""
    scale = load("scale")
    machine, job = scale.Machine(), scale.JOBS[0]

    def step(gpus: int, layout: int = 0) -> dict[str, float]:
        return scale.step(job, job.layouts(gpus, 8)[layout], machine, 32, gpus)

    assert step(8)["in place"] == pytest.approx(step(1)["in place"] / 8), "a shard each"
    assert machine.gather_ms(1, 1) == machine.wire_ms(1, 1) == 0
    assert machine.wire_ms(1, 8) == pytest.approx(1e3 * 7 / 8 / machine.peer), "one GPU's own eighth stays"
    assert machine.wire_ms(1, 16) == pytest.approx(1e3 / 2 / machine.network), "half of it comes from the other node"
    agreeing = machine.agree_ms(64) - machine.agree_ms(8)
    alone = {mode: ms + (agreeing if mode != "in place" else 0) for mode, ms in step(8).items()}
    assert step(64, 1) == pytest.approx(alone), "HSDP: a node as if alone, but that all ranks agree"
    assert machine.agree_ms(1) == 0 < agreeing
    moe = next(j for j in scale.JOBS if "ep" in j.megatron)
    assert moe.gigabytes(True) + moe.gigabytes(False) == pytest.approx(moe.gigabytes())


def test_latency(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latency = load("latency")
    data = tmp_path / "latency.json"
    run = ["latency.py", "--device", "cpu", "--shape", "tiny", "--repeat", "2", "--json", str(data)]
    monkeypatch.setattr(sys, "argv", run)
    latency.main()
    record = json.loads(data.read_text())
    assert set(record["us"]) == {"alone", "in a row"}, "graphs are of GPUs"
    points = record["layers"]
    assert [p["layers"] for p in points] == list(latency.LAYERS)
    residuals = [p["us"] - record["fixed_us"] - record["x_copy"] * p["copy_us"] for p in points]
    assert sum(residuals) == pytest.approx(0, abs=1e-3 * points[-1]["us"])
    assert f"{record['x_copy']:.2f} copies" in capsys.readouterr().out


def test_entry(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entry = load("entry")
    data = tmp_path / "entry.json"
    monkeypatch.setattr(entry, "SHAPES", {"tiny": shapes.SHAPES["tiny"]})
    monkeypatch.setattr(sys, "argv", ["entry.py", "--repeat", "2", "--json", str(data)])
    entry.main()
    (point,) = json.loads(data.read_text())["points"]
    assert point["matrices"] == len(shapes.SHAPES["tiny"].matrices())
    assert min(point["ms"], point["cpu_ms"]) > 0


def test_energy(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The floor of the recorded run by the formula; without a GPU a clear end."""
    energy = load("energy")
    record = json.loads((ROOT / "benchmarks" / "results" / "energy-h200.json").read_text())
    copy_ms = next(row["ms"] for row in record["rows"] if row["label"] == "copy")
    rows = [row for row in record["rows"] if row.get("floor_copies", 1) > 1]
    assert rows
    for row in rows:
        floor_ms = energy.floor_ms(row["nbytes"], row["operations"], record)
        assert floor_ms / copy_ms == pytest.approx(row["floor_copies"], rel=1e-2)
    monkeypatch.setattr(sys, "argv", ["energy.py"])
    monkeypatch.setattr(energy.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="an NVIDIA GPU is needed"):
        energy.main()


def test_merging_on_shards(tmp_path: Path) -> None:
    """Two real processes; the part without an engine, which test_vllm_shards.py adds."""
    data = tmp_path / "fsdp.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "benchmarks" / "fsdp.py"), "--device", "cpu", "--shape", "tiny", "--rank", "8"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment |= {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--parts", "merge", "--json", str(data)],
        env=environment, text=True, capture_output=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    record = json.loads(data.read_text())
    linears = 2 * (128 * 128 * 2 + 64 * 128 * 2 + 3 * 256 * 128)  # of two layers
    assert record["merge"]["local_bytes"] == 2 * linears / 2, "bf16, and half of it here"
    columns = 2 * (6 * 128 + 256)
    assert record["merge"]["adapter_bytes_received"] == 8 * 4 * columns / 2, "lora_A, half of whose rows lie here"
    assert record["merge"]["merge_launches"] == 1
    assert "adapters sent, and received, per rank" in done.stdout


class TestRegress:
    """A run beside the recorded ones."""

    @pytest.fixture
    def status(
        self, load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> Any:
        """Exit status and output for a record that was changed."""
        regress, new = load("regress"), tmp_path / "new.json"

        def run(record: dict[str, Any]) -> tuple[int, str]:
            new.write_text(json.dumps(record))
            monkeypatch.setattr(sys, "argv", ["regress.py", str(new)])
            with pytest.raises(SystemExit) as end:
                regress.main()
            return end.value.code, capsys.readouterr().out

        return run

    RECORDS = tuple(path.stem for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")))

    def read(self, name: str) -> dict[str, Any]:
        return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())

    @pytest.mark.parametrize("name", [name for name in RECORDS if name.startswith(("merge-", "peers-", "restore-"))])
    def test_a_recorded_run_against_itself(self, status: Any, name: str) -> None:
        assert status(self.read(name))[0] == 0

    @pytest.mark.parametrize("name", ["merge-qwen2.5-7b", "peers-h200"])
    @pytest.mark.parametrize(
        ("figure", "factor", "code"),
        [("x_copy", 1.06, 1), ("x_copy", 1.02, 0), ("launches", 2, 1), ("of_bound", 1e3, 1)],
    )
    def test_a_merge_that_changed(self, status: Any, name: str, figure: str, factor: float, code: int) -> None:
        record = self.read(name)
        record["methods"]["lora_merge in place"][figure] *= factor
        found, printed = status(record)
        assert found == code, printed
        assert ("lora_merge in place" in printed) == bool(code)

    @pytest.mark.parametrize("figure", ["x_copy_merge", "x_copy_unmerge", "held"])
    def test_a_tracked_merge_that_changed(self, status: Any, figure: str) -> None:
        record = self.read("restore-h200")
        record["runs"][1][figure] *= 1.06
        assert status(record)[0] == 1

    def test_methods_that_are_gone_and_bits_that_stay_away(self, status: Any) -> None:
        record = self.read("merge-qwen2.5-7b")
        del record["methods"]["lora_merge in place"]
        assert status(record)[0] == 1
        record = self.read("merge-qwen2.5-7b")
        record["methods"]["merged() enter+exit"]["restored"] = False
        assert status(record)[0] == 1

    def test_nothing_to_compare_with(self, status: Any) -> None:
        assert status(self.read("merge-qwen2.5-7b") | {"rank": 33})[0] == 2
        assert status(self.read("sync-qwen2.5-7b"))[0] == 2

    def test_another_build_is_found(self, status: Any) -> None:
        """The kernels for any GPU are slower than the slack allows."""
        assert status(self.read("variants/merge-qwen2.5-7b-sm80"))[0] == 1


PROVENANCE = {"versions": {"vllm": "0.26.0", "trl": "1.16.0"}, "device_name": "a GPU", "cuda_graphs": True}
ROLLOUT = PROVENANCE | {
    "shape": "qwen3-30b-a3b", "layers": 24, "rank": 32, "targets": "all", "prompt_tokens": 128, "new_tokens": 256,
    "requests": [1, 64],
    "ways": {
        "base": {"tokens_s": [200.0, 10000.0]}, "merged": {"tokens_s": [198.0, 10000.0]},
        "adapter": {"refused": "PushRefused: no LoRA for experts"},
    },
}  # fmt: skip
STEP = PROVENANCE | {
    "shape": "qwen2.5-7b", "layers": 28, "rank": 32, "ranks": 2, "completions": 64, "new_tokens": 512,
    "ways": {
        "trl": {"seconds": {"rollout": 3.0, "sync": 0.5, "update": 4.5}, "drift": 0.1},
        "adapter": {"error": "part adapter ended with 1"},
        "merged": {"seconds": {"rollout": 3.0, "sync": 0.02, "update": 4.5}, "drift": 0.0},
        "trained": {"seconds": {"rollout": 3.0, "sync": 0.02, "update": 3.0}, "drift": 0.0},
    },
}  # fmt: skip
GRPO = PROVENANCE | {
    "steps": 4, "dtype": "bfloat16",
    "ways": {
        "merged": {"log": [
            {"step": i, "reward": i / 4, "ratio_mean": 1.001, "ratio_off": 0.125, "resumed": i == 2} for i in range(4)
        ]},
        "engine": {"log": [], "error": "status 1 after 0 steps"},
        "trained": {
            "log": [
                {"step": i, "reward": i / 4, "ratio_mean": 1.0, "ratio_off": 0.1, "resumed": i == 2} for i in range(4)
            ],
            "others": [
                {"seed": 1, "log": [{"step": 0, "reward": 0.5, "ratio_mean": 1.0, "ratio_off": 0.2, "resumed": False}]},
                {"seed": 2, "log": [], "error": "status 2 after 0 steps"},
            ],
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "record"), [("rollout", ROLLOUT), ("step", STEP), ("grpo", GRPO)])
def test_rollouts_and_steps_are_shown(
    name: str, record: dict, load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Table and picture of a record in which a way is missing; pictures.py draws it where the record lies."""
    benchmark, pictures = load(name), load("pictures")
    benchmark.show(record)
    printed = " ".join(capsys.readouterr().out.split())
    wanted = {
        "rollout": [
            "(24 of 48 layers)",
            "198 (99%)",
            "10,000 (100%)",
            "vLLM's LoRA path: refused, PushRefused: no LoRA",
        ],
        "step": ["2 x a GPU", "7.520 (94%)", "6.020 (75%)", "LoRA path: part adapter ended with 1"],
        "grpo": [
            "merged by the trainer 1 0.00 0.38 1.0010 1.0010 0.125 2",
            "merged by the engine: status 1 after 0",
            "trained on merged weights 2 0.25 0.44 (0.38 to 0.50) 1.0000 1.0000 0.200 2",
            "trained on merged weights: seed 2, status 2 after 0",
        ],
    }
    assert all(text in printed for text in wanted[name]), printed
    assert not pictures.recorded(tmp_path)
    record_of = next(of for benchmark_of, of in pictures.WAITING.values() if benchmark_of == name)
    data, picture = tmp_path / f"{record_of}.json", tmp_path / "deeper" / "out.png"
    data.write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--draw", str(data), "--plot", str(picture)])
    benchmark.main()
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    [(file, draw)] = pictures.recorded(tmp_path).items()
    draw(tmp_path / file)
    assert (tmp_path / file).read_bytes() == picture.read_bytes()


def test_experts_are_shown_apart(load: Any) -> None:
    """A model without the LoRA path's figures has a bar for each number of requests; a record of no pair has none."""
    rollout = load("rollout")
    assert rollout.share(ROLLOUT, "merged", 0) == pytest.approx(0.99)
    assert rollout.share(ROLLOUT, "adapter", 0) is None
    with pytest.raises(SystemExit, match="--ways"):
        rollout.draw(ROLLOUT | {"ways": {"base": {"tokens_s": [1.0, 2.0]}}}, Path("none.png"))


@pytest.mark.parametrize(("option", "text"), [("--batch=3", "multiple of --batch 3"), ("--group=3", "--group 3")])
def test_steps_of_no_whole_batches(
    option: str, text: str, load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = load("step")
    monkeypatch.setattr(sys, "argv", ["step.py", "--device", "cpu", option])
    with pytest.raises(SystemExit):
        step.parse()
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("name", ["rollout", "step"])
def test_a_picture_of_no_file(
    name: str, load: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = load(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--draw", "record.json"])
    with pytest.raises(SystemExit):
        benchmark.main()
    assert "--draw needs --plot" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["start", "push", "other"])
def test_an_engine_that_fails_is_recorded_with_its_phase(where: str, load: Any) -> None:
    """That of what came up first, where clearing away fails, too."""
    engines = load("quantised_engines")

    def run() -> dict[str, Any]:
        try:
            for name in ("start", "push"):
                with engines.phase(name):
                    assert where != name, "first\nof two lines"
            raise KeyError("neither")
        finally:
            if where == "push":
                raise RuntimeError("while the engine ended")

    found = engines.guarded(run)
    assert found["phase"] == where
    assert found["failed"].startswith(
        "KeyError: 'neither'" if where == "other" else "AssertionError: first of two lines"
    )


def test_scaled(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every group and rank has both halves of its time."""
    scaled = load("scaled")
    monkeypatch.setattr(scaled, "FUSED", [((64, 32, 32), 128)])
    monkeypatch.setattr(sys, "argv", ["scaled.py", "--repeats", "1", "--json", str(tmp_path / "scaled.json")])
    scaled.main()
    runs = json.loads((tmp_path / "scaled.json").read_text())["runs"]
    assert len(runs) == len(scaled.GROUPS) * len(scaled.RUNS)
    assert all(min(run["ms"], run["merge_ms"], run["scale_ms"]) > 0 for run in runs)
