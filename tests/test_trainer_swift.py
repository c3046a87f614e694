"""ms-swift's GRPO and GKD in one process with its colocated engine: the engine holds the policy, the base stays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
import swift_runs
import torch
from swift_runs import Stock, arguments, assert_is, assert_untouched, before_answers, engine_weights, policy, training
from torch import nn


@pytest.fixture(scope="module", autouse=True)
def readable() -> Iterator[None]:
    with swift_runs.as_on_a_gpu():
        yield


def qwen2(tied: bool) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**engines.SIZES | {"vocab_size": 264}, tie_word_embeddings=tied))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: `tied`, `untied`, and another one to learn from."""
    made = tmp_path_factory.mktemp("swift")
    for tied in (True, False):
        swift_runs.checkpoint(qwen2(tied), made / ("tied" if tied else "untied"))
    teacher = qwen2(True)
    engines.train(teacher)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(1.3)
    swift_runs.checkpoint(teacher, made / "teacher")
    return made


class Watch:
    """Looks at an engine each time before it answers, with swift's own way beside it."""

    def __init__(self, trainer: Any) -> None:
        self.stock, self.looks, self.worst, self.apart = Stock(trainer), 0, 0.0, 0.0
        before_answers(trainer, self.look)

    def look(self, trainer: Any) -> None:
        wanted = policy(trainer.model)
        self.worst = max(self.worst, assert_is(engine_weights(trainer.engine.inner_model), wanted))
        self.stock.turn(trainer)
        for name, tensor in self.stock.sent.items():
            if name in wanted:
                self.apart = max(self.apart, float((tensor.double() - wanted[name].value).abs().max()))
        self.looks += 1


def history(trainer: Any, name: str) -> list[float]:
    return [line[name] for line in trainer.state.log_history if name in line]


@pytest.mark.parametrize(("kind", "base", "flags"), [
    ("grpo", "tied", {}),
    ("grpo", "untied", {"target_modules": ["q_proj", "down_proj"], "modules_to_save": "lm_head", "use_rslora": "true"}),
    ("gkd", "untied", {"teacher_model": "teacher", "teacher_model_type": "qwen2"}),
])  # fmt: skip
def test_each_answer_comes_from_the_policy(
    kind: str, base: str, flags: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("LORA_MERGE_CHECK", "1")
    watched: list[Watch] = []
    if "teacher_model" in flags:
        flags = flags | {"teacher_model": str(folder / flags["teacher_model"])}
    line = arguments(kind, folder / base, tmp_path, max_steps="3", **flags)
    with training(line, lambda trainer: watched.append(Watch(trainer))) as trainer:
        (watch,) = watched
        assert watch.looks == 3
        assert_untouched(trainer.model, folder / base)
        trained = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
        assert all(p.abs().max() > 0 for p in trained), "nothing was trained"
        assert history(trainer, "lora_merge/version") == [1, 2, 3]
        assert history(trainer, "lora_merge/coverage") == [1, 1, 1]
        low, high = history(trainer, "lora_merge/ratio_min"), history(trainer, "lora_merge/ratio_max")
        assert len(low) == 3
        # In float32: some ten roundings of 2^-24 in a log-prob of a few units, on either side.
        assert 1 - 1e-4 < min(low) <= max(high) < 1 + 1e-4, (low, high)
        print(f"{kind}: ratios {min(low):.7f} to {max(high):.7f}; engine: {watch.worst:.2f} of what rounding allows; "
              f"swift's own tensors lie {watch.apart:.1e} from the policy, and leave {watch.stock.drift()}")  # fmt: skip
    said = capfd.readouterr()
    assert len(re.findall(r"lora_merge takes over \w+Trainer._move_model_to_vllm: merged pushes", said.err)) == 1
    assert len(re.findall(r"lora_merge: merged@[123] over local", said.err + said.out)) == 3
    print(said.out[-400:])
