"""Bases that bitsandbytes quantised (QLoRA), merged into what the policy multiplies with (`make test-libraries`)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import bitsandbytes.functional as F
import models
import pytest
import torch
import torch.distributed as dist
from backends import Backend
from helpers import assert_rounded_once, assert_same_bits
from peft import LoraConfig, PeftModel, get_peft_model
from processes import spawn
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from lora_merge import (
    InvalidInput,
    LoraMergeError,
    MergedWeights,
    Plan,
    Segment,
    UnsupportedAdapter,
    merged,
    read_deltas,
    save_merged,
)
from lora_merge.engine.payload.pull import Unmoved, unreadable
from lora_merge.kernels.packed import Packed
from lora_merge.kernels.reference import round_once
from lora_merge.shards.bitsandbytes import _decodes_rows, bits, shard_of

pytestmark = pytest.mark.filterwarnings("ignore")

FOUR: dict[str, dict[str, Any]] = {
    "nf4": {"quant_type": "nf4", "compress_statistics": False},
    "nf4, double": {"quant_type": "nf4"},
    "fp4, double": {"quant_type": "fp4"},
    "fp4 in bfloat16": {"quant_type": "fp4", "compress_statistics": False, "quant_storage": torch.bfloat16},
    "nf4 in float32": {"quant_type": "nf4", "quant_storage": torch.float32},
}


# Whole blocks in each row: over the ends of rows bitsandbytes' own kernel for AVX-512 takes other blocks' scales.
ROW, WIDE = 64, 128


def qwen2(tied: bool = False) -> nn.Module:
    return models.qwen2(tied, hidden_size=ROW, intermediate_size=WIDE)


def four_bits(layer: nn.Linear, **options: Any) -> nn.Linear:
    made = bnb.nn.Linear4bit(
        layer.in_features, layer.out_features, layer.bias is not None, layer.weight.dtype, **options
    )
    made.weight = bnb.nn.Params4bit(layer.weight.data, module=made, **options)
    made.bias = layer.bias
    return made.to("cpu")


def eight_bits(layer: nn.Linear, **options: Any) -> nn.Linear:
    options = {"has_fp16_weights": False, "threshold": 6.0} | options
    made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, layer.bias is not None, **options)
    made.load_state_dict(layer.state_dict())
    made.bias = layer.bias
    return made.to("cpu")


def quantised(
    model: nn.Module, make: Callable[..., nn.Linear] = four_bits, skip: tuple[str, ...] = ("lm_head",), **options: Any
) -> nn.Module:
    """Its linear layers replaced, as transformers does with a BitsAndBytesConfig."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and not name.endswith(skip):
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, make(module, **options))
    model.is_loaded_in_4bit = make is four_bits
    model.is_loaded_in_8bit = make is eight_bits
    return model


def with_lora(build: Callable[[], nn.Module], **config: Any) -> PeftModel:
    adapters = config.pop("adapters", ("default",))
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "init_lora_weights": False} | config
    model = get_peft_model(build(), LoraConfig(**copy.deepcopy(settings)), adapters[0])
    for number, name in enumerate(adapters[1:], start=1):
        model.add_adapter(name, LoraConfig(**(copy.deepcopy(settings) | {"r": settings["r"] + number})))
    model.base_model.set_adapter(list(adapters))
    for name, parameter in model.named_parameters():
        if "lora_magnitude" in name:
            parameter.data *= 1 + 0.1 * torch.rand_like(parameter)
        if "lora_B" in name and name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    return model


def base_of(module: Any) -> Tensor:
    """What bitsandbytes itself makes of a layer's weight: as one row, of which its kernels are right everywhere."""
    if bits(module) == 4:
        state = copy.copy(module.weight.quant_state)
        shape, state.shape = state.shape, torch.Size((1, state.shape.numel()))
        return F.dequantize_4bit(module.weight.data, state).view(shape)
    if bits(module) == 8:
        SCB = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
        return F.int8_vectorwise_dequant(module.weight.data, SCB)
    return module.weight.detach()


