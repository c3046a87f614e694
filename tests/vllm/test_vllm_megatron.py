"""A Megatron trainer and a real vLLM engine, on CPUs and on GPUs: HF checkpoint, Megatron shards, adapter, push."""

from __future__ import annotations

import os
from contextlib import closing, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import megatron_models as mm
import pytest
import torch
import torch.distributed as dist
from helpers import assert_accurate
from megatron_models import Grid
from megatron_peft import exported, with_peft
from processes import spawn
from torch import Tensor

from lora_merge import Follower, MergedWeights, Publisher, Segment, VllmSync
from lora_merge.engine.payload.pull import MOVED
from lora_merge.megatron import Chunks

SIZES = {"head_dim": 32, "heads": (8, 4)}
"""vLLM wants head dimensions of 32 and more in float32."""
PROMPTS = [[(7 * i + 11 * p) % 100 + 1 for i in range(12)] for p in range(4)]
TOLERANCE = {False: 2e-5, True: 6e-5}
"""Of log-probs, without and with experts. Three forwards, each with its own order of sums (`engines.assert_answers`):
18e-6 (1.05e-5 was the most seen, between Megatron and an engine with AVX-512). A router's logits are sums of 256
products with weights of one, up to three times 16: ten roundings of 48 * 2^-24 on either side, which shift the experts'
weights by as much."""


ON_GPU = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28}
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
BF16_MEDIAN = 0.1
"""Of the errors of log-probs in bf16, where rounding turns a router's choice now and then and a token is then off by
up to 1: the forwards of transformers and of Megatron are 0.02 apart on average, without adapters 1.5 in the median."""


def work(rank: int, folder: Path, kind: str, grid: Grid, modes: list[str], dtype: torch.dtype) -> None:
    exact = dtype == torch.float32
    hf = mm.hf_model(kind, **SIZES, dtype=dtype).to(mm.DEVICE)
    tolerance = TOLERANCE[grid.ep > 1]
    options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8} if "adapter" in modes else {}
    options |= ON_GPU if mm.DEVICE == "cuda" else {}
    with engines.engine(hf, folder, processes=True, **options) if rank == 0 else nullcontext() as llm:
        chunks = mm.megatron(kind, hf, grid)
        mm.adapt(chunks, "bridge")
        model = Chunks(chunks, vocab_size=101)
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step, mode in enumerate(modes):
            with torch.no_grad():
                for name, parameter in (item for chunk in chunks for item in chunk.named_parameters()):
                    if ".adapter." in name:
                        parameter.mul_(1.0 + 0.1 * step)
            report = sync.push(mode=mode, verify=True)
            assert report.version == step + 1
            tensors = exported(model)
            asked: list[Any] = [None]
            if llm is not None:
                outputs = engines.ask(llm, sync.lora_request(), PROMPTS)
                policy = with_peft(hf, tensors)
                if exact:
                    engines.assert_answers(outputs, policy, PROMPTS, tolerance=tolerance)
                    with policy.disable_adapter(), pytest.raises(AssertionError):
                        engines.assert_answers(outputs, policy, PROMPTS, tolerance=2 * tolerance)
                else:
                    assert engines.log_prob_errors(outputs, policy, PROMPTS).median() < BF16_MEDIAN
                    with policy.disable_adapter():
                        assert engines.log_prob_errors(outputs, policy, PROMPTS).median() > 5 * BF16_MEDIAN
                asked = [[said(output) for output in outputs]]
            dist.broadcast_object_list(asked)
            check(chunks, asked[0], tolerance if exact else None, f"{mode}, step {step}")
        if llm is not None and "moe" in kind and mm.DEVICE == "cpu":
            check_packed(llm.apply_model(expert_modules)[0], tensors)
        sync.close()


def follow(rank: int, folder: Path, kind: str, grid: Grid) -> None:
    """An engine that follows a store merges what a Megatron model publishes into it, and answers as that does."""
    hf, url = mm.hf_model(kind, **SIZES), folder.parent / "run7"
    with engines.engine(hf, folder, processes=True, load_format="auto") if rank == 0 else nullcontext() as llm:
        chunks = mm.megatron(kind, hf, grid)
        mm.adapt(chunks, "bridge")
        adapters = []
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                parameter.requires_grad_(".adapter." in name)
                adapters += [parameter] if parameter.requires_grad else []
        model = Chunks(chunks, vocab_size=101)
        publisher = Publisher(model, url)
        follower = None if llm is None else Follower(llm, url, base=folder)
        for step in range(2):
            with torch.no_grad():
                for parameter in adapters:
                    parameter.mul_(1.0 + 0.1 * step)
            published, tensors = publisher.publish(), exported(model)
            asked: list[Any] = [None]
            if follower is not None:
                report = follower.step()
                assert (report.merge, follower.serves) == ("engine", published.name)
                outputs = engines.ask(llm, None, PROMPTS)
                engines.assert_answers(outputs, with_peft(hf, tensors), PROMPTS, tolerance=TOLERANCE["moe" in kind])
                asked = [[said(output) for output in outputs]]
            dist.broadcast_object_list(asked)
            check(chunks, asked[0], TOLERANCE["moe" in kind], f"step {step}")
        if follower is not None:
            follower.close()


