"""A real checkpoint and a real adapter on disk: written, trained and read back through transformers and peft."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidInput

# Everything lies on this disk; neither library needs to ask a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[2]

QWEN2: dict[str, Any] = {
    "vocab_size": 256,  # bytes
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
"""122 million parameters."""


def write_checkpoint(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Save a Qwen2 model with random weights in HF format (config.json, model.safetensors)."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    with _quiet(), _complete(folder) as part:
        Qwen2ForCausalLM(Qwen2Config(**config)).to(dtype).save_pretrained(part)


def train_adapter(folder: Path, checkpoint: Path, rank: int, steps: int = 12) -> list[float]:
    """Train a LoRA adapter on a text that stays as it is, the licence, a byte a token; save it in PEFT's format.

    Args:
        folder: where `adapter_config.json` and `adapter_model.safetensors` go.
        checkpoint: the base, with a vocabulary of bytes.
        rank: of the adapter on every linear layer; alpha is twice that.
        steps: of AdamW, on a window of 128 bytes each.

    Returns:
        The loss at each step.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    tokens = torch.frombuffer(bytearray(_licence()), dtype=torch.uint8).long()
    with _quiet(), _complete(folder) as part:
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
        losses = []
        for _ in range(steps):
            start = int(torch.randint(len(tokens) - 128, ()))
            window = tokens[None, start : start + 128]
            loss = model(input_ids=window, labels=window).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        model.save_pretrained(part)
    return losses


def _licence() -> bytes:
    """Return the licence of this package, from the repository or an installed wheel."""
    if (ROOT / "LICENSE").is_file():
        return (ROOT / "LICENSE").read_bytes()
    files = distribution("lora-merge").files or ()
    return next(Path(str(file.locate())) for file in files if file.name == "LICENSE").read_bytes()


def elements(folder: Path) -> int:
    """Return how many elements the weights of a checkpoint have; 0 where its files are no safetensors."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return total


def load(
    checkpoint: Path, adapter: Path, dtype: torch.dtype, adapter_dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Return a PeftModel from disk; and the base weight of its n-th LoRA layer, as loaded."""
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForCausalLM

    with _quiet():
        with _told("--model", checkpoint):
            base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        with _told("--adapter", adapter):
            model = PeftModel.from_pretrained(base, str(adapter))
        model = model.to(device)
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.lora_A.to(adapter_dtype)
        layer.lora_B.to(adapter_dtype)
    bases = [layer.get_base_layer().weight.detach().clone() for layer in layers]
    return model, bases.__getitem__


@contextmanager
def _told(option: str, folder: Path) -> Iterator[None]:
    """Turn what a library raises about a folder into an error that names the option."""
    try:
        yield
    except Exception as error:
        message = str(error).strip().partition("\n")[0]
        raise InvalidInput(f"{option} {folder} cannot be loaded: {type(error).__name__}: {message}") from error


@contextmanager
def _complete(folder: Path) -> Iterator[Path]:
    """Yield a folder that is renamed to `folder` once all is there: an interrupted run leaves nothing half written."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}")
    part.mkdir(parents=True)
    yield part
    part.rename(folder)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars, and what it deprecates and PEFT still calls, out of the output."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
    logging.enable_progress_bar()
