"""Engines on NVIDIA GPUs: same process, other process over CUDA IPC, NCCL, sleep mode; bf16."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import launched
import models
import pytest
import torch
import torch.distributed as dist
from engines import ask, engine, train
from processes import spawn
from sharded_trainer import pushes
from torch import nn

from lora_merge import PushFailed, PushRefused, VllmSync
from lora_merge.stream.bucket_writer import BucketWriter
from lora_merge.verify import coverage
from tests.shards.test_shards_merge import fsdp2

pytestmark = pytest.mark.gpu
DENSE = {"target_modules": engines.LINEARS}
MOE = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "target_parameters": engines.EXPERTS}
BF16 = {"dtype": "bfloat16", "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 28}
TOLERANCE = 0.15
"""Log-probs of bf16 models: logits of a few units carry errors of some 2^-7 of themselves; a policy without its
adapter is off by far more (asserted)."""


ENGINE = timedelta(minutes=4)
"""Ranks wait for the one that starts the engines."""


def policy(build: Any, **config: Any) -> nn.Module:
    with torch.device("cuda"):
        model = models.with_lora(build, dtype=torch.bfloat16, **config)
    return model.cuda()


def assert_answers(outputs: Any, model: Any) -> None:
    engines.assert_answers(outputs, model, tolerance=TOLERANCE, greedy=False)
    with model.disable_adapter(), pytest.raises(AssertionError):
        engines.assert_answers(outputs, model, tolerance=2 * TOLERANCE, greedy=False)


def needs(count: int) -> Any:
    return pytest.mark.skipif(torch.cuda.device_count() < count, reason=f"needs {count} GPUs")


@pytest.mark.parametrize("processes", [False, True], ids=["same process", "cuda ipc"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_dense_in_both_modes(name: str, processes: bool, tmp_path: Path) -> None:
    model = policy(getattr(engines, name), **DENSE)
    with engine(model, tmp_path / "base", processes=processes, enable_lora=True, max_lora_rank=8, **BF16) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step, mode in enumerate(["merged", "adapter", "adapter", "merged"]):
            train(model, step)
            report = sync.push(mode=mode, verify=True)
            straight = {"write"} if processes and (mode == "merged" or report.base_sent) else set()
            assert {*report.transports} == {"ipc" if processes else "local"} | straight
            assert_answers(ask(llm, sync.lora_request()), model)
        train(model, 5)
        assert sync.push().transports == (("write",) if processes else ("local",)), "no bucket where none is compared"
        assert_answers(ask(llm), model)
        assert all(c.complete for c in coverage(llm))
        sync.close()


@pytest.mark.parametrize("mode", ["merged", "adapter"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts(name: str, mode: str, tmp_path: Path) -> None:
    model = policy(getattr(engines, name), **MOE)
    lora = {"enable_lora": True, "max_lora_rank": 8} if mode == "adapter" else {}
    with engine(model, tmp_path / "base", **lora, **BF16) as llm:
        sync = VllmSync(model, llm, mode=mode, bucket_bytes=1 << 17)
        for step in range(3):
            train(model, step)
            sync.push(verify=step == 1)
            assert_answers(ask(llm, sync.lora_request()), model)
        examine = {"op": "dry_run", "digest": sync._weights.bucket_writer().digest}
        (worker,) = llm.collective_rpc("lora_merge", args=(json.dumps(examine),))
        assert mode == "adapter" or json.loads(worker)["reloaded"] == 0, "Triton's experts are filled where they are"


def test_buffers_of_gemma4(tmp_path: Path) -> None:
    model = policy(engines.gemma4, **DENSE)
    with engine(model, tmp_path / "base", **BF16) as llm:
        VllmSync(model, llm).push(verify=True)
        assert_answers(ask(llm), model)


def test_an_engine_that_sees_images(tmp_path: Path) -> None:
    """Vision tower and language model, adapters on both; the dummy load left the pixels' normalisation random."""
    from PIL import Image

    model = policy(engines.qwen2_5_vl, target_modules=["q_proj", "v_proj", "o_proj", "qkv", "proj"])
    processor = engines.qwen2_5_vl_processor()
    engines.save_base(model.get_base_model(), tmp_path / "base")
    processor.save_pretrained(tmp_path / "base")
    image = Image.effect_mandelbrot((112, 112), (-2, -1.5, 1, 1.5), 50).convert("RGB")
    text = f"{engines.IMAGE}what"
    inputs = processor(text=[text], images=[image], return_tensors="pt").to("cuda")
    with engine(model, tmp_path / "base", skip_tokenizer_init=False, max_model_len=128, **BF16) as llm:
        sync = VllmSync(model, llm)
        for step in range(2):
            train(model, step)
            sync.push(verify=True)
            assert all(c.complete for c in coverage(llm))
            assert_answers(ask(llm), model)
            prompt = {"prompt": text, "multi_modal_data": {"image": image}}
            (output,) = llm.generate([prompt], engines.GREEDY, use_tqdm=False)
            with torch.no_grad():
                wanted = model(**inputs).logits[0, -1].float().log_softmax(-1)
            ((token, got),) = output.outputs[0].logprobs[0].items()
            assert abs(got.logprob - wanted[token].item()) < TOLERANCE


