"""Latent attention, gated delta nets, Mamba, vision towers, and experts with biases: models that Megatron-Bridge builds
and loads, beside transformers' own, over gloo.

The layouts are Megatron-Bridge's on the way in, ours on the way out. Expected values come from the HF checkpoint, the
adapters' halves put together by the test's own code, merged by `lora_merge.merge`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="the megatron tests run in an environment of their own")

import hf_kinds
import torch
from helpers import assert_same_bits
from megatron_models import Grid
from megatron_processes import Pool, call
from torch import Tensor

import lora_merge
from tests.megatron.test_megatron_read import assemble

POOL = Pool(2, method="spawn")
"""Workers with modules in the place of TransformerEngine's, which other workers of this folder have not."""
BRIDGE = tuple(map(int, version("megatron-bridge").split(".")[:2]))
BF16, FLOAT = torch.bfloat16, torch.float32
TP, PP, EP = Grid(tp=2, etp=1), Grid(pp=2), Grid(ep=2)


@dataclass(frozen=True)
class Case:
    kind: str
    grid: Grid
    dtype: torch.dtype = FLOAT
    cut: bool = False

    @property
    def world(self) -> int:
        return self.grid.tp * max(self.grid.pp, self.grid.ep)

    def __str__(self) -> str:
        sizes = "".join(f" {k}{v}" for k in ("tp", "pp", "ep") if (v := getattr(self.grid, k)) > 1)
        return f"{self.kind}{sizes}{' bf16' if self.dtype == BF16 else ''}{' cut' if self.cut else ''}"


