"""ms-swift over several processes: its command line, ranks with an engine each, its rollout server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import models
import pytest
import swift_runs
import torch
from processes import spawn
from repository import ROOT, SUPPORT
from swift_runs import arguments, assert_untouched, training
from torch import Tensor

from lora_merge import MergedWeights, PushFailed, PushRefused
from lora_merge.integrations.metrics import PolicyGap
from lora_merge.integrations.ms_swift import PLUGIN
from lora_merge.integrations.ms_swift.delivery import Served
from lora_merge.integrations.options import Options
from tests.shards.test_shards_merge import fsdp2

nothing_set = swift_runs.nothing_set
EXACT = 1e-4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return swift_runs.checkpoint(swift_runs.qwen2(tied=False), tmp_path_factory.mktemp("swift") / "base")


def environment(**more: str) -> dict[str, str]:
    """For a process of swift's; this package and its tests come first."""
    paths = [str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", ""), str(swift_runs.NAMED)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LORA_MERGE")}
    return clean | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | more


def swift(*line: str, **more: str) -> str:
    """Run a command line of swift's to its end; what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "swift.cli.main", *line], env=environment(**more), text=True, capture_output=True,
        timeout=500, cwd=more.get("PWD"),
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout + done.stderr


def logged(out: Path) -> list[dict[str, Any]]:
    """What swift wrote of each step."""
    lines = [json.loads(line) for line in (out / "logging.jsonl").read_text().splitlines()]
    return [line for line in lines if "lora_merge/version" in line]


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """swift's rollout server of the base; its port."""
    port, log = swift_runs.port(), tmp_path_factory.mktemp("server") / "log"
    line = ["rollout", "--model", str(base), "--model_type", "qwen2", "--template", "qwen2_5", "--host", "127.0.0.1",
            "--port", port, "--external_plugins", str(SUPPORT / "swift_server.py"), "--vllm_max_model_len", "160",
            "--vllm_enforce_eager", "true", "--torch_dtype", "float32", "--use_hf", "true", "--max_length", "128",
            "--vllm_use_async_engine", "false"]  # fmt: skip
    with log.open("w") as out:
        running = subprocess.Popen(
            [sys.executable, "-m", "swift.cli.main", *line], env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0"),
            stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 120
        while not answers(port):
            assert running.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)
        yield port
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()


