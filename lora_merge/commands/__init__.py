"""The commands of `lora-merge`, a file for each kind: each adds its options to a parser and runs."""

from .output import DIRTY, REFUSED

__all__ = ["DIRTY", "REFUSED"]
