"""A control call over HTTP reaches the server that its URL names, and counts as made only where that server says so."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from strangers import saying

from lora_merge import InvalidInput
from lora_merge.engine.control import http as web
from lora_merge.engine.control.http import Answered, NotReached, Server, Unfit
from lora_merge.engine.transport.liveness import process_id

HINT = "is it the right one?"
SECRET = "0123456789abcdef" * 4
PROXY = "LORA_MERGE_HTTP_PROXY"
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def raw(body: str, *headers: str, code: str = "200 OK", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    return "\r\n".join([f"HTTP/1.1 {code}", f"Content-Length: {length}", *headers, "", body]).encode()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, "no_proxy", "NO_PROXY", PROXY):
        monkeypatch.delenv(name, raising=False)


def test_proxies_of_the_environment_hear_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with saying(raw("{}")) as (proxy, overheard), saying(raw('{"a": 1}')) as (url, heard):
        for name in PROXIES:
            monkeypatch.setenv(name, proxy)
        for host in (url, url.replace("127.0.0.1", "localhost")):
            assert Server(host, HINT).post("collective_rpc", {"secret": SECRET}) == {"a": 1}
        assert (len(heard), overheard) == (2, [])
        with pytest.raises(NotReached, match="is not known"):
            Server("http://no-such-host.invalid", HINT).post("pause")
        assert overheard == []


def test_a_proxy_that_the_user_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for other hosts, never for this one."""
    with saying(raw('{"proxied": 1}')) as (proxy, overheard), saying(raw('{"a": 1}')) as (url, _):
        monkeypatch.setenv(PROXY, proxy)
        assert Server(url, HINT).get("is_paused") == {"a": 1}
        assert Server("http://no-such-host.invalid:8000", HINT).get("is_paused") == {"proxied": 1}
        assert overheard[0].startswith(b"GET http://no-such-host.invalid:8000/is_paused ")
        monkeypatch.setenv(PROXY, "proxy:3128")
        with pytest.raises(InvalidInput, match=f"{PROXY} must be a URL"):
            Server("http://no-such-host.invalid:8000", HINT).get("is_paused")


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("method", ["get", "post"])
def test_redirects_are_not_followed(method: str, code: int) -> None:
    with saying(raw("{}")) as (elsewhere, heard):
        answer = raw("", f"Location: {elsewhere}/target", code=f"{code} Elsewhere")
        with (
            saying(answer) as (url, _),
            pytest.raises(Unfit, match=rf"answered {code}, which sends it to {elsewhere}.*URL of the engine itself"),
        ):
            getattr(Server(url, HINT), method)("pause")
        assert heard == []


ANSWERS: dict[str, tuple[bytes, type[Exception], str]] = {
    "accepted, not done": (raw("{}", code="202 Accepted"), Unfit, "answered 202, which is not done"),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", Unfit, "answered 204, which is not done"),
    "not all": (raw('{"status": ', length=50), NotReached, "closes the connection"),
    "nothing of all": (raw("", length=2), NotReached, "closes the connection"),
    "chunks that end": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n",
        NotReached,
        "closes the connection",
    ),
    "a list": (raw("[1]"), Unfit, r"JSON of something else \(\[1\]\)"),
    "null": (raw("null"), Unfit, r"JSON of something else \(null\)"),
    "a page": (raw("<html/>", "Content-Type: text/html"), Unfit, "answers with text/html, which is not JSON"),
    "more than any engine says": (raw(" " * 5000 + "{}"), Unfit, "its answer is longer than 4000 bytes: is it"),
    "a gateway that waits no longer": (
        raw("<html/>", "Content-Type: text/html", "Server: nginx", code="504 Gateway Time-out"),
        NotReached,
        r"answered 504 \(text/html from nginx\), as gateways do.*let the gateway wait longer",
    ),
    "a gateway without a server": (
        raw("no healthy upstream", "Content-Type: text/plain", code="503 Service Unavailable"),
        NotReached,
        r"answered 503 \(text/plain\), as gateways do that do not reach a server.*URL of the engine itself",
    ),
    "a gateway that speaks JSON": (
        raw('{"message": "no upstream"}', "Content-Type: application/json", code="502 Bad Gateway"),
        NotReached,
        r"answered 502 \(application/json\), as gateways do",
    ),
    "an engine that says why not": (
        raw('{"detail": "not now"}', "Content-Type: application/json", code="503 Service Unavailable"),
        Answered,
        r'answered 503: \{"detail": "not now"\}$',
    ),
    "what it was told": (
        raw(json.dumps({"detail": [{"input": {"secret": SECRET}}]}), code="422 Unprocessable"),
        Answered,
        r'answered 422: \{"detail": \[\{"input": \{"secret": "\.\.\."\}\}\]\}$',
    ),
    "what it was told, as if it were done": (raw(json.dumps([SECRET])), Unfit, r'something else \(\["\.\.\."\]\)'),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_that_is_none(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, error, match = ANSWERS[what]
    monkeypatch.setattr(web, "MOST", 4000)
    with saying(answer) as (url, _), pytest.raises(error, match=match):
        Server(url, HINT).post("pause", {"secret": SECRET})


def test_an_answer_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte comes in time."""
    end = threading.Event()

    class Endless:
        length = None

        def read1(self, count: int) -> bytes:
            end.wait(0.01)
            return b" "

    with pytest.raises(web.TooMuch, match="no end"):
        web._whole(Endless(), web.time.monotonic() + 0.1, 0.1)


def test_a_server_that_is_gone_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has answered: not after a call that was interrupted, nor beside one that is under way."""
    waits: list[float] = []
    comes: list[BaseException] = [NotReached("gone"), KeyboardInterrupt(), web.TooMuch("no end")]
    server = Server("http://127.0.0.1:1", HINT)

    def send(request: Any, seconds: float, connect_s: float) -> Any:
        waits.append(connect_s)
        if len(waits) == 2:
            beat: Any = Server.get
            with pytest.raises(KeyboardInterrupt):
                beat(server, "beats")
        raise comes.pop(0)

    monkeypatch.setattr(web, "send", send)
    for error in (NotReached, Unfit, IndexError):
        with pytest.raises(error):
            server.get("is_paused")
    again = web.CONNECT_AGAIN_S
    assert waits == [web.SILENT_S, again, again, web.SILENT_S]


DONE = {"status": "paused"}


@pytest.mark.parametrize(
    ("said", "done", "well"),
    [
        ('{"status": "paused", "more": 1}', DONE, True),
        ('{"status": "ok"}', DONE, False),
        ('{"error": "not now"}', DONE, False),
        ("{}", DONE, False),
        ("", DONE, False),
        ("", {}, True),
        ('{"success": false}', {}, False),
        ('{"success": false}', {"success": True}, False),
        ('{"success": 1.5}', {"success": True}, False),
    ],
)
def test_what_is_done_is_said(said: str, done: dict[str, Any], well: bool) -> None:
    with saying(raw(said)) as (url, _):
        if well:
            Server(url, HINT).do("pause", done)
            return
        with pytest.raises(Unfit, match=r"/pause answered 200 and .*, where an engine that has done it gives"):
            Server(url, HINT).do("pause", done)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://host:8000/?a=b", "a query or fragment"),
        ("http://host:8000?", "a query or fragment"),
        ("http://host:8000/#top", "a query or fragment"),
        ("http://user:pw@host:8000", "got one of host with a user or password"),
        ("http://:pw@host:8000", "a user or password"),
        ("http://host:8000/v1", "control calls above it: http://host:8000$"),
        ("http://host:8000/v1/", "control calls above it: http://host:8000$"),
        ("http://", "must be a URL like"),
        ("http:///path", "must be a URL like"),
        ("http://host:80000", "must be a URL like .*Port out of range"),
        ("http://host:port", "must be a URL like"),
        ("http://[::1", "must be a URL like"),
        ("http://host:8000\n", "must be a URL like"),
        ("http://ho st:8000", "must be a URL like"),
    ],
)
def test_urls_that_would_not_be_called_as_they_are(url: str, match: str) -> None:
    with pytest.raises(InvalidInput, match=match) as raised:
        Server(url, HINT)
    assert "pw" not in str(raised.value)


