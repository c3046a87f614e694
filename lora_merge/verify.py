"""Did it arrive? What rounding loses, whether an engine is covered, and how far rollout and trainer lie apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .errors import InvalidInput
from .kernels.segments import FLOATS
from .models.delta import Delta, whole_job
from .models.operands import MergePlan, Operands, Turn
from .models.peft.read import read_deltas
from .shards.ranks import Ranks
from .stream.buckets import checksum
from .stream.weights import MergedWeights


@dataclass(frozen=True, slots=True)
class Coverage:
    """What the last full push wrote in one worker.

    Args:
        written, elements: elements of parameters and persistent buffers that it wrote, and that there are.
        state: what the worker holds ("merged@3").
    """

    written: int
    elements: int
    state: str

    @property
    def complete(self) -> bool:
        return 0 < self.elements == self.written


def coverage(engine: Any) -> list[Coverage]:
    """Whether every element of every parameter and persistent buffer was written by the last full push, by worker.

    Args:
        engine: as for `VllmSync`; of an `AsyncLLM` use `acoverage`.
    """
    from .engine.vllm.control import drive

    return drive(acoverage(engine))


async def acoverage(engine: Any) -> list[Coverage]:
    """As `coverage`, in an `AsyncLLM`'s event loop."""
    from .engine.state import State
    from .engine.vllm.control import control_of

    answers = await control_of(engine).rpc("coverage")
    found = []
    for answer in answers:
        written, elements = answer["elements"]
        found.append(Coverage(written, elements, str(State(**answer["state"]))))
    return found


def checksums(weights: MergedWeights) -> dict[str, int]:
    """Checksum of every tensor of a stream, by name; `VllmSync.push(verify=True)` compares the same ones."""
    return {name: checksum(tensor) for name, tensor in weights}


@dataclass(frozen=True, slots=True)
class RoundingLoss:
    """What rounding does to the update of one parameter.

    Args:
        name: HF name of the parameter.
        loss: `||round(W+D) - (W+D)|| / ||D||`: 0 keeps the update whole, 1 is as bad as losing it.
        cosine: between the update that arrives, `round(W+D) - W`, and D; NaN where nothing arrives.
    """

    name: str
    loss: float
    cosine: float


def rounding_loss(
    model: nn.Module, dtype: torch.dtype = torch.bfloat16, *, rounding: str = "nearest", seed: int | None = None
) -> list[RoundingLoss]:
    """How much of each adapter's update is lost when merged weights are rounded to the rollout dtype.

    Args:
        model: a PEFT model.
        dtype: of the rollout.
        rounding, seed: as in `merge`; stochastic rounding loses more in each draw, and nothing on average.

    Returns:
        One entry for each adapted parameter; parameters whose update is zero have loss 0 and cosine 1.
    """
    if dtype not in FLOATS:
        raise InvalidInput(f"dtype must be bfloat16, float16 or float32, got {dtype}")
    return [_rounding_loss(delta, dtype, rounding, seed) for delta in read_deltas(model)]


def _rounding_loss(delta: Delta, dtype: torch.dtype, rounding: str, seed: int | None) -> RoundingLoss:
    if not delta.weight.whole:
        raise InvalidInput(f"{delta.name} is sharded: measure the rounding loss on a model that is whole on one device")
    weight = delta.weight.pieces[0].tensor
    rounded = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    operands = Operands([Turn([delta])], Ranks(), weight.device)
    operands.refresh()
    MergePlan([whole_job(delta, weight, rounded)], operands).run(rounding=rounding, seed=seed)
    lost = kept = update = arrived = 0.0
    lora_A, lora_B, scaling = operands.factors(delta)
    for e, (w, r) in enumerate(zip(delta.matrices(weight), delta.matrices(rounded), strict=True)):
        base = w.double()
        exact = base + scaling * (lora_B[:, :, e].double() @ lora_A[e].double())
        if delta.magnitude is not None:
            norms = torch.linalg.vector_norm(exact, dim=1)
            magnitude = operands.whole(delta.magnitude)
            exact *= (magnitude.flatten().double() / norms).unsqueeze(1)
        change, there = exact - base, r.double() - base
        lost += float((r.double() - exact).square().sum())
        update += float(change.square().sum())
        arrived += float(there.square().sum())
        kept += float((there * change).sum())
    if update == 0:
        return RoundingLoss(delta.name, 0.0, 1.0)
    return RoundingLoss(
        delta.name, (lost / update) ** 0.5, kept / (update * arrived) ** 0.5 if arrived else float("nan")
    )


@dataclass(frozen=True, slots=True, eq=False)
class LogprobGap:
    """How far the rollout's log-probs lie from the trainer's, over response tokens.

    Args:
        maximum, mean: of `|trainer - rollout|`.
        ratios: importance ratio `exp(trainer - rollout)` of each token, one float32 tensor a response.
    """

    maximum: float
    mean: float
    ratios: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        return sum(r.numel() for r in self.ratios)

    @property
    def ratio_mean(self) -> float:
        return float(torch.cat(self.ratios).mean())

    @property
    def ratio_range(self) -> tuple[float, float]:
        """Smallest and largest."""
        flat = torch.cat(self.ratios)
        return float(flat.min()), float(flat.max())

    def __str__(self) -> str:
        low, high = self.ratio_range
        return (
            f"log-prob gap over {self.tokens} tokens: max {self.maximum:.2e}, mean {self.mean:.2e}; "
            f"importance ratio {low:.4f} to {high:.4f}, mean {self.ratio_mean:.4f}"
        )


