"""Pushes into engines whose checkpoint is quantised: what its tools make of the merged weights, bit for bit.

On a CPU vLLM has kernels for INT8 (channels and tensors) and FP8 by channels; for blocks where there is AMX, and tests
bring one where there is not. FP8 by tensors, and experts, are in test_vllm_quantised_gpu.py; layers that a trainer in
the engine's process writes as they lie are in test_vllm_compressed_written.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import engines
import models
import policies
import pytest
import quantised
import torch
from compressed import (
    arguments,
    by_blocks,
    by_their_tools,
    calibrate,
    compress,
    compress_by_blocks,
    kernel_for_blocks,
)
from engines import ask, engine, train
from torch import Tensor, nn

from lora_merge import LoraMergeError, PushRefused, VllmSync
from lora_merge.engine.vllm.loading.compressed import Scheme
from lora_merge.engine.vllm.loading.formats import refusal
from lora_merge.engine.worker.modules import Modules
from lora_merge.serve import load_adapter
from lora_merge.verify import coverage

BUCKET = 1 << 17
READ = {"load_format": "auto", "worker_extension_cls": "quantised.Watched"}
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def policy(seed: int = 0, build: Any = engines.qwen2, **options: Any) -> Any:
    return models.with_lora(build, dtype=torch.bfloat16, seed=seed, **{"target_modules": engines.LINEARS} | options)


def even() -> nn.Module:
    """A model with a tied head that blocks of 128 divide."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = engines.SIZES | {"num_key_value_heads": 4, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(**sizes))


def held(llm: Any) -> tuple[Any, Any]:
    """Bits of the engine's parameters; and of what it says, as INT8 weights are no parameters on some CPUs."""
    steps = [step for output in ask(llm) for step in output.outputs[0].logprobs]
    return llm.collective_rpc("bits"), [{token: said.logprob for token, said in step.items()} for step in steps]


def is_of_blocks(llm: Any) -> bool:
    """Whether its checkpoint has DeepSeek's blocks, which are written as they lie: test_vllm_compressed_written.py."""
    return any(name.endswith("weight_scale_inv") for name, _ in quantised.served(llm).named_parameters())


def assert_close(llm: Any, model: Any, most: float) -> None:
    """Log-probs are the trainer's as far as the format goes, in the mean."""
    own = float(engines.log_prob_errors(ask(llm), model).mean())
    with model.disable_adapter():
        other = float(engines.log_prob_errors(ask(llm), model).mean())
    assert own < most < 0.2 < other, (own, other)


# Formats, each in an engine of its own: kind, what shares a scale, how far log-probs may be off
FORMATS = [
    pytest.param(("int", "channel", 0.03), id="int-channel"),
    pytest.param(("int", "tensor", 0.05), id="int-tensor"),
    pytest.param(("float", "channel", 0.08), id="float-channel"),
    pytest.param(("float", "block", 0.08), id="float-block"),
    pytest.param(("DeepSeek's", "block", 0.08), id="deepseek-block"),
]


@pytest.fixture(scope="module", params=FORMATS)
def one(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Any, float]]:
    """An engine on a checkpoint that was quantised from a merged policy, the policy, and what that engine holds."""
    kind, strategy, most = request.param
    model, folder = policy(build=even), tmp_path_factory.mktemp("one") / "merged"
    train(model)
    quantised.save_merged(model, folder)
    if kind == "DeepSeek's":
        compress_by_blocks(folder)
    else:
        compress(folder, arguments(kind, strategy))
    # vLLM's LoRA asks a layer for the device of its weight, which its INT8 kernel for CPUs has dropped.
    adapters = {} if kind == "int" else {"enable_lora": True, "max_lora_rank": 8}
    with kernel_for_blocks(), engine(model, folder, **READ | adapters) as llm:
        for layer in quantised.served(llm).modules():
            for key in ("_q_scale", "_k_scale", "_v_scale"):  # parameters in vLLM 0.26
                if hasattr(layer, "kv_cache_dtype") and key in layer._buffers:
                    scale = layer._buffers.pop(key)
                    layer.register_parameter(key, nn.Parameter(scale, requires_grad=False))
        yield llm, model, held(llm), most


