"""`lora-merge plan`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput
from .output import REFUSED, add_json, tell

if TYPE_CHECKING:
    from ..sizing import Policy, Row, Setup

_GB = 1e9
_FLOATS = ("bfloat16", "float16", "float32")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _dtype(*more: str) -> Any:
    """Return a parser of a dtype's name, short or long."""

    def parse(text: str) -> str:
        name = _SHORT.get(text, text)
        if name not in (*_FLOATS, *more):
            raise argparse.ArgumentTypeError(f"{text!r}: expected one of {', '.join((*_SHORT, *_FLOATS, *more))}")
        return name

    return parse


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a config.json, the folder of one, or a name on the hub")
    parser.add_argument(
        "--memory", type=float, metavar="GB", help="memory of one GPU: prints what is left of it, and whether it fits"
    )
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of the trainer, which FSDP2 shards over (default: 1)")
    parser.add_argument("--ddp", action="store_true", help="each GPU of the trainer holds the whole model")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of one engine (default: 1)")
    parser.add_argument("--apart", action="store_true", help="engines have GPUs of their own, reached over NCCL")
    parser.add_argument(
        "--sleep", type=int, choices=(0, 1, 2), default=0, help="level of the engine's sleep in training (default: 0)"
    )
    parser.add_argument("--offload", action="store_true", help="the trainer's weights leave the GPU for a rollout")
    parser.add_argument(
        "--merge", choices=("trainer", "engine"), default="trainer", help="who adds the adapters (default: trainer)"
    )
    parser.add_argument(
        "--mode", choices=("merged", "adapter"), default="merged", help="what the engine holds (default: merged)"
    )
    parser.add_argument("--train-merged", action="store_true", help="the trainer computes with merged weights")
    parser.add_argument("--share", action="store_true", help="one copy of the weights for trainer and engine")
    parser.add_argument(
        "--rank", type=int, default=32, help="rank of the adapter (default: 32); 0: no adapter, all is trained"
    )
    parser.add_argument(
        "--targets", default="all-linear", help="modules with adapters: all-linear, or names with commas between"
    )
    parser.add_argument("--experts", default="", metavar="NAMES", help="PEFT's target_parameters, with commas between")
    parser.add_argument(
        "--dtype", type=_dtype("nf4", "int8"), default="bfloat16", help="dtype of the trainer's base; nf4: QLoRA"
    )
    parser.add_argument(
        "--adapter-dtype", type=_dtype(), default="float32", help="dtype of the adapter (default: float32, as in PEFT)"
    )
    parser.add_argument("--engine-dtype", type=_dtype("fp8"), default="bfloat16", help="dtype of the engine's weights")
    add_json(parser)


def plan(options: argparse.Namespace) -> int:
    from ..sizing import Setup, check, estimate, host_bytes, read_policy, totals

    names = options.targets.split(",")
    setup = Setup(
        gpus=options.gpus, ddp=options.ddp, tp=options.tp, apart=options.apart, base=options.dtype,
        adapters=options.adapter_dtype, engine=options.engine_dtype, merge=options.merge, mode=options.mode,
        train_merged=options.train_merged, share=options.share, sleep=options.sleep, offload=options.offload,
    )  # fmt: skip
    check(setup)  # before the model is read
    policy = read_policy(
        options.model,
        rank=options.rank,
        targets=names if len(names) > 1 or names[0] != "all-linear" else "all-linear",
        parameters=[name for name in options.experts.split(",") if name],
    )
    rows, host = estimate(policy, setup), host_bytes(policy, setup)
    sums = totals(rows, setup)
    fits = None if options.memory is None else _largest(sums) <= options.memory * _GB
    result = {
        "model": policy.name, "parameters": policy.parameters, "adapter_parameters": policy.lora_A + policy.lora_B,
        "setup": setup, "rows": rows, "totals": sums, "host": host, "fits": fits,
    }  # fmt: skip
    words = _words(policy, setup, rows, sums, host, options.memory)
    if options.memory is not None:
        words += "\n" + "\n".join(_advice(policy, setup, options.memory))
    tell(options, words, result)
    return REFUSED if fits is False else 0


