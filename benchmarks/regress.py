"""Fails where a run is slower than the recorded one of the same job: by ratio to the copy, never by absolute time.

    python benchmarks/merge.py --shape qwen2.5-7b --device cuda --adapter-dtype bf16 --json new.json
    python benchmarks/regress.py new.json

The recorded run is the one in benchmarks/results with the same device, shape, rank and dtypes (not in its folder
variants: other builds and backends). For lora_merge's own methods `x_copy` and extra memory may exceed it by the slack;
launches, results beyond the error bound and bits that are no longer restored may not. Exit status: 0 as fast, 1 slower,
2 nothing to compare with.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import report

RESULTS = Path(__file__).resolve().parent / "results"
JOB = ("device_name", "shape", "rank", "dtype", "adapter_dtype")
SPARE_BYTES = 1 << 20
"""Below this much extra memory nothing is compared: it is noise of the process."""


def ours(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The methods of this package."""
    methods: dict[str, dict[str, Any]] = record.get("methods", {})
    return {name: m for name, m in methods.items() if report.is_ours(name)}


def regressions(new: dict[str, Any], old: dict[str, Any], slack: float) -> list[str]:
    """What got worse, a line each."""
    found = []
    for name, before in ours(old).items():
        now = ours(new).get(name)
        if now is None:
            found.append(f"{name}: recorded, but not in the new run")
            continue
        if now["x_copy"] > before["x_copy"] * slack:
            found.append(f"{name}: {now['x_copy']:.3f} copies, recorded {before['x_copy']:.3f}, slack {slack}")
        if now["extra_bytes"] > before["extra_bytes"] * slack + SPARE_BYTES:
            found.append(f"{name}: {now['extra_bytes']} extra bytes, recorded {before['extra_bytes']}")
        if before["launches"] is not None and now["launches"] > before["launches"]:
            found.append(f"{name}: {now['launches']} launches, recorded {before['launches']}")
        if now["of_bound"] > 1:
            found.append(f"{name}: an error of {now['of_bound']:.3f} times the bound")
        if before["restored"] and not now["restored"]:
            found.append(f"{name}: the weights are no longer restored bit for bit")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of a new run of merge.py or peers.py")
    parser.add_argument("--against", type=Path, help="the recorded JSON (default: the one of the same job)")
    parser.add_argument("--slack", type=float, default=1.05, help="factor that is no regression (default %(default)s)")
    args = parser.parse_args()
    new = json.loads(args.result.read_text())
    recorded = [args.against] if args.against else sorted(RESULTS.glob("*.json"))
    compared = 0
    found: list[str] = []
    for path in recorded:
        old = json.loads(path.read_text())
        if ours(old) and all(new.get(key) == old.get(key) for key in JOB):
            lines = regressions(new, old, args.slack) if set(ours(old)) & set(ours(new)) else []
            compared += bool(set(ours(old)) & set(ours(new)))
            found += [f"{path.name}: {line}" for line in lines]
    if not compared:
        print("no recorded run of this job: " + ", ".join(f"{key}={new.get(key)}" for key in JOB))
        sys.exit(2)
    print("\n".join(found) or f"no regression against {compared} recorded run(s)")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
