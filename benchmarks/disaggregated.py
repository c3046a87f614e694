"""Pushes from the GPUs of a trainer into an engine on other GPUs of the same host, while it answers requests.

    torchrun --nproc-per-node 4 benchmarks/disaggregated.py --shape qwen3-30b-a3b --json out.json           # 8 GPUs
    torchrun --nproc-per-node 2 benchmarks/disaggregated.py --shape qwen3-235b-a22b --layers 12 --json out.json
    torchrun --nproc-per-node 1 benchmarks/disaggregated.py --shape qwen2.5-7b --json out.json              # 2 GPUs
    torchrun --nproc-per-node 2 benchmarks/disaggregated.py --device cpu --shape tiny --requests 2          # a dry run

FSDP2 over the ranks of torchrun, on the first GPUs; vLLM's server with TP (and EP, where there are experts) on as many
GPUs behind these (`--tp`), asked by a process of its own (served.py). Random weights of the shape, rank 32 in float32
on all linears and experts. One host: no figure of this is one of a cluster. `--parts` are measured in order, and the
file of `--json` is written after each:

- merged: `VllmSync(merge="trainer")`, which writes into the engine's memory. With `--sleep-mode` and
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True neither side's memory can be mapped, and it goes over NCCL:
  `transports` says which.
- engine: `VllmSync(merge="engine")`: adapters alone cross, and the engine merges them.
- published: `Publisher.publish()` by all ranks into a folder. (`publish.py` has what an engine does with a version.)
- vllm: vLLM's own NCCL weight transfer of the merged stream into a second engine, beside making that stream alone. It
  needs GPUs, and vLLM 0.28 or later. (Its `sharded_rdt` wants Ray and NIXL; it is not run here.)

For the first two: the first push, and medians over `--repeats` steady ones, after a step of training each, into the
idle engine and then, a second apart, with requests in flight; the bytes that are sent; GB/s into each GPU of the
engine, and their share of the link (a copy from the first GPU of the trainer to the first one of the engine); peak
memory of the fullest trainer GPU in the first push; the longest time between two tokens of a request, median over
requests and most, beside that before; coverage, and one push whose checksums are compared on every worker. On an H200
also what the formulas of `scale.py` predict of an idle engine. Times are those of rank 0.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import fsdp
import publish
import scale
import served
import sync
import torch
import torch.distributed as dist
import trainers
from sharded import tell
from torch import nn

from lora_merge.bench import report
from lora_merge.bench.job import DTYPES

Record = dict[str, Any]
LINK_BYTES = 1 << 30
PARTS = ("merged", "engine", "published", "vllm")
_SETTLE_S = 2.0
"""Seconds of answers before a part, beside which its own are held."""
_REST_S = 1.0
"""Seconds between pushes under load, as a step of training takes some: what a push has made stale is computed anew
then, and the next push waits for no engine at that work."""


# ---- the engine ------------------------------------------------------------------------------------------------------


@contextmanager
def on_other_gpus(args: argparse.Namespace) -> Iterator[None]:
    """What is started meanwhile is no rank of torchrun's, and sees the engine's GPUs alone."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith(fsdp.TORCHRUN)]:
        del os.environ[name]
    if args.device == "cuda":
        first = dist.get_world_size()
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str(first + gpu) for gpu in range(args.tp))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def rollout(args: argparse.Namespace, folder: Path) -> Iterator[str | None]:
    """The engine's server, which rank 0 has started: its URL; None on the others."""
    url = None
    with ExitStack() as stack:
        if dist.get_rank() == 0:
            config = sync.config_of(args.shape, args.layers)
            config.save_pretrained(folder)
            trainers.tokenizer(folder, config.vocab_size)
            flags = ["--load-format", "dummy", "--dtype", "bfloat16", "--tensor-parallel-size", str(args.tp)]
            flags += ["--max-num-seqs", str(max(args.requests, 1))]
            flags += ["--max-model-len", str(args.prompt_tokens + args.new_tokens)]
            if args.device == "cuda":
                flags += ["--kv-cache-memory-bytes", str(1 << 30), "--gpu-memory-utilization", str(args.gpu_memory)]
                experts = "num_experts" in sync.SHAPES[args.shape] and args.tp > 1
                flags += ["--enable-sleep-mode"] * args.sleep_mode + ["--enable-expert-parallel"] * experts
            else:
                flags.append("--enforce-eager")
            with on_other_gpus(args):
                environment = dict(os.environ)
            url = stack.enter_context(served.server(folder, flags, environment))
            tell("the engine runs")
        # Not NCCL's barrier: its kernel would spin while the engine starts.
        dist.broadcast_object_list([None], device=torch.device("cpu"))
        yield url


