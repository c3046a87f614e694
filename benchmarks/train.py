"""What training on merged weights costs: a step beside PEFT's own forward, and beside the frozen base alone.

    python benchmarks/train.py --json train-h200.json --plot train.png     # a GPU: Qwen2.5-7B and Qwen3-30B-A3B
    python benchmarks/train.py --parts layers4 --ranks 32 --profile        # and the kernels of one step
    python benchmarks/train.py --shape tiny --device cpu                   # a smoke test

Parts, each with random weights in bf16, made on the device:

- `layers4`: four decoder layers of Qwen2.5-7B's width, without gradient checkpointing and without a head.
- `whole`: Qwen2.5-7B with gradient checkpointing, and its head in pieces of 1,024 tokens.
- `experts`: eight layers of Qwen3-30B-A3B, adapters on attention and fused experts, without gradient checkpointing.

Three ways to train, on one copy of the weights, in turns:

- `base`: no adapters. The input asks for a gradient, as it does in the other ways, so that backward goes all the way.
- `peft`: PEFT's forward.
- `merged`: `lora_merge.train_merged`.

A step is forward, backward and AdamW on the adapters. The forward of `merged` begins with the merge of what the step
before has changed, so a step has one of these; `merge_ms` is what it takes by itself. Milliseconds are medians over all
turns without the first two steps of each (on a CPU the least). Peak memory is beside the weights: adapters, gradients,
optimizer states and what restores the base count. The JSON is written after every case, so that a time limit loses one
only.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import sync
import torch
from bars import Bar, bars
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lora_merge import Training, UnsupportedAdapter, train_merged
from lora_merge.bench import check_extra, report, timing
from lora_merge.stream.buckets import checksum

Record = dict[str, Any]

WAYS = {"base": "base alone", "peft": "PEFT's forward", "merged": "train_merged"}
"""The option -> what tables and pictures call it."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP = 2
"""Steps of a turn that do not count: the second one lays out how one merge follows another."""
CHUNK = 1024
"""Tokens whose logits exist at a time."""
UPDATE = 0.01
"""Size of the adapters' product, as a share of the weights'."""


@dataclass(frozen=True)
class Part:
    """A model, and how often it is trained.

    Args:
        shape: one of `sync.SHAPES`.
        layers: of it; None for all.
        head: whether the loss is that of next tokens, by the model's head.
        checkpointing: of gradients.
        ranks: of adapters.
        batch, length: of the tokens of a step.
        rounds: turns of each way.
        steps: timed steps of a turn.
        of_base, of_peft: most that a merged step may take, in steps of the base alone, and of PEFT's with float32
            adapters.
    """

    shape: str
    layers: int | None
    head: bool
    checkpointing: bool
    ranks: tuple[int, ...]
    batch: int
    length: int
    rounds: int
    steps: int
    of_base: float
    of_peft: float


PARTS = {
    "layers4": Part("qwen2.5-7b", 4, False, False, (8, 32, 128), 4, 2048, 3, 4, 1.03, 0.62),
    "whole": Part("qwen2.5-7b", None, True, True, (8, 32, 128), 4, 2048, 2, 2, 1.06, 0.62),
    "experts": Part("qwen3-30b-a3b-8", None, False, False, (32,), 4, 2048, 2, 3, math.inf, 0.5),
}
TINY = {name: replace(part, ranks=(4,), batch=2, length=16, rounds=2, steps=1) for name, part in PARTS.items()}
TINY = {
    "layers4": replace(TINY["layers4"], shape="tiny", layers=None),
    "whole": replace(TINY["whole"], shape="tiny"),
    "experts": replace(TINY["experts"], shape="tiny-moe"),
}
SHAPES = {"full": PARTS, "tiny": TINY}


# Models


