"""Pushes into an in-process engine, model by model; every engine starts with random weights."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import models
import numpy as np
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

from lora_merge import MergedWeights, PushFailed, PushRefused, VllmSync
from lora_merge.engine.vllm import worker as worker_module
from lora_merge.engine.vllm.loading.loader import Loader
from lora_merge.engine.vllm.sync import compiled_classes, forward_complaint
from lora_merge.engine.worker.modules import Modules
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


@pytest.mark.parametrize("name", ["gemma2", "cohere"])
def test_a_head_that_the_engine_has_no_name_for(name: str, tmp_path: Path) -> None:
    """vLLM's classes have no head of their own there, and refuse or pass over its name: both were an error."""
    model = models.with_lora(getattr(engines, name), **DENSE)
    with engine(model, tmp_path / "base", enable_lora=True, max_lora_rank=8) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step, mode in enumerate(["merged", "merged", "adapter"]):
            train(model, step)
            report = sync.push(mode=mode, verify=True)
            assert set(report.left_out) == {"lm_head.weight"}, report
            assert_answers(ask(llm, sync.lora_request()), model)
        apart = models.with_lora(getattr(engines, name), target_modules=["embed_tokens"])
        with pytest.raises(PushRefused, match=r"lm_head\.weight is (refused|surplus)"):  # another tensor than that
            VllmSync(apart, llm).push()
        untied = getattr(engines, name)()
        untied.lm_head.weight = nn.Parameter(untied.lm_head.weight * 2)  # it was left out for Cohere, without a word
        with pytest.raises(PushRefused, match=r"lm_head\.weight is (refused|surplus)"):
            VllmSync(models.with_lora(lambda: untied, **DENSE), llm).push()


def test_a_parameter_that_loading_makes(tmp_path: Path) -> None:
    """vLLM makes the bias of a head when it comes: the dry run ended in "Cannot copy out of meta tensor"."""
    model = models.with_lora(engines.phi, target_modules=["q_proj", "v_proj", "fc1"])
    with engine(model, tmp_path / "base", processes=True) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            sync.push(verify=True)
            assert_answers(ask(llm), model)
            with torch.no_grad():
                model.base_model.model.lm_head.bias.mul_(-2)


def test_classes_that_an_engine_in_this_process_has_changed(tmp_path: Path) -> None:
    """vLLM's Transformers backend decorates transformers' classes: the trainer's forward fails after that."""
    model, other = models.with_lora(engines.olmo2, target_modules=["q_proj"]), engines.qwen2()
    assert forward_complaint(model) == ""
    with engine(model, tmp_path / "base") as llm:
        assert compiled_classes(model) == ["Olmo2Model"]
        assert "Olmo2Model of transformers" in forward_complaint(model)
        assert forward_complaint(other) == ""
        with pytest.raises(AttributeError, match="do_not_compile"):
            model(torch.tensor([[1, 2, 3]]))
        with pytest.warns(UserWarning, match=r"Olmo2Model of transformers.*VLLM_ENABLE_V1_MULTIPROCESSING=1"):
            sync = VllmSync(model, llm)
        sync.push(verify=True)  # weights go over all the same


def test_experts_that_pass_by_their_loaders(tmp_path: Path) -> None:
    """vLLM's reload does not see what GPT-OSS copies into its experts: they lost their kernel, and kept old weights."""
    model = models.with_lora(engines.gpt_oss, **MOE)
    with engine(model, tmp_path / "base") as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            sync.push(verify=True)
            assert_answers(ask(llm), model)
        before = ask(llm)
        worker = llm.llm_engine.model_executor.driver_worker.worker
        side, load = worker_module.session_of(worker.get_model(), worker.model_config, worker.device), Loader.load
        # A push that breaks off while a layer's tensors lie where they are loaded: the layer is closed again.
        with pytest.MonkeyPatch.context() as patch:

            def broken(self: Loader, examination: Any, index: int, *rest: Any) -> None:
                load(self, examination, index, *rest)
                if self._reload is not None and self._reload._open:
                    raise RuntimeError("broken off")

            patch.setattr(Loader, "load", broken)
            with pytest.raises(PushFailed, match="broken off"):
                sync.push()
        assert all(not parameter.is_meta for parameter in worker.get_model().parameters())
        assert side.loader._reload is None
        sync.push(verify=True)
        assert_answers(ask(llm), model)
        assert [o.outputs[0].token_ids for o in before] == [o.outputs[0].token_ids for o in ask(llm)]


