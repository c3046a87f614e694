"""GRPO with LoRA: PyTorch trains, a real engine rolls out, `VllmSync` or `SglangSync` keeps the two at the same policy.

    python examples/grpo.py --out runs/grpo --plot runs/grpo.png
    python examples/grpo.py --out runs/sglang --engine sglang
    python examples/grpo.py --out runs/grpo --steps 80 --resume
    python examples/grpo.py --out runs/adapter --mode adapter
    python examples/grpo.py --out runs/engine --merge engine
    python examples/grpo.py --out runs/trained --train merged
    python examples/grpo.py --out runs/gpu --device cuda --dtype bfloat16
    python examples/grpo.py --out runs/fp8 --dtype bfloat16 --quantization fp8_per_channel \
        --truncated-importance-sampling 2
    torchrun --nproc-per-node 2 examples/grpo.py --out runs/sharded

With several processes the model is sharded by FSDP2; the engine is process 0's, and every push takes all of them. What
is one engine's own (starting it, asking it) lies in grpo_engines.py.

With `--train merged` the trainer's own forward and backward compute with the weights that are pushed.

The task is to sort. A prompt is `BOS d1 .. d6 SEP` with random digits, the right answer is the sorted digits and `EOS`.
Everything is a token id, so there is no tokenizer. The reward can be verified: the share of positions that hold what
the right answer has there; a surplus token counts as a wrong position, a missing one too. 1 is a right answer.

The policy is a small Qwen2 with random weights, which would never be rewarded for anything that it could learn from. So
the first run trains the base for some seconds to answer with the digits in *random* order (reward about 0.35), and
keeps it in `--out`. GRPO then teaches a LoRA adapter, and nothing else, to put them in order.

Each step: push the policy, sample groups of answers, advantages relative to the group, a few clipped (PPO) updates
against the log-probs that the engine gave. `logprob_gap` lines those up with the trainer's own before the first update:
the importance ratio of every token is 1, but for rounding, if and only if the engine serves the policy being trained.
In float32 a ratio outside of 1 +- 0.02 ends the run. An engine that quantises (`--quantization`) samples from a policy
that is a little different, and the ratios say by how much; `--truncated-importance-sampling C` weighs each token by it,
at most C, so that the gradient is the trained policy's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")  # the bars of transformers
os.environ.setdefault("GOMP_SPINCOUNT", "0")  # threads that wait leave the core to the engine

import torch
import torch.distributed as dist
from grpo_engines import ENGINES, LINEARS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from lora_merge import MissingExtra, train_merged
from lora_merge.verify import logprob_gap

DIGITS = 6
BOS, SEP, EOS, PAD = 10, 11, 12, 13
PROMPT, RESPONSE = DIGITS + 2, DIGITS + 2  # BOS digits SEP; digits EOS, and room for one token too many
POLICY = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": BOS,
    "eos_token_id": EOS, "pad_token_id": PAD,
}  # fmt: skip
RATIO_BOUND = 0.02


def main() -> None:
    args = arguments()
    rank, device = start_processes(args.device)
    console = Console(width=None if sys.stdout.isatty() else 300, highlight=False)

    if rank == 0 and not (args.out / "base").exists():
        console.print("teaching the base to answer in random order")
        pretrain(args.out / "base", device, args.pretrain, args.hidden)
    dist.barrier()
    checkpoint = newest_checkpoint(args.out) if args.resume else None
    model = build_policy(args, checkpoint, device)
    optimizer = torch.optim.AdamW(trainable(model), lr=args.lr, weight_decay=0.0)
    prompts_rng = torch.Generator().manual_seed(args.seed)
    first = load_checkpoint(checkpoint, model, optimizer, prompts_rng) if checkpoint else 0
    log = open_log(args.out / "log.jsonl", first) if rank == 0 else None

    rollouts = ENGINES[args.engine]
    start = rollouts.start(args.out / "base", POLICY["max_position_embeddings"], args) if rank == 0 else no_engine()
    with start as engine, training_of(model, args.train):
        sync = rollouts.sync(model, engine, args)
        with progress_bar(console, args.steps, first, shown=rank == 0) as advance:
            for step in range(first, args.steps):
                begin = time.perf_counter()
                report = sync.push()
                pushed = time.perf_counter()
                batch = share(rollout(engine, sync, prompts_rng, args) if rank == 0 else None, device)
                rolled = time.perf_counter()
                figures = update(model, optimizer, batch, args)
                figures |= {"push_s": pushed - begin, "rollout_s": rolled - pushed}
                figures["train_s"] = time.perf_counter() - rolled
                write(log, {"step": step, "resumed": checkpoint is not None and step == first, **figures})
                if rank == 0:
                    console.print(summary(step, figures, report))
                check_ratios(figures, args.dtype)
                if (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                    save_checkpoint(args.out, step + 1, model, optimizer, prompts_rng)
                advance()
        sync.close()
    if args.plot and rank == 0:
        plot(args.out / "log.jsonl", args.plot)
        console.print(f"picture: {args.plot}")
    dist.barrier()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="base, checkpoints and log.jsonl")
    parser.add_argument("--engine", choices=list(ENGINES), default="vllm", help="that rolls out")
    parser.add_argument("--mode", choices=["merged", "adapter"], default="merged", help="what the engine serves")
    parser.add_argument(
        "--merge",
        choices=["auto", "trainer", "engine"],
        default="auto",
        help="who adds the adapter to the base: the trainer, or the engine, which then gets adapters alone",
    )
    parser.add_argument(
        "--train", choices=["adapters", "merged"], default="adapters", help="what the trainer computes with"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="of the base and the engine"
    )
    parser.add_argument("--quantization", metavar="FORMAT", help="that vLLM makes of what is pushed; needs bfloat16")
    parser.add_argument("--steps", type=int, default=60, help="in all, those before a resume included")
    parser.add_argument("--prompts", type=int, default=32, help="groups a step")
    parser.add_argument("--group", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--updates", type=int, default=2, help="optimizer steps on each rollout")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--clip", type=float, default=0.2, help="importance ratios are clipped to 1 +- this")
    parser.add_argument(
        "--truncated-importance-sampling",
        type=float,
        metavar="C",
        help="weigh tokens by how much more probable the trainer finds them than the engine did, at most C",
    )
    parser.add_argument("--rank", type=int, default=16, help="of the adapter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pretrain", type=int, default=400, metavar="STEPS", help="of the base, in the first run")
    parser.add_argument("--hidden", type=int, default=64, metavar="SIZE", help="of the base; fp8_per_block wants 128")
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw reward and gap, as PNG (needs matplotlib)")
    args = parser.parse_args()
    if args.prompts * args.group % int(os.environ.get("WORLD_SIZE", "1")):
        parser.error("--prompts times --group must be a multiple of the number of processes")
    if args.train == "merged" and args.mode == "adapter":
        parser.error(
            "--train merged needs --mode merged: the engine's LoRA path computes with the base and the adapter"
        )
    if args.quantization and args.dtype != "bfloat16":
        parser.error("--quantization needs --dtype bfloat16")
    if args.quantization and args.engine != "vllm":
        parser.error("--quantization is for --engine vllm: pushes into quantised SGLang engines are refused")
    if args.plot and not find_spec("matplotlib"):
        raise MissingExtra("--plot needs matplotlib: pip install 'lora-merge[bench]'")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def start_processes(device: str) -> tuple[int, torch.device]:
    """Join torchrun's processes; without torchrun, be the only one. Returns the rank and its device."""
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    index = torch.cuda.current_device() if device == "cuda" else None
    return dist.get_rank(), torch.device(device, index)


