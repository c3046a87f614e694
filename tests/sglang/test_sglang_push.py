"""Pushes into one real SGLang engine: what arrives, what is refused, requests in flight, who merges."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import models
import policies
import pytest
import sglang_engines
import torch
from sglang_engines import ask, assert_answers, do, engine, pushed_in_flight, spans
from sglang_faults import BUCKET, FLIGHTS, PAUSES, fail_at_the_end, fail_in_a_call, fail_in_flight
from torch import nn

import lora_merge.verify
from lora_merge import InvalidInput, MergedWeights, PushFailed, PushRefused, SglangSync
from lora_merge.stream.bucket_writer import BucketWriter

DENSE = {"target_modules": policies.LINEARS}
no_leftovers = sglang_engines.no_leftovers


def policy(seed: int = 0) -> Any:
    return models.with_lora(policies.qwen2, seed=seed, **DENSE)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with engine(policy(), tmp_path_factory.mktemp("sglang") / "base") as one:
        yield one


@pytest.fixture(autouse=True)
def mended(started: Any) -> Iterator[None]:
    """The next test finds the engine well."""
    yield
    sglang_engines.mend(started, policy())


def test_the_engine_answers_as_the_trainer_does(started: Any) -> None:
    model = policy()
    sync = SglangSync(model, started)
    report = sync.push(verify=True)
    assert report.transports == ("shm",)
    assert report.coverage == 1
    assert [found.complete for found in lora_merge.verify.coverage(started)] == [True]
    assert sync.states()[0].kind == "merged"
    assert_answers(ask(started), model)
    for _ in range(2):
        policies.train(model)
        report = sync.push()
        assert not report.differs
        outputs = sync.generate(
            input_ids=policies.prompts(), sampling_params=sglang_engines.GREEDY, return_logprob=True
        )
        assert_answers(outputs, model)
        assert {output["meta_info"]["weight_version"] for output in outputs} == {f"merged@{report.version}"}
    model.config.rms_norm_eps = 1e-5
    with pytest.warns(UserWarning, match=r"engine 0 computes otherwise.*rms_norm_eps 1e-05 \(engine: 1e-06\)"):
        assert sync.push().differs
    sync.close()
    with pytest.raises(InvalidInput, match="closed"):
        sync.push()


def test_nothing_cached_is_used_again(started: Any) -> None:
    """The prompts of the last answers are in the radix cache."""
    model = policy()
    sync = SglangSync(model, started)
    for seed in range(3):
        sync.push()
        assert_answers(ask(started), model)
        policies.train(model, seed, size=0.2)
    sync.close()


def test_schedulers_read_the_trainer_s_weights_where_they_lie(started: Any) -> None:
    """Where these are in shared memory, and stay; what has moved since is not read."""
    model = policy()
    sync = SglangSync(model, started, bucket_bytes=BUCKET)
    for step, shared in enumerate([True, None, None, False, None, True, None]):
        for parameter in model.parameters() if shared is not None else ():
            moved = parameter.detach().clone()
            parameter.data = moved.share_memory_() if shared else moved
        report = sync.push(verify=step == 2)
        assert ("pull" in report.transports) == (step in (1, 2, 6)), (step, report)
        assert report.coverage == 1
        assert_answers(ask(started), model)
        policies.train(model, step)
    sync.close()


def test_trainable_tokens(started: Any) -> None:
    """Rows of a tied embedding, some of them in the prompts: one tensor for the engine, whoever merges."""
    rows = {"embed_tokens": list(range(0, 256, 3))}
    model = models.with_lora(policies.qwen2, target_modules=["q_proj"], trainable_token_indices=rows)
    for merge in ("trainer", "engine"):
        sync = SglangSync(model, started, merge=merge, bucket_bytes=BUCKET)
        for step in range(2):
            policies.train(model, step)
            report = sync.push(verify=step == 1)
            assert (report.merge, report.coverage) == (merge, 1)
            assert_answers(ask(started), model)
        sync.close()


def wrong_shape(model: Any) -> None:
    model.model.layers[1].self_attn.q_proj = nn.Linear(128, 64)


def missing_k(model: Any) -> None:
    del model.model.layers[1].self_attn.k_proj


def unknown(model: Any) -> None:
    model.model.layers[0].mlp.extra = nn.Linear(8, 8)


def another_depth(model: Any) -> None:
    del model.model.layers[1]


MISFITS = {
    wrong_shape: r"layers\.1\.self_attn\.q_proj",
    missing_k: r"nothing would fill model\.layers\.1\.self_attn\.qkv_proj",
    unknown: r"mlp\.extra\.\w+ is surplus|mlp\.extra",
    another_depth: r"nothing would fill model\.layers\.1\.",
}


@pytest.mark.parametrize("spoil", MISFITS)
def test_what_does_not_fit_is_refused_and_changes_nothing(started: Any, spoil: Any) -> None:
    """SGLang itself ends with the first, serves the second, and passes over the third."""
    good = policy()
    sync = SglangSync(good, started)
    sync.push()
    held, bad = sync.states(), policies.qwen2()
    spoil(bad)
    with pytest.raises(PushRefused, match=MISFITS[spoil]):
        SglangSync(bad, started).push()
    assert sync.states() == held
    assert_answers(ask(started), good)
    sync.close()


FAULTS = [
    "hello",
    "dry_run",
    "connect",
    "begin_full",
    "receive",
    "bucket",
    "finish",
    "commit",
    "flush_cache",
    "checksums",
]
BEFORE = {"hello", "dry_run", "connect"}
"""Phases in which nothing has been written yet."""


@pytest.mark.parametrize("where", FAULTS)
def test_a_scheduler_fails_in_each_phase(started: Any, where: str) -> None:
    """It lives on; the engine is what it was, or dirty and still, and the next push heals it."""
    model = policy()
    sync = SglangSync(model, started, bucket_bytes=BUCKET)
    sync.push()
    process, before = do(started, "process"), copy.deepcopy(model)
    policies.train(model)
    if where in ("dry_run", "connect"):  # which are known by now
        sync.close()
        sync = SglangSync(model, started, bucket_bytes=BUCKET * 2)
    do(started, "fail", where, [0])
    with pytest.raises(PushRefused if where in BEFORE else PushFailed, match="injected"):
        sync.push(verify=True)
    do(started, "mend")
    (state,) = sync.states()
    if where in BEFORE:
        assert state.kind == "merged"
        assert_answers(ask(started), before)
    else:
        assert state.kind == "dirty"
        assert started.tokenizer_manager.is_pause
        with pytest.raises(PushRefused, match="push"):
            sync.generate(input_ids=policies.prompts(), sampling_params=sglang_engines.GREEDY)
    sync.push(verify=True)
    assert not started.tokenizer_manager.is_pause
    assert_answers(ask(started), model)
    assert do(started, "process") == process
    sync.close()


@pytest.mark.parametrize("at", [0, 3])
def test_the_trainer_fails_in_the_middle(started: Any, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    sync = SglangSync(model, started, bucket_bytes=BUCKET)
    sync.push()
    policies.train(model)
    fill = BucketWriter.fill

    def breaks(self: BucketWriter, index: int, *args: Any) -> None:
        if index == at:
            raise MemoryError("injected")
        fill(self, index, *args)

    with monkeypatch.context() as patched:
        patched.setattr(BucketWriter, "fill", breaks)
        with pytest.raises(PushFailed, match="injected"):
            sync.push()
    assert sync.states()[0].kind == "dirty"
    sync.push()
    assert_answers(ask(started), model)
    sync.close()


def push_and_wait(sync: SglangSync) -> None:
    sync.push()
    time.sleep(5)  # the push was through before the signal came


def test_ctrl_c_in_the_middle(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal while buckets are filled, and one while the trainer waits for the scheduler."""
    model = policy()
    sync = SglangSync(model, started, bucket_bytes=BUCKET)
    sync.push()
    fill = BucketWriter.fill
    for number in (0, 2, len(sync._weights.bucket_writer().table) - 1):

        def interrupted(self: BucketWriter, index: int, *args: Any, number: int = number) -> None:
            fill(self, index, *args)
            if index == number:
                threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGINT)).start()
                time.sleep(0.01 if number != 2 else 0)

        with monkeypatch.context() as patched:
            patched.setattr(BucketWriter, "fill", interrupted)
            with pytest.raises(KeyboardInterrupt):
                push_and_wait(sync)
        assert sync.states()[0].kind in ("dirty", "merged")
        policies.train(model)
        sync.push()
        assert_answers(ask(started), model)
    sync.close()


