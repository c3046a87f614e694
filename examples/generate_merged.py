"""Generate with the model that is being trained, at the speed of its base, inside of `lora_merge.merged()`.

    python examples/generate_merged.py                                           # a tiny model, on the CPU
    python examples/generate_merged.py --device cuda --model Qwen/Qwen2.5-1.5B   # bf16, on a GPU

Needs `pip install ".[peft]"` in a clone. Inside of the block the base weights hold base and adapters, and the adapters
add nothing on top, so that each linear layer is one product, not three. After it every weight is what it was, bit for
bit, also after an exception. What training does next is as if nothing had happened.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

import lora_merge

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", help="a checkpoint of transformers; default: a tiny one with random weights")
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
parser.add_argument("--rank", type=int, default=16)
parser.add_argument("--answers", type=int, default=8)
parser.add_argument("--tokens", type=int, default=32, help="of each answer (default %(default)s)")


def model_of(name: str | None, rank: int, device: str) -> Any:
    """A model with a random adapter on every linear layer: bf16 on a GPU, float32 on a CPU."""
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

    if name is None:
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 1024}
        base: Any = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=8, num_key_value_heads=2))
    else:
        base = AutoModelForCausalLM.from_pretrained(name)
    lora = LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False)
    base = base.to(device=device, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    return get_peft_model(base, lora).eval()


@torch.no_grad()
def timed(model: Any, prompts: Tensor, tokens: int) -> tuple[Tensor, float]:
    """Greedy answers, all of one length, and how many tokens a second they took."""
    begin = time.perf_counter()
    answers = model.generate(
        input_ids=prompts, attention_mask=torch.ones_like(prompts), do_sample=False, min_new_tokens=tokens,
        max_new_tokens=tokens,
    )[:, prompts.shape[1] :].cpu()  # fmt: skip
    return answers, answers.numel() / (time.perf_counter() - begin)


def main() -> None:
    args = parser.parse_args()
    torch.manual_seed(0)
    model = model_of(args.model, args.rank, args.device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prompts = torch.randint(0, model.config.vocab_size, (args.answers, 16), device=args.device)
    timed(model, prompts, args.tokens)  # warms up

    plain, plain_speed = timed(model, prompts, args.tokens)
    with lora_merge.merged(model):
        merged, merged_speed = timed(model, prompts, args.tokens)

    back = all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    same = (plain == merged).float().mean().item()
    print(f"with adapters beside the base {plain_speed:8.0f} tokens/s")
    print(f"inside of merged()            {merged_speed:8.0f} tokens/s, {merged_speed / plain_speed:.2f} times as many")
    print(f"greedy tokens that agree      {same:8.1%}{'' if args.device == 'cpu' else ' (bf16 rounds otherwise)'}")
    print(f"every bit is back             {'yes' if back else 'NO':>8}")


if __name__ == "__main__":
    main()
