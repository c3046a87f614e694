"""What all integrations share: options, asking a release for its names, one line at start, numbers for loggers, and the
check that rollout and trainer are one policy."""

from __future__ import annotations

import logging
import sys
import types
from importlib.metadata import version
from typing import Any

import models
import pytest
import torch
from torch import nn

from lora_merge import InvalidInput, MergedWeights, MissingExtra, SyncReport
from lora_merge.integrations.compat import Release, TrainerRefused
from lora_merge.integrations.metrics import Counted, PolicyGap, hold, metrics
from lora_merge.integrations.options import Options, switched_off, switched_on
from lora_merge.integrations.tied import check_tied
from lora_merge.verify import logprob_gap

INSTALLED = version("torch")
"""Of the distribution: builds for CUDA may name that in `torch.__version__` alone."""
TORCH = Release("PyTorch", "torch", (INSTALLED,))


def test_options_come_from_the_environment() -> None:
    assert Options.from_environment({}) == Options("merged", "nearest", None, False)
    with pytest.raises(InvalidInput, match="LORA_MERGE_TRAIN=merged is for TRL, ms-swift, verl and"):
        Options.from_environment({"LORA_MERGE_TRAIN": "merged"})
    assert Options.from_environment({"LORA_MERGE_TRAIN": "merged"}, trains=True).train == "merged"
    with pytest.raises(InvalidInput, match="train='merged' trains the policy"):
        Options(mode="adapter", train="merged")
    with pytest.raises(InvalidInput, match="LORA_MERGE_SHARE=1 is for TRL and ms-swift"):
        Options.from_environment({"LORA_MERGE_SHARE": "1"}, trains=True)
    assert Options.from_environment({"LORA_MERGE_SHARE": "1"}, trains=True, shares=True).train == "merged"
    with pytest.raises(InvalidInput, match="LORA_MERGE_MERGE=engine is for verl"):
        Options.from_environment({"LORA_MERGE_MERGE": "engine"})
    assert Options.from_environment({"LORA_MERGE_MERGE": "engine"}, merges=True).merge == "engine"
    names = {"LORA_MERGE_MODE": "adapter", "LORA_MERGE_ROUNDING": "stochastic"}
    found = Options.from_environment(names | {"LORA_MERGE_CHECK": "0.05", "LORA_MERGE_VERIFY": "True"})
    assert found == Options("adapter", "stochastic", 0.05, True)
    assert Options.from_environment({"LORA_MERGE_CHECK": "1"}).check == 0.02
    assert Options.from_environment({"LORA_MERGE_CHECK": "0"}).check is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MODE", "both"),
        ("ROUNDING", "up"),
        ("CHECK", "yes please"),
        ("CHECK", "2"),
        ("CHECK", "nan"),
        ("VERIFY", "2"),
        ("TRAIN", "base"),
        ("CACHE", "kept"),
    ],
)
def test_a_wrong_option_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=f"LORA_MERGE_{name}"):
        Options.from_environment({f"LORA_MERGE_{name}": value})


@pytest.mark.parametrize(
    ("value", "on", "off"), [(None, False, False), ("1", True, False), ("0", False, True), ("", False, False),
                             ("off", False, True), ("TRUE", True, False)]
)  # fmt: skip
def test_the_switch(value: str | None, on: bool, off: bool) -> None:
    environment = {} if value is None else {"LORA_MERGE": value}
    assert (switched_on(environment), switched_off(environment)) == (on, off)


def test_a_release_is_asked_for_the_names_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    TORCH.require({"torch.nn:Linear": ["forward", "reset_parameters"], "torch.nn": ["Linear"], "torch.nn:Module": []})
    module = types.ModuleType("made_up_trainer")
    module.Generation = type("Generation", (), {"generate": None})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_trainer", module)
    names = {"made_up_trainer:Generation": ["generate", "sync"], "made_up_trainer:Trainer": ["x"], "no_module:A": ["b"]}
    with pytest.raises(TrainerRefused, match=r"does not offer made_up_trainer\.Generation\.sync, made_up_trainer\.Tra"):
        TORCH.require(names)
    with pytest.raises(TrainerRefused, match=r"no_module\.A, which lora_merge uses.*LORA_MERGE=0 leaves PyTorch's"):
        TORCH.require(names)
    with pytest.raises(MissingExtra, match="pip install no-such-trainer"):
        Release("None", "no-such-trainer", ("1.0",)).require({"no_module": []})
    module.__version__ = "2.0"  # type: ignore[attr-defined]
    assert Release("None", "no-such-trainer", ("1.0",), "made_up_trainer").installed == "2.0", "a checkout"


