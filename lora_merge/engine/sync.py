"""The base class of `VllmSync` and `SglangSync`: all that users call on both."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, ClassVar, Self

import torch.distributed as dist
from torch import nn

from ..choices import Cache, Lost, Merge, Mode, Pause, Rounding, Strategy, check_choice
from ..errors import InvalidInput, PushFailed, PushRefused
from ..models.pausing import training_of
from ..shards.ranks import Ranks
from ..stream.buckets import BUCKET_BYTES
from ..stream.weights import MergedWeights
from .configs import computing, config_of
from .control.base import Control
from .control.calls import drive
from .push.channels import Trainer
from .push.planner import PushPlanner
from .push.replica import SyncReport, check_handle
from .push.sharing import Sharing, check_shareable, check_shared_arguments
from .push.tenants import TenantPlanner
from .push.versions import VersionPusher
from .tenants import Tenants
from .transport.lent import LENT


class EngineSync(VersionPusher):
    """Pushes the model that is being trained into one or several engines of one kind; `VllmSync` and `SglangSync`
    derive from it, and document the arguments.

    Attributes:
        awaited: description of a handle whose calls have to be awaited, for messages.
        unshared: why no trainer can share weights with such engines, in words; "" where one can.
        without_tenants: why such engines serve no tenants, in words; "" where they do.
        unkept: why such engines cannot keep their KV cache over a push, in words; "" where they can.
    """

    awaited: ClassVar[str]
    unshared: ClassVar[str] = ""
    without_tenants: ClassVar[str] = ""
    unkept: ClassVar[str] = ""

    def __init__(
        self,
        model: nn.Module,
        engine: Any,
        *,
        mode: Mode = "merged",
        merge: Merge = "auto",
        rounding: Rounding = "nearest",
        pause: Pause = "keep",
        cache: Cache = "reset",
        bucket_bytes: int = BUCKET_BYTES,
        strategy: Strategy | None = None,
        share: bool = False,
        adapter_names: Sequence[str] | None = None,
        tenants: Sequence[str] | None = None,
        lost: Lost = "refuse",
    ) -> None:
        for name, value, known in (
            ("merge", merge, Merge),
            ("pause", pause, Pause),
            ("mode", mode, Mode),
            ("cache", cache, Cache),
            ("lost", lost, Lost),
        ):
            check_choice(name, value, known)
        if cache == "keep" and self.unkept:
            raise InvalidInput(f"cache='keep' is for vLLM: {self.unkept}. Leave cache out")
        _check_kept(cache, mode)
        if cache == "keep" and share:
            raise InvalidInput(
                "share=True lets the trainer write to the engine's weights between two pushes, so which weights "
                "computed a cached block is unknown, and none can be kept: leave out cache='keep', or share"
            )
        engines = engine if isinstance(engine, list | tuple) else [] if engine is None else [engine]
        self._require(engines)
        self._tenants = None if tenants is None else self._tenants_of(model, tenants, mode, share, adapter_names, lost)
        if self._tenants is not None:
            adapter_names = self._tenants.order[:1]
        self._weights = MergedWeights(
            model, rounding=rounding, bucket_bytes=bucket_bytes, strategy=strategy, adapter_names=adapter_names
        )
        self._base = self._weights.beside(adapters=False)
        self._base.strategy = strategy
        if share and adapter_names is not None:
            raise InvalidInput(
                f"share=True got adapter_names={list(adapter_names)}: what is shared holds the adapters that are "
                "trained (set_adapter); leave adapter_names out"
            )
        world = Ranks(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
        with world.vote(type(self).__name__):
            controls = [self._control_of(e) for e in engines]
        if not world.any(bool(controls)):
            raise InvalidInput("engine must be a handle or a list of them, on one rank at least; got none")
        trainer = Trainer(controls, world)
        with world.vote(type(self).__name__):
            for index, control in enumerate(controls):
                check_handle(index, control, controls[:index])
        if complaint := self._complaint(model):
            warnings.warn(complaint, stacklevel=3)
        if self._tenants is None:
            planner = PushPlanner(trainer, self._weights, self._base, merge)
        else:
            planner = TenantPlanner(trainer, self._weights, self._base, merge, self._tenants)
        super().__init__(
            trainer,
            planner,
            pause=pause,
            cache=cache,
            mode=mode,
            rounding=rounding,
            computing=partial(computing, config_of(model)),
            lost=lost,
        )
        if share:
            with world.vote(type(self).__name__):
                check_shared_arguments(model, controls, world.size, merge, mode, self.unshared)
            drive(self._share(model, planner))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied or pickled, as `copy` and `pickle` ask for it."""
        name = type(self).__name__
        raise InvalidInput(
            f"a {name} cannot be copied or pickled: it holds a handle of its engine and a record of what was pushed. "
            f"Copy the model alone; where another {name} is needed, make it there from model and engine"
        )

    @staticmethod
    def _control_of(engine: Any) -> Control:
        """Make the control plane for a handle."""
        raise NotImplementedError

    def _require(self, engines: Sequence[Any]) -> None:
        """Raise `MissingExtra` if a package that some of these handles needs is not installed."""

    def _complaint(self, model: nn.Module) -> str:
        """Return what to warn of when this model is trained beside such engines; "" for nothing."""
        return ""

    # What a user calls

    def __enter__(self) -> Self:
        """Begin a block at whose end `close` is called; for an `AsyncLLM` write `async with`."""
        if any(control.suspends for control in self._trainer.controls):
            raise InvalidInput(f"{self.awaited} has to be awaited: write `async with {type(self).__name__}(...)`")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        """Begin a block at whose end `aclose` is awaited."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def push(
        self, *, mode: Mode | None = None, keep: int | None = None, verify: bool = False, hottest: str | None = None
    ) -> SyncReport:
        """Bring the model as it is now into every engine.

            report = sync.push()

        Checks everything, pauses generation, transfers, resets caches, resumes what was running. Collective over the
        trainer's ranks; errors are raised on every rank. After `PushFailed` the next push heals dirty engines.

        Args:
            mode: "merged" or "adapter" for this and later pushes, the same on every rank; default: as before.
            keep: in adapter mode, for this and later pushes, the same on every rank: bring the adapter as a new version
                beside those before it, and keep the last so many. Nothing is paused, no cache is reset, and requests in
                flight end on the version that they began with. If one engine fails, all answer with the version before.
                0 (at first): one adapter, whose place each push takes.
            verify: also compare checksums of every tensor on both sides, and of what lies in the engine where that can
                be read; a base that stays is looked at whole. Slow: for tests.
            hottest: of `tenants`: the one that this and later pushes merge, the same on every rank; default: as before.

        Returns:
            what was done: version, bytes, seconds by phase, transports.

        Raises:
            PushRefused: something does not fit, or another push is under way; every engine is as before.
            PushFailed: the push broke off half-way; names the engines that are dirty. The others are valid.
            InvalidInput: a mode that is none, an engine that has to be awaited (use `apush`), or a closed object.
            UnsupportedAdapter, AlreadyMerged: the model cannot be merged, as for `MergedWeights`; every engine is as
                before.
        """
        if any(control.suspends for control in self._trainer.controls):
            raise InvalidInput(f"{self.awaited} has to be awaited: use `await apush()` in its event loop")
        return drive(self.apush(mode=mode, keep=keep, verify=verify, hottest=hottest))

    async def apush(
        self, *, mode: Mode | None = None, keep: int | None = None, verify: bool = False, hottest: str | None = None
    ) -> SyncReport:
        """Bring the model as it is now into every engine, from the event loop of an asynchronous handle; see `push`.

            report = await sync.apush()

        The loop keeps running meanwhile.
        """
        tenants = self._tenants
        if tenants is None:
            if hottest is not None:
                raise InvalidInput(f"hottest={hottest!r} names one of tenants, and this {type(self).__name__} has none")
            return await self._push(mode, verify, keep=keep)
        tenants.check_model()
        if hottest is not None:
            tenants.check(hottest, "hottest")
        if mode not in (None, "merged"):
            raise InvalidInput(f"tenants are served beside merged weights, so mode must be 'merged', got {mode!r}")
        return await self._push(mode, verify, partial(tenants.pushing, hottest, self._weights), keep)

    def check(self) -> None:
        """Check that the engines whose handles this rank holds still hold what was pushed last. Not collective.

            sync.check()

        Raises:
            PushRefused: an engine is dirty, another trainer has pushed to it, or nothing was pushed yet.
        """
        for index, state in enumerate(self.states()):
            if state != self._pushed:
                whose = " of another trainer" if state.trainer not in ("", self._trainer.name) else ""
                ours = (
                    "and nothing was pushed from here"
                    if self._pushed is None
                    else f"not the {self._pushed} of this one"
                )
                which = "the engine" if len(self._trainer.controls) == 1 else f"engine {index}"
                raise PushRefused(f"{which} holds {state}{whose}, {ours}; push() first")

    async def _share(self, model: nn.Module, planner: PushPlanner) -> None:
        """Let the model's base weights lie in this rank's engine. Collective."""
        world, replicas = self._trainer.world, await self._introduce()
        own = next(replica for replica in replicas if replica.control is not None)
        slept, lent = own.asleep, None
        try:
            with world.vote(type(self).__name__):
                check_shareable(own)
            if slept:
                await own.handle.wake("weights")  # the KV cache stays as it is
                replicas = await self._introduce()
            replaced = "has thrown its weights away (sleep at level 2)" if slept > 1 else ""
            if own.state.kind != "nothing":
                replaced = f"holds {own.state}"
            writer = await planner.base(replicas)
            await self._sequence.tell(own, "lend", digest=writer.digest)
            lent = LENT.pop(own.workers[0].name)
            with world.vote(type(self).__name__):
                self.sharing = Sharing(model, writer, lent, self._weights.rounding, replaced=replaced)
                self._guard(own.handle, self.sharing)
        except BaseException:
            sharing, self.sharing = self.sharing, None
            if sharing is not None:
                sharing.close()
            if lent is not None:
                lent.loan.end()
            if slept:
                await own.handle.sleep(slept)
            raise
        finally:
            planner.release()
            await self._let_go()

    def _guard(self, control: Control, sharing: Sharing) -> None:
        """Refuse calls that would take the weights from the engine while a trainer shares them."""

    def _tenants_of(
        self,
        model: nn.Module,
        names: Sequence[str],
        mode: str,
        share: bool,
        adapter_names: Sequence[str] | None,
        lost: str,
    ) -> Tenants:
        """Return the tenants of an argument, or raise `InvalidInput`."""
        if self.without_tenants:
            raise InvalidInput(f"tenants={names!r}: {self.without_tenants}")
        if adapter_names is not None:
            raise InvalidInput("tenants are adapters each by itself, adapter_names a sum of some: give one of both")
        if share:
            raise InvalidInput("share=True has the model train on the merged weights, which are one tenant's: leave it")
        if mode != "merged":
            raise InvalidInput(f"tenants are served beside merged weights, so mode must be 'merged', got {mode!r}")
        if lost != "refuse":
            raise InvalidInput(
                f"lost={lost!r} leaves an engine with the tenant that was merged before, and its requests name no "
                "adapter, which the next one's may not either: leave lost out with tenants"
            )
        return Tenants(names, model)

    async def _push(
        self,
        mode: str | None,
        verify: bool,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
        keep: int | None = None,
    ) -> SyncReport:
        mode = self._mode if mode is None else mode
        check_choice("mode", mode, Mode)
        before, pushed = self._keep, self._pushed
        self._keep = self._checked_keep(mode, keep)
        try:
            _check_kept(self._sequence.cache, mode)
            _check_served(self._weights, mode)
            if self.sharing is not None:
                self.sharing.lay_again()
            report = await super()._push(mode, verify, within)
        except PushFailed:
            raise
        except BaseException:  # also an interrupt, which may come when all engines have what is new
            if self._pushed is pushed:
                self._keep = before
            raise
        if self.sharing is not None:
            self.sharing.pushed()
        return report

    def _checked_keep(self, mode: str, keep: int | None) -> int:
        """Return how many versions are kept from now on."""
        if keep is None:
            return self._keep
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 0:
            raise InvalidInput(f"keep must be a number of versions, or 0 for none beside the newest, got {keep!r}")
        if keep and mode != "adapter":
            raise InvalidInput(
                f"keep={keep} is for mode='adapter', where engines keep versions of the adapter beside the base; got "
                f"mode={mode!r}"
            )
        return keep


def _check_kept(cache: Cache, mode: str) -> None:
    """Raise `InvalidInput` if what is pushed in a mode cannot leave a KV cache as it is."""
    if cache == "keep" and mode != "merged":
        raise InvalidInput(
            f"cache='keep' is for merged weights, got mode={mode!r}, where requests carry their adapter: push with "
            'mode="merged", or leave cache out'
        )


def _check_served(weights: MergedWeights, mode: str) -> None:
    """Raise `InvalidInput` if a model is trained on merged weights, and the push would serve another policy."""
    training, rounding = training_of(weights.model), weights.rounding
    if training is not None and rounding == "stochastic" and weights.strategy is not None:
        raise InvalidInput(
            "train_merged(model, rounding='stochastic') has drawn the weights, and "
            f"strategy={weights.strategy!r} would draw others: leave strategy out"
        )
    if training is not None and (mode, rounding) != ("merged", training.rounding):
        raise InvalidInput(
            f"train_merged(model) trains the policy that mode='merged' and rounding={training.rounding!r} serve, and "
            f"this would serve another one: mode={mode!r}, rounding={rounding!r}. Change these, or close() the training"
        )
    if training is not None and weights.adapter_names is not None:
        raise InvalidInput(
            "train_merged(model) trains the policy of the adapters that act, and "
            f"adapter_names={list(weights.adapter_names)} would serve another one: leave adapter_names out, or close() "
            "the training"
        )
