"""Judges what engines answered about a stream: what does not fit, which names are left out, and in which dtypes it
goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from ...kernels.segments import FLOATS
from ...stream.buckets import Meta, dtype_of
from ..messages import ANOTHER_SIZE, DryRunAnswer

Found: TypeAlias = Sequence[DryRunAnswer]
"""What the workers of one engine found in their dry runs."""


class Evaluation(NamedTuple):
    """How a stream fits one engine.

    Args:
        problems: what does not fit, in words.
        absent: names that the engine has no place for, and need not have.
    """

    problems: list[str]
    absent: set[str]


class Choice(NamedTuple):
    """Which names a stream leaves out, and to which dtypes it rounds, for all engines at once.

    Args:
        left_out: names that no engine has a part for.
        dtypes: of floating-point tensors, as the engines hold them.
    """

    left_out: frozenset[str]
    dtypes: Mapping[str, torch.dtype]


def evaluate(
    stream: Mapping[str, Meta], found: Mapping[str, Found], ties: Mapping[str, str]
) -> tuple[list[str], Choice]:
    """Judge the answers of all engines: list what does not fit, or decide what the stream leaves out and to which
    dtypes it rounds.

    Args:
        stream: what is sent, by name.
        found: for each engine what its workers found in it.
        ties: as of `evaluate_engine`.
    """
    elements = {name: prod(meta.shape) for name, meta in stream.items()}
    problems: list[str] = []
    held: dict[str, dict[torch.dtype, str]] = {}
    absent: list[set[str]] = []
    for engine, workers in found.items():
        fitted = evaluate_engine(workers, ties)
        problems += [f"{engine}: {problem}" for problem in [*fitted.problems, *_left(workers, elements)]]
        absent.append(fitted.absent)
        for name, dtype in ((name, dtype_of(dtype)) for worker in workers for name, dtype in worker.dtypes.items()):
            if dtype in FLOATS and name in stream and stream[name].dtype in FLOATS:
                held.setdefault(name, {}).setdefault(dtype, engine)
    problems += _differing(held)
    choice = Choice(
        frozenset(set.intersection(*absent)) if absent else frozenset(),
        {name: next(iter(dtypes)) for name, dtypes in held.items()},
    )
    return problems, choice


def _differing(held: Mapping[str, Mapping[torch.dtype, str]]) -> list[str]:
    """List tensors that engines hold in different dtypes: a stream is rounded once, so it fits only one of them."""
    apart = [(name, dtypes) for name, dtypes in held.items() if len(dtypes) > 1]
    if not apart:
        return []
    name, dtypes = apart[0]
    engines = ", ".join(f"{engine} in {dtype}" for dtype, engine in dtypes.items())
    others = f" (and {len(apart) - 1} more)" if len(apart) > 1 else ""
    return [
        f"{engines} hold {name}{others}: tensors are rounded once, to what an engine holds; start the engines with one "
        "dtype, or push to them apart, each by itself"
    ]


def evaluate_engine(found: Found, ties: Mapping[str, str]) -> Evaluation:
    """Evaluate how a stream fits one engine.

    A name that no worker takes is left out where one takes the name that it is tied to: some of vLLM's models have no
    head of their own, and do not know its name. Where no worker takes either of them, both are problems.

    Args:
        ties: name -> name of the tensor of the stream that is the same one.
    """
    ignored = set.intersection(*(set(worker.ignored) for worker in found))
    refused = {name for worker in found for name in worker.refused}
    untaken = set.intersection(*({*worker.ignored, *worker.refused} for worker in found))
    groups: dict[str, set[str]] = {}
    for name, first in ties.items():
        groups.setdefault(first, {first}).add(name)
    spare = {name for names in groups.values() if names - untaken - refused for name in names & untaken}
    absent = spare | ignored.intersection(name for worker in found for name in worker.absent)
    reasons = {name: why for worker in found for name, why in worker.refused.items() if name not in spare}
    other = {name: why for name, why in reasons.items() if why.startswith(ANOTHER_SIZE)}
    problems = [f"{name} is refused: {why}" for name, why in reasons.items() if name not in other]
    if other:
        problems.insert(0, _sizes(other))
    else:  # what nothing would fill otherwise is what is of another size
        problems += [f"nothing would fill {what}" for worker in found for what in worker.missing]
    problems += [f"{name} is surplus: the engine has no place for it" for name in sorted(ignored - absent)]
    return Evaluation(list(dict.fromkeys(problems)), absent)


def _left(found: Found, sizes: Mapping[str, int]) -> list[str]:
    """List tensors of which workers together do not take all: vLLM cuts a part out of a tensor that is too large, and
    does not say so.

    Args:
        sizes: elements of each tensor.
    """
    split = set[str]().union(*(worker.partial for worker in found))
    taken = {
        name: sum(worker.partial.get(name, sizes[name] if name in worker.dtypes else 0) for worker in found)
        for name in split
    }
    left = sorted(name for name, count in taken.items() if count < sizes[name])
    if not left:
        return []
    others = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    return [
        f"the model is of another size: the engine's workers take {taken[left[0]]} of the {sizes[left[0]]} elements of "
        f"{left[0]}{others}"
    ]


def _sizes(sizes: Mapping[str, str]) -> str:
    name, why = next((name, why.removeprefix(ANOTHER_SIZE)) for name, why in sizes.items())
    if len(sizes) == 1:
        return f"{name} is refused: it is {why}"
    return f"the model is of another size: {name} is {why} (and {len(sizes) - 1} more)"
