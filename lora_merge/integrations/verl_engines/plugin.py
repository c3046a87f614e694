"""What verl loads through its `verl.plugins` entry point, in each of its processes, while `import verl` is under way.

verl's engines ask for the accelerator as they are imported, and other plugins may yet bring one. So nothing of verl is
imported here: the engines are registered as soon as verl itself has imported its own.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ...extras import after_import

ENGINES = "verl.workers.engine"


def _register(engines: ModuleType) -> None:
    from .registry import take_over_quietly

    take_over_quietly()


if ENGINES not in sys.modules:
    after_import(ENGINES, _register)
