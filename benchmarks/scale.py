"""Predicts what a step costs in each mode, from 7B to 1T parameters on 1 to 1024 GPUs, out of measured bandwidths.

    python benchmarks/scale.py --json benchmarks/results/scale.json        # every model, all three networks
    python benchmarks/scale.py --network "25 Gb/s" --rank 16

Trainer and engines share the GPUs, as processes of their own: every engine is `tp` GPUs wide, there are `gpus / tp` of
them, and all get the new weights. A group of GPUs holds the model between them: all GPUs (FSDP), a node's (HSDP), or
tp x pp x ep (Megatron: experts are cut by all three, the rest by tp x pp). Per step, for S bytes of weights, of which a
rank merges s, and a bytes of adapters:

    in place   the trainer's own weights are merged, and restored after the rollout    2 merge(s)
    merged     every rank merges its part, buckets gather whole tensors in the group,  merge(s) + gather(S)
               engines load their slice of each                                        + load(S / tp)
    write      every rank merges into the slices of its engine                         merge(S / tp) or wire(S / tp)
    adapter    adapters alone are gathered; the engine computes with them              gather(a) + load(a / tp)
    engine     adapters alone are sent, to each host what its workers hold; a rank     gather(common) + wire(own)
               gathers what all get, and gets of the rest what it sends. The engine    + network(part)
               puts these in the place of the last ones, in its slice                  + update(S / tp)

A push also agrees: the trainer's ranks tell each other what they hold and what their engines say, in AGREEMENTS small
collectives over all of them. Control calls go to all engines at a time, so their number costs nothing.

In "engine" engines count as if they were on hosts of their own, as many as the trainer's. Their experts are cut by all
`tp` GPUs (expert parallelism), so that each gets the adapters of its part of them, and all others. One trainer rank
serves an engine on a host, over one network card, or one GPU of it; all of them do so at the same time, as there are no
more of those than ranks. Where a node has one card, its engines share it.

Between nodes there is one of NETWORKS: NVLink, a card of 400 Gb/s for each GPU, or one of 25 Gb/s for a node.

TARGETS are published transfers of whole weights from a trainer's GPUs to an engine's on other hosts. Beside each stand
three predictions of this package between as many GPUs (FSDP, hosts of 8):

    merged     buckets are gathered by all ranks of the trainer, and broadcast to      max(merge(s) + gather(S), far(S))
               each host of an engine over one card, two buffers in turns              + hand(S) + load(S / tp)
    engine     as above
    by parts   no code here, a limit: each GPU of an engine gets its own part over     max(merge(s), parts(S))
               a card of its own, from those that hold it

"write" is for engines that a host shares with all ranks that hold the model; beyond one node it is a design. "engine"
is `VllmSync(merge="engine")`. The check compares the same formulas with the runs that are recorded in
benchmarks/results; a constant that was fitted to a run says so, and is not compared with that run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from lora_merge.bench import report, shapes
from lora_merge.bench.shapes import Shape

RESULTS = Path(__file__).resolve().parent / "results"
GB = 1e9
AGREEMENTS = 7
"""Small collectives of a steady push from FSDP: one for each of six values that all ranks tell, and two flags; counted
by tests/support/sharded_trainer.py. (Where one rank has the handles of several engines, what they say of their workers
may take one more.)"""


@dataclass(frozen=True)
class Machine:
    """GB/s as programs see them. A merge or a copy of n bytes moves 2n."""

    copy: float = 4240
    merge_copies: float = 1.02
    gather: float = 308
    broadcast: float = 368
    peer: float = 371
    network: float = 50
    hop_us: float = 5
    load_copies: float = 1
    tensor_us: float = 0
    bucket_ms: float = 0
    fixed_ms: float = 0
    write_fixed_ms: float = 0
    update_copies: float = 1.63
    engine_fixed_ms: float = 0
    cards_a_node: int = 8
    gpus_a_node: int = 8
    bucket: float = 0.512

    def merge_ms(self, gigabytes: float) -> float:
        """A merge of so many GB in place or into other memory of the same GPU."""
        return 2e3 * gigabytes / self.copy * self.merge_copies

    def update_ms(self, gigabytes: float) -> float:
        """So many GB go from one update to the next, in one pass."""
        return 2e3 * gigabytes / self.copy * self.update_copies

    def load_ms(self, gigabytes: float, tensors: int) -> float:
        """The engine's loader takes tensors that lie on its own GPU, in its own process."""
        return 2e3 * gigabytes / self.copy * self.load_copies + tensors * self.tensor_us / 1e3

    def hand_ms(self, gigabytes: float) -> float:
        """Buckets of so many GB are handed to another process, one by one."""
        return max(1.0, gigabytes / self.bucket) * self.bucket_ms

    def gather_ms(self, gigabytes: float, gpus: int) -> float:
        """Rings of NCCL, bucket by bucket, every GPU ending with all bytes: NVLink or all network cards of a node."""
        if gpus == 1:
            return 0.0
        speed = self.gather if gpus <= self.gpus_a_node else min(self.gather, self.network * self.cards_a_node)
        hops = max(1.0, gigabytes / self.bucket) * (gpus - 1) * self.hop_us / 1e3
        return 1e3 * gigabytes * (gpus - 1) / gpus / speed + hops

    def agree_ms(self, gpus: int) -> float:
        """Small collectives over all ranks of the trainer, which wait for the hops of a ring."""
        return AGREEMENTS * (gpus - 1) * self.hop_us / 1e3

    def wire_ms(self, gigabytes: float, gpus: int) -> float:
        """Every GPU receives so many GB, evenly from all GPUs, each byte once, over NVLink and network at a time."""
        near = min(gpus, self.gpus_a_node)
        nvlink = gigabytes * (near - 1) / gpus / self.peer
        far = gigabytes * (gpus - near) / gpus / (self.network * self.cards_a_node / self.gpus_a_node)
        return 1e3 * max(nvlink, far)

    def parts_ms(self, gigabytes: float, senders: int, receivers: int) -> float:
        """All `receivers` get so many GB each from other nodes, evenly from all `senders`, over a card each."""
        card = self.network * self.cards_a_node / self.gpus_a_node
        return 1e3 * gigabytes * max(1.0, receivers / senders) / card

    def far_ms(self, gigabytes: float, engines: int) -> float:
        """Engines of a node get so many GB each from another node, over a card each while there are enough."""
        return 1e3 * gigabytes * max(1.0, engines / self.cards_a_node) / self.network


