"""Control planes: how an engine is told what to do. One interface, a thin class for each kind of handle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch

from ...errors import InvalidInput, PushRefused
from ..waiting import CHECK_S, alive
from .web import send

_T = TypeVar("_T")
TIMEOUT_S = 600
"""Seconds that a control call over HTTP may take."""
GRACE_S = 3.0
"""Seconds that vLLM has to say that an engine is dead."""
LOOK_S = 1.0
"""Seconds between two looks at whether an AsyncLLM's workers are still there."""


_SENT_S = 5e-4
"""Seconds for calls to go out before this thread computes: Python lets it go on for 5 ms when another one is ready."""


class NoRoute(RuntimeError):
    """A server does not know a route."""


class WorkerFailed(RuntimeError):
    """Workers of an engine report an error; the others have done what they were asked for."""


class EngineGone(RuntimeError):
    """A worker process of an engine has died, and the engine with it."""


class OutOfStep(RuntimeError):
    """An engine hands on answers to calls that are past: somebody's call has failed in one of several workers, after
    which vLLM cannot be asked anything any more."""


class Control:
    """An in-process `vllm.LLM`, or its `LLMEngine`: nothing runs in it but what its owner steps.

    Every method is a coroutine function; those of synchronous handles never suspend.

    Attributes:
        handle: what the user gave.
        engine: what is called.
        workers: process ids of its workers on this host, other processes than this one. vLLM leaves a call for ever
            without an answer that is under way when the engine dies.
    """

    suspends = False
    """Whether calls have to be awaited in the handle's own event loop."""
    adapters: str | None = None
    """Why adapters cannot be served over this handle."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.engine = getattr(handle, "llm_engine", handle)
        self.workers: list[int] = []

    @property
    def elsewhere(self) -> bool:
        """Whether other processes do all the work of its calls, as far as is known."""
        return bool(self.workers)

    def config(self) -> Any:
        """The engine's `VllmConfig`, where this process has it; else None."""
        return getattr(self.engine, "vllm_config", None)

    async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
        """Call the worker method `lora_merge` on every worker.

        Returns:
            their answers, in rank order.

        Raises:
            WorkerFailed: one or several report an error; names them.
            OutOfStep: the answers are not to this call.
        """
        call = secrets.token_hex(8)
        request = json.dumps({"op": op, "call": call, **message})
        answers = [json.loads(answer) for answer in await self._ask(request)]
        if any(answer.get("call") != call for answer in answers):
            raise OutOfStep(
                "its workers' answers belong to an earlier call, which vLLM left unread when one worker failed in it: "
                "start this engine anew"
            )
        errors = [f"worker {answer['rank']}: {answer['error']}" for answer in answers if "error" in answer]
        if errors:
            raise WorkerFailed("; ".join(errors) if len(answers) > 1 else answers[0]["error"])
        return sorted(answers, key=lambda answer: answer["rank"])

    async def _ask(self, request: str) -> Sequence[str]:
        """What each worker's method `lora_merge` returns."""
        return await self._call("collective_rpc", "lora_merge", args=(request,))

    async def paused(self) -> bool:
        """Whether generation stands still already."""
        return bool(await self._call("is_sleeping"))

    async def pause(self, mode: str) -> None:
        """Stop generation."""
        # Nothing of an LLM's is in flight between its calls, and in the caller's own process vLLM refuses to wait.
        await self._call("sleep", level=0, mode="keep" if mode == "wait" else mode)

    async def resume(self) -> None:
        await self._call("wake_up", tags=["scheduling"])

    async def sleep(self, level: int) -> None:
        """Unmap the weights and the KV cache again, where a push has woken them for nothing."""
        await self._call("sleep", level=level)

    async def wake(self, tag: str) -> None:
        """Map the memory of a sleeping engine again: "weights" or "kv_cache"."""
        await self._call("wake_up", tags=[tag])

    async def label(self, version: str) -> None:
        """Tell the engine what its weights are called: vLLM 0.32 notes on every output which tokens came from which."""
        if hasattr(self.engine, "set_weight_version"):
            await self._call("set_weight_version", version)

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        """Forget cached blocks; `running` preempts requests that hold some. Whether it worked."""
        return bool(await self._call("reset_prefix_cache", running, connector))

    async def reset_media_caches(self) -> None:
        """Forget cached encoder outputs and multimodal inputs."""
        await self._call("reset_encoder_cache")
        await self._call("reset_mm_cache")

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = partial(getattr(self.engine, method), *args, **kwargs)
        return while_alive(call, self.workers) if self.workers else call()