def own_update(started: Any, tensors: Any, **options: Any) -> None:
    """An update of SGLang's own; from 0.5.21 on it has a beginning and an end."""
    later = hasattr(started, "begin_weight_update")
    if later:
        started.begin_weight_update()
        with pytest.raises(PushRefused, match="end_weight_update"):
            SglangSync(policy(), started).push()
    started.update_weights_from_tensor(tensors, **options)
    if later:
        started.end_weight_update()


@pytest.mark.parametrize("nbytes", [1 << 30, 1 << 17], ids=["one bucket", "several"])
def test_a_stream_as_sglangs_own_buckets(started: Any, nbytes: int) -> None:
    """How verl and slime send what `MergedWeights` yields."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    model, together = policy(), list[tuple[str, torch.Tensor]]()
    whole = [(name, tensor.clone()) for name, tensor in MergedWeights(model)]
    for number, (name, tensor) in enumerate(whole):
        together.append((name, tensor))
        last = number + 1 == len(whole)
        if last or sum(t.nbytes for _, t in together) > nbytes:
            bucket = FlattenedTensorBucket(named_tensors=together)
            told = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
            sent = [MultiprocessingSerializer.serialize(told)]
            own_update(started, sent, load_format="flattened_bucket", flush_cache=last)
            together = []
    assert_answers(ask(started), model)
    other = policy(1)
    sync = SglangSync(other, started)
    sync.push()
    assert_answers(ask(started), other)
    sync.close()


def test_sglangs_own_update_is_noticed(started: Any) -> None:
    model, other = policy(), policies.llama()
    sync = SglangSync(model, started)
    sync.push()
    name = "model.layers.0.mlp.down_proj.weight"
    own_update(started, [(name, other.state_dict()[name])])
    assert sync.states()[0].kind == "dirty"
    with pytest.raises(PushRefused, match="changed by something else"):
        sync.check()
    sync.push()
    assert_answers(ask(started), model)
    sync.close()


def test_who_pushed_last_is_known(started: Any) -> None:
    model = policy()
    sync, other = SglangSync(model, started), SglangSync(policy(1), started)
    sync.push()
    assert other.states() == sync.states()
    other.push()
    with pytest.raises(PushRefused, match="of another trainer"):
        sync.check()
    sync.push()
    assert_answers(ask(started), model)
    sync.close()
    other.close()


def test_memory_that_was_released(started: Any) -> None:
    """Weights are known to be gone, and a push maps them first. (Without the memory saver's library nothing goes.)"""
    model = policy()
    sync = SglangSync(model, started)
    sync.push()
    started.release_memory_occupation()
    policies.train(model)
    sync.push()
    assert_answers(ask(started), model)
    started.release_memory_occupation(["weights"])
    bad = policies.qwen2()
    unknown(bad)
    with pytest.raises(PushRefused):
        SglangSync(bad, started).push()
    assert sync.states()[0].kind == "merged"
    started.resume_memory_occupation(["weights"])  # which were gone again: else SGLang would end
    assert_answers(ask(started), model)
    sync.close()


MAPS = {"the weights": ("map_memory", 0), "the rest": ("map_memory", 1), "unmap": ("unmap_memory", 0)}


@pytest.mark.parametrize("what", MAPS)
def test_a_scheduler_fails_as_memory_is_mapped(started: Any, what: str) -> None:
    """The weights, before a push; the KV cache, after it; the weights, which a refused push unmaps again. The next push
    finds what is mapped and what is not, and all is mapped then."""
    model, bad = policy(), policies.qwen2()
    unknown(bad)
    sync = SglangSync(model, started)
    sync.push()
    policies.train(model)
    started.release_memory_occupation()
    every, process = do(started, "unmapped"), do(started, "process")
    assert every == ["cuda_graph", "kv_cache", "weights"]
    do(started, "fail", *MAPS[what][:1], [0], MAPS[what][1])
    if what == "unmap":
        with pytest.raises(PushRefused, match=MISFITS[unknown]):
            SglangSync(bad, started).push()
    elif what == "the weights":
        with pytest.raises(PushRefused, match="injected into map"):
            sync.push()
    else:
        with pytest.raises(PushFailed, match=r"holds merged@\d+, but going on with it failed: .*injected into map"):
            sync.push()
    do(started, "mend")
    assert do(started, "unmapped") == (every if what == "the weights" else every[:2])
    assert started.tokenizer_manager.is_pause == (what == "the rest"), "without a KV cache it answers nothing"
    assert sync.states()[0].kind == "merged"  # (without the memory saver's library)
    sync.push(verify=True)
    assert do(started, "unmapped") == []
    assert not started.tokenizer_manager.is_pause
    assert_answers(ask(started), model)
    assert do(started, "process") == process
    sync.close()


# Who merges


def test_the_engine_merges(started: Any) -> None:
    """The base once, then adapters alone; the bits are those of a merge in the trainer."""
    model = policy()
    by_engine, by_trainer = SglangSync(model, started, merge="engine"), SglangSync(model, started, merge="trainer")
    report = by_engine.push(verify=True)
    assert report.base_sent
    assert report.merge == "engine"
    assert_answers(ask(started), model)
    for seed in range(3):
        policies.train(model, seed)
        report = by_engine.push()
        assert not report.base_sent
        assert_answers(ask(started), model)
    merged = do(started, "digest")
    by_trainer.push()
    assert do(started, "digest") == merged
    assert by_engine.push().base_sent, "the trainer has overwritten the base"
    assert do(started, "digest") == merged
    by_engine.close()
    by_trainer.close()


@pytest.mark.parametrize("where", ["receive_update", "merge", "products"])
def test_a_scheduler_fails_as_it_merges(started: Any, where: str) -> None:
    model = policy()
    sync = SglangSync(model, started, merge="engine")
    sync.push()
    before = copy.deepcopy(model)
    policies.train(model)
    do(started, "fail", where, [0])
    with pytest.raises((PushFailed, PushRefused), match="injected"):
        sync.push()
    do(started, "mend")
    if where == "receive_update":
        assert_answers(ask(started), before)
    sync.push()
    assert_answers(ask(started), model)
    sync.close()


# Requests in flight


@pytest.mark.parametrize("pause", PAUSES)
def test_requests_in_flight(started: Any, pause: str) -> None:
    model = policy()
    sync = SglangSync(model, started, pause=pause)
    before, old = sync.push().version, copy.deepcopy(model)
    policies.train(model, size=0.2)
    tokens = 60

    def refused() -> None:
        with pytest.raises(InvalidInput, match="apush"):
            sync.push()

    outputs = pushed_in_flight(started, sync, tokens, refused)
    for prompt, output in zip(policies.prompts(), outputs, strict=False):
        assert output["meta_info"]["weight_version"] == f"merged@{before + (pause == 'keep')}", "that at its end"
        if pause == "abort":
            assert output["meta_info"]["finish_reason"]["type"] == "abort"
            continue
        assert len(output["output_ids"]) == tokens
        mine = spans(output, prompt, old, model)
        assert mine == tokens if pause == "wait" else mine < tokens
    assert_answers(ask(started), model)
    sync.close()


@pytest.mark.parametrize(("where", "pause"), FLIGHTS)
def test_a_scheduler_fails_with_requests_in_flight(started: Any, where: str, pause: str) -> None:
    fail_in_flight(started, policy(), where, 0, pause)


FAILING_CALLS = [("pause", late, pause) for late in (False, True) for pause in PAUSES]
FAILING_CALLS += [("label", False, pause) for pause in PAUSES] + [("label", True, "keep")]
FAILING_CALLS += [("resume", False, pause) for pause in PAUSES] + [("resume", True, "keep")]


@pytest.mark.parametrize(("where", "late", "pause"), FAILING_CALLS)
def test_a_call_of_sglangs_own_fails(started: Any, where: str, late: bool, pause: str) -> None:
    fail_in_a_call(started, policy(), where, late, pause)


@pytest.mark.parametrize("pause", PAUSES)
def test_a_scheduler_fails_at_the_end(started: Any, pause: str) -> None:
    fail_at_the_end(started, policy(), 0, pause)


def test_a_users_own_pause_stays(started: Any) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    model, manager = policy(), started.tokenizer_manager
    started.loop.run_until_complete(manager.pause_generation(PauseGenerationReqInput(mode="in_place")))
    sync = SglangSync(model, started)
    sync.push()
    assert manager.is_pause
    started.loop.run_until_complete(manager.continue_generation(ContinueGenerationReqInput()))
    assert_answers(ask(started), model)
    sync.close()
