"""What each way of merging costs on the same tensors: PEFT, plain PyTorch, how peers do it, and lora_merge.

    python benchmarks/peers.py --shape tiny
    python benchmarks/peers.py --shape qwen2.5-7b --device cuda --adapter-dtype bf16 --json out.json --plot out.png

PEFT is the real package. Peers that do not install beside it are re-implemented step by step; each function names its
source. Wires and engines are left out: this is the trainer's side alone.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
from measured import add_arguments
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor

import lora_merge
from lora_merge.bench import job, report, shapes
from lora_merge.bench.job import Matrix, Method

BUCKET_BYTES = 512 << 20
COLUMNS = ("ms", "back\nms", "x copy", "extra\nMiB", "host\nMiB", "launch-\nes", "mis-\nrounded", "error",
           "re-\nstored")  # fmt: skip


def streamed(stream: Callable[[], Iterator[Tensor]]) -> Method:
    """A method that leaves the weights alone and yields merged ones, each good until the next."""
    return Method(lambda: deque(stream(), maxlen=0), lambda: None, lambda: [tensor.clone() for tensor in stream()])


def buckets(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """lora_merge's stream, as it goes out to an engine. Its two buffers are kept from step to step."""
    weights = lora_merge.MergedWeights(model, bucket_bytes=BUCKET_BYTES)
    buffers: dict[int, int] = {}

    def run() -> None:
        for bucket in weights.buckets():
            buffers[bucket.data.data_ptr()] = bucket.data.untyped_storage().nbytes()

    def results() -> list[Tensor]:
        found = {name: tensor.clone() for bucket in weights.buckets() for name, tensor in bucket.tensors()}
        return [found[m.name.removeprefix("base_model.model.") + ".weight"] for m in matrices]

    return Method(run, lambda: None, results, held_bytes=lambda: sum(buffers.values()))


