"""benchmarks/fidelity.py with real engines, as a user runs it; without them: tests/package/test_training_figures.py."""

from __future__ import annotations

from pathlib import Path

from trainer_benchmark import ran

SHORT = ("--shape", "tiny", "--device", "cpu", "--pretrain", "5", "--steps", "1", "--lrs", "1e-4", "--engine")
ASKED = ("--prompts", "2", "--prompt-tokens", "8", "--new-tokens", "8")


def answers(folder: Path, *engines: str) -> dict[str, dict[str, float]]:
    """The gap of each way, once all were compared with the trainer token by token."""
    record, printed = ran("fidelity", folder, *SHORT, *ASKED, "--work", str(folder / "work"), "--engines", *engines)
    assert "vllm" in record["versions"]
    assert "vLLM against the trainer" in printed
    found = {way: gap for engine in record["engines"].values() for way, gap in engine.items()}
    for way, gap in found.items():
        assert gap["tokens"] == 2 * 8, way
        # Two layers in bf16; other weights than those of the trainer would be off by far more.
        assert gap["maximum"] < 0.1, way
    return found


def test_the_engine_that_both_trainers_push_to(tmp_path: Path) -> None:
    assert answers(tmp_path, "merged").keys() == {"peft, merged", "merged, merged"}


def test_other_engines(tmp_path: Path) -> None:
    assert answers(tmp_path, "adapter", "fp16").keys() == {"peft, adapter", "peft, fp16"}
