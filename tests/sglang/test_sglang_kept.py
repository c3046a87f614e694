"""What is kept over a push and over memory that is released: requests in flight, and tensors beside the weights."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import models
import policies
import pytest
import sglang_engines
import torch
from sglang_engines import ado, ask, assert_answers, do, engine, flying

from lora_merge import SglangSync

TOKENS = 30
no_leftovers = sglang_engines.no_leftovers


def policy() -> Any:
    return models.with_lora(policies.qwen2, target_modules=policies.LINEARS)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine with a tokenizer, of which the least number of new tokens asks for the end of a text: token 0."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    model, folder = policy(), tmp_path_factory.mktemp("kept") / "base"
    policies.save_base(model.get_base_model(), folder)
    words = Tokenizer(WordLevel({str(number): number for number in range(256)}, "1"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(folder)
    with engine(model, folder, skip_tokenizer_init=False, enable_return_hidden_states=True) as one:
        yield one


async def answered(started: Any, sampling: dict[str, Any], sync: SglangSync | None) -> list[int]:
    """Return what the engine answers if it is pushed to when a third of the answer is there."""
    stream = await started.async_generate(
        input_ids=policies.prompts()[0],
        sampling_params={"temperature": 0, "max_new_tokens": TOKENS} | sampling,
        stream=True,
    )
    await ado(started, "slow", 0.03)
    said = list[int]()
    async for output in stream:
        said = list(output["output_ids"])
        if sync is not None and len(said) >= TOKENS // 3:
            await sync.apush()
            sync = None
            await ado(started, "slow", 0)
    assert sync is None, "it was in flight"
    return said


COUNTED: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 2.0, "ignore_eos": True},
    "presence": {"presence_penalty": 2.0, "ignore_eos": True},
    "repetition": {"repetition_penalty": 2.0, "ignore_eos": True},
    "the least number of tokens": {"min_new_tokens": 20, "logit_bias": {"0": 3.0}},
}
"""Sampling that depends on the tokens before."""


@pytest.mark.parametrize("what", COUNTED)
def test_tokens_from_before_a_push_count(started: Any, what: str) -> None:
    """The same weights are pushed again: nothing else may change the answer."""
    sync = SglangSync(policy(), started)
    sync.push()

    async def both() -> list[list[int]]:
        return [await answered(started, COUNTED[what], given) for given in (None, sync)]

    alone, pushed = started.loop.run_until_complete(asyncio.wait_for(both(), 120))
    assert pushed == alone
    assert len(alone) == 21 if "least" in what else len(set(alone)) > TOKENS // 3, "it has an effect"
    sync.close()


def test_a_full_queue_takes_back_what_a_push_keeps(started: Any) -> None:
    """SGLang would end requests that it had begun, with 503."""
    sync = SglangSync(policy(), started)

    async def scenario() -> list[Any]:
        tasks = await flying(started, TOKENS)
        await ado(started, "limit", 1)
        await sync.apush()
        await ado(started, "slow", 0)
        return await asyncio.gather(*tasks)

    try:
        answers = started.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
        assert [len(answer["output_ids"]) for answer in answers] == [TOKENS] * 3
    finally:
        do(started, "mend")
        sync.close()


def test_hidden_states_are_of_the_weights_that_computed_all(started: Any) -> None:
    """SGLang keeps those of before when it computes a request anew: rows of the old weights came in front of all."""
    model = policy()
    sync = SglangSync(model, started)
    sync.push()
    policies.train(model, size=0.2)

    async def scenario() -> list[Any]:
        tasks = await flying(started, TOKENS, return_hidden_states=True)
        await sync.apush()
        await ado(started, "slow", 0)
        return await asyncio.gather(*tasks)

    answers = started.loop.run_until_complete(asyncio.wait_for(scenario(), 120))
    for prompt, answer in zip(policies.prompts(), answers, strict=False):
        ids = [*prompt, *answer["output_ids"]]
        first, *others = answer["meta_info"]["hidden_states"]
        got = torch.tensor([*first, *others])
        with torch.no_grad():
            want = model.base_model.model.model(torch.tensor([ids])).last_hidden_state[0, :-1]
        assert len(first) > len(prompt), "it has begun anew, with what it had said"
        assert got.shape == want.shape
        assert (got - want).abs().max() < 1e-3  # rows of other weights are off by more than 1
    sync.close()


class Batch(SimpleNamespace):
    """One that can be referred to weakly."""


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_of_different_lengths(overlap: bool) -> None:
    """In one batch; each counts its own tokens, as at each step before."""
    from sglang.srt.sampling import penaltylib

    from lora_merge.engine.sglang import penalties

    kinds = {getattr(penaltylib, f"Batched{kind}Penalizer") for kind in ("Frequency", "Presence", "Repetition")}
    kinds |= {penaltylib.BatchedMinNewTokensPenalizer}
    make = inspect.unwrap(penaltylib.BatchedPenalizerOrchestrator.__init__)  # where an engine has started, it is hooked
    drawn = torch.Generator().manual_seed(0)
    requests = [
        SimpleNamespace(
            sampling_params=SimpleNamespace(
                frequency_penalty=0.5 * row,
                presence_penalty=0.25 * row,
                repetition_penalty=1 + row,
                min_new_tokens=2 * row,
                stop_token_ids={row},
            ),
            tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=9),
            eos_token_ids={9},  # SGLang 0.5.23
            origin_input_ids=[5, row],
            output_ids=torch.randint(0, 12, (length,), generator=drawn).tolist(),
        )
        for row, length in enumerate([3, 0, 7, 7, 1])
    ]

    def made(of: list[Any]) -> Any:
        batch = Batch(reqs=of, device="cpu", enable_overlap=overlap)
        found = object.__new__(penaltylib.BatchedPenalizerOrchestrator)
        penalties.count_again(make, found, vocab_size=12, batch=batch, penalizers=kinds)
        found.kept = batch
        return found

    logits = torch.randn(len(requests), 12, generator=drawn)
    together = logits.clone()
    made(requests).apply(together)
    for row, request in enumerate(requests):
        said, request.output_ids = request.output_ids, []
        one = made([request])
        for step, token in enumerate(said):
            known = said[step - 1] if step else request.origin_input_ids[-1]
            one.cumulate_output_tokens(torch.tensor([known if overlap else token]))
        alone = logits[row : row + 1].clone()
        one.apply(alone)
        assert torch.equal(together[row : row + 1], alone), row


@pytest.mark.parametrize("tags", [None, ["weights"]])
def test_tensors_beside_parameters_and_buffers_outlast_a_release(started: Any, tags: list[str] | None) -> None:
    """SGLang keeps buffers, and a push brings parameters."""
    model = policy()
    sync = SglangSync(model, started)
    sync.push()
    do(started, "saver")
    try:
        assert_answers(ask(started), model)
        policies.train(model)
        for _ in range(2):
            started.release_memory_occupation(tags)
            assert str(*sync.states()).startswith("dirty (its weights were thrown away")
            started.resume_memory_occupation(tags)
        started.release_memory_occupation(tags)
        sync.push()
        assert_answers(ask(started), model)
    finally:
        do(started, "mend")
        sync.close()
