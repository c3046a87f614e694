"""verl for trainers.py: its FSDP2 engine of random weights on one rank, its bucket sender, and its worker extension in
a vLLM engine of another process. No Ray: what its actors would call is called here."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sync
import torch
import torch.distributed as dist
from trainers import Trainer, tokenizer
from trainers_swift import random_weights

TESTS = str(Path(__file__).parents[1] / "tests" / "support")
BUCKET_MB = 2048
"""verl's `update_weights_bucket_megabytes`."""


def prepare(device: str) -> None:
    """Before verl is imported, here and in the engine's process."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "VERL_RAY_JOB_ID": f"{os.getpid()}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29519")}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if device == "cpu":
        os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VLLM_PLUGINS": "lora_merge"}
        os.environ |= {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": "nvidia"}
    here = [TESTS, str(Path(__file__).parent)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*here, os.environ.get("PYTHONPATH", "")])
    sys.path.append(TESTS)


def engine_of(args: argparse.Namespace, folder: Path) -> Any:
    """verl's engine for language models with strategy fsdp2, as this package registers it; initialised."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    import lora_merge.integrations.verl  # noqa: F401 - registers the engine

    engine = EngineRegistry.new(
        model_type="language_model",
        backend="fsdp2",
        model_config=HFModelConfig(
            path=str(folder), lora_rank=args.rank, lora_alpha=2 * args.rank, lora={"merge": True},
            use_remove_padding=False, enable_gradient_checkpointing=False,
            override_config={"attn_implementation": "eager"},
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", model_dtype="bf16", use_torch_compile=False, use_dynamic_bsz=False,
            micro_batch_size_per_gpu=2, use_remove_padding=False,
        ),
        optimizer_config=FSDPOptimizerConfig(lr=1e-4, total_training_steps=10),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    with torch.no_grad():  # adapters begin as nothing
        for name, parameter in engine.module.named_parameters():
            if "lora_B" in name:
                parameter.to_local().normal_(std=0.02)
    return engine


@contextmanager
def started(args: argparse.Namespace, folder: Path) -> Iterator[Trainer]:
    """verl's FSDP2 engine, and the engine that it feeds."""
    prepare(args.device)
    sync.config_of(args.shape).save_pretrained(folder)
    tokenizer(folder)
    from vllm import LLM

    llm = LLM(
        str(folder), load_format="dummy", dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=64, gpu_memory_utilization=args.gpu_memory,
        worker_extension_cls="verl_extension.Extension",
        weight_transfer_config={"backend": "lora_merge"},
    )  # fmt: skip
    import no_ray  # noqa: F401 - only now, or vLLM would find it

    dist.init_process_group("gloo" if args.device == "cpu" else "cpu:gloo,cuda:nccl")
    with random_weights(args.device, "cpu"):
        engine = engine_of(args, folder)
    from verl.utils.device import is_support_ipc
    from verl.workers.engine import FSDPEngineWithLMHead
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    from lora_merge import VllmSync

    pool, ours = ThreadPoolExecutor(1), type(engine)
    handle = f"ipc:///tmp/rl-colocate-zmq-{os.environ['VERL_RAY_JOB_ID']}-replica-0-rank-0.sock"
    bucket = BUCKET_MB if args.device == "cuda" else 16
    shared = not is_support_ipc()
    report: list[Any] = []

    def sent() -> None:
        stream, _ = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
        loading = pool.submit(
            llm.collective_rpc, "update_weights_from_ipc", None, (), {"use_shm": not is_support_ipc()}
        )
        sender = BucketedWeightSender(handle, bucket, use_shm=shared)
        asyncio.run(sender.async_send_weights(stream))
        loading.result()

    def as_(kind: type) -> Callable[[], object]:
        engine.__class__ = kind
        return sent

    def pushed() -> Callable[[], object]:
        pusher = VllmSync(engine.module, llm)
        return lambda: report.append(pusher.push())

    ways = {
        "verl's own": lambda: as_(FSDPEngineWithLMHead),
        "lora_merge, verl's transport": lambda: as_(ours),
        "lora_merge, pushed": pushed,
    }
    yield Trainer("verl", ("verl",), engine.module, ways, lambda: report[-1].nbytes)
    print(report[-1])
    pool.shutdown()
    llm.llm_engine.engine_core.shutdown()
    dist.destroy_process_group()
