"""One copy of the weights: a trainer's parameters lie in a vLLM of its process."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import ask, assert_answers, engine
from torch import Tensor, nn
from weight_bits import bits_of

from lora_merge import InvalidInput, PushRefused, VllmSync
from lora_merge.engine.vllm.loading.loader import Loader

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
LOADED = {"load_format": "auto"}


@pytest.fixture
def plain_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers of vLLM on a CPU keep their weights as they were loaded, as on a GPU; see shared_weights.py, which
    does it for processes of their own."""
    from vllm.model_executor.layers import utils

    def plain(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear  # type: ignore[assignment]

    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain)
    monkeypatch.setattr(Loader, "_laid_anew", lambda self: [])


def base_bits(model: Any) -> dict[str, Any]:
    return {name: bits_of(tensor) for name, tensor in model.state_dict().items() if "lora_" not in name}


def base_of(model: nn.Module) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if "lora_" not in name]


def parameters_of(llm: Any) -> list[Tensor]:
    return list(llm.apply_model(lambda model: list(model.parameters()))[0])


def test_a_trainer_and_an_engine_with_one_copy(plain_layout: None, tmp_path: Path) -> None:
    """Parameters are views of the engine's; a push moves nothing; the base comes back bit for bit."""
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    base = base_bits(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, fused=True)
    tokens = torch.tensor(engines.prompts()[:1])
    with engine(model, tmp_path / "base", **LOADED) as llm:
        with closing(VllmSync(model, llm, share=True)) as sync:
            assert sync.sharing is not None
            assert sync.sharing.shared == sum(p.nbytes for p in base_of(model)), sync.sharing
            assert not sync.sharing.apart
            theirs = {p.untyped_storage().data_ptr() for p in parameters_of(llm)}
            assert all(p.untyped_storage().data_ptr() in theirs for p in base_of(model))
            for _ in range(3):
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                report = sync.push()
                assert (report.shared, report.nbytes) == (sync.sharing.shared, 0)
                assert_answers(ask(llm), model)
                sync.check()
                with torch.no_grad(), model.disable_adapter():
                    model(input_ids=tokens)
                with pytest.raises(PushRefused, match="trainer that shares them"):
                    sync.check()
                assert sync.push(verify=True).version == report.version + 1
                assert_answers(ask(llm), model)
        assert base_bits(model) == base
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert base_bits(model) == base


def test_what_cannot_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    with engine(model, tmp_path / "base") as llm:
        with pytest.raises(InvalidInput, match="engine holds other values"):
            VllmSync(model, llm, share=True)
        monkeypatch.setattr(llm.llm_engine.vllm_config.model_config, "enable_sleep_mode", True)
        with pytest.raises(PushRefused, match="enable_sleep_mode=True"):
            VllmSync(model, llm, share=True)
    with engine(model, tmp_path / "base", processes=True, **LOADED) as llm:
        with pytest.raises(PushRefused, match="expected one worker in this process"):
            VllmSync(model, llm, share=True)
        with pytest.raises(InvalidInput, match="share=True got mode='adapter'"):
            VllmSync(model, llm, mode="adapter", share=True)
