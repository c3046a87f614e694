"""What verl's tests train on: a tiny Qwen2 with a tokenizer of bytes, questions, and a reward."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# verl's rollout masks what its tokenizer has no token for, and its trainer does not: the vocabulary has no more.
VOCABULARY = 256 + len(SPECIAL)
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **options):
    return sum(map(ord, solution_str)) % 7 / 7
"""


def save_tokenizer(folder: Path, size: int = 0) -> None:
    """Bytes as tokens, and three special ones.

    Args:
        size: of the vocabulary, if others follow that no text has: verl's rollouts draw none beyond it, and its trainer
            counts all that the model has.
    """
    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {token: 256 + i for i, token in enumerate(SPECIAL)}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end, _, stop = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=stop, pad_token=end, chat_template=CHAT)
    fast.save_pretrained(folder)


def save_model(folder: Path, *, tied: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint with random weights."""
    save_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=257,
        eos_token_id=258,
        pad_token_id=256,
    )
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


def save_task(folder: Path) -> None:
    """Questions for `data.train_files`, and a reward function."""
    import pandas

    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {
            "data_source": "count",
            "prompt": [{"role": "user", "content": f"say {i}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i in range(32)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "questions.parquet")
    (folder / "reward.py").write_text(REWARD)
