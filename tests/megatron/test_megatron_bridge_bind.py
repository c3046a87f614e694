"""`bind` on real AutoBridges of Megatron-Bridge, beside its own `export_hf_weights`, on megatron-core models."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="the megatron tests run in an environment of their own")

import megatron_models as mm
import torch
from helpers import assert_same_bits
from megatron_models import Grid
from megatron_processes import POOL

from lora_merge.errors import InvalidInput, UnsupportedAdapter
from lora_merge.integrations.megatron_bridge import bind
from tests.megatron.test_megatron_read import Case


def auto_bridge(folder: Path) -> Any:
    """Megatron-Bridge's own, of a checkpoint."""
    mm.bridge()
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    return AutoBridge.from_hf_pretrained(str(folder))


@mock.patch.dict(sys.modules, mm.stand_ins())
def exported(case: Case, folder: Path) -> dict[str, Any]:
    """On each rank: what the bridge exports before and after `bind`, merged and not."""
    hf = mm.hf_model(case.kind, **case.hf)
    chunks = mm.megatron(case.kind, hf, case.grid, form=case.form)
    assert case.style
    mm.adapt(chunks, case.style)
    bridge = auto_bridge(folder)
    before = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    answer: dict[str, Any] = {}
    for who in ("stock", "ours"):
        if who == "ours":
            with mock.patch.dict(os.environ, LORA_MERGE="0"):
                assert bind(bridge) is bridge
                assert "export_hf_weights" not in vars(bridge)
            with mock.patch("lora_merge.integrations.compat.announce") as told:
                assert bind(bridge) is bridge
            assert told.called is (torch.distributed.get_rank() == 0), "one line, on the first rank"
        for merge in (True, False):
            stream = bridge.export_hf_weights(chunks, cpu=True, show_progress=False, merge_adapter_weights=merge)
            answer[f"{who} {merge}"] = {weight.param_name: weight.weight.clone() for weight in stream}
    for p, was in zip((p for chunk in chunks for p in chunk.parameters()), before, strict=True):
        assert_same_bits(p.detach(), was, "a shard after everything")
    # As callers of Megatron-Bridge 0.6 do.
    for weight in bridge.export_hf_weights(chunks, weight_dtype=torch.bfloat16):
        assert_same_bits(weight.weight, answer["ours True"][weight.param_name].bfloat16(), weight.param_name)
    tasks = bridge.get_conversion_tasks(chunks)
    for weight in bridge.export_hf_weights(chunks, conversion_tasks=tasks):  # as NeMo-RL and verl pass them
        assert_same_bits(weight.weight, answer["ours True"][weight.param_name], weight.param_name)
    with pytest.raises(InvalidInput, match=r"conversion_tasks=\.\.\.\) of a part"):
        bridge.export_hf_weights(chunks, conversion_tasks=tasks[1:])
    for name, p in chunks[0].named_parameters():
        if ".linear_out." in name:
            p.data.mul_(1.5)  # a step
    assert any(
        not torch.equal(weight.weight, answer["ours True"][weight.param_name])
        for weight in bridge.export_hf_weights(chunks)
    )
    return answer


VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
CASES = [Case("llama", Grid(), 1, "bridge"), Case("qwen3", Grid(tp=2), 2, "bridge", hf={"tied": True})]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_bridge_exports_as_before(case: Case, tmp_path: Path) -> None:
    """The same names, shapes and, up to the order of sums, values as Megatron-Bridge's own export, merged and not."""
    mm.hf_model(case.kind, **case.hf).save_pretrained(tmp_path)
    for rank in POOL.run(case.world, exported, case, tmp_path):
        assert rank["ours False"].keys() == rank["stock False"].keys()
        for name, tensor in rank["ours False"].items():
            assert_same_bits(tensor, rank["stock False"][name], name)
        ours, stock = rank["ours True"], rank["stock True"]
        assert ours.keys() == stock.keys(), ours.keys() ^ stock.keys()
        for name, tensor in ours.items():
            # Stock's embedding and head have the rows of padding, too.
            wanted = stock[name][: tensor.shape[0]] if name in VOCABULARY else stock[name]
            assert tensor.dtype == wanted.dtype, name
            assert tensor.shape == wanted.shape, name
            # Sums of four products in float32, in any order: a few 2^-24 of the largest.
            assert float((tensor - wanted).abs().max()) <= 2.0**-20 * float(wanted.abs().max()), name
        base = {name.replace(".base_layer", ""): t for name, t in rank["stock False"].items()}
        changed = [name for name in ours if not torch.equal(ours[name], base[name][: len(ours[name])])]
        assert len(changed) == 14, changed  # seven linears of two layers


@mock.patch.dict(sys.modules, mm.stand_ins())
def refused(case: Case, folder: Path) -> None:
    """Adapters of classes that nobody here knows are refused by name, not passed over."""
    hf = mm.hf_model(case.kind)
    chunks = mm.megatron(case.kind, hf, case.grid)
    mm.adapt(chunks, "bridge")
    bridge = bind(auto_bridge(folder))
    layer = next(module for module in chunks[0].modules() if hasattr(module, "to_wrap"))
    for name in ("PackedPerExpertLinear", "NewerAdapter"):
        adapter = layer.adapter
        was = type(adapter)
        adapter.__class__ = type(name, (was,), {})
        with pytest.raises(UnsupportedAdapter, match=name):
            bridge.export_hf_weights(chunks)
        adapter.__class__ = was
    was, layer.__class__ = type(layer), type("DoRALinear", (type(layer),), {})
    with pytest.raises(UnsupportedAdapter, match="DoRALinear"):
        bridge.export_hf_weights(chunks)
    layer.__class__ = was
    known = vars(type(bridge))["_model_bridge"]
    hooked = type("Gemma4Bridge", (type(bridge._model_bridge),), {"maybe_modify_converted_hf_weight": None})
    type(bridge)._model_bridge = property(lambda self: hooked())
    with pytest.raises(InvalidInput, match="Gemma4Bridge changes exported weights"):
        bind(auto_bridge(folder)).export_hf_weights(chunks)
    type(bridge)._model_bridge = known
    assert len(list(bridge.export_hf_weights(chunks))) == 21


def test_newer_adapters_are_refused_by_name(tmp_path: Path) -> None:
    case = Case("llama", Grid(), 1, "bridge")
    mm.hf_model(case.kind).save_pretrained(tmp_path)
    POOL.run(1, refused, case, tmp_path)
