"""What an engine's workers say against a stream, and what of it the engine can do without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

ANOTHER_SIZE = "another size: "
"""How a worker's reason begins where a tensor is refused for its size: `[256, 64] here and [256, 128] there`."""


class Fit(NamedTuple):
    """Args:
    problems: what does not fit, in words.
    absent: names that the engine has no place for, and need not have.
    """

    problems: list[str]
    absent: set[str]


def fit(found: Sequence[Mapping[str, Any]], ties: Mapping[str, str]) -> Fit:
    """How a stream fits one engine.

    A name that no worker takes is left out where one takes the name that it is tied to: some of vLLM's models have no
    head of their own, and do not know its name. Where no worker takes either of them, both are problems.

    Args:
        found: of each worker `refused` (name -> why), `ignored` (names that fill nothing), `absent` (those among them
            for parts of the model that the engine was started without) and `missing` (what nothing would fill).
        ties: name -> name of the tensor of the stream that is the same one.
    """
    ignored = set.intersection(*(set(worker["ignored"]) for worker in found))
    refused = {name for worker in found for name in worker["refused"]}
    untaken = set.intersection(*({*worker["ignored"], *worker["refused"]} for worker in found))
    groups: dict[str, set[str]] = {}
    for name, first in ties.items():
        groups.setdefault(first, {first}).add(name)
    spare = {name for names in groups.values() if names - untaken - refused for name in names & untaken}
    absent = spare | ignored.intersection(name for worker in found for name in worker["absent"])
    reasons = {name: why for worker in found for name, why in worker["refused"].items() if name not in spare}
    sizes = {name: why for name, why in reasons.items() if why.startswith(ANOTHER_SIZE)}
    problems = [f"{name} is refused: {why}" for name, why in reasons.items() if name not in sizes]
    if sizes:
        problems.insert(0, _sizes(sizes))
    else:  # what nothing would fill otherwise is what is of another size
        problems += [f"nothing would fill {what}" for worker in found for what in worker["missing"]]
    problems += [f"{name} is surplus: the engine has no place for it" for name in sorted(ignored - absent)]
    return Fit(list(dict.fromkeys(problems)), absent)


def _sizes(sizes: Mapping[str, str]) -> str:
    """A tensor of another size, or a whole model, in a line."""
    name, why = next((name, why.removeprefix(ANOTHER_SIZE)) for name, why in sizes.items())
    if len(sizes) == 1:
        return f"{name} is refused: it is {why}"
    return f"the model is of another size: {name} is {why} (and {len(sizes) - 1} more)"
