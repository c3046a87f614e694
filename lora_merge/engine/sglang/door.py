"""Requests that come while a push changes the mode, in front of an `sglang.Engine`: SGLang holds them back until
generation resumes, and would then answer those that were made for the mode before with other weights."""

from __future__ import annotations

from typing import Any

from ..payload.adapter import ADAPTER_NAME


class Door:
    """A tokenizer manager's `_validate_and_resolve_lora`, which each request passes when it is held back no longer.

    Args:
        manager: SGLang's `TokenizerManager`, of 0.5.17 or 0.5.23.

    Attributes:
        stale: requests that it refuses: by id, what SGLang notes of them. (Ids may be used again.)
    """

    def __init__(self, manager: Any) -> None:
        self._manager, self._resolve = manager, manager._validate_and_resolve_lora
        self.stale: dict[str, Any] = {}

    async def __call__(self, asked: Any) -> None:
        for rid in asked.rid if isinstance(asked.rid, list) else [asked.rid]:
            if rid in self.stale and self._manager.rid_to_state.get(rid) is self.stale[rid]:
                raise ValueError(
                    f"request {rid} was made while a push changed the mode, for weights that are gone: ask for "
                    "sync.lora_path() again (it is None for merged weights)"
                )
        await self._resolve(asked)


async def end_wrong_mode_requests(manager: Any, adapter: bool) -> None:
    """End requests that were made for the other mode; see `Control.end_wrong_mode_requests`.

    Args:
        manager: as for `Door`; it holds requests back.
    """
    door = manager._validate_and_resolve_lora
    if not isinstance(door, Door):
        door = manager._validate_and_resolve_lora = Door(manager)

    def wrong(path: str | None) -> bool:
        return not path if adapter else path == ADAPTER_NAME

    door.stale = {
        rid: state for rid, state in manager.rid_to_state.items() if wrong(getattr(state.obj, "lora_path", None))
    }
    for rid in door.stale:  # which those hear that a scheduler has; 0.5.23 passes over it for those held back
        manager.abort_request(rid)
