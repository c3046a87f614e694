"""Quantised bases that are sharded in ways in which they are not read: each is refused by name (`make test-libraries`).

4 bits of bitsandbytes under FSDP2, which are read, and under FSDP1 are in test_libraries_quantised.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import bitsandbytes as bnb
import pytest
import torch
import torch.distributed as dist
from processes import spawn
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lora_merge import InvalidInput, LoraMergeError, MergedWeights
from tests.libraries.test_libraries_dequantised import in_format
from tests.libraries.test_libraries_dequantised import with_lora as with_every_adapter
from tests.libraries.test_libraries_quantised import eight_bits, quantised, qwen2, with_lora
from tests.libraries.test_libraries_zero3 import engine
from tests.models.test_staging import elsewhere

pytestmark = pytest.mark.filterwarnings("ignore")
os.environ["DS_ACCELERATOR"] = "cpu"


def of_four_bits() -> Any:
    return with_lora(lambda: quantised(qwen2().bfloat16(), quant_type="nf4", quant_storage=torch.bfloat16))


def of_eight_bits() -> Any:
    return with_lora(lambda: quantised(qwen2().bfloat16(), eight_bits))


def of_a_library(case: str) -> Callable[[], Any]:
    return lambda: with_every_adapter(lambda: in_format(case))


def every_case(rank: int, cases: dict[str, Callable[[], None]]) -> None:
    for name, case in cases.items():
        try:
            case()
        except Exception as error:
            raise AssertionError(f"{name} on rank {rank}") from error
        dist.barrier()


def assert_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(LoraMergeError, match=message):
        list(MergedWeights(model))


# ---- ZeRO-3 ----------------------------------------------------------------------------------------------------------


def partitioned(model: nn.Module) -> Any:
    return engine(model, stage3_param_persistence_threshold=0)


def under_zero3(rank: int) -> None:
    bitsandbytes = r"q_proj: quantised by bitsandbytes, and partitioned by ZeRO-3.*4 bits.*or ZeRO-2"
    hqq = r"q_proj: quantised by HQQ, and sharded.*\(DDP\)"
    cases: dict[str, Callable[[], None]] = {
        "4 bits": lambda: assert_refused(partitioned(of_four_bits()), bitsandbytes),
        "8 bits": lambda: assert_refused(partitioned(of_eight_bits()), bitsandbytes),
        "HQQ": lambda: assert_refused(partitioned(of_a_library("hqq 4 bits")()), hqq),
        "HQQ, as floats": lambda: assert_refused(partitioned(of_a_library("hqq 2 bits, seen as floats")()), hqq),
        "torchao": torchao_under_zero3,
    }
    every_case(rank, cases)


def torchao_under_zero3() -> None:
    """DeepSpeed 0.19 cannot move torchao's tensors to its device; a release that can would leave this."""
    with pytest.raises(RuntimeError, match=r"swap Linear\.weight"):
        partitioned(of_a_library("int8")())
    model = of_a_library("int8")()
    weight = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    weight.ds_id, weight.ds_process_group = 0, dist.group.WORLD
    assert_refused(model, r"q_proj: quantised by torchao .*Int8Tensor\), and sharded.*train on one rank")


def test_zero3() -> None:
    spawn(2, under_zero3)


# ---- FSDP ------------------------------------------------------------------------------------------------------------


def under_fsdp2(model: Any) -> nn.Module:
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def under_fsdp1(model: nn.Module, *apart: type[nn.Module]) -> nn.Module:
    device, policy = torch.device("cpu"), ModuleWrapPolicy(set(apart))
    return FullyShardedDataParallel(model, use_orig_params=True, device_id=device, auto_wrap_policy=policy)


def not_flattened() -> None:
    """FSDP1 itself takes no integers into a flat parameter."""
    with pytest.raises(ValueError, match="flatten integer dtype"):
        under_fsdp1(of_eight_bits().bfloat16(), bnb.nn.Linear8bitLt)


def under_fsdp(rank: int) -> None:
    floats = of_a_library("hqq 2 bits, seen as floats")
    cases: dict[str, Callable[[], None]] = {
        "8 bits, FSDP2": lambda: assert_refused(
            under_fsdp2(of_eight_bits()), r"q_proj: LLM.int8 weights that are sharded.*shard 4-bit weights \(FSDP2\)"
        ),
        "8 bits, FSDP1": not_flattened,
        "HQQ, FSDP1": lambda: assert_refused(
            under_fsdp1(floats().bfloat16()), r"q_proj: quantised \(2-bit, HQQ\), and in a flat parameter of FSDP1"
        ),
    }
    every_case(rank, cases)


def test_fsdp() -> None:
    spawn(2, under_fsdp)


# ---- on one rank -----------------------------------------------------------------------------------------------------


def test_an_embedding_that_would_be_rounded_twice() -> None:
    """Its rows are decoded to the dtype that they were quantised from, and go on in another one of 16 bits."""
    layer = bnb.nn.Embedding4bit(64, 64, dtype=torch.float16)
    layer.weight = bnb.nn.Params4bit(torch.randn(64, 64, dtype=torch.bfloat16), requires_grad=False, module=layer)
    layer = layer.to("cpu")
    message = r"0.weight: an embedding of torch.float16 .*from torch.bfloat16.*rounded twice; make it of torch.bfloat16"
    with pytest.raises(InvalidInput, match=message):
        list(MergedWeights(nn.Sequential(layer)))
    layer.dtype = torch.float32  # no rounding: the stream is in the dtype that the rows are decoded to
    (weight,) = dict(MergedWeights(nn.Sequential(layer))).values()
    assert weight.dtype == torch.bfloat16


@pytest.mark.parametrize("build", [of_four_bits, of_eight_bits, of_a_library("int8"), of_a_library("hqq 4 bits")])
def test_codes_that_are_offloaded(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To another device than the model computes on: said before anything is decoded."""
    model = build()
    list(MergedWeights(model))
    elsewhere(monkeypatch)
    with pytest.raises(InvalidInput, match=r"q_proj.*offloaded to cpu cannot be merged on cpu:0: keep it on cpu:0"):
        list(MergedWeights(model))
