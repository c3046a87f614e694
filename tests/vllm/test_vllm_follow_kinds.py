"""An engine that follows a store in which adapters of several kinds follow one another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import ask, assert_answers, engine, train

from lora_merge import Follower, Publisher
from lora_merge.publish.publisher import rollback
from lora_merge.serve import unload_adapter
from tests.vllm.test_vllm_follow import DENSE, EXTENDED, bits

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
KINDS: list[dict[str, Any]] = [
    DENSE,
    {"target_modules": ["q_proj"], "r": 8, "lora_alpha": 3, "adapters": ("policy",)},
    DENSE | {"use_dora": True, "r": 2},
    {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    DENSE | {"bias": "all", "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    DENSE | {"trainable_token_indices": [3, 5]},
]


def test_adapters_of_other_kinds_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks, modules, names; DoRA, biases, what is trained whole: by trainers that go on from one another. Each
    kept version comes back with its bits, whatever was served before it, and so does the checkpoint."""
    engines.plain_layout(monkeypatch)  # else most weights lie where `bits` does not look
    build, base = functools.partial(engines.qwen2, tied=False), tmp_path / "base"
    policies, weights = [models.with_lora(build, **kind) for kind in KINDS], dict[int, dict[str, str]]()
    with engine(policies[0], base, load_format="auto", **EXTENDED) as llm:
        checkpoint, follower = bits(llm), Follower(llm, tmp_path / "run7", base=base)
        for policy in policies:
            train(policy, 5)
            with torch.no_grad():
                for parameter in policy.parameters():
                    if parameter.requires_grad:
                        parameter.add_(0.01)
            version = Publisher(policy, tmp_path / "run7").publish().version
            assert follower.step() is not None
            assert_answers(ask(llm), policy)
            weights[version] = bits(llm)
        assert len({str(sorted(found.items())) for found in weights.values()}) == len(KINDS)
        for version in (1, 5, 2, 6, 4, 3, 1):
            rollback(follower._store, version)
            assert follower.step() is not None
            assert bits(llm) == weights[version]
            assert_answers(ask(llm), policies[version - 1])
        unload_adapter(llm)
        assert bits(llm) == checkpoint
        follower.close()
