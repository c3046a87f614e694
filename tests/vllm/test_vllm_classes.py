"""A trainer's class that is wider than the engine's, and one that is narrower: what one has and the other lacks. Their
processors need torchvision, as of test_vllm_seen.py."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ask, assert_answers, engine, no_leftovers, train  # noqa: F401
from peft import LoraConfig, get_peft_model
from repository import ROOT
from torch import nn
from vllm import LLM

from lora_merge import PushRefused, VllmSync
from lora_merge.verify import coverage

pytest.importorskip("torchvision")
sys.path.append(str(ROOT / "benchmarks"))
from families import build
from families_seen import SEEN

LINEARS = ["q_proj", "v_proj", "o_proj", "down_proj"]
TEXT = {"limit_mm_per_prompt": {"image": 0, "video": 0, "audio": 0}, "skip_mm_profiling": True}
LORA = {"enable_lora": True, "max_lora_rank": 8}


def family(title: str) -> Any:
    return build(next(one for one in SEEN if one.title == title))


def adapted(model: nn.Module, targets: Any, **options: Any) -> Any:
    trained = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, lora_alpha=6, target_modules=targets, **options))
    return trained.eval()


def language(model: nn.Module) -> list[str]:
    """The linear layers of the thinker's language model."""
    return [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n.split(".")[-1] in LINEARS
            and ("thinker.model." in n or n.startswith("model."))]  # fmt: skip


@pytest.fixture(scope="module")
def omni() -> Any:
    return family("Qwen2.5-Omni, with its talker")


@pytest.fixture(scope="module")
def llm(omni: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("omni") / "base"
    omni.save_pretrained(folder)
    with engine(omni, folder, load_format="auto", **TEXT, **LORA) as found:
        yield found


def test_what_vllm_drops_is_left_out(llm: LLM, omni: Any) -> None:
    """The default class has a talker, which vLLM's thinker does not have: every push was refused."""
    trained = adapted(omni, language(omni))
    sync = VllmSync(trained, llm)
    for step in range(2):
        train(trained, step)
        report = sync.push(verify=True)
        assert_answers(ask(llm), trained.get_base_model().thinker)
        assert {name.partition(".")[0] for name in report.left_out} == {"talker", "token2wav", "thinker"}
        assert all("visual" in n or "audio" in n for n in report.left_out if n.startswith("thinker"))
        assert "talker.codec_head.weight" in report.left_out
    assert all(worker.complete for worker in coverage(llm))


def test_a_talker_that_is_trained_is_refused(llm: LLM, omni: Any) -> None:
    """Adapters that have not learnt anything (all-linear puts some there) are no reason; weights of its own are."""
    trained = adapted(omni, [*language(omni), "talker.model.layers.0.self_attn.q_proj"])
    sync = VllmSync(trained, llm)
    sync.push()
    train(trained)
    before = sync.states()
    with pytest.raises(PushRefused, match=r"talker\.model\.layers\.0\.self_attn\.q_proj\.weight is trained.*talker"):
        sync.push()
    assert sync.states() == before
    for name, parameter in trained.named_parameters():
        if "talker" in name and "lora_B" in name:
            parameter.data.zero_()
    sync.push()
    assert_answers(ask(llm), trained.get_base_model().thinker)
    trained.get_base_model().talker.codec_head.weight.requires_grad_(True)
    with pytest.raises(PushRefused, match=r"talker\.codec_head\.weight is trained"):
        sync.push()


@pytest.mark.parametrize("mode", ["merged", "adapter"])
def test_the_thinker_alone(llm: LLM, omni: Any, mode: str) -> None:
    """Its names lack what stands in front of them in the whole model's checkpoint."""
    trained = adapted(omni.thinker, language(omni.thinker))
    sync = VllmSync(trained, llm, mode=mode)
    for step in range(2):
        train(trained, step)
        sync.push()
        assert_answers(ask(llm, sync.lora_request()), trained)
    whole = adapted(omni, language(omni))
    VllmSync(whole, llm).push()  # and back
    assert_answers(ask(llm), whole.get_base_model().thinker)


def test_another_class_is_told_in_a_line(llm: LLM) -> None:
    other = family("LLaVA-OneVision")
    sync = VllmSync(adapted(other, LINEARS), llm)
    with pytest.raises(PushRefused) as caught:
        sync.push()
    told = str(caught.value)
    assert "Load Qwen2_5OmniModel with transformers" in told or "Load Qwen2_5OmniForConditional" in told, told
    assert len(told) < 2000
    assert "available parameters" not in told


def test_a_parameter_of_the_class_itself(tmp_path: Path) -> None:
    """Of an engine that takes no images it lies on the meta device (`image_newline`): a push went as far as its
    transfer, and left the engine dirty."""
    trained = adapted(family("LLaVA-OneVision"), r".*language_model.*\.(q_proj|v_proj|down_proj)")
    with engine(trained, tmp_path / "base", **TEXT) as llm:
        sync = VllmSync(trained, llm)
        for step in range(2):
            train(trained, step)
            report = sync.push(verify=True)
            assert any(name.endswith("image_newline") for name in report.left_out)
            assert_answers(ask(llm), trained)
