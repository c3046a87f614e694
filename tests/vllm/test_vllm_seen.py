"""Engines that see images: six families of `benchmarks/architectures.py`, and a language model that is pushed into an
engine with a tower. They need torchvision, which `make test-vllm` has in a folder of its own."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ask, assert_answers, engine, no_leftovers, train  # noqa: F401
from peft import LoraConfig, get_peft_model
from repository import ROOT
from torch import nn
from vllm import LLM

from lora_merge import PushRefused, VllmSync
from lora_merge.verify import coverage

pytest.importorskip("torchvision")
sys.path.append(str(ROOT / "benchmarks"))
from families import build, published
from families_seen import SEEN

FAMILIES = ("Qwen2.5-VL", "Qwen3-VL-MoE", "Qwen2.5-Omni, with", "Gemma-3", "LLaVA-OneVision", "Qwen3.5, text")
LINEARS = ["q_proj", "v_proj", "o_proj", "down_proj"]


def test_six_families(tmp_path: Path) -> None:
    """Text and an image, adapters on the tower too; one with linear attention, beside a fresh engine."""
    record = tmp_path / "record.json"
    script = ROOT / "benchmarks" / "architectures.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script), "--merged", "--only", *FAMILIES, "--json", str(record)]
    made = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert made.returncode == 0, made.stdout + made.stderr
    rows = {row["name"]: row for row in json.loads(record.read_text())["rows"]}
    assert len(rows) == len(FAMILIES)
    for row in rows.values():
        right = "as a fresh engine" if row["name"] == "Qwen3.5, text" else "right"
        assert (row["vllm"], row["merged"]) == ("right", right), row
        # Of Gemma-3's images vLLM says something else on a CPU, before any push.
        seen = "as a fresh engine" if row["name"] == "Gemma-3" else "right"
        assert row["image"] == (seen if row["kind"] == "image" else ""), row


def adapted(model: nn.Module, targets: Any) -> Any:
    return get_peft_model(copy.deepcopy(model), LoraConfig(r=4, lora_alpha=6, target_modules=targets)).eval()


ARCHITECTURE = next(one for one in SEEN if one.title == "Gemma-3")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return published(build(ARCHITECTURE), tmp_path_factory.mktemp("gemma") / "base")


@pytest.fixture(scope="module")
def text(gemma: Any) -> Any:
    """The language model of the same checkpoint, as transformers loads it."""
    from transformers import Gemma3ForCausalLM

    return Gemma3ForCausalLM.from_pretrained(gemma.name_or_path, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def seeing(gemma: Any, text: Any) -> Iterator[LLM]:
    """An engine with the tower."""
    assert ARCHITECTURE.processor is not None
    folder = Path(text.name_or_path)
    ARCHITECTURE.processor().save_pretrained(folder)
    options = ARCHITECTURE.engine | {"skip_tokenizer_init": False, "max_model_len": 128, "load_format": "auto"}
    with engine(gemma, folder, **options, enable_lora=True, max_lora_rank=8) as found:
        yield found


def test_a_language_model_goes_into_an_engine_with_a_tower(seeing: LLM, text: Any) -> None:
    """The tower stays as the engine has it, in both modes, and the report says so."""
    trained = adapted(text, LINEARS)
    for mode in ("merged", "adapter"):
        sync = VllmSync(trained, seeing, mode=mode)
        for step in range(2):
            train(trained, step)
            report = sync.push()
            assert_answers(ask(seeing, sync.lora_request()), trained)
            if mode == "merged" or report.base_sent:
                assert {name.partition(".")[0] for name in report.kept} == {"vision_tower", "multi_modal_projector"}
                assert "parameters of the engine stay as they are: multi_modal_projector" in str(report)
        sync.close()


def test_a_tower_that_has_changed_is_not_kept(seeing: LLM, gemma: Any, text: Any) -> None:
    """As after a sleep that threw the weights away: nobody would bring the tower back."""
    sync = VllmSync(adapted(text, LINEARS), seeing)
    sync.push()
    model = seeing.llm_engine.model_executor.driver_worker.worker.get_model()
    norms = [p for n, p in model.named_parameters() if "vision_tower" in n and "norm" in n]
    kept = [norm.clone() for norm in norms]
    with torch.no_grad():
        for norm in norms:
            norm.zero_()
    with pytest.raises(PushRefused, match=r"vision_tower.*cannot stay.*push a Gemma3ForConditionalGeneration"):
        sync.push()
    with torch.no_grad():
        for norm, before in zip(norms, kept, strict=True):
            norm.copy_(before)
    sync.push()
    whole = adapted(gemma, LINEARS)
    VllmSync(whole, seeing).push(verify=True)
    assert_answers(ask(seeing), whole)
    assert all(worker.complete for worker in coverage(seeing))


def test_adapters_on_a_tower_are_told_of_vllms_setting(seeing: LLM, gemma: Any) -> None:
    trained = adapted(gemma, [n for n, m in gemma.named_modules() if n.endswith("layers.0.mlp.fc1")])
    with pytest.raises(PushRefused, match=r"fc1.*enable_tower_connector_lora=True"):
        VllmSync(trained, seeing, mode="adapter").push()
