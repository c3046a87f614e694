"""What a rank of a trainer does with verl's real FSDP2 engine, on CPUs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_same_bits
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel, _init_utils
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine.base import merge_weight_chunks, split_weight_chunks
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import QATEngineConfig
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.rollout.sglang_rollout.utils import get_named_tensor_buckets
from verl_engines import engine_of

from lora_merge.errors import InvalidInput, LoraMergeError
from lora_merge.integrations.compat import TrainerRefused
from lora_merge.integrations.metrics import PolicyGap
from lora_merge.integrations.verl_engines.rollout import LoraMergeServerAdapter


def batch(rank: int, seed: int, **fields: Tensor) -> Any:
    """A share of a batch in verl's layout without padding: whole sequences, and masks of their responses."""
    g = torch.Generator().manual_seed(1000 * rank + seed)
    sequences = [torch.randint(0, 256, (length,), generator=g) for length in (12, 9, 14, 10)]
    masks = [torch.arange(len(s)) >= 5 for s in sequences]
    jagged = {
        "input_ids": sequences,
        "position_ids": [torch.arange(len(s)) for s in sequences],
        "loss_mask": masks,
    }
    nested = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in jagged.items()}
    return tu.get_tensordict(
        {**nested, **fields},
        {
            "use_remove_padding": False,
            "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2,
            "use_fused_kernels": False,
            "pad_mode": DatasetPadMode.NO_PADDING,
            "temperature": 1.0,
            "global_batch_size": 8,
        },
    )


