"""How fast, in how much memory and how exactly LoRA adapters are merged: lora_merge, PEFT and torch.addmm_.

Without options a Qwen2 checkpoint is written and an adapter trained on it, both in a folder that a second run finds
again; they are loaded back through transformers and peft, merged with every method, and each result is checked against
float64. A real model and adapter can be named, or the shapes of a well-known model, with random weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

import lora_merge

from ..extras import root_of
from ..kernels import backend
from ..kernels.cuda.table import PARTS_RANK
from . import checkpoint, report, shapes, timing
from .accuracy import Accuracy, accuracy_of, compare, same_bits
from .room import check_files, lacking

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass
class Matrix:
    """One base weight with its adapter, inside a PeftModel. `base` returns the weight as it was loaded."""

    name: str
    linear: nn.Linear
    lora_A: Tensor
    lora_B: Tensor
    scaling: float
    base: Callable[[], Tensor]

    @property
    def weight(self) -> Tensor:
        return self.linear.weight.detach()

    def compare(self, result: Tensor) -> Accuracy:
        return compare(result, self.base(), self.lora_A, self.lora_B, self.scaling)


@dataclass
class Method:
    """A way to merge a whole model, and its own way back.

    Attributes:
        merge: leaves the merged values in `results()`.
        back: takes them off again.
        round_trip: `back` belongs to the method's time.
        plan_ms: how long it took to build what is kept from step to step.
        held_bytes: device memory of the size of weights that it keeps from step to step.
        host_bytes: host memory that a step takes while the weights are on a GPU.
        traffic: bytes that a merge reads and writes at the least, in multiples of twice the weights'.
    """

    merge: Callable[[], object]
    back: Callable[[], object]
    results: Callable[[], Sequence[Tensor]]
    round_trip: bool = False
    plan_ms: float | None = None
    held_bytes: Callable[[], int] = lambda: 0
    host_bytes: int = 0
    traffic: float = 1.0


def in_place(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """Merge by one `Plan` over all weights; back by subtraction, which is not exact."""

    def plan(sign: int) -> lora_merge.Plan:
        return lora_merge.Plan(
            [lora_merge.Segment(m.name, m.weight, m.weight, m.lora_A, m.lora_B, sign * m.scaling) for m in matrices]
        )

    begin = time.perf_counter()
    merge = plan(1)
    plan_ms = (time.perf_counter() - begin) * 1e3
    return Method(merge.run, plan(-1).run, lambda: [m.weight for m in matrices], plan_ms=plan_ms)


def out_of_place(model: PeftModel, matrices: Sequence[Matrix], dtype: torch.dtype | None = None) -> Method:
    """Merge by one `Plan` into tensors that exist, as a bucket's or an engine's do; the weights are only read."""
    outs = [torch.zeros_like(m.weight, dtype=dtype) for m in matrices]
    begin = time.perf_counter()
    plan = lora_merge.Plan(
        [
            lora_merge.Segment(m.name, m.weight, out, m.lora_A, m.lora_B, m.scaling)
            for m, out in zip(matrices, outs, strict=True)
        ]
    )
    plan_ms = (time.perf_counter() - begin) * 1e3
    traffic = (1 + outs[0].element_size() / matrices[0].weight.element_size()) / 2
    return Method(plan.run, lambda: None, lambda: outs, plan_ms=plan_ms, traffic=traffic)


def into_bf16(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """Merge out of place, as a float32 trainer fills a bf16 engine."""
    return out_of_place(model, matrices, torch.bfloat16)


def merged(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """Use the context manager over the PeftModel: merged inside, restored bit for bit after."""
    contexts = []

    def enter() -> None:
        contexts.append(lora_merge.merged(model))
        contexts[-1].__enter__()

    def leave() -> None:
        contexts.pop().__exit__(None, None, None)

    return Method(enter, leave, lambda: [m.weight for m in matrices], round_trip=True)


def peft(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """Merge by PEFT's own calls, on the same model."""
    return Method(model.merge_adapter, model.unmerge_adapter, lambda: [m.weight for m in matrices])


