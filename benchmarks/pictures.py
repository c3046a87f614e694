"""Tables of README and docs/performance_merges.md and all pictures, from the records in `results/`.

    python benchmarks/pictures.py            # draws docs/images/*.png and writes the tables into the pages
    python benchmarks/pictures.py --check    # exit status 1 where a table is not what the records say

Nothing is measured here. A new record is copied to `results/`, then this is run again.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import diagrams
from bars import BLUE, GREY, RED, Bar, bars, figure

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES, README = ROOT / "benchmarks" / "results", ROOT / "docs" / "images", ROOT / "README.md"
MERGES = ROOT / "docs" / "performance_merges.md"


def read(name: str) -> Record:
    """The record `results/<name>.json`."""
    found: Record = json.loads((RESULTS / f"{name}.json").read_text())
    return found


TRAINERS = (
    ("TRL", "trainers-trl-h200", "TRL's own", "lora_merge"),
    ("ms-swift", "trainers-swift-h200", "swift's own", "lora_merge"),
    ("verl", "trainers-verl-h200", "verl's own", "lora_merge, pushed"),
)
"""Trainer, record, its own way there, and ours."""
ALONE = "lora_merge, verl's transport"
"""In verl's record: `lora.merge=True` and nothing else."""


# The tables


def ms(value: float) -> str:
    """Milliseconds with the digits that mean something."""
    return f"{value:,.0f} ms" if value >= 30 else f"{value:.1f} ms"


def _copies(record: Record, method: str, *, back: bool = False) -> str:
    """Time of a method, and in copies of the same bytes; with its way back where that is a call of its own."""
    found = record["methods"][method]
    total = found["ms"] + (found["back_ms"] if back else 0)
    return f"{ms(total)} = {total / record['copy_ms']:.2f} copies"


def _gigabytes(n: int) -> str:
    return "0" if n == 0 else f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"


def rows() -> Iterator[tuple[str, str, str]]:
    """What and in which setting, the usual way, lora_merge."""
    rollout, step = read("rollout-h200"), read("step-h200")
    tokens = {name: way["tokens_s"] for name, way in rollout["ways"].items()}

    def share(way: str) -> str:
        found = sorted(100 * n / base for n, base in zip(tokens[way], tokens["base"], strict=True))
        return f"{found[0]:.0f} to {found[-1]:.0f} %"

    first, *_, last = rollout["requests"]
    yield (
        f"**Rollout**: tokens/s of the base's, {first} to {last} requests (vLLM 0.26, H200)",
        f"vLLM's LoRA path {share('adapter')}",
        f"**{share('merged')}**",
    )
    seconds = {name: sum(way["seconds"].values()) for name, way in step["ways"].items()}
    yield (
        f"**GRPO step**: TRL, {step['completions']} answers of {step['new_tokens']} tokens (H200)",
        f"TRL's merge {seconds['trl']:.2f} s, LoRA path {seconds['adapter']:.2f} s",
        f"{seconds['merged']:.2f} s; trained merged **{seconds['trained']:.2f} s**",
    )
    run = read("verl-step-h200")
    verl = {name: f"{way['step_s']:.2f} s ({way['update_weights_s']:.2f})" for name, way in run["ways"].items()}
    answers = f"{run['batch'] * run['answers']} answers of {run['new_tokens']} tokens"
    yield (
        f"**GRPO step**: verl's `main_ppo`, sleep, {answers} (`update_weights`; H200)",
        f"verl's merge {verl['merge']}, LoRA path {verl['adapter']}",
        f"**{verl['push']}**; by verl's transport {verl['stream']}",
    )
    whole = next(c for c in read("train-h200")["cases"] if (c["part"], c["adapters"]) == ("whole", "fp32"))
    trained = {name: ms(way["step_ms"]) for name, way in whole["ways"].items()}
    yield (
        f"**Training on what is served**: {whole['tokens']:,} tokens, float32 adapters, checkpointing (H200)",
        f"PEFT's forward {trained['peft']}",
        f"**{trained['merged']}** (base alone {trained['base']})",
    )
    for trainer, name, theirs, mine in TRAINERS:
        ways = read(name)["ways"]
        if ALONE in ways:  # of verl there is a whole step above
            continue
        changed = ways[theirs]["drift"]
        yield (
            f"**Update vLLM** from {trainer} (15.2 GB, H200)",
            f"{ms(ways[theirs]['ms'])}; after six, {100 * changed:.1f} % of the adapted base changed",
            f"**{ms(ways[mine]['ms'])}**",
        )
    full, half = read("merge-qwen2.5-7b-fp32-adapters"), read("merge-qwen2.5-7b")
    ours, round_trip = "lora_merge in place", "merged() enter+exit"
    yield (
        "**Merge**: linears, float32 adapters (H200)",
        f"PEFT {_copies(full, 'peft')}",
        f"**{_copies(full, ours)}**, no extra memory",
    )
    yield (
        "**Merge and back** (H200)",
        f"PEFT {_copies(full, 'peft', back=True)}; the base has changed",
        f"**{_copies(full, round_trip)}**, every bit back, {_gigabytes(full['methods'][round_trip]['extra_bytes'])}",
    )
    yield (
        "**Wrongly rounded elements**: bf16 adapters (H200)",
        f"PEFT {100 * half['methods']['peft']['misrounded']:.1f} %",
        f"**{100 * half['methods'][ours]['misrounded']:.3f} %**",
    )


