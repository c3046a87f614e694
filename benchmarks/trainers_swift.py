"""ms-swift for trainers.py: its GRPO trainer of random weights, made by its own entry."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import sync
import torch
from trainers import Trainer, readable, tokenizer

if sys.platform == "linux" and "VLLM_PLUGINS" not in os.environ:
    os.environ["VLLM_PLUGINS"] = "lora_merge"  # vLLM's own wants torchvision


def line(args: argparse.Namespace, folder: Path) -> list[str]:
    """A command line of `swift rlhf`."""
    rewards = folder / "rewards.py"
    rewards.write_text(
        "from swift.rewards import ORM, orms\n\n\nclass Nothing(ORM):\n"
        "    def __call__(self, completions, **kwargs):\n        return [0.0] * len(completions)\n\n\n"
        "orms['nothing'] = Nothing\n"
    )
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}]} for i in range(8)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "rlhf_type": "grpo", "model": str(folder), "model_type": "qwen2", "template": "qwen2_5", "use_hf": "true",
        "dataset": str(folder / "data.jsonl"), "output_dir": str(folder / "out"), "external_plugins": str(rewards),
        "reward_funcs": "nothing", "check_model": "false", "add_version": "false", "report_to": "none",
        "torch_dtype": "bfloat16", "attn_impl": "sdpa", "split_dataset_ratio": "0", "use_vllm": "true",
        "vllm_mode": "colocate", "vllm_max_model_len": "64", "vllm_enforce_eager": "true", "max_length": "48",
        "vllm_engine_kwargs": json.dumps({"load_format": "dummy"}), "max_completion_length": "8", "max_steps": "1",
        "vllm_gpu_memory_utilization": str(args.gpu_memory), "per_device_train_batch_size": "2", "beta": "0",
        "num_generations": "2", "lora_rank": str(args.rank), "target_modules": "all-linear", "init_weights": "false",
        "dataset_num_proc": "1", "dataloader_num_workers": "0", "use_cpu": str(args.device == "cpu").lower(),
        "bf16": str(args.device == "cuda").lower(), "gradient_checkpointing": "false",
    }  # fmt: skip
    return [part for name, value in flags.items() for part in (f"--{name}", value)]


@contextmanager
def random_weights(device: str, home: str) -> Iterator[None]:
    """Checkpoints are not read: models are made of their configuration.

    Args:
        device: where numbers are drawn.
        home: where the trainer would have what it has read.
    """
    from transformers import AutoModelForCausalLM

    def made(pretrained_model_name_or_path: Any, *args: Any, config: Any, **options: Any) -> Any:
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=options.get("dtype") or options["torch_dtype"])
        model.config._name_or_path = model.name_or_path = str(pretrained_model_name_or_path)
        return model.to(home)

    with mock.patch.object(AutoModelForCausalLM, "from_pretrained", made):
        yield


@contextmanager
def started(args: argparse.Namespace, folder: Path) -> Iterator[Trainer]:
    """swift's `GRPOTrainer`, engine in its process."""
    from swift.pipelines.train.rlhf import SwiftRLHF

    from lora_merge.integrations.ms_swift.trainers import pushing
    from lora_merge.integrations.options import Options

    kept: list[Any] = []
    told: list[dict[str, float]] = []

    class Untrained(SwiftRLHF):
        def train(self, trainer: Any) -> Any:
            kept.append(trainer)

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29517")}
    sync.config_of(args.shape).save_pretrained(folder)
    tokenizer(folder)
    with readable(), random_weights(args.device, args.device):
        Untrained(line(args, folder)).main()
        (trainer,) = kept

        def ours() -> Callable[[], object]:
            trainer.__class__ = pushing("grpo", type(trainer))
            trainer._lora_merge_options = Options.from_environment()
            trainer._tell = told.append
            trainer._begin(trainer._load_state_dict_to_vllm, True)
            return trainer._move_model_to_vllm

        ways = {"swift's own": lambda: trainer._move_model_to_vllm, "lora_merge": ours}
        yield Trainer(
            "ms-swift", ("ms-swift",), trainer.model, ways, lambda: round(1e6 * told[-1]["lora_merge/megabytes"])
        )
        trainer.engine.engine.engine_core.shutdown()
