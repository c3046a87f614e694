"""What engines say of a stream is judged by a pure function; several of them are asked side by side, and once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from workers import hello, worker

from lora_merge import InvalidInput, MergedWeights, PushFailed, PushRefused
from lora_merge.engine.configs import computing, differences
from lora_merge.engine.control.base import Control
from lora_merge.engine.control.calls import drive, side_by_side, together, while_alive
from lora_merge.engine.messages import NO_PART, TIED, DryRunAnswer, SharedExperts
from lora_merge.engine.push.channels import Trainer
from lora_merge.engine.push.compatibility import Answers, CompatibilityCheck
from lora_merge.engine.push.evaluation import evaluate
from lora_merge.engine.push.introduction import hello as introduce
from lora_merge.engine.push.replica import (
    Replica,
    SyncReport,
    check_apart,
    check_whole,
    engines_of,
    fail_together,
    failure,
)
from lora_merge.engine.state import State, change
from lora_merge.names import renamed
from lora_merge.serve import unload_adapter
from lora_merge.shards.ranks import Ranks
from lora_merge.stream.bucket_writer import BucketWriter
from lora_merge.stream.buckets import Meta

BF16, FP32 = torch.bfloat16, torch.float32
STREAM = {name: Meta(name, BF16, (2, 2)) for name in ("a", "b", "c")}


def found(dtype: str = "bfloat16", taken: str = "abc", **more: Any) -> DryRunAnswer:
    answer: dict[str, Any] = {
        "refused": {},
        "ignored": [name for name in STREAM if name not in taken],
        "absent": [],
        "missing": [],
        "partial": {},
        "dtypes": dict.fromkeys(taken, dtype),
    }
    return DryRunAnswer.read(answer | more)


CASES: dict[str, tuple[Mapping[str, Sequence[DryRunAnswer]], list[str], set[str], set[torch.dtype]]] = {
    "all fits": ({"engine 0": [found(), found()]}, [], set(), {BF16}),
    "engines round to their dtype": ({"engine 0": [found("float32")]}, [], set(), {FP32}),
    "stages share a model": ({"engine 0": [found(taken="ab"), found(taken="c")]}, [], set(), {BF16}),
    "refused": ({"engine 3": [found(refused={"a": "too wide"})]}, ["engine 3: a is refused: too wide"], set(), {BF16}),
    "said by both workers": ({"engine 0": [found(missing=["x"])] * 2}, ["engine 0: nothing would fill"], set(), {BF16}),
    "halves": ({"engine 0": [found(partial={"a": 2})] * 2}, [], set(), {BF16}),
    "halves of a smaller one": (
        {"engine 0": [found(partial={"a": 1})] * 2}, ["engine 0: the model is of another size: "], set(), {BF16},
    ),
    "a stage and two halves": ({"engine 0": [found(taken="bc"), *[found(partial={"a": 2})] * 2]}, [], set(), {BF16}),
    "one that takes all": ({"engine 0": [found(), found(partial={"a": 1})]}, [], set(), {BF16}),
    "surplus": ({"engine 0": [found(taken="ab")] * 2}, ["engine 0: c is surplus"], set(), {BF16}),
    "no such part in any": ({"engine 0": [found(taken="ab", absent=["c"])]}, [], {"c"}, {BF16}),
    "no such part in one": (
        {"engine 0": [found(taken="ab", absent=["c"])], "engine 1": [found()]}, [], set(), {BF16},
    ),
    "two dtypes": (
        {"engine 0": [found()], "engine 1": [found("float32")]},
        ["engine 0 in torch.bfloat16, engine 1 in torch.float32 hold a (and 2 more)"],
        set(),
        set(),
    ),
}  # fmt: skip


def test_names_of_another_class_are_one_line() -> None:
    """vLLM lists all parameters of its own for each of them."""
    unknown = dict.fromkeys("abc", f"{NO_PART}'model' in Gemma3ForConditionalGeneration")
    answer = found(taken="", refused=unknown, ignored=[], missing=["x", "y"], serves="Gemma3ForConditionalGeneration")
    (problem,), choice = evaluate(STREAM, {"engine 0": [answer]}, {})
    assert problem.startswith("engine 0: a (and 2 more) is no name in what the engine serves (Gemma3ForConditionalGen")
    assert "Load Gemma3ForConditionalGeneration with transformers" in problem
    assert choice.renames == ()
    one = found(refused={"c": unknown["c"]}, taken="ab", ignored=[], serves="Gemma3ForCausalLM")
    problems = evaluate(STREAM, {"engine 0": [one]}, {})[0]
    assert problems == ["engine 0: c is refused: Gemma3ForCausalLM has nothing of that name"]
    headless = found(refused={"lm_head.weight": NO_PART}, taken="abc", ignored=[], serves="Gemma3nForCausalLM")
    (problem,) = evaluate(STREAM, {"engine 0": [headless]}, {})[0]
    assert "lm_head.weight is refused: Gemma3nForCausalLM has nothing of that name: it takes the embedding" in problem
    assert "ensure_weight_tying=True" in problem
    renames = (("model.", "model.language_model."),)
    answer = found(taken="", refused=unknown, renames=[["model.", "model.language_model."]])
    assert evaluate(STREAM, {"engine 0": [answer], "engine 1": [answer]}, {})[1].renames == renames
    assert evaluate(STREAM, {"engine 0": [answer], "engine 1": [found()]}, {})[1].renames == ()
    assert renamed("model.layers.0.weight", renames) == "model.language_model.layers.0.weight"
    assert renamed("lm_head.weight", renames) == "lm_head.weight"
    assert renamed("lm_head.weight", (("", "thinker."),)) == "thinker.lm_head.weight"


def test_what_stays_is_told_of_each_stream() -> None:
    """Also where another stream was asked about meanwhile, and engines that hold nothing more."""
    model = torch.nn.Linear(2, 2, bias=False)
    merged, base = MergedWeights(model), MergedWeights(model)
    wide, narrow = (found(taken="", ignored=[], kept=kept) for kept in (["tower.weight"], []))

    class Asked(CompatibilityCheck):
        async def _ask(self, weights: MergedWeights, *_: Any) -> tuple[BucketWriter, Answers]:
            self._results = {"wide": wide, "narrow": narrow}
            writer = weights.bucket_writer()
            return writer, Answers(writer.digest, (("engine 0", ("wide" if weights is merged else "narrow",)),))

    check = Asked(Trainer([], Ranks(None)))
    assert "(1 left out, which the engine has no part for: a)" in str(SyncReport(1, "merged", left_out=("a",)))
    assert "(2 parameters of the engine stay as they are: a to b)" in str(SyncReport(1, "merged", kept=("a", "b")))
    for weights, kept in ((merged, ("tower.weight",)), (base, ()), (merged, ("tower.weight",))):
        drive(check(weights, []))
        assert check.kept == kept


def test_what_makes_tied_weights_differ() -> None:
    """Adapters, or a model that holds them apart: the advice is not the same."""
    tied = found(refused={"a": f"{TIED}b"})
    (problem,), _ = evaluate(STREAM, {"engine 0": [tied]}, {}, {"b"})
    assert "but here adapters change the two apart" in problem
    (problem,), _ = evaluate(STREAM, {"engine 0": [tied]}, {}, {"c"})
    assert "here they are two weights" in problem
    assert "adapter" not in problem


def test_many_lines_are_counted() -> None:
    missing = [f"x{number}" for number in range(40)]
    problems, _ = evaluate(STREAM, {"engine 0": [found(missing=missing)]}, {})
    assert len(problems) == 9
    assert problems[-1] == "engine 0: and 32 more like the last"


@pytest.mark.parametrize("case", CASES)
def test_judge(case: str) -> None:
    engines, wanted, left_out, dtypes = CASES[case]
    problems, choice = evaluate(STREAM, engines, {})
    assert [problem.startswith(start) for problem, start in zip(problems, wanted, strict=True)] == [True] * len(wanted)
    if not wanted:
        assert choice.left_out == left_out
        assert set(choice.dtypes.values()) == dtypes


def replica(index: int, ranks: Sequence[int], world: int, control: Control | None = None) -> Replica:
    return Replica(index, control, [worker(rank=r, world=world, launcher=world != len(ranks)) for r in ranks])


def test_handles_of_one_engine_belong_together() -> None:
    whole = [replica(i, (0, 1), 2) for i in range(2)]
    pieces = [replica(2 + rank, (rank,), 2) for rank in range(4)]
    assert [[r.index for r in engine] for engine in engines_of([*whole, *pieces])] == [[0], [1], [2, 3], [4, 5]]
    check_whole([*whole, *pieces])
    with pytest.raises(PushRefused, match=r"engine 4 has 2 workers.* ranks 3 are missing"):
        check_whole(pieces[:3])
    pieces[3].error = "injected"
    fail_together(pieces)
    assert [r.error for r in pieces] == ["", "", "injected", "injected"]


def sharing(index: int, name: str, engines: int) -> Replica:
    """A data-parallel engine that computes its experts together with others."""
    one = replica(index, (0,), 1)
    one.workers[0].shares = SharedExperts(name, engines)
    return one


def test_data_parallel_engines_that_share_experts_fail_together() -> None:
    """One of two that went on with old weights sent its tokens to the other one's half-written experts."""
    engines = [sharing(0, "a", 2), sharing(1, "b", 2), sharing(2, "a", 2), sharing(3, "b", 2), replica(4, (0,), 1)]
    assert [[r.index for r in engine] for engine in engines_of(engines)] == [[0, 2], [1, 3], [4]]
    check_whole(engines)
    with pytest.raises(PushRefused, match=r"engine 1 computes its experts together with 1 other.* and 1 of these"):
        check_whole(engines[:3])
    engines[2].error, engines[2].begun, engines[4].error = "injected", True, "its own"
    fail_together(engines)
    assert [(r.error, r.begun) for r in engines] == [
        ("injected", True), ("", False), ("injected", True), ("", False), ("its own", False)
    ]  # fmt: skip
    told = str(failure(engines))
    assert "engine 0 is dirty: injected; engine 2 is dirty: injected; engine 4 holds what it held before" in told