# ---- parts -----------------------------------------------------------------------------------------------------------


@contextmanager
def least_free(device: torch.device) -> Iterator[list[int]]:
    """Yield a list that at the end has the bytes which a GPU had free before a block, and the least in it."""
    found: list[int] = []
    if device.type == "cpu":
        yield found
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    found += [torch.cuda.mem_get_info(device)[0]] * 2
    over = threading.Event()

    def watch() -> None:
        while not over.wait(1e-3):
            found[1] = min(found[1], torch.cuda.mem_get_info(device)[0])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


@torch.no_grad()
def train(model: nn.Module) -> None:
    """Move the adapters, as a step of an optimizer would."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.mul_(1.001)


def phases_of(reports: Sequence[Any]) -> dict[str, float]:
    """Medians of the milliseconds of each phase."""
    return {p: statistics.median(1e3 * r.seconds.get(p, 0.0) for r in reports) for p in reports[-1].seconds}


def pushed(
    args: argparse.Namespace, model: nn.Module, engine: str | None, folder: Path, device: torch.device, merge: str
) -> Record:
    """Pushes of one kind."""
    from lora_merge import VllmSync

    pusher = VllmSync(model, engine, merge=merge, bucket_bytes=args.bucket_bytes)  # type: ignore[arg-type]
    with least_free(device) as free:
        first = pusher.push()
    pusher.push()

    def steady(rest_s: float = 0) -> list[Any]:
        reports = []
        for _ in range(args.repeats):
            time.sleep(rest_s)
            train(model)
            reports.append(pusher.push())
        return reports

    idle = phases_of(steady())
    asked = served.Requests(engine, folder, args)
    asked.begin()
    time.sleep(_SETTLE_S if engine is not None else 0)
    begin = time.perf_counter()
    reports = steady(_REST_S)
    end = time.perf_counter()
    asked.end()
    compared = pusher.push(verify=True)
    pusher.close()

    last, phases = reports[-1], phases_of(reports)
    peak = [None] * dist.get_world_size()
    dist.all_gather_object(peak, free[0] - free[1] if free else 0)
    if engine is not None:
        print(last, flush=True)
    return {
        "first_ms": 1e3 * sum(first.seconds.values()),
        "base_sent_first": first.base_sent,
        "idle_phases_ms": idle,
        "idle_ms": sum(idle.values()),
        "phases_ms": phases,
        "total_ms": sum(phases.values()),
        "bytes": last.nbytes,
        "tensors": last.tensors,
        "transports": list(last.transports),
        "buckets": last.buckets,
        "extra_bytes": max(peak),  # type: ignore[type-var]
        "longest_ms": publish.longest(asked.times, begin, end),
        "longest_before_ms": publish.longest(asked.times, begin - _SETTLE_S, begin),
        "coverage": compared.coverage,
        "checksums": "equal on every worker",  # or the push would have failed
    }


def beside_the_link(args: argparse.Namespace, found: Record, merge: str, link_gb_s: float) -> Record:
    """Speed into each GPU of the engine, and what scale.py says where its constants are of this GPU."""
    ranks, size = dist.get_world_size(), found["bytes"] / 1e9
    written = "write" in found["transports"]
    each = size / args.tp if written else size
    for when in ("", "idle_"):
        phases = found[f"{when}phases_ms"]
        speed = 1e3 * each / (phases["transfer"] + phases["finish"])
        found |= {f"{when}gb_s_each_gpu": speed, f"{when}share_of_link": speed / link_gb_s}
    if args.device == "cuda" and "H200" in torch.cuda.get_device_name():
        m = scale.fitted(scale.Machine())
        if merge == "trainer":
            crossing = 1e3 * each * (max(1.0, args.tp / ranks) / m.peer if written else 1 / m.broadcast)
            predicted = max(m.merge_ms(size / ranks), crossing) + m.write_fixed_ms
        else:
            whole = sum(p.numel() for p in sync.build_base(args.shape, "meta", args.layers).parameters()) * 2 / 1e9
            predicted = m.gather_ms(size, ranks) + 1e3 * size / m.broadcast
            predicted += m.update_ms(whole / args.tp) + m.engine_fixed_ms
        found["predicted_ms"] = predicted + m.agree_ms(ranks)
    return found


def published(args: argparse.Namespace, model: nn.Module, folder: Path) -> Record:
    from lora_merge import Publisher

    publisher = Publisher(model, folder / "run", keep=2)
    first = publisher.publish()
    made = []
    for _ in range(args.repeats):
        train(model)
        made.append(publisher.publish())
    return {
        "first_ms": 1e3 * first.seconds,
        "total_ms": 1e3 * statistics.median(one.seconds for one in made),
        "bytes": made[-1].nbytes,
    }


def by_vllm(args: argparse.Namespace, model: nn.Module, folder: Path) -> Record:
    """vLLM's own trainer engine sends the stream; rank 0 has the engine."""
    import vllm.distributed.weight_transfer as api

    from lora_merge import MergedWeights

    if args.device == "cpu":
        return {"skipped": "NCCL wants GPUs"}
    if not hasattr(api, "WeightTransferTrainerFactory"):
        return {"skipped": "vLLM 0.28 and later have trainer engines"}
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.clients import _json_safe_update_payload
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_open_port

    class Client:
        def __init__(self, llm: Any) -> None:
            self.llm = llm

        def init_weight_transfer_engine(self, init_info: Any) -> None:
            self.llm.init_weight_transfer_engine({"init_info": init_info})

        def start_weight_update(self) -> None:
            self.llm.start_weight_update()

        def update_weights(self, update_info: Any) -> None:
            self.llm.update_weights({"update_info": _json_safe_update_payload(update_info)})

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            self.llm.finish_weight_update(weight_version)

    source = MergedWeights(model, bucket_bytes=args.bucket_bytes)

    def stream() -> None:
        for _ in source:
            pass

    record = {"stream_alone_ms": sync.timed(stream, args.device, args.repeats)}
    with ExitStack() as stack:
        llm, port = None, [get_open_port()]
        if dist.get_rank() == 0:
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
            options = {"weight_transfer_config": WeightTransferConfig(backend="nccl"), "kv_cache_memory_bytes": 1 << 30}
            with on_other_gpus(args):
                llm = stack.enter_context(
                    sync.start_engine(args, folder / "second", tp=args.tp, layers=args.layers, **options)
                )
        dist.broadcast_object_list(port, device=torch.device("cpu"))
        info = NCCLTrainerInitInfo(
            "127.0.0.1", port[0], 1 + args.tp, packed_buffer_size_bytes=args.bucket_bytes, rank=dist.get_rank()
        )
        sender = api.WeightTransferTrainerFactory.trainer_init(info, client=Client(llm), source=source)
        record["total_ms"] = sync.timed(sender.send_weights, args.device, args.repeats)
        sender.shutdown()
    record["bytes"] = sum(p.numel() for p in sync.build_base(args.shape, "meta", args.layers).parameters()) * 2
    return record