def likelihood(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """A loss."""
    return -model_output["log_probs"].values().mean(), {}


def step(engine: Any, seed: int, **fields: Tensor) -> dict[str, Any]:
    """A real step: forward, backward, clipping, optimizer; its metrics."""
    with engine.train_mode():
        return engine.train_batch(batch(engine.rank, seed, **fields), likelihood)["metrics"]


def whole(engine: Any) -> dict[str, Tensor]:
    """Every parameter as it lies in the model, under PEFT's names, gathered."""
    if isinstance(engine.module, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(engine.module, writeback=False):
            return {bare(name): p.detach().clone() for name, p in engine.module.named_parameters()}
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in engine.module.named_parameters()
    }


def bare(name: str) -> str:
    """Without what FSDP1 wraps modules in."""
    return name.replace("_fsdp_wrapped_module.", "")


def world_size() -> int:
    return torch.distributed.get_world_size()


def is_base(name: str) -> bool:
    return "lora_" not in name and "modules_to_save" not in name


def float64_merge(engine: Any) -> dict[str, Tensor]:
    """HF names and what should be streamed, by the plainest code, in float64."""
    parameters, config = whole(engine), engine.module.peft_config["default"]
    modules, merged = {bare(f"{name}."): module for name, module in engine.module.named_modules()}, {}
    for name, p in parameters.items():
        if "lora_" in name or ".original_module." in name:
            continue
        value = p.double()
        stem = name.removesuffix(".base_layer.weight")
        if stem != name:
            A, B = (parameters[f"{stem}.lora_{half}.default.weight"].double() for half in "AB")
            scaling = modules[f"{stem}."].scaling["default"]
            leaf = stem.split(".")[-1]
            assert A.shape[0] == config.rank_pattern.get(leaf, config.r)
            assert scaling == config.alpha_pattern.get(leaf, config.lora_alpha) / A.shape[0]
            value = value + scaling * (B @ A)
        for part in (".base_layer", ".modules_to_save.default"):
            name = name.replace(part, "")
        merged[name.removeprefix("base_model.model.")] = value
    return merged


def taken(engine: Any) -> dict[str, Tensor]:
    """verl's stream as its transports take it: each tensor copied while it is there."""
    stream, peft_config = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
    assert peft_config is None
    return {name: tensor.detach().clone() for name, tensor in stream}


def assert_is_merge(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """In bf16: half a step, at most 2^-8 of the value, and what a float32 sum of some ten products is off by, taken
    generously as 2^-18 of the largest value."""
    assert got.keys() == wanted.keys(), got.keys() ^ wanted.keys()
    for name, value in wanted.items():
        assert got[name].dtype == torch.bfloat16, name
        assert got[name].shape == value.shape, name
        error = (got[name].double() - value).abs()
        assert bool((error <= value.abs() * 2**-8 + value.abs().max() * 2**-18).all()), (name, error.max())


def against_stock(engine: Any) -> dict[str, Any]:
    """verl's own merged stream of the same engine beside ours, and what it leaves of the base.

    Returns:
        elements of tensors that both streams have, how many of them differ, and the error of stock's (to float64, in
        root mean square) over ours; tensors that are more than rounding away in stock's; names that only one of them
        has; of the base that stock leaves, how many elements differ.
    """
    before, ours, wanted = whole(engine), taken(engine), float64_merge(engine)
    for name, p in whole(engine).items():
        assert_same_bits(p, before[name], f"{name} after our stream")
    # What is no DTensor (FSDP1 on one rank) verl leaves to the rollout to round.
    stock = FSDPEngineWithLMHead._merged_lora_per_tensor_param(engine)
    theirs = {name: t.clone() if world_size() > 1 else t.bfloat16() for name, t in stock}
    assert_is_merge(ours, wanted)
    lacking, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    if engine.module.config.tie_word_embeddings:  # stock sends a tied tensor under both names
        assert extra == ["lm_head.weight"], extra
        assert_same_bits(theirs["lm_head.weight"], theirs["model.embed_tokens.weight"], "tied")
    wrong, differ, elements, errors = [], 0, 0, [0.0, 0.0]
    for name in ours.keys() & theirs.keys():
        assert theirs[name].shape == ours[name].shape, name
        assert theirs[name].dtype == ours[name].dtype, name
        elements, differ = elements + ours[name].numel(), differ + int((theirs[name] != ours[name]).sum())
        both = [float((one[name].double() - wanted[name]).square().sum()) for one in (ours, theirs)]
        errors = [error + more for error, more in zip(errors, both, strict=True)]
        if both[1] > 2.0**-14 * float(wanted[name].square().sum()):
            wrong.append(name)
    drift = sum(int((p != before[name]).sum()) for name, p in whole(engine).items() if is_base(name))
    return {"elements": elements, "differ": differ, "error": (errors[1] / errors[0]) ** 0.5, "drift": drift,
            "tensors": len(ours), "wrong": wrong, "lacking": lacking, "extra": extra}  # fmt: skip


async def sglang_buckets(stream: Any) -> dict[str, Tensor]:
    """verl's batches for SGLang: lists of tensors that are held until the list is full."""
    found = {}
    async for bucket in get_named_tensor_buckets(stream, 1 << 15):
        found |= {name: tensor.clone() for name, tensor in bucket}
    return found


async def checkpoint_engine(stream: Any) -> dict[str, Tensor]:
    """verl's chunks for its checkpoint engines (nccl, nixl, ...), put together again."""
    found = {}
    async for name, tensor in merge_weight_chunks(split_weight_chunks(stream, 1 << 15), 1 << 15):
        found[name] = tensor.clone()
    return found


def three_steps(engine: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Train and sync three times: each stream is the policy, and the base keeps its bits.

    Returns:
        each step's metrics, and the last stream.
    """
    base = {name: p for name, p in whole(engine).items() if is_base(name)}
    metrics: list[dict[str, Any]] = []
    last: dict[str, Tensor] = {}
    for turn in range(3):
        metrics.append(step(engine, turn))
        now = taken(engine)
        assert_is_merge(now, float64_merge(engine))
        assert last == {} or any(not torch.equal(now[name], last[name]) for name in now), "nothing was trained"
        last = now
        for name, p in whole(engine).items():
            if is_base(name):
                assert_same_bits(p, base[name], f"{name} after step and sync {turn}")
    return metrics, last


def streams(rank: int, folder: Path, changes: dict[str, Any], answer: Path) -> None:
    """Training steps and syncs in turn: the base keeps its bits, each stream is the policy, as stock's within rounding;
    a checkpoint of verl's own manager brings the same stream back, and the same next step."""
    engine = engine_of(folder / "model", **changes)
    assert type(engine).__module__ == "lora_merge.integrations.verl_engines.fsdp"
    metrics, last = three_steps(engine)
    found: dict[str, Any] = {
        "told": [{name: v for name, v in one.items() if name.startswith("lora_merge/")} for one in metrics]
    }
    offloaded = engine.get_per_tensor_param()[0]
    next(offloaded)
    offloaded.close()  # a sender that failed
    assert_same_bits(taken(engine)["model.norm.weight"], last["model.norm.weight"], "after one that broke off")
    for transport in (sglang_buckets, checkpoint_engine):
        carried = asyncio.run(transport(engine.get_per_tensor_param()[0]))
        assert carried.keys() == last.keys()
        for name, tensor in last.items():
            assert_same_bits(carried[name], tensor, f"{name} by {transport.__name__}")
    engine.save_checkpoint(str(folder / "checkpoint"), global_step=3)
    again = engine_of(folder / "model", **changes)
    again.load_checkpoint(str(folder / "checkpoint"), del_local_after_load=False)
    resumed = taken(again)
    for name, tensor in last.items():
        assert_same_bits(resumed[name], tensor, f"{name} after resume")
    for one in (engine, again):
        step(one, 7)
    after, there = taken(engine), taken(again)
    for name, tensor in after.items():
        assert_same_bits(there[name], tensor, f"{name}, a step after resume")
    assert_is_merge(there, float64_merge(again))
    found |= against_stock(again)
    found["offloaded"] = again.is_param_offload_enabled
    if rank == 0:
        answer.write_text(json.dumps(found))


def steps_and_syncs(rank: int, folder: Path, answer: Path, strategy: str) -> None:
    """In turn, on verl's engine of this strategy: each stream is the policy, the base keeps its bits."""
    import lora_merge.integrations.verl  # noqa: F401

    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    else:  # FSDP1 wants GPUs for what it sends to all ranks at first, and verl for what it loads; gloo does without
        _init_utils._check_module_states_for_sync_module_states = lambda module: None
        transformer_impl.load_fsdp_model_to_gpu = lambda model: None
    engine = engine_of(folder / "model", strategy=strategy)
    assert type(engine).__module__ == "lora_merge.integrations.verl_engines.fsdp"
    assert isinstance(engine.module, FullyShardedDataParallel) == (strategy == "fsdp")
    three_steps(engine)
    found = against_stock(engine)
    if rank == 0:
        answer.write_text(json.dumps(found))


def log_probs(engine: Any, seed: int) -> Tensor:
    """The trainer's own of the responses of a batch: jagged, as in verl's batches."""
    with engine.eval_mode():
        found = engine.infer_batch(batch(engine.rank, seed))["model_output"]["log_probs"]
    rows = [row[4:-1].clone() for row in found.unbind()]  # entry t is about token t + 1; prompts have five tokens
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def fields(old: Tensor, rolled: Tensor, layout: str) -> dict[str, Tensor]:
    """What verl's batches hold of them; the padded ones have tokens of a tool, too, which do not count."""
    rows = [torch.ones(len(row), dtype=torch.bool) for row in old.unbind()]
    mask = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    found = {"old_log_probs": old, "rollout_log_probs": rolled, "response_mask": mask}
    if layout == "padded":
        found = {name: torch.nested.to_padded_tensor(field.float(), 0.0) for name, field in found.items()}
        found["response_mask"][:, 1] = 0.0
        found["rollout_log_probs"][:, 1] = -50.0
    return found


def checks(rank: int, folder: Path) -> None:
    """The check of each batch of an update, in both of verl's layouts, and what it refuses, on all ranks alike."""
    os.environ |= {"LORA_MERGE_CHECK": "1", "LORA_MERGE_DTYPE": "float32"}
    engine = engine_of(folder / "model")
    taken(engine)
    old = log_probs(engine, 0)
    near, far = (
        torch.nested.as_nested_tensor(
            [row + d * (torch.arange(len(row)) % 2 * 2.0 - 1) for row in old.unbind()], layout=torch.jagged
        )
        for d in (1e-4, 0.05)
    )
    for layout in ("jagged", "padded"):
        metrics = step(engine, 0, **fields(old, near, layout))
        low, high = metrics["lora_merge/ratio_min"][0], metrics["lora_merge/ratio_max"][0]
        assert 0.9998 < low < 1 < high < 1.0002, (layout, low, high)
        with pytest.raises(PolicyGap if rank else InvalidInput, match=r"ratio 0\.951. to 1\.051."):
            step(engine, 0, **fields(old, far if rank else near, layout))
        with pytest.raises(TrainerRefused, match=r"rollout_correction\.bypass_mode=False"):
            step(engine, 0, **fields(old, old, layout))
    lacking = fields(old, near, "padded")
    del lacking["rollout_log_probs"]
    with pytest.raises(TrainerRefused, match=r"rollout\.calculate_log_probs=True"):
        step(engine, 0, **lacking)
    del os.environ["LORA_MERGE_CHECK"], os.environ["LORA_MERGE_DTYPE"]


def refusals(rank: int, folder: Path) -> None:
    """What is not served is refused with verl's flag; what is not ours to take over is verl's own."""
    for merge, lora_rank in ((False, 8), (True, 0)):
        engine = engine_of(folder / "untied" / "model", lora={"merge": merge}, lora_rank=lora_rank)
        step(engine, 0)
        for done in (True, False):
            ours, peft = engine.get_per_tensor_param(base_sync_done=done)
            stock, also = FSDPEngineWithLMHead.get_per_tensor_param(engine, base_sync_done=done)
            assert (peft is None) == (also is None) == (lora_rank == 0)
            theirs = dict(stock)
            for name, tensor in dict(ours).items():
                assert_same_bits(tensor, theirs.pop(name), name)
            assert not theirs
        assert next(engine.get_per_tensor_param_shard()[0])
    engine = engine_of(folder / "untied" / "model")
    with pytest.raises(TrainerRefused, match=r"checkpoint_engine\.backend=delta_sharded .*lora\.merge=True"):
        engine.get_per_tensor_param_shard()
    with pytest.raises(
        TrainerRefused, match=r"model\.lora\.rank=8 is not read .* set actor_rollout_ref\.model\.lora_rank=8"
    ):
        engine_of(folder / "untied" / "model", lora={"merge": True, "rank": 8}, lora_rank=0)
    with pytest.raises(TrainerRefused, match=r"qat\.enable=True .*LORA_MERGE=0"):
        engine_of(folder / "untied" / "model", qat=QATEngineConfig(enable=True))
    biased = engine_of(
        folder / "untied" / "model", lora_adapter_path=str(folder / "untied" / "biased"), param_offload=True
    )
    with pytest.raises(TrainerRefused, match=r"lora\.merge=True cannot be served: .*lora_bias.*LORA_MERGE=0"):
        biased.get_per_tensor_param()
    head = engine_of(folder / "tied" / "model", lora_adapter_path=str(folder / "tied" / "head"))
    with pytest.raises(
        TrainerRefused, match=r"lm_head\.weight is tied to .*leave lm_head and .* out of .*target_modules"
    ):
        head.get_per_tensor_param()
    # An actor of verl's would be started for this; what it is told alone matters.
    adapter = object.__new__(LoraMergeServerAdapter)
    adapter.config = SimpleNamespace(engine_kwargs={"vllm": {"weight_transfer_config": {"backend": "lora_merge"}}})
    with pytest.raises(TrainerRefused, match=r"weight_transfer_config=\{backend:lora_merge\} is for merged weights"):
        asyncio.run(adapter.update_weights(iter([]), peft_config={"r": 8}))
    adapter.config.data_parallel_size = 2
    with pytest.raises(TrainerRefused, match=r"data_parallel_size=2 makes one of 2.*leave weight_transfer_con"):
        adapter._refuse_engines()
    adapter.config.engine_kwargs = {}
    adapter._refuse_engines()  # verl's own transport reaches all of them
    for name, value in (("LORA_MERGE_VERIFY", "1"), ("LORA_MERGE_CACHE", "keep"), ("LORA_MERGE_MERGE", "engine")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            unseen = engine_of(folder / "untied" / "model").get_per_tensor_param()[0]
            with pytest.raises(TrainerRefused, match=rf"{name}={value} .*weight_transfer_config=\{{"):
                next(unseen)
    for name, value in (
        ("CHECK", "1"),
        ("VERIFY", "1"),
        ("ROUNDING", "stochastic"),
        ("MERGE", "engine"),
        ("CACHE", "keep"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(f"LORA_MERGE_{name}", value)
            with pytest.raises(TrainerRefused, match=rf"LORA_MERGE_{name} is for merged weights.*lora\.merge=True"):
                engine_of(folder / "untied" / "model", lora={"merge": False})
    for name, value, message in (
        ("LORA_MERGE_MODE", "adapter", r"model\.lora\.merge=False is verl's own"),
        ("LORA_MERGE_DTYPE", "int8", "LORA_MERGE_DTYPE must be bfloat16, float16 or float32"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(LoraMergeError, match=message):
                engine_of(folder / "untied" / "model")
