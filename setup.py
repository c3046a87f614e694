"""Builds the compiled module lora_merge._C; everything else about the package is in pyproject.toml.

csrc/module.cpp and csrc/cpu are always compiled, csrc/module_cuda.cpp and csrc/cuda where nvcc is found. Neither torch
nor a GPU is needed to build.
`LORA_MERGE_BUILD=0` installs without the module, `LORA_MERGE_CUDA=0` with its CPU kernels alone; `TORCH_CUDA_ARCH_LIST`
("8.0;9.0+PTX", "Hopper") names GPU architectures: default, those of the GPUs in this machine, or all of `DEFAULT` where
there are none; `LORA_MERGE_GLIBC=2.28` (needs ziglang) makes what runs on systems as old as that. `MAX_JOBS` compilers
run at a time: default, as many as there are cores.

`CXX` is the C++ compiler; one for another machine, aarch64-linux-gnu-g++, builds for that one. CUDA kernels then need
that machine's libcudart_static.a: nvcc's own, or the one in the folder `LORA_MERGE_CUDART`.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
HINT = "LORA_MERGE_BUILD=0 installs lora_merge without its compiled kernels"
# No contraction: where a fused multiply-add is meant, it is written. GCC 12 warns of uninitialised values in its own
# AVX-512 header.
CXX = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wall", "-Wno-uninitialized"]
CXX += ["-Wno-maybe-uninitialized", "-Wno-unknown-warning-option", "-DNDEBUG"]
# Line numbers, two thirds of a wheel, are left out: profilers and compute-sanitizer want NVCC_APPEND_FLAGS=-lineinfo.
NVCC = ["-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
# None of the names of C++'s library, which is inside, is seen outside: that of torch may be another.
LINK = [f"-Wl,--version-script={ROOT / 'csrc/exports.map'}", "-Wl,--gc-sections", "-s"]
COMPILER = os.environ.get("CXX", "c++")
GLIBC = os.environ.get("LORA_MERGE_GLIBC", "")
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


def gpus() -> list[tuple[int, int]]:
    """Compute capabilities of the GPUs in this machine."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    return [(int(major), int(minor)) for major, minor in re.findall(r"^(\d+)\.(\d)$", listed, re.MULTILINE)]


HOST = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())


def machine() -> str:
    """What the compiler compiles for."""
    asked = [*COMPILER.split(), "-dM", "-E", "-x", "c++", os.devnull]
    try:
        defined = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return HOST  # a compiler that does not work says so itself, where it is needed
    names = [name for name in ("x86_64", "aarch64") if f"#define __{name}__ 1\n" in defined]
    return names[0] if names else HOST


MACHINE = machine()
CROSS = MACHINE != HOST


def toolkit() -> Path | None:
    """The folder of CUDA, whose bin has nvcc; None where there is none, or LORA_MERGE_CUDA=0 leaves it out."""
    if os.environ.get("LORA_MERGE_CUDA") == "0":
        return None
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=str(Path(home) / "bin") if home else None)
    if nvcc is None:
        return None
    # What is on the PATH may be a script that calls the real one: that says where it is.
    told = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-c", os.devnull], capture_output=True, text=True, check=False)
    found = re.search(r"TOP=(.+)", told.stderr)
    return Path(found[1].strip()).resolve() if found else Path(nvcc).resolve().parents[1]