CASES = [
    Case("deepseek_v3", TP),
    Case("deepseek_v3", TP, cut=True),
    Case("deepseek_v3", EP, BF16),
    Case("qwen3_next", TP),
    Case("qwen3_next", PP, BF16),
    Case("qwen3_next", EP),
    Case("nemotron_h", TP),
    Case("nemotron_h", PP),
    Case("gpt_oss", TP),
    Case("gpt_oss", EP, BF16),
    Case("qwen2_5_vl", TP),
    Case("qwen2_5_vl", PP),
    Case("qwen3_vl", Grid()),
    Case("qwen3_vl", TP),
    Case("qwen3_vl_moe", EP),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_stream_is_the_hf_model_with_what_its_adapters_add(case: Case, tmp_path: Path) -> None:
    hf = hf_kinds.hf_model(case.kind, case.dtype)
    hf_kinds.save(hf, tmp_path)
    compare(case, hf, POOL.run(*on(case, tmp_path)))


def on(case: Case, folder: Path, *more: Any) -> tuple[Any, ...]:
    args = (case.kind, str(folder), case.grid, case.dtype, 9_000, case.cut, *more)
    return (case.world, call, "megatron_kinds", "work", *args)


def compare(case: Case, hf: Any, ranks: list[dict[str, Any]]) -> None:
    wanted = expected(hf_kinds.checkpoint(hf), [rank["deltas"] for rank in ranks])
    for rank in ranks:
        for what in ("stream", "bridge"):
            assert set(rank[what]) == set(wanted), f"{what}: {sorted(set(rank[what]) ^ set(wanted))}"
            for name, value in wanted.items():
                assert_same_bits(rank[what][name], value, f"{what}: {name}")
        if "stock" in rank:
            as_stock(case, rank["stock"], wanted)
        assert_same_bits(rank["after"], rank["adapters"], "logits after")
        assert not torch.equal(rank["plain"], rank["adapters"]), "the adapters do nothing"
        sent(case, hf_kinds.checkpoint(hf), wanted, rank)
    if case.dtype == FLOAT:
        agree(case, hf, wanted, ranks)


@pytest.mark.parametrize("case", [Case("deepseek_v3", EP), Case("gpt_oss", EP)], ids=str)
def test_experts_that_share_one_half_of_their_adapters(case: Case, tmp_path: Path) -> None:
    hf = hf_kinds.hf_model(case.kind, case.dtype)
    hf_kinds.save(hf, tmp_path)
    ranks = POOL.run(*on(case, tmp_path, "outer"))
    compare(case, hf, ranks)
    if case.kind == "deepseek_v3":
        shared = {name: t for name, t in ranks[0]["exported"].items() if "experts.0.down_proj.lora_B" in name}
        for name, tensor in shared.items():
            assert torch.equal(tensor, ranks[0]["exported"][name.replace("experts.0", "experts.3")])


@pytest.mark.skipif(BRIDGE < (0, 5), reason="Megatron-Bridge has had them since 0.5")
@pytest.mark.parametrize("case", [Case("deepseek_v3", EP), Case("gpt_oss", EP), Case("qwen3_vl_moe", EP)], ids=str)
def test_experts_with_an_adapter_each(case: Case, tmp_path: Path) -> None:
    """Of half the others' rank, as two experts see each token."""
    hf = hf_kinds.hf_model(case.kind, case.dtype)
    hf_kinds.save(hf, tmp_path)
    compare(case, hf, POOL.run(*on(case, tmp_path, "each")))


BAD = [
    (
        "deepseek_v3",
        "mtp",
        r"InvalidInput: rank 0: mtp\.layers\.0\..*: layers of multi-token prediction.* mtp_num_layers",
    ),
    ("deepseek_v3", "norms less one", r"InvalidInput: layernorm_zero_centered_gamma: .*names=bridge_names"),
    (
        "deepseek_v3",
        "latent rank",
        r"InvalidInput: rank 0: .*linear_kv_up_proj\.weight: .* does not fit kv_lora_rank=32",
    ),
    ("deepseek_v3", "value heads", r"InvalidInput: rank 0: .*linear_proj\.weight: 64 columns .* v_head_dim=24"),
    (
        "qwen3_next",
        "one norm",
        r"InvalidInput: rank 0: decoder\.final_layernorm\.weight: its zero_centered_gamma=False",
    ),
    (
        "qwen3_next",
        "another delta net",
        r"InvalidInput: rank 0: .*layers\.0\.self_attention: a mine\.Another, which may",
    ),
    (
        "qwen3_next",
        "another attention",
        r"InvalidInput: rank 0: .*layers\.1\.self_attention: a mine\.Another, which may",
    ),
    ("qwen3_next", "heads of the delta net", r"InvalidInput: rank 0: .*\.in_proj\.weight: .* linear_num_value_heads=2"),
    ("qwen3_next", "q alone", r"UnsupportedAdapter: rank 0: .*linear_qkv: an adapter on q alone"),
    ("nemotron_h", "gate and up", r"UnsupportedAdapter: rank 0: .*linear_fc1: an adapter on (gate|up) alone, which"),
    ("nemotron_h", "groups of Mamba", r"InvalidInput: rank 0: .*\.in_proj\.weight: 200 rows .* mamba_num_groups=4"),
    ("qwen2_5_vl", "another model with a tower", r"InvalidInput: mine\.AnotherVL: .* pass names="),
]


@pytest.mark.parametrize(("kind", "damage", "wanted"), BAD, ids=[damage for _, damage, _ in BAD])
def test_what_is_not_known_is_refused_by_name(kind: str, damage: str, wanted: str, tmp_path: Path) -> None:
    hf_kinds.save(hf_kinds.hf_model(kind), tmp_path)
    (said,) = POOL.run(1, call, "megatron_kinds", "refused", kind, str(tmp_path), damage)
    assert re.match(wanted, said), said


def as_stock(case: Case, stock: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Megatron-Bridge's own export merges the same, up to the order of sums."""
    assert set(stock) == set(wanted), sorted(set(stock) ^ set(wanted))
    for name, value in wanted.items():
        theirs = stock[name][: value.shape[0]]
        assert theirs.shape == value.shape, name
        error, largest = (theirs.double() - value.double()).abs().max(), float(value.double().abs().max())
        assert error <= (2.0**-20 if case.dtype == FLOAT else 2.0**-8) * largest, f"{name}: off by {error}"


def agree(case: Case, hf: Any, wanted: dict[str, Tensor], ranks: list[dict[str, Any]]) -> None:
    """transformers' model with the merged weights, Megatron's with the adapters and inside `merged` say the same."""
    with torch.no_grad():
        base, ours = hf(hf_kinds.TOKENS).logits, (merged := hf_kinds.with_weights(hf, wanted))(hf_kinds.TOKENS).logits
    assert (base - ours).abs().max() > 0.02, "the adapters do nothing"
    tower = None if "vl" not in case.kind else hf_kinds.features(case.kind, merged.model.visual)
    for rank in ranks:
        assert (rank["plain"] - base).abs().max() < 1e-5, "Megatron's forward is another one"
        for what in ("adapters", "merged"):
            error = float((rank[what] - ours).abs().max())
            assert error < 1e-5 * max(1.0, float(ours.abs().max())), f"{what}: off by {error}"
        for what in ("tower", "tower merged"):
            if rank[what] is not None:
                assert (rank[what] - tower).abs().max() < 1e-5, what
    assert tower is None or any(rank["tower"] is not None for rank in ranks)


def sent(case: Case, base: dict[str, Tensor], wanted: dict[str, Tensor], rank: dict[str, Any]) -> None:
    """What adapter mode sends adds to the base what was merged, and to nothing else; or it is refused."""
    if case.kind in ("gpt_oss", "qwen3_vl_moe"):
        assert "its checkpoint layout cannot be adapted in parts; push with mode=" in rank["refused"]
        return
    factors = rank["exported"]
    adapted = {name.removesuffix(".lora_A.weight") for name in factors if name.endswith(".lora_A.weight")}
    assert adapted == {name.removesuffix(".weight") for name in wanted if not torch.equal(wanted[name], base[name])}
    for name in adapted:
        added = factors[f"{name}.lora_B.weight"].double() @ factors[f"{name}.lora_A.weight"].double()
        made = wanted[f"{name}.weight"].double()
        error, largest = (base[f"{name}.weight"].double() + added - made).abs().max(), float(made.abs().max())
        assert error < (1e-6 if case.dtype == FLOAT else 2.0**-8) * max(1.0, largest), name  # of bf16 half a last place


def expected(base: dict[str, Tensor], deltas: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The checkpoint with what all ranks' adapters add to it, each part by itself."""
    wanted = {name: tensor.clone() for name, tensor in base.items()}
    adapted = {name for one in deltas for name in one}
    assert adapted
    for part in sorted(adapted):
        holders = [one[part] for one in deltas if part in one]
        place = place_of(part, wanted)
        for i, (_, _, scaling) in enumerate(holders[0]):
            a, b = (assemble(f"{part} lora_{half}", [h[i][turn] for h in holders]) for turn, half in enumerate("AB"))
            place.copy_(lora_merge.merge(place.contiguous(), a, b, scaling))
    return wanted


def place_of(part: str, tensors: dict[str, Tensor]) -> Tensor:
    """The view `[out, in]` of a checkpoint tensor that a part of ours goes into."""
    found = re.fullmatch(r"(.+)\[(\d+)\](?:\.(\w+))?", part)
    if not found:
        return tensors[part]
    tensor = tensors[found[1]][int(found[2])]
    half = tensor.shape[-1] // 2
    columns = {"even": slice(0, None, 2), "odd": slice(1, None, 2), "gate": slice(half), "up": slice(half, None)}
    return tensor[:, columns.get(found[3], slice(None))].t()
