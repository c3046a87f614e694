"""Which architectures can be pushed into a real vLLM engine, and answer as the trainer does.

    python benchmarks/architectures.py --json benchmarks/results/architectures-cpu.json     # all, some 20 minutes
    python benchmarks/architectures.py --only Gemma2 Phi                                    # some, by name

Each one is a tiny random model of transformers in a child process (CPU, float32). It is saved by transformers, loaded
by vLLM and asked: what differs there is vLLM's own. Then an adapter that changes the answers is pushed, twice, the
second time with every base weight changed, too; and once more as an adapter beside the base, where vLLM has LoRA layers
for it. A push is right where greedy tokens and their log-probs are those of the trainer's own forward; where they are
not, a fresh engine is asked, on the checkpoint that PEFT merges and transformers saves: it may be as far off.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lora_merge.bench import report

HERE = Path(__file__).resolve()
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = {"head_dim": 32}
FEW = {"num_experts_per_tok": 2}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 64,
}
TOLERANCE = 12e-6
"""Of log-probs, in float32: some ten roundings of each forward, see tests/support/engines.py."""
OTHER = "other answers"
FRESH = "as a fresh engine"
"""Whose answers are further from the trainer's than `TOLERANCE`, too."""
CPU_MLA = {"attention_backend": "CPU_MLA"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A tiny model of transformers.

    Args:
        name: its class is `{name}ForCausalLM`, or `name`; its configuration `{config or name}Config`.
        sizes: beside `SIZES`, or in their place.
        experts: whether PEFT adapts fused experts, and vLLM has no LoRA layers for them on a CPU.
        engine: options of the engine.
    """

    name: str
    sizes: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    experts: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    label: str = ""

    @property
    def title(self) -> str:
        return self.label or self.name


def tied(name: str, tie: bool, **sizes: Any) -> Architecture:
    return Architecture(name, sizes | {"tie_word_embeddings": tie}, label=f"{name}, {'tied' if tie else 'untied'}")


def moe(name: str, **sizes: Any) -> Architecture:
    return Architecture(name, FEW | sizes, experts=True)


ARCHITECTURES: tuple[Architecture, ...] = (
    tied("Qwen2", True),
    tied("Qwen2", False),
    tied("Llama", True),
    tied("Llama", False),
    tied("Qwen3", False, **HEAD),
    tied("Mistral", False),
    tied("Gemma", True, **HEAD),
    tied("Gemma2", True, **HEAD, query_pre_attn_scalar=32),
    tied("Gemma2", False, **HEAD, query_pre_attn_scalar=32),
    Architecture("Gemma3", HEAD | {"query_pre_attn_scalar": 32}, config="Gemma3Text"),
    Architecture("Gemma4", HEAD | {
        "global_head_dim": 32, "vocab_size_per_layer_input": 256, "hidden_size_per_layer_input": 0,
    }, config="Gemma4Text"),
    tied("Cohere", True),
    tied("Cohere", False),
    tied("Cohere2", True),
    Architecture("Phi"),
    Architecture("Phi3"),
    Architecture("Olmo"),
    Architecture("Olmo2"),
    Architecture("Olmo3"),
    Architecture("Granite"),
    Architecture("StableLm"),
    Architecture("Starcoder2"),
    Architecture("Nemotron"),
    Architecture("Apertus"),
    Architecture("Exaone4", {"sliding_window": 64, "sliding_window_pattern": 4}),
    Architecture("Ernie4_5", HEAD),
    Architecture("Glm", HEAD),
    Architecture("Glm4", HEAD),
    Architecture("SmolLM3"),
    Architecture("Helium", HEAD),
    Architecture("Arcee"),
    Architecture("SeedOss", HEAD),
    Architecture("GPT2LMHeadModel", config="GPT2"),
    Architecture("GPTNeoX"),
    Architecture("GPTJ", {"rotary_dim": 32}),
    Architecture("Bloom"),
    Architecture("OPT", {"ffn_dim": 256, "word_embed_proj_dim": 128}),
    Architecture("Falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": False}),
    Architecture("Lfm2", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 256}),
    Architecture("Mamba", {"state_size": 16}),
    moe("Mixtral", num_local_experts=4),
    moe("Qwen2Moe", num_experts=4, moe_intermediate_size=64, shared_expert_intermediate_size=64),
    moe("Qwen3Moe", **HEAD, num_experts=4, moe_intermediate_size=64),
    moe("Olmoe", num_experts=4),
    moe("GptOss", **HEAD, num_local_experts=4),
    moe("GraniteMoe", num_local_experts=4),
    moe("Ernie4_5_Moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=64, moe_num_shared_experts=1),
    moe("Glm4Moe", **HEAD, n_routed_experts=4, moe_intermediate_size=64, first_k_dense_replace=1,
        n_group=1, topk_group=1),
    moe("MiniMaxM2", **HEAD, num_local_experts=4),
    moe("FlexOlmo", num_experts=4),
    Architecture("DeepseekV2", FEW | MLA, experts=True, engine=CPU_MLA),
    Architecture("DeepseekV3", FEW | MLA | {"topk_method": "noaux_tc"}, experts=True, engine=CPU_MLA),
    moe("HunYuanMoEV1", **HEAD, num_experts=4, moe_topk=2),
    moe("GraniteMoeShared", num_local_experts=4, shared_intermediate_size=64),
)  # fmt: skip


@dataclass(slots=True)
class Row:
    """What became of one architecture; "right", or what was seen instead.

    Args:
        vllm: vLLM's own answers on the checkpoint that transformers saved.
        merged: after two pushes in merged mode.
        adapter: after a push in adapter mode.
        error: largest difference of a log-prob that was seen.
        tensors: that crossed.
    """

    name: str
    vllm: str = ""
    merged: str = ""
    adapter: str = ""
    error: float = 0.0
    tensors: int = 0
    seconds: float = 0.0

    @property
    def fine(self) -> bool:
        """What is not right is vLLM's."""
        return self.merged in ("right", FRESH) or self.vllm != "right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="names, or beginnings of them, in their order")
    parser.add_argument("--json", type=Path, help="where the record goes; rows that it has of others stay")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one architecture")
    args = parser.parse_args()
    sys.path[:0] = [str(HERE.parent.parent / "tests" / "support"), str(HERE.parent.parent)]
    import engines  # type: ignore[import-not-found]  # noqa: F401 - vLLM, transformers and PEFT, for all children

    chosen = [a for n in args.only or [""] for a in ARCHITECTURES if a.title.startswith(n)]
    rows: list[Row] = []
    kept = [Row(**row) for row in json.loads(args.json.read_text())["rows"]] if args.json and args.json.exists() else []
    for number, architecture in enumerate(chosen, start=1):
        print(f"{number}/{len(chosen)} {architecture.title} ...", end=" ", flush=True, file=sys.stderr)
        rows.append(tried(architecture, args.timeout))
        print(told(rows[-1]), file=sys.stderr, flush=True)
        if args.json is not None:
            record = provenance() | {"rows": [asdict(row) for row in joined(rows, kept)]}
            args.json.write_text(json.dumps(record, indent=2) + "\n")
    print(table(joined(rows, kept)))
    sys.exit(any(not row.fine for row in rows))


def provenance() -> report.Record:
    """What the rows were made with."""
    import transformers
    import vllm

    made = report.provenance(torch.device("cpu"))
    return made | {"versions": made["versions"] | {m.__name__: m.__version__ for m in (vllm, transformers)}}


def joined(rows: Sequence[Row], kept: Sequence[Row]) -> list[Row]:
    """These rows, and those of a record for other architectures, in the order of `ARCHITECTURES`."""
    found = {row.name: row for row in [*kept, *rows]}
    return [found[a.title] for a in ARCHITECTURES if a.title in found]


def told(row: Row) -> str:
    return f"vLLM: {row.vllm}; merged: {row.merged}; adapter: {row.adapter} ({row.error:.1e} off, {row.seconds:.0f} s)"


def table(rows: Sequence[Row]) -> str:
    """As in docs/architectures.md."""
    lines = ["| architecture | merged | adapter |", "|---|---|---|"]
    for row in rows:
        merged = row.merged if row.vllm == "right" else f"vLLM itself: {row.vllm}"
        lines.append(f"| {row.name} | {cell(merged)} | {cell(row.adapter) if row.vllm == 'right' else ''} |")
    return "\n".join(lines)


def tried(architecture: Architecture, timeout: float) -> Row:
    """With LoRA layers where vLLM has them, else without."""
    if architecture.experts:
        row = in_child(architecture.title, timeout, lora=False)
        row.adapter = "vLLM has no LoRA layers for experts on CPUs"
        return row
    row = in_child(architecture.title, timeout, lora=True)
    if row.vllm == "right" or row.vllm.startswith(OTHER):
        return row
    without = in_child(architecture.title, timeout, lora=False)
    without.adapter = f"vLLM: {row.vllm}"
    return without


def cell(text: str) -> str:
    """What fits a table; the record has the rest."""
    text = text.replace("|", "/").replace(f"{OTHER}: (tensor", f"{OTHER}: log-probs (tensor")
    text = text.partition(" for the prompt")[0].partition(" (tensor")[0]
    return text if len(text) <= 90 else f"{text[:87]}..."


def in_child(title: str, timeout: float, *, lora: bool) -> Row:
    """An engine that dies takes only its own row along. A fork, as imports take longer than all else."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=answer, args=(title, lora, theirs))
    begin = time.monotonic()
    child.start()
    theirs.close()
    try:
        row = Row(**ours.recv()) if ours.poll(timeout) else Row(title, vllm="no answer")
    except EOFError:
        child.join()
        row = Row(title, vllm=f"died with {child.exitcode}")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid or 0, signal.SIGKILL)  # its engine's processes, too
    child.join()
    row.seconds = round(time.monotonic() - begin, 1)
    return row


def answer(title: str, lora: bool, to: Any) -> None:
    """What a child does."""
    os.setsid()
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        if not os.environ.get("VERBOSE"):
            os.dup2(nowhere.fileno(), 2)
    to.send(asdict(examine(next(a for a in ARCHITECTURES if a.title == title), lora)))


# In a child


def build(architecture: Architecture) -> Any:
    import torch
    import transformers

    name = architecture.name
    model_class = getattr(transformers, name, None) or getattr(transformers, f"{name}ForCausalLM")
    config_class = getattr(transformers, f"{architecture.config or name}Config")
    torch.manual_seed(0)
    # Gemma 2's soft cap is in the eager attention only.
    config = config_class(**SIZES | architecture.sizes, attn_implementation="eager")
    model = model_class(config).eval()
    config._experts_implementation = "eager"
    with torch.no_grad():  # nothing at the value that it starts with: a bias of zeros would be right by accident
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def adapted(model: Any) -> Any:
    """With an adapter on every linear layer but the head, and on fused experts."""
    from peft import LoraConfig, get_peft_model
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    linears = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    fused = [n for n, p in model.named_parameters() if p.dim() == 3 and ".experts." in n and not n.endswith("_bias")]
    targets = sorted({".".join(n.split(".")[-3:]) for n in fused})
    head = model.get_output_embeddings()
    heads = {n.rpartition(".")[2] for n, m in model.named_modules() if m is head}
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=sorted(linears - heads), target_parameters=targets or None,
        init_lora_weights=False,
    )  # fmt: skip
    trained = get_peft_model(model, config).eval()
    with torch.no_grad():  # large ones make large sums, and these large errors
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.3)
    return trained


def examine(architecture: Architecture, lora: bool) -> Row:
    """One row, of an engine with LoRA layers or without."""
    import engines

    row = Row(architecture.title)
    options = architecture.engine | ({"enable_lora": True, "max_lora_rank": 8} if lora else {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "base"
        model = build(architecture)
        try:
            model.save_pretrained(path)
            trained: list[Any] = []
            pushed: list[Any] = []
            options |= {"processes": by_transformers(model), "load_format": "auto"}
            with engines.engine(model, path, **options) as llm:
                ask_all(row, engines, llm, model, lora, trained, pushed)
            if row.merged.startswith(OTHER):
                merged = trained[0].merge_and_unload()
                merged.save_pretrained(Path(folder) / "merged")
                with engines.engine(merged, Path(folder) / "merged", **options) as llm:
                    row.merged = FRESH if alike(pushed, engines.ask(llm)) else row.merged
        except Exception as error:
            row.vllm = short(error)
    return row


def by_transformers(model: Any) -> bool:
    """Whether vLLM runs the classes of transformers, which it changes: then its process must not be the trainer's."""
    from vllm.model_executor.models.registry import ModelRegistry

    known = ModelRegistry.models.get(type(model).__name__)
    return known is None or known.module_name.endswith(".transformers")


def check(row: Row, engines: Any, answers: Sequence[Any], model: Any) -> None:
    """Tokens and log-probs are the trainer's own."""
    row.error = max(row.error, float(engines.log_prob_errors(answers, model).max()))
    engines.assert_answers(answers, model, tolerance=TOLERANCE)


def alike(answers: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two engines said the same."""
    for one, other in zip((a.outputs[0] for a in answers), (o.outputs[0] for o in others), strict=True):
        if one.token_ids != other.token_ids:
            return False
        for token, here, there in zip(one.token_ids, one.logprobs, other.logprobs, strict=True):
            if abs(here[token].logprob - there[token].logprob) >= TOLERANCE:
                return False
    return True


def ask_all(row: Row, engines: Any, llm: Any, model: Any, lora: bool, models: list[Any], pushed: list[Any]) -> None:
    """Ask before any push, after two merged ones, after one of an adapter. `models` gets the adapted model, `pushed`
    the answers after the last merged push."""
    import torch

    from lora_merge import VllmSync

    row.vllm = said(lambda: check(row, engines, engines.ask(llm), model))
    if row.vllm != "right":
        return
    before = engines.ask(llm)
    trained = adapted(model)
    models.append(trained)
    sync = VllmSync(trained, llm, bucket_bytes=1 << 17)
    for step in range(2):

        def push(step: int = step) -> None:
            engines.train(trained, step)
            if step:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.01)
            row.tensors = sync.push(verify=True).tensors
            pushed[:] = answers = engines.ask(llm)
            check(row, engines, answers, trained)
            if moved(before, answers) < 1e-3:
                raise ValueError("the adapter changes nothing")

        row.merged = said(push)
        if row.merged != "right":
            return
    if lora:

        def push_adapter() -> None:
            engines.train(trained, 2)
            sync.push(mode="adapter")
            check(row, engines, engines.ask(llm, sync.lora_request()), trained)

        row.adapter = said(push_adapter)


def moved(before: Sequence[Any], after: Sequence[Any]) -> float:
    """How far the log-prob of the first token moved; infinite where it is another token."""
    far = 0.0
    for one, other in zip(before, after, strict=True):
        (first, was), (second, now) = ((o.outputs[0].token_ids[0], o.outputs[0].logprobs[0]) for o in (one, other))
        far = max(far, float("inf") if first != second else abs(was[first].logprob - now[second].logprob))
    return far


def said(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except AssertionError as error:
        return f"{OTHER}: {str(error).splitlines()[0][:60]}"
    except Exception as error:
        return short(error)
    return "right"


def short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:300]}"


if __name__ == "__main__":
    main()
