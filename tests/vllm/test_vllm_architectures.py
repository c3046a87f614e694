"""The table of architectures is of its record, and the script says right where a push is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
from engines import ask, assert_answers, engine, train
from repository import ROOT

from lora_merge import VllmSync

SCRIPT = ROOT / "benchmarks" / "architectures.py"
sys.path.append(str(SCRIPT.parent))
from architectures import ARCHITECTURES  # noqa: E402
from families import build, save  # noqa: E402
from trials import Answers, adapted  # noqa: E402

no_leftovers = engines.no_leftovers


def python(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SCRIPT.parent)])}
    command = [sys.executable, *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("record", sorted((ROOT / "benchmarks" / "results").rglob("architectures-*.json")))
def test_the_table_is_of_the_record(record: Path) -> None:
    rows = json.loads(record.read_text())["rows"]
    assert rows
    show = "import json, sys, architectures as a; print(a.table([a.Row(**r) for r in json.load(sys.stdin)['rows']]))"
    made = python("-c", show, given=record.read_text())
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() in (ROOT / "docs" / "architectures.md").read_text()


def test_who_is_tried_on_a_gpu_alone_says_why() -> None:
    made = python("-c", "import architectures as a; print(a.alone(), all(x.why for x in a.ARCHITECTURES if not x.cpu))")
    assert made.returncode == 0, made.stderr
    told, _, all_say = made.stdout.strip().rpartition(" ")
    assert all_say == "True"
    assert told in (ROOT / "docs" / "architectures.md").read_text()


@pytest.mark.parametrize("said", [float("nan"), float("-inf")])
def test_answers_that_are_no_numbers(said: float) -> None:
    steps = [{7: SimpleNamespace(logprob=found)} for found in (-0.5, said)]
    output = SimpleNamespace(
        prompt_logprobs=None, prompt_token_ids=[1], outputs=[SimpleNamespace(token_ids=[7, 7], logprobs=steps)]
    )
    with pytest.raises(ValueError, match="no numbers"):
        Answers([output]).check()
    steps[1][7].logprob = -1.0
    Answers([output]).check()


@pytest.mark.parametrize("name", ["Olmo2", "GPT2LMHeadModel"])
def test_a_push_is_right(name: str, tmp_path: Path) -> None:
    """One of vLLM's Transformers backend, in another process; one whose weights lie the other way round."""
    record = tmp_path / "record.json"
    made = python(str(SCRIPT), "--only", name, "--json", str(record))
    assert made.returncode == 0, made.stdout + made.stderr
    (row,) = json.loads(record.read_text())["rows"]
    assert (row["vllm"], row["merged"]) == ("right", "right")
    assert row["error"] < 12e-6


def test_an_adapter_that_vllm_takes_apart_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    """GLM-4's gate and up are one weight in the checkpoint and two for vLLM's adapters: it broke off in the worker."""
    record = tmp_path / "record.json"
    python(str(SCRIPT), "--only", "Glm4", "--json", str(record))
    rows = {row["name"]: row for row in json.loads(record.read_text())["rows"]}
    assert rows["Glm4"]["merged"] == "right"
    assert rows["Glm4"]["adapter"].startswith("PushRefused: vLLM has no LoRA layer for model.layers.0.mlp.gate_up_proj")


def rotary(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Its kernel for CPUs takes the heads of queries `[tokens, heads, dim]` for tokens; PyTorch's code does not."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    patch.setattr(RotaryEmbedding, "forward_cpu", RotaryEmbedding.forward_native)


def apertus(model: Any, patch: pytest.MonkeyPatch) -> None:
    """xIELU's parameters are bfloat16 there."""
    for layer in model.model.layers:
        layer.mlp.act_fn.bfloat16()


def ernie(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Its router for CPUs adds no bias."""
    for layer in model.model.layers[1:]:
        layer.mlp.gate.moe_statics.e_score_correction_bias.data.zero_()


CAUSES = {"Apertus": apertus, "Ernie4_5_Moe": ernie, "Lfm2": rotary, "Lfm2-MoE": rotary}


@pytest.mark.parametrize("name", CAUSES)
def test_what_vllm_does_otherwise(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it answers are the trainer's, before a push and after two: no other difference hides behind it."""
    architecture = next(a for a in ARCHITECTURES if a.title == name)
    model = build(architecture)
    CAUSES[name](model, monkeypatch)
    save(model, tmp_path / "base")
    with engine(model, tmp_path / "base", load_format="auto") as llm:
        assert_answers(ask(llm), model)
        trained = adapted(model, architecture.bare)
        sync = VllmSync(trained, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(trained, step)
            sync.push(verify=True)
            assert_answers(ask(llm), trained)


def test_every_cause_is_known() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "architectures-cpu.json").read_text())["rows"]
    others = {row["name"] for row in rows if row["vllm"] != "right"}
    assert others == {a.title for a in ARCHITECTURES if a.own} == {*CAUSES, "Cohere, untied", "Gemma2, untied"}
