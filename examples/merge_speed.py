"""A merge at the speed of a copy, beside PEFT's, on your machine.

    python examples/merge_speed.py                                           # a small model, on the CPU
    python examples/merge_speed.py --device cuda --model Qwen/Qwen2.5-1.5B   # 3 GB, on a GPU

Needs `pip install ".[peft]"` in a clone. A copy reads every byte of the weights and writes it somewhere else; no merge
can take less. Compiled kernels are for GPUs with compute capability 8.0 (A100, A10, L4) or newer; others run Triton or
the reference, and a warning says so. `lora-merge bench` measures the same with more methods, exactness and memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from torch import Tensor

import lora_merge
from lora_merge.bench.timing import milliseconds

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a checkpoint of transformers; default: a small one with random weights")
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--repeat", type=int, default=5, help="runs, of which the fastest counts (default %(default)s)")


def model_of(name: str | None, rank: int, device: str) -> Any:
    """A bf16 model with a random adapter on every linear layer; PEFT keeps adapters in float32."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if name is None:
        sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "vocab_size": 1024}
        base: Any = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=2)).bfloat16()
    else:
        base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    lora = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(base.to(device), lora).eval()


def fastest(run: Callable[[], object], repeat: int, device: torch.device, after: Callable[[], object]) -> float:
    """Milliseconds of a call, after one that warms up; `after` follows each call and is not timed."""
    times = []
    for _ in range(repeat + 1):
        times.append(milliseconds(run, device))
        after()
    return min(times[1:])


@torch.no_grad()
def main() -> None:
    args = parser.parse_args()
    device = torch.device(args.device)
    model = model_of(args.model, args.rank, args.device)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    weights = {name: layer.base_layer.weight for name, layer in layers.items()}
    before = {name: weight.clone() for name, weight in weights.items()}

    def changed() -> float:
        """The share of the base's elements whose bits are others than at the beginning."""
        different = sum(int((weights[name] != old).sum()) for name, old in before.items())
        return different / sum(old.numel() for old in before.values())

    # Merged weights go to tensors that lie ready, as those of a rollout engine do.
    ready: dict[str, Tensor] = {name: torch.empty_like(weight) for name, weight in weights.items()}
    plan = lora_merge.Plan(  # checked and laid out once
        [
            lora_merge.Segment(
                name, weights[name], ready[name], layer.lora_A["default"].weight, layer.lora_B["default"].weight,
                layer.scaling["default"],
            )
            for name, layer in layers.items()
        ]
    )  # fmt: skip
    source = torch.ones(sum(weight.nbytes for weight in weights.values()), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def nothing() -> None: ...

    rows = {"one copy": fastest(lambda: target.copy_(source), args.repeat, device, nothing)}
    rows["lora_merge"] = fastest(plan.run, args.repeat, device, nothing)
    ours = changed()
    rows["PEFT's merge_adapter"] = fastest(model.merge_adapter, args.repeat, device, model.unmerge_adapter)
    print(f"{len(weights)} matrices, {source.nbytes / 1e6:.0f} MB of bfloat16, rank {args.rank}, {args.device}")
    for name, ms in rows.items():
        print(f"  {name:22}{ms:9.2f} ms {ms / rows['one copy']:7.2f} copies")
    print(f"base weights that have other bits now: after lora_merge {ours:.1%}, after PEFT {changed():.1%}")


if __name__ == "__main__":
    main()