_LEANER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("--share", {"share": True}),
    ("--sleep 1", {"sleep": 1}),
    ("--sleep 1 --offload", {"sleep": 1, "offload": True}),
    ("--sleep 1 --engine-dtype fp8", {"sleep": 1, "engine": "fp8"}),
    ("--sleep 1 --dtype nf4", {"sleep": 1, "base": "nf4"}),
    ("--sleep 1 --dtype nf4 --engine-dtype fp8", {"sleep": 1, "base": "nf4", "engine": "fp8"}),
)
"""Options that take less memory."""


def _largest(sums: dict[str, dict[str, int]]) -> int:
    return max(n for total in sums.values() for n in total.values())


def _advice(policy: Policy, setup: Setup, memory: float) -> list[str]:
    """Return what to set in vLLM if the setup fits, else the options with which it would."""
    from ..sizing import estimate, totals

    rows = estimate(policy, setup)
    if _largest(totals(rows, setup)) <= memory * _GB:
        return [] if setup.apart else _utilization(rows, setup, memory)
    found = []
    for words, change in _LEANER:
        leaner = replace(setup, **change)
        try:
            largest = _largest(totals(estimate(policy, leaner), leaner))
        except InvalidInput:  # the options do not go together
            continue
        if largest <= memory * _GB:
            found.append(f"{words} (takes {_gb(largest)})")
    if found:
        return [f"It does not fit into {memory:g} GB. It would with: {'; '.join(found)}."]
    first = "Spread it" if policy.modules else "Train an adapter (--rank 32), spread it"
    ways = f"{first} over more GPUs (--gpus, --tp), or take a smaller model."
    return [f"It does not fit into {memory:g} GB. {ways}"]


def _utilization(rows: list[Row], setup: Setup, memory: float) -> list[str]:
    """Return between which values vLLM's gpu_memory_utilization lies, of which its weights and KV cache are a part."""
    steps = ("push", "rollout") if setup.sleep else ("training", "push", "rollout")
    mine = [row for row in rows if row.side == "engine"]
    if setup.share:  # the base's memory is the engine's
        mine = [row for row in rows if row.what.startswith("base weights")]
    weights = max(sum(getattr(row, step) for row in mine) for step in steps)
    beside = max(sum(getattr(row, step) for row in rows if row not in mine) for step in steps)
    low, high = weights / _GB / memory, 1 - beside / _GB / memory
    bounds = f"above {low:.2f} (its weights), below {high:.2f} (the trainer has the rest)"
    return [f"vLLM's gpu_memory_utilization: {bounds}."]


def _words(
    policy: Policy, setup: Setup, rows: list[Row], sums: dict[str, dict[str, int]], host: int, memory: float | None
) -> str:
    adapter = policy.lora_A + policy.lora_B
    has = f"the adapter has {adapter / 1e6:,.1f} million, on {policy.modules} weights"
    trained = has if policy.modules else "all are trained, without an adapter"
    lines = [f"{policy.name}: {policy.parameters / 1e9:.2f} billion parameters; {trained}"]
    for side, total in sums.items():
        mine = [row for row in rows if side in (row.side, "each")]
        head = f"GB on {'each GPU' if side == 'each' else f'a GPU of the {side}'}"
        table: list[tuple[str, ...]] = [(head, "training", "push", "rollout")]
        table += [
            (row.what if setup.apart else f"{row.side}: {row.what}", *map(_gb, (row.training, row.push, row.rollout)))
            for row in mine
        ]
        table.append(("together", *map(_gb, total.values())))
        if memory is not None:
            table.append((f"left of {memory:g} GB", *(_gb(memory * _GB - n) for n in total.values())))
        widths = [max(len(line[i]) for line in table) for i in range(4)]
        lines.append("")
        lines += [
            "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))])
            for line in table
        ]
    lines.append("")
    if host:
        lines.append(f"On the host: {_gb(host)} GB for each GPU of an engine that sleeps at level 1.")
    lines.append("Not counted: activations, CUDA contexts, the KV cache. They get what is left.")
    return "\n".join(lines)


def _gb(n: float) -> str:
    return f"{n / _GB:.2f}"