def test_a_model_of_another_size_is_told_in_a_line(tmp_path: Path) -> None:
    """It gave twenty lines, most of them `AssertionError:` and nothing else."""
    model = engines.qwen2(tied=False).eval()
    with engine(model, tmp_path / "base") as llm:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        small = Qwen2ForCausalLM(Qwen2Config(**engines.SIZES | {"hidden_size": 64}))
        with pytest.raises(PushRefused) as refused:
            VllmSync(small, llm).push()
        said = str(refused.value).splitlines()
        assert len(said) == 2, refused.value
        assert "model.embed_tokens.weight is [256, 64] here and [256, 128] there (and " in said[1]
        vocabulary = Qwen2ForCausalLM(Qwen2Config(**engines.SIZES | {"vocab_size": 200}))
        with pytest.raises(PushRefused, match=r"embed_tokens\.weight is \[200, 128\] here and \[256, 128\] there"):
            VllmSync(vocabulary, llm).push()
        wide = Qwen2ForCausalLM(Qwen2Config(**engines.SIZES | {"intermediate_size": 128}))
        with pytest.raises(PushRefused) as refused:
            VllmSync(wide, llm).push()
        assert "AssertionError" not in str(refused.value), refused.value
        sync = VllmSync(model, llm)
        sync.push()
        assert_answers(ask(llm), model)


def read(kind: str, weight: torch.Tensor) -> Any:
    """Ways in which a `load_weights` looks at values."""
    return {
        "item": lambda: weight.view(-1)[0].item(),
        "bool": lambda: bool((weight > 0).all()),
        "any": lambda: bool(weight.any()),
        "equal": lambda: torch.equal(weight, torch.zeros(weight.shape)),
        "allclose": lambda: torch.allclose(weight, torch.zeros(weight.shape)),
        "cpu": lambda: weight.cpu().numpy().sum(),
        "to": lambda: weight.to("cpu", torch.float64).tolist(),
        "float": lambda: float(weight.float().max()),
        "list": lambda: weight.tolist(),
        "array": lambda: np.asarray(weight).mean(),
        "nonzero": lambda: len(weight.nonzero()),
        "unique": lambda: weight.unique().numel(),
        "branch": lambda: weight[weight > 0].sum(),
        "int": lambda: int(weight.sum()),
    }[kind]()


READS = ["item", "bool", "any", "equal", "allclose", "cpu", "to", "float", "list", "array", "nonzero", "unique",
         "branch", "int"]  # fmt: skip


@pytest.mark.parametrize("kind", READS)
def test_the_dry_run_survives_reads_of_values(kind: str) -> None:
    """Values are not there yet: a `load_weights` that looks at some is for real when they are."""

    class Reading(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            parameters = dict(self.named_parameters())
            for name, weight in weights:
                if "head" in name:
                    read(kind, weight)
                parameters[name].data.copy_(weight)

    with set_current_vllm_config(VllmConfig()):
        model = Reading(head=nn.Linear(4, 4, bias=False), tail=nn.Linear(4, 4, bias=False))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        names = ["head.weight", "tail.weight"]
        found = loader(model).examine("digest", lay_out([Meta(n, torch.float32, (4, 4)) for n in names], 1 << 20))
        assert not found.answer.refused
        assert not found.answer.missing
        assert "tail.weight" in found.copies
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]), name
        # Sizes are seen, too, whoever reads.
        found = loader(model).examine("other", lay_out([Meta(n, torch.float32, (4, 8)) for n in names], 1 << 20))
        assert found.answer.refused == dict.fromkeys(names, "another size: [4, 8] here and [4, 4] there")


