"""Each architecture in a real SGLang engine of its own: merged pushes, greedy tokens and log-probs as the trainer's."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import models
import policies
import pytest
import sglang_cpu
import sglang_engines
import torch
from sglang_engines import ask, assert_answers, do, engine
from torch import nn

from lora_merge import PushRefused, SglangSync
from lora_merge.engine.sglang import internals

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
    """And an engine with an API key, for which nobody asks where no server is."""
    model = models.with_lora(lambda: policies.qwen2(tied=False), **DENSE)
    with engine(model, tmp_path / "base", api_key="abc") as started:
        push_and_ask(model, started)


def test_calibrated_scales_of_the_kv_cache(tmp_path: Path) -> None:
    """They stay those of the engine's start, and the push says so."""
    model = models.with_lora(policies.qwen2, **DENSE)
    scales = {str(layer): 0.5 for layer in range(model.config.num_hidden_layers)}
    told = {"dtype": "float8_e4m3fn", "scaling_factor": {"0": scales}}
    path = tmp_path / "scales.json"
    path.write_text(json.dumps({"model_type": "qwen2", "kv_cache": told}))
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "quantization_param_path": str(path)}
    with (
        engine(model, tmp_path / "base", **fp8) as started,
        closing(SglangSync(model, started)) as sync,
        pytest.warns(UserWarning, match=r"keeps the scales .*those of quantization_param_path='.*scales\.json'"),
    ):
        assert "scales.json" in sync.push().calibrated


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_fp16_policy(dtype: str, tmp_path: Path) -> None:
    """In an engine of its own dtype, whoever merges, and in one of bf16, to which the trainer rounds once. Logits of a
    few units carry errors of some 2^-10, or 2^-7, of themselves."""
    model = models.with_lora(policies.qwen2, **DENSE, dtype=torch.float16)
    tolerance = {"float16": 0.02, "bfloat16": 0.15}[dtype]
    with engine(model, tmp_path / "base", dtype=dtype) as started:
        for merge in ("trainer", "engine") if dtype == "float16" else ("trainer",):
            with closing(SglangSync(model, started, merge=merge)) as sync:
                assert sync.push(verify=True).coverage == 1
                assert_answers(ask(started), model, tolerance=tolerance, greedy=False)
                policies.train(model)
                sync.push()
                assert_answers(ask(started), model, tolerance=tolerance, greedy=False)


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
            assert do(started, *anew) != "0 layers"
            other = SglangSync(model, started, bucket_bytes=(number + 1) << 16)  # what is known is not looked at again
            with pytest.raises(PushRefused, match=rf"in another layout than it loads it in \({words}"):
                other.push()
            do(started, "mend")
            assert other.states() == held
            assert_answers(ask(started), model)
            other.close()
        up_first(model, started, tmp_path)


LAID_ANEW = {
    ("lay anew", "UnquantizedFusedMoEMethod", "method", "use_flashinfer_trtllm_moe"): (
        r'moe_runner_backend="flashinfer_trtllm": start the engine with moe_runner_backend="triton"'
    ),
    ("lay anew", "UnquantizedLinearMethod", "layer", "use_intel_amx_backend"): "packed for AMX",
    ("shuffle",): "shuffled for aiter: start the engine with SGLANG_USE_AITER=0",
}
"""What SGLang may have made of weights by itself: FlashInfer's experts, AMX, aiter. (Pretended.)"""


def up_first(model: Any, started: Any, folder: Path) -> None:
    """Experts for FlashInfer's CUTLASS kernels, which take up before gate: SGLang loads them so, and a push puts them
    where it does. (Pretended: such kernels compute on GPUs alone.)"""
    halves = []
    for number, turned in enumerate((False, True)):
        if turned:
            assert (
                do(started, "lay anew", "UnquantizedFusedMoEMethod", "method", "use_flashinfer_cutlass") != "0 layers"
            )
        sync = SglangSync(model, started, bucket_bytes=(number + 7) << 16)
        assert sync.push(verify=True).coverage == 1
        do(started, "save", str(folder / "saved"))
        saved = torch.load(folder / "saved")
        halves.append({name: tensor.chunk(2, 1) for name, tensor in saved.items() if name.endswith("w13_weight")})
        sync.close()
    assert halves[0]
    for name, (gate, up) in halves[0].items():
        assert torch.equal(halves[1][name][0], up), name
        assert torch.equal(halves[1][name][1], gate), name
    do(started, "mend")
    sync = SglangSync(model, started, bucket_bytes=9 << 16)
    sync.push()
    assert_answers(ask(started), model)
    sync.close()


# What SGLang started otherwise than one may think


def test_an_engine_without_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own `check_weights` answers, and the engine lives on; so it is where a release lets the plugin's hooks
    fall. (Pretended: that this is one.)"""
    monkeypatch.setenv("SGLANG_PLUGINS", "cpu")
    model = policies.qwen2()
    with engine(model, tmp_path / "base") as started:
        before = ask(started)
        with pytest.raises(PushRefused, match=r"Unsupported action=.*is lora-merge installed .*SGLANG_PLUGINS"):
            SglangSync(model, started).push()
        with monkeypatch.context() as patched:
            patched.setattr(internals, "RELEASES", ())
            with pytest.raises(PushRefused, match=r'are supported.*log says "Failed to apply hooks to sglang\.srt'):
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
