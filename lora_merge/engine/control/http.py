"""HTTP to an engine's server. If its host is gone, or cut off, a request ends soon, not after the longest control call.

A control call reaches the server that the URL names, or fails: proxies of the environment are ignored, redirects are
not followed, and an answer counts only if it is one of such a server.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import os
import re
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from email.message import Message
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import InvalidInput
from ...logs import shown
from ..transport.tcp_link import SILENT_S, watched
from .base import TIMEOUT_S, Unheard

MOST = 1 << 28
"""Bytes that an answer may have."""
CONNECT_AGAIN_S, ANSWER_AGAIN_S = 1.0, SILENT_S + 10.0
"""Seconds to connect to a server that was not reached the last time, and to wait for its answer: no call waits long for
it again. A server that is back accepts a connection at once, but its workers may take `SILENT_S` to find out that their
push has ended."""
_PIECE = 1 << 16


class Unfit(RuntimeError):
    """Something other than such a server answers; the message says what, and what to do."""


class NoRoute(Unfit):
    """A server does not know a route."""


class Answered(RuntimeError):
    """A server knows a route, and answers with an error."""

    def __init__(self, url: str, code: int, body: str) -> None:
        super().__init__(f"{url} answered {code}: {body}")
        self.code, self.body = code, body


class NotReached(Unheard, OSError):
    """No server answers at a URL, or a gateway says that it reaches none."""


class TooMuch(RuntimeError):
    """An answer has no end, or takes too long to come."""


_UNKNOWN = (404, 405, 501)
"""Codes of servers that do not know a route, or no POST to it."""
_LOCKED = (401, 403)
_GATEWAYS = (502, 503, 504)
"""Codes of what stands in front of a server. Engines answer with 503 alone, and then in JSON."""
_LONGEST = 2000
"""Characters of an answer that a message quotes at most."""
_SECRET = re.compile("[0-9a-fA-F]{64,}")
"""What may be a secret of a channel: servers quote what they do not understand."""


class _Watched(http.client.HTTPConnection):
    """A connection that gives up after `SILENT_S` if the host is gone; a busy server has the request's own limit.

    Args:
        connect_s: seconds to connect.
    """

    def __init__(self, host: str, *, connect_s: float = SILENT_S, **options: Any) -> None:
        super().__init__(host, **options)
        self._connect_s = connect_s

    def connect(self) -> None:
        limit, self.timeout = self.timeout, self._connect_s
        super().connect()
        self.sock.settimeout(limit)
        watched(self.sock)


class _Https(_Watched, http.client.HTTPSConnection):
    """The same over TLS."""


@lru_cache(maxsize=1)
def _trust(stamps: tuple[tuple[str, int], ...]) -> ssl.SSLContext:
    """Return what checks servers' certificates. Reading them takes 30 ms.

    Args:
        stamps: where they lie, and when each place was written last.
    """
    return ssl.create_default_context()


def _stamps() -> tuple[tuple[str, int], ...]:
    places = ssl.get_default_verify_paths()  # by SSL_CERT_FILE and SSL_CERT_DIR, if they are set
    return tuple((place, Path(place).stat().st_mtime_ns) for place in (places.cafile, places.capath) if place)


class _Handler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def __init__(self, connect_s: float) -> None:
        # Not that of `HTTPSHandler`: since Python 3.12 it reads all certificates, for each call to plain HTTP, too.
        urllib.request.AbstractHTTPHandler.__init__(self)
        self._connect_s = connect_s

    def http_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_Watched, request, connect_s=self._connect_s)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self.do_open(_Https, request, connect_s=self._connect_s, context=_trust(_stamps()))


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: 301 to 303 would make a GET of a POST, and any may lead to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _proxies(request: urllib.request.Request) -> dict[str, str]:
    """Return the proxies of a request, for urllib; none for a server on this host."""
    # `http_proxy` and its like are for other things, and control calls carry the secrets of channels.
    proxy = os.environ.get("LORA_MERGE_HTTP_PROXY", "")
    if not proxy or _loopback(urllib.parse.urlsplit(request.full_url).hostname or ""):
        return {}
    if not proxy.startswith(("http://", "https://")):
        raise InvalidInput(f"LORA_MERGE_HTTP_PROXY must be a URL like http://proxy:3128, got {shown(proxy)!r}")
    return {"http": proxy, "https": proxy}


def _loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def send(request: urllib.request.Request, seconds: float, connect_s: float = SILENT_S) -> tuple[bytes, str]:
    """Send a request, which may take some seconds, and return the body and the kind (`_kind`) of the answer.

    Args:
        connect_s: seconds to connect.

    Raises:
        urllib.error.HTTPError: it is an error, or a redirect.
        OSError: the server cannot be reached, or is gone.
        http.client.HTTPException: it does not speak HTTP, or the answer is cut off.
        TooMuch: the answer has no end.
    """
    handlers = urllib.request.ProxyHandler(_proxies(request)), _Handler(connect_s), _Stays
    end = time.monotonic() + seconds
    with urllib.request.build_opener(*handlers).open(request, timeout=seconds) as response:
        if response.status != http.HTTPStatus.OK:  # "accepted" is not "done"
            raise urllib.error.HTTPError(request.full_url, response.status, response.reason, response.headers, response)
        return _whole(response, end, seconds), _kind(response.headers)


def _whole(response: Any, end: float, seconds: float) -> bytes:
    read = bytearray()
    while piece := response.read1(_PIECE):
        read += piece
        if len(read) > MOST:
            raise TooMuch(f"its answer is longer than {MOST} bytes")
        if time.monotonic() > end:
            raise TooMuch(f"its answer has no end after {seconds:.0f} s")
    if response.length:
        raise http.client.IncompleteRead(bytes(read), response.length)
    return bytes(read)


def _kind(headers: Message) -> str:
    """Return the content type of an answer and its server, in words."""
    server = headers.get("Server")
    return (headers.get("Content-Type") or "content of no type") + (f" from {server}" if server else "")


def checked_url(url: str, example: str) -> str:
    """Return the URL of a server, without a slash at its end; raise `InvalidInput` if control calls cannot use it."""
    where = f"engine must be a URL like {example}"
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidInput(f"{where}, got {shown(url)!r} ({error})") from error
    if parts.scheme not in ("http", "https") or not host or re.search(r"[\s\\]", url):
        raise InvalidInput(f"{where}, got {shown(url)!r}")
    if parts.username is not None or parts.password is not None:
        raise InvalidInput(
            f"{where}, got one of {host} with a user or password in it, which control calls do not send: leave it out, "
            "and let the server listen on a private interface"
        )
    if "?" in url or "#" in url:
        raise InvalidInput(f"{where}, got {shown(url)!r}: a query or fragment is part of no control call, leave it out")
    url = url.rstrip("/")
    if url.endswith("/v1"):
        raise InvalidInput(
            f"{where}, got {url!r}: the OpenAI API lies at /v1, control calls above it: {url.removesuffix('/v1')}"
        )
    return url


class Server:
    """An engine's server: JSON in, JSON out.

    Args:
        hint: what to check if something else answers, in words.
        example: of such a URL.

    Attributes:
        answer_s: seconds that an answer may take.
    """

    def __init__(self, url: str, hint: str, example: str = "http://host:8000") -> None:
        self.url, self.hint = checked_url(url, example), hint
        self.answer_s: float = TIMEOUT_S
        self._gone = False

    def post(self, route: str, body: Any = None, **query: str) -> dict[str, Any]:
        """Post to a route, and return the JSON of the answer; {} for an empty one."""
        return self._send(self._post(route, body, **query))

    def _post(self, route: str, body: Any, **query: str) -> urllib.request.Request:
        url = f"{self.url}/{route}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST")

    def confirm(self, route: str, body: Any) -> None:
        """Post to a route that answers in words, which have to begin with "Success"."""
        text = self._text(self._post(route, body))[0].decode(errors="replace")
        if not text.startswith("Success"):
            raise Unfit(f"{self.url}/{route} answered 200 and {_shown(text)!r}: {self.hint}")

    def get(self, route: str) -> dict[str, Any]:
        return self._send(urllib.request.Request(f"{self.url}/{route}"))

    def do(
        self, route: str, done: Mapping[str, Any], body: Any = None, or_says: Sequence[str] = (), **query: str
    ) -> None:
        """Post to a route, and raise `Unfit` unless the answer confirms it.

        Args:
            done: fields of an answer that does; {} if it is empty.
            or_says: names of fields, of any value, in releases that do not leave it empty.
        """
        answer = self.post(route, body=body, **query)
        if any(answer.get(name) != value for name, value in done.items()) or (
            answer and not done and not (or_says and all(name in answer for name in or_says))
        ):
            wanted = json.dumps(dict(done)) if done else "an empty answer"
            raise Unfit(
                f"{self.url}/{route} answered 200 and {_shown(json.dumps(answer))}, where an engine that has done it "
                f"gives {wanted}: {self.hint} Is something in front of it that answers in its place?"
            )

    def unlike(self, answer: object) -> Unfit:
        """Return the error for an answer in JSON that is not one of such a server."""
        return Unfit(f"{self.url} answers with JSON of something else ({_shown(json.dumps(answer))}): {self.hint}")

    def _send(self, request: urllib.request.Request) -> dict[str, Any]:
        """Return the JSON of the answer; raise `Unfit`, `Answered` or `NotReached`."""
        url = request.full_url
        text, kind = self._text(request)
        try:
            answer = json.loads(text) if text else {}
        except ValueError as error:
            raise Unfit(f"{url} answers with {kind}, which is not JSON: {self.hint}") from error
        if not isinstance(answer, dict):
            raise self.unlike(answer)
        return answer

    def _text(self, request: urllib.request.Request) -> tuple[bytes, str]:
        """Return the answer and its kind; raise `Unfit`, `Answered` or `NotReached`."""
        limits = (min(self.answer_s, ANSWER_AGAIN_S), CONNECT_AGAIN_S) if self._gone else (self.answer_s, SILENT_S)
        try:
            answer = self._answer(request, *limits)
        except (NotReached, RuntimeError) as error:
            self._gone = isinstance(error, NotReached)
            raise
        self._gone = False
        return answer

    def _answer(self, request: urllib.request.Request, seconds: float, connect_s: float) -> tuple[bytes, str]:
        url, began = request.full_url, time.monotonic()
        try:
            return send(request, seconds, connect_s)
        except urllib.error.HTTPError as error:
            raise self._error(url, error) from error
        except urllib.error.URLError as error:
            raise NotReached(_why(self.url, error.reason)) from error
        except TimeoutError as error:
            spent = time.monotonic() - began
            raise NotReached(
                f"{url} has not answered in {spent:.0f} s: does the engine still run, and can this host reach it?"
            ) from error
        except (ConnectionError, http.client.IncompleteRead) as error:
            told = f"{url} does not answer and closes the connection: {self.hint} Did it end just now?"
            raise NotReached(told) from error
        except http.client.HTTPException as error:
            raise Unfit(f"{url} does not answer in HTTP ({error!r}): {self.hint}") from error
        except TooMuch as error:
            raise Unfit(f"{url}: {error}: {self.hint}") from error

    def _error(self, url: str, error: urllib.error.HTTPError) -> RuntimeError | NotReached:
        detail, kind = _shown(error.read(_LONGEST).decode(errors="replace")), _kind(error.headers)
        if 200 <= error.code < 400:
            to = error.headers.get("Location")
            elsewhere = f", which sends it to {to}: give the URL of the engine itself" if to else ", which is not done"
            return Unfit(
                f"{url} answered {error.code}{elsewhere}. Control calls follow no redirects (a POST would become a "
                f"GET, or reach another server): {self.hint}"
            )
        if error.code in _LOCKED:
            return Unfit(
                f"{url} answered {error.code} ({detail}): it asks for an API key, and pushes have none to give: start "
                "the server without (--api-key, --admin-api-key), and let it listen on a private interface alone"
            )
        if error.code in _GATEWAYS and not (error.code == http.HTTPStatus.SERVICE_UNAVAILABLE and "json" in kind):
            return NotReached(
                f"{url} answered {error.code} ({kind}), as gateways do that do not reach a server, or wait no longer "
                f"for it: {self.hint} A control call may take minutes: give the URL of the engine itself, or let "
                "the gateway wait longer"
            )
        if error.code in _UNKNOWN or "html" in kind:
            error_of = NoRoute if error.code in _UNKNOWN else Unfit
            return error_of(f"{url} answered {error.code} ({kind}): {self.hint}")
        return Answered(url, error.code, detail)


def _shown(text: str) -> str:
    """Return the part of an answer that a message quotes, without secrets."""
    return _SECRET.sub("...", text)[:_LONGEST]


def _why(url: str, reason: object) -> str:
    """Return why no server answers at a URL, and what to check."""
    if isinstance(reason, ConnectionRefusedError):
        return f"nothing listens at {url} (connection refused): is the server running, and is this its port?"
    if isinstance(reason, socket.gaierror):
        return f"the host of {url} is not known ({reason.strerror}): is it spelt right?"
    if isinstance(reason, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {url} is not trusted here ({reason.verify_message}): is this the right host? Name the "
            "certificates that you trust in SSL_CERT_FILE"
        )
    if isinstance(reason, ssl.SSLError):
        return f"{url} does not speak TLS as it should ({reason.reason}): is it https, and not http?"
    return f"{url} is not reached ({reason}): is the server running, and can this host reach it?"
