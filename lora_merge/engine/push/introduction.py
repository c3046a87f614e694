"""How a push gets to know the engines: each says what it is and what it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import PushRefused
from ..control.base import WorkerFailed
from ..control.calls import bind, side_by_side, together
from ..control.http import NotReached, Unfit
from ..messages import WorkerInfo
from ..transport.liveness import error_text, host_id
from .channels import Trainer
from .replica import SILENT, Replica, check_apart, check_whole


async def hello(trainer: Trainer, work: Callable[[], None] | None = None, **message: Any) -> list[list[WorkerInfo]]:
    """Ask the engines whose handles are here what they are and what they hold.

    Args:
        work: of this rank's own, done meanwhile; it is done in any case.
    """
    introduced: dict[int, list[WorkerInfo]] = {}

    async def ask(index: int) -> None:
        control = trainer.controls[index]
        try:
            answers = await control.rpc("hello", **message)
        except (NotReached, Unfit) as error:
            raise PushRefused(f"engine {index}: {error}") from error
        except WorkerFailed as error:
            raise PushRefused(f"engine {index} cannot be pushed to: {error}") from error
        except Exception as error:
            if error_text(error).startswith(SILENT):
                raise PushRefused(f"engine {index} has died, start it anew: {error}") from error
            raise PushRefused(
                f"engine {index} does not answer as one of lora_merge's: {error}. If it does not know the method, "
                f"is lora-merge installed where its workers run, and does {control.plugins} allow it?"
            ) from error
        try:
            workers = [WorkerInfo.read(answer) for answer in answers]
        except PushRefused as error:
            raise PushRefused(f"engine {index}: {error}") from error
        here = [worker.pid for worker in workers if worker.host == host_id()]
        control.far = len(here) < len(workers)
        control.workers = [pid for pid in here if pid != os.getpid()]
        for worker in workers:
            worker.no_adapters, worker.no_media = control.adapters, control.media
            worker.no_versions = control.versions
        introduced[index] = workers

    controls = trainer.controls
    failure: BaseException | None = None
    if work is not None and all(control.elsewhere for control in controls):
        errors, failure = await together(controls, [bind(ask, index) for index in range(len(controls))], work)
    else:
        errors = await side_by_side(controls, ask, range(len(controls)))
        if work is not None:
            await trainer.blocking(work)
    for error in (*errors, failure):
        if error is not None:
            raise error
    return [introduced[index] for index in range(len(controls))]


def replicas_of(trainer: Trainer, everyone: Sequence[Sequence[list[WorkerInfo]]]) -> list[Replica]:
    """Number the engines of all ranks.

    Args:
        everyone: what each rank's engines answered to `hello`.

    Raises:
        PushRefused: an engine cannot be pushed to, has more than one handle, or lacks some.
    """
    replicas: list[Replica] = []
    for rank, introduced in enumerate(everyone):
        controls = trainer.controls if rank == trainer.world.rank else [None] * len(introduced)
        for control, workers in zip(controls, introduced, strict=True):
            replicas.append(Replica(len(replicas), control, workers))
    for replica in replicas:
        replica.check()
    check_apart(replicas)
    check_whole(replicas)
    return replicas