def paths(rank: int, folder: Path, kind: str, grid: Grid, parallel: dict[str, Any]) -> None:
    """A push in buckets, one that two workers pull and one that the ranks write, each of other adapters: the engine has
    the bits of what the trainer merges, which is what float64 says."""
    hf = mm.hf_model(kind, **SIZES, dtype=torch.bfloat16)
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_HOST_IP": "127.0.0.1"}
    options = {"tensor_parallel_size": 2, "worker_extension_cls": "sliced_weights.Sliced", **parallel}
    with engines.engine(hf, folder, processes=True, **options) if rank == 0 else nullcontext() as llm:
        llms = [llm] if llm is not None else []
        chunks = mm.megatron(kind, hf, grid)
        mm.adapt(chunks, "bridge")
        parameters = [item for chunk in chunks for item in chunk.named_parameters()]
        model = Chunks(chunks, vocab_size=101)
        sync = VllmSync(model, llms or None, bucket_bytes=1 << 17)
        for ways in (("shm",), ("pull", "shm"), ("write",)):
            with torch.no_grad():
                for name, parameter in parameters:
                    if ".adapter." in name:
                        parameter.mul_(1.25)
            if ways == ("pull", "shm"):
                for _, parameter in parameters:
                    parameter.share_memory_()
                assert MOVED in sync.push().buckets
            for one in llms if ways == ("write",) else ():
                one.collective_rpc("share")
            for one in llms:
                one.collective_rpc("scale")
            report = sync.push()
            assert report.transports == ways, report
            assert report.coverage == 1.0
            assert not report.buckets or ways == ("shm",)
            if "pull" in ways:  # what comes in buckets is adapters alone
                assert not sync._planner._pulls[sync._planner._weights]._last.whole_names
            bits = [one.collective_rpc("bits") for one in llms]
            merged = {name: tensor.clone() for name, tensor in MergedWeights(model)}
            accurate(mm.checkpoint(hf), exported(model), merged)
            with closing(VllmSync(mm.with_weights(hf, merged), llms or None, bucket_bytes=1 << 17)) as plain:
                plain.push()
            assert [one.collective_rpc("bits") for one in llms] == bits, ways
        sync.close()


def accurate(base: dict[str, Tensor], adapter: dict[str, Tensor], merged: dict[str, Tensor]) -> None:
    """Merged weights are the base and its adapter in float64, within the bound of every kernel."""
    assert merged.keys() == base.keys()
    adapted = 0
    for name, weight in base.items():
        lora_A, lora_B = (adapter.get(name.replace("weight", f"lora_{half}.weight")) for half in "AB")
        if lora_A is None:
            assert torch.equal(merged[name], weight), name
            continue
        assert_accurate(Segment(name, weight, merged[name], lora_A, lora_B, 1.0), merged[name])
        assert not torch.equal(merged[name], weight), name
        adapted += 1
    assert adapted == len(adapter) / 2 > 0


def said(output: Any) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs."""
    answer = list(output.outputs[0].token_ids)
    return answer, [step[token].logprob for step, token in zip(output.outputs[0].logprobs, answer, strict=True)]


def check(chunks: list[Any], answers: list[tuple[list[int], list[float]]], tolerance: float | None, what: str) -> None:
    """Greedy tokens and log-probs are those of the Megatron model's own forward, adapters and all; on every rank. In
    bf16, without a tolerance, most log-probs are."""
    ids = torch.tensor([[*prompt, *answer] for prompt, (answer, _) in zip(PROMPTS, answers, strict=True)])
    logp = mm.logits(chunks, ids)[..., :101].float().log_softmax(-1)[:, len(PROMPTS[0]) - 1 : -1].cpu()
    tokens = torch.tensor([answer for answer, _ in answers])
    wanted = logp.gather(-1, tokens[..., None]).squeeze(-1)
    error = (torch.tensor([probs for _, probs in answers]) - wanted).abs()
    if tolerance is None:
        assert error.median() < BF16_MEDIAN, f"{what}: log-probs are off by {error.median()} in the median"
        return
    assert torch.equal(logp.argmax(-1), tokens), f"{what}: greedy tokens differ"
    assert error.max() < tolerance, f"{what}: log-probs are off by {error.max()}"


def expert_modules(model: Any) -> list[str]:
    """In the engine: which modules of an adapter vLLM stacks for a layer's experts, in its order."""
    from vllm.lora.utils import process_packed_modules_mapping

    return list(process_packed_modules_mapping(model)["experts"])