def peft(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """PEFT's merge_adapter and unmerge_adapter around a push, as TRL does."""
    method = job.peft(model, matrices)
    method.round_trip = True
    return method


def verl(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """verl/utils/fsdp_utils.py, merged_lora_context(backup_adapters=True): every base weight cloned to the CPU,
    PEFT's merge, then all of them copied back."""
    backup: dict[str, Tensor] = {}

    def enter() -> None:
        with model.disable_adapter():
            backup.update({n: p.data.clone().cpu() for n, p in model.named_parameters() if "lora" not in n.lower()})
        model.merge_adapter()

    def leave() -> None:
        for name, parameter in model.named_parameters():
            if name in backup:
                parameter.data.copy_(backup[name].to(parameter.device))
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.merged_adapters = []
        backup.clear()

    on_gpu = matrices[0].weight.is_cuda
    host = sum(m.weight.nbytes for m in matrices) if on_gpu else 0
    return Method(enter, leave, lambda: [m.weight for m in matrices], round_trip=True, host_bytes=host)


def swift(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """ms-swift, rollout_mixin.py: PEFT's delta, rounded to the weight's dtype before the addition, out of place;
    buckets by torch.cat of uint8 views (FlattenedTensorBucket)."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]

    def flat(bucket: list[Tensor]) -> Iterator[Tensor]:
        data = torch.cat([t.flatten().view(torch.uint8) for t in bucket])
        for tensor, part in zip(bucket, data.split([t.nbytes for t in bucket]), strict=True):
            yield part.view(tensor.dtype).view(tensor.shape)

    def stream() -> Iterator[Tensor]:
        bucket: list[Tensor] = []
        for layer, m in zip(layers, matrices, strict=True):
            bucket.append(m.weight + layer.get_delta_weight(layer.active_adapters[0]).to(m.weight.dtype))
            if sum(t.nbytes for t in bucket) >= BUCKET_BYTES:
                yield from flat(bucket)
                bucket = []
        if bucket:
            yield from flat(bucket)

    return streamed(stream)


def nemo(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """NeMo-RL, dtensor_policy_worker_v2.py, _maybe_merge_lora_weight: A and B cut to the weight's dtype, then
    weight + matmul(B, A) * scale in that dtype."""

    def stream() -> Iterator[Tensor]:
        for m in matrices:
            dtype = m.weight.dtype
            yield m.weight + torch.matmul(m.lora_B.to(dtype), m.lora_A.to(dtype)) * m.scaling

    return streamed(stream)


def bridge(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """Megatron-Bridge, peft/lora_merge.py, LoRAMerge.merge on float32 copies, one parameter at a time."""

    def stream() -> Iterator[Tensor]:
        for m in matrices:
            yield (m.weight.float() + m.scaling * (m.lora_B.float() @ m.lora_A.float())).to(m.weight.dtype)

    return streamed(stream)


def compiled(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """torch.compile of PEFT's formula, one static graph for each shape; compiled before the clock starts."""
    torch._dynamo.config.recompile_limit = 64

    @torch.compile(dynamic=False, fullgraph=True)
    def add(weight: Tensor, lora_A: Tensor, lora_B: Tensor, scaling: float) -> None:
        weight.add_((lora_B @ lora_A) * scaling)

    def run(sign: int) -> None:
        for m in matrices:
            add(m.weight, m.lora_A, m.lora_B, sign * m.scaling)

    return Method(lambda: run(1), lambda: run(-1), lambda: [m.weight for m in matrices])


def baddbmm(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """`torch.baddbmm_` a group of equal shapes. It wants one tensor a group and one dtype: weights are laid into
    stacks, adapters stacked and cut, before the clock starts. It is the last method for that reason."""
    groups: dict[tuple[torch.Size, float], list[Matrix]] = {}
    for m in matrices:
        groups.setdefault((m.weight.shape, m.scaling), []).append(m)
    stacks = []
    for (_, scaling), group in groups.items():
        weights = torch.stack([m.weight for m in group])
        for m, view in zip(group, weights, strict=True):
            m.linear.weight.data = view
        lora_A = torch.stack([m.lora_A for m in group]).to(weights.dtype)
        stacks.append((weights, lora_A, torch.stack([m.lora_B for m in group]).to(weights.dtype), scaling))

    def run(sign: int) -> None:
        for weights, lora_A, lora_B, scaling in stacks:
            weights.baddbmm_(lora_B, lora_A, alpha=sign * scaling)

    return Method(lambda: run(1), lambda: run(-1), lambda: [m.weight for m in matrices])


METHODS: dict[str, Callable[[PeftModel, Sequence[Matrix]], Method]] = {
    "lora_merge in place": job.in_place,
    "lora_merge buckets": buckets,
    "merged(), there and back": job.merged,
    "PEFT, there and back": peft,
    "verl, there and back": verl,
    "ms-swift": swift,
    "NeMo-RL": nemo,
    "Megatron-Bridge": bridge,
    "addmm_": job.addmm_,
    "torch.compile": compiled,
    "baddbmm_": baddbmm,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="small", help="default %(default)s")
    parser.add_argument("--rank", type=int, default=32, help="default %(default)s")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--dtype", choices=job.DTYPES, default="bf16", help="of the weights (default %(default)s)")
    parser.add_argument("--adapter-dtype", choices=job.DTYPES, default="fp32", help="default %(default)s, as PEFT's")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="default %(default)s")
    add_arguments(parser, repeat=9)
    return parser.parse_args()


@torch.no_grad()
def main() -> None:
    args = parse()
    chosen = {name: make for name, make in METHODS.items() if name in args.methods}
    with report.Progress(steps=len(chosen)) as progress:
        progress.say(f"drawing weights of {args.shape}")
        dtype, adapter_dtype = job.DTYPES[args.dtype], job.DTYPES[args.adapter_dtype]
        model, base = shapes.random_model(shapes.SHAPES[args.shape], args.rank, dtype, adapter_dtype, args.device)
        record = job.compare_methods(chosen, model, job.matrices_of(model, base), args, progress)
    record["shape"] = args.shape
    report.publish(record, args.json, args.plot, COLUMNS)


if __name__ == "__main__":
    main()
