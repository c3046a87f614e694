"""A stream as workers pull it: what is offered stays good as long as it is offered, and fills whatever buffer comes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from weakref import ref

import models
import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor

from lora_merge import MergedWeights
from lora_merge.engine.payload.pull import PullBuilder, PullSource, Unmoved, readable, unreadable
from lora_merge.engine.payload.spec import ReceivedUpdate, UpdateSpec, _bring
from lora_merge.engine.transport import memory
from lora_merge.engine.transport import peer_memory as mapped
from lora_merge.engine.transport.memory import NotExported
from lora_merge.engine.transport.peer_memory import ExportedMemory, MappedMemory
from lora_merge.engine.worker import session as side
from lora_merge.engine.worker.pull import PullTarget, nearest
from lora_merge.engine.worker.session import WorkerSession
from lora_merge.shards import Piece
from lora_merge.stream.buckets import extent
from lora_merge.stream.direct_targets import DirectTargets
from lora_merge.stream.window import Window

NEAREST = {"rounding": "nearest"}


def shared(*, adapters: bool = True, **options: Any) -> Any:
    """A model whose weights other processes can map, and its adapters, where these are to be read, too."""
    model = models.with_lora(models.qwen2, **{"target_modules": ["q_proj", "down_proj"]} | options)
    for name, parameter in model.named_parameters():
        if adapters or "lora_" not in name:
            parameter.share_memory_()
    return model


def beside(pull: PullSource, kept: list[Tensor]) -> dict[str, Tensor]:
    """The tensors that go whole, out of a buffer that lies elsewhere each time."""
    pull.settle()
    kept.append(torch.empty(pull.capacity, dtype=torch.uint8))
    found = {}
    with pull.passing():
        for index, slots in enumerate(pull.table):
            pull.fill(index, kept[-1], NEAREST)
            found.update({slot.name: slot.view(kept[-1]).clone() for slot in slots})
    return {name: found[name] for name in pull.whole_names}


def test_what_goes_beside_it_fills_another_buffer_at_each_pass() -> None:
    model, kept = shared(), list[Tensor]()
    weights = MergedWeights(model)
    pulls, blocked = PullBuilder(weights), frozenset({"model.layers.0.self_attn.q_proj.weight", "model.norm.weight"})
    pull = pulls(weights.bucket_writer(), blocked)
    for step in range(3):
        assert pulls(weights.bucket_writer(), blocked) is pull, "it stays what it was"
        found = beside(pull, kept)
        assert found.keys() == blocked
        for name, tensor in MergedWeights(model):
            assert name not in found or torch.equal(tensor, found[name]), (step, name)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)


def exported(weight: Tensor) -> ExportedMemory:
    exports = ExportedMemory(DirectTargets({"w": [(((0, 0), (4, 8)), weight)]}), (), "the trainer's")
    exports.release()
    return exports


def test_other_memory_at_the_same_address_is_other_memory() -> None:
    """Workers have the file mapped that lay there before, and would go on reading that."""
    weight = torch.ones(4, 8).share_memory_()
    exports = exported(weight)
    address = weight.data_ptr()
    assert exports.hold({address: weight.untyped_storage()})
    del weight
    other = torch.ones(4, 8).share_memory_()  # as if it were mapped there
    assert not exports.hold({address: other.untyped_storage()})


def test_another_file_under_the_same_path_is_another_file() -> None:
    """A descriptor that was closed is the next one's number."""
    weight = torch.ones(4, 8).share_memory_()
    exports = exported(weight)
    assert torch.equal(MappedMemory(exports.description, torch.device("cpu"), os.getpid()).views["w"][0][1], weight)
    path = exports.description["memory"][0]["path"]
    del weight
    other = torch.full((4, 8), 2.0).share_memory_()
    again = exported(other)
    assert again.description["memory"][0]["path"] == path
    assert again.digest != exports.digest
    with pytest.raises(RuntimeError, match="another file by now"):
        MappedMemory(exports.description, torch.device("cpu"), os.getpid())


