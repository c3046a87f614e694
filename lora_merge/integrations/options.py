"""Settings of an integration: arguments where the user makes a call, environment variables otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ..choices import Cache, Merge, Mode, Rounding, Train, check_choice
from ..errors import InvalidInput

SWITCH = "LORA_MERGE"
_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")
_CHOICES: dict[str, tuple[str, Any]] = {
    "mode": (f"{SWITCH}_MODE", Mode),
    "rounding": (f"{SWITCH}_ROUNDING", Rounding),
    "train": (f"{SWITCH}_TRAIN", Train),
    "cache": (f"{SWITCH}_CACHE", Cache),
    "merge": (f"{SWITCH}_MERGE", Merge),
}
"""Options that are words -> their variable, and the type that lists the words."""
SETTINGS = frozenset({
    "MODE", "ROUNDING", "TRAIN", "SHARE", "CHECK", "VERIFY", "CACHE", "DTYPE", "MERGE", "BACKEND", "CPU_ISA", "FOLLOW",
    "STORE_KEY", "HTTP_PROXY", "BUILD", "CUDA", "GLIBC", "CUDART",
})  # fmt: skip
"""What follows on LORA_MERGE_ in the names of this package's variables."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of an integration.

    Args:
        mode: "merged" or "adapter", as for `VllmSync`. LORA_MERGE_MODE.
        rounding: of merged weights, "nearest" or "stochastic". LORA_MERGE_ROUNDING.
        check: how far the importance ratio between trainer and rollout may lie from 1, in each step's batch, before the
            run ends in an error (0.02 is what one policy in both places gives); None: it is not looked at.
            LORA_MERGE_CHECK, where "1" is 0.02.
        verify: whether each push compares checksums on both sides, as `VllmSync.push(verify=True)`.
            LORA_MERGE_VERIFY.
        train: what the trainer's forward computes with: "adapters", as PEFT does, or "merged", the weights that are
            pushed (`train_merged`). LORA_MERGE_TRAIN.
        share: whether trainer and engine hold the weights once, as `VllmSync(share=True)`; train is "merged" then.
            LORA_MERGE_SHARE.
        cache: what happens to the KV cache of requests that are under way, "reset" or "keep", as for `VllmSync`.
            LORA_MERGE_CACHE.
        merge: who adds the adapters to the base, as for `VllmSync`. LORA_MERGE_MERGE.

    Raises:
        InvalidInput: a value that is none of these.
    """

    mode: Mode = "merged"
    rounding: Rounding = "nearest"
    check: float | None = None
    verify: bool = False
    train: Train = "adapters"
    share: bool = False
    cache: Cache = "reset"
    merge: Merge = "auto"

    def __post_init__(self) -> None:
        for name, (variable, known) in _CHOICES.items():
            check_choice(name, getattr(self, name), known, f" (or {variable})")
        if self.check is not None and not 0 < self.check < 1:
            raise InvalidInput(f"check must lie between 0 and 1, got {self.check} (or {SWITCH}_CHECK)")
        if self.share:
            object.__setattr__(self, "train", "merged")
        for_merged = {
            "SHARE": "share=True shares merged weights" if self.share else "",
            "CACHE": "cache='keep' is for merged weights" if self.cache == "keep" else "",
            "TRAIN": "train='merged' trains the policy that mode='merged' serves" if self.train == "merged" else "",
        }
        for name, why in for_merged.items():
            if why and self.mode != "merged":
                raise InvalidInput(f"{why}, got mode={self.mode!r} ({SWITCH}_{name}, {SWITCH}_MODE)")

    @classmethod
    def from_environment(
        cls,
        environment: Mapping[str, str] | None = None,
        *,
        trains: bool = False,
        shares: bool = False,
        merges: bool = False,
    ) -> Options:
        """Read LORA_MERGE_MODE, LORA_MERGE_ROUNDING, LORA_MERGE_CHECK, LORA_MERGE_VERIFY, LORA_MERGE_TRAIN,
        LORA_MERGE_SHARE, LORA_MERGE_CACHE and LORA_MERGE_MERGE.

        Args:
            trains: whether the integration can train on merged weights; else asking for that is an error.
            shares: the same of sharing the weights.
            merges: the same of choosing who merges.
        """
        found = _given(environment)
        check, verify = (found.get(f"{SWITCH}_{name}", "") for name in ("CHECK", "VERIFY"))
        share = _flag(f"{SWITCH}_SHARE", found.get(f"{SWITCH}_SHARE", ""))
        if share and not shares:
            raise InvalidInput(
                f"{SWITCH}_SHARE=1 is for TRL and ms-swift, and not with Megatron: leave it out, or pass share=True to "
                "VllmSync in a script of your own"
            )
        if trains_merged(found) and not trains:
            raise InvalidInput(
                f"{SWITCH}_TRAIN=merged is for TRL, ms-swift, verl and Transformers, and not with Megatron: leave it "
                "out, or call lora_merge.train_merged(model) in your script before training"
            )
        if found.get(f"{SWITCH}_MERGE", "auto") != "auto" and not merges:
            raise InvalidInput(
                f"{SWITCH}_MERGE={found[f'{SWITCH}_MERGE']} is for verl: leave it out, or pass merge= to VllmSync in a "
                "script of your own"
            )
        words: dict[str, Any] = {name: found[variable] for name, (variable, _) in _CHOICES.items() if variable in found}
        return cls(**words, check=_bound(check), verify=_flag(f"{SWITCH}_VERIFY", verify), share=share)


def trains_merged(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if LORA_MERGE_TRAIN=merged is set."""
    return _given(environment).get(f"{SWITCH}_TRAIN") == "merged"


def switched_on(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if LORA_MERGE=1 is set."""
    return _flag(SWITCH, _given(environment).get(SWITCH, ""))


def switched_off(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if LORA_MERGE=0 is set, which leaves a trainer as it is."""
    return bool(_given(environment).get(SWITCH)) and not switched_on(environment)


def unknown_variables(environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield a sentence for each variable that is set under this package's prefix and that nothing reads: a mistyped
    LORA_MERGE_CHECK checks nothing."""
    for name in sorted(_given(environment)):
        prefix, found, setting = name.partition(f"{SWITCH}_")
        if found and not prefix and setting not in SETTINGS:
            meant = "".join(f", {found}{close}?" for close in get_close_matches(setting, SETTINGS, 1, 0.7))
            yield f"{name} is set, and nothing reads it{meant} (docs/environment.md has all settings)"


def _given(environment: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return an environment, or the process's own as it is now: ms-swift, for one, replaces `os.environ`."""
    return os.environ if environment is None else environment


def _flag(name: str, value: str) -> bool:
    if value.lower() not in _OFF + _ON:
        raise InvalidInput(f"{name} must be 1 or 0, got {value!r}")
    return value.lower() in _ON


def _bound(value: str) -> float | None:
    if value.lower() in _OFF:
        return None
    if value.lower() in _ON:
        return 0.02
    try:
        return float(value)
    except ValueError as error:
        raise InvalidInput(f"{SWITCH}_CHECK must be 1, 0 or a bound like 0.02, got {value!r}") from error
