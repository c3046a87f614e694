"""Pushes that keep the KV cache of requests in flight: what these answer is what old keys and values and new weights
make, what new ones answer is of the new weights alone, and each answer says which it was."""

from __future__ import annotations

import copy
import json
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import models
import pytest
import torch
from engines import engine, train
from torch import Tensor, nn
from vllm import LLM, EngineArgs, SamplingParams
from vllm.config import KVEventsConfig, KVTransferConfig

from lora_merge import Follower, InvalidInput, Publisher, PushRefused, SglangSync, Span, VllmSync, weight_spans
from lora_merge.cli import main
from lora_merge.engine.control.calls import drive
from lora_merge.engine.vllm import kept
from lora_merge.engine.vllm.control import RayControl
from tests.vllm.test_vllm_processes import Server

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
PROMPT = [(7 * i + 3) % 251 for i in range(40)]
"""Longer than a block."""
LONG = [(11 * i + 5) % 251 for i in range(150)]
"""Longer than a step computes."""


class Stepped:
    """An engine that is stepped by hand, with requests in flight."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.said, self.ended = llm.llm_engine, dict[str, int](), dict[str, Any]()

    def begin(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, detokenize=False, ignore_eos=True)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for output in self.engine.step():
                self.said[output.request_id] = len(output.outputs[0].token_ids)
                if output.finished:
                    self.ended[output.request_id] = output

    def end(self) -> dict[str, Any]:
        while self.engine.has_unfinished_requests():
            self.step()
        return self.ended


def replayed(policies: dict[str, nn.Module], ids: Sequence[int], kv: Sequence[Span]) -> Tensor:
    """Log-probs of all tokens at each position, in float64: each version goes on from the cache of those before."""
    found, cache = [], None
    with torch.no_grad():
        for span in kv:
            made = policies[span.version](
                torch.tensor([ids[span.start : span.end]]), past_key_values=cache, use_cache=True
            )
            cache = made.past_key_values
            found.append(made.logits[0].log_softmax(-1))
    return torch.cat(found)


def assert_replays(output: Any, policies: dict[str, nn.Module]) -> Any:
    """The answer's log-probs are those of the cache that it says it had; return what it says."""
    spans, answer = weight_spans(output), list(output.outputs[0].token_ids)
    ids = [*output.prompt_token_ids, *answer]
    assert (spans.kv[0].start, spans.kv[-1].end) == (0, len(ids) - 1)
    assert (spans.tokens[0].start, spans.tokens[-1].end) == (0, len(answer))
    versions = [Span(one.version, one.start, one.end) for one in output.outputs[0].weight_versions]
    assert list(spans.tokens) == versions, "vLLM's own"
    logp = replayed(policies, ids, spans.kv)[len(output.prompt_token_ids) - 1 :]
    got = torch.tensor([step[token].logprob for step, token in zip(output.outputs[0].logprobs, answer, strict=True)])
    wanted = logp.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
    assert logp.argmax(-1).tolist() == answer
    assert (got - wanted).abs().max() < 12e-6, (output.request_id, (got - wanted).abs())
    return spans


