"""Models that DeepSpeed's ZeRO partitions: merged and streamed to the bit as whole ones (`make test-libraries`)."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import models
import pytest
import torch
import torch.distributed as dist
from checkpoints import tensors
from helpers import assert_same_bits
from processes import spawn
from repository import ROOT
from torch import Tensor, nn

from lora_merge import (
    AlreadyMerged,
    InvalidInput,
    LoraMergeError,
    MergedWeights,
    NotRestored,
    merged,
    read_deltas,
    save_merged,
)
from lora_merge.models.part import Learning
from lora_merge.shards.zero3 import _init_of
from tests.models.test_trainable_tokens import KINDS as TOKENS
from tests.shards.test_shards_errors import FAULTS, assert_refused, enter
from tests.shards.test_shards_merge import (
    MODELS,
    Odd,
    check,
    cut,
    device,
    held_inside,
    local_bits,
    odd,
    read_deltas_merged,
)

pytestmark = pytest.mark.filterwarnings("ignore")
os.environ["DS_ACCELERATOR"] = "cpu"  # test_zero3_gpu.py, whose cases these are, too, says otherwise

CONFIGS: dict[str, dict[str, Any]] = {
    "partitioned": {"stage3_param_persistence_threshold": 0},
    "some persist": {"stage3_param_persistence_threshold": 1100},
    "all persist": {},
    "offloaded": {"stage3_param_persistence_threshold": 600, "offload_param": {"device": "cpu"}},
    "hpZ": {"stage3_param_persistence_threshold": 600, "zero_hpz_partition_size": 2},
}


def engine(
    model: nn.Module, *, stage: int = 3, lr: float = 1e-2, bf16: bool = False, autocast: bool = False, **options: Any
) -> Any:
    import deepspeed

    # Else it compiles what a CPU's collectives take in inference alone: a minute in each environment.
    deepspeed.ops.__compatible_ops__ = {}
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, **options},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "Adam", "params": {"lr": lr, "torch_adam": True}},
        "bf16": {"enabled": bf16},
        "torch_autocast": {"enabled": autocast, "dtype": "bfloat16"},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def build(name: str) -> nn.Module:
    return MODELS[name]().to(device())


def wrap_of(name: str, **options: Any) -> Callable[[Any], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        return engine(model, **CONFIGS[name], **options)

    return wrap


def bases(model: nn.Module) -> list[Any]:
    """The adapted parameters."""
    return [delta.owner._parameters[delta.attribute] for delta in read_deltas(model) if delta.owner is not None]


def every_case(rank: int, cases: Sequence[Callable[[int], None]]) -> None:
    for case in cases:
        try:
            case(rank)
        except Exception as error:
            raise AssertionError(f"{case.__name__} on rank {rank}") from error


def every_config(rank: int, configs: Sequence[str], names: Sequence[str]) -> None:
    for config in configs:
        for name in names:
            check(MODELS[name], wrap_of(config), f"{config} {name} on rank {rank}")


def in_bf16(rank: int) -> None:
    """Float32 master weights of the adapters are the optimizer's: what the forward computes with is bf16."""
    check(lambda: MODELS["qwen2"]().bfloat16(), wrap_of("some persist", bf16=True), f"bf16 on rank {rank}")


def loss_of(model: Any, rank: int, step: int) -> Tensor:
    tokens = models.tokens(seed=10 * step + rank).to(device())
    return model(input_ids=tokens, labels=tokens).loss


def under_autocast(rank: int) -> None:
    """DeepSpeed's torch_autocast rounds to bf16 what a forward gathers of float32 partitions: nobody wrote to that, and
    the partitions are what is streamed and merged."""
    plain, model = build("qwen2 float32"), engine(build("qwen2 float32"), autocast=True, **CONFIGS["some persist"])
    wanted, before, seen = dict(MergedWeights(plain)), local_bits(model), []

    def look(module: Any, _: Any) -> None:
        weight, mine = module.weight, module.weight.ds_tensor
        there = weight.data.flatten()[rank * mine.ds_numel :][: mine.numel()]
        seen.append(hasattr(weight, "comm_dtype") and not torch.equal(there.float(), mine[: there.numel()]))
        for name, tensor in MergedWeights(model, bucket_bytes=10_000):
            assert_same_bits(tensor, wanted[name], name)

    layer = model.module.get_base_model().model.layers[1].mlp.up_proj.base_layer
    hook = layer.register_forward_pre_hook(look)
    with torch.no_grad():
        adapter = loss_of(model, rank, 0)
        hook.remove()
        with merged(model):
            torch.testing.assert_close(loss_of(model, rank, 0), adapter, rtol=2**-6, atol=0)
    assert seen == [True], "gathered, and rounded"
    for now, then in zip(local_bits(model), before, strict=True):
        assert_same_bits(now, then)


