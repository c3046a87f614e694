"""The names of the files that PEFT saves an adapter in."""

from __future__ import annotations

from pathlib import Path

CONFIG = "adapter_config.json"
TENSORS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
FILES = (TENSORS, PICKLED)
"""What the adapter's own tensors may be in; PEFT reads the first that is there."""


def file_of(folder: Path) -> Path | None:
    """Find the file of an adapter's own tensors; None where there is none."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)