# The policy


def pretrain(folder: Path, device: torch.device, steps: int, hidden: int = 64) -> None:
    """Train a base that answers with the digits of the prompt in random order, and save it in HF format."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    sizes = POLICY | {"hidden_size": hidden, "intermediate_size": 2 * hidden}
    base = Qwen2ForCausalLM(Qwen2Config(**sizes)).to(device)
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, max(steps, 1))
    for _ in range(steps):
        prompts = draw_prompts(128, g)
        order = torch.rand(128, DIGITS, generator=g).argsort(1)
        answers = F.pad(prompts[:, 1:-1].gather(1, order), (0, 1), value=EOS)
        tokens = torch.cat([prompts, answers], 1).to(device)
        loss = -token_logps(base, tokens)[:, PROMPT - 1 : -1].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    unfinished = folder.with_suffix(".unfinished")
    base.save_pretrained(unfinished)
    unfinished.rename(folder)


def build_policy(args: argparse.Namespace, checkpoint: Path | None, device: torch.device) -> nn.Module:
    """The frozen base and a float32 adapter, sharded over the processes where there are several."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(args.seed)  # every process draws the same adapter
    base = AutoModelForCausalLM.from_pretrained(args.out / "base", dtype=getattr(torch, args.dtype)).to(device)
    if checkpoint is not None:
        model = PeftModel.from_pretrained(base, checkpoint, is_trainable=True)
    else:
        config = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=LINEARS, task_type="CAUSAL_LM")
        model = get_peft_model(base, config)
    if dist.get_world_size() > 1:
        for layer in base.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def training_of(model: nn.Module, how: str) -> AbstractContextManager[object]:
    """PEFT's forward, or for the time of the block one on merged weights."""
    return train_merged(model) if how == "merged" else nullcontext()


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def token_logps(model: nn.Module, tokens: Tensor) -> Tensor:
    """`[N, P + R]`: entry t is the log-prob of token t + 1; the last one is 0 and about nothing.

    Sequences are padded on the right, so causal attention needs no mask.
    """
    logps = model(input_ids=tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    return F.pad(logps.gather(-1, tokens[:, 1:, None]).squeeze(-1), (0, 1))


@contextmanager
def no_engine() -> Iterator[None]:
    """The other processes only train; they take part in every push."""
    yield None


# One step


@dataclass
class Batch:
    """Answers and what they are worth; N of them, prompts of width P, answers padded to R.

    Args:
        tokens: `[N, P + R]`, int64.
        lengths: `[N]`, tokens of each answer.
        logps: `[N, R]`, float32, the engine's log-prob of each token of the answers; 0 in the padding.
        rewards, advantages: `[N]`, float32.
    """

    tokens: Tensor
    lengths: Tensor
    logps: Tensor
    rewards: Tensor
    advantages: Tensor


def draw_prompts(count: int, g: torch.Generator) -> Tensor:
    """`[count, P]`"""
    digits = torch.randint(0, 10, (count, DIGITS), generator=g)
    return F.pad(F.pad(digits, (1, 0), value=BOS), (0, 1), value=SEP)


def rollout(engine: Any, sync: Any, g: torch.Generator, args: argparse.Namespace) -> Batch:
    """Groups of answers to fresh prompts, sampled by the engine, with rewards and group-relative advantages."""
    prompts = draw_prompts(args.prompts, g).tolist()
    seeds = torch.randint(0, 1 << 31, (args.prompts,), generator=g).tolist()
    asked = ENGINES[args.engine].ask(engine, sync, prompts, seeds, group=args.group, tokens=RESPONSE, stop=EOS)
    rows, lengths, logps, rewards = [], [], [], []
    for prompt, answers in zip(prompts, asked, strict=True):
        for ids, own in answers:
            blank = RESPONSE - len(ids)
            rows.append(prompt + ids + [PAD] * blank)
            lengths.append(len(ids))
            logps.append(own + [0.0] * blank)
            rewards.append(reward(prompt, ids))
    worth = torch.tensor(rewards)
    groups = worth.view(args.prompts, args.group)
    advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return Batch(torch.tensor(rows), torch.tensor(lengths), torch.tensor(logps), worth, advantages.flatten())


def reward(prompt: list[int], answer: list[int]) -> float:
    """Share of positions at which the answer is the sorted digits of the prompt and EOS."""
    right = [*sorted(prompt[1:-1]), EOS]
    hits = sum(a == b for a, b in zip(answer, right, strict=False))
    return hits / max(len(answer), len(right))


def share(batch: Batch | None, device: torch.device) -> Batch:
    """Process 0 has the batch; each process gets its part of it."""
    box = [batch]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    mine = [t.chunk(dist.get_world_size())[dist.get_rank()].to(device) for t in vars(box[0]).values()]
    return Batch(*mine)


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, args: argparse.Namespace
) -> dict[str, float]:
    """Clipped policy-gradient steps on one rollout; figures of all processes together."""
    mask = torch.arange(RESPONSE, device=batch.lengths.device) < batch.lengths[:, None]
    tokens = summed(mask.sum())
    figures: dict[str, float] = {}
    for _ in range(args.updates):
        logps = token_logps(model, batch.tokens)
        if not figures:
            figures = compare(logps.detach(), batch)
            own = logps[:, PROMPT - 1 : -1].detach()
            before, weights = correction(own, batch.logps, args.truncated_importance_sampling)
        ratio = (logps[:, PROMPT - 1 : -1] - before).exp()
        advantages = batch.advantages[:, None]
        gain = weights * torch.minimum(ratio * advantages, ratio.clamp(1 - args.clip, 1 + args.clip) * advantages)
        # The mean over the tokens of all processes; FSDP averages gradients over them.
        loss = -(gain * mask).sum() / tokens * dist.get_world_size()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable(model), 1.0)
        optimizer.step()
    answers = summed(torch.ones_like(batch.rewards).sum())
    figures["reward"] = summed(batch.rewards.sum()) / answers
    figures["right"] = summed((batch.rewards == 1).float().sum()) / answers
    return figures


