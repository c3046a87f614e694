"""An FSDP2 trainer on 2 or 4 GPUs: merging on the shard, a push into a colocated vLLM, and the same as verl does it.

    torchrun --nproc-per-node 2 benchmarks/fsdp.py --adapter-dtype bf16 --json benchmarks/results/fsdp-7b-x2.json
    torchrun --nproc-per-node 4 benchmarks/fsdp.py --shape qwen2.5-72b --parts push --json out.json
    torchrun --nproc-per-node 2 benchmarks/fsdp.py --device cpu --shape tiny --tp 1      # a smoke test

Random weights of the shape, made on the shards; `load_format="dummy"` in the engine: no checkpoint is read. The engine
has processes of its own on the same GPUs, TP = ranks. `--parts` are measured in order, and the file of `--json` is
written after each:

- merge: what `merged` runs, in place, beside one large copy of the same bytes and one all-gather of the adapters'.
- push: `VllmSync.push()` in merged mode. Peak memory is that of making the `VllmSync` and the first two pushes, of all
  processes on a GPU; then the phases, medians over `--repeats` pushes; then one push that compares every tensor.
- peer: what `verl_peer.py` says, into the same engine; the better of two.

Times and bytes are those of the slowest rank and the fullest GPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import sync
import torch
import torch.distributed as dist
import verl_peer
from measured import peak_of_everybody
from sharded import COPY_TARGET, all_gather, clocked, merge_on_shards, tell
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lora_merge.bench import report
from lora_merge.bench.job import DTYPES

Record = dict[str, Any]
TORCHRUN = ("TORCHELASTIC_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_")
BUCKETS_TARGET, PEER_TARGET = 2, 20
"""Extra memory of a push, in buckets; how many times faster than verl it is to be."""


def build(args: argparse.Namespace, device: torch.device, layers: int | None = None) -> nn.Module:
    """A PEFT model under FSDP2, a unit a layer; no rank ever holds more than its shards.

    Args:
        layers: how many layers of the shape; default: all.
    """
    from peft.tuners.lora import LoraLayer

    model: Any = sync.build_policy(args.shape, args.rank, "meta", layers)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.lora_A.to(DTYPES[args.adapter_dtype])
            module.lora_B.to(DTYPES[args.adapter_dtype])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().normal_(0, 0.02)
    return model


@contextmanager
def rollout(args: argparse.Namespace, folder: Path) -> Iterator[Any]:
    """The engine, whose handle is rank 0's; None on the others."""
    with ExitStack() as stack:
        engine = None
        if dist.get_rank() == 0:
            # Its processes are none of torchrun's.
            ours = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(TORCHRUN)}
            options: Record = {"worker_extension_cls": "verl_peer.Receiver"}
            if args.device == "cuda":
                options |= {"kv_cache_memory_bytes": 1 << 29}  # whatever share of the GPU is free
                options |= {"enable_sleep_mode": True} if args.sleep_mode else {}
            engine = stack.enter_context(sync.start_engine(args, folder, tp=args.tp, **options))
            os.environ.update(ours)
            tell("the engine runs")
        # Not NCCL's barrier: its kernel would spin on a GPU on which the engine starts.
        dist.broadcast_object_list([None], device=torch.device("cpu"))
        yield engine


@torch.no_grad()
def part_merge(args: argparse.Namespace, model: nn.Module, device: torch.device) -> Record:
    from lora_merge.models.live import live

    return merge_on_shards(live(model), device, args.repeats)


def part_push(args: argparse.Namespace, model: nn.Module, engine: Any, device: torch.device) -> Record:
    from lora_merge import VllmSync
    from lora_merge.models.live import live

    made: list[VllmSync] = []

    def begin() -> None:
        made.append(VllmSync(model, engine, bucket_bytes=args.bucket_bytes))
        for _ in range(2):
            made[0].push()

    group = live(model).ranks.group
    bucket = clocked({"gather": all_gather(args.bucket_bytes, device, group)}, device, args.repeats)
    record: Record = {"extra_bytes": peak_of_everybody(begin, device)}
    (pusher,) = made
    record |= sync.pushes(pusher, args.repeats, "merged")
    pusher.push(verify=True)
    pusher.close()
    record["gather_of_all_bytes_ms"] = bucket["gather_ms"] * record["bytes"] / args.bucket_bytes
    record["extra_buckets"] = record["extra_bytes"] / args.bucket_bytes
    return record


def part_peer(args: argparse.Namespace, model: nn.Module, engine: Any, device: torch.device, folder: Path) -> Record:
    runs: list[dict[str, float]] = []

    def run() -> None:
        runs.append(verl_peer.push(model, engine, folder, args.tp, device))

    extra = peak_of_everybody(run, device)
    run()
    best = min(runs, key=lambda seconds: sum(seconds.values()))
    base: dict[str, Any] = {name: p for name, p in model.named_parameters() if "lora_" not in name}
    return {
        "phases_ms": {name: 1e3 * spent for name, spent in best.items()},
        "total_ms": 1e3 * sum(best.values()),
        "extra_bytes": extra,
        "host_bytes": sum(parameter.to_local().nbytes for parameter in base.values()),
    }


