"""What a push costs the requests in flight: an adapter as a new version beside those before it, and merged weights.

    python benchmarks/versions.py --json versions-h200.json        # GPU: Qwen2.5-7B's shape, rank 32, one GPU
    python benchmarks/versions.py --device cpu --shape tiny        # a smoke test

`--requests` requests generate in an `AsyncLLM`, one after another for each client, each with the newest version when it
begins. For each push: how long it took; the longest time that a request waited for its next token meanwhile (the median
over requests, and the most), beside the second before; tokens a second in the second before, from its begin to the
second after its end, and in the second after that. The JSON is written after each push.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import publish
import sync
import torch

from lora_merge.bench import report


async def ask(engine: Any, pusher: Any, number: int, args: argparse.Namespace, times: publish.Times) -> None:
    """Generate for ever; note when each token came."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    vocabulary, turn = sync.SHAPES[args.shape]["vocab_size"], 0
    while True:
        turn += 1
        prompt = {"prompt_token_ids": [(number * 131 + i) % vocabulary for i in range(args.prompt_tokens)]}
        mine: list[float] = []
        times.append(mine)
        sampling = SamplingParams(
            temperature=1.0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=args.new_tokens * (1 + number % 4) // 4,  # they do not end together
            output_kind=RequestOutputKind.DELTA,
        )
        lora = pusher.lora_request()
        async for output in engine.generate(
            prompt, sampling, f"{lora and lora.lora_name} {number}-{turn}", lora_request=lora
        ):
            now = time.perf_counter()
            mine.extend([now] * sum(len(one.token_ids) for one in output.outputs))


async def measure(args: argparse.Namespace, folder: Path, record: dict[str, Any]) -> None:
    from vllm import AsyncEngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.v1.engine.async_llm import AsyncLLM

    from lora_merge import VllmSync

    sync.config_of(args.shape).save_pretrained(folder)
    model = sync.build_policy(args.shape, args.rank, args.device, experts=False).eval()
    memory = {"gpu_memory_utilization": args.gpu_memory} if args.device == "cuda" else {}
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_num_seqs=args.requests,
            max_model_len=args.prompt_tokens + args.new_tokens,
            enforce_eager=args.device == "cpu",
            enable_lora=True,
            max_lora_rank=max(args.rank, 8),
            max_loras=args.loras,
            weight_transfer_config=WeightTransferConfig(backend="lora_merge"),
            **memory,
        )
    )
    try:
        async with VllmSync(model, engine) as pusher:
            for way in ({"mode": "adapter", "keep": args.keep}, {"mode": "merged"}):
                print(await pusher.apush(**way), flush=True)  # the base with it
                times: publish.Times = []
                asking = [asyncio.create_task(ask(engine, pusher, n, args, times)) for n in range(args.requests)]
                await asyncio.sleep(args.warm)
                for _ in range(args.pushes):
                    record["points"].append(await push(pusher, model, times, args))
                    report.save(record, args.json)
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)
    finally:
        engine.shutdown()


async def push(pusher: Any, model: Any, times: publish.Times, args: argparse.Namespace) -> dict[str, Any]:
    """One push; what it cost."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.01)
    begin = time.perf_counter()
    done = await pusher.apush()
    end = time.perf_counter()
    await asyncio.sleep(max(args.pause, 2.1))
    before = [ms for one in publish.waits(times, begin - 1, begin) for ms in one] or [0.0]
    point = {
        "mode": done.mode,
        "nbytes": done.nbytes,
        "push_ms": 1e3 * (end - begin),
        "between_tokens_ms": statistics.median(before),
        "longest_before_ms": publish.longest(times, begin - 1, begin),
        "longest_ms": publish.longest(times, begin, end + 1),
        "tokens_s": [
            publish.rate(times, begin - 1, begin),
            publish.rate(times, begin, end + 1),
            publish.rate(times, end + 1, end + 2),
        ],
    }
    print(
        f"{done}\n  took {point['push_ms']:.0f} ms; longest wait for a token, median over requests and most, "
        f"{publish.spoken(point['longest_ms'])} ms ({publish.spoken(point['longest_before_ms'])} in the second before, "
        f"{point['between_tokens_ms']:.1f} between two); tokens/s before, meanwhile, after "
        f"{', '.join(f'{one:,.0f}' for one in point['tokens_s'])}",
        flush=True,
    )
    return point


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="qwen2.5-7b", help="default %(default)s")
    parser.add_argument("--rank", type=int, default=32, help="default %(default)s")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default %(default)s")
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="the engine's share (default %(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="in flight (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument("--new-tokens", type=int, default=1024, help="of the longest request (default %(default)s)")
    parser.add_argument("--loras", type=int, default=4, help="vLLM's max_loras (default %(default)s)")
    parser.add_argument("--keep", type=int, default=3, help="versions (default %(default)s)")
    parser.add_argument("--pushes", type=int, default=8, help="of each mode (default %(default)s)")
    parser.add_argument("--warm", type=float, default=10.0, help="seconds before the first (default %(default)s)")
    parser.add_argument("--pause", type=float, default=3.0, help="seconds between two (default %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    sync.quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    record: dict[str, Any] = report.provenance(torch.device(args.device)) | {
        key: getattr(args, key) for key in ("shape", "rank", "requests", "prompt_tokens", "new_tokens", "loras", "keep")
    }
    record["points"] = []
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(args, Path(folder), record))
    if not record["points"]:
        sys.exit("nothing was pushed")


if __name__ == "__main__":
    main()
