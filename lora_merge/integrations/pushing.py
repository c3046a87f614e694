"""What pushing integrations share: the `VllmSync` of the model as it is wrapped now, and when a callback pushes."""

from __future__ import annotations

import logging
from typing import Any

from ..engine.push.replica import SyncReport
from ..engine.vllm.sync import VllmSync
from ..errors import InvalidInput
from .options import Options


class KeptSync:
    """Keeps the `VllmSync` of a model. Trainers wrap theirs when training begins, some once more after that.

    Attributes:
        sync: the last one; None before the first, and after `close`.
    """

    def __init__(self) -> None:
        self.sync: VllmSync | None = None
        self._model: Any = None

    def of(self, model: Any, engine: Any, options: Options, **more: Any) -> VllmSync:
        """Return the `VllmSync` for this model. For another model than before, make a new one and close the old.
        Collective.

        Args:
            engine, more: as for `VllmSync`.

        Raises:
            as `VllmSync`.
        """
        if self.sync is None or self._model is not model:
            self.close()
            self.sync = VllmSync(
                model,
                engine,
                mode=options.mode,
                merge=options.merge,
                rounding=options.rounding,
                share=options.share,
                cache=options.cache,
                **more,
            )
            self._model = model
        return self.sync

    @property
    def written(self) -> bool:
        """Whether the trainer has written since the last push to weights that it shares with the engine."""
        return self.sync is not None and self.sync.sharing is not None and self.sync.sharing.written

    def close(self) -> None:
        """Free buffers and handles. Collective."""
        sync, self.sync, self._model = self.sync, None, None
        if sync is not None:
            sync.close()


class Pusher:
    """The pushing part of a callback for trainers without rollouts of their own: pushes after every `every` optimizer
    steps.

    Args:
        engine: as for `VllmSync`; None on the ranks that hold no handle.
        every: optimizer steps between two pushes.
        options: default: as the environment says.
        trainer: in words, "Lightning".
        log: where reports go.
        trains: whether the trainer can train on merged weights.

    Raises:
        InvalidInput: an argument that does not fit.
    """

    def __init__(
        self,
        engine: Any,
        every: int,
        options: Options | None,
        *,
        trainer: str,
        log: logging.Logger,
        trains: bool = False,
    ) -> None:
        if every < 1:
            raise InvalidInput(f"every must be 1 or more optimizer steps, got {every}")
        self._engine, self._every, self._log = engine, every, log
        self._options = Options.from_environment() if options is None else options
        if self._options.check is not None:
            raise InvalidInput(
                f"check (LORA_MERGE_CHECK) needs the rollout's log-probs, which {trainer} does not have: compare them "
                "with lora_merge.verify.logprob_gap where you sample"
            )
        if self._options.train == "merged" and not trains:
            raise InvalidInput(
                f"train='merged' is not for {trainer}: leave it out, or call lora_merge.train_merged(model) before "
                "training, and close() of what it returns after it"
            )
        self._kept = KeptSync()

    @property
    def sync(self) -> VllmSync | None:
        """The sync, made when training begins: only then is the model wrapped and sharded as it will be trained."""
        return self._kept.sync

    def begin(self, model: Any) -> None:
        """Make the sync when training begins, of the model wrapped as it will be trained. Collective."""
        self._kept.of(model, self._engine, self._options)

    def due(self, step: int, last: int | None = None) -> bool:
        """Return True if a push follows an optimizer step.

        Args:
            last: step of the last push, where steps may have passed since without a call.
        """
        return step // self._every > (step - 1 if last is None else last) // self._every

    def push(self) -> SyncReport:
        """Bring the model as it is now to the engine. Collective."""
        assert self.sync is not None
        report = self.sync.push(verify=self._options.verify)
        self._log.info("%s", report)
        return report