def build_base(part: Part, device: torch.device) -> Any:
    """A frozen model in training mode; where its head is not used, that and the embedding are small."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = sync.config_of(part.shape, part.layers)
    if not part.head:
        config.vocab_size = 256
    with device:
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    base.requires_grad_(False).train()
    if device.type == "cuda" and "num_experts" in sync.SHAPES[part.shape]:
        base.set_experts_implementation("grouped_mm")  # one kernel for all experts, in every way alike
    if part.checkpointing:
        base.gradient_checkpointing_enable({"use_reentrant": False})
    return base


def with_adapters(base: Any, part: Part, rank: int, dtype: torch.dtype) -> nn.Module:
    """Another model on the same weights, with adapters whose product is `UPDATE` of a weight."""
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import LoraLayer

    shared = {id(tensor): tensor for tensor in (*base.parameters(), *base.buffers())}
    twin = copy.deepcopy(base, dict(shared))
    moe = "num_experts" in sync.SHAPES[part.shape]
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=sync.LINEARS[:4] if moe else sync.LINEARS,
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if moe else None,
    )
    get_peft_model(twin, config)
    trained = [p for p in twin.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.to(dtype)
    spread = base.config.initializer_range
    for layer in (module for module in twin.modules() if isinstance(module, LoraLayer)):
        for name, lora_A in layer.lora_A.items():
            size = float(lora_A.weight.detach().float().std()) * layer.scaling[name] * math.sqrt(rank)
            nn.init.normal_(layer.lora_B[name].weight, std=UPDATE * spread / size)
    return twin


def loss_of(model: Any, part: Part, x: Tensor, labels: Tensor) -> Tensor:
    """Forward.

    Args:
        model: of transformers, for causal language modelling.
        part: says whether its head counts.
        x: `[batch, length, hidden]`, in the place of embeddings.
        labels: `[batch * length]`, tokens.
    """
    hidden = model.model(inputs_embeds=x, use_cache=False).last_hidden_state
    if not part.head:
        return hidden.float().square().mean()
    pieces = [
        checkpoint(_head, model.lm_head, some, tokens, use_reentrant=False)
        for some, tokens in zip(hidden.flatten(0, 1).split(CHUNK), labels.split(CHUNK), strict=True)
    ]
    return torch.stack(pieces).sum() / labels.numel()


def _head(head: nn.Module, hidden: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), tokens, reduction="sum")


# Steps


class Turn(NamedTuple):
    """Steps of one way, one after the other.

    Args:
        steps: milliseconds of each, and of its forward.
        peak: of memory beside the weights, bytes; None on a CPU.
        merge: milliseconds of a merge by itself; None where there is none.
    """

    steps: list[tuple[float, float]]
    peak: int | None
    merge: float | None


class Case:
    """One part with one adapter: a base alone, and a model with adapters on the same weights."""

    def __init__(self, base: Any, part: Part, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.part, self.device, self.base = part, device, base
        self.weights = _allocated(device)
        self.model = with_adapters(base, part, rank, dtype)
        self.trained: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-4, weight_decay=0.0, fused=device.type == "cuda")
        g = torch.Generator(device).manual_seed(0)
        config = base.config
        size = (part.batch, part.length, config.hidden_size)
        self.x = torch.randn(size, generator=g, device=device, dtype=torch.bfloat16).requires_grad_()
        self.labels = torch.randint(config.vocab_size, (part.batch * part.length,), generator=g, device=device)

    def step(self, way: str) -> tuple[float, float]:
        """One step; milliseconds of all of it, and of its forward."""
        model = self.base if way == "base" else self.model
        begin, middle, end = (_stamp(self.device) for _ in range(3))
        _wait(self.device)
        begin.record()
        loss = loss_of(model, self.part, self.x, self.labels)
        middle.record()
        loss.backward()
        if way != "base":
            self.optimizer.step()
        end.record()
        _wait(self.device)
        self.optimizer.zero_grad()
        self.x.grad = None
        return begin.elapsed_time(end), begin.elapsed_time(middle)

    def turn(self, way: str) -> Turn:
        """Some steps after those that warm up."""
        before = _allocated(self.device)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        count, merge = self.part.steps + WARM_UP, None
        with self.way(way) as training:
            found = [self.step(way) for _ in range(count)][WARM_UP:]
            # what adapters and their optimizer hold all the time is none of the base's
            peak = _peak(self.device) - (before if way == "base" else self.weights)
            if isinstance(training, Training):
                if training.merges != count:
                    raise RuntimeError(f"{count} steps were to merge once each, and merged {training.merges} times")
                with torch.no_grad():
                    torch._foreach_mul_(self.trained, 1.0)
                merge = timing.milliseconds(training.refresh, self.device)
        return Turn(found, peak if self.device.type == "cuda" else None, merge)

    def way(self, way: str) -> AbstractContextManager[object]:
        return train_merged(self.model) if way == "merged" else nullcontext()


class _Clock:
    """What a step asks of a CUDA event, on a CPU."""

    def record(self) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, other: _Clock) -> float:
        return 1e3 * (other.at - self.at)


def _stamp(device: torch.device) -> Any:
    return torch.cuda.Event(enable_timing=True) if device.type == "cuda" else _Clock()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def bits_of(model: nn.Module) -> list[int]:
    """A checksum of each weight."""
    return [checksum(p.detach()) for p in model.parameters()]


def measure(case: Case) -> Record:
    """All ways in turns. A way that fails, as memory does not hold it or it is refused, has an error in place of
    figures."""
    before = bits_of(case.base)
    turns: dict[str, list[Turn]] = {way: [] for way in WAYS}
    errors: dict[str, str] = {}
    for _ in range(case.part.rounds):
        for way in [way for way in WAYS if way not in errors]:
            try:
                turns[way].append(case.turn(way))
            except Exception as error:
                errors[way] = f"{type(error).__name__}: {error}"
                case.optimizer.zero_grad()
            if way in errors:  # the traceback is gone, and with it what the step held
                _empty(case.device)
    ways = {way: {"error": errors[way]} if way in errors else figures(turns[way], case.device) for way in WAYS}
    return {"ways": ways, "restored": bits_of(case.base) == before}


def figures(turns: Sequence[Turn], device: torch.device) -> Record:
    """What counts of the turns of one way."""
    typical = timing.typical(device)
    steps = [step for turn in turns for step in turn.steps]
    whole, forward = (typical(column) for column in zip(*steps, strict=True))
    found = {"step_ms": whole, "forward_ms": forward, "steps": steps}
    # the least, as a first turn of a way holds nothing of another one's
    peaks = [turn.peak for turn in turns if turn.peak is not None]
    merges = [turn.merge for turn in turns if turn.merge is not None]
    found |= {"peak_bytes": min(peaks)} if peaks else {}
    return found | ({"merge_ms": typical(merges)} if merges else {})


# Where the time goes


def kernels(case: Case, way: str) -> tuple[dict[str, tuple[int, float]], float]:
    """Calls and milliseconds of each kernel of one step, after two others; and milliseconds of the whole."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or it prints lines of its own
    from torch.profiler import ProfilerActivity, profile

    on_gpu = case.device.type == "cuda"
    with case.way(way):
        case.step(way)
        whole, _ = case.step(way)
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
            case.step(way)
    found = {}
    for event in seen.key_averages():
        spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if spent:
            found[event.key] = (event.count, spent / 1e3)
    return found, whole