def test_another_allocation_with_the_same_handle_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA may give memory that comes to lie at the same address the handle of what lay there before."""
    marks = [7]
    monkeypatch.setattr(mapped, "_marks", lambda storages: marks * len(list(storages)))
    monkeypatch.setattr(
        mapped._Exporter, "__call__", lambda self, storage, mark: ({"handle": "h", "nbytes": 1, "mark": mark}, 0)
    )
    model = shared()
    stream = MergedWeights(model).bucket_writer()
    first = PullBuilder(MergedWeights(model))(stream, frozenset())
    told = first.offer("one", [first.exported()])
    assert first.stays()
    marks[0] = 8
    assert not first.stays()
    second = PullBuilder(MergedWeights(model))(stream, frozenset())
    assert second.offer("one", [second.exported()])["digest"] != told["digest"], "workers map it anew"


def test_weights_have_to_stay_before_they_are_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have mapped is not free when its owner frees it: a trainer that offloads its weights between pushes
    would find its GPU full."""
    model = shared()
    weights, stayed = MergedWeights(model), Unmoved()
    assert not stayed(weights.bucket_writer())
    assert stayed(weights.bucket_writer())
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()
    assert not stayed(weights.bucket_writer())
    assert stayed(weights.bucket_writer())
    assert stayed(MergedWeights(model, adapters=False).bucket_writer()), "another stream of the same model"
    mark = iter(range(1000))
    monkeypatch.setattr(mapped, "_marks", lambda storages: [next(mark)] * len(list(storages)))
    stayed(weights.bucket_writer())
    assert not stayed(weights.bucket_writer()), "freed, and taken again at the same address"


def rank(host: str = "a", pid: int = 1, device: str = "gpu-1", group: int = 0) -> dict[str, Any]:
    return {"host": host, "pid": pid, "device": device, "group": group}


@pytest.mark.parametrize(
    ("workers", "ranks", "why"),
    [
        ([rank(pid=7)], [rank()], ""),
        ([rank(pid=7, device="gpu-2")], [rank()], ""),
        ([rank(pid=7), rank(pid=8, device="gpu-2")], [rank(), rank(pid=2, device="gpu-2")], ""),
        ([rank(pid=7, device="cpu")], [rank(device="cpu")], ""),
        ([rank(pid=1)], [rank()], "in the trainer's process"),
        ([rank(host="b", pid=1)], [rank()], "a worker on gpu-1 shares no memory with a rank on gpu-1"),
        ([rank(pid=7, device="cpu")], [rank()], "a worker on cpu shares no memory with a rank on gpu-1"),
        ([rank(pid=7)], [rank(device="cpu")], "a worker on gpu-1 shares no memory with a rank on cpu"),
        ([rank(pid=7)], [rank(), rank("b", 2, "gpu-9")], "with a rank on gpu-9"),
        ([rank(pid=7)], [rank(), rank("b", 2, "gpu-9", 1)], ""),
        (
            [rank(pid=7), rank("c", 8)],
            [rank(), rank("b", 2, "gpu-9", 1)],
            "on gpu-1 shares no memory with a rank on gpu-1",
        ),
        ([rank("b", 7)], [rank(), rank(pid=2), rank("b", 3, group=2), rank("b", 4, group=2)], ""),
        ([rank("b", 7)], [rank(), rank("b", 2), rank("b", 3, group=2), rank("a", 4, group=2)], "shares no memory"),
    ],
)
def test_who_can_read_from_whom(workers: list[Any], ranks: list[Any], why: str) -> None:
    found = readable(workers, ranks)
    assert why in found
    assert bool(found) == bool(why)


def test_a_worker_reads_the_nearest_of_ranks_that_have_everything() -> None:
    ranks = [rank("b", 1, "gpu-8", 0), rank("a", 2, "gpu-1", 1), rank("a", 3, "gpu-2", 2)]
    assert nearest(ranks, rank("a", 9, "gpu-2"))["pid"] == 3
    assert nearest(ranks, rank("a", 9, "gpu-3"))["pid"] == 2
    assert nearest(ranks, rank("b", 9, "gpu-9"))["pid"] == 1


def test_a_worker_reads_the_nearest_of_groups_that_its_host_has() -> None:
    ranks = [rank("a", 1, "gpu-1", 0), rank("b", 2, "gpu-8", 0), rank("a", 3, "gpu-2", 2), rank("a", 4, "gpu-3", 2)]
    assert nearest(ranks, rank("a", 9, "gpu-1"))["group"] == 2
    assert nearest(ranks, rank("a", 9, "gpu-3"))["pid"] == 4
    ranks += [rank("a", 5, "gpu-1", 4), rank("a", 6, "gpu-4", 4)]
    assert nearest(ranks, rank("a", 9, "gpu-1"))["group"] == 4


def stub(parts: Mapping[str, tuple[Any, torch.device]], device: torch.device) -> Any:
    """A stream of which as much is there as `unreadable` looks at."""
    made = {
        name: SimpleNamespace(
            name=name,
            shard=SimpleNamespace(pieces=[SimpleNamespace(tensor=tensor)] if tensor is not None else [], device=at),
        )
        for name, (tensor, at) in parts.items()
    }
    return SimpleNamespace(source=SimpleNamespace(parts=made), device=device)


