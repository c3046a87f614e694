"""A GRPO training with each way to bring the policy to the engine, stopped half way and resumed: reward and ratios.

    python benchmarks/grpo.py --device cuda --json grpo.json --plot grpo.png
    python benchmarks/grpo.py --steps 4 --options --prompts 8 --pretrain 20         # a smoke test on a CPU

`examples/grpo.py` trains, with the same seed each way: merged by the trainer, merged by the engine (adapters alone go),
and the adapter beside its base in the engine's LoRA path. The ways run side by side on the GPUs that there are. Seconds
say nothing here; what counts is that the curves are the same, and that the importance ratio before each update is 1
but for rounding, before and after the resume.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bars import BLUE, GREY, INK, RED, panels

from lora_merge.bench import check_extra, report

Record = dict[str, Any]
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "grpo.py"
WAYS = {
    "adapter": ("adapter mode", ("--mode", "adapter"), (GREY, 5.0)),
    "engine": ("merged by the engine", ("--merge", "engine"), (INK, 2.6)),
    "merged": ("merged by the trainer", ("--merge", "trainer"), (BLUE, 1.2)),
}
"""Way -> its name in pictures, what the example is told, and its line: curves lie on each other, the thin ones last."""


def start(args: argparse.Namespace, name: str, out: Path, gpu: int) -> subprocess.Popen[bytes]:
    """One way, in one process after the other: up to the middle, and on from its checkpoint."""
    half = args.steps // 2
    common = [sys.executable, str(EXAMPLE), "--out", str(out), "--device", args.device, "--dtype", args.dtype]
    common += [*WAYS[name][1], "--save-every", str(max(half, 1)), *args.options]
    parts = [*common, "--steps", str(half)], [*common, "--steps", str(args.steps), "--resume"]
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": str(gpu)} if args.device == "cuda" else {})
    line = " && ".join(shlex.join(part) for part in parts)
    with (out.parent / f"{name}.log").open("wb") as log:
        return subprocess.Popen(line, shell=True, env=environment, stdout=log, stderr=subprocess.STDOUT)


def run(args: argparse.Namespace) -> Record:
    """Every way; those that failed have an error in the record in the place of steps."""
    record = report.provenance(torch.device(args.device)) | {"steps": args.steps, "dtype": args.dtype, "ways": {}}
    gpus = max(torch.cuda.device_count(), 1)
    with tempfile.TemporaryDirectory() as folder:
        started = {}
        for number, name in enumerate(args.ways):
            started[name] = start(args, name, Path(folder) / name, number % gpus)
            if args.device == "cpu":
                started[name].wait()  # one at a time: engines on a CPU take all of it
        for name, process in started.items():
            status, told = process.wait(), (Path(folder) / f"{name}.log").read_text(errors="replace")
            log = Path(folder) / name / "log.jsonl"
            steps = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            record["ways"][name] = {"log": steps}
            if status or len(steps) != args.steps:
                record["ways"][name]["error"] = f"status {status} after {len(steps)} steps: {told[-2000:]}"
    return record


def show(record: Record) -> None:
    """Print what the ways came to."""
    sheet = report.sheet_of(
        f"GRPO, {record['steps']} steps, {record['dtype']}, {record['device_name']}",
        "way",
        ["reward, first", "last ten", "mean ratio, least", "most", "largest |ratio - 1|", "resumed at"],
    )
    out = report.console()
    for name, way in record["ways"].items():
        log = way["log"]
        if log:
            ratios, last = [entry["ratio_mean"] for entry in log], [entry["reward"] for entry in log[-10:]]
            resumed = ", ".join(str(entry["step"]) for entry in log if entry["resumed"])
            sheet.add_row(
                WAYS[name][0], f"{log[0]['reward']:.2f}", f"{sum(last) / len(last):.2f}", f"{min(ratios):.4f}",
                f"{max(ratios):.4f}", f"{max(entry['ratio_off'] for entry in log):.3f}", resumed,
            )  # fmt: skip
    out.print(sheet)
    for name, way in record["ways"].items():
        if "error" in way:
            out.print(f"{WAYS[name][0]}: {way['error']}", markup=False)


def draw(record: Record, file: Path) -> None:
    """Reward above, the mean ratio below, a line for each way; dashed: the resume."""
    logs = {name: way["log"] for name, way in record["ways"].items() if way["log"]}
    if not logs:
        raise SystemExit("a picture needs a way that went through")
    title = "GRPO, resumed in the middle: three ways to the engine"
    with panels(file, title, 2) as (top, bottom):
        bottom.axhline(1, color=RED, linewidth=1, linestyle=(0, (4, 2)))
        for name in [name for name in WAYS if name in logs]:
            (label, _, (colour, width)), log = WAYS[name], logs[name]
            steps = [entry["step"] for entry in log]
            top.plot(steps, [entry["reward"] for entry in log], color=colour, label=label, linewidth=width)
            bottom.plot(steps, [entry["ratio_mean"] for entry in log], color=colour, linewidth=width)
            for entry in log:
                if entry["resumed"]:
                    for ax in (top, bottom):
                        ax.axvline(entry["step"] - 0.5, color=GREY, linewidth=0.8, linestyle="--")
        bottom.set_ylim(0.97, 1.03)
        bottom.set_yticks([0.98, 1, 1.02])
        top.set_ylim(0, 1)
        top.set_ylabel("reward")
        bottom.set_ylabel("importance ratio, mean")
        device = record["device_name"].removeprefix("NVIDIA ")
        bottom.set_xlabel(f"step; {record['dtype']}, {device}", loc="left")
        bottom.xaxis.get_major_locator().set_params(integer=True)
        top.legend(frameon=False, loc="lower right", fontsize=11)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU")
    parser.add_argument("--steps", type=int, default=200, help="in all, of each way (default %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here, as PNG")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing: --plot what --json wrote")
    parser.add_argument("--options", nargs=argparse.REMAINDER, default=[], help="for examples/grpo.py; the last option")
    args = parser.parse_args()
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    if args.plot:
        check_extra(plot=True)
    record = json.loads(args.draw.read_text()) if args.draw else run(args)
    if not args.draw:
        report.save(record, args.json)
        show(record)
    if args.plot:
        draw(record, args.plot)
    if not args.draw and any("error" in way for way in record["ways"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
