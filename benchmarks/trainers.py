"""What one sync of weights takes in a real trainer: the trainer's own way beside this package's, in one run.

    make .venv-vllm/trl/done && PYTHONPATH=.venv-vllm/trl .venv-vllm/bin/python benchmarks/trainers.py
    python benchmarks/trainers.py --trainer verl --shape qwen2.5-7b --device cuda --json out.json

A trainer with random weights, a LoRA on every linear layer and a vLLM engine of its own; what training calls before
each rollout is called again and again, in the trainer's own way and in ours:

- `trl`: `VLLMGeneration.sync_weights` of a `GRPOTrainer`, engine colocated; before and after `attach`.
- `swift`: `_move_model_to_vllm` of a `GRPOTrainer`, engine colocated; before and after it gets this package's class.
- `verl`: `get_per_tensor_param` of the FSDP2 engine, by verl's bucket sender into its worker extension in another
  process; and a push to the same engine, in place of verl's transport.

Each needs the packages of its file in requirements/. verl needs no Ray here, and of its file only verl, tensordict,
codetiming, omegaconf, antlr4-python3-runtime, orjson, pyvers, TransferQueue, datasets, multiprocess, pandas, pyarrow.

On a CPU vLLM packs its weights, which the trainers' own ways cannot load; there they are kept as a GPU has them.

Of each way: milliseconds a sync (the median on a GPU, the least on a CPU), peak memory of the trainer's process beside
what was in use before it, and the share of the adapted base weights whose bits are others after `--repeat` syncs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "LORA_MERGE": ""}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sync
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lora_merge.bench import report, timing

Record = dict[str, Any]


@dataclass
class Trainer:
    """A trainer before its first step, with its engine.

    Args:
        name: in words.
        packages: what to say the versions of.
        model: whose adapted base weights are looked at.
        ways: makes a sync ready by its name, and returns it; in the order in which they are measured.
        nbytes: of the last of our syncs.
    """

    name: str
    packages: tuple[str, ...]
    model: nn.Module
    ways: dict[str, Callable[[], Callable[[], object]]]
    nbytes: Callable[[], int]


def tokenizer(folder: Path, size: int = 0) -> Any:
    """Bytes as tokens; with `size` of them in all, further ones that no text has."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2TokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), size)}
    made = Qwen2TokenizerFast(vocab=vocabulary, merges=[], eos_token="ÿ", pad_token="þ", unk_token="þ")
    made.save_pretrained(folder)
    return made


@contextmanager
def readable() -> Iterator[None]:
    """vLLM's linear layers keep their weights as they were loaded, on CPUs too, where its own loaders work then."""
    from unittest import mock

    from vllm.model_executor.layers import utils

    from lora_merge.engine.vllm.loading.loader import Loader

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    kept: Any = mock.patch.object(Loader, "_laid_anew", return_value=[])
    with (
        mock.patch.object(utils, "dispatch_cpu_unquantized_gemm", plain),
        nullcontext() if torch.cuda.is_available() else kept,
    ):
        yield


def grpo(args: argparse.Namespace, folder: Path, prompts: Sequence[str], reward: Any, **options: Any) -> Any:
    """TRL's `GRPOTrainer` of a random policy, engine in its process, on a CPU without CUDA's settings.

    Args:
        args: `shape`, `rank`, `device` and `gpu_memory` count; `layers` where there is one.
        folder: for the configuration, the tokenizer and what TRL writes.
        prompts: of the data.
        reward: as TRL takes it.
        options: of `GRPOConfig`, beside the ones here.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model: Any = sync.build_policy(args.shape, args.rank, args.device, getattr(args, "layers", None))
    model.get_base_model().config.save_pretrained(folder)
    model.get_base_model().config._name_or_path = model.name_or_path = str(folder)
    config = GRPOConfig(
        output_dir=str(folder / "out"), use_cpu=args.device == "cpu", bf16=args.device == "cuda", report_to="none",
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=args.gpu_memory, **options,
    )  # fmt: skip
    return GRPOTrainer(
        model=model, reward_funcs=reward, args=config, processing_class=tokenizer(folder),
        train_dataset=Dataset.from_dict({"prompt": list(prompts)}),
    )  # fmt: skip


@contextmanager
def trl(args: argparse.Namespace, folder: Path) -> Iterator[Trainer]:
    """TRL's `GRPOTrainer`, engine in its process."""
    from lora_merge.integrations.trl import attach, engine_options

    def nothing(completions: list[str], **kwargs: Any) -> list[float]:
        return [0.0] * len(completions)

    with readable(), engine_options(load_format="dummy", dtype="bfloat16", enforce_eager=True):
        trainer = grpo(
            args, folder, ["a", "b"], nothing, per_device_train_batch_size=2, num_generations=2,
            max_completion_length=8, vllm_max_model_length=64,
        )  # fmt: skip
        rollout: list[Any] = []

        def ours() -> Callable[[], object]:
            rollout.append(attach(trainer))
            return rollout[0].sync_weights

        ways = {"TRL's own": lambda: trainer.vllm_generation.sync_weights, "lora_merge": ours}
        yield Trainer("TRL", ("trl",), trainer.model, ways, lambda: rollout[0].report.nbytes)
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()


def adapted(model: nn.Module) -> dict[str, Tensor]:
    """The base weights that have an adapter, as far as this rank holds them."""
    found = {name: p.detach() for name, p in model.named_parameters() if name.endswith(".base_layer.weight")}
    return {name: p.to_local() if isinstance(p, DTensor) else p for name, p in found.items()}


def measured(one: Callable[[], object], model: nn.Module, args: argparse.Namespace) -> Record:
    """`--repeat` syncs after a first one, and the drift that all of them leave."""
    device = torch.device(args.device)
    before = {name: p.clone() for name, p in adapted(model).items()}
    one()
    runs = [timing.observe(one, device) for _ in range(args.repeat)]
    changed = sum(int((p != before[name]).sum()) for name, p in adapted(model).items())
    return {
        "ms": timing.typical(device)([run.ms for run in runs]),
        "extra_bytes": max(run.peak_bytes for run in runs),
        "drift": changed / sum(p.numel() for p in before.values()),
    }


def trainer_of(args: argparse.Namespace, folder: Path) -> AbstractContextManager[Trainer]:
    """The one that was asked for; each imports its own packages, which exclude each other."""
    if args.trainer == "trl":
        return trl(args, folder)
    return import_module(f"trainers_{args.trainer}").started(args, folder)


def run(args: argparse.Namespace) -> Record:
    """All ways in one trainer."""
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder, trainer_of(args, Path(folder)) as trainer:
        ways = {name: measured(ready(), trainer.model, args) for name, ready in trainer.ways.items()}
        nbytes = trainer.nbytes()
    copy_ms = timing.typical(device)(timing.copies(nbytes, device, args.repeat))
    made = report.provenance(device)
    made["versions"] |= {name: version(name) for name in trainer.packages} | {"vllm": version_of_vllm()}
    return made | {
        "trainer": trainer.name, "shape": args.shape, "rank": args.rank, "device": args.device, "repeat": args.repeat,
        "bytes": nbytes, "copy_ms": copy_ms, "ways": ways,
    }  # fmt: skip


def version_of_vllm() -> str:
    """Its distribution for CPUs has another name."""
    try:
        return version("vllm-cpu")
    except PackageNotFoundError:
        return version("vllm")


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
    parser.add_argument("--trainer", choices=["trl", "verl", "swift"], default="trl")
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