def test_failures_say_what_each_engine_holds() -> None:
    replicas = [replica(i, (0,), 1) for i in range(3)]
    replicas[0].error = replicas[1].error = "injected"
    replicas[0].begun = True
    error = failure(replicas)
    assert isinstance(error, PushFailed)
    assert "engine 0 is dirty: injected; engine 1 holds what it held before: injected; engine 2 is valid" in str(error)
    assert isinstance(failure(replicas[1:2]), PushRefused)
    replicas[0].resumed = True
    told = str(failure(replicas))
    assert "engine 2 is valid; engine 0 holds what was pushed, but: injected" in told


def test_of_an_engine_that_has_died_nothing_is_claimed() -> None:
    replicas = [replica(i, (0,), 1) for i in range(3)]
    for one, begun in zip(replicas, (True, False), strict=False):
        one.error, one.begun = "EngineGone: process 7 has died", begun
    error = failure(replicas)
    assert isinstance(error, PushFailed)
    assert str(error) == (
        "engine 0 does not answer any more, and what it holds is not known: EngineGone: process 7 has died; engine 1 "
        "does not answer any more, and whether it goes on is not known: EngineGone: process 7 has died; engine 2 is "
        "valid. Start an engine that has died anew, and push again"
    )


def test_one_engine_under_two_handles() -> None:
    replicas = [replica(i, (0,), 1) for i in range(3)]
    for one, name in zip(replicas, "aba", strict=True):
        one.workers[0].name = name
    check_apart(replicas[:2])
    with pytest.raises(PushRefused, match=r"engine 2 is engine 0 under another handle \(process 7 on here\)"):
        check_apart(replicas)