@dataclass(frozen=True)
class Network:
    """What is between nodes: GB/s of a card, and cards a node."""

    card: float
    cards: int


NETWORKS = {"NVLink": Network(Machine.peer, 8), "400 Gb/s": Network(50, 8), "25 Gb/s": Network(25 / 8, 1)}


SOURCES = {
    "copy": "one large copy on an H200, read and write counted (results/merge-qwen2.5-7b.json)",
    "merge_copies": "Qwen2.5-7B linears, rank 32, bf16 (the same file); the other merges are checked against it",
    "gather": "NCCL all-gather over NVLink between two H200, 1 GB and more",
    "broadcast": "NCCL broadcast over NVLink between two H200, 1 GB and more",
    "peer": "stores of a kernel into memory of the other H200, over NVLink",
    "network": "ASSUMED: a card of 400 Gb/s; all cards of a node work for one ring. NETWORKS has the others",
    "cards_a_node": "ASSUMED: one a GPU",
    "hop_us": "ASSUMED: one hop of a ring for one bucket",
    "tensor_us": "fitted: a push of 339 tensors within a process, less its merge (results/sync-qwen2.5-7b.json)",
    "load_copies": "ASSUMED: one launch a bucket copies it into the engine's parameters",
    "bucket_ms": "fitted: the push of the same tensors to another process (the same file)",
    "fixed_ms": "fitted: check, pause, finish, caches and resume of the push to another process",
    "write_fixed_ms": "fitted: a push written to another process, less its merge (results/sync-write-qwen2.5-7b.json)",
    "update_copies": "TrackedPlan.remerge, rank 32, bf16 adapters (results/variants/restore-h200-remerge-7b.json)",
    "engine_fixed_ms": "fitted: a push that the engine of the same process merges, less a way back and "
    "a merge of two passes by themselves (results/sync-engine-qwen2.5-7b.json)",
    "gpus_a_node": "ASSUMED, NVLink between them",
    "bucket": "the default of MergedWeights",
}