def gathered(rank: int) -> None:
    """What is gathered when merging begins, and what is gathered inside."""
    from deepspeed.runtime.zero import GatheredParameters

    plain, model = build("qwen2 float32"), engine(build("qwen2 float32"), **CONFIGS["some persist"])
    wanted, before = dict(MergedWeights(plain)), local_bits(model)
    base = {delta.name: delta.weight.pieces[0].tensor.clone() for delta in read_deltas(plain)}
    parameters = {delta.name: parameter for delta, parameter in zip(read_deltas(model), bases(model), strict=True)}
    everything = list(model.parameters())
    some = [p for name, p in model.named_parameters() if "layers.1" not in name]
    for held in (everything, some):
        with GatheredParameters(held):
            for name, tensor in MergedWeights(model, bucket_bytes=10_000):
                assert_same_bits(tensor, wanted[name], name)
            assert_refused(model, r"layers\.0.*inside deepspeed.zero.GatheredParameters", (enter,))
            assert parameters["model.layers.0.mlp.up_proj.weight"].shape == (48, 32), "still gathered"
    adapters = [p for name, p in model.named_parameters() if "lora_" in name]
    with GatheredParameters(adapters), merged(model):
        for modifier in (None, 0):
            with GatheredParameters(list(parameters.values()), modifier_rank=modifier):
                for name, parameter in parameters.items():
                    assert_same_bits(parameter.data, wanted[name], f"{name}, gathered inside")
    with GatheredParameters(list(parameters.values())):
        for name, parameter in parameters.items():
            assert_same_bits(parameter.data, base[name], f"{name}, gathered after")
    for now, then in zip(local_bits(model), before, strict=True):
        assert_same_bits(now, then)
    # Begun inside and never left: what it held goes back, its end changes nothing, and all is as before.
    for modifier in (None, 0):
        context = GatheredParameters(list(parameters.values()), modifier_rank=modifier)
        with pytest.raises(InvalidInput, match=r"14 merged weights .* leave it inside"), merged(model):
            context.__enter__()
        context.__exit__(None, None, None)
        for now, then in zip(local_bits(model), before, strict=True):
            assert_same_bits(now, then)
        with merged(model):
            pass


def written_while_gathered(rank: int) -> None:
    """As PEFT loads an adapter: into what persists, which the partitions do not see, and the next step forgets."""
    from deepspeed.runtime.zero import GatheredParameters

    model = engine(odd(), lr=0.0)
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(rank)).to(device())
    weights = MergedWeights(model, bucket_bytes=512)
    for _ in range(2):
        model(x)  # gathers what persists
        with merged(model):
            pass
        before = {name: tensor.clone() for name, tensor in weights}
    lora_B = model.module.base_model.model.narrow.lora_B["default"].weight
    for write in (lambda: lora_B.mul_(2), lambda: lora_B[-1].zero_()):  # the last row is one rank's alone
        model(x)
        with torch.no_grad():
            write()
        told = "narrow.* was written to while" if rank == 1 else "narrow.* was written to while|rank 1 failed"
        assert_refused(model, told)
        lora_B.partition()
        assert dict(weights).keys() == before.keys()
    with GatheredParameters([lora_B], modifier_rank=0), torch.no_grad():
        lora_B.zero_()
    for name, tensor in weights:
        assert torch.equal(tensor, before[name]) == (name != "narrow.weight"), name
    with merged(model):
        pass


def written_inside(rank: int) -> None:
    """A write that GatheredParameters takes to the partitions is found by name; all other weights come back."""
    from deepspeed.runtime.zero import GatheredParameters

    model = engine(MODELS["qwen2 float32"](), **CONFIGS["some persist"])
    names = [delta.name for delta in read_deltas(model)]
    parameter, before = bases(model)[3], local_bits(model)
    numbers = [number for number, p in enumerate(model.parameters()) if p is parameter]
    expected = pytest.raises(NotRestored, match=names[3])
    with expected, merged(model), GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
        parameter.data[:] = 1.0
    changed = [n for n, (a, b) in enumerate(zip(local_bits(model), before, strict=True)) if not torch.equal(a, b)]
    assert changed, numbers


