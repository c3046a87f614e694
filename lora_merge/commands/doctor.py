"""`lora-merge doctor`."""

from __future__ import annotations

import argparse

from .output import REFUSED, add_json, tell


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def doctor(options: argparse.Namespace) -> int:
    from ..doctor import examine

    found = examine()
    tell(options, str(found), found)
    return REFUSED if found.todo else 0
