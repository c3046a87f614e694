"""Serve a folder of wheels and source distributions as a package index (PEP 503), and run a command whose pip installs
from it and from nowhere else.

    python tests/support/index.py dist pip install lora-merge
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def write_index(dist: Path, folder: Path) -> None:
    """Lay out `folder` as an index: `simple/<project>/index.html`, with each file's hash, and the files beside it."""
    projects: dict[str, list[str]] = {}
    for file in sorted(path for path in dist.iterdir() if path.name.endswith((".whl", ".tar.gz"))):
        project = re.sub(r"[-_.]+", "-", file.name.partition("-")[0]).lower()
        home = folder / "simple" / project
        home.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, home)
        name, digest = escape(file.name), hashlib.sha256(file.read_bytes()).hexdigest()
        projects.setdefault(project, []).append(f'<a href="{name}#sha256={digest}">{name}</a>')
    for project, links in projects.items():
        (folder / "simple" / project / "index.html").write_text("<!DOCTYPE html>\n" + "<br>\n".join(links))
    listed = "<br>\n".join(f'<a href="{project}/">{project}</a>' for project in projects)
    (folder / "simple" / "index.html").write_text("<!DOCTYPE html>\n" + listed)


@contextmanager
def served(dist: Path) -> Iterator[dict[str, str]]:
    """Serve `dist`; yield the environment variables under which pip takes packages from there alone."""
    with tempfile.TemporaryDirectory() as folder:
        write_index(dist, Path(folder))
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield {
                "PIP_INDEX_URL": f"http://127.0.0.1:{server.server_port}/simple/",
                "PIP_CONFIG_FILE": os.devnull,
                "PIP_EXTRA_INDEX_URL": "",
                "PIP_FIND_LINKS": "",
                "NO_PROXY": "127.0.0.1",
            }
        finally:
            server.shutdown()
            server.server_close()


if __name__ == "__main__":
    with served(Path(sys.argv[1])) as variables:
        sys.exit(subprocess.call(sys.argv[2:], env=os.environ | variables))
