"""Faults in SGLang's schedulers, and what there is to see in them: actions of `check_weights` for tests alone."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

PREFIX = "test:"
_MENDED: list[Callable[[], object]] = []


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from lora_merge.engine.sglang.internals import HOOKED

    HookRegistry.register(HOOKED, _check_weights, HookType.AROUND)


def _check_weights(original: Any, manager: Any, request: Any) -> Any:
    if not request.action.startswith(PREFIX):
        return original(manager, request)
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput

    name, *given = json.loads(request.action.removeprefix(PREFIX))
    return CheckWeightsReqOutput(success=True, message=json.dumps(_ACTIONS[name](manager, *given)))


def _fail(manager: Any, where: str, ranks: list[int], after: int = 0, dies: bool = False) -> str:
    """From now on `where` raises on these ranks, after it has worked `after` times: an operation of a worker, or one of
    `_where`; or two, with "+" between them. Or the scheduler `dies` there."""
    from lora_merge.engine.sglang import worker

    _mend(manager)
    if worker.SglangWorker(manager).rank not in ranks:
        return "well"
    for one in where.split("+"):
        _break(one, after, dies)
    return "broken"


def _break(where: str, after: int, dies: bool) -> None:
    from lora_merge.engine.sglang import worker

    count = itertools.count()

    def broken(works: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(count) >= after:
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise MemoryError(f"injected into {where}")
            return works(*args, **kwargs)

        return call

    if where in worker.OPERATIONS:
        works = worker.OPERATIONS[where]
        _MENDED.append(lambda: worker.OPERATIONS.update({where: works}))
        worker.OPERATIONS[where] = broken(works)
    else:
        owner, name = _where(where)
        works = getattr(owner, name)
        _MENDED.append(lambda: setattr(owner, name, works))
        setattr(owner, name, broken(works))


def _where(name: str) -> tuple[Any, str]:
    from sglang.srt.lora.lora_manager import LoRAManager

    from lora_merge.engine.worker.loader import Loader
    from lora_merge.engine.worker.merger import _Products
    from lora_merge.engine.worker.session import WorkerSession

    return {
        "bucket": (Loader, "load"),
        "finish": (Loader, "finish"),
        "checksums": (Loader, "arrived"),
        "connect": (WorkerSession, "connect"),
        "products": (_Products, "merge"),
        "load adapter": (LoRAManager, "load_lora_adapter_from_tensors"),
    }[name]


def _mend(manager: Any) -> str:
    while _MENDED:
        _MENDED.pop()()
    return "well"


class _Overlaid:
    """Something with some other attributes, and without some."""

    def __init__(self, of: Any, lacking: tuple[str, ...] = (), **others: Any) -> None:
        self._of, self._lacking = of, lacking
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        if name in self._lacking:
            raise AttributeError(name)
        return getattr(self._of, name)


def _pretend(manager: Any, name: str, value: Any) -> str:
    """From now on the engine is judged as if it had another setting: an argument, or `model_config.NAME`."""
    from lora_merge.engine.sglang import worker

    _mend(manager)
    works = worker.unfit
    owner, _, name = name.rpartition(".")
    owner = owner or "server_args"

    def instead(manager: Any) -> str:
        settings = _Overlaid(getattr(manager.scheduler, owner), **{name: value})
        return works(_Overlaid(manager, scheduler=_Overlaid(manager.scheduler, **{owner: settings})))

    _MENDED.append(lambda: setattr(worker, "unfit", works))
    worker.unfit = instead
    return "pretends"


def _draft(manager: Any, algorithm: str) -> str:
    """From now on the engine is judged as if it drafted tokens."""
    from lora_merge.engine.sglang import worker

    _mend(manager)
    works = worker.unfit

    def instead(manager: Any) -> str:
        settings = _Overlaid(manager.scheduler.server_args, speculative_algorithm=algorithm)
        return works(
            _Overlaid(manager, draft_worker=object(), scheduler=_Overlaid(manager.scheduler, server_args=settings))
        )

    _MENDED.append(lambda: setattr(worker, "unfit", works))
    worker.unfit = instead
    return "pretends"


def _lay_anew(manager: Any, kind: str, where: str, name: str) -> str:
    """From now on layers have an attribute by which SGLang says that it laid their weights anew.

    Args:
        kind: of the layers' `quant_method`.
        where: "layer" or "method": which of the two has it.
        name: of the attribute.
    """
    found = 0
    for module in manager.tp_worker.model_runner.model.modules():
        method = getattr(module, "quant_method", None)
        if type(method).__name__ == kind:
            owner = module if where == "layer" else method
            had = getattr(owner, name, None)
            setattr(owner, name, True)
            _MENDED.append(lambda owner=owner, had=had: setattr(owner, name, had))
            found += 1
    return f"{found} layers"


def _shuffle(manager: Any) -> str:
    """From now on SGLang's layers say that their experts are shuffled for aiter."""
    from sglang.srt.layers.quantization import unquant

    had, unquant._use_aiter = unquant._use_aiter, True
    _MENDED.append(lambda: setattr(unquant, "_use_aiter", had))
    return "pretends"


