"""Which architectures can be pushed into a real vLLM engine, and answer as the trainer does.

    python benchmarks/architectures.py --json benchmarks/results/architectures-cpu.json     # all that CPUs run
    python benchmarks/architectures.py --only Gemma2 Phi                                    # some, by name
    python benchmarks/architectures.py --device cuda --json benchmarks/results/architectures-gpu.json --logs logs

Each one is a tiny random model of transformers (`families.py`, `families_seen.py`) in a child process. It is saved by
transformers, loaded by vLLM and asked: what differs there is vLLM's own. Then an adapter that changes the answers is
pushed, twice, the second time with every base weight changed, too; and once more as an adapter beside the base, where
vLLM has LoRA layers for it. Families that see are asked with an image, too, if torchvision is installed.

On a CPU, in float32, a push is right where greedy tokens and their log-probs are those of the trainer's own forward;
where they are not, a fresh engine is asked, on the checkpoint that PEFT merges and transformers saves: it may be as far
off. In bfloat16, on a GPU always, that engine alone is asked. There the engine has CUDA graphs, and sleeps at both
levels between pushes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from families import HYBRIDS, LATENT_ATTENTION, SPARSE, TEXT, Architecture
from families_seen import SEEN
from trials import FRESH, LANGUAGE, NONE, OTHER, TOWER, Row, examine

from lora_merge.bench import report

HERE = Path(__file__).resolve()
ARCHITECTURES: tuple[Architecture, ...] = (*TEXT, *SPARSE, *LATENT_ATTENTION, *HYBRIDS, *SEEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of them, in their order")
    parser.add_argument("--json", type=Path, help="where the record goes; rows that it has of others stay")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one architecture")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parallel", type=int, default=1, help="workers of one engine (tensor_parallel_size)")
    parser.add_argument("--merged", action="store_true", help="merged weights alone, of engines without LoRA layers")
    parser.add_argument("--logs", type=Path, help="folder for what the engines say, a file for each architecture")
    args = parser.parse_args()
    sys.path[:0] = [str(HERE.parent.parent / "tests" / "support"), str(HERE.parent.parent)]
    if args.device == "cpu":
        import engines  # type: ignore[import-not-found]  # noqa: F401 - vLLM, transformers and PEFT, for all children
    if args.logs is not None:
        args.logs.mkdir(parents=True, exist_ok=True)

    possible = [a for a in ARCHITECTURES if (a.gpu if args.device == "cuda" else a.cpu)]
    titles = {a.title for a in possible}
    wanted = args.only or [""]
    chosen = [a for n in wanted for a in possible if a.title == n or (n not in titles and a.title.startswith(n))]
    rows: list[Row] = []
    kept = [Row(**row) for row in json.loads(args.json.read_text())["rows"]] if args.json and args.json.exists() else []
    for number, architecture in enumerate(chosen, start=1):
        print(f"{number}/{len(chosen)} {architecture.title} ...", end=" ", flush=True, file=sys.stderr)
        rows.append(tried(architecture, args))
        print(told(rows[-1]), file=sys.stderr, flush=True)
        if args.json is not None:
            record = provenance(args.device) | {"rows": [asdict(row) for row in joined(rows, kept)]}
            args.json.write_text(json.dumps(record, indent=2) + "\n")
    print(table(joined(rows, kept)))
    sys.exit(any(not row.fine for row in rows))


def provenance(device: str) -> report.Record:
    """What the rows were made with."""
    import transformers
    import vllm

    made = report.provenance(torch.device(device))
    return made | {"versions": made["versions"] | {m.__name__: m.__version__ for m in (vllm, transformers)}}


def joined(rows: Sequence[Row], kept: Sequence[Row]) -> list[Row]:
    """These rows, and those of a record for other architectures, in the order of `ARCHITECTURES`."""
    found = {row.name: row for row in [*kept, *rows]}
    return [found[a.title] for a in ARCHITECTURES if a.title in found]


def told(row: Row) -> str:
    image = f"; with an image: {row.image}" if row.image else ""
    return (
        f"vLLM: {row.vllm}; merged: {row.merged}{image}; adapter: {row.adapter} "
        f"({row.error:.1e} off, {row.seconds:.0f} s)"
    )


def table(rows: Sequence[Row]) -> str:
    """As in docs/architectures.md: architectures with the same results in one row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        merged = row.merged if row.image in ("", row.merged) else f"{row.merged}; with an image: {row.image}"
        merged = merged if row.vllm != "right" else cell(merged)
        if row.vllm != "right":
            own = next(a.own for a in ARCHITECTURES if a.title == row.name)
            own = f"vLLM itself: {own}" if own else cell(f"vLLM itself: {row.vllm}")
            merged = f"{cell(merged)}; {own}" if merged else own
        adapter = cell(row.adapter) if row.vllm == "right" else ""
        if adapter.endswith("does not support LoRA yet."):
            adapter = "vLLM has no LoRA layers for it"
        prompts = "text, image" if row.image else "text"
        groups.setdefault((prompts, merged, adapter, f"{row.device}, {row.release}"), []).append(row.name)
    lines = ["| architectures | prompts | merged | adapter | on, vLLM |", "|---|---|---|---|---|"]
    lines += [f"| {'; '.join(names)} | {' | '.join(results)} |" for results, names in groups.items()]
    return "\n".join(lines)