def exact(model: PeftModel) -> dict[str, Tensor]:
    """float64 weights of every linear layer and embedding, by checkpoint name: by the definition of each adapter."""
    found = {}
    for name, module in model.get_base_model().named_modules():
        if name.rpartition(".")[2] == "base_layer" or "lora_" in name or not hasattr(module, "weight"):
            continue
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        total = base_of(base).double()
        if base is not module:
            for adapter in module.active_adapters:
                total = total + module.scaling[adapter] * (
                    module.lora_B[adapter].weight.double() @ module.lora_A[adapter].weight.double()
                )
            if adapter in module.lora_magnitude_vector:
                magnitude = module.lora_magnitude_vector[adapter].weight.double()
                total = total * (magnitude / total.norm(dim=1))[:, None]
        found[f"{name}.weight"] = total
    return found


def assert_streams(
    model: PeftModel, dtype: torch.dtype = torch.bfloat16, stream: MergedWeights | None = None
) -> dict[str, Tensor]:
    """Every weight of the stream is the exact one, rounded once."""
    got = {name: tensor.clone() for name, tensor in stream or MergedWeights(model)}
    right = exact(model)
    assert not set(right) - set(got)
    assert not any("absmax" in name or "SCB" in name or "quant" in name for name in got)
    assert_rounded_once(got, right, dtype)
    return got


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("double", [False, True])
def test_decoded_bits(backend: Backend, quant_type: str, double: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of bitsandbytes, every code, dtype and block size, ragged and odd shapes."""
    monkeypatch.setattr("lora_merge.shards.bitsandbytes._decodes_rows", lambda *sizes: True)
    shapes = [(64, 128), (7, 130), (3, 100)] if backend.compiled else [(7, 130)]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for blocksize in (32, 64, 128, 512, 4096):
            for shape in shapes:
                weight = torch.randn(shape, generator=torch.Generator().manual_seed(blocksize)).to(dtype) * 0.1
                module = bnb.nn.Linear4bit(shape[1], shape[0], bias=False)
                module.weight = bnb.nn.Params4bit(
                    weight, quant_type=quant_type, blocksize=blocksize, compress_statistics=double, module=module
                )
                module = module.to(backend.device)
                assert module.weight.quant_state.nested == double
                source = shard_of("w", module, module.weight).pieces[0].tensor
                assert isinstance(source, Packed)
                out = torch.empty(shape, dtype=dtype, device=backend.device)
                Plan([Segment("w", source, out)]).run()
                # Some of bitsandbytes' own kernels make -0.0 of FP4's code 8, others 0.0.
                assert_same_bits(out + 0.0, base_of(module) + 0.0, f"{dtype}, {shape} in blocks of {blocksize}")


def test_decoded_bits_of_int8(backend: Backend) -> None:
    for shape in ((40, 128), (7, 33), (1, 5)):
        module = bnb.nn.Linear8bitLt(shape[1], shape[0], bias=False, has_fp16_weights=False).to(backend.device)
        source = shard_of("w", module, module.weight).pieces[0].tensor
        out = torch.empty(shape, device=backend.device)
        Plan([Segment("w", source, out)]).run()
        assert_same_bits(out, base_of(module))


# ---- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FOUR)
def test_qlora(case: str) -> None:
    """Of PEFT's own layers; the merged checkpoint's names; and the policy is that of the merged weights."""
    model = with_lora(lambda: quantised(qwen2().bfloat16(), **FOUR[case]))
    assert type(model.get_base_model().model.layers[0].self_attn.q_proj).__module__ == "peft.tuners.lora.bnb"
    got = assert_streams(model)
    plain = qwen2().bfloat16()
    assert set(got) == set(plain.state_dict())
    plain.load_state_dict(got)
    with torch.no_grad():
        ours, theirs = plain(models.tokens()).logits.float(), model(models.tokens()).logits.float()
    assert (ours - theirs).norm() <= 0.03 * theirs.norm()  # each layer rounds its output to bf16, 2^-9 a time


ADAPTERS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "several": {"adapters": ("one", "two")},
    "some layers": {"target_modules": ["q_proj", "down_proj"]},
    "head too": {"target_modules": ["q_proj", "lm_head"]},
    "trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("make", [four_bits, eight_bits])
@pytest.mark.parametrize("case", ADAPTERS)
def test_adapters(case: str, make: Callable[..., nn.Linear]) -> None:
    model = with_lora(lambda: quantised(qwen2().bfloat16(), make), **ADAPTERS[case])
    if case == "trained whole":
        head = model.get_base_model().lm_head.modules_to_save["default"]
        head.weight.data.normal_()
        got = {name: tensor.clone() for name, tensor in MergedWeights(model)}
        assert_same_bits(got["lm_head.weight"], head.weight)
        return
    assert_streams(model)


def test_lora_bias() -> None:
    model = with_lora(lambda: quantised(qwen2().bfloat16()), target_modules=["q_proj"], lora_bias=True)
    got, layer = dict(MergedWeights(model)), model.get_base_model().model.layers[1].self_attn.q_proj
    wanted = layer.base_layer.bias.double() + layer.scaling["default"] * layer.lora_B["default"].bias.double()
    assert_same_bits(got["model.layers.1.self_attn.q_proj.bias"], round_once(wanted, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, None])
@pytest.mark.parametrize("base", [torch.float16, torch.float32])
def test_dtypes(base: torch.dtype, dtype: torch.dtype | None) -> None:
    """The stream has the dtype of the state that was quantised, or what is asked for."""
    model = with_lora(lambda: quantised(qwen2().to(base), quant_type="nf4"))
    assert_streams(model, dtype or base, MergedWeights(model, dtype=dtype))


def test_stochastic() -> None:
    model = with_lora(lambda: quantised(qwen2().bfloat16(), quant_type="nf4"))
    right = exact(model)
    for name, tensor in MergedWeights(model, rounding="stochastic"):
        if name in right:
            step = 2.0**-7 * right[name].abs() + 2.0**-20
            assert ((tensor.double() - right[name]).abs() <= step).all()


def test_tied_and_embeddings() -> None:
    """A tied head beside quantised layers; embeddings that are quantised themselves."""
    tied = with_lora(lambda: quantised(qwen2(tied=True).bfloat16()), target_modules=["q_proj"])
    assert "lm_head.weight" not in dict(MergedWeights(tied))
    model = quantised(qwen2().bfloat16())
    for make in (bnb.nn.EmbeddingNF4, bnb.nn.Embedding8bit):
        embedding = make(models.VOCABULARY, ROW, dtype=torch.bfloat16)
        embedding.load_state_dict(qwen2().bfloat16().model.embed_tokens.state_dict())
        model.model.embed_tokens = embedding.to("cpu")
        got = dict(MergedWeights(model))["model.embed_tokens.weight"]
        rows = embedding(torch.arange(models.VOCABULARY))
        assert got.dtype == rows.dtype
        torch.testing.assert_close(got.float(), rows.float(), rtol=2.0**-8, atol=0)
        if make is bnb.nn.EmbeddingNF4:
            assert_same_bits(got, rows.detach())


def test_mixed_formats() -> None:
    """NF4, FP4, int8 and plain layers in one model, as llm_int8_skip_modules and hands leave it."""

    def build() -> nn.Module:
        model = quantised(qwen2().bfloat16(), skip=("lm_head", "v_proj", "k_proj", "o_proj"), quant_type="nf4")
        attention = model.model.layers[0].self_attn
        attention.k_proj = four_bits(attention.k_proj, quant_type="fp4")
        attention.o_proj = eight_bits(attention.o_proj)
        return model

    assert_streams(with_lora(build))


def test_transformers(tmp_path: Path) -> None:
    """A model as transformers loads it, and as it saves and loads it quantised."""
    from transformers import BitsAndBytesConfig, Qwen2ForCausalLM

    qwen2().bfloat16().save_pretrained(tmp_path / "plain")
    for number, options in enumerate((
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"load_in_4bit": True, "bnb_4bit_quant_storage": torch.bfloat16, "llm_int8_skip_modules": ["v_proj"]},
        {"load_in_8bit": True},
    )):  # fmt: skip
        config = BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.bfloat16, **options)
        load = lambda folder, **more: Qwen2ForCausalLM.from_pretrained(  # noqa: E731
            folder, device_map="cpu", dtype=torch.bfloat16, **more
        )
        base = load(tmp_path / "plain", quantization_config=config)
        plain = {name: tensor.clone() for name, tensor in MergedWeights(base)}
        base.save_pretrained(tmp_path / str(number))
        for name, tensor in MergedWeights(load(tmp_path / str(number))):
            assert_same_bits(tensor, plain[name], name)
        assert_streams(with_lora(lambda base=base: base))


@pytest.mark.parametrize("bits", [4, 8])
def test_conv1d(bits: int, tmp_path: Path) -> None:
    """transformers quantises GPT-2's weights, `[in, out]` in checkpoints, as those of linear layers."""
    from transformers import BitsAndBytesConfig, GPT2LMHeadModel

    models.gpt2(ROW).bfloat16().save_pretrained(tmp_path)
    config = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8)
    base = GPT2LMHeadModel.from_pretrained(tmp_path, quantization_config=config, device_map="cpu", dtype=torch.bfloat16)
    model = with_lora(lambda: base, target_modules=["c_attn", "c_proj"])
    got, right = dict(MergedWeights(model)), exact(model)
    plain = GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
    name = "transformer.h.1.attn.c_proj.weight"  # a square one
    assert_same_bits(got[name], round_once(right[name].t(), torch.bfloat16).contiguous())
    assert all(tensor.shape == plain[name].shape for name, tensor in got.items())


