"""Encoders that embed and classify: vLLM's classes leave a pooler out, and hold what no checkpoint has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
import transformers
from engines import engine, prompts, train
from torch import Tensor, nn
from vllm import LLM, PoolingParams

from lora_merge import PushRefused, VllmSync

ENCODER: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 130, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_labels": 2,
}  # fmt: skip
SIDES = ["query", "key", "value"]


def bert() -> nn.Module:
    """Pooler and all, which transformers makes and vLLM's class for embeddings drops."""
    return transformers.BertModel(transformers.BertConfig(**ENCODER))


def reranker() -> nn.Module:
    return transformers.XLMRobertaForSequenceClassification(transformers.XLMRobertaConfig(**ENCODER))


def pooled(llm: LLM, task: Any) -> list[Tensor]:
    params = PoolingParams(task=task, use_activation=False)
    asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts()]
    return [o.outputs.data.float() for o in llm.encode(asked, params, pooling_task=task, use_tqdm=False)]


def wanted(model: Any, task: str) -> list[Tensor]:
    with torch.no_grad():
        found = [model(input_ids=torch.tensor([list(prompt)])) for prompt in prompts()]
    return [one.last_hidden_state[0, 0] if task == "embed" else one.logits[0] for one in found]


@pytest.mark.parametrize(("make", "task"), [(bert, "embed"), (reranker, "classify")])
def test_encoders(make: Any, task: str, tmp_path: Path) -> None:
    """vLLM's positions are a buffer of BERT's that no checkpoint has: every push was refused for it."""
    model = models.with_lora(make, target_modules=SIDES)
    base = tmp_path / "base"
    engines.save_base(model.get_base_model(), base)
    engines._tokenizer().save_pretrained(base)  # vLLM wants one to pool
    with engine(model, base, runner="pooling", num_gpu_blocks_override=None, skip_tokenizer_init=False) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            report = sync.push(verify=True)
            assert set(report.left_out) == ({"pooler.dense.weight", "pooler.dense.bias"} if task == "embed" else set())
            for got, want in zip(pooled(llm, task), wanted(model, task), strict=True):
                assert (got - want).abs().max() < 12e-6
        if task == "embed":
            pooler = models.with_lora(make, target_modules=[*SIDES, "pooler.dense"])
            train(pooler)
            with pytest.raises(PushRefused, match=r"pooler\.dense\.weight is trained.*BertModel.*target_modules"):
                VllmSync(pooler, llm).push()


def test_a_prompt_that_is_half_pooled(tmp_path: Path) -> None:
    """vLLM keeps the rows of the chunks before, and computes the whole prompt anew: a reward model's answer had 64 rows
    of the old weights in front of its own."""
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    base = tmp_path / "base"
    engines.save_base(model.get_base_model(), base)
    engines._tokenizer().save_pretrained(base)
    prompt = [(11 * i + 5) % 251 for i in range(150)]
    options = {"runner": "pooling", "convert": "embed", "num_gpu_blocks_override": None, "skip_tokenizer_init": False}
    with engine(model, base, **options, max_model_len=256, max_num_batched_tokens=64) as llm:
        sync, inside = VllmSync(model, llm), llm.llm_engine
        for step in range(2):
            train(model, step, 0.2)
            sync.push()
            params = PoolingParams(task="token_embed", use_activation=False)
            inside.add_request(str(step), {"prompt_token_ids": prompt}, params)
            assert not inside.step(), "more of the prompt is to come"
            train(model, step + 5, 0.2)
            sync.push()
            ended = []
            while inside.has_unfinished_requests():
                ended += inside.step()
            with torch.no_grad():
                want = model.base_model.model.model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
            got = ended[0].outputs.data.float()
            assert got.shape == want.shape
            assert (got - want).abs().max() < 1e-3  # rows of other weights are off by more than 1
