"""SGLang on NVIDIA GPUs: CUDA IPC, captured graphs, experts, adapters, the memory saver, a scheduler that dies."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import models
import policies
import pytest
import sglang_engines
import torch
from sglang_engines import ask, do, engine, follow_the_scaling, pushed_in_flight, spans
from torch import Tensor, nn

from lora_merge import MergedWeights, PushFailed, PushRefused, SglangSync
from lora_merge.engine.payload.update import UpdatePayload
from lora_merge.stream.bucket_writer import BucketWriter
from tests.sglang.test_sglang_models import MOE
from tests.sglang.test_sglang_server import act, answers, serving

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("sglang") is None, reason="needs SGLang")]
DENSE = {"target_modules": policies.LINEARS, "r": 16}
BUCKET = 1 << 19
"""Small buckets: there is a middle of a push."""
TOLERANCE = 0.15
"""Log-probs of bf16 models carry errors of 0.04 here; a policy without its adapter is off by 2 (asserted)."""
SIZES = policies.SIZES | {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Heads of 128, as most models have."""
GRAPHS = {"disable_cuda_graph": False, "cuda_graph_bs_decode": [1, 2, 4, 8]}
PAUSES = ["keep", "wait", "abort"]
no_leftovers = sglang_engines.no_leftovers


def qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False))


def qwen3() -> nn.Module:
    """A tied head."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=128, tie_word_embeddings=True))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = SIZES | {"head_dim": 128, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    return models.eager(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)))


def policy(build: Callable[[], nn.Module] = qwen2, seed: int = 0, **config: Any) -> Any:
    return models.with_lora(build, dtype=torch.bfloat16, seed=seed, **(config or DENSE)).cuda()


def assert_answers(outputs: Any, model: Any) -> None:
    sglang_engines.assert_answers(outputs, model, tolerance=TOLERANCE, greedy=False)
    with model.disable_adapter(), pytest.raises(AssertionError):
        sglang_engines.assert_answers(outputs, model, tolerance=2 * TOLERANCE, greedy=False)


def parameters(started: Any, folder: Path) -> dict[str, Tensor]:
    """As they lie in the scheduler."""
    do(started, "save", str(folder / "parameters"))
    return torch.load(folder / "parameters")


def expected(model: Any) -> dict[str, Tensor]:
    """What SGLang's parameters are: tensors of a merge in the trainer, those side by side that are one there."""
    stream = {name: tensor.cpu().clone() for name, tensor in MergedWeights(model)}
    wanted: dict[str, list[Tensor]] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in stream.items():
        path, _, what = name.rpartition(".")
        parent, _, kind = path.rpartition(".")
        if ".experts." in name:
            layer, _, number = parent.rpartition(".")
            experts.setdefault(layer, {}).setdefault(int(number), {})[kind] = tensor
        elif kind in ("q_proj", "k_proj", "v_proj"):
            wanted.setdefault(f"{parent}.qkv_proj.{what}", []).append(tensor)
        elif kind in ("gate_proj", "up_proj"):
            wanted.setdefault(f"{parent}.gate_up_proj.{what}", []).append(tensor)
        else:
            wanted[name] = [tensor]
    for layer, of in experts.items():
        each = [of[number] for number in range(len(of))]
        wanted[f"{layer}.w13_weight"] = [torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in each])]
        wanted[f"{layer}.w2_weight"] = [torch.stack([e["down_proj"] for e in each])]
    return {name: torch.cat(parts) for name, parts in wanted.items()}


def assert_bits(started: Any, model: Any, folder: Path) -> None:
    """Every parameter of the scheduler, bit for bit."""
    found, wanted = parameters(started, folder), expected(model)
    tied = model.config.tie_word_embeddings
    assert found.keys() - ({"lm_head.weight"} if tied else set()) == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name


def assert_float64(started: Any, model: Any, folder: Path) -> None:
    """q, k and v in the scheduler are the sums in float64, rounded once."""
    found, count = parameters(started, folder), 0
    for path, module in model.get_base_model().named_modules():
        if not path.endswith("self_attn"):
            continue
        layers = [getattr(module, f"{part}_proj") for part in "qkv"]
        added = [
            layer.scaling["default"] * layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
            for layer in layers
        ]
        magnitude = [
            layer.scaling["default"]
            * layer.lora_B["default"].weight.double().abs()
            @ layer.lora_A["default"].weight.double().abs()
            for layer in layers
        ]
        base = torch.cat([layer.base_layer.weight.double() for layer in layers])
        wanted = base + torch.cat(added)
        got = found[f"{path}.qkv_proj.weight"].cuda().double()
        half = torch.exp2(torch.floor(torch.log2(wanted.abs().clamp_min(2**-126))) - 8)
        allowed = half * (1 + 2**-10) + 2**-23 * (base.abs() + got.abs()) + 2**-20 * torch.cat(magnitude)
        assert ((got - wanted).abs() <= allowed).all(), path
        count += 1
    assert count == SIZES["num_hidden_layers"]


