"""Runs segment tables that lie in a file, in any Python and on any machine: `python run_tables.py FOLDER JOBS RESULTS`.

FOLDER has the compiled module. JOBS has, for each job, a line of JSON and a memory image; the addresses of its table
are places in the image. RESULTS gets what lies in the image afterwards; of a tracked merge, the image after the merge
and after the way back; of row norms, these. Needs neither torch nor numpy.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, sys.argv[1])
import _C

ALIGNMENT = 64


class Memory:
    """Bytes that begin at a multiple of ALIGNMENT."""

    def __init__(self, content: bytes) -> None:
        self.size = len(content)
        self._all = ctypes.create_string_buffer(self.size + ALIGNMENT)
        first = ctypes.addressof(self._all)
        self.address = (first + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        ctypes.memmove(self.address, content, self.size)

    def bytes(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def words(self) -> list[int]:
        return list((ctypes.c_int64 * (self.size // 8)).from_address(self.address))


def words(values: list[int]) -> Memory:
    return Memory(bytes((ctypes.c_int64 * len(values))(*values)))


def run(job: dict[str, Any], image: Memory) -> list[bytes]:
    at = [word + image.address if index in job["addresses"] else word for index, word in enumerate(job["table"])]
    table, segments = words(at), job["segments"]
    if job["kind"] == "merge":
        _C.launch_cpu(table.address, segments, job["stochastic"], job["seed"])
        return [image.bytes()]
    if job["kind"] == "norms":
        out = Memory(bytes(8 * job["rows"]))
        _C.row_norms_cpu(table.address, segments, out.address, job["rows"])
        return [out.bytes()]
    first = words([0] * (segments + 1))
    n_codes = _C.tracked_sizes_cpu(table.address, segments, first.address)
    codes, records = Memory(bytes(n_codes)), words([-1] * 2 * first.words()[-1])
    arena, counter = Memory(bytes(image.size + 4 * first.words()[-1])), words([0, 0, 0])
    room = (arena.address, arena.size, 0, counter.address)
    journal = (codes.address, codes.size, records.address, records.size // 8, *room)
    _C.track_cpu(table.address, segments, *journal)
    merged = image.bytes()
    assert counter.words()[1] == 0, "the arena has room for every element"
    _C.untrack_cpu(table.address, segments, *journal)
    assert counter.words()[2] == 0, "nobody else wrote"
    return [merged, image.bytes()]


def main() -> None:
    with Path(sys.argv[2]).open("rb") as jobs, Path(sys.argv[3]).open("wb") as results:
        for line in jobs:
            job = json.loads(line)
            for result in run(job, Memory(jobs.read(job["bytes"]))):
                results.write(result)
    print(*_C.cpu_isas())


if __name__ == "__main__":
    main()
