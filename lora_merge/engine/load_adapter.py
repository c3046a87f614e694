"""An adapter from a folder into running engines, onto the checkpoint that they were started from, and off it again."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..choices import Cache, Pause
from ..errors import InvalidInput, PushRefused
from ..kernels.checks import check_device
from ..models.peft.folder import needs_values, notes_of, read_folder
from ..shards.ranks import Ranks
from ..stream.bucket_writer import BucketWriter
from ..stream.buckets import dtype_of
from ..stream.weights import MergedWeights
from .configs import computing, config_of
from .control.base import Control
from .control.calls import drive
from .handles import control_of
from .payload.base import LocalOp
from .payload.update import converted
from .push.channels import Trainer
from .push.compatibility import CompatibilityCheck
from .push.introduction import hello
from .push.negotiators import UpdateNegotiator
from .push.planner import Planner, Transfer
from .push.pusher import Pusher
from .push.replica import Replica, SyncReport, check_handle, engines_of
from .push.warn import warn_of_differences
from .stamps import difference, stamps
from .state import OWN, State
from .transport.routing import Route

_HEALING = "load it again, which reads the engine's own checkpoint again; where that is refused, start the engine anew"
_READ = (".json", ".safetensors", ".bin", ".pt")


class LoadPlanner(Planner):
    """Plans the transfers of a load.

    Args:
        trainer: this process, with the engines.
        folder, base: see `read_folder`.
        name: under which the engine serves it.
        device: on which buckets are filled.
        stages: whether engines receive it while they generate, where their handles allow it.
        trained_on: samples of the base that it was trained on, which the engines' checkpoint has to equal
            (`samples_of`); {} for none.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: Path,
        base: str | Path | None,
        name: str,
        device: torch.device,
        *,
        stages: bool = False,
        trained_on: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        self._trainer, self._folder, self._base, self._name, self._device = trainer, folder, base, name, device
        self._stages, self._trained_on = stages, trained_on
        self._streams: list[MergedWeights | UpdateNegotiator] = []

    def release(self) -> None:
        for stream in self._streams:
            stream.release()

    async def __call__(
        self, replicas: Sequence[Replica], report: SyncReport, verify: bool, read: BucketWriter | None
    ) -> list[Transfer]:
        for replica in replicas:
            if why := _not_loadable(replica):
                raise PushRefused(f"engine {replica.index} {why}")
        dtypes = {worker.dtype for replica in replicas for worker in replica.workers}
        if len(dtypes) > 1:
            raise PushRefused(
                f"the engines compute in {' and '.join(sorted(dtypes))}: load the adapter into each by itself"
            )
        await self._check_base(replicas)
        # Read the adapter, and find out what it changes in the base.
        files = stamps(_files(self._folder))
        model = await self._trainer.blocking(lambda: _read(self._folder, self._base, dtype_of(dtypes.pop())))
        if differs := difference(files, stamps(_files(self._folder))):
            raise PushRefused(
                f"{self._folder} was written to while it was read, so that its tensors may be of two adapters: "
                f"{differs}. Load it when it is saved"
            )
        report.differs = warn_of_differences(replicas, computing(config_of(model)), set())
        weights, bare = MergedWeights(model), MergedWeights(model, adapters=False)
        negotiate = UpdateNegotiator(self._trainer, weights, trains=False)
        self._streams = [weights, bare, negotiate]
        try:
            check = CompatibilityCheck(self._trainer)
            base = await check(bare, replicas)
        except PushRefused as error:
            raise PushRefused(
                f"{self._folder}: the adapter's base is another model than the engine serves, or the engine cannot be "
                f"pushed to: {error}"
            ) from error
        update = await negotiate(bare, base, replicas, check.recipients())
        update.device = self._device
        update.staged = self._stages and all(control.beats for control in self._trainer.controls)
        report.merge = "engine"
        report.left_out = tuple(sorted(bare.left_out))
        # Engines that still hold their checkpoint take the update at once; others read the checkpoint again before.
        # All workers are asked, as what they keep of it may have been written to since.
        whole = [replica for replica in replicas if replica.state.kind != "dirty"]
        answers = await self._trainer.ask(
            whole, "adopt_checkpoint", trainer=self._trainer.name, digest=base.digest, update=update.digest
        )
        kept = {index for index, workers in answers.items() if not any(answer["lost"] for answer in workers)}
        gone = {replica.index for replica in replicas}.difference(kept)
        engines = [engine for engine in engines_of(replicas) if any(one.index in gone for one in engine)]
        lost = [replica for engine in engines for replica in engine]
        before, after = (
            State(kind, report.version, OWN, trainer=self._trainer.name, adapter=name)
            for kind, name in (("base", ""), ("merged", self._name))
        )
        message = {"digest": base.digest, "update": update.digest, "state": before.to_json()}
        reload = Transfer(before, LocalOp("reload_checkpoint", message, writes=True), lost)
        return [*([reload] if lost else []), Transfer(after, update, replicas, Route.of_buckets(update))]

    async def _check_base(self, replicas: Sequence[Replica]) -> None:
        """Raise `PushRefused` unless the engines' checkpoint is the base that the adapter was trained on."""
        if not self._trained_on:
            return
        answers = await self._trainer.ask(replicas, "compare_checkpoint", samples=self._trained_on)
        for index, workers in answers.items():
            if differs := next((answer["differs"] for answer in workers if answer["differs"]), ""):
                raise PushRefused(
                    f"engine {index} was started from another model than {self._name} was trained on: {differs}. Start "
                    "it on the checkpoint that the trainer has loaded"
                )


