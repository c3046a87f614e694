"""lora_merge.verify without an engine: rounding loss, and log-probs lined up."""

from __future__ import annotations

import models
import pytest
import torch
from torch import Tensor

from lora_merge import InvalidInput
from lora_merge.stream.weights import MergedWeights
from lora_merge.verify import checksums, logprob_gap, rounding_loss

PROMPTS, RESPONSES = [3, 1, 5, 2], [4, 6, 1, 3]


@pytest.fixture(scope="module")
def sequences() -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randint(3, models.VOCABULARY, (p + r,), generator=g) for p, r in zip(PROMPTS, RESPONSES, strict=True)]


@pytest.fixture(scope="module")
def alone(sequences: list[Tensor]) -> list[Tensor]:
    """The truth: log-probs of each response, every sequence computed by itself, without padding."""
    model = models.qwen2().eval()
    found = []
    for ids, prompt in zip(sequences, PROMPTS, strict=True):
        with torch.no_grad():
            logp = model(ids[None]).logits[0].log_softmax(-1)
        found.append(logp[prompt - 1 : -1].gather(-1, ids[prompt:, None]).squeeze(-1))
    return found


def shifted_rows(sequences: list[Tensor], alone: list[Tensor], shifted: bool) -> list[Tensor]:
    """Whole sequences with the truth at response positions and nonsense everywhere else."""
    rows = []
    for ids, prompt, truth in zip(sequences, PROMPTS, alone, strict=True):
        row = torch.full((len(ids),), 99.0)
        start = prompt - (1 if shifted else 0)
        row[start : start + len(truth)] = truth
        rows.append(row)
    return rows


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("layout", ["padded", "packed", "packed batch", "jagged"])
@pytest.mark.parametrize("rollout", ["list", "padded", "jagged"])
def test_response_positions_line_up_in_every_layout(
    sequences: list[Tensor], alone: list[Tensor], shifted: bool, layout: str, rollout: str
) -> None:
    """A large trainer was off by one here and got ratios of 451,728 where about 1 was right."""
    rows = shifted_rows(sequences, alone, shifted)
    lengths: dict[str, object] = {"shifted": shifted, "prompt_lengths": PROMPTS}
    if layout == "padded":
        width = max(PROMPTS)
        ours = torch.full((len(rows), width + max(RESPONSES)), 77.0)
        for i, (row, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
            ours[i, width - prompt : width - prompt + len(row)] = row
        lengths |= {"prompt_width": width, "response_lengths": torch.tensor(RESPONSES)}
    elif layout.startswith("packed"):
        ours = torch.cat(rows)
        ours = ours[None] if layout == "packed batch" else ours
        lengths["cu_seqlens"] = torch.tensor([0, *torch.tensor([len(r) for r in rows]).cumsum(0).tolist()])
    else:
        ours = torch.nested.nested_tensor(rows, layout=torch.jagged)
    noisy = [truth + 0.01 for truth in alone]
    theirs: object = noisy
    if rollout == "padded":
        theirs = torch.full((len(rows), max(RESPONSES)), 55.0)
        for i, row in enumerate(noisy):
            theirs[i, : len(row)] = row
        lengths["response_lengths"] = RESPONSES
    elif rollout == "jagged":
        theirs = torch.nested.nested_tensor(noisy, layout=torch.jagged)
    gap = logprob_gap(ours, theirs, **lengths)
    assert gap.tokens == sum(RESPONSES)
    assert gap.maximum == pytest.approx(0.01, abs=1e-6)  # float32 log-probs of a few units
    assert gap.mean == pytest.approx(0.01, abs=1e-6)
    assert gap.ratio_mean == pytest.approx(torch.tensor(-0.01).exp().item(), abs=1e-6)
    assert [r.numel() for r in gap.ratios] == RESPONSES


def test_a_left_right_padded_batch_equals_sequences_alone(sequences: list[Tensor], alone: list[Tensor]) -> None:
    width, total = max(PROMPTS), max(PROMPTS) + max(RESPONSES)
    ids = torch.zeros(len(sequences), total, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, (s, p) in enumerate(zip(sequences, PROMPTS, strict=True)):
        ids[i, width - p : width - p + len(s)], mask[i, width - p : width - p + len(s)] = s, 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    torch.manual_seed(0)
    model = models.qwen2().eval()
    reference = []
    with torch.no_grad():
        logp = model(ids, attention_mask=mask, position_ids=positions).logits.log_softmax(-1)
        for s, p in zip(sequences, PROMPTS, strict=True):
            one = model(s[None]).logits[0].log_softmax(-1)
            reference.append(one[p - 1 : -1].gather(-1, s[p:, None]).squeeze(-1))
    trainer = logp.gather(-1, ids.roll(-1, 1)[..., None]).squeeze(-1)  # entry t is about token t + 1
    gap = logprob_gap(trainer, reference, shifted=True, prompt_width=width, response_lengths=RESPONSES)
    assert gap.maximum < 1e-4, gap  # float32 attention over padding sums in another order
    assert "451" not in str(gap)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"prompt_width": 5}, "response_lengths"),
        ({"prompt_width": 9, "response_lengths": [4, 6, 1, 3]}, "width"),
        ({}, "prompt_lengths"),
        ({"prompt_lengths": [1, 1, 1, 1]}, "cu_seqlens"),
        ({"prompt_lengths": [1, 1, 1, 1], "cu_seqlens": [0, 5]}, "cu_seqlens"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(arguments: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        logprob_gap(torch.zeros(4, 11), [[0.0] * r for r in RESPONSES], shifted=True, **arguments)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(InvalidInput, match="sequence 1"):
        logprob_gap(torch.zeros(2, 4), [[0.0], [0.0] * 2], shifted=False, prompt_width=2, response_lengths=[1, 1])


def test_bf16_swallows_a_small_adapter_and_says_so() -> None:
    model = models.with_lora(models.qwen2, dtype=torch.bfloat16, target_modules=["q_proj"])
    large = rounding_loss(model)[0]
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 1e-4
    small = rounding_loss(model)[0]
    assert large.name == "model.layers.0.self_attn.q_proj.weight"
    assert large.loss < 0.2, large
    assert large.cosine > 0.98, large
    assert small.loss > 0.5, small
    draws = [rounding_loss(model, rounding="stochastic", seed=s)[0] for s in range(3)]
    assert all(d.cosine > 0 for d in draws), draws
    assert rounding_loss(model, torch.float32)[0].loss < 1e-2


@pytest.mark.parametrize("config", [{"use_dora": True}, {"target_modules": ["embed_tokens"]}])
def test_rounding_loss_of_an_exact_merge_is_float32_noise(config: dict[str, object]) -> None:
    for found in rounding_loss(models.with_lora(models.qwen2, **config), torch.float32):
        assert found.loss < 1e-5, found
        assert found.cosine == pytest.approx(1, abs=1e-6)


def test_checksums_are_those_of_the_stream() -> None:
    model = models.with_lora(models.qwen2)
    first, second = checksums(MergedWeights(model)), checksums(MergedWeights(model, bucket_bytes=4096))
    assert first == second
    assert len(first) == len(MergedWeights(model).metadata())
