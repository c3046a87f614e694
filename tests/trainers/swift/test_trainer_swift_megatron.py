"""`megatron rlhf` of ms-swift, its own entry and trainers: each answer comes from the policy, and the base stays.

TransformerEngine's modules are stood in for (`te_cpu`); the rest is real: ms-swift, mcore-bridge, megatron-core, vLLM.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from repository import SUPPORT

if find_spec("mcore_bridge") is None:
    pytest.skip("swift's tests run in an environment of their own", allow_module_level=True)

import swift_runs

from lora_merge.integrations.compat import TrainerRefused
from lora_merge.integrations.ms_swift.refusals import refuse_megatron
from lora_merge.integrations.options import Options
from tests.trainers.swift import test_trainer_swift_processes as processes
from tests.trainers.swift.test_trainer_swift_processes import at, environment

nothing_set, base, server = swift_runs.nothing_set, processes.base, processes.server
EXACT = 1e-4
"""Of importance ratios in float32: some ten roundings of 2^-24 in a log-prob of a few units, on either side."""
EXPERTS = {"expert_model_parallel_size": "2", "model_type": "qwen3_moe", "template": "qwen3", "micro_batch_size": "1"}
BF16 = {"torch_dtype": "bfloat16", "bf16": "true", "clip_grad": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints: `tied` and `untied`, and `experts`."""
    made = tmp_path_factory.mktemp("swift")
    for tied in (True, False):
        swift_runs.checkpoint(swift_runs.qwen2(tied), made / ("tied" if tied else "untied"))
    swift_runs.checkpoint(swift_runs.qwen3_moe(), made / "experts")
    swift_runs.dataset(made / "data.jsonl")
    return made


def trained(kind: str, world: int, base: Path, out: Path, flags: dict[str, str], **more: str) -> list[dict[str, Any]]:
    """What each rank of a training has seen."""
    together = {"WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{world}", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": swift_runs.port(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "TORCHDYNAMO_DISABLE": "1"}  # fmt: skip
    ranks = []
    for rank in range(world):
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(SUPPORT / "swift_megatron.py"), kind, str(base), str(out), json.dumps(flags)],
                env=environment(RANK=f"{rank}", LOCAL_RANK=f"{rank}", **together, **more), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    try:
        said = [rank.communicate(timeout=400)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, said, strict=True):
        assert rank.returncode == 0, text[-6000:]
    assert sum(text.count("lora_merge takes over Megatron") for text in said) == 1
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("kind", "world", "base", "flags"), [
    ("grpo", 2, "untied", {"tensor_model_parallel_size": "2"}),
    ("grpo", 2, "untied", {"pipeline_model_parallel_size": "2"}),
    ("grpo", 2, "experts", EXPERTS),
    ("grpo", 1, "tied", BF16),
    ("grpo", 1, "untied", {"vllm_enable_lora": "true"}),
    ("gkd", 1, "untied", {"teacher_model": "tied", "teacher_model_type": "qwen2"}),
])  # fmt: skip
def test_each_answer_comes_from_the_policy(
    kind: str, world: int, base: str, flags: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    """Its weights, each element rounded once, in the engine of every rank; the shards keep their bits."""
    if kind == "gkd":
        flags = flags | {"teacher_model": str(folder / flags["teacher_model"])}
    check = {} if kind == "gkd" else {"LORA_MERGE_CHECK": "1"}
    ranks = trained(kind, world, folder / base, tmp_path, flags, LORA_MERGE_VERIFY="1", **check)
    for seen in ranks:
        assert seen["class"] == f"lora_merge.integrations.ms_swift.megatron.Megatron{kind.upper()}Trainer"
        assert seen["looks"] == 3
        assert seen["trained"] > 0.01
        assert [told["lora_merge/version"] for told in seen["told"]] == [1, 2, 3]
        assert all(told["lora_merge/coverage"] == 1 for told in seen["told"])
    merged = 0 if "vllm_enable_lora" in flags else 1
    assert all(told["lora_merge/merged"] == merged for told in ranks[-1]["told"])
    if check:  # the last pipeline stage has the trainer's log-probs
        for told in ranks[-1]["told"]:
            low, high, mean = (told[f"lora_merge/ratio_{kind}"] for kind in ("min", "max", "mean"))
            assert abs(mean - 1) < 0.02
            assert flags is BF16 or 1 - EXACT < low <= high < 1 + EXACT, (low, high)
    worst, stock = max(seen["worst"] for seen in ranks), [seen["stock"] for seen in ranks]
    assert all(one["changed"] for one in stock)
    print(f"{kind} {flags}: engine: {worst:.2f} of what rounding allows; swift's own way: {stock}")


def test_a_stream_into_the_rollout_server(server: str, base: Path, tmp_path: Path) -> None:
    """From the rank that talks to it, the last one; the answers are the policy's."""
    flags = {name: value for name, value in at(server).items() if name != "max_steps"}
    flags |= {"tensor_model_parallel_size": "2"}
    for seen in trained("grpo", 2, base, tmp_path, flags, LORA_MERGE_CHECK="1"):
        assert [told["lora_merge/version"] for told in seen["told"]] == [1, 2, 3]
        ratios = [told[f"lora_merge/ratio_{kind}"] for told in seen["told"] for kind in ("min", "max")]
        assert all(abs(ratio - 1) < EXACT for ratio in ratios), ratios


NAMES = """
import os
import swift_megatron
swift_megatron.prepare()
import swift.megatron.trainers as trainers
from swift.megatron.trainers.rollout_mixin import MegatronRolloutMixin
from lora_merge.integrations.ms_swift import kinds
own = trainers.MegatronGRPOTrainer
os.environ["LORA_MERGE"] = "0"
kinds.take_over()
assert trainers.MegatronGRPOTrainer is own
del os.environ["LORA_MERGE"]
lacking = MegatronRolloutMixin._sync_bucket_to_server
del MegatronRolloutMixin._sync_bucket_to_server
try:
    kinds.take_over()
except RuntimeError as error:
    print(error)
MegatronRolloutMixin._sync_bucket_to_server = lacking
kinds.take_over()
kinds.take_over()
print(len([kind for kind in trainers.MegatronGRPOTrainer.__mro__ if "lora_merge" in kind.__module__]))
print(issubclass(trainers.MegatronGRPOTrainer, own), trainers.MegatronDPOTrainer.__module__)
os._exit(0)
"""


def test_names() -> None:
    """`megatron rlhf` finds trainers by name: these push, unless LORA_MERGE=0 or a name that is used is missing."""
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": swift_runs.port(),
    }
    done = subprocess.run(
        [sys.executable, "-uc", NAMES], env=environment(**alone), text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lacking, classes, last = done.stdout.splitlines()[-3:]
    assert "does not offer swift.megatron.trainers.rollout_mixin.MegatronRolloutMixin._sync_bucket_to_server" in lacking
    assert int(classes) == 3, "the class, and what it inherits from"
    assert last == "True swift.megatron.trainers.dpo_trainer"


PLAIN = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_lora": False, "tuner_type": "lora", "lmbda": 0.5,
         "rlhf_type": "grpo", "use_megatron_fsdp": False, "bridge_backend": "mcore-bridge", "fp8_param_gather": False,
         "fp4_param_gather": False, "top_k": -1, "top_p": 1.0, "repetition_penalty": 1.0, "async_generate": False,
         "structured_outputs_regex": None}  # fmt: skip