def alone() -> str:
    """Return the table of families that are tried on a GPU alone, as in docs/architectures.md."""
    lines = ["| architecture | what vLLM lacks on a CPU |", "|---|---|"]
    return "\n".join([*lines, *(f"| {a.title} | {a.why} |" for a in ARCHITECTURES if not a.cpu)])


def tried(architecture: Architecture, args: argparse.Namespace) -> Row:
    """With LoRA layers where vLLM has them, else without."""
    row = Row(architecture.title)
    wanted = [LANGUAGE, NONE] if architecture.kind != "image" else [TOWER, LANGUAGE, NONE]
    if architecture.experts or args.device == "cuda" or args.merged:
        wanted = [NONE]
    for number, lora in enumerate(wanted):
        refused, row = row.vllm, in_child(architecture.title, lora, args)
        if number and lora == NONE:
            row.adapter = f"vLLM: {refused}"
        if lora == TOWER and row.merged in ("right", FRESH) and not row.adapter.startswith("right"):
            row.adapter = in_child(architecture.title, LANGUAGE, args).adapter  # of towers vLLM's layers fail
        if row.vllm == "right" or row.vllm.startswith(OTHER):
            break
    if architecture.experts and args.device == "cpu":
        row.adapter = "vLLM has no LoRA layers for experts on CPUs"
    return row


def cell(text: str) -> str:
    """What fits a table; the record has the rest."""
    text = text.replace("|", "/").replace(f"{OTHER}: (tensor", f"{OTHER}: log-probs (tensor")
    text = text.partition(" for the prompt")[0].partition(" (tensor")[0]
    return text if len(text) <= 90 else f"{text[:87]}..."


def in_child(title: str, lora: str, args: argparse.Namespace) -> Row:
    """An engine that dies takes only its own row along. On a CPU a fork, as imports take longer than all else."""
    context: Any = multiprocessing.get_context("fork" if args.device == "cpu" else "spawn")
    ours, theirs = context.Pipe(duplex=False)
    log = os.devnull if args.logs is None else str(args.logs / f"{title.replace('/', '-')}{lora and '-' + lora}.txt")
    options = {"device": args.device, "parallel": args.parallel}
    child = context.Process(target=answer, args=(title, lora, options, log, theirs))
    begin = time.monotonic()
    child.start()
    theirs.close()
    try:
        row = Row(**ours.recv()) if ours.poll(args.timeout) else Row(title, vllm="no answer")
    except EOFError:
        child.join()
        row = Row(title, vllm=f"died with {child.exitcode}")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid or 0, signal.SIGKILL)  # its engine's processes, too
    child.join()
    row.device = "CPU" if args.device == "cpu" else "GPU"
    row.device += f", TP={args.parallel}" if args.parallel > 1 else ""
    row.seconds = round(time.monotonic() - begin, 1)
    return row


def answer(title: str, lora: str, options: dict[str, Any], log: str, to: Any) -> None:
    """What a child does."""
    os.setsid()
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 1)
        if not os.environ.get("VERBOSE"):
            os.dup2(file.fileno(), 2)
    to.send(asdict(examine(next(a for a in ARCHITECTURES if a.title == title), lora, options)))


if __name__ == "__main__":
    main()
