"""What of a LoRA policy an engine serves: by rounding, by pushes, and by training on the weights that are served.

    python benchmarks/fidelity.py --engine --json fidelity-h200.json --plot fidelity.png    # a GPU, about four minutes
    python benchmarks/fidelity.py --shape small --device cpu                                # some minutes on two cores
    python benchmarks/fidelity.py --shape tiny --device cpu --pretrain 20 --steps 1 3       # a smoke test

A Qwen2 with bytes as tokens learns the source code of Python's standard library and is rounded to bf16, as released
checkpoints are. Then LoRA (rank 32, alpha 64, float32, AdamW) learns the text of Python's reference, once with PEFT's
forward and once with `lora_merge.train_merged`, on the same data in the same order.

After each of `--steps`, policies are compared in float32 arithmetic on text that was held out, so that nothing but the
weights differs. `trained` is `W + scaling * lora_B @ lora_A` in float32. Of each way to serve it, KL(trained || served)
in nats a token, and its share of KL(trained || base), that is of what was learnt:

- `nearest`, `stochastic`: bf16 weights by `MergedWeights`, in both roundings.
- `fp16`: the same for an engine in float16.
- `merged`: of the other run: weights as its own forward reads them, beside those of `MergedWeights`.

Then arithmetic: the mean |log-prob gap| between the trainer's own forward and one of transformers with the weights
that are served, both in bf16.

`--engine` starts real vLLM engines, which sample from the policy of the last step, and has the mean |log-prob gap|
between them and the trainer, both in bf16: what an engine's kernels add.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import sync
import torch
from bars import BLUE, GREY, INK, RED, figure
from torch import Tensor, nn

from lora_merge import MergedWeights, VllmSync, train_merged
from lora_merge.bench import check_extra, report
from lora_merge.choices import Mode
from lora_merge.verify import logprob_gap

Record = dict[str, Any]

WORK = Path(__file__).resolve().parent / "work" / "fidelity"
RANK, ALPHA = 32, 64
SERVED = {"nearest": "bf16, nearest", "stochastic": "bf16, stochastic", "fp16": "fp16", "merged": "trained merged"}
"""The way -> what tables and pictures call it."""
GAPS = {
    "peft, merged": "PEFT's forward, merged pushes",
    "peft, adapter": "PEFT's forward, vLLM's LoRA path",
    "peft, fp16": "PEFT's forward, merged pushes into an fp16 engine",
    "merged, merged": "trained merged, merged pushes",
}
ENGINES = ("merged", "adapter", "fp16")


class Size(NamedTuple):
    """A model and its training.

    Args:
        config: as in `sync.SHAPES`.
        batch, length: of the tokens of a step on source code.
        pretrain: such steps.
        lora_batch: sequences of a LoRA step.
        steps: of LoRA, after which policies are compared.
        held_out: sequences to compare on.
    """

    config: dict[str, Any]
    batch: int
    length: int
    pretrain: int
    lora_batch: int
    steps: tuple[int, ...]
    held_out: int


def _config(hidden: int, intermediate: int, layers: int, heads: int, kv: int) -> dict[str, Any]:
    return {
        "vocab_size": 256, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "tie_word_embeddings": False,
    }  # fmt: skip


SIZES = {
    "75m": Size(_config(768, 2048, 12, 12, 4), 64, 512, 600, 16, (3, 10, 30, 100, 300), 32),
    "small": Size(_config(128, 384, 3, 2, 1), 8, 128, 300, 4, (3, 10, 30, 100), 16),
    "tiny": Size(_config(64, 128, 2, 2, 1), 4, 64, 60, 2, (3, 10), 4),
}
sync.SHAPES |= {f"bytes-{name}": size.config for name, size in SIZES.items()}


# Texts


def sources() -> Tensor:
    """The standard library, as bytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "pydoc_data"}
    files = sorted(f for f in folder.rglob("*.py") if not left_out & set(f.relative_to(folder).parts))
    return _bytes([file.read_bytes() for file in files])


def reference() -> Tensor:
    """Python's reference as its `help` has it, as bytes: another text."""
    from pydoc_data.topics import topics

    return _bytes([text.encode() for _, text in sorted(topics.items())])


def _bytes(texts: Sequence[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts)), dtype=torch.uint8)