def test_either_way_that_values_decide_counts() -> None:
    """What is loaded only where some value is not zero was taken for missing."""

    class Deciding(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            for _, weight in weights:
                if weight.any():
                    self.head.weight.data.copy_(weight)
                else:
                    self.buffer.zero_()

    with set_current_vllm_config(VllmConfig()):
        model = Deciding(head=nn.Linear(4, 4, bias=False))
        model.register_buffer("buffer", torch.ones(4), persistent=False)
        table = lay_out([Meta("head.weight", torch.float32, (4, 4))], 1 << 20)
        found = loader(model).examine("digest", table)
    assert not found.answer.missing
    assert found.staged == {"head.weight"}
    assert model.buffer.tolist() == [1.0] * 4  # nothing of the engine is written, whatever it is


def test_what_loading_computes_is_loaded_for_real() -> None:
    """Written over before it is copied, or put together from several: no window, and every name that it is of."""

    class Computing(Model):
        def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            found = dict(weights)
            whole = torch.empty(8, 4)
            whole[:4] = found["a"]
            whole[4:].copy_(found["b"])
            self.head.weight.data.copy_(whole)
            found["c"].mul_(2)
            self.tail.weight.data.copy_(found["c"])

    with set_current_vllm_config(VllmConfig()):
        model = Computing(head=nn.Linear(4, 8, bias=False), tail=nn.Linear(4, 4, bias=False))
        table = lay_out([Meta(name, torch.float32, (4, 4)) for name in "abc"], 1 << 20)
        found = loader(model).examine("digest", table)
    assert not found.answer.missing
    assert not found.answer.refused
    assert not found.copies
    assert found.staged == {"a", "b", "c"}


def test_dummy_loaded_buffers_are_pushed(tmp_path: Path) -> None:
    """A dummy-loaded engine's buffers were never synced by a peer: Gemma 4's layer_scalar stayed random."""
    model = models.with_lora(engines.gemma4, target_modules=engines.LINEARS)
    with engine(model, tmp_path / "base") as llm:
        VllmSync(model, llm).push(verify=True)
        assert_answers(ask(llm), model)


def test_buffers_that_vllm_makes_itself_are_made_again(tmp_path: Path) -> None:
    """A dummy load leaves the normalisation of pixels random, and no checkpoint has it: pushes made an engine right in
    all its weights that saw noise. (tests/gpu/test_vllm_gpu.py asks such an engine about an image.)"""
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
    config = SimpleNamespace(dtype=torch.bfloat16, hf_config=SimpleNamespace(architectures=["Modules"]))
    return Loader(Modules(model), config, torch.device("cpu"))


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
        assert not found.answer.missing
        assert not found.answer.refused
        assert [copy.destination.data_ptr() for copy in found.copies["attn.kv_b_proj.weight"]] == [
            layer.kv_b_proj.weight.data_ptr()
        ]
        layer.kv_b_proj.weight = nn.Parameter(torch.empty(0))  # as where vLLM packs it for AMX
        found = loader(Model(attn=layer)).examine("digest", table)
        assert "CPU_MLA" in found.answer.refused["attn.kv_b_proj"]


def test_a_model_that_makes_something_of_all_its_weights_is_refused() -> None:
    """vLLM's own reload does not call this hook, and some models do nothing in it the second time."""

    class Finishing(Model):
        def process_weights_after_loading(self) -> None:
            raise AssertionError("too late")

    with set_current_vllm_config(VllmConfig()):
        table = lay_out([Meta("inner.head.weight", torch.float32, (4, 4))], 1 << 20)
        inner = Finishing(head=nn.Linear(4, 4, bias=False))
        found = loader(Model(inner=inner)).examine("digest", table)
    assert found.answer.refused.keys() == {"inner"}
    assert found.answer.refused["inner"].startswith("Finishing.process_weights_after_loading makes something")


def test_a_step_that_is_of_one_kernel_is_nothing_where_no_layer_runs_it() -> None:
    if find_spec("vllm.models.kimi_k3") is None:
        pytest.skip("this vLLM has no Kimi-Linear of that kind")
    subprocess.run([sys.executable, Path(engines.__file__).with_name("kimi_hook.py")], check=True, timeout=200)


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
