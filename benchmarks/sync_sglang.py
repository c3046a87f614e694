"""How long a push into a real SGLang engine takes, beside SGLang's own weight updates.

    python benchmarks/sync_sglang.py --json benchmarks/results/sync-sglang.json       # GPU: Qwen2.5-7B shape, rank 32
    python benchmarks/sync_sglang.py --device cpu --shape tiny                        # a smoke test
    python benchmarks/sync.py --engine sglang                                         # the same as the first

The engine starts with `load_format="dummy"` in processes of its own on the same device, the trainer with random weights
of the same shape. An engine a part, each in a process of its own: `pushes` (the trainer merges; the engine does, which
gets adapters alone; and SGLang's `update_weights_from_tensor` on weights that are merged already, tensor by tensor and
as flattened buckets of `--bucket-bytes`), `adapter` (base and adapter apart), `memory` (an engine with the memory
saver, which reads the trainer's weights; and its weights when they have been released), `buckets` (engine and trainer
can map nothing of each other's); asked for with --parts, `across` (an engine on another GPU, written straight, and over
NCCL). Times are medians over `--repeats` pushes; the first push of each part compares all bits on both sides. Steps of
requests are captured as CUDA graphs unless `--no-graphs` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sync import LINEARS, SHAPES, beside_a_copy, build_policy, config_of, pushes, timed

from lora_merge.bench import report

PROMPT = list(range(5, 37))


@contextmanager
def start_engine(args: argparse.Namespace, folder: Path, **options: Any) -> Iterator[Any]:
    import sglang

    config_of(args.shape).save_pretrained(folder)
    cpu = args.device == "cpu"
    options |= {"max_total_tokens": 2048 if cpu else 65536, "disable_cuda_graph": cpu or not args.graphs}
    if not cpu:
        options |= {"mem_fraction_static": args.gpu_memory, "cuda_graph_bs_decode": [1, 2, 4, 8]}
        options |= {"disable_prefill_cuda_graph": True}
    began = time.perf_counter()
    engine = sglang.Engine(
        model_path=str(folder), load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, device=args.device,
        attention_backend="torch_native" if cpu else "triton", sampling_backend="pytorch", max_running_requests=8,
        log_level="warning", **options,
    )  # fmt: skip
    print(f"the engine started in {time.perf_counter() - began:.0f} s", flush=True)
    try:
        yield engine
    finally:
        engine.shutdown()


def answers(engine: Any, **more: Any) -> list[int]:
    sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return engine.generate(input_ids=[PROMPT], sampling_params=sampling, **more)[0]["output_ids"]


def free_bytes(device: str) -> int:
    """Of the GPU."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def part_pushes(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from lora_merge import MergedWeights, SglangSync

    model, result = build_policy(args.shape, args.rank, args.device), dict[str, Any]()
    with start_engine(args, folder) as engine:
        for name in ("trainer", "engine"):
            sync = SglangSync(model, engine, merge=name, bucket_bytes=args.bucket_bytes)
            before = free_bytes(args.device)
            measured = pushes(sync, args.repeats, "merged")
            measured["memory_bytes"] = before - free_bytes(args.device)
            verified = sync.push(verify=True)
            measured |= {"check_of_all_bytes": str(verified), "buckets": verified.buckets}
            measured |= {"coverage": verified.coverage, "answer": answers(engine)}
            result["merged" if name == "trainer" else "engine"] = measured
            sync.close()
        result["merged"] = beside_a_copy(result["merged"], args)
        if args.peers:
            result["peers"] = peers(engine, [(name, t.clone()) for name, t in MergedWeights(model)], args)
    return result


def peers(engine: Any, merged: list[tuple[str, torch.Tensor]], args: argparse.Namespace) -> dict[str, Any]:
    """SGLang's own updates with weights that are merged already."""
    result: dict[str, Any] = {}
    in_buckets = partial(flattened, bucket_bytes=args.bucket_bytes)
    for name, update in (("update_weights_from_tensor", named), ("flattened_bucket", in_buckets)):
        try:
            result[f"{name}_ms"] = timed(partial(update, engine, merged), args.device, args.repeats)
            result[f"{name}_answer"] = answers(engine)
        except Exception as error:
            result[f"{name}_error"] = str(error)
    return result


def named(engine: Any, merged: list[tuple[str, torch.Tensor]]) -> None:
    """Tensor by tensor."""
    engine.update_weights_from_tensor(merged)


