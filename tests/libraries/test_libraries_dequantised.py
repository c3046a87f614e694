"""Bases that torchao or HQQ quantised: what their own dequantise calls give, merged (`make test-libraries`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import models
import policies
import pytest
import torch
from helpers import assert_rounded_once, assert_same_bits
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from peft import PeftModel
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)

from lora_merge import (
    InvalidInput,
    MergedWeights,
    Plan,
    Segment,
    UnsupportedAdapter,
    read_deltas,
    save_merged,
)
from lora_merge.kernels import packed
from lora_merge.kernels.packed import Called, Packed
from lora_merge.shards.quantised import how, shard_of
from tests.libraries.test_libraries_quantised import base_of as base_of_bitsandbytes
from tests.libraries.test_libraries_quantised import four_bits, quantised
from tests.libraries.test_libraries_quantised import with_lora as with_adapters

pytestmark = pytest.mark.filterwarnings("ignore")

ROW, WIDE = 64, 128

TORCHAO: dict[str, Callable[[], Any]] = {
    "int8": Int8WeightOnlyConfig,
    "int8 in groups of 32": lambda: Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int8 by tensor": lambda: Int8WeightOnlyConfig(granularity=PerTensor()),
    "int8, inputs too": Int8DynamicActivationInt8WeightConfig,
    "int4 in groups of 32": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "int4 in groups of 64": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(64)),
    "int2 by rows": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int2, granularity=PerAxis(0)),
    "int4, inputs too": lambda: Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4, weight_granularity=PerGroup(32)
    ),
    "fp8": Float8WeightOnlyConfig,
    "fp8, e5m2": lambda: Float8WeightOnlyConfig(weight_dtype=torch.float8_e5m2),
}
HQQ: dict[str, dict[str, Any]] = {
    "hqq 8 bits": {"nbits": 8, "group_size": 32, "axis": 1},
    "hqq 4 bits": {"nbits": 4, "group_size": 64, "axis": 1},
    "hqq 4 bits, by columns": {"nbits": 4, "group_size": 32, "axis": 0},
    "hqq 3 bits": {"nbits": 3, "group_size": 64, "axis": 1},
    "hqq 2 bits, seen as floats": {"nbits": 2, "group_size": 16, "axis": 1, "view_as_float": True},
    "hqq 1 bit": {"nbits": 1, "group_size": 32, "axis": 0},
}
FORMATS = [*TORCHAO, *HQQ]


def plain(tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return models.qwen2(tied, hidden_size=ROW, intermediate_size=WIDE).to(dtype)


def hqq_layer(layer: nn.Linear, **config: Any) -> nn.Module:
    made = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=layer.weight.dtype)
    made.load_state_dict(layer.state_dict())
    config = BaseQuantizeConfig(**config)
    return HQQLinear(made.requires_grad_(False), config, compute_dtype=layer.weight.dtype, device="cpu")


LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""What PEFT's "all-linear" leaves out where HQQ's layers are."""


def with_lora(build: Callable[[], nn.Module], **config: Any) -> PeftModel:
    return with_adapters(build, **{"target_modules": LINEARS} | config)


def in_format(case: str, base: nn.Module | None = None) -> nn.Module:
    """A model whose linear layers, but for its head, are quantised."""
    base = plain() if base is None else base
    if case in HQQ:
        return quantised(base, hqq_layer, **HQQ[case])
    quantize_(base, TORCHAO[case](), lambda module, name: type(module) is nn.Linear and not name.endswith("lm_head"))
    return base


def base_of(module: Any) -> Tensor:
    """What the library itself makes of a layer's weight."""
    if isinstance(module, HQQLinear):
        return module.dequantize()
    return module.weight.dequantize() if how(module).endswith("Tensor") else base_of_bitsandbytes(module)


