"""The table of docs/performance.md in which pushes into SGLang stand beside those into vLLM, from records.

python benchmarks/beside_vllm.py                   # of benchmarks/results
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
SGLANG, ACROSS = "sync-sglang.json", "sync-sglang-x2.json"


class Row(NamedTuple):
    """A kind of push, and where its figures are: a record and a part of it."""

    what: str
    vllm: tuple[str, str]
    sglang: tuple[str, str]


SEVEN = "qwen2.5-7b"
FIRST = f"sync-engine-first-{SEVEN}.json"
ROWS = (
    Row("the trainer merges, written", (f"sync-push-{SEVEN}.json", "other"), (SGLANG, "merged")),
    Row("the worker merges, reads the trainer's weights", (f"sync-pull-{SEVEN}.json", "pull"), (SGLANG, "memory")),
    Row("the trainer merges, in buckets", (f"sync-{SEVEN}.json", "other"), (SGLANG, "buckets")),
    Row("the engine merges, adapters alone go", (FIRST, "engine-other"), (SGLANG, "engine")),
    Row("adapters beside their base (vLLM: same process)", (f"sync-{SEVEN}.json", "adapter"), (SGLANG, "adapter")),
    Row("another GPU, written (vLLM: TP=2)", (f"sync-write-{SEVEN}-x2.json", "tp2"), (ACROSS, "across_written")),
    Row("another GPU, NCCL (vLLM: TP=2)", (f"sync-{SEVEN}-x2.json", "tp2"), (ACROSS, "across_nccl")),
)  # fmt: skip


def cells(folder: Path, where: tuple[str, str]) -> list[str]:
    """Milliseconds of a whole push; of it check, transfer and finish."""
    part = read(folder, where[0]).get(where[1], {})
    if "total_ms" not in part:
        return ["", ""]
    phases = (part["phases_ms"].get(phase, 0.0) for phase in ("check", "transfer", "finish"))
    return [f"{part['total_ms']:.0f}", ", ".join(f"{ms:.1f}" for ms in phases)]


def read(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else {}


def table(folder: Path) -> str:
    """In Markdown."""
    names = [
        " and ".join(
            sorted({read(folder, file).get("device_name", "").removeprefix("NVIDIA ") for file in files} - {""})
        )
        for files in ({row.vllm[0] for row in ROWS}, {SGLANG, ACROSS})
    ]
    spent = "check, transfer, finish"
    lines = [
        f"| milliseconds | vLLM ({names[0]}) | {spent} | SGLang ({names[1]}) | {spent} |",
        "|---|---|---|---|---|",
    ]
    for row in ROWS:
        lines.append(f"| {' | '.join([row.what, *cells(folder, row.vllm), *cells(folder, row.sglang)])} |")
    for name, what in (
        ("update_weights_from_tensor", "SGLang's own update of weights that are merged already, tensor by tensor"),
        ("flattened_bucket", "the same, in flattened buckets"),
    ):
        own = read(folder, SGLANG).get("peers", {}).get(f"{name}_ms")
        lines.append(f"| {what} | | | {'' if own is None else f'{own:.0f}'} | |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    print(table(parser.parse_args().results))


if __name__ == "__main__":
    main()