def correction(own: Tensor, engine: Tensor, most: float | None) -> tuple[Tensor, Tensor]:
    """The log-probs before the update against which ratios are taken, and a weight for each token.

    They are the engine's, as if it were the policy; with truncated importance sampling the trainer's own, and a token
    weighs min(own probability / engine's probability, `most`), for it was the engine's that it was drawn from.

    Args:
        own, engine: `[N, R]`, log-probs.
    """
    if most is None:
        return engine, torch.ones_like(engine)
    return own, (own - engine).exp().clamp(max=most)


def compare(logps: Tensor, batch: Batch) -> dict[str, float]:
    """How far the engine's log-probs lie from the trainer's, over the tokens of all processes."""
    gap = logprob_gap(logps, batch.logps, shifted=True, prompt_width=PROMPT, response_lengths=batch.lengths)
    low, high = gap.ratio_range
    extremes = torch.tensor([gap.maximum, max(high - 1, 1 - low)], device=logps.device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    sums = [summed(torch.tensor(x * gap.tokens, device=logps.device)) for x in (1.0, gap.mean, gap.ratio_mean)]
    return {
        "gap_max": float(extremes[0]),
        "gap_mean": sums[1] / sums[0],
        "ratio_off": float(extremes[1]),
        "ratio_mean": sums[2] / sums[0],
        "tokens": sums[0],
    }


def summed(x: Tensor) -> float:
    """The sum over the processes."""
    x = x.double()
    dist.all_reduce(x)
    return float(x)


def check_ratios(figures: dict[str, float], dtype: str) -> None:
    """Stop before the policy learns from answers that another policy gave.

    In bfloat16 both round each activation, in an order of their own, so only float32 has a bound.
    """
    if dtype == "float32" and not figures["ratio_off"] <= RATIO_BOUND:
        raise RuntimeError(
            f"an importance ratio is off by {figures['ratio_off']:.3g}, more than {RATIO_BOUND}: the engine does not "
            "serve the policy that is being trained"
        )


# Checkpoints: the adapter in PEFT's format, and what goes on from it


def save_checkpoint(
    out: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, g: torch.Generator
) -> None:
    """Write `checkpoint-STEP`: the adapter, the optimizer, the step and the generator of prompts and seeds."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    adapter = get_model_state_dict(model, options=whole)
    state = get_optimizer_state_dict(model, optimizer, options=whole)
    if dist.get_rank() == 0:
        folder = out / f"checkpoint-{step:06d}"
        unfinished = folder.with_suffix(".unfinished")
        model.save_pretrained(unfinished, state_dict=adapter, save_embedding_layers=False)  # type: ignore[operator]
        torch.save({"step": step, "optimizer": state, "rng": g.get_state()}, unfinished / "trainer.pt")
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
    dist.barrier()


def newest_checkpoint(out: Path) -> Path:
    found = sorted(path for path in out.glob("checkpoint-*") if path.suffix != ".unfinished")
    if not found:
        raise SystemExit(f"--resume: there is no checkpoint in {out}")
    return found[-1]


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, g: torch.Generator) -> int:
    """Bring back all but the adapter, which `build_policy` read; returns the step to go on with."""
    saved = torch.load(checkpoint / "trainer.pt", weights_only=True)
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=whole)
    g.set_state(saved["rng"])
    return saved["step"]


# What there is to see


def open_log(file: Path, first: int) -> TextIO:
    """A file for one JSON object a step; keeps the steps before `first`, drops what came after the last checkpoint."""
    kept = [record for record in read_log(file) if record["step"] < first]
    log = file.open("w")
    for record in kept:
        write(log, record)
    return log


def write(log: TextIO | None, record: dict[str, Any]) -> None:
    if log is not None:
        print(json.dumps(record), file=log, flush=True)


def read_log(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def summary(step: int, figures: dict[str, float], report: Any) -> str:
    by = f" by the {report.merge}" if report.merge else ""
    return (
        f"step {step}: reward {figures['reward']:.3f}, right {100 * figures['right']:.0f} %; "
        f"gap max {figures['gap_max']:.1e} mean {figures['gap_mean']:.1e}, "
        f"ratio off by {figures['ratio_off']:.1e} at most, mean {figures['ratio_mean']:.6f}; "
        f"{report.mode}@{report.version}{by} pushed in {1e3 * figures['push_s']:.0f} ms, "
        f"rollout {figures['rollout_s']:.2f} s, training {figures['train_s']:.2f} s"
    )


@contextmanager
def progress_bar(console: Console, steps: int, first: int, shown: bool) -> Iterator[Any]:
    """A bar below the printed steps, on a terminal only."""
    columns = ("GRPO", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=steps, completed=first)
        yield lambda: bar.advance(task)


def plot(log: Path, file: Path) -> None:
    """Draw reward and gap over the steps, as PNG; dashed lines are resumes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    records = read_log(log)
    steps = [r["step"] for r in records]
    fig, (top, bottom) = plt.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    top.plot(steps, [r["reward"] for r in records], color="#1f6feb", label="mean reward")
    top.plot(steps, [r["right"] for r in records], color="#aab2bf", label="share of right answers")
    top.set(ylim=(0, 1), title="reward")
    bottom.semilogy(steps, [r["ratio_off"] for r in records], color="#1f6feb", label="largest |importance ratio - 1|")
    bottom.semilogy(steps, [r["gap_mean"] for r in records], color="#aab2bf", label="mean |log-prob gap|")
    bottom.axhline(RATIO_BOUND, color="#d1242f", linewidth=1, label=f"bound in float32: {RATIO_BOUND}")
    bottom.set(xlabel="step", title="engine against trainer, before each update")
    for ax in (top, bottom):
        for r in records:
            if r["resumed"]:
                ax.axvline(r["step"] - 0.5, color="black", linewidth=0.8, linestyle="--")
        ax.legend(frameon=False)
        ax.grid(color="#e6e8ec", linewidth=0.8)
        ax.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(file, dpi=150)
    plt.close(fig)


if __name__ == "__main__":
    main()