class Build(build_ext):
    """Compiles by ninja, which does again only what changed; nothing of torch is needed."""

    def build_extension(self, ext: Extension) -> None:
        if shutil.which(COMPILER.split()[0]) is None:
            raise SystemExit(f"no C++ compiler: {COMPILER!r} is not on the PATH; install g++ or set CXX; {HINT}")
        folder = Path(self.build_temp).resolve() / MACHINE
        made, target = folder / "_C.so", Path(self.get_ext_fullpath(ext.name)).resolve()
        for old in (ROOT / "lora_merge").glob("_C.cpython-*"):
            old.unlink()  # of the time when each Python had a module of its own, which would be imported first
        folder.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        (folder / "build.ninja").write_text(recipe(toolkit(), made))
        try:
            jobs = os.environ.get("MAX_JOBS")
            subprocess.run([*ninja(), "-C", str(folder), *(["-j", jobs] if jobs else [])], check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(f"lora_merge._C did not compile (see above); {HINT}") from error
        shutil.copy(made, target)  # not linked there: the next machine's module goes to the same place


def ninja() -> list[str]:
    """How to call it: pip's, or the machine's."""
    try:
        import ninja as package

        return [str(Path(package.BIN_DIR) / "ninja")]
    except ImportError:
        if shutil.which("ninja") is None:
            raise SystemExit(f"ninja is missing: pip install ninja; {HINT}") from None
        return ["ninja"]


def linking() -> tuple[str, list[str]]:
    """The linker and its options.

    With LORA_MERGE_GLIBC=2.28 what the compiler made is linked against that release of glibc, which systems of that age
    and all later ones have: zig's linker brings the names and versions of each of them.
    """
    if not GLIBC:
        return COMPILER, ["-static-libstdc++", "-static-libgcc", *LINK]
    linker = f"{sys.executable} -m ziglang c++ -target {MACHINE}-linux-gnu.{GLIBC} -nostdlib++"
    ask = [*COMPILER.split(), "-print-file-name="]
    inside = [
        subprocess.run([*ask[:-1], ask[-1] + name], capture_output=True, text=True, check=True).stdout.strip()
        for name in ("libstdc++.a", "libgcc_s.so.1")
    ]
    return linker, [*inside, *LINK]


def cudart(cuda: Path) -> list[str]:
    """Where the linker finds CUDA's runtime for the machine that is compiled for, beside its own places.

    Raises:
        SystemExit: there is none for another machine.
    """
    target = {"aarch64": "sbsa"}.get(MACHINE, MACHINE)  # NVIDIA's name of servers
    given = os.environ.get("LORA_MERGE_CUDART")
    own = [] if CROSS else [cuda / "lib64", cuda / "lib"]
    folders = [Path(given).resolve()] if given else [*own, cuda / "targets" / f"{target}-linux" / "lib"]
    if CROSS and not any((folder / "libcudart_static.a").exists() for folder in folders):
        raise SystemExit(
            f"no libcudart_static.a for {MACHINE} in {', '.join(map(str, folders))}: name its folder with "
            "LORA_MERGE_CUDART (pip's package nvidia-cuda-runtime has it), or leave the CUDA kernels out with "
            f"LORA_MERGE_CUDA=0; {HINT}"
        )
    return [f"-L{folder}" for folder in folders if folder.exists()]


def recipe(cuda: Path | None, target: Path) -> str:
    """The text of build.ninja.

    Args:
        cuda: the toolkit's folder; None builds for CPUs alone.
        target: the module.
    """
    sources = [ROOT / "csrc" / name for name in ("module.cpp", "watch/watch.cpp", "watch/watch_type.cpp")]
    sources += sorted((ROOT / "csrc/cpu").glob("*.cpp"))
    macros, nvcc = [], ""
    linker, link = linking()
    if GLIBC:
        sources.append(ROOT / "csrc/old_glibc.cpp")
    if cuda is not None:
        nvcc = str(cuda / "bin" / "nvcc")
        built = architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""), gpus(), known_to(Path(nvcc)))
        say(f"CUDA kernels for {', '.join(built)}, by {nvcc}")
        sources += [ROOT / "csrc/module_cuda.cpp", *sorted((ROOT / "csrc/cuda").rglob("*.cu"))]
        macros = [f"-DLORA_MERGE_CUDA_ARCHITECTURES='\"{','.join(built)}\"'"]
        # The runtime inside: which one torch has does not matter.
        link += [*cudart(cuda), "-lcudart_static", "-ldl", "-lrt"]
    else:
        say("no nvcc: kernels for CPUs alone")
    objects = [f"{source.relative_to(ROOT / 'csrc')}.o".replace("/", "-") for source in sources]
    include = sysconfig.get_path("include")
    # Headers of the machine where it is compiled, which are the same.
    beside = ["-ccbin", COMPILER.split()[0], "-target-dir", f"{HOST}-linux"] if CROSS else []
    lines = [
        "ninja_required_version = 1.8",
        f"cxx = {COMPILER}",
        f"linker = {linker}",
        f"nvcc = {nvcc}",
        f"cxxflags = {' '.join([*CXX, *macros, f'-isystem {include}'])}",
        f"nvccflags = {' '.join([*NVCC, *beside, *(flags(built) if cuda is not None else [])])}",
        f"link = {' '.join(link)}",
        "rule cxx",
        "  command = $cxx $cxxflags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = c++ $in",
        "rule nvcc",
        "  command = $nvcc $nvccflags -MMD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = nvcc $in",
        "rule link",
        "  command = $linker -shared $in $link -o $out",
        *(
            f"build {made}: {'nvcc' if source.suffix == '.cu' else 'cxx'} {source}"
            for made, source in zip(objects, sources, strict=True)
        ),
        f"build {target}: link {' '.join(objects)}",
        f"default {target}",
        "",
    ]
    return "\n".join(lines)


def extension() -> dict[str, Any]:
    """setup()'s arguments for the compiled module: of the limited API, so that it serves every later Python, too."""
    module = Extension("lora_merge._C", ["csrc/module.cpp"], py_limited_api=True)
    options = {"bdist_wheel": {"py_limited_api": "cp311"}}
    if GLIBC:
        options["bdist_wheel"]["plat_name"] = f"manylinux_{GLIBC.replace('.', '_')}_{MACHINE}"
    elif CROSS:
        options["bdist_wheel"]["plat_name"] = f"linux_{MACHINE}"
    return {"ext_modules": [module], "cmdclass": {"build_ext": Build}, "options": options}


def page() -> dict[str, Any]:
    """setup()'s arguments for what an index shows: the README, and where the repository is.

    A workflow on GitHub says where; links to files beside the README then lead there. Elsewhere no address is named.
    """
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r'__version__ = "(.+)"', (ROOT / "lora_merge/__init__.py").read_text(encoding="utf-8"))
    server, name = os.environ.get("GITHUB_SERVER_URL"), os.environ.get("GITHUB_REPOSITORY")
    urls = {}
    if server and name and found:
        home, tag = f"{server}/{name}", f"v{found[1]}"
        text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{home}/raw/{tag}/", text)
        text = re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{home}/blob/{tag}/", text)
        files = {"Documentation": "docs/install.md", "Changelog": "CHANGELOG.md"}
        urls = {"Repository": home, **{what: f"{home}/blob/{tag}/{file}" for what, file in files.items()}}
        urls["Issues"] = f"{home}/issues"
    return {"long_description": text, "long_description_content_type": "text/markdown", "project_urls": urls}


if __name__ == "__main__":
    setup(**page(), **({} if os.environ.get("LORA_MERGE_BUILD") == "0" else extension()))
