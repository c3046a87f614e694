"""Which backends the tests run on, and how hypothesis draws."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

# Read when torch loads: OpenMP threads that wait do not burn the core that another process needs.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import first_calls  # noqa: F401  settles what the first cosines of this process are
import pytest
import torch
from hypothesis import HealthCheck, settings

GPU = torch.cuda.is_available()
if not GPU and find_spec("sglang") is not None:
    import sglang_cpu  # before transformers imports torchvision

    sglang_cpu.operators()
if not GPU:
    # Read when triton is imported, which nothing has done so far: the Triton kernels then run on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile(
    "lora_merge",
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("lora_merge")


def pytest_configure(config: pytest.Config) -> None:
    # numpy speaks up where the interpreter computes with infinities and NaN, as the tests want it to.
    config.addinivalue_line("filterwarnings", "ignore:(overflow|invalid value) encountered:RuntimeWarning:triton")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `.ci/run` leaves to `make test-all`."""
    lines = Path(__file__).with_name("whole.txt").read_text().splitlines()
    patterns = [line for line in lines if line and not line.startswith("#")]
    for item in items:
        if any(fnmatchcase(item.nodeid.removeprefix("tests/"), pattern) for pattern in patterns):
            item.add_marker(pytest.mark.whole)


@dataclass(frozen=True)
class Backend:
    """A backend that LORA_MERGE_BACKEND forces, and where its tensors lie."""

    name: str
    device: torch.device

    @property
    def interpreted(self) -> bool:
        """Triton's interpreter takes milliseconds for each tile: tests give it fewer and smaller cases."""
        return self.name == "triton" and self.device.type == "cpu"

    @property
    def compiled(self) -> bool:
        return self.name != "reference" and not self.interpreted


# On a GPU machine Triton compiles, so its interpreter is tested on machines without one.
ON_CPU = ("reference", "cpu") if GPU else ("reference", "cpu", "triton")
ON_GPU = ("reference", "cuda", "triton")

BACKENDS = [pytest.param((name, "cpu"), id=name) for name in ON_CPU] + [
    pytest.param((name, "cuda"), id=f"{name}-gpu", marks=pytest.mark.gpu) for name in ON_GPU
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Each backend in turn, forced."""
    return forced(request, monkeypatch)


def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend that a fixture was given one of `BACKENDS` for."""
    name, device = request.param
    monkeypatch.setenv("LORA_MERGE_BACKEND", name)
    return Backend(name, torch.device(device, 0) if device == "cuda" else torch.device(device))


@pytest.fixture(autouse=True)
def own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests does not choose the backend."""
    monkeypatch.delenv("LORA_MERGE_BACKEND", raising=False)
