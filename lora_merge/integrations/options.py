"""Settings of an integration: arguments where the user makes a call, environment variables otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..choices import Cache, Merge, Mode, Rounding, Train, check_choice
from ..errors import InvalidInput

SWITCH = "LORA_MERGE"
_OFF = ("", "0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")


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
        given = (
            ("mode", self.mode, Mode),
            ("rounding", self.rounding, Rounding),
            ("train", self.train, Train),
            ("cache", self.cache, Cache),
            ("merge", self.merge, Merge),
        )
        for name, value, known in given:
            check_choice(name, value, known, f" (or {SWITCH}_{name.upper()})")
        if self.check is not None and not 0 < self.check < 1:
            raise InvalidInput(f"check must lie between 0 and 1, got {self.check} (or {SWITCH}_CHECK)")
        if self.share:
            object.__setattr__(self, "train", "merged")
        if self.share and self.mode != "merged":
            raise InvalidInput(
                f"share=True shares merged weights, got mode={self.mode!r} ({SWITCH}_SHARE, {SWITCH}_MODE)"
            )
        if self.cache == "keep" and self.mode != "merged":
            raise InvalidInput(
                f"cache='keep' is for merged weights, got mode={self.mode!r} ({SWITCH}_CACHE, {SWITCH}_MODE)"
            )
        if self.train == "merged" and self.mode != "merged":
            raise InvalidInput(
                "train='merged' trains the policy that mode='merged' serves, got "
                f"mode={self.mode!r} ({SWITCH}_TRAIN, {SWITCH}_MODE)"
            )

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
        found = os.environ if environment is None else environment
        if shares_weights(found) and not shares:
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
        named: dict[str, Any] = {  # words, which are checked
            "mode": found.get(f"{SWITCH}_MODE", "merged"),
            "rounding": found.get(f"{SWITCH}_ROUNDING", "nearest"),
            "train": found.get(f"{SWITCH}_TRAIN", "adapters"),
            "cache": found.get(f"{SWITCH}_CACHE", "reset"),
            "merge": found.get(f"{SWITCH}_MERGE", "auto"),
        }
        check, verify = (found.get(f"{SWITCH}_{name}", "") for name in ("CHECK", "VERIFY"))
        return cls(**named, check=_bound(check), verify=_flag(f"{SWITCH}_VERIFY", verify), share=shares_weights(found))


def trains_merged(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if LORA_MERGE_TRAIN=merged is set."""
    found = os.environ if environment is None else environment
    return found.get(f"{SWITCH}_TRAIN") == "merged"


def shares_weights(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if LORA_MERGE_SHARE=1 is set."""
    found = os.environ if environment is None else environment
    return _flag(f"{SWITCH}_SHARE", found.get(f"{SWITCH}_SHARE", ""))


def switched_on(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if LORA_MERGE=1 is set."""
    found = os.environ if environment is None else environment
    return _flag(SWITCH, found.get(SWITCH, ""))


def switched_off(environment: Mapping[str, str] | None = None) -> bool:
    """Return True if LORA_MERGE=0 is set, which leaves a trainer as it is."""
    found = os.environ if environment is None else environment
    return bool(found.get(SWITCH)) and not switched_on(found)


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
