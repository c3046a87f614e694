"""What integrations share: they check that a trainer's release has the names that they use, and say at start what
they took over."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch.distributed as dist

from ..errors import LoraMergeError, MissingExtra
from ..extras import root_of
from ..logs import announce
from .options import SWITCH, unknown_variables


class TrainerRefused(LoraMergeError, RuntimeError):
    """A trainer cannot be taken over as it was started; the message names the setting to change. The trainer is
    unchanged."""


@dataclass(frozen=True, slots=True)
class Release:
    """A trainer's installed release, and those that were tested.

    Args:
        trainer: its name in words, "TRL".
        distribution: its name on the package index, "trl".
        tested: releases whose real trainers this package's tests run.
        module: which has `__version__`, where people import it from a checkout of its sources; "": none do.
    """

    trainer: str
    distribution: str
    tested: tuple[str, ...]
    module: str = ""

    @property
    def installed(self) -> str:
        """Return the version that is installed.

        Raises:
            MissingExtra: none is.
        """
        try:
            return version(self.distribution)
        except PackageNotFoundError as error:
            if self.module in sys.modules:
                return str(vars(sys.modules[self.module]).get("__version__", "of unknown release"))
            raise MissingExtra(
                f"this integration needs {self.trainer}: pip install {self.distribution}; tested with "
                f"{', '.join(self.tested)}"
            ) from error

    def require(self, names: Mapping[str, Sequence[str]]) -> None:
        """Refuse a release that lacks any name that is used.

        Args:
            names: "module:Class" or "module" -> attributes of it ("" alone: its being there is enough).

        Raises:
            TrainerRefused: names all that is missing.
        """
        lacking = [missing for where, attributes in names.items() for missing in _missing(where, attributes)]
        if lacking:
            raise self.lacks(lacking)

    def lacks(self, names: Sequence[str]) -> TrainerRefused:
        """Return the refusal of a release that lacks names."""
        return TrainerRefused(
            f"{self.trainer} {self.installed} does not offer {', '.join(names)}, which lora_merge uses; tested with "
            f"{', '.join(self.tested)}. {off(self.trainer)}"
        )

    def announce(self, took_over: str) -> None:
        """Log one line, on the first rank: what was taken over, and with which releases that was tested. One more for
        each variable of the environment that looks like a setting, and is none.

        Args:
            took_over: in words, "VLLMGeneration.sync_weights: merged pushes into the colocated engine".
        """
        known = "tested with" if self.installed in self.tested else "not tested with this release, but with"
        _say(
            f"takes over {took_over} of {self.trainer} {self.installed} ({known} {', '.join(self.tested)}; {SWITCH}=0 "
            "switches it off)"
        )
        for unknown in unknown_variables():
            _say(f"warns: {unknown}")

    def announce_training(self, shared: str = "") -> None:
        """Log one line, on the first rank: the policy is trained on its merged weights.

        Args:
            shared: in words, how much of these lies in the engine; "" if they are the trainer's own.
        """
        how = f"in the engine's memory: {shared}" if shared else f"{SWITCH}_TRAIN=adapters: as PEFT computes"
        _say(
            f"trains the policy of {self.trainer} {self.installed} on its merged weights: forward and backward compute "
            f"with what is pushed ({how})"
        )

    def nothing(self, why: str) -> None:
        """Log one line, on the first rank: nothing of this training is taken over.

        Args:
            why: in words, "--rlhf_type dpo has no rollout engine".
        """
        _say(f"takes over nothing of {self.trainer} {self.installed}: {why}")


def _say(what: str) -> None:
    ranks = dist.is_available() and dist.is_initialized()
    if (dist.get_rank() if ranks else int(os.environ.get("RANK", "0") or 0)) == 0:
        announce(f"lora_merge {what}")


def off(trainer: str) -> str:
    """Return how to go on without this package, in words."""
    return f"{SWITCH}=0 leaves {trainer}'s own way in place"


def _missing(where: str, attributes: Sequence[str]) -> list[str]:
    module, _, attribute = where.partition(":")
    try:
        found = import_module(module)
        owner = getattr(found, attribute) if attribute else found
    except AttributeError:
        return [where.replace(":", ".")]
    except ModuleNotFoundError as error:
        plain = module.startswith(error.name or " ")
        return [where.replace(":", ".") + ("" if plain else f" ({root_of(error)})")]
    except Exception as error:  # of a library that it imports, perhaps: a torchvision of another torch raises any
        return [f"{where.replace(':', '.')} ({root_of(error)})"]
    return [f"{where.replace(':', '.')}.{name}" for name in attributes if not hasattr(owner, name)]
