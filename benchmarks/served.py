"""vLLM's server, and requests to it, in processes of their own: what the trainer's process does is a push's alone.

    python benchmarks/served.py URL MODEL --requests 32 --prompt-tokens 64 --new-tokens 512

asks a server until standard input ends: prints `ready` when each request has a token, and at the end a JSON list of the
seconds at which the pieces of each answer came. The clock is the system's monotonic one, which processes share.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

START_S = 400.0


# ---- in the benchmark's process --------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def command(model: Path, port: int, flags: Sequence[str]) -> list[str]:
    """Return what starts vLLM's server, as arguments of `python -m`."""
    started = ["vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port), "--host", "127.0.0.1"]
    transfer = json.dumps({"backend": "lora_merge"})
    return [*started, "--disable-uvicorn-access-log", "--weight-transfer-config", transfer, *flags]


def is_up(url: str) -> bool:
    with suppress(OSError):
        urllib.request.urlopen(f"{url}/health", timeout=2).close()
        return True
    return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that has a session of its own, and all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def server(model: Path, flags: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """Start vLLM's server, wait until it answers, and yield its URL; its log is server.log beside the model."""
    log, port = model / "server.log", free_port()
    url, started = f"http://127.0.0.1:{port}", [sys.executable, "-m", *command(model, port, flags)]
    with log.open("wb") as told:
        environment = {**environment, "VLLM_SERVER_DEV_MODE": "1"}
        process = subprocess.Popen(started, env=environment, stdout=told, stderr=told, start_new_session=True)
    try:
        until = time.monotonic() + START_S
        while not is_up(url):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server has not started:\n{log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.2)
        yield url
    finally:
        stop(process)


class Requests:
    """Requests in flight to a server, from a process of their own; of no server (None) there are none.

    Attributes:
        times: when the pieces of each answer came, once `end` was called.
    """

    def __init__(self, url: str | None, model: Path, args: argparse.Namespace) -> None:
        self.times: list[list[float]] = []
        numbers = ("requests", "prompt_tokens", "new_tokens")
        options = [word for name in numbers for word in ("--" + name.replace("_", "-"), str(getattr(args, name)))]
        self._command = [sys.executable, __file__, url or "", str(model), *options]
        self._process: subprocess.Popen[str] | None = None
        self._any = url is not None and args.requests > 0

    def begin(self) -> None:
        """Wait until all are answered."""
        if self._any:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True)
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            if line != "ready\n":
                raise SystemExit(f"the requests have ended with {line!r}")

    def end(self) -> None:
        if self._process is not None:
            said, _ = self._process.communicate()
            if self._process.returncode:
                raise SystemExit("requests in flight have failed, see above")
            self.times = json.loads(said)


# ---- in the process of the requests ----------------------------------------------------------------------------------


def ask(
    url: str, model: str, number: int, args: argparse.Namespace, times: list[list[float]], over: threading.Event
) -> None:
    """Ask for one answer after the other, until it is over; note when each piece came."""
    place, turn = urllib.parse.urlsplit(url), 0
    asked = {"model": model, "max_tokens": args.new_tokens, "temperature": 1.0, "ignore_eos": True, "stream": True}
    while not over.is_set():
        turn += 1
        mine: list[float] = []
        times.append(mine)
        asked["prompt"] = [(number * 131 + 7 * turn + i) % 256 for i in range(args.prompt_tokens)]
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{answer.status}: {answer.read()[:500]!r}")
        for line in answer:
            if line.startswith(b"data: {"):
                mine.append(time.perf_counter())
            if over.is_set():
                break
        connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model", help="its name at the server")
    parser.add_argument("--requests", type=int, default=32, help="in flight (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument("--new-tokens", type=int, default=512, help="default %(default)s")
    args = parser.parse_args()
    times, over = list[list[float]](), threading.Event()
    threads = [
        threading.Thread(target=ask, args=(args.url, args.model, number, args, times, over))
        for number in range(args.requests)
    ]
    for thread in threads:
        thread.start()
    while sum(map(bool, list(times))) < args.requests:
        time.sleep(0.02)
        if not all(thread.is_alive() for thread in threads):
            over.set()
            raise SystemExit(1)
    print("ready", flush=True)
    sys.stdin.read()
    failed = not all(thread.is_alive() for thread in threads)
    over.set()
    for thread in threads:
        thread.join()
    if failed:
        raise SystemExit("a request has failed: fewer were in flight than were asked for")
    print(json.dumps(times))


if __name__ == "__main__":
    main()
