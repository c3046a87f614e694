"""Trainers whose base bitsandbytes, torchao or HQQ quantised, and real engines that hold it in plain floats (`make
test-vllm`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import quantised as engines_quantised
import torch
import torch.distributed as dist
from engines import ask, assert_answers, engine, train
from processes import spawn
from torch.distributed.fsdp import fully_shard

from lora_merge import PushRefused, VllmSync
from lora_merge.shards import here
from tests.libraries import test_libraries_dequantised as dequantised
from tests.libraries.test_libraries_quantised import eight_bits, exact, four_bits, quantised, with_lora
from tests.libraries.test_libraries_zero3 import engine as deepspeed

pytestmark = [pytest.mark.usefixtures("no_leftovers"), pytest.mark.filterwarnings("ignore")]
no_leftovers = engines.no_leftovers


def policy(**options: Any) -> Any:
    """QLoRA of a float32 model: what the policy multiplies with is float32, and so are both forwards."""
    make = options.pop("make", four_bits)
    dtype = options.pop("dtype", torch.float32)
    torch.manual_seed(0)
    base = engines.qwen2(tied=False).to(dtype)
    return with_lora(lambda: quantised(base, make, **options), target_modules=engines.LINEARS)


def by_their_library(case: str, dtype: torch.dtype = torch.float32) -> Any:
    """On a base that torchao or HQQ quantised."""
    torch.manual_seed(0)
    base = engines.qwen2(tied=False).to(dtype)
    return with_lora(lambda: dequantised.in_format(case, base), target_modules=engines.LINEARS)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("quantised") / "base"
    options = {"enable_lora": True, "max_lora_rank": 8}
    with engine(policy(quant_type="nf4"), folder, **options) as running:
        yield running


@pytest.mark.parametrize("merge", ["trainer", "engine"])
@pytest.mark.parametrize("case", ["nf4", "fp4"])
def test_qlora(llm: Any, case: str, merge: str) -> None:
    """The engine says what the trainer says, step after step; with merge="engine" the decoded base crosses once."""
    model = policy(quant_type=case, compress_statistics=case == "nf4")
    with closing(VllmSync(model, llm, merge=merge)) as sync:
        for step in range(3):
            train(model, step)
            report = sync.push()
            assert report.merge == merge, report.merge_why
            if merge == "engine":
                assert report.base_sent == (step == 0)
            assert_answers(ask(llm), model, greedy=False)


def test_adapters_beside_the_decoded_base(llm: Any) -> None:
    """vLLM's own LoRA path: the engine gets the base as the trainer has it, once, and then adapters."""
    model = policy(quant_type="nf4")
    with closing(VllmSync(model, llm, mode="adapter")) as sync:
        for step in range(2):
            train(model, step)
            sync.push()
            assert_answers(ask(llm, sync.lora_request()), model, greedy=False)


def test_llm_int8(llm: Any) -> None:
    """Its forward on CPUs in train mode multiplies with the decoded weight, rounded to the activations' dtype."""
    model = policy(make=eight_bits).train()
    with closing(VllmSync(model, llm, merge="trainer")) as sync:
        train(model)
        sync.push()
        assert_answers(ask(llm), model, greedy=False)


@pytest.mark.parametrize("case", ["int8", "int4 in groups of 32", "fp8", "hqq 4 bits"])
def test_bases_that_their_library_decodes(llm: Any, case: str) -> None:
    """Of torchao and HQQ: merged by the trainer, by the engine beside a base that crosses once, and as adapters."""
    model = by_their_library(case)
    for options in ({"merge": "trainer"}, {"merge": "engine"}, {"mode": "adapter"}):
        with closing(VllmSync(model, llm, **options)) as sync:
            for step in range(2):
                train(model, step)
                report = sync.push(verify=step == 1 and "mode" not in options)
                assert report.merge == options.get("merge", report.merge), report.merge_why
                request = {"lora_request": sync.lora_request()} if "mode" in options else {}
                assert_answers(ask(llm, *request.values()), model, greedy=False)


def test_an_engine_that_rounds_the_base(tmp_path: Path) -> None:
    """Of bfloat16: merged here it is rounded once; there, twice, which is refused with what to do."""
    model = policy(quant_type="nf4")
    with engine(model, tmp_path / "base", dtype="bfloat16") as running:
        with closing(VllmSync(model, running)) as sync:
            assert sync.push().merge == "trainer"
            assert_answers(ask(running), model, tolerance=0.1, greedy=False)
        with (
            closing(VllmSync(model, running, merge="engine")) as sync,
            pytest.raises(PushRefused, match="rounded twice"),
        ):
            sync.push()


