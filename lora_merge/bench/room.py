"""Whether what is to be measured has room: memory that is free, and files that can be written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from ..errors import InvalidInput

_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Where Linux says how much memory a container may have and has: version 2 and 1 of its control groups."""
SPARE = 0.05
"""Share of the free memory that is left alone, for everybody else and for what is not counted."""


def free(device: torch.device) -> int | None:
    """Return how many bytes of a device can still be taken without swapping; None where nobody says."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's, to be used again
        return torch.cuda.mem_get_info(device)[0] + unused
    known = [left for left in (_of_machine(), _of_container()) if left is not None]
    return min(known) if known else None


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_container(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    for limit, usage, stat in _CGROUPS:
        try:
            most, used = (root / limit).read_text().strip(), int((root / usage).read_text())
            if not most.isdigit():  # "max"
                return None
            # Files that are cached give way: they count as used, and can be taken.
            lines = dict(line.split() for line in (root / stat).read_text().splitlines())
            return int(most) - used + int(lines.get("inactive_file", lines.get("total_inactive_file", 0)))
        except (OSError, ValueError):
            continue
    return None


def lacking(what: str, nbytes: int, device: torch.device) -> str:
    """Return that something has no room, in words; "" where it has, or nobody knows.

    Args:
        what: the subject of the sentence.
        nbytes: how many bytes it takes at its peak, on top of what is taken now.
    """
    left = free(device)
    if left is None or nbytes <= left * (1 - SPARE):
        return ""
    where = "GPU" if device.type == "cuda" else "machine"
    return f"{what} takes {nbytes / 1e9:.1f} GB, and {left / 1e9:.1f} GB are free on this {where}"


def check_files(files: Iterable[Path | None]) -> None:
    """Raise `InvalidInput` unless every file can be written: what was measured would be lost. Makes missing folders.

    Args:
        files: paths; None stands for one that was not asked for.
    """
    for file in files:
        if file is None:
            continue
        there = file.exists()
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("ab"):
                pass
            if not there:
                file.unlink()
        except OSError as error:
            raise InvalidInput(f"{file} cannot be written ({error.strerror}); name another file") from error
