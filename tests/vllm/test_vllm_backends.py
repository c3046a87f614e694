"""vLLM's own weight-transfer backends take `MergedWeights` as their source: their classes of both sides, and a real
engine, which was started without this package's worker code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch.distributed as dist
import vllm_backends
from engines import ask, assert_answers, engine
from processes import spawn
from sharded_trainer import train_alike
from torch import nn
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import WeightSource, layerwise_groups
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo
from vllm.distributed.weight_transfer.sharded_rdt_trainer import ShardedRDTTrainerInitInfo

from lora_merge import MergedWeights
from lora_merge.stream.by_layer import by_layer
from tests.shards.test_shards_merge import fsdp2

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


def build() -> nn.Module:
    return models.with_lora(engines.qwen3, target_modules=["q_proj", "v_proj", "down_proj"])


def port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def served(rank: int, folder: Path) -> Iterator[Any]:
    """Rank 0's engine in a process of its own, as anybody starts one for vLLM's backends."""
    if rank:
        yield None
        return
    options: dict[str, Any] = {
        "worker_extension_cls": "vllm_backends.Switched",
        "weight_transfer_config": WeightTransferConfig(backend="ipc"),
    }
    with engine(build(), folder / "base", processes=True, **options) as llm:
        yield llm


def sends(rank: int, model: Any, plain: Any, llm: Any, folder: Path) -> None:
    """Each backend in turn brings another step of training, which the engine then answers with."""
    client = vllm_backends.Engine(llm)
    source = MergedWeights(model, bucket_bytes=1 << 16)
    ways: dict[str, Any] = {
        "nccl": lambda packed: NCCLTrainerInitInfo(
            "127.0.0.1", port(), 2, packed, packed_buffer_size_bytes=50_000, rank=rank
        ),
        "ipc": lambda packed: IPCTrainerInitInfo(packed, packed_buffer_size_bytes=1 << 18, rank=rank),
        "sharded_rdt": lambda packed: ShardedRDTTrainerInitInfo(
            1, trainer_actor_namespace=str(folder), gather_lookahead=int(packed), stall_timeout_s=60.0, rank=rank
        ),
    }
    for backend, options in ways.items():
        for packed in (True, False):
            if llm is not None:
                llm.collective_rpc("use", args=(backend,))
            dist.barrier()
            info = options(packed)
            made = vllm_backends.RDTTrainer if backend == "sharded_rdt" else WeightTransferTrainerFactory
            trainer = made.trainer_init(info, client=client, source=source)
            for _ in range(2 if backend == "sharded_rdt" else 1):
                for one in (model, plain):
                    train_alike(one)
                trainer.send_weights()
                dist.barrier()
                if llm is not None:
                    assert (client.calls[0], client.calls[-1]) == ("start", "finish"), client.calls
                    client.calls.clear()
                    llm.reset_prefix_cache()
                    assert_answers(ask(llm), plain)
            if backend == "sharded_rdt":
                assert trainer.served == sorted(source.held_names() or ())
                assert 0 < len(trainer.served) < len(source.metadata()), "each rank serves its own part"


def works(rank: int, folder: Path) -> None:
    vllm_backends.settle(rank)
    plain, sharded = build(), fsdp2(build())
    with served(rank, folder) as llm:
        sends(rank, sharded, plain, llm, folder)


def test_every_backend_takes_a_sharded_trainers_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # as vLLM asks of who sends IPC handles over HTTP
    spawn(2, works, tmp_path, timeout=timedelta(minutes=4))


ODD = ["wte.weight", "h.1.a", "h.0.b", "norm.weight", "vision.blocks.2.x", "h.10.a.7.c", "h.2.a", "vision.blocks.0.x"]


def test_layers_are_vllms() -> None:
    for names in (ODD, ODD[::-1], ["a", "b"], ["0.a", "1.b", "a.0"], [], ["layers.3"]):
        assert by_layer(names) == layerwise_groups(names), names
    model = build()
    names = [meta.name for meta in MergedWeights(model).metadata()]
    assert [name for group in layerwise_groups(names) for name in group] == names
    asked = {name for name in vars(WeightSource) if not name.startswith("_")}
    assert asked == {"metadata", "held_names", "groups", "iter_groups"}, "what vLLM asks of a source"
    assert asked <= set(dir(MergedWeights))