def windows(text: Tensor, count: int, length: int, g: torch.Generator, device: torch.device) -> Tensor:
    """`[count, length]`, from places drawn at random."""
    starts = torch.randint(len(text) - length, (count, 1), generator=g)
    return text[starts + torch.arange(length)].long().to(device)


# Models


def pretrained(size: Size, shape: str, device: torch.device, steps: int) -> tuple[Any, float]:
    """A model that has learnt source code, rounded to bf16; and its last loss."""
    from transformers import AutoModelForCausalLM

    text, g = sources(), torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(sync.config_of(f"bytes-{shape}"), dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * i / steps))
    )
    last = []
    for step in range(steps):
        tokens = windows(text, size.batch, size.length, g, device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        last.append(loss.detach())
        if step % 50 == 0:
            print(f"source code, step {step}: loss {float(loss.detach()):.3f}", flush=True)
    return model.to(torch.bfloat16).eval(), float(torch.stack(last[-20:]).mean())


def with_lora(folder: Path, device: torch.device) -> Any:
    """The base and a fresh adapter in float32, the same one each time."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    torch.manual_seed(0)
    return get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=sync.LINEARS))


def as_read(model: Any) -> dict[str, Tensor]:
    """Copies of the base's parameters as a forward reads them, under their names in a checkpoint."""
    named = model.get_base_model().named_parameters()
    return {name.replace(".base_layer", ""): p.detach().clone() for name, p in named if "lora_" not in name}


def copied(weights: MergedWeights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights}


class Judge:
    """Compares policies by their weights, in float32 arithmetic; and forwards in bf16."""

    def __init__(self, shape: str, tokens: Tensor) -> None:
        from transformers import AutoModelForCausalLM

        config = sync.config_of(f"bytes-{shape}")
        with tokens.device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
            self.rollout = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.tokens = tokens

    @torch.no_grad()
    def logps(self, weights: dict[str, Tensor]) -> Tensor:
        """`[tokens, 256]`, float64: of each next byte."""
        self.model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        pieces = [self.model(input_ids=some, use_cache=False).logits[:, :-1] for some in self.tokens.split(8)]
        return torch.cat(pieces).flatten(0, 1).double().log_softmax(-1)

    @torch.no_grad()
    def gap(self, trainer: Any, served: dict[str, Tensor]) -> float:
        """Mean |log-prob gap| of the next bytes, between a trainer's forward and one with the served weights."""
        self.rollout.load_state_dict(served)
        found = []
        for some in self.tokens.split(8):
            own, theirs = (
                model(input_ids=some, use_cache=False).logits[:, :-1].float().log_softmax(-1)
                for model in (trainer, self.rollout)
            )
            found.append((own - theirs).gather(-1, some[:, 1:, None]).abs().mean())
        return float(torch.stack(found).mean())

    def loss(self, logps: Tensor) -> float:
        return -float(logps.gather(1, self.tokens[:, 1:].reshape(-1, 1)).mean())


def divergence(p: Tensor, q: Tensor) -> float:
    """KL(p || q), nats a token; of log-probs."""
    return float((p.exp() * (p - q)).sum(-1).mean())


# LoRA runs


def run_lora(args: argparse.Namespace, size: Size, folder: Path, lr: float, merged: bool) -> Iterator[tuple[int, Any]]:
    """Train; the steps after which policies are compared, each with the model, whose weights are read in between."""
    device = torch.device(args.device)
    model, text, g = with_lora(folder, device), learnt(reference()), torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=0.0)
    with training_of(model, merged) as training:
        for step in range(1, max(args.steps) + 1):
            tokens = windows(text, size.lora_batch, size.length, g, device)
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step in args.steps:
                if training is not None:
                    training.refresh()  # as the next forward would
                yield step, model


@contextmanager
def training_of(model: Any, merged: bool) -> Iterator[Any]:
    """Training on merged weights, or PEFT's own."""
    if not merged:
        yield None
        return
    with train_merged(model) as training:
        yield training


