"""What vLLM's own weight-transfer backends do with the stream on NVIDIA GPUs: CUDA IPC of its tensors, and, where vLLM
has trainer engines (0.28 and later), its IPC and NCCL backends into a real engine."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from lora_merge import MergedWeights

pytestmark = pytest.mark.gpu


def _read(handles: list[tuple[str, Any]], answer: Any) -> None:
    found = {}
    for name, args in handles:
        tensor = rebuild_cuda_tensor(*args)
        found[name] = tensor.reshape(-1).view(torch.uint8).long().sum().item()
        del tensor
    torch.cuda.synchronize()
    answer.put(found)


def test_another_process_reads_tensors_of_the_stream() -> None:
    """As vLLM's `ipc` exports them, one handle a tensor, all of them held."""
    model = models.with_lora(models.qwen2, dtype=torch.bfloat16).cuda()
    for groups in (False, True):
        source = MergedWeights(model, bucket_bytes=1 << 16)
        pairs = [(n, t) for layer in source.iter_groups() for n, t in zip(*layer, strict=True)] if groups else [*source]
        handles = [(name, reduce_tensor(tensor)[1]) for name, tensor in pairs]
        context = multiprocessing.get_context("spawn")
        answer = context.Queue()
        process = context.Process(target=_read, args=(handles, answer))
        process.start()
        found = answer.get(timeout=120)
        process.join()
        assert found == {name: tensor.reshape(-1).view(torch.uint8).long().sum().item() for name, tensor in pairs}


def _trainer_engines() -> bool:
    if find_spec("vllm") is None:
        return False
    import vllm.distributed.weight_transfer.ipc_engine as api

    return hasattr(api, "IPCTrainerInitInfo")


@contextmanager
def _visible(gpu: str) -> Any:
    """What is started meanwhile sees this GPU alone."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


@pytest.mark.skipif(not _trainer_engines(), reason="vLLM 0.28 and later have trainer engines")
@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_vllms_backends(backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine answers as the policy after each step, packed and not."""
    import engines
    from engines import ask, engine, train
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.clients import _json_safe_update_payload
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
    from vllm.utils.network_utils import get_open_port

    from tests.gpu.test_vllm_gpu import BF16, assert_answers, policy

    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants two GPUs")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    model = policy(engines.qwen2)

    class Client:
        def __init__(self, llm: Any) -> None:
            self.llm = llm

        def init_weight_transfer_engine(self, init_info: Any) -> None:
            self.llm.init_weight_transfer_engine({"init_info": init_info})

        def start_weight_update(self) -> None:
            self.llm.start_weight_update()

        def update_weights(self, update_info: Any) -> None:
            self.llm.update_weights({"update_info": _json_safe_update_payload(update_info)})

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            self.llm.finish_weight_update(weight_version)

    options = BF16 | {"weight_transfer_config": WeightTransferConfig(backend=backend)}
    with (
        _visible("1" if backend == "nccl" else "0"),
        engine(model, tmp_path / "base", processes=True, **options) as llm,
    ):
        source = MergedWeights(model, bucket_bytes=1 << 17)
        info: Any
        if backend == "nccl":
            info = NCCLTrainerInitInfo("127.0.0.1", get_open_port(), 2, packed_buffer_size_bytes=1 << 18, rank=0)
        else:
            info = IPCTrainerInitInfo(rank=0)
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=Client(llm), source=source)
        for step in range(3):
            train(model, step, size=0.02)
            trainer.send_weights()
            llm.reset_prefix_cache()
            assert_answers(ask(llm), model)
        trainer.shutdown()
