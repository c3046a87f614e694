"""A KV connector that forgets its blocks, as vLLM's own file-backed example does not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class Forgetful(ExampleConnector):  # type: ignore[misc]
    """`says` is what a reset answers; one that says False keeps its blocks, and an exception is raised."""

    says: ClassVar[bool | Exception] = True

    def reset_cache(self) -> bool:
        if isinstance(self.says, Exception):
            raise self.says
        if self.says:
            for block in Path(self._storage_path).iterdir():
                shutil.rmtree(block)
        return self.says