def addmm_(model: PeftModel, matrices: Sequence[Matrix]) -> Method:
    """Run `torch.addmm_` a matrix. It takes one dtype, so adapters are cut to the weight's before the clock starts."""
    cut = [(m, m.lora_A.to(m.weight.dtype), m.lora_B.to(m.weight.dtype)) for m in matrices]

    def add(sign: int) -> None:
        for m, lora_A, lora_B in cut:
            m.weight.addmm_(lora_B, lora_A, alpha=sign * m.scaling)

    return Method(lambda: add(1), lambda: add(-1), lambda: [m.weight for m in matrices])


METHODS: dict[str, Callable[[PeftModel, Sequence[Matrix]], Method]] = {
    "lora_merge in place": in_place,
    "lora_merge out of place": out_of_place,
    "merged() enter+exit": merged,
    "peft": peft,
    "addmm_": addmm_,
}


ROOM = {"lora_merge out of place": 1.0, "lora_merge into bf16": 0.5, "merged() enter+exit": 0.25}
"""What methods take on top of the weights, in multiples of their bytes, others nothing; a method without room is
skipped."""
_BESIDE = 12
"""Bytes an element of the largest weight that drawing, merging and checking it take: three float32."""

SMALL_BYTES = 8 << 20
"""A copy that moves fewer bytes is too short to be a limit, whatever the cache."""
BUDGET_S = 10
"""Seconds of timed runs a method, after which no further one begins: `addmm_` of bf16 is slow on some CPUs."""


def measure(method: Method, matrices: Sequence[Matrix], device: torch.device, repeat: int) -> dict[str, Any]:
    """Measure one method: accuracy, whether the way back restores the bits, then time and peak memory."""

    def reset() -> None:
        for m in matrices:
            m.weight.copy_(m.base())

    # This run is the warm-up too: kernels load, threads start, every page is touched.
    reset()
    method.merge()
    pairs = zip(matrices, method.results(), strict=True)
    accuracy = accuracy_of([partial(m.compare, result) for m, result in pairs], device)
    method.back()
    restored = all(same_bits(m.weight, m.base()) for m in matrices)
    reset()

    runs: list[tuple[timing.Run, timing.Run]] = []
    begin = time.perf_counter()
    while not runs or (len(runs) < repeat and time.perf_counter() - begin < BUDGET_S):
        runs.append((timing.observe(method.merge, device), timing.observe(method.back, device)))
    launches = timing.launches(method.merge, device)
    if method.round_trip:
        launches += timing.launches(method.back, device)
    else:
        method.back()
    reset()

    typical = timing.typical(device)
    merge_ms, back_ms = typical([merge.ms for merge, _ in runs]), typical([back.ms for _, back in runs])
    peak = max(merge.peak_bytes for merge, _ in runs)
    if method.round_trip:
        peak = max(max(merge.peak_bytes, merge.kept_bytes + back.peak_bytes) for merge, back in runs)
    return {
        "ms": merge_ms + back_ms if method.round_trip else merge_ms,
        "back_ms": back_ms,
        "plan_ms": method.plan_ms,
        "runs": len(runs),
        "launches": launches,
        "extra_bytes": peak + method.held_bytes(),
        "host_bytes": method.host_bytes,
        "traffic": method.traffic,
        "max_ulp": accuracy.max_ulp,
        "misrounded": accuracy.misrounded,
        "of_bound": accuracy.of_bound,
        "x_rounding": accuracy.x_rounding,
        "elements": accuracy.elements,
        "restored": restored,
    }


_COPIES = {"lora_merge in place": 3, "merged() enter+exit": 5, "peft": 20, "addmm_": 12}
"""Copies that one run of a method takes, there and back; others take 2."""
CHECKS = 3
"""Checks of one matrix that the estimate takes the least of."""