def test_steps() -> None:
    """Adapters that train are followed; a layer that is quantised anew, or moved, is read anew."""
    model = with_lora(lambda: quantised(qwen2().bfloat16(), quant_type="nf4"), target_modules=["q_proj"])
    stream = MergedWeights(model)

    def check() -> None:
        right = exact(model)
        for name, tensor in stream:
            if name in right:
                rounded = round_once(right[name], torch.bfloat16)
                assert (rounded != tensor).sum() <= 2, name

    check()
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.lora_B["default"].weight.data.mul_(-2)
    check()
    layer.scaling["default"] = 0.25
    check()
    state = layer.base_layer.weight.quant_state
    state.absmax = state.absmax.flip(0).clone()
    check()
    layer.base_layer = four_bits(nn.Linear(ROW, ROW).bfloat16(), quant_type="fp4")
    check()
    with torch.no_grad():
        model(models.tokens())
    check()


def test_int8_before_and_after_a_forward() -> None:
    """Which moves codes and statistics from the parameter to the layer's state."""
    model = with_lora(lambda: quantised(qwen2().bfloat16(), eight_bits))
    stream = MergedWeights(model)
    before = {name: tensor.clone() for name, tensor in stream}
    model.train()(models.tokens())
    assert model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight.CB is None
    for name, tensor in stream:
        assert_same_bits(tensor, before[name], name)


