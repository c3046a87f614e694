"""Processes that come out of tests/support/warm.py's server are as those that `spawn` starts."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import warm

NAME = "LORA_MERGE_TEST_NAME"


def here(threads: int | None = None) -> tuple[Any, ...]:
    threads = torch.get_num_threads() if threads is None else threads
    return os.environ.get(NAME), "PYTHONPATH" in os.environ, str(Path.cwd()), os.getpgid(0), threads


def tell(told: Any, deeper: bool) -> None:
    """Say what is here, and in a process of this one's; end with 7."""
    told.put(here())
    print("said by", os.getpid(), flush=True)
    if deeper:
        os.environ[NAME] = "deeper"
        child = multiprocessing.get_context(warm.METHOD).Process(target=tell, args=(told, False))
        child.start()
        child.join()
        assert child.exitcode == 7
    sys.exit(7)


def fail_as_sglang_does() -> None:
    os.kill(os.getppid(), signal.SIGQUIT)


def test_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    context, pids = multiprocessing.get_context(warm.METHOD), []
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    threads = int(subprocess.check_output(command))  # a test before may have set others here
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in ("first", "second"):
        monkeypatch.setenv(NAME, name)
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        told = context.Queue()
        process = context.Process(target=tell, args=(told, True))
        process.start()
        pids.append(process.pid)
        assert told.get(timeout=120) == here(threads)
        assert told.get(timeout=120) == ("deeper", *here(threads)[1:])
        process.join()
        assert process.exitcode == 7
    printed = capfd.readouterr().out
    assert all(f"said by {pid}" in printed for pid in pids)


def test_signals() -> None:
    """The one by which SGLang's schedulers tell that they fail, and what ends a process."""
    context, heard = multiprocessing.get_context(warm.METHOD), list[int]()
    before = signal.signal(signal.SIGQUIT, lambda number, _: heard.append(number))
    try:
        process = context.Process(target=fail_as_sglang_does)
        process.start()
        process.join()
        end = time.monotonic() + 30
        while not heard and time.monotonic() < end:
            time.sleep(0.01)
        assert heard == [signal.SIGQUIT]
    finally:
        signal.signal(signal.SIGQUIT, before)
    process = context.Process(target=time.sleep, args=(600,))
    process.start()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def test_nothing_else_is_replaced_until_asked() -> None:
    assert multiprocessing.get_context("spawn") is not multiprocessing.get_context(warm.METHOD)
    warm.instead_of_spawn()
    try:
        assert multiprocessing.get_context("spawn") is multiprocessing.get_context(warm.METHOD)
    finally:
        warm.instead_of_spawn(False)