def test_what_a_worker_does_not_say_is_told_by_name() -> None:
    """An older lora_merge runs with the engine, or a newer one."""
    assert worker(newer="ignored", state=State("merged", 3).to_json() | {"newer": 1}).state == State("merged", 3)

    class Older(Control):
        async def rpc(self, op: str, **message: Any) -> list[dict[str, Any]]:
            older = hello(rank=1)
            del older["served"]
            return [hello(), older]

    match = r"engine 0: worker 1 does not say 'served': the lora_merge where the engine runs is another one"
    with pytest.raises(PushRefused, match=match):
        drive(introduce(Trainer([Older(object())], Ranks())))


def test_a_kind_of_engine_that_is_new_here_loads_nothing_from_folders() -> None:
    class Newer(Control):
        name = "Newer"

    with pytest.raises(InvalidInput, match=r"one of vLLM's, got one of Newer's, whose workers merge no adapter"):
        unload_adapter(Newer(object()))


class Slow(Control):
    """A handle whose calls take half a second."""

    def __init__(self) -> None:
        super().__init__(object())

    async def resume(self) -> None:
        time.sleep(0.5)


class SlowAsync(Slow):
    suspends = True

    async def resume(self) -> None:
        await asyncio.sleep(0.5)


@pytest.mark.parametrize("kinds", [[Slow] * 8, [SlowAsync] * 8, [Slow, SlowAsync] * 4])
def test_replicas_are_called_side_by_side(kinds: list[type[Slow]]) -> None:
    controls = [kind() for kind in kinds]
    trainer = Trainer(controls, Ranks())
    replicas = [replica(index, (0,), 1, control) for index, control in enumerate(controls)]

    async def step(one: Replica) -> None:
        await one.handle.resume()
        if one.index == 3:
            raise RuntimeError("injected")

    async def steps() -> None:
        await trainer.each(replicas, step)

    begin = time.monotonic()
    drive(steps()) if Slow is kinds[0] is kinds[1] else asyncio.run(steps())
    assert time.monotonic() - begin < 1, "one after the other they take four seconds"
    assert [r.error for r in replicas] == ["RuntimeError: injected" if r.index == 3 else "" for r in replicas]