def test_nothing_is_decoded_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_lora(lambda: quantised(qwen2().bfloat16(), quant_type="nf4"), use_dora=True)

    def refuse(self: Packed) -> Tensor:
        raise AssertionError(f"decoded {self}")

    monkeypatch.setattr(Packed, "decoded", refuse)
    assert len(dict(MergedWeights(model))) == len(qwen2().state_dict())


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_other_processes_do_not_read_codes() -> None:
    """They are sent what codes stand for: no memory holds that."""
    model = with_lora(lambda: quantised(qwen2(), compress_statistics=False))
    stream, stayed = MergedWeights(model).bucket_writer(), Unmoved()
    assert unreadable(stream).endswith("is quantised")
    stayed(stream)
    assert stayed(stream), "what is not quantised stays where it is"


def test_in_place_is_refused() -> None:
    for make in (four_bits, eight_bits):
        model = with_lora(lambda make=make: quantised(qwen2().bfloat16(), make))
        with (
            pytest.raises(UnsupportedAdapter, match=r"q_proj.weight: the base is quantised .*MergedWeights"),
            merged(model),
        ):
            pass
        assert len(read_deltas(model)) == 14


def bare(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = quantised(qwen2().bfloat16(), quant_type="nf4")
        change(model.model.layers[1].mlp.up_proj)
        return model

    return build


def plain_state(layer: Any) -> None:
    layer.weight.quant_state = layer.quant_state = None


def halve_scales(layer: Any) -> None:
    state = layer.weight.quant_state.state2
    state.absmax = state.absmax.half()


def moved() -> nn.Module:
    layer = eight_bits(nn.Linear(64, 64))
    layer.weight.data = layer.weight.data.clone()
    return layer


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "not quantised yet": (
        lambda: nn.Sequential(bnb.nn.Linear4bit(64, 64)), r"0.weight: .*not quantised yet; move it to its device",
    ),
    "8 bits not quantised yet": (
        lambda: nn.Sequential(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)),
        r"0.weight: .*8-bit.*not quantised yet",
    ),
    "quantised in each forward": (
        lambda: nn.Sequential(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=True)), "0.weight: has_fp16_weights=True",
    ),
    "state lost": (bare(plain_state), r"layers.1.mlp.up_proj.weight: .*not quantised yet"),
    "packed for the CPU": (
        bare(lambda layer: setattr(layer.weight.quant_state, "packing_format_for_cpu", True)),
        r"layers.1.mlp.up_proj.weight: .*eval mode.*load the base again",
    ),
    "scales in half precision": (
        bare(halve_scales),
        r"up_proj.weight: state2.absmax .*float32 of .*got torch.float16.*do not convert it",
    ),
    "turned over": (
        bare(lambda layer: setattr(layer.weight.quant_state, "shape", torch.Size((ROW, WIDE)))),
        r"up_proj.weight: quantised from a weight of shape .*64, 128.*in a layer of .128, 64",
    ),
    "moved": (lambda: nn.Sequential(moved()), r"0.weight: .*other codes than those of its weight .64, 64.*anew"),
    "too few codes": (
        bare(lambda layer: setattr(layer.weight, "data", layer.weight.data[:100])),
        "up_proj.weight: 100 bytes hold no 8192",
    ),
}  # fmt: skip