def logprob_gap(
    trainer: Tensor,
    rollout: Tensor | Sequence[Tensor | Sequence[float]],
    *,
    shifted: bool,
    prompt_lengths: Sequence[int] | Tensor | None = None,
    response_lengths: Sequence[int] | Tensor | None = None,
    prompt_width: int | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> LogprobGap:
    """The rollout's log-probs of its own tokens against the trainer's, lined up response token by response token.

    The trainer's come in one of three layouts:

    - padded `[N, P + R]`, prompts left-padded to P, responses right-padded to R; needs `prompt_width` = P and
      `response_lengths`;
    - packed `[T]` or `[1, T]`, whole sequences one after another; needs `cu_seqlens` `[N + 1]` and `prompt_lengths`;
    - a jagged nested tensor `[N, length]` of whole sequences; needs `prompt_lengths`.

    Args:
        trainer: log-probs over whole sequences, prompts included, as many positions as tokens.
        rollout: log-probs of response tokens only: a list of N, a padded `[N, R]` with `response_lengths`, or a
            jagged nested tensor.
        shifted: whether entry t is about token t + 1, as gathering from `logits[:, t]` gives it (the last entry of a
            sequence is then unused), or about token t itself (the first entry is then unused).
        prompt_lengths: `[N]` tokens of each prompt, without padding, at least 1.
        response_lengths: `[N]` tokens of each response, without padding.

    Raises:
        InvalidInput: a layout that lacks something, or whose lengths do not fit.
    """
    theirs = _responses(rollout, response_lengths)
    ours = _trainer_responses(trainer, shifted, prompt_lengths, response_lengths, prompt_width, cu_seqlens)
    if len(ours) != len(theirs):
        raise InvalidInput(f"trainer holds {len(ours)} sequences, rollout {len(theirs)}")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.numel() != b.numel():
            raise InvalidInput(f"sequence {i}: {a.numel()} response tokens in trainer, {b.numel()} in rollout")
    if not sum(a.numel() for a in ours):
        raise InvalidInput("there is no response token to compare")
    differences = [a.detach().double() - b.detach().double().to(a.device) for a, b in zip(ours, theirs, strict=True)]
    flat = torch.cat(differences).abs()
    return LogprobGap(float(flat.max()), float(flat.mean()), tuple(d.exp().float() for d in differences))


def _trainer_responses(
    trainer: Tensor,
    shifted: bool,
    prompt_lengths: Sequence[int] | Tensor | None,
    response_lengths: Sequence[int] | Tensor | None,
    prompt_width: int | None,
    cu_seqlens: Sequence[int] | Tensor | None,
) -> list[Tensor]:
    back = 1 if shifted else 0
    if prompt_width is not None:
        if trainer.is_nested or trainer.dim() != 2 or response_lengths is None:
            raise InvalidInput("a padded trainer must be [N, P + R] and come with prompt_width and response_lengths")
        lengths = _ints(response_lengths)
        if len(lengths) != trainer.shape[0] or prompt_width < 1 or prompt_width + max(lengths) > trainer.shape[1]:
            raise InvalidInput(
                f"trainer {tuple(trainer.shape)} does not hold prompts of width {prompt_width} and responses {lengths}"
            )
        start = prompt_width - back
        return [row[start : start + n] for row, n in zip(trainer, lengths, strict=True)]
    if prompt_lengths is None:
        raise InvalidInput("pass prompt_width for a padded trainer, or prompt_lengths for a packed or jagged one")
    if trainer.is_nested:
        sequences = list(trainer.unbind())
    elif cu_seqlens is not None:
        flat, bounds = trainer.reshape(-1), _ints(cu_seqlens)
        if bounds[0] != 0 or bounds[-1] != flat.numel() or any(b < a for a, b in pairwise(bounds)):
            raise InvalidInput(f"cu_seqlens {bounds} do not rise from 0 to the {flat.numel()} positions of trainer")
        sequences = [flat[a:b] for a, b in pairwise(bounds)]
    else:
        raise InvalidInput("a trainer without padding must be a nested tensor, or come with cu_seqlens")
    prompts = _ints(prompt_lengths)
    if len(prompts) != len(sequences):
        raise InvalidInput(f"prompt_lengths has {len(prompts)} entries for {len(sequences)} sequences")
    for i, (s, p) in enumerate(zip(sequences, prompts, strict=True)):
        if not 1 <= p <= s.numel():
            raise InvalidInput(f"sequence {i} has {s.numel()} tokens, so its prompt cannot have {p}")
    return [s[p - back : s.numel() - back] for s, p in zip(sequences, prompts, strict=True)]


def _responses(
    rollout: Tensor | Sequence[Tensor | Sequence[float]], lengths: Sequence[int] | Tensor | None
) -> list[Tensor]:
    if isinstance(rollout, Tensor) and rollout.is_nested:
        return list(rollout.unbind())
    if isinstance(rollout, Tensor):
        if rollout.dim() != 2 or lengths is None:
            raise InvalidInput("a padded rollout must be [N, R] and come with response_lengths")
        wanted = _ints(lengths)
        if len(wanted) != rollout.shape[0] or max(wanted, default=0) > rollout.shape[1]:
            raise InvalidInput(f"rollout {tuple(rollout.shape)} does not hold responses of lengths {wanted}")
        return [row[:n] for row, n in zip(rollout, wanted, strict=True)]
    return [r if isinstance(r, Tensor) else torch.tensor(list(r), dtype=torch.float64) for r in rollout]


def _ints(values: Sequence[int] | Tensor) -> list[int]:
    return [int(v) for v in (values.tolist() if isinstance(values, Tensor) else values)]
