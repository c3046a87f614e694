"""What the messages of a steady push cost: a policy so small that its weights take next to nothing, and a real vLLM
engine behind each kind of handle.

    python benchmarks/messages.py --json benchmarks/results/messages-cpu.json

Each handle gets `--pushes` pushes of a policy that has changed, after three others. The server is also asked as
lora_merge did before: each call of a push by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import served
import torch

from lora_merge import VllmSync
from lora_merge.bench import report
from lora_merge.engine.control.http import Server
from lora_merge.engine.vllm.control import AsyncControl, LlmControl
from lora_merge.engine.vllm.url import HttpControl

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
WARM = 3
_Measure: TypeAlias = Callable[[str, Any], Coroutine[Any, Any, None]]
"""Measures a handle, under a name."""


@contextmanager
def counted() -> Iterator[list[str]]:
    """Note the messages to an engine."""
    noted: list[str] = []

    def noting(owner: type, name: str) -> Any:
        method = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            noted.append(owner.__name__)
            return method(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with noting(LlmControl, "_call"), noting(AsyncControl, "_call"), noting(Server, "_answer"):
        yield noted


async def measure(engine: Any, model: Any, merge: str, pushes: int) -> dict[str, Any]:
    """Push; return the milliseconds of the median push and of the fastest, and the messages of the one with most."""
    import engines  # type: ignore[import-not-found]

    sync = VllmSync(model, engine, merge=merge)  # type: ignore[arg-type]
    seconds, messages = list[float](), list[int]()
    with counted() as noted:
        for number in range(WARM + pushes):
            engines.train(model, number)
            noted.clear()
            begin = time.perf_counter()
            await sync.apush()
            seconds.append(time.perf_counter() - begin)
            messages.append(len(noted))
    await sync.aclose()
    ms = sorted(1e3 * one for one in seconds[WARM:])
    return {"merge": merge, "ms": statistics.median(ms), "least_ms": ms[0], "messages": max(messages[WARM:])}


def of_llm(folder: Path, model: Any, each: _Measure) -> None:
    import engines

    with engines.engine(model, folder, processes=True) as llm:
        asyncio.run(each("LLM, in a process of its own", llm))


def of_async(folder: Path, model: Any, each: _Measure) -> None:
    import engines
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(str(folder), **engines.engine_options(model)))
        try:
            await each("AsyncLLM", llm)
        finally:
            llm.shutdown()

    with mock.patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}):
        asyncio.run(run())


def of_server(folder: Path, model: Any, each: _Measure) -> None:
    flags = ["--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "64", "--dtype", "float32"]
    flags += ["--load-format", "dummy", "--max-num-seqs", "8"]
    with served.server(folder, flags, os.environ | {"OMP_NUM_THREADS": "1"}) as url:
        asyncio.run(each("server, by its URL", url))
        with mock.patch.object(HttpControl, "_reaches_core", return_value=False):
            asyncio.run(each("server, each call by itself", url))


STARTED = {"llm": of_llm, "async": of_async, "server": of_server}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pushes", type=int, default=50, help="timed pushes of each kind (default %(default)s)")
    parser.add_argument("--only", nargs="+", choices=STARTED, default=[*STARTED], help="some of the engines")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    import engines
    import models  # type: ignore[import-not-found]
    import transformers
    import vllm

    torch.set_num_threads(1)
    record: dict[str, Any] = report.provenance(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    record["versions"] |= {m.__name__: m.__version__ for m in (vllm, transformers)}
    record |= {"pushes": args.pushes, "points": []}
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    for engine in args.only:
        with tempfile.TemporaryDirectory() as folder:
            base = Path(folder) / "base"
            engines.save_base(model.get_base_model(), base)

            async def each(handle: str, engine: Any) -> None:
                for merge in ("trainer", "engine"):
                    point = await measure(engine, model, merge, args.pushes)
                    record["points"].append({"handle": handle} | point)
                    print(f"{handle}, {merge} merges: {point['messages']} messages, {point['ms']:.1f} ms", flush=True)

            STARTED[engine](base, model, each)
    report.save(record, args.json)


if __name__ == "__main__":
    main()