WHOLE = {"quant_method": None, "quant_bits": None}


@pytest.mark.parametrize(("args", "info", "options", "message"), [
    ({"use_vllm": False}, {}, {}, "--use_vllm true --vllm_mode colocate"),
    ({}, {"quant_method": "fp8", "quant_bits": 8}, {}, "quantised"),
    ({"rlhf_type": "gkd", "lmbda": 0}, {}, {}, "--lmbda 0"),
    ({"use_megatron_fsdp": True}, {}, {}, "--use_megatron_fsdp true .*pass false"),
    ({"bridge_backend": "megatron-bridge"}, {}, {}, "pass mcore-bridge"),
    ({"fp8_param_gather": True}, {}, {}, "--fp8_param_gather true"),
    ({"vllm_mode": "server"}, {}, {"verify": True}, "LORA_MERGE_VERIFY"),
    ({}, {}, {"mode": "adapter"}, "--vllm_enable_lora true"),
    ({"rlhf_type": "gkd"}, {}, {"check": 0.02}, "leave LORA_MERGE_CHECK out"),
    ({"top_k": 5}, {}, {"check": 0.02}, r"--top_k 5 \(pass -1\)"),
])  # fmt: skip
def test_what_is_refused(args: dict[str, Any], info: dict[str, Any], options: dict[str, Any], message: str) -> None:
    refuse_megatron(SimpleNamespace(**PLAIN, model_info=SimpleNamespace(**WHOLE)), Options(check=0.02))
    wrong = SimpleNamespace(**PLAIN | args, model_info=SimpleNamespace(**WHOLE | info))
    with pytest.raises(TrainerRefused, match=message):
        refuse_megatron(wrong, Options(**options))
