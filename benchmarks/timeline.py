"""Where the time of a push into an engine in another process goes: what the trainer's calls, the engine's core and its
workers do, each with the millisecond of its begin and end.

    python benchmarks/timeline.py                                  # GPU: Qwen2.5-7B's shape, workers read (a pull)
    python benchmarks/timeline.py --write                          # the trainer writes
    python benchmarks/timeline.py --tp 2 --json timeline.json
    python benchmarks/timeline.py --device cpu --shape tiny        # a smoke test

The push shown is the one of median length of `--repeats`, after some that warm up. On a GPU, "waits for its GPU" ends
when the merge does. Steps of the core between those of workers are seen where it is in the process of the only worker
(one GPU).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import sync
import torch
from timeline_worker import Event, noting

from lora_merge.bench import report

WARM_UP = 12


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All pushes; returns the record."""
    from lora_merge import VllmSync

    options: dict[str, Any] = {"worker_extension_cls": "timeline_worker.Timeline"}
    if args.device == "cuda" and not args.write:
        options["enable_sleep_mode"] = True  # whose memory cannot be mapped
    with sync.start_engine(args, folder, tp=args.tp, **options) as llm:
        model = sync.build_policy(args.shape, args.rank, args.device)
        if args.device == "cpu":
            model.share_memory()
        pusher = VllmSync(model, llm)
        for _ in range(WARM_UP):
            pusher.push()
        llm.collective_rpc("note_events")
        core, calls = llm.llm_engine.engine_core, list[Event]()
        core.call_utility = noting(calls, lambda name, *_: f"trainer: {name}", core.call_utility)
        pushes = []
        for _ in range(args.repeats):
            begin = time.perf_counter()
            done = pusher.push()
            end = time.perf_counter()
            events = [*calls, *(tuple(event) for noted in llm.collective_rpc("noted_events") for event in noted)]
            calls.clear()
            pushes.append((end - begin, begin, str(done), [e for e in events if begin <= e[1] < end]))
        pusher.close()
    pushes.sort(key=lambda push: push[0])
    length, begin, said, events = pushes[len(pushes) // 2]
    record = report.provenance(torch.device(args.device)) | {"shape": args.shape, "rank": args.rank, "tp": args.tp}
    rows = [(name, 1e3 * (b - begin), 1e3 * (e - begin)) for name, b, e in sorted(events, key=lambda event: event[1])]
    return record | {"push_ms": 1e3 * length, "push": said, "events_ms": rows}


def show(record: dict[str, Any]) -> None:
    """Print the events."""
    sheet = report.sheet_of(f"{record['push']}: milliseconds", "", ["begin", "end", "takes"])
    for name, begin, end in record["events_ms"]:
        sheet.add_row(name, f"{begin:.2f}", f"{end:.2f}", f"{end - begin:.2f}")
    sheet.add_row("the whole push", "0.00", f"{record['push_ms']:.2f}", f"{record['push_ms']:.2f}")
    report.console().print(sheet)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="qwen2.5-7b")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter (default %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tp", type=int, default=1, help="workers, a GPU each (default %(default)s)")
    parser.add_argument(
        "--write", action="store_true", help="the trainer writes to the engine, whose workers else read"
    )
    parser.add_argument("--repeats", type=int, default=21, help="pushes (default %(default)s)")
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="the engine's share (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the events here")
    args = parser.parse_args()
    sync.quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # in this process nothing is to be called
    with tempfile.TemporaryDirectory() as folder:
        record = run(args, Path(folder))
    show(record)
    if args.json:
        report.save(record, args.json)


if __name__ == "__main__":
    main()
