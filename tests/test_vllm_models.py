"""Pushes into an in-process engine, model by model; every engine starts with random weights."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import models
import pytest
import torch
from engines import ask, assert_answers, engine, train
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import set_default_quant_scales
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.utils import replace_parameter
from vllm.v1.attention.backend import AttentionImplBase

from lora_merge import MergedWeights, PushRefused, VllmSync
from lora_merge.engine.vllm.loader import Loader
from lora_merge.engine.vllm.modules import Modules
from lora_merge.stream.buckets import Meta, lay_out
from lora_merge.verify import coverage

MOE = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": engines.EXPERTS}
DENSE = {"target_modules": engines.LINEARS}


@pytest.mark.parametrize("name", ["qwen2", "llama", "qwen3"])
def test_dense_models_in_both_modes(name: str, tmp_path: Path) -> None:
    model = models.with_lora(getattr(engines, name), **DENSE)
    with engine(model, tmp_path / "base", enable_lora=True, max_lora_rank=8) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step, mode in enumerate(["merged", "adapter", "adapter", "merged", "adapter"]):
            train(model, step)
            report = sync.push(mode=mode, verify=step < 2)
            assert (report.version, report.mode) == (step + 1, mode)
            # The base follows a merged push only: a peer reloaded it at every switch and every step.
            assert report.base_sent == (step in (1, 4)), report
            assert_answers(ask(llm, sync.lora_request()), model)
            assert_answers(sync.generate([{"prompt_token_ids": p} for p in engines.prompts()], engines.GREEDY), model)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_merged(name: str, tmp_path: Path) -> None:
    """Peers packed the experts' lora_B rank-major where it is expert-major."""
    model = models.with_lora(getattr(engines, name), **MOE)
    with engine(model, tmp_path / "base") as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            sync.push(verify=True)
            assert_answers(ask(llm), model)
        (covered,) = coverage(llm)
        assert covered.complete, covered
        assert covered.state == "merged@2"


def test_dummy_loaded_buffers_are_pushed(tmp_path: Path) -> None:
    """A dummy-loaded engine's buffers were never synced by a peer: Gemma 4's layer_scalar stayed random."""
    model = models.with_lora(engines.gemma4, target_modules=engines.LINEARS)
    with engine(model, tmp_path / "base") as llm:
        VllmSync(model, llm).push(verify=True)
        assert_answers(ask(llm), model)


def test_buffers_that_vllm_makes_itself_are_made_again(tmp_path: Path) -> None:
    """A dummy load leaves the normalisation of pixels random, and no checkpoint has it: pushes made an engine right in
    all its weights that saw noise. (tests/test_vllm_gpu.py asks such an engine about an image.)"""
    from vllm.model_executor.layers.fusion.mm_input_norm import build_mm_input_norm

    settings = {"do_normalize": True, "do_rescale": True, "rescale_factor": 1 / 255}
    settings |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings | {"image_processor_type": "X"}))
    config = SimpleNamespace(
        model=str(tmp_path),
        revision=None,
        multimodal_config=SimpleNamespace(mm_device_do_normalize=True),
        hf_image_processor_config=settings,
    )
    with set_current_vllm_config(VllmConfig()):
        tower = nn.ModuleDict({"input_norm": build_mm_input_norm(config)})
        wanted = {key: buffer.clone() for key, buffer in tower.named_buffers()}
        for buffer in tower.buffers():
            buffer.uniform_()
        Loader(Modules(tower), config, torch.device("cpu")).finish()
    assert wanted.keys() == {"input_norm.weight", "input_norm.bias"}
    for key, buffer in tower.named_buffers():
        assert torch.equal(buffer, wanted[key]), key


class Layer(nn.Module, AttentionLayerBase):
    """An attention layer that computes from something that it makes of weights after they are loaded."""

    get_attn_backend = get_kv_cache_spec = None  # type: ignore[assignment]

    def __init__(self, **tensors: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, tensor)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        if hasattr(self, "sinks"):  # as FlashInfer's backend
            self.wide = self.sinks.detach().float()
        if hasattr(self, "kv_b_proj"):  # as MLAAttention
            keys, values = self.kv_b_proj.weight.t().view(8, 4, 8).split(4, -1)
            replace_parameter(self, "W_UV", values.transpose(0, 1), prefer_copy=True)
            replace_parameter(self, "W_UK_T", keys.permute(1, 2, 0), prefer_copy=True)


