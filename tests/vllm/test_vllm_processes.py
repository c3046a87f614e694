"""Engines in other processes: shared memory, tensor parallelism, HTTP, AsyncLLM, Ray, replicas."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import GREEDY, ask, assert_answers, engine, train
from strangers import JSON, in_front
from vllm import SamplingParams

from lora_merge import InvalidInput, LoraMergeError, PushFailed, PushRefused, VllmSync
from lora_merge.engine.transport.sender import Sender
from lora_merge.engine.vllm.url import HttpControl
from lora_merge.stream.weights import BucketWriter
from lora_merge.verify import coverage

DENSE = {"target_modules": engines.LINEARS}
pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


@pytest.fixture
def single_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")


def test_tensor_parallel_workers_each_take_what_is_theirs(tmp_path: Path, single_cores: None) -> None:
    """gate and up were split wrongly under TP by a peer."""
    model = models.with_lora(engines.qwen2, **DENSE)
    options = {"tensor_parallel_size": 2, "enable_lora": True, "max_lora_rank": 8}
    with engine(model, tmp_path / "base", processes=True, **options) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step, mode in enumerate(["merged", "adapter", "adapter", "merged"]):
            train(model, step)
            report = sync.push(mode=mode, verify=step < 2)
            assert report.transports == ("shm",)
            assert_answers(ask(llm, sync.lora_request()), model)
        assert [c.complete for c in coverage(llm)] == [True, True]


def test_a_pipeline_ties_its_head_on_the_last_stage(tmp_path: Path, single_cores: None) -> None:
    """The first stage has no head and ties nothing; `lm_head.weight` was then sent, and refused by the last one."""
    model = models.with_lora(engines.qwen2, **DENSE)
    assert model.config.tie_word_embeddings
    with engine(model, tmp_path / "base", processes=True, pipeline_parallel_size=2) as llm:
        VllmSync(model, llm).push(verify=True)  # (vLLM 0.32 cannot generate in a pipeline of CPUs)
        assert [c.complete for c in coverage(llm)] == [True, True]


def test_experts_on_the_workers_that_hold_them(tmp_path: Path, single_cores: None) -> None:
    """Each worker fills all of the experts that are its own. (vLLM 0.32 starts expert parallelism on CPUs, and dies in
    its first forward, also without a push.)"""
    model = models.with_lora(engines.qwen3_moe, target_modules=["q_proj"], target_parameters=engines.EXPERTS)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with engine(model, tmp_path / "base", processes=True, **options) as llm:
        for step in range(2):
            train(model, step)
            VllmSync(model, llm, bucket_bytes=1 << 17).push(verify=True)
            assert [c.complete for c in coverage(llm)] == [True, True]


def test_another_process_and_a_trainer_that_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.with_lora(engines.mixtral, target_modules=["q_proj"], target_parameters=engines.EXPERTS)
    with engine(model, tmp_path / "base", processes=True) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        sync.push(verify=True)
        assert_answers(ask(llm), model)
        fill = BucketWriter.fill

        def broken(self: BucketWriter, index: int, *args: Any) -> None:
            if index == 3:
                raise RuntimeError("injected")
            fill(self, index, *args)

        monkeypatch.setattr(BucketWriter, "fill", broken)
        with pytest.raises(PushFailed, match="injected"):
            sync.push()
        assert sync.states()[0].kind == "dirty"
        monkeypatch.undo()
        newcomer = VllmSync(model, llm, bucket_bytes=1 << 18)  # a trainer that resumed takes over
        train(model)
        assert newcomer.push().version == 2
        assert_answers(ask(llm), model)
        monkeypatch.setattr(Sender, "serve", serve_damaged)
        with pytest.raises(PushFailed):
            newcomer.push(verify=True)
        assert newcomer.states()[0].kind == "dirty"


def serve_damaged(sender: Sender, source: Any, run: Any, gone: Any, route: Any = None) -> None:
    """As `Sender.serve`, by a transport that flips a bit on the way."""
    mailbox: Any = sender.ends["shm"]
    for index in range(len(source.table)):
        source.fill(index, sender.buffers[index % 2][: sender.nbytes], run)
        sender.buffers[index % 2][100] ^= 1
        mailbox.box[0] = index + 1
        while mailbox.box[2] <= index and not gone():
            time.sleep(1e-3)


def serve(arguments: Sequence[str], log: Path) -> None:
    """Be `python -m vllm.entrypoints.openai.api_server`, in a process group of its own."""
    os.setpgid(0, 0)
    with log.open("w") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    os.environ |= SERVING
    sys.argv = [SERVER, *arguments]
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


SERVER = "vllm.entrypoints.openai.api_server"
SERVING = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


class Server:
    """A real `vllm serve` on this machine.

    Args:
        elsewhere: the command that runs it on another host.
        host: address at which it listens.
        load_format: vLLM's.
    """

    def __init__(
        self,
        folder: Path,
        log: Path,
        *flags: str,
        tokenizer: bool = False,
        elsewhere: Sequence[str] = (),
        host: str = "127.0.0.1",
        load_format: str = "dummy",
    ) -> None:
        self.reserved = socket.socket()  # stays bound, so that nobody else is given the port; vLLM shares it
        self.reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.reserved.bind(("127.0.0.1", 0))
        self.port = self.reserved.getsockname()[1]
        self.url = f"http://{host}:{self.port}"
        arguments = ["--model", str(folder), "--port", str(self.port), "--host", host, "--enforce-eager", *flags]
        arguments += [] if tokenizer else ["--skip-tokenizer-init"]
        arguments += ["--load-format", load_format, "--max-model-len", "64", "--dtype", "float32", "--enable-scale-out"]
        arguments += ["--weight-transfer-config", json.dumps({"backend": "lora_merge"}), "--max-num-seqs", "8"]
        self.log = log
        self.process: Any
        if elsewhere:
            self._command = [*elsewhere, sys.executable, "-m", SERVER, *arguments]
            self.start()
        else:
            self.process = multiprocessing.get_context("spawn").Process(target=serve, args=(arguments, log))
            self.process.start()

    def start(self) -> None:
        """Start it on the other host; also anew, at the same URL."""
        with self.log.open("a") as file:
            self.process = subprocess.Popen(
                self._command, env=os.environ | SERVING, stdout=file, stderr=file, start_new_session=True
            )

    def _ended(self, seconds: float) -> bool:
        """Wait for the process to end, for so long at most."""
        if isinstance(self.process, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
            return self.process.returncode is not None
        self.process.join(seconds)
        return self.process.exitcode is not None

    def wait(self) -> None:
        end = time.monotonic() + 400
        while time.monotonic() < end and not self._ended(0):
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return
            except OSError:
                time.sleep(0.3)
        raise AssertionError(f"the server did not come up: {self.log.read_text()[-3000:]}")

    def generate(self, prompt: list[int]) -> list[int]:
        body = {"token_ids": prompt, "sampling_params": {"temperature": 0, "max_tokens": 10, "ignore_eos": True}}
        request = urllib.request.Request(
            f"{self.url}/inference/v1/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())["choices"][0]["token_ids"]

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        if not self._ended(20):
            os.killpg(self.process.pid, signal.SIGKILL)
            assert self._ended(20)
        self.reserved.close()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("servers")
    engines.save_base(engines.qwen2(), folder / "base")
    servers = [Server(folder / "base", folder / f"{i}.log") for i in range(2)]
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.close()


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(10):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_two_replicas_over_http(servers: list[Server]) -> None:
    model = models.with_lora(engines.qwen2, **DENSE)
    sync = VllmSync(model, [server.url for server in servers], bucket_bytes=1 << 17)
    for step in range(2):
        train(model, step)
        report = sync.push(verify=step == 0)
        assert report.transports == ("shm",)
        for prompt in engines.prompts():
            wanted = greedy(model, prompt)
            assert [server.generate(prompt) for server in servers] == [wanted, wanted]
    with pytest.raises(PushRefused, match=r'(?s)API server does not know.*mode="merged"'):
        sync.push(mode="adapter")
    with pytest.raises(PushRefused, match=r"without enable_lora=True"):
        sync.push(mode="adapter", keep=1)
    sync.push(mode="merged")
    same = [servers[0].url, servers[0].url.replace("127.0.0.1", "localhost")]
    with (
        closing(VllmSync(model, same)) as twice,
        pytest.raises(PushRefused, match=r"engine 1 is engine 0 under another handle"),
    ):
        twice.push()
    assert servers[0].generate(prompt) == wanted


WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None  # as if it were not installed
import models, policies
from lora_merge import VllmSync
with VllmSync(models.with_lora(policies.qwen2, seed=8, target_modules=policies.LINEARS), sys.argv[1:]) as sync:
    sync.push(verify=True)
    sync.check()
"""


