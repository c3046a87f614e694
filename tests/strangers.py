"""Servers that are no engine's: what may answer at a URL that is wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
