"""Real SGLang engines for tests: tiny models that SGLang serves, and what they must answer."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
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
import warm  # noqa: E402
from processes import leaving_nothing  # noqa: E402
from torch import nn  # noqa: E402

from lora_merge import SglangSync  # noqa: E402

GREEDY = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
LORA = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras_per_batch": 2,
    "lora_target_modules": policies.LINEARS,
    "lora_backend": "torch_native",
}
"""Options of an engine that serves adapters."""


@contextmanager
def engine(model: nn.Module, folder: Path, **options: Any) -> Iterator[Any]:
    """An engine of the model's architecture, with random weights unless `options` say otherwise.

    Args:
        folder: a checkpoint; where there is none, the model's base is saved there.
    """
    import sglang
    import sglang.srt.entrypoints.engine as entry
    from sglang.srt.utils import kill_process_tree

    # Of the test's own process alone: schedulers look for their engine in their parent, and a server knows one.
    own = multiprocessing.parent_process() is None and not torch.cuda.is_available()
    warm.instead_of_spawn(own and sglang_cpu.BROKEN not in os.environ)  # what is to fail must not have been imported
    if own:
        entry.kill_process_tree = lambda *args, **options: kill_process_tree(*args, skip_pid=warm.server(), **options)
    if not folder.exists():
        policies.save_base(model.get_base_model() if hasattr(model, "get_base_model") else model, folder)
    bind(options.get("tp_size", 1))
    try:
        started = sglang.Engine(**arguments(model, folder) | options)
    finally:
        bind(1)  # others that tests start have this environment, too
    try:
        yield started
    finally:
        started.shutdown()


def bind(ranks: int) -> None:
    """The next engine's schedulers run on processors of their own where they are several."""
    os.environ.pop("SGLANG_CPU_OMP_THREADS_BIND", None)
    if ranks > 1:
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(ranks)))


def arguments(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Of an engine on the device of the model."""
    device = next(model.parameters()).device.type
    cpu = {"attention_backend": "torch_native", "max_total_tokens": 2048}
    gpu = {"attention_backend": "triton", "max_total_tokens": 8192, "mem_fraction_static": 0.2}
    return {
        "model_path": str(folder),
        "load_format": "dummy",
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "device": device,
        "max_running_requests": 8,
        "log_level": "error",
    } | (cpu if device == "cpu" else gpu)


def do(started: Any, name: str, *given: Any) -> Any:
    """An action of sglang_faulty.py in the engine's schedulers; the first one's answer."""
    return started.loop.run_until_complete(ado(started, name, *given))


def mend(started: Any, policy: nn.Module) -> None:
    """Take faults and delays out of an engine; a dirty one gets a policy."""
    do(started, "mend")
    do(started, "slow", 0)
    sync = SglangSync(policy, started)
    if any(answer.kind == "dirty" for answer in sync.states()):
        sync.push()


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
    greedy: bool = True,
) -> None:
    """Greedy tokens and their log-probs are the trainer's own, adapter counted once.

    The tolerance is for float32: log-probs of a few units out of sums over a few hundred products, each of the two
    forwards in its own order: some ten roundings of 2^-24 times 10 for each.

    Args:
        greedy: the tokens are the trainer's; else each is one of those that are likeliest within the tolerance.
    """
    device = next(model.parameters()).device
    for prompt, output in zip(asked or policies.prompts(), outputs, strict=True):
        answer = list(output["output_ids"])
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *answer]], device=device)
            logp = model(ids).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1].cpu()
        got = torch.tensor([float(logprob) for logprob, *_ in output["meta_info"]["output_token_logprobs"]])
        wanted = logp.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
        if greedy:
            assert logp.argmax(-1).tolist() == answer, f"greedy tokens differ for the prompt {prompt}"
        assert (logp.max(-1).values - wanted).max() < 2 * tolerance, f"no greedy tokens for the prompt {prompt}"
        assert (got - wanted).abs().max() < tolerance, (got, wanted)


async def flying(started: Any, tokens: int, count: int = 3, **more: Any) -> list[asyncio.Task[Any]]:
    """Requests, each of which has said something.

    Args:
        more: of each request.
    """
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    begun = [asyncio.Event() for _ in range(count)]

    async def request(number: int) -> Any:
        stream = await started.async_generate(
            input_ids=policies.prompts()[number], sampling_params=sampling, stream=True, return_logprob=True, **more
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


def pushed_in_flight(
    started: Any, sync: Any, tokens: int, before: Callable[[], None] = lambda: None, mode: str | None = None
) -> list[Any]:
    """A push while requests are in flight, which were made as the push before asks for.

    Args:
        before: called when they are.
        mode: of the push.

    Returns:
        what came of each, in the order of `policies.prompts`.
    """

    async def scenario() -> list[Any]:
        tasks = await flying(started, tokens, lora_path=sync.lora_path())
        before()
        await sync.apush(mode=mode)
        await ado(started, "slow", 0)
        return await asyncio.gather(*tasks)

    return started.loop.run_until_complete(asyncio.wait_for(scenario(), 120))


def follow_the_scaling(started: Any, sync: Any, model: Any, check: Callable[[Any, Any], None]) -> None:
    """Pushes of adapters: the base goes once, and the engine takes the live scaling.

    Args:
        check: of answers, and the model that they should be of.
    """
    assert sync.push(verify=True).base_sent
    for seed in range(3):
        check(ask(started, lora_path=sync.lora_path()), model)
        policies.train(model, seed)
        for layer in model.modules():
            if hasattr(layer, "lora_A"):
                layer.scaling["default"] *= 1.25
        assert not sync.push().base_sent
    check(ask(started, lora_path=sync.lora_path()), model)


def spans(output: Any, prompt: list[int], old: nn.Module, new: nn.Module, tolerance: float = 0.0) -> int:
    """How many of the tokens are the old policy's; all after them are the new one's, of everything before them.

    Args:
        tolerance: by which a token may be less likely than the likeliest one.
    """
    answer = list(output["output_ids"])
    ids = torch.tensor([[*prompt, *answer]], device=next(old.parameters()).device)
    said = []
    for model in (old, new):
        with torch.no_grad():
            logp = model(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        lacks = logp.max(-1).values - logp.gather(-1, ids[0, len(prompt) :, None]).squeeze(-1)
        said.append((lacks <= tolerance).tolist())
    by_old, by_new = said
    fits = [n for n in range(len(answer) + 1) if all(by_old[:n]) and all(by_new[n:])]
    assert fits, (by_old, by_new)
    return fits[0]


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Nothing of ours stays in shared memory."""
    with leaving_nothing():
        yield
