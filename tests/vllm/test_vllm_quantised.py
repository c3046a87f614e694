"""Pushes into engines that quantise what they load: what vLLM itself makes of the merged checkpoint, bit for bit.

On a CPU vLLM has kernels for FP8 by channels; the other formats are in test_vllm_quantised_gpu.py, and engines whose
checkpoint is quantised in test_vllm_compressed.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import models
import pytest
import quantised
import torch
from engines import ask, engine, train
from torch import nn

from lora_merge import LoraMergeError, MergedWeights, PushFailed, PushRefused, VllmSync
from lora_merge.engine.vllm.loading.direct import DirectLayers
from lora_merge.engine.vllm.loading.formats import bring_scales_back, calibrated_scales, refusal, stale_scales
from lora_merge.engine.worker.modules import Modules
from lora_merge.serve import load_adapter, unload_adapter
from lora_merge.stream.bucket_writer import BucketWriter
from lora_merge.stream.direct_targets import DirectTargets
from lora_merge.verify import coverage

DENSE = {"target_modules": engines.LINEARS}
MOE = {"target_modules": engines.LINEARS[:4], "target_parameters": engines.EXPERTS}
BUCKET = 1 << 17
CHANNELS = {"quantization": "fp8_per_channel", "worker_extension_cls": "quantised.Watched"}
READ = {"load_format": "auto"}
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def policy(seed: int = 0, build: Any = engines.qwen2, **options: Any) -> Any:
    return models.with_lora(build, dtype=torch.bfloat16, seed=seed, **DENSE | options)


def untied() -> nn.Module:
    return engines.qwen2(tied=False)


def bits(llm: Any) -> list[dict[str, str]]:
    return llm.collective_rpc("bits")


def mean_gap(outputs: Any, model: Any) -> float:
    return float(engines.log_prob_errors(outputs, model).mean())


def assert_close(llm: Any, model: Any, lora: Any = None) -> None:
    """Log-probs are the trainer's as far as FP8 goes: 0.04 off in the mean of nine policies that were measured, and
    0.54 without the adapter."""
    outputs = ask(llm, lora)
    assert mean_gap(outputs, model) < 0.08
    with model.disable_adapter():
        assert mean_gap(outputs, model) > 0.3


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, list[dict[str, str]]]]:
    """An engine in this process that was started on a merged checkpoint, the policy that was merged, and the bits that
    vLLM made of it."""
    model, folder = policy(), tmp_path_factory.mktemp("one")
    train(model)
    merged = quantised.save_merged(model, folder / "merged")
    with engine(model, merged, **CHANNELS | READ | {"enable_lora": True, "max_lora_rank": 8}) as llm:
        yield llm, model, bits(llm)


@pytest.fixture
def anew(one: Any) -> Iterator[tuple[Any, Any, list[dict[str, str]]]]:
    """`one`, of which no push knows anything yet, and none will know what one did here."""
    quantised.served(one[0]).__dict__.pop("_lora_merge", None)
    yield one
    quantised.served(one[0]).__dict__.pop("_lora_merge", None)


@pytest.mark.parametrize("merge", ["trainer", "engine"])
def test_the_bits_are_those_of_a_fresh_engine_on_the_merged_checkpoint(one: Any, merge: str) -> None:
    """After other policies were there, too; in either place of merging, and checked on the way."""
    llm, model, fresh = one
    other = policy(seed=1)
    train(other, 5)
    with closing(VllmSync(other, llm, bucket_bytes=BUCKET)) as sync:
        sync.push()
        assert bits(llm) != fresh
    with closing(VllmSync(model, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in range(2):
            train(model, step)
            sync.push(verify=step == 0)
            assert_close(llm, model)
        model.load_state_dict(start, strict=False)
        assert sync.push().merge == merge
        assert bits(llm) == fresh
        (covered,) = coverage(llm)
        assert covered.complete, covered
        assert [state.kind for state in sync.states()] == ["merged"]


def test_layers_are_written_as_they_lie(one: Any) -> None:
    """By a trainer in the engine's process, in one bucket or across several, which share no rank's scale: no layer that
    vLLM quantises is reloaded, but for those that come in a bucket with what can only be reloaded (here the head)."""
    llm, model, fresh = one
    for bucket_bytes, most in ((1 << 16, 2), (BUCKET, 5)):
        with closing(VllmSync(model, llm, bucket_bytes=bucket_bytes)) as sync:
            start = {name: p.detach().clone() for name, p in model.named_parameters()}
            train(model, 7)
            with quantised.reloaded(llm) as found:
                report = sync.push(verify=True)
            assert sum("layers" in path for path in found) <= most, found
            assert report.reloaded == len(found), report
            assert_close(llm, model)
            memory = {name: p.data_ptr() for name, p in quantised.served(llm).named_parameters()}
            model.load_state_dict(start, strict=False)
            with quantised.reloaded(llm) as found:
                sync.push()
            assert sum("layers" in path for path in found) <= most, found
            assert bits(llm) == fresh
            assert memory == {name: p.data_ptr() for name, p in quantised.served(llm).named_parameters()}


def test_layers_with_a_bias_are_written_if_vllm_loads_that_on_the_meta_device(
    one: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.26 does; later ones leave it out of what a layer is opened with."""
    from vllm.model_executor.model_loader.reload import layerwise, meta

    llm, model, fresh = one
    monkeypatch.setattr(meta, "SKIP_TENSORS", meta.SKIP_TENSORS - {"bias"})
    biased = [m for m in quantised.served(llm).modules() if m._parameters.get("bias") is not None]
    assert biased
    for layer in biased:
        recorded, _ = layerwise.get_layerwise_info(layer).restore_metadata
        monkeypatch.setitem(recorded, "bias", meta.to_meta_tensor(layer.bias))
    quantised.served(llm).__dict__.pop("_lora_merge", None)
    try:
        with closing(VllmSync(model, llm, bucket_bytes=1 << 16)) as sync:
            for step in range(2):
                with quantised.reloaded(llm) as found:
                    sync.push(verify=step == 0)
                assert not any("layers" in path for path in found), found
                assert bits(llm) == fresh
    finally:
        quantised.served(llm).__dict__.pop("_lora_merge", None)


