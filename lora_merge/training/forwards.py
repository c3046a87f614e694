"""Which threads are in a forward of a model that is trained on merged weights."""

from __future__ import annotations

import sys
import threading
from threading import get_ident
from types import FrameType

from torch import nn

_CALL = nn.Module._call_impl.__code__


class Forward(threading.local):
    """The forward that a thread is in.

    Attributes:
        outermost: the module that holds all adapter layers, and was called first; None: it is in no such one.
        awaited: layers with a forward of their own that were called, and whose bases were not yet.
    """

    def __init__(self) -> None:
        self.outermost: nn.Module | None = None
        self.awaited = set[nn.Module]()


def others_compute(threads: set[int]) -> bool:
    """Return True if another thread than this one is in a forward.

    Args:
        threads: those that have begun one. Those that were interrupted in it (Ctrl-C) are taken out.
    """
    others = threads - {get_ident()}
    frames = sys._current_frames() if others else {}
    threads -= {thread for thread in others if not _calls(frames.get(thread))}
    return not threads <= {get_ident()}


def _calls(frame: FrameType | None) -> bool:
    """Return True if something in a stack calls a module."""
    while frame is not None and frame.f_code is not _CALL:
        frame = frame.f_back
    return frame is not None
