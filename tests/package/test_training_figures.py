"""benchmarks/train.py on small models: every case has figures, and the base comes back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from repository import ROOT


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a benchmark as its own scripts do."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")

    def by_name(name: str) -> ModuleType:
        return __import__(name)

    return by_name


def test_steps_on_merged_weights(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain and with checkpointing; the experts may be refused, by name. The picture again from the JSON alone."""
    train = load("train")
    data, picture, again = tmp_path / "train.json", tmp_path / "train.png", tmp_path / "again.png"
    run = ["train.py", "--shape", "tiny", "--device", "cpu", "--json", str(data), "--plot", str(picture), "--profile"]
    monkeypatch.setattr(sys, "argv", run)
    train.main()
    printed, record = capsys.readouterr().out, json.loads(data.read_text())
    assert [(case["part"], case["adapters"]) for case in record["cases"]] == [
        (part, dtype) for part in ("layers4", "whole", "experts") for dtype in ("fp32", "bf16")
    ]
    for case in record["cases"]:
        assert case["restored"]
        for way, found in case["ways"].items():
            if "error" in found:
                assert (case["part"], way) == ("experts", "merged")
                assert found["error"].startswith("UnsupportedAdapter: ")
                assert found["error"] in " ".join(printed.split()), "said in the table, too"
            else:
                assert 0 < found["forward_ms"] < found["step_ms"], way
                assert ("merge_ms" in found) == (way == "merged")
    assert train.ratio(record["cases"][0], "base") > 0
    assert "layers4, rank 4, fp32 adapters: kernels" in printed
    monkeypatch.setattr(sys, "argv", ["train.py", "--draw", str(data), "--plot", str(again)])
    train.main()
    assert json.loads(data.read_text()) == record
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert again.read_bytes() == picture.read_bytes()


def test_parts_are_joined(load: Any) -> None:
    """Where a time limit takes one part at a time; never of two devices."""
    train = load("train")
    records = [
        {"device_name": "a GPU", "commit": "abc", "shape": "full", "command": [part], "cases": [part]}
        for part in ("layers4", "whole")
    ]
    assert train.joined(records)["cases"] == ["layers4", "whole"]
    assert train.joined(records[:1]) == records[0]
    with pytest.raises(SystemExit, match="device_name"):
        train.joined([records[0], records[1] | {"device_name": "another GPU"}])


