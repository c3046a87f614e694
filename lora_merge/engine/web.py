"""HTTP to an engine's server. Where its host is gone, or cut off, a request ends soon, and not when the longest control
call would have ended."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from typing import Any

from .control import TIMEOUT_S
from .links import SILENT_S, watched


class Unfit(RuntimeError):
    """What answers is nothing that a push can reach; says what it is, and what to do."""


class NoRoute(Unfit):
    """A server does not know a route."""


class Answered(RuntimeError):
    """A server knows a route, and answers with an error.

    Args:
        code: of HTTP.
        body: of the answer.
    """

    def __init__(self, url: str, code: int, body: str) -> None:
        super().__init__(f"{url} answered {code}: {body}")
        self.code, self.body = code, body


class NotReached(OSError):
    """No server answers at a URL."""


_UNKNOWN = (404, 405, 501)
"""By which servers say that they do not know a route, or no POST to it."""
_LOCKED = (401, 403)
_LONGEST = 2000
"""Characters of an answer that a message has at most."""


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


def send(request: urllib.request.Request, seconds: float) -> tuple[bytes, str]:
    """Send a request, and return the body of the answer, and of what kind it is, in words.

    Args:
        seconds: that the server may take.

    Raises:
        urllib.error.HTTPError: it answers with an error.
        OSError: it is not reached, or gone.
        http.client.HTTPException: it does not speak HTTP.
    """
    opener = urllib.request.build_opener(_HttpHandler, _HttpsHandler)
    with opener.open(request, timeout=seconds) as response:
        body: bytes = response.read()
        return body, _kind(response.headers)


def _kind(headers: Message) -> str:
    """Of an answer, by its headers: its content, and whose it is."""
    server = headers.get("Server")
    return (headers.get("Content-Type") or "content of no type") + (f" from {server}" if server else "")


class Server:
    """An engine's server; JSON goes in and out.

    Args:
        url: of it.
        hint: what to look at where something else answers, in words.
    """

    def __init__(self, url: str, hint: str) -> None:
        self.url, self.hint = url.rstrip("/"), hint

    def post(self, route: str, body: Any = None, **query: str) -> dict[str, Any]:
        url = f"{self.url}/{route}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        return self._send(urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST"))

    def get(self, route: str) -> dict[str, Any]:
        return self._send(urllib.request.Request(f"{self.url}/{route}"))

    def unlike(self, answer: object) -> Unfit:
        """The error for an answer in JSON that is not one of such a server."""
        return Unfit(f"{self.url} answers with JSON of something else ({json.dumps(answer)[:_LONGEST]}): {self.hint}")

    def _send(self, request: urllib.request.Request) -> dict[str, Any]:
        """Raises `Unfit`, `Answered`, `NotReached`."""
        url = request.full_url
        try:
            text, kind = send(request, TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise self._error(url, error) from error
        except urllib.error.URLError as error:
            raise NotReached(_why(self.url, error.reason)) from error
        except (ConnectionError, http.client.IncompleteRead) as error:
            told = f"{url} does not answer and closes the connection: {self.hint} Did it end just now?"
            raise NotReached(told) from error
        except http.client.HTTPException as error:
            raise Unfit(f"{url} does not answer in HTTP ({error!r}): {self.hint}") from error
        try:
            return json.loads(text) if text else {}
        except ValueError as error:
            raise Unfit(f"{url} answers with {kind}, which is not JSON: {self.hint}") from error

    def _error(self, url: str, error: urllib.error.HTTPError) -> RuntimeError:
        detail, kind = error.read().decode(errors="replace")[:_LONGEST], _kind(error.headers)
        if error.code in _LOCKED:
            return Unfit(
                f"{url} answered {error.code} ({detail}): it asks for an API key, and pushes have none to give: start "
                "the server without (--api-key, --admin-api-key), and let it listen on a private interface alone"
            )
        if error.code in _UNKNOWN or "html" in kind:
            error_of = NoRoute if error.code in _UNKNOWN else Unfit
            return error_of(f"{url} answered {error.code} ({kind}): {self.hint}")
        return Answered(url, error.code, detail)


def _why(url: str, reason: object) -> str:
    """Why no server answers at a URL, and what to look at."""
    if isinstance(reason, ConnectionRefusedError):
        return f"nothing listens at {url} (connection refused): is the server running, and is this its port?"
    if isinstance(reason, socket.gaierror):
        return f"the host of {url} is not known ({reason.strerror}): is it spelt right?"
    return f"{url} is not reached ({reason}): is the server running, and can this host reach it?"