def test_a_trainer_without_vllm(servers: list[Server]) -> None:
    folders = [str(Path(models.__file__).parent), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM, *(server.url for server in servers)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, folders))},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    model = models.with_lora(engines.qwen2, seed=8, **DENSE)
    for prompt in engines.prompts():
        assert [server.generate(prompt) for server in servers] == 2 * [greedy(model, prompt)]


def test_one_replica_fails_and_the_other_is_valid(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.with_lora(engines.qwen2, seed=4, **DENSE)
    sync = VllmSync(model, [server.url for server in servers], bucket_bytes=1 << 17)
    sync.push()
    failing = sync._trainer.controls[1]
    rpc = failing.rpc

    async def broken(op: str, **message: Any) -> Any:
        if op == "begin_full":
            raise RuntimeError("injected")
        return await rpc(op, **message)

    monkeypatch.setattr(failing, "rpc", broken)
    train(model)
    with pytest.raises(PushFailed, match=r"engine 1 is dirty: RuntimeError: injected; engine 0 is valid"):
        sync.push()
    assert [state.kind for state in sync.states()] == ["merged", "dirty"]
    prompt = engines.prompts()[0]
    assert servers[0].generate(prompt) == greedy(model, prompt)
    monkeypatch.undo()
    sync.push()
    assert [server.generate(prompt) for server in servers] == [greedy(model, prompt)] * 2


@pytest.mark.parametrize("how", ["in turn", "by route", "once"])
def test_a_load_balancer_in_front_of_replicas(servers: list[Server], how: str) -> None:
    """One would be paused, and another one written to."""
    model = models.with_lora(engines.qwen2, seed=3, **DENSE)
    with closing(VllmSync(model, [server.url for server in servers])) as sync:
        sync.push()
        before, turn = sync.states(), itertools.count()

    def engine(path: str) -> str:
        at = next(turn)
        if how == "in turn":
            return servers[at % 2].url
        if how == "by route":  # workers are the same all the time, and what is asked of the engine goes elsewhere
            return servers[path == "/collective_rpc" and at % 3 == 0].url
        return servers[path == "/collective_rpc" and at == 10].url

    with in_front(engine) as (url, asked):
        with closing(VllmSync(model, url)) as sync, pytest.raises(LoraMergeError, match="by more than one engine"):
            sync.push()
        assert how == "once" or set(asked) == {"/collective_rpc"}, "nothing was paused"
    with closing(VllmSync(model, [server.url for server in servers])) as sync:
        assert sync.states() == before
        train(model)
        sync.push()
    prompt = engines.prompts()[0]
    assert [server.generate(prompt) for server in servers] == [greedy(model, prompt)] * 2


def test_an_engine_that_is_started_anew_between_pushes(servers: list[Server]) -> None:
    """At the same URL."""
    model, now = models.with_lora(engines.qwen2, seed=3, **DENSE), [0]
    with in_front(lambda path: servers[now[0]].url) as (url, _), closing(VllmSync(model, url)) as sync:
        for now[0] in (0, 1):
            train(model, now[0])
            sync.push()
            prompt = engines.prompts()[0]
            assert servers[now[0]].generate(prompt) == greedy(model, prompt)


LIES = {
    "pause": ((200, JSON, "{}"), "engine 0 holds what it held before.*answered 200 and {}, where an engine"),
    "is_paused": ((200, JSON, "{}"), "engine 0 holds what it held before.*JSON of something else"),
    "reset_prefix_cache": ((200, JSON, '{"ok": true}'), "engine 0 holds what it held before.*JSON of something else"),
    "resume": ((200, JSON, '{"status": "ok"}'), r"holds merged@\d+, but going on with it failed.*answered 200 and"),
}
"""What something in front answers in the engine's place, and what a push says of it."""


@pytest.mark.parametrize("route", LIES)
def test_what_was_not_done(servers: list[Server], route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an engine whose lora_merge is too old to take several calls in one message."""
    monkeypatch.setattr(HttpControl, "_reaches_core", lambda control: False)
    model, (answer, match) = models.with_lora(engines.qwen2, seed=3, **DENSE), LIES[route]
    url = servers[0].url
    with (
        in_front(lambda path: answer if path == f"/{route}" else url) as (front, _),
        closing(VllmSync(model, front)) as sync,
        pytest.raises(LoraMergeError, match=match),
    ):
        sync.push()
    with closing(VllmSync(model, url)) as sync:
        sync.push()
        assert not sync._trainer.controls[0]._server.get("is_paused")["is_paused"]  # type: ignore[attr-defined]
    prompt = engines.prompts()[0]
    assert servers[0].generate(prompt) == greedy(model, prompt)


CALLED = {
    "the pause, nothing": (1, {}, "is dirty: Unheard: Unfit: .*JSON of something else"),
    "the pause, an object": (1, {"results": ["{}"]}, "is dirty: Unheard: Unfit: .*JSON of something else"),
    "the pause, none of it": (
        1,
        {"results": ['{"returned": [], "failed": ""}']},
        "is dirty: Unheard: of 5 calls 0 were answered, and none of these ended them",
    ),
    "the work, not even JSON": (2, "<html/>", "is dirty: Unheard: Unfit: .*which is not JSON"),
    "the work, none of it": (
        2,
        {"results": ['{"returned": [], "failed": ""}']},
        "is dirty: Unheard: of 7 calls 0 were answered, and none of these ended them",
    ),
}
"""Which message of a push something in front answers in the engine's place, with what, and what a push says of it."""


@pytest.mark.parametrize("what", CALLED)
def test_messages_that_something_else_answers(servers: list[Server], what: str) -> None:
    """Of three: who is there; the pause, and the begin; the work, the caches, the name, and the resume."""
    model, (at, said, match) = models.with_lora(engines.qwen2, seed=3, **DENSE), CALLED[what]
    answer = (200, JSON, said if isinstance(said, str) else json.dumps(said))
    server, truths = servers[0], -1

    def engine(path: str) -> Any:
        nonlocal truths
        truths -= 1
        return server.url if truths != -1 else answer

    with in_front(engine) as (front, asked), closing(VllmSync(model, front, merge="trainer")) as sync:
        for step in range(3):
            asked.clear()
            train(model, step)
            sync.push()
        assert asked == 3 * ["/collective_rpc"]
        truths = at
        with pytest.raises(PushFailed, match=match):
            sync.push()
        train(model)
        sync.push()
    prompt = engines.prompts()[0]
    assert server.generate(prompt) == greedy(model, prompt)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_proxy_that_repeats_what_it_is_sent(servers: list[Server], taken: int) -> None:
    """What comes again is not done again: neither a bucket is taken twice, nor an engine resumed in the next push."""
    model, server = models.with_lora(engines.qwen2, seed=taken, **DENSE), servers[0]
    with in_front(lambda path: server.url, taken) as (front, asked):
        for merge in ("trainer", "engine"):
            with closing(VllmSync(model, front, merge=merge, bucket_bytes=1 << 17)) as sync:
                for step in range(2):
                    train(model, step)
                    sync.push()
                    prompt = engines.prompts()[step]
                    assert server.generate(prompt) == greedy(model, prompt)
    assert set(asked) == {"/collective_rpc"}


def test_a_users_pause_stays(servers: list[Server]) -> None:
    sync = VllmSync(engines.qwen2(), servers[0].url)
    server = sync._trainer.controls[0]._server  # type: ignore[attr-defined]
    server.post("pause", mode="keep")
    sync.push()
    assert server.get("is_paused")["is_paused"], "the user paused and did not ask to go on"
    server.post("resume")
    sync.push()
    assert not server.get("is_paused")["is_paused"]


def push_and_die(url: str) -> None:
    """A trainer that is killed in the middle of a push."""
    fill = BucketWriter.fill

    def broken(self: BucketWriter, index: int, *args: Any) -> None:
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        fill(self, index, *args)

    BucketWriter.fill = broken  # type: ignore[method-assign]
    VllmSync(models.with_lora(engines.qwen2, **DENSE), url, merge="trainer", bucket_bytes=1 << 16).push()


def test_a_trainer_killed_in_the_middle_of_a_push(servers: list[Server]) -> None:
    """Its engine is dirty, says so, and the next trainer's push heals it; it generates again, too."""
    model = models.with_lora(engines.qwen2, seed=2, **DENSE)
    sync = VllmSync(model, servers[0].url, bucket_bytes=1 << 17)
    version = sync.push().version
    trainer = multiprocessing.get_context("spawn").Process(target=push_and_die, args=(servers[0].url,))
    trainer.start()
    trainer.join(400)
    assert trainer.exitcode == -signal.SIGKILL
    end = time.monotonic() + 60
    while (state := sync.states()[0]).kind != "dirty" and time.monotonic() < end:
        time.sleep(0.1)
    assert state.kind == "dirty"
    assert sync.push(verify=True).version == version + 1
    prompt = engines.prompts()[0]
    assert servers[0].generate(prompt) == greedy(model, prompt)
    sync.close()


def test_pushes_while_an_async_engine_generates_for_training_and_evaluation(tmp_path: Path) -> None:
    """No request is lost, and none mixes versions without saying so."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model = models.with_lora(engines.qwen2, **DENSE)
    engines.save_base(model.get_base_model(), tmp_path / "base")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"

    async def scenario() -> None:
        options = engines.engine_options(model) | {"enable_lora": True, "max_lora_rank": 8, "max_model_len": 256}
        options["worker_extension_cls"] = "engines.Slow"
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path / "base"), **options))
        try:
            sync = VllmSync(model, llm, bucket_bytes=1 << 17)
            with pytest.raises(InvalidInput, match="apush"):
                sync.push()
            await sync.apush()

            async def request(kind: str, number: int, tokens: int) -> Any:
                sampling = SamplingParams(
                    temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1
                )
                prompt = {"prompt_token_ids": engines.prompts(8)[number % 8]}
                async for output in llm.generate(
                    prompt, sampling, f"{kind}-{number}", lora_request=sync.lora_request()
                ):
                    last = output
                    begun.set()
                return last

            begun = asyncio.Event()
            await llm.collective_rpc("slow", args=(True,))
            running = [asyncio.create_task(request("train", i, 150)) for i in range(6)]
            running += [asyncio.create_task(request("eval", i, 60)) for i in range(6)]
            first = asyncio.ensure_future(begun.wait())
            await asyncio.wait([first, *running], return_when=asyncio.FIRST_COMPLETED)
            for step in range(3):
                train(model, step)
                await sync.apush(mode="merged")
                await llm.collective_rpc("slow", args=(False,))  # what was in flight is so after a push, too
                await asyncio.sleep(0.1)
            outputs = await asyncio.gather(*running)
            assert [len(o.outputs[0].token_ids) for o in outputs] == [150] * 6 + [60] * 6
            known = {f"merged@{version}" for version in range(1, 5)}
            mixed = 0
            for output in outputs:
                spans = output.outputs[0].weight_versions
                assert spans, "vLLM says which tokens came from which version"
                assert {span.version if hasattr(span, "version") else span[0] for span in spans} <= known
                mixed += len(spans) > 1
            assert mixed, "the scenario kept requests over a push"
            quiet = await asyncio.gather(*(request("quiet", i, 10) for i in range(4)))
            assert_answers(quiet, model)
            await sync.apush(mode="adapter")
            assert_answers(await asyncio.gather(*(request("adapter", i, 10) for i in range(4))), model)
        finally:
            llm.shutdown()

    asyncio.run(scenario())


def test_requests_that_come_while_the_mode_changes(tmp_path: Path) -> None:
    """Those that were made for the mode before are ended, and hear so: they went on with the bare base, or asked for an
    adapter that had gone, which killed the engine. Those of the new mode wait for it."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    model = models.with_lora(engines.qwen2, **DENSE)
    engines.save_base(model.get_base_model(), tmp_path / "base")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    sampling = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, detokenize=False, logprobs=1)
    prompt = {"prompt_token_ids": engines.prompts(1)[0]}

    async def scenario() -> None:
        options = engines.engine_options(model) | {"enable_lora": True, "max_lora_rank": 8, "max_model_len": 256}
        options["worker_extension_cls"] = "engines.Slow"
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(tmp_path / "base"), **options))

        async def request(name: str, lora: Any, begun: asyncio.Event | None = None) -> Any:
            async for output in llm.generate(prompt, sampling, name, lora_request=lora):
                last = output
                if begun is not None:
                    begun.set()
            return last

        try:
            sync = VllmSync(model, llm)
            await sync.apush()
            for to in ("adapter", "merged", "adapter"):
                old, begun = sync.lora_request(), asyncio.Event()
                await llm.collective_rpc("slow", args=(True,))
                running = asyncio.create_task(request(f"running to {to}", old, begun))
                await begun.wait()
                push = asyncio.create_task(sync.apush(mode=to))
                while sync._mode != to:  # all is checked, and it pauses
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.5)
                assert not push.done(), "the push waits for what is in flight"
                late = [asyncio.create_task(request(f"{i} late to {to}", old)) for i in range(2)]
                fresh = asyncio.create_task(request(f"fresh to {to}", sync.lora_request()))
                await asyncio.sleep(0.2)
                await llm.collective_rpc("slow", args=(False,))
                await push
                for output in await asyncio.wait_for(asyncio.gather(*late), 30):
                    assert output.outputs[0].finish_reason == "abort"
                    assert not output.outputs[0].token_ids
                outputs = await asyncio.wait_for(asyncio.gather(running, fresh), 30)
                assert_answers(outputs, model, [prompt["prompt_token_ids"]] * 2)
        finally:
            llm.shutdown()

    asyncio.run(scenario())


