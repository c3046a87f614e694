"""Warnings of engines that take a push and still answer otherwise than the trainer's model: once of each engine, on the
rank that has its handle."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ..configs import differences
from .replica import Replica


def warn_of_differences(replicas: Sequence[Replica], ours: Mapping[str, Any], warned: set[tuple[int, str]]) -> str:
    """Warn of engines whose configuration computes otherwise than the trainer's.

    Args:
        ours: the trainer's settings, as of `computing` in configs.py.
        warned: what was warned of before; gets the rest.

    Returns:
        The differences of the first of these engines, in words; "" where there is none.
    """
    found = [(replica, differences(ours, replica.workers[0].computing)) for replica in replicas]
    for replica, differs in found:
        if not differs or replica.control is None or (replica.index, differs) in warned:
            continue
        warned.add((replica.index, differs))
        warnings.warn(
            f"engine {replica.index} computes otherwise than the model whose weights it takes, because its "
            f"configuration is another one: {differs}. Its answers are not that model's. Start the engine on that "
            "model's own folder, without hf_overrides that the model does not have",
            stacklevel=2,
        )
    return next((differs for _, differs in found if differs), "")


def warn_of_calibrated(replicas: Sequence[Replica], warned: set[int]) -> str:
    """Warn of engines whose KV cache keeps scales that were calibrated for other weights than they now hold.

    Args:
        warned: engines that were warned of before; gets the others.

    Returns:
        The layers of the first of these engines, in words; "" where there is none.
    """
    found = [replica for replica in replicas if replica.calibrated]
    for replica in found:
        if replica.control is None or replica.index in warned:
            continue
        warned.add(replica.index)
        warnings.warn(
            f"engine {replica.index}: its KV cache keeps the scales of the checkpoint that it was started from, which "
            f"were calibrated for that one's weights and not for those that are pushed: {replica.calibrated}. Keys and "
            "values that outgrow the calibrated range (FP8: 448 times the scale) are cut off there. Where the policy "
            "moves far, start the engine on a checkpoint without k_scale and v_scale, or calibrate them again for a "
            "merged checkpoint and start it anew on that",
            stacklevel=2,
        )
    return found[0].calibrated if found else ""


def warn_of_lost(lost: Mapping[int, str], warned: dict[int, str]) -> None:
    """Warn of engines that a push goes on without: once of each, until it has come back.

    Args:
        lost: why, by the number of the engine.
        warned: those that were warned of before; becomes those that are lost now.
    """
    new = [f"engine {index} is left out of this push ({why})" for index, why in lost.items() if index not in warned]
    warned.clear()
    warned.update(lost)
    if new:
        warnings.warn(
            f"{'; '.join(new)}. What it serves is not what is trained: send it no requests until a push has reached it "
            "again, which brings it all that it lacks",
            stacklevel=2,
        )