# ---- all of it -------------------------------------------------------------------------------------------------------


def link_gb_s(args: argparse.Namespace, device: torch.device) -> float:
    """A large copy from the first GPU of the trainer to the first one of the engine."""
    there = torch.device("cuda", dist.get_world_size()) if args.device == "cuda" else device
    source = torch.empty(LINK_BYTES if args.device == "cuda" else LINK_BYTES >> 6, dtype=torch.uint8, device=device)
    target = torch.empty_like(source, device=there)
    return source.numel() / 1e6 / sync.timed(lambda: target.copy_(source), args.device, args.repeats)


def rows(name: str, found: Record) -> Iterator[tuple[str, str]]:
    if "skipped" in found:
        yield name, f"skipped: {found['skipped']}"
        return
    first = f"first {found['first_ms']:,.1f} ms, " if "first_ms" in found else ""
    yield name, f"{first}steady {found['total_ms']:,.1f} ms, {found['bytes'] / 1e6:,.1f} MB"
    if "phases_ms" in found:
        over = "+".join(found["transports"])
        for when, of in (("", "under load"), ("idle_", "idle")):
            yield f"  by phase, {of}", ", ".join(f"{phase} {ms:.1f}" for phase, ms in found[f"{when}phases_ms"].items())
            speed = f"{found[f'{when}gb_s_each_gpu']:,.2f} GB/s, {found[f'{when}share_of_link']:.0%} of the link"
            yield f"  into each GPU, over {over}, {of}", speed
        waits = " and ".join(publish.spoken(found[key]) for key in ("longest_ms", "longest_before_ms"))
        yield "  longest wait for a token, median and most; before", f"{waits} ms"
        yield "  peak extra memory of a trainer GPU", f"{found['extra_bytes'] / 2**20:,.0f} MiB"
        yield "  coverage; checksums", f"{found['coverage']}; {found['checksums']}"
    if "predicted_ms" in found:
        predicted, idle = found["predicted_ms"], found["idle_ms"]
        yield "  idle; predicted", f"{idle:,.1f} ms; {predicted:,.1f} ms, {predicted / idle:.2f} of it"
    if "stream_alone_ms" in found:
        yield "  making the stream alone", f"{found['stream_alone_ms']:,.1f} ms"


