"""How tests run: the fixtures that all of them see, and how hypothesis draws."""

from __future__ import annotations

import os
from collections.abc import Generator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

# Read when torch loads: OpenMP threads that wait do not burn the core that another process needs.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import first_calls  # noqa: F401  settles what the first cosines of this process are
import pytest
import thread_state
from backends import BACKENDS, GPU, Backend, forced
from hypothesis import HealthCheck, settings

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
        if any(fnmatchcase(f"{item.path.name}::{item.nodeid.partition('::')[2]}", pattern) for pattern in patterns):
            item.add_marker(pytest.mark.whole)


def pytest_collection_finish() -> None:
    import garbage  # noqa: F401


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What one test leaves the thread's torch with does not fail the tests after it."""
    try:
        return (yield)
    finally:
        thread_state.restore(item.nodeid)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Each backend in turn, forced."""
    return forced(request, monkeypatch)


@pytest.fixture(autouse=True)
def own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests does not choose the backend."""
    monkeypatch.delenv("LORA_MERGE_BACKEND", raising=False)