def seconds_of(
    methods: Iterable[str], matrices: Sequence[Matrix], args: argparse.Namespace, copies: Sequence[float]
) -> float:
    """Estimate how long all methods take: each is checked against float64 and timed. Runs the check of one matrix.

    The first check starts threads and allocates. A share of a hundredth makes minutes of that, so the least counts.

    Args:
        copies: milliseconds of a large copy.
    """
    least = min(matrices, key=lambda m: m.weight.numel())
    share = least.weight.numel() / sum(m.weight.numel() for m in matrices)
    checks = [timing.milliseconds(lambda: least.compare(least.base()), args.device) for _ in range(CHECKS)]
    check_ms = min(checks) / share
    check_ms /= min(len(matrices), torch.get_num_threads()) if args.device.type == "cpu" else 1
    run_s = [_COPIES.get(name, 2) * timing.typical(args.device)(copies) / 1e3 for name in methods]
    return sum(check_ms / 1e3 + 3 * one + min(args.repeat * one, BUDGET_S) for one in run_s)


def product_parts(device: torch.device, dtype: torch.dtype, adapter_dtype: torch.dtype, rank: int) -> int:
    """Return how many products of the matrix unit one of the adapter takes, where weights and results have one dtype.

    On a GPU float32 adapters are split in three bf16 parts, of which six products count, those above rank 32 of 16-bit
    weights in two fp16 parts, of which three do (docs/method.md).
    """
    if device.type != "cuda" or adapter_dtype != torch.float32:
        return 1
    return 6 if dtype == torch.float32 or rank <= PARTS_RANK else 3


def compare_methods(
    methods: Mapping[str, Callable[[PeftModel, Sequence[Matrix]], Method]],
    model: PeftModel,
    matrices: Sequence[Matrix],
    args: argparse.Namespace,
    progress: report.Progress,
) -> report.Record:
    """Measure every method on the same weights, and both limits of the machine before and after them."""
    nbytes = sum(m.weight.nbytes for m in matrices)
    largest = max(_BESIDE * m.weight.numel() for m in matrices)
    progress.say("the machine's limits: one large copy of the same bytes, and products of matrices")
    copies, operations = timing.copies(nbytes, args.device, args.repeat), timing.operations(args.device, args.repeat)
    progress.note(f"{len(methods)} methods: {report.words_of(seconds_of(methods, matrices, args, copies))}")
    measured: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for number, (name, make) in enumerate(methods.items(), start=1):
        progress.say(f"{number} of {len(methods)}: {name}")
        if why := lacking("it", int(ROOM.get(name, 0) * nbytes) + largest, args.device):
            skipped[name] = why
            progress.advance()
            continue
        try:
            measured[name] = measure(make(model, matrices), matrices, args.device, args.repeat)
        except torch.OutOfMemoryError as error:
            skipped[name] = str(error).splitlines()[0]
        progress.advance()
    copy_ms = timing.typical(args.device)(copies + timing.copies(nbytes, args.device, args.repeat))
    operations = max(operations, timing.operations(args.device, args.repeat))

    # What a cache holds is copied at its speed, in less time than threads or a launch take to begin.
    cache = timing.cache_bytes(args.device)
    small = 2 * nbytes <= max(cache, SMALL_BYTES)
    parts = product_parts(args.device, matrices[0].weight.dtype, matrices[0].lora_A.dtype, len(matrices[0].lora_A))
    products_ms = 1e3 * parts * sum(2 * m.lora_A.shape[0] * m.weight.numel() for m in matrices) / operations
    for figures in measured.values():
        # Each byte of the weights is read once and written once, or fewer where the result has a smaller dtype.
        least_ms = copy_ms * figures["traffic"]
        figures["x_copy"] = None if small else figures["ms"] / least_ms
        figures["of_copy"] = None if small else least_ms / figures["ms"]
        figures["gb_s"] = 2 * nbytes * figures["traffic"] / figures["ms"] / 1e6
        figures["of_products"] = None if small else products_ms / figures["ms"]
    return {
        "device": args.device.type,
        "torch": torch.__version__,
        "rank": max(m.lora_A.shape[0] for m in matrices),
        "dtype": args.dtype,
        "adapter_dtype": args.adapter_dtype,
        "matrices": len(matrices),
        "bytes": nbytes,
        "cache_bytes": cache,
        "copy_ms": copy_ms,
        "products_ms": products_ms,
        "operations_s": operations,
        "repeat": args.repeat,
        "backend": backend.name_of(backend.pick(args.device)),
        "methods": measured,
        "skipped": skipped,
        **report.provenance(args.device),
    }