class AsyncControl(Control):
    """A `vllm.AsyncLLM`, driven in its own event loop."""

    suspends = True

    async def paused(self) -> bool:
        return bool(await self._call("is_paused"))

    async def pause(self, mode: str) -> None:
        await self._call("pause_generation", mode=mode, clear_cache=False)

    async def resume(self) -> None:
        await self._call("resume_generation")

    async def label(self, version: str) -> None:
        if hasattr(self.engine, "update_weight_version"):
            await self._call("update_weight_version", version)

    async def reset_media_caches(self) -> None:
        await self._call("reset_encoder_cache")
        await self._call("reset_mm_cache")

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = asyncio.ensure_future(getattr(self.engine, method)(*args, **kwargs))
        look = _Look(self.workers)
        try:
            while not (await asyncio.wait([call], timeout=LOOK_S))[0]:
                look()
        finally:
            call.cancel()  # where it is not done
        return call.result()


class RayControl(AsyncControl):
    """A Ray actor around `vllm.AsyncLLM`, or around `vllm.LLM`, whose calls queue up behind each other."""

    suspends = False

    def config(self) -> Any:
        return None

    async def paused(self) -> bool:
        # An actor around an LLM does one call after the other: it stands still whenever it takes ours.
        return await super().paused() if hasattr(self.engine, "pause_generation") else True

    async def reset_media_caches(self) -> None:
        if not hasattr(self.engine, "reset_encoder_cache"):
            raise PushRefused("the encoder cache of a multimodal model can only be reset in an actor around AsyncLLM")
        await super().reset_media_caches()

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        import ray

        return ray.get(getattr(self.engine, method).remote(*args, **kwargs))


class HttpControl(Control):
    """A running `vllm serve` with `VLLM_SERVER_DEV_MODE=1`, by its URL. JSON goes in and out."""

    adapters = "its API server does not know adapters that a worker loaded by itself"

    def config(self) -> Any:
        return None

    async def _ask(self, request: str) -> Sequence[str]:
        return self._post("collective_rpc", body={"method": "lora_merge", "args": [request]})["results"]

    async def paused(self) -> bool:
        return bool(self._get("is_paused")["is_paused"])

    async def pause(self, mode: str) -> None:
        self._post("pause", mode=mode, clear_cache="false")

    async def resume(self) -> None:
        self._post("resume")

    async def wake(self, tag: str) -> None:
        self._post("wake_up", tags=tag)

    async def sleep(self, level: int) -> None:
        self._post("sleep", level=str(level))

    async def label(self, version: str) -> None:
        with contextlib.suppress(NoRoute):  # vLLM 0.26 keeps no versions
            self._post("update_weight_version", body={"new_version": version})

    async def reset_prefix_cache(self, running: bool, connector: bool) -> bool:
        query = {"reset_running_requests": str(running).lower(), "reset_external": str(connector).lower()}
        return bool(self._post("reset_prefix_cache", **query).get("success", True))

    async def reset_media_caches(self) -> None:
        self._post("reset_encoder_cache")
        self._post("reset_mm_cache")

    def _post(self, route: str, body: Any = None, **query: str) -> dict[str, Any]:
        url = f"{self.engine.rstrip('/')}/{route}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = None if body is None else json.dumps(body).encode()
        return self._send(urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="POST"))

    def _get(self, route: str) -> dict[str, Any]:
        return self._send(urllib.request.Request(f"{self.engine.rstrip('/')}/{route}"))

    def _send(self, request: urllib.request.Request) -> dict[str, Any]:
        try:
            text = send(request, TIMEOUT_S)
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:2000]
            if error.code == 404:
                raise NoRoute(f"{request.full_url}: start the server with VLLM_SERVER_DEV_MODE=1") from error
            raise RuntimeError(f"{request.full_url} answered {error.code}: {detail}") from error
        return json.loads(text) if text else {}