def table() -> str:
    """README's table of figures, as Markdown."""
    head = ["| Qwen2.5-7B, rank 32 | the usual way | lora_merge |", "|---|---|---|"]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows())]) + "\n"


EVERY_WAY = (
    ("bf16, in place", "bf16", "in place"),
    ("bf16, out of place", "bf16", "out of place"),
    ("bf16, there and exactly back", "bf16", "there and back"),
    ("fp16, in place", "fp16", "in place"),
    ("fp16, out of place", "fp16", "out of place"),
    ("bf16, float32 adapters, in place", "bf16, fp32 adapters", "in place"),
    ("bf16, float32 adapters, out of place", "bf16, fp32 adapters", "out of place"),
    ("bf16, float32 adapters, there and exactly back", "bf16, fp32 adapters", "there and back"),
    ("`addmm_` on bf16 (adapters cut to bf16)", "bf16", "addmm_"),
)
"""Row of the table of ranks, and which kind and way of the record it is."""


def rank_table() -> str:
    """Copies of merges by rank, as Markdown."""
    points = read("ranks-h100")["points"]
    shown = sorted({p["rank"] for p in points})
    lines = ["| rank | " + " | ".join(map(str, shown)) + " |", "|---|" + "---|" * len(shown)]
    for name, kind, way in EVERY_WAY:
        found = {p["rank"]: p["x_copy"][way] for p in points if p["kind"] == kind}
        cells = (f"{found[rank]:.2f}" if found[rank] < 10 else f"{found[rank]:.1f}" for rank in shown)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


CARDS = (
    ("B200", 8000),
    ("A100 80 GB (SXM)", 2039),
    ("A100 40 GB (SXM)", 1555),
    ("RTX 4090", 1008),
    ("L4", 300),
)
"""Cards that have not been measured, and the memory bandwidth that NVIDIA gives for them, GB/s."""
H200_BANDWIDTH = 4800
"""GB/s, of the card on which the records were made."""
PORTABLE_FLOAT32 = 1.82
"""Copies that the kernel for any GPU took with float32 adapters of rank 32 on an H200 (docs/performance_history.md)."""


def prediction_table() -> str:
    """Predicted times of a merge on cards that have not been measured, from bytes and bandwidth, as Markdown."""
    record, portable = read("merge-qwen2.5-7b"), read("variants/merge-qwen2.5-7b-sm80")
    moved = 2 * record["bytes"]
    share = moved / record["copy_ms"] / 1e6 / H200_BANDWIDTH
    factor = max(portable["methods"][way]["x_copy"] for way in ("lora_merge in place", "lora_merge out of place"))
    lines = [
        "| card | bandwidth by NVIDIA | one copy: the floor | bf16 adapters | float32 adapters |",
        "|---|---|---|---|---|",
    ]
    for card, bandwidth in CARDS:
        copy = moved / (share * bandwidth) / 1e6
        slow = copy * PORTABLE_FLOAT32
        lines.append(
            f"| {card} | {bandwidth:,} GB/s | {copy:.3g} ms | {copy * factor:.3g} ms | "
            f"{copy * factor:.3g} to {slow:.3g} ms |"
        )
    return "\n".join(lines) + "\n"


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    README: {"figures": table},
    MERGES: {"ranks": rank_table, "predictions": prediction_table},
}
"""Page -> its tables by name: each stands between `<!-- NAME: ... -->` and `<!-- end of NAME -->`."""


