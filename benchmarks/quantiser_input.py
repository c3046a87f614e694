"""Whether an engine is closer to the policy if its weights are quantised from the float32 sums of a merge, or from
these rounded to bf16 first, which is what vLLM's quantisers get.

    python benchmarks/quantiser_input.py --models grpo --prompts 256 --adapters 5 --json FILE
    python benchmarks/quantiser_input.py --models qwen2.5-0.5b --layers 4 --json FILE

The policies are those of quantised_engines.py: `grpo`, whose base is taught, and a shape of sync.py with random
weights, of which `--layers` are taken. Each adapter's update is `--update` of the RMS of its weight. The policy itself
is computed in float32 (bf16 base, float32 adapters); beside it, also in float32, the same model with the merged
linear layers as an engine would hold them: in bf16, or quantised in rows (FP8 E4M3, INT8) and in blocks of 128 x 128
(FP8) and dequantised. So only weights differ: inputs are not quantised. Answers are the policy's, sampled at
temperature 1. Errors of weights are RMS, against the float32 sums, in parts of their RMS.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import quantised_engines
import sync
import torch
from torch import Tensor, nn

from lora_merge import MergedWeights
from lora_merge.bench import report
from lora_merge.verify import logprob_gap

E4M3 = torch.float8_e4m3fn
INPUTS = {"bf16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    args = arguments()
    record = report.provenance(torch.device("cpu")) | {"update": args.update, "rank": args.rank, "policies": []}
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            found = {"model": name, "rows": measured(*made(name, args, Path(folder)), args)}
        if name != "grpo":
            found["layers"] = args.layers
        record["policies"].append(found)
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["grpo", "qwen2.5-0.5b"], help="grpo, or shapes of sync.py")
    parser.add_argument("--layers", type=int, default=6, help="of a shape")
    parser.add_argument("--adapters", type=int, default=3, help="random ones, one after the other")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--update", type=float, default=0.05, help="RMS of an update, in parts of its weight's")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def made(name: str, args: Namespace, folder: Path) -> tuple[nn.Module, list[list[int]], int]:
    """A PEFT model, prompts, and how many tokens it answers with."""
    torch.manual_seed(0)
    if name == "grpo":
        g = torch.Generator().manual_seed(0)
        model, prompts, response = quantised_engines.grpo(Namespace(device="cpu", rank=args.rank), folder, g)
        return model, prompts[: args.prompts], response
    model = sync.build_policy(name, args.rank, "cpu", args.layers)
    return model, torch.randint(10, sync.SHAPES[name]["vocab_size"], (args.prompts, 16)).tolist(), 32


def measured(model: Any, prompts: list[list[int]], response: int, args: Namespace) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], list[dict[str, float]]] = {}
    for seed in range(args.adapters):
        redraw(model, args.update, seed)
        policy: Any = copy.deepcopy(model).float()
        torch.manual_seed(seed)
        tokens = policy.generate(
            input_ids=torch.tensor(prompts), max_new_tokens=response, min_new_tokens=response, do_sample=True, top_k=0,
            top_p=1.0, pad_token_id=0,
        )  # fmt: skip
        wanted = quantised_engines.log_probs(policy, tokens, "cpu")
        sums = {n: t.clone() for n, t in MergedWeights(model, dtype=torch.float32) if n.endswith("proj.weight")}
        served = policy.unload()
        for form, quantised in FORMS.items():
            for given, dtype in INPUTS.items():
                if form == "none" and given == "float32":
                    continue
                error = loaded(served, sums, dtype, quantised)
                theirs = quantised_engines.log_probs(served, tokens, "cpu")
                rollout, lengths = [row[len(prompts[0]) - 1 : -1].tolist() for row in theirs], [response] * len(theirs)
                gap = logprob_gap(wanted, rollout, shifted=True, prompt_width=len(prompts[0]), response_lengths=lengths)
                found = {"weight_error": error, "gap_mean": gap.mean, "gap_max": gap.maximum, "tokens": gap.tokens}
                rows.setdefault((form, given), []).append(found)
                print(form, given, json.dumps(found), flush=True)
    return [{"format": form, "from": given, "adapters": found} for (form, given), found in rows.items()]


def redraw(model: nn.Module, update: float, seed: int) -> None:
    """Another adapter, whose update of each weight has this part of its RMS."""
    g = torch.Generator().manual_seed(seed)
    for layer in cast(Iterable[Any], model.modules()):
        if not hasattr(layer, "lora_A"):
            continue
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        with torch.no_grad():
            for factor in (a, b):
                factor.copy_(torch.randn(factor.shape, generator=g))
            product, weight = layer.scaling["default"] * (b.float() @ a.float()), layer.get_base_layer().weight.float()
            b.mul_(update * weight.square().mean().sqrt() / product.square().mean().sqrt())


def loaded(
    model: nn.Module, sums: dict[str, Tensor], dtype: torch.dtype, quantised: Callable[[Tensor], Tensor]
) -> float:
    """A model's linear layers get what an engine would compute with; returns the RMS of its error."""
    parameters, wrong, whole = dict(model.named_parameters()), 0.0, 0.0
    for name, exact in sums.items():
        held = quantised(exact.to(dtype).float())
        parameters[name].data.copy_(held)
        wrong += float((held - exact).double().square().sum())
        whole += float(exact.double().square().sum())
    return (wrong / whole) ** 0.5


# What engines hold, dequantised. The scale of a row of zeros does not matter here.


def rows_of(largest: float, rounded: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / largest
    return rounded((weight / scale).clamp(-largest, largest)) * scale


def blocks_of(weight: Tensor) -> Tensor:
    held = torch.empty_like(weight)
    for rows, out in zip(weight.split(128), held.split(128), strict=True):
        for block, to in zip(rows.split(128, 1), out.split(128, 1), strict=True):
            scale = block.abs().max().clamp(min=1e-4) / 448
            to.copy_((block / scale).clamp(-448, 448).to(E4M3).float() * scale)
    return held


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda weight: weight,
    "fp8_per_channel": partial(rows_of, 448.0, lambda x: x.to(E4M3).float()),
    "fp8_per_block": blocks_of,
    "int8_per_channel": partial(rows_of, 127.0, torch.round),
}


if __name__ == "__main__":
    main()
