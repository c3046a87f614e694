"""A local S3: moto's server in a process of its own, and the environment in which clients find it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def s3() -> Iterator[str]:
    """Yield the URL of an empty bucket."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    url = f"http://127.0.0.1:{port}"
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(url, timeout=2)
                break
            except OSError:
                assert server.poll() is None, "moto's server has ended"
                assert time.monotonic() < end, "moto's server does not answer"
                time.sleep(0.2)
        with mock.patch.dict(os.environ, settings):
            urllib.request.urlopen(urllib.request.Request(f"{url}/runs", method="PUT"), timeout=10)
            yield "s3://runs"
    finally:
        server.terminate()
        server.wait(20)
