"""Fails where a run is slower than the recorded one of the same job: by ratio to the copy, never by absolute time.

    python benchmarks/merge.py --shape qwen2.5-7b --device cuda --adapter-dtype bf16 --json new.json
    python benchmarks/regress.py new.json

Compared is with the runs of the same script (merge.py, peers.py or restore.py) in benchmarks/results, of the same
device, shape, rank and dtypes (not in its folder variants: other builds and backends, and re-merges beside the tracked
merges that other records have). For lora_merge's own methods
`x_copy` and memory may exceed the record by the slack; launches, results beyond the error bound and bits that are no
longer restored may not. Exit status: 0 as fast, 1 slower, 2 nothing to compare with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_merge.bench import report

RESULTS = Path(__file__).resolve().parent / "results"
JOB = ("device_name", "shape", "rank", "dtype", "adapter_dtype")
RESTORE_JOB, RESTORE_RUN = ("device_name", "rows", "cols", "matrices"), ("base", "adapters", "rank", "update")
PYTHON_SLACK = 1.15
"""Of `merged()`, whose entry is mostly Python: two recorded runs of version 13 took 4.2 and 4.7 copies. Its launch took
1.074 and 1.080 there, so the slack of launches is less than the 5 % that a build for sm_80 lies above."""
SPARE_BYTES = 1 << 20
"""Below this much extra memory nothing is compared: it is noise of the process."""

Figures = dict[str, dict[str, Any]]
"""Name of a method -> its figures."""


def jobs(record: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Figures]]:
    """What a record has of this package, job by job; jobs of two records that are equal may be compared."""
    script = next((Path(word).name for word in record.get("command") or () if word.endswith(".py")), None)
    if script in ("merge.py", "peers.py"):
        ours = {name: m for name, m in record["methods"].items() if report.is_ours(name)}
        yield (script, *(record[key] for key in JOB)), ours
    for run in record.get("runs", ()) if script == "restore.py" else ():
        job = (script, *(record[key] for key in RESTORE_JOB), *(run[key] for key in RESTORE_RUN))
        ways = [way for way in ("merge", "unmerge", "remerge") if f"x_copy_{way}" in run]
        yield job, {f"tracked {way}": {"x_copy": run[f"x_copy_{way}"], "held": run["held"]} for way in ways}


def regressions(new: Figures, old: Figures, slack: float) -> Iterator[str]:
    """What got worse, a line each."""
    for name, before in old.items():
        now = new.get(name)
        if now is None:
            yield f"{name}: recorded, but not in the new run"
            continue
        allowed = max(slack, PYTHON_SLACK) if name.startswith("merged()") else slack
        if now["x_copy"] > before["x_copy"] * allowed:
            yield f"{name}: {now['x_copy']:.3f} copies, recorded {before['x_copy']:.3f}, slack {allowed}"
        if now.get("held", 0) > before.get("held", 0) * slack:
            yield f"{name}: holds {now['held']:.4f} of the weights, recorded {before['held']:.4f}"
        if now.get("extra_bytes", 0) > before.get("extra_bytes", 0) * slack + SPARE_BYTES:
            yield f"{name}: {now['extra_bytes']} extra bytes, recorded {before['extra_bytes']}"
        if now.get("launches", 0) > before.get("launches", 0):
            yield f"{name}: {now['launches']} launches, recorded {before['launches']}"
        if now.get("of_bound", 0) > 1:
            yield f"{name}: an error of {now['of_bound']:.3f} times the bound"
        if before.get("restored") and not now["restored"]:
            yield f"{name}: the weights are no longer restored bit for bit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON of a new run of merge.py, peers.py or restore.py")
    parser.add_argument("--against", type=Path, help="the recorded JSON (default: all of the same job)")
    parser.add_argument("--slack", type=float, default=1.03, help="factor that is no regression (default %(default)s)")
    args = parser.parse_args()
    new = dict(jobs(json.loads(args.result.read_text())))
    compared = 0
    found: list[str] = []
    for path in [args.against] if args.against else sorted(RESULTS.glob("*.json")):
        for job, old in jobs(json.loads(path.read_text())):
            if job in new:
                compared += 1
                found += [f"{path.name}, {job}: {line}" for line in regressions(new[job], old, args.slack)]
    if not compared:
        print("no recorded run of " + (", or of ".join(map(str, new)) or "this kind"))
        sys.exit(2)
    print("\n".join(found) or f"no regression against {compared} recorded job(s)")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
