"""The logger `lora_merge`, whose children are those of the package's files (`lora_merge.engine.worker.rpc`).

A line at the start of training says at INFO what was taken over; each push of a callback is a line at INFO, and each
version that a server follows; what goes wrong in an engine's worker is logged there with its trace.

    logging.getLogger("lora_merge").setLevel(logging.WARNING)  # no lines at start
"""

from __future__ import annotations

import logging
import sys

LOG = logging.getLogger("lora_merge")


def announce(line: str) -> None:
    """Log a line at INFO that a user has to see: on standard error where logging is not set up to show it, unless the
    logger's own level is above INFO."""
    if LOG.isEnabledFor(logging.INFO) and LOG.hasHandlers():
        LOG.info(line)
    elif LOG.level <= logging.INFO:
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