def test_one_line_at_start(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    TORCH.announce("everything")
    Release("PyTorch", "torch", ("0.1",)).announce("everything")
    known, unknown = capsys.readouterr().err.splitlines()
    assert f"takes over everything of PyTorch {INSTALLED} (tested with {INSTALLED}" in known
    assert "LORA_MERGE=0 switches it off" in known
    assert "not tested with this release, but with 0.1" in unknown
    monkeypatch.setenv("RANK", "1")
    TORCH.announce("everything")
    assert capsys.readouterr().err == ""


def test_a_mistyped_variable_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It would check nothing, without a word."""
    monkeypatch.setenv("LORA_MERGE_VERFIY", "1")
    monkeypatch.setenv("LORA_MERGE_OF_MY_OWN", "1")
    monkeypatch.setenv("LORA_MERGE_CHECK", "1")
    TORCH.announce("everything")
    _, own, mistyped = capsys.readouterr().err.splitlines()
    assert "lora_merge warns: LORA_MERGE_OF_MY_OWN is set, and nothing reads it (docs" in own
    assert "LORA_MERGE_VERFIY is set, and nothing reads it, LORA_MERGE_VERIFY? (docs" in mistyped


def test_the_line_at_start_is_a_record_where_logging_shows_it(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        TORCH.announce("everything")
    with caplog.at_level(logging.WARNING, "lora_merge"):
        TORCH.announce("everything")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("lora_merge", "INFO")
    assert record.getMessage().startswith("lora_merge takes over everything of PyTorch")
    assert capsys.readouterr().err == ""


def test_numbers_for_loggers() -> None:
    report = SyncReport(3, "merged", nbytes=2_000_000, tensors=5, seconds={"check": 0.25, "transfer": 0.5})
    wanted = {"version": 3, "merged": 1, "megabytes": 2, "tensors": 5, "seconds": 0.75, "seconds_check": 0.25}
    assert metrics(report) == {f"lora_merge/{k}": v for k, v in (wanted | {"seconds_transfer": 0.5}).items()}
    report.coverage, report.mode = 1.0, "adapter"
    assert metrics(report)["lora_merge/coverage"] == 1
    assert metrics(report)["lora_merge/merged"] == 0


def test_a_stream_that_a_trainers_transport_carries_is_counted() -> None:
    tensors = [("a", torch.zeros(3, 2)), ("b", torch.zeros(4, dtype=torch.bfloat16))]
    counted = Counted(iter(tensors), 7, "a server")
    assert list(counted) == tensors
    report = counted.report
    assert (report.version, report.tensors, report.nbytes, report.transports) == (7, 2, 32, ("a server",))
    assert report.seconds["transfer"] > 0


def test_the_check_of_ratios() -> None:
    trainer, lengths = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)), [5, 2, 4]
    rollout = trainer[:, 3:8].clone()

    def gap_at(shift: torch.Tensor):  # noqa: ANN202
        return logprob_gap(trainer, rollout + shift, shifted=True, prompt_width=4, response_lengths=lengths)

    same = gap_at(torch.zeros(3, 5))
    assert hold(same, 0.02, exact=True)["lora_merge/ratio_mean"] == 1
    one = torch.zeros(3, 5)
    one[0, 0] = 0.1  # one token of eleven: beyond the bound itself, within it on average
    assert hold(gap_at(one), 0.02, exact=False)["lora_merge/ratio_min"] == pytest.approx(0.905, abs=1e-3)
    with pytest.raises(PolicyGap, match=r"importance ratio 0\.9048 to 1\.0000"):
        hold(gap_at(one), 0.02, exact=True)
    for wrong in (-0.1, 0.1, float("nan")):
        with pytest.raises(PolicyGap, match="does not answer as the policy"):
            hold(gap_at(torch.full((3, 5), wrong)), 0.02, exact=False)


@pytest.mark.parametrize(
    ("build", "targets", "named"),
    [
        (lambda: models.qwen2(tied=True), ["lm_head"], "lm_head"),
        (lambda: models.qwen2(tied=True), ["embed_tokens"], "lm_head"),
        (models.gpt2, ["wte"], "lm_head"),
    ],
)
def test_an_adapter_on_one_of_two_tied_names(build: Any, targets: list[str], named: str) -> None:
    """An engine holds one tensor for both, and passes over the other name."""
    model = models.with_lora(build, target_modules=targets)
    for wrapped in (model, nn.DataParallel(model)):
        with pytest.raises(InvalidInput, match=rf"{named}.* is tied to .*out of --target_modules"):
            check_tied(MergedWeights(wrapped), "--target_modules")


@pytest.mark.parametrize("tied", [True, False])
def test_tied_names_without_an_adapter_come_once(tied: bool) -> None:
    model = models.with_lora(lambda: models.qwen2(tied=tied), target_modules=["q_proj"])
    check_tied(MergedWeights(model), "--target_modules")
    other = models.with_lora(lambda: models.qwen2(tied=False), target_modules=["q_proj", "lm_head"])
    check_tied(MergedWeights(other), "--target_modules")


def test_a_pass_that_nobody_begins_is_ended_once() -> None:
    """verl loads parameters for it, and may fail before its first tensor."""
    from lora_merge.integrations.verl_engines.stream import Pass

    ended: list[str] = []
    stream: Any = types.SimpleNamespace(options=types.SimpleNamespace(verify=False))
    one = Pass(stream, lambda: ended.append("offloaded"))
    one.close()
    one.close()
    assert ended == ["offloaded"]


def test_a_model_in_place_of_its_trainer_is_told() -> None:
    transformers = pytest.importorskip("lora_merge.integrations.transformers")
    trl = pytest.importorskip("lora_merge.integrations.trl")
    with pytest.raises(TrainerRefused, match=r"trainer of TRL's .*, got Linear"):
        trl.attach(nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="Trainer of transformers, got Linear"):
        transformers.attach(nn.Linear(2, 2), None)
