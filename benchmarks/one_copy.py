"""One copy of the weights for a trainer and a colocated vLLM: memory, pushes, and GRPO on a small card.

    python benchmarks/one_copy.py --json one-copy-h200.json                          # GPU: Qwen2.5-7B's shape, rank 32
    python benchmarks/one_copy.py --parts grpo --limit 24 --json one-copy-24.json    # TRL's GRPO within 24 GiB
    python benchmarks/one_copy.py --parts grpo --limit 80 --shape qwen2.5-32b --ways shared
    python benchmarks/one_copy.py --device cpu --shape tiny                          # a smoke test

`memory`: an engine with CUDA graphs and random weights, and in its process a LoRA policy of the same shape, in three
ways after each other: `one copy`, made on meta and never loaded, whose parameters lie in the engine (`share=True`),
with bf16 and with float32 adapters; `two copies`, with memory of its own, trained on merged weights and pushed. Of
each: device memory of trainer and engine with the weights merged, without adapters, KV cache and what the
engine holds beside weights, in copies of the weights (`of_weights`); the median of `--repeats` pushes, each after a
change of the adapters, in milliseconds and in copies of the same bytes; what the device is busy of it, and the rest
(`host_ms`); and how far log-probs of the engine's own answers are from those of the trainer's forward.

`grpo`: `--steps` steps of TRL's GRPOTrainer, bf16, gradient checkpointing, fused AdamW on the adapters, in a process
for each way that may allocate `--limit` GiB of device memory, what lies outside of torch's allocator included as far
as that is known (`torch.cuda.set_per_process_memory_fraction`): `trl`, TRL's own sync; `merged`, this package without
sharing; `shared`. The JSON is written after every part. TRL's packages are those of requirements/trl.txt.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sync
import torch
import trainers
from torch import nn

from lora_merge.bench import report

Record = dict[str, Any]
sync.SHAPES["qwen2.5-32b"] = {
    "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
    "num_attention_heads": 40, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
WAYS = {"trl": "TRL's own merge", "merged": "lora_merge, two copies", "shared": "lora_merge, one copy"}
GiB = 1 << 30
CONTEXT = 0.7 * GiB
"""What CUDA's context and its libraries take beside torch's allocator, about."""


def empty_policy(args: argparse.Namespace, adapters: torch.dtype = torch.float32) -> Any:
    """A policy of the shape on meta: no tensor has values but buffers."""
    from accelerate import init_empty_weights
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with init_empty_weights():
        base = AutoModelForCausalLM.from_config(sync.config_of(args.shape, args.layers), dtype=torch.bfloat16)
    config = LoraConfig(r=args.rank, target_modules=sync.LINEARS, init_lora_weights=False)
    return get_peft_model(base, config, autocast_adapter_dtype=adapters == torch.float32).eval()


def randomise(model: nn.Module) -> None:
    """Give an engine weights as a model has them before training; vLLM's dummy ones are too small for opinions."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1)
            else:
                parameter.normal_(std=0.02, generator=generator)


# Memory and pushes


def allocated(args: argparse.Namespace) -> int:
    """Bytes of this process's tensors on the GPU; 0 on a CPU, where nobody counts them."""
    gc.collect()
    if args.device == "cpu":
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_allocated())


def changed(model: nn.Module) -> None:
    """Move the adapters as a step of an optimizer would."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 1e-3)


def forward(model: nn.Module, args: argparse.Namespace) -> None:
    """What merges."""
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3, 4]], device=args.device))


def busy_ms(run: Callable[[], object], args: argparse.Namespace) -> float:
    """How long the device computes and copies in one call."""
    if args.device == "cpu":
        return 0.0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 1e3


def gap(model: Any, engine: Any, args: argparse.Namespace) -> float:
    """Mean distance of the log-probs that the engine has of its greedy answers from the trainer's."""
    from vllm import SamplingParams

    prompts = [list(range(3 + i, 19 + i)) for i in range(4)]
    sampling = SamplingParams(temperature=0, max_tokens=16, logprobs=0, detokenize=False, ignore_eos=True)
    outputs = engine([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    distances = []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]], device=args.device)).logits[0, len(prompt) - 1 : -1]
        ours = logits.float().log_softmax(-1).gather(-1, torch.tensor(answer, device=args.device)[:, None])[:, 0]
        theirs = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, answer, strict=True)]
        distances += (ours.cpu() - torch.tensor(theirs)).abs().tolist()
    return statistics.mean(distances)