def test_errors_of_several_handles_are_their_own() -> None:
    async def step(number: int) -> None:
        if number % 2:
            raise ValueError(number)

    errors = drive(side_by_side([Slow()] * 4, step, range(4)))
    assert [str(error) for error in errors] == ["None", "1", "None", "3"]


def test_what_an_engine_holds_changes_along_one_table() -> None:
    merged = State("merged", 3)
    dirty = change(merged, "begin", reason="a push")
    assert (dirty.kind, dirty.version, dirty.reason) == ("dirty", 3, "a push")
    assert change(dirty, "end", brought=State("base", 4, "f")) == State("base", 4, "f")
    adapter = State("adapter", 5, "f", trainer="t")
    assert change(adapter, "evict") == State("base", 5, "f", trainer="t")
    for held, event in ((merged, "evict"), (merged, "end"), (State(), "overwrite"), (dirty, "overwrite")):
        with pytest.raises(RuntimeError, match="cannot happen"):
            change(held, event, brought=merged)


class Blocking:
    """A control plane whose calls block."""

    suspends = False


@pytest.mark.parametrize("when", ["as calls go out", "in the work"])
def test_an_interrupt_does_not_wait_for_calls_that_wait_for_us(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers wait for buckets as long as the trainer lives, and leaving the threads waits for them."""
    given_up = threading.Event()

    async def receives() -> None:
        assert given_up.wait(30), "nobody told the workers"

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def work() -> None:
        if when == "in the work":
            interrupt()

    if when != "in the work":
        monkeypatch.setattr("lora_merge.engine.control.calls.time.sleep", interrupt)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        drive(together([Blocking()], [receives], work, give_up=given_up.set))
    assert given_up.is_set()
    assert time.monotonic() - began < 10


def test_a_call_that_is_interrupted_comes_before_the_next_one() -> None:
    """Or the end of a push would be heard before its beginning."""
    done: list[str] = []

    def slow() -> None:
        time.sleep(0.5)
        done.append("begin")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lora_merge.engine.control.calls.Liveness.__call__", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            while_alive(slow, [])
    while_alive(lambda: done.append("end"), [])
    assert done == ["begin", "end"]


def test_settings_in_which_models_of_one_shape_differ() -> None:
    from transformers import DeepseekV3Config, Qwen2Config

    ours = computing(Qwen2Config())
    assert not differences(ours, computing(Qwen2Config(vocab_size=7, max_position_embeddings=99)))
    other = Qwen2Config(
        num_attention_heads=16, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    )
    said = 'num_attention_heads 32 (engine: 16), rope_parameters.rope_type "default" (engine: "linear")'
    assert differences(ours, computing(other)) == said
    other.original_num_attention_heads = 12  # as SGLang notes where it has added some
    assert "heads" not in differences(ours, computing(other))
    for off in (None, 0):
        windowed = Qwen2Config()
        windowed.sliding_window = off
        assert not differences(ours, computing(windowed))
    renamed = DeepseekV3Config()
    renamed.rope_parameters = renamed.rope_parameters | {"rope_type": "deepseek_yarn"}  # as vLLM does, in place
    assert not differences(computing(DeepseekV3Config()), computing(renamed))
    assert computing(None) == {}
