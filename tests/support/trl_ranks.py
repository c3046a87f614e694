"""One of two ranks of a real TRL training, each with an engine in its process; torchrun starts it.

    torchrun --nproc-per-node 2 tests/support/trl_ranks.py KIND FOLDER

KIND is ddp, fsdp2, fsdp1 or zero3; FOLDER holds `base`. What was seen goes to FOLDER/KIND.rank.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from repository import ROOT

if sys.argv[1] == "zero3":
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.append(str(ROOT / ".venv" / "libraries"))  # where `make` puts DeepSpeed

import engines
import pytest
import torch.distributed as dist
import trl_training
from engines import ask, assert_answers
from torch import Tensor, nn
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import GRPOTrainer

import lora_merge.integrations.trl as lm
from lora_merge import PushFailed
from lora_merge.engine.vllm.loading.loader import Loader

ZERO3 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1100},
    "zero_allow_untested_optimizer": True,
}
SHARDED = {
    "ddp": {},
    "fsdp2": {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}},
    "fsdp1": {"fsdp": True, "fsdp_config": {"version": 1, "use_orig_params": True}},
    "zero3": {"deepspeed": ZERO3},
}

TRAINED_MERGED = ("fsdp2",)


def shard_on_cpus() -> None:
    """accelerate leaves FSDP out on CPUs, where torch has it: the rest of its way is taken as on a GPU."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plain = AcceleratorState.__init__

    def sharded(self: AcceleratorState, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = sharded


def main(kind: str, folder: Path) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    shard_on_cpus()
    with lm.engine_options(dtype="float32", enforce_eager=True):
        trainer = GRPOTrainer(
            model=str(folder / "base"),
            reward_funcs=trl_training.vowels,
            args=trl_training.arguments(folder / kind, **SHARDED[kind]),
            train_dataset=trl_training.prompts(),
            peft_config=trl_training.lora(),
        )
    before = whole(trainer.model)
    lm.attach(trainer, check=True, verify=True, train="merged" if kind in TRAINED_MERGED else None)
    trainer.train()
    after = whole(trainer.model)
    frozen = [name for name in before if "lora_" not in name]
    assert frozen
    unset_hf_deepspeed_config()  # what is built from here on is whole
    rollout, wanted = trainer.vllm_generation, trl_training.policy(folder / "base", after, trl_training.lora())
    rollout.sync_weights()
    assert_answers(ask(rollout.llm), wanted)
    # A sync that fails on one rank fails on both, and neither serves what it has before another one.
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Loader, "finish", broken)
        with pytest.raises(PushFailed, match=r"engine 1 is dirty: .*injected"):
            rollout.sync_weights()
    assert_answers(ask(rollout.llm), wanted)
    seen = {
        "changed": sum(int(after[name].ne(before[name]).sum()) for name in frozen),
        "trained": sum(int(after[name].ne(before[name]).sum()) for name in before if "lora_" in name),
        "wrapped": type(trainer.model_wrapped).__name__,
        "history": trainer.state.log_history,
    }
    (folder / f"{kind}.{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.barrier()
    os._exit(0)  # vLLM and torch end the same process groups


def broken(*args: Any) -> None:
    raise RuntimeError("injected")


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model, sharded or not, on every rank, by the names of the plain one."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    if "deepspeed" in sys.modules:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters(list(model.parameters())):
            return {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    box = [{name.removeprefix("module."): tensor.clone() for name, tensor in state.items()}]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


if __name__ == "__main__":
    _ = engines  # sets the environment of vLLM before it is imported
    main(sys.argv[1], Path(sys.argv[2]))
