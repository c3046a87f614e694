"""An update that a worker receives in a thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lora_merge.engine.payload.spec import ReceivedUpdate, UpdateSpec
from lora_merge.engine.worker import staging
from lora_merge.engine.worker.staging import Staging

CPU = torch.device("cpu")
UPDATE = ReceivedUpdate(UpdateSpec("", (), 0, (), (), (), {}, {}), [])


def ended(staged: Staging) -> ReceivedUpdate | None:
    end = time.monotonic() + 20
    while (found := staged.result()) is None and time.monotonic() < end:
        time.sleep(0.01)
    return found


def test_it_comes_beside_other_work() -> None:
    come = threading.Event()

    def receive() -> ReceivedUpdate:
        assert come.wait(20)
        return UPDATE

    staged = Staging(CPU, receive)
    assert staged.result() is None
    come.set()
    assert ended(staged) is UPDATE
    staged.end(lambda: pytest.fail("nobody waits for a transfer that is over"))


def test_an_error_is_raised_where_it_is_asked_for() -> None:
    def receive() -> ReceivedUpdate:
        raise OSError("the trainer is gone")

    with pytest.raises(RuntimeError, match="could not be staged: OSError: the trainer is gone"):
        ended(Staging(CPU, receive))


def test_it_ends_when_its_trainer_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    left = threading.Event()

    def receive() -> ReceivedUpdate:
        assert left.wait(20)
        raise OSError("left")

    Staging(CPU, receive).end(left.set)
    assert left.is_set()
    monkeypatch.setattr(staging, "_END_S", 0.05)
    stays = threading.Event()
    with pytest.raises(RuntimeError, match="still receives an update of another push"):
        Staging(CPU, lambda: (stays.wait(20), UPDATE)[1]).end(lambda: None)
    stays.set()
