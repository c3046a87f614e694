"""Real SGLang engines for tests: tiny models that SGLang serves on a CPU, and what they must answer."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang_cpu

os.environ |= {"HF_HUB_OFFLINE": "1", "SGLANG_PLUGINS": "lora_merge,cpu"}
sglang_cpu.folder(Path(tempfile.mkdtemp(prefix="sglang-cpu-")) / "site")

import policies  # noqa: E402
import pytest  # noqa: E402
import sglang_faulty  # noqa: E402
import torch  # noqa: E402
from processes import leaving_nothing  # noqa: E402
from torch import nn  # noqa: E402

GREEDY = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}


@contextmanager
def engine(model: nn.Module, folder: Path, **options: Any) -> Iterator[Any]:
    """An engine of the model's architecture, with random weights unless `options` say otherwise.

    Args:
        folder: a checkpoint; where there is none, the model's base is saved there.
    """
    import sglang

    if not folder.exists():
        policies.save_base(model.get_base_model() if hasattr(model, "get_base_model") else model, folder)
    os.environ.pop("SGLANG_CPU_OMP_THREADS_BIND", None)
    if (ranks := options.get("tp_size", 1)) > 1:
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))
    started = sglang.Engine(**arguments(model, folder) | options)
    try:
        yield started
    finally:
        started.shutdown()


def arguments(model: nn.Module, folder: Path) -> dict[str, Any]:
    return {
        "model_path": str(folder),
        "load_format": "dummy",
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "device": "cpu",
        "max_total_tokens": 2048,
        "max_running_requests": 8,
        "log_level": "error",
    }


def do(started: Any, name: str, *given: Any) -> Any:
    """An action of sglang_faulty.py in the engine's schedulers; the first one's answer."""
    return started.loop.run_until_complete(ado(started, name, *given))


async def ado(started: Any, name: str, *given: Any) -> Any:
    """As `do`, in the engine's event loop."""
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    action = sglang_faulty.PREFIX + json.dumps([name, *given])
    return json.loads((await started.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action)))[1])


def ask(started: Any, asked: Sequence[Sequence[int]] | None = None, **more: Any) -> list[dict[str, Any]]:
    prompts = [list(prompt) for prompt in asked or policies.prompts()]
    return started.generate(input_ids=prompts, sampling_params=GREEDY, return_logprob=True, **more)


def assert_answers(
    outputs: Sequence[dict[str, Any]],
    model: nn.Module,
    asked: Sequence[Sequence[int]] | None = None,
    *,
    tolerance: float = 12e-6,
) -> None:
    """Greedy tokens and their log-probs are the trainer's own, adapter counted once.

    The tolerance is for float32: log-probs of a few units out of sums over a few hundred products, each of the two
    forwards in its own order: some ten roundings of 2^-24 times 10 for each.
    """
    for prompt, output in zip(asked or policies.prompts(), outputs, strict=True):
        answer = list(output["output_ids"])
        with torch.no_grad():
            logp = model(torch.tensor([[*prompt, *answer]])).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1]
        got = torch.tensor([float(logprob) for logprob, *_ in output["meta_info"]["output_token_logprobs"]])
        wanted = logp.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
        assert logp.argmax(-1).tolist() == answer, f"greedy tokens differ for the prompt {prompt}"
        assert (got - wanted).abs().max() < tolerance, (got, wanted)


async def flying(started: Any, tokens: int, count: int = 3) -> list[asyncio.Task[Any]]:
    """Requests, each of which has said something."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    begun = [asyncio.Event() for _ in range(count)]

    async def request(number: int) -> Any:
        stream = await started.async_generate(
            input_ids=policies.prompts()[number], sampling_params=sampling, stream=True, return_logprob=True
        )
        async for output in stream:
            last = output
            begun[number].set()
        return last

    await ado(started, "slow", 0.03)
    tasks = [asyncio.ensure_future(request(number)) for number in range(count)]
    await asyncio.gather(*(event.wait() for event in begun))
    assert not any(task.done() for task in tasks), "the scenario has requests in flight"
    return tasks


def spans(output: Any, prompt: list[int], old: nn.Module, new: nn.Module) -> int:
    """How many of the tokens are the old policy's; all after them are the new one's, of everything before them."""
    answer = list(output["output_ids"])
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        said = [model(ids).logits[0, len(prompt) - 1 : -1].argmax(-1) for model in (old, new)]
    by_old, by_new = ([bool(a == b) for a, b in zip(answer, tokens.tolist(), strict=True)] for tokens in said)
    fits = [n for n in range(len(answer) + 1) if all(by_old[:n]) and all(by_new[n:])]
    assert fits, (by_old, by_new)
    return fits[0]


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Nothing of ours stays in shared memory."""
    with leaving_nothing():
        yield