def show_kernels(case: Case, title: str, rows: int = 30) -> None:
    """Print the kernels of a merged step beside those of the base alone, the largest differences first."""
    (merged, whole), (base, alone) = kernels(case, "merged"), kernels(case, "base")
    sheet = report.sheet_of(f"{title}: kernels", "kernel", ["calls", "ms", "of the base\nms", "more\nms"])
    nothing = (0, 0.0)
    more = {name: merged.get(name, nothing)[1] - base.get(name, nothing)[1] for name in merged.keys() | base.keys()}
    for name in sorted(more, key=lambda one: -more[one])[:rows]:
        calls, ms = merged.get(name, nothing)
        sheet.add_row(name[:72], str(calls), f"{ms:.2f}", f"{base.get(name, nothing)[1]:.2f}", f"{more[name]:.2f}")
    out = report.console()
    out.print(sheet)
    busy, busy_base = (sum(ms for _, ms in found.values()) for found in (merged, base))
    out.print(
        f"kernels: {busy:.1f} ms of a step of {whole:.1f} ms; of the base alone {busy_base:.1f} of {alone:.1f} ms. "
        "Where the first is much less than the second, the device waits for the host."
    )


# The record


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Part, int, str]]:
    for name in args.parts:
        part = SHAPES[args.shape][name]
        for rank in args.ranks or part.ranks:
            for dtype in args.adapters:
                yield name, part, rank, dtype


