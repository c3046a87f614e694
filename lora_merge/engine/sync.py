"""VllmSync: one call brings what is being trained into the engines that roll it out."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn

from ..errors import InvalidInput, MissingExtra, PushRefused
from ..shards.ranks import Ranks
from ..stream.buckets import BUCKET_BYTES
from ..stream.weights import MergedWeights
from .passes import MERGES, Passes
from .push import Pushes, check_pause
from .replica import SyncReport, check_handle
from .trainer import Trainer
from .vllm.adapter import ADAPTER_ID, ADAPTER_NAME
from .vllm.control import Control, control_of, drive
from .vllm.decorated import complaint

MODES = ("merged", "adapter")


class VllmSync(Pushes):
    """Keeps one or several vLLM engines at the policy that is being trained.

    Where torch.distributed is initialised, making one, `push` and `close` are collective over all ranks: every rank
    makes one of its model. Engines are any rank's: usually all handles are rank 0's and the others pass None, or each
    rank has an `LLM` of its own. Only the owner of a handle makes control calls; each worker gets its weights from the
    rank on its GPU, or from rank 0.

    Args:
        model: what is trained: a PEFT model, or any module; sharded by FSDP2, FSDP1 or ZeRO-3, or whole. Or Megatron's
            chunks.
        engine: a `vllm.LLM`, an `LLMEngine`, an `AsyncLLM`, a Ray actor around one, the URL of an api_server, or a list
            of these (replicas). Engines are best started with
            `weight_transfer_config=WeightTransferConfig(backend="lora_merge")`; one that was started without is taken
            unless it chose a layout that cannot be loaded again. None where other ranks hold all handles.
        mode: "merged" (the engine serves merged weights) or "adapter" (base and adapter apart, vLLM's LoRA path).
        merge: in merged mode, who adds the adapters to the base. "trainer": merged weights cross, written straight into
            engines of the same host. "engine": the base crosses once, then adapters alone; the engine's workers merge
            them into their own slices, with the bits of a merge in the trainer, and take them off again, exactly,
            before the next ones (2 bits an element and the adapters stay in the engine's memory for that; weights that
            vLLM lays out anew after loading are kept twice). "auto": the engine where some of its workers run on
            another host than every rank of the trainer, and nothing speaks against it; the report says who did.
        rounding: of merged weights, "nearest" or "stochastic" (seeded by the version).
        pause: what becomes of requests in flight: "keep" them (they go on with the new weights), "wait" for them, or
            "abort" them. A push that changes the mode waits where others keep.
        bucket_bytes: of each of two buffers. Tensors that are larger are cut.
        strategy: see `MergedWeights`.

    Raises:
        InvalidInput: an argument that does not fit.
        PushRefused: an engine that no push can reach, as far as can be told before the first one.
        MissingExtra: vLLM is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Any,
        *,
        mode: str = "merged",
        merge: str = "auto",
        rounding: str = "nearest",
        pause: str = "keep",
        bucket_bytes: int = BUCKET_BYTES,
        strategy: str | None = None,
    ) -> None:
        if merge not in MERGES:
            raise InvalidInput(f"merge must be one of {', '.join(MERGES)}, got {merge!r}")
        check_pause(pause)
        try:
            import vllm  # noqa: F401
        except ImportError as error:
            raise MissingExtra("VllmSync needs vLLM: pip install lora-merge[vllm]") from error
        _checked(mode)
        self._weights = MergedWeights(model, rounding=rounding, bucket_bytes=bucket_bytes, strategy=strategy)
        self._base = MergedWeights(model, bucket_bytes=bucket_bytes, adapters=False, strategy=strategy)
        engines = engine if isinstance(engine, list | tuple) else [] if engine is None else [engine]
        world = Ranks(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)
        with world.vote("VllmSync"):
            controls = [control_of(e) for e in engines]
        if not world.any(bool(controls)):
            raise InvalidInput("engine must be a handle or a list of them, on one rank at least; got none")
        trainer = Trainer(controls, world)
        with world.vote("VllmSync"):
            for index, control in enumerate(controls):
                check_handle(index, control)
        if told := complaint(model):
            warnings.warn(told, stacklevel=2)
        passes = Passes(trainer, self._weights, self._base, merge)
        super().__init__(trainer, passes, pause=pause, mode=mode, rounding=rounding)

    # What a user calls

    def push(self, *, mode: str | None = None, verify: bool = False) -> SyncReport:
        """Bring the model as it is now into every engine: base + adapter, once.

        Pauses generation, transfers, resets caches, resumes what was running. Everything that can be checked is
        checked before the first byte moves; a push that fails after that leaves its engine dirty, and the next
        merged push (or adapter push, which then brings the base too) heals it.

        Args:
            mode: for this and later pushes, unless this one is refused; default: as before. The same on every rank.
            verify: compare checksums of every tensor on both sides, and what lies in the engine where it can be read.

        Raises:
            PushRefused: something does not fit, or another push is under way; every engine is as before.
            PushFailed: it broke off half-way in some engines, which are dirty; names them. The others are valid.

            On every rank.
        """
        if any(control.suspends for control in self._trainer.controls):
            raise InvalidInput("an AsyncLLM has to be awaited: use `await apush()` in its event loop")
        return drive(self._push(mode, verify))

    async def apush(self, *, mode: str | None = None, verify: bool = False) -> SyncReport:
        """As `push`, in the event loop of an `AsyncLLM`; the loop keeps turning while buckets are filled."""
        return await self._push(mode, verify)

    def lora_request(self) -> Any:
        """What to pass to `generate` as `lora_request`: one constant request in adapter mode, None in merged mode."""
        if self._mode == "merged":
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest(ADAPTER_NAME, ADAPTER_ID, f"/{ADAPTER_NAME}/in-memory")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the (only) in-process `LLM`, with the right `lora_request`.

        Raises:
            PushRefused: as `check`.
        """
        controls = self._trainer.controls
        if len(controls) != 1 or type(controls[0]) is not Control or not hasattr(controls[0].handle, "generate"):
            raise InvalidInput("generate() is for one in-process LLM; pass lora_request() to other engines yourself")
        self.check()
        return controls[0].handle.generate(*args, lora_request=self.lora_request(), **kwargs)

    def check(self) -> None:
        """Whether the engines whose handles this rank holds still have what was pushed last; no collective.

        Raises:
            PushRefused: one of them does not: it is dirty, another trainer pushed to it, or it was never pushed to.
        """
        for state in self.states():
            if state != self._pushed:
                whose = " of another trainer" if state.trainer not in ("", self._trainer.name) else ""
                ours = (
                    "and nothing was pushed from here"
                    if self._pushed is None
                    else f"not the {self._pushed} of this one"
                )
                raise PushRefused(f"the engine holds {state}{whose}, {ours}; push() first")

    async def _push(self, mode: str | None, verify: bool) -> SyncReport:
        return await super()._push(None if mode is None else _checked(mode), verify)


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise InvalidInput(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    return mode
