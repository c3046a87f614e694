"""NCCL's functions are called as NCCL declares them: a library of the same functions tells what reached it. (Real ones:
test_transport.py, on two GPUs.)"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lora_merge.engine.transport import nccl, nccl_library
from lora_merge.engine.transport.nccl_library import Library

SOURCE = """
#include <stdio.h>
#include <string.h>
#include <stddef.h>
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct { int rank, world; char id[128]; int aborted; } Comm;
static Comm made;
char last[512];
int ncclGetUniqueId(ncclUniqueId* id) { for (int i = 0; i < 128; ++i) id->internal[i] = (char)(i * 7); return 0; }
int ncclCommInitRank(Comm** comm, int world, ncclUniqueId id, int rank) {
  if (world < 2) return 4;
  made.rank = rank, made.world = world, memcpy(made.id, id.internal, 128), made.aborted = 0;
  *comm = &made;
  return 0;
}
int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm, void* stream) {
  snprintf(last, sizeof last, "%p %p %zu %d %d %d/%d %p", from, to, count, type, root, comm->rank, comm->world, stream);
  return comm->aborted ? 3 : 0;
}
int ncclGroupStart(void) { last[0] = 0; return 0; }
int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, void* stream) {
  snprintf(last + strlen(last), sizeof last - strlen(last), "to %d: %p %zu %d %p; ", peer, from, count, type, stream);
  return comm->aborted ? 3 : 0;
}
int ncclGroupEnd(void) { strcat(last, "end"); return 0; }
int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, void* stream) {
  snprintf(last, sizeof last, "from %d: %p %zu %d %p", peer, to, count, type, stream);
  return comm->aborted ? 3 : 0;
}
int ncclCommAbort(Comm* comm) { comm->aborted = 1; return 0; }
const char* ncclGetErrorString(int code) { return code == 4 ? "invalid argument" : "internal error"; }
"""
compiler = shutil.which("cc") or shutil.which("gcc")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "nccl.c").write_text(SOURCE)
    made = tmp_path / "libtold.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(made), str(tmp_path / "nccl.c")], check=True)
    monkeypatch.setattr(nccl_library, "_NAME", str(made))
    return ctypes.CDLL(str(made))


class Data:
    """A tensor of a GPU that is not here."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.address, self.nbytes = address, nbytes

    def data_ptr(self) -> int:
        return self.address


def test_what_reaches_it(library: Any) -> None:
    def last() -> str:
        return ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "last"))).decode()

    ours = Library()
    known = ours.unique_id()
    assert known == bytes(i * 7 % 256 for i in range(128))
    communicator = ours.join(known, 2, 3)
    assert ctypes.string_at(communicator.value + 8, 128) == known
    data: Any = Data((1 << 47) + 12345, 5 << 30)
    at = f"{data.address:#x}"
    ours.broadcast(communicator, data, 0x1234)
    assert last() == f"{at} {at} {5 << 30} 1 0 2/3 0x1234"
    ours.send(communicator, data, [1, 2], (1 << 40) + 1)
    assert last() == f"to 1: {at} {5 << 30} 1 0x10000000001; to 2: {at} {5 << 30} 1 0x10000000001; end"
    ours.receive(communicator, data, 0x99)
    assert last() == f"from 0: {at} {5 << 30} 1 0x99"

    ours.abort(communicator)
    with pytest.raises(RuntimeError, match="ncclBroadcast failed: internal error"):
        ours.broadcast(communicator, data, 0)
    with pytest.raises(RuntimeError, match="ncclSend failed: internal error"):
        ours.send(communicator, data, [1], 0)
    assert last().endswith("end")  # the group is closed behind a call that failed
    with pytest.raises(RuntimeError, match="ncclRecv failed: internal error"):
        ours.receive(communicator, data, 0)


def test_an_error_is_told(library: Any) -> None:
    with pytest.raises(RuntimeError, match="ncclCommInitRank failed: invalid argument"):
        Library().join(bytes(128), 0, 1)


def test_a_machine_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before any member waits for this one."""
    monkeypatch.setattr(nccl_library, "_NAME", "libnothing-of-the-kind.so.2")
    with pytest.raises(RuntimeError, match="NCCL cannot be used here, as torch has brought no libnothing"):
        nccl.Nccl.check()