class _Look:
    """Raises `EngineGone` when a process has been dead for `GRACE_S`: vLLM's own word on it is better."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._since = list(pids), 0.0

    def __call__(self) -> None:
        dead = [pid for pid in self._pids if not alive(pid)]
        self._since = (self._since or time.monotonic()) if dead else 0.0
        if dead and time.monotonic() - self._since > GRACE_S:
            raise EngineGone(f"process {dead[0]} of the engine has died; start a new engine")


def while_alive(call: Callable[[], _T], pids: Sequence[int]) -> _T:
    """Make a call that waits for other processes, and not for ever when one of them is gone.

    Raises:
        EngineGone: one is; the call is left behind in its thread.
    """
    done: list[tuple[Any, BaseException | None]] = []
    ended, look = threading.Event(), _Look(pids)

    def there() -> None:
        try:
            done.append((call(), None))
        except BaseException as error:
            done.append((None, error))
        ended.set()

    threading.Thread(target=on_this_device(there), daemon=True).start()
    while not ended.wait(CHECK_S):
        look()
    value, error = done[0]
    if error is not None:
        raise error
    return value


def control_of(engine: Any) -> Control:
    """The control plane of a handle: an LLM, an AsyncLLM, a Ray actor, or a server's URL. One that is a control plane
    already (a trainer's integration made it) is taken as it is.

    Raises:
        InvalidInput: it is none of them.
    """
    if isinstance(engine, Control):
        return engine
    if isinstance(engine, str):
        if not engine.startswith(("http://", "https://")):
            raise InvalidInput(f"engine must be a URL like http://host:8000, got {engine!r}")
        return HttpControl(engine)
    if type(engine).__module__.startswith("ray."):
        return RayControl(engine)
    if asyncio.iscoroutinefunction(getattr(engine, "collective_rpc", None)):
        return AsyncControl(engine)
    if hasattr(engine, "llm_engine") or hasattr(engine, "collective_rpc"):
        return Control(engine)
    raise InvalidInput(
        f"engine must be a vllm.LLM, an LLMEngine, an AsyncLLM, a Ray actor or a URL, got {type(engine).__name__}"
    )


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
) -> tuple[list[BaseException | None], BaseException | None]:
    """Control calls of several replicas at the same time, and blocking work of our own beside them.

    Args:
        ended: told of each call that has ended.
        stop: asks the work, and so the calls, to end soon: when this is cancelled, which waits for them.

    Returns:
        an error of each call, and that of the work.
    """
    if not any(control.suspends for control in controls):
        return _in_threads(calls, work, ended)

    async def one(position: int) -> BaseException | None:
        try:
            control = controls[position]
            await (calls[position]() if control.suspends else asyncio.to_thread(drive, calls[position]()))
        except Exception as error:
            return error
        finally:
            ended(position)
        return None

    async def beside() -> BaseException | None:
        try:
            await asyncio.to_thread(on_this_device(work))
        except Exception as error:
            return error
        return None

    tasks = [asyncio.ensure_future(one(position)) for position in range(len(calls))]
    *errors, failure = await to_its_end(asyncio.gather(*tasks, beside()), stop)
    return errors, failure


async def side_by_side(
    controls: Sequence[Control], step: Callable[[_T], Coroutine[Any, Any, Any]], items: Sequence[_T]
) -> list[BaseException | None]:
    """A control call for each of several engines, at the same time; their errors. One engine's is made right here."""
    if len(items) > 1:
        return (await together(controls, [bind(step, item) for item in items]))[0]
    errors: list[BaseException | None] = []
    for item in items:
        try:
            await step(item)
            errors.append(None)
        except Exception as error:
            errors.append(error)
    return errors


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
    """The same in another thread, which begins with GPU 0."""
    device = torch.cuda.current_device() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def there() -> _T:
        if device is not None:
            torch.cuda.set_device(device)
        return work()

    return there


def _in_threads(
    calls: Sequence[Callable[[], Coroutine[Any, Any, None]]], work: Callable[[], None], ended: Callable[[int], object]
) -> tuple[list[BaseException | None], BaseException | None]:
    def one(position: int) -> BaseException | None:
        try:
            drive(calls[position]())
        except Exception as error:
            return error
        finally:
            ended(position)
        return None

    failure: BaseException | None = None
    with ThreadPoolExecutor(max(len(calls), 1)) as pool:
        futures = [pool.submit(on_this_device(partial(one, position))) for position in range(len(calls))]
        if calls:
            time.sleep(_SENT_S)
        try:
            work()
        except Exception as error:
            failure = error
    return [future.result() for future in futures], failure


def bind(method: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> Callable[[], Coroutine[Any, Any, None]]:
    return lambda: method(*args)
