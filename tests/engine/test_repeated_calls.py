"""A proxy that sends each POST twice: a call that comes again gets its answer again, and nothing is done twice."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import models
import plain_engine
import policies
import pytest
import torch

from lora_merge import VllmSync
from lora_merge.engine.worker import answered


@contextmanager
def server() -> Iterator[str]:
    """Run a worker without an engine (support/plain_engine.py), and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, plain_engine.__file__, "127.0.0.1", str(port), "5", "20"])
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(400):
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@contextmanager
def repeating(url: str, taken: int) -> Iterator[str]:
    """Yield the URL of a proxy that sends each POST twice, and returns the first answer or the second."""

    class Twice(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) if self.command == "POST" else None
            answers = [self.sent(body) for _ in range(1 if body is None else 2)]
            code, answer = answers[min(taken, len(answers) - 1)]
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST

        def sent(self, body: bytes | None) -> tuple[int, bytes]:
            kind = {"Content-Type": "application/json"}
            request = urllib.request.Request(url + self.path, body, kind, method=self.command)
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    return response.status, response.read()
            except urllib.error.HTTPError as error:
                return error.code, error.read()

        def log_message(self, *args: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Twice)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_address[1]}"
    finally:
        proxy.shutdown()
        proxy.server_close()


def test_pushes_through_it() -> None:
    """The bucket that was received twice was taken for the next one: the push said that all was well."""
    model = models.with_lora(policies.qwen2, target_modules=policies.LINEARS)
    prompt = torch.randint(3, 256, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    with server() as url:
        for taken in (0, 1):
            with repeating(url, taken) as proxy:
                for merge in ("trainer", "engine"):
                    sync = VllmSync(model, proxy, merge=merge, bucket_bytes=1 << 16)
                    for step in range(2):
                        policies.train(model, step)
                        sync.push()
                        request = urllib.request.Request(f"{url}/answer", json.dumps(prompt).encode())
                        with urllib.request.urlopen(request, timeout=60) as response:
                            said = json.loads(response.read())["tokens"]
                        assert said == greedy(model, prompt, len(said)), (taken, merge, step)
                    sync.close()


def greedy(model: torch.nn.Module, prompt: list[int], length: int) -> list[int]:
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(length):
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_calls_of_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answered, "_REPLIES", 2)
    monkeypatch.setattr(answered, "_CALLS", 4)
    calls = answered.Answered()
    for number in range(6):
        assert calls.to(str(number)) is None
        assert calls.keep(str(number), f"answer {number}") == f"answer {number}"
    assert calls.to("5") == "answer 5"
    assert calls.to("4") == "answer 4"
    with pytest.raises(RuntimeError, match="comes again"):
        calls.to("3")
    assert calls.to("0") is None, "it is not kept for ever"
    calls.keep(None, "a call without a number")
    assert calls.to(None) is None
