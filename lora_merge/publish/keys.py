"""The key with which versions are signed."""

from __future__ import annotations

import os

from ..errors import InvalidInput

_SHORTEST = 16


def key_of(key: str | bytes | None) -> bytes | None:
    """Return a key as bytes; by default that of the environment, or None for no signatures. White space around it is no
    part of it: files and secrets often end with a line break.

    Raises:
        InvalidInput: it has fewer than 16 bytes.
    """
    found = os.environ.get("LORA_MERGE_STORE_KEY") or None if key is None else key
    if found is None:
        return None
    made = (found.encode() if isinstance(found, str) else bytes(found)).strip()
    if len(made) < _SHORTEST:
        raise InvalidInput(f"a key for signatures must have at least {_SHORTEST} bytes, got {len(made)}")
    return made