def slowest(record: Record) -> Record:
    """The largest of every number over the ranks. Collective."""
    records: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(records, record)
    return {
        name: max(r[name] for r in records) if isinstance(value, int | float) else value
        for name, value in record.items()
    }


def rows(name: str, record: Record) -> Iterator[tuple[str, str, str]]:
    """What the table of a part shows: what, the figure, the target."""
    if name == "merge":
        m = record[name]
        yield "merge on the shard", f"{m['merge_ms']:.3f} ms, {m['x_copy']:.2f} copies", f"{COPY_TARGET} copies"
        with_gather = f"{m['merge_with_gather_ms']:.3f} ms, {m['x_allowed_with_gather']:.2f} of what is allowed"
        yield "  with the adapters' collectives", with_gather, "1"
        received = m["adapter_bytes_received"]
        share = received / m["local_bytes"]
        yield "  adapters sent, and received, per rank", f"{received / 1e6:,.1f} MB, {share:.2%} of its weights", ""
    if name == "push":
        p = record[name]
        yield "push", f"{p['total_ms']:,.1f} ms, {p['bytes'] / p['total_ms'] / 1e6:,.1f} GB/s", ""
        yield from ((f"  {phase}", f"{spent:,.1f} ms", "") for phase, spent in p["phases_ms"].items())
        yield "  share of the all-gather's speed", f"{p['share_of_gather']:.0%}", ""
        extra = f"{p['extra_bytes'] / 2**20:,.0f} MiB, {p['extra_buckets']:.2f} buckets"
        yield "  peak extra memory of a GPU", extra, f"{BUCKETS_TARGET} buckets"
    if name == "peer":
        v = record[name]
        faster = f", {v['times_faster']:.1f} times ours" if "times_faster" in v else ""
        yield "the same as verl does it", f"{v['total_ms']:,.1f} ms{faster}", f"{PEER_TARGET} times"
        yield from ((f"  {phase}", f"{spent:,.1f} ms", "") for phase, spent in v["phases_ms"].items())
        yield "  peak extra memory of a GPU", f"{v['extra_bytes'] / 2**20:,.0f} MiB", ""
        yield "  of the host, per rank", f"{v['host_bytes'] / 2**20:,.0f} MiB", ""


def publish(name: str, record: Record, json_file: Path | None) -> None:
    """Print a part; write everything that is known by now."""
    gpus, adapters = record["gpus"], f"rank {record['rank']} in {record['adapter_dtype']}"
    title = f"{record['shape']} under FSDP2 over {gpus} ranks, TP={record['tp']}, {adapters}"
    sheet = report.sheet_of(title, "", ["measured", "target"])
    for row in rows(name, record):
        sheet.add_row(*row)
    report.console().print(sheet)
    report.save(record, json_file)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="qwen2.5-7b", help="default %(default)s")
    parser.add_argument("--parts", nargs="+", choices=["merge", "push", "peer"], default=["merge", "push", "peer"])
    parser.add_argument("--rank", type=int, default=32, help="of the adapter (default %(default)s)")
    parser.add_argument("--adapter-dtype", choices=DTYPES, default="fp32", help="default %(default)s, as PEFT's")
    parser.add_argument("--tp", type=int, help="of the engine (default: the number of ranks)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sleep-mode", action="store_true", help="of the engine, whose workers then read the ranks'")
    parser.add_argument("--gpu-memory", type=float, default=0.05, help="what the engine insists on finding free")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    sync.quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # an engine inside of a torchrun rank does not start
    device = sync.join(args.device, minutes=10)
    args.tp = args.tp or dist.get_world_size()
    first = dist.get_rank() == 0
    named = ("shape", "rank", "adapter_dtype", "tp", "bucket_bytes", "repeats", "sleep_mode")
    record: Record = report.provenance(device) | {"gpus": dist.get_world_size()}
    record |= {name: getattr(args, name) for name in named}

    def done(name: str, figures: Record) -> None:
        record[name] = slowest(figures)
        if name == "push":
            push = record[name]
            push["share_of_gather"] = push["gather_of_all_bytes_ms"] / push["merge_and_load_ms"]
        if "push" in record and name == "peer":
            record["peer"]["times_faster"] = record["peer"]["total_ms"] / record["push"]["total_ms"]
        if first:
            publish(name, record, args.json)

    with ExitStack() as stack:
        shared: list[Any] = [stack.enter_context(tempfile.TemporaryDirectory()) if first else None]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        tell("the ranks are connected")
        needs_engine = {"push", "peer"} & set(args.parts)
        engine = stack.enter_context(rollout(args, folder / "model")) if needs_engine else None
        tell("making the model")
        model = build(args, device)
        parts = {
            "merge": partial(part_merge, args, model, device),
            "push": partial(part_push, args, model, engine, device),
            "peer": partial(part_peer, args, model, engine, device, folder),
        }
        for name in args.parts:
            tell(name)
            done(name, parts[name]())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
