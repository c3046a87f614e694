"""A GRPO training in four ways, with several seeds each: rewards, and the importance ratios of every step.

    python benchmarks/grpo.py --device cuda --seeds 3 --json grpo.json --plot grpo.png
    python benchmarks/grpo.py --steps 4 --options --prompts 8 --pretrain 20         # a smoke test on a CPU

`examples/grpo.py` trains, with the same seeds each way: merged by the trainer, merged by the engine (adapters alone
go), the adapter beside its base in the engine's LoRA path, and merged by a trainer that computes with the merged
weights (`train_merged`). The runs of the first seed are stopped half way and resumed. Runs go side by side on the GPUs
that there are. Seconds say nothing here; what counts is that the curves are the same within the spread of their seeds,
and that the importance ratio before each update is 1 but for rounding, before and after the resume.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bars import BLUE, GREEN, GREY, INK, RED, panels

from lora_merge.bench import check_extra, report

Record = dict[str, Any]
Log = list[dict[str, Any]]
"""Of one run, a record for each step."""
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "grpo.py"
WAYS = {
    "adapter": ("adapter mode", ("--mode", "adapter"), (GREY, 5.0)),
    "engine": ("merged by the engine", ("--merge", "engine"), (INK, 2.6)),
    "merged": ("merged by the trainer", ("--merge", "trainer"), (BLUE, 1.2)),
    "trained": ("trained on merged weights", ("--merge", "trainer", "--train", "merged"), (GREEN, 0.8)),
}
"""Way -> its name in pictures, what the example is told, and its line: curves lie on each other, the thin ones last."""


def start(args: argparse.Namespace, name: str, seed: int, out: Path, gpu: str) -> subprocess.Popen[bytes]:
    """One run. That of the first seed goes up to the middle, and on from its checkpoint in another process."""
    half = args.steps // 2
    common = [sys.executable, str(EXAMPLE), "--out", str(out), "--device", args.device, "--dtype", args.dtype]
    common += [*WAYS[name][1], "--seed", str(seed), "--save-every", str(max(half, 1)), *args.options]
    parts = [[*common, "--steps", str(args.steps)]]
    if seed == 0:
        parts = [[*common, "--steps", str(half)], [*parts[0], "--resume"]]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if args.device == "cuda" else {})
    line = " && ".join(shlex.join(part) for part in parts)
    with out.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            line, shell=True, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def found_of(args: argparse.Namespace, out: Path, status: int) -> Record:
    """What a run left: its steps, and where it failed why."""
    log = out / "log.jsonl"
    steps = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if status == 0 and len(steps) == args.steps:
        return {"log": steps}
    told = out.with_suffix(".log").read_text(errors="replace")
    return {"log": steps, "error": f"status {status} after {len(steps)} steps: {told[-2000:]}"}


def run(args: argparse.Namespace) -> Record:
    """Every way with every seed; runs that failed have an error beside their steps."""
    record = report.provenance(torch.device(args.device)) | {"steps": args.steps, "dtype": args.dtype, "ways": {}}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    gpus = visible if visible != [""] else [str(gpu) for gpu in range(max(torch.cuda.device_count(), 1))]
    waiting = [(seed, name) for seed in range(args.seeds) for name in args.ways]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        running: dict[tuple[int, str], subprocess.Popen[bytes]] = {}
        while waiting or running:
            while waiting and len(running) < args.at_once:
                seed, name = waiting.pop(0)
                out, gpu = Path(folder) / f"{name}-{seed}", gpus[len(running) % len(gpus)]
                running[seed, name] = start(args, name, seed, out, gpu)
            time.sleep(0.2)
            if time.monotonic() - began > args.deadline:
                waiting.clear()
                for process in running.values():
                    os.killpg(process.pid, signal.SIGKILL)  # with its engine
                    process.wait()
            for (seed, name), process in list(running.items()):
                if process.poll() is None:
                    continue
                del running[seed, name]
                found = found_of(args, Path(folder) / f"{name}-{seed}", process.returncode)
                way = record["ways"].setdefault(name, {"log": []})
                if seed == 0:
                    way |= found
                else:
                    way.setdefault("others", []).append({"seed": seed} | found)
                print(f"{WAYS[name][0]}, seed {seed}: {len(found['log'])} steps", flush=True)
                report.save(record, args.json)
    return record


def runs_of(way: Record) -> list[Record]:
    """Of one way, the run of each seed that has a step."""
    return [one for one in (way, *way.get("others", [])) if one["log"]]


def errors_of(way: Record) -> Iterator[str]:
    for one in (way, *way.get("others", [])):
        if "error" in one:
            yield (f"seed {one['seed']}, " if "seed" in one else "") + one["error"]


def show(record: Record) -> None:
    """Print what the ways came to."""
    sheet = report.sheet_of(
        f"GRPO, {record['steps']} steps, {record['dtype']}, {record['device_name']}",
        "way",
        ["runs", "reward,\nfirst", "last ten", "mean ratio,\nleast", "most", "largest\n|ratio - 1|", "resumed\nat"],
    )
    out = report.console()
    for name, way in record["ways"].items():
        logs: list[Log] = [one["log"] for one in runs_of(way)]
        if logs:
            entries = [entry for log in logs for entry in log]
            ratios, last = [entry["ratio_mean"] for entry in entries], [mean(log[-10:], "reward") for log in logs]
            resumed = ", ".join(str(entry["step"]) for entry in entries if entry["resumed"])
            spread = f" ({min(last):.2f} to {max(last):.2f})" if len(logs) > 1 else ""
            sheet.add_row(
                WAYS[name][0], str(len(logs)), f"{mean([log[0] for log in logs], 'reward'):.2f}",
                f"{sum(last) / len(last):.2f}{spread}", f"{min(ratios):.4f}",
                f"{max(ratios):.4f}", f"{max(entry['ratio_off'] for entry in entries):.3f}", resumed,
            )  # fmt: skip
    out.print(sheet)
    for name, way in record["ways"].items():
        for error in errors_of(way):
            out.print(f"{WAYS[name][0]}: {error}", markup=False)


def mean(entries: Log, figure: str) -> float:
    return sum(entry[figure] for entry in entries) / len(entries)


def draw(record: Record, file: Path) -> None:
    """Reward above, the mean ratio below: a line for each way, over its seeds, and the spread of these; dashed: the
    resume."""
    logs = {name: [one["log"] for one in runs_of(way)] for name, way in record["ways"].items()}
    logs = {name: logs[name] for name in WAYS if logs.get(name)}
    if not logs:
        raise SystemExit("a picture needs a way that went through")
    words = {1: "one way", 2: "two ways", 3: "three ways", 4: "four ways"}[len(logs)]
    seeds = max(map(len, logs.values()))
    with panels(file, f"GRPO, resumed in the middle: {words} to the engine", 2) as (top, bottom):
        bottom.axhline(1, color=RED, linewidth=1, linestyle=(0, (4, 2)))
        for name, some in logs.items():
            label, _, (colour, width) = WAYS[name]
            steps = range(min(map(len, some)))
            for ax, figure in ((top, "reward"), (bottom, "ratio_mean")):
                values = [[log[step][figure] for log in some] for step in steps]
                line = [sum(one) / len(one) for one in values]
                ax.plot(steps, line, color=colour, label=label, linewidth=width)
                if len(some) > 1:
                    ax.fill_between(steps, list(map(min, values)), list(map(max, values)), color=colour, alpha=0.2)
            for entry in some[0]:
                if entry["resumed"]:
                    for ax in (top, bottom):
                        ax.axvline(entry["step"] - 0.5, color=GREY, linewidth=0.8, linestyle="--")
        bottom.set_ylim(0.97, 1.03)
        bottom.set_yticks([0.98, 1, 1.02])
        top.set_ylim(0, 1)
        top.set_ylabel("reward")
        bottom.set_ylabel("importance ratio, mean")
        device = record["device_name"].removeprefix("NVIDIA ")
        shown = f"; {seeds} seeds: mean, least and most" if seeds > 1 else ""
        bottom.set_xlabel(f"step; {record['dtype']}, {device}{shown}", loc="left")
        bottom.xaxis.get_major_locator().set_params(integer=True)
        top.legend(frameon=False, loc="lower right", fontsize=11)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU")
    parser.add_argument("--steps", type=int, default=200, help="in all, of each way (default %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--seeds", type=int, default=1, help="runs of each way (default %(default)s)")
    parser.add_argument("--at-once", type=int, metavar="RUNS", help="default: all, on a CPU one, which takes all of it")
    parser.add_argument("--deadline", type=float, default=math.inf, metavar="SECONDS", help="then runs are ended")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here, as PNG")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing: --plot what --json wrote")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="for examples/grpo.py; the last option")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    args.at_once = args.at_once or (1 if args.device == "cpu" else args.seeds * len(args.ways))
    if args.plot:
        check_extra(plot=True)
    record = json.loads(args.draw.read_text()) if args.draw else run(args)
    if not args.draw:
        report.save(record, args.json)
        show(record)
    if args.plot:
        draw(record, args.plot)
    if not args.draw and any(True for way in record["ways"].values() for _ in errors_of(way)):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
