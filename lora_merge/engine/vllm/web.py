"""HTTP to an engine's server. Where its host is gone, or cut off, a request ends soon, and not when the longest control
call would have ended."""

from __future__ import annotations

import http.client
import urllib.request
from typing import Any

from ..links import SILENT_S, watched


class _Watched(http.client.HTTPConnection):
    """Gives a host that does not answer up after `SILENT_S`; a server that is busy has the request's own limit."""

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
    """Send a request; the body of the answer.

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