def test_requests_go_on_from_their_old_cache(tmp_path: Path) -> None:
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    policies, reports = dict[str, nn.Module](), list[str]()

    def push(sync: VllmSync) -> str:
        train(model, len(policies))
        report = sync.push()
        reports.append(report.cache)
        name = f"merged@{report.version}"
        policies[name] = copy.deepcopy(model).double().eval()
        return name

    options = {"block_size": 32, "max_model_len": 256, "max_num_batched_tokens": 64, "enable_prefix_caching": True}
    with engine(model, tmp_path / "base", **options) as llm:
        keeps, resets = VllmSync(model, llm, cache="keep", merge="trainer"), VllmSync(model, llm)
        merges = VllmSync(model, llm, cache="keep", merge="engine")
        flight = Stepped(llm)
        first = push(keeps)
        flight.begin("a", PROMPT, 100)
        flight.begin("shares a's prompt", PROMPT, 30)
        flight.step(21)
        flight.begin("prefill", LONG, 20)
        flight.step()
        at = flight.said["a"]
        second = push(keeps)
        flight.begin("new", PROMPT, 60)
        flight.step(25)
        later = flight.said["a"]
        third = push(merges)  # the base goes first, in the same pause
        flight.step(3)
        train(model, 77)
        with pytest.raises(InvalidInput, match="cache='keep' is for merged weights, got mode='adapter'"):
            merges.push(mode="adapter")
        fourth = push(merges)
        found = {name: assert_replays(output, policies) for name, output in flight.end().items()}
        spans = found["a"]
        assert spans.mixed
        assert [one.version for one in spans.tokens] == [first, second, third, fourth]
        assert [one.end for one in spans.tokens][:2] == [at, later]
        assert [one.end for one in spans.kv][:2] == [len(PROMPT) + at - 1, len(PROMPT) + later - 1]
        assert len(spans.by_token()) == 100
        assert [one.version for one in found["shares a's prompt"].kv] == [first, second]
        prefill = found["prefill"]
        assert [one.version for one in prefill.kv][:2] == [first, second]
        assert 0 < prefill.kv[0].end < len(LONG)
        assert prefill.tokens[0].version == second, "the prompt alone has old keys and values"
        assert [one.version for one in found["new"].kv] == [second, third, fourth]
        # Old blocks, and those that kept requests went on to fill, are found by nobody.
        talk = [*PROMPT, *flight.ended["a"].outputs[0].token_ids, 9]
        for name in ("talk", "again"):
            flight.begin(name, talk, 5)
            output = flight.end()[name]
            assert [one.version for one in assert_replays(output, policies).kv] == [fourth]
            assert (output.num_cached_tokens > 0) == (name == "again")
        # A request that loses its blocks is computed again, with the weights of that moment.
        for name, forget in (("preempted", True), ("reset", False)):
            flight.begin(name, PROMPT, 60)
            flight.step(10)
            before = push(keeps)
            flight.step(10)
            if forget:
                llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
                after = before
            else:
                after = push(resets)
            output = flight.end()[name]
            spans = weight_spans(output)
            assert [(one.version, one.start) for one in spans.kv] == [(after, 0)]
            assert not spans.mixed
            assert len({one.version for one in spans.tokens}) == (2 if forget else 3)
            ids, answer = [*PROMPT, *output.outputs[0].token_ids], output.outputs[0].token_ids
            logp = replayed(policies, ids[:-1], [Span(after, 0, len(ids) - 1)])[len(PROMPT) - 1 :]
            assert logp.argmax(-1)[25:].tolist() == list(answer)[25:]
        # What was kept over one failed push is not kept over the next: nobody knows what a dirty engine has computed.
        flight.begin("dirty", PROMPT, 60)
        flight.step(10)
        with torch.no_grad():
            llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.get_model().model.norm.weight.mul_(2)
        assert keeps.states()[0].kind == "dirty"
        healed = push(keeps)
        spans = weight_spans(flight.end()["dirty"])
        assert [one.version for one in spans.kv] == [healed]
        assert reports == ["keep"] * 6 + ["reset"] * 2, "the last one asked for it, and was told"
        for sync in (keeps, merges, resets):
            sync.close()


def test_answers_name_the_version_of_an_adapter_that_they_had(tmp_path: Path) -> None:
    """Pushes with `keep` set no name for the engine's weights, which stays that of the base."""
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "max_cpu_loras": 2}
    with engine(model, tmp_path / "base", **lora) as llm:
        keeps, sync = VllmSync(model, llm, cache="keep"), VllmSync(model, llm, mode="adapter")
        merged, adapter = keeps.push().version, sync.push(keep=2).version
        flight = Stepped(llm)

        def begin(name: str, lora: Any) -> None:
            sampling = SamplingParams(temperature=0, max_tokens=12, logprobs=0, detokenize=False, ignore_eos=True)
            flight.engine.add_request(name, {"prompt_token_ids": PROMPT}, sampling, lora_request=lora)

        begin("in flight", sync.lora_request())
        begin("without", None)
        flight.step(4)
        train(model, 1)
        newer = sync.push().version
        begin("newer", sync.lora_request())
        begin("older", sync.lora_request(adapter))
        found = {name: weight_spans(output) for name, output in flight.end().items()}
        assert (merged, newer) == (adapter - 1, adapter + 1)
        wanted = {"in flight": f"adapter@{adapter}", "older": f"adapter@{adapter}", "newer": f"adapter@{newer}"}
        for name, version in (wanted | {"without": f"base@{adapter}"}).items():
            assert found[name].tokens == (Span(version, 0, 12),)
            assert found[name].kv == (Span(version, 0, len(PROMPT) + 11),)
        keeps.push()
        begin("merged", None)
        assert weight_spans(flight.end()["merged"]).tokens[0].version == f"merged@{newer + 1}"
        keeps.close()
        sync.close()