class Model(nn.Module):
    """A model as `load_weights` of vLLM's are."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)


def loader(model: nn.Module) -> Loader:
    return Loader(Modules(model), SimpleNamespace(dtype=torch.bfloat16), torch.device("cpu"))


def test_what_attention_layers_keep_of_weights_is_made_again() -> None:
    """vLLM calls a hook of every attention layer after a reload. It was called of MLA's alone: FlashInfer went on with
    the sinks of the weights that the engine had started with."""
    layer = Layer(sinks=nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)))
    with set_current_vllm_config(VllmConfig()):
        layer.process_weights_after_loading(torch.bfloat16)
        with torch.no_grad():
            layer.sinks.fill_(3)
        loader(Model(attn=layer)).finish()
    assert layer.wide.tolist() == [3.0] * 4


@pytest.mark.parametrize("old", [False, True], ids=["vLLM 0.32", "vLLM 0.26"])
@pytest.mark.parametrize("hook", [False, True], ids=["a backend without a hook", "a backend with one"])
def test_plain_attention_over_a_backend_that_keeps_nothing_is_left_alone(
    hook: bool, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its hook sets scales of the cache back, which are no weights; and takes longer than anything else at the end of a
    push."""
    if old:
        monkeypatch.delattr("vllm.model_executor.layers.attention.is_deferred_attention_layer")
    calls = []

    class Plain(AttentionImplBase):
        pass

    class Keeping(AttentionImplBase):
        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
            calls.append(act_dtype)

    kind: Any = Keeping if hook else Plain
    kind.__abstractmethods__ = frozenset()
    layer = Attention.__new__(Attention)
    nn.Module.__init__(layer)
    layer.impl, layer.quant_config = object.__new__(kind), None
    set_default_quant_scales(layer, register_buffer=True)
    layer._k_scale.fill_(2)
    loader(Model(attn=layer)).finish()
    assert calls == [torch.bfloat16] * hook
    assert layer._k_scale == (1 if hook else 2)


def test_matrices_that_mla_makes_of_a_weight_are_not_waited_for() -> None:
    """vLLM registers them as parameters, views of the weight: what went into it was taken for theirs, and the push
    refused because nothing would fill the weight's other half."""
    layer = Layer(kv_b_proj=nn.Linear(8, 32, bias=False))
    with set_current_vllm_config(VllmConfig()), torch.no_grad():
        layer.process_weights_after_loading(torch.float32)
        table = lay_out([Meta("attn.kv_b_proj.weight", torch.float32, (32, 8))], 1 << 20)
        found = loader(Model(attn=layer)).examine("digest", table)
        assert not found.missing
        assert not found.refused
        assert [copy.destination.data_ptr() for copy in found.copies["attn.kv_b_proj.weight"]] == [
            layer.kv_b_proj.weight.data_ptr()
        ]
        layer.kv_b_proj.weight = nn.Parameter(torch.empty(0))  # as where vLLM packs it for AMX
        found = loader(Model(attn=layer)).examine("digest", table)
        assert "CPU_MLA" in found.refused["attn.kv_b_proj"]


def test_a_model_that_makes_something_of_all_its_weights_is_refused() -> None:
    """vLLM's own reload does not call this hook, and some models do nothing in it the second time."""

    class Finishing(Model):
        def process_weights_after_loading(self) -> None:
            raise AssertionError("too late")

    with set_current_vllm_config(VllmConfig()):
        table = lay_out([Meta("inner.head.weight", torch.float32, (4, 4))], 1 << 20)
        inner = Finishing(head=nn.Linear(4, 4, bias=False))
        found = loader(Model(inner=inner)).examine("digest", table)
    assert found.refused.keys() == {"inner"}
    assert found.refused["inner"].startswith("Finishing.process_weights_after_loading makes something")


