"""Versions of an adapter that a vLLM engine keeps beside each other: `push(mode="adapter", keep=k)`."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import assert_answers, engine, train
from processes import until
from vllm import LLM, AsyncEngineArgs, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError

from lora_merge import InvalidInput, PushFailed, PushRefused, VllmSync
from lora_merge.engine.adapter_versions import version_of
from tests.vllm.test_vllm_processes import Server

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}
BLOCK = 32
"""Tokens in a block of the KV cache; prompts here have two whole ones and a few more."""
SHORT = engines.prompts(1)[0]
"""What a server is asked."""


def policy() -> Any:
    return models.with_lora(engines.qwen2, target_modules=engines.LINEARS)


def asked(count: int = 2) -> list[list[int]]:
    g = torch.Generator().manual_seed(5)
    return [torch.randint(256, (2 * BLOCK + 5,), generator=g).tolist() for _ in range(count)]


def prompts_of(tokens: list[list[int]]) -> list[Any]:
    return [{"prompt_token_ids": prompt} for prompt in tokens]


def ask(llm: LLM, lora: Any, cached: int) -> list[Any]:
    """Answers of one version, each with so many tokens of its prompt out of the cache."""
    outputs = engines.ask(llm, lora, asked())
    assert [output.num_cached_tokens for output in outputs] == [cached] * 2
    assert {version_of(output) for output in outputs} == {version_of(lora.lora_name)}
    return outputs


def test_versions_in_one_process(tmp_path: Path) -> None:
    model = policy()
    with engine(model, tmp_path / "base", block_size=BLOCK, max_model_len=128, **LORA) as llm:
        sync = VllmSync(model, llm)
        with pytest.raises(InvalidInput, match="keep=2 is for mode='adapter'"):
            sync.push(keep=2)
        with pytest.raises(InvalidInput, match="keep must be a number of versions"):
            sync.push(mode="adapter", keep=-1)
        policies = versions(sync, llm, model)
        requests_in_flight(sync, llm, model)
        failures(sync, llm, model)
        other_modes(sync, llm, model)
        broken_off(sync, llm, model)
        assert policies
        sync.close()


def versions(sync: VllmSync, llm: LLM, model: Any) -> dict[int, Any]:
    """Each version answers as its policy did, from blocks of its own, and no push drops those of another one."""
    policies, loras = {}, {}
    for version in range(1, 5):
        train(model, version)
        report = sync.push(mode="adapter", keep=3, verify=version == 2)
        assert (report.version, report.base_sent) == (version, version == 1)
        assert report.versions == tuple(range(max(version - 2, 1), version + 1))
        assert str(report).endswith(f"kept: {', '.join(map(str, report.versions))}")
        assert ("pause" in report.seconds) == (version == 1), "the base alone is sent into an engine that stands still"
        policies[version], loras[version] = copy.deepcopy(model), sync.lora_request()
        assert loras[version].lora_name == f"lora_merge@{version}" == sync.adapter_name()
        for kept in report.versions:
            outputs = ask(llm, sync.lora_request(kept), 0 if kept == version else 2 * BLOCK)
            assert_answers(outputs, policies[kept], asked())
    # Three do not fit into vLLM's two places: each was loaded again, from the worker's memory.
    sync.check()
    assert {sync.version_of(output) for output in sync.generate(prompts_of(asked()), engines.GREEDY)} == {4}
    assert {version_of(o) for o in sync.generate(prompts_of(asked(1)), engines.GREEDY, version=3)} == {3}
    with pytest.raises(InvalidInput, match=r"version must be one of those that are kept, 2, 3, 4; got 1"):
        sync.lora_request(1)
    with pytest.raises(ValueError, match="lora_merge@1 is not kept in this engine"):
        engines.ask(llm, loras[1], asked())
    assert_answers(ask(llm, sync.lora_request(), 2 * BLOCK), model, asked())
    return policies


def requests_in_flight(sync: VllmSync, llm: LLM, model: Any) -> None:
    """A request ends on the version that it began with, however many came since; then that one leaves."""
    core: Any = llm.llm_engine
    began, version = copy.deepcopy(model), sync.lora_request()
    sampling = SamplingParams(temperature=0, max_tokens=10, logprobs=1, detokenize=False, ignore_eos=True)
    core.add_request("in flight", {"prompt_token_ids": asked()[0]}, sampling, lora_request=version)
    done: list[Any] = []
    pushes = 0
    while core.has_unfinished_requests():
        done += [output for output in core.step() if output.finished]
        if pushes < 4:
            train(model, 10 + pushes)
            assert len(sync.push(keep=1).versions) == 1
            pushes += 1
    assert_answers(done, began, asked(1))
    worker = core.engine_core.engine_core.model_executor.driver_worker.worker
    kept = worker.model_runner.lora_manager._load_adapter
    assert [one["version"] for one in kept.states(leaving=True)] == [version_of(version.lora_name)]
    train(model, 20)
    sync.push()
    assert kept.states(leaving=True) == []
    assert len(kept.states(leaving=False)) == 1
    assert_answers(ask(llm, sync.lora_request(), 0), model, asked())


def failures(sync: VllmSync, llm: LLM, model: Any) -> None:
    """At any step: the version before answers, from its blocks, and a number is never given twice."""
    serving, before, states = copy.deepcopy(model), sync.lora_request(), sync.states()
    control = sync._trainer.controls[0]
    rpc = control.rpc
    for number, op in enumerate(("receive_version", "add_version", "allow_adapters"), 1):
        train(model, 30 + number)

        async def broken(name: str, op: str = op, **message: Any) -> Any:
            if name == "add_version" == op:
                await rpc(name, **message)
            if name == op:
                raise RuntimeError("injected")
            return await rpc(name, **message)

        async def shut(*arguments: Any, calls: list[int] = [], **options: Any) -> Any:  # noqa: B006
            calls.append(1)
            if len(calls) == 1:
                raise RuntimeError("injected")
            return await type(control).allow_adapters(control, *arguments, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control, *(("allow_adapters", shut) if op == "allow_adapters" else ("rpc", broken)))
            with pytest.raises(PushRefused, match=r"engine 0: .*injected.* was taken back: every engine answers with"):
                sync.push()
        assert sync.states() == states
        assert sync.lora_request() == before
        assert_answers(ask(llm, before, 2 * BLOCK), serving, asked())
    burnt = states[0].version + 2  # two of them had come to the workers
    report = sync.push()
    assert report.version == burnt + 1
    assert_answers(ask(llm, sync.lora_request(), 0), model, asked())


def other_modes(sync: VllmSync, llm: LLM, model: Any) -> None:
    stale = sync.lora_request()
    with pytest.raises(PushRefused, match=r"keeps versions of an adapter \(\d+\).*go on with keep="):
        sync.push(keep=0)
    assert sync.lora_request() == stale
    train(model, 40)
    sync.push(mode="merged")
    assert sync.lora_request() is None
    with pytest.raises(InvalidInput, match="version must be None, got 3"):
        sync.lora_request(3)
    assert_answers(engines.ask(llm, None, asked()), model, asked())
    with pytest.raises(ValueError, match="is not kept in this engine"):
        engines.ask(llm, stale, asked())
    with closing(VllmSync(model, llm, mode="adapter")) as other:  # one adapter, whose place each push takes
        other.push()
        assert_answers(engines.ask(llm, other.lora_request(), asked()), model, asked())
        with pytest.raises(PushRefused, match=r"holds adapter@\d+, one adapter that each push.*once before keep=2"):
            other.push(keep=2)
        other.push(mode="merged")
    report = sync.push(mode="adapter", keep=2)
    assert report.base_sent
    assert_answers(ask(llm, sync.lora_request(), 0), model, asked())


def broken_off(sync: VllmSync, llm: LLM, model: Any) -> None:
    """What pushes leave that change more than the version."""
    control, stale = sync._trainer.controls[0], sync.lora_request()
    rpc = control.rpc
    train(model, 50)

    async def interrupted(op: str, **message: Any) -> Any:
        found = await rpc(op, **message)
        if op == "commit":
            raise KeyboardInterrupt
        return found

    async def broken(op: str, **message: Any) -> Any:
        if op == "add_version":
            raise RuntimeError("injected")
        return await rpc(op, **message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "rpc", interrupted)
        with pytest.raises(KeyboardInterrupt):
            sync.push(mode="merged")
    assert_answers(engines.ask(llm, None, asked()), model, asked())
    with pytest.raises(ValueError, match="is not kept in this engine"):
        engines.ask(llm, stale, asked())

    # The base is there, and no version: not what was asked for, nor what was there before.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "rpc", broken)
        with pytest.raises(
            PushFailed, match=r"was taken back.*this push has brought the base to engine 0 \(base@\d+\)"
        ):
            sync.push(mode="adapter", keep=2)
    with pytest.raises(PushRefused, match=r"the engine holds base@\d+, not the adapter@\d+"):
        sync.check()
    with pytest.raises(InvalidInput, match="no version of the adapter is in every engine"):
        sync.lora_request()
    sync.push(keep=0)  # the door, which was told of the version, opens for the one adapter
    assert_answers(engines.ask(llm, sync.lora_request(), asked()), model, asked())
    sync.push(mode="merged")

    # Another trainer pushes between the base and the version.
    other_model, pushes = copy.deepcopy(model), list[int]()
    train(other_model, 51)
    carry_out = sync._carry_out
    with closing(VllmSync(other_model, llm)) as other, pytest.MonkeyPatch.context() as patch:

        async def between(*arguments: Any) -> None:
            await carry_out(*arguments)
            if not pushes:
                pushes.append(other.push().version)

        patch.setattr(sync, "_carry_out", between)
        report = sync.push(mode="adapter", keep=2)
        assert report.version == pushes[0] + 1
        with pytest.raises(PushRefused, match="of another trainer"):
            other.check()
    sync.check()
    assert_answers(ask(llm, sync.lora_request(), 0), model, asked())

    # A trainer dies between the base and the version, which leaves the engine paused, with whom it may concern.
    sync.push(mode="merged")

    async def back(*arguments: Any) -> None: ...

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "rpc", interrupted)
        patch.setattr(sync, "_back", back)
        with pytest.raises(KeyboardInterrupt):
            sync.push(mode="adapter")
    ended, method = list[bool](), type(control).end_wrong_mode_requests

    async def ends(control: Any, adapter: bool) -> None:
        ended.append(adapter)
        await method(control, adapter)

    with closing(VllmSync(model, llm)) as new, pytest.MonkeyPatch.context() as patch:
        assert new.states()[0].kind == "base"
        patch.setattr(type(control), "end_wrong_mode_requests", ends)
        new.push(mode="adapter", keep=2)
        assert ended == [True]
        assert_answers(ask(llm, new.lora_request(), 0), model, asked())


def test_versions_while_requests_run(tmp_path: Path) -> None:
    model = policy()
    engines.save_base(model.get_base_model(), tmp_path / "base")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

    async def run() -> None:
        options = engines.engine_options(model) | {"worker_extension_cls": "engines.Slow", "block_size": BLOCK} | LORA
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path / "base"), **options | {"max_model_len": 128}))
        try:
            async with VllmSync(model, llm, mode="adapter") as sync:
                await pushes_while_requests_run(llm, sync, model)
        finally:
            llm.shutdown()

    asyncio.run(run())


async def one_adapter(llm: AsyncLLM, sync: VllmSync, model: Any, request: Any) -> None:
    """Before any version: a request for the adapter ends alone where merged weights have taken its place."""
    await sync.apush()
    stale = sync.lora_request()
    assert_answers([await request("adapter", stale)], model, asked(1))
    await sync.apush(mode="merged")
    with pytest.raises(EngineGenerateError) as refused:
        await request("too late", stale)
    assert "lora_merge is not in this engine (any more)" in str(refused.value.__cause__)
    door = llm.input_processor._validate_lora
    llm.input_processor._validate_lora = lambda lora: None  # as of a client in another process
    refusal = await request("too late for the core", stale)
    assert refusal is None or refusal.outputs[0].finish_reason == "error"
    llm.input_processor._validate_lora = door
    assert_answers([await request("merged", None)], model, asked(1))
    await sync.apush(mode="adapter")
    assert_answers([await request("adapter again", stale)], model, asked(1))
    await sync.apush(mode="merged")


async def pushes_while_requests_run(llm: AsyncLLM, sync: VllmSync, model: Any) -> None:
    policies: dict[int, Any] = {}

    async def push(keep: int | None = None) -> Any:
        report = await sync.apush(keep=keep)
        policies[report.version] = copy.deepcopy(model)
        return report

    async def request(name: str, lora: Any) -> Any:
        sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False, logprobs=1)
        async for output in llm.generate({"prompt_token_ids": asked()[0]}, sampling, name, lora_request=lora):
            last = output
        return last

    async with VllmSync(model, llm, mode="adapter") as first:
        await one_adapter(llm, first, model, request)
    train(model, 1)
    await push(keep=2)
    answers, going = [], True

    async def client(number: int) -> None:
        count = 0
        while going:
            count += 1
            answers.append(await request(f"{number}, {count}", sync.lora_request()))

    await llm.collective_rpc("slow", args=(True,))
    clients = [asyncio.create_task(client(number)) for number in range(3)]
    for step in range(6):
        while len(answers) < 3 * step:
            await asyncio.sleep(0.01)
        train(model, 2 + step)
        report = await push()
        assert not report.base_sent
        assert "pause" not in report.seconds
    while len(answers) < 24:
        await asyncio.sleep(0.01)
    going = False
    await asyncio.gather(*clients)
    await llm.collective_rpc("slow", args=(False,))
    assert {output.outputs[0].finish_reason for output in answers} == {"length"}, "none was ended"
    for output in answers:
        assert_answers([output], policies[version_of(output)], asked(1))
    assert len({version_of(output) for output in answers}) >= 4
    stale = sync.lora_request(report.versions[0])
    train(model, 20)
    await push()
    with pytest.raises(EngineGenerateError) as refused:
        await request("stale", stale)
    assert "is not kept in this engine" in str(refused.value.__cause__)
    door = llm.input_processor._validate_lora
    llm.input_processor._validate_lora = lambda lora: None  # as of a client in another process
    try:
        with pytest.raises(Exception, match=r"(?i)error"):
            raise RuntimeError(f"error: {(await request('stale', stale)).outputs[0].finish_reason}")
    finally:
        llm.input_processor._validate_lora = door
    assert_answers([await request("last", sync.lora_request())], model, asked(1))


def over_http(server: Server, model: str, tokens: int = 10) -> tuple[int | None, list[int]]:
    """The version that an answer says it had, and its tokens."""
    body = {"model": model, "token_ids": SHORT,
            "sampling_params": {"temperature": 0, "max_tokens": tokens, "ignore_eos": True}}  # fmt: skip
    request = urllib.request.Request(
        f"{server.url}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer = json.loads(response.read())
    return VllmSync.version_of(answer), answer["choices"][0]["token_ids"]


def said(model: Any, tokens: int = 10) -> list[int]:
    ids = list(SHORT)
    with torch.no_grad():
        for _ in range(tokens):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-tokens:]


def said_here(llm: LLM, sync: VllmSync) -> list[int]:
    return list(engines.ask(llm, sync.lora_request(), [SHORT])[0].outputs[0].token_ids)


def names(server: Server) -> set[str]:
    with urllib.request.urlopen(f"{server.url}/v1/models", timeout=60) as response:
        return {card["id"] for card in json.loads(response.read())["data"] if "lora" in card["id"]}


def test_versions_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server, and an engine of this process beside it: both have a version, or none has."""
    model = policy()
    engines.save_base(model.get_base_model(), tmp_path / "base")
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    flags = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--block-size", str(BLOCK))
    server = Server(tmp_path / "base", tmp_path / "log", *flags, "--worker-extension-cls", "engines.Slower")
    try:
        with engine(model, tmp_path / "base", block_size=BLOCK, **LORA) as llm:
            server.wait()
            with closing(VllmSync(model, server.url, mode="adapter")) as sync:
                versions_of_a_server(server, sync, model)
            with closing(VllmSync(model, [server.url, llm], mode="adapter")) as sync:
                report = sync.push(keep=2)
                assert report.base_sent, "to the one that has just come"
                assert report.versions == (7,), "which all of them have"
                assert names(server) == {"lora_merge@6", "lora_merge@7"}
                one_replica_fails(server, llm, sync, model)
                kept = sync.adapter_name()
            before = said(model)
            train(model, 9)
            with closing(VllmSync(model, [server.url, llm], mode="adapter")) as sync:  # of a trainer that goes on
                report = sync.push(keep=2)
                assert not report.base_sent
                assert over_http(server, sync.adapter_name()) == (report.version, said(model))
                assert over_http(server, kept) == (report.versions[0], before)
                train(model, 10)
                sync.push(mode="merged")
                assert names(server) == set()
                assert over_http(server, "") == (None, said(model))
        with closing(VllmSync(model, server.url)) as sync:
            the_mode_changes(server, sync, model)
    finally:
        server.close()


