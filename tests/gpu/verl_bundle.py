"""Packs verl and Ray for a GPU machine that reaches no registry: `python tests/gpu/verl_bundle.py OUT.tar.xz`.

    mkdir site && tar xJf OUT.tar.xz -C site && PYTHONPATH=site:$PYTHONPATH bash tests/gpu/gpu.sh RESULTS verl-step

The pins are those of requirements/verl.txt, and Ray's of requirements/sglang-verl.txt, for Python 3.12 on x86-64. What
such machines have is left out (pandas, pyarrow and the like), and of Ray what no training asks for, so that it stays
below 40 MB. vLLM comes apart from it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
THERE = {"pandas", "pyarrow", "python-dateutil", "six", "xxhash"}
LEFT_OUT = ("ray/jars", "ray/rllib", "ray/cpp", "ray/dashboard/client")
FOR = ["--python-version=3.12", "--implementation=cp", "--only-binary=:all:"]
FOR += [f"--platform={name}" for name in ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")]
PROGRAMS = ("raylet", "gcs_server")


def wanted() -> list[Requirement]:
    """Return what the machine lacks."""
    lines = (ROOT / "requirements" / "verl.txt").read_text().splitlines()
    lines += [line for line in (ROOT / "requirements" / "sglang-verl.txt").read_text().splitlines() if "ray==" in line]
    found = [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]
    return [one for one in found if one.name not in THERE]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        wheels, site = Path(folder) / "wheels", Path(folder) / "site"
        for one in wanted():
            print(one, flush=True)
            if one.name == "antlr4-python3-runtime":  # has no wheel, and is plain Python
                pip("wheel", "--no-deps", f"--wheel-dir={wheels}", str(one))
            else:
                pip("download", "--no-deps", f"--dest={wheels}", *FOR, str(one))
        for wheel in wheels.glob("*.whl"):
            shutil.unpack_archive(wheel, site, "zip")
        for name in LEFT_OUT:
            shutil.rmtree(site / name, ignore_errors=True)
        binaries = [p for p in site.rglob("*") if p.is_file() and (".so" in p.suffixes or p.name in PROGRAMS)]
        subprocess.run(["strip", "--strip-unneeded", *map(str, binaries)], check=False, stderr=subprocess.DEVNULL)
        for binary in binaries:
            binary.chmod(0o755)  # a zip file keeps no modes
        subprocess.run(["tar", "cf", str(out), "-I", "xz -9", "-C", str(site), "."], check=True)
    print(f"{out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
