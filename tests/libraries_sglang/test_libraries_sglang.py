"""Trainers whose base bitsandbytes, torchao or HQQ quantised, or DeepSpeed's ZeRO-3 partitions, and real SGLang engines
(`make test-sglang`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import models
import policies
import pytest
import sglang_engines
import torch
import torch.distributed as dist
from processes import spawn
from sglang_engines import LORA, ask, assert_answers, engine
from torch import nn
from torch.distributed.fsdp import fully_shard

from lora_merge import SglangSync
from lora_merge.shards import here
from tests.libraries import test_libraries_dequantised as dequantised
from tests.libraries.test_libraries_quantised import eight_bits, four_bits, quantised, with_lora
from tests.libraries.test_libraries_zero3 import engine as deepspeed

pytestmark = pytest.mark.filterwarnings("ignore")
no_leftovers = sglang_engines.no_leftovers


def policy(make: Any = four_bits, **options: Any) -> Any:
    """QLoRA of a float32 model: what the policy multiplies with is float32, and so are both forwards."""
    torch.manual_seed(0)
    base = policies.qwen2(tied=False)
    return with_lora(lambda: quantised(base, make, **options), target_modules=policies.LINEARS)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("sglang") / "base"
    with engine(policy(), folder, **LORA) as one:
        yield one


@pytest.mark.parametrize("merge", ["trainer", "engine"])
@pytest.mark.parametrize("case", ["nf4", "fp4"])
def test_qlora(started: Any, case: str, merge: str) -> None:
    """The engine says what the trainer says, step after step; with merge="engine" the decoded base crosses once."""
    model = policy(quant_type=case, compress_statistics=case == "nf4")
    with closing(SglangSync(model, started, merge=merge)) as sync:
        for step in range(3):
            policies.train(model, step)
            report = sync.push()
            assert report.merge == merge, report.merge_why
            if merge == "engine":
                assert report.base_sent == (step == 0)
            assert_answers(ask(started), model, greedy=False)


def test_adapters_beside_the_decoded_base(started: Any) -> None:
    model = policy(quant_type="nf4")
    with closing(SglangSync(model, started, mode="adapter")) as sync:
        for step in range(2):
            policies.train(model, step)
            assert sync.push().base_sent == (step == 0)
            assert_answers(ask(started, lora_path=sync.lora_path()), model, greedy=False)


def test_llm_int8(started: Any) -> None:
    """Its forward on CPUs in train mode multiplies with the decoded weight."""
    model = policy(eight_bits).train()
    with closing(SglangSync(model, started, merge="trainer")) as sync:
        policies.train(model)
        sync.push()
        assert_answers(ask(started), model, greedy=False)


@pytest.mark.parametrize("case", ["int8", "hqq 4 bits"])
def test_bases_that_their_library_decodes(started: Any, case: str) -> None:
    """Of torchao and HQQ: merged by the trainer, by the engine beside a base that crosses once, and as adapters."""
    torch.manual_seed(0)
    base = policies.qwen2(tied=False)
    model = with_lora(lambda: dequantised.in_format(case, base), target_modules=policies.LINEARS)
    for options in ({"merge": "trainer"}, {"merge": "engine"}, {"mode": "adapter"}):
        with closing(SglangSync(model, started, **options)) as sync:
            policies.train(model)
            report = sync.push()
            assert report.merge == options.get("merge", report.merge), report.merge_why
            request = {"lora_path": sync.lora_path()} if "mode" in options else {}
            assert_answers(ask(started, **request), model, greedy=False)


def zero3() -> tuple[nn.Module, Any]:
    """A whole model, and the same one partitioned."""
    plain, model = (models.with_lora(policies.qwen2, target_modules=policies.LINEARS) for _ in range(2))
    return plain, deepspeed(model, stage3_param_persistence_threshold=1100)


def qlora_fsdp2() -> tuple[nn.Module, Any]:
    storage = {"quant_type": "nf4", "quant_storage": torch.float32}
    plain, model = policy(**storage), policy(**storage)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return plain, fully_shard(model)


def sharded(rank: int, build: Callable[[], tuple[nn.Module, Any]], folder: Path) -> None:
    """Two ranks push to rank 0's engine: merged by the trainer, by the engine, and adapters alone."""
    plain, model = build()
    with ExitStack() as stack:
        handle = stack.enter_context(engine(plain, folder / "base", **LORA)) if rank == 0 else None
        dist.barrier()
        for way in ({"merge": "trainer"}, {"merge": "engine"}, {"mode": "adapter"}):
            with closing(SglangSync(model, handle, bucket_bytes=1 << 18, **way)) as sync:
                for step in range(2):
                    train_alike(plain)
                    train_alike(model)
                    report = sync.push(verify=step == 1)
                    assert report.base_sent == ("trainer" not in way.values() and step == 0)
                    if handle is not None:
                        assert_answers(ask(handle, lora_path=sync.lora_path()), plain, greedy=build is zero3)


def train_alike(model: nn.Module) -> None:
    """A step of training that does not depend on how parameters are cut."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                here(parameter).mul_(-1.25)


@pytest.mark.parametrize("build", [zero3, qlora_fsdp2])
def test_pushes_of_a_sharded_trainer(build: Any, tmp_path: Path) -> None:
    spawn(2, sharded, build, tmp_path, timeout=timedelta(minutes=8))