# One engine with captured graphs


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with engine(policy(), tmp_path_factory.mktemp("sglang") / "base", **GRAPHS) as one:
        yield one


class TestDense:
    """One engine, whose steps are captured before the first push."""

    @pytest.fixture(autouse=True)
    def mended(self, started: Any) -> Iterator[None]:
        yield
        do(started, "mend")
        do(started, "slow", 0)
        if any(answer.kind == "dirty" for answer in SglangSync(policy(), started).states()):
            SglangSync(policy(), started).push()

    def test_the_trainer_merges(self, started: Any, tmp_path: Path) -> None:
        """Straight into the engine's memory; what was captured computes with it."""
        assert do(started, "captured") == [1, 2, 4, 8]
        model = policy()
        sync = SglangSync(model, started, merge="trainer", bucket_bytes=BUCKET)
        for step in range(3):
            report = sync.push(verify=step == 0)
            assert report.transports == (("ipc", "write") if step == 0 else ("write",)), report
            assert report.coverage == 1
            assert_answers(ask(started), model)
            assert_bits(started, model, tmp_path)
            assert_float64(started, model, tmp_path)
            policies.train(model, step)
        sync.close()

    def test_the_engine_merges(self, started: Any, tmp_path: Path) -> None:
        """The base once, adapters alone after that; the bits of a merge in the trainer, after many updates too."""
        model = policy()
        sync = SglangSync(model, started, merge="engine", bucket_bytes=BUCKET)
        report = sync.push(verify=True)
        assert (report.merge, report.base_sent) == ("engine", True), report.merge_why
        for step in range(20):
            policies.train(model, step, size=0.02)
            report = sync.push(verify=step == 3)
            assert (report.merge, report.base_sent) == ("engine", False), report.merge_why
            assert report.transports == ("ipc",), report
        assert_answers(ask(started), model)
        assert_bits(started, model, tmp_path)
        sync.close()

    def test_stochastic_rounding(self, started: Any) -> None:
        """The seed is the version; engines that merge refuse it."""
        model = policy()
        sync, digests = SglangSync(model, started, rounding="stochastic"), set()
        for _ in range(2):
            sync.push(verify=True)
            digests.add(do(started, "digest"))
            assert_answers(ask(started), model)
        assert len(digests) == 2
        with pytest.raises(PushRefused, match="stochastic"):
            SglangSync(model, started, rounding="stochastic", merge="engine").push()
        sync.close()

    def test_a_stream_as_sglangs_own_bucket(self, started: Any, tmp_path: Path) -> None:
        """How verl and slime send what `MergedWeights` yields: the same bits as a push."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        model = policy(seed=1)
        bucket = FlattenedTensorBucket(named_tensors=[(name, tensor.clone()) for name, tensor in MergedWeights(model)])
        told = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        started.update_weights_from_tensor([MultiprocessingSerializer.serialize(told)], load_format="flattened_bucket")
        assert SglangSync(model, started).states()[0].kind in ("nothing", "dirty")
        assert_answers(ask(started), model)
        assert_bits(started, model, tmp_path)

    @pytest.mark.parametrize("pause", PAUSES)
    def test_requests_in_flight(self, started: Any, pause: str) -> None:
        model = policy()
        sync = SglangSync(model, started, pause=pause)
        sync.push()
        old = copy.deepcopy(model)
        policies.train(model, size=0.2)
        tokens = 60
        outputs = pushed_in_flight(started, sync, tokens)
        for prompt, output in zip(policies.prompts(), outputs, strict=False):
            if pause == "abort":
                assert output["meta_info"]["finish_reason"]["type"] == "abort"
                continue
            assert len(output["output_ids"]) == tokens
            mine = spans(output, prompt, old, model, 2 * TOLERANCE)
            assert pause == "wait" or mine < tokens
            assert pause != "wait" or spans(output, prompt, model, old, 2 * TOLERANCE) == 0
        assert_answers(ask(started), model)
        sync.close()

    @pytest.mark.parametrize("merge", ["trainer", "engine"])
    def test_the_trainer_fails_in_the_middle(self, started: Any, merge: str, tmp_path: Path) -> None:
        """Dirty and still, or untouched where adapters alone were on their way; the next push heals it."""
        model = policy()
        sync = SglangSync(model, started, merge=merge, bucket_bytes=BUCKET)
        sync.push()
        policies.train(model)
        owner, name = (BucketWriter, "write_direct") if merge == "trainer" else (UpdatePayload, "fill")
        works = getattr(owner, name)

        def breaks(self: Any, index: int, *args: Any) -> None:
            if index == (2 if merge == "trainer" else 0):
                raise MemoryError("injected")
            works(self, index, *args)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, name, breaks)
            with pytest.raises((PushFailed, PushRefused), match="injected"):
                sync.push()
        assert sync.states()[0].kind == ("dirty" if merge == "trainer" else "merged")
        sync.push(verify=True)
        assert_answers(ask(started), model)
        assert_bits(started, model, tmp_path)
        sync.close()

    @pytest.mark.parametrize("where", ["hello", "begin_full", "commit", "flush_cache", "merge", "products"])
    def test_a_scheduler_fails(self, started: Any, where: str) -> None:
        """It lives on, and the next push heals it."""
        model = policy()
        sync = SglangSync(model, started, merge="engine" if where in ("merge", "products") else "trainer")
        sync.push()
        process = do(started, "process")
        policies.train(model)
        do(started, "fail", where, [0])
        with pytest.raises((PushRefused, PushFailed), match="injected"):
            sync.push()
        do(started, "mend")
        if where not in ("merge", "products"):
            assert sync.states()[0].kind == ("merged" if where == "hello" else "dirty")
        sync.push(verify=True)
        assert_answers(ask(started), model)
        assert do(started, "process") == process
        sync.close()

    def test_what_does_not_fit_changes_nothing(self, started: Any) -> None:
        good = policy()
        sync = SglangSync(good, started)
        sync.push()
        before, held = do(started, "digest"), sync.states()
        bad = qwen2().bfloat16().cuda()
        del bad.model.layers[1].self_attn.k_proj
        with pytest.raises(PushRefused, match=r"nothing would fill model\.layers\.1\.self_attn\.qkv_proj"):
            SglangSync(bad, started).push()
        assert (do(started, "digest"), sync.states()) == (before, held)
        assert_answers(ask(started), good)
        sync.close()

    def test_memory_and_training_weights_after_many_pushes(self, started: Any) -> None:
        model = policy()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for merge in ("trainer", "engine"):
            sync = SglangSync(model, started, merge=merge)
            sync.push()
            sync.push()
            used, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
            for _ in range(50):
                sync.push()
            assert torch.cuda.memory_allocated() == used
            # Other tests' engines may start on this GPU meanwhile: what is here is printed, not asserted.
            print(f"{merge}: {(free - torch.cuda.mem_get_info()[0]) / 2**20:.1f} MiB less free on the GPU")
            sync.close()
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name

    def test_expandable_segments(self, started: Any) -> None:
        """Memory of PyTorch's that cannot be exported: buckets of other processes do not lie in it."""
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        try:
            model = policy()
            sync = SglangSync(model, started, merge="trainer")
            assert sync.push(verify=True).transports == ("ipc", "write")
            assert_answers(ask(started), model)
            sync.close()
        finally:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


