"""How far the log-probs of engines that quantise what they load lie from the trainer's, and how long a push takes.

    python benchmarks/quantised_engines.py --json benchmarks/results/quantised-engines-cpu.json
    python benchmarks/quantised_engines.py --device cuda --models grpo grpo-128 qwen2.5-0.5b small-moe --json FILE
    python benchmarks/quantised_engines.py --device cuda --models --time qwen2.5-7b --json FILE

For each model and each format an engine starts in this process with random weights, gets the merged weights of one
policy by a push, and samples at temperature 1; `verify.logprob_gap` lines its log-probs up with the trainer's. The
policies, in bfloat16: `grpo` is the base that examples/grpo.py teaches, with a random adapter (its hidden size, 64, is
not divided by blocks of 128; that of `grpo-128` is); the others have random weights of a shape of sync.py, whose
answers are nearly uniform. vLLM's INT8 covers experts alone and is skipped where there are none. A format that vLLM has
no kernel for here is recorded with its reason. `--time` takes the times of pushes, too, in multiples of a copy of what
is read and written (bf16, and 8 bits where the engine has these), and beside them those of vLLM's own reload of each
layer. Where verl can be imported, an engine on a checkpoint of FP8 blocks takes verl's own update, too: its worker
quantises whole tensors, merged before and not part of the time, and loads them by the methods that it patches
(`verl_fp8.py`); a push into the same kind of engine is beside it. The JSON is written after every engine.

Where an engine fails, `phase` says in what: its start, a push, what it generates, or the trainer's forward. A GPU is
waited for at the end of each. After a CUDA error the others of a run may fail because of it: run the format that failed
by itself (`--formats mxfp8`).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import sync
import torch
from torch import Tensor, nn

from lora_merge.bench import report

EXPERTS_ALONE = "int8_per_channel_weight_only"
CHECKPOINT = "checkpoint"
"""An engine on a checkpoint that is FP8 in blocks of 128 x 128 already, in the place of vLLM's `quantization`."""
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
FORMATS = ["none", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "mxfp8", EXPERTS_ALONE]
GRPO = {"grpo": 64, "grpo-128": 128}
"""Hidden sizes of the bases that examples/grpo.py teaches."""
BAND = 0.02
"""How far an importance ratio may be from 1 before a correction is worth having."""
PROMPTS, PROMPT, RESPONSE = 64, 16, 32


