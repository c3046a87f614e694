"""verl's real engines on two ranks, which train on merged weights: LORA_MERGE_TRAIN=merged."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("verl") is None:
    pytest.skip("verl's tests run in an environment of their own", allow_module_level=True)

import verl_model
from processes import spawn
from vllm_name import folder as vllm_by_name

from tests.trainers.verl.test_trainer_verl import entry_points  # noqa: F401


@pytest.fixture(autouse=True)
def switched_on(entry_points: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.syspath_prepend(str(vllm_by_name(entry_points)))
    monkeypatch.setenv("LORA_MERGE_TRAIN", "merged")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verl")
    verl_model.save_model(folder / "model")
    return folder


def all_cases(rank: int, base: Path, place: Path) -> None:
    import verl_trained

    verl_trained.trains(rank, base, place, list(verl_trained.CASES))
    verl_trained.refused(rank, base)


def go_on(rank: int, base: Path, place: Path) -> None:
    import verl_trained

    verl_trained.resumes(rank, base, place, list(verl_trained.CASES))


def test_fsdp2(base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What is pushed is what the next forward and backward compute with, bit for bit; a reference pass, a checkpoint
    and an interrupt find the base; a run that goes on from a checkpoint in other processes ends as one that was not
    interrupted."""
    spawn(2, all_cases, base, tmp_path)
    assert capfd.readouterr().err.count("lora_merge trains the policy of verl 0.9.1 on its merged weights") == 3
    spawn(2, go_on, base, tmp_path)


def fsdp1(rank: int, base: Path, place: Path) -> None:
    import verl_trained

    verl_trained.trains(rank, base, place, ["float32"], "fsdp")


def fsdp1_goes_on(rank: int, base: Path, place: Path) -> None:
    import verl_trained

    verl_trained.resumes(rank, base, place, ["float32"], "fsdp")


def test_fsdp1(base: Path, tmp_path: Path) -> None:
    """verl's default strategy."""
    spawn(2, fsdp1, base, tmp_path)
    spawn(2, fsdp1_goes_on, base, tmp_path)
