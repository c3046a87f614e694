"""Trainable tokens of real PEFT models: rows that replace others, in streams, in place, and in both ways of saving."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import peft
import pytest
import torch
import torch.distributed as dist
from checkpoints import tensors, write_base
from helpers import assert_same_bits
from packaging.version import Version
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from processes import spawn
from torch import Tensor, nn

from lora_merge import (
    InvalidInput,
    MergedWeights,
    NotRestored,
    UnsupportedAdapter,
    merge_checkpoint,
    merged,
    read_deltas,
    save_merged,
)
from lora_merge.models.delta import Delta, Run
from lora_merge.saving.inspect import inspect_adapter
from lora_merge.verify import change_of
from tests.shards.test_shards_merge import fsdp1, fsdp1_one_unit, fsdp2, fsdp2_columns, local_bits

OLD = Version(peft.__version__) < Version("0.19")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS = [5, 100, 7, 8, 0]
"""Out of order; the last row of the vocabulary among them."""


def tied() -> nn.Module:
    return models.qwen2(tied=True)


def trained(model: Any, seed: int = 3) -> Any:
    """A step of training on the rows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    return model


def policy(
    build: Callable[[], nn.Module] = tied, rows: Any = None, dtype: torch.dtype = torch.float32, **config: Any
) -> Any:
    config = {"target_modules": ["q_proj"], "trainable_token_indices": rows or {"embed_tokens": ROWS}} | config
    return trained(models.with_lora(build, dtype=dtype, **config))


def prompts(model: Any) -> Tensor:
    """The logits of a prompt of trained tokens."""
    ids = torch.tensor([[1, *ROWS, 9], [100, 4, 0, 8, 8, 2, 5]])
    with torch.no_grad():
        return model(ids).logits


def streamed(model: Any, **options: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in MergedWeights(model, **options)}


def expected(model: Any, module: str = "embed_tokens", adapter: str = "default") -> Tensor:
    """The weight, out of its base and the rows, as the layer has them."""
    layer = next(m for n, m in model.named_modules() if n.endswith(f"{module}.token_adapter"))
    found = layer.base_layer.weight.detach().clone()
    for at, row in enumerate(layer.token_indices[adapter]):
        found[row] = layer.trainable_tokens_delta[adapter][at].detach().to(found.dtype)
    return found