def run(args: argparse.Namespace) -> Record:
    """Every case, one after the other; of one part all on the same weights."""
    from importlib.metadata import version

    device = torch.device(args.device)
    record = report.provenance(device)
    record["versions"]["transformers"] = version("transformers")
    record |= {"shape": args.shape, "device": args.device, "cases": []}
    base: Any = None
    built = ""
    for name, part, rank, dtype in cases(args):
        if name != built:
            base = None
            _empty(device)
            base, built = build_base(part, device), name
        case = Case(base, part, rank, DTYPES[dtype], device)
        found: Record = {"part": name, "rank": rank, "adapters": dtype, "tokens": part.batch * part.length}
        found |= {"layers": base.config.num_hidden_layers, "checkpointing": part.checkpointing, "head": part.head}
        found |= {"experts": getattr(base.config, "_experts_implementation", None)} if name == "experts" else {}
        found |= {"weight_bytes": sum(p.nbytes for p in base.parameters())} | measure(case)
        record["cases"].append(found)
        report.save(record, args.json)
        print(f"{title(found)}: {told(found)}", flush=True)
        if args.profile and "step_ms" in found["ways"]["merged"]:
            show_kernels(case, title(found))
        del case
        _empty(device)
    return record


def joined(records: Sequence[Record]) -> Record:
    """One record of several, each of some parts, made on one kind of device with one commit."""
    for name in ("device_name", "commit", "shape"):
        found = {record[name] for record in records}
        if len(found) > 1:
            raise SystemExit(f"records of one run are joined, and these have {name} {', '.join(map(str, found))}")
    if len(records) == 1:
        return records[0]
    cases = [case for record in records for case in record["cases"]]
    return records[0] | {"commands": [record["command"] for record in records], "cases": cases}


def title(case: Record) -> str:
    return f"{case['part']}, rank {case['rank']}, {case['adapters']} adapters"


def told(case: Record) -> str:
    ways = case["ways"]
    return ", ".join(
        f"{WAYS[way]} {found['step_ms']:.1f} ms" if "step_ms" in found else f"{WAYS[way]}: {found['error']}"
        for way, found in ways.items()
    )


def ratio(case: Record, of: str, figure: str = "step_ms") -> float | None:
    """A figure of training on merged weights over that of another way, where both were measured."""
    merged, other = (case["ways"].get(way, {}).get(figure) for way in ("merged", of))
    return merged / other if merged and other else None


def asked(record: Record) -> Iterator[tuple[str, float | None, float]]:
    """What, what came out, and the most that was asked for."""
    for case in record["cases"]:
        part = PARTS[case["part"]]
        if part.of_base < math.inf:
            yield f"{title(case)}: step beside the base alone", ratio(case, "base"), part.of_base
        if case["adapters"] == "fp32":
            yield f"{title(case)}: step beside PEFT's", ratio(case, "peft"), part.of_peft
        else:
            yield f"{title(case)}: memory beside PEFT's", ratio(case, "peft", "peak_bytes"), 1.0