@pytest.mark.parametrize("processes", [False, True], ids=["same process", "cuda ipc"])
def test_a_sleeping_engine(processes: bool, tmp_path: Path) -> None:
    """Both levels in one engine: vLLM's sleep mode allows one engine in the life of a process."""
    model = policy(engines.qwen2, **DENSE)
    options = {"enable_sleep_mode": True, "enable_lora": True, "max_lora_rank": 8} | BF16
    with engine(model, tmp_path / "base", processes=processes, **options) as llm:
        sync = VllmSync(model, llm)
        for level, mode in itertools.product((1, 2), ("merged", "adapter", "adapter")):
            sync.push(mode=mode)
            llm.sleep(level=level)
            train(model)
            report = sync.push(mode=mode)
            assert mode == "merged" or report.base_sent == (level == 2), "level 2 throws the weights away"
            assert (
                not processes or "sleep mode" in report.buckets or "pull" in report.transports or not report.base_sent
            )
            assert_answers(ask(llm, sync.lora_request()), model)
        sync.push(mode="merged")
        llm.sleep(level=2)
        llm.wake_up()
        assert sync.states()[0].kind == "dirty", "the weights were discarded behind our back"
        sync.push()
        assert_answers(ask(llm), model)
        sync.close()


@pytest.mark.parametrize("processes", [False, True], ids=["same process", "cuda ipc"])
def test_cuda_graphs_and_compiled_models_compute_with_what_was_pushed(processes: bool, tmp_path: Path) -> None:
    """What was captured and compiled before a push reads the addresses that the push writes to; after a sleep, too,
    which vLLM allows one engine in the life of a process: here those of their own."""
    model = policy(engines.qwen2, **DENSE)
    options = BF16 | {"enforce_eager": False, "enable_sleep_mode": processes, "enable_lora": True, "max_lora_rank": 8}
    with engine(model, tmp_path / "base", processes=processes, **options) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step, mode in enumerate(["merged", "adapter", "merged"]):
            train(model, step)
            sync.push(mode=mode, verify=True)
            assert_answers(ask(llm, sync.lora_request()), model)
        for level in (1, 2) if processes else ():
            llm.sleep(level=level)
            train(model, level)
            sync.push()
            assert_answers(ask(llm), model)
        sync.close()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_cuda_graphs_of_experts(name: str, tmp_path: Path) -> None:
    model = policy(getattr(engines, name), **MOE)
    with engine(model, tmp_path / "base", **BF16 | {"enforce_eager": False}) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            sync.push()
            assert_answers(ask(llm), model)


def test_a_refused_push_leaves_a_sleeping_engine_asleep(tmp_path: Path) -> None:
    model = policy(engines.qwen2, **DENSE)
    with engine(model, tmp_path / "base", processes=True, **BF16 | {"enable_sleep_mode": True}) as llm:
        sync = VllmSync(model, llm)
        for level in (1, 2):
            sync.push()
            llm.sleep(level=level)
            asleep = torch.cuda.mem_get_info()[0]
            layer = model.base_model.model.model.layers[0].mlp
            layer.extra = nn.Linear(8, 8, device="cuda", dtype=torch.bfloat16)
            with pytest.raises(PushRefused, match="extra"):
                sync.push()
            del layer.extra
            assert llm.llm_engine.is_sleeping()
            assert abs(torch.cuda.mem_get_info()[0] - asleep) < 1 << 27, "the KV cache's memory is free"
            train(model, level)
            sync.push()
            assert_answers(ask(llm), model)
        sync.close()


