"""Runs the tests marked `gpu` side by side, on all GPUs of a machine: `python gpu_tests.py LOG [options] [TESTS ...]`.

Most of an engine's test is its start, so several share a GPU. Each test of an engine or a trainer is a process of its
own, and each file of others. What they say goes to LOG as they end, so that a run that is cut off has told what it
knew. Tests that were skipped because one GPU was to be seen run again afterwards, one after the other, and see all.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

STARTS = ("vllm", "sglang", "trainer", "zero3", "megatron", "shards", "transport")
"""Parts of the names of files whose tests start processes, most of them engines."""
AT_ONCE = 40
"""Tests of other files that a process takes."""


RESULT = re.compile(r"^(\S+::.*) (PASSED|FAILED|ERROR|SKIPPED)(?: \((.*)\))?", re.MULTILINE)
"""A test, what came of it, and why it was skipped: a line of `pytest -v`."""


class Job(NamedTuple):
    """Tests that one process runs, and what it is called."""

    name: str
    tests: list[str]


def collected(tests: Sequence[str], words: str) -> tuple[list[str], list[str]]:
    """The ids of all tests marked `gpu` whose names pytest's `-k` finds, and the files that cannot be imported."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", "-k", words, *tests]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    lines = told.stdout.splitlines()
    broken = [line for line in lines if line.startswith("ERROR")]
    if broken:
        print(told.stdout)
    return [line for line in lines if "::" in line and line not in broken], broken


def jobs_of(tests: Sequence[str]) -> list[Job]:
    """Tests by the process that runs them; those that take long to start come first."""
    by: dict[str, list[str]] = {}
    for test in tests:
        file, _, rest = test.partition("::")
        alone = any(part in Path(file).name for part in STARTS)
        by.setdefault(f"{file}::{rest.partition('[')[0]}" if alone else file, []).append(test)
    found = []
    for name, some in sorted(by.items(), key=lambda one: "::" not in one[0]):
        for begin in range(0, len(some), AT_ONCE):
            found.append(Job(f"{name} from {begin}" if len(some) > AT_ONCE else name, some[begin : begin + AT_ONCE]))
    return found


class Run:
    """Runs jobs, and notes what came of them.

    Attributes:
        failed: names of jobs, and of tests in them.
        wanting: tests that were skipped for want of GPUs.
        left: jobs that were not begun in time.
    """

    def __init__(self, log: TextIO, limit: float, deadline: float) -> None:
        self._log, self._limit, self._begun = log, limit, time.monotonic()
        self._end = self._begun + deadline
        self._lock = threading.Lock()
        self.failed: list[str] = []
        self.wanting: list[str] = []
        self.left: list[str] = []

    def side_by_side(self, jobs: Sequence[Job], gpus: Sequence[str]) -> None:
        """A thread for each of `gpus` (as CUDA_VISIBLE_DEVICES) takes jobs until there are none."""
        waiting = deque(jobs)

        def work(gpu: str) -> None:
            while True:
                try:
                    job = waiting.popleft()
                except IndexError:
                    return
                if time.monotonic() < self._end:
                    self._one(job, gpu)
                else:
                    self.left.append(job.name)

        threads = [threading.Thread(target=work, args=(gpu,)) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _one(self, job: Job, gpu: str) -> None:
        begun = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--tb=short", "--show-capture=no", "-p"]
        command += ["no:cacheprovider", *job.tests]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "COLUMNS": "300"}  # why tests are skipped is told whole
        with tempfile.TemporaryFile("w+") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )
            try:
                ended = f"status {process.wait(min(self._limit, max(self._end - begun, 1)))}"
            except subprocess.TimeoutExpired:
                ended = "not done in time"
                os.killpg(process.pid, signal.SIGKILL)  # with its engines
                process.wait()
            out.seek(0)
            told = out.read()
        results = RESULT.findall(told)
        counts = Counter(result for _, result, _ in results)
        wrong = [test for test, result, _ in results if result in ("FAILED", "ERROR")]
        with self._lock:
            self.wanting += [test for test, result, why in results if result == "SKIPPED" and "GPUs" in why]
            if ended not in ("status 0", "status 5"):
                self.failed += wrong or [f"{job.name}: {ended}"]
            said = ", ".join(f"{number} {what.lower()}" for what, number in counts.items()) or "no result"
            took, at = time.monotonic() - begun, time.monotonic() - self._begun
            print(f"{job.name}: {said}, {ended}, {took:.0f} s (at {at:.0f})", *wrong, sep="\n    ", flush=True)
            self._log.write(f"##### {job.name}: {ended}, {took:.0f} s\n{told}\n")
            self._log.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path, help="gets all that the tests print")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files and tests as pytest takes them (all)")
    parser.add_argument("-k", dest="words", default="", help="which of their tests, as pytest's -k (all)")
    parser.add_argument("--gpus", type=int, help="how many there are (all that torch sees)")
    parser.add_argument("--each", type=int, default=5, help="processes at a time on each GPU (%(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a process (%(default)s)")
    parser.add_argument("--deadline", type=float, default=3600, help="seconds for all (%(default)s)")
    args = parser.parse_intermixed_args()
    if args.gpus is None:
        import torch

        args.gpus = torch.cuda.device_count()
    gpus = [str(gpu) for gpu in range(args.gpus)]
    with args.log.open("w") as log:
        run = Run(log, args.limit, args.deadline)
        tests, broken = collected(args.tests, args.words)
        run.failed += broken
        run.side_by_side(jobs_of(tests), gpus * args.each)
        if len(gpus) > 1:
            run.side_by_side(jobs_of(run.wanting), [",".join(gpus)])
    for what, names in (("failed", run.failed), ("not begun in time", run.left)):
        print(f"{len(names)} {what}", *names, sep="\n    ")
    raise SystemExit(1 if run.failed or run.left else 0)


if __name__ == "__main__":
    main()