def main() -> None:
    args = arguments()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sync.quiet()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
    import vllm

    record = report.provenance(torch.device(args.device)) | {"rank": args.rank, "band": BAND, "gaps": [], "pushes": []}
    record["versions"]["vllm"] = vllm.__version__
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            model, prompts, response = policy(name, args, Path(folder))
            for quantization in args.formats:
                if quantization == EXPERTS_ALONE and "num_experts" not in sync.SHAPES.get(name, {}):
                    continue
                found = guarded(gap_of, model, prompts, response, Path(folder), quantization, args)
                record["gaps"].append({"model": name, "format": quantization} | found)
                tell(record["gaps"][-1], record, args)
            del model
            free()
    if args.time:
        args.shape = args.time
        model = sync.build_policy(args.time, args.rank, args.device)
        for quantization in args.formats:
            for way in ("written", "reloaded")[: 1 if quantization == "none" else 2]:
                found = guarded(times_of, model, quantization, way, args)
                record["pushes"].append({"model": args.time, "format": quantization, "way": way} | found)
                tell(record["pushes"][-1], record, args)
        for way, run in {"lora_merge": times_of, "verl, of merged weights": verls_times}.items():
            found = guarded(run, model, CHECKPOINT, "written", args)
            record["pushes"].append({"model": args.time, "format": "checkpoint of FP8 blocks", "way": way} | found)
            tell(record["pushes"][-1], record, args)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="*", default=["grpo"], help="grpo, grpo-128, or shapes of sync.py")
    parser.add_argument("--formats", nargs="+", default=FORMATS, help="vLLM's `quantization`, and none")
    parser.add_argument("--time", choices=list(sync.SHAPES), help="take the times of pushes of this shape")
    parser.add_argument("--rank", type=int, default=32, help="of the adapters")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--gpu-memory", type=float, default=0.4, help="share of the device that an engine may take")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def tell(found: dict[str, Any], record: dict[str, Any], args: argparse.Namespace) -> None:
    print(json.dumps(found), flush=True)
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def guarded(run: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """What a run finds, or why vLLM cannot do it here, and in which phase that came up."""
    try:
        return run(*args)
    except Exception as error:
        first = cause(error)
        said = " ".join(f"{type(first).__name__}: {first}".split())
        return {"phase": getattr(first, "phase", "other"), "failed": said[:300]}
    finally:
        with suppress(RuntimeError):  # what broke the GPU was noted
            free()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """What fails in here, on the GPU too, says in which phase it did."""
    try:
        yield
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:
        error.phase = name  # type: ignore[attr-defined]
        raise


def cause(error: BaseException) -> BaseException:
    """The error of a phase, where another one came up while what it left was cleared away."""
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(before)
    return next((one for one in reversed(chain) if hasattr(one, "phase")), error)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Policies


def policy(name: str, args: argparse.Namespace, folder: Path) -> tuple[nn.Module, list[list[int]], int]:
    """A PEFT model in bf16 (its base's config lies in a folder), prompts, and how many tokens it answers with."""
    g = torch.Generator().manual_seed(0)
    if name in GRPO:
        return grpo(args, folder, g, GRPO[name])
    model = sync.build_policy(name, args.rank, args.device)
    sync.config_of(name).save_pretrained(folder / "base")
    size = sync.SHAPES[name]["vocab_size"]
    return model, torch.randint(10, size, (PROMPTS, PROMPT), generator=g).tolist(), RESPONSE


def grpo(
    args: argparse.Namespace, folder: Path, g: torch.Generator, hidden: int = 64
) -> tuple[nn.Module, list[list[int]], int]:
    """The policy of examples/grpo.py, its base taught, its adapter random."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    example: Any = import_module("grpo")
    example.pretrain(folder / "base", torch.device(args.device), 400, hidden)
    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.bfloat16).to(args.device)
    torch.manual_seed(0)
    lora = LoraConfig(r=args.rank, target_modules=sync.LINEARS, init_lora_weights=False)
    model = get_peft_model(base, lora).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.mul_(0.1)
    return model, example.draw_prompts(4 * PROMPTS, g).tolist(), example.RESPONSE


# Engines


@contextmanager
def engine(folder: Path, quantization: str, args: argparse.Namespace) -> Iterator[Any]:
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    options: dict[str, Any] = {} if quantization in ("none", CHECKPOINT) else {"quantization": quantization}
    if quantization == CHECKPOINT:
        options["hf_overrides"] = {"quantization_config": FP8_BLOCKS}
    options |= {"gpu_memory_utilization": args.gpu_memory}
    if args.device == "cuda":
        options |= {"kv_cache_memory_bytes": 1 << 30}
    with phase("start"):
        llm = LLM(
            str(folder), load_format="dummy", dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True,
            max_model_len=64, max_num_seqs=64, weight_transfer_config=WeightTransferConfig(backend="lora_merge"),
            **options,
        )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        free()
        cleanup_dist_env_and_memory()


def gap_of(
    model: nn.Module, prompts: list[list[int]], response: int, folder: Path, quantization: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Log-probs of sampled answers, in an engine and in the trainer."""
    from vllm import SamplingParams

    from lora_merge import VllmSync
    from lora_merge.verify import logprob_gap

    sampling = SamplingParams(max_tokens=response, logprobs=0, ignore_eos=True, detokenize=False, seed=0)
    with engine(folder / "base", quantization, args) as llm, closing(VllmSync(model, llm)) as pushing:
        with phase("push"):
            pushing.push()
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        with phase("generate"):
            answers = [output.outputs[0] for output in llm.generate(asked, sampling, use_tqdm=False)]
    rollout = [
        [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        for answer in answers
    ]
    tokens = torch.tensor([[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)])
    with phase("the trainer's forward"):
        own = log_probs(model, tokens, args.device)
    gap = logprob_gap(
        own, rollout, shifted=True, prompt_width=len(prompts[0]), response_lengths=[response] * len(prompts)
    )
    ratios = torch.cat(gap.ratios).cpu()
    low, middle, high = (float(ratios.quantile(q)) for q in (0.01, 0.5, 0.99))
    return {
        "tokens": gap.tokens,
        "gap_max": gap.maximum,
        "gap_mean": gap.mean,
        "ratio_range": gap.ratio_range,
        "ratio_mean": gap.ratio_mean,
        "ratio_quantiles": {"0.01": low, "0.5": middle, "0.99": high},
        "outside_band": float(((ratios - 1).abs() > BAND).float().mean()),
    }


def log_probs(model: nn.Module, tokens: Tensor, device: str) -> Tensor:
    """`[N, T]`, float32: entry t is the trainer's log-prob of token t + 1."""
    found = []
    for rows in tokens.split(16):
        with torch.no_grad():
            logps = model(input_ids=rows.to(device), use_cache=False).logits[:, :-1].float().log_softmax(-1)
        found.append(logps.gather(-1, rows[:, 1:, None].to(device)).squeeze(-1).cpu())
    return nn.functional.pad(torch.cat(found), (0, 1))


def times_of(model: nn.Module, quantization: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Pushes into an engine in this process, beside one large copy of the bytes that cross."""
    from lora_merge import VllmSync

    with tempfile.TemporaryDirectory() as folder, loading(way):
        sync.config_of(args.time).save_pretrained(folder)
        with engine(Path(folder), quantization, args) as llm, closing(VllmSync(model, llm)) as pushing:
            with phase("push"):
                found = sync.pushes(pushing, args.repeats, "merged")
            held = sum(p.nbytes for p in served(llm).parameters())
            copy = sync.copy_ms((found["bytes"] + held) // 2, args.device, args.repeats)
            return found | {"held_bytes": held, "copy_ms": copy, "x_copy": found["merge_and_load_ms"] / copy}


def verls_times(model: nn.Module, quantization: str, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """verl's updates of such an engine, beside one large copy."""
    import verl_fp8

    from lora_merge import MergedWeights
    from lora_merge.bench import timing

    with tempfile.TemporaryDirectory() as folder, verl_fp8.patched():
        sync.config_of(args.time).save_pretrained(folder)
        with engine(Path(folder), quantization, args) as llm:
            merged = {name: tensor.clone() for name, tensor in MergedWeights(model)}
            nbytes = sum(tensor.nbytes for tensor in merged.values())
            device = torch.device(args.device)
            with phase("push"):
                runner = worker_of(llm).model_runner
                runs = [
                    timing.milliseconds(lambda: verl_fp8.update(merged, runner), device) for _ in range(args.repeats)
                ]
            held = sum(p.nbytes for p in served(llm).parameters())
            copy = sync.copy_ms((nbytes + held) // 2, args.device, args.repeats)
            spent = timing.typical(device)(runs)
            return {"bytes": nbytes, "total_ms": spent, "held_bytes": held, "copy_ms": copy, "x_copy": spent / copy}


def worker_of(llm: Any) -> Any:
    """Of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker


def served(llm: Any) -> nn.Module:
    """The model of an engine in this process."""
    model: nn.Module = worker_of(llm).get_model()
    return model


@contextmanager
def loading(way: str) -> Iterator[None]:
    """Layers that an engine quantises are written as they lie, or go through vLLM's own reload."""
    from lora_merge.engine.vllm.loading.direct import DirectLayers
    from lora_merge.stream.direct_targets import DirectTargets

    places = DirectLayers.targets
    if way == "reloaded":
        DirectLayers.targets = lambda *_: DirectTargets({})  # type: ignore[method-assign]
    try:
        yield
    finally:
        DirectLayers.targets = places  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