def measured(args: argparse.Namespace, brings: Any, model: Any, before: int) -> Record:
    """One way.

    Args:
        brings: the `VllmSync`.
        before: bytes that were allocated with the engine alone.
    """
    changed(model)
    first = brings.push()
    forward(model, args)
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    # The second copy of the adapters, which re-merging holds, is counted.
    changed(model)
    brings.push()
    extra = allocated(args) - before - adapters if args.device == "cuda" else None
    milliseconds = []
    for _ in range(args.repeats):
        changed(model)
        sync.synchronize(args.device)
        begin = time.perf_counter()
        brings.push()
        sync.synchronize(args.device)
        milliseconds.append(1e3 * (time.perf_counter() - begin))
    changed(model)
    busy = busy_ms(brings.push, args)
    nbytes = first.shared + first.nbytes
    copy = sync.copy_ms(nbytes, args.device, args.repeats)
    push = statistics.median(milliseconds)
    found = {
        "shared_bytes": first.shared, "moved_bytes": first.nbytes, "adapters_bytes": adapters, "extra_bytes": extra,
        "of_weights": None if extra is None else 1 + extra / nbytes,
        "push_ms": push, "busy_ms": busy, "host_ms": push - busy, "copy_ms": copy,
        "x_copy": push / copy, "pushes_ms": milliseconds, "gap": gap(model, brings.generate, args),
    }  # fmt: skip
    print(found, flush=True)
    return found


def part_memory(args: argparse.Namespace, folder: Path) -> Record:
    """Trainer and engine in one process, in three ways."""
    from lora_merge import VllmSync, train_merged

    found: Record = {}
    options: Record = {"enforce_eager": args.eager or args.device == "cpu"}
    options |= {"kv_cache_memory_bytes": 1 << 30} if args.device == "cuda" else {}
    with trainers.readable(), sync.start_engine(args, folder, layers=args.layers, **options) as llm:
        llm.apply_model(randomise)
        for name, dtype in (("bf16 adapters", torch.bfloat16), ("float32 adapters", torch.float32)):
            before = allocated(args)
            model = empty_policy(args, dtype)
            brings = VllmSync(model, llm, share=True)
            found[f"one copy, {name}"] = measured(args, brings, model, before)
            found[f"one copy, {name}"]["sharing"] = str(brings.sharing)
            brings.close(meta=True)
            del model, brings
        before = allocated(args)
        model = sync.build_policy(args.shape, args.rank, args.device, args.layers)
        with train_merged(model):
            brings = VllmSync(model, llm)
            found["two copies, float32 adapters"] = measured(args, brings, model, before)
            brings.close()
    return found


# GRPO within a limit


class Peak:
    """The most device memory that was in use while it is watched, of all of the device."""

    def __init__(self, device: str) -> None:
        self.bytes, self._over = 0, threading.Event()
        if device == "cuda":
            self._idle = self._used()
            threading.Thread(target=self._watch, daemon=True).start()

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.bytes = max(self.bytes, self._used() - self._idle)

    def end(self) -> int:
        self._over.set()
        return self.bytes


@contextmanager
def limited(args: argparse.Namespace) -> Iterator[None]:
    """This process may allocate `--limit` GiB."""
    if args.device == "cuda" and args.limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((args.limit * GiB - CONTEXT) / total)
    yield


