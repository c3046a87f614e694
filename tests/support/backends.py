"""The backends that tests run on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

GPU = torch.cuda.is_available()


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


def forced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """The backend that a fixture was given one of `BACKENDS` for."""
    name, device = request.param
    monkeypatch.setenv("LORA_MERGE_BACKEND", name)
    found = Backend(name, torch.device(device, 0) if device == "cuda" else torch.device(device))
    if found.interpreted:
        import interpreter  # noqa: F401
    return found
