"""`lora-merge plan` beside the bytes of real models: transformers', PEFT's, FSDP2's, AdamW's, tracked merges'."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import transformers
from docs_code import DOCS
from peft import LoraConfig, get_peft_model
from processes import spawn
from torch import nn
from torch.distributed.fsdp import fully_shard

from lora_merge import InvalidInput, MergedWeights, Segment, cli
from lora_merge.restore import TrackedPlan
from lora_merge.sizing import Policy, Row, Setup, estimate, host_bytes, read_policy, totals

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = {
    "qwen2": (models.qwen2, []),
    "tied": (lambda: models.qwen2(tied=True), []),
    "experts": (models.qwen3_moe, EXPERTS),
    "gpt2": (models.gpt2, []),
}


def saved(model: nn.Module, folder: Path) -> Path:
    """The folder of a model's configuration alone."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


def adapted(model: Any, parameters: list[str]) -> Any:
    options = {"target_parameters": parameters} if parameters else {}
    return get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", **options))


def row(rows: list[Row], start: str) -> Row:
    [found] = [r for r in rows if f"{r.side}: {r.what}".startswith(start)]
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_of_one_gpu(kind: str, tmp_path: Path) -> None:
    """Weights, adapters, gradients and moments are those of a real step; the engine has the base's bytes."""
    make, parameters = KINDS[kind]
    model = make()
    policy = read_policy(saved(model, tmp_path), rank=8, parameters=parameters)
    model = adapted(model.bfloat16(), parameters)
    halves = [p for p in model.parameters() if p.requires_grad]
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    optimizer = torch.optim.AdamW(halves)
    with torch.autocast("cpu", torch.bfloat16):
        model(models.tokens(), labels=models.tokens()).loss.backward()
    optimizer.step()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    rows = estimate(policy, Setup())
    assert row(rows, "trainer: base").training == base
    assert row(rows, "trainer: adapters").training == sum(p.nbytes for p in halves)
    beside = sum(t.nbytes for t in moments) + sum(p.grad.nbytes for p in halves if p.grad is not None)
    assert row(rows, "trainer: their").training == beside
    assert row(rows, "engine: weights").push == base
    assert totals(rows, Setup())["each"]["push"] == sum(r.push for r in rows)


def _shards(rank: int, policy: Policy) -> None:
    model = adapted(models.qwen2(), []).bfloat16()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    rows = estimate(policy, Setup(gpus=3, adapters="bfloat16"))
    held = {True: 0, False: 0}
    for parameter in model.parameters():
        held[parameter.requires_grad] += parameter.to_local().nbytes
    frozen, halves = row(rows, "trainer: base").training, row(rows, "trainer: adapters").training
    assert held[False] <= frozen <= held[False] + 4096, (rank, held, frozen)  # the last rank has the smallest part
    assert rank or held[False] == frozen
    assert 0.9 < halves / held[True] < 1.2 or rank, (held, halves)
    model(models.tokens())
    if rank:
        return
    gathered = row(rows, "trainer: gathered").training
    layers = [sum(p.numel() for n, p in layer.named_parameters() if "lora" not in n) for layer in _layers(model)]
    every = sum(p.numel() for n, p in model.named_parameters() if "lora" not in n)
    assert gathered == 2 * (every - sum(layers) + 2 * max(layers))


def _layers(model: Any) -> Any:
    return model.base_model.model.model.layers


