"""Each architecture in a real SGLang engine of its own: merged pushes, greedy tokens and log-probs as the trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import policies
import pytest
import sglang_cpu
import sglang_engines
from sglang_engines import ask, assert_answers, do, engine
from torch import nn

from lora_merge import PushRefused, SglangSync

DENSE = {"target_modules": policies.LINEARS}
MOE = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": policies.EXPERTS}
no_leftovers = sglang_engines.no_leftovers


def push_and_ask(model: Any, started: Any, **options: Any) -> None:
    """Twice, after training and by each who can merge."""
    for merge in ("trainer", "engine"):
        sync = SglangSync(model, started, merge=merge, **options)
        for seed in range(2):
            report = sync.push(verify=seed == 0)
            assert report.coverage == 1
            assert_answers(ask(started), model)
            policies.train(model, seed)
        sync.close()


def test_an_untied_head(tmp_path: Path) -> None:
    model = models.with_lora(lambda: policies.qwen2(tied=False), **DENSE)
    with engine(model, tmp_path / "base") as started:
        push_and_ask(model, started)


def test_gemma2(tmp_path: Path) -> None:
    """A tied head that the engine's model has no module for, norms of 1 + w, and a buffer that no checkpoint holds."""
    model = models.with_lora(lambda: policies.gemma2(capped=False), **DENSE)
    with engine(model, tmp_path / "base") as started:
        push_and_ask(model, started)


def test_phi3(tmp_path: Path) -> None:
    """q, k and v are one tensor in the checkpoint, too, and so are gate and up: one adapter over all of each."""
    model = models.with_lora(policies.phi3, target_modules=policies.FUSED)
    with engine(model, tmp_path / "base") as started:
        push_and_ask(model, started)


def test_experts(tmp_path: Path) -> None:
    model = models.with_lora(policies.qwen3_moe, **MOE)
    with engine(model, tmp_path / "base") as started:
        push_and_ask(model, started)
        sync = SglangSync(model, started)
        sync.push()
        held, bad = sync.states(), policies.qwen3_moe()
        experts = bad.model.layers[0].mlp.experts
        experts.down_proj = nn.Parameter(experts.down_proj[:3].detach())
        with pytest.raises(PushRefused):
            SglangSync(bad, started).push()
        assert sync.states() == held
        assert_answers(ask(started), model)
        sync.close()
        for number, (anew, words) in enumerate(LAID_ANEW.items()):
            assert do(started, "lay anew", *anew) != "0 layers"
            other = SglangSync(model, started, bucket_bytes=(number + 1) << 16)  # what is known is not looked at again
            with pytest.raises(PushRefused, match=rf"in another layout than it loads it in \({words}"):
                other.push()
            do(started, "mend")
            assert other.states() == held
            assert_answers(ask(started), model)
            other.close()


LAID_ANEW = {
    ("UnquantizedFusedMoEMethod", "method", "use_flashinfer_trtllm_moe"): (
        r'moe_runner_backend="flashinfer_trtllm": start the engine with moe_runner_backend="triton"'
    ),
    ("UnquantizedLinearMethod", "layer", "use_intel_amx_backend"): "packed for AMX",
}
"""What SGLang may have made of weights by itself: FlashInfer's experts, AMX. (Pretended.)"""


# What SGLang started otherwise than one may think


def test_an_engine_without_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own `check_weights` answers, and the engine lives on."""
    monkeypatch.setenv("SGLANG_PLUGINS", "cpu")
    model = policies.qwen2()
    with engine(model, tmp_path / "base") as started:
        before = ask(started)
        with pytest.raises(PushRefused, match=r"Unsupported action=.*is lora-merge installed .*SGLANG_PLUGINS"):
            SglangSync(model, started).push()
        assert [one["output_ids"] for one in ask(started)] == [one["output_ids"] for one in before]


def test_a_model_that_fails_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang runs transformers' code in its place, and says so in a log."""
    monkeypatch.setenv(sglang_cpu.BROKEN, "sglang.srt.models.qwen3")
    model = models.with_lora(policies.qwen3, **DENSE)
    with engine(model, tmp_path / "base") as started:
        before = ask(started)
        with pytest.raises(PushRefused, match=r"runs TransformersForCausalLM.*failed to import.*model_impl="):
            SglangSync(model, started).push()
        assert [one["output_ids"] for one in ask(started)] == [one["output_ids"] for one in before]
        assert [state.kind for state in SglangSync(model, started).states()] == ["nothing"]


def test_a_model_that_is_to_run_by_transformers(tmp_path: Path) -> None:
    model = models.with_lora(policies.qwen3, **DENSE)
    with engine(model, tmp_path / "base", model_impl="transformers") as started:
        push_and_ask(model, started)