FP8 = {"quantization": "fp8_per_channel", "worker_extension_cls": "quantised.Watched", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    "case", ["nf4", "nf4, double", "fp4", "llm.int8", "int4 in groups of 32", "int8", "fp8", "hqq 4 bits"]
)
def test_an_engine_that_quantises_what_it_loads(case: str, tmp_path: Path) -> None:
    """What the codes stand for and the adapters, rounded to bfloat16, then by vLLM: the bits of a fresh engine on the
    merged checkpoint, wherever the merge happens; and adapters beside the quantised base."""
    right = exact
    if case == "llm.int8":
        model = policy(make=eight_bits)
    elif case in dequantised.FORMATS:
        right = dequantised.exact
        model = by_their_library(case, torch.bfloat16)
    else:
        model = policy(quant_type=case[:3], compress_statistics="double" in case, dtype=torch.bfloat16)
    train(model)
    folder = engines_quantised.save_merged(model, tmp_path / "merged", torch.bfloat16)
    with engine(model, folder, **FP8, enable_lora=True, max_lora_rank=8, load_format="auto") as llm:
        fresh = llm.collective_rpc("bits")
        for merge in ("trainer",) if case == "llm.int8" else ("trainer", "engine"):  # in float32, what int8 stands for
            with closing(VllmSync(model, llm, merge=merge)) as sync:
                start = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}
                train(model, 5)
                sync.push(verify=merge == "trainer")
                assert llm.collective_rpc("bits") != fresh
                model.load_state_dict(start, strict=False)
                report = sync.push()
                assert report.merge == merge
                assert llm.collective_rpc("bits") == fresh
        assert engines_quantised.assert_rounded_once(right(model), engines_quantised.served(llm)) == 8
        assert engines.log_prob_errors(ask(llm), model).mean() < 0.08
        if case != "llm.int8":
            with closing(VllmSync(model, llm, mode="adapter")) as sync:
                sync.push()
                assert engines.log_prob_errors(ask(llm, sync.lora_request()), model).mean() < 0.08


def qlora_fsdp2() -> Any:
    storage = {"quant_type": "nf4", "quant_storage": torch.bfloat16}
    return policy(dtype=torch.bfloat16, **storage).bfloat16()


def wrapped_fsdp2(model: Any) -> Any:
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    return fully_shard(model)


def bf16() -> Any:
    return models.with_lora(engines.qwen2, dtype=torch.bfloat16, target_modules=engines.LINEARS)


def wrapped_zero3(model: Any) -> Any:
    return deepspeed(model, stage3_param_persistence_threshold=1100)


def train_alike(model: Any, factor: float) -> None:
    """A step of training that does not depend on how parameters are cut."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                here(parameter).mul_(factor)


def shards_into_floats(rank: int, folder: Path) -> None:
    """Two ranks; the engine says what the whole model says, in the three ways."""
    storage = {"quant_type": "nf4", "quant_storage": torch.float32}
    whole, model = policy(**storage), wrapped_fsdp2(policy(**storage))
    with ExitStack() as stack:
        options = {"enable_lora": True, "max_lora_rank": 8, "processes": True}
        llm = stack.enter_context(engine(whole, folder / "base", **options)) if rank == 0 else None
        dist.barrier()
        for way in ({"merge": "trainer"}, {"merge": "engine"}, {"mode": "adapter"}):
            with closing(VllmSync(model, llm, bucket_bytes=1 << 18, **way)) as sync:
                for step in range(2):
                    train_alike(whole, -1.25)
                    train_alike(model, -1.25)
                    report = sync.push(verify=step == 1)
                    assert report.base_sent == ("trainer" not in way.values() and step == 0)
                    if llm is not None:
                        assert_answers(ask(llm, sync.lora_request()), whole, greedy=False)


def test_shards_of_codes_into_an_engine(tmp_path: Path) -> None:
    spawn(2, shards_into_floats, tmp_path, timeout=timedelta(minutes=8))


def shards_into_fp8(rank: int, build: Any, wrap: Any, folder: Path) -> None:
    """Two ranks; the bits are those of a fresh engine on what the whole model merges to."""
    with ExitStack() as stack:
        llm: Any = None
        if rank == 0:
            whole = build()
            merged = engines_quantised.save_merged(whole, folder / "merged", torch.bfloat16)
            options = FP8 | {"processes": True, "load_format": "auto"}
            llm = stack.enter_context(engine(whole, merged, **options))
        dist.barrier()
        model = wrap(build())
        fresh = llm and llm.collective_rpc("bits")
        with closing(VllmSync(model, llm, bucket_bytes=1 << 18)) as sync:
            for factor in (-2.0, -0.5):
                train_alike(model, factor)
                sync.push(verify=factor == -2.0)
                assert rank or (llm.collective_rpc("bits") == fresh) == (factor == -0.5)
        assert rank or engines.log_prob_errors(ask(llm), build()).mean() < 0.08


@pytest.mark.parametrize(("build", "wrap"), [(qlora_fsdp2, wrapped_fsdp2), (bf16, wrapped_zero3)])
def test_shards_into_an_engine_that_quantises(build: Any, wrap: Any, tmp_path: Path) -> None:
    spawn(2, shards_into_fp8, build, wrap, tmp_path, timeout=timedelta(minutes=8))