# Engines of their own


def test_experts(tmp_path: Path) -> None:
    """Triton's experts are filled where they are; by each who can merge."""
    model = policy(qwen3_moe, **MOE)
    with engine(model, tmp_path / "base", **GRAPHS) as started:
        for merge in ("trainer", "engine"):
            sync = SglangSync(model, started, merge=merge, bucket_bytes=BUCKET)
            for step in range(3):
                report = sync.push(verify=step == 0)
                assert report.coverage == 1
                if merge == "trainer":
                    assert "write" in report.transports, report
                assert_answers(ask(started), model)
                assert_bits(started, model, tmp_path)
                policies.train(model, step)
            sync.close()


def test_adapters(tmp_path: Path) -> None:
    """The base once, then adapters with the live scaling in SGLang's own LoRA kernels; back and forth."""
    model = policy()
    lora = {
        "enable_lora": True,
        "max_lora_rank": 16,
        "max_loras_per_batch": 2,
        "lora_target_modules": policies.LINEARS,
        "lora_backend": "triton",
    }
    with engine(model, tmp_path / "base", **lora) as started:
        sync = SglangSync(model, started, mode="adapter", bucket_bytes=BUCKET)
        follow_the_scaling(started, sync, model, assert_answers)
        for merge in ("merged", "adapter"):
            report = sync.push(mode=merge, verify=True)
            assert "write" in report.transports or merge == "adapter", report
            assert_answers(ask(started, lora_path=sync.lora_path()), model)
        sync.close()


