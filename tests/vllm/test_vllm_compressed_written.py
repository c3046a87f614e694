"""Engines on checkpoints in DeepSeek's blocks whose layers a trainer in their process writes as they lie: which are
written, the bits, and what goes through the reload instead.

Engines with experts, and vLLM 0.26, are in test_vllm_quantised_gpu.py.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import quantised
import torch
from compressed import arguments, compress, compress_by_blocks, kernel_for_blocks
from engines import engine, train
from policies import FUSED
from torch import nn
from weight_bits import bits_of

from lora_merge import Plan, PushFailed, VllmSync
from lora_merge.engine.vllm.loading import direct
from lora_merge.engine.vllm.loading.compressed import Scheme, as_in_checkpoint, named_back
from lora_merge.engine.vllm.loading.reload import on_meta
from lora_merge.engine.worker.dry_run import Capture, feed
from lora_merge.engine.worker.loader import everything
from lora_merge.kernels.segments import copies
from lora_merge.stream.bucket_writer import BucketWriter
from lora_merge.stream.direct_targets import DirectTargets
from lora_merge.verify import coverage
from tests.vllm.test_vllm_compressed import BUCKET, READ, assert_close, even, held, policy

NARROW = 1 << 16
"""Buckets in which no layer comes with the embedding, which a CPU's engine can only reload."""
LEFT = {"model.embed_tokens"}
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Any]]:
    """An engine on the blocks of a merged policy, the policy, and what that engine holds."""
    model, folder = policy(build=even), tmp_path_factory.mktemp("one") / "merged"
    train(model)
    compress_by_blocks(quantised.save_merged(model, folder))
    with kernel_for_blocks(), engine(model, folder, **READ | {"enable_lora": True, "max_lora_rank": 8}) as llm:
        yield llm, model, held(llm)


def forget(llm: Any) -> None:
    """As if nothing of the engine were known."""
    quantised.served(llm).__dict__.pop("_lora_merge", None)


@pytest.mark.parametrize("bucket_bytes", [NARROW, BUCKET, 1 << 18])
def test_layers_are_written_as_they_lie(one: Any, bucket_bytes: int) -> None:
    """In every push, in memory that stays where it is; but for those that come in a bucket with the embedding."""
    llm, model, fresh = one
    most = {NARROW: 0, BUCKET: 2, 1 << 18: 4}[bucket_bytes]
    memory = {name: p.data_ptr() for name, p in quantised.served(llm).named_parameters()}
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with closing(VllmSync(model, llm, bucket_bytes=bucket_bytes)) as sync:
        for step in range(3):
            train(model, step, 0.02)
            with quantised.reloaded(llm) as found:
                report = sync.push(verify=step == 0)
            assert sum("layers" in path for path in found) <= most, found
            assert report.reloaded == len(found), report
            assert held(llm)[0] != fresh[0]
            assert_close(llm, model, 0.08)
            assert [state.kind for state in sync.states()] == ["merged"]
        model.load_state_dict(start, strict=False)
        sync.push(verify=True)
    assert held(llm) == fresh
    assert all(covered.complete for covered in coverage(llm))
    assert memory == {name: p.data_ptr() for name, p in quantised.served(llm).named_parameters()}


def test_adapters_of_several_ranks(one: Any) -> None:
    """And a layer without one; bits are those that the reload makes of the same policy."""
    llm, _, fresh = one
    ranks = {"r": 8, "rank_pattern": {"q_proj": 3, "o_proj": 16, "down_proj": 40}}
    model = policy(3, even, **ranks, target_modules=[name for name in engines.LINEARS if name != "v_proj"])
    train(model, 4)
    wanted: Any = None
    for written in (False, True):
        with pytest.MonkeyPatch.context() as patched, closing(VllmSync(model, llm, bucket_bytes=NARROW)) as sync:
            if not written:
                patched.setattr(direct.DirectLayers, "targets", lambda *_: DirectTargets({}))
            forget(llm)
            with quantised.reloaded(llm) as found:
                sync.push(verify=True)
        assert {path for path in found if "layers" in path} == set() if written else len(found) >= 8
        wanted = held(llm) if wanted is None else wanted
        assert held(llm) == wanted != fresh