def test_a_trainer_that_dies_when_it_has_woken_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are awake, its KV cache sleeps: the next push wakes that too. After users' own order it does not."""
    model = policy(engines.qwen2, **DENSE)
    with engine(model, tmp_path / "base", processes=True, **BF16 | {"enable_sleep_mode": True}) as llm:
        sync = VllmSync(model, llm)
        sync.push()
        awake = torch.cuda.mem_get_info()[0]
        llm.sleep(level=1)
        asleep = torch.cuda.mem_get_info()[0]

        async def die(*args: Any) -> None:
            raise KeyboardInterrupt

        async def nothing(*args: Any) -> None:
            pass

        with monkeypatch.context() as patch:
            patch.setattr(type(sync), "_connect", die)
            patch.setattr(type(sync._sequence), "sleep_again", nothing)
            with pytest.raises(KeyboardInterrupt):
                sync.push()
        assert torch.cuda.mem_get_info()[0] - awake > (asleep - awake) / 2, "the KV cache sleeps"
        train(model, 1)
        sync.push()
        assert_answers(ask(llm), model)
        assert torch.cuda.mem_get_info()[0] - awake < 1 << 27

        llm.sleep(level=1)
        llm.wake_up(tags=["weights"])
        train(model, 2)
        sync.push()
        assert torch.cuda.mem_get_info()[0] - awake > (asleep - awake) / 2, "its owner wakes the KV cache"
        llm.wake_up(tags=["kv_cache"])
        assert_answers(ask(llm), model)
        sync.close()


def test_training_weights_and_memory_after_a_hundred_pushes(tmp_path: Path) -> None:
    model = policy(engines.qwen2, **DENSE)
    before = copy.deepcopy(model.state_dict())
    with engine(model, tmp_path / "base", **BF16) as llm:
        sync = VllmSync(model, llm)
        sync.push()
        used = torch.cuda.memory_allocated()
        for _ in range(100):
            sync.push()
        assert torch.cuda.memory_allocated() == used
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8)), name


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=needs(2))])
def test_an_engine_that_dies_while_the_trainer_writes_to_it(tp: int, tmp_path: Path) -> None:
    """The memory that is written to goes away with its owner: the trainer is told, lives on, and pushes to the next."""
    model = policy(engines.qwen2, **DENSE)
    options = BF16 | {"tensor_parallel_size": tp, "worker_extension_cls": "faulty.Faulty"}
    sync = None
    for life in range(2):
        with engine(model, tmp_path / "base", processes=True, **options) as llm:
            sync = VllmSync(model, llm, bucket_bytes=1 << 17)
            assert sync.push().transports == ("write",)
            assert_answers(ask(llm), model)
            train(model, life)
            pids, place = llm.collective_rpc("process"), BucketWriter.write_direct

            def killing(self: BucketWriter, index: int, *args: Any, pids: Any = pids, place: Any = place) -> None:
                if index == 1:
                    for pid in pids:
                        os.kill(pid, signal.SIGKILL)
                    time.sleep(0.5)
                place(self, index, *args)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(BucketWriter, "write_direct", killing)
                with pytest.raises(PushFailed):
                    sync.push()
            with contextlib.suppress(Exception):
                sync.close()
    torch.cuda.synchronize()


def with_one_gpu(folder: str) -> None:
    """A trainer that sees one GPU, and an engine on the other one."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    model = policy(engines.qwen2, **DENSE)
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"  # of the engine's processes; this one has begun
    with engine(model, Path(folder) / "base", processes=True, **BF16) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            report = sync.push()
            assert report.transports == (("nccl",) if report.buckets else ("write",)), report
            assert_answers(ask(llm), model)
        assert sync.push(verify=True).transports == ("nccl", "write")
        sync.close()


@needs(2)
def test_a_gpu_that_the_trainer_does_not_see(tmp_path: Path) -> None:
    """As in Ray's actors: its memory is mapped all the same (H200, CUDA 13); where it is not, buckets go."""
    process = torch.multiprocessing.get_context("spawn").Process(target=with_one_gpu, args=(str(tmp_path),))
    process.start()
    process.join(240)
    assert process.exitcode == 0


