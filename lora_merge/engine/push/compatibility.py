"""Whether a stream fits the engines: each is asked, the answers are evaluated, and the result is remembered.

Every engine's workers make a dry run of the model's own `load_weights`. Its result is the same at every push of a
table, so only a digest of it crosses then; the other ranks of the trainer get it in full once.
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
from .left_out import refusal, sources_of, trained
from .replica import Replica, engines_of


class Answers(NamedTuple):
    """What engines answered about a stream.

    Args:
        stream: digest of its table.
        workers: each engine's name, with the digests of its workers' dry runs.
    """

    stream: str
    workers: tuple[tuple[str, tuple[str, ...]], ...]


class CompatibilityCheck:
    """Fits streams to the engines of a trainer, and remembers the engines' answers."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._results: dict[str, DryRunAnswer] = {}
        """Results of dry runs, by digest; the same on every rank."""
        self._fitted: dict[MergedWeights, tuple[Answers, tuple[str, ...]]] = {}
        """The engines' answers about each stream when it fitted last, and what it then left as they have it."""
        self._found: dict[int, list[str]] = {}
        """The digests of the workers' dry runs, for each replica that was asked last."""
        self._dropped: dict[MergedWeights, tuple[dict[str, str], str]] = {}
        """The parameters of each stream that engines of this class have no part for, and the class."""
        self.kept: tuple[str, ...] = ()
        """Parameters that the stream which was checked last leaves as the engines have them."""
        self.at: dict[int, list[str]] = {}
        """The `ExportedMemory.digest` of every worker, for each replica that was asked last."""

    def known(self, weights: MergedWeights) -> list[str]:
        """Return the digest of the stream as it fitted last, if it ever did."""
        return [self._fitted[weights][0].stream] if weights in self._fitted else []

    def recipients(self) -> Recipients:
        """Return which workers take which tensors of the stream that was checked last."""
        return Recipients(
            {(index, w): digest for index, workers in self._found.items() for w, digest in enumerate(workers)},
            {digest: found.ignored for digest, found in self._results.items()},
        )

    async def __call__(
        self, weights: MergedWeights, replicas: Sequence[Replica], read: BucketWriter | None = None
    ) -> BucketWriter:
        """Return the stream that fits every engine; its settings are kept in `weights` for the next push.

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
        anew = False
        for last in (False, False, False, True):
            writer, answers = await self._ask(weights, replicas, read)
            read = None
            before = self._fitted.get(weights)
            if before is not None and before[0] == answers:  # as at the push before: evaluating reads every name
                self.kept = before[1]
                await self._check_left_out(weights, writer)
                return writer
            found = {engine: [self._results[digest] for digest in workers] for engine, workers in answers.workers}
            problems, choice = evaluate(metas(writer.table), found, writer.ties, _adapted(writer))
            if problems and (weights.left_out or weights.renames) and not anew and not last:
                # Perhaps an engine was started anew, with the parts that it had been without, or on another class.
                weights.left_out, weights.renames, anew = frozenset(), (), True
                continue
            if problems and choice.renames and not last:
                weights.renames, anew = choice.renames, True
                continue
            if problems:
                raise PushRefused("the weights do not fit the engine:\n  " + "\n  ".join(problems))
            if not choice.left_out and all(
                meta.dtype == choice.dtypes.get(name, meta.dtype) for name, meta in metas(writer.table).items()
            ):
                self._fitted[weights], self.kept = (answers, choice.kept), choice.kept
                await self._check_left_out(weights, writer)
                return writer
            known = self._dropped.get(weights, ({}, ""))[0] if weights.left_out else {}
            self._dropped[weights] = known | sources_of(writer, choice.dropped & choice.left_out), choice.serves
            weights.left_out |= choice.left_out
            weights.dtypes = choice.dtypes
        raise PushRefused("the engines ask for another stream at every try: push to each with a sync of its own")

    async def _check_left_out(self, weights: MergedWeights, writer: BucketWriter) -> None:
        """Raise `PushRefused` where what is left out is trained. Collective over all ranks where anything is."""
        sources, serves = self._dropped.get(weights, ({}, ""))
        if not sources or not weights.left_out:
            return
        found = await self._trainer.everywhere(self._trainer.blocking(partial(trained, weights, writer, sources)))
        if names := sorted({sources[name] for some in found for name in some}):
            raise PushRefused(refusal(names, serves))

    async def _ask(
        self, weights: MergedWeights, replicas: Sequence[Replica], read: BucketWriter | None
    ) -> tuple[BucketWriter, Answers]:
        """Return the stream with its present settings, and the engines' answers; the same on every rank."""
        trainer = self._trainer
        (writer, fresh), answers = await trainer.keep_and_gather(self._ask_own(weights, replicas, read))
        if len({lines for lines, _ in answers}) > 1:
            # The ranks that share a model agree; its replicas may not.
            trainer.world.same(writer.lines, partial(list, writer.lines))
        heard: dict[int, list[str]] = {}
        for rank, (_, digests) in enumerate(answers):
            for index, workers in digests.items():
                heard[index] = [same for same, _ in workers]
                self.at[index] = [at for _, at in workers]
                for digest in heard[index]:
                    if digest not in self._results:
                        self._results[digest] = await trainer.spread(fresh.get(digest), rank)
        self._found = heard
        used = {digest for workers in heard.values() for digest in workers}
        self._results = {digest: found for digest, found in self._results.items() if digest in used}
        by_engine = (
            (f"engine {engine[0].index}", tuple(digest for replica in engine for digest in heard[replica.index]))
            for engine in engines_of(replicas)
        )
        return writer, Answers(writer.digest, tuple(by_engine))

    async def _ask_own(
        self, weights: MergedWeights, replicas: Sequence[Replica], read: BucketWriter | None
    ) -> tuple[tuple[BucketWriter, dict[str, DryRunAnswer]], tuple[int, dict[int, list[tuple[str, str]]]]]:
        """Ask the engines whose handles are here.

        Returns:
            for this rank: the stream, and results that are not known yet, by digest. For all ranks: the key of the
            stream, and for each engine the digests of its workers' dry runs, and of where they have what it fills.
        """
        writer = await self._trainer.blocking(weights.bucket_writer) if read is None else read
        # Usually the answers to `hello` have this.
        answers: dict[int, list[Any]] = {
            replica.index: [worker.fits.get(writer.digest, {"same": ""}) for worker in replica.workers]
            for replica in replicas
            if replica.control is not None
        }
        new = [r for r in replicas if any(found["same"] not in self._results for found in answers.get(r.index, ()))]
        answers |= await self._trainer.ask_own(
            new, "dry_run", lambda: {"table": to_json(writer.table)}, digest=writer.digest, known=list(self._results)
        )
        fresh = {w["same"]: DryRunAnswer.read(w) for found in answers.values() for w in found if "refused" in w}
        digests = {index: [(w["same"], w["at"]) for w in found] for index, found in answers.items()}
        return (writer, fresh), (writer.lines_key, digests)


def _adapted(writer: BucketWriter) -> frozenset[str]:
    """Return the names of a stream's tensors to which adapters add something."""
    parts = writer.source.parts
    return frozenset(n for n, e in writer.entries.items() if any(parts[s].delta is not None for s in e.sources))
