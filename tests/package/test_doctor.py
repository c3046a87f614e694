"""`lora-merge doctor` says what runs, why nothing faster, and what to do."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lora_merge import cli, doctor
from lora_merge.kernels import backend
from lora_merge.kernels.bindings import native
from lora_merge.kernels.cuda import backend as cuda
from lora_merge.kernels.cuda import hopper as cuda_hopper
from lora_merge.kernels.triton import merge_kernels

HINT = f"{native.BUILD_HINT} and nvcc"


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends are picked once in a process, for whoever asks first."""
    backend._default.cache_clear()
    backend._first.cache_clear()


def rows() -> dict[str, str]:
    return dict(doctor.examine().rows)


def test_a_machine_where_all_is_well() -> None:
    done = subprocess.run([sys.executable, "-m", "lora_merge", "doctor"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch" in done.stdout
    assert done.stdout.rstrip().endswith("nothing to do")


def test_without_the_compiled_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(native, "load_error", lambda: "the compiled extension is missing; build it")
    with pytest.warns(RuntimeWarning, match="slower reference backend"):
        assert cli.main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "reference, as cpu: the compiled extension is missing" in told
    assert "to do: install a platform wheel" in told


def gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built: tuple[str, ...]) -> None:
    """A GPU by what torch would say of it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    properties = SimpleNamespace(shared_memory_per_block_optin=99 << 10, shared_memory_per_multiprocessor=100 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(native, "has_cuda", lambda: True)
    monkeypatch.setattr(native, "architectures", lambda: built)
    monkeypatch.setattr(native, "cuda_problem", lambda: None)
    monkeypatch.setattr(backend, "pick", lambda device: cuda if device.type == "cuda" else doctor.cpu)


def test_gpus_and_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (9, 0), ("80", "90a"))
    found = rows()
    assert found["GPU 0"] == "a GPU, compute capability 9.0: cuda"
    assert "compute capability 9 (tensor maps" in found["  16-bit weights"]
    assert found["    rows of no whole 16 bytes"] == found["  float32 weights"] == "portable kernel (cp.async, mma)"
    assert "decodes" in found["  quantised weights"]
    assert "results of 8 bits" in found["  results of 8 bits"]
    monkeypatch.setattr(cuda_hopper, "_available", lambda device: False)
    assert "compiled without 9.0a" in rows()["    why"]
    gpu(monkeypatch, (8, 9), ("80",))
    assert rows()["  16-bit weights"] == "portable kernel (cp.async, mma)"
    assert rows()["  results of 8 bits"].startswith("merged to 16 bits first")


def test_a_module_for_cpus_alone_says_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why it has no kernels for GPUs (no nvcc, LORA_MERGE_CUDA=0), it does not know."""
    monkeypatch.setattr(native, "has_cuda", lambda: False)
    assert rows()["compiled"].endswith("GPU architectures: none (it has kernels for CPUs alone)")
    assert cuda.unavailable(torch.device("cuda")) == f"the compiled extension was built for CPUs alone; {HINT}"


def test_a_gpu_that_no_code_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, (12, 0), ("80", "90a"))
    monkeypatch.setattr(backend, "pick", lambda device: doctor.triton if device.type == "cuda" else doctor.cpu)
    found = doctor.examine()
    assert "triton, as cuda: the compiled extension was built for 80, 90a" in dict(found.rows)["GPU 0"]
    assert any("12.0" in one for one in found.todo)


def test_a_gpu_of_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told from NVIDIA's by torch, whatever numbers it gives it: a MI250 has compute capability 9.0 there."""
    picked = backend.pick
    gpu(monkeypatch, (9, 0), ("80", "90a"))
    monkeypatch.setattr(backend, "pick", picked)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(gcnArchName="gfx90a"))
    monkeypatch.setattr(merge_kernels, "INTERPRETED", SimpleNamespace(value=False))
    with pytest.warns(RuntimeWarning, match="slower triton backend for cuda tensors: cuda: it is for NVIDIA GPUs"):
        found = doctor.examine()
    told = dict(found.rows)
    assert told["torch"].endswith("ROCm 6.4")
    assert told["GPU 0"].startswith("a GPU, gfx90a: triton, as cuda: it is for NVIDIA GPUs")
    assert "have not run yet" in told["GPU 0"]
    assert "  16-bit weights" not in told
    assert not [one for one in found.todo if "cuda" in one]


@pytest.mark.parametrize(
    ("entries", "allowed", "told", "todo"),
    [
        (["lora_merge"], None, "finds", ""),
        (["lora_merge"], "lora_merge,other", "finds", ""),
        (["lora_merge"], "other", "is told to leave", "add lora_merge to VLLM_PLUGINS"),
        (["other"], None, "does not see", "has no entry point"),
    ],
)
def test_whether_vllm_sees_the_plugin(
    entries: list[str], allowed: str | None, told: str, todo: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0" if name in ("vllm", "trl") else None)
    monkeypatch.setattr(doctor, "entry_points", lambda group: [SimpleNamespace(name=name) for name in entries])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if allowed is not None:
        monkeypatch.setenv("VLLM_PLUGINS", allowed)
    found = doctor.examine()
    assert told in dict(found.rows)["vLLM"]
    assert dict(found.rows)["trl"].startswith("1.0; LORA_MERGE=1 trl grpo")
    assert any(todo in one for one in found.todo) if todo else not found.todo
    monkeypatch.setenv("LORA_MERGE", "0")
    assert rows()["trl"] == "1.0; LORA_MERGE=0 switches it off"
    monkeypatch.setenv("LORA_MERGE", "perhaps")  # a trainer would end in this
    assert any("LORA_MERGE must be 1 or 0, got 'perhaps'" in one for one in doctor.examine().todo)
    monkeypatch.setenv("LORA_MERGE_CHEKC", "1")
    assert any("nothing reads it, LORA_MERGE_CHECK?" in one for one in doctor.examine().todo)