def answers(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture
def over_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer in this process talks to the server as it does, and does not look for it when this process ends."""
    import swift_server
    from swift.rlhf_trainers import vllm_client

    monkeypatch.setattr(vllm_client, "PyNcclCommunicator", swift_server.OverStore)
    monkeypatch.setattr(vllm_client, "atexit", SimpleNamespace(register=lambda work: None))


def at(server: str) -> dict[str, str]:
    """Flags of a trainer."""
    return {"vllm_mode": "server", "vllm_server_host": "127.0.0.1", "vllm_server_port": server, "max_steps": "3",
            "vllm_server_group_port": swift_runs.port()}  # fmt: skip


@pytest.mark.usefixtures("over_store")
@pytest.mark.parametrize("later", ["false", "true"])
def test_a_stream_into_the_rollout_server(
    later: str, server: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through swift's own transport; with --async_generate the answers are those of the policy one step before."""
    if later == "false":
        monkeypatch.setenv("LORA_MERGE_CHECK", "1")
    with training(arguments("grpo", base, tmp_path, **at(server), async_generate=later)) as trainer:
        steps = [line for line in trainer.state.log_history if "lora_merge/version" in line]
        assert [step["lora_merge/version"] for step in steps] == [1, 2, 3]
        assert all(step["lora_merge/tensors"] == steps[0]["lora_merge/tensors"] > 20 for step in steps)
        assert_untouched(trainer.model, base)
        if later == "false":
            ratios = [step[f"lora_merge/ratio_{kind}"] for step in steps for kind in ("min", "max")]
            assert len(ratios) == 6
            assert all(abs(ratio - 1) < EXACT for ratio in ratios), ratios
            print(f"server: ratios {min(ratios):.7f} to {max(ratios):.7f}")


@pytest.mark.usefixtures("over_store")
def test_a_server_that_drops_what_it_gets(
    server: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where loading fails, swift's server says so to its log, and the trainer goes on; the check does not."""

    def drop(trainer: Any) -> None:
        trainer._lora_merge._load = lambda tensors: None

    monkeypatch.setenv("LORA_MERGE_CHECK", "1")
    with pytest.raises(PolicyGap, match="rank 0: the engine does not answer as the policy"):
        swift_runs.train(arguments("grpo", base, tmp_path, **at(server)), drop)


def test_the_command_line(base: Path, tmp_path: Path) -> None:
    """`swift rlhf`, with the path that `python -m lora_merge.integrations.ms_swift` prints, logs each push."""
    line = arguments("grpo", base, tmp_path, max_completion_length="6")
    told = swift("rlhf", *line, LORA_MERGE_CHECK="1")
    assert told.count("lora_merge takes over GRPOTrainer._move_model_to_vllm") == 1
    steps = logged(tmp_path)
    assert [step["lora_merge/version"] for step in steps] == [1, 2]
    assert all(abs(step[f"lora_merge/ratio_{kind}"] - 1) < EXACT for step in steps for kind in ("min", "max"))


ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 1100,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "zero_allow_untested_optimizer": True,
}


@pytest.mark.parametrize("kind", ["ddp", "zero3"])
def test_two_ranks(kind: str, base: Path, tmp_path: Path) -> None:
    """torchrun, gloo, DDP or ZeRO-3, an engine in each rank's process: both hold what the files of the first step's
    checkpoint make in float64, and answer as the policy. (accelerate knows no FSDP on CPUs; FSDP2 with an engine a rank
    is in test_vllm_launcher.py.)"""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    flags = {"per_device_train_batch_size": "2", "save_strategy": "steps", "save_steps": "1",
             "external_plugins": [swift_runs.REWARDS, str(SUPPORT / "swift_ranks.py"), str(PLUGIN)]}  # fmt: skip
    more = {}
    if kind == "zero3":
        flags["deepspeed"] = json.dumps(ZERO3)
        libraries = str(ROOT / ".venv" / "libraries")  # where `make` puts DeepSpeed
        more = {"DS_ACCELERATOR": "cpu", "PYTHONPATH": os.pathsep.join([environment()["PYTHONPATH"], libraries])}
    line = arguments("grpo", base, tmp_path, **flags)
    told = swift(
        "rlhf", *line, NPROC_PER_NODE="2", MASTER_PORT=swift_runs.port(), LORA_MERGE_CHECK="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0", SWIFT_KEPT=str(tmp_path), **more,
    )  # fmt: skip
    assert told.count("lora_merge takes over GRPOTrainer._move_model_to_vllm") == 1
    assert f"partitioned: {kind == 'zero3'}" in told
    steps = logged(tmp_path)
    assert [step["lora_merge/version"] for step in steps] == [1, 2]
    ratios = [step[f"lora_merge/ratio_{kind}"] for step in steps for kind in ("min", "max")]
    assert all(abs(ratio - 1) < EXACT for ratio in ratios), ratios
    files = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wanted = swift_runs.policy(PeftModel.from_pretrained(files, tmp_path / "checkpoint-1"))
    for rank in range(2):
        kept = torch.load(tmp_path / f"{rank}-2.pt")
        worst = swift_runs.assert_is(kept, wanted)
    print(
        f"two ranks, {kind}: ratios {min(ratios):.7f} to {max(ratios):.7f}, engine: {worst:.2f} of what rounding allows"
    )


def streams(rank: int) -> None:
    """A sharded model into a server that breaks off in the middle; the next push is whole."""
    sent: dict[str, Tensor] = {}
    faults = ["injected"]

    def load(tensors: Mapping[str, Tensor]) -> None:
        if len(sent) > 3 and faults:
            raise RuntimeError(faults.pop())
        sent.update({name: tensor.clone() for name, tensor in tensors.items()})

    build = {"target_modules": engines.LINEARS}
    model, whole = fsdp2(models.with_lora(engines.qwen2, **build)), models.with_lora(engines.qwen2, **build)
    finished: list[bool] = []
    served = Served(load, (lambda: finished.append(True)) if rank == 0 else None, Options())
    served._weights = MergedWeights(model, bucket_bytes=1 << 15)
    if rank:
        faults.clear()
    told = "the server may hold a part of an update" if rank == 0 else "trainer rank 0: .*injected"
    with pytest.raises(PushFailed, match=told):
        served.push(model)
    with pytest.raises(PushRefused, match="push first"):
        served.check()
    assert not finished
    sent.clear()
    report = served.push(model)
    served.check()
    assert report.version == 2
    assert bool(sent) == bool(finished) == (rank == 0)
    if rank == 0:
        assert report.tensors == len(sent)
        swift_runs.assert_is(sent, swift_runs.policy(whole))


def test_a_sharded_model_into_a_server_that_breaks_off() -> None:
    """No rank is left waiting, and what the server may hold a part of answers nothing."""
    spawn(2, streams)
