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
        ours: the trainer's settings, see `computing` in configs.py.
        warned: what was warned of before; gets the rest.

    Returns:
        The differences of the first of these engines, in words; "" where there is none.
    """
    words = (
        " computes otherwise than the model whose weights it takes, because its configuration is another one: {}. Its "
        "answers are not that model's. Start the engine on that model's own folder, without hf_overrides that the "
        "model does not have"
    )
    return _warn_of([(one, differences(ours, one.workers[0].computing)) for one in replicas], warned, words)


def warn_of_calibrated(replicas: Sequence[Replica], warned: set[tuple[int, str]]) -> str:
    """Warn of engines whose KV cache keeps scales that were calibrated for other weights than they now hold.

    Args:
        warned: what was warned of before; gets the rest.

    Returns:
        The layers of the first of these engines, in words; "" where there is none.
    """
    words = (
        ": its KV cache keeps the scales of the checkpoint that it was started from, which were calibrated for that "
        "one's weights and not for those that are pushed: {}. Keys and values that outgrow the calibrated range (FP8: "
        "448 times the scale) are cut off there. Where the policy moves far, start the engine on a checkpoint without "
        "k_scale and v_scale, or calibrate them again for a merged checkpoint and start it anew on that"
    )
    return _warn_of([(one, one.calibrated) for one in replicas], warned, words)


def warn_of_others(replicas: Sequence[Replica], warned: set[tuple[int, str]]) -> str:
    """Warn of engines in which adapters that were trained on the base lie on top of the pushed weights.

    Args:
        warned: what was warned of before; gets the rest.

    Returns:
        The adapters of the first of these engines, in words; "" where there is none.
    """
    words = (
        ": this trainer has not loaded the adapters {}. Requests that name them are answered on top of the pushed "
        "weights from now on, and not on the base that the adapters were trained on. Serve them from an engine of "
        "their own, or as tenants of this trainer (VllmSync alone), or unload them"
    )
    return _warn_of([(one, one.others) for one in replicas], warned, words)


def _warn_of(found: Sequence[tuple[Replica, str]], warned: set[tuple[int, str]], words: str) -> str:
    """Warn of what was found in engines, once of each thing, and return the first of it; "" for none.

    Args:
        words: that follow the engine's number, with a place for what was found.
    """
    for replica, what in found:
        if what and replica.control is not None and (replica.index, what) not in warned:
            warned.add((replica.index, what))
            warnings.warn(f"engine {replica.index}{words.format(what)}", stacklevel=3)
    return next((what for _, what in found if what), "")


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
