"""What `trl grpo --reward_funcs trl_rewards.vowels` imports: a reward, and in the test with a server what stands in for
NCCL, which CPUs have not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from trl.generation.vllm_client import VLLMClient


def vowels(completions: list[str], **kwargs: Any) -> list[float]:
    """A reward that differs between answers."""
    return [sum(ord(character) % 3 for character in text) / 10 for text in completions]


class Carried(VLLMClient):
    """TRL's client, but for the two methods that need NCCL: what it is to send is kept in files, and brought to the
    server by a `VllmSync` of a plain model that holds it."""

    folder = Path(os.environ.get("TRL_STREAMS", ""))

    def init_communicator(self, device: Any = 0) -> None:
        self.count = 0

    def update_named_params(
        self, metadata: list[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, Tensor]]
    ) -> None:
        from transformers import AutoModelForCausalLM

        from lora_merge import VllmSync

        sent = {name: tensor.clone() for name, tensor in named_params}
        assert metadata == [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in sent.items()
        ]
        torch.save(sent, self.folder / f"stream-{self.count}.pt")
        self.count += 1
        model = AutoModelForCausalLM.from_pretrained(os.environ["TRL_BASE"])
        missing = model.load_state_dict(sent, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}, missing  # tied
        with patch("torch.distributed.is_initialized", return_value=False):  # the other ranks have no part in it
            sync = VllmSync(model, self.base_url)
            sync.push()
            sync.close()


if "TRL_STREAMS" in os.environ:
    import trl.generation.vllm_generation

    trl.generation.vllm_generation.VLLMClient = Carried
