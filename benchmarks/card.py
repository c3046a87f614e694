"""What a GPU that this project has never run on does: one file to send (docs/early_testers.md).

    pip install ".[test]" && python benchmarks/card.py

Asks `lora-merge doctor`, runs the kernels' tests of that GPU, and times merges of Qwen2.5 in the largest size that has
room, each result compared with float64. Nothing is sent anywhere.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lora_merge import LoraMergeError
from lora_merge.bench import check_extra, job, report
from lora_merge.bench.options import add_options, device
from lora_merge.commands.output import plain
from lora_merge.doctor import examine

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ["qwen2.5-7b", "qwen2.5-3b", "qwen2.5-1.5b", "qwen2.5-0.5b"]
"""The first that has room is measured."""
JOBS = {
    "bf16 weights, float32 adapters": [],
    "bf16 weights, bf16 adapters": ["--adapter-dtype", "bf16"],
    "bf16 weights, bf16 adapters of rank 128": ["--adapter-dtype", "bf16", "--rank", "128"],
    "float32 weights, float32 adapters": ["--dtype", "fp32"],
}
TESTS = [f"tests/kernels/test_{name}.py" for name in ("kernels", "restore", "operators", "launch_shapes")]
TESTS_S = 1200
"""After which the tests are ended; what failed by then is in the file."""
_TAIL = 20_000


def tests(files: list[str]) -> dict[str, Any]:
    """Run the tests that are marked `gpu`; return how they ended, and the end of what they printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *files]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_S)
        status, text = str(done.returncode), done.stdout + done.stderr
    except subprocess.TimeoutExpired as ended:
        status = f"ended after {TESTS_S} s"
        text = "".join(
            part.decode() if isinstance(part, bytes) else part or "" for part in (ended.stdout, ended.stderr)
        )
    last = next((line for line in reversed(text.splitlines()) if re.search(r"\d (passed|failed|error)", line)), "")
    return {"status": status, "summary": last, "seconds": time.perf_counter() - began, "output": text[-_TAIL:]}


def measure(options: list[str], where: torch.device) -> tuple[str, dict[str, Any]]:
    """Run the main job in the largest size that has room; return the size, and its figures or why there are none."""
    parser = argparse.ArgumentParser()
    add_options(parser, ROOT / "benchmarks/work")
    why = ""
    for shape in SHAPES:
        args = parser.parse_args(["--device", str(where), "--repeat", "7", "--shape", shape, *options])
        args.json_file = None
        try:
            return shape, job.run(args, quiet=True)
        except (LoraMergeError, torch.OutOfMemoryError) as error:
            why = f"{type(error).__name__}: {error}"
            if where.type == "cuda":
                torch.cuda.empty_cache()
    return "", {"error": why}


def lines_of(found: dict[str, Any]) -> Iterator[str]:
    """Yield a result in words: each method's time in copies, and whether its errors are within the bound."""
    if "error" in found:
        yield f"  {found['error']}"
    for name, figures in found.get("methods", {}).items():
        exact = ", exact" if figures["of_bound"] <= 1 else ", NOT EXACT: please send"
        exact = exact if report.is_ours(name) else ""
        copies = "" if figures["x_copy"] is None else f" = {figures['x_copy']:.2f} copies"
        yield f"  {name}: {figures['ms']:.1f} ms{copies}{exact}"


def without_home(value: Any) -> Any:
    """Return a value as JSON has it, in which the path of the user's folder is `~`."""
    return json.loads(json.dumps(plain(value)).replace(json.dumps(str(Path.home()))[1:-1], "~"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=device, default=torch.device("cuda"), help="default: cuda")
    parser.add_argument("--out", type=Path, help="file to write (default: card-NAME.json in this folder)")
    args = parser.parse_args()
    check_extra(plot=False)
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.exit(1, "torch sees no GPU here; lora-merge doctor says more\n")
    from_here = report.provenance(args.device)
    name = re.sub(r"[^a-z0-9]+", "-", from_here["device_name"].lower()).strip("-")
    out = args.out or Path(f"card-{name}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    say = report.console().print
    say(f"{from_here['device_name']}: tests of the kernels, then {len(JOBS)} measurements; 10 to 30 minutes in all")
    findings = examine()
    say(str(findings))
    record: dict[str, Any] = {"card": from_here, "doctor": findings, "tests": {}, "measured": {}}
    for step in ("tests", *JOBS):
        say(f"\n{step}")
        if step == "tests":
            record["tests"] = tests(TESTS)
            say(f"  {record['tests']['summary'] or record['tests']['output'][-500:]}")
        else:
            shape, found = measure(JOBS[step], args.device)
            record["measured"][step] = found
            say("\n".join([f"  {shape}", *lines_of(found)]), soft_wrap=True)
        out.write_text(json.dumps(without_home(record), indent=2) + "\n")  # after each step: nothing is lost
    say(f"\nPlease look through {out} and send it (docs/early_testers.md)")


if __name__ == "__main__":
    main()
