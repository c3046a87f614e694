"""A job that leaves the caches is compared with the machine's limits; `test_benchmark.py` has jobs that do not."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from lora_merge.bench import job, timing
from lora_merge.bench.options import add_options


def test_limits_of_a_job_that_leaves_the_caches(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "SMALL_BYTES", 0)
    monkeypatch.setattr(timing, "cache_bytes", lambda device: 0)
    monkeypatch.setattr("sys.argv", ["merge.py"])
    options = argparse.ArgumentParser()
    add_options(options, tmp_path)
    args = options.parse_args(["--shape", "tiny", "--repeat", "1", "--plot", str(tmp_path / "out.png")])
    args.json_file = None
    record = job.run(args)
    for name, figures in record["methods"].items():
        assert figures["x_copy"] == pytest.approx(figures["ms"] / record["copy_ms"]), name
        assert figures["of_copy"] == pytest.approx(1 / figures["x_copy"]), name
    printed = capsys.readouterr().out
    for words in ("limit: one large copy", "limit: the products", "a copy moves", "100% is as fast as a plain copy"):
        assert words in printed
