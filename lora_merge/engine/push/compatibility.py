"""Whether a stream fits the engines: each is asked, the answers are judged, and the result is remembered.

Every engine's workers make a dry run of the model's own `load_weights`. What they find is the same at every push of the
same table, so only its digest crosses then; in full it goes to the other ranks of the trainer once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ...errors import PushRefused
from ...stream.bucket_writer import BucketWriter
from ...stream.buckets import metas, to_json
from ...stream.weights import MergedWeights
from ..messages import DryRunAnswer
from ..payload.recipients import Recipients
from .channels import Trainer
from .evaluation import evaluate
from .replica import Replica, engines_of


class Answers(NamedTuple):
    """What engines answered about a stream.

    Args:
        stream: digest of its table.
        workers: each engine's name, with the digests of what its workers find.
    """

    stream: str
    workers: tuple[tuple[str, tuple[str, ...]], ...]


class CompatibilityCheck:
    """Fits streams to the engines of a trainer, and remembers the engines' answers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._said: dict[str, DryRunAnswer] = {}
        """What workers found, by its digest; known to every rank."""
        self._fitted: dict[MergedWeights, Answers] = {}
        """What the engines said of each stream when it fitted last."""
        self._found: dict[int, list[str]] = {}
        """Of each replica that was asked last, digests of what its workers found."""
        self.at: dict[int, list[str]] = {}
        """Of each replica that was asked last, where its workers have what the stream fills: see
        `ExportedMemory.digest`."""

    def known(self, weights: MergedWeights) -> list[str]:
        """The digest of the stream as it fitted last, if it ever did."""
        return [self._fitted[weights].stream] if weights in self._fitted else []

    def recipients(self) -> Recipients:
        """Which workers take which tensors of the stream that was fitted last."""
        return Recipients(
            {(index, w): digest for index, workers in self._found.items() for w, digest in enumerate(workers)},
            {digest: found.ignored for digest, found in self._said.items()},
        )

    async def __call__(
        self, weights: MergedWeights, replicas: Sequence[Replica], read: BucketWriter | None = None
    ) -> BucketWriter:
        """The stream that fits every engine; its settings in `weights` are kept for the next push.

        Args:
            read: the stream with the settings of the push before, where it was read in this one already.

        Raises:
            PushRefused: it does not fit; one error lists all that does not. Nothing was written.
        """
        # Of a pipeline only the last stage has the head, and can tie it.
        keep_tied = not all(
            any(worker.tied for replica in engine for worker in replica.workers) for engine in engines_of(replicas)
        )
        read = read if keep_tied == weights.keep_tied else None
        weights.keep_tied = keep_tied
        for last in (False, False, True):
            writer, answers = await self._ask(weights, replicas, read)
            read = None
            if self._fitted.get(weights) == answers:  # as at the push before: judging takes a look at every name
                return writer
            found = {engine: [self._said[digest] for digest in workers] for engine, workers in answers.workers}
            problems, choice = evaluate(metas(writer.table), found, writer.ties)
            if problems and weights.left_out and not last:
                # Perhaps an engine was started anew, with the parts that it had been without.
                weights.left_out = frozenset()
                continue
            if problems:
                raise PushRefused("the weights do not fit the engine:\n  " + "\n  ".join(problems))
            if not choice.left_out and all(
                meta.dtype == choice.dtypes.get(name, meta.dtype) for name, meta in metas(writer.table).items()
            ):
                self._fitted[weights] = answers
                return writer
            weights.left_out |= choice.left_out
            weights.dtypes = choice.dtypes
        raise PushRefused("the engines take another stream at every try; push to them apart, each by itself")

    async def _ask(
        self, weights: MergedWeights, replicas: Sequence[Replica], read: BucketWriter | None
    ) -> tuple[BucketWriter, Answers]:
        """The stream as it stands, and what the engines say of it; the same on every rank."""
        trainer = self._trainer
        made: list[BucketWriter] = []
        fresh: dict[str, DryRunAnswer] = {}
        answers = await trainer.everywhere(self._ask_own(weights, replicas, read, made, fresh))
        (writer,) = made
        if len({lines for lines, _ in answers}) > 1:
            # The ranks that share a model agree; its replicas may not.
            trainer.world.same(writer.lines, partial(list, writer.lines))
        heard: dict[int, list[str]] = {}
        for rank, (_, digests) in enumerate(answers):
            for index, workers in digests.items():
                heard[index] = [same for same, _ in workers]
                self.at[index] = [at for _, at in workers]
                for digest in heard[index]:
                    if digest not in self._said:
                        self._said[digest] = await trainer.spread(fresh.get(digest), rank)
        self._found = heard
        used = {digest for workers in heard.values() for digest in workers}
        self._said = {digest: found for digest, found in self._said.items() if digest in used}
        by_engine = (
            (f"engine {engine[0].index}", tuple(digest for replica in engine for digest in heard[replica.index]))
            for engine in engines_of(replicas)
        )
        return writer, Answers(writer.digest, tuple(by_engine))

    async def _ask_own(
        self,
        weights: MergedWeights,
        replicas: Sequence[Replica],
        read: BucketWriter | None,
        made: list[BucketWriter],
        fresh: dict[str, DryRunAnswer],
    ) -> tuple[int, dict[int, list[tuple[str, str]]]]:
        """Ask the engines whose handles are here.

        Args:
            made: gets the stream.
            fresh: gets what workers found that is not known yet, by digest.

        Returns:
            the key of the stream, and for each engine the digests of what its workers found, and where it is.
        """
        writer = await self._trainer.blocking(weights.bucket_writer) if read is None else read
        made.append(writer)
        # Usually the answers to `hello` have said it.
        answers: dict[int, list[Any]] = {
            replica.index: [worker.fits.get(writer.digest, {"same": ""}) for worker in replica.workers]
            for replica in replicas
            if replica.control is not None
        }
        new = [r for r in replicas if any(found["same"] not in self._said for found in answers.get(r.index, ()))]
        answers |= await self._trainer.ask_own(
            new, "examine", lambda: {"table": to_json(writer.table)}, digest=writer.digest, known=list(self._said)
        )
        fresh.update({w["same"]: DryRunAnswer.read(w) for found in answers.values() for w in found if "refused" in w})
        return writer.lines_key, {index: [(w["same"], w["at"]) for w in found] for index, found in answers.items()}