@pytest.mark.parametrize("merge", ["trainer", "engine"])
def test_what_is_held_is_the_checkpoint_of_the_merged_weights(one: Any, merge: str) -> None:
    """After other policies were there, and with an adapter that changes from push to push."""
    llm, model, fresh, most = one
    other = policy(1, even)
    train(other, 5)
    with closing(VllmSync(other, llm, bucket_bytes=BUCKET)) as sync:
        sync.push()
        assert held(llm)[0] != fresh[0]
        assert held(llm)[1] != fresh[1]
    with closing(VllmSync(model, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for step in range(2):
            train(model, step, 0.02)
            report = sync.push(verify=step == 0)
            assert report.merge == merge
            assert report.reloaded >= (3 if merge == "trainer" and is_of_blocks(llm) else 8)
            assert_close(llm, model, most)
        model.load_state_dict(start, strict=False)
        sync.push()
        assert held(llm) == fresh
        assert all(covered.complete for covered in coverage(llm))
        assert [state.kind for state in sync.states()] == ["merged"]


def test_an_adapter_beside_the_quantised_base(one: Any) -> None:
    llm, model, _, most = one
    if llm.llm_engine.vllm_config.lora_config is None:  # vLLM has no LoRA beside this format on a CPU
        with pytest.raises(PushRefused, match="enable_lora"):
            VllmSync(model, llm, mode="adapter", bucket_bytes=BUCKET).push()
        return
    with closing(VllmSync(model, llm, mode="adapter", bucket_bytes=BUCKET)) as sync:
        assert sync.push().base_sent
        base = llm.collective_rpc("bits")
        train(model, 3, 0.02)
        assert not sync.push().base_sent
        assert llm.collective_rpc("bits") == base
        assert float(engines.log_prob_errors(ask(llm, sync.lora_request()), model).mean()) < most
        train(model, 3, -0.02)
        sync.push(mode="merged")
        assert_close(llm, model, most)


def test_a_push_that_breaks_off(one: Any) -> None:
    """The layer is closed again, the engine dirty, and the next push heals it. In small buckets, of which several are
    loaded where only the embedding is."""
    llm, model, _, _ = one
    with closing(VllmSync(model, llm, bucket_bytes=1 << 13)) as sync:
        quantised.assert_heals(llm, sync, held)


def test_what_does_not_fit_is_said_before_anything_is_written(one: Any) -> None:
    """By the dry run, which leaves the engine as it was: also a weight that its kernel has packed and dropped."""
    llm, _, _, _ = one
    before = held(llm)
    for build, said in ((engines.qwen3, "k_proj.weight is .64, 128. here"), (_wider, "another size")):
        with (
            closing(VllmSync(policy(build=build), llm, bucket_bytes=BUCKET)) as sync,
            pytest.raises(PushRefused, match=said),
        ):
            sync.push()
        assert held(llm) == before


def _wider() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = engines.SIZES | {"num_key_value_heads": 4, "intermediate_size": 512, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(**sizes))


@pytest.mark.parametrize("kind", ["int", "float"])
def test_an_adapter_of_zeros_gives_what_quantising_the_base_gives(kind: str, tmp_path: Path) -> None:
    """Layers that the checkpoint leaves in bf16 stay so: the head, embeddings, norms, and one that is named."""
    model = policy(build=engines.llama)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.zeros_(parameter)
    engines.save_base(model.get_base_model(), tmp_path / "base")
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    left = "model.layers.1.mlp.down_proj"
    compress(tmp_path / "base", arguments(kind, "channel"), ignore=[left])
    other = policy(1, engines.llama)
    with engine(model, tmp_path / "base", **READ) as llm:
        fresh = held(llm)
        assert quantised.served(llm).get_submodule(left).weight.dtype == torch.bfloat16
        with pytest.raises(PushRefused, match=r"quantised \(model.layers.0.*start the engine on the unquantised"):
            load_adapter(llm, tmp_path / "adapter")  # the engine has nothing to merge it onto
        assert held(llm) == fresh
        for merge in ("trainer", "engine"):
            for one, same in ((other, False), (model, True)):
                with closing(VllmSync(one, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
                    sync.push()
                    assert (held(llm) == fresh) == same


def test_what_lies_there_is_the_merge_to_a_rounding_of_the_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dequantised, against the merge in float64; INT8 as vLLM hands it to a kernel that keeps it."""
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsW8A8Int8 as Int8

    given: dict[int, tuple[Tensor, Tensor]] = {}
    process = Int8.process_weights_after_loading

    def noted(self: Any, layer: Any) -> None:
        given[id(layer)] = layer.weight.double(), layer.weight_scale.double()
        process(self, layer)

    monkeypatch.setattr(Int8, "process_weights_after_loading", noted)
    for kind in ("float", "int"):
        model = policy()
        train(model)
        engines.save_base(model.get_base_model(), folder := tmp_path / kind)
        compress(folder, arguments(kind, "channel"))
        with engine(model, folder, **READ) as llm, closing(VllmSync(model, llm, bucket_bytes=BUCKET)) as sync:
            given.clear()
            sync.push()
            if kind == "float":
                assert quantised.assert_rounded_once(quantised.exact_merge(model), quantised.served(llm)) == 8
                continue
            exact, paths = quantised.exact_merge(model), {id(m): n for n, m in quantised.served(llm).named_modules()}
            assert len(given) == 8
            for layer, (values, scale) in given.items():
                wanted = quantised.stacked(exact, paths[layer])
                # Half a step; merge, scale and quotient are rounded to bf16, and 127.5 steps are 127 at their end.
                bound = scale / 2 * (1 + 2**-8) + 2**-7 * wanted.abs()
                assert ((values * scale - wanted).abs() <= bound).all(), paths[layer]


@pytest.mark.parametrize(
    ("build", "adapted", "options"),
    [
        (policies.phi3, policies.FUSED, {}),  # q, k and v in one tensor
        (engines.deepseek_v3, ["q_proj", "kv_b_proj", "o_proj"], {"attention_backend": "CPU_MLA"}),  # latent attention
    ],
)
def test_other_layouts(build: Any, adapted: list[str], options: dict[str, Any], tmp_path: Path) -> None:
    model, other = (policy(seed, build, target_modules=adapted) for seed in range(2))
    train(model)
    compress(quantised.save_merged(model, tmp_path / "merged"), arguments("float", "channel"))
    with engine(model, tmp_path / "merged", **READ | options) as llm:
        fresh = held(llm)
        for merge in ("trainer", "engine"):
            for one, same in ((other, False), (model, True)):
                with closing(VllmSync(one, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
                    sync.push()
                    assert (held(llm) == fresh) == same, merge


def test_replicas_in_several_formats_take_one_stream(tmp_path: Path) -> None:
    """A bf16 engine, and one of INT8."""
    model = policy(build=engines.llama)
    train(model)
    engines.save_base(model.get_base_model(), folder := tmp_path / "base")
    compress(quantised.save_merged(model, tmp_path / "merged"), arguments("int", "channel"))
    with (
        engine(model, folder, processes=True) as plain,
        engine(model, tmp_path / "merged", **READ) as llm,
        closing(VllmSync(model, [plain, llm], bucket_bytes=BUCKET)) as sync,
    ):
        fresh = held(llm)
        train(model, 2, 0.02)
        sync.push()
        assert held(llm) != fresh
        assert_close(llm, model, 0.03)
        assert_close(plain, model, 0.03)
        train(model, 2, -0.02)


def test_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes its part of values and scales, which are of the whole."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = policy(build=engines.llama)
    train(model)
    compress(quantised.save_merged(model, tmp_path / "merged"), arguments("float", "channel"))
    with engine(model, tmp_path / "merged", processes=True, tensor_parallel_size=2, **READ) as llm:
        fresh = held(llm)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for merge in ("trainer", "engine"):
            with closing(VllmSync(model, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
                train(model, 1)
                sync.push()
                assert held(llm) != fresh
                llm.collective_rpc("fail", args=("receive" if merge == "trainer" else "merge", [1]))
                with pytest.raises(LoraMergeError, match="injected"):
                    sync.push()
                llm.collective_rpc("mend")
                model.load_state_dict(start, strict=False)
                sync.push()
                assert held(llm) == fresh, merge


# Scales of the KV cache


def scales_of(llm: Any) -> list[list[float]]:
    layers = [layer for layer in quantised.served(llm).modules() if hasattr(layer, "kv_cache_dtype")]
    assert all(layer.kv_cache_dtype == "fp8" for layer in layers)
    names = ("_k_scale", "_v_scale", "_k_scale_float", "_v_scale_float")
    return [[float(getattr(layer, name)) for name in names] for layer in layers]


def lose_scales(llm: Any) -> None:
    """As sleep at level 2 does where they are parameters, as in vLLM 0.26."""
    for layer in quantised.served(llm).modules():
        for name in ("_k_scale", "_v_scale", "_q_scale") if hasattr(layer, "kv_cache_dtype") else ():
            scale = layer._parameters.pop(name, None)
            scale = layer._buffers.pop(name) if scale is None else scale
            layer.register_parameter(name, nn.Parameter(torch.full_like(scale, torch.nan), requires_grad=False))


def test_calibrated_scales_of_the_cache_stay_and_are_told_of(tmp_path: Path) -> None:
    """By one warning for each engine, and in each report."""
    model = policy()
    train(model)
    folder = compress(quantised.save_merged(model, tmp_path / "merged"), arguments("float", "channel"))
    calibrate(folder, k=0.25, v=0.125)
    told = r"attn \(k_scale 0.25, v_scale 0.125\) and 1 more layers"
    with engine(model, folder, **READ | {"enable_lora": True, "max_lora_rank": 8}) as llm:
        for merge in ("trainer", "engine"):
            with closing(VllmSync(model, llm, merge=merge, bucket_bytes=BUCKET)) as sync:
                train(model, 2, 0.02)
                lose_scales(llm)
                with pytest.warns(UserWarning, match=f"engine 0.*{told}.*calibrate them again"):
                    report = sync.push()
                assert re.search(told, report.calibrated)
                assert re.search(f"KV cache scales of the engine's checkpoint kept: .*{told}", str(report))
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    assert sync.push(mode="adapter" if merge == "trainer" else None).calibrated == report.calibrated
                assert scales_of(llm) == [[0.25, 0.125] * 2] * 2
                sync.push(mode="merged")
                assert_close(llm, model, 0.08)


def test_random_scales_of_the_cache_are_refused(tmp_path: Path) -> None:
    """vLLM's dummy loading fills them, too, and no push brings others. Scales of 1, where the checkpoint has none, stay
    1 and nothing is told."""
    model = policy()
    engines.save_base(model.get_base_model(), tmp_path / "plain")
    engines.save_base(model.get_base_model(), tmp_path / "base")
    calibrate(compress(tmp_path / "base", arguments("float", "channel")), k=0.25, v=0.125)
    with (
        engine(model, tmp_path / "base", **READ | {"load_format": "dummy"}) as llm,
        closing(VllmSync(model, llm)) as sync,
        pytest.raises(PushRefused, match=r'random numbers.*load_format="dummy".*k_scale.*load_format="auto"'),
    ):
        sync.push()
    with (
        engine(model, tmp_path / "plain", kv_cache_dtype="fp8") as llm,  # of a dummy load, too
        closing(VllmSync(model, llm, bucket_bytes=BUCKET)) as sync,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", "engine 0")
        assert sync.push().calibrated == ""
        assert scales_of(llm) == [[1.0] * 4] * 2
        assert_close(llm, model, 0.08)


# What is refused


@pytest.mark.parametrize("zero_points", [False, True])
def test_static_scales_are_refused_by_name(zero_points: bool, tmp_path: Path) -> None:
    """They are those of other weights. Nothing of the engine changes, and it goes on."""
    model = policy()
    engines.save_base(model.get_base_model(), tmp_path / "base")
    also = {"input_scale": torch.ones(1)}
    if zero_points:
        also["input_zero_point"] = torch.zeros(1, dtype=torch.int8)
    inputs = {"strategy": "tensor", "dynamic": False, "symmetric": not zero_points}
    compress(tmp_path / "base", arguments("int", "channel"), inputs=inputs, also=also)
    said = r"qkv_proj.weight is loaded as torch.int8 \(CompressedTensorsW8A8Int8\) with input_scale.*calibrated again"
    with engine(model, tmp_path / "base", **READ) as llm:
        before = held(llm)
        for merge in ("trainer", "engine"):
            with closing(VllmSync(model, llm, merge=merge)) as sync, pytest.raises(PushRefused, match=said):
                sync.push()
        assert held(llm) == before


def layer_of(kind: str, loaded: dict[str, Tensor], **settings: Any) -> nn.Module:
    """A layer as vLLM makes one for a checkpoint, of a method by this name."""
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    layer = nn.Module()
    for name, tensor in loaded.items():
        layer.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    layer.quant_method = type(kind, (), settings)()
    record_metadata_for_reloading(layer)
    return layer


E4M3 = torch.empty(4, 4, dtype=torch.float8_e4m3fn)
INT8 = torch.empty(4, 4, dtype=torch.int8)
FLOAT = torch.empty(4, 1)
LAYERS: dict[str, tuple[str, dict[str, Tensor], dict[str, Any], str]] = {
    "channels": ("CompressedTensorsW8A8Fp8", {"weight": E4M3, "weight_scale": FLOAT}, {"strategy": "channel"}, ""),
    "blocks": ("Fp8LinearMethod", {"weight": E4M3, "weight_scale_inv": FLOAT}, {"weight_block_size": [128, 128]}, ""),
    "other blocks": (
        "Fp8LinearMethod",
        {"weight": E4M3, "weight_scale_inv": FLOAT},
        {"weight_block_size": [64, 128]},
        "not quantised to that format",
    ),
    "scales of 8 bits": (
        "Fp8LinearMethod",
        {"weight": E4M3, "weight_scale_inv": torch.empty(1, 1, dtype=torch.float8_e8m0fnu)},
        {"weight_block_size": [128, 128]},
        "not quantised to that format",
    ),
    "tensors of other tools": (
        "Fp8LinearMethod",
        {"weight": E4M3, "weight_scale": FLOAT},
        {"weight_block_size": None},
        "not quantised to that format",
    ),
    "scales of activations": (
        "CompressedTensorsW8A8Fp8",
        {"weight": E4M3, "weight_scale": FLOAT, "input_scale": FLOAT},
        {"strategy": "tensor"},
        "input_scale, a static scale.*calibrated again.*dynamic activations",
    ),
    "zero points": (
        "CompressedTensorsW8A8Int8",
        {"weight": INT8, "weight_scale": FLOAT, "weight_zero_point": INT8},
        {"strategy": "channel"},
        "weight_zero_point, of an asymmetric format.*symmetric weights",
    ),
    "groups": (
        "CompressedTensorsW8A8Int8",
        {"weight": INT8, "weight_scale": FLOAT},
        {"strategy": "group"},
        "not quantised to that format",
    ),
    "4 bits": (
        "CompressedTensorsWNA16",
        {"weight_packed": INT8.int(), "weight_scale": FLOAT, "weight_shape": torch.empty(2, dtype=torch.int64)},
        {},
        "not quantised to that format",
    ),
    "sparse": (
        "CompressedTensors24",
        {"compressed": INT8, "bitmask": INT8, "weight_scale": FLOAT},
        {},
        "not quantised to that format",
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_refused(name: str) -> None:
    kind, loaded, settings, said = LAYERS[name]
    refused = refusal(Modules(nn.ModuleDict({"layer": layer_of(kind, loaded, **settings)})))
    assert bool(refused) == bool(said)
    if said:
        assert re.search(rf"layer\.\w+ is loaded as .* \({kind}\).*{said}", refused), refused
        assert 'quantization="fp8_per_block"' in refused


# Values and scales, against the tools' own functions


def numbers() -> list[Tensor]:
    """All bf16 numbers but NaN, rows of zeros, tiny and huge ones."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(512, 384, generator=g) * torch.rand(512, 1, generator=g) * 0.1
    rows[::7], rows[3::7] = 0, rows[3::7] * 1e-37
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = torch.where(every.isfinite(), every, 1.0).view(256, 256)
    small = every.where(every.abs() < 1e3, 1.0)
    return [rows.bfloat16(), (rows * 1e37).bfloat16(), every, small, small[torch.randperm(256, generator=g)]]


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_compressed_tensors_make_the_same(kind: str, strategy: str) -> None:
    for weight in numbers():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x = weight.to(dtype).nan_to_num(0)
            wanted = by_their_tools(x, arguments(kind, strategy))
            scheme = Scheme(wanted["weight"].dtype, strategy, "_scale")  # type: ignore[arg-type]
            (name, values), (of_scales, scales) = scheme.pair("a.weight", x)
            assert (name, of_scales) == ("a.weight", "a.weight_scale")
            assert torch.equal(scales, wanted["weight_scale"])
            assert scales.dtype == wanted["weight_scale"].dtype == dtype
            assert torch.equal(values.view(torch.uint8), wanted["weight"].view(torch.uint8))


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_zeros_alone(kind: str, strategy: str) -> None:
    x = torch.zeros(256, 384, dtype=torch.bfloat16)
    wanted = by_their_tools(x, arguments(kind, strategy))
    scheme = Scheme(wanted["weight"].dtype, strategy, "_scale")  # type: ignore[arg-type]
    (_, values), (_, scales) = scheme.pair("a.weight", x)
    assert torch.equal(scales, wanted["weight_scale"])
    assert (scales == torch.finfo(torch.bfloat16).eps).all()
    assert not values.view(torch.uint8).any(), "no -0 either"


@pytest.mark.parametrize("kind", ["int", "float"])
def test_blocks_that_do_not_divide_the_shape(kind: str) -> None:
    """As of a weight that zeros fill up, of which its own part is kept."""
    for rows, cols in ((200, 300), (5, 384), (256, 1)):
        x = numbers()[0][:rows, :cols].contiguous()
        padded = nn.functional.pad(x, (0, -cols % 128, 0, -rows % 128))
        wanted = by_their_tools(padded, arguments(kind, "block"))
        scheme = Scheme(wanted["weight"].dtype, "block", "_scale")
        (_, values), (_, scales) = scheme.pair("a.weight", x)
        assert torch.equal(scales, wanted["weight_scale"])
        assert values.shape == x.shape
        assert torch.equal(values.view(torch.uint8), wanted["weight"][:rows, :cols].view(torch.uint8))
        for made, there in zip(scheme.pair("a.weight", x.to("meta")), (values, scales), strict=True):
            assert (made[1].shape, made[1].dtype) == (there.shape, there.dtype)


@pytest.mark.parametrize(
    ("suffix", "strategy", "where"),
    [
        ("_scale", "block", (1, 1)),
        ("_scale", "channel", (200, 0)),
        ("_scale", "tensor", (0,)),
        ("_scale_inv", "block", (1, 1)),
    ],
)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_shows_in_a_scale(suffix: str, strategy: Any, where: tuple[int, ...], odd: float) -> None:
    """Of its group; all others are as without it."""
    for dtype in (torch.int8, torch.float8_e4m3fn) if suffix == "_scale" else (torch.float8_e4m3fn,):
        x, scheme = numbers()[0].clone(), Scheme(dtype, strategy, suffix)
        before = [tensor for _, tensor in scheme.pair("a.weight", x)]
        x[200, 150] = odd
        values, scales = (tensor for _, tensor in scheme.pair("a.weight", x))
        assert [tuple(at) for at in (~scales.isfinite()).nonzero().tolist()] == [where]
        assert torch.equal(scales[scales.isfinite()], before[1][scales.isfinite()])
        others = torch.ones(x.shape, dtype=torch.bool)
        rows, cols = {"block": (slice(128, 256), slice(128, 256)), "channel": (200, slice(None))}.get(
            strategy, (slice(None), slice(None))
        )
        others[rows, cols] = False
        assert torch.equal(values.view(torch.uint8)[others], before[0].view(torch.uint8)[others])


def test_deep_seeks_blocks() -> None:
    """Blocks of a part, too; and what vLLM's own function makes, to the last bit of a scale."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    scheme = Scheme(torch.float8_e4m3fn, "block", "_scale_inv")
    for weight in [*numbers(), torch.randn(320, 200, generator=torch.Generator().manual_seed(1)).bfloat16()]:
        x, wanted = weight, by_blocks(weight)
        (_, values), (name, scales) = scheme.pair("a.weight", x)
        assert name == "a.weight_scale_inv"
        assert torch.equal(scales, wanted["weight_scale_inv"])
        assert torch.equal(values.view(torch.uint8), wanted["weight"].view(torch.uint8))
        theirs, of_theirs = per_block_cast_to_fp8(x, [128, 128], use_ue8m0=False)
        torch.testing.assert_close(scales, of_theirs, rtol=2**-22, atol=0)
        assert (theirs.float() - values.float()).abs().max() <= 32  # a step of the largest
        for made, there in zip(scheme.pair("a.weight", x.to("meta")), ((_, values), (name, scales)), strict=True):
            assert (made[1].shape, made[1].dtype) == (there[1].shape, there[1].dtype)
