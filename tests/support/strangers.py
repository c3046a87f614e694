"""Servers that are no engine's: what may answer at a URL that is wrong."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

Answer: TypeAlias = tuple[int, str, str] | None
"""Code, type and text; None for nothing, with a closed connection."""
HTML, JSON = "text/html", "application/json"


class Other(BaseHTTPRequestHandler):
    """What answers there.

    Attributes:
        given: by path, what it answers; "" for all others.
        asked: which paths it was asked for.
    """

    given: dict[str, Answer]
    asked: list[str]

    def _answer(self) -> None:
        self.asked.append(self.path)
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        given = self.given.get(self.path, self.given[""])
        self.close_connection = True
        if given is None:
            return
        code, kind, text = given
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_POST = _answer

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def answering(**given: Answer) -> Iterator[tuple[str, list[str]]]:
    """A server of something else: its URL, and the paths that it was asked for.

    Args:
        given: as of `Other`, by path without its slash; `other` for all others.
    """
    paths = {"" if path == "other" else f"/{path}": answer for path, answer in given.items()}
    handler = type("Handler", (Other,), {"given": paths, "asked": []})
    with _serving(handler) as url:
        yield url, handler.asked


class Front(Other):
    """What stands in front of engines.

    Attributes:
        engine: which one a path is sent to next; or what is answered in its place.
        taken: None, or which answer is given on of two: everything is sent twice.
    """

    engine: Callable[[str], str | Answer]
    taken: int | None = None

    def _answer(self) -> None:
        to = type(self).engine(self.path.partition("?")[0])
        if not isinstance(to, str):
            self.given = {"": to}
            super()._answer()
            return
        self.asked.append(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))) or None
        headers = {"Content-Type": JSON}
        request = urllib.request.Request(to + self.path, body, headers, method=self.command)
        answers = [_sent(request) for _ in range(1 if self.taken is None else 2)]
        code, text = answers[self.taken or 0]
        self.close_connection = True
        self.send_response(code)
        self.send_header("Content-Type", JSON)
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = _answer


def _sent(request: urllib.request.Request) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(request) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@contextmanager
def in_front(engine: Callable[[str], str | Answer], taken: int | None = None) -> Iterator[tuple[str, list[str]]]:
    """A server in front of engines: its URL, and the paths that it was asked for.

    Args:
        engine, taken: as of `Front`.
    """
    handler = type("Handler", (Front,), {"engine": staticmethod(engine), "taken": taken, "asked": []})
    with _serving(handler) as url:
        yield url, handler.asked


@contextmanager
def saying(raw: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """What answers to every request with these bytes and hangs up: its URL, and the requests."""
    heard: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with listening.accept()[0] as one:
                    heard.append(one.recv(1 << 16))
                    with contextlib.suppress(OSError):
                        one.sendall(raw)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", heard
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def _serving(handler: type[Other]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
