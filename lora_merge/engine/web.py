"""HTTP to an engine's server. Where its host is gone, or cut off, a request ends soon, and not when the longest control
call would have ended."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from .control import TIMEOUT_S
from .links import SILENT_S, watched


class NoRoute(RuntimeError):
    """A server does not know a route."""


class NotReached(OSError):
    """No server answers at a URL."""


class _Watched(http.client.HTTPConnection):
    """A connection that gives up after `SILENT_S` if the host does not answer; a server that is busy has the request's
    own limit."""

    def connect(self) -> None:
        limit, self.timeout = self.timeout, SILENT_S
        super().connect()
        self.sock.settimeout(limit)
        watched(self.sock)


class _Https(_Watched, http.client.HTTPSConnection):
    """Over TLS."""


class _HttpHandler(urllib.request.HTTPHandler):
    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_Watched, request)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_Https, request)


def send(request: urllib.request.Request, seconds: float) -> bytes:
    """Send a request, and return the body of the answer.

    Args:
        seconds: that the server may take.

    Raises:
        urllib.error.HTTPError: it answers with an error.
        OSError: it is not reached, or gone.
    """
    opener = urllib.request.build_opener(_HttpHandler, _HttpsHandler)
    with opener.open(request, timeout=seconds) as response:
        body: bytes = response.read()
    return body


class Server:
    """An engine's server; JSON goes in and out.

    Args:
        url: of it.
        routes: what to do where it does not know a route, in words.
    """

    def __init__(self, url: str, routes: str) -> None:
        self._url, self._routes = url.rstrip("/"), routes

    def post(self, route: str, body: Any = None, **query: str) -> dict[str, Any]:
        url = f"{self._url}/{route}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        return self._send(urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST"))

    def get(self, route: str) -> dict[str, Any]:
        return self._send(urllib.request.Request(f"{self._url}/{route}"))

    def _send(self, request: urllib.request.Request) -> dict[str, Any]:
        try:
            text = send(request, TIMEOUT_S)
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:2000]
            if error.code == 404:
                raise NoRoute(f"{request.full_url}: {self._routes}") from error
            raise RuntimeError(f"{request.full_url} answered {error.code}: {detail}") from error
        except urllib.error.URLError as error:
            raise NotReached(_why(self._url, error.reason)) from error
        return json.loads(text) if text else {}


def _why(url: str, reason: object) -> str:
    """Why no server answers at a URL, and what to look at."""
    if isinstance(reason, ConnectionRefusedError):
        return f"nothing listens at {url} (connection refused): is the server running, and is this its port?"
    if isinstance(reason, socket.gaierror):
        return f"the host of {url} is not known ({reason.strerror}): is it spelt right?"
    return f"{url} is not reached ({reason}): is the server running, and can this host reach it?"
