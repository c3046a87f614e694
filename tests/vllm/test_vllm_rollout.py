"""benchmarks/rollout.py on tiny shapes, as a user runs it."""

from __future__ import annotations

from pathlib import Path

from trainer_benchmark import ran

SHORT = ("--device", "cpu", "--repeats", "1", "--prompt-tokens", "4", "--new-tokens", "4", "--requests", "1", "3")


def test_merged_weights(tmp_path: Path) -> None:
    record, printed = ran("rollout", tmp_path, "--shape", "tiny", *SHORT, "--ways", "merged", "--layers", "1")
    assert {"commit", "command", "versions", "device_name", "requests", "cuda_graphs"} <= record.keys()
    assert "vllm" in record["versions"]
    assert record["layers"] == 1
    [merged] = record["ways"].values()
    assert len(merged["tokens_s"]) == 2, merged
    assert all(speed > 0 for speed in merged["tokens_s"])
    assert merged["push"].startswith("merged@1")
    assert "tiny (1 of 2 layers), LoRA of rank 32: tokens/s" in " ".join(printed.split())


def test_all_ways(tmp_path: Path) -> None:
    record, printed = ran("rollout", tmp_path, "--shape", "tiny", *SHORT)
    pushes = {name: way["push"].partition("@")[0] for name, way in record["ways"].items()}
    assert pushes == {"base": "merged", "merged": "merged", "adapter": "adapter"}
    assert printed.count("%)") == 4, "merged weights and the LoRA path are compared with the base"


def test_experts_that_cannot_be_served(tmp_path: Path) -> None:
    """vLLM on a CPU has no LoRA for experts: that is a line below the table, and no failure."""
    record, printed = ran("rollout", tmp_path, "--shape", "tiny-moe", *SHORT, "--ways", "merged", "adapter")
    assert "tokens_s" in record["ways"]["merged"]
    assert "refused" in record["ways"]["adapter"]
    assert "vLLM's LoRA path: refused, " in printed
