"""Tokens a second of a real vLLM engine: the base alone, merged weights, and vLLM's own LoRA path.

    python benchmarks/rollout.py --json rollout-h200.json --plot rollout.png         # GPU: Qwen2.5-7B's shape, rank 32
    python benchmarks/rollout.py --shape qwen3-30b-a3b --layers 12                   # experts; a quarter of the layers
    python benchmarks/rollout.py --device cpu --shape tiny                           # a smoke test

Two engines, each in a process of its own, started with dummy weights and the same options, with CUDA graphs on a GPU.
In the first the LoRA path is off:

- `base`: a push of the model without adapters.
- `merged`: a push of merged weights.

The second has room for one adapter of this rank, the least that vLLM can be told:

- `adapter`: a push with `mode="adapter"`: the base, and one adapter beside it, which every request carries.

All three hold the same random base weights, and adapters are small, so that experts are chosen alike. A call of
`generate` has `--requests` requests of `--prompt-tokens` random tokens, each of which gets exactly `--new-tokens`,
sampled at temperature 1; the figure is the new tokens over the median time of `--repeats` calls, prompts included.
Before that come calls until one is no longer 5 % faster than the one before it: kernels are compiled at first use.
Prefixes are not cached. What an engine cannot serve as an adapter (experts, in many versions and on CPUs) is named in
the table. The JSON is written after either engine, so that a time limit loses one only.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import sync
import torch
from bars import Bar, bars

from lora_merge.bench import check_extra, report

Record = dict[str, Any]

WAYS = {"base": "base alone", "merged": "merged (lora_merge)", "adapter": "vLLM's LoRA path"}
"""The option -> what tables and pictures call it."""
ENGINES = {"merged": ("base", "merged"), "adapter": ("adapter",)}
"""An engine -> the ways that it serves, one after the other."""


SMALL = 1e-3
"""What lora_B is multiplied by: as PEFT draws it at random, other experts are chosen than by the base, and fewer."""


def warm_up(run: Callable[[], object], device: str) -> None:
    """Call it until it is no longer 5 % faster than the time before, at most five times."""
    before = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        run()
        sync.synchronize(device)
        spent = time.perf_counter() - begin
        if spent > 0.95 * before:
            return
        before = spent


def measure(name: str, llm: Any, request: Any, args: argparse.Namespace) -> list[float]:
    """New tokens a second for each of `--requests`, in their order."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=args.new_tokens, ignore_eos=True, detokenize=False)
    vocabulary = sync.SHAPES[args.shape]["vocab_size"]
    found = []
    for count in args.requests:
        draw = random.Random(count)
        prompts = [
            {"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(args.prompt_tokens)]} for _ in range(count)
        ]

        def answer(prompts: list[dict[str, list[int]]] = prompts) -> None:
            outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=request)
            lengths = {len(output.outputs[0].token_ids) for output in outputs}
            if lengths != {args.new_tokens}:
                raise RuntimeError(f"answers of {args.new_tokens} tokens were asked for, got {sorted(lengths)}")

        warm_up(answer, args.device)
        ms = sync.timed(answer, args.device, args.repeats)
        found.append(1e3 * count * args.new_tokens / ms)
        print(f"{WAYS[name]}, {count} requests: {found[-1]:,.0f} tokens/s", flush=True)
    return found