def matrices_of(model: PeftModel, base: Callable[[int], Tensor]) -> list[Matrix]:
    """Return every base weight that the model's adapter adds to; all methods here merge its plain Linear adapters."""
    from peft.tuners.lora import Linear, LoraLayer

    found = []
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]
    for n, (name, layer) in enumerate(layers):
        if not isinstance(layer, Linear) or layer.fan_in_fan_out or any(layer.use_dora.values()):
            raise lora_merge.UnsupportedAdapter(
                f"{name}: this benchmark compares methods on plain Linear adapters, got {type(layer).__name__}"
            )
        (adapter,) = layer.active_adapters
        lora_A, lora_B = layer.lora_A[adapter].weight.detach(), layer.lora_B[adapter].weight.detach()
        found.append(Matrix(name, layer.base_layer, lora_A, lora_B, layer.scaling[adapter], partial(base, n)))
    return found


def prepare(args: argparse.Namespace, progress: report.Progress) -> tuple[PeftModel, list[Matrix], str]:
    """Return the model to merge, its matrices, and what to call its shape."""
    dtype, adapter_dtype = DTYPES[args.dtype], DTYPES[args.adapter_dtype]
    if args.shape:
        sizes = [rows * cols for _, rows, cols in shapes.SHAPES[args.shape].matrices()]
        _check_room(f"{args.shape} in {args.dtype}", dtype.itemsize * sum(sizes) + _BESIDE * max(sizes), args.device)
        progress.say(f"drawing weights of {args.shape}")
        model, base = shapes.random_model(shapes.SHAPES[args.shape], args.rank, dtype, adapter_dtype, args.device)
        return model, matrices_of(model, base), args.shape
    folder, adapter = args.model, args.adapter
    if folder is not None:
        for option, where, file in (("--model", folder, "config.json"), ("--adapter", adapter, "adapter_config.json")):
            if not (where / file).is_file():
                raise lora_merge.InvalidInput(f"{option} {where}: expected a folder with {file}, and there is none")
    else:
        folder = args.work / f"qwen2-128m-{args.dtype}"
        adapter = args.work / f"{folder.name}-adapter-rank{args.rank}"
        if not folder.exists():
            progress.note(
                "a first run makes a model of 128M parameters and trains an adapter: a minute or two on a CPU"
            )
            progress.say(f"writing checkpoint {folder.name}")
            checkpoint.write_checkpoint(folder, checkpoint.QWEN2, dtype)
        if not adapter.exists():
            progress.say(f"training {adapter.name}")
            losses = checkpoint.train_adapter(adapter, folder, args.rank)
            progress.note(f"  {len(losses)} steps on the licence: loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    _check_room(str(folder), 2 * checkpoint.elements(folder) * dtype.itemsize, args.device)
    progress.say(f"loading {folder.name} and {adapter.name}")
    try:
        model, base = checkpoint.load(folder, adapter, dtype, adapter_dtype, args.device)
    except (OSError, ValueError, RuntimeError) as error:  # what transformers, PEFT and safetensors say of bad files
        raise lora_merge.InvalidInput(f"{folder} with {adapter} cannot be loaded ({root_of(error)})") from error
    return model, matrices_of(model, base), folder.name


def _check_room(what: str, nbytes: int, device: torch.device) -> None:
    """Raise `InvalidInput` if a model has no room: a CPU would swap, and everything else on it with it."""
    if why := lacking(what, nbytes, device):
        raise lora_merge.InvalidInput(f"{why}: choose a smaller --shape or --model, or a machine with more memory")


@torch.no_grad()
def run(args: argparse.Namespace, *, quiet: bool = False) -> report.Record:
    """Run the main job; return its figures, which were printed, written and drawn as the options say.

    Args:
        args: as `options.add_options` names them.
        quiet: print nothing.
    """
    check_files([args.json_file, args.plot])
    methods = METHODS | ({"lora_merge into bf16": into_bf16} if args.dtype == "fp32" else {})
    with report.Progress(steps=len(methods), quiet=quiet) as progress:
        with torch.enable_grad():
            model, matrices, shape = prepare(args, progress)
        record = compare_methods(methods, model, matrices, args, progress)
    record["shape"] = shape
    report.publish(record, args.json_file, args.plot, quiet=quiet)
    return record