def test_what_was_asked_for(load: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A step that takes more than was asked for is told, and a way that failed has a reason in the place of figures."""
    train = load("train")
    ways = {"base": 100.0, "peft": 160.0, "merged": 104.0}
    figures = {way: {"step_ms": ms, "forward_ms": ms / 2, "peak_bytes": 1 << 30} for way, ms in ways.items()}
    common = {"rank": 32, "adapters": "fp32", "tokens": 8192, "restored": True}
    failed = figures | {"peft": {"error": "OutOfMemoryError: too much"}}
    cases = [common | {"part": "layers4", "ways": figures}, common | {"part": "whole", "ways": failed}]
    train.show({"device_name": "a GPU", "device": "cuda", "versions": {}, "cases": cases})
    printed = capsys.readouterr().out
    assert "missed: layers4, rank 32, fp32 adapters: step beside the base alone: 1.040, asked 1.03" in printed
    assert "step beside PEFT's: 0.650, asked 0.62" in printed
    assert "whole, rank 32, fp32 adapters, PEFT's forward: OutOfMemoryError: too much" in printed
    assert "missed: whole" not in printed


def test_what_is_served_of_what_was_learnt(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """benchmarks/fidelity.py without engines: trained merged, the served bits are the trained ones, and KL is 0."""
    fidelity = load("fidelity")
    data, picture, again = tmp_path / "fidelity.json", tmp_path / "fidelity.png", tmp_path / "again.png"
    run = ["fidelity.py", "--shape", "tiny", "--device", "cpu", "--pretrain", "10", "--steps", "1", "3"]
    run += ["--work", str(tmp_path / "work"), "--json", str(data), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", run)
    fidelity.main()
    printed, record = capsys.readouterr().out, json.loads(data.read_text())
    assert [(row["lr"], row["step"]) for row in record["rows"]] == [(1e-5, 1), (1e-5, 3), (1e-4, 1), (1e-4, 3)]
    for row in record["rows"]:
        assert row["merged"]["same_bits"]
        assert row["kl"]["merged"] == 0
        assert row["merged"]["gap"] == 0 < row["gap"], (
            "the trainer's forward is that of the served weights, bit for bit"
        )
        assert 0 <= row["kl"]["fp16"] < row["learnt"]
        assert row["merged"]["loss"] == pytest.approx(row["loss"], abs=1e-4)
    careful = record["rows"][0]
    assert careful["kl"]["fp16"] < careful["kl"]["nearest"], "bf16 rounds most of a small update away"
    assert "the bits served are those trained on" in printed
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--draw", str(data), "--plot", str(again)])
    fidelity.main()
    assert again.read_bytes() == picture.read_bytes()
    record["engines"] = {
        "merged": {
            way: {"mean": 0.03, "maximum": 0.4, "ratio_mean": 1.0} for way in ("peft, merged", "merged, merged")
        },
        "adapter": {"error": "part adapter ended with 1"},
    }
    fidelity.show(record)
    printed = " ".join(capsys.readouterr().out.split())
    assert "trained merged, merged pushes 0.03000" in printed
    assert "adapter: part adapter ended with 1" in printed
    fidelity.draw(record, again)


EXAMPLE = """
import json, sys, time
from pathlib import Path
asked = dict(zip(sys.argv[1::1], sys.argv[2::1]))
out, steps, seed = Path(asked["--out"]), int(asked["--steps"]), int(asked["--seed"])
out.mkdir(exist_ok=True)
log = out / "log.jsonl"
first = len(log.read_text().splitlines()) if log.exists() else 0
with log.open("a") as file:
    for step in range(first, steps - (seed == 2)):
        entry = {"step": step, "reward": step / 4, "ratio_mean": 1.0, "ratio_off": 0.0, "resumed": step == first > 0}
        print(json.dumps(entry), file=file)
time.sleep(int(asked.get("--hang", 0)))
sys.exit(3 if seed == 2 else 0)
"""


def test_seeds_of_grpo(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run for each way and seed, that of the first resumed; the steps of one that fails count."""
    grpo = load("grpo")
    (tmp_path / "example.py").write_text(EXAMPLE)
    monkeypatch.setattr(grpo, "EXAMPLE", tmp_path / "example.py")
    data, picture = tmp_path / "grpo.json", tmp_path / "grpo.png"
    run = ["grpo.py", "--steps", "4", "--seeds", "3", "--ways", "merged", "trained", "--at-once", "6"]
    run += ["--json", str(data), "--plot", str(picture)]
    monkeypatch.setattr(sys, "argv", run)
    with pytest.raises(SystemExit):
        grpo.main()
    record = json.loads(data.read_text())
    assert record["ways"].keys() == {"merged", "trained"}
    for way in record["ways"].values():
        assert [entry["resumed"] for entry in way["log"]] == [False, False, True, False]
        others = {one["seed"]: one for one in way["others"]}
        assert [len(others[seed]["log"]) for seed in (1, 2)] == [4, 3]
        assert "error" not in others[1]
        assert others[2]["error"].startswith("status 3 after 3 steps")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "trained on merged weights: seed 2, status 3" in " ".join(capsys.readouterr().out.split())


def test_a_deadline_of_grpo(load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Runs are ended then, and said to be."""
    grpo = load("grpo")
    (tmp_path / "example.py").write_text(EXAMPLE)
    monkeypatch.setattr(grpo, "EXAMPLE", tmp_path / "example.py")
    data = tmp_path / "grpo.json"
    run = ["grpo.py", "--steps", "4", "--ways", "merged", "--deadline", "0", "--json", str(data)]
    monkeypatch.setattr(sys, "argv", [*run, "--options", "--hang", "600"])
    with pytest.raises(SystemExit):
        grpo.main()
    assert json.loads(data.read_text())["ways"]["merged"]["error"].startswith("status -9")
