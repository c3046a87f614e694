"""Which stream a plan runs on: what is its own on the device is made, read and freed in an order that holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import InvalidInput


class Streams:
    """The runs of one plan, one after the other, whichever streams they are on.

    A plan has memory of its own on the device (tables, a counter of units). It is made on one stream; two runs at a
    time would take units from one counter, and each would leave some out; and freed memory is handed out again to the
    stream that it was made on. So a run on another stream than the last one waits for that, and the memory is kept
    until it has run.

    In a CUDA graph nothing is waited for: `torch.cuda.graph` waits for the device before it captures, and replays are
    for their owner to order.

    Args:
        own: its tensors; those on other devices do not matter.
    """

    def __init__(self, device: torch.device, own: Sequence[Tensor]) -> None:
        self._own = [t for t in own if t.device.type == "cuda" and t.numel()]
        if not self._own:  # small tables travel as arguments
            return
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._last = torch.cuda.current_stream(self._index)
        self._of_graph = torch.cuda.is_current_stream_capturing()

    def join(self) -> None:
        """Wait for the last run if that was on another stream; called before every run."""
        if self._own and torch._C._cuda_getCurrentRawStream(self._index) != self._last.cuda_stream:
            self._change()

    def _change(self) -> None:
        with torch.cuda.device(self._index):
            now = torch.cuda.current_stream()
            if torch.cuda.is_current_stream_capturing():
                return
            if self._of_graph:
                raise InvalidInput(
                    "this plan was built while a CUDA graph was captured, and runs in that graph alone; build it "
                    "before the capture to run it elsewhere as well"
                )
            now.wait_stream(self._last)
            for tensor in self._own:
                tensor.record_stream(now)
            self._last = now
