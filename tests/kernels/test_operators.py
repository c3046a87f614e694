"""The operators in PyTorch: schemas, fakes, torch.compile, autograd, CUDA graphs, and the choice of the backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from backends import Backend
from helpers import assert_accurate, assert_same_bits, make_segment
from torch import Tensor

from lora_merge import BackendUnavailable, Plan, Segment, merge, merge_, run_segments, unmerge_
from lora_merge.kernels import backend
from lora_merge.kernels.bindings import native
from lora_merge.kernels.segments import pack

OPERATORS = torch.ops.lora_merge


def tensors(device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    s = make_segment("w", 33, 48, 4, (dtype, dtype, torch.float32, torch.float32), torch.device(device))
    assert s.lora_A is not None
    assert s.lora_B is not None
    return s.source, s.lora_A, s.lora_B


# ---- the functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_functions_agree(backend: Backend, dtype: torch.dtype) -> None:
    """In place, into `out`, into a new tensor, as a table and as a Plan: the same bits, and what is returned."""
    w, a, b = tensors(backend.device, dtype)
    before = w.clone()
    wanted = merge(w, a, b, 0.5)
    assert_accurate(Segment("merge", w, wanted, a, b, 0.5), wanted)
    assert_same_bits(w, before, "the weight of an out-of-place merge")
    out = torch.empty_like(w)
    assert merge(w, a, b, 0.5, out=out) is out
    assert_same_bits(out, wanted, "out=")
    assert merge(w, a, b, 0.5, out=w) is w
    assert_same_bits(w, wanted, "out=weight")
    w.copy_(before)
    assert merge_(w, a, b, 0.5) is w
    assert_same_bits(w, wanted, "merge_")
    w.copy_(before)
    run_segments([w[:10], w[10:]], [None, None], [a, a], [b[:10], b[10:]], [0.5, 0.5], ["upper", "lower"])
    assert_same_bits(w, wanted, "run_segments")
    assert unmerge_(w, a, b, 0.5) is w
    assert_accurate(Segment("unmerge_", wanted, w, a, b, -0.5), w)


def test_result_dtype_and_rounding(backend: Backend) -> None:
    w, a, b = tensors(backend.device, torch.float32)
    result = merge(w.t(), b.t(), a.t(), 0.5, dtype=torch.bfloat16)
    assert result.dtype == torch.bfloat16
    assert result.is_contiguous()
    assert_accurate(Segment("transposed", w.t(), result, b.t(), a.t(), 0.5), result)
    drawn = merge(w, a, b, 0.5, dtype=torch.bfloat16, rounding="stochastic", seed=5)
    assert_accurate(Segment("stochastic", w, drawn, a, b, 0.5), drawn, stochastic=True)
    assert_same_bits(merge(w, a, b, 0.5, dtype=torch.bfloat16, rounding="stochastic", seed=5), drawn)
    assert not torch.equal(merge(w, a, b, 0.5, dtype=torch.bfloat16, rounding="stochastic", seed=6), drawn)


# ---- PyTorch ---------------------------------------------------------------------------------------------------------


def calls() -> Iterator[tuple[str, tuple[object, ...], dict[str, object]]]:
    w, a, b = tensors()
    out = torch.empty_like(w)
    yield "merge_", (w, a, b, 0.5), {}
    yield "merge_", (w, a, b, 0.5, "stochastic", 3), {}
    yield "merge", (w, a, b, 0.5), {}
    yield "merge", (w.t(), b.t(), a.t(), 0.5, torch.float16, "stochastic", -1), {}
    yield "merge_out", (w, a, b, 0.5), {"out": out}
    tables = [out[:9], out[9:]], [w[:9], None], [a, None], [b[:9], None]
    yield "run_segments", (*tables, [0.5, 1.0], ["x", "y"], [0, 0], [48, 1, 48, 1]), {}


@pytest.mark.parametrize("call", list(calls()), ids=lambda call: call[0])
def test_opcheck(call: tuple[str, tuple[object, ...], dict[str, object]]) -> None:
    """Schema, fake implementation, autograd registration and AOT dispatch, by PyTorch's own checks."""
    name, args, kwargs = call
    torch.library.opcheck(getattr(OPERATORS, name).default, args, kwargs)


def test_all_operators_are_checked() -> None:
    defined = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("lora_merge::")}
    assert defined == {name for name, _, _ in calls()}


