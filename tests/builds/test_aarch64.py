"""The kernels compiled for aarch64, emulated here: the bits are those of this machine's vectors.

`make aarch64` compiles the module and brings an emulator, and a CPython for it, into build/aarch64.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import LAYOUTS, assert_accurate, in_place, make_segment
from repository import ROOT
from torch import Tensor

from lora_merge import Segment
from lora_merge.kernels.bindings import native
from lora_merge.kernels.segments import (
    DESTINATION,
    FLOATS,
    LORA_A,
    LORA_B,
    ROW_SCALE,
    ROWS,
    SOURCE,
    WORDS,
    pack,
    seed_key,
)

EMULATED = ROOT / "build/aarch64/python"
MODULE = ROOT / "build/aarch64/lib/lora_merge"
CPU = torch.device("cpu")
SPECIALS = (float("nan"), float("inf"), -float("inf"), -0.0, 2.0**-126, 2.0**-149, -(2.0**-24), 3e38, 65504.0, 65520.0)
"""Ends of what float32, bf16 and fp16 hold, and denormals of each."""

pytestmark = pytest.mark.skipif(
    not (EMULATED.exists() and MODULE.exists()), reason="`make aarch64` builds what it needs"
)


@dataclasses.dataclass
class Job:
    """What run_tables.py does with one segment, whose tensors lie in one image of memory."""

    kind: str
    segment: Segment
    image: Tensor
    stochastic: bool

    def bytes(self) -> bytes:
        table = pack([self.segment])
        words, base = table.reshape(-1).tolist(), self.image.data_ptr()
        columns = (SOURCE, DESTINATION, LORA_A, LORA_B, ROW_SCALE)
        addresses = [i for i, word in enumerate(words) if i % WORDS in columns and word != 0]
        told = {
            "kind": self.kind,
            "stochastic": self.stochastic,
            "seed": seed_key(7),
            "segments": len(table),
            "rows": int(table[:, ROWS].sum()),
            "table": [word - base if i in addresses else word for i, word in enumerate(words)],
            "addresses": addresses,
            "bytes": self.image.nbytes,
        }
        return json.dumps(told).encode() + b"\n" + self.image.numpy().tobytes()

    def results(self, told: memoryview) -> tuple[list[Tensor], memoryview]:
        """The bytes of what it gave, and what follows them."""
        count = {"merge": 1, "norms": 1, "track": 2}[self.kind]
        size = 8 * self.segment.source.shape[0] if self.kind == "norms" else self.image.nbytes
        parts = [torch.frombuffer(bytearray(told[i * size : (i + 1) * size]), dtype=torch.uint8) for i in range(count)]
        return parts, told[count * size :]

    def destination(self, image: Tensor) -> Tensor:
        d = self.segment.destination
        first = d.data_ptr() - self.image.data_ptr()
        whole = image[first : first + (image.nbytes - first) // d.itemsize * d.itemsize]
        return whole.clone().view(d.dtype).as_strided(d.shape, d.stride())


def job(kind: str, s: Segment, *, stochastic: bool = False) -> Job:
    """Moves a segment's tensors into an image, with their strides and what lies around them."""
    tensors = {name: getattr(s, name) for name in ("source", "destination", "lora_A", "lora_B", "row_scale")}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors.values() if t is not None}
    begin, end = {}, 0
    for address, storage in storages.items():
        begin[address], end = end, (end + storage.nbytes() + 127) // 64 * 64
    image = torch.zeros(end, dtype=torch.uint8)
    for address, storage in storages.items():
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        image[begin[address] : begin[address] + whole.numel()] = whole
    moved = {}
    for name, t in tensors.items():
        if t is not None:
            first = begin[t.untyped_storage().data_ptr()]
            part = image[first : first + t.untyped_storage().nbytes()].view(t.dtype)
            moved[name] = part.as_strided(t.shape, t.stride(), t.storage_offset() + part.storage_offset())
    return Job(kind, dataclasses.replace(s, **moved), image, stochastic)


def strewn(t: Tensor, seed: int) -> None:
    """Special values in a fifth of the elements."""
    g = torch.Generator().manual_seed(seed)
    values = torch.tensor(SPECIALS).to(t.dtype)[torch.randint(len(SPECIALS), t.shape, generator=g)]
    t.copy_(torch.where(torch.rand(t.shape, generator=g) < 0.2, values, t))


def scaled(s: Segment, seed: int) -> Segment:
    return dataclasses.replace(
        s, row_scale=torch.rand(s.source.shape[0], generator=torch.Generator().manual_seed(seed)) + 0.5
    )


