"""How long a push takes: merged weights and adapters into a real vLLM engine, beside how peers do it.

    python benchmarks/sync.py --json benchmarks/results/sync.json            # GPU: Qwen2.5-7B shape, rank 32
    python benchmarks/sync.py --device cpu --shape tiny                      # a smoke test
    python benchmarks/sync.py --engine sglang                                # sync_sglang.py, with its own options

Engines start with `load_format="dummy"`, the trainer with random weights of the same shape. Each part runs in a process
of its own: `same` (trainer and engine in one process), `other` (engine in another process on the same device),
`adapter`, `tp2` (two GPUs, asked for with --parts), `engine` and `engine-other` (adapters alone cross, and the engine
merges), `pull` (an engine in sleep mode in another process, which reads the trainer's weights) and `pull-tp2` (two of
its workers, on two GPUs). Times are medians over `--repeats` pushes after a warm-up. Each part measures one large copy
of the same bytes; `tp2` measures NCCL's broadcast of a bucket, too. The JSON is written after every part, so that a
time limit loses one part only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lora_merge.bench import report

SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-7b": {
        "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "qwen2.5-72b": {
        "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen3-30b-a3b-8": {  # 8 of the 48 layers
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768,
        "num_experts_per_tok": 8, "tie_word_embeddings": False,
    },
    "tiny-moe": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 64,
        "num_experts_per_tok": 2, "tie_word_embeddings": False,
    },
    "small-moe": {  # blocks of 128 divide its weights, and vLLM 0.26 can quantise a router for 16 experts
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 16, "moe_intermediate_size": 128,
        "num_experts_per_tok": 4, "tie_word_embeddings": False,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    },
}  # fmt: skip
SHAPES["qwen3-30b-a3b"] = SHAPES["qwen3-30b-a3b-8"] | {"num_hidden_layers": 48}
SHAPES["qwen3-235b-a22b"] = SHAPES["qwen3-30b-a3b"] | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}  # fmt: skip
SHAPES["llama-70b"] = SHAPES["qwen2.5-72b"] | {"vocab_size": 128256, "intermediate_size": 28672}
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def config_of(shape: str, layers: int | None = None) -> Any:
    """Of transformers, in bf16.

    Args:
        shape: one of `SHAPES`.
        layers: how many of its layers; default: all.
    """
    from transformers import Qwen2Config, Qwen3MoeConfig

    sizes = SHAPES[shape] | {"max_position_embeddings": 4096, "dtype": "bfloat16"}
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    config = Qwen3MoeConfig(**sizes) if "num_experts" in sizes else Qwen2Config(**sizes)
    config.architectures = ["Qwen3MoeForCausalLM" if "num_experts" in sizes else "Qwen2ForCausalLM"]
    return config


def name_of(record: dict[str, Any]) -> str:
    """The shape of a record, and how many of its layers there were where it was not all of them."""
    whole = SHAPES[record["shape"]]["num_hidden_layers"]
    return record["shape"] + ("" if record["layers"] == whole else f" ({record['layers']} of {whole} layers)")


def build_base(shape: str, device: str, layers: int | None = None) -> nn.Module:
    """Random weights of the shape, the same ones each time."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(shape, layers), dtype=torch.bfloat16).eval()


def build_policy(
    shape: str, rank: int, device: str, layers: int | None = None, *, experts: bool = True, **options: Any
) -> nn.Module:
    """The same with a LoRA on every linear layer.

    Args:
        shape: one of `SHAPES`.
        rank: of the adapter.
        device: where the model is made.
        layers: as of `config_of`.
        experts: whether experts have adapters, too, where the shape has any.
        options: of `LoraConfig`, instead of the ones here.
    """
    from peft import LoraConfig, get_peft_model

    base = build_base(shape, device, layers)
    moe = "num_experts" in SHAPES[shape]
    fused = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {
        "r": rank, "target_modules": LINEARS[:4] if moe else LINEARS,
        "target_parameters": fused if moe and experts else None, "init_lora_weights": False,
    }  # fmt: skip
    with torch.device(device):
        return get_peft_model(base, LoraConfig(**config | options)).eval()