KINDS: dict[str, Callable[[], Any]] = {
    "tied": policy,
    "untied": lambda: policy(models.qwen2),
    "bf16": lambda: policy(dtype=torch.bfloat16),
    "both, untied": lambda: policy(models.qwen2, {"embed_tokens": ROWS, "lm_head": [3, 4, 99]}),
    "tied, rows of two kinds": lambda: policy(tied, {"embed_tokens": ROWS, "lm_head": [3, 4, 99]}),
    "head": lambda: policy(models.qwen2, {"lm_head": [3, 4, 99]}),
    "every row": lambda: policy(rows={"embed_tokens": list(range(models.VOCABULARY))}),
    "alone": lambda: trained(
        get_peft_model(tied(), TrainableTokensConfig(token_indices=ROWS, target_modules=["embed_tokens"])).eval()
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_in_place_and_streamed(kind: str) -> None:
    """The forward inside is PEFT's with the adapter; every bit comes back; the stream is what lies there inside."""
    torch.manual_seed(0)
    model = KINDS[kind]()
    apart = kind == "tied, rows of two kinds"
    if apart and OLD:
        pytest.skip("this PEFT knows no rows of a linear layer")
    wanted = prompts(model)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    bits = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    stream = streamed(model)
    for _ in range(3):  # read, watched, unchanged
        with merged(model):
            near = 2e-2 if kind == "bf16" else 1e-5
            torch.testing.assert_close(prompts(model), wanted, rtol=near, atol=near)
            inside = {t: m.weight.detach().clone() for t, m in _places(base).items()}
        for name, parameter in model.named_parameters():
            assert_same_bits(parameter.detach(), bits[name], name)
        assert torch.equal(prompts(model), wanted)
    for name, weight in inside.items():
        if name in stream:
            assert_same_bits(stream[name], weight, name)
    assert (HEAD in stream) == (apart or base.config.tie_word_embeddings is False)
    if kind == "alone":
        return
    if "embed_tokens" in str(model.peft_config["default"].trainable_token_indices):
        assert_same_bits(stream[EMBEDDING], expected(model))
    if kind in ("head", "both, untied"):
        assert_same_bits(stream[HEAD], expected(model, "lm_head"))
    with model.disable_adapter(), pytest.warns(UserWarning, match="no adapter acts"):
        assert_same_bits(streamed(model)[EMBEDDING], _places(base)[EMBEDDING].weight.detach())


def _places(base: Any) -> dict[str, Any]:
    """The modules that hold the two weights, under all wrappers."""
    found: dict[str, Any] = {EMBEDDING: base.model.embed_tokens, HEAD: base.lm_head}
    for name, module in found.items():
        while hasattr(module, "token_adapter") or hasattr(module, "base_layer"):
            module = module.token_adapter if hasattr(module, "token_adapter") else module.base_layer
        found[name] = module
    return found


def test_adapters_of_which_one_has_rows() -> None:
    """By name, several at once, and none of them; rows that were trained on are seen at the next pass."""
    model = policy()
    model.add_adapter("plain", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    base = _places(model.get_base_model())[EMBEDDING].weight.detach().clone()
    weights = MergedWeights(model)
    assert_same_bits(dict(weights)[EMBEDDING], expected(model))
    trained(model, 8)
    assert_same_bits(dict(weights)[EMBEDDING], expected(model))
    assert_same_bits(streamed(model, adapter_names=["plain"])[EMBEDDING], base)
    both = streamed(model, adapter_names=["plain", "default"])
    assert_same_bits(both[EMBEDDING], expected(model))
    with merged(model, adapter_names=["plain"]):
        assert model.get_base_model().model.embed_tokens.weight.dtype == torch.float32, "PEFT's wrapper has one"
        inside = prompts(model)
    model.set_adapter("plain")
    torch.testing.assert_close(inside, prompts(model), rtol=1e-5, atol=1e-5)
    assert_same_bits(streamed(model)[EMBEDDING], base)
    model.set_adapter("default")
    assert_same_bits(dict(weights)[EMBEDDING], expected(model))
    model.get_base_model().model.embed_tokens.token_adapter.token_indices["default"] = [1, 2, 3, 4, 6]
    assert_same_bits(dict(weights)[EMBEDDING], expected(model))
    stochastic = streamed(model, dtype=torch.bfloat16, rounding="stochastic")[EMBEDDING]
    assert ((stochastic.float() - expected(model)).abs() <= 2**-7 * expected(model).abs()).all()


@pytest.mark.skipif(OLD, reason="this PEFT gives the tied head another layer for each adapter")
def test_two_adapters_with_rows_of_their_own() -> None:
    """PEFT activates one of them; its layer takes several whose rows differ."""
    model = policy()
    model.add_adapter(
        "other", LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [50]})
    )
    trained(model, 9)
    got = streamed(model, adapter_names=["default", "other"])[EMBEDDING]
    wanted = expected(model)
    wanted[50] = expected(model, adapter="other")[50]
    assert_same_bits(got, wanted)
    model.get_base_model().model.embed_tokens.token_adapter.token_indices["other"] = [100]
    with pytest.raises(UnsupportedAdapter, match="'default' and 'other' both replace row 100"):
        streamed(model, adapter_names=["default", "other"])


def test_writes_inside_are_found() -> None:
    """A row that somebody writes inside stays; all else comes back. Memory that moved is found where it is."""
    model = policy()
    weight = _places(model.get_base_model())[EMBEDDING].weight
    base = weight.detach().clone()
    with pytest.raises(NotRestored, match=r"model\.embed_tokens\.weight: rows that an adapter replaces"), merged(model):
        weight.data[100] += 1
    assert (weight.detach() != base).any(dim=1).nonzero().flatten().tolist() == [100]
    weight.data[100] = base[100]
    with merged(model):
        weight.share_memory_()
    assert_same_bits(weight.detach(), base)
    with merged(model):
        weight.data = weight.data.clone()
    assert_same_bits(weight.detach(), base)
    with pytest.raises(ZeroDivisionError), merged(model):
        _ = 1 / 0
    assert_same_bits(weight.detach(), base)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda layer: layer.token_indices.update(default=[5, 5, 7, 8, 0]), "hold a number twice"),
        (lambda layer: layer.token_indices.update(default=[5, 101, 7, 8, 0]), "must be from 0 to 100"),
        (lambda layer: layer.token_indices.update(default=[5, -1, 7, 8, 0]), "must be from 0 to 100"),
        (lambda layer: layer.token_indices.update(default=[5]), r"are \[5, 32\], expected \[1, 32\]"),
        (lambda layer: setattr(layer.base_layer, "max_norm", 1.0), "max_norm"),
        (lambda layer: setattr(layer.base_layer, "forward", lambda x: x), "computes by"),
    ],
)
def test_refused(change: Callable[[Any], object], match: str) -> None:
    model = policy()
    layer = model.get_base_model().model.embed_tokens.token_adapter
    before = layer.base_layer.weight.detach().clone()
    weights = MergedWeights(model)
    dict(weights)
    change(layer)
    with pytest.raises(UnsupportedAdapter, match=match), merged(model):
        raise AssertionError("the body ran")
    with pytest.raises(UnsupportedAdapter, match=match):
        dict(weights)
    assert_same_bits(layer.base_layer.weight.detach(), before)


