"""Builds the compiled extension lora_merge._C; everything else about the package is in pyproject.toml.

csrc/library.cpp and csrc/cpu are always compiled; csrc/library_cuda*.cpp and csrc/cuda where torch was built for CUDA
and nvcc is found.
`LORA_MERGE_BUILD=0` installs without the extension; `TORCH_CUDA_ARCH_LIST` ("8.0;9.0") names GPU architectures.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from setuptools import setup

HINT = "LORA_MERGE_BUILD=0 installs lora_merge without its compiled kernels"


def cuda_architectures() -> list[str]:
    """nvcc's flags for TORCH_CUDA_ARCH_LIST, else for the GPUs in this machine, else for sm_80 and sm_90a."""
    import torch

    wanted = re.split(r"[\s;,]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip())
    if wanted == [""]:
        gpus = range(torch.cuda.device_count())
        wanted = [".".join(map(str, torch.cuda.get_device_capability(gpu))) for gpu in gpus] or ["8.0", "9.0"]
    flags = []
    for name in sorted(set(wanted)):
        match = re.fullmatch(r"(\d+)\.(\d[af]?)(\+PTX)?", name)
        if match is None:
            raise SystemExit(f"TORCH_CUDA_ARCH_LIST: expected numbers such as 8.0;9.0a, got {name!r}")
        number = match[1] + match[2]
        number = "90a" if number == "90" else number  # TMA and wgmma are in the "a" set
        flags.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if match[3]:
            flags.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return sorted(set(flags))


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
    make, nvcc = cpp_extension.CppExtension, []
    home = cpp_extension.CUDA_HOME
    if torch.version.cuda and home and shutil.which("nvcc", path=str(Path(home) / "bin")):
        make = cpp_extension.CUDAExtension
        sources += map(str, [*sorted(Path("csrc").glob("library_cuda*.cpp")), *sorted(Path("csrc/cuda").glob("*.cu"))])
        nvcc = ["-O3", "-std=c++17", "-lineinfo", *cuda_architectures()]

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
        extra_compile_args={"cxx": cxx, "nvcc": nvcc},
        extra_link_args=["-fopenmp"],
    )
    return {"ext_modules": [module], "cmdclass": {"build_ext": Build}}


setup(**({} if os.environ.get("LORA_MERGE_BUILD") == "0" else extension()))
