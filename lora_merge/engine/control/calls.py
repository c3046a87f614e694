"""Calls to several engines at the same time, from synchronous code or an event loop, that do not wait for ever for a
dead process."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from ...inference import outside_default_device, outside_inference_mode
from ..transport.liveness import CHECK_S, alive
from .base import Control

_T = TypeVar("_T")
LOOK_S = 1.0
"""Seconds between two checks whether the workers of an awaited engine live."""
GRACE_S = 3.0
"""Seconds that an engine has to report its own death."""
_SENT_S = 5e-4
"""Seconds for calls to be sent before this thread computes: Python switches threads only every 5 ms."""


class EngineGone(RuntimeError):
    """A worker process of an engine has died, and the engine with it."""


class Liveness:
    """When called, raises `EngineGone` if one of some processes has been dead for `GRACE_S`. Until then the engine may
    report it itself."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._since = list(pids), 0.0

    def __call__(self) -> None:
        dead = [pid for pid in self._pids if not alive(pid)]
        self._since = (self._since or time.monotonic()) if dead else 0.0
        if dead and time.monotonic() - self._since > GRACE_S:
            raise EngineGone(f"process {dead[0]} of the engine has died; start a new engine")


class _Caller:
    """A thread that makes calls one after another; it is reused, since starting one takes as long as a call."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="lora_merge").start()

    def _run(self) -> None:
        while True:
            self.calls.get()()


_idle: list[_Caller] = []
os.register_at_fork(after_in_child=_idle.clear)  # a forked process has none of the threads


def _begun(call: Callable[[], _T]) -> Future[_T]:
    """Begin a call in a `_Caller`."""
    future: Future[_T] = Future()
    try:
        caller = _idle.pop()
    except IndexError:
        caller = _Caller()

    def run() -> None:
        try:
            value = call()
        except BaseException as error:
            _idle.append(caller)
            future.set_exception(error)
        else:
            _idle.append(caller)
            future.set_result(value)

    caller.calls.put(run)
    return future


def while_alive(call: Callable[[], _T], pids: Sequence[int]) -> _T:
    """Make a blocking call that waits for other processes, and stop waiting when one of them has died.

    Raises:
        EngineGone: one has; the call is left behind in its thread.
    """
    check, future = Liveness(pids), _begun(on_this_device(call))

    def ended(seconds: float) -> bool:
        with suppress(TimeoutError):
            future.exception(seconds)
        return future.done()

    try:
        while not ended(CHECK_S):
            check()
    except EngineGone:
        raise
    except BaseException:
        ended(GRACE_S)  # what is called next comes after it
        raise
    return future.result()


async def watched(awaited: Awaitable[_T], pids: Sequence[int]) -> _T:
    """Await a call, and stop waiting when a process has died; see `while_alive`. Cancelling this cancels the call."""
    call = asyncio.ensure_future(awaited)
    check = Liveness(pids)
    try:
        while not (await asyncio.wait([call], timeout=LOOK_S))[0]:
            check()
    finally:
        call.cancel()  # unless it is done
    return call.result()


@outside_default_device
@outside_inference_mode
def drive(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError("this engine has to be awaited: use apush() in its event loop")


async def together(
    controls: Sequence[Control],
    calls: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    work: Callable[[], None] = lambda: None,
    *,
    ended: Callable[[int], object] = lambda position: None,
    stop: Callable[[], None] = lambda: None,
    give_up: Callable[[], None] = lambda: None,
) -> tuple[list[BaseException | None], BaseException | None]:
    """Make control calls to several replicas at the same time, and run blocking work of this rank beside them.

    Args:
        ended: called with the position of each call that has ended.
        give_up: called if this is interrupted before the work has begun, for which the calls would wait.
        stop: called if this is cancelled: asks the work, and so the calls, to end soon; they are waited for.

    Returns:
        the error of each call, or None, and that of the work.
    """
    if not any(control.suspends for control in controls):
        return _in_threads(calls, work, ended, give_up)

    def made(position: int) -> Awaitable[None]:
        call = calls[position]()
        return call if controls[position].suspends else asyncio.to_thread(drive, call)

    every = range(len(calls))
    tasks = [asyncio.ensure_future(_error_of(partial(made, at), partial(ended, at))) for at in every]
    beside = _error_of(lambda: asyncio.to_thread(on_this_device(work)))
    *errors, failure = await to_its_end(asyncio.gather(*tasks, beside), stop)
    return errors, failure


async def _error_of(
    call: Callable[[], Awaitable[Any]], ended: Callable[[], object] = lambda: None
) -> BaseException | None:
    """Make a call, and return its error; None if there is none."""
    try:
        await call()
    except Exception as error:
        return error
    finally:
        ended()
    return None


async def side_by_side(
    controls: Sequence[Control], step: Callable[[_T], Coroutine[Any, Any, Any]], items: Sequence[_T]
) -> list[BaseException | None]:
    """Make a control call to each of several engines at the same time, and return their errors. With a single engine it
    runs in this thread."""
    if len(items) > 1:
        return (await together(controls, [partial(step, item) for item in items]))[0]
    return [await _error_of(partial(step, item)) for item in items]


async def to_its_end(running: asyncio.Future[_T], stop: Callable[[], None] = lambda: None) -> _T:
    """Wait for work that a cancellation must not leave running behind (a thread cannot be cancelled).

    Args:
        stop: asks it to end soon; called at the first cancellation.

    Raises:
        asyncio.CancelledError: this was cancelled meanwhile, however often; the work has ended.
    """
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError as error:
            if running.cancelled():
                raise
            if cancelled is None:
                stop()
            cancelled = error
        except BaseException:
            break  # the work's own: raised below
    if cancelled is not None:
        raise cancelled
    return running.result()


def on_this_device(work: Callable[[], _T]) -> Callable[[], _T]:
    """Wrap work for another thread, so that it runs on this thread's GPU (a new thread begins with GPU 0)."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> _T:
        if device is not None:
            torch.cuda.set_device(device)
        return work()

    return run


def _in_threads(
    calls: Sequence[Callable[[], Coroutine[Any, Any, None]]],
    work: Callable[[], None],
    ended: Callable[[int], object],
    give_up: Callable[[], None],
) -> tuple[list[BaseException | None], BaseException | None]:
    def one(position: int) -> BaseException | None:
        return drive(_error_of(calls[position], partial(ended, position)))

    failure: BaseException | None = None
    futures: list[Future[BaseException | None]] = []
    try:
        futures.extend(_begun(on_this_device(partial(one, position))) for position in range(len(calls)))
        if calls:
            time.sleep(_SENT_S)
        try:
            work()
        except Exception as error:
            failure = error
    except BaseException:
        give_up()  # or the calls wait for the work, and this for them
        raise
    finally:
        wait(futures)
    return [future.result() for future in futures], failure
