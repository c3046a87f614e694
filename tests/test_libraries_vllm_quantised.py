"""Trainers whose base bitsandbytes quantised, and real engines that hold it in plain floats (`make test-vllm`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from engines import ask, assert_answers, engine, train
from test_libraries_quantised import eight_bits, four_bits, quantised, with_lora

from lora_merge import PushRefused, VllmSync

pytestmark = [pytest.mark.usefixtures("no_leftovers"), pytest.mark.filterwarnings("ignore")]
no_leftovers = engines.no_leftovers


def policy(**options: Any) -> Any:
    """QLoRA of a float32 model: what the policy multiplies with is float32, and so are both forwards."""
    make = options.pop("make", four_bits)
    torch.manual_seed(0)
    base = engines.qwen2(tied=False)
    return with_lora(lambda: quantised(base, make, **options), target_modules=engines.LINEARS)


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