class UnloadPlanner(Planner):
    """Plans the transfer of an unload.

    Args:
        trainer: this process, with the engines.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def __call__(
        self, replicas: Sequence[Replica], report: SyncReport, verify: bool, read: BucketWriter | None
    ) -> list[Transfer]:
        for replica in replicas:
            if why := _not_unloadable(replica):
                raise PushRefused(f"engine {replica.index} holds {replica.state}{why}")
        report.merge = "engine"
        state = State("base", report.version, OWN, trainer=self._trainer.name)
        return [Transfer(state, LocalOp("unload", {}, writes=False, merges=True), replicas)]


def _not_loadable(replica: Replica) -> str:
    """Return why nothing can be loaded into an engine, and what to do; "" where it can."""
    if replica.state.kind not in ("nothing", "dirty") and replica.state.base != OWN:
        return (
            f"holds {replica.state}, which a trainer pushed over the checkpoint that it was started from, and an "
            "adapter is loaded onto that: push it from a trainer, or start the engine anew"
        )
    if layer := next((worker.quantised for worker in replica.workers if worker.quantised), ""):
        return (
            f"was started on a checkpoint that is quantised ({layer}), and an adapter is merged onto what that was "
            "quantised from, which the engine does not hold: push from a trainer that does (VllmSync), or start the "
            "engine on the unquantised checkpoint and let vLLM quantise it"
        )
    return ""


def _not_unloadable(replica: Replica) -> str:
    """Return why nothing can be unloaded from an engine, and what to do; "" where it can."""
    state = replica.state
    if state.kind == "dirty":
        return ": load an adapter, which reads the engine's own checkpoint again, or start the engine anew"
    if state.kind == "nothing" or (state.kind == "base" and state.base == OWN):
        return ": no adapter is loaded, there is nothing to unload"
    if state.base != OWN:
        return (
            ", which a trainer pushed over the checkpoint that it was started from: push from there without the "
            "adapter (model.disable_adapter()), or start the engine anew"
        )
    if any(worker.base != OWN for worker in replica.workers):
        return ", and cannot take it off any more: load the adapter again, which reads its checkpoint, and unload then"
    return ""


def _files(folder: Path) -> list[Path]:
    """Return the files that an adapter is read from."""
    return [path for path in folder.iterdir() if path.suffix in _READ] if folder.is_dir() else []


def _read(folder: Path, base: str | Path | None, dtype: torch.dtype) -> nn.Module:
    """Read the adapter; with the values of its base where what it adds depends on them."""
    model = None if needs_values(folder) else read_folder(folder, base, dtype)
    if model is None or converted(MergedWeights(model).bucket_writer()):
        model = read_folder(folder, base, dtype, values=True)
    for note in notes_of(model):
        warnings.warn(note, stacklevel=2)
    return model


def _controls_of(engine: Any) -> list[Control]:
    engines = engine if isinstance(engine, list | tuple) else [engine]
    if not engines:
        raise InvalidInput("engine must be a handle or a list of them, got none")
    controls = [control_of(one) for one in engines]
    for control in controls:
        if control.folders:
            raise InvalidInput(f"engine must be one of vLLM's, got one of {control.name}'s, {control.folders}")
    return controls


def _trainer_of(engine: Any) -> Trainer:
    """Return this process alone as the trainer, whatever other ranks there are."""
    controls = _controls_of(engine)
    for index, control in enumerate(controls):
        check_handle(index, control, controls[:index])
    return Trainer(controls, Ranks())


class AdapterLoader:
    """Loads one adapter after another into an engine, which receives each while it generates.

    Args:
        engine: as for `serve.load_adapter`, but none that has to be awaited.
        pause, cache: as there.
        device: from which adapters are sent.

    Raises:
        InvalidInput: an argument does not fit.
    """

    def __init__(
        self, engine: Any, *, pause: Pause = "keep", cache: Cache = "reset", device: str | torch.device = "cpu"
    ) -> None:
        check_blocking(engine)
        self._trainer, self._device = _trainer_of(engine), check_device(device)
        self._pusher = Pusher(self._trainer, Planner(), pause=pause, cache=cache, mode="merged", healing=_HEALING)

    def load(
        self, folder: Path, *, base: str | Path | None, name: str, trained_on: Mapping[str, Mapping[str, str]]
    ) -> SyncReport:
        """Load an adapter in the place of the one before; raises what `serve.load_adapter` does.

        Args:
            folder, base, name: as there.
            trained_on: see `LoadPlanner`.
        """
        self._pusher._planner = LoadPlanner(
            self._trainer, folder, base, name, self._device, stages=True, trained_on=trained_on
        )
        return drive(self._pusher._push(None, False))

    def state(self) -> State:
        """Return what the engine holds now; raise `PushRefused` if it does not answer, or sleeps."""
        (workers,) = drive(hello(self._trainer))
        if any(worker.asleep for worker in workers):
            raise PushRefused("the engine sleeps, and a load would wake it: wake it up first")
        return Replica(0, None, workers).state

    def close(self) -> None:
        """Free buffers."""
        self._pusher.close()


async def load(
    engine: Any,
    folder: str | Path,
    *,
    base: str | Path | None,
    name: str | None,
    device: str | torch.device,
    pause: Pause,
    cache: Cache,
    verify: bool,
) -> SyncReport:
    """Load an adapter; see `serve.load_adapter`."""
    trainer, folder = _trainer_of(engine), Path(folder)
    name = folder.resolve().name if name is None else name
    planner = LoadPlanner(trainer, folder, base, name, check_device(device))
    return await _push(Pusher(trainer, planner, pause=pause, cache=cache, mode="merged", healing=_HEALING), verify)


async def unload(engine: Any, *, pause: Pause) -> SyncReport:
    """Unload the adapter; see `serve.unload_adapter`."""
    trainer = _trainer_of(engine)
    return await _push(Pusher(trainer, UnloadPlanner(trainer), pause=pause, mode="base", healing=_HEALING), False)


async def _push(pusher: Pusher, verify: bool) -> SyncReport:
    try:
        return await pusher._push(None, verify)
    finally:
        await pusher.aclose()


def check_blocking(engine: Any) -> None:
    """Raise `InvalidInput` for an engine whose calls have to be awaited."""
    if any(control.suspends for control in _controls_of(engine)):
        raise InvalidInput("an AsyncLLM has to be awaited: use aload_adapter() and aunload_adapter() in its event loop")