def show(record: Record) -> None:
    """Print the figures, and how they stand to what was asked for."""
    heads = ["base\nms", "PEFT\nms", "merged\nms", "x\nbase", "x\nPEFT", "forward\nx base", "merge\nms"]
    heads += ["base\nGiB", "PEFT\nGiB", "merged\nGiB"]
    sheet = report.sheet_of(f"A training step, {record['device_name']}", "case", heads)

    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    for case in record["cases"]:
        ways = case["ways"]
        steps = [cell(ways[way].get("step_ms"), ".1f") for way in WAYS]
        ratios = [ratio(case, "base"), ratio(case, "peft"), ratio(case, "base", "forward_ms")]
        peaks = [ways[way].get("peak_bytes") for way in WAYS]
        sheet.add_row(
            title(case).removesuffix(" adapters"), *steps, *(cell(one, ".3f") for one in ratios),
            cell(ways["merged"].get("merge_ms"), ".1f"), *(cell(peak and peak / 2**30, ".2f") for peak in peaks),
        )  # fmt: skip
    out = report.console()
    out.print(sheet)
    for case in record["cases"]:
        for way, found in case["ways"].items():
            if "error" in found:
                out.print(f"{title(case)}, {WAYS[way]}: {found['error']}", markup=False)
        if not case["restored"]:
            out.print(f"{title(case)}: THE BASE DID NOT COME BACK")
    for what, value, most in asked(record):
        if record["device"] == "cuda" and value is not None and value > most:
            out.print(f"missed: {what}: {value:.3f}, asked {most}")
    out.print(f"Memory is beside the weights. {record['versions']}", markup=False)


def draw(record: Record, file: Path) -> None:
    """Steps of each case, in steps of the base alone: PEFT's forward, and merged weights. Of several ranks 32 alone."""
    shown = [case for case in record["cases"] if "step_ms" in case["ways"]["base"]]
    shown = [case for case in shown if case["rank"] == 32] or shown
    if not shown:
        raise SystemExit("a picture needs a case that went through")
    groups, longest = [], 1.0
    for case in shown:
        group, alone = [], case["ways"]["base"]["step_ms"]
        for way, label in (
            ("peft", f"{case['part']}, rank {case['rank']}, {case['adapters']}: PEFT"),
            ("merged", "merged"),
        ):
            if "step_ms" in case["ways"][way]:
                ms = case["ways"][way]["step_ms"]
                group.append(Bar(label, ms / alone, f"{ms / alone:.2f}, {ms:.0f} ms", way == "merged"))
                longest = max(longest, ms / alone)
        groups.append(group)
    note = f"bf16 weights, {shown[0]['tokens']:,} tokens a step. {record['device_name']}."
    bars(file, "A training step with LoRA, beside the base alone", groups, limit=(1, "the frozen base alone"), start=0,
         beyond=True, end=1.4 * longest, note=note)  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--shape", choices=SHAPES, default="full", help="tiny: for a smoke test")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, nargs="+", help="of adapters; default: 8 32 128, of experts 32")
    parser.add_argument("--adapters", nargs="+", choices=DTYPES, default=list(DTYPES), help="their dtypes")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step of each case, too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here, as PNG")
    parser.add_argument(
        "--draw", type=Path, nargs="+", metavar="FILE",
        help="measure nothing: join what --json wrote, show it, and --plot and --json that",
    )  # fmt: skip
    args = parser.parse_args()
    if args.plot:
        check_extra(plot=True)
    return args


def main() -> None:
    args = parse()
    if args.draw:
        record = joined([json.loads(file.read_text()) for file in args.draw])
        report.save(record, args.json)
    else:
        record = run(args)
    show(record)
    if args.plot:
        draw(record, args.plot)
    errors = (case["ways"]["merged"].get("error", "") for case in record["cases"])
    if any(error and not error.startswith(UnsupportedAdapter.__name__) for error in errors):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