@dataclass(frozen=True)
class Layout:
    """How the trainer holds the weights: `group` GPUs between them, cut in so many ways."""

    name: str
    group: int
    dense_ways: int
    expert_ways: int


class Sums(NamedTuple):
    """Numbers of some of a shape's weights: how many, their elements, their rows and columns."""

    weights: int
    elements: int
    edges: int


@cache
def sums(shape: Shape) -> dict[bool, Sums]:
    """Of weights of experts (True), and of the others."""
    found: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for name, rows, cols in shape.matrices():
        found["experts." in name].append((rows, cols))
    return {
        kind: Sums(len(sizes), sum(rows * cols for rows, cols in sizes), sum(rows + cols for rows, cols in sizes))
        for kind, sizes in found.items()
    }


@dataclass(frozen=True)
class Job:
    """A model: bytes of all adapted weights in bf16 and of its adapters, GPUs an engine, and the trainer's layouts."""

    name: str
    shape: Shape
    tp: int
    megatron: str

    def gigabytes(self, experts: bool | None = None) -> float:
        """Of all weights, or of those of experts, or of the others."""
        return 2 * sum(found.elements for kind, found in sums(self.shape).items() if experts in (None, kind)) / GB

    def adapters(self, rank: int) -> float:
        return 2 * rank * sum(found.edges for found in sums(self.shape).values()) / GB

    def card(self, rank: int, m: Machine) -> float:
        """GB of adapters that a rank of the trainer sends: what a host of an engine holds; or, where most of what goes
        to it is its GPUs' own experts and each has a card, what one GPU holds (`UpdatePayload.apart`)."""
        together, experts = self.apart(rank)
        return together + experts * self.beside(rank, m) / self.tp

    def beside(self, rank: int, m: Machine) -> int:
        """GPUs of an engine that a rank of the trainer serves."""
        together, experts = self.apart(rank)
        alone = experts > self.tp * together and m.cards_a_node == m.gpus_a_node
        return 1 if alone else min(self.tp, m.gpus_a_node)

    def apart(self, rank: int) -> tuple[float, float]:
        """GB of adapters that all GPUs of an engine get, and of those of which each gets its part."""
        experts = 2 * rank * sums(self.shape)[True].edges / GB if self.tp > 1 else 0.0
        return self.adapters(rank) - experts, experts

    def layouts(self, gpus: int, node: int) -> list[Layout]:
        """Those that fit on so many GPUs; HSDP as long as an eighth of 141 GB holds a GPU's part of the weights."""
        sizes = {name: int(size) for name, size in (part.split("=") for part in self.megatron.split())}
        dense = sizes["tp"] * sizes.get("pp", 1)
        model = dense * sizes.get("ep", 1)
        found = [Layout("FSDP", gpus, gpus, gpus)]
        if gpus > node and self.gigabytes() / node < 141 / 8:
            found.append(Layout("HSDP", node, node, node))
        return found + ([Layout(self.megatron, model, dense, model)] if gpus >= model else [])


