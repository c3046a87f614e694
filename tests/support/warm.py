"""Processes that have imported what takes longest before they begin: they come out of a server that did so once.

A process of vLLM's, or a rank of a trainer's, takes three to ten seconds of CPU to import what it needs, more than for
what a test asks of it, and tests start hundreds. As `spawn` does, such a process gets its parent's environment, working
folder, paths, standard output and error as they are when it starts, and imports this package and the tests itself.
Its parent is the server, in the eyes of the kernel: the server passes on the signal by which SGLang's processes tell
their parent that they failed. A process that ends runs no `atexit` functions.
"""

from __future__ import annotations

import io
import multiprocessing.context
import os
import signal
import sys
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing import forkserver, popen_forkserver, reduction, spawn, util
from typing import Any
from unittest import mock

METHOD = "warm"
"""What `multiprocessing.get_context` takes."""
_PARENT = "LORA_MERGE_TEST_PARENT"
"""The environment variable that tells a server whose it is."""
_IMPORTED = (
    "first_calls", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "transformers", "peft", "accelerate",
    "deepspeed", "sglang.srt.managers.scheduler", "sglang.srt.managers.detokenizer_manager", "vllm.entrypoints.llm",
    "vllm.v1.engine.core", "vllm.v1.engine.async_llm", "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
)  # fmt: skip
"""What the server imports of what its parent has imported."""


class _Server(forkserver.ForkServer):
    """One for this process and those that it starts so, beside Python's own, which others may want otherwise."""

    def ensure_running(self) -> None:
        if self._forkserver_pid is None:
            if self._forkserver_address is not None:
                return  # of the process that started this one
            there = {*sys.modules, *(["deepspeed"] if find_spec("deepspeed") else ())}  # which ranks alone import
            names = [name for name in _IMPORTED if name.partition(".")[0] in there]
            names += [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
            self.set_forkserver_preload([__name__, *names, "garbage"])
        # A server has the paths of its environment alone.
        instead = {"PYTHONPATH": os.pathsep.join(sys.path), _PARENT: str(os.getpid()), "LORA_MERGE": "0"}
        with mock.patch.dict(os.environ, instead):
            super().ensure_running()


class _Popen(popen_forkserver.Popen):
    """As its base, by this module's server, with the environment."""

    def _launch(self, process: Any) -> None:
        data = io.BytesIO()
        multiprocessing.context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process._name) | {"as here": _AsHere()}, data)
            reduction.dump(process, data)
        finally:
            multiprocessing.context.set_spawning_popen(None)
        self.sentinel, writing = _SERVER.connect_to_new_process(self._fds)
        # The child takes the end of this for the end of its parent.
        self.finalizer = util.Finalize(self, util.close_fds, (os.dup(writing), self.sentinel))
        with open(writing, "wb", closefd=True) as file:  # noqa: PTH123
            file.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Process(multiprocessing.context.ForkServerProcess):
    @staticmethod
    def _Popen(process: Any) -> _Popen:
        return _Popen(process)


class _Context(multiprocessing.context.ForkServerContext):
    _name = "spawn"  # as others see it
    Process = _Process


class _AsHere:
    """What a process is to have as its parent has it now: applied as it is read, before anything else is."""

    def __reduce__(self) -> Any:
        outputs = [reduction.DupFd(number) for number in (1, 2)]
        replaced = isinstance(multiprocessing.context._concrete_contexts["spawn"], _Context)
        return _apply, (dict(os.environ), outputs, os.getpgid(0), replaced)


def _apply(environment: dict[str, str], outputs: list[Any], group: int, replaced: bool) -> None:
    with suppress(PermissionError):  # a parent in another session
        os.setpgid(0, group)
    for number, output in enumerate(outputs, 1):
        there = output.detach()
        os.dup2(there, number)
        os.close(there)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    _SERVER._forkserver_address = forkserver._forkserver._forkserver_address
    _SERVER._forkserver_alive_fd = forkserver._forkserver._forkserver_alive_fd
    if replaced:
        instead_of_spawn()


def instead_of_spawn(warm: bool = True) -> None:
    """Start so whatever is to be spawned from now on, in this process and those that it starts; or no more."""
    multiprocessing.context._concrete_contexts["spawn"] = _CONTEXT if warm else _SPAWN


def server() -> int | None:
    """Return the server's process id; None where this process has not begun one."""
    return _SERVER._forkserver_pid


_SERVER, _CONTEXT, _SPAWN = _Server(), _Context(), multiprocessing.context._concrete_contexts["spawn"]
multiprocessing.context._concrete_contexts[METHOD] = _CONTEXT
if _PARENT in os.environ:
    _parent = int(os.environ[_PARENT])
    signal.signal(signal.SIGQUIT, lambda *_: os.kill(_parent, signal.SIGQUIT))
