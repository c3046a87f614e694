"""What has been imported is left out of looks for garbage, from the first import of this module on.

A look takes half a second where PyTorch, transformers and an engine are imported, more than all else of a tiny model's
start: vLLM looks a dozen times as an engine starts and ends. It would freeze and thaw by itself, engines that end later
among what it freezes, and what is frozen here among what it thaws: neither is done any more.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None