# Engines are as wide as it takes to hold the weights in half of 141 GB a GPU.
JOBS = (
    Job("Qwen2.5-7B", shapes.SHAPES["qwen2.5-7b"], 1, "tp=2"),
    Job("Qwen2.5-32B", shapes.SHAPES["qwen2.5-32b"], 1, "tp=4"),
    Job("Qwen3-30B-A3B", shapes.SHAPES["qwen3-30b-a3b"], 1, "tp=2 ep=4"),
    Job("Qwen2.5-72B", shapes.SHAPES["qwen2.5-72b"], 4, "tp=8"),
    Job("Qwen3-235B-A22B", shapes.SHAPES["qwen3-235b-a22b"], 8, "tp=4 pp=2 ep=8"),
    Job("DeepSeek-V3 (671B)", shapes.SHAPES["like-deepseek-v3"], 32, "tp=8 pp=4 ep=8"),
    Job("Kimi-K2 (1T)", shapes.SHAPES["like-kimi-k2"], 32, "tp=8 pp=8 ep=8"),
)
GPUS = (1, 2, 4, 8, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Target:
    """A published transfer of weights that were trained in full: from so many GPUs to so many others."""

    what: str
    seconds: float
    job: str
    trainer: int
    engine: int


TARGETS = (
    Target("Perplexity: 1T, RDMA, 256 to 128 GPUs", 1.3, "Kimi-K2 (1T)", 256, 128),
    Target("vLLM's RDT: 235B, 32 GPUs (counted here as 16 and 16)", 3.49, "Qwen3-235B-A22B", 16, 16),
    Target("miles, Mooncake: 1T, point to point (GPUs not told; 256 and 128 here)", 7.2, "Kimi-K2 (1T)", 256, 128),
)


def beside(target: Target, m: Machine, rank: int) -> dict[str, float]:
    """Milliseconds of a push between as many GPUs as a target has."""
    job = next(job for job in JOBS if job.name == target.job)
    size, ranks, tp = job.gigabytes(), target.trainer, job.tp
    mine = m.merge_ms(size / ranks)
    load = m.hand_ms(size) + m.load_ms(size / tp, len(job.shape.matrices()))
    engines = max(1, m.gpus_a_node // tp)  # that a host has, or has a part of
    rounds = max(1.0, target.engine / min(tp, m.gpus_a_node) / ranks)  # hosts that a rank sends to
    merged = max(mine + m.gather_ms(size, ranks), rounds * m.far_ms(size, engines)) + load
    return {
        "merged": merged + m.fixed_ms + m.agree_ms(ranks),
        "engine": step(job, Layout("FSDP", ranks, ranks, ranks), m, rank, ranks)["engine"],
        "by parts": max(mine, m.parts_ms(size / tp, ranks, target.engine)),
    }


def step(job: Job, layout: Layout, m: Machine, rank: int, gpus: int) -> dict[str, float]:
    """Milliseconds of a step in each mode; engine-side fixed costs, and agreeing, are in all that push."""
    fixed = m.fixed_ms + m.agree_ms(gpus)
    size, adapters = job.gigabytes(), job.adapters(rank)
    tensors = sum(found.weights for found in sums(job.shape).values())
    mine = m.merge_ms(job.gigabytes(False) / layout.dense_ways + job.gigabytes(True) / layout.expert_ways)
    gathered = m.gather_ms(adapters, layout.group) + m.hand_ms(adapters)
    together, _ = job.apart(rank)
    card, engines = job.card(rank, m), min(gpus, m.gpus_a_node) // job.tp
    load = m.hand_ms(size) + m.load_ms(size / job.tp, tensors)
    return {
        "in place": 2 * mine,
        "merged": mine + m.gather_ms(size, layout.group) + load + fixed,
        "write": max(m.merge_ms(size / job.tp), m.wire_ms(size / job.tp, layout.group))
        + m.write_fixed_ms
        + m.agree_ms(gpus),
        "adapter": gathered + m.load_ms(adapters / job.tp, 2 * tensors) + fixed,
        "engine": m.gather_ms(together, layout.group)
        + m.wire_ms((card - together) / job.beside(rank, m), layout.group)  # as many ranks as it takes send
        + m.far_ms(card, engines)
        + m.update_ms(size / job.tp)
        + m.engine_fixed_ms
        + m.agree_ms(gpus),
    }


def fitted(m: Machine) -> Machine:
    """The machine with what two recorded pushes say: within a process, and to another one on the same GPU."""
    same = recorded("sync-qwen2.5-7b.json")["same"]
    loading, merging = same["merge_and_load_ms"], same["merge_only_ms"]  # of float32 adapters
    m = replace(m, tensor_us=1e3 * (loading - merging) / same["tensors"])
    other = recorded("sync-qwen2.5-7b.json")["other"]
    size, loading = other["bytes"] / GB, other["merge_and_load_ms"]
    rest = loading - merging - m.load_ms(size, other["tensors"])
    written = recorded("sync-write-qwen2.5-7b.json")["other"]["total_ms"] - m.merge_ms(size)
    pushed = recorded("sync-engine-qwen2.5-7b.json")["engine"]
    m = replace(m, engine_fixed_ms=pushed["total_ms"] - pushed["unmerge_and_merge_ms"])
    fixed = {"fixed_ms": other["total_ms"] - loading, "write_fixed_ms": written}
    return replace(m, bucket_ms=rest / (size / m.bucket), **fixed)


def recorded(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return record


@dataclass(frozen=True)
class Check:
    """A figure that was measured, and what the formulas say."""

    what: str
    measured_ms: float
    predicted_ms: float
    note: str = ""


def checks(m: Machine) -> list[Check]:
    """Every recorded run of the GPU that the formulas speak of, but those that a constant was fitted to."""
    found, gpu = [], recorded("merge-qwen2.5-7b.json")["device_name"]
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        if record.get("device") == "cuda" and (record["device_name"], record.get("adapter_dtype")) == (gpu, "bf16"):
            points = record.get("points", [record])
            for p in points:
                ours = p["methods"].get("lora_merge in place")
                name = f"{p.get('sweep', '')} {p.get('name', record.get('shape'))}, rank {p['rank']}".strip()
                if ours and path.name != "merge-qwen2.5-7b.json":
                    found.append(Check(f"merge: {name}", ours["ms"], m.merge_ms(p["bytes"] / GB), _beyond(p)))
    squares = recorded("variants/restore-h200-remerge.json")
    size = 2 * squares["matrices"] * squares["rows"] * squares["cols"] / GB
    for run in (run for run in squares["runs"] if run["adapters"] == "bf16"):
        what = f"update: {squares['matrices']} matrices of {squares['rows']} x {squares['cols']}, rank {run['rank']}"
        note = "not modelled: above rank 32 products take longer than bytes" if run["rank"] > 32 else ""
        found.append(Check(what, run["remerge_ms"], m.update_ms(size), note))
    push = recorded("sync-qwen2.5-7b-x2.json")["tp2"]
    size, merging = push["bytes"] / GB, recorded("sync-qwen2.5-7b.json")["same"]["merge_only_ms"]
    ways = merging + 1e3 * size / m.broadcast + m.hand_ms(size) + m.load_ms(size / 2, push["tensors"])
    found += _push("push to TP=2 over IPC and NCCL", push, ways, m.fixed_ms)
    push = recorded("fsdp-qwen2.5-7b-x2.json")["push"]
    ways = m.merge_ms(size / 2) + m.gather_ms(size, 2) + m.hand_ms(size) + m.load_ms(size / 2, push["tensors"])
    found += _push("push of FSDP2 over two GPUs to TP=2 on them", push, ways, m.fixed_ms)
    # Each worker has half of the weights: of one GPU's, the other's half crosses; of two GPUs', a half of each one's.
    push = recorded("sync-write-qwen2.5-7b-x2.json")["tp2"]
    ways = max(m.merge_ms(size / 2), 1e3 * size / 2 / m.peer)
    found += _push("push to TP=2, written from one GPU", push, ways, m.write_fixed_ms)
    push = recorded("fsdp-write-qwen2.5-7b-x2.json")["push"]
    ways = max(m.merge_ms(size / 2), m.wire_ms(size / 2, 2))
    found += _push("push of FSDP2 over two GPUs, written to TP=2 on them", push, ways, m.write_fixed_ms)
    push = recorded("fsdp-qwen2.5-72b-x4.json")["push"]
    size = push["bytes"] / GB
    ways = max(m.merge_ms(size / 2), m.wire_ms(size / 2, 4))
    return found + _push("72B: push of FSDP2 over four GPUs, written to TP=2 on two", push, ways, m.write_fixed_ms)


def _push(what: str, record: dict[str, Any], predicted: float, fixed: float) -> list[Check]:
    """Merge and load, and the whole push."""
    whole = Check(what, record["total_ms"], predicted + fixed)
    return [Check(f"{what}: merge and load", record["merge_and_load_ms"], predicted), whole]


def _beyond(point: dict[str, Any]) -> str:
    """Why a merge is not one that the formulas are for."""
    if point["rank"] > 64:
        return "not modelled: above rank 64 products take longer than bytes"
    return "not modelled: the 0.1 ms that any launch takes" if point["bytes"] < GB else ""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=32, help="of the adapters, in bf16 (default %(default)s)")
    parser.add_argument(
        "--network", nargs="+", choices=NETWORKS, default=[*NETWORKS], help="between nodes (default: each of them)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser.parse_args()


def show(print_line: Callable[[str], object], record: dict[str, Any]) -> None:
    """Assumptions, check, predictions, targets."""
    print_line("| constant | value | from |\n|---|---|---|")
    for name, value in record["machine"].items():
        print_line(f"| {name} | {value:.4g} | {SOURCES[name]} |")
    print_line("\n| measured | ms | predicted | predicted / measured | |\n|---|---|---|---|---|")
    for c in record["checks"]:
        ratio = c["predicted_ms"] / c["measured_ms"]
        print_line(f"| {c['what']} | {c['measured_ms']:.2f} | {c['predicted_ms']:.2f} | {ratio:.2f} | {c['note']} |")
    modes = list(record["predictions"][0]["ms"])
    print_line(
        f"\n| model | GB | adapters GB | layout | GPUs | network | {' | '.join(modes)} |"
        + "\n|"
        + "---|" * (6 + len(modes))
    )
    for p in record["predictions"]:
        times = " | ".join(f"{ms:.0f} ms" if ms < 1e4 else f"{ms / 1e3:.1f} s" for ms in p["ms"].values())
        print_line(
            f"| {p['model']} | {p['gigabytes']:.4g} | {p['adapter_gigabytes']:.3g} | {p['layout']} | {p['gpus']} | "
            f"{p['network']} | {times} |"
        )
    print_line("\n| published | s | network | merged | engine | by parts (a limit) |\n|---|---|---|---|---|---|")
    for t in record["targets"]:
        times = " | ".join(f"{ms / 1e3:.2f} s" for ms in t["ms"].values())
        print_line(f"| {t['what']} | {t['seconds']} | {t['network']} | {times} |")


def main() -> None:
    args = parse()
    machine = fitted(Machine())
    machines = {
        name: replace(machine, network=NETWORKS[name].card, cards_a_node=NETWORKS[name].cards) for name in args.network
    }
    predictions = [
        {
            "model": job.name,
            "gigabytes": job.gigabytes(),
            "adapter_gigabytes": job.adapters(args.rank),
            "layout": layout.name,
            "tp": job.tp,
            "gpus": gpus,
            "network": network,
            "ms": {mode: round(ms, 2) for mode, ms in step(job, layout, m, args.rank, gpus).items()},
        }
        for job in JOBS
        for gpus in GPUS
        if gpus >= job.tp
        for layout in job.layouts(gpus, machine.gpus_a_node)
        for network, m in machines.items()
    ]
    record = {
        "command": ["python", *sys.argv],
        "rank": args.rank,
        "machine": asdict(machine),
        "networks": {name: asdict(NETWORKS[name]) for name in args.network},
        "checks": [asdict(check) for check in checks(machine)],
        "predictions": predictions,
        "targets": [
            asdict(target)
            | {"network": name, "ms": {how: round(ms, 2) for how, ms in beside(target, m, args.rank).items()}}
            for target in TARGETS
            for name, m in machines.items()
            if name != "NVLink"
        ],
    }
    show(lambda line: report.console().print(line, soft_wrap=True, markup=False), record)
    report.save(record, args.json)


if __name__ == "__main__":
    main()