def test_what_is_refused(tmp_path: Path) -> None:
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    for options, word in (
        ({"cache": "keep", "pause": "wait"}, "pause='wait' leaves none"),
        ({"cache": "keep", "mode": "adapter"}, "is for merged weights, got mode='adapter'"),
        ({"cache": "keep", "share": True}, "share=True lets the trainer write"),
        ({"cache": "kept"}, "cache must be one of reset, keep, got 'kept'"),
    ):
        with pytest.raises(InvalidInput, match=word):
            VllmSync(model, "http://localhost:1", **options)
    with pytest.raises(InvalidInput, match=r"cache='keep' is for vLLM: .* names the version of its end alone"):
        SglangSync(model, "http://localhost:1", cache="keep")
    said = {"tokens": [["merged@1", 0, 5], ["merged@2", 5, 9]], "kv": [["merged@1", 0, 12]], "mixed": False}
    answer = {"choices": [{}], "usage": {"completion_tokens": 4}, "kv_transfer_params": {"lora_merge": said}}
    assert weight_spans(json.loads(json.dumps(answer))).tokens == (Span("merged@1", 0, 4),)
    for wrong, word in (
        (answer | {"choices": [{}, {}]}, "has 2 sequences"),
        (answer | {"kv_transfer_params": None}, "says nothing of its versions"),
        ({}, "has ended"),
    ):
        with pytest.raises(InvalidInput, match=word):
            weight_spans(wrong)


def test_a_step_that_is_under_way_has_sampled_with_the_old_weights() -> None:
    """An engine in its owner's process that schedules ahead: what it has sampled is delivered after the push."""
    counts = {"num_output_tokens": 21, "num_output_placeholders": 1, "num_computed_tokens": 61, "num_preemptions": 0}
    request = SimpleNamespace(**counts, lora_request=None)
    core = SimpleNamespace(
        get_weight_version=lambda: "merged@1", scheduler=SimpleNamespace(requests={"in flight": request})
    )
    set_to: list[str] = []
    kept.noting(lambda core, version: set_to.append(version))(core, "merged@2")
    assert set_to == ["merged@2"]
    request.num_output_tokens, request.num_tokens = 60, 100
    said = kept._spans(request, "merged@2")
    assert said["tokens"] == [["merged@1", 0, 22], ["merged@2", 22, 60]]
    assert said["kv"] == [["merged@1", 0, 61], ["merged@2", 61, 99]]


def test_an_actor_that_takes_no_name_for_its_weights() -> None:
    """Its answers would all be of "default"."""
    with pytest.raises(PushRefused, match="does not offer update_weight_version"):
        drive(RayControl(SimpleNamespace(collective_rpc=None, pause_generation=None)).will_keep())