def flattened(engine: Any, merged: list[tuple[str, torch.Tensor]], bucket_bytes: int) -> None:
    """As verl and slime send it: bucket by bucket, the caches flushed with the last one."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    buckets: list[list[tuple[str, torch.Tensor]]] = [[]]
    room = bucket_bytes
    for name, tensor in merged:
        if buckets[-1] and tensor.nbytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append((name, tensor))
        room -= tensor.nbytes
    for tensors in buckets:
        bucket = FlattenedTensorBucket(named_tensors=tensors)
        told = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        serialised = [MultiprocessingSerializer.serialize(told)]
        last = tensors is buckets[-1]
        engine.update_weights_from_tensor(serialised, load_format="flattened_bucket", flush_cache=last)


def part_adapter(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from lora_merge import SglangSync

    model = build_policy(args.shape, args.rank, args.device)
    lora = {
        "enable_lora": True,
        "max_lora_rank": max(args.rank, 8),
        "max_loras_per_batch": 2,
        "lora_target_modules": LINEARS,
        "lora_backend": "torch_native" if args.device == "cpu" else "triton",
    }
    with start_engine(args, folder, **lora) as engine:
        sync = SglangSync(model, engine, mode="adapter", bucket_bytes=args.bucket_bytes)
        sync.push(verify=True)
        result = pushes(sync, args.repeats, "adapter") | {"answer": answers(engine, lora_path=sync.lora_path())}
        sync.close()
    return {"adapter": result}


def part_memory(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from lora_merge import SglangSync

    model = build_policy(args.shape, args.rank, args.device)
    with start_engine(args, folder, enable_memory_saver=True) as engine:
        sync = SglangSync(model, engine, merge="trainer", bucket_bytes=args.bucket_bytes)
        sync.push(verify=True)
        result = pushes(sync, args.repeats, "merged")
        before, free = answers(engine), free_bytes(args.device)
        engine.release_memory_occupation()
        result |= {"released_bytes": free_bytes(args.device) - free, "state_then": str(sync.states()[0])}
        woken = sync.push(verify=True)
        result |= {"woken": str(woken), "buckets": woken.buckets, "same_answer": before == answers(engine)}
        sync.close()
    return {"memory": result}


def part_buckets(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The engine maps nothing of the trainer's (expandable segments), and the trainer nothing of its (the memory
    saver). On a CPU the trainer's memory is its own anyway."""
    from lora_merge import SglangSync

    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    model = build_policy(args.shape, args.rank, args.device)
    with start_engine(args, folder, **({"enable_memory_saver": True} if cuda else {})) as engine:
        sync = SglangSync(model, engine, merge="trainer", bucket_bytes=args.bucket_bytes)
        verified = sync.push(verify=True)
        result = pushes(sync, args.repeats, "merged")
        result |= {"check_of_all_bytes": str(verified), "buckets": sync.push().buckets, "answer": answers(engine)}
        sync.close()
    return {"buckets": beside_a_copy(result, args)}


def part_across(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from lora_merge import SglangSync

    result: dict[str, Any] = {}
    for name, options in (("across_written", {}), ("across_nccl", {"enable_memory_saver": True})):
        # Of what can be mapped on neither side, buckets go.
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{bool(options)}")
        model = build_policy(args.shape, args.rank, args.device)
        with start_engine(args, folder, base_gpu_id=1, **options) as engine:
            sync = SglangSync(model, engine, merge="trainer", bucket_bytes=args.bucket_bytes)
            sync.push(verify=True)
            result[name] = pushes(sync, args.repeats, "merged") | {"answer": answers(engine)}
            sync.close()
        del model, sync
        torch.cuda.empty_cache()
    return result


PARTS = {
    "pushes": part_pushes,
    "adapter": part_adapter,
    "memory": part_memory,
    "buckets": part_buckets,
    "across": part_across,
}


def run_part(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One part in a process of its own."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [sys.executable, __file__, *sys.argv[1:], "--part", name, "--json", out.name]
        done = subprocess.run(command, check=False, timeout=args.limit)
        text = out.read()
    return json.loads(text) if text else {f"{name}_error": f"ended with {done.returncode}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpu-memory", type=float, default=0.4, help="the engine's share of the GPU")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a part may take")
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS)[:4])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.part:
        assert args.json is not None
        with tempfile.TemporaryDirectory() as folder:
            args.json.write_text(json.dumps(PARTS[args.part](args, Path(folder))))
        sys.stdout.flush()
        os._exit(0)  # engines leave threads behind
    import sglang

    record = report.provenance(torch.device(args.device))
    record["versions"]["sglang"] = sglang.__version__
    record |= {"shape": args.shape, "rank": args.rank, "bucket_bytes": args.bucket_bytes, "graphs": args.graphs}
    for name in args.parts:
        try:
            record |= run_part(name, args)
        except subprocess.TimeoutExpired:
            record[f"{name}_error"] = f"took more than {args.limit} s"
        report.save(record, args.json)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