def replaced_inside(rank: int) -> None:
    """Another module in the place of one that was merged is found by name, and all weights come back."""
    model = engine(MODELS["qwen2 float32"](), **CONFIGS["some persist"])
    before, mlp = local_bits(model), model.module.get_base_model().model.layers[1].mlp
    for _ in range(2):
        there = mlp.up_proj
        expected = pytest.raises(NotRestored, match=r"layers\.1\.mlp\.up_proj\.weight: another module")
        with expected, merged(model):
            loss_of(model, rank, 0)
            mlp.up_proj = nn.Linear(32, 48)
        mlp.up_proj = there
        for now, then in zip(local_bits(model), before, strict=True):
            assert_same_bits(now, then)
        with merged(model):
            loss_of(model, rank, 0)
            with pytest.raises(AlreadyMerged, match="Copy it before or after"):
                copy.deepcopy(there)


def raising(*_: object) -> None:
    raise RuntimeError("injected")


def raised_inside(rank: int) -> None:
    """A forward that raises in the middle of it, with all-gathers under way: weights go back to the base all the same,
    and are merged again."""
    for config in ("partitioned", "all persist"):
        model = engine(MODELS["qwen2 float32"]().train(), **CONFIGS[config])
        for step in range(3):
            model.backward(loss_of(model, rank, step))
            model.step()
        with torch.no_grad():
            wanted, before = loss_of(model, rank, 9), local_bits(model)
        for _ in range(2):
            hook = model.module.get_base_model().model.layers[1].mlp.register_forward_pre_hook(raising)
            with pytest.raises(RuntimeError, match="injected"), merged(model):
                loss_of(model, rank, 9)
            hook.remove()
            for now, then in zip(local_bits(model), before, strict=True):
                assert_same_bits(now, then, config)
            with torch.no_grad():
                assert torch.equal(loss_of(model, rank, 9), wanted), f"{config}: a forward after it"


def in_a_forward(rank: int) -> None:
    model = engine(odd(), stage3_param_persistence_threshold=0)
    hook = model.module.base_model.model.wide.base_layer.register_forward_pre_hook(
        lambda *_: assert_refused(model, r"wide\.weight: DeepSpeed is using it in a forward", (enter,))
    )
    model(torch.randn(4, 20, device=device()))
    hook.remove()
    with merged(model):
        model(torch.randn(4, 20, device=device()))