class Asked(threading.Thread):
    """A request to a server, and its answer."""

    def __init__(self, server: Server, tokens: int) -> None:
        super().__init__()
        self.server, self.tokens = server, tokens
        self.start()

    def run(self) -> None:
        sampling = {"temperature": 0, "max_tokens": self.tokens, "ignore_eos": True}
        body = json.dumps({"token_ids": PROMPT[:10], "sampling_params": sampling}).encode()
        url, kind = f"{self.server.url}/inference/v1/generate", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, kind), timeout=100) as response:
            self.answer = json.loads(response.read())

    def spans(self, policies: dict[str, nn.Module]) -> Any:
        """Wait for the answer, compare its tokens with those of the cache that it says it had, and return that."""
        self.join()
        spans, answer = weight_spans(self.answer), self.answer["choices"][0]["token_ids"]
        ids = [*PROMPT[:10], *answer]
        assert len(answer) == self.tokens
        assert replayed(policies, ids, spans.kv)[9:].argmax(-1).tolist() == answer
        return spans


def test_a_server_keeps_what_follows_and_what_is_pushed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, policies = models.with_lora(engines.qwen2, target_modules=engines.LINEARS), dict[str, nn.Module]()
    base, store = tmp_path / "base", tmp_path / "store"
    engines.save_base(model.get_base_model(), base)
    server = Server(base, tmp_path / "log", "--worker-extension-cls", "engines.Slower", load_format="auto")
    try:
        server.wait()
        publisher = Publisher(model, store)

        def publish() -> str:
            train(model, len(policies))
            name = publisher.publish().name
            policies[name] = copy.deepcopy(model).double().eval()
            return name

        first = publish()
        assert main(["follow", server.url, str(store), "--once", "--cache", "keep", "--base", str(base)]) == 0
        assert first in capsys.readouterr().out
        follower = Follower(server.url, store, base=base, cache="keep")
        follower.step()
        control = follower._loader._trainer.controls[0]
        control._server.post("collective_rpc", body={"method": "slow", "args": ["on"]})  # type: ignore[attr-defined]
        asked = Asked(server, 50)
        time.sleep(1.5)
        second = publish()
        assert follower.step() is not None
        new = Asked(server, 3)
        assert [one.version for one in new.spans(policies).kv] == [second]
        spans = asked.spans(policies)
        assert spans.mixed
        assert [one.version for one in spans.kv] == [one.version for one in spans.tokens] == [first, second]
        follower.close()
        # A trainer's push over HTTP, which reaches the engine's core by workers' calls alone.
        sync = VllmSync(model, server.url, cache="keep")
        asked = Asked(server, 50)
        time.sleep(1.5)
        train(model, 9)
        third = f"merged@{sync.push().version}"
        policies[third] = copy.deepcopy(model).double().eval()
        spans = asked.spans(policies)
        assert [one.version for one in spans.kv] == [second, third]
        # An older lora_merge where the engine runs says nothing of keeping.
        control = sync._trainer.controls[0]
        rpc = control.rpc

        async def older(op: str, **message: Any) -> list[dict[str, Any]]:
            return [{name: said for name, said in one.items() if name != "unkept"} for one in await rpc(op, **message)]

        monkeypatch.setattr(control, "rpc", older)
        with pytest.raises(PushRefused, match=r"runs a lora_merge that does not keep caches.*Push with cache='reset'"):
            sync.push()
        monkeypatch.undo()
        assert str(sync.states()[0]) == third
        sync.close()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, ""),
        ({"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")}, "KV connector"),
        ({"kv_events_config": KVEventsConfig(enable_kv_cache_events=True, publisher="null")}, "kv_events_config"),
        ({"runner": "pooling", "convert": "embed"}, "pooling engine"),
        ({"scheduler_cls": "somewhere.Scheduler"}, "scheduler_cls"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, ""),
    ],
)
def test_engines_that_cannot_keep(tmp_path: Path, options: dict[str, Any], word: str) -> None:
    """(vLLM's own configuration.)"""
    engines.save_base(engines.qwen2(), tmp_path / "base")
    config = EngineArgs(str(tmp_path / "base"), skip_tokenizer_init=True, **options).create_engine_config()
    found = kept.unkept(config, True)
    assert word in found
    assert bool(word) == bool(found)
    assert "0.32" in kept.unkept(config, False)
    if hasattr(config, "aux_output_config"):  # which wants a GPU to be asked for
        config.aux_output_config.enable_return_routed_experts = True
        assert bool(word) or "enable_return_routed_experts" in kept.unkept(config, True)
