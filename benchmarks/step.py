"""A whole RL step of TRL's GRPO trainer, rollout, sync and update, in five ways to bring the policy to vLLM.

    PYTHONPATH=.venv-vllm/trl .venv-vllm/bin/python benchmarks/step.py --shape tiny --device cpu     # a smoke test
    python benchmarks/step.py --json step-h200.json --plot step.png                  # GPU: Qwen2.5-7B's shape, rank 32
    python benchmarks/step.py --ranks 2                                              # DDP, a GPU and an engine a rank

Each way is a training in a process of its own, with the same random policy and data, and an engine in the trainer's
process, with CUDA graphs on a GPU:

- `trl`: TRL's own sync: PEFT's `merge_adapter`, `load_weights` tensor by tensor, `unmerge_adapter`.
- `adapter`: `attach(trainer, mode="adapter")`: the adapter alone crosses, and vLLM's LoRA path serves it.
- `merged`: `attach(trainer)`: merged weights are written into the engine.
- `trained`: `attach(trainer, train="merged")`: the same, and the update computes with the weights that are pushed.
- `shared`: `attach(trainer, share=True)`: as `trained`, with the weights in memory once.

A step is what transformers' `Trainer` takes for one: `--completions` answers a rank of exactly `--new-tokens` each,
sampled by one call of vLLM, and one update from them in batches of `--batch`. `rollout` is TRL's call of the engine,
`sync` its call before it, `update` all the rest of the step: rewards, log-probs, forward, backward, optimizer. Seconds
are medians over `--steps` after two that warm up. `drift` is the share of the adapted base weights with other bits
at the end. The JSON is written after every way, so that a time limit loses one way only. TRL's packages are those of
requirements/trl.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import sync
import torch
import trainers
from bars import Bar, stacked

from lora_merge.bench import check_extra, report

Record = dict[str, Any]

WAYS = {
    "trl": "TRL's own merge",
    "adapter": "LoRA path",
    "merged": "lora_merge",
    "trained": "lora_merge, trained merged",
    "shared": "lora_merge, one copy",
}
"""The option -> what tables and pictures call it."""
PHASES = ("rollout", "sync", "update")
WARM_UP = 2


class Clock:
    """Seconds of each phase of each step, on this rank."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._begin = 0.0

    def now(self) -> float:
        """When all that was launched is done."""
        sync.synchronize(self.device)
        return time.perf_counter()

    def watch(self, owner: Any, name: str, phase: str) -> None:
        """Count calls of a method of one object to a phase."""
        call: Callable[..., Any] = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            begin = self.now()
            try:
                return call(*args, **kwargs)
            finally:
                self._spent[phase] += self.now() - begin

        setattr(owner, name, watched)

    def begin(self) -> None:
        """A step begins."""
        self._spent = dict.fromkeys(PHASES, 0.0)
        self._begin = self.now()

    def end(self) -> None:
        """It ends; what no watched call took is the update."""
        total = self.now() - self._begin
        self._spent["update"] = total - sum(self._spent.values())
        self.steps.append(self._spent)
        print({phase: round(seconds, 4) for phase, seconds in self._spent.items()}, flush=True)