def test_written_between_other_ways(one: Any) -> None:
    """Engines that merge, and adapters beside the base, leave layers in which the next push is written."""
    llm, model, fresh = one
    for way in ({"merge": "engine"}, {"mode": "adapter"}):
        with closing(VllmSync(model, llm, bucket_bytes=NARROW, **way)) as sync:
            sync.push()
            sync.push()
        with closing(VllmSync(model, llm, bucket_bytes=NARROW)) as sync, quantised.reloaded(llm) as found:
            sync.push()
        assert set(found) <= LEFT
        assert held(llm) == fresh


@pytest.mark.parametrize("part", ["weight", "scales"])
def test_a_layer_that_is_written_wrong_shows(one: Any, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, model, fresh = one
    with closing(VllmSync(model, llm, bucket_bytes=NARROW)) as sync:
        with monkeypatch.context() as patched:
            patched.setattr(
                BucketWriter, "write_direct", quantised.wrong_in_one_bit(part, "model.layers.1.self_attn.v_proj.weight")
            )
            with pytest.raises(PushFailed, match="did not arrive as they were sent"):
                sync.push(verify=True)
        assert [state.kind for state in sync.states()] == ["dirty"]
        sync.push(verify=True)
    assert held(llm) == fresh


@pytest.mark.parametrize("name", ["weight", "weight_scale_inv"])
def test_layers_are_reloaded_where_vllm_makes_other_bits(one: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod as Method

    llm, model, fresh = one
    process = Method.process_weights_after_loading

    def other(self: Any, layer: Any) -> None:
        process(self, layer)
        getattr(layer, name).data.view(torch.uint8)[0, 0] ^= 1

    for broken in (True, False):
        forget(llm)
        caplog.clear()
        with (
            pytest.MonkeyPatch.context() as patched,
            caplog.at_level(logging.DEBUG, direct.__name__),
            closing(VllmSync(model, llm, bucket_bytes=NARROW)) as sync,
            quantised.reloaded(llm) as found,
        ):
            if broken:
                patched.setattr(Method, "process_weights_after_loading", other)
            sync.push()
        assert sum("layers" in path for path in found) == 8 * broken, found
        assert ("weight came out with other bits than the kernel's" in caplog.text) == broken
        assert (held(llm)[0] == fresh[0]) != broken


def turned(layer: Any) -> None:
    """The same values, column after column."""
    layer.weight = nn.Parameter(layer.weight.data.t().contiguous().t(), requires_grad=False)


def padded(layer: Any) -> None:
    scales = nn.functional.pad(layer.weight_scale_inv.data, (0, 0, 0, 1))
    layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)


def spread(layer: Any) -> None:
    """Scales with room between them."""
    scales = nn.functional.pad(layer.weight_scale_inv.data, (0, 1))[:, :-1]
    layer.weight_scale_inv = nn.Parameter(scales, requires_grad=False)


def requantised(layer: Any) -> None:
    """To scales that are powers of two, as DeepGEMM's are."""
    scales = layer.weight_scale_inv.data
    rounded = torch.exp2(torch.ceil(torch.log2(scales)))
    factor = (scales / rounded).repeat_interleave(128, 0).repeat_interleave(128, 1)
    rows, cols = layer.weight.shape
    values = (layer.weight.float() * factor[:rows, :cols]).to(layer.weight.dtype)
    layer.weight = nn.Parameter(values, requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(rounded, requires_grad=False)


def renamed(layer: Any) -> None:
    scales = layer.weight_scale_inv.data
    del layer.weight_scale_inv
    layer.weight_scale = nn.Parameter(scales, requires_grad=False)


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (turned, set(FUSED)),
        (padded, set(FUSED)),
        (spread, {"qkv_proj", "gate_up_proj"}),  # the others have a single row of scales
        (requantised, set(FUSED)),
        (renamed, set()),
    ],
)
def test_what_vllm_makes_of_a_layer(
    change: Any, left: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other layouts and values are reloaded, another name of the scales is written; none is ever wrong."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod as Method

    process = Method.process_weights_after_loading

    def changed(self: Any, layer: Any) -> None:
        process(self, layer)
        change(layer)

    monkeypatch.setattr(Method, "process_weights_after_loading", changed)
    assert assert_as_fresh(policy(build=even), tmp_path / "merged", even) == left


def uneven(intermediate: int, tied: bool = True) -> nn.Module:
    """A model whose weights have rows and columns that blocks of 128 do not divide.

    Args:
        intermediate: rows of gate and up, which the engine has one above the other.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = engines.SIZES | {"hidden_size": 192, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes | {"intermediate_size": intermediate, "tie_word_embeddings": tied}))


@pytest.mark.parametrize(("intermediate", "left"), [(256, set()), (224, {"gate_up_proj"})])
def test_blocks_that_do_not_divide_the_shape(
    intermediate: int, left: set[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the end of a weight a block is a smaller one. Where a tensor begins inside of a block of the engine's layer,
    its checkpoint has scales of parts that the kernel does not make; what comes in buckets with it is reloaded, too."""
    build = partial(uneven, intermediate)
    caplog.set_level(logging.DEBUG, direct.__name__)
    found = assert_as_fresh(policy(build=build), tmp_path / "merged", build, bucket_bytes=256 * 192 * 2)
    assert left <= found if left else not found
    said = re.findall(r"MergedColumnParallelLinear of \S+ is reloaded: weight came out with other bits", caplog.text)
    assert bool(said) == bool(left)
    assert len(re.findall("came out", caplog.text)) == len(said)


def test_tensors_in_several_buckets(tmp_path: Path) -> None:
    """Of which the last is shared with what can only be reloaded, the head: all of the tensor comes one way. (It was
    written with the bucket of its last part, which is not, so it was not written at all.)"""
    build = partial(uneven, 256, tied=False)
    assert "down_proj" in assert_as_fresh(policy(build=build), tmp_path / "merged", build)


@pytest.mark.parametrize("strategy", ["channel", "block"])
def test_compressed_tensors_are_reloaded(strategy: str, tmp_path: Path) -> None:
    """Their scales are bf16 numbers, which the kernel does not make."""
    found = assert_as_fresh(policy(build=even), tmp_path / "merged", even, partial(ct, strategy=strategy))
    assert found == set(FUSED)


def ct(folder: Path, strategy: str) -> Path:
    return compress(folder, arguments("float", strategy))


def test_the_proof_finds_that_compressed_tensors_are_other_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Were they not told apart by their name."""
    read = direct._read

    def any_scheme(loading: Any) -> Any:
        unnamed = direct._Loading(loading.root, loading.records, loading.fed, {})
        monkeypatch.setattr(type(unnamed), "pairs", property(lambda self: {"weight"}))
        return read(unnamed)

    monkeypatch.setattr(direct, "_read", any_scheme)
    caplog.set_level(logging.DEBUG, direct.__name__)
    found = assert_as_fresh(policy(build=even), tmp_path / "merged", even, partial(ct, strategy="block"))
    assert found == set(FUSED)
    assert "came out with other bits than the kernel's" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "loaded"), [(torch.float32, "bfloat16"), (torch.float16, "bfloat16"), (torch.float32, "float16")]
)
def test_a_trainer_of_another_dtype(dtype: torch.dtype, loaded: str, tmp_path: Path) -> None:
    """Sums are rounded once to what the engine wants, before they are scaled."""
    import models

    model, folder = models.with_lora(even, dtype=dtype, target_modules=engines.LINEARS), tmp_path / "merged"
    quantised.save_merged(model, folder, getattr(torch, loaded))
    compress_by_blocks(folder)
    with kernel_for_blocks(), engine(model, folder, **READ | {"dtype": loaded}) as llm:
        fresh = llm.collective_rpc("bits")
        for one, same in ((policy(1, even), False), (model, True)):
            with closing(VllmSync(one, llm, bucket_bytes=NARROW)) as sync, quantised.reloaded(llm) as found:
                sync.push(verify=True)
            assert set(found) <= LEFT
            assert (llm.collective_rpc("bits") == fresh) == same


class Fp8MoEMethod:
    """By the name of vLLM's method for experts, which has no kernel for a CPU."""

    weight_block_size = (128, 128)

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in list(layer._parameters):
            layer.register_parameter(name, nn.Parameter(layer._parameters[name].data.clone(), requires_grad=False))


class Experts(nn.Module):
    """Experts `[3, 2 * middle, 256]` and `[3, 256, middle]` as vLLM loads them.

    Args:
        middle: rows of gate and of up.
        swapped: whether scales of up are loaded where those of gate belong.
    """

    def __init__(self, middle: int, swapped: bool = False) -> None:
        from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

        super().__init__()
        self.middle, self.swapped, self.quant_method = middle, swapped, Fp8MoEMethod()
        for name, rows, cols in (("w13", 2 * middle, 256), ("w2", 256, middle)):
            values = torch.zeros(3, rows, cols, dtype=torch.float8_e4m3fn)
            self.register_parameter(f"{name}_weight", nn.Parameter(values, requires_grad=False))
            grid = torch.zeros(3, -(-rows // 128), -(-cols // 128))
            self.register_parameter(f"{name}_weight_scale_inv", nn.Parameter(grid, requires_grad=False))
        record_metadata_for_reloading(self)

    def load_weights(self, tensors: Any) -> None:
        for name, tensor in tensors:
            expert, which, part = name.split(".", 2)
            into = self._parameters["w2_" + part if which == "down" else "w13_" + part][int(expert)]
            second = (which == "up") != (self.swapped and part.endswith("inv"))
            start = tensor.shape[0] if second and which != "down" else 0
            into[start : start + tensor.shape[0]].copy_(tensor)


@pytest.mark.parametrize(
    ("middle", "swapped", "said"),
    [(256, False, ""), (256, True, "w13_weight came out with other bits"), (224, False, "w13_weight came out with")],
)
def test_experts(
    middle: int, swapped: bool, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each expert is a weight of its own; what is merged to the places has the bits of what is loaded."""
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    caplog.set_level(logging.DEBUG, direct.__name__)
    layer, scheme = Experts(middle, swapped), Scheme(torch.float8_e4m3fn, "block", "_scale_inv")
    shapes = {"gate": (middle, 256), "up": (middle, 256), "down": (256, middle)}
    stream = {f"{e}.{w}.weight": torch.randn(shape).bfloat16() for e in range(3) for w, shape in shapes.items()}
    fed = {name: tensor.to("meta") for name, tensor in stream.items()}
    schemes = dict.fromkeys(fed, scheme)
    pairs = as_in_checkpoint(list(fed.items()), schemes)
    with on_meta([layer]):
        owners = dict(layer.named_parameters())
        capture = Capture(owners, pairs, everything(layer))
        assert feed(layer, capture, pairs) == {}
    refused, of_scales = named_back(capture, {}, schemes, torch.bfloat16)
    assert not refused
    records = [*capture.records, *of_scales]
    places = direct.DirectLayers().targets([layer], records, fed, dict.fromkeys(owners, layer), schemes)
    assert said in caplog.text
    assert bool(places.views) == (not said)
    if said:
        return
    layer.load_weights(as_in_checkpoint(list(stream.items()), schemes))
    wanted = {name: bits_of(p) for name, p in layer.named_parameters()}
    for parameter in layer.parameters():
        parameter.data.zero_()
    segments = [
        s for name, found in places.views.items() for _, view in found for s in copies(name, stream[name], view)
    ]
    Plan(segments, list({id(s): s for found in places.scaled.values() for s in found}.values())).run()
    assert {name: bits_of(p) for name, p in layer.named_parameters()} == wanted


def assert_as_fresh(
    model: Any, folder: Path, other: Any, quantise: Any = compress_by_blocks, bucket_bytes: int = NARROW
) -> set[str]:
    """After another policy was there, pushes bring the bits of a fresh engine.

    Args:
        other: builds another policy's model.
        quantise: makes the engine's checkpoint of the merged one.

    Returns:
        The last parts of the names of the layers that were reloaded in each push.
    """
    train(model)
    quantise(quantised.save_merged(model, folder))
    reloaded, others = [], []
    with kernel_for_blocks(), engine(model, folder, **READ) as llm:
        fresh = llm.collective_rpc("bits")
        for verify in (False, True):
            for one, same in ((policy(1, other), False), (model, True)):
                with closing(VllmSync(one, llm, bucket_bytes=bucket_bytes)) as sync, quantised.reloaded(llm) as found:
                    report = sync.push(verify=verify)
                assert report.reloaded == len(found)
                reloaded.append({path.rpartition(".")[2] for path in found if "layers" in path})
                bits = llm.collective_rpc("bits")
                assert (bits == fresh) == same
                others += [] if same else [bits]
    assert others[0] == others[1]
    assert all(some == reloaded[0] for some in reloaded)
    return reloaded[0]
