"""benchmarks/messages.py counts the messages of a push."""

from __future__ import annotations

from pathlib import Path

from trainer_benchmark import ran


def test_a_server_is_asked_as_seldom_as_an_engine_of_this_process(tmp_path: Path) -> None:
    """A push by URL asked a dozen times, and waited in one of vLLM's own calls."""
    handles = ("server, by its URL", "server, each call by itself")
    record, printed = ran("messages", tmp_path, "--pushes", "2", "--only", "server", limit=500)
    assert {"commit", "command", "versions", "device_name"} <= record.keys()
    assert [(one["handle"], one["merge"], one["messages"]) for one in record["points"]] == [
        (handles[0], "trainer", 3),
        (handles[0], "engine", 4),
        (handles[1], "trainer", 12),
        (handles[1], "engine", 11),
    ]
    assert "server, by its URL, trainer merges: 3 messages" in printed
