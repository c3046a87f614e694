"""An update that a worker receives in a thread, while its engine goes on generating."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..transport.liveness import error_text

_END_S = 30.0
"""Seconds in which a thread has to notice that its trainer has gone (`TransferAborted`)."""


class Staged(Protocol):
    """What a thread receives; `data` are its tensors on the device."""

    @property
    def data(self) -> Mapping[Any, Tensor]: ...


class Staging:
    """A thread that receives an update. On a GPU it works on a stream of its own, beside the model's.

    Args:
        receive: receives it, and returns it.
    """

    def __init__(self, device: torch.device, receive: Callable[[], Staged]) -> None:
        self._device, self._receive = device, receive
        # The stream of the worker's own thread, not of this one: vLLM gives that thread another stream than the
        # default.
        self._used = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._update: Staged | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="lora_merge")
        self._thread.start()

    def result(self) -> Staged | None:
        """Return the update; None while it still comes.

        Raises:
            RuntimeError: it could not be received.
        """
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise RuntimeError(f"the update could not be staged: {error_text(self._error)}") from self._error
        return self._update

    def end(self, leave: Callable[[], object]) -> None:
        """Wait for the thread, whose trainer has given up or died.

        Args:
            leave: tells the trainer, if it lives, not to wait for this worker.

        Raises:
            RuntimeError: the thread still reads what the trainer sends.
        """
        if self._thread.is_alive():
            leave()
            self._thread.join(_END_S)
        if self._thread.is_alive():
            raise RuntimeError("this worker still receives an update of another push; push again when that has ended")

    def _run(self) -> None:
        try:
            self._update = self._received()
        except BaseException as error:  # `result` raises it
            self._error = error

    def _received(self) -> Staged:
        if self._used is None:
            return self._receive()
        torch.cuda.set_device(self._device)
        beside = torch.cuda.Stream(self._device)
        with torch.cuda.stream(beside):
            update = self._receive()
            for data in update.data.values():
                data.record_stream(self._used)  # on which it is merged
        beside.synchronize()
        return update
