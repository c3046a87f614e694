"""Whether a stream fits the engines: they are asked, what they say is judged, and what follows is tried on once.

Every engine's workers make a dry run of the model's own `load_weights`. What they find is the same at every push of the
same table, so only its digest crosses then; in full it goes to the other ranks of the trainer once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from ..errors import PushRefused
from ..kernels.segments import FLOATS
from ..stream.buckets import Meta, dtype_of, metas, to_json
from ..stream.filler import Filler
from ..stream.weights import MergedWeights
from .replica import Replica, engines_of
from .trainer import Trainer

Found: TypeAlias = Sequence[Mapping[str, Any]]
"""What the workers of one engine found in their dry runs."""


class Choice(NamedTuple):
    """What a stream leaves out, and how it rounds, for all engines at once.

    Args:
        left_out: names that no engine has a part for.
        dtypes: of floating-point tensors, as the engines hold them.
    """

    left_out: frozenset[str]
    dtypes: Mapping[str, torch.dtype]


class Fit:
    """Fits streams to the engines of a trainer; remembers what these said."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._said: dict[str, Any] = {}
        """What workers found, by its digest; known to every rank."""

    async def __call__(self, weights: MergedWeights, replicas: Sequence[Replica]) -> Filler:
        """The stream that fits every engine; its settings in `weights` are kept for the next push.

        Raises:
            PushRefused: it does not fit; one error lists all that does not. Nothing was written.
        """
        # Of a pipeline only the last stage has the head, and can tie it.
        weights.keep_tied = not all(
            any(worker["tied"] for replica in engine for worker in replica.workers) for engine in engines_of(replicas)
        )
        for last in (False, False, True):
            filler, found = await self._ask(weights, replicas)
            problems, choice = judge(metas(filler.table), found)
            if problems and weights.left_out and not last:
                # Perhaps an engine was started anew, with the parts that it had been without.
                weights.left_out = frozenset()
                continue
            if problems:
                raise PushRefused("the weights do not fit the engine:\n  " + "\n  ".join(problems))
            if not choice.left_out and all(
                meta.dtype == choice.dtypes.get(name, meta.dtype) for name, meta in metas(filler.table).items()
            ):
                return filler
            weights.left_out |= choice.left_out
            weights.dtypes = choice.dtypes
        raise PushRefused(
            "the engines take another stream at every try; push to them apart, with a VllmSync for each one"
        )

    async def _ask(self, weights: MergedWeights, replicas: Sequence[Replica]) -> tuple[Filler, dict[str, Found]]:
        """The stream as it stands, and what each engine's workers find, by the engine's name; the same on every
        rank."""
        trainer = self._trainer
        made: list[Filler] = []
        fresh: dict[str, Any] = {}
        answers = await trainer.everywhere(self._ask_own(weights, replicas, made, fresh))
        (filler,) = made
        if len({lines for lines, _ in answers}) > 1:
            # The ranks that share a model agree; its replicas may not.
            trainer.world.same(filler.lines, partial(list, filler.lines))
        heard: dict[int, list[Mapping[str, Any]]] = {}
        for rank, (_, digests) in enumerate(answers):
            for index, workers in digests.items():
                for digest in workers:
                    if digest not in self._said:
                        self._said[digest] = await trainer.spread(fresh.get(digest), rank)
                heard[index] = [self._said[digest] for digest in workers]
        used = {digest for _, digests in answers for workers in digests.values() for digest in workers}
        self._said = {digest: found for digest, found in self._said.items() if digest in used}
        return filler, {
            f"engine {engine[0].index}": [worker for replica in engine for worker in heard[replica.index]]
            for engine in engines_of(replicas)
        }

    async def _ask_own(
        self, weights: MergedWeights, replicas: Sequence[Replica], made: list[Filler], fresh: dict[str, Any]
    ) -> tuple[int, dict[int, list[str]]]:
        """Ask the engines whose handles are here.

        Args:
            made: gets the stream.
            fresh: gets what workers found that is not known yet, by digest.

        Returns:
            the key of the stream, and for each engine the digests of what its workers found.
        """
        filler = await self._trainer.blocking(weights.filler)
        made.append(filler)
        digests: dict[int, list[str]] = {}

        async def ask(replica: Replica) -> None:
            known = list(self._said)
            found = await replica.handle.rpc("examine", digest=filler.digest, known=known)
            if any("unknown" in worker for worker in found):
                table = to_json(filler.table)
                found = await replica.handle.rpc("examine", digest=filler.digest, known=known, table=table)
            digests[replica.index] = [worker["same"] for worker in found]
            fresh.update({worker["same"]: worker for worker in found if "refused" in worker})

        await self._trainer.all_own(replicas, ask)
        return filler.lines_key, digests


def judge(stream: Mapping[str, Meta], found: Mapping[str, Found]) -> tuple[list[str], Choice]:
    """What does not fit, in words; and what the stream leaves out and rounds to, where all fits.

    Args:
        stream: what is sent, by name.
        found: for each engine what its workers found in it.
    """
    problems: list[str] = []
    held: dict[str, dict[torch.dtype, str]] = {}
    absent: list[set[str]] = []
    for engine, workers in found.items():
        without = _ignored(workers).intersection(name for worker in workers for name in worker["absent"])
        absent.append(without)
        problems += [f"{engine}: {name} is refused: {why}" for w in workers for name, why in w["refused"].items()]
        problems += [f"{engine}: nothing would fill {what}" for worker in workers for what in worker["missing"]]
        surplus = sorted(_ignored(workers) - without)
        problems += [f"{engine}: {name} is surplus: the engine has no place for it" for name in surplus]
        for name, dtype in ((name, dtype_of(dtype)) for worker in workers for name, dtype in worker["dtypes"].items()):
            if dtype in FLOATS and name in stream and stream[name].dtype in FLOATS:
                held.setdefault(name, {}).setdefault(dtype, engine)
    problems += _differing(held)
    choice = Choice(
        frozenset(set.intersection(*absent)) if absent else frozenset(),
        {name: next(iter(dtypes)) for name, dtypes in held.items()},
    )
    return list(dict.fromkeys(problems)), choice


def _differing(held: Mapping[str, Mapping[torch.dtype, str]]) -> list[str]:
    """Tensors that engines hold in different dtypes: one stream is rounded once, and could serve only one of them."""
    apart = [(name, dtypes) for name, dtypes in held.items() if len(dtypes) > 1]
    if not apart:
        return []
    name, dtypes = apart[0]
    told = ", ".join(f"{engine} in {dtype}" for dtype, engine in dtypes.items())
    others = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
    return [
        f"{told} hold {name}{others}: tensors are rounded once, to what an engine holds; start the engines with one "
        "dtype, or push to them apart, with a VllmSync for each one"
    ]


def _ignored(workers: Found) -> set[str]:
    """Names that no worker has a place for."""
    return set.intersection(*(set(worker["ignored"]) for worker in workers)) if workers else set()
