"""Prompts with images on their way to a colocated engine: it has to read what the trainer trains on.

TRL's processor puts a token for each part of an image into a prompt, and TRL hands vLLM such prompts beside the images.
vLLM expands the first of these tokens once more, so the engine answers another prompt than the one that is trained on
(huggingface/trl#6294). Here the engine gets prompts that nobody has expanded, and what it makes of them is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ..metrics import PolicyGap


class Prompts:
    """The prompts of one trainer, as its engine has to get them.

    Args:
        trainer: of TRL.
        generation: its `VLLMGeneration`.
    """

    def __init__(self, trainer: Any, generation: Any) -> None:
        self._trainer, self._generation = trainer, generation
        self._known: dict[tuple[int, ...], list[int]] = {}
        """Token ids of a prompt as the trainer has them -> as a tokenizer alone makes them."""
        self._sees = getattr(trainer, "_is_vlm", False) and hasattr(trainer, "_tokenize_prompts")

    def install(self) -> None:
        """Note from now on how the trainer's prompts look unexpanded, if it trains a model that sees images."""
        if self._sees:
            self._trainer._tokenize_prompts = self._tokenize

    def detach(self) -> None:
        """Restore the trainer's own method."""
        vars(self._trainer).pop("_tokenize_prompts", None)
        self._known = {}

    def _tokenize(self, prompts: Any) -> Any:
        """Call the trainer's `_tokenize_prompts`, and note what it renders."""
        processor, texts = self._trainer.processing_class, list[str]()
        render = processor.apply_chat_template

        def noted(*args: Any, **options: Any) -> Any:
            rendered = render(*args, **options | {"tokenize": False, "return_dict": False})
            texts.extend([rendered] if isinstance(rendered, str) else rendered)
            return render(*args, **options)

        own = vars(processor).get("apply_chat_template")  # a user's
        processor.apply_chat_template = noted
        try:
            found = type(self._trainer)._tokenize_prompts(self._trainer, prompts)
        finally:
            del processor.apply_chat_template
            if own is not None:
                processor.apply_chat_template = own
        expanded, images = found[:2]
        seen = images is not None and len(texts) == len(expanded)
        self._known = {tuple(ids): self._plain(text) for ids, text in zip(expanded, texts, strict=True)} if seen else {}
        return found

    def _plain(self, text: str) -> list[int]:
        """Return the tokens of a rendered prompt, as the processor adds special ones to them."""
        tokenizer = self._trainer.processing_class.tokenizer
        bos = tokenizer.bos_token
        ids: list[int] = tokenizer(text, add_special_tokens=bos is None or not text.startswith(bos))["input_ids"]
        return ids

    def to_engine(self, rows: Sequence[Any]) -> list[Any]:
        """Return the rows that TRL hands to `LLM.generate`, those with images unexpanded. Collective among the ranks
        that share an engine: each of them hands it the rows of all."""
        known = self._known
        if self._sees and self._generation.tensor_parallel_size > 1:
            everywhere: list[Any] = [None] * self._generation.tensor_parallel_size
            dist.all_gather_object(everywhere, known, group=self._generation.tp_group)
            known = {ids: plain for one in everywhere for ids, plain in one.items()}
        return [_unexpanded(row, known) if _sees(row) else row for row in rows]

    def check(self, rows: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check that the engine has read the prompts that TRL trains on.

        Raises:
            PolicyGap: it has read another one.
        """
        for row, output in zip(rows, outputs, strict=True) if any(map(_sees, rows)) else ():
            trained = list(row["prompt_token_ids"]) if _sees(row) else None
            if trained is not None and trained != list(output.prompt_token_ids):
                raise PolicyGap(
                    f"the engine answered a prompt with images of {len(output.prompt_token_ids)} tokens, and the one "
                    f"that is trained on has {len(trained)}: vLLM expands placeholders of images that TRL has expanded "
                    "(huggingface/trl#6294). lora_merge undoes that for prompts of the data set; it cannot for images "
                    "that tools return, nor where vLLM's processor for this model expands a prompt otherwise than "
                    "transformers' (mm_processor_kwargs, a size of images): have them alike, or train on text"
                )


def _sees(row: Any) -> bool:
    return isinstance(row, Mapping) and bool(row.get("multi_modal_data")) and "prompt_token_ids" in row


def _unexpanded(row: Mapping[str, Any], known: Mapping[tuple[int, ...], list[int]]) -> Mapping[str, Any]:
    """Return a row with its prompt unexpanded, and with what followed that in a conversation with tools."""
    ids = tuple(row["prompt_token_ids"])
    begin = max((prompt for prompt in known if ids[: len(prompt)] == prompt), key=len, default=())
    return {**row, "prompt_token_ids": [*known[begin], *ids[len(begin) :]]} if begin else row
