"""Which weights an engine's answer was computed with, where pushes keep the KV cache of requests in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import InvalidInput

_KEY = "lora_merge"
_STREAMED = (
    "this answer says nothing of its versions: it is of an engine that no push with cache='keep' has reached before it "
    "ended, was aborted, or was streamed over HTTP, where vLLM leaves that out (of versions of an adapter, pushed with "
    "keep=, version_of() of the sync reads the version)"
)


class Span(NamedTuple):
    """A stretch `[start, end)` of an answer that one version has computed.

    Args:
        version: as the engine names it: "merged@17", "adapter@17", the name of a loaded adapter, or "default" for the
            weights that it was started with.
        start, end: indices of tokens, or positions.
    """

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WeightSpans:
    """Which weights an answer was computed with.

    Args:
        tokens: of the tokens of the answer, from 0 on: which weights made the logits that each was sampled from.
        kv: of the KV cache at its end, by position in prompt and answer: which weights computed it. Its last token has
            none.
    """

    tokens: tuple[Span, ...]
    kv: tuple[Span, ...]

    @property
    def mixed(self) -> bool:
        """Whether the KV cache is of several versions: later ones have gone on from what earlier ones computed."""
        return len(self.kv) > 1

    def by_token(self) -> list[str]:
        """Return the version of each token of the answer."""
        return [span.version for span in self.tokens for _ in range(span.start, span.end)]


def weight_spans(answer: Any) -> WeightSpans:
    """Return which weights an answer of a vLLM engine was computed with, if pushes to it keep caches.

        spans = lora_merge.weight_spans(output)
        spans.tokens                              # (Span("merged@16", 0, 212), Span("merged@17", 212, 512))
        spans.mixed                               # True: merged@17 went on from the KV cache of merged@16

    Args:
        answer: a `RequestOutput` that has ended, or the JSON of a server's answer to one prompt (`/v1/completions`,
            `/v1/chat/completions`), not streamed; of one sequence (`n=1`).

    Raises:
        InvalidInput: it says nothing of its versions, has not ended, or has several sequences.
    """
    said: Any
    if isinstance(answer, Mapping):
        sequences, said = answer.get("choices") or (), answer.get("kv_transfer_params")
        ended = bool(sequences)
        length = (answer.get("usage") or {}).get("completion_tokens")
    else:
        sequences, said = getattr(answer, "outputs", ()), getattr(answer, "kv_transfer_params", None)
        ended = getattr(answer, "finished", False)
        length = None  # of an output that was streamed, the last piece alone is here
    if len(sequences) > 1:
        raise InvalidInput(
            f"answer has {len(sequences)} sequences, and vLLM carries the versions of one alone: ask for n=1, and for "
            "one prompt with each request"
        )
    if not ended:
        raise InvalidInput("answer must be a RequestOutput that has ended, or the JSON of an answer; its last one says")
    if not isinstance(said, Mapping) or _KEY not in said:
        raise InvalidInput(_STREAMED)
    found = said[_KEY]
    tokens = _read(found["tokens"])
    if length is not None:  # tokens behind a stop string are cut off
        tokens = tuple(Span(one.version, one.start, min(one.end, length)) for one in tokens if one.start < length)
    return WeightSpans(tokens, _read(found["kv"]))


def _read(spans: Sequence[Sequence[Any]]) -> tuple[Span, ...]:
    return tuple(Span(str(version), int(start), int(end)) for version, start, end in spans)