def quiet() -> None:
    """Settings of vLLM that every benchmark has."""
    for name, value in {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1",
                        "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_USE_FLASHINFER_SAMPLER": "0"}.items():  # fmt: skip
        os.environ.setdefault(name, value)


@contextmanager
def start_engine(
    args: argparse.Namespace,
    folder: Path,
    *,
    tp: int = 1,
    lora: bool = False,
    layers: int | None = None,
    **options: Any,
) -> Iterator[Any]:
    """An engine with dummy weights of `args.shape`; `options` of `vllm.LLM` count before the ones here."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    config_of(args.shape, layers).save_pretrained(folder)
    chosen = {
        "load_format": "dummy", "dtype": "bfloat16", "enforce_eager": True, "skip_tokenizer_init": True,
        "max_model_len": 1024, "max_num_seqs": 16, "tensor_parallel_size": tp,
        "weight_transfer_config": WeightTransferConfig(backend="lora_merge"),
    }  # fmt: skip
    chosen |= {"enable_lora": True, "max_lora_rank": max(args.rank, 8)} if lora else {}
    chosen |= {"gpu_memory_utilization": args.gpu_memory} if args.device == "cuda" else {}
    llm = LLM(str(folder), **chosen | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median milliseconds, after one warm-up."""
    spent = []
    for index in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        if index:
            spent.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(spent)


def pushes(sync: Any, repeats: int, mode: str) -> dict[str, Any]:
    """Medians by phase over some pushes. The first two make plans and bring the base; until the tenth or so a push gets
    faster by a millisecond or two, as both processes' code comes into caches, which shows on a GPU alone. Collective.
    """
    warm_up = 12 if torch.cuda.is_initialized() else 2
    reports = [sync.push(mode=mode) for _ in range(warm_up + repeats)]
    steady = reports[warm_up:]
    phases = {p: statistics.median(1e3 * r.seconds.get(p, 0.0) for r in steady) for p in reports[-1].seconds}
    if os.environ.get("RANK", "0") == "0":
        print(reports[-1], flush=True)
    return {
        "bytes": reports[-1].nbytes,
        "tensors": reports[-1].tensors,
        "transports": list(reports[-1].transports),
        "phases_ms": phases,
        "merge_and_load_ms": phases["transfer"] + phases["finish"],
        "total_ms": sum(phases.values()),
        "first_ms": 1e3 * sum(reports[0].seconds.values()),
        "third_ms": 1e3 * sum(reports[2].seconds.values()),
    }


def copy_ms(nbytes: int, device: str, repeats: int) -> float:
    """One large copy of as many bytes."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return timed(lambda: target.copy_(source), device, repeats)


def beside_a_copy(result: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The same with one large copy of the same bytes, and merge and load in multiples of it."""
    copy = copy_ms(result["bytes"], args.device, args.repeats)
    return result | {"copy_ms": copy, "x_copy": result["merge_and_load_ms"] / copy}


def as_verl(model: Any, engine_model: Any, device: str) -> dict[str, float]:
    """Backup of the base to the CPU, PEFT's merge, tensor by tensor into the engine, restore."""
    spent: dict[str, float] = {}

    def phase(name: str, run: Callable[[], Any]) -> Any:
        synchronize(device)
        begin = time.perf_counter()
        value = run()
        synchronize(device)
        spent[name] = 1e3 * (time.perf_counter() - begin)
        return value

    parameters = {n: p for n, p in model.named_parameters() if "lora_" not in n}
    backup = phase("backup", lambda: {n: p.detach().clone().cpu() for n, p in parameters.items()})
    phase("merge", model.merge_adapter)

    def stream() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in parameters.items():
            yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), parameter.detach()

    phase("load", lambda: [engine_model.load_weights([pair]) for pair in stream()])

    def restore() -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(backup[name])
        for module in model.modules():
            if hasattr(module, "merged_adapters"):
                module.merged_adapters = []

    phase("restore", restore)
    spent["total"] = sum(spent.values())
    return spent


