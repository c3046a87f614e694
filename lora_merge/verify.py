"""Checks: what rounding loses, whether a push wrote all of an engine, how far log-probs of both sides differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from .choices import DType, Rounding
from .errors import InvalidInput
from .kernels.checks import check_dtype
from .models.delta import Delta, whole_job
from .models.operands import Operands, Turn, merge_plan
from .models.peft.read import read_deltas
from .shards.ranks import Ranks
from .stream.buckets import checksum
from .stream.weights import MergedWeights


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of one worker the last full push wrote; made by `coverage`.

    Args:
        written: number of elements of parameters and persistent buffers that the push wrote.
        elements: number of all elements of parameters and persistent buffers.
        state: what the worker holds now, such as "merged@3".
    """

    written: int
    elements: int
    state: str

    @property
    def complete(self) -> bool:
        """Whether every element was written."""
        return 0 < self.elements == self.written


def coverage(engine: Any) -> list[Coverage]:
    """Ask each worker how much of its parameters and persistent buffers the last full push wrote.

        assert all(worker.complete for worker in lora_merge.verify.coverage(llm))

    Args:
        engine: one handle, as for `VllmSync`, or an `sglang.Engine`. For an `AsyncLLM` await `acoverage`.

    Returns:
        one entry for each worker; its `complete` says whether everything was written.

    Raises:
        InvalidInput: `engine` is no handle of a vLLM or SGLang engine.
        RuntimeError, OSError: the engine does not answer, or has to be awaited.
    """
    from .engine.control.calls import drive

    return drive(acoverage(engine))


async def acoverage(engine: Any) -> list[Coverage]:
    """Ask each worker what the last full push wrote, in the event loop of an `AsyncLLM`.

        workers = await lora_merge.verify.acoverage(engine)

    Arguments, result and errors are those of `coverage`.
    """
    from .engine.handles import control_of
    from .engine.state import State

    answers = await control_of(engine).rpc("coverage")
    found = []
    for answer in answers:
        written, elements = answer["elements"]
        found.append(Coverage(written, elements, str(State(**answer["state"]))))
    return found


def checksums(weights: MergedWeights) -> dict[str, int]:
    """Compute a checksum of every tensor of a stream; `VllmSync.push(verify=True)` compares the same ones.

        before = lora_merge.verify.checksums(lora_merge.MergedWeights(model))

    Args:
        weights: a stream; it is iterated once. Of a sharded model: on every rank.

    Returns:
        HF name of each tensor -> its checksum.

    Raises:
        LoraMergeError: as iterating `MergedWeights`.
    """
    return {name: checksum(tensor) for name, tensor in weights}


@dataclass(frozen=True, slots=True)
class RoundingLoss:
    """How much of the update of one parameter survives rounding; W is the weight and D the update.

    Args:
        name: HF name of the parameter.
        loss: `||round(W+D) - (W+D)|| / ||D||`: 0 means that the update is kept whole, 1 is as bad as losing all of it;
            infinite where something is no number.
        cosine: cosine similarity of the update after rounding, `round(W+D) - W`, and D; NaN where rounding removes all
            of it.
    """

    name: str
    loss: float
    cosine: float


def rounding_loss(
    model: nn.Module, dtype: DType = torch.bfloat16, *, rounding: Rounding = "nearest", seed: int | None = None
) -> list[RoundingLoss]:
    """Measure how much of each adapter's update is lost when merged weights are rounded to the rollout's dtype.

        worst = max(lora_merge.verify.rounding_loss(model, torch.bfloat16), key=lambda one: one.loss)

    Args:
        model: a PEFT model, whole on one device.
        dtype: dtype of the rollout's weights: bfloat16, float16 or float32.
        rounding: as in `merge`; stochastic rounding loses more in each draw, and nothing on average.
        seed: as in `merge`.

    Returns:
        one entry for each adapted parameter; parameters whose update is zero have loss 0 and cosine 1.

    Raises:
        InvalidInput: another dtype, or a sharded model.
        UnsupportedAdapter, AlreadyMerged: as `read_deltas`.
    """
    found = check_dtype(dtype)
    if found is None:
        raise InvalidInput("dtype must be bfloat16, float16 or float32, got None")
    changes = ((delta.name, change_of(delta, found, rounding, seed)) for delta in read_deltas(model))
    return [RoundingLoss(name, change.loss, change.cosine) for name, change in changes]


