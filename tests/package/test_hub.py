"""What is said of a name on the hub before it is fetched; `test_not_there` has a hub that does not answer."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from lora_merge import hub


class AnsweredError(Exception):
    """What huggingface_hub raises of an HTTP status."""

    response = "401"


@pytest.mark.parametrize(
    ("raised", "answers"), [(None, True), (AnsweredError("no such repository"), True), (OSError("no route"), False)]
)
def test_answers(
    raised: Exception | None, answers: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def model_info(self: HfApi, name: str, *, timeout: float) -> None:
        assert (name, timeout) == ("owner/name", 10.0)
        assert "looking for base 'owner/name' on " in capsys.readouterr().err, "said before it is asked"
        if raised:
            raise raised

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", model_info)
    assert hub.answers("base", "owner/name") is answers
    assert ("does not answer (OSError: no route): looking in the cache" in capsys.readouterr().err) is not answers


@pytest.mark.parametrize(("name", "offline", "answers"), [("/home/somebody/base", False, True), ("a/b", True, False)])
def test_is_not_asked(
    name: str, offline: bool, answers: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def model_info(self: HfApi, *arguments: Any, **options: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(HfApi, "model_info", model_info)
    assert hub.answers("base", name) is answers
    assert capsys.readouterr().err == ""
    assert ("HF_HUB_OFFLINE is set" in hub.absent()) is offline
