"""What a rank does with verl's real FSDP2 engine of a model that sees images, on CPUs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import images
import torch
from computed import computed
from helpers import assert_same_bits
from transformers import AutoProcessor
from verl.models.transformers.qwen2_vl import get_rope_index
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl_engines import engine_of
from verl_ranks import assert_is_merge, float64_merge, is_base, likelihood, taken, whole


def batch(folder: Path, rank: int, seed: int) -> Any:
    """A rank's share, as verl's agent loop and its removal of padding leave it: each prompt has an image or two."""
    processor, seen = AutoProcessor.from_pretrained(folder), images.images(3)
    g = torch.Generator().manual_seed(1000 * rank + seed)
    rows: dict[str, list[Any]] = {name: [] for name in ("input_ids", "position_ids", "loss_mask", "multi_modal_inputs")}
    for i in range(4):
        shown = [seen[(rank + i + j) % 3] for j in range(1 + i % 2)]
        made = processor(text=[images.IMAGE * len(shown) + f"say {i}"], images=shown, return_tensors="pt")
        said = torch.randint(0, 256, (5 + i,), generator=g)
        ids = torch.cat([made["input_ids"][0], said])
        places = get_rope_index(processor, ids, image_grid_thw=made["image_grid_thw"])
        rows["input_ids"].append(ids)
        rows["position_ids"].append(torch.cat([torch.arange(len(ids))[None], places]))
        rows["loss_mask"].append(torch.arange(len(ids)) >= len(ids) - len(said))
        rows["multi_modal_inputs"].append({name: made[name] for name in ("pixel_values", "image_grid_thw")})
    nested = {
        name: torch.nested.as_nested_tensor(rows[name], layout=torch.jagged)
        for name in ("input_ids", "position_ids", "loss_mask")
    }
    return tu.get_tensordict(
        nested | {"multi_modal_inputs": rows["multi_modal_inputs"]},
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


def trains(rank: int, folder: Path) -> None:
    """What is sent is base and adapters merged, of the tower, too, and what is computed with; the base stays."""
    import lora_merge.integrations.verl  # noqa: F401

    engine = engine_of(folder)
    before = whole(engine)
    assert any("visual" in name and "lora_B" in name for name in before)
    for step in range(2):
        sent = taken(engine)
        engine.training.pause()
        live = images.live_names(engine.module, sent)
        assert_is_merge({n: t.bfloat16() for n, t in live.items()}, float64_merge(engine))
        with computed(engine.module, partial(dict, live)) as seen, engine.train_mode():
            engine.train_batch(batch(folder, rank, step), likelihood)
        layers = sum(hasattr(module, "base_layer") for module in engine.module.modules())
        assert seen["forward"] >= seen["backward"] > layers, "two micro-batches"
    engine.training.pause()
    for name, parameter in whole(engine).items():
        if is_base(name):
            assert_same_bits(parameter, before[name], name)
        elif "lora_B" in name:
            assert (parameter - before[name]).abs().max() > 0, f"{name} was not trained"
