"""Judges what engines answered about a stream: what does not fit, which names are left out, and in which dtypes it
goes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod
from typing import NamedTuple, TypeAlias

import torch

from ...kernels.segments import FLOATS
from ...models.conversion import TRAIN_AS_ONE
from ...stream.buckets import Meta, dtype_of
from ..messages import ANOTHER_SIZE, NO_PART, TIED, DryRunAnswer

_LISTED = 8
"""Lines about tensors of one engine that are listed; more are counted."""
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
        dropped: those among `left_out` that engines of their class never have.
        kept: parameters that stay as the engines have them.
        renames: what would make the names fit every engine; () where nothing would.
        serves: class of the first engine's model.
    """

    left_out: frozenset[str]
    dtypes: Mapping[str, torch.dtype]
    dropped: frozenset[str] = frozenset()
    kept: tuple[str, ...] = ()
    renames: Sequence[Sequence[str]] = ()
    serves: str = ""


def evaluate(
    stream: Mapping[str, Meta],
    found: Mapping[str, Found],
    ties: Mapping[str, str],
    adapted: Container[str] = frozenset(),
) -> tuple[list[str], Choice]:
    """Judge the answers of all engines: list what does not fit, or decide what the stream leaves out and to which
    dtypes it rounds.

    Args:
        stream: what is sent, by name.
        found: for each engine what its workers found in it.
        ties, adapted: see `evaluate_engine`.
    """
    elements = {name: prod(meta.shape) for name, meta in stream.items()}
    problems: list[str] = []
    held: dict[str, dict[torch.dtype, str]] = {}
    absent: list[set[str]] = []
    for engine, workers in found.items():
        fitted = evaluate_engine(workers, ties, adapted)
        problems += [f"{engine}: {problem}" for problem in [*fitted.problems, *_left(workers, elements)]]
        absent.append(fitted.absent)
        for name, dtype in ((name, dtype_of(dtype)) for worker in workers for name, dtype in worker.dtypes.items()):
            if dtype in FLOATS and name in stream and stream[name].dtype in FLOATS:
                held.setdefault(name, {}).setdefault(dtype, engine)
    problems += _differing(held)
    answers = [worker for workers in found.values() for worker in workers]
    renames = {tuple(map(tuple, worker.renames)) for worker in answers}
    choice = Choice(
        frozenset(set.intersection(*absent)) if absent else frozenset(),
        {name: next(iter(dtypes)) for name, dtypes in held.items()},
        frozenset(name for worker in answers for name in worker.dropped),
        tuple(sorted({path for worker in answers for path in worker.kept})),
        next(iter(renames)) if len(renames) == 1 else (),
        next((worker.serves for worker in answers), ""),
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


def evaluate_engine(found: Found, ties: Mapping[str, str], adapted: Container[str] = frozenset()) -> Evaluation:
    """Evaluate how a stream fits one engine.

    A name that no worker takes is left out where one takes the name that it is tied to: some of vLLM's models have no
    head of their own, and do not know its name. Where no worker takes either of them, both are problems.

    Args:
        ties: name -> name of the tensor of the stream that is the same one.
        adapted: names of tensors to which adapters add something.
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
    unknown = [name for name, why in reasons.items() if why.startswith(NO_PART)]
    another = len(unknown) > len(set[str]().union(*(worker.dtypes for worker in found)))
    told = other.keys() | (unknown if another else ())
    serves = found[0].serves or "its model"
    problems = _some(
        [f"{n} is refused: {_plainly(n, why, adapted, serves)}" for n, why in reasons.items() if n not in told]
    )
    if other:
        problems.insert(0, _sizes(other))
    if another:
        problems.insert(0, _class(unknown, serves))
    if not told:  # else parameters are missing whose tensors were refused for their size or name
        missing = dict.fromkeys(what for worker in found for what in worker.missing)
        problems += _some([f"nothing would fill {what}" for what in missing])
    problems += _some([f"{name} is surplus: the engine has no place for it" for name in sorted(ignored - absent)])
    return Evaluation(list(dict.fromkeys(problems)), absent)


def _some(lines: Sequence[str]) -> list[str]:
    """Return the first of many lines, and how many more there are."""
    more = len(lines) - _LISTED
    return [*lines] if more <= 1 else [*lines[:_LISTED], f"and {more} more like the last"]


def _class(unknown: Sequence[str], serves: str) -> str:
    """Say that the engine's class has other names, and which class it is."""
    others = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
    return (
        f"{unknown[0]}{others} is no name in what the engine serves ({serves}): the model here is of another class, or "
        f"something is around it. Load {serves} with transformers, and train that, or start the engine on a checkpoint "
        "of the class here"
    )


_HEADLESS = (
    ": it takes the embedding for its head, and here the two differ: load the model here with "
    f"tie_word_embeddings=True, and leave both out of target_modules and modules_to_save, or {TRAIN_AS_ONE}"
)


def _plainly(name: str, why: str, adapted: Container[str], serves: str) -> str:
    """Return why a tensor is refused; of one that the engine ties to another, what makes the two differ."""
    if why.startswith(NO_PART):
        headless = name.endswith("lm_head.weight")
        return f"{serves} has nothing of that name{_HEADLESS if headless else ''}"
    if not why.startswith(TIED):
        return why
    first = why.removeprefix(TIED)
    if name in adapted or any(other in adapted for other in first.split(", ")):
        return (
            f"the engine ties it to {first}, but here adapters change the two apart: start the engine with "
            f"tie_word_embeddings=False on a checkpoint that has both (save_merged writes one), or {TRAIN_AS_ONE}"
        )
    return (
        f"the engine ties it to {first}, and here they are two weights: start the engine with "
        'hf_overrides={"tie_word_embeddings": False}, on a checkpoint that has both (save_merged writes one), or load '
        "the model here with tie_word_embeddings=True, as the engine did, and if modules_to_save names one of the two, "
        "train them as one with ensure_weight_tying=True"
    )


def _left(found: Found, sizes: Mapping[str, int]) -> list[str]:
    """List tensors that workers together do not take whole: vLLM cuts a part out of a tensor that is too large, and
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