def test_what_cannot_be_read_is_named() -> None:
    cpu, gpu, tensor = torch.device("cpu"), torch.device("cuda", 1), torch.ones(1)
    assert not unreadable(stub({"a": (tensor, gpu), "elsewhere": (None, cpu)}, gpu))
    assert unreadable(stub({"a": (tensor, gpu), "b": (tensor, cpu)}, gpu)) == "b is offloaded to cpu"
    assert unreadable(stub({"a": (tensor, torch.device("cuda", 0))}, gpu)) == "a is offloaded to cuda:0"
    description = ExportedMemory(DirectTargets({"w": [(((0,), (1,)), tensor)]}), (), "the trainer's").description
    assert description == {"why": "the trainer's weights cannot be mapped: w: it lies in memory of its own process"}


@pytest.mark.parametrize(
    ("attribute", "why"),
    [(8, "managed memory"), (17, "cudaMallocAsync"), (None, "sleep mode, memory saver, expandable segments")],
)
def test_who_made_what_cuda_does_not_export(attribute: int | None, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA tells."""

    def ask(to: Any, asked: ctypes.c_int, address: ctypes.c_uint64) -> int:
        if asked.value != attribute:
            return 1
        to._obj.value = 1
        return 0

    ranged = SimpleNamespace(cuMemGetAddressRange_v2=lambda *args: 0, cuPointerGetAttribute=ask)
    runtime = SimpleNamespace(cudaIpcGetMemHandle=lambda *args: 1, cudaGetLastError=lambda: 1)
    monkeypatch.setattr(memory, "_driver", lambda: ranged)
    monkeypatch.setattr(memory, "_cuda_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    with pytest.raises(NotExported, match=why):
        memory.exported(torch.ones(4).untyped_storage(), {})


class Engine:
    """Places of an engine: of each tensor of the stream that is read, some rows."""

    def __init__(self, said: UpdateSpec, share: float = 1.0) -> None:
        windows = {name: window for name, (_, window) in said.tensors.items()} | dict(said.copied)
        self.held: dict[str, tuple[int, Tensor]] = {}
        for name, window in windows.items():
            rows = max(1, int(window.size[0] * share))
            begin = window.size[0] - rows
            self.held[name] = begin, torch.full((rows, *window.size[1:]), float("nan"))

    def pieces(self, name: str, window: Window) -> Iterator[Piece]:
        begin, tensor = self.held[name]
        start = (window.start[0] + begin, *window.start[1:])
        yield Piece(start, tensor)


def offered(model: Any) -> tuple[PullSource, dict[str, Any], UpdateSpec]:
    made = PullBuilder(MergedWeights(model))(MergedWeights(model).bucket_writer(), frozenset())
    return made, made.exported(), UpdateSpec.read(made.spec)


def of(sources: Sequence[dict[str, Any]], device: str = "gpu-1", **options: Any) -> dict[str, Any]:
    here = {"host": "a", "pid": 99, "device": device}
    return {"sources": sources, "here": here, "device": torch.device("cpu"), **options}


def bucketed(made: PullSource, said: UpdateSpec) -> ReceivedUpdate:
    update = ReceivedUpdate(said, made.scalings)
    with made.passing():
        made.settle()
        for index in range(said.factors):
            buffer = torch.empty(made.capacity, dtype=torch.uint8)
            made.fill(index, buffer, NEAREST)
            update.data[index] = buffer[: extent(said.table[index])]
    return update


@pytest.mark.parametrize("adapters", [True, False], ids=["adapters are read", "adapters come"])
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("device", ["gpu-1", "gpu-2", "gpu-3"])
@pytest.mark.parametrize("dora", [False, True])
def test_what_two_ranks_hold_is_merged_in_a_worker(adapters: bool, share: float, device: str, dora: bool) -> None:
    """On the GPU of one of them, or on a third one: what lies on another one is a peer's, and only that."""
    model = shared(adapters=adapters, use_dora=dora)
    made, found, said = offered(model)
    assert bool(said.there) == adapters
    assert bool(said.factors) == (not adapters or dora)
    halves = [{n: v for i, (n, v) in enumerate(found["views"].items()) if i % 2 == half} for half in range(2)]
    sources = [
        {**found, "views": views, "host": "a", "pid": os.getpid(), "device": f"gpu-{number}", "group": 0}
        for number, views in enumerate(halves, 1)
    ]
    engine: Any = Engine(said, share)
    pulled = PullTarget(said, "table", engine, **of(sources, device))
    assert pulled.pids == {os.getpid()}
    for step in range(3):
        pulled.merge(bucketed(made, said), NEAREST)
        for name, tensor in MergedWeights(model):
            begin, held = engine.held[name]
            assert torch.equal(held, tensor[begin:]), (name, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.25)
    assert pulled._made is not None
    for segment in pulled._segments(pulled._made[0]):
        home = next(number for number, views in enumerate(halves, 1) if segment.name in views)
        assert segment.peer == (device != f"gpu-{home}"), segment.name
    brought = pulled._made[0]._bring is not None
    assert brought == (adapters and device == "gpu-3"), "the kernels read factors again and again"
    pulled.close()
    assert pulled.closed


def test_only_what_a_worker_holds_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks that all have everything, the nearest one's; of what it exports, what comes here."""
    _, found, said = offered(shared())
    opened: list[str] = []
    open_ = mapped._opened
    monkeypatch.setattr(mapped, "_opened", lambda path, *args: opened.append(path) or open_(path, *args))
    sources = [{**found, **rank("a", os.getpid(), f"gpu-{number}", number)} for number in (2, 1)]
    sources[0] |= {"memory": [], "views": {}}  # whoever reads this one fails
    engine: Any = Engine(said)
    names = list(engine.held)[::3]
    engine.held = {name: engine.held[name] for name in names}
    engine.pieces = lambda name, window: Engine.pieces(engine, name, window) if name in engine.held else iter(())
    pulled = PullTarget(said, "table", engine, **of(sources))
    memory = {view[2] for name in names for view in found["views"][name]}
    factors = {view[2] for some in found["factors"]["views"].values() for view in some}
    assert len(opened) == len(memory) + len(factors) < len(found["memory"]) + len(factors)
    pulled.close()


def test_what_nobody_exports_is_refused() -> None:
    model = shared()
    _, found, said = offered(model)
    whole = {**found, **rank("a", os.getpid())}
    lacking = dict(list(found["views"].items())[1:])
    engine: Any = Engine(said)
    with pytest.raises(RuntimeError, match=r"0 of \d+ elements that this worker holds are exported"):
        PullTarget(said, "table", engine, **of([{**whole, "views": lacking}]))
    with pytest.raises(RuntimeError, match="lora_A is not exported"):
        PullTarget(said, "table", engine, **of([{**whole, "factors": {"memory": [], "views": {}}}]))


def test_scalings_that_change_are_of_another_plan() -> None:
    model = shared()
    made, found, said = offered(model)
    engine: Any = Engine(said)
    pulled = PullTarget(said, "table", engine, **of([{**found, **rank("a", os.getpid())}]))
    pulled.merge(bucketed(made, said), NEAREST)
    update = bucketed(made, said)
    update.scalings = [[scaling * 2 for scaling in some] for some in update.scalings]
    pulled.merge(update, NEAREST)
    for module in model.modules():
        if hasattr(module, "scaling") and isinstance(module.scaling, dict):
            module.scaling = {name: value * 2 for name, value in module.scaling.items()}
    for name, tensor in MergedWeights(model):
        assert torch.equal(engine.held[name][1], tensor), name
    pulled.close()


def test_memory_of_a_trainer_that_died_is_let_go_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when nobody pushes any more; not while it is read."""
    monkeypatch.setattr(side, "_WATCH_S", 0.01)
    here: Any = WorkerSession.__new__(WorkerSession)
    here.pulls, here.lease, here.puller = {}, SimpleNamespace(owner="x"), ""
    here.pull_lock = threading.RLock()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pulled: Any = PullTarget.__new__(PullTarget)
        pulled._made, pulled._views, pulled._read, pulled._mapped = None, {}, {}, []
        pulled.closed, pulled.pids = False, {process.pid, os.getpid()}
        here.keep_pull("d", pulled)
        time.sleep(0.1)
        assert here.pulls == {"d": pulled}
        with here.pull_lock:
            process.kill()
            process.wait()
            time.sleep(0.1)
            assert not pulled.closed
        end = time.monotonic() + 10
        while not pulled.closed and time.monotonic() < end:
            time.sleep(0.01)
    assert pulled.closed
    assert not here.pulls
    assert ref(here)() is here


def test_workers_read_when_the_device_has_done_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its streams, on the device of the model, whichever is the current one."""
    model = shared()
    made, _, _ = offered(model)
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    made.settle()
    assert not waited
    made.stream.device = torch.device("cuda", 3)
    made.settle()
    assert waited == [torch.device("cuda", 3)]


def test_adapters_of_another_gpu_come_bit_by_bit() -> None:
    """What a worker copies before it merges; in one plan, so on a GPU in one launch."""
    far = {"nan": torch.tensor([[1, -1], [0x7FC00001, -0x80000000]], dtype=torch.int32).view(torch.float32)}
    far |= {"bf16": torch.randn(5, 7).bfloat16(), "one": torch.randn(1, 1)}
    here = {name: torch.zeros_like(there) for name, there in far.items()}
    _bring(far, here).run()
    for name, there in far.items():
        assert_same_bits(here[name], there, name)
