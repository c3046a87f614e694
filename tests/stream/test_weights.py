"""MergedWeights: names, layouts and values of the stream, buckets, and consumers that misbehave."""

from __future__ import annotations

import copy
import gc
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import assert_same_bits
from memory import Allocations
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn

from lora_merge import InvalidInput, MergedWeights, UnsupportedAdapter, save_merged
from lora_merge.engine.payload.adapter import AdapterBuilder
from lora_merge.stream.bucket_writer import BucketWriter
from lora_merge.stream.buckets import ALIGNMENT, Meta, checksum, extent, from_json, lay_out, to_json
from lora_merge.stream.direct_targets import DirectTargets
from lora_merge.stream.source import Source


def gemma4() -> nn.Module:
    """Persistent buffers (`layer_scalar`)."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = models._SIZES | {"head_dim": 8, "vocab_size_per_layer_input": models.VOCABULARY}
    return Gemma4ForCausalLM(Gemma4TextConfig(**sizes, hidden_size_per_layer_input=8))


def qwen2_5_vl() -> nn.Module:
    """A vision tower and a language model; run-time names differ from those of checkpoints."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32,
              "fullatt_block_indexes": [1]}  # fmt: skip
    text = models._SIZES | {"rope_parameters": rope}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
CASES = {
    "qwen2": (models.qwen2, {}),
    "qwen2 tied": (lambda: models.qwen2(tied=True), {}),
    "qwen2 embeddings": (models.qwen2, {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
    "qwen2 dora": (models.qwen2, {"use_dora": True}),
    "qwen2 head saved": (models.qwen2, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "gpt2": (models.gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "mixtral": (models.mixtral, ATTENTION | {"target_parameters": EXPERTS}),
    "qwen3 moe": (models.qwen3_moe, ATTENTION | {"target_parameters": EXPERTS}),
    "gpt_oss": (models.gpt_oss, ATTENTION | {"target_parameters": EXPERTS}),
    "gemma4": (gemma4, ATTENTION),
    "qwen2.5 vl": (qwen2_5_vl, {"target_modules": ["q_proj", "qkv"]}),
}


def checkpoint(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """What PEFT merges and transformers saves."""
    merged = copy.deepcopy(model).merge_and_unload() if hasattr(model, "merge_and_unload") else model
    merged.save_pretrained(folder)
    return {k: t for file in folder.glob("*.safetensors") for k, t in load_file(file).items()}


@pytest.mark.parametrize("case", CASES)
def test_the_stream_is_the_checkpoint_that_peft_merges_and_saves(case: str, tmp_path: Path) -> None:
    build, config = CASES[case]
    model = models.with_lora(build, **config)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    weights = MergedWeights(model, bucket_bytes=1 << 13)
    streamed = dict(weights)
    wanted = checkpoint(model, tmp_path)
    assert streamed.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # Both round a float32 sum once; the products are accumulated in different orders.
        torch.testing.assert_close(streamed[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert weights.metadata() == [(name, t.dtype, tuple(t.shape)) for name, t in streamed.items()]
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, before[name], name)


@pytest.mark.parametrize("bucket_bytes", [ALIGNMENT, 3000, 1 << 20])
def test_bits_do_not_depend_on_the_buckets(bucket_bytes: int) -> None:
    model = models.with_lora(models.qwen3_moe, dtype=torch.bfloat16, **ATTENTION, target_parameters=EXPERTS)
    whole = dict(MergedWeights(model))
    for bucket in MergedWeights(model, bucket_bytes=bucket_bytes).buckets():
        assert len(bucket.slots) == 1 or extent(bucket.slots) <= -(-bucket_bytes // ALIGNMENT) * ALIGNMENT
        for slot, (name, tensor) in zip(bucket.slots, bucket.tensors(), strict=True):
            assert slot.offset % ALIGNMENT == 0
            assert_same_bits(tensor, whole[name], name)


def test_a_tensor_larger_than_a_bucket_gets_its_own() -> None:
    metas = [Meta("a", torch.float32, (10,)), Meta("b", torch.float32, (1000,)), Meta("c", torch.int8, (3,))]
    table = lay_out(metas, 512)
    assert [[slot.name for slot in slots] for slots in table] == [["a"], ["b"], ["c"]]
    assert max(map(extent, table)) == 4096
    assert from_json(json.loads(json.dumps(to_json(table)))) == table


@pytest.mark.parametrize("change", [{3: 128}, {1: "floating"}, {2: [11]}])
def test_a_wrong_table_off_the_wire_is_refused(change: dict[int, object]) -> None:
    (slots,) = to_json(lay_out([Meta("w", torch.float32, (10,))], 512))
    for column, value in change.items():
        slots[0][column] = value
    with pytest.raises(InvalidInput):
        from_json([slots])


def engine_like(weights: MergedWeights) -> tuple[DirectTargets, dict[str, Tensor]]:
    """Parameters as an engine has them: two tensors of the stream in one (the second one stored transposed where it is
    a matrix), and each tensor cut into two boxes, as fused and padded layers are loaded."""
    views, whole = {}, {}
    for turn, meta in enumerate(weights.metadata()):
        shape = (*meta.shape[:-1], meta.shape[-1] + 3) if meta.shape else meta.shape
        held = torch.full(shape, 7, dtype=meta.dtype)
        if turn % 2 and held.dim() == 2:
            held = torch.full(shape[::-1], 7, dtype=meta.dtype).t()
        inner = held[..., : meta.shape[-1]] if meta.shape else held
        whole[meta.name] = inner
        half = meta.shape[0] // 2 if meta.shape else 0
        start, rest = (0,) * len(meta.shape), meta.shape[1:]
        if half:
            views[meta.name] = [
                ((start, (half, *rest)), inner[:half]),
                (((half, *start[1:]), (meta.shape[0] - half, *rest)), inner[half:]),
            ]
        else:
            views[meta.name] = [((start, meta.shape), inner)]
    return DirectTargets(views), whole


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_placed_is_what_a_bucket_holds(case: str, rounding: str) -> None:
    """An engine of this process gets merged weights without a bucket between."""
    build, config = CASES[case]
    model = models.with_lora(build, dtype=torch.bfloat16, **config)
    weights = MergedWeights(model, bucket_bytes=1 << 12, rounding=rounding)
    run = {"rounding": rounding} | ({"seed": 5} if rounding == "stochastic" else {})
    wanted = {name: t.clone() for bucket in weights.buckets(seed=run.get("seed")) for name, t in bucket.tensors()}
    places, engine = engine_like(weights)
    for step in range(2):
        writer, placed = weights.bucket_writer(), set()
        with writer.passing():
            straight = writer.direct_buckets(places.on(writer.device))
            for index, slots in enumerate(writer.table):
                if index in straight:
                    writer.write_direct(index, places, run)
                    placed |= {slot.name for slot in slots}
                else:
                    assert any(writer.entries[slot.name].window is None for slot in slots)
        assert placed, "nothing was placed"
        for name in placed:
            assert_same_bits(engine[name], wanted[name], f"{name}, pass {step}")
            engine[name].fill_(9)
    beyond = [t._base for t in engine.values() if t._base is not None]
    assert all(bool((t[..., -3:] == 7).all() or (t[-3:] == 7).all()) for t in beyond), "written beside its place"
    lacking = DirectTargets({name: views for name, views in places.views.items() if not name.endswith("norm.weight")})
    writer = weights.bucket_writer()
    for index in writer.direct_buckets(lacking.on(writer.device)):
        assert not any(slot.name.endswith("norm.weight") for slot in writer.table[index])


def test_an_engine_that_is_gone_is_not_kept() -> None:
    weights = MergedWeights(models.with_lora(models.qwen2))
    places, engine = engine_like(weights)
    gone = [weakref.ref(t) for t in (*engine.values(), places)]
    writer = weights.bucket_writer()
    with writer.passing():
        writer.write_direct(0, places, {})
    del places, engine
    gc.collect()
    assert all(r() is None for r in gone), "plans that lie idle hold the tensors of an engine"


def test_consumers_that_keep_tensors_stop_early_or_raise() -> None:
    model = models.with_lora(models.qwen2)
    weights = MergedWeights(model, bucket_bytes=4096)
    kept = list(weights)  # holds on to every tensor
    expected = {name: t.clone() for name, t in kept}
    for name, tensor in weights:
        if "layers.1" in name:
            break
        assert_same_bits(tensor, expected[name], name)

    def consume() -> None:
        for _ in weights.buckets():
            raise RuntimeError("consumer")

    with pytest.raises(RuntimeError, match="consumer"):
        consume()
    for name, tensor in weights:
        assert_same_bits(tensor, expected[name], name)
    kept += list(weights)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for _ in weights.buckets():
        pass
    for name, tensor in kept:
        assert_same_bits(tensor, expected[name], f"{name}, which was held during more passes")


@pytest.mark.parametrize("held", [0, 1])
def test_two_buffers_suffice_for_who_lets_go(held: int) -> None:
    """Also for a plain loop, which has the last tensor until it gets the next one; then plans are kept, too."""
    weights = MergedWeights(models.with_lora(models.qwen2), bucket_bytes=4096)
    assert len(weights.bucket_writer(whole=True).table) > 10
    places = set()
    plans: list[list[object]] = []
    for _ in range(2):
        for _, tensor in weights:
            places.add(tensor.untyped_storage().data_ptr())
            if not held:
                del tensor
        plans.append([plan for _, plan in weights.bucket_writer(whole=True)._plans._plans.values()])
    assert len(places) == 2
    assert plans[0] == plans[1]


def test_buffers_go_with_who_holds_them() -> None:
    """A consumer that collects some tensors at a time (a trainer's own buckets) does not make the stream keep all."""
    weights = MergedWeights(models.with_lora(models.qwen2), bucket_bytes=4096)
    capacity = weights.bucket_writer(whole=True).capacity
    with Allocations() as allocations:
        some: list[Tensor] = []
        most = 0
        for _, tensor in weights:
            some.append(tensor)
            if len({tensor.untyped_storage().data_ptr() for tensor in some}) == 4:
                del tensor
                some.clear()
            alive = (not held.expired() for held, nbytes in allocations.seen.values() if nbytes == capacity)
            most = max(most, sum(alive))
    assert 4 <= most <= 7  # the consumer's, the stream's two, and one that it is handing over


def test_lazily_read_tensors_hold_the_adapter() -> None:
    """A peer restored the base before its lazy tensors were read, and sent the base without the adapter."""
    model = models.with_lora(models.qwen2)
    stream = iter(MergedWeights(model, bucket_bytes=4096))
    lazily = dict(stream)
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    name = "model.layers.1.mlp.down_proj.weight"
    torch.testing.assert_close(lazily[name], merged[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_dora", [False, True])
def test_passes_inside_of_inference_mode_and_then_outside(use_dora: bool) -> None:
    model = models.with_lora(models.qwen2, use_dora=use_dora)
    stream = MergedWeights(model)
    for number in range(4):
        with torch.inference_mode(number in (0, 2)):
            sent = {name: tensor.clone() for name, tensor in stream}
        for name, tensor in MergedWeights(model):
            assert_same_bits(sent[name], tensor, name)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(-1.1)


def test_every_pass_reads_the_adapter_as_it_is_now() -> None:
    model = models.with_lora(models.qwen2)
    weights = MergedWeights(model)
    name = "model.layers.0.self_attn.q_proj.weight"
    first = dict(weights)[name]
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    base = layer.base_layer.weight.detach()
    for factor in (3.0, 0.0):
        layer.scaling["default"] = factor * 1.5
        torch.testing.assert_close(dict(weights)[name] - base, factor * (first - base), rtol=1e-3, atol=1e-5)
    layer.base_layer.weight.data = base.clone() + 1  # another tensor in the parameter's place
    torch.testing.assert_close(dict(weights)[name], base + 1)
    with model.disable_adapter():
        torch.testing.assert_close(dict(weights)[name], base + 1)


def test_an_adapter_on_one_of_two_tied_weights_sends_both() -> None:
    tied = models.with_lora(lambda: models.qwen2(tied=True), target_modules=["embed_tokens", "q_proj"])
    streamed = dict(MergedWeights(tied))
    base = tied.get_base_model().lm_head.weight
    assert_same_bits(streamed["lm_head.weight"], base.detach(), "the head, which has no adapter")
    assert not torch.equal(streamed["model.embed_tokens.weight"], base)
    assert "lm_head.weight" not in dict(MergedWeights(models.qwen2(tied=True)))


SMALL = models._SIZES | {
    "d_model": 32, "dim": 32, "d_kv": 8, "d_ff": 48, "hidden_dim": 48, "ffn_dim": 48, "embedding_size": 32,
    "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_heads": 4, "attention_types": [[["global"], 2]], "attention_window": 4, "word_embed_proj_dim": 32,
    "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 1,
    "tie_word_embeddings": True, "max_source_positions": 64,
}  # fmt: skip
"""Sizes of all kinds of models; each takes what it knows."""
TIED = [
    "AlbertForMaskedLM",
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "BertForPreTraining",
    "BloomForCausalLM",
    "CamembertForCausalLM",
    "CamembertForMaskedLM",
    "CohereForCausalLM",
    "DebertaV2ForMaskedLM",
    "DistilBertForMaskedLM",
    "ElectraForMaskedLM",
    "FalconForCausalLM",
    "Gemma2ForCausalLM",
    "GemmaForCausalLM",
    "GPT2LMHeadModel",
    "GPTNeoForCausalLM",
    "LlamaForCausalLM",
    "MBartForConditionalGeneration",
    "MPNetForMaskedLM",
    "MT5ForConditionalGeneration",
    "OPTForCausalLM",
    "PegasusForConditionalGeneration",
    "PhiForCausalLM",
    "Qwen2ForCausalLM",
    "RobertaForCausalLM",
    "RobertaForMaskedLM",
    "SwitchTransformersForConditionalGeneration",
    "T5ForConditionalGeneration",
    "UMT5ForConditionalGeneration",
    "WhisperForConditionalGeneration",
    "XLMRobertaForCausalLM",
    "XLMRobertaForMaskedLM",
    "XLMRobertaXLForMaskedLM",
    "LongformerForMaskedLM",
    "BigBirdForMaskedLM",
]


@pytest.mark.parametrize("name", TIED)
def test_of_tied_names_the_one_that_transformers_saves(name: str, tmp_path: Path) -> None:
    """CamemBERT's and XLM-RoBERTa's heads come before the embedding that their checkpoints hold."""
    import transformers

    kind = getattr(transformers, name)
    takes = {*dir(kind.config_class()), *kind.config_class.attribute_map}
    model = kind(kind.config_class(**{key: value for key, value in SMALL.items() if key in takes}))
    patterns = [key for module in model.modules() for key in getattr(module, "_tied_weights_keys", None) or ()]
    assert patterns, "nothing is tied here"
    assert dict(MergedWeights(model)).keys() == checkpoint(model, tmp_path).keys()


SHARED = {
    "one": {"target_modules": ["q_proj", "down_proj"]},
    "two": {"target_modules": ["q_proj", "down_proj"], "adapters": ("one", "two")},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
}


def block_in_two_places() -> nn.Module:
    model = models.qwen2()
    model.config.use_cache = False
    model.model.layers[1] = model.model.layers[0]
    return model


@pytest.mark.parametrize("config", SHARED)
def test_a_module_in_two_places_is_merged_under_both_names(config: str) -> None:
    """Nobody ties the two when a checkpoint is loaded, so it needs both names."""
    model = models.with_lora(block_in_two_places, **SHARED[config])
    policy = models.outputs(model)
    weights = MergedWeights(model, bucket_bytes=4096)
    streamed = dict(weights)
    for name, tensor in streamed.items():
        assert_same_bits(tensor, streamed[name.replace(".layers.1.", ".layers.0.")], name)
    weights.keep_tied = True
    assert dict(weights).keys() == streamed.keys()
    for build in (block_in_two_places, models.qwen2):
        loaded = build()
        loaded.config.use_cache = False
        assert loaded.load_state_dict(streamed, strict=True).unexpected_keys == []
        torch.testing.assert_close(models.outputs(loaded.eval()), policy)


def test_replicated_layers_and_a_head_tied_by_hand(tmp_path: Path) -> None:
    """What is loaded is the policy: PEFT's replicas share their base, and a config that ties nothing ties no head."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_attention_heads": 4}
    for layers, replication in ((3, [[0, 2], [1, 3]]), (2, None)):
        base = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, tie_word_embeddings=False)).eval()
        for name, parameter in base.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 2)
        if replication is None:
            base.lm_head.weight = base.model.embed_tokens.weight
        config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, layer_replication=replication)
        model = get_peft_model(base, config).eval()
        wanted = models.outputs(model)
        save_merged(model, tmp_path / str(layers), verify=True)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / str(layers)).eval()
        torch.testing.assert_close(models.outputs(loaded), wanted)


def test_an_interrupt_waits_for_the_collective_of_its_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks, which nobody may have interrupted, are in it: left out, it met their next one."""
    made = list[int]()

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lora_merge.kernels.plan.Plan.run", interrupted)
    monkeypatch.setattr(BucketWriter, "_together", lambda self, index, buffer: made.append(index))
    with pytest.raises(KeyboardInterrupt):
        next(iter(MergedWeights(models.with_lora(models.qwen2, target_modules=["q_proj"])).buckets()))
    assert made[:1] == [0]


def test_an_adapter_in_two_places_is_sent_under_both_names() -> None:
    """An engine has a module for each, and adds their product: the scaling is in it."""
    model = models.with_lora(block_in_two_places, target_modules=["q_proj"], r=4, lora_alpha=6)
    weights = MergedWeights(model)
    source = AdapterBuilder(weights)(torch.float32)
    assert source.modules == [f"model.layers.{layer}.self_attn.q_proj" for layer in (0, 1)]
    buffer = torch.empty(source.capacity, dtype=torch.uint8)
    source.fill(0, buffer, {})
    sent = {slot.name: slot.view(buffer) for slot in source.table[0]}
    for name, tensor in sent.items():
        assert_same_bits(tensor, sent[name.replace(".layers.1.", ".layers.0.")], name)
    base = {name: tensor.clone() for name, tensor in MergedWeights(model, adapters=False)}
    merged = {name: tensor.clone() for name, tensor in MergedWeights(model)}
    for module in source.modules:
        added = sent[f"{module}.lora_B.weight"] @ sent[f"{module}.lora_A.weight"]
        torch.testing.assert_close(base[f"{module}.weight"] + added, merged[f"{module}.weight"])


def test_a_transposed_view_is_no_tie() -> None:
    """Square, it has the address, shape and dtype of the other one, and other values."""
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    model[1].weight.data = model[0].weight.data.t()
    streamed = dict(MergedWeights(model))
    assert_same_bits(streamed["0.weight"], model[0].weight.detach())
    assert_same_bits(streamed["1.weight"], model[1].weight.detach())


def test_dtype_converts_parameters_once_and_leaves_buffers() -> None:
    model = models.with_lora(gemma4, **ATTENTION)
    streamed = dict(MergedWeights(model, dtype=torch.bfloat16))
    full = dict(MergedWeights(model))
    for name, tensor in streamed.items():
        if name.endswith("layer_scalar"):
            assert tensor.dtype == torch.float32
        else:  # float32 merged weights rounded to bf16 once more: at most one step apart
            assert tensor.dtype == torch.bfloat16
            torch.testing.assert_close(tensor.float(), full[name], rtol=2**-8, atol=0)


def test_stochastic_rounding_draws_by_seed() -> None:
    weights = MergedWeights(models.with_lora(models.qwen2, dtype=torch.bfloat16), rounding="stochastic")

    def draw(seed: int) -> dict[str, Tensor]:
        return {name: t.clone() for bucket in weights.buckets(seed=seed) for name, t in bucket.tensors()}

    one, same, other = draw(7), draw(7), draw(8)
    name = "model.layers.0.mlp.up_proj.weight"
    assert_same_bits(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_empty_tensors_are_not_tied() -> None:
    """They have no address that would tell them apart."""
    model = nn.Module()
    model.one, model.two = (nn.Parameter(torch.empty(0, 3)) for _ in range(2))
    assert [name for name, _ in MergedWeights(model)] == ["one", "two"]


def test_full_fine_tuning_without_adapters() -> None:
    model = models.qwen2()
    for name, tensor in MergedWeights(model, bucket_bytes=4096):
        assert_same_bits(tensor, model.state_dict()[name], name)


def test_plans_do_not_keep_a_dropped_model() -> None:
    model = models.qwen2()
    weights = MergedWeights(model)
    list(weights)
    gone = weakref.ref(model)
    del weights, model
    gc.collect()
    assert gone() is None


def test_bad_arguments_are_named() -> None:
    model = models.qwen2()
    for arguments, word in (
        ({"rounding": "up"}, "rounding"),
        ({"dtype": torch.int8}, "dtype"),
        ({"bucket_bytes": 1}, "bucket_bytes"),
    ):
        with pytest.raises(InvalidInput, match=word):
            MergedWeights(model, **arguments).metadata()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to("meta"))
    with pytest.raises(InvalidInput, match=r"lm_head.weight: a meta tensor"):
        MergedWeights(model).metadata()


def test_checksums_see_a_bit_and_an_order() -> None:
    a = torch.arange(1001, dtype=torch.int16)
    assert checksum(a) == checksum(a.clone())
    for change in (lambda t: t[500:502].copy_(t[500:502].flip(0)), lambda t: t[1000:].add_(1), lambda t: t[:1].add_(1)):
        b = a.clone()
        change(b)
        assert checksum(b) != checksum(a)


@pytest.mark.parametrize("config", [{"adapters": ("one", "two")}, {"use_dora": True}], ids=["two", "dora"])
def test_passes_in_several_threads(config: dict[str, Any]) -> None:
    """They share what the adapters of a bucket are laid side by side in."""
    weights = MergedWeights(models.with_lora(models.qwen2, **config), bucket_bytes=4096)
    wanted, wrong = {name: tensor.clone() for name, tensor in weights}, set()

    def passes() -> None:
        for _ in range(20):
            wrong.update(name for name, tensor in weights if not torch.equal(tensor, wanted[name]))
        done.append(True)

    done: list[bool] = []
    threads = [threading.Thread(target=passes) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 3
    assert not wrong


@pytest.mark.parametrize("names", [None, ("one",)], ids=["acting", "named"])
def test_a_pass_begins_as_another_ends(names: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that ends releases the model; what the other has read by then is its own."""
    model = models.with_lora(models.qwen2, adapters=("one", "two"))
    weights = MergedWeights(model, bucket_bytes=4096, adapter_names=names)
    wanted = dict(weights)
    adopt, has_read, ended = BucketWriter.adopt, threading.Event(), threading.Event()

    def adopting(self: BucketWriter, source: Source) -> Source:
        found = adopt(self, source)
        if threading.current_thread() is second:
            has_read.set()
            assert ended.wait(60)
        return found

    second = threading.Thread(target=lambda: got.update(weights))
    got: dict[str, torch.Tensor] = {}
    first = iter(weights)
    next(first)
    monkeypatch.setattr(BucketWriter, "adopt", adopting)
    second.start()
    assert has_read.wait(60)
    for _ in first:
        pass
    ended.set()
    second.join()
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_repr_says_what_differs_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.with_lora(models.qwen2)
    monkeypatch.setattr(MergedWeights, "_open", None)
    assert repr(MergedWeights(model)) == "MergedWeights(PeftModel)"
    made = MergedWeights(model, dtype="bf16", rounding="stochastic", adapter_names=("one",), bucket_bytes=4096)
    told = "dtype='bfloat16', rounding='stochastic', adapter_names=['one'], bucket_bytes=4096"
    assert repr(made) == f"MergedWeights(PeftModel, {told})"
    base = MergedWeights(model.get_base_model(), adapters=False, strategy="unshard")
    assert repr(base) == "MergedWeights(Qwen2ForCausalLM, adapters=False, strategy='unshard')"


def test_passes_that_begin_at_once_share_no_buffer() -> None:
    weights = MergedWeights(models.with_lora(models.qwen2), bucket_bytes=4096)
    dict(weights)
    writer = weights.bucket_writer(whole=True)
    with writer.buffers() as some, writer.buffers() as others:
        assert {b.data_ptr() for b in some}.isdisjoint(b.data_ptr() for b in others)


@pytest.mark.parametrize("adapters", [("one",), ("one", "two")], ids=["one", "two"])
def test_scalings_and_factors_that_float32_does_not_hold(adapters: tuple[str, ...]) -> None:
    """Also where adapters are laid side by side in float32."""
    model = models.with_lora(models.qwen2, adapters=adapters, target_modules=["q_proj"])
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    name, before = "model.layers.0.self_attn.q_proj.weight", layer.lora_A["one"].weight
    layer.scaling["one"] = 1e200
    with pytest.raises(InvalidInput, match=r"q_proj.weight: scaling must be finite in float32, got 1e\+200"):
        dict(MergedWeights(model))
    layer.scaling["one"] = 1.0
    for dtype in (torch.complex64, torch.float64):
        layer.lora_A["one"].weight = nn.Parameter(before.to(dtype))
        with pytest.raises(InvalidInput, match=f"lora_A must be bfloat16, float16 or float32, got {dtype}"):
            dict(MergedWeights(model))
    # What the forward gives is finite: so is the merge, though lora_B times the scaling is not.
    layer.lora_A["one"].weight = nn.Parameter(before * 1e-30)
    layer.lora_B["one"].weight.data.mul_(1e30)
    layer.scaling["one"] = 1e10
    merged, base = dict(MergedWeights(model))[name], layer.base_layer.weight
    wanted = base.double()
    for adapter in adapters:
        a, b = layer.lora_A[adapter].weight.double(), layer.lora_B[adapter].weight.double()
        wanted = wanted + layer.scaling[adapter] * (b @ a)
    torch.testing.assert_close(merged.double(), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


def test_a_magnitude_that_does_not_fit() -> None:
    """Each by itself: all are taken in one piece, where one that is too short takes from the next."""
    model = models.with_lora(models.qwen2, use_dora=True)
    layer = model.base_model.model.model.layers[0].self_attn
    first, second = (part.lora_magnitude_vector["default"] for part in (layer.q_proj, layer.k_proj))
    own = first.weight, second.weight
    first.weight, second.weight = second.weight, first.weight
    with pytest.raises(UnsupportedAdapter, match=r"q_proj.weight: DoRA's magnitude has shape \(\d+,\), expected \d+"):
        dict(MergedWeights(model))
    first.weight, second.weight = own
    first.weight = nn.Parameter(own[0].to("meta"))
    with pytest.raises(InvalidInput, match=r"q_proj.weight: the magnitude is a meta tensor"):
        dict(MergedWeights(model))
