"""GRPO by TRL with a LoRA adapter and a vLLM engine in the same process, which lora_merge keeps at the policy.

    python examples/trl_grpo.py --out runs/trl
    python examples/trl_grpo.py --out runs/trl --mode adapter
    python examples/trl_grpo.py --out runs/trl --model Qwen/Qwen2.5-0.5B --cuda

Needs `pip install ".[vllm]" trl` in a clone. `attach(trainer)` is the switch; the command line `trl grpo` takes
LORA_MERGE=1 instead. Without --model a tiny one with random weights is made in --out, which a CPU trains in seconds;
a GPU has to know bfloat16 (compute capability 8.0 or newer). The reward is the share of letters in an answer. The
check ends the run if the engine answers as another policy than the one that is trained.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from lora_merge.integrations.trl import attach, engine_options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", help="default: a tiny one")
    parser.add_argument("--mode", choices=["merged", "adapter"], default="merged", help="what the engine serves")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--cuda", action="store_true", help="bfloat16 on a GPU; default: float32 on the CPU")
    args = parser.parse_args()

    config = GRPOConfig(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=16,
        learning_rate=1e-4 if args.model else 1e-2,
        logging_steps=1,
        report_to="none",
        use_cpu=not args.cuda,
        bf16=args.cuda,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=64,
        vllm_gpu_memory_utilization=0.3,
    )
    options: dict[str, Any] = {} if args.cuda else {"dtype": "float32", "enforce_eager": True}
    if args.mode == "adapter":
        options |= {"enable_lora": True, "max_lora_rank": args.rank}
    with engine_options(**options):
        trainer = GRPOTrainer(
            model=args.model or str(tiny_model(args.out / "base")),
            reward_funcs=letters,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [f"{i % 10}{i % 7}" for i in range(64)]}),
            peft_config=LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear"),
        )
    rollout = attach(trainer, mode=args.mode, check=True)
    trainer.train()
    if rollout is not None:
        print(f"last push: {rollout.report}")
    ratios = [entry["lora_merge/ratio_max"] for entry in trainer.state.log_history if "lora_merge/ratio_max" in entry]
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(
        f"{len(ratios)} steps, importance ratios up to {max(ratios):.6f}, reward {rewards[0]:.3f} to {rewards[-1]:.3f}"
    )


def letters(completions: list[str], **kwargs: Any) -> list[float]:
    """The share of letters in each answer."""
    return [sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def tiny_model(folder: Path) -> Path:
    """A Qwen2 of two layers with bytes as tokens."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2TokenizerFast

    if not folder.exists():
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
        Qwen2ForCausalLM(Qwen2Config(vocab_size=256, num_hidden_layers=2, **sizes)).save_pretrained(folder)
        vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
        ends = {"eos_token": "ÿ", "pad_token": "þ", "unk_token": "þ"}
        Qwen2TokenizerFast(vocab=vocabulary, merges=[], **ends).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