class Asynchronous:
    """What an actor around an `AsyncLLM` offers, as users write them."""

    def __init__(self, folder: str, **options: Any) -> None:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(folder, **options))
        self.called: list[str] = []

    async def generate(self, requests: Sequence[Any], sampling: Any, use_tqdm: bool, lora_request: Any) -> list[Any]:
        async def one(number: int, prompt: Any) -> Any:
            async for output in self.llm.generate(prompt, sampling, str(number), lora_request=lora_request):
                last = output
            return last

        return await asyncio.gather(*(one(*numbered) for numbered in enumerate(requests)))

    async def collective_rpc(self, method: str, args: Sequence[Any] = ()) -> list[Any]:
        self.called.append(method)
        return await self.llm.collective_rpc(method, args=tuple(args))

    async def pause_generation(self, **options: Any) -> None:
        await self.llm.pause_generation(**options)

    async def resume_generation(self) -> None:
        await self.llm.resume_generation()

    async def is_paused(self) -> bool:
        return await self.llm.is_paused()

    async def calls(self) -> list[str]:
        called, self.called = self.called, []
        return called


@pytest.mark.parametrize("around", ["LLM", "AsyncLLM"])
def test_a_ray_actor(tmp_path: Path, around: str) -> None:
    import ray
    from vllm import LLM

    model = models.with_lora(engines.qwen2, **DENSE)
    engines.save_base(model.get_base_model(), tmp_path / "base")
    environment = {k: v for k, v in os.environ.items() if k.startswith(("VLLM_", "HF_"))}
    inside = "0" if around == "LLM" else "1"
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": inside, "PYTHONPATH": os.pathsep.join(sys.path)}
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment}, logging_level="ERROR")
    try:
        options = engines.engine_options(model) | {"enable_lora": True, "max_lora_rank": 8}
        kind = LLM if around == "LLM" else Asynchronous
        actor: Any = ray.remote(kind).remote(str(tmp_path / "base"), **options)
        sync = VllmSync(model, actor, bucket_bytes=1 << 17)
        for mode in ("merged", "adapter"):
            train(model)
            assert sync.push(mode=mode).transports == ("shm",)
            requests = [{"prompt_token_ids": p} for p in engines.prompts()]
            call = actor.generate.remote(requests, GREEDY, use_tqdm=False, lora_request=sync.lora_request())
            assert_answers(ray.get(call), model)
        if around == "AsyncLLM":
            for step in range(3):
                train(model, step)
                ray.get(actor.calls.remote())
                sync.push(mode="merged")
            assert ray.get(actor.calls.remote()) == ["lora_merge", *2 * ["lora_merge_calls"]], "as few as can be"
            with closing(VllmSync(model, actor, cache="keep")) as keeping:
                assert keeping.push().cache == "keep"
        sync.close()
    finally:
        ray.shutdown()
