"""What quantised engines hold and compute, seen from tests: their bits, the weights that they stand for, and the
trainer's forward with the same roundings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engines
import faulty
import pytest
import torch
import weight_bits
from torch import Tensor, nn

from lora_merge import MergedWeights, PushFailed, VllmSync
from lora_merge.stream.bucket_writer import BucketWriter
from lora_merge.stream.direct_targets import DirectTargets

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max


class Watched(faulty.Faulty, weight_bits.Bits):
    """Extends vLLM's workers."""


def save_merged(model: Any, folder: Path, dtype: torch.dtype | None = None) -> Path:
    """The checkpoint of the merged model, in its dtype or another."""
    from safetensors.torch import save_file

    engines.save_base(model.get_base_model(), folder)
    merged = {name: tensor.contiguous().clone() for name, tensor in MergedWeights(model, dtype=dtype)}
    save_file(merged, folder / "model.safetensors", {"format": "pt"})
    return folder


def served(llm: Any) -> nn.Module:
    """The model of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.get_model()


@contextmanager
def reloaded(llm: Any) -> Iterator[list[str]]:
    """Paths of the layers of an engine in this process that go through the reload inside."""
    from lora_merge.engine.vllm.loading.reload import Reload

    paths = {id(module): path for path, module in served(llm).named_modules()}
    found: list[str] = []
    end = Reload._process

    def noted(self: Reload, root: Any) -> None:
        found.append(paths.get(id(root), type(root).__name__))
        end(self, root)

    Reload._process = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Reload._process = end  # type: ignore[method-assign]


def matrices(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Of each linear layer that holds FP8 its name, its weight `[out, in]` in float64, dequantised, and the scale of
    each element."""
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.dtype != E4M3:
            continue
        blocks = module._parameters.get("weight_scale_inv")
        if blocks is None and module.weight_scale.dtype != torch.float32:  # MXFP8
            continue
        values = weight.double() if blocks is not None else weight.t().double()
        if blocks is not None:
            scale = blocks.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
            scale = scale[: values.shape[0], : values.shape[1]]
        else:
            scale = module.weight_scale.double().reshape(-1, 1).expand(values.shape[0], values.shape[1])
        yield path.removesuffix(".base_layer"), values * scale, scale


def stacked(exact: Mapping[str, Tensor], path: str) -> Tensor:
    """The checkpoint's tensors that an engine's linear layer is made of, one above the other."""
    inside, _, name = path.rpartition(".")
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}.get(name, (name,))
    return torch.cat([exact[f"{inside}.{part}.weight"] for part in parts])


def assert_rounded_once(exact: Mapping[str, Tensor], engine: nn.Module) -> int:
    """An engine's FP8 layers hold the merge (in float64) to a rounding of the format; returns how many they are.

    FP8 (E4M3) has 4 bits: at most 2^-4 of the value, or half a step of 2^-9 of the scale where that is more. The value
    that it rounds is the float64 merge rounded to bf16.
    """
    checked = 0
    for path, weight, scale in matrices(engine):
        wanted = stacked(exact, path)
        rows, cols = wanted.shape  # CUTLASS pads to sixteens
        weight, scale = weight[:rows, :cols], scale[:rows, :cols]
        bound = torch.maximum(2**-4 * wanted.abs(), 2**-10 * scale) * (1 + 2**-8) + 2**-8 * wanted.abs()
        assert ((weight - wanted).abs() <= bound).all(), path
        checked += 1
    return checked


def assert_heals(llm: Any, sync: VllmSync, held: Callable[[Any], Any]) -> None:
    """A push that breaks off closes the layer again and leaves the engine dirty, and the next one heals it.

    Args:
        held: what an engine holds, to be compared.
    """
    sync.push()
    wanted = held(llm)
    for where, after in (("bucket", 0), ("bucket", 3), ("finish", 0), ("receive", 0)):
        llm.collective_rpc("fail", args=(where, [0], after))
        with pytest.raises(PushFailed, match=f"injected into {where}"):
            sync.push()
        llm.collective_rpc("mend")
        assert [state.kind for state in sync.states()] == ["dirty"]
        assert not any(p.is_meta for p in served(llm).parameters())
        sync.push()
        assert held(llm) == wanted, where


def wrong_in_one_bit(part: str, name: str) -> Callable[..., None]:
    """`BucketWriter.write_direct` that changes one bit of a written weight, or of its scales, after its last bucket.

    Args:
        part: "weight" or "scales".
        name: of a tensor of the stream.
    """
    place = BucketWriter.write_direct

    def wrong(self: BucketWriter, index: int, places: DirectTargets, run: Any) -> None:
        place(self, index, places, run)
        if index == max(at for at, slots in enumerate(self.table) for slot in slots if slot.name == name):
            [scaled] = places.scaled[name]
            getattr(scaled, part).view(-1).view(torch.uint8)[5] ^= 1

    return wrong


def exact_merge(model: Any) -> dict[str, Tensor]:
    """The merged weights in float64."""
    merged: nn.Module = copy.deepcopy(model).double().merge_and_unload()
    return {name: tensor.detach() for name, tensor in merged.named_parameters()}


@contextmanager
def computing_alike(model: Any, engine: nn.Module) -> Iterator[nn.Module]:
    """The trainer's merged model with what an engine's FP8 layers compute: their dequantised weights, and inputs that
    are rounded to FP8 with a scale for each token."""
    merged: nn.Module = copy.deepcopy(model).merge_and_unload()
    held = {path: weight for path, weight, _ in matrices(engine)}
    hooks = []
    for path, module in merged.named_modules():
        if isinstance(module, nn.Linear):
            rows = _rows(held, path, merged)
            if rows is not None:
                module.weight = nn.Parameter(rows.float())
                module.bias = None if module.bias is None else nn.Parameter(module.bias.float())
                hooks += [module.register_forward_pre_hook(_round_inputs), module.register_forward_hook(_round_outputs)]
    try:
        yield merged
    finally:
        for hook in hooks:
            hook.remove()


def _rows(held: Mapping[str, Tensor], path: str, merged: nn.Module) -> Tensor | None:
    """What of an engine's layers is one of the model's."""
    inside, _, name = path.rpartition(".")
    for whole, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if name in parts and f"{inside}.{whole}" in held:
            sizes = [merged.get_submodule(f"{inside}.{part}").weight.shape[0] for part in parts]
            return held[f"{inside}.{whole}"].split(sizes)[parts.index(name)]
    return held.get(path)


def _round_inputs(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x = inputs[0].float()
    scale = x.abs().amax(-1, keepdim=True) / LARGEST
    return ((x / scale).clamp(-LARGEST, LARGEST).to(E4M3).float() * scale,)


def _round_outputs(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.bfloat16()