def moved(rank: int) -> None:
    """Partitions that lie elsewhere than before are read, and merged, where they are."""
    model = engine(MODELS["qwen2 float32"](), **CONFIGS["some persist"])
    weights = MergedWeights(model, bucket_bytes=10_000)
    wanted, before = {name: t.clone() for name, t in weights}, local_bits(model)

    def move() -> list[Tensor]:
        left = [parameter.ds_tensor.data for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.ds_tensor.data = parameter.ds_tensor.data.clone()
        return left

    for inside in (False, True):
        for _ in range(2):
            for left in move() if not inside else ():
                left.fill_(torch.nan)
            for name, tensor in weights:
                assert_same_bits(tensor, wanted[name], name)
            with merged(model):
                if inside:
                    move()
            for now, then in zip(local_bits(model), before, strict=True):
                assert_same_bits(now, then, f"moved {'inside' if inside else 'before'}")


def before_the_engine(rank: int) -> None:
    """A base that was built partitioned, with adapters that are whole on each rank."""
    import deepspeed

    os.environ["LOCAL_RANK"] = str(rank)
    wanted, model = dict(MergedWeights(build("qwen2 float32"))), build("qwen2 float32")
    for parameter in model.parameters():
        if not parameter.requires_grad:
            deepspeed.zero.Init()._convert_to_zero_parameters([parameter])
    for _ in range(2):
        for name, tensor in MergedWeights(model, bucket_bytes=10_000):
            assert_same_bits(tensor, wanted[name], name)
        with merged(model):
            pass


def parts(rank: int) -> None:
    """Of the model, with its adapters and without."""
    plain = build("qwen2 float32")
    model = engine(MODELS["qwen2 float32"](), **CONFIGS["some persist"])
    inner, base = model.module.get_base_model().model, plain.get_base_model().model
    pairs = [
        (MergedWeights(inner.norm), MergedWeights(base.norm)),
        (MergedWeights(inner.layers[0].mlp), MergedWeights(base.layers[0].mlp)),
        (MergedWeights(model, adapters=False), MergedWeights(plain, adapters=False)),
        (MergedWeights(model, dtype=torch.bfloat16), MergedWeights(plain, dtype=torch.bfloat16)),
    ]
    for one, other in pairs:
        got, wanted = dict(one), dict(other)
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert_same_bits(got[name], tensor, name)
    assert [delta.describe() for delta in read_deltas(model)] == [delta.describe() for delta in read_deltas(plain)]


def learning(rank: int) -> None:
    """What training changes beside the adapters is the same as of the whole model, however parameters are cut."""

    def trained() -> nn.Module:
        model = models.with_lora(models.qwen2, target_modules=["q_proj"], modules_to_save=["embed_tokens"], bias="all")
        model.get_base_model().model.norm.weight.requires_grad_(True)
        return model.to(device())

    found = []
    for model in (trained(), engine(trained(), **CONFIGS["some persist"])):
        source = MergedWeights(model).bucket_writer().source
        modules = getattr(model, "module", model).modules()
        found.append(Learning(modules).names(source.parts, source.ranks, buffers=False))
    assert found[0] == found[1]
    assert {name.rpartition(".")[2] for name in found[0]} == {"weight", "bias"}
    assert len(found[0]) == 8, found[0]  # three biases in each of two layers, the norm, and the embedding


def refused(rank: int) -> None:
    """What is kept in a way that is not read, each by name; and what must not be called."""
    model = engine(odd(), **CONFIGS["partitioned"])
    inner = model.module.base_model.model
    weight, alone = inner.narrow.base_layer.weight, dist.new_group([rank], use_local_synchronization=True)
    cases: dict[str, tuple[Any, str, Any]] = {
        r"narrow.*: DeepSpeed \(ZeRO\+\+\)": (weight.ds_tensor, "ds_quant_scale", torch.ones(1)),
        r"wide: DeepSpeed \(ZeRO\+\+\) quantises": (_init_of(weight), "quantized_weights", True),
        r"narrow.*: DeepSpeed MiCS": (weight, "comm", object()),
        r"narrow.*: DeepSpeed keeps .* on a disk": (
            weight.ds_tensor,
            "status",
            type(weight.ds_tensor.status)["NOT_AVAILABLE"],
        ),
        r"narrow.*: expected partitions of 186 elements of 371": (weight.ds_tensor, "ds_numel", 7),
        r"narrow.*: DeepSpeed ZeRO-3 has not partitioned this parameter yet.*deepspeed.initialize": (
            weight,
            "ds_tensor",
            None,
        ),
        "over 2 ranks and others over 1": (weight, "ds_process_group", alone),
    }
    for message, (owner, name, value) in cases.items():
        with mock.patch.object(owner, name, value, create=True):
            assert_refused(model, message)
    for module in (model, inner.narrow):
        weight.ds_status = type(weight.ds_status)["INFLIGHT"]
        assert_refused(module, "weight: DeepSpeed is gathering it ahead of its use", (enter,))
        weight.ds_status = type(weight.ds_status)["NOT_AVAILABLE"]
    with merged(model), pytest.raises(AlreadyMerged):
        model.save_checkpoint("nowhere")
    with merged(inner.narrow):
        pass
    assert_refused(engine(Odd(), **CONFIGS["partitioned"]), "no LoRA layers", (enter,))


def tied(rank: int) -> None:
    """In place an adapter on one of two tied weights is refused; the stream holds the two apart."""

    def both() -> nn.Module:
        made = models.with_lora(lambda: models.qwen2(tied=True), target_modules=["lm_head", "q_proj"])
        return made.to(device())

    model, wanted = engine(both(), **CONFIGS["partitioned"]), dict(MergedWeights(both()))
    assert_refused(model, "tied weight", (enter,))
    got = dict(MergedWeights(model))
    assert got.keys() == wanted.keys()
    for name, tensor in got.items():
        assert_same_bits(tensor, wanted[name], name)


def tokens(rank: int) -> None:
    """Trained rows replace those of an embedding and a head that are cut between them: streamed, in place, and back."""
    for kind in ("tied", "both, untied"):
        plain = TOKENS[kind]().to(device())
        wanted, held = dict(MergedWeights(plain)), held_inside(plain)
        for config in ("partitioned", "some persist"):
            model = engine(TOKENS[kind]().to(device()), **CONFIGS[config])
            before, weights = local_bits(model), MergedWeights(model, bucket_bytes=4096)
            for strategy in (None, "unshard", None):
                got = dict(weights)
                assert got.keys() == wanted.keys()
                for name, tensor in got.items():
                    assert_same_bits(tensor, wanted[name], f"{kind} {config} {name}")
                with merged(model, strategy=strategy):
                    for delta in read_deltas_merged(model):
                        for piece in delta.weight.pieces:
                            assert_same_bits(piece.tensor, cut(held[delta.name], piece.box), f"{config} {delta.name}")
                for now, then in zip(local_bits(model), before, strict=True):
                    assert_same_bits(now, then, f"{kind} {config}: a partition after merging")


def fails_on_one_rank(rank: int) -> None:
    """It is an error on every rank, wherever it comes up on one; nothing is changed, and forwards find each other."""

    def out_of_memory(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("injected")

    faults = [*FAULTS, ("lora_merge.models.peft.live.Peft.weights", enter, {})]
    for number, (where, use, options) in enumerate(faults):
        model = engine(odd(("one", "two")), **CONFIGS[("partitioned", "all persist")[number % 2]])
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(rank)).to(device())
        before, wanted = local_bits(model), model(x).detach().clone()
        with (
            mock.patch(where, out_of_memory) if rank == 1 else nullcontext(),
            pytest.raises(torch.OutOfMemoryError if rank == 1 else LoraMergeError),
        ):
            use(model, **options)
        for now, then in zip(local_bits(model), before, strict=True):
            assert_same_bits(now, then, where)
        assert torch.equal(model(x), wanted), where
        with merged(model):
            model(x)
        dict(MergedWeights(model))
        assert torch.equal(model(x), wanted), where
    if rank == 1:
        model.module.base_model.model.wide.set_scale("one", 7.0)
    assert_refused(model, "(?s)disagree.*rank 1: wide.weight")


def after_the_end(rank: int) -> None:
    model = engine(odd(), **CONFIGS["partitioned"])
    with mock.patch.object(dist, "is_initialized", return_value=False):
        assert_refused(model, "torch.distributed is not initialised")


ON_TWO: list[Callable[[int], None]] = [
    in_bf16,
    gathered,
    written_while_gathered,
    written_inside,
    replaced_inside,
    raised_inside,
    in_a_forward,
    moved,
    parts,
    learning,
    before_the_engine,
    refused,
    tied,
    tokens,
    fails_on_one_rank,
    after_the_end,
    under_autocast,  # the last: DeepSpeed then takes all engines of the process for such
]


def test_every_config_on_two_ranks() -> None:
    spawn(2, every_config, list(CONFIGS), ["qwen2 float32"])


def test_every_model_on_two_ranks() -> None:
    spawn(2, every_config, ["some persist"], [name for name in MODELS if "qwen2" not in name or "head" in name])


def test_rows_that_do_not_divide() -> None:
    spawn(3, every_config, ["partitioned", "all persist"], ["qwen2 head and embeddings", "experts"])


def test_one_rank() -> None:
    spawn(1, every_config, ["partitioned", "all persist", "offloaded"], ["qwen2 float32"])


def test_two_ranks() -> None:
    spawn(2, every_case, ON_TWO)


def saved(rank: int, folder: Path) -> None:
    """A checkpoint out of partitions: written by one rank, with the bits of the whole model's stream."""
    wanted = {name: t.clone() for name, t in MergedWeights(MODELS["qwen2 float32"]())}
    model = engine(MODELS["qwen2 float32"](), **CONFIGS["some persist"])
    told = save_merged(model, folder / "out", max_shard_size="20KB", bucket_bytes=10_000)
    assert (told is not None) == (rank == 0)
    dist.barrier()
    got = tensors(folder / "out")
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(got[name], tensor, name)
    assert (folder / "out" / "config.json").exists()
    options = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}  # a copy of one of two tied weights
    wanted = {
        name: t.clone() for name, t in MergedWeights(models.with_lora(lambda: models.qwen2(tied=True), **options))
    }
    model = engine(models.with_lora(lambda: models.qwen2(tied=True), **options), **CONFIGS["some persist"])
    save_merged(model, folder / "apart")
    dist.barrier()
    got = tensors(folder / "apart")
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(got[name], tensor, name)
    assert json.loads((folder / "apart" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_checkpoint_is_saved(tmp_path: Path) -> None:
    spawn(2, saved, tmp_path)


def test_benchmark(tmp_path: Path) -> None:
    """`benchmarks/zero3.py` on two ranks: all ways see all bytes of the base."""
    data = tmp_path / "zero3.json"
    options = ["--device", "cpu", "--shape", "tiny", "--bucket-bytes", "200000", "--repeats", "1", "--json", str(data)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*torchrun, "benchmarks/zero3.py", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    record = json.loads(data.read_text())
    ways = record["ways"]
    assert list(ways) == ["buckets", "stream", "in place", "gather all", "gather layers"]
    assert {ways[name]["bytes"] for name in ways if name != "in place"} == {ways["stream"]["bytes"]}
    assert all(way["ms"] > 0 and way["first_ms"] > 0 for way in ways.values())
    assert {"deepspeed", "torch", "peft"} <= record["versions"].keys()
