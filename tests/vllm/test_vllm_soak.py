"""benchmarks/soak.py finds what is wrong with an answer."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from repository import ROOT
from trainer_benchmark import ran


def test_a_short_soak(tmp_path: Path) -> None:
    """An engine that follows by itself; what is torn and copied is refused, and a rollback is served."""
    record, printed = ran("soak", tmp_path, "--minutes", "0.25", "--every", "4", limit=500)
    assert {"commit", "command", "versions", "device_name"} <= record.keys()
    assert not record["strange"]
    events = [one["event"] for one in record["events"]]
    assert events  # a slow machine comes to fewer
    assert events == ["torn", "copied", "rollback"][: len(events)]
    last = record["points"][-1]
    assert last["published"] >= last["switched"] > 1
    assert last["answers"] > 0
    assert last["told_apart"] > 0.9 * last["tokens"] > 0
    assert last["store_files"] <= 3 * 6 + 2  # versions that stay, the pinned one, its pin, the engine's words
    assert last["engine"]["processes"] >= 2
    assert f"{last['published']} versions" in printed


def test_it_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log-probs of another policy than the one that the answer names, or of none."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import soak

    run = soak.Soak(argparse.Namespace(), tmp_path)
    run.named = {"a": 0, "b": 1}
    monkeypatch.setattr(soak.time, "sleep", lambda seconds: None)
    prompt, length = run.policies.prompts[0], 8

    def greedy(policy: int, before: list[int]) -> dict[str, Any]:
        ids, said = prompt + before, []
        with torch.no_grad():
            while len(ids) < len(prompt) + length:
                logs = run.policies.all[policy](torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(logs.argmax()))
                said.append({"top_logprobs": [{"logprob": float(logs.max())}]})
        return {"token_ids": ids[len(prompt) :], "logprobs": {"content": said}}

    first = greedy(0, []) | {"weight_versions": [{"version": "a", "start": 0, "end": length}]}
    assert run.check(prompt, length, first) == ""
    second = greedy(1, first["token_ids"][:3])
    second["logprobs"]["content"][:0] = first["logprobs"]["content"][:3]
    spans = [{"version": "a", "start": 0, "end": 3}, {"version": "b", "start": 3, "end": length}]
    assert run.check(prompt, length, second | {"weight_versions": spans}) == ""
    for many in (2, 4):  # the switch was a token sooner or later than it says
        spans[0]["end"] = spans[1]["start"] = many
        assert "log-probs" in run.check(prompt, length, second | {"weight_versions": spans})
    assert "log-probs" in run.check(prompt, length, second | {"weight_versions": spans[:1]})
    assert "c is no version" in run.check(prompt, length, first | {"weight_versions": [spans[0] | {"version": "c"}]})
    assert "8 tokens of 9" in run.check(prompt, length + 1, first)
    moved = copy.deepcopy(first)
    moved["logprobs"]["content"][5]["top_logprobs"][0]["logprob"] += 0.01
    assert "log-probs" in run.check(prompt, length, moved)
    assert run.counts == {"tokens": 2 * length, "told_apart": 2 * length}
