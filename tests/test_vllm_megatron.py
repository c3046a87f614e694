"""A Megatron trainer of two ranks and a real vLLM engine: HF checkpoint, Megatron shards, adapter, push."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import engines
import megatron_models as mm
import pytest
import torch
import torch.distributed as dist
from megatron_models import Grid
from processes import spawn

from lora_merge import VllmSync
from lora_merge.shards.megatron import Chunks

SIZES = {"head_dim": 32, "heads": (8, 4)}
"""vLLM wants head dimensions of 32 and more in float32."""
PROMPTS = [[(7 * i + 11 * p) % 100 + 1 for i in range(12)] for p in range(4)]


def work(rank: int, folder: Path, kind: str, grid: Grid, modes: list[str]) -> None:
    hf = mm.hf_model(kind, **SIZES)
    lora = {"enable_lora": True, "max_lora_rank": 8} if "adapter" in modes else {}
    with engines.engine(hf, folder, processes=True, **lora) if rank == 0 else nullcontext() as llm:
        chunks = mm.megatron(kind, hf, grid)
        mm.adapt(chunks, "bridge")
        sync = VllmSync(Chunks(chunks, vocab_size=101), llm, bucket_bytes=1 << 17)
        for step, mode in enumerate(modes):
            with torch.no_grad():
                for name, parameter in (item for chunk in chunks for item in chunk.named_parameters()):
                    if ".adapter." in name:
                        parameter.mul_(1.0 + 0.1 * step)
            report = sync.push(mode=mode, verify=True)
            assert report.version == step + 1
            asked: list[Any] = [None]
            if llm is not None:
                outputs = engines.ask(llm, sync.lora_request(), PROMPTS)
                asked = [[said(output) for output in outputs]]
            dist.broadcast_object_list(asked)
            check(chunks, asked[0], f"{mode}, step {step}")
        sync.close()


def said(output: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs."""
    answer = list(output.outputs[0].token_ids)
    return answer, [step[token].logprob for step, token in zip(output.outputs[0].logprobs, answer, strict=True)]


def check(chunks: list[Any], answers: list[tuple[list[int], list[float]]], what: str) -> None:
    """Greedy tokens and log-probs are those of the Megatron model's own forward, adapters and all; on every rank.

    Tolerance: as in `engines.assert_answers`, with the sums of two tensor-parallel ranks in another order again.
    """
    ids = torch.tensor([[*prompt, *answer] for prompt, (answer, _) in zip(PROMPTS, answers, strict=True)])
    logp = mm.logits(chunks, ids)[..., :101].float().log_softmax(-1)[:, len(PROMPTS[0]) - 1 : -1]
    tokens = torch.tensor([answer for answer, _ in answers])
    assert torch.equal(logp.argmax(-1), tokens), f"{what}: greedy tokens differ"
    wanted = logp.gather(-1, tokens[..., None]).squeeze(-1)
    error = (torch.tensor([probs for _, probs in answers]) - wanted).abs().max()
    assert error < 1e-5, f"{what}: log-probs are off by {error}"


@pytest.mark.parametrize(
    ("kind", "grid", "modes"),
    [
        ("qwen2", Grid(tp=2), ["merged", "adapter", "adapter", "merged"]),
        ("llama", Grid(pp=2), ["merged", "adapter"]),
        ("qwen3_moe", Grid(tp=2, ep=2, etp=1), ["merged", "merged"]),
    ],
)
def test_the_engine_answers_as_the_megatron_model_does(kind: str, grid: Grid, modes: list[str], tmp_path: Path) -> None:
    spawn(2, work, tmp_path / "base", kind, grid, modes)