def test_a_head_with_a_bias_is_refused() -> None:
    """PEFT's forward leaves it out, so that merging would be another model."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    model = get_peft_model(net, TrainableTokensConfig(token_indices=[1], target_modules=["1"]))
    with pytest.raises(UnsupportedAdapter, match="leaves the bias out"), merged(model):
        raise AssertionError("the body ran")


def test_runs() -> None:
    """Where rows come from, cut anyhow."""
    (delta,) = [d for d in read_deltas(policy()) if d.name == EMBEDDING]
    assert list(delta.runs(0, 101)) == [
        Run(0, 1, 0, 4), Run(1, 4), Run(5, 1, 0, 0), Run(6, 1), Run(7, 2, 0, 2), Run(9, 91), Run(100, 1, 0, 1),
    ]  # fmt: skip
    for begin in range(101):
        for many in range(1, 101 - begin + 1, 13):
            runs = list(delta.runs(begin, many))
            assert [row for run in runs for row in range(run.first, run.first + run.many)] == [
                *range(begin, begin + many)
            ]
            for run in runs:
                for at in range(run.many):
                    row = run.first + at
                    assert (ROWS[run.at + at] == row) if run.which == 0 else row not in ROWS
    assert isinstance(delta, Delta)
    change = change_of(delta, torch.bfloat16)
    weight, model = delta.weight.pieces[0].tensor.double(), policy()
    assert change.weight == pytest.approx(float(weight.square().sum()))
    assert change.update == pytest.approx(float((expected(model).double() - weight).square().sum()))


@pytest.mark.parametrize("kind", ["tied", "untied", "both, untied", "alone"])
def test_saved(kind: str, tmp_path: Path) -> None:
    """By both ways the checkpoint is PEFT's own merge, and as tied as its base."""
    from transformers import AutoModelForCausalLM

    build = models.qwen2 if "untied" in kind else tied
    base = write_base(tmp_path / "base", build, torch.float32)
    if kind == "alone":
        config: Any = TrainableTokensConfig(token_indices=ROWS, target_modules=["embed_tokens"])
    else:
        rows = {"embed_tokens": ROWS} | ({"lm_head": [3, 4, 99]} if kind == "both, untied" else {})
        config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, trainable_token_indices=rows)
    model = trained(get_peft_model(base, config).eval())
    model.save_pretrained(tmp_path / "adapter")
    wanted = prompts(model)
    save_merged(model, tmp_path / "live")
    merge_checkpoint(tmp_path / "base", tmp_path / "adapter", tmp_path / "disk", verify=True)
    live, disk = tensors(tmp_path / "live"), tensors(tmp_path / "disk")
    assert live.keys() == disk.keys() == tensors(tmp_path / "base").keys()
    for name, tensor in live.items():
        assert_same_bits(disk[name], tensor, name)
    for folder in ("live", "disk"):
        said = json.loads((tmp_path / folder / "config.json").read_text())
        assert said["tie_word_embeddings"] == ("untied" not in kind)
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / folder).eval()
        torch.testing.assert_close(prompts(loaded), wanted, rtol=1e-5, atol=1e-5)
    found = inspect_adapter(tmp_path / "adapter", tmp_path / "base")
    assert not found.problems
    assert not found.whole
    assert found.replaced[EMBEDDING] == len(ROWS)
    assert EMBEDDING in [update.name for update in found.updates]