def callback_of(clock: Clock) -> Any:
    """Tells a trainer's steps to a clock."""
    from transformers import TrainerCallback

    class Steps(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.begin()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.end()

    return Steps()


def even(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """A reward that differs between answers, whatever they say: the share of even tokens."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]


def train(args: argparse.Namespace, folder: Path) -> Record:
    """One way: a training, its steps, and the drift that it leaves."""
    from transformers import PrinterCallback

    from lora_merge.integrations.trl import attach, engine_options

    lora = {"enable_lora": True, "max_lora_rank": max(args.rank, 8)} if args.part == "adapter" else {}
    start = {"load_format": "dummy", "dtype": "bfloat16", "enforce_eager": args.device == "cpu"} | lora
    prompts = [chr(97 + i % 26) * args.prompt_tokens for i in range(args.completions)]
    with trainers.readable(), engine_options(**start):
        trainer = trainers.grpo(
            args, folder, prompts, even, max_steps=WARM_UP + args.steps, per_device_train_batch_size=args.batch,
            gradient_accumulation_steps=args.completions // args.batch, num_generations=args.group,
            max_completion_length=args.new_tokens, vllm_max_model_length=args.prompt_tokens + args.new_tokens,
            generation_kwargs={"ignore_eos": True}, logging_steps=1, save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        if args.part == "trained":
            attach(trainer, mode="merged", train="merged")
        elif args.part == "shared":
            first = attach(trainer)
            assert first is not None
            first.sync_weights()  # the engine has the trainer's weights, and no dummy ones of its own
            first.detach()
            attach(trainer, share=True)
        elif args.part != "trl":
            attach(trainer, mode=args.part)
        clock = Clock(args.device)
        clock.watch(trainer.vllm_generation, "sync_weights", "sync")
        clock.watch(trainer.vllm_generation, "generate", "rollout")
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(callback_of(clock))
        before = {name: p.cpu().clone() for name, p in trainers.adapted(trainer.model).items()}
        trainer.train()
        after = trainers.adapted(trainer.model)
        changed = sum(int((p != before[name].to(p.device)).sum()) for name, p in after.items())
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
    lengths = [entry["completions/mean_length"] for entry in trainer.state.log_history if "loss" in entry]
    if any(length != args.new_tokens for length in lengths):
        raise RuntimeError(f"answers of {args.new_tokens} tokens were asked for, got {lengths}")
    timed = clock.steps[WARM_UP:]
    return {
        "seconds": {phase: statistics.median(step[phase] for step in timed) for phase in PHASES},
        "steps": clock.steps,
        "drift": changed / sum(p.numel() for p in before.values()),
    }


def part(args: argparse.Namespace) -> None:
    """A way, in this process, which then ends; of several ranks the first one writes."""
    rank = int(os.environ.get("RANK", "0"))
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with tempfile.TemporaryDirectory() as folder:
        found = train(args, Path(folder))
    sync.end_part(found, args.json if rank == 0 else Path(os.devnull))


def run(args: argparse.Namespace) -> Record:
    """Every way, one after the other."""
    record = report.provenance(torch.device(args.device))
    record["versions"] |= {"trl": version("trl"), "vllm": trainers.version_of_vllm()}
    names = ("shape", "rank", "ranks", "completions", "group", "batch", "prompt_tokens", "new_tokens", "device")
    record |= {name: getattr(args, name) for name in names}
    record |= {"layers": args.layers or sync.SHAPES[args.shape]["num_hidden_layers"]}
    record |= {"cuda_graphs": args.device == "cuda", "timed_steps": args.steps, "ways": {}}
    # torchrun gives each rank one thread otherwise, which makes a model's random weights for minutes
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.ranks)))
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}")
    launcher = (sys.executable, *(torchrun if args.ranks > 1 else ()))
    for name in args.ways:
        record["ways"][name] = sync.run_part(name, True, __file__, launcher)
        report.save(record, args.json)
    return record


def measured(record: Record) -> dict[str, dict[str, float]]:
    """Seconds by phase, of the ways that went through."""
    return {name: way["seconds"] for name, way in record["ways"].items() if "seconds" in way}


def title(record: Record) -> str:
    """Which model and adapter, where."""
    devices = f"{record['ranks']} x " if record["ranks"] > 1 else ""
    return f"{sync.name_of(record)}, rank {record['rank']}, {devices}{record['device_name']}"


def show(record: Record) -> None:
    """Print the figures."""
    heading = f"{title(record)}: seconds a step"
    sheet = report.sheet_of(heading, "way", [*PHASES, "step", "base weights\nchanged"])
    ways = measured(record)
    for name, seconds in ways.items():
        total = sum(seconds.values())
        cells = [f"{seconds[phase]:.3f}" for phase in PHASES]
        of_trl = f" ({total / sum(ways['trl'].values()):.0%})" if name != "trl" and "trl" in ways else ""
        drift = record["ways"][name].get("drift")  # a way that a time limit cut has none
        changed = "?" if drift is None else f"{drift:.1%}"
        sheet.add_row(WAYS[name], *cells, f"{total:.3f}{of_trl}", changed)
    out = report.console()
    out.print(sheet)
    for name, way in record["ways"].items():
        if "error" in way:
            out.print(f"{WAYS[name]}: {way['error']}", markup=False)
    graphs = "with CUDA graphs" if record["cuda_graphs"] else "eager"
    out.print(
        f"{record['completions']} answers a rank of {record['new_tokens']} tokens, {graphs}, {record['versions']}",
        markup=False,
    )


def seconds_of(value: float) -> str:
    """In milliseconds below a second."""
    return f"{1e3 * value:.0f} ms" if value < 1 else f"{value:.2f} s"


def draw(record: Record, file: Path) -> None:
    """A stacked bar for each way."""
    ways = measured(record)
    if not ways:
        raise SystemExit("a picture needs a way that went through")
    rows = []
    for name, seconds in ways.items():
        total = sum(seconds.values())
        label = f"{seconds_of(total)}\nsync {seconds_of(seconds['sync'])}"
        rows.append(
            (Bar(WAYS[name].replace(", ", ",\n"), total, label, name in ("merged", "trained", "shared")), seconds)
        )
    versions = record["versions"]
    note = f"{title(record)}.\n{record['completions']} answers a rank of {record['new_tokens']} tokens. "
    note += f"TRL {versions['trl']}, vLLM {versions['vllm']}. Red: sync."
    stacked(file, "A GRPO step in TRL: rollout, sync, update", rows, thin="sync", unit="s", note=note)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, where memory asks for it")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter (default %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=1, help="processes, a GPU each (default %(default)s)")
    parser.add_argument("--completions", type=int, help="answers a rank and step; default: 64, on a CPU 4")
    parser.add_argument("--group", type=int, help="answers to one prompt; default: 8, on a CPU 2")
    parser.add_argument("--batch", type=int, help="answers a backward pass; default: 8, on a CPU 2")
    parser.add_argument("--prompt-tokens", type=int, help="default: 128, on a CPU 8")
    parser.add_argument("--new-tokens", type=int, help="default: 512, on a CPU 8")
    parser.add_argument("--steps", type=int, default=5, help="timed ones (default %(default)s)")
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="the engine's share (default %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here, as PNG")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing: --plot what --json wrote")
    parser.add_argument("--part", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.draw and not args.plot:
        parser.error("--draw needs --plot, where the picture goes")
    sizes = {
        "completions": (64, 4),
        "group": (8, 2),
        "batch": (8, 2),
        "prompt_tokens": (128, 8),
        "new_tokens": (512, 8),
    }
    for name, (gpu, cpu) in sizes.items():
        setattr(args, name, getattr(args, name) or (cpu if args.device == "cpu" else gpu))
    for name in ("batch", "group"):
        if args.completions % getattr(args, name):
            parser.error(f"--completions {args.completions} has to be a multiple of --{name} {getattr(args, name)}")
    return args


def main() -> None:
    args = parse()
    sync.quiet()
    if args.part:
        part(args)
    if args.plot:
        check_extra(plot=True)
    if args.draw:
        draw(json.loads(args.draw.read_text()), args.plot)
        return
    record = run(args)
    show(record)
    if args.plot:
        draw(record, args.plot)


if __name__ == "__main__":
    main()