def jobs() -> Iterator[Job]:
    for i in range(162):  # every four dtypes, twice
        dtypes = [FLOATS[i // 3**e % 3] for e in range(4)]
        layouts = [LAYOUTS[i * step % 6] for step in (1, 5, 2, 3)]
        s = make_segment(f"dtypes {i}", 1 + i * 7 % 29, 1 + i * 11 % 70, i % 23, dtypes, CPU, layouts=layouts, seed=i)
        if i >= 81:
            strewn(s.source, i)
            if s.lora_A is not None and s.lora_B is not None and i % 3 == 0:
                strewn(s.lora_A[:, ::9], i + 1)
                strewn(s.lora_B[::5], i + 2)
        yield job("merge", scaled(s, i) if i % 4 == 3 else s, stochastic=i % 3 == 1)
    for rank in (*range(1, 130), 255, 256, 257, 511, 512):
        dtypes = [FLOATS[rank // 3**e % 3] for e in (0, 0, 1, 1)]
        s = make_segment(f"rank {rank}", 8 + rank % 11, 16 + rank % 19, rank, dtypes, CPU, seed=rank)
        yield job("merge", s, stochastic=rank % 5 == 0)
    for cols in range(1, 71):
        s = make_segment(f"columns {cols}", 9, cols, 5, [FLOATS[cols % 3]] * 4, CPU, seed=cols)
        yield job("merge", s)
    yield job("merge", make_segment("large", 400, 1100, 40, FLOATS[:1] * 4, CPU))
    for i in range(72):  # beyond a unit of a tracked merge, too
        rows, cols = ((5, 40), (17, 69), (8, 16), (197, 530))[i % 4 if i < 12 else i % 3]
        dtypes = [FLOATS[i // 3 % 3]] * 2 + [FLOATS[i % 3]] * 2
        s = make_segment(f"tracked {i}", rows, cols, i * 5 % 41 + 1, dtypes, CPU, layouts=[LAYOUTS[i % 6]] * 4, seed=i)
        if i % 2:
            strewn(s.source, i)
        yield job("track", in_place(scaled(s, i) if i % 4 > 1 else s))
        yield job("norms", scaled(s, i))
    for source in FLOATS[:2]:  # all of their bits
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source).view(256, 256)
        for other in FLOATS:
            s = Segment(f"{source} to {other}", every, torch.empty(256, 256, dtype=other))
            yield job("merge", s)
            yield job("merge", scaled(s, 1), stochastic=True)
    some = torch.randint(-(2**31), 2**31, (256, 256), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    around = torch.arange(-(2**15), 2**15, dtype=torch.int32).view(256, 256)
    near = 0x38800000 + around * 0x1000 // 3  # of fp16's least normal number
    for bits in (some, near):
        for other in FLOATS[:2]:
            for stochastic in (False, True):
                s = Segment(f"to {other}", bits.view(torch.float32), torch.empty(256, 256, dtype=other))
                yield job("merge", s, stochastic=stochastic)


ALL = functools.cache(lambda: list(jobs()))


def results(folder: Path, python: str, module: Path, isa: str) -> list[list[Tensor]]:
    """Of every job, by an interpreter and a module."""
    given, told = folder / "jobs", folder / f"results-{isa}"
    given.write_bytes(b"".join(each.bytes() for each in ALL()))
    command = [python, str(ROOT / "tests/support/run_tables.py"), str(module), str(given), str(told)]
    done = subprocess.run(command, env=os.environ | {"LORA_MERGE_CPU_ISA": isa}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert isa in done.stdout.split()
    rest, each_of_all = memoryview(told.read_bytes()), []
    for each in ALL():
        parts, rest = each.results(rest)
        each_of_all.append(parts)
    assert not rest
    return each_of_all


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> list[list[Tensor]]:
    """This machine's results; AMX's sums have another order."""
    assert native.load_error() is None
    isa = next(name for name in native.compiled.cpu_isas() if name != "amx")
    return results(tmp_path_factory.mktemp("here"), sys.executable, Path(native.compiled.__file__).parent, isa)


def test_here_is_right(here: list[list[Tensor]]) -> None:
    """Held against float64, where no special value is; a way back brings every byte."""
    checked = 0
    for each, parts in zip(ALL(), here, strict=True):
        s = each.segment
        if each.kind == "merge" and all(t is None or t.isfinite().all() for t in (s.source, s.lora_A, s.lora_B)):
            out = each.destination(parts[0])
            if out.isfinite().all():  # fp16 cannot hold all of them
                assert_accurate(s, out, stochastic=each.stochastic)
                checked += 1
        if each.kind == "track":
            assert torch.equal(parts[1], each.image), f"{s.name}: not as before"
            assert not torch.equal(parts[0], each.image), f"{s.name}: not merged"
    assert checked > 280


@pytest.mark.parametrize("isa", ["neon", "generic"])
def test_same_bits(here: list[list[Tensor]], isa: str, tmp_path: Path) -> None:
    """Of every byte of the memory: nothing beside the results is written. NaN of row norms may be any."""
    for each, wanted, got in zip(ALL(), here, results(tmp_path, str(EMULATED), MODULE, isa), strict=True):
        for one, other in zip(wanted, got, strict=True):
            if each.kind == "norms":
                same = torch.equal(*(t.view(torch.float64).nan_to_num(nan=-1.0) for t in (one, other)))
            else:
                same = torch.equal(one, other)
            assert same, f"{each.segment.name}: {each.kind} gives other bits"
