"""The logger `lora_merge`, whose children are those of the package's files (`lora_merge.engine.worker.rpc`).

A line at the start of training says at INFO what was taken over; each push of a callback is a line at INFO, and each
version that a server follows; what goes wrong in an engine's worker is logged there with its trace.

    logging.getLogger("lora_merge").setLevel(logging.WARNING)  # no lines at start
"""

from __future__ import annotations

import logging
import re
import sys
from urllib.parse import unquote

LOG = logging.getLogger("lora_merge")
# In abfs:// what stands before the "@" alone is a container.
_USER = re.compile(r"(?<=http://)[^/?#]*@|(?<=https://)[^/?#]*@|(?:^|(?<=://))[^/?#:]*:[^/?#]*@")
_QUERY = re.compile(r"(://[^?]*\?).*", re.DOTALL)


def announce(line: str) -> None:
    """Log a line at INFO that a user has to see: on standard error where logging is not set up to show it, unless the
    logger's own level is above INFO."""
    if LOG.isEnabledFor(logging.INFO) and LOG.hasHandlers():
        LOG.info(line)
    elif LOG.level <= logging.INFO:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def shown(url: str) -> str:
    """Return a URL without what no line may tell: user and password, and a query, in which tokens are. Paths stay."""
    if url.startswith(("/", "file:", "local:")):
        return url
    return _QUERY.sub(r"\1***", _USER.sub("***@", url))


def words_of(error: Exception, url: str) -> str:
    """Return an error of a library that was given a URL in words, without what no line may tell."""
    words = f"{type(error).__name__}: {error}".replace(url, shown(url)) if url else f"{type(error).__name__}: {error}"
    if login := re.search(r"://([^/?#]*)@", url):
        password = login[1].partition(":")[2]
        for secret in filter(None, (login[1], password, unquote(password))):
            words = words.replace(secret, "***")
    return words