def test_the_memory_saver(tmp_path: Path) -> None:
    """What it maps cannot be exported, so that buckets go. Weights that are gone are known to be gone."""
    model = policy(qwen3)
    with engine(model, tmp_path / "base", **GRAPHS | {"enable_memory_saver": True}) as started:
        sync = SglangSync(model, started, merge="trainer", bucket_bytes=BUCKET)
        report = sync.push(verify=True)
        assert report.transports == ("ipc",), report
        assert "does not export" in report.buckets, report.buckets
        assert_answers(ask(started), model)
        assert_bits(started, model, tmp_path)

        for step, tags in enumerate((None, ["weights"], ["weights", "kv_cache"], None)):
            started.release_memory_occupation(tags)
            assert sync.states()[0].kind == "dirty"
            policies.train(model, step)
            sync.push(verify=step == 0)
            assert_answers(ask(started), model)
            assert_bits(started, model, tmp_path)
        assert do(started, "captured") == [1, 2, 4, 8]

        # Mapped again behind our back: what lies there is nobody's weights.
        started.release_memory_occupation(["weights"])
        started.resume_memory_occupation(["weights"])
        assert sync.states()[0].kind == "dirty"
        with pytest.raises(PushRefused):
            sync.check()
        sync.push()
        assert_answers(ask(started), model)

        # A refused push leaves memory as it was.
        started.release_memory_occupation(["weights"])
        bad = qwen3().bfloat16().cuda()
        bad.model.layers[0].mlp.extra = nn.Linear(8, 8, device="cuda", dtype=torch.bfloat16)
        with pytest.raises(PushRefused, match="extra"):
            SglangSync(bad, started).push()
        assert sync.states()[0].kind == "dirty"
        started.resume_memory_occupation(["weights"])  # which were gone again: else SGLang would end
        sync.push()
        assert_answers(ask(started), model)
        sync.close()

        # Adapters alone, onto a base that is thrown away now and then.
        sync = SglangSync(model, started, merge="engine", bucket_bytes=BUCKET)
        assert sync.push().base_sent
        policies.train(model)
        assert not sync.push().base_sent
        started.release_memory_occupation()
        policies.train(model)
        assert sync.push().base_sent
        assert_answers(ask(started), model)
        assert_bits(started, model, tmp_path)
        sync.close()


def assert_told(sync: SglangSync, process: int, method: str, at: int, after: float = 0.0) -> None:
    """A scheduler is killed when the trainer comes to a bucket; the trainer is told soon, and closes.

    Args:
        method: of `BucketWriter`, which the trainer calls for each bucket.
        after: seconds until it goes on.
    """
    works = getattr(BucketWriter, method)

    def killing(self: BucketWriter, index: int, *args: Any) -> None:
        if index == at:
            os.kill(process, signal.SIGKILL)
            time.sleep(after)
        works(self, index, *args)

    began = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BucketWriter, method, killing)
        with pytest.raises(PushFailed, match=r"engine 0 (is dirty|does not answer any more)"):
            sync.push()
    assert time.monotonic() - began < 60
    with contextlib.suppress(Exception):
        sync.close()


def test_a_scheduler_that_dies_while_the_trainer_writes_to_it(tmp_path: Path) -> None:
    """The memory that is written to goes away with its owner: the trainer is told, lives on, and pushes to the next."""
    model = policy()
    for life in range(2):
        with serving(tmp_path / "base", model) as url:
            sync = SglangSync(model, url, merge="trainer", bucket_bytes=BUCKET)
            assert sync.push().transports == ("write",)
            assert_answers(answers(url), model)
            if life:
                sync.close()
                break
            policies.train(model)
            assert_told(sync, act(url, "process"), "write_direct", 2, 0.5)
    torch.cuda.synchronize()
