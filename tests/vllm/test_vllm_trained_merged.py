"""A policy that trains on its merged weights: the engine serves the bits that the trainer computes with."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import engine
from weight_bits import bits_of

from lora_merge import InvalidInput, VllmSync, train_merged

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def fused(model: Any) -> dict[str, str]:
    """Bits of what the trainer's layers hold now, by vLLM's names."""
    found = {"model.embed_tokens.weight": bits_of(model.get_input_embeddings().weight)}
    for number, layer in enumerate(model.get_base_model().model.layers):
        attention, mlp, name = layer.self_attn, layer.mlp, f"model.layers.{number}"
        parts = {
            f"{name}.self_attn.qkv_proj.weight": (attention.q_proj, attention.k_proj, attention.v_proj),
            f"{name}.self_attn.o_proj.weight": (attention.o_proj,),
            f"{name}.mlp.gate_up_proj.weight": (mlp.gate_proj, mlp.up_proj),
            f"{name}.mlp.down_proj.weight": (mlp.down_proj,),
        }
        found |= {key: bits_of(torch.cat([part.base_layer.weight for part in some])) for key, some in parts.items()}
    return found


def test_the_engine_serves_what_is_trained(tmp_path: Path) -> None:
    """After each step, whichever side merges, all of the engine's weights have the bits of the trainer's next forward.
    The base is back at the end. A push of another policy is refused, and changes nothing."""
    model = models.with_lora(
        partial(engines.qwen2, tied=False), dtype=torch.bfloat16, target_modules=[*engines.LINEARS, "embed_tokens"]
    )
    base = {name: bits_of(tensor) for name, tensor in model.state_dict().items() if "lora_" not in name}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    tokens = torch.tensor(engines.prompts()[:1])
    options = {"processes": True, "worker_extension_cls": "plain_bits.PlainBits"}
    with engine(model, tmp_path / "base", **options) as llm, train_merged(model) as training:
        for merge in ("trainer", "engine"):
            with closing(VllmSync(model, llm, merge=merge, bucket_bytes=1 << 14)) as sync:
                for _ in range(2):
                    model(input_ids=tokens, labels=tokens).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    assert sync.push(verify=True).merge == merge
                    with torch.no_grad():
                        model(input_ids=tokens)
                    held, computed = llm.collective_rpc("bits")[0], fused(model)
                    assert {name: held[name] for name in computed} == computed
                with pytest.raises(InvalidInput, match=r"train_merged\(model\) .*mode='adapter', rounding='nearest'"):
                    sync.push(mode="adapter")
                sync.check()
                assert llm.collective_rpc("bits")[0] == held
        with closing(VllmSync(model, llm, rounding="stochastic")) as other:
            with pytest.raises(InvalidInput, match=r"train_merged\(model\) .*rounding='stochastic'"):
                other.push()
            training.close()
            other.push()
        assert training.merges >= 4
    assert {name: bits_of(tensor) for name, tensor in model.state_dict().items() if "lora_" not in name} == base
