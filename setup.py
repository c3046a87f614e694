"""Builds the compiled extension lora_merge._C; everything else about the package is in pyproject.toml.

csrc/library.cpp and csrc/cpu are always compiled; csrc/library_cuda*.cpp and csrc/cuda where torch was built for CUDA
and nvcc is found.
`LORA_MERGE_BUILD=0` installs without the extension; `TORCH_CUDA_ARCH_LIST` ("8.0;9.0+PTX", "Hopper") names GPU
architectures: default, those of the GPUs in this machine, or all of `DEFAULT` where there are none.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from setuptools import setup

HINT = "LORA_MERGE_BUILD=0 installs lora_merge without its compiled kernels"
DEFAULT = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0+PTX")
"""Where no GPU is visible. Code for the last is kept as PTX, too, which later GPUs compile for themselves."""
OLDEST = (8, 0)
"""The kernels need its matrix units and copies."""
NAMED = {
    **{old: ["0.0"] for old in ("kepler", "kepler+tesla", "maxwell", "maxwell+tegra", "pascal", "volta", "turing")},
    "ampere": ["8.0", "8.6"],
    "ampere+tegra": ["8.7"],
    "ada": ["8.9"],
    "hopper": ["9.0"],
    "blackwell": ["10.0", "10.3", "12.0", "12.1"],
    "blackwell+tegra": ["11.0"],
}
"""Names that torch.utils.cpp_extension takes for TORCH_CUDA_ARCH_LIST, too."""


def say(text: str) -> None:
    """On the console, where pip shows it with `-v`."""
    sys.stderr.write(f"lora_merge: {text}\n")


def architectures(wanted: str, gpus: list[tuple[int, int]], known: set[str]) -> list[str]:
    """What to build, as nvcc names it: "80", "90a", "120+PTX".

    What cannot be built is left out with a word: GPUs too old for the kernels, and those that this nvcc does not know.

    Args:
        wanted: TORCH_CUDA_ARCH_LIST.
        gpus: compute capabilities of the GPUs in this machine.
        known: what nvcc compiles for, "80".

    Raises:
        SystemExit: nothing is left, or an entry is not one of an architecture.
    """
    entries = [entry for entry in re.split(r"[\s;,]+", wanted) if entry]
    entries = entries or [f"{major}.{minor}" for major, minor in gpus] or list(DEFAULT)
    built = []
    for entry in entries:
        name = re.sub(r"\+ptx$", "", entry.lower())
        for number in NAMED.get(name, [name]):
            built += _architecture(number, entry, known)
    if not built:
        raise SystemExit(
            f"TORCH_CUDA_ARCH_LIST={wanted!r}: none of it can be built; the kernels are for compute capability 8.0 and "
            f"later, and this nvcc knows {', '.join(sorted(known))}. {HINT}"
        )
    return sorted(set(built), key=lambda a: (int(re.match(r"\d+", a)[0]), a))  # type: ignore[index]


def _architecture(number: str, entry: str, known: set[str]) -> list[str]:
    match = re.fullmatch(r"(\d+)\.(\d)([af]?)", number)
    if match is None:
        raise SystemExit(f"TORCH_CUDA_ARCH_LIST: expected numbers such as 8.0;9.0a, or Hopper, got {entry!r}")
    if (int(match[1]), int(match[2])) < OLDEST:
        say(f"TORCH_CUDA_ARCH_LIST: {entry!r} is left out: the kernels are for compute capability 8.0 and later")
        return []
    code = match[1] + match[2]
    if code not in known:
        say(f"{entry!r}: {number} is left out: this nvcc does not know it")
        return []
    suffix = "a" if code == "90" else match[3]  # TMA and wgmma are in the "a" set
    return [code + suffix, *([f"{code}{suffix}+PTX"] if entry.lower().endswith("+ptx") else [])]


def flags(built: list[str]) -> list[str]:
    """nvcc's, for each architecture."""

    def flag(name: str) -> str:
        number, ptx, _ = name.partition("+")
        return f"-gencode=arch=compute_{number},code={'compute' if ptx else 'sm'}_{number}"

    return [flag(name) for name in built]


def known_to(nvcc: Path) -> set[str]:
    """What an nvcc compiles for."""
    listed = subprocess.run([str(nvcc), "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"compute_(\d+)\b", listed))


def extension() -> dict[str, Any]:
    """setup()'s arguments for the extension."""
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError as error:
        raise SystemExit(
            f"torch cannot be imported ({error}): install it first, then build with "
            f"`pip install --no-build-isolation --no-deps .`; {HINT}"
        ) from error

    sources = ["csrc/library.cpp", *map(str, sorted(Path("csrc/cpu").glob("*.cpp")))]
    headers = [str(path) for path in sorted(Path("csrc").rglob("*.h*")) + sorted(Path("csrc").rglob("*.cuh"))]
    # OpenMP is what at::parallel_for runs on. No contraction: where a fused multiply-add is meant, it is written.
    # GCC 12 warns of uninitialised values in its own AVX-512 header.
    cxx = ["-O3", "-fopenmp", "-ffp-contract=off", "-Wall", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
    make, nvcc, macros = cpp_extension.CppExtension, [], []
    home = cpp_extension.CUDA_HOME
    compiler = home and shutil.which("nvcc", path=str(Path(home) / "bin"))
    if torch.version.cuda and compiler:
        make = cpp_extension.CUDAExtension
        sources += map(str, [*sorted(Path("csrc").glob("library_cuda*.cpp")), *sorted(Path("csrc/cuda").glob("*.cu"))])
        gpus = [torch.cuda.get_device_capability(gpu) for gpu in range(torch.cuda.device_count())]
        built = architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), gpus, known_to(Path(compiler)))
        nvcc = ["-O3", "-std=c++17", "-lineinfo", *flags(built)]
        macros = [("LORA_MERGE_CUDA_ARCHITECTURES", f'"{",".join(built)}"')]

    class Build(cpp_extension.BuildExtension):
        def build_extensions(self) -> None:
            compiler = os.environ.get("CXX", "c++").split()[0]
            if shutil.which(compiler) is None:
                raise SystemExit(f"no C++ compiler: {compiler!r} is not on the PATH; install g++ or set CXX; {HINT}")
            try:
                super().build_extensions()
            except Exception as error:
                raise SystemExit(f"lora_merge._C did not compile (see above): {error}\n{HINT}") from error

    module = make(
        "lora_merge._C",
        sources,
        depends=headers,
        define_macros=macros,
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=["-fopenmp"],
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": Build}}


if __name__ == "__main__":
    setup(**({} if os.environ.get("LORA_MERGE_BUILD") == "0" else extension()))