def exact(model: nn.Module) -> dict[str, Tensor]:
    """float64 weights of every linear layer and embedding, by checkpoint name: by the definition of each adapter."""
    found = {}
    root = model.get_base_model() if isinstance(model, PeftModel) else model
    for name, module in root.named_modules():
        if name.rpartition(".")[2] == "base_layer" or "lora_" in name:
            continue
        base = module.get_base_layer() if hasattr(module, "get_base_layer") else module
        if not isinstance(base, (nn.Linear, nn.Embedding, HQQLinear)):
            continue
        total = base_of(base).double()
        if base is not module:
            for adapter in module.active_adapters:
                if isinstance(base, nn.Embedding):
                    update = (module.lora_embedding_B[adapter].double() @ module.lora_embedding_A[adapter].double()).T
                else:
                    update = module.lora_B[adapter].weight.double() @ module.lora_A[adapter].weight.double()
                total = total + module.scaling[adapter] * update
            if adapter in module.lora_magnitude_vector:
                magnitude = module.lora_magnitude_vector[adapter].weight.double()
                total = total * (magnitude / total.norm(dim=1))[:, None]
        found[f"{name}.weight"] = total.detach()
    return found


def assert_streams(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, stream: MergedWeights | None = None
) -> dict[str, Tensor]:
    """Every weight of the stream is the exact one, rounded once; and it has the names of the plain checkpoint."""
    got = {name: tensor.clone() for name, tensor in stream or MergedWeights(model)}
    assert set(got) == set(plain().state_dict())
    assert_rounded_once(got, exact(model), dtype)
    return got