def versions_of_a_server(server: Server, sync: VllmSync, model: Any) -> None:
    with pytest.raises(PushRefused, match=r"engine 0 cannot take an adapter: its API server.*keep=1"):
        sync.push()
    answers = {}
    for version in (1, 2, 3):
        train(model, version, size=0.2)
        report = sync.push(keep=2, verify=version == 2)
        assert report.version == version
        answers[version] = said(model)
        assert names(server) == {f"lora_merge@{kept}" for kept in report.versions}
        for kept in report.versions:
            assert over_http(server, sync.adapter_name(kept)) == (kept, answers[kept])
    with pytest.raises(urllib.error.HTTPError, match="404"):
        over_http(server, "lora_merge@1")
    # A request that runs through three pushes ends on the version that it began with.
    began, name = said(model, 24), sync.adapter_name()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(over_http, server, name, 24)
        for step in range(3):
            train(model, 4 + step, size=0.2)
            sync.push(keep=1)
            assert over_http(server, sync.adapter_name()) == (4 + step, said(model))
        assert running.result() == (3, began)


def the_mode_changes(server: Server, sync: VllmSync, model: Any) -> None:
    """A request that came meanwhile, for merged weights, was answered by the bare base."""
    sync.push(mode="merged")
    merged, control = said(model, 30), sync._trainer.controls[0]

    def slow(on: bool) -> None:
        control._server.post("collective_rpc", {"method": "slow", "args": [on]})  # type: ignore[attr-defined]

    slow(True)
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(over_http, server, "", 30)
        until(lambda: in_flight(server) == 1)
        train(model, 11)
        push = pool.submit(sync.push, mode="adapter", keep=1)
        until(lambda: sync._mode == "adapter")  # all is checked, and it pauses
        late = pool.submit(over_http, server, "", 30)
        until(lambda: in_flight(server) == 2)
        slow(False)
        push.result()
        assert running.result() == (None, merged)
        assert late.result() == (None, []), "it was ended, and hears so"
    assert over_http(server, sync.adapter_name())[1] == said(model)


def in_flight(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    named = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(named)))


def one_replica_fails(server: Server, llm: LLM, sync: VllmSync, model: Any) -> None:
    serving, name, states = said(model), sync.adapter_name(), sync.states()
    of_server, of_llm = sync._trainer.controls
    for control, method in ((of_server, "name_version"), (of_server, "allow_adapters"), (of_llm, "rpc")):
        works, calls = getattr(control, method), list[str]()

        async def fails(*arguments: Any, works: Any = works, calls: list[str] = calls, **options: Any) -> Any:
            calls.append(str(arguments[0]))
            if calls[-1] == "add_version" or len(calls) == (arguments[0] != "hello"):
                raise RuntimeError("injected")
            return await works(*arguments, **options)

        train(model, 7)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(control, method, fails)
            with pytest.raises(PushRefused, match=r"engine [01]: .*injected.* was taken back: every engine answers"):
                sync.push()
        assert sync.states() == states
        assert (sync.adapter_name(), names(server)) == (name, {"lora_merge@6", name})
        assert over_http(server, name) == (states[0].version, serving)
        assert said_here(llm, sync) == serving
    sync.push()
    assert over_http(server, sync.adapter_name())[1] == said(model)
    assert said_here(llm, sync) == said(model)
