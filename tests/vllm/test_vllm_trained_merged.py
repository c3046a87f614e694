"""A policy that trains on its merged weights: the engine serves the bits that the trainer computes with."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import engines
import models
import pytest
import torch
from engines import engine
from weight_bits import bits_of

from lora_merge import InvalidInput, VllmSync, train_merged

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_engine_serves_what_is_trained(rounding: str, tmp_path: Path) -> None:
    """After some steps, whichever side merges: what came is what was sent, and the weight that vLLM keeps as it came
    has the bits of the trainer's next forward, and of the one before. The base is back at the end."""
    model = models.with_lora(
        partial(engines.qwen2, tied=False), dtype=torch.bfloat16, target_modules=[*engines.LINEARS, "embed_tokens"]
    )
    base = {name: bits_of(tensor) for name, tensor in model.state_dict().items() if "lora_" not in name}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    tokens = torch.tensor(engines.prompts()[:1])
    options = {"processes": True, "worker_extension_cls": "weight_bits.Bits"}

    def computed() -> object:
        with torch.no_grad():
            model(input_ids=tokens)
        return bits_of(model.get_input_embeddings().weight)  # linear ones lie packed in vLLM on a CPU

    with engine(model, tmp_path / "base", **options) as llm, train_merged(model, rounding=rounding) as training:
        for merge in ("trainer", "engine") if rounding == "nearest" else ("trainer",):
            with closing(VllmSync(model, llm, merge=merge, rounding=rounding, bucket_bytes=1 << 14)) as sync:
                for _ in range(2):
                    for _ in range(3):
                        model(input_ids=tokens, labels=tokens).loss.backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    before = computed()
                    assert sync.push(verify=True).merge == merge
                    served = llm.collective_rpc("bits")[0]["model.embed_tokens.weight"]
                    assert before == served
                    assert computed() == served
        other = VllmSync(model, llm, rounding="nearest" if rounding == "stochastic" else "stochastic")
        with closing(other), pytest.raises(InvalidInput, match="what is served would not be what is trained"):
            other.push()
        assert training.merges >= 10
    assert {name: bits_of(tensor) for name, tensor in model.state_dict().items() if "lora_" not in name} == base
