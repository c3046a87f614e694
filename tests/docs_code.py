"""The code blocks of the documentation pages, as names to call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"


def names_of(page: str, *, vllm: bool = False) -> dict[str, Any]:
    """Run the python blocks of a page that need vLLM, or those that do not; returns what they define."""
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    chosen = [block for block in blocks if ("from vllm" in block) == vllm]
    assert chosen, f"{page} has no such block"
    names: dict[str, Any] = {}
    for block in chosen:
        exec(compile(block, page, "exec"), names)
    return names