def by_rows(codes: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: tuple[int, ...]) -> Tensor:
    """What bitsandbytes 0.50's kernel for AVX-512 computes, wherever this runs."""
    code = F.get_4bit_type(quant_type, device="cpu", blocksize=64)
    rows, cols = shape
    found = code[torch.stack((codes >> 4, codes & 15), -1).flatten().long()].view(rows, cols)
    if cols % 16 or blocksize >= 2048:
        return (found.flatten() * absmax.repeat_interleave(blocksize)[: found.numel()]).view(rows, cols)
    block = torch.arange(rows)[:, None] * (cols // blocksize) + torch.arange(cols) // blocksize
    return found * absmax[block]


@pytest.mark.parametrize("cols", [32, 48, 80, 96])
def test_what_bitsandbytes_decodes_with_other_scales_is_refused(cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name of the weight, on a CPU where it does; nowhere else, and no weight whose blocks end with its rows."""
    module = "lora_merge.shards.bitsandbytes"
    layer = nn.Sequential(four_bits(nn.Linear(cols, 40).bfloat16(), quant_type="nf4"))
    monkeypatch.setattr(f"{module}._decodes_rows", _decodes_rows.__wrapped__)  # without what it keeps
    monkeypatch.setattr(f"{module}._decode", by_rows)
    with pytest.raises(
        InvalidInput, match=rf"0.weight: .*rows of {cols} codes in blocks of 64.*move the model to a GPU"
    ):
        dict(MergedWeights(layer))
    for blocksize in (32, 4096) if cols % 32 == 0 else (4096,):
        weight = bnb.nn.Params4bit(torch.randn(40, cols), blocksize=blocksize, module=layer[0])
        layer[0].weight = weight.to("cpu")
        dict(MergedWeights(layer))
    monkeypatch.undo()
    assert _decodes_rows(30, 64, "nf4")  # not by that kernel


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    build, message = REFUSED[case]
    with pytest.raises(InvalidInput, match=message):
        list(MergedWeights(build()))


def test_a_forward_on_the_cpu_may_pack_anew() -> None:
    """Where bitsandbytes has AVX-512 with bf16 a forward in eval mode changes the weights; in train mode none does."""
    model = with_lora(lambda: quantised(qwen2().bfloat16(), quant_type="nf4"))
    before = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    model.train()(models.tokens())
    for name, tensor in MergedWeights(model):
        assert_same_bits(tensor, before[name], name)


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def sharded(rank: int, storage: torch.dtype, strategy: str | None) -> None:
    """Each rank reads its own codes, wherever blocks end, and the stream is that of the whole model."""

    def build() -> PeftModel:
        model = with_lora(lambda: quantised(qwen2().bfloat16(), quant_type="nf4", quant_storage=storage))
        return model.bfloat16() if storage == torch.bfloat16 else model

    torch.manual_seed(1)
    wanted = {name: tensor.clone() for name, tensor in MergedWeights(build())}
    torch.manual_seed(1)
    model = build()
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    stream = MergedWeights(model, strategy=strategy)
    for _ in range(3):
        got = {name: tensor.clone() for name, tensor in stream}
        assert set(got) == set(wanted)
        for name, tensor in got.items():
            assert_same_bits(tensor, wanted[name], name)
        model.train()(models.tokens()).logits.float().square().mean().backward()
    with pytest.raises(UnsupportedAdapter, match="quantised"), merged(model):
        pass
    dist.barrier()


@pytest.mark.parametrize(("world", "storage", "strategy"), [
    (2, torch.bfloat16, None), (3, torch.bfloat16, None), (3, torch.float32, None), (2, torch.bfloat16, "unshard"),
])  # fmt: skip
def test_fsdp2(world: int, storage: torch.dtype, strategy: str | None) -> None:
    spawn(world, sharded, storage, strategy)


def test_a_saved_checkpoint_is_plain(tmp_path: Path) -> None:
    """save_merged of a QLoRA model: merged weights in bfloat16, and a config that does not call them quantised."""
    from transformers import BitsAndBytesConfig, Qwen2ForCausalLM

    qwen2().bfloat16().save_pretrained(tmp_path / "plain")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    base = Qwen2ForCausalLM.from_pretrained(
        tmp_path / "plain", quantization_config=config, device_map="cpu", dtype=torch.bfloat16
    )
    model = with_lora(lambda: base)
    wanted = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    save_merged(model, tmp_path / "out", max_shard_size="20KB")
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()
    loaded = Qwen2ForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    for name, tensor in wanted.items():
        assert_same_bits(loaded[name], tensor, name)


def flat(rank: int) -> None:
    model = with_lora(lambda: quantised(qwen2().bfloat16(), quant_storage=torch.bfloat16)).bfloat16()
    wrapped = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    with pytest.raises(LoraMergeError, match=r"q_proj: .*flat parameter of FSDP1.*use FSDP2"):
        list(MergedWeights(wrapped))
    dist.barrier()


def test_fsdp1_is_refused() -> None:
    spawn(2, flat)
