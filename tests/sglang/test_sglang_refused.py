"""SGLang engines that no push reaches: refused by name, with what to do, and left as they were."""

from __future__ import annotations

import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import models
import policies
import pytest
import sglang_engines
from sglang_engines import ask, assert_answers, do, engine
from sglang_faults import BUCKET

from lora_merge import InvalidInput, PushRefused, SglangSync
from lora_merge.engine.sglang import internals, plugin
from lora_merge.engine.sglang.internals import (
    HOOKED,
    PENALTIES,
    QUEUE_LIMIT,
    REGISTRY,
    RELEASE_MEMORY,
    RESUME_MEMORY,
)
from lora_merge.serve import load_adapter, unload_adapter

no_leftovers = sglang_engines.no_leftovers


def policy(seed: int = 0) -> Any:
    return models.with_lora(policies.qwen2, seed=seed, target_modules=policies.LINEARS)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with engine(policy(), tmp_path_factory.mktemp("sglang") / "base") as one:
        yield one


@pytest.fixture(autouse=True)
def mended(started: Any) -> Iterator[None]:
    """The next test finds the engine well."""
    yield
    do(started, "mend")


UNFIT = {
    "enable_dp_attention": (True, "enable_dp_attention"),
    "dp_size": (2, "a list of handles"),
    "pp_size": (2, "pp_size"),
    "enable_eplb": (True, "moves its experts"),
    "ep_num_redundant_experts": (2, "moves its experts"),
    "init_expert_location": ("experts.json", "moves its experts"),
    "disaggregation_mode": ("prefill", "disaggregation_mode"),
    "language_only": (True, "images to other servers .*language_only"),
    "enable_hierarchical_cache": (True, "outside of the GPU, too .*enable_hierarchical_cache"),
    "enable_lmcache": (True, "outside of the GPU, too .*enable_lmcache"),
    "enable_flexkv": (True, "outside of the GPU, too .*enable_flexkv"),
    "radix_cache_backend": ("mine", "radix_cache_backend"),
    "kt_weight_path": ("experts", "kt_weight_path"),
    "enable_elastic_expert_backup": (True, "starts experts anew"),
    "dwdp_size": (2, "dwdp_size"),
    "tokenizer_worker_num": (2, "naming the weight version before.*tokenizer_worker_num=1"),
    "enable_pdmux": (True, "enable_pdmux.*no pause stops"),
    "enable_torch_compile": (True, "as constants .*enable_torch_compile on a CPU"),
    "cpu_offload_gb": (1, "in the host's memory .*cpu_offload_gb"),
    "offload_group_size": (2, "in the host's memory .*offload_group_size"),
    "weight_cache_mode": ("daemon", "weight_cache_mode"),
    "model_config.quantization": ("fp8", "holds fp8 weights; .*without quantization"),
    "torchao_config": ("int4wo-128", "holds int4wo-128 weights; .*without quantization or torchao_config"),
    "model_config.is_multimodal": (True, "multimodal"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_engines_that_no_push_reaches(started: Any, name: str) -> None:
    """(Pretended: what such an engine says of itself.)"""
    value, word = UNFIT[name]
    model = policy()
    sync = SglangSync(model, started)
    sync.push()
    held = sync.states()
    do(started, "pretend", name, value)
    with pytest.raises(PushRefused, match=word):
        sync.push()
    do(started, "mend")
    assert sync.states() == held
    assert_answers(ask(started), model)
    sync.close()


def test_adapters_from_folders_are_for_vllm(started: Any, tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    with pytest.raises(InvalidInput, match=r"one of vLLM's, got one of SGLang's.*load_lora_adapter"):
        load_adapter(started, tmp_path)
    with pytest.raises(InvalidInput, match="one of vLLM's, got one of SGLang's"):
        unload_adapter([started])


def test_models_that_make_something_of_weights(started: Any) -> None:
    """Multi-head latent attention. (Pretended: such a model has this method.)"""
    model = policy()
    sync = SglangSync(model, started)
    sync.push()
    held = sync.states()
    do(started, "derive")
    other = SglangSync(model, started, bucket_bytes=BUCKET * 3)  # what is known is not looked at again
    with pytest.raises(PushRefused, match=r"Qwen2ForCausalLM\.post_load_weights makes something .*roll out with vLLM"):
        other.push()
    do(started, "mend")
    assert sync.states() == held
    assert_answers(ask(started), model)
    other.close()
    sync.close()


@pytest.fixture
def names_anew() -> Iterator[None]:
    """Names of SGLang's are looked up anew, before and after."""
    internals._unresolved.cache_clear()
    yield
    internals._unresolved.cache_clear()


MOVED = [HOOKED, HOOKED.rpartition(".")[0], RELEASE_MEMORY, RESUME_MEMORY, QUEUE_LIMIT, REGISTRY]
MOVED += [PENALTIES.rpartition(".")[0]]


@pytest.mark.parametrize("path", MOVED)
def test_a_release_that_has_moved_what_the_plugin_hooks(
    started: Any, path: str, monkeypatch: pytest.MonkeyPatch, names_anew: None
) -> None:
    """SGLang logs it alone, and would run without the plugin."""
    release = re.escape(internals.installed())
    owner, _, name = path.rpartition(".")
    with monkeypatch.context() as patched:
        patched.delattr(pkgutil.resolve_name(owner), name)
        words = rf"does not offer .*{re.escape(path)}.*; 0\.5\.17 and 0\.5\.23 are supported: install one of these"
        with pytest.raises(PushRefused, match=rf"engine 0 runs SGLang {release}, which {words}"):
            SglangSync(policy(), started)
    internals._unresolved.cache_clear()
    sync = SglangSync(policy(), started)
    sync.push()
    sync.close()


def test_a_hook_without_its_target_is_only_logged(
    started: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the words that a refusal names."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    owner, _, name = HOOKED.rpartition(".")
    monkeypatch.delattr(pkgutil.resolve_name(owner), name)
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    HookRegistry.register(HOOKED, plugin.check_weights, HookType.AROUND)
    HookRegistry.apply_hooks()
    assert f"Failed to apply hooks to {HOOKED}" in caplog.text


@pytest.mark.parametrize("name", ["release_memory_occupation", "resume_memory_occupation", "offload_tags"])
def test_a_scheduler_of_a_release_that_lacks_a_name(started: Any, name: str) -> None:
    """(Pretended.)"""
    model = policy()
    sync = SglangSync(model, started)
    sync.push()
    held = sync.states()
    do(started, "lack", name)
    with pytest.raises(PushRefused, match=rf"does not offer \S+\.{name}; 0\.5\.17 and 0\.5\.23 are supported"):
        sync.push()
    do(started, "mend")
    assert sync.states() == held
    assert_answers(ask(started), model)
    sync.close()


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
def test_engines_that_draft_tokens(started: Any, algorithm: str) -> None:
    """With a model, which no push reaches; NGRAM has no weights. (Pretended.)"""
    model = policy()
    sync = SglangSync(model, started)
    sync.push()
    held = sync.states()
    policies.train(model)
    do(started, "draft", algorithm)
    if algorithm == "NGRAM":
        sync.push()
    else:
        with pytest.raises(PushRefused, match=rf"drafts tokens with a model \({algorithm}\).*speculative_algorithm"):
            sync.push()
        assert sync.states() == held
        do(started, "mend")
        sync.push()
    assert_answers(ask(started), model)
    sync.close()


@pytest.mark.parametrize("name", ["_session", "_weight_update_in_progress"])
def test_an_update_of_sglangs_own_is_under_way(started: Any, name: str) -> None:
    """(Pretended: from 0.5.21 on.)"""
    model = policy()
    sync = SglangSync(model, started)
    sync.push()
    held = sync.states()
    do(started, "update", name)
    with pytest.raises(PushRefused, match="end_weight_update"):
        sync.push()
    do(started, "mend")
    assert sync.states() == held
    sync.close()