def with_tables(page: Path) -> str:
    """The text of a page with the tables of now."""
    text = page.read_text()
    for name, made in TABLES[page].items():
        mark = re.compile(rf"(<!-- {name}:[^\n]*-->\n).*?(<!-- end of {name} -->)", flags=re.DOTALL)
        pieces = mark.split(text)
        if len(pieces) != 4:
            raise SystemExit(f"{page.name} has no place for a table: <!-- {name}: ... --> and <!-- end of {name} -->")
        before, begin, end, after = pieces
        text = f"{before}{begin}\n{made()}\n{end}{after}"
    return text


# The pictures


def sync_picture(file: Path) -> None:
    """Updating a vLLM engine from each trainer, its own way and ours."""
    groups, copies, alone = [], [], 0.0
    for trainer, name, theirs, mine in TRAINERS:
        record = read(name)
        ways = record["ways"]
        copies.append(record["copy_ms"])
        star, stars = (" *", " **") if ALONE in ways else ("", "")
        alone = ways.get(ALONE, {}).get("ms", alone)
        groups.append(
            [
                Bar(f"{trainer}'s own way", ways[theirs]["ms"], f"{ways[theirs]['ms']:,.0f} ms{star}"),
                Bar("with lora_merge", ways[mine]["ms"], f"{ways[mine]['ms']:.0f} ms{stars}", ours=True),
            ]
        )
    one = sorted(copies)[len(copies) // 2]
    bars(
        file,
        "Updating a vLLM engine with a 7B LoRA policy, one H200",
        groups,
        limit=(one, f"one copy of its 15.2 GB: {one:.1f} ms"),
        start=1,
        end=160_000,
        log=True,
        note=(
            "Logarithmic. vLLM 0.26, rank 32, one run each. TRL and ms-swift: engine in their process.\n"
            "* verl clones every base parameter to the host, merges with PEFT, gathers parameter\n"
            "  by parameter, sends, and copies the base back; its engine is in another process.\n"
            "** with the engine started for pushes, weight_transfer_config={backend:lora_merge};\n"
            f"  with lora.merge=True alone, over verl's own transport, {ms(alone)}."
        ),
    )


def round_trip_picture(file: Path) -> None:
    """float32 adapters on a bf16 base: there and back in each way."""
    record = read("merge-qwen2.5-7b-fp32-adapters")
    one, methods = record["copy_ms"], record["methods"]

    def back(name: str) -> float:
        return float((methods[name]["ms"] + methods[name]["back_ms"]) / one)

    peft, addmm = back("peft"), back("addmm_")
    ours, apart = methods["merged() enter+exit"]["x_copy"], methods["lora_merge out of place"]["x_copy"]
    wrong = 100 * methods["addmm_"]["misrounded"]
    bars(
        file,
        "Merge and back: 7B linears in bf16, float32 adapters",
        [
            [
                Bar("PEFT merge, unmerge", peft, f"{peft:.1f} copies, base changed"),
                Bar("torch addmm_, twice", addmm, f"{addmm:.1f}, base changed, {wrong:.0f} % misrounded"),
            ],
            [
                Bar("lora_merge.merged()", ours, f"{ours:.1f}, every bit is back", ours=True),
                Bar("lora_merge, out of place", apart, f"{apart:.2f}, the base is never written", ours=True),
            ],
        ],
        limit=(1, f"one copy of the weights: {one:.1f} ms"),
        start=0,
        end=36,
        note="Qwen2.5-7B, rank 32 (PEFT keeps adapters in float32 by default), one H200.",
    )


def peers_picture(file: Path) -> None:
    """The same tensors in every way that trainers have, one way and round trips apart."""
    record = read("peers-h200")
    one, methods = record["copy_ms"], record["methods"]
    both = {name: m for name, m in methods.items() if name.endswith("there and back")}
    groups = []
    for group in ({n: m for n, m in methods.items() if n not in both}, both):
        found = sorted(group.items(), key=lambda pair: -pair[1]["x_copy"])
        groups.append(
            [
                Bar(
                    name,
                    m["x_copy"],
                    f"{m['x_copy']:.2f}" if m["x_copy"] < 100 else f"{m['x_copy']:,.0f}",
                    ours=name.startswith(("lora_merge", "merged()")),
                )
                for name, m in found
            ]
        )
    bars(
        file,
        "7B linears, bf16 adapters of rank 32, in copies",
        groups,
        limit=(1, f"one copy of the weights: {one:.1f} ms"),
        start=0.5,
        end=12_000,
        log=True,
        note=f"Logarithmic. One H200, one run of {record['commit']}; each way is written after its trainer's source.",
    )


def rank_picture(file: Path) -> None:
    """Copies against the rank, in place."""
    record = read("ranks-h100")
    lines = lines_of(record)
    with figure(file, 4.0) as ax:
        for (name, points), colour, style in zip(lines.items(), (BLUE, BLUE, GREY), ("-", ":", "-"), strict=True):
            ranks, values = [rank for rank, _ in points], [value for _, value in points]
            ax.plot(ranks, values, style, color=colour, linewidth=2.4, marker="o", markersize=4)
            ax.annotate(name, (ranks[-1], values[-1]), textcoords="offset points", xytext=(8, 0), va="center")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        shown = [1, 2, 4, 8, 16, 32, 64, 128, 256]
        ax.set_xticks(shown, [str(rank) for rank in shown])
        ax.set_yticks([1, 2, 4], ["1", "2", "4"])
        ax.minorticks_off()
        ax.set_xlim(0.9, 3600)
        ax.set_ylim(0.8, 4.5)
        ax.axhline(1, color=RED, linewidth=1.6, linestyle=(0, (4, 2)))
        ax.annotate("one copy of the weights", (1, 0.9), color=RED, va="center", fontsize=11)
        title = "Merging 7B linears in place, in copies, by rank (one H100)"
        ax.figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        ax.set_xlabel("rank", loc="left")


def lines_of(record: Record) -> dict[str, list[tuple[int, float]]]:
    """(rank, copies) of three ways, by name."""
    wanted = {
        "lora_merge, bf16 adapters": ("bf16", "in place"),
        "lora_merge, float32 adapters": ("bf16, fp32 adapters", "in place"),
        "addmm_, bf16 adapters": ("bf16", "addmm_"),
    }
    points = record["points"]
    return {
        name: [(p["rank"], p["x_copy"][way]) for p in points if p["kind"] == kind]
        for name, (kind, way) in wanted.items()
    }


WAITING = {
    "rollout.png": ("rollout", "rollout-h200"),
    "step.png": ("step", "step-h200"),
    "step-x2.png": ("step", "step-h200-x2"),
    "grpo.png": ("grpo", "grpo-h200"),
    "train.png": ("train", "train-h200"),
    "fidelity.png": ("fidelity", "fidelity-h200"),
}
"""Picture -> the benchmark that draws it, and its record; where the record is not there, neither is the picture."""


def recorded(folder: Path) -> dict[str, Callable[[Path], None]]:
    """Those of `WAITING` whose record lies in a folder."""

    def draw(benchmark: str, record: Path, file: Path) -> None:
        import_module(benchmark).draw(json.loads(record.read_text()), file)

    found = {name: (benchmark, folder / f"{record}.json") for name, (benchmark, record) in WAITING.items()}
    return {name: partial(draw, *made) for name, made in found.items() if made[1].exists()}


PICTURES: dict[str, Callable[[Path], None]] = {
    "sync.png": sync_picture,
    "round-trip.png": round_trip_picture,
    "peers.png": peers_picture,
    "ranks.png": rank_picture,
    "merge.png": diagrams.merge_diagram,
    "push.png": diagrams.push_diagram,
    "ways.png": diagrams.ways_diagram,
    "states.png": diagrams.state_diagram,
} | recorded(RESULTS)


def main() -> None:
    """Draw all, and write the tables; or hold the tables against the records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a page is behind")
    options = parser.parse_args()
    for page in TABLES:
        new = with_tables(page)
        if options.check and new != page.read_text():
            raise SystemExit(f"{page.name}: figures are not those of the records; run python benchmarks/pictures.py")
        if not options.check:
            page.write_text(new)
    if options.check:
        return
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        draw(IMAGES / name)
        sys.stdout.write(f"docs/images/{name}\n")


if __name__ == "__main__":
    main()