def as_swift(model: Any, engine_model: Any, device: str, bucket_bytes: int) -> float:
    """Out of place on full tensors, buckets made by torch.cat of uint8 views, split and loaded."""
    layers = {f"{n}.weight": m for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                continue
            layer = layers.get(name.replace(".base_layer.", "."))
            value = parameter.detach()
            if layer is not None:
                value = value + layer.get_delta_weight("default").to(value.dtype)
            yield name.removeprefix("base_model.model.").replace(".base_layer.", "."), value

    def send(bucket: list[tuple[str, Tensor]]) -> None:
        flat = torch.cat([t.contiguous().view(-1).view(torch.uint8) for _, t in bucket])
        sizes = [t.nbytes for _, t in bucket]
        parts = zip(bucket, flat.split(sizes), strict=True)
        engine_model.load_weights([(n, part.view(t.dtype).view(t.shape)) for (n, t), part in parts])

    def run() -> None:
        bucket: list[tuple[str, Tensor]] = []
        for name, tensor in tensors():
            bucket.append((name, tensor))
            if sum(t.nbytes for _, t in bucket) >= bucket_bytes:
                send(bucket)
                bucket = []
        if bucket:
            send(bucket)

    with torch.no_grad():
        return timed(run, device, 3)


def fill_all(writer: Any, buffers: list[Tensor]) -> None:
    for index in range(len(writer.table)):
        writer.fill(index, buffers[index % 2], {})


def part_same(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from lora_merge import VllmSync

    with start_engine(args, folder) as llm:
        model = build_policy(args.shape, args.rank, args.device)
        before = {n: p.detach().cpu().clone() for n, p in model.named_parameters()}
        free = torch.cuda.mem_get_info()[0] if args.device == "cuda" else 0
        sync = VllmSync(model, llm, bucket_bytes=args.bucket_bytes)
        result = pushes(sync, args.repeats, "merged")
        result["extra_bytes"] = free - torch.cuda.mem_get_info()[0] if args.device == "cuda" else None
        result["check_of_all_bytes"] = str(sync.push(verify=True))
        writer = sync._weights.bucket_writer()
        with writer.buffers() as buffers:
            result["merge_only_ms"] = timed(lambda: fill_all(writer, buffers), args.device, args.repeats)
        writer._idle = []
        used = torch.cuda.memory_allocated() if args.device == "cuda" else 0
        for _ in range(args.pushes):
            sync.push()
        result["memory_growth_bytes"] = (torch.cuda.memory_allocated() if args.device == "cuda" else 0) - used
        result["pushes"] = args.pushes
        result["weights_identical"] = all(torch.equal(p.detach().cpu(), before[n]) for n, p in model.named_parameters())
        del before
        sync.close()
        worker = llm.llm_engine.model_executor.driver_worker.worker
        if args.device == "cuda" and "num_experts" not in SHAPES[args.shape]:
            from vllm.config import set_current_vllm_config

            with set_current_vllm_config(worker.vllm_config):
                result["as_swift_ms"] = as_swift(model, worker.get_model(), args.device, args.bucket_bytes)
                result["as_verl_ms"] = as_verl(model, worker.get_model(), args.device)
        return beside_a_copy(result, args)


def part_other(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from lora_merge import VllmSync

    with start_engine(args, folder) as llm:
        model = build_policy(args.shape, args.rank, args.device)
        result = pushes(VllmSync(model, llm, bucket_bytes=args.bucket_bytes), args.repeats, "merged")
        return beside_a_copy(result, args)


def part_adapter(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from lora_merge import VllmSync

    with start_engine(args, folder, lora=True) as llm:
        model = build_policy(args.shape, args.rank, args.device)
        result = pushes(VllmSync(model, llm, bucket_bytes=args.bucket_bytes), args.repeats, "adapter")
        return beside_a_copy(result, args)


def part_engine(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Adapters alone cross, and the engine's worker merges them; with the copy of the whole model."""
    from lora_merge import VllmSync

    with start_engine(args, folder) as llm:
        model = build_policy(args.shape, args.rank, args.device)
        sync = VllmSync(model, llm, merge="engine", bucket_bytes=args.bucket_bytes)
        free = torch.cuda.mem_get_info()[0] if args.device == "cuda" else 0
        result = pushes(sync, args.repeats, "merged")
        for _ in range(args.pushes):
            sync.push()
        result["extra_bytes"] = free - torch.cuda.mem_get_info()[0] if args.device == "cuda" else None
        if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
            worker = llm.llm_engine.model_executor.driver_worker.worker
            plan = worker.get_model()._lora_merge.merger._plan
            result["kept_bytes"] = plan.tracked.nbytes
            result["unmerge_and_merge_ms"] = timed(
                lambda: (plan.tracked.unmerge(), plan.tracked.merge()), args.device, args.repeats
            )
        model_bytes = sync._base.bucket_writer().nbytes
        copy = copy_ms(model_bytes, args.device, args.repeats)
        return result | {"model_bytes": model_bytes, "copy_ms": copy, "x_copy": result["merge_and_load_ms"] / copy}


def part_tp2(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trainer on GPU 0, workers on GPUs 0 (IPC) and 1 (NCCL)."""
    from lora_merge import VllmSync

    speed = broadcast_speed(args)
    with start_engine(args, folder, tp=2) as llm:
        model = build_policy(args.shape, args.rank, args.device)
        result = pushes(VllmSync(model, llm, bucket_bytes=args.bucket_bytes), args.repeats, "merged")
        result["broadcast_bytes_per_s"] = speed
        result["share_of_broadcast"] = result["bytes"] / (1e-3 * result["phases_ms"]["transfer"]) / speed
        return beside_a_copy(result, args)


def part_pull(args: argparse.Namespace, folder: Path, tp: int = 1) -> dict[str, Any]:
    """An engine whose memory cannot be mapped: its workers read the trainer's. The first push, in buckets, shows where
    that lies; in the second it is mapped."""
    from lora_merge import VllmSync

    cuda = args.device == "cuda"
    options: dict[str, Any] = {"worker_extension_cls": "pull_worker.Timed"}
    with start_engine(args, folder, tp=tp, **options | ({"enable_sleep_mode": True} if cuda else {})) as llm:
        model = build_policy(args.shape, args.rank, args.device)
        if not cuda:
            model.share_memory()
        before = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(tp)] if cuda else []
        sync = VllmSync(model, llm, bucket_bytes=args.bucket_bytes)
        buckets, mapping = sync.push(), sync.push()
        result = pushes(sync, args.repeats, "merged")
        result |= {"buckets_ms": 1e3 * sum(buckets.seconds.values()), "map_ms": 1e3 * sum(mapping.seconds.values())}
        between = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(tp)] if cuda else []
        for _ in range(args.pushes):
            sync.push()
        after = [torch.cuda.mem_get_info(gpu)[0] for gpu in range(tp)] if cuda else []
        result["extra_bytes"] = [free - left for free, left in zip(before, after, strict=True)]
        result["memory_growth_bytes"] = [free - left for free, left in zip(between, after, strict=True)]
        spent = llm.collective_rpc("pull_ms", args=(args.repeats,))
        result |= {
            "merge_in_worker_ms": [merge for merge, _ in spent],
            "bring_in_worker_ms": [bring for _, bring in spent],
        }
        result["check_of_all_bytes"] = str(sync.push(verify=True))
        result = beside_a_copy(result, args)
        result["transfer_x_copy"] = result["phases_ms"]["transfer"] / result["copy_ms"]
        return result | {"total_x_copy": result["total_ms"] / result["copy_ms"]}


def part_pull_tp2(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trainer on GPU 0, workers on GPUs 0 and 1: the second one reads over NVLink."""
    return part_pull(args, folder, tp=2)


def broadcast_speed(args: argparse.Namespace) -> float:
    """Bytes per second of NCCL's broadcast of a bucket from GPU 0 to GPU 1: the fastest of some in a row."""
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        answer = context.SimpleQueue()
        ranks = [
            context.Process(target=_broadcast, args=(rank, folder, args.bucket_bytes, args.repeats, answer))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        if any(rank.exitcode for rank in ranks):
            raise RuntimeError("NCCL could not broadcast between the two GPUs")
        return args.bucket_bytes / (1e-3 * answer.get())


def _broadcast(rank: int, folder: str, nbytes: int, repeats: int, answer: Any) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2, device_id=torch.device("cuda", rank)
    )
    bucket = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    inner = 8
    spent = timed(lambda: [torch.distributed.broadcast(bucket, 0) for _ in range(inner)], "cuda", repeats) / inner
    if rank == 0:
        answer.put(spent)
    torch.distributed.destroy_process_group()


PARTS = {
    "same": part_same,
    "other": part_other,
    "adapter": part_adapter,
    "tp2": part_tp2,
    "engine": part_engine,
    "engine-other": part_engine,
    "pull": part_pull,
    "pull-tp2": part_pull_tp2,
}
IN_PROCESS = ("same", "adapter", "engine")


def join(device: str, minutes: float) -> torch.device:
    """Make this process a rank of those that torchrun has started, and its GPU the current one.

    Args:
        device: "cuda" or "cpu".
        minutes: that a collective may take.
    """
    cuda = device == "cuda"
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(own)
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=minutes))
    return own


def run_part(
    name: str, in_process: bool, script: str = __file__, launcher: Sequence[str] = (sys.executable,)
) -> dict[str, Any]:
    """One part in a process of its own, with the options of this one.

    Args:
        name: what it is given as `--part`.
        in_process: whether vLLM's engine runs in the part's process.
        script: the benchmark; it ends with `end_part`.
        launcher: what starts it.

    Returns:
        what it wrote, or `{"error": ...}`.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [*launcher, script, *sys.argv[1:], "--part", name, "--json", out.name]
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(not in_process))}
        done = subprocess.run(command, env=environment, check=False)
        text = out.read()
    if done.returncode or not text:
        return {"error": f"part {name} ended with {done.returncode}"}
    return json.loads(text)


def end_part(result: dict[str, Any], file: Path) -> NoReturn:
    """Write what a part found, and end its process."""
    file.write_text(json.dumps(result))
    sys.stdout.flush()
    gc.collect()
    os._exit(0)  # engines leave threads behind


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--engine", choices=["vllm", "sglang"], default="vllm", help="sglang: see sync_sglang.py --help"
    )
    chosen, rest = parser.parse_known_args()
    if chosen.engine == "sglang":
        script = str(Path(__file__).with_name("sync_sglang.py"))
        os.execv(sys.executable, [sys.executable, script, *rest])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[parser]
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pushes", type=int, default=100, help="pushes of the drift and memory test")
    parser.add_argument("--gpu-memory", type=float, default=0.4, help="the engine's share of the GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["same", "other", "adapter"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    quiet()
    if args.part:
        with tempfile.TemporaryDirectory() as folder:
            result = PARTS[args.part](args, Path(folder))
        assert args.json is not None
        end_part(result, args.json)
    import vllm

    record = report.provenance(torch.device(args.device))
    record["versions"]["vllm"] = vllm.__version__
    record |= {"shape": args.shape, "rank": args.rank, "bucket_bytes": args.bucket_bytes}
    for name in args.parts:
        record[name] = part = run_part(name, name in IN_PROCESS)
        if "as_verl_ms" in part:
            ours = part["merge_and_load_ms"]
            part["times_faster"] = {"verl": part["as_verl_ms"]["total"] / ours, "ms-swift": part["as_swift_ms"] / ours}
        report.save(record, args.json)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
