"""Hook of mkdocs: the pages at the repository's root join those of docs/, with links that fit both places."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""File at the root -> page of the site."""


def on_config(config: Any) -> Any:
    """Pages that mkdocs.yml does not place come last."""
    rest = {page.name for page in (ROOT / "docs").glob("*.md")} - set(re.findall(r"[\w-]+\.md", str(config["nav"])))
    if rest:
        config["nav"].append({"More": sorted(rest)})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the root."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between the root and docs/ become links between pages."""
    for source, there in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(source)}(#[^)]*)?\)", rf"]({there}\1)", markdown)
    return re.sub(r"\]\(docs/", "](", markdown) if page.file.src_uri in PAGES.values() else markdown