def check_packed(modules: list[str], tensors: dict[str, Tensor]) -> None:
    """vLLM's CPU engines run no adapters on experts; but its loader and packer take what adapter mode sends."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict({"r": 4, "lora_alpha": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"]})
    sent = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    loaded = LoRAModel.from_lora_tensors(1, sent, helper, device="cpu")
    names = [f"model.layers.0.mlp.{module}" for module in modules]
    packed = PackedLoRALayerWeights.pack_moe([loaded.get_lora(name) for name in names], "experts")
    for turn, projection in enumerate(("gate_proj", "down_proj", "up_proj")):
        assert [name.rpartition(".")[2] for name in names[turn::3]] == [projection] * 4
        for half, stacked in (("lora_A", packed.lora_a[turn]), ("lora_B", packed.lora_b[turn])):
            wanted = torch.stack([tensors[f"{name}.{half}.weight"] for name in names[turn::3]])
            assert torch.equal(stacked, wanted), f"{half} of {projection}: {list(stacked.shape)}"


@pytest.mark.parametrize(
    ("kind", "grid", "modes"),
    [
        ("qwen2", Grid(tp=2), ["merged", "adapter", "adapter", "merged"]),
        ("llama", Grid(pp=2), ["merged", "adapter"]),
        ("qwen3_moe", Grid(tp=2, ep=2, etp=1, sp=True), ["merged", "merged"]),
        ("mixtral", Grid(ep=2), ["merged"]),
    ],
)
def test_the_engine_answers_as_the_megatron_model_does(
    kind: str, grid: Grid, modes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # `apply_model` with a function of this file
    # A rank waits in a collective while the other one starts the engine.
    spawn(2, work, tmp_path / "base", kind, grid, modes, torch.float32, timeout=timedelta(minutes=8))


@pytest.mark.parametrize(("kind", "grid"), [("qwen2", Grid(tp=2)), ("qwen3_moe", Grid(pp=2))], ids=["tp2", "pp2"])
def test_an_engine_follows_what_a_megatron_model_publishes(kind: str, grid: Grid, tmp_path: Path) -> None:
    spawn(2, follow, tmp_path / "base", kind, grid, timeout=timedelta(minutes=8))


@pytest.mark.parametrize(
    ("kind", "grid", "world", "parallel"),
    [
        ("qwen2", Grid(tp=2), 2, {}),
        ("qwen2", Grid(tp=2), 4, {}),
        ("qwen3", Grid(pp=2), 2, {}),
        ("qwen3_moe", Grid(tp=2, ep=2, etp=1, sp=True), 2, {"enable_expert_parallel": True}),
    ],
    ids=["tp2", "tp2 twice", "pp2", "tp2 ep2 into ep2"],
)
def test_workers_pull_and_ranks_write(
    kind: str, grid: Grid, world: int, parallel: dict[str, Any], tmp_path: Path
) -> None:
    spawn(world, paths, tmp_path / "base", kind, grid, parallel, timeout=timedelta(minutes=8))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["adapter", "merged"])
@pytest.mark.parametrize(
    ("kind", "grid", "world"),
    [
        ("qwen3_moe", Grid(), 1),
        ("mixtral", Grid(), 1),
        pytest.param("qwen3_moe", Grid(tp=2, ep=2, etp=1), 2, marks=TWO),
    ],
    ids=["qwen3_moe", "mixtral", "qwen3_moe tp2 ep2"],
)
def test_experts_reach_an_engine_on_a_gpu(kind: str, grid: Grid, world: int, mode: str, tmp_path: Path) -> None:
    """Trainer and engine share the first GPU. vLLM's CPU engines run no adapters on experts; those on GPUs do."""
    args = (tmp_path / "base", kind, grid, [mode] * 2, torch.bfloat16)
    spawn(world, work, *args, backend="cpu:gloo,cuda:nccl", timeout=timedelta(minutes=3))