def way(args: argparse.Namespace, folder: Path) -> Record:
    """An engine, and of each of its ways a push, and what it then generates."""
    lora, most = args.part == "adapter", max(args.requests)
    with sync.start_engine(
        args, folder, lora=lora, layers=args.layers, enforce_eager=args.device == "cpu", max_num_seqs=most,
        max_model_len=args.prompt_tokens + args.new_tokens, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        return {name: pushed(name, llm, args) for name in ENGINES[args.part] if name in args.ways}


def pushed(name: str, llm: Any, args: argparse.Namespace) -> Record:
    """One way."""
    from lora_merge import VllmSync

    if name == "base":
        model = sync.build_base(args.shape, args.device, args.layers)
    else:
        experts = args.targets == "all"
        model = sync.build_policy(args.shape, args.rank, args.device, args.layers, experts=experts)
        with torch.no_grad():
            for parameter in (p for path, p in model.named_parameters() if "lora_B" in path):
                parameter.mul_(SMALL)
    with closing(VllmSync(model, llm, mode="adapter" if name == "adapter" else "merged")) as pusher:
        done = pusher.push()
        print(done, flush=True)
        tokens_s = measure(name, llm, pusher.lora_request(), args)
        pusher.check()  # the engine still holds what was measured
    return {"tokens_s": tokens_s, "push": str(done)}


def part(args: argparse.Namespace) -> Record:
    """The ways of one engine, in this process. Of the adapter's way a refusal is a result."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return way(args, Path(folder))
        except Exception as error:
            if args.part != "adapter":
                raise
            lines = str(error).splitlines() or [""]
            return {"adapter": {"refused": f"{type(error).__name__}: {lines[0]}"}}


def run(args: argparse.Namespace) -> Record:
    """Every engine, one after the other."""
    import vllm

    record = report.provenance(torch.device(args.device))
    record["versions"]["vllm"] = vllm.__version__
    names = ("shape", "layers", "rank", "targets", "prompt_tokens", "new_tokens", "requests", "repeats", "device")
    record |= {name: getattr(args, name) for name in names}
    record |= {"layers": args.layers or sync.SHAPES[args.shape]["num_hidden_layers"]}
    record |= {"cuda_graphs": args.device == "cuda", "ways": {}}
    for name, ways in ENGINES.items():
        if asked := [way for way in ways if way in args.ways]:
            # As users have it: on a GPU vLLM starts its engine in a process of its own.
            found = sync.run_part(name, args.device == "cpu", __file__)
            record["ways"] |= dict.fromkeys(asked, found) if "error" in found else found
            report.save(record, args.json)
    return record


def share(record: Record, name: str, index: int) -> float | None:
    """Of the base's speed, where both were measured."""
    ways = record["ways"]
    if not all("tokens_s" in ways.get(n, {}) for n in ("base", name)):
        return None
    return float(ways[name]["tokens_s"][index] / ways["base"]["tokens_s"][index])


def title(record: Record) -> str:
    """Which model, and which adapters."""
    where = "" if record["targets"] == "all" else " on attention"
    return f"{sync.name_of(record)}, LoRA of rank {record['rank']}{where}"


def show(record: Record) -> None:
    """Print the figures, and why there are none."""
    heads = [f"{count} request{'s' * (count > 1)}" for count in record["requests"]]
    sheet = report.sheet_of(f"{title(record)}: tokens/s", "engine with", heads)
    out = report.console()
    for name, found in record["ways"].items():
        cells = ["-"] * len(record["requests"])
        for index, speed in enumerate(found.get("tokens_s", [])):
            of_base = share(record, name, index)
            cells[index] = f"{speed:,.0f}" + (f" ({of_base:.0%})" if of_base is not None and name != "base" else "")
        sheet.add_row(WAYS[name], *cells)
    out.print(sheet)
    for name, found in record["ways"].items():
        for kind in ("refused", "error"):
            if kind in found:
                out.print(f"{WAYS[name]}: {kind}, {found[kind]}", markup=False)
    graphs = "with CUDA graphs" if record["cuda_graphs"] else "eager"
    out.print(
        f"{record['prompt_tokens']} + {record['new_tokens']} tokens a request; in brackets: of the base's speed. "
        f"{record['device_name']}, {graphs}, {record['versions']}",
        markup=False,
    )


def draw(record: Record, file: Path) -> None:
    """Speed of merged weights and of the LoRA path as shares of the base's, for each number of requests."""
    groups, longest = [], 1.0
    for index, count in enumerate(record["requests"]):
        group = []
        for name in ("merged", "adapter"):
            of_base = share(record, name, index)
            if of_base is None:
                continue
            longest = max(longest, of_base)
            label = f"{of_base:.0%}, {record['ways'][name]['tokens_s'][index]:,.0f} tokens/s"
            asked = f"{count} request{'s' * (count > 1)}: " if name == "merged" else ""
            group.append(Bar(asked + ("merged" if name == "merged" else "LoRA path"), of_base, label, name == "merged"))
        groups.append(group)
    if not all(groups):
        raise SystemExit("a picture needs the base, and merged weights or the LoRA path beside it: --ways")
    graphs = ", CUDA graphs" if record["cuda_graphs"] else ""
    note = f"{title(record)}. vLLM {record['versions']['vllm']}{graphs}.\n{record['device_name']}. "
    note += f"{record['prompt_tokens']} + {record['new_tokens']} tokens a request."
    if "tokens_s" not in record["ways"].get("adapter", {}):
        note += "\nvLLM's LoRA path does not serve these adapters." if "adapter" in record["ways"] else ""
    bars(file, "Rollout: tokens a second, beside the base alone", groups, limit=(1, "the base alone"), start=0,
         beyond=True, end=2 * longest, note=note)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, where memory asks for it")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--targets", choices=["all", "attention"], default="all", help="attention: experts have none")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--requests", type=int, nargs="+", help="default: 1 8 64 256, on a CPU 1 4 16")
    parser.add_argument("--prompt-tokens", type=int, help="of a request; default: 128, on a CPU 16")
    parser.add_argument("--new-tokens", type=int, help="of an answer; default: 256, on a CPU 16")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls (default %(default)s)")
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="the engine's share (default %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here, as PNG")
    parser.add_argument("--part", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing: --plot what --json wrote")
    args = parser.parse_args()
    if args.draw and not args.plot:
        parser.error("--draw needs --plot, where the picture goes")
    if args.plot:
        check_extra(plot=True)
    if args.draw:
        draw(json.loads(args.draw.read_text()), args.plot)
        return
    on_cpu = args.device == "cpu"
    args.requests = args.requests or ([1, 4, 16] if on_cpu else [1, 8, 64, 256])
    args.prompt_tokens = args.prompt_tokens or (16 if on_cpu else 128)
    args.new_tokens = args.new_tokens or (16 if on_cpu else 256)
    sync.quiet()
    if args.part:
        sync.end_part(part(args), args.json)
    record = run(args)
    show(record)
    if args.plot:
        draw(record, args.plot)


if __name__ == "__main__":
    main()