def test_a_path_in_front_of_the_routes() -> None:
    """As a reverse proxy has it."""
    with saying(raw("{}")) as (url, heard):
        Server(f"{url}/engines/0/", HINT).post("pause", mode="keep")
        assert heard[0].startswith(b"POST /engines/0/pause?mode=keep ")


@contextmanager
def over_tls(folder: Path) -> Iterator[tuple[str, Path]]:
    """A server of HTTPS that answers `{"a": 1}`: its URL, and its certificate, which it has signed itself."""
    key, certificate = folder / "key", folder / "certificate"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(raw('{"a": 1}'))

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"https://localhost:{server.server_address[1]}", certificate
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_certificate_that_nobody_vouches_for(tmp_path: Path) -> None:
    told = r"certificate of https://localhost.* is not trusted here .*SSL_CERT_FILE"
    with over_tls(tmp_path) as (url, _), pytest.raises(NotReached, match=told):
        Server(url, HINT).get("is_paused")


def test_certificates_are_read_when_they_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them takes 30 ms, and a push makes a dozen calls: none reads them for plain HTTP, and one for HTTPS."""
    reads, read = list[int](), ssl.create_default_context

    def counted(*args: Any, **options: Any) -> ssl.SSLContext:
        reads.append(1)
        return read(*args, **options)

    for name in ("create_default_context", "_create_default_https_context"):  # the latter by Python's own HTTPS
        monkeypatch.setattr(ssl, name, counted)
    with saying(raw('{"a": 1}')) as (url, _):
        assert [Server(url, HINT).get("is_paused") for _ in range(3)] == 3 * [{"a": 1}]
        assert not reads
    (tmp_path / "own").mkdir()
    (tmp_path / "other").mkdir()
    with over_tls(tmp_path / "own") as (url, certificate), over_tls(tmp_path / "other") as (elsewhere, unknown):
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert [Server(url, HINT).get("is_paused") for _ in range(3)] == 3 * [{"a": 1}]
        assert len(reads) == 1
        with pytest.raises(NotReached, match="not trusted here"):
            Server(elsewhere, HINT).get("is_paused")
        assert len(reads) == 1
        certificate.write_bytes(unknown.read_bytes())
        os.utime(certificate, ns=(0, 0))  # in case both were written within a tick
        assert Server(elsewhere, HINT).get("is_paused") == {"a": 1}
        assert len(reads) == 2


def test_each_process_has_a_name_of_its_own() -> None:
    """Also one that is forked off."""
    ours = process_id()
    reads, writes = os.pipe()
    if not (child := os.fork()):
        os.write(writes, process_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reads, 1000).decode()
    assert theirs.startswith(f"{child} of ")
    assert ours == process_id() != theirs
    os.close(reads)
    os.close(writes)
