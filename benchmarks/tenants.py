"""Several adapters served at once: one merged and the others beside it, or all of them in vLLM's LoRA slots.

    python benchmarks/tenants.py --json tenants-h200.json                    # GPU: Qwen2.5-7B's shape, rank 32
    python benchmarks/tenants.py --device cpu --shape tiny --tenants 1 3     # a smoke test

Two engines, each in a process of its own, started with dummy weights, for the largest number of `--tenants`, with CUDA
graphs on a GPU:

- `beside`: `VllmSync(tenants=[...])`. The first tenant is merged; the others lie in slots of twice the rank.
- `slots`: vLLM's own path. It loads every adapter from a folder into a slot of its own.

Traffic is skewed as Zipf has it: of `--requests`, tenant k gets a share of 1 / k^s, for each s of `--skew`; with one
tenant all are its own. A call of `generate` has requests of `--prompt-tokens` random tokens, each of which gets exactly
`--new-tokens`, sampled at temperature 1. The figure is the new tokens over the median time of `--repeats` calls,
prompts included. Before that come calls until one is no longer 5 % faster than the one before it. Prefixes are not
cached. Memory is that of the slots, which vLLM allocates when it starts, and of the factors that it keeps to fill them;
and the tokens for which its KV cache has room beside them. Of `beside`, `push_ms` is a steady push of all tenants. The
JSON is written after either engine, so that a time limit loses one only.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import rollout
import sync
import torch
from torch import Tensor

from lora_merge.bench import report

Record = dict[str, Any]

WAYS = {"beside": "one merged, others beside it", "slots": "vLLM's slots for all"}
"""The option -> what the table calls it."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM takes as `max_lora_rank`."""


class Memory:
    """Extends vLLM's workers, for `collective_rpc`."""

    def lora_bytes(self) -> dict[str, int]:
        """Return the bytes of the slots of all layers, and of the factors that are kept to fill them."""
        inner = self.model_runner.lora_manager._adapter_manager  # type: ignore[attr-defined]
        layers = {id(layer): layer for layer in inner.modules.values()}.values()
        slots = {id(t): t for layer in layers for name in ("lora_a_stacked", "lora_b_stacked")
                 for t in getattr(layer, name, ())}  # fmt: skip
        kept = [factor for adapter in inner.list_adapters().values() for lora in adapter.loras.values()
                for one in (lora.lora_a, lora.lora_b) for factor in flat(one)]  # fmt: skip
        on_device = [factor for factor in kept if factor.device.type == self.device.type]  # type: ignore[attr-defined]
        return {"slots": nbytes(slots.values()), "kept": nbytes(kept), "kept_on_device": nbytes(on_device)}


