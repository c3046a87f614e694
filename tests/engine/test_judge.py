"""What an engine says against a stream, and what it can do without: names that are tied, parts that it lacks, sizes."""

from __future__ import annotations

from typing import Any

from lora_merge.engine.messages import ANOTHER_SIZE, DryRunAnswer
from lora_merge.engine.push.evaluation import evaluate_engine

TIES = {"lm_head.weight": "embed.weight"}


def worker(**said: Any) -> DryRunAnswer:
    nothing = {"refused": {}, "ignored": [], "absent": [], "missing": [], "partial": {}, "dtypes": {}}
    return DryRunAnswer.read(nothing | said)


def test_a_tied_name_that_the_engine_does_not_know_is_left_out() -> None:
    """Whether it refuses the name or passes over it, and whichever of the two it knows."""
    for said in (worker(refused={"lm_head.weight": "no such module"}), worker(ignored=["lm_head.weight"])):
        assert evaluate_engine([said], TIES) == ([], {"lm_head.weight"})
    assert evaluate_engine([worker(ignored=["embed.weight"])], TIES) == ([], {"embed.weight"})


def test_without_a_tie_it_is_surplus() -> None:
    assert evaluate_engine([worker(ignored=["lm_head.weight"])], {}) == (
        ["lm_head.weight is surplus: the engine has no place for it"],
        set(),
    )


def test_where_neither_name_is_taken_both_are_problems() -> None:
    found = evaluate_engine([worker(ignored=["lm_head.weight"], refused={"embed.weight": "no such module"})], TIES)
    assert not found.absent
    assert len(found.problems) == 2
    assert not evaluate_engine([worker(ignored=["lm_head.weight", "embed.weight"])], TIES).absent


def test_stages_of_a_pipeline_take_it_together() -> None:
    """The first has the embedding, the last perhaps the head: only what none of them takes is left out."""
    first, last = worker(ignored=["lm_head.weight"]), worker(ignored=["embed.weight"])
    assert evaluate_engine([first, last], TIES) == ([], set())
    headless = worker(refused={"lm_head.weight": "no such module"}, ignored=["embed.weight"])
    assert evaluate_engine([first, headless], TIES) == ([], {"lm_head.weight"})
    between = worker(ignored=["embed.weight", "lm_head.weight"])
    assert evaluate_engine([first, between, last], TIES) == ([], set())


def test_what_nothing_fills_is_a_problem_though_its_twin_is_taken() -> None:
    """The engine has a head of its own that is of another size."""
    why = {"lm_head.weight": f"{ANOTHER_SIZE}[8, 4] here and [9, 4] there"}
    found = evaluate_engine([worker(refused=why, missing=["lm_head.weight [9, 4]: 36 of 36 elements"])], TIES)
    assert found.problems == ["nothing would fill lm_head.weight [9, 4]: 36 of 36 elements"]


def test_one_worker_refuses_what_another_takes() -> None:
    found = evaluate_engine([worker(), worker(refused={"lm_head.weight": "broken"})], TIES)
    assert found == (["lm_head.weight is refused: broken"], set())


def test_parts_that_the_engine_was_started_without() -> None:
    said = worker(ignored=["tower.weight", "stray.weight"], absent=["tower.weight"])
    assert evaluate_engine([said], {}) == (
        ["stray.weight is surplus: the engine has no place for it"],
        {"tower.weight"},
    )
    assert evaluate_engine([said, worker()], {}) == ([], set())


def test_another_size_is_one_line_and_not_what_follows_from_it() -> None:
    names = ["embed.weight", "q.weight", "k.weight"]
    refused = dict.fromkeys(names, f"{ANOTHER_SIZE}[8, 4] here and [8, 6] there") | {"odd.weight": "KeyError: odd"}
    said = worker(refused=refused, missing=["embed.weight [8, 6]: 48 of 48 elements"])
    assert evaluate_engine([said, said], {}).problems == [
        "the model is of another size: embed.weight is [8, 4] here and [8, 6] there (and 2 more)",
        "odd.weight is refused: KeyError: odd",
    ]
    alone = evaluate_engine(
        [worker(refused={"q.weight": f"{ANOTHER_SIZE}[8, 4] here and qkv.weight [24, 4] there"})], {}
    )
    assert alone.problems == ["q.weight is refused: it is [8, 4] here and qkv.weight [24, 4] there"]