@needs(2)
def test_experts_on_the_workers_that_hold_them(tmp_path: Path) -> None:
    model = policy(engines.qwen3_moe, **MOE)
    options = BF16 | {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    with engine(model, tmp_path / "base", processes=True, **options) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            sync.push(verify=True)
            assert_answers(ask(llm), model)


def data_parallel(rank: int, folder: Path, port: int) -> None:
    """A rank of the trainer, and its engine of two that hold half of the experts each."""
    own = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": 2, "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {f"VLLM_DP_{name}": str(value) for name, value in own.items()}
    model = policy(engines.qwen3_moe, **MOE)
    if rank == 0:
        engines.save_base(model.get_base_model(), folder / "base")
    dist.barrier()
    with engine(model, folder / "base", processes=True, enable_expert_parallel=True, **BF16) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            sync.push(verify=step == 0)
            assert_answers(ask(llm), model)
        control = sync._trainer.controls[0]
        request = control._request
        if rank == 1:
            control._request = lambda op, told: request("lost" if op == "commit" else op, told)  # type: ignore[method-assign]
        with pytest.raises(PushFailed, match=r"engine 0 is dirty.*engine 1 is dirty"):
            sync.push()
        control._request = request  # type: ignore[method-assign]
        assert [state.kind for state in sync.states()] == ["dirty"]
        train(model, 2)
        sync.push()
        assert_answers(ask(llm), model)
        sync.close()
        dist.barrier()  # an engine that ends takes the other one with it


@needs(2)
def test_experts_of_data_parallel_engines(tmp_path: Path) -> None:
    """Each answers with the other one's experts, too: where one is dirty, both are, and both wait."""
    spawn(2, data_parallel, tmp_path, launched.free_port(), backend="cpu:gloo,cuda:nccl", timeout=ENGINE)


@needs(2)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("wrap", [launched.plain, launched.ddp, fsdp2])
def test_an_engine_on_the_ranks_of_the_trainer(wrap: Any, tp: int, tmp_path: Path) -> None:
    """vLLM's external_launcher: with TP=2 each rank's handle reaches one of the two workers of one engine."""
    options = wrap, tmp_path, launched.free_port(), tp, BF16, TOLERANCE
    spawn(2, launched.colocated, *options, backend="cpu:gloo,cuda:nccl", timeout=ENGINE)


@needs(2)
@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe"])
def test_tensor_parallel_over_ipc_and_nccl(name: str, tmp_path: Path) -> None:
    model = policy(getattr(engines, name), **(MOE if "moe" in name else DENSE))
    with engine(model, tmp_path / "base", processes=True, tensor_parallel_size=2, **BF16) as llm:
        sync = VllmSync(model, llm, bucket_bytes=1 << 17)
        for step in range(2):
            train(model, step)
            report = sync.push(verify=step == 0)
            assert report.transports == (("ipc", "nccl", "write") if step == 0 else ("write",))
            assert_answers(ask(llm), model)


def trainer_of_several(rank: int, folder: Path, gpus: list[str], tp: int) -> None:
    pushes(rank, fsdp2, folder, torch.bfloat16, gpus, BF16 | {"tensor_parallel_size": tp}, TOLERANCE)


@needs(2)
def test_a_sharded_trainer(tmp_path: Path) -> None:
    """FSDP2 over two GPUs, one engine with TP=2 on the same GPUs: each worker is served by the rank on its GPU."""
    spawn(2, trainer_of_several, tmp_path, ["0,1"], 2, backend="nccl", timeout=ENGINE)


@needs(4)
def test_tensor_and_data_parallel_engines(tmp_path: Path) -> None:
    """FSDP2 over four GPUs, TP=2 x DP=2."""
    spawn(4, trainer_of_several, tmp_path, ["0,1", "2,3"], 2, backend="nccl", timeout=ENGINE)


def test_expandable_segments(tmp_path: Path) -> None:
    """Memory of PyTorch's that cannot be exported: buckets of other processes do not lie in it."""
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        model = policy(engines.qwen2, **DENSE)
        with engine(model, tmp_path / "base", processes=True, **BF16) as llm:
            sync = VllmSync(model, llm)
            assert sync.push(verify=True).transports == ("ipc", "write")
            assert_answers(ask(llm), model)
            sync.close()
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