def flat(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested list."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from flat(one)


def nbytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def shares(requests: int, tenants: int, skew: float) -> list[int]:
    """Return how many requests each tenant gets, the hottest one first: the largest remainders are rounded up."""
    weights = [1 / (k + 1) ** skew for k in range(tenants)]
    exact = [requests * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    rest = sorted(range(tenants), key=lambda k: counts[k] - exact[k])[: requests - sum(counts)]
    return [count + (k in rest) for k, count in enumerate(counts)]


def adapters(args: argparse.Namespace) -> Any:
    """A model with as many adapters as there are tenants at the most."""
    from peft import LoraConfig

    model: Any = sync.build_policy(args.shape, args.rank, args.device, args.layers, experts=False)
    targets = sorted(model.peft_config["default"].target_modules)
    for index in range(1, max(args.tenants)):
        config = LoraConfig(r=args.rank, target_modules=targets, init_lora_weights=False)
        with torch.device(args.device):
            model.add_adapter(name_of(index), config)
    with torch.no_grad():
        for parameter in (p for path, p in model.named_parameters() if "lora_B" in path):
            parameter.mul_(rollout.SMALL)
    return model


def name_of(index: int) -> str:
    return f"tenant{index}" if index else "default"


def measure(way: str, llm: Any, requests: Sequence[Any], args: argparse.Namespace, what: str) -> float:
    """Return new tokens a second.

    Args:
        requests: of each request its `lora_request`.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=1.0, max_tokens=args.new_tokens, ignore_eos=True, detokenize=False)
    vocabulary, draw = sync.SHAPES[args.shape]["vocab_size"], random.Random(len(requests))
    prompts = [{"prompt_token_ids": [draw.randrange(vocabulary) for _ in range(args.prompt_tokens)]} for _ in requests]

    def answer() -> None:
        outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=list(requests))
        if {len(output.outputs[0].token_ids) for output in outputs} != {args.new_tokens}:
            raise RuntimeError(f"answers of {args.new_tokens} tokens were asked for")

    rollout.warm_up(answer, args.device)
    speed = 1e3 * len(requests) * args.new_tokens / sync.timed(answer, args.device, args.repeats)
    print(f"{WAYS[way]}, {what}: {speed:,.0f} tokens/s", flush=True)
    return speed


def measured(way: str, llm: Any, request_of: Any, count: int, args: argparse.Namespace) -> list[Record]:
    """Return the figures of one number of tenants, for each skew.

    Args:
        request_of: makes the `lora_request` of a tenant.
    """
    found = []
    for skew in args.skew if count > 1 else args.skew[:1]:
        counts = shares(args.requests, count, skew)
        requests = [request_of(index) for index, many in enumerate(counts) for _ in range(many)]
        random.Random(count).shuffle(requests)
        what = f"{count} tenants, skew {skew:g} (hottest {counts[0]} of {args.requests})" if count > 1 else "1 tenant"
        speed = measure(way, llm, requests, args, what)
        found.append({"tenants": count, "skew": skew if count > 1 else None, "hottest": counts[0], "tokens_s": speed})
    return found


def part(args: argparse.Namespace) -> Record:
    """One way, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        run = beside if args.part == "beside" else slots
        return run(args, Path(folder))


def options(args: argparse.Namespace, rank: int, slots: int) -> Record:
    """Options of an engine with room for so many adapters of a rank beside the base."""
    most = max(args.tenants)
    return {
        "enable_lora": True, "max_lora_rank": next(known for known in RANKS if known >= rank), "max_loras": slots,
        "max_cpu_loras": most, "enforce_eager": args.device == "cpu", "max_num_seqs": args.requests,
        "max_model_len": args.prompt_tokens + args.new_tokens, "enable_prefix_caching": False,
        "worker_extension_cls": "tenants.Memory",
    }  # fmt: skip


def memory(llm: Any) -> Record:
    """What the slots take, and what is left for the KV cache."""
    [found] = llm.collective_rpc("lora_bytes")
    cache = llm.llm_engine.vllm_config.cache_config
    return {**found, "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size}


def beside(args: argparse.Namespace, folder: Path) -> Record:
    """One tenant is merged."""
    from lora_merge import VllmSync

    most = max(args.tenants)
    chosen = options(args, 2 * args.rank, max(1, most - 1))
    with sync.start_engine(args, folder / "base", lora=True, layers=args.layers, **chosen) as llm:
        model, found, push_ms = adapters(args), list[Record](), {}
        for count in args.tenants:
            names = [name_of(index) for index in range(count)]
            with closing(VllmSync(model, llm, tenants=names)) as pusher:
                print(pusher.push(), flush=True)
                push_ms[count] = sync.timed(pusher.push, args.device, args.repeats)
                found += measured("beside", llm, lambda index: pusher.lora_request(tenant=name_of(index)), count, args)
                pusher.check()  # the engine still holds what was measured
        return {"speed": found, "memory": memory(llm), "push_ms": push_ms}


def slots(args: argparse.Namespace, folder: Path) -> Record:
    """All are LoRA slots of vLLM's, which it fills from a folder; of speed the values are no matter."""
    from vllm.lora.request import LoRARequest

    args_of_one = argparse.Namespace(**vars(args) | {"tenants": [1]})
    model = adapters(args_of_one)
    model.save_pretrained(folder / "adapter")
    del model
    if args.device == "cuda":
        torch.cuda.empty_cache()
    chosen = options(args, args.rank, max(args.tenants))
    with sync.start_engine(args, folder / "base", lora=True, layers=args.layers, **chosen) as llm:
        found = []
        for count in args.tenants:
            requests = [LoRARequest(name_of(index), index + 1, str(folder / "adapter")) for index in range(count)]
            found += measured("slots", llm, requests.__getitem__, count, args)
        return {"speed": found, "memory": memory(llm)}


def run(args: argparse.Namespace) -> Record:
    """Every way, one after the other."""
    import vllm

    record = report.provenance(torch.device(args.device))
    record["versions"]["vllm"] = vllm.__version__
    names = ("shape", "rank", "tenants", "skew", "requests", "prompt_tokens", "new_tokens", "repeats", "device")
    record |= {name: getattr(args, name) for name in names}
    record |= {"layers": args.layers or sync.SHAPES[args.shape]["num_hidden_layers"]}
    record |= {"targets": "all", "cuda_graphs": args.device == "cuda", "ways": {}}
    for way in args.ways:
        # As users have it: on a GPU vLLM starts its engine in a process of its own.
        record["ways"][way] = sync.run_part(way, args.device == "cpu", __file__)
        report.save(record, args.json)
    return record


def show(record: Record) -> None:
    """Print the figures, and why there are none."""
    out = report.console()
    ways = {name: found for name, found in record["ways"].items() if "speed" in found}
    sheet = report.sheet_of(f"{rollout.title(record)}: tokens/s", "traffic", [WAYS[name] for name in ways])
    for row in zip(*(found["speed"] for found in ways.values()), strict=True):
        first = row[0]
        count, skew = first["tenants"], first["skew"]
        what = "1 tenant" if skew is None else f"{count} tenants, Zipf {skew:g}, hottest {first['hottest']}"
        cells = [f"{cell['tokens_s']:,.0f}" for cell in row]
        if len(row) == len(WAYS):
            cells[0] += f" ({row[0]['tokens_s'] / row[1]['tokens_s']:.2f}x)"
        sheet.add_row(what, *cells)
    for what, key, unit in (
        ("slots, MB", "slots", 1e6),
        ("kept factors, MB", "kept", 1e6),
        ("KV tokens", "kv_tokens", 1),
    ):
        sheet.add_row(what, *(f"{found['memory'][key] / unit:,.0f}" for found in ways.values()))
    out.print(sheet)
    for name, found in record["ways"].items():
        if "error" in found:
            out.print(f"{WAYS[name]}: error, {found['error']}", markup=False)
        for count, ms in found.get("push_ms", {}).items():
            out.print(f"{WAYS[name]}: a push of {count} takes {ms:.1f} ms", markup=False)
    graphs = "with CUDA graphs" if record["cuda_graphs"] else "eager"
    out.print(
        f"{record['requests']} requests of {record['prompt_tokens']} + {record['new_tokens']} tokens; memory with room "
        f"for {max(record['tenants'])} tenants. {record['device_name']}, {graphs}, {record['versions']}",
        markup=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has, where time or memory asks for it")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 4, 16], help="(default %(default)s)")
    parser.add_argument("--skew", type=float, nargs="+", default=[1.0, 2.0], help="of Zipf (default %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--requests", type=int, help="of a call; default: 64, on a CPU 8")
    parser.add_argument("--prompt-tokens", type=int, help="of a request; default: 128, on a CPU 16")
    parser.add_argument("--new-tokens", type=int, help="of an answer; default: 128, on a CPU 8")
    parser.add_argument("--repeats", type=int, default=2, help="timed calls (default %(default)s)")
    parser.add_argument("--gpu-memory", type=float, default=0.5, help="the engine's share (default %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--part", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    on_cpu = args.device == "cpu"
    args.requests = args.requests or (8 if on_cpu else 64)
    args.prompt_tokens = args.prompt_tokens or (16 if on_cpu else 128)
    args.new_tokens = args.new_tokens or (8 if on_cpu else 128)
    if min(args.tenants) < 1:
        parser.error("--tenants wants numbers of at least 1")
    sync.quiet()
    if args.part:
        sync.end_part(part(args), args.json)
    show(run(args))


if __name__ == "__main__":
    main()