def learnt(text: Tensor) -> Tensor:
    return text[: len(text) * 9 // 10]


def held_out(text: Tensor) -> Tensor:
    return text[len(text) * 9 // 10 :]


def rows(args: argparse.Namespace, size: Size, folder: Path, lr: float, judge: Judge) -> Iterator[Record]:
    """One for each of `--steps`: both runs, and each way to serve."""
    base = as_read(with_lora(folder, torch.device(args.device)))
    start = judge.logps(base)
    runs = run_lora(args, size, folder, lr, merged=False)
    plain = {step: served_by(model, judge, base, start) for step, model in runs}
    for step, model in run_lora(args, size, folder, lr, merged=True):
        trained, served = as_read(model), copied(MergedWeights(model))
        goal = judge.logps(trained)
        same = trained.keys() == served.keys() and all(torch.equal(trained[name], served[name]) for name in trained)
        row = plain[step] | {"lr": lr, "step": step}
        row["kl"]["merged"] = divergence(goal, judge.logps(served))
        row["merged"] = {"learnt": divergence(goal, start), "loss": judge.loss(goal), "same_bits": same}
        row["merged"]["gap"] = judge.gap(model, served)
        yield row
    model.save_pretrained(folder.parent / "adapter")


def served_by(model: Any, judge: Judge, base: dict[str, Tensor], start: Tensor) -> Record:
    """What a policy has learnt that trains by PEFT's forward, and what of it each way serves.

    Args:
        model: the policy.
        judge: what compares.
        base: weights without the adapter.
        start: log-probs of these.
    """
    goal = judge.logps(copied(MergedWeights(model, dtype=torch.float32)))
    served = {
        "nearest": copied(MergedWeights(model)),
        "stochastic": copied(MergedWeights(model, rounding="stochastic")),
        "fp16": copied(MergedWeights(model, dtype=torch.float16)),
    }
    adapted = [name for name in base if any(f".{linear}.weight" in name for linear in sync.LINEARS)]
    changed = sum(int((served["nearest"][name] != base[name]).sum()) for name in adapted)
    return {
        "learnt": divergence(goal, start),
        "kl": {name: divergence(goal, judge.logps(weights)) for name, weights in served.items()},
        "changed": changed / sum(base[name].numel() for name in adapted),
        "loss": judge.loss(goal),
        "base_loss": judge.loss(start),
        "gap": judge.gap(model, served["nearest"]),
    }


def run(args: argparse.Namespace) -> Record:
    """All of it."""
    device, size = torch.device(args.device), SIZES[args.shape]
    record = report.provenance(device)
    record |= {
        "shape": args.shape,
        "rank": RANK,
        "alpha": ALPHA,
        "device": args.device,
        "pretrain_steps": args.pretrain,
    }
    shutil.rmtree(args.work, ignore_errors=True)
    folder = args.work / "base"
    model, record["pretrain_loss"] = pretrained(size, args.shape, device, args.pretrain)
    record["parameters"] = sum(p.numel() for p in model.parameters())
    model.save_pretrained(folder)
    del model
    tokens = windows(held_out(reference()), size.held_out, size.length, torch.Generator().manual_seed(3), device)
    judge = Judge(args.shape, tokens)
    record["rows"] = []
    for lr in sorted(args.lrs):
        for row in rows(args, size, folder, lr, judge):
            record["rows"].append(row)
            report.save(record, args.json)
            print(f"lr {lr:g}, step {row['step']}: {row['kl']} of {row['learnt']:.3g}", flush=True)
    if args.engine:
        import trainers

        record["versions"]["vllm"] = trainers.version_of_vllm()
        record["engines"] = {}
        for name in args.engines:
            record["engines"][name] = sync.run_part(name, args.device == "cpu", __file__)
            report.save(record, args.json)
    return record


# A real engine


def part(args: argparse.Namespace) -> Record:
    """Answers of one engine to the policy of the last step, beside the trainer's log-probs: gap by way."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    device = torch.device(args.device)
    mode: Mode = "adapter" if args.part == "adapter" else "merged"
    base = AutoModelForCausalLM.from_pretrained(args.work / "base", dtype=torch.bfloat16).to(device)
    model = PeftModel.from_pretrained(base, args.work / "adapter", is_trainable=True)
    g = torch.Generator().manual_seed(4)
    prompts = windows(held_out(reference()), args.prompts, args.prompt_tokens, g, device)
    options = {"dtype": "float16" if args.part == "fp16" else "bfloat16", "max_num_seqs": args.prompts}
    named = argparse.Namespace(**vars(args) | {"shape": f"bytes-{args.shape}"})
    with (
        tempfile.TemporaryDirectory() as folder,
        sync.start_engine(named, Path(folder), lora=mode == "adapter", **options) as llm,
        closing(VllmSync(model, llm, mode=mode)) as pusher,
    ):
        print(pusher.push(), flush=True)
        tokens, engine = answers(llm, pusher.lora_request(), prompts, args.new_tokens)
    found = {f"peft, {args.part}": gap(model, tokens, engine)}
    if args.part == "merged":
        with train_merged(model):
            found["merged, merged"] = gap(model, tokens, engine)
    return found


def answers(llm: Any, request: Any, prompts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Prompts with what the engine sampled, `[N, P + R]`; and its log-probs of that, `[N, R]`."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(seed=i, max_tokens=count, logprobs=0, ignore_eos=True, detokenize=False)
        for i in range(len(prompts))
    ]
    asked = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
    outputs = [o.outputs[0] for o in llm.generate(asked, sampling, lora_request=request, use_tqdm=False)]
    ids = [list(output.token_ids) for output in outputs]
    logps = [
        [step[token].logprob for step, token in zip(output.logprobs, some, strict=True)]
        for output, some in zip(outputs, ids, strict=True)
    ]
    device = prompts.device
    return torch.cat([prompts, torch.tensor(ids, device=device)], 1), torch.tensor(logps, device=device)


@torch.no_grad()
def gap(model: Any, tokens: Tensor, engine: Tensor) -> Record:
    """How far the engine's log-probs lie from the trainer's."""
    logps = model.eval()(input_ids=tokens, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    own = nn.functional.pad(logps.gather(-1, tokens[:, 1:, None]).squeeze(-1), (0, 1))
    count, length = engine.shape
    width = tokens.shape[1] - length
    found = logprob_gap(own, engine, shifted=True, prompt_width=width, response_lengths=[length] * count)
    return {"mean": found.mean, "maximum": found.maximum, "ratio_mean": found.ratio_mean, "tokens": found.tokens}


# What there is to see


def share(row: Record, way: str) -> float:
    """Of what was learnt, the part that is not served."""
    learnt = row["merged"]["learnt"] if way == "merged" else row["learnt"]
    return row["kl"][way] / learnt if learnt else math.nan


def title(record: Record) -> str:
    return f"LoRA of rank {record['rank']} on {record['parameters'] / 1e6:.3g}M parameters in bf16"


def show(record: Record) -> None:
    """Print the figures."""
    heading = f"{title(record)}: KL(trained || served), and its share of what was learnt"
    heads = ["KL to\nthe base", *(name.replace(" ", "\n", 1) for name in SERVED.values())]
    sheet = report.sheet_of(heading, "lr, steps", [*heads, "elements\nchanged", "loss\nPEFT", "loss\nmerged"])
    for row in record["rows"]:
        ways = [f"{row['kl'][way]:.1e} ({abs(share(row, way)):.1%})" for way in SERVED]
        losses = [f"{row['loss']:.4f}", f"{row['merged']['loss']:.4f}"]
        name = f"{row['lr']:g}, {row['step']}"
        sheet.add_row(name, f"{row['learnt']:.1e}", *ways, f"{row['changed']:.0%}", *losses)
    out = report.console()
    out.print(sheet)
    other = [row for row in record["rows"] if not row["merged"]["same_bits"]]
    told = "THE ENGINE WOULD GET OTHER BITS than were trained on" if other else "the bits served are those trained on"
    out.print(f"trained merged: {told}; base: loss {record['rows'][0]['base_loss']:.4f}")
    ours, theirs = (
        [one["gap"] for one in some] for some in ([row["merged"] for row in record["rows"]], record["rows"])
    )
    out.print(
        f"mean |log-prob gap| to the same forward with the served weights, bf16: PEFT's {min(theirs):.4f} to "
        f"{max(theirs):.4f}, trained merged {max(ours):.4f} at most"
    )
    found = gaps(record)
    if found:
        sheet = report.sheet_of("vLLM against the trainer", "", ["mean |log-prob gap|", "largest", "mean ratio"])
        for way in [way for way in GAPS if way in found]:
            cells = (f"{found[way]['mean']:.5f}", f"{found[way]['maximum']:.3f}", f"{found[way]['ratio_mean']:.5f}")
            sheet.add_row(GAPS[way], *cells)
        out.print(sheet)
    for name, engine in record.get("engines", {}).items():
        if "error" in engine:
            out.print(f"{name}: {engine['error']}", markup=False)
    out.print(f"{record['device_name']}, {record['versions']}", markup=False)


def gaps(record: Record) -> dict[str, Record]:
    """By way, of the engines that answered."""
    engines = record.get("engines", {}).values()
    return {way: found for engine in engines if "error" not in engine for way, found in engine.items()}


def draw(record: Record, file: Path) -> None:
    """The share of what was learnt that is not served, by step; solid for the least learning rate, dashed above."""
    lrs = sorted({row["lr"] for row in record["rows"]})
    colours = {"nearest": RED, "stochastic": INK, "fp16": GREY}
    floor = 1e-6
    found = gaps(record)
    with figure(file, 5.1 + 0.24 * len(found)) as ax:
        for lr, style in zip(lrs, ("-", "--", ":"), strict=False):
            some = [row for row in record["rows"] if row["lr"] == lr]
            for way, colour in colours.items():
                values = [max(share(row, way), floor) for row in some]
                label = f"{SERVED[way]}, lr {lr:.0e}"
                ax.plot(
                    [row["step"] for row in some], values, style, color=colour, marker="o", markersize=3, label=label
                )
        steps = sorted({row["step"] for row in record["rows"]})
        worst = max(share(row, "merged") for row in record["rows"])
        ax.plot(steps, [max(worst, floor)] * len(steps), color=BLUE, linewidth=2.6)
        said = "trained merged: 0" if worst == 0 else f"trained merged: {worst:.0e}"
        spot = {"textcoords": "offset points", "xytext": (0, 6), "color": BLUE, "fontweight": "bold"}
        ax.annotate(said, (steps[0], max(worst, floor)), **spot)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xticks(steps, [str(step) for step in steps])
        ax.minorticks_off()
        ax.set_ylim(floor / 2, 300)  # room for the legend
        ax.set_yticks([1e-6, 1e-4, 1e-2, 1], ["", "0.01 %", "1 %", "100 %"])
        ax.set_xlabel("steps of LoRA", loc="left")
        ax.legend(frameon=False, fontsize=9, loc="upper right", ncols=len(lrs))
        ax.figure.suptitle("What was learnt and is not served", x=0.01, ha="left", fontsize=13, fontweight="bold")
        note = f"{title(record)}, {record['device_name']}."
        note += "\nThe same forward in bf16 with the served weights, mean |log-prob gap| to the trainer:"
        note += f"\nPEFT's forward {max(row['gap'] for row in record['rows']):.4f}, trained merged "
        note += f"{max(row['merged']['gap'] for row in record['rows']):.4f}."
        for way in [way for way in GAPS if way in found]:
            note += f"\nvLLM's mean |log-prob gap|, {GAPS[way]}: {found[way]['mean']:.4f}"
        ax.figure.supxlabel(note, x=0.01, ha="left", fontsize=10, color="#57606a")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SIZES, default="75m")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--pretrain", type=int, metavar="STEPS", help="on source code; default: 600, 300 and 60")
    parser.add_argument("--steps", type=int, nargs="+", help="of LoRA, after which policies are compared")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-5, 1e-4], help="of LoRA (default %(default)s)")
    parser.add_argument("--engine", action="store_true", help="ask real vLLM engines, too")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="which ones")
    parser.add_argument("--prompts", type=int, default=64, help="to each engine (default %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--gpu-memory", type=float, default=0.3, help="an engine's share (default %(default)s)")
    parser.add_argument("--work", type=Path, default=WORK, metavar="DIR", help="for the base and the adapter")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them here, as PNG")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing: --plot what --json wrote")
    parser.add_argument("--part", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.draw and not args.plot:
        parser.error("--draw needs --plot, where the picture goes")
    args.steps = args.steps or list(SIZES[args.shape].steps)
    args.pretrain = args.pretrain or SIZES[args.shape].pretrain
    args.rank = RANK
    return args


def main() -> None:
    args = parse()
    sync.quiet()
    if args.part:
        sync.end_part(part(args), args.json)
    if args.plot:
        check_extra(plot=True)
    if args.draw:
        draw(json.loads(args.draw.read_text()), args.plot)
        return
    record = run(args)
    show(record)
    if args.plot:
        draw(record, args.plot)


if __name__ == "__main__":
    main()