def test_multi_head_latent_attention(tmp_path: Path) -> None:
    """As a fresh engine on the merged checkpoint answers. (vLLM's CPU backend is not as exact as transformers.)"""
    model = models.with_lora(engines.deepseek_v3, target_modules=["q_proj", "kv_b_proj", "o_proj"])
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    engines.save_base(copy.deepcopy(model).merge_and_unload(), tmp_path / "merged")
    with engine(model, tmp_path / "merged", load_format="auto", attention_backend="CPU_MLA") as llm:
        sync, answers = VllmSync(model, llm, bucket_bytes=1 << 17), [ask(llm)]
        for step in range(2):
            train(model)
            if step:
                model.load_state_dict(start, strict=False)
            sync.push(verify=True)
            answers.append(ask(llm))
    fresh, trained, again = ([o.outputs[0] for o in outputs] for outputs in answers)
    assert [o.token_ids for o in trained] != [o.token_ids for o in fresh]
    for one, other in zip(fresh, again, strict=True):
        assert one.token_ids == other.token_ids
        for token, before, after in zip(one.token_ids, one.logprobs, other.logprobs, strict=True):
            assert abs(before[token].logprob - after[token].logprob) < 12e-6


def test_an_engine_that_was_started_without_its_vision_tower(tmp_path: Path) -> None:
    """What only the tower would take is left out, and the report says so; not so where the engine holds a tower."""
    model = models.with_lora(engines.idefics3, target_modules=["q_proj", "v_proj", "o_proj", "fc1"])
    with engine(model, tmp_path / "base", limit_mm_per_prompt={"image": 0}) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            report = sync.push(verify=True)
            everything = dict(MergedWeights(model))
            assert set(report.left_out) == {n for n in everything if ".vision_model." in n or ".connector." in n}
            assert report.tensors == len(everything) - len(report.left_out)
            assert f"{len(report.left_out)} left out" in str(report)
            assert_answers(ask(llm), model)
        other = models.with_lora(engines.idefics3, target_modules=["q_proj"])
        other.base_model.model.model.extra = nn.Linear(4, 4)
        with pytest.raises(PushRefused, match=r"model\.extra\.weight"):
            VllmSync(other, llm).push()
        sync.push()
        # As if it had been started anew, with a tower that cannot be loaded: then the tower is sent, and refused.
        served = llm.llm_engine.model_executor.driver_worker.worker.get_model().model
        served.vision_model = served.vision_model.__dict__["module"].to_empty(device="cpu")
        with pytest.raises(PushRefused, match=r"vision_model\.encoder\.layers\.0\.self_attn\.q_proj\.weight is ref"):
            sync.push()


def test_bf16_as_a_fresh_engine_on_the_checkpoint_that_peft_merged(tmp_path: Path) -> None:
    model = models.with_lora(engines.qwen2, dtype=torch.bfloat16, **DENSE)
    with engine(model, tmp_path / "live") as llm:
        VllmSync(model, llm).push()
        pushed = ask(llm)
    merged: nn.Module = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    with engine(merged, tmp_path / "merged", load_format="auto") as llm:
        fresh = ask(llm)
    for one, other in zip(pushed, fresh, strict=True):
        first = one.outputs[0].logprobs[0], other.outputs[0].logprobs[0]
        token = one.outputs[0].token_ids[0]
        # PEFT's bf16 merge rounds as ours does here but for ties broken by the order of float32 sums: one step of
        # 2^-8 in a handful of weights moves a log-prob by far less than this.
        assert abs(first[0][token].logprob - first[1][token].logprob) < 0.02
    assert [o.outputs[0].token_ids for o in pushed] == [o.outputs[0].token_ids for o in fresh]


def test_float32_training_weights_are_rounded_once_to_the_engines_bf16(tmp_path: Path) -> None:
    model = models.with_lora(engines.qwen2, **DENSE)
    with engine(model, tmp_path / "base", dtype="bfloat16") as llm:
        report = VllmSync(model, llm).push(verify=True)
        sizes = {n: p.numel() for n, p in model.named_parameters() if "lora_" not in n}
        # Where vLLM packs weights for AMX, it holds biases in float32.
        biases = sum(size for name, size in sizes.items() if name.endswith("bias"))
        assert report.nbytes - 2 * sum(sizes.values()) in (0, 2 * biases)


def test_full_fine_tuning_without_adapters(tmp_path: Path) -> None:
    model = engines.qwen2().eval()
    with engine(model, tmp_path / "base") as llm:
        sync = VllmSync(model, llm)
        sync.push()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        sync.push()
        assert_answers(ask(llm), model)
