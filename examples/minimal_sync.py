"""A sync of a policy into an engine, slow and plain: the truth that the fast path is tested against.

    python examples/minimal_sync.py           # a tiny model, into a transformers model that stands for an engine
    python examples/minimal_sync.py --vllm    # into a vLLM engine in this process (run with vLLM 0.32 on a CPU)

Needs `pip install ".[peft]"` in a clone. All but `compare` is plain torch and PEFT: adapters are merged in float64 and
rounded once, the tensors travel in buckets, an engine loads them. `compare` holds `lora_merge.MergedWeights` against
that. For LoRA on Linear, Conv1D and Embedding, one adapter or several.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain, starmap
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor


@torch.no_grad()
def exact(model: Any) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Merge the active adapters of a PEFT model. Yield for each tensor of the merged checkpoint its name, the base's
    weight, the merged value in float64, and sum |scaling| |lora_B| |lora_A|, which bounds the error of float32 sums."""
    base, plain = model.get_base_model(), set[int]()
    for key, weight in base.state_dict().items():
        path, _, attribute = key.replace(".base_layer.", ".").rpartition(".")
        if ".lora_" in key:
            continue
        layer = base.get_submodule(path)
        added = list(factors(layer)) if isinstance(layer, LoraLayer) and attribute == "weight" else []
        value = sum((scaling * (b @ a) for a, b, scaling in added), weight.double())
        products = sum((abs(scaling) * (b.abs() @ a.abs()) for a, b, scaling in added), torch.zeros(()))
        if added or weight.data_ptr() not in plain:  # a head that stays tied comes once
            plain |= set() if added else {weight.data_ptr()}
            yield f"{path}.{attribute}", weight, value, products


def factors(layer: Any) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield lora_A, lora_B and scaling of each active adapter, so that lora_B @ lora_A is shaped as the weight is."""
    for name in layer.active_adapters:
        if name in layer.lora_A:
            a, b = layer.lora_A[name].weight.double(), layer.lora_B[name].weight.double()
            yield (b.T, a.T, layer.scaling[name]) if layer.fan_in_fan_out else (a, b, layer.scaling[name])
        elif name in layer.lora_embedding_A:
            a, b = layer.lora_embedding_A[name].double(), layer.lora_embedding_B[name].double()
            yield b.T, a.T, layer.scaling[name]


def round_once(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to nearest, ties to even. torch goes through float32 and rounds twice: the second rounding is right
    if the first one is to odd."""
    near = value.float()
    if dtype == torch.float32:
        return near
    bits, beyond = near.view(torch.int32), (near.double().abs() > value.abs()).int()
    return torch.where(near.double() == value, bits, (bits - beyond) | 1).view(torch.float32).to(dtype)


def merged_slowly(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the merged checkpoint."""
    for name, weight, value, _ in exact(model):
        yield name, round_once(value, weight.dtype)


def buckets(pairs: Iterable[tuple[str, Tensor]], nbytes: int) -> Iterator[tuple[list[Any], Tensor]]:
    """Lay tensors behind each other in buffers of `nbytes`, or of one larger tensor; each comes with its table."""
    table, parts = list[Any](), list[Tensor]()
    for name, tensor in pairs:
        part = tensor.contiguous().view(-1).view(torch.uint8)
        if table and sum(map(len, parts)) + len(part) > nbytes:
            yield table, torch.cat(parts)
            table, parts = [], []
        table.append((name, tensor.dtype, tensor.shape, sum(map(len, parts))))
        parts.append(part)
    yield table, torch.cat(parts)


def unpacked(table: list[Any], data: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket; cloned, as a dtype wants its bytes aligned."""
    for name, dtype, shape, begin in table:
        yield name, data[begin : begin + shape.numel() * dtype.itemsize].clone().view(dtype).view(shape)


def load(engine: Any, stream: Iterable[tuple[list[Any], Tensor]]) -> None:
    """Load a stream of buckets into a vLLM `LLM`, or a transformers model."""
    pairs = chain.from_iterable(starmap(unpacked, stream))
    if hasattr(engine, "collective_rpc"):
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": pairs})
    else:
        assert not engine.load_state_dict(dict(pairs), strict=False).unexpected_keys


def compare(model: Any) -> tuple[int, int, int]:
    """Count elements of `MergedWeights`: that err more than docs/design.md allows, that differ at all, and all."""
    import lora_merge

    fast, beyond, differ, total = dict(lora_merge.MergedWeights(model)), 0, 0, 0
    for name, weight, value, products in exact(model):
        out, slow = fast.pop(name).double(), round_once(value, weight.dtype).double()
        sums = (2.0**-23 * (weight.double().abs() + out.abs()) + 2.0**-20 * products) * (products > 0)
        beyond += int(((out - value).abs() > (slow - value).abs() + 2 * sums).sum())
        differ, total = differ + int((out != slow).sum()), total + out.numel()
    assert not fast, fast.keys()
    return beyond, differ, total


def greedy(model: Any, prompt: list[int]) -> list[int]:
    answer = model.eval().generate(input_ids=torch.tensor([prompt]), do_sample=False, max_length=12, min_length=12)
    return answer[0, len(prompt) :].tolist()


def main() -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", action="store_true")
    args, prompt = parser.parse_args(), [5, 3, 8, 13]
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2, architectures=["Qwen2ForCausalLM"])
    model = get_peft_model(Qwen2ForCausalLM(config), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    stream = buckets(merged_slowly(model), nbytes=1 << 18)
    if args.vllm:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM, SamplingParams

        options = {"dtype": "float32", "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True}
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            engine: Any = LLM(folder, **options)
        load(engine, stream)
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
        got = list(engine.generate({"prompt_token_ids": prompt}, sampling)[0].outputs[0].token_ids)
    else:
        engine = Qwen2ForCausalLM(config)
        load(engine, stream)
        got = greedy(engine, prompt)
    wanted, (beyond, differ, total) = greedy(model, prompt), compare(model)
    print(f"MergedWeights: {beyond} of {total} elements are beyond the bound, {differ} differ from the slow merge")
    print(f"greedy tokens: the trainer's {wanted}, the engine's {got}: {'same' if got == wanted else 'DIFFERENT'}")


if __name__ == "__main__":
    main()
