"""A stream in words."""

from __future__ import annotations

from .bucket_writer import BucketWriter
from .source import Entry, Source

_WAYS = {
    "merge": "each rank merges what it holds",
    "copy": "no adapter",
    "unshard": "gathered whole, merged, cut",
    "convert": "merged whole, then converted to the checkpoint's layout",
}


def describe(writer: BucketWriter, source: Source) -> str:
    """Return which way every tensor goes, and what a pass costs, as `MergedWeights.describe` gives it."""
    direct = frozenset(writer.windows())
    ways: dict[str, list[Entry]] = {}
    for name, entry in writer.entries.items():
        adapted = any(source.parts[part].delta is not None for part in entry.sources)
        way = ("unshard" if not writer.ranks.alone else "convert") if name not in direct else None
        ways.setdefault(way or ("merge" if adapted else "copy"), []).append(entry)
    gathered = {part: source.parts[part] for e in ways.get("unshard", ()) for part in e.sources}
    whole = sum(part.shard.nbytes for part in gathered.values())
    lines = [f"{len(writer.table)} buckets of up to {writer.capacity:,} bytes; {writer.nbytes:,} bytes in all"]
    if writer.operands.held:
        lines.append(f"beside two buckets: {writer.operands.held:,} bytes, through which the adapters of each come")
    for way, what in _WAYS.items():
        entries = ways.get(way, [])
        if entries:
            size = sum(entry.meta.nbytes for entry in entries)
            lines.append(f"{way}: {len(entries)} tensors, {size:,} bytes ({what})")
            lines += [f"  {e.meta.name} {list(e.meta.shape)}" for e in entries if way in ("unshard", "convert")]
    if not writer.ranks.alone:
        received = writer.nbytes * (writer.ranks.size - 1) // writer.ranks.size
        lines.append(
            f"from other ranks, a pass: {received:,} bytes of merged shards, {writer.operands.nbytes:,} of "
            f"adapters, {whole * (writer.ranks.size - 1) // writer.ranks.size:,} of base weights"
        )
    return "\n".join(lines)
