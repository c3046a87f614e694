"""Hook of mkdocs: the pages at the repository's root join those of docs/, with links that fit both places; indented
blocks are highlighted as what they are; the header links to the repository."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import textwrap
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


SHELL = ("lora-merge", "pip", "git", "make", "python", "torchrun", "bash", "trl", "swift", "vllm", "docker", "cd")
"""Words that a command begins with; so does a setting, `NAME=value` or `+name=value`."""


def repository() -> str:
    """Return the repository's address, as a workflow on GitHub or the remote of this clone has it; else ""."""
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    if server and name:
        return f"{server}/{name}"
    asked = subprocess.run(
        ["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    address = re.sub(r"^(?:ssh://)?git@([^:/]+)[:/]", r"https://\1/", asked.stdout.strip()).removesuffix(".git")
    return address if address.startswith("https://") and "@" not in address else ""


def on_config(config: Any) -> Any:
    """Pages that mkdocs.yml does not place come last."""
    config["repo_url"] = repository() or None
    config["repo_name"] = "lora_merge" if config["repo_url"] else None
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
    """Links between the root and docs/ become links between pages, and indented blocks those of a language."""
    for source, there in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(source)}(#[^)]*)?\)", rf"]({there}\1)", markdown)
    markdown = fenced(markdown)
    return re.sub(r"\]\(docs/", "](", markdown) if page.file.src_uri in PAGES.values() else markdown


def fenced(markdown: str) -> str:
    """Put indented blocks between fences with their language; those in lists stay."""
    made: list[str] = []
    block: list[str] = []
    inside, text = False, ""  # between fences; the last line of text
    for line in [*markdown.split("\n"), "end"]:
        if line.startswith("```"):
            line = "```text" if line == "```" and not inside else line
            inside = not inside
        in_list = re.match(r" *(?:[-*]|\d+\.) ", text) or text.startswith(" ")
        if not inside and not in_list and (line.startswith("    ") or (block and not line.strip())):
            block.append(line)
            continue
        if block:
            code = textwrap.dedent("\n".join(block)).strip("\n")
            made += [f"```{language(code)}", *code.split("\n"), "```", ""]
            block = []
        made.append(line)
        if line.strip():
            text = line
    return "\n".join(made[:-1])


def language(code: str) -> str:
    """Return the language of a block: python where it parses, bash where it begins with a command, else text."""
    first = code.split(maxsplit=1)[0]
    if first in SHELL or re.match(r"\+?[\w.]+=", first):
        return "bash"
    try:
        ast.parse(code)
    except SyntaxError:
        return "text"
    return "python"
