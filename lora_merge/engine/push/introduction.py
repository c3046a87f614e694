"""How a push gets to know the engines: each says what it is and what it holds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...errors import PushRefused
from ..control.base import WorkerFailed
from ..control.calls import side_by_side, together
from ..control.http import NotReached, Unfit
from ..messages import WorkerInfo
from ..transport.liveness import error_text, host_id
from .channels import Trainer
from .replica import ONE_ENGINE, SILENT, Replica, check_apart, check_whole

_WITHOUT = ' (With lost="skip" pushes go on without it.)'


async def hello(
    trainer: Trainer,
    work: Callable[[], None] | None = None,
    *,
    lost: dict[int, str] | None = None,
    **message: Any,
) -> list[list[WorkerInfo]]:
    """Ask the engines whose handles are here what they are and what they hold.

    Args:
        work: of this rank's own, done meanwhile; it is done in any case.
        lost: gets why engines cannot be reached, by the position of their handle here. None: that is an error.

    Returns:
        each engine's workers, in the order of the handles; none of an engine that is lost.

    Raises:
        PushRefused: an engine cannot be reached, or is none of lora_merge's.
    """
    introduced: dict[int, list[WorkerInfo]] = {}

    async def ask(index: int) -> None:
        control = trainer.controls[index]
        try:
            answers = await control.rpc("hello", **message)
        except (NotReached, Unfit) as error:
            if lost is not None and isinstance(error, NotReached):
                lost[index] = str(error)
                return
            others = isinstance(error, NotReached) and len(trainer.controls) > 1
            raise PushRefused(f"engine {index}: {error}{_WITHOUT if others else ''}") from error
        except WorkerFailed as error:
            raise PushRefused(f"engine {index} cannot be pushed to: {error}") from error
        except Exception as error:
            if error_text(error).startswith(SILENT):
                if lost is not None:
                    lost[index] = f"it has died: {error}"
                    return
                raise PushRefused(f"engine {index} has died, start it anew: {error}") from error
            # `NotFirst`, as vLLM tells of it.
            if one := re.search(rf"number \d+ of {re.escape(ONE_ENGINE)}", str(error)):
                raise PushRefused(f"engine {index} is {one[0]}") from error
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
        control.chains = all(worker.chains for worker in workers)
        control.workers = [pid for pid in here if pid != os.getpid()]
        for worker in workers:
            worker.no_adapters = control.adapters or worker.no_adapters
            worker.no_media = control.media
            worker.no_versions = control.versions
        introduced[index] = workers

    controls = trainer.controls
    failure: BaseException | None = None
    if work is not None and all(control.elsewhere for control in controls):
        errors, failure = await together(controls, [partial(ask, index) for index in range(len(controls))], work)
    else:
        errors = await side_by_side(controls, ask, range(len(controls)))
        if work is not None:
            await trainer.blocking(work)
    for error in (*errors, failure):
        if error is not None:
            raise error
    return [introduced.get(index, []) for index in range(len(controls))]


def replicas_of(
    trainer: Trainer, everyone: Sequence[tuple[Sequence[list[WorkerInfo]], Mapping[int, str]]]
) -> tuple[list[Replica], dict[int, str]]:
    """Number the engines of all ranks. An engine that is lost keeps its number, and is no replica.

    Args:
        everyone: what each rank's engines answered to `hello`, and which of them are lost.

    Returns:
        the replicas, and why the others are lost, by their number.

    Raises:
        PushRefused: an engine cannot be pushed to, has more than one handle, or lacks some; or all are lost.
    """
    replicas, gone, index = list[Replica](), dict[int, str](), 0
    for rank, (introduced, lost) in enumerate(everyone):
        for at, workers in enumerate(introduced):
            if at in lost:
                gone[index] = lost[at]
            else:
                control = trainer.controls[at] if rank == trainer.world.rank else None
                replicas.append(Replica(index, control, workers))
            index += 1
    if not replicas:
        raise PushRefused(f"no engine can be reached: {_in_words(gone)}")
    for replica in replicas:
        replica.check()
    check_apart(replicas)
    try:
        check_whole(replicas)
    except PushRefused as error:
        if gone:
            raise PushRefused(f"{_in_words(gone)}; and without it the others are not whole: {error}") from error
        raise
    return replicas, gone


def _in_words(gone: Mapping[int, str]) -> str:
    return "; ".join(f"engine {index}: {why}" for index, why in gone.items())
