"""The stream of merged weights from an engine of verl's to its rollout, checked before the first, and its report."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor

from ...engine.push.replica import SyncReport
from ...engine.vllm.names import BACKEND
from ...engine.vllm.sync import VllmSync
from ...errors import InvalidInput, LoraMergeError
from ...stream.buckets import dtype_of
from ...stream.weights import MergedWeights
from ..compat import TrainerRefused, off
from ..metrics import Counted, both_float32
from ..options import SWITCH, Options
from ..tied import check_tied

FLAG = "actor_rollout_ref.model.lora.merge=True"
CONFIGURED = f"actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config={{backend:{BACKEND}}}"
_TRANSPORT = "verl's rollout"

logger = logging.getLogger("lora_merge.verl")
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


class Stream:
    """The policy as a stream of `(name, tensor)` for verl's transports, again and again; its plans are kept.

    Args:
        model: what is trained, wrapped as verl wraps it; or Megatron's chunks.
        rank: of this process; the first one logs.
        dtype: of the stream, unless LORA_MERGE_DTYPE says otherwise; None: as the weights are.
        trains: whether the engine can train on merged weights.

    Raises:
        InvalidInput: an environment variable that does not fit.
    """

    def __init__(
        self, model: Any, rank: int, dtype: torch.dtype | None = torch.bfloat16, *, trains: bool = False
    ) -> None:
        self.options = Options.from_environment(trains=trains, merges=True)
        if self.options.mode != "merged":
            raise TrainerRefused(
                f"{SWITCH}_MODE={self.options.mode} does not go with {FLAG}: actor_rollout_ref.model.lora.merge=False "
                "is verl's own way of sending adapters alone"
            )
        self.dtype = _dtype(dtype)
        self.weights = MergedWeights(model, dtype=self.dtype, rounding=self.options.rounding)
        self.report: SyncReport | None = None
        """Of the last pass that has ended."""
        self._rank, self.passes = rank, 0

    def exact(self, computed: torch.dtype) -> bool:
        """Return True if trainer (which computes in `computed`) and rollout hold the policy in float32."""
        return self.dtype is not None and both_float32(self.dtype, computed)

    def begin(self, after: Callable[[], None] = lambda: None) -> Pass:
        """Return a pass, after every check that can be made before verl's rollout begins to receive. Collective.

        Args:
            after: called when the pass has ended, also in an error.

        Raises:
            TrainerRefused: the model cannot be streamed.
        """
        try:
            check_tied(self.weights, "actor_rollout_ref.model.target_modules")
        except LoraMergeError as error:
            after()
            raise TrainerRefused(f"{FLAG} cannot be served: {error}. {off('verl')}") from error
        except BaseException:
            after()
            raise
        return Pass(self, after)

    def ended(self, report: SyncReport) -> None:
        """Keep and log the report of a pass."""
        self.report = report
        if self._rank == 0:
            logger.info("lora_merge: %s", report)


class Pass(Iterator[tuple[str, Tensor]]):
    """The policy on its way to a rollout, once: iterated by verl's transports, or pushed.

    Args:
        stream: whose.
        after: called at its end.
    """

    def __init__(self, stream: Stream, after: Callable[[], None]) -> None:
        self.stream, self._after = stream, after
        self._tensors, self._begun = self._iterate(), False

    def __next__(self) -> tuple[str, Tensor]:
        self._begun = True
        return next(self._tensors)

    def close(self) -> None:
        """End an iteration before its end, or before it has begun; on all ranks."""
        self._tensors.close()
        if not self._begun:  # then nothing of the iteration runs, its end neither
            self._begun = True
            self._after()

    def push(self, sync: VllmSync) -> None:
        """Bring it into the engines by pushes, which check everything first, instead of iterating."""
        self._begun = True
        try:
            report = sync.push(verify=self.stream.options.verify)
        finally:
            self._after()
        self.stream.ended(report)

    def _iterate(self) -> Generator[tuple[str, Tensor], None, None]:
        if reason := _unpushed(self.stream.options):
            self._after()
            raise TrainerRefused(reason)
        self.stream.passes += 1
        counted = Counted(self.stream.weights, self.stream.passes, _TRANSPORT)
        try:
            yield from counted
        finally:
            self._after()
        self.stream.ended(counted.report)


def _unpushed(options: Options) -> str:
    """Return why these options need pushes, where verl's own transport is to carry the stream; "" if they do not."""
    if options.verify:
        return (
            f"{SWITCH}_VERIFY=1 compares what lies in the engines, which verl's own transport does not tell: set "
            f"{CONFIGURED}, or {SWITCH}_VERIFY=0"
        )
    if options.cache == "keep":
        return (
            f"{SWITCH}_CACHE=keep is for pushes, and verl's own transport drops every cache: set {CONFIGURED}, or "
            f"{SWITCH}_CACHE=reset"
        )
    if options.merge == "engine":
        return (
            f"{SWITCH}_MERGE=engine sends adapters to engines that merge them, and verl's own transport carries merged "
            f"weights: set {CONFIGURED}, or leave {SWITCH}_MERGE out"
        )
    return ""


def _dtype(default: torch.dtype | None) -> torch.dtype | None:
    name = os.environ.get(f"{SWITCH}_DTYPE")
    if not name:
        return default
    if name not in ("bfloat16", "float16", "float32"):
        raise InvalidInput(f"{SWITCH}_DTYPE must be bfloat16, float16 or float32, got {name!r}")
    return dtype_of(name)