def test_sums_on_disk(tmp_path: Path) -> None:
    """Rows of two adapters go together where no row is in both; a sum or a scale of a row is none."""
    base = write_base(tmp_path / "base", tied, torch.float32)
    for name, config in {
        "a": {"trainable_token_indices": {"embed_tokens": [3, 4]}},
        "b": {"trainable_token_indices": {"embed_tokens": [9]}},
        "c": {"trainable_token_indices": {"embed_tokens": [4]}},
        "lora": {"target_modules": ["embed_tokens"]},
    }.items():
        options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False} | config
        model = trained(get_peft_model(write_base(tmp_path / "again", tied, torch.float32), LoraConfig(**options)))
        model.save_pretrained(tmp_path / name, save_embedding_layers=False)
    one, other = (tensors(tmp_path / name) for name in ("a", "b"))
    key = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    wanted = base.model.embed_tokens.weight.detach().clone()
    wanted[[3, 4]], wanted[[9]] = one[key], other[key]
    merge_checkpoint(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert_same_bits(tensors(tmp_path / "out")[EMBEDDING], wanted)
    for names, scales, match in [
        (["a", "c"], {}, "a and c both replace row 4"),
        (["a", "lora"], {}, "a replaces rows of it .*, and lora changes it too"),
        (["a"], {"a": 0.5}, "a scale of 0.5 on rows"),
    ]:
        with pytest.raises(UnsupportedAdapter, match=match):
            merge_checkpoint(tmp_path / "base", [tmp_path / n for n in names], tmp_path / "no", scales=scales)
    file = tmp_path / "a" / "adapter_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps(said | {"trainable_token_indices": {"embed_tokens": [3, 500]}}))
    with pytest.raises(InvalidInput, match="does not fit the base"):
        merge_checkpoint(tmp_path / "base", tmp_path / "a", tmp_path / "no")


def sharded(rank: int) -> None:
    """Each rank writes the rows that it holds; a tied head sees them; strategy="unshard" too."""
    for kind in ("tied", "both, untied"):
        plain = KINDS[kind]()
        wanted, answers = streamed(plain), prompts(plain)
        with merged(plain):
            inside = prompts(plain)
        for wrap in (fsdp2, fsdp2_columns, fsdp1, fsdp1_one_unit):
            model = wrap(KINDS[kind]())
            before = local_bits(model)
            got = streamed(model, bucket_bytes=1 << 12)
            assert got.keys() == wanted.keys()
            for name, tensor in got.items():
                assert_same_bits(tensor, wanted[name], f"{kind} {wrap.__name__} {name}")
            for strategy in (None, "unshard", None):
                with merged(model, strategy=strategy):
                    torch.testing.assert_close(prompts(model), inside, rtol=1e-5, atol=1e-5)
                for now, then in zip(local_bits(model), before, strict=True):
                    assert_same_bits(now, then)
            torch.testing.assert_close(prompts(model), answers, rtol=1e-5, atol=1e-5)
    dist.barrier()


def test_sharded() -> None:
    spawn(2, sharded)