def trainer_of(args: argparse.Namespace, folder: Path) -> Any:
    """A `GRPOTrainer` and its engine. A model on meta stays there until it lies in the engine."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Config(GRPOConfig):
        @property
        def place_model_on_device(self) -> bool:
            return args.part != "shared"

    model: Any = empty_policy(args)
    if args.part != "shared":
        model = sync.build_policy(args.shape, args.rank, args.device)
    model.get_base_model().config.save_pretrained(folder)
    model.get_base_model().config._name_or_path = model.name_or_path = str(folder)
    prompts = [chr(97 + i % 26) * args.prompt_tokens for i in range(args.completions)]
    config = Config(
        output_dir=str(folder / "out"), use_cpu=args.device == "cpu", bf16=args.device == "cuda", report_to="none",
        use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=args.gpu_memory, max_steps=args.steps,
        per_device_train_batch_size=args.batch, gradient_accumulation_steps=args.completions // args.batch,
        num_generations=args.group, max_completion_length=args.new_tokens, gradient_checkpointing=True,
        vllm_max_model_length=args.prompt_tokens + args.new_tokens, generation_kwargs={"ignore_eos": True},
        optim="adamw_torch_fused", learning_rate=1e-5, logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    return GRPOTrainer(
        model=model, reward_funcs=even, args=config, processing_class=trainers.tokenizer(folder),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )  # fmt: skip


def even(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs between answers, whatever they say: the share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def part_grpo(args: argparse.Namespace, folder: Path) -> Record:
    """Steps of one way, or the error that it ended with."""
    from lora_merge.integrations.trl import attach, engine_options

    start: Record = {"load_format": "dummy", "dtype": "bfloat16", "enforce_eager": args.eager or args.device == "cpu"}
    start |= {"max_num_seqs": args.completions, "max_num_batched_tokens": 2048}
    start |= {"kv_cache_memory_bytes": args.cache << 20} if args.device == "cuda" else {}
    peak, found = Peak(args.device), Record()
    begin = time.perf_counter()
    try:
        with limited(args), trainers.readable(), engine_options(**start):
            trainer = trainer_of(args, folder)
            found["engine_s"] = time.perf_counter() - begin
            if args.part == "shared":
                trainer.vllm_generation.llm.apply_model(randomise)
            ours = args.part != "trl"
            rollout = attach(trainer, train="merged", share=args.part == "shared") if ours else None
            stamps = [time.perf_counter()]
            trainer.add_callback(_each_step(lambda: stamps.append(time.perf_counter())))
            trainer.train()
            if rollout is not None:
                found["report"] = str(rollout.report)
            found["steps_s"] = [after - before for before, after in itertools.pairwise(stamps)]
            found["losses"] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    except Exception as error:  # out of memory has several names in vLLM and torch
        found["error"] = f"{type(error).__name__}: {error}"[:600]
    if args.device == "cuda":
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
    found["peak_bytes"] = peak.end()
    return found


def _each_step(call: Callable[[], None]) -> Any:
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            call()

    return Steps()


# All of it


def part(args: argparse.Namespace) -> None:
    """A part or a way, in this process, which then ends."""
    with tempfile.TemporaryDirectory() as folder:
        run = part_memory if args.part == "memory" else part_grpo
        sync.end_part(run(args, Path(folder)), args.json)


def run(args: argparse.Namespace) -> Record:
    record = report.provenance(torch.device(args.device))
    record["versions"] |= {"vllm": trainers.version_of_vllm()}
    record["versions"] |= {"trl": version("trl")} if "grpo" in args.parts else {}
    names = ("shape", "layers", "rank", "repeats", "limit", "steps", "completions", "group", "batch", "prompt_tokens")
    record |= {name: getattr(args, name) for name in (*names, "new_tokens", "cache", "device", "eager")}
    for name in args.parts:
        if name == "memory":
            record["memory"] = sync.run_part("memory", True, __file__)
        else:
            record["grpo"] = {}
            for way in args.ways:
                record["grpo"][way] = sync.run_part(way, True, __file__)
                report.save(record, args.json)
        report.save(record, args.json)
    return record


def show(record: Record) -> None:
    """Print the figures."""
    out, title = report.console(), f"{record['shape']}, rank {record['rank']}, {record['device_name']}"
    memory = record.get("memory", {})
    if "error" not in memory and memory:
        columns = ["memory\nof weights", "push\nms", "x copy", "device\nms", "host\nms", "log-prob\ngap"]
        sheet = report.sheet_of(title, "", columns)
        for name, way in memory.items():
            cells = [way[cell] for cell in ("of_weights", "push_ms", "x_copy", "busy_ms", "host_ms")]
            sheet.add_row(name, *("" if cell is None else f"{cell:.2f}" for cell in cells), f"{way['gap']:.4f}")
        out.print(sheet)
    if "grpo" in record:
        limit = f" within {record['limit']:g} GiB" if record["limit"] else ""
        sheet = report.sheet_of(f"GRPO in TRL, {title}{limit}", "way", ["steps", "s a step", "peak\nGiB", "error"])
        for name, way in record["grpo"].items():
            steps = way.get("steps_s", [])
            each = f"{statistics.median(steps):.2f}" if steps else ""
            peak = f"{way.get('peak_bytes', 0) / GiB:.1f}"
            sheet.add_row(WAYS[name], str(len(steps)), each, peak, way.get("error", "")[:60])
        out.print(sheet)
    if "error" in memory:
        out.print(memory["error"], markup=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has (memory alone)")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", nargs="+", choices=["memory", "grpo"], default=["memory", "grpo"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of grpo")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--repeats", type=int, default=20, help="pushes (default %(default)s)")
    parser.add_argument("--limit", type=float, default=24.0, help="GiB of grpo; 0: none (default %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of grpo (default %(default)s)")
    parser.add_argument("--completions", type=int, default=8, help="answers a step (default %(default)s)")
    parser.add_argument("--group", type=int, default=4, help="answers to one prompt (default %(default)s)")
    parser.add_argument("--batch", type=int, default=2, help="answers a backward pass (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, help="default: 128, on a CPU 8")
    parser.add_argument("--new-tokens", type=int, help="default: 256, on a CPU 8")
    parser.add_argument("--cache", type=int, default=512, help="MiB of the KV cache in grpo (default %(default)s)")
    parser.add_argument("--gpu-memory", type=float, default=0.15, help="share that vLLM asks for (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--part", choices=["memory", *WAYS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, gpu in (("prompt_tokens", 128), ("new_tokens", 256)):
        setattr(args, name, getattr(args, name) or (8 if args.device == "cpu" else gpu))
    return args


def main() -> None:
    args = parse()
    sync.quiet()
    if args.part:
        part(args)
    record = run(args)
    show(record)


if __name__ == "__main__":
    main()