def measure(args: argparse.Namespace, device: torch.device, folder: Path, record: Record) -> None:
    link = record["link_gb_s"] = link_gb_s(args, device) if dist.get_rank() == 0 else 0.0
    with ExitStack() as stack:
        needed = {"merged", "engine"} & set(args.parts)
        engine = stack.enter_context(rollout(args, folder / "model")) if needed else None
        tell("making the model")
        model = fsdp.build(args, device, args.layers)
        for name in args.parts:
            tell(name)
            if name in ("merged", "engine"):
                merge = "trainer" if name == "merged" else "engine"
                found = pushed(args, model, engine, folder / "model", device, merge)
                if engine is not None:
                    beside_the_link(args, found, merge, link)
            elif name == "published":
                found = published(args, model, folder)
            else:
                stack.close()  # its GPUs are wanted
                found = by_vllm(args, model, folder)
            record[name] = found
            if dist.get_rank() == 0:
                title = f"{args.shape} under FSDP2 over {dist.get_world_size()} ranks, TP={args.tp} on others"
                sheet = report.sheet_of(title, "", ["measured"])
                for row in rows(name, found):
                    sheet.add_row(*row)
                report.console().print(sheet)
                report.save(record, args.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="qwen3-30b-a3b", help="default %(default)s")
    parser.add_argument("--layers", type=int, help="how many of its layers (default: all)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all; vllm comes last")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter (default %(default)s)")
    parser.add_argument("--adapter-dtype", choices=DTYPES, default="fp32", help="default %(default)s, as PEFT's")
    parser.add_argument("--tp", type=int, help="of the engine (default: the number of ranks)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32, help="in flight (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument("--new-tokens", type=int, default=512, help="default %(default)s")
    parser.add_argument("--sleep-mode", action="store_true", help="of the engine: its memory cannot be mapped")
    parser.add_argument("--gpu-memory", type=float, default=0.05, help="what the engine insists on finding free")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    if "vllm" in args.parts[:-1]:
        parser.error("vllm has to come last: it ends the first engine")
    return args


def main() -> None:
    args = parse()
    sync.quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # an engine inside of a torchrun rank does not start
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    device = sync.join(args.device, minutes=10)
    args.tp = args.tp or dist.get_world_size()
    named = ("shape", "layers", "rank", "adapter_dtype", "tp", "bucket_bytes", "repeats", "requests", "sleep_mode")
    record: Record = report.provenance(device) | {"trainer_ranks": dist.get_world_size()}
    record |= {name: getattr(args, name) for name in named}
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared, device=torch.device("cpu"))
        measure(args, device, Path(shared[0]), record)
        dist.broadcast_object_list([None], device=torch.device("cpu"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
