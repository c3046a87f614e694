"""What a switch to a published version costs the requests in flight: an `AsyncLLM` that follows a store by itself.

    python benchmarks/publish.py --json publish-h200.json          # GPU: Qwen2.5-7B's shape, rank 32, one GPU
    python benchmarks/publish.py --device cpu --shape tiny         # a smoke test

The trainer (random weights, on the same device) saves its base as the engine's checkpoint, and publishes adapters into
a folder while `--requests` requests generate. For each version: the longest time that a request waited for its next
token, from its publication until the follower said that it is served (the median over requests, and the most), beside
the median time between two tokens of a request in the second before, and the longest then; tokens a second in the
second before, meanwhile, and in the second after; how long the engine was paused, as the follower says; and the bytes
that the engine read. The JSON is written after each version.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, TypeAlias

import sync
import torch

from lora_merge.bench import report

_ONCE = {"temperature": 1.0, "ignore_eos": True, "detokenize": False}


def policy(args: argparse.Namespace, folder: Path) -> Any:
    """The trainer's model; its base is saved as a checkpoint."""
    from peft import LoraConfig, get_peft_model

    base: Any = sync.build_base(args.shape, args.device)
    base.save_pretrained(folder, max_shard_size="4GB")
    config = LoraConfig(r=args.rank, target_modules=sync.LINEARS, init_lora_weights=False)
    with torch.device(args.device):
        return get_peft_model(base, config).eval()


Times: TypeAlias = list[list[float]]
"""When each token of each request came."""


async def ask(engine: Any, number: int, args: argparse.Namespace, times: Times, stop: asyncio.Event) -> None:
    """Generate until `stop` is set; note when each token came."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vocabulary, turn = sync.SHAPES[args.shape]["vocab_size"], 0
    while not stop.is_set():
        turn += 1
        prompt = {"prompt_token_ids": [(number * 131 + i) % vocabulary for i in range(args.prompt_tokens)]}
        mine: list[float] = []
        times.append(mine)
        sampling = SamplingParams(**_ONCE, max_tokens=args.new_tokens, output_kind=RequestOutputKind.DELTA)
        async for output in engine.generate(prompt, sampling, f"{number}-{turn}"):
            now = time.perf_counter()
            mine.extend([now] * sum(len(one.token_ids) for one in output.outputs))
            if stop.is_set():
                break


def serves(store: Any) -> dict[str, Any]:
    """What the engine's follower says."""
    return next(iter(store.engines().values()), {})


def waits(times: Times, begin: float, end: float) -> list[list[float]]:
    """Milliseconds between two tokens of each request, where both came in a stretch of time."""
    inside = ([t for t in one if begin <= t <= end] for one in times)
    return [[1e3 * (b - a) for a, b in itertools.pairwise(one)] for one in inside if len(one) > 1]


def longest(times: Times, begin: float, end: float) -> list[float]:
    """The longest wait of each request; the median of these, and the most."""
    most = [max(one) for one in waits(times, begin, end)] or [0.0]
    return [statistics.median(most), max(most)]


def rate(times: Times, begin: float, end: float) -> float:
    """Tokens a second."""
    return sum(begin <= t < end for one in times for t in one) / max(end - begin, 1e-9)


def spoken(pair: list[float]) -> str:
    return " and ".join(f"{ms:.1f}" for ms in pair)


async def measure(args: argparse.Namespace, folder: Path, record: dict[str, Any]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from lora_merge import Publisher
    from lora_merge.publish.store import Store

    url = folder / "run"
    model = policy(args, folder / "base")
    publisher, store = Publisher(model, url, keep=3), Store(url)
    publisher.publish()
    os.environ |= {"LORA_MERGE_FOLLOW": str(url), "LORA_MERGE_CACHE": args.cache}
    memory = {"gpu_memory_utilization": args.gpu_memory} if args.device == "cuda" else {}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder / "base"),
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_num_seqs=args.requests,
            max_model_len=args.prompt_tokens + args.new_tokens,
            enforce_eager=args.device == "cpu",
            **memory,
        )
    )
    times, stop = list[list[float]](), asyncio.Event()
    asking = [asyncio.create_task(ask(engine, number, args, times, stop)) for number in range(args.requests)]
    try:
        while not any(times):  # the first version is merged before the first token
            await asyncio.sleep(0.1)
            for task in asking:
                if task.done():
                    task.result()
        await asyncio.sleep(args.warm)
        for _ in range(args.versions):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        parameter.mul_(1.01)
            begin = time.perf_counter()
            published = await asyncio.to_thread(publisher.publish)
            made = time.perf_counter()
            while serves(store).get("serves") != published.name:
                await asyncio.sleep(0.02)
                assert time.perf_counter() - made < 60, serves(store)
            end = time.perf_counter()
            await asyncio.sleep(max(args.pause, 1.0))
            before = [ms for one in waits(times, begin - 1, begin) for ms in one] or [0.0]
            point = {
                "version": published.version,
                "bytes_read": published.nbytes,
                "publish_ms": 1e3 * published.seconds,
                "served_after_ms": 1e3 * (end - made),
                "paused_ms": 1e3 * serves(store)["waited"],
                "between_tokens_ms": statistics.median(before),
                "longest_before_ms": longest(times, begin - 1, begin),
                "longest_ms": longest(times, made, end),
                "tokens_s": [rate(times, begin - 1, begin), rate(times, made, end), rate(times, end, end + 1)],
            }
            record["points"].append(point)
            print(
                f"version {point['version']}: paused {point['paused_ms']:.1f} ms; longest wait for a token, median "
                f"over requests and most, {spoken(point['longest_ms'])} ms ({spoken(point['longest_before_ms'])} in "
                f"the second before, {point['between_tokens_ms']:.1f} between two); tokens/s before, meanwhile, after "
                f"{', '.join(f'{one:,.0f}' for one in point['tokens_s'])}; served {point['served_after_ms']:.0f} ms "
                f"after it was there; {point['bytes_read'] / 1e6:.0f} MB",
                flush=True,
            )
            report.save(record, args.json)
    finally:
        stop.set()
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="qwen2.5-7b", help="default %(default)s")
    parser.add_argument("--rank", type=int, default=32, help="default %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument(
        "--gpu-memory", type=float, default=0.5, help="share of it that vLLM takes (default %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=64, help="in flight (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument("--new-tokens", type=int, default=1024, help="default %(default)s")
    parser.add_argument("--versions", type=int, default=8, help="default %(default)s")
    parser.add_argument("--warm", type=float, default=10.0, help="seconds before the first (default %(default)s)")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two (default %(default)s)")
    parser.add_argument(
        "--cache",
        choices=("reset", "keep"),
        default="reset",
        help="KV cache of requests in flight (default %(default)s)",
    )
    parser.add_argument("--folder", type=Path, help="for checkpoint and store (default: a new one in /dev/shm)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    sync.quiet()
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    shared = Path("/dev/shm")
    folder = args.folder or Path(tempfile.mkdtemp(dir=shared if shared.is_dir() else None))
    record: dict[str, Any] = report.provenance(torch.device(args.device)) | {
        key: getattr(args, key) for key in ("shape", "rank", "requests", "prompt_tokens", "new_tokens", "cache")
    }
    record["points"] = []
    try:
        asyncio.run(measure(args, folder, record))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if not record["points"]:
        sys.exit("no version was served")


if __name__ == "__main__":
    main()