def test_compiled_code_merges_the_same(backend: Backend) -> None:
    """A whole graph with every function, also on values that the graph made."""

    def step(w: Tensor, a: Tensor, b: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        fresh = w * 2
        merge_(fresh, a, b, 0.5)
        short = merge(fresh, a, b, 0.25, dtype=torch.float16)
        merge(fresh, a, b, 1.0, out=out)
        run_segments([fresh[:8], fresh[8:]], [None, w[8:]], [a, None], [b[:8], None], [0.5, 1.0], ["x", "y"])
        return fresh, short, out + 1

    w, a, b = tensors(backend.device)
    eager = step(w, a, b, torch.zeros_like(w))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(w, a, b, torch.zeros_like(w))
    for got, wanted in zip(compiled, eager, strict=True):
        assert_same_bits(got, wanted)


def test_plans_stay_out_of_graphs() -> None:
    """A compiled caller breaks its graph around `Plan.run`, whose Python nobody traces, on the first call and after."""
    w, a, b = tensors()
    plan, graphs = Plan([Segment("weight", w, w, a, b, 1.0)]), []

    def step(x: Tensor) -> Tensor:
        doubled = x * 2
        plan.run()
        return doubled + w

    compiled = torch.compile(step, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    wanted = w.clone()
    for _ in range(3):
        merge_(wanted, a, b, 1.0)
        assert_same_bits(compiled(torch.zeros_like(w)), wanted)
    assert len(graphs) == 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        torch.compile(lambda x: step(x), fullgraph=True, backend="eager")(torch.zeros_like(w))


WITHOUT_DYNAMO = """
import sys, torch
before = set(sys.modules)
import lora_merge
lora_merge.Plan([]).run()
print(sorted(name for name in {"torch._dynamo", "peft", "vllm"} & (set(sys.modules) - before)))
"""


def test_import_is_cheap() -> None:
    """Importing the package, and running a plan, brings in none of the modules that take seconds to load."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_DYNAMO], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_autograd_notices() -> None:
    """Weights that require gradients merge, results carry none, and a stale backward pass raises."""
    w, a, b = tensors(dtype=torch.float32)
    parameter = torch.nn.Parameter(w)
    assert not merge(parameter, a, b, 1.0).requires_grad
    loss = (parameter * parameter).sum()
    merge_(parameter, a, b, 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        inner = w.clone()
        assert_same_bits(merge_(inner, a, b, 1.0), merge(w, a, b, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_cuda_graph_of_a_plan(name: str, rounding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay reads the weights of that moment."""
    monkeypatch.setenv("LORA_MERGE_BACKEND", name)
    seed = 3 if rounding == "stochastic" else None
    w, a, b = tensors("cuda")
    s = Segment("w", w, torch.zeros_like(w), a, b, 0.5)
    copy = Segment("copy", a, torch.zeros_like(a))
    plan = Plan([s, copy])
    plan.run(rounding=rounding, seed=seed)  # compiles, loads
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(rounding=rounding, seed=seed)
    for _ in range(3):
        for tensor in (w, a, b):
            tensor.normal_()
        s.destination.zero_()
        graph.replay()
        got = s.destination.clone()
        assert_same_bits(copy.destination, a, "the copy")
        plan.run(rounding=rounding, seed=seed)
        assert_same_bits(got, s.destination, "the replay")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton"])
def test_cuda_graph_of_the_operators(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that exist only while the graph is captured: nothing that a replay reads may be gone by then."""
    monkeypatch.setenv("LORA_MERGE_BACKEND", name)
    w, a, b = tensors("cuda")
    target, out, parts = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w)
    rows = torch.zeros(20, *w.shape, dtype=w.dtype, device="cuda")

    def step() -> None:
        merge_(target, a, b, 0.5)
        merge(target, a, b, 0.25, out=out)
        run_segments([parts[:7], parts[7:]], [w[:7], w[7:]], [a, None], [b[:7], None], [0.5, 1.0], ["x", "y"])
        some = [a, None] * 10, [b, None] * 10  # more than a launch takes as arguments
        run_segments(list(rows), [w] * 20, *some, [0.5] * 20, [f"{i}" for i in range(20)])

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    keep = [torch.randint(100, (1 << 16,), device="cuda") for _ in range(100)]  # takes freed memory
    for _ in range(2):
        w.normal_()
        target.copy_(w)
        graph.replay()
        first = merge(w, a, b, 0.5)
        assert_same_bits(target, first, "merge_")
        assert_same_bits(out, merge(first, a, b, 0.25), "merge(out=)")
        assert_same_bits(parts, torch.cat([first[:7], w[7:]]), "run_segments")
        assert_same_bits(rows, torch.stack([first, w] * 10), "many segments")
    assert len(keep) == 100


@pytest.mark.parametrize("capturing", [True, False])
def test_tables_of_a_captured_launch_are_arguments(capturing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many launches as it takes, in the table's order; outside of a capture one table. Says nothing about a GPU."""
    from lora_merge.kernels.cuda import backend as cuda
    from lora_merge.kernels.cuda import hopper as cuda_hopper
    from lora_merge.kernels.cuda import merge as cuda_merge

    segments = [make_segment(f"w{i}", 3, 8, 2, (torch.float32,) * 4, torch.device("cpu")) for i in range(20)]
    table = pack(segments)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda_merge, "merges", lambda piece, device, kernels: [partial(print, piece)])
    monkeypatch.setattr(cuda, "serves", lambda kernels, table, device: table[:, 0] > 0)
    monkeypatch.setattr(cuda_hopper.Hopper, "could_serve", lambda self, table, device: table[:, 0] < 0)
    pieces = [one.args[0] for one in cuda._Launch(segments, torch.device("cuda", 0)).launches]
    assert [len(piece) for piece in pieces] == ([8, 8, 4] if capturing else [20])
    assert (np.concatenate(pieces) == table).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda", "triton", "reference"])
def test_work_goes_to_the_current_stream(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_MERGE_BACKEND", name)
    w, a, b = tensors("cuda", torch.float32)
    plan = Plan([Segment("w", w, torch.zeros_like(w), a, b)])
    plan.run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        w.fill_(3.0)
        plan.run()
    stream.synchronize()
    assert_accurate(plan.segments[0], plan.segments[0].destination)


# ---- the choice of the backend ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("cuda", r"LORA_MERGE_BACKEND=cuda cannot run on cpu: it needs CUDA tensors"),
        ("Reference", r"LORA_MERGE_BACKEND=Reference: expected one of cuda, triton, cpu, reference"),
    ],
)
def test_impossible_choices(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    w, a, b = tensors()
    before = w.clone()
    monkeypatch.setenv("LORA_MERGE_BACKEND", name)
    with pytest.raises(BackendUnavailable, match=reason):
        merge_(w, a, b, 1.0)
    assert_same_bits(w, before)


def test_no_work_wants_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan without segments is of no device: a rank that has nothing to send makes one, whatever is forced."""
    monkeypatch.setenv("LORA_MERGE_BACKEND", "cuda")
    empty = torch.empty(0, 4)
    for segments in ([], [Segment("empty", empty, empty)]):
        plan = Plan(segments)
        plan.run()
        plan.run(rounding="stochastic", seed=1)
        assert plan.bytes_moved == 0
    assert Plan([]).row_norms() == []


@pytest.mark.gpu
def test_cpu_kernels_refuse_gpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_MERGE_BACKEND", "cpu")
    with pytest.raises(BackendUnavailable, match=r"LORA_MERGE_BACKEND=cpu cannot run on cuda:0: it needs CPU tensors"):
        merge_(*tensors("cuda"), 1.0)


def test_compiled_kernels_are_the_default() -> None:
    """The extension is built wherever the tests run; its absence is a failure, not a slower run."""
    assert native.load_error() is None
    assert backend.pick(torch.device("cpu")).__name__ == "lora_merge.kernels.cpu"


@pytest.mark.gpu
def test_compiled_kernels_are_the_default_on_a_gpu() -> None:
    assert backend.pick(torch.device("cuda")).__name__ == "lora_merge.kernels.cuda.backend"


WITHOUT_EXTENSION = """
import os, sys, warnings
sys.modules["lora_merge._C"] = None  # as on a machine without a compiler
import torch, lora_merge
tensors = torch.ones(4, 4), torch.ones(1, 4), torch.ones(4, 1), 0.5
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        assert (lora_merge.merge(*tensors) == 1.5).all()
    print(*(f"{w.category.__name__}: {w.message}" for w in caught))
os.environ["LORA_MERGE_BACKEND"] = "cpu"
try:
    lora_merge.merge_(*tensors)
except lora_merge.BackendUnavailable as error:
    print(error)
assert (tensors[0] == 1).all()
"""


def test_works_without_the_extension() -> None:
    """On the reference backend, with one warning that names what is missing and how to get it; forced, it fails."""
    environment = {label: value for label, value in os.environ.items() if label != backend.ENVIRONMENT}
    command = [sys.executable, "-c", WITHOUT_EXTENSION]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    hint = r"the compiled extension is missing; build it with `pip install .*"
    warning = r"RuntimeWarning: lora_merge runs on the slower reference backend for cpu tensors: cpu: "
    refusal = r"LORA_MERGE_BACKEND=cpu cannot run on cpu: "
    assert re.fullmatch(f"{warning}{hint}\n{refusal}{hint}\n", done.stdout), done.stdout


def test_triton_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_merge.kernels.triton import backend as triton
    from lora_merge.kernels.triton import merge_kernels

    assert triton.unavailable(torch.device("mps")) == "it needs CUDA tensors"
    monkeypatch.setattr(merge_kernels.INTERPRETED, "value", False)
    assert "TRITON_INTERPRET=1, set before triton is imported" in str(triton.unavailable(torch.device("cpu")))
    monkeypatch.setattr(merge_kernels.INTERPRETED, "value", True)
    assert "TRITON_INTERPRET=1 is set" in str(triton.unavailable(torch.device("cuda")))
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    assert triton.unavailable(torch.device("cpu")) == "triton is not installed"