def test_a_sharded_trainer(tmp_path: Path) -> None:
    """Rows that three ranks do not divide: the first rank has as much as is said."""
    spawn(3, _shards, read_policy(saved(models.qwen2(), tmp_path), rank=8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_way_back(dtype: torch.dtype) -> None:
    """What a tracked merge takes, from one update to the next, is what is said, less the records of a GPU."""
    weight = torch.randn(1024, 2048).to(dtype)
    plans = []
    for _ in range(2):
        A, B = torch.randn(16, 2048) / 45, torch.randn(1024, 16) / 400
        plans.append(TrackedPlan([Segment("w", weight, weight, A, B, 1.0)], keep=True))
    plans[0].merge()
    plans[1].remerge(plans[0])  # `keep`: the second arena, which others give back when it is done
    policy = Policy("", (), weight.numel(), 0, 0, 1)
    name = str(dtype).removeprefix("torch.")
    said = row(estimate(policy, Setup(base=name, engine=name, train_merged=True)), "trainer: lora_merge").push
    assert plans[1].nbytes <= said <= 1.05 * plans[1].nbytes
    plans[1].unmerge()


def test_buckets(tmp_path: Path) -> None:
    """Two of them, and none where the trainer writes into the engine."""
    policy = read_policy(saved(models.qwen2(), tmp_path), rank=8)
    weights = MergedWeights(adapted(models.qwen2().bfloat16(), []), bucket_bytes=1 << 14)
    largest = max(bucket.data.nbytes for bucket in weights.buckets())
    said = row(estimate(policy, Setup(bucket=1 << 14, sleep=1)), "trainer: lora_merge: two").push
    assert largest <= said // 2 == 1 << 14
    assert not [r for r in estimate(policy, Setup()) if "buckets" in r.what]


def test_setups(tmp_path: Path) -> None:
    """Each option moves what it is there to move, and nothing else."""
    policy = read_policy(saved(models.qwen2(), tmp_path), rank=8)
    plain = row(estimate(policy, Setup()), "engine: weights")
    halved = row(estimate(policy, Setup(gpus=2, tp=2)), "engine: weights")
    matrices = sum(t.elements for t in policy.tensors if len(t.shape) > 1)
    assert plain.push - halved.push == matrices  # of 2 bytes; vectors are whole on each
    asleep = estimate(policy, Setup(sleep=1))
    assert row(asleep, "engine: weights").training == 0
    assert host_bytes(policy, Setup(sleep=1)) == plain.push
    assert host_bytes(policy, Setup(sleep=2)) == 0
    assert row(estimate(policy, Setup(offload=True)), "trainer: base").rollout == 0
    shared = estimate(policy, Setup(share=True))
    assert estimate(policy, Setup(share=True, sleep=1)) == shared  # which frees the KV cache alone
    assert not [r for r in shared if r.side == "engine"]
    assert row(shared, "trainer: lora_merge: way back").rollout > 0
    engine = row(estimate(policy, Setup(merge="engine", sleep=2)), "engine: lora_merge: way back")
    assert engine.training == engine.rollout > 8 * (policy.lora_A + policy.lora_B)
    eight = row(estimate(policy, Setup(engine="fp8")), "engine: weights").push
    assert plain.push - eight == sum(t.elements for t in policy.tensors if t.linear)
    assert row(estimate(policy, Setup(mode="adapter")), "engine: vLLM").push == 2 * (policy.lora_A + policy.lora_B)
    apart = estimate(policy, Setup(apart=True))
    assert totals(apart, Setup(apart=True)).keys() == {"trainer", "engine"}


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        (Setup(gpus=0), "1 or more"),
        (Setup(gpus=3, tp=2), "divides them"),
        (Setup(share=True, gpus=2), "unsharded"),
        (Setup(share=True, offload=True), "no offload"),
        (Setup(share=True, base="float32"), "one dtype"),
        (Setup(train_merged=True, base="nf4"), "cannot be trained so"),
        (Setup(merge="engine", mode="adapter"), "goes with mode merged"),
        (Setup(merge="engine", base="float32"), "rounded twice"),
        (Setup(base="int8", gpus=2), "cannot be sharded"),
        (Setup(base="bf8"), "a name of torch's"),
    ],
    ids=str,
)
def test_refused(setup: Setup, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        estimate(Policy("", (), 0, 0, 0, 0), setup)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(models.qwen2(), tmp_path)
    assert cli.main(["plan", str(folder), "--rank", "8", "--memory", "24", "--sleep", "1"]) == 0
    words = capsys.readouterr().out
    assert "engine: weights, bfloat16" in words
    assert "left of 24 GB" in words
    assert "On the host" in words
    assert cli.main(["plan", str(folder / "config.json"), "--memory", "0.00001", "--apart", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["parameters"] == sum(p.numel() for p in models.qwen2().parameters())
    assert found["totals"].keys() == {"trainer", "engine"}
    assert cli.main(["plan", str(folder), "--targets", "q_proj,v_proj", "--rank", "8"]) == 0
    assert "on 4 weights" in capsys.readouterr().out
    for wrong, said in (
        (["--targets", "nothing"], "puts no adapter of these targets"),
        (["--rank", "-1"], "expected 1 or more"),
        (["--rank", "0", "--share"], "needs an adapter"),
        (["--rank", "0", "--dtype", "nf4"], "cannot be trained without an adapter"),
        (["--tp", "2"], "divides them"),
    ):
        assert cli.main(["plan", str(folder), *wrong]) == 1
        assert said in capsys.readouterr().err
    assert cli.main(["plan", str(tmp_path / "misspelt")]) == 1
    assert "no such file or folder" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main(["plan", str(tmp_path / "empty")]) == 1
    assert "no config.json" in capsys.readouterr().err


def test_full_fine_tuning(tmp_path: Path) -> None:
    """Without an adapter gradients and moments are those of all weights."""
    model = models.qwen2().bfloat16()
    policy = read_policy(saved(model, tmp_path), rank=0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(models.tokens(), labels=models.tokens()).loss.backward()
    optimizer.step()
    moments = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim)
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    rows = estimate(policy, Setup())
    assert row(rows, "trainer: their").training == moments + gradients
    assert row(rows, "trainer: their").push == moments
    assert not [r for r in rows if "adapters" in r.what]


def test_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What fits says how to start vLLM; what does not, with which options it would."""
    seven = configurations()["7B"]
    seven.architectures = ["Qwen2ForCausalLM"]
    seven.save_pretrained(tmp_path)
    for options, code, said in (
        (["--share", "--memory", "24"], 0, "gpu_memory_utilization: above 0.63 (its weights), below 0.83"),
        (["--memory", "80"], 0, "gpu_memory_utilization: above 0.19 (its weights), below 0.79"),
        (["--memory", "24"], 1, "It would with: --share (takes 19.31);"),
        (["--memory", "8"], 1, "Spread it over more GPUs"),
        (["--rank", "0", "--memory", "80"], 0, "parameters; all are trained, without an adapter"),
        (["--rank", "0", "--memory", "24"], 1, "Train an adapter (--rank 32), spread it over more GPUs"),
    ):
        assert cli.main(["plan", str(tmp_path), *options]) == code
        assert said in capsys.readouterr().out


SIZES = {"7B": ("1", "1"), "32B": ("4", "4"), "72B": ("8", "8"), "235B": ("16", "8")}
"""Of the page's table: the trainer's GPUs, and an engine's."""


def configurations() -> dict[str, Any]:
    """Of the models in the page's table, as their config.json has them."""

    def qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv: int) -> Any:
        return transformers.Qwen2Config(
            vocab_size=152064, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=kv, tie_word_embeddings=False,
        )  # fmt: skip

    experts = transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, moe_intermediate_size=1536, num_hidden_layers=94,
        num_attention_heads=64, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
        tie_word_embeddings=False,
    )  # fmt: skip
    return {
        "7B": qwen2(3584, 18944, 28, 28, 4),
        "32B": qwen2(5120, 27648, 64, 40, 8),
        "72B": qwen2(8192, 29568, 80, 64, 8),
        "235B": experts,
    }


def test_the_table_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/sizing.md has what the command prints, for each model and setup in its table."""
    text = (DOCS / "sizing.md").read_text()
    assert any(line.startswith("| setup | options |") for line in text.splitlines())
    rows = re.findall(r"^\| [^|]+ \| `(--[^`]*)`[^|]* \| (.+) \|$", text, flags=re.MULTILINE)
    assert len(rows) >= 6
    for name, config in configurations().items():
        config.architectures = ["Qwen3MoeForCausalLM" if name == "235B" else "Qwen2ForCausalLM"]
        config.save_pretrained(tmp_path / name)
    read: dict[str, Policy] = {name: read_policy(tmp_path / name) for name in configurations()}
    for options, cells in rows:
        for name, cell in zip(read, cells.split(" | "), strict=True):
            if cell == "-":
                continue
            gpus, tp = SIZES[name]
            said_options = options.replace("N", gpus).replace("T", tp).split()
            parsed = cli.parser().parse_args(["plan", name, *said_options])
            setup = Setup(
                gpus=parsed.gpus, tp=parsed.tp, base=parsed.dtype, engine=parsed.engine_dtype, merge=parsed.merge,
                mode=parsed.mode, share=parsed.share, sleep=parsed.sleep, offload=parsed.offload,
                train_merged=parsed.train_merged,
            )  # fmt: skip
            each = totals(estimate(read[name], setup), setup)["each"]
            said = ", ".join(f"{each[step] / 1e9:.1f}" for step in ("training", "push", "rollout"))
            assert cell == said, f"{name} {options}: the page says {cell}, the command {said}"