@pytest.mark.parametrize("part", ["weight", "scales"])
def test_a_layer_that_is_written_wrong_shows(one: Any, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one bit of a value, or of a scale."""
    llm, model, fresh = one
    with closing(VllmSync(model, llm, bucket_bytes=1 << 16)) as sync:
        with monkeypatch.context() as patched:
            patched.setattr(
                BucketWriter, "write_direct", quantised.wrong_in_one_bit(part, "model.layers.1.mlp.down_proj.weight")
            )
            with pytest.raises(PushFailed, match="did not arrive as they were sent"):
                sync.push(verify=True)
        assert [state.kind for state in sync.states()] == ["dirty"]
        sync.push(verify=True)
    assert bits(llm) == fresh


def test_layers_are_reloaded_where_vllm_makes_other_bits(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantiser that is not ours, in one bit of one scale or value, is found out before anything is written."""
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod as Method

    llm, model, fresh = one
    process = Method.process_weights_after_loading
    for name in ("weight", "weight_scale"):

        def other(self: Any, layer: Any, name: str = name) -> None:
            process(self, layer)
            getattr(layer, name).data.view(torch.uint8)[3, 0] ^= 1

        with monkeypatch.context() as patched:
            patched.setattr(Method, "process_weights_after_loading", other)
            quantised.served(llm).__dict__.pop("_lora_merge", None)
            with closing(VllmSync(model, llm, bucket_bytes=1 << 16)) as sync, quantised.reloaded(llm) as found:
                sync.push()
            assert sum("layers" in path for path in found) == 8, found
            assert bits(llm) != fresh
        with closing(VllmSync(model, llm, bucket_bytes=1 << 16)) as sync:
            sync.push()
        assert bits(llm) == fresh


def of_layers(paths: list[str]) -> set[str]:
    return {path for path in paths if "layers" in path}


def linear(llm: Any) -> list[Any]:
    """The layers of an engine that hold FP8."""
    return [m for m in quantised.served(llm).modules() if m._parameters.get("weight_scale") is not None]


@pytest.mark.parametrize("who", ["another push", "vLLM"])
def test_layers_that_a_reload_leaves_with_tensors_of_their_own_are_not_written(
    anew: Any, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As experts on GPUs: their kernel reads scales that lie where no parameter is, and what was found of the same
    layers before does not count any more."""
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod as Method

    llm, model, fresh = anew
    process = Method.process_weights_after_loading

    def keeping(self: Any, layer: Any) -> None:
        process(self, layer)
        layer.kept_by_kernel = layer.weight_scale.data

    try:
        with closing(VllmSync(model, llm, bucket_bytes=1 << 16)) as sync:
            with quantised.reloaded(llm) as found:
                sync.push()
            assert not of_layers(found)
            with monkeypatch.context() as patched:
                patched.setattr(Method, "process_weights_after_loading", keeping)
                if who == "vLLM":
                    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(MergedWeights(model))})
                else:
                    with closing(VllmSync(model, llm, merge="engine", bucket_bytes=1 << 16)) as other:
                        other.push()
            assert all(hasattr(layer, "kept_by_kernel") for layer in linear(llm))
            with quantised.reloaded(llm) as found:
                sync.push()
            assert len(of_layers(found)) == 8, found
        assert bits(llm) == fresh
    finally:
        for layer in linear(llm):
            layer.__dict__.pop("kept_by_kernel", None)


def test_layers_whose_format_changes_between_pushes_are_tried_anew(anew: Any) -> None:
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod as Method

    class Other(Method):
        """Scales that are not ours, in one bit."""

        def process_weights_after_loading(self, layer: Any) -> None:
            super().process_weights_after_loading(layer)
            layer.weight_scale.data.view(torch.uint8)[3, 0] ^= 1

    llm, model, fresh = anew
    before = [layer.quant_method for layer in linear(llm)]
    with closing(VllmSync(model, llm, bucket_bytes=1 << 16)) as sync:
        sync.push()
        try:
            for layer, method in zip(linear(llm), before, strict=True):
                layer.quant_method = Other.__new__(Other)
                vars(layer.quant_method).update(vars(method))
            with quantised.reloaded(llm) as found:
                sync.push()
            assert len(of_layers(found)) == 8, found
            assert bits(llm) != fresh
        finally:
            for layer, method in zip(linear(llm), before, strict=True):
                layer.quant_method = method
            quantised.served(llm).__dict__.pop("_lora_merge", None)  # what is reloaded stays so
        with quantised.reloaded(llm) as found:
            sync.push()
        assert not of_layers(found)
    assert bits(llm) == fresh


def test_what_is_known_of_an_engine_is_kept_until_it_changes(anew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether layers are reloaded or written: it took most of the time before a push."""
    from lora_merge.engine.vllm import unfit

    llm, model, fresh = anew
    asked: list[str] = []

    def told(modules: Modules) -> str:
        asked.append(refusal(modules))
        return asked[-1]

    monkeypatch.setattr(unfit, "refusal", told)
    for bucket_bytes, reloads in ((1 << 16, False), (1 << 24, True)):
        asked.clear()
        with closing(VllmSync(model, llm, bucket_bytes=bucket_bytes)) as sync:
            for _ in range(4):
                with quantised.reloaded(llm) as found:
                    sync.push()
                assert bool(of_layers(found)) == reloads
            assert len(asked) <= 1
            for layer in linear(llm)[:1]:  # a parameter that is another one, and data that has moved
                layer.weight_scale = nn.Parameter(layer.weight_scale.data.clone(), requires_grad=False)
                layer.weight.data = layer.weight.t().clone().t()
            sync.push()
            assert bits(llm) == fresh
            layer = linear(llm)[-1]
            with monkeypatch.context() as patched:
                patched.setattr(layer, "quant_method", Method())
                with pytest.raises(PushRefused, match="not known to be made again"):
                    sync.push()
            sync.push()
    assert bits(llm) == fresh


def test_what_lies_there_is_the_merge_to_a_rounding_of_the_format(one: Any) -> None:
    """And what is computed is what these roundings make."""
    llm, model, _ = one
    with closing(VllmSync(model, llm, bucket_bytes=BUCKET)) as sync:
        sync.push()
    assert quantised.assert_rounded_once(quantised.exact_merge(model), quantised.served(llm)) == 8
    outputs = ask(llm)
    with quantised.computing_alike(model, quantised.served(llm)) as alike:
        assert mean_gap(outputs, alike) < 0.035  # bf16 activations, some of which round to the other of two FP8 values


def test_an_adapter_beside_the_quantised_base(one: Any) -> None:
    """vLLM's own LoRA: only the adapter crosses, the base keeps its bits, and merged mode is the way back."""
    llm, model, _ = one
    with closing(VllmSync(model, llm, mode="adapter", bucket_bytes=BUCKET)) as sync:
        assert sync.push().base_sent
        base = bits(llm)
        assert_close(llm, model, sync.lora_request())
        for step in range(2):
            train(model, step + 3)
            assert not sync.push().base_sent
            assert bits(llm) == base
            assert_close(llm, model, sync.lora_request())
        sync.push(mode="merged")
        assert_close(llm, model)
        assert sync.push(mode="adapter").base_sent
        assert bits(llm) == base


def test_a_push_that_breaks_off_in_the_middle_of_a_layer(anew: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer is closed again, the engine dirty, and the next push heals it."""
    llm, model, _ = anew
    monkeypatch.setattr(DirectLayers, "targets", lambda *_: DirectTargets({}))  # all are reloaded
    with closing(VllmSync(model, llm, bucket_bytes=BUCKET)) as sync:
        quantised.assert_heals(llm, sync, bits)


def test_what_was_changed_behind_our_back_shows(one: Any) -> None:
    """The fingerprint reads FP8 values and scales."""
    llm, model, _ = one
    for name in ("weight", "weight_scale"):
        with closing(VllmSync(model, llm, bucket_bytes=BUCKET)) as sync:
            sync.push()
            assert [state.kind for state in sync.states()] == ["merged"]
            layer = quantised.served(llm).get_submodule("model.layers.1.mlp.down_proj")
            layer = getattr(layer, "base_layer", layer)
            getattr(layer, name).view(torch.uint8).bitwise_xor_(1)
            assert [state.kind for state in sync.states()] == ["dirty"]


def hostile(odd: float = 0.0) -> nn.Module:
    """Rows of zeros, a row with the largest value that there is, infinities, and something odd."""
    model = untied()
    with torch.no_grad():
        for layer in model.model.layers:
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight, layer.mlp.up_proj.weight):
                weight[:4] = 0
                weight[8, 3], weight[9, 5], weight[10, 7] = 3.3e38, torch.inf, odd
                weight[11] = 1e-40
    return model


def test_values_that_have_no_scale_become_what_vllm_makes_of_them(tmp_path: Path) -> None:
    model = models.with_lora(hostile, dtype=torch.bfloat16, target_modules=["q_proj", "gate_proj"])
    merged = quantised.save_merged(model, tmp_path / "merged")
    with engine(model, merged, **CHANNELS | READ) as llm:
        fresh = bits(llm)
        for merge in ("trainer", "engine"):
            with closing(VllmSync(policy(2, untied), llm, bucket_bytes=BUCKET)) as sync:
                sync.push()
                assert bits(llm) != fresh
            with closing(VllmSync(model, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
                sync.push()
                assert bits(llm) == fresh
        # A NaN shows, whoever quantises; its sign is nobody's.
        model = models.with_lora(partial(hostile, torch.nan), dtype=torch.bfloat16, target_modules=["q_proj"])
        for merge in ("trainer", "engine"):
            with closing(VllmSync(model, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
                sync.push()
            for layer in quantised.served(llm).model.layers:
                scale = layer.mlp.down_proj.weight_scale.view(-1)
                assert [i for i, x in enumerate(scale.tolist()) if x != x] == [10]


def test_formats_that_are_mixed_in_one_model(tmp_path: Path) -> None:
    """FP8 linear layers, but for one, and plain experts (vLLM's CPU experts have no FP8)."""
    model = models.with_lora(engines.qwen3_moe, dtype=torch.bfloat16, **MOE)
    train(model)
    merged = quantised.save_merged(model, tmp_path / "merged")
    mixed = {"linear": "fp8_per_channel", "ignore": ["model.layers.0.self_attn.o_proj"]}
    options = CHANNELS | READ | {"quantization": "online", "quantization_config": mixed}
    with engine(model, merged, **options) as llm:
        kinds = {p.dtype for p in quantised.served(llm).parameters()}
        assert kinds == {torch.float8_e4m3fn, torch.bfloat16, torch.float32}
        fresh = bits(llm)
        for merge in ("trainer", "engine"):
            with closing(VllmSync(model, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
                start = {name: p.detach().clone() for name, p in model.named_parameters()}
                train(model, 4)
                sync.push()
                assert bits(llm) != fresh
                model.load_state_dict(start, strict=False)
                sync.push()
                assert bits(llm) == fresh


def test_adapters_from_folders(tmp_path: Path) -> None:
    """Onto what the engine was started from, and off again."""
    model = policy()
    train(model)
    engines.save_base(model.get_base_model(), base := tmp_path / "base")
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(tmp_path / "adapter")
    with engine(model, base, **CHANNELS | READ) as llm:
        before = bits(llm)
        load_adapter(llm, tmp_path / "adapter")
        loaded = bits(llm)
        assert_close(llm, model)
        unload_adapter(llm)
        assert bits(llm) == before
        with closing(VllmSync(model, llm, bucket_bytes=BUCKET)) as sync:
            sync.push()
        assert bits(llm) == loaded


MODELS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "a head without a name": (engines.gemma2, DENSE, {}),
    "experts that pass by their loaders": (engines.gpt_oss, MOE, {}),
    "latent attention": (
        engines.deepseek_v3,
        {"target_modules": ["q_proj", "kv_b_proj", "o_proj"]},
        {"attention_backend": "CPU_MLA"},
    ),
    "a vision tower": (
        engines.idefics3,
        {"target_modules": ["q_proj", "v_proj", "o_proj", "fc1"]},
        {"limit_mm_per_prompt": {"image": 0}},
    ),
    "a bias that loading makes": (engines.phi, {"target_modules": ["q_proj", "v_proj", "fc1"]}, {"processes": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, tmp_path: Path) -> None:
    build, adapter, options = MODELS[name]
    model, other = (models.with_lora(build, dtype=torch.bfloat16, seed=seed, **adapter) for seed in range(2))
    merged = quantised.save_merged(model, tmp_path / "merged")
    linear = {"quantization": "online", "quantization_config": {"linear": "fp8_per_channel"}}
    with engine(model, merged, **CHANNELS | READ | linear | options) as llm:
        fresh = bits(llm)
        for merge in ("trainer", "engine"):
            for policy, same in ((other, False), (model, True)):
                with closing(VllmSync(policy, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
                    sync.push()
                    assert (bits(llm) == fresh) == same, merge


@pytest.mark.parametrize(
    ("dtype", "loaded"),
    [(torch.float32, "bfloat16"), (torch.float16, "bfloat16"), (torch.float32, "float16"), (torch.bfloat16, "float16")],
)
def test_a_trainer_of_another_dtype_is_rounded_once_before_it_is_quantised(
    dtype: torch.dtype, loaded: str, tmp_path: Path
) -> None:
    """To what the engine loads, in layers that are reloaded and in those that are written as they lie. Engines that
    merge would round the base before they add to it, and are refused."""
    model = models.with_lora(engines.qwen2, **DENSE, dtype=dtype)
    merged = quantised.save_merged(model, tmp_path / "merged", torch.float32)
    with engine(model, merged, **CHANNELS | READ | {"dtype": loaded}) as llm:
        fresh = bits(llm)
        with closing(VllmSync(policy(1), llm, bucket_bytes=BUCKET)) as sync:
            sync.push()
            assert bits(llm) != fresh
        with closing(VllmSync(model, llm, bucket_bytes=BUCKET)) as sync:
            sync.push()
            assert bits(llm) == fresh
        with (
            closing(VllmSync(model, llm, merge="engine")) as sync,
            pytest.raises(PushRefused, match="it would be rounded twice"),
        ):
            sync.push()
        assert bits(llm) == fresh


# Engines of several workers, which take scales of the whole of a matrix that is cut


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, list[dict[str, str]]]]:
    """As `one`, on two tensor-parallel workers, of a model without biases: on a CPU with AMX an engine that is not
    quantised keeps them in float32, and would be no replica of one that is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        model, folder = policy(build=engines.llama), tmp_path_factory.mktemp("wide")
        train(model)
        merged = quantised.save_merged(model, folder / "merged")
        with engine(model, merged, processes=True, tensor_parallel_size=2, **CHANNELS | READ) as llm:
            yield llm, model, bits(llm)


@pytest.mark.parametrize("merge", ["trainer", "engine"])
def test_matrices_that_are_cut_have_scales_of_the_whole(wide: Any, merge: str) -> None:
    llm, model, fresh = wide
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with closing(VllmSync(model, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
        train(model, 1)
        sync.push()
        assert bits(llm) != fresh
        assert_close(llm, model)
        model.load_state_dict(start, strict=False)
        sync.push(verify=merge == "trainer")
        assert bits(llm) == fresh


@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
def test_nobody_waits_for_a_worker_that_failed(wide: Any, ranks: list[int]) -> None:
    """The other one stood in a collective for a scale, for ever."""
    llm, model, _ = wide
    for merge, phases in (
        ("trainer", ["begin_full", "receive", "bucket", "bucket 3", "finish", "commit"]),
        ("engine", ["merge", "products", "unmerge", "receive"]),
    ):
        with closing(VllmSync(model, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
            sync.push()
            train(model, 1, 0.01)
            sync.push()
            wanted = bits(llm)
            for phase in phases:
                name, _, after = phase.partition(" ")
                if merge == "engine" and name == "receive":
                    with closing(VllmSync(policy(3, engines.llama), llm, bucket_bytes=BUCKET)) as another:
                        another.push()  # so that the base has to come again
                llm.collective_rpc("fail", args=(name, ranks, int(after or 0)))
                with pytest.raises(LoraMergeError, match=f"injected into {name}"):
                    sync.push()
                assert llm.collective_rpc("mend") == ["well"] * 2, "answers are to this call"
                assert [state.kind for state in sync.states()] == ["dirty"]
                sync.push()
                assert bits(llm) == wanted, phase


def test_the_trainer_fails_while_scales_are_agreed_on(wide: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_merge.stream.bucket_writer import BucketWriter

    llm, model, _ = wide
    fill = BucketWriter.fill
    with closing(VllmSync(model, llm, bucket_bytes=BUCKET)) as sync:
        sync.push()
        for at in (0, 2, len(sync._weights.bucket_writer().table) - 1):

            def broken(self: BucketWriter, number: int, *args: Any, at: int = at) -> None:
                if number == at:
                    raise RuntimeError("injected")
                fill(self, number, *args)

            with monkeypatch.context() as patched:
                patched.setattr(BucketWriter, "fill", broken)
                with pytest.raises(PushFailed, match="injected"):
                    sync.push()
            assert [state.kind for state in sync.states()] == ["dirty"]
            sync.push()
            assert_close(llm, model)


def test_replicas_in_different_formats_and_one_that_comes_back_in_another(wide: Any, tmp_path: Path) -> None:
    """One stream serves a bf16 engine and an FP8 one: each gets it as it loads it. Behind a handle another engine may
    answer one day, in another format, as a server's URL does when it is started anew."""
    llm, model = wide[0], policy(build=engines.llama)  # not `wide`'s: what FP8 costs grows with training
    with (
        engine(model, tmp_path / "base") as plain,
        closing(VllmSync(model, [plain, llm], bucket_bytes=BUCKET)) as sync,
    ):
        for step in range(2):
            train(model, step, 0.01)
            sync.push(verify=step == 0)
            assert_close(llm, model)
            assert mean_gap(ask(plain), model) < 0.02
        wanted = bits(llm)
        for first, second in ((llm, plain), (plain, llm)):
            sync._trainer.controls[0].engine, sync._trainer.controls[1].engine = first.llm_engine, second.llm_engine
            train(model, 5, 0.01)
            sync.push()
            assert bits(llm) != wanted
            wanted = bits(llm)
            assert_close(llm, model)
            assert mean_gap(ask(plain), model) < 0.02


class Method:
    """A way to compute with weights that is not vLLM's plain one."""


class UnquantizedAnything(Method):
    pass


class Online(Method):
    uses_meta_device = True


class Experts(Online):
    moe = SimpleNamespace(tp_size=4)


@pytest.mark.parametrize(
    ("method", "dtype", "said"),
    [
        (UnquantizedAnything, torch.bfloat16, ""),
        (Online, torch.bfloat16, ""),
        (Online, torch.float8_e4m3fn, "layer.weight is loaded as torch.float8_e4m3fn (Online)"),  # made anew of FP8
        (Method, torch.uint8, "layer.weight is loaded as torch.uint8 (Method)"),  # MXFP4, GPTQ, AWQ, GGUF
        (Method, torch.bfloat16, "layer (Method) after loading that is not known to be made again"),  # torchao
        (Experts, torch.bfloat16, "together with other data-parallel engines"),
    ],
)
def test_what_is_refused(method: Any, dtype: torch.dtype, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=2))
    model = nn.ModuleDict({"layer": nn.Module(), "attention": nn.Module()})
    model["layer"].weight = nn.Parameter(torch.empty(4, 4).to(dtype), requires_grad=False)
    model["layer"].quant_method = method()
    model["attention"].quant_method, model["attention"].kv_cache_dtype = Method(), "fp8"  # scales, and no weights
    record_metadata_for_reloading(model)
    refused = refusal(Modules(model))
    assert said in refused
    assert bool(said) == bool(refused)


def test_scales_that_are_computed_once_or_random_are_refused() -> None:
    calibrated = "attn (k_scale 0.1, v_scale 0.1)"
    assert "calculate_kv_scales" in stale_scales(SimpleNamespace(calculate_kv_scales=True), "auto", "")
    assert "random" in stale_scales(SimpleNamespace(), "dummy", calibrated)
    assert not stale_scales(SimpleNamespace(calculate_kv_scales=False), "auto", calibrated)
    assert not stale_scales(SimpleNamespace(), "dummy", "")


def test_scales_that_are_lost_in_sleep_come_back() -> None:
    """vLLM 0.26 has those of compressed-tensors as parameters, whose memory sleep at level 2 gives back."""
    model = nn.ModuleDict({"attention": nn.Module()})
    layer: Any = model["attention"]
    layer.kv_cache_dtype, layer._k_scale_float, layer._v_scale_float, layer._q_scale_float = "fp8", 0.25, 0.5, 1.0
    for name in ("_k_scale", "_v_scale", "_q_scale"):
        layer.register_parameter(name, nn.Parameter(torch.tensor([torch.nan]), requires_grad=False))
    modules = Modules(model)
    assert calibrated_scales(modules) == "attention (k_scale 0.25, v_scale 0.5)"
    bring_scales_back(modules)
    found = [layer._k_scale, layer._v_scale, layer._q_scale]
    assert torch.equal(torch.cat(found), torch.tensor([0.25, 0.5, 1.0]))
    layer._k_scale = nn.Parameter(torch.tensor([0.25, 0.125]), requires_grad=False)  # by heads
    bring_scales_back(modules)
    assert torch.equal(layer._k_scale, torch.tensor([0.25, 0.125]))
    layer._k_scale.zero_()
    with pytest.raises(RuntimeError, match=r"attention: .*were lost.*start the engine anew"):
        bring_scales_back(modules)
    layer.kv_cache_dtype = "auto"  # nothing computes with them
    bring_scales_back(Modules(model))
    assert calibrated_scales(Modules(model)) == ""
