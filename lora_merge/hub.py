"""Names on the Hugging Face hub: say at once what is looked for, and do not wait for a hub that does not answer.

The hub's own calls try six times with pauses: without a network they take up to a minute and print nothing until then.
"""

from __future__ import annotations

from .extras import needed
from .logs import announce

_TIMEOUT_S = 10.0


def is_name(name: str) -> bool:
    """Return True if a repository can have this name: `owner/name`, or a name alone."""
    return not name.startswith((".", "/", "~")) and name.count("/") <= 1 and all(name.split("/"))


def answers(what: str, name: str) -> bool:
    """Return True if the hub answers, and say before that what is looked for there; the caller looks in this machine's
    cache otherwise.

    Args:
        what: "base", "adapter", "model".
        name: of the repository.

    Raises:
        MissingExtra: huggingface_hub is not installed.
    """
    with needed(f"to look for {what} {name!r} takes huggingface_hub", "'lora-merge[peft]'", "huggingface_hub"):
        from huggingface_hub import HfApi, constants
        from huggingface_hub.utils._validators import validate_repo_id

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        validate_repo_id(name)
    except ValueError:  # letters that no repository's name has; the caller's own call says so
        return True
    announce(f"looking for {what} {name!r} on {constants.ENDPOINT}")
    try:
        HfApi().model_info(name, timeout=_TIMEOUT_S)
    except Exception as error:
        # An answer of any kind is one: the call that fetches says what it means (not there, gated, ...).
        if getattr(error, "response", None) is not None:
            return True
        announce(f"{constants.ENDPOINT} does not answer ({type(error).__name__}: {error}): looking in the cache")
        return False
    return True


def absent() -> str:
    """Return the end of an error about a name that the cache does not have, where `answers` said False."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return (
            f"HF_HUB_OFFLINE is set, and it is not in the cache ({constants.HF_HUB_CACHE}); pass a folder, or unset "
            "HF_HUB_OFFLINE where there is a network"
        )
    return (
        f"{constants.ENDPOINT} does not answer, and it is not in the cache ({constants.HF_HUB_CACHE}); pass a folder, "
        "or fetch it where there is a network. HF_HUB_OFFLINE=1 looks in the cache alone"
    )