def _derive(manager: Any) -> str:
    """From now on the model has a method by which SGLang makes something of its weights after loading."""
    model = manager.tp_worker.model_runner.model
    model.post_load_weights = lambda: None
    _MENDED.append(lambda: delattr(model, "post_load_weights"))
    return "pretends"


def _update(manager: Any, name: str) -> str:
    """From now on the engine is judged as if an update of its own were under way, which it knows by this attribute."""
    from lora_merge.engine.sglang import worker

    _mend(manager)
    works = worker.unfit
    _MENDED.append(lambda: setattr(worker, "unfit", works))
    worker.unfit = lambda manager: works(_Overlaid(manager, **{name: True}))
    return "pretends"


def _lack(manager: Any, *names: str) -> str:
    """From now on the engine is judged as if its SGLang did not have these attributes of the manager."""
    from lora_merge.engine.sglang import worker

    _mend(manager)
    works = worker.unfit
    _MENDED.append(lambda: setattr(worker, "unfit", works))
    worker.unfit = lambda manager: works(_Overlaid(manager, lacking=names))
    return "pretends"


def _slow(manager: Any, seconds: float) -> str:
    """From now on every step takes that much longer."""
    scheduler = manager.scheduler
    vars(scheduler).pop("run_batch", None)
    run_batch = scheduler.run_batch

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return run_batch(*args, **kwargs)

    if seconds:
        scheduler.run_batch = late
    return "slow"


def _digest(manager: Any) -> str:
    """Of the bits of all parameters."""
    import torch

    found = hashlib.sha256()
    for _, parameter in sorted(manager.tp_worker.model_runner.model.named_parameters()):
        found.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _save(manager: Any, path: str) -> str:
    """All parameters, to a file."""
    import torch

    parameters = manager.tp_worker.model_runner.model.named_parameters()
    torch.save({name: parameter.detach().cpu() for name, parameter in parameters}, path)
    return "saved"


def _captured(manager: Any) -> list[int]:
    """Batch sizes of which the steps of requests are captured as CUDA graphs."""
    runner = manager.tp_worker.model_runner.decode_cuda_graph_runner
    return [int(size) for size in getattr(runner, "capture_bs", ())]


def _unmapped(manager: Any) -> list[str]:
    """Which memory the memory saver has unmapped, by its tags."""
    return sorted(manager.offload_tags)


def _saver(manager: Any) -> str:
    """From now on a memory saver throws the weights away, as that of GPUs does, and what a layer holds beside them: a
    number by which it multiplies its output."""
    import torch

    model = manager.tp_worker.model_runner.model
    layer, works = model.model.layers[0].mlp, manager.memory_saver_adapter
    layer.held = torch.full((1,), 1.0)
    hook = layer.register_forward_hook(lambda layer, given, output: output * layer.held)

    def pause(tag: str) -> None:
        for tensor in (*model.parameters(), *model.buffers(), layer.held) if tag == "weights" else ():
            tensor.data.fill_(0.25)

    def mend() -> None:
        hook.remove()
        del layer.held
        manager.memory_saver_adapter = works

    _MENDED.append(mend)
    manager.memory_saver_adapter = _Overlaid(works, enabled=True, pause=pause)
    return "throws away"


def _limit(manager: Any, queued: int) -> str:
    """From now on so many requests may be queued."""
    scheduler = manager.scheduler
    _MENDED.append(lambda: setattr(scheduler, "max_queued_requests", None))
    scheduler.max_queued_requests = queued
    return "limited"


def _pulls(manager: Any) -> int:
    """How many offers of a trainer's memory are mapped."""
    from lora_merge.engine.sglang import worker

    return len(worker.SglangWorker(manager).session().pulls)


def _process(manager: Any) -> int:
    return os.getpid()


_ACTIONS: dict[str, Callable[..., Any]] = {
    "fail": _fail,
    "mend": _mend,
    "pretend": _pretend,
    "draft": _draft,
    "update": _update,
    "lay anew": _lay_anew,
    "shuffle": _shuffle,
    "derive": _derive,
    "lack": _lack,
    "slow": _slow,
    "process": _process,
    "unmapped": _unmapped,
    "saver": _saver,
    "limit": _limit,
    "pulls": _pulls,
    "save": _save,
    "captured": _captured,
    "digest": _digest,
}