# ---- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", FORMATS)
def test_decoded_bits(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of views: those of the library's call, whatever is decoded at a time."""
    layer = nn.Sequential(nn.Linear(128, 96, bias=False, dtype=dtype))
    owner = in_format(case, layer)[0]
    right = base_of(owner)
    assert right.dtype == dtype
    for at_a_time in (1, 1000, 1 << 22):
        monkeypatch.setattr(packed, "_AT_A_TIME", at_a_time)
        shard = shard_of("w", owner, "weight")
        assert shard is not None
        source = shard.pieces[0].tensor
        assert isinstance(source, Packed)
        assert (source.shape, source.dtype, source.device.type) == (right.shape, dtype, "cpu")
        assert_same_bits(source.decoded(), right)
        for view in (
            lambda t: t[5:17],
            lambda t: t[95:, 3:4],
            lambda t: t.t()[7:50],
            lambda t: t[:, 32:96],
            lambda t: t.view(4, 24, 128)[1:3, :, ::5].transpose(0, 2),
            lambda t: t[3, 4],
            lambda t: t[:0],
        ):
            assert_same_bits(view(source).contiguous(), view(right).contiguous())


@pytest.mark.parametrize("case", FORMATS)
def test_what_is_decoded_at_a_time(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows, each once; of HQQ a layer. No more than a bucket's weights are held decoded."""
    monkeypatch.setattr(packed, "_AT_A_TIME", 8 * ROW)
    model, asked = with_lora(lambda: in_format(case)), []
    decode = Called.decode

    def counted(self: Called, out: Tensor, places: Tensor) -> None:
        def values(tensors: Any, begin: int, end: int) -> Tensor:
            asked.append((self.name, end - begin))
            return self.values(tensors, begin, end)

        decode(packed.replace(self, values=values), out, places)

    monkeypatch.setattr(Called, "decode", counted)
    weights = MergedWeights(model, bucket_bytes=1 << 14)
    writer = weights.bucket_writer()
    assert writer._plans.staging._nbytes <= max(writer.capacity, 1 << 14)
    for _ in weights:
        pass
    for path, layer in model.get_base_model().named_modules():
        if not path.endswith(".base_layer") or not how(layer):
            continue
        name, shape = path.removesuffix(".base_layer"), base_of(layer).shape
        rows = [count for asking, count in asked if asking.removesuffix(".weight") == name]
        assert sum(rows) == shape[0]
        assert case in HQQ or all(count * shape[1] <= 8 * ROW for count in rows)


class Peak(TorchDispatchMode):
    """The most bytes that operators returned and that were held at one time."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if type(tensor) is Tensor and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known:
                    self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.seen = {at: known for at, known in self.seen.items() if not known[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.seen.values()))
        return result


@pytest.mark.parametrize("case", ["int8", "int4 in groups of 32", "fp8", "hqq 4 bits"])
def test_memory_of_a_pass(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two buckets, one bucket's weights decoded, and what a library needs for some rows, or (HQQ) for a layer; what is
    streamed is 32 layers of 1 MiB in bf16."""
    monkeypatch.setattr(packed, "_AT_A_TIME", 1 << 16)
    model = nn.Sequential(*(nn.Linear(1024, 512, bias=False, dtype=torch.bfloat16) for _ in range(32)))
    model = with_lora(lambda: in_format(case, model), target_modules=[str(number) for number in range(32)])
    weights, layer = MergedWeights(model, bucket_bytes=1 << 20), 1 << 20
    held = [tensor for delta in read_deltas(model) for tensor in packed.memory(delta.weight.pieces[0].tensor)]
    with Peak(held) as peak:
        for _ in weights:
            pass
    assert peak.most <= (9 if case in HQQ else 6) * layer


def test_no_kernel_reads_it() -> None:
    delta = read_deltas(with_lora(lambda: in_format("int8")))[0]
    source = delta.weight.pieces[0].tensor
    assert "Packed(torch.int8 codes of torch.bfloat16" in repr(source)
    with pytest.raises(InvalidInput, match=r"q_proj.*no kernel decodes the weight; pass a plain tensor"):
        Plan([Segment("q_proj", source, torch.empty(source.shape, dtype=source.dtype))])
    with pytest.raises(InvalidInput, match="cannot be written"):
        source.zero_()


# ---- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FORMATS)
def test_lora(case: str) -> None:
    """Of PEFT's own layers, pass after pass; and the policy is that of the merged weights."""
    model = with_lora(lambda: in_format(case))
    assert type(model.get_base_model().model.layers[0].self_attn.q_proj).__module__ in (
        "peft.tuners.lora.torchao",
        "peft.tuners.lora.hqq",
    )
    weights = MergedWeights(model)
    got = assert_streams(model, stream=weights)
    policy = plain()
    policy.load_state_dict(got)
    with torch.no_grad():
        ours, theirs = policy(models.tokens()).logits.float(), model(models.tokens()).logits.float()
    # Each layer rounds its output to bf16, 2^-9 a time; and those that quantise their inputs do it to 8 bits.
    assert (ours - theirs).norm() <= (0.1 if "inputs" in case else 0.03) * theirs.norm()
    for parameter in (p for name, p in model.named_parameters() if "lora_B" in name):
        parameter.data.mul_(-2)
    assert_streams(model, stream=weights)


ADAPTERS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "several": {"adapters": ("one", "two")},
    "some layers": {"target_modules": ["q_proj", "down_proj"]},
    "head too": {"target_modules": ["q_proj", "lm_head"]},
    "trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


@pytest.mark.parametrize("case", ["int8 in groups of 32", "int4 in groups of 32", "fp8", "hqq 4 bits"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(kind: str, case: str) -> None:
    model = with_lora(lambda: in_format(case), **ADAPTERS[kind])
    if kind == "trained whole":
        head = model.get_base_model().lm_head.modules_to_save["default"]
        head.weight.data.normal_()
        assert_same_bits(dict(MergedWeights(model))["lm_head.weight"], head.weight)
        return
    weights = MergedWeights(model, bucket_bytes=1 << 14)
    for _ in range(2):
        assert_streams(model, stream=weights)


@pytest.mark.parametrize("case", ["int8", "hqq 4 bits"])
def test_biases(case: str) -> None:
    """Those of the base; PEFT has no lora_bias beside these bases."""
    base = plain()
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    biases = {name: tensor.clone() for name, tensor in base.state_dict().items() if name.endswith("bias")}
    model = with_lora(lambda: in_format(case, base))
    got = dict(MergedWeights(model))
    assert biases
    for name, bias in biases.items():
        assert_same_bits(got[name], bias)
    with pytest.raises(ValueError, match="does not support lora_bias"):
        with_lora(lambda: in_format(case), lora_bias=True, target_modules=["q_proj"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, None])
@pytest.mark.parametrize("base", [torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["int8", "int4 in groups of 32", "fp8", "hqq 4 bits"])
def test_dtypes(case: str, base: torch.dtype, dtype: torch.dtype | None) -> None:
    """The stream has the dtype that the weights are dequantised to, or what is asked for."""
    model = with_lora(lambda: in_format(case, plain(dtype=base)))
    assert_streams(model, dtype or base, MergedWeights(model, dtype=dtype))


@pytest.mark.parametrize("case", ["int8", "int4 in groups of 32", "fp8"])
def test_a_model_that_is_moved_to_another_dtype(case: str) -> None:
    """Some of torchao's tensors take it over, others go on dequantising to the dtype that they were made from."""
    model = with_lora(lambda: in_format(case, plain(dtype=torch.float32)))
    weights = MergedWeights(model)
    assert_streams(model, torch.float32, weights)
    model.to(torch.bfloat16)
    weight = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    assert weight.dequantize().dtype == (torch.bfloat16 if "int4" in case else torch.float32)
    got, right = {name: tensor.clone() for name, tensor in weights}, exact(model)
    for name in (name for name in right if name.endswith("proj.weight")):
        assert got[name].dtype == weight.dequantize().dtype
        torch.testing.assert_close(got[name].double(), right[name], rtol=2.0**-8, atol=2.0**-20)
    assert_streams(model, torch.bfloat16, MergedWeights(model, dtype=torch.bfloat16))


@pytest.mark.parametrize("case", ["int8", "hqq 4 bits"])
def test_in_inference_mode(case: str) -> None:
    model = with_lora(lambda: in_format(case))
    weights = MergedWeights(model)
    for _ in range(3):
        with torch.inference_mode():
            assert_streams(model, stream=weights)
        assert_streams(model, stream=weights)


def test_stochastic() -> None:
    model = with_lora(lambda: in_format("int8"))
    right = exact(model)
    for name, tensor in MergedWeights(model, rounding="stochastic"):
        if name in right:
            step = 2.0**-7 * right[name].abs() + 2.0**-20
            assert ((tensor.double() - right[name]).abs() <= step).all()


@pytest.mark.parametrize("case", ["int8", "int4 in groups of 32", "fp8", "hqq 4 bits"])
def test_without_adapters(case: str) -> None:
    model = with_lora(lambda: in_format(case))
    base = in_format(case)
    for stream in (MergedWeights(base), MergedWeights(model, adapters=False)):
        got = {name: tensor.clone() for name, tensor in stream}
        for name, wanted in exact(base).items():
            assert_same_bits(got[name], wanted.bfloat16(), name)


def test_tied() -> None:
    """A tied head beside quantised layers; one quantised weight in two places; embeddings that are quantised."""
    tied = with_lora(lambda: in_format("int8", plain(tied=True)), target_modules=["q_proj"])
    assert "lm_head.weight" not in dict(MergedWeights(tied))
    whole = plain(tied=True)
    quantize_(whole, TORCHAO["int4 in groups of 32"](), lambda module, name: isinstance(module, nn.Embedding))
    whole.lm_head.weight = whole.model.embed_tokens.weight
    got = dict(MergedWeights(whole))
    assert "lm_head.weight" not in got
    assert_same_bits(got["model.embed_tokens.weight"], whole.model.embed_tokens.weight.dequantize())
    model = in_format("int8")
    for name in ("k_proj", "q_proj"):
        assert model.model.layers[0].self_attn.get_submodule(name).weight.data_ptr() == 0
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert_streams(model)


def test_mixed_formats() -> None:
    base = plain()
    for config, layers in ((TORCHAO["int8"](), ("k_proj", "up_proj")), (TORCHAO["fp8"](), ("q_proj", "lm_head"))):
        quantize_(base, config, lambda module, name, layers=layers: name.endswith(layers))
    attention = base.model.layers[0].self_attn
    attention.v_proj = hqq_layer(attention.v_proj, nbits=4, group_size=32, axis=1)
    attention.o_proj = four_bits(attention.o_proj, quant_type="nf4")  # which a kernel decodes
    assert_streams(with_lora(lambda: base))


@pytest.mark.parametrize("case", ["int8", "hqq 4 bits"])
def test_merged_whole(case: str) -> None:
    """Weights that are gathered first, and merged then."""
    for kind in ({}, {"use_dora": True}, {"adapters": ("one", "two")}):
        model = with_lora(lambda: in_format(case), **kind)
        assert_streams(model, stream=MergedWeights(model, strategy="unshard"))


def test_fused_experts() -> None:
    """Of three dimensions; a checkpoint has each expert apart."""
    torch.manual_seed(0)
    model, coded = policies.qwen3_moe().bfloat16(), 0
    for module in model.modules():
        for name in ("gate_up_proj", "down_proj"):
            weight = module._parameters.get(name)
            if weight is not None and weight.dim() == 3:
                made = Int8Tensor.from_hp(weight.detach(), PerRow())
                setattr(module, name, nn.Parameter(made, requires_grad=False))
                coded += 1
    assert coded
    got = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if how(module, name):
                setattr(module, name, nn.Parameter(weight.dequantize()))
    plain = dict(MergedWeights(model))
    assert set(got) == set(plain)
    for name, tensor in plain.items():
        assert_same_bits(got[name], tensor, name)


@pytest.mark.parametrize("case", ["int8", "int8 in groups of 32", "int4 in groups of 32", "fp8"])
def test_transformers(case: str, tmp_path: Path) -> None:
    """A model as transformers loads it, and as it saves and loads it quantised; embeddings and heads too."""
    from transformers import Qwen2ForCausalLM, TorchAoConfig

    plain().save_pretrained(tmp_path / "plain")
    load = lambda folder, **more: Qwen2ForCausalLM.from_pretrained(  # noqa: E731
        folder, device_map="cpu", dtype=torch.bfloat16, **more
    )
    for both in (False, True):
        config = TorchAoConfig(quant_type=TORCHAO[case](), include_input_output_embeddings=both)
        base = load(tmp_path / "plain", quantization_config=config)
        assert bool(how(base.lm_head)) == both
        before = {name: tensor.clone() for name, tensor in MergedWeights(base)}
        base.save_pretrained(tmp_path / str(both))
        for name, tensor in MergedWeights(load(tmp_path / str(both))):
            assert_same_bits(tensor, before[name], name)
        assert_streams(with_lora(lambda base=base: base))


def test_embeddings() -> None:
    """PEFT makes a linear layer's adapter of one on a quantised embedding, which cannot be run; beside it one can."""
    base = plain()
    quantize_(base, TORCHAO["int4 in groups of 32"](), lambda module, name: isinstance(module, nn.Embedding))
    got = assert_streams(with_lora(lambda: base, target_modules=["q_proj"]))
    with torch.no_grad():
        assert_same_bits(got["model.embed_tokens.weight"], base.model.embed_tokens(torch.arange(models.VOCABULARY)))
    model = with_lora(lambda: in_format("int8", base), target_modules=["embed_tokens"])
    with pytest.raises(UnsupportedAdapter, match="embed_tokens"):
        list(MergedWeights(model))


def test_saved(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = with_lora(lambda: in_format("int8"))
    save_merged(model, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    for name, tensor in MergedWeights(model):
        assert_same_bits(saved[name], tensor, name)