@dataclass(frozen=True, slots=True)
class Change:
    """What an adapter changes of one parameter, and what rounding leaves of that; sums of squares over all elements, W
    the weight, D the update, R the rounded result.

    Args:
        weight, update: of W and of D.
        lost: of R - (W + D).
        arrived: of R - W.
        kept: sum of (R - W) * D.
    """

    weight: float = 0.0
    update: float = 0.0
    lost: float = 0.0
    arrived: float = 0.0
    kept: float = 0.0

    def __add__(self, other: Change) -> Change:
        return Change(*map(add, astuple(self), astuple(other)))

    @property
    def loss(self) -> float:
        """As of `RoundingLoss`."""
        lost = (self.lost / self.update) ** 0.5 if self.update else 0.0
        return math.inf if math.isnan(lost) else lost  # `max` would pass over what is no number

    @property
    def cosine(self) -> float:
        """As of `RoundingLoss`."""
        if not self.update:
            return 1.0
        return self.kept / (self.update * self.arrived) ** 0.5 if self.arrived else float("nan")


def change_of(delta: Delta, dtype: torch.dtype, rounding: Rounding = "nearest", seed: int | None = None) -> Change:
    """Return what a delta changes of its weight, which is whole and has values, in float64, a block of rows at a
    time."""
    if not delta.weight.whole:
        raise InvalidInput(f"{delta.name} is sharded: measure the rounding loss on a model that is whole on one device")
    weight = delta.weight.pieces[0].tensor
    rounded = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    operands = Operands([Turn([delta], everything={delta.name})], Ranks(), weight.device)
    operands.refresh()
    merge_plan([whole_job(delta, weight, rounded)], operands).run(rounding=rounding, seed=seed)
    if delta.rows:
        return _replaced(delta, weight, rounded)
    lora_A, lora_B, scaling = operands.factors(delta)
    magnitude = None if delta.magnitude is None else operands.whole(delta.magnitude).flatten().double()
    found = Change()
    for e, (w, r) in enumerate(zip(delta.matrices(weight), delta.matrices(rounded), strict=True)):
        a, b = lora_A[e].double(), lora_B[:, :, e].double()
        step = max(_BLOCK // max(w.shape[1], 1), 1)
        for begin in range(0, w.shape[0], step):
            rows = slice(begin, begin + step)
            base = w[rows].double()
            exact = base + scaling * (b[rows] @ a)
            if magnitude is not None:
                exact *= (magnitude[rows] / torch.linalg.vector_norm(exact, dim=1)).unsqueeze(1)
            found += _change(base, exact, r[rows].double())
    return found


def _change(base: Tensor, exact: Tensor, rounded: Tensor) -> Change:
    change, there, lost = exact - base, rounded - base, rounded - exact
    w2, d2, l2, a2 = (float(t.square().sum()) for t in (base, change, lost, there))
    return Change(w2, d2, l2, a2, float((there * change).sum()))


def _replaced(delta: Delta, weight: Tensor, rounded: Tensor) -> Change:
    rest = torch.linalg.vector_norm(weight, dtype=torch.float64).square()
    found = Change()
    for rows in delta.rows:
        at = torch.tensor(rows.indices, device=weight.device)
        values = rows.values.pieces[0].tensor.to(weight.device)
        found += _change(weight[at].double(), values.double(), rounded[at].double())
    return replace(found, weight=float(rest))


_BLOCK = 1 << 22
"""Elements of which float64 copies are made at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class LogprobGap:
    """How far the rollout's log-probs lie from the trainer's, over response tokens; made by `logprob_gap`.

    Args:
        maximum: largest `|trainer - rollout|`, in nats.
        mean: mean `|trainer - rollout|`, in nats.
        ratios: importance ratio `exp(trainer - rollout)` of each token, one float32 tensor a response.
    """

    maximum: float
    mean: float
    ratios: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        """How many response tokens were compared."""
        return sum(r.numel() for r in self.ratios)

    @property
    def ratio_mean(self) -> float:
        """Mean importance ratio."""
        return float(torch.cat(self.ratios).mean())

    @property
    def ratio_range(self) -> tuple[float, float]:
        """Smallest and largest importance ratio."""
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
    """Compare the rollout's log-probs of its own tokens with the trainer's, response token by response token.

        gap = lora_merge.verify.logprob_gap(
            trainer, rollout, shifted=True, prompt_width=256, response_lengths=[17, 42]
        )
        print(gap)

    If both compute with the same weights, all importance ratios are 1 up to rounding. The trainer's log-probs come in
    one of three layouts:

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
        prompt_width: P, the padded width of prompts; for the padded layout.
        cu_seqlens: `[N + 1]` positions where sequences begin, and the end of the last; for the packed layout.

    Returns:
        the differences, and the importance ratio of each token.

    Raises:
        InvalidInput: a layout that lacks an argument, whose lengths do not fit, or that has no response token.
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
    return [r if isinstance(r, Tensor) else torch.tensor(list(r), dtype=torch.float64, device="cpu") for r in rollout]


def _ints(values: Sequence[int] | Tensor) -> list[int]:
    return [int(v) for v in (values.tolist() if isinstance(values, Tensor) else values)]
