"""Warns where torch.compile makes constants of weights: compiled code then goes on with those of its first call."""

from __future__ import annotations

import sys
import warnings


def warn_if_frozen() -> None:
    """Warn if inductor freezes what it compiles (`torch._inductor.config.freezing`, `TORCHINDUCTOR_FREEZING=1`)."""
    config = sys.modules.get("torch._inductor.config")
    if config is not None and getattr(config, "freezing", False):
        warnings.warn(
            "lora_merge: torch._inductor.config.freezing is on (TORCHINDUCTOR_FREEZING=1), under which torch.compile "
            "makes constants of weights: a compiled model goes on with the weights of its first call, and sees no "
            "later merged() and no training. Turn it off before the model is compiled",
            stacklevel=2,
        )
