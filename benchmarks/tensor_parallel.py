"""Merging and exporting a tensor-parallel megatron-core model: on the shard, and as Megatron-Bridge does it.

    python benchmarks/tensor_parallel.py --shape qwen2.5-7b --gpus 2 --json benchmarks/results/tp-qwen2.5-7b-x2.json
    python benchmarks/tensor_parallel.py --shape qwen3-30b-a3b --layers 8 --gpus 2
    python benchmarks/tensor_parallel.py --shape tiny --gpus 2 --device cpu

Real GPTModel chunks with random weights, one process a GPU, TP = GPUs (experts whole: EP = GPUs), adapters of
mcore-bridge's or Megatron-Bridge's layout on every linear. Rank 0's figures; the ranks run in step. Needs what
`make test-megatron` installs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sharded import clocked, merge_on_shards, tell
from torch import Tensor, nn

from lora_merge.bench.shapes import SHAPES, Shape

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))


def build(shape: Shape, layers: int, tp: int, style: str, rank: int, device: torch.device) -> list[Any]:
    """This rank's chunk, random weights in bf16, adapters on every linear. Nothing is drawn on the host, nor twice:
    thousands of experts would take minutes."""
    import megatron_models
    import peft  # noqa: F401 - before megatron-core is made to believe in a CPU
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    megatron_models.DEVICE = str(device)
    megatron_models._shim()
    parallel = {"expert_model_parallel_size": tp, "expert_tensor_parallel_size": 1} if shape.experts else {}
    ps.initialize_model_parallel(tp, **parallel)
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(1)
    else:
        initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
    moe: dict[str, Any] = {}
    if shape.experts:
        moe = {"num_moe_experts": shape.experts, "moe_ffn_hidden_size": shape.intermediate, "moe_router_topk": 2}
        moe |= {"moe_token_dispatcher_type": "alltoall"} | parallel
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        activation_func=nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=not shape.experts,
        qk_layernorm=bool(shape.experts),
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **moe,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=shape.experts or None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    vocabulary = 1024 * tp
    chunk = GPTModel(config, spec, vocabulary, 64, parallel_output=False, share_embeddings_and_output_weights=False,
                     position_embedding_type="rope")  # fmt: skip
    chunks = [chunk]
    tell("putting adapters on it")
    with device:
        megatron_models.wrap(chunks, style, r=rank)
    torch.manual_seed(0)
    chunks[0].to(device, torch.bfloat16).eval()
    for parameter in chunks[0].parameters():
        parameter.data.normal_(std=0.02)
    return chunks


def as_bridge(deltas: Sequence[Any], group: Any) -> None:
    """Every parameter on every rank: gather base, lora_A and lora_B in full, merge in float32, cast (the formula of
    Megatron-Bridge's LoRAMerge and of its export, which gathers an expert from every rank at a time)."""
    size = dist.get_world_size(group)

    def gathered(shard: Any, expert: bool) -> list[Tensor]:
        """The whole tensor; of experts each rank's, which are whole."""
        if shard.whole and not expert:
            return [shard.pieces[0].tensor]
        mine = torch.cat([piece.tensor.reshape(-1) for piece in shard.pieces])
        parts = torch.empty(size * mine.numel(), dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(parts, mine, group=group)
        if expert:
            return [part.view(shard.shape) for part in parts.chunk(size)]
        return [parts.view(shard.shape)]  # the order of rows does not matter to a clock

    for delta in deltas:
        expert = ".experts." in delta.name
        merged = [base.float() for base in gathered(delta.weight, expert)]
        for f in delta.factors:
            for base, a, b in zip(merged, gathered(f.lora_A, expert), gathered(f.lora_B, expert), strict=True):
                base += f.scaling * (b.float() @ a.float())
        for base in merged:
            base.to(delta.weight.dtype)


def work(rank: int, args: argparse.Namespace, store: str) -> None:
    cuda = args.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=args.gpus)
    shape = SHAPES[args.shape]
    tell("making the model")
    chunks = build(shape, args.layers or shape.layers, args.gpus, args.style, args.rank, device)
    with torch.no_grad():
        record = measure(chunks, args, device)
    if rank == 0:
        publish(record, args)
    dist.barrier()
    dist.destroy_process_group()


def measure(chunks: list[Any], args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    from lora_merge import MergedWeights
    from lora_merge.models.live import live

    model: Any = live(chunks)
    _, deltas = model.adapters()
    weights = MergedWeights(chunks, bucket_bytes=args.bucket_bytes)

    def export() -> None:
        writer = weights.bucket_writer()
        with writer.buffers() as buffers:
            for index in range(len(writer.table)):
                writer.fill(index, buffers[index % 2], {})

    tell(f"merging {len(deltas)} weights")
    record = merge_on_shards(model, device, args.repeats)
    dtypes = sorted({str(delta.weight.dtype).removeprefix("torch.") for delta in deltas})
    record |= {"weights": len(deltas), "experts": sum(".experts." in d.name for d in deltas), "dtypes": dtypes}
    tell("the stream")
    record |= clocked({"export": export}, device, args.repeats) | {"tensors": len(weights.bucket_writer().entries)}
    record["export_nbytes"] = weights.bucket_writer().nbytes
    tell("the same as Megatron-Bridge does it")
    record |= clocked({"export_as_bridge": lambda: as_bridge(deltas, model.ranks.group)}, device, args.repeats)
    tell("done")
    return record | {"x_as_bridge": record["export_as_bridge_ms"] / record["export_ms"]}


def publish(record: dict[str, Any], args: argparse.Namespace) -> None:
    import megatron.core

    from lora_merge.bench import report

    head = {name: getattr(args, name) for name in ("shape", "layers", "gpus", "style", "rank", "bucket_bytes")}
    head["layers"] = args.layers or SHAPES[args.shape].layers
    record = report.provenance(torch.device(args.device)) | head | record
    record["versions"]["megatron-core"] = megatron.core.__version__
    for name, value in record.items():
        if isinstance(value, int | float):
            print(f"{name:32} {value:,.3f}" if isinstance(value, float) else f"{name:32} {value:,}")
    report.save(record, args.json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--style", choices=["mcore", "bridge"], default="bridge")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if SHAPES[args.shape].kv_heads % args.gpus:
        parser.error(f"--gpus must divide the {SHAPES[args.shape].kv_heads} query groups of {args.shape}")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # no forward runs here, and megatron-core compiles at import
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (args, f"{folder}/store"), nprocs=args.gpus)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
