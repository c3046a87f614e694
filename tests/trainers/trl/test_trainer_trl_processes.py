"""TRL as users start it: its command line, with an engine in the trainer's process and with a server, two ranks, and
the example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
import trl_training
from repository import ROOT, SUPPORT
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trl_training.checkpoint(tmp_path_factory.mktemp("trl") / "base")


def run(command: Sequence[str], folder: Path, **environment: str) -> str:
    """Run Python; returns what it printed."""
    paths = [str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    chosen = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONWARNINGS": "ignore",
    }
    # A trainer that ran in this process has left its place among ranks in the environment.
    places = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in places}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=inherited | chosen | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


TRL = ("-c", "from trl.cli import main; main()")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def command_line(
    script: str, base: Path, folder: Path, *flags: str, launcher: Sequence[str] = TRL, **environment: str
) -> tuple[str, list[Any]]:
    """Run `trl SCRIPT` for two steps, or what it runs by another launcher; returns what it printed and its history."""
    found = {plugin.name for plugin in entry_points(group="vllm.platform_plugins")}
    assert "lora_merge" in found, "this environment was made before that entry point: make it anew"
    (folder / "data").mkdir(exist_ok=True)
    rows = [json.dumps({"prompt": trl_training.LETTERS[i % 5 : i % 5 + 3]}) for i in range(16)]
    (folder / "data" / "train.jsonl").write_text("\n".join(rows))
    given = {
        "model_name_or_path": base,
        "dataset_name": "data",
        "vllm_max_model_length": 64,
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "max_completion_length": 6,
        "logging_steps": 1,
        "report_to": "none",
        "save_steps": 1,
        "output_dir": folder / "out",
        "learning_rate": 1e-2,
        "bf16": False,
        "lora_target_modules": "all-linear",
    }
    if script != "distillation":
        given |= {"reward_funcs": "trl_rewards.vowels", "num_generations": 2}
    started = [script] if launcher == TRL else ["-m", f"trl.scripts.{script}"]
    arguments = [*launcher, *started, "--use_peft", "--use_vllm", "--use_cpu", *flags]
    for name, value in given.items():
        arguments += [f"--{name}", str(value)]
    printed = run(arguments, folder, LORA_MERGE="1", LORA_MERGE_VERIFY="", **environment)
    state = json.loads((folder / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    return printed, [entry for entry in state["log_history"] if "lora_merge/version" in entry]


SCRIPTS = [("grpo", "merged"), ("rloo", "adapter"), ("distillation", "merged"), ("grpo", "adapter")]


@pytest.mark.parametrize(("script", "mode"), SCRIPTS)
def test_command_line(script: str, mode: str, base: Path, tmp_path: Path) -> None:
    environment = {"LORA_MERGE_MODE": mode} | ({"LORA_MERGE_CHECK": "1"} if script == "grpo" else {})
    flags = {"distillation": ["--teacher_model_name_or_path", str(base)], "grpo": ["--disable_dropout"]}.get(script, [])
    trained = (script, mode) == ("grpo", "merged")
    if trained:
        environment["LORA_MERGE_TRAIN"] = "merged"
    printed, history = command_line(script, base, tmp_path, "--vllm_mode", "colocate", *flags, **environment)
    line = f"lora_merge takes over VLLMGeneration.sync_weights: {mode} pushes into the colocated engine of TRL"
    assert printed.count(line) == 1
    assert printed.count("lora_merge trains the policy of TRL 1.16.0 on its merged weights") == int(trained)
    assert [entry["lora_merge/version"] for entry in history] == [1, 2]
    assert [entry["lora_merge/merged"] for entry in history] == 2 * [float(mode == "merged")]
    if script == "grpo":  # TRL's engine computes in half precision here, the trainer in float32
        assert all(abs(entry["lora_merge/ratio_mean"] - 1) < 0.02 for entry in history)


def test_qlora(base: Path, tmp_path: Path) -> None:
    """TRL would have vLLM quantise the weights of the engine, too, and nothing could be pushed to it."""
    flags = ("--vllm_mode", "colocate", "--load_in_4bit", "--disable_dropout")
    printed, history = command_line("grpo", base, tmp_path, *flags, LORA_MERGE_CHECK="0.1")
    assert (
        printed.count("lora_merge takes over VLLMGeneration.sync_weights: merged pushes into the colocated engine") == 1
    )
    assert [entry["lora_merge/version"] for entry in history] == [1, 2]
    assert [entry["lora_merge/coverage"] for entry in history] == [1, 1]


def test_server(base: Path, tmp_path: Path) -> None:
    """TRL's script on two ranks, which train on merged weights, and a real server, which answers TRL's own client;
    trl_rewards.py replaces NCCL."""
    from tests.vllm.test_vllm_processes import Server

    server = Server(base, tmp_path / "server.log", "--logprobs-mode", "processed_logprobs", tokenizer=True)
    try:
        server.wait()
        printed, history = command_line(
            "grpo",
            base,
            tmp_path,
            *("--vllm_mode", "server", "--vllm_server_base_url", server.url, "--disable_dropout"),
            launcher=TORCHRUN,
            LORA_MERGE_CHECK="1",
            LORA_MERGE_TRAIN="merged",
            TRL_STREAMS=str(tmp_path),
            TRL_BASE=str(base),
        )
    finally:
        server.close()
    assert printed.count("lora_merge takes over VLLMGeneration._iter_named_params: merged weights over TRL's own") == 1
    for step, entry in enumerate(history):
        assert entry["lora_merge/version"] == step + 1
        assert max(abs(entry[f"lora_merge/ratio_{end}"] - 1) for end in ("min", "max")) < 1e-4
    # What the second sync sent is the first checkpoint's adapter on the base.
    sent = torch.load(tmp_path / "stream-1.pt", weights_only=True)
    wanted = checkpoint_merge(base, tmp_path / "out" / "checkpoint-1")
    assert sent.keys() == wanted.keys()
    for name, exact in wanted.items():
        assert (sent[name].double() - exact).abs().max() <= 2**-22 * exact.abs().max(), name


def checkpoint_merge(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Base and adapter out of their files, merged in float64."""
    from peft import PeftModel

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base).double(), adapter).double()
    merged = model.merge_and_unload()
    return {name: parameter.detach() for name, parameter in merged.named_parameters()}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero3"])
def test_two_ranks(kind: str, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """trl_ranks.py compares each rank's engine with the policy in float64."""
    (tmp_path / "base").symlink_to(base)
    run([*TORCHRUN, str(SUPPORT / "trl_ranks.py"), kind, str(tmp_path)], tmp_path)
    for rank in range(2):
        seen = json.loads((tmp_path / f"{kind}.{rank}.json").read_text())
        assert seen["changed"] == 0
        assert seen["trained"] > 0
        wrapped = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPPeftModel", "zero3": "DeepSpeedEngine"}
        assert seen["wrapped"] == wrapped[kind]
        if rank == 0:  # which logs
            history = [entry for entry in seen["history"] if "lora_merge/version" in entry]
            assert [entry["lora_merge/version"] for entry in history] == [1, 2, 3]
            off = max(abs(entry[f"lora_merge/ratio_{end}"] - 1) for entry in history for end in ("min", "max"))
            assert off < 1e-4
            with capsys.disabled():
                print(f"\n{kind}, two ranks: importance ratios off by {off:.1e} at most")


def test_example(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "trl_grpo.py")
    printed = run([example, "--out", "out", "--mode", "adapter", "--steps", "3"], tmp_path)
    assert "last push: adapter@3 over local" in printed
    assert "3 steps, importance ratios up to 1.0000" in printed
