"""A trainer under DeepSpeed's ZeRO-3: what taking merged weights out of its partitions costs, beside gathering.

    torchrun --nproc-per-node 2 benchmarks/zero3.py --json benchmarks/results/zero3-qwen2.5-7b-x2.json
    torchrun --nproc-per-node 2 benchmarks/zero3.py --device cpu --shape tiny      # a smoke test

Random weights of the shape in bf16, an adapter on every linear layer, float32 master weights in the optimizer, one
training step; then every way in turn:

- buckets: what a push sends, bucket by bucket, boxes of tensors as ranks hold them.
- stream: a loop over `MergedWeights`, whole tensors.
- in place: `merged(model)`, both ends.
- gather all: all parameters by `deepspeed.zero.GatheredParameters`, PEFT's `merge_adapter` and `unmerge_adapter`, as
  TRL does it, and ms-swift by default.
- gather layers: the same, a layer of the model at a time, as ms-swift's `--move_model_batches` does.

Peaks are of the first call, above what was in use before it, by the allocator of a GPU; times are medians over
`--repeats` calls after it; of the slowest rank and the fullest GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import sync
import torch
import torch.distributed as dist
from sharded import tell
from torch import Tensor, nn

from lora_merge import MergedWeights, merged
from lora_merge.bench import report
from lora_merge.bench.timing import milliseconds, observe

Record = dict[str, Any]
BUCKETS_TARGET = 2
"""Extra memory of what a push sends, in buckets."""
PEERS = ("gather all", "gather layers")


def engine_of(model: nn.Module, *, offload: bool) -> Any:
    """DeepSpeed's, which partitions the model."""
    import deepspeed

    zero: Record = {"stage": 3}
    if offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "torch_adam": True}},
        "bf16": {"enabled": True},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def trained_once(engine: Any, device: torch.device) -> None:
    """A step: DeepSpeed then holds what it holds between steps."""
    tokens = torch.randint(3, 500, (1, 64), device=device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


class Gathering:
    """The ways of others. What is gathered is forgotten at the end: partitions do not see it."""

    def __init__(self, engine: Any) -> None:
        from peft.tuners.lora import LoraLayer

        self.model: Any = engine.module
        self.units: list[nn.Module] = list(self.model.get_base_model().model.layers)
        inside = {id(p) for unit in self.units for p in unit.parameters()}
        self.rest = [p for p in self.model.parameters() if id(p) not in inside]
        self.kind = LoraLayer

    def _taken(self, parameters: Iterable[Any], layers: Iterable[Any]) -> int:
        """Gathers, merges, looks at the weights as a receiver would, and takes the update out again."""
        from deepspeed.runtime.zero import GatheredParameters

        layers = list(layers)
        parameters = list(parameters)
        with GatheredParameters(parameters):
            for layer in layers:
                layer.merge()
            nbytes = sum(p.data.nbytes for p in parameters if not p.requires_grad)
            for layer in layers:
                layer.unmerge()
        return nbytes

    def everything(self) -> int:
        return self._taken(self.model.parameters(), self._layers(self.model))

    def layer_by_layer(self) -> int:
        whole = self._taken(self.rest, [])
        return whole + sum(self._taken(unit.parameters(), self._layers(unit)) for unit in self.units)

    def _layers(self, module: nn.Module) -> Iterable[Any]:
        return (m for m in module.modules() if isinstance(m, self.kind))


def ways_of(engine: Any, bucket_bytes: int) -> dict[str, Callable[[], int]]:
    """Each returns the bytes of what it looked at."""
    weights, gathering = MergedWeights(engine, bucket_bytes=bucket_bytes), Gathering(engine)

    def buckets() -> int:
        writer = weights.bucket_writer()
        with writer.buffers() as buffers:
            for _ in writer.filled(buffers, {"rounding": "nearest"}):
                pass
        return writer.nbytes

    def stream() -> int:
        nbytes, tensor = 0, Tensor()
        for _, tensor in weights:
            nbytes += tensor.nbytes
        return nbytes

    def in_place() -> int:
        with merged(engine):
            pass
        return 0

    ours = {"buckets": buckets, "stream": stream, "in place": in_place}
    return ours | dict(zip(PEERS, (gathering.everything, gathering.layer_by_layer), strict=True))


def measured(call: Callable[[], int], device: torch.device, repeats: int) -> Record:
    """This rank's figures of a way."""
    seen: list[int] = []
    dist.barrier()
    first = observe(lambda: seen.append(call()), device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dist.barrier()
    ms = statistics.median(milliseconds(call, device) for _ in range(repeats))
    return {"bytes": seen[0], "first_ms": first.ms, "ms": ms, "peak_bytes": first.peak_bytes}


def slowest(record: Record) -> Record:
    """The largest of every number over the ranks. Collective."""
    records: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(records, record)
    return {name: max(r[name] for r in records) for name in record}


def publish(record: Record, json_file: Path | None) -> None:
    title = f"{record['shape']} under ZeRO-3 over {record['gpus']} ranks, rank {record['rank']}"
    sheet = report.sheet_of(title, "", ["ms", "first ms", "peak MiB", "buckets"])
    for name, m in record["ways"].items():
        peak = [f"{m['peak_bytes'] / 2**20:,.0f}", f"{m['peak_bytes'] / record['bucket_bytes']:.2f}"]
        sheet.add_row(name, f"{m['ms']:,.1f}", f"{m['first_ms']:,.0f}", *peak)
    report.console().print(sheet)
    report.save(record, json_file)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sync.SHAPES, default="qwen2.5-7b", help="default %(default)s")
    parser.add_argument("--rank", type=int, default=32, help="of the adapter (default %(default)s)")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--offload", action="store_true", help="partitions on the CPU (offload_param)")
    parser.add_argument("--bucket-bytes", type=int, default=512 << 20, help="default %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="default %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    sync.quiet()
    os.environ["DS_ACCELERATOR"] = args.device
    device = sync.join(args.device, minutes=5)
    import deepspeed

    if args.device == "cpu":  # else it compiles collectives that it takes in inference alone, for a minute
        deepspeed.ops.__compatible_ops__ = {}
    tell("making the model")
    model = sync.build_policy(args.shape, args.rank, str(device)).train()
    engine = engine_of(model, offload=args.offload)
    trained_once(engine, device)
    named = ("shape", "rank", "bucket_bytes", "repeats", "offload")
    record: Record = report.provenance(device) | {"gpus": dist.get_world_size(), "ways": {}}
    record |= {name: getattr(args, name) for name in named}
    record["versions"]["deepspeed"] = deepspeed.__version__
    for name, call in ways_of(engine, args.bucket_bytes).items():
        tell(name)
        with torch.no_grad():
            record["ways"][name] = slowest(measured(call, device, args.repeats))
        if dist.get_rank() == 0:
            report.save(record, args.json)
    if dist.get_rank() == 0:
        publish(record, args.json)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
