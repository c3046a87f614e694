"""verl's real FSDP2 engine on two ranks, with its merged weights from this package: `make test-verl`."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import models
import pytest
from processes import spawn
from repository import ROOT, SUPPORT
from vllm_name import folder as vllm_by_name

if find_spec("verl") is None:
    pytest.skip("verl's tests run in an environment of their own", allow_module_level=True)
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
    # What verl has registered for NVIDIA's accelerators.
    "VERL_ENGINE_DEVICE": "cuda",
    "VERL_ENGINE_VENDOR": "nvidia",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

os.environ |= ENVIRONMENT

ADAPTERS = {
    # What verl's own options cannot say comes with an adapter that it goes on with.
    "patterns": {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"q_proj": 3},
                 "alpha_pattern": {"down_proj": 5}},
    "head": {"target_modules": ["o_proj", "lm_head"]},
    "biased": {"target_modules": ["o_proj"], "lora_bias": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a base with a head of its own and of one without, and of adapters."""
    folder = tmp_path_factory.mktemp("verl")
    import verl_model

    for tied in (False, True):
        verl_model.save_model(folder / ("tied" if tied else "untied") / "model", tied=tied)
    from transformers import AutoModelForCausalLM

    for name, config in ADAPTERS.items():
        where = folder / ("tied" if name == "head" else "untied")
        base = AutoModelForCausalLM.from_pretrained(where / "model")
        models.with_lora(lambda base=base: base, **config).save_pretrained(where / name)
    return folder


def environment(entry_points: Path | None = None, **changes: str) -> dict[str, str]:
    """Of a process that is to find this package, the tests and what comes with them."""
    found = [entry_points, ROOT, SUPPORT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    absolute = [str(Path(path).resolve()) for path in found if path]  # it may begin elsewhere
    return os.environ | {"PYTHONPATH": os.pathsep.join(absolute)} | changes


def run(code: str, **changes: Any) -> str:
    """What a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(**changes), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


CASES = {
    "float32": ("untied", {}),
    "tied, bf16, offloaded": (
        "tied",
        {"model_dtype": "bf16", "param_offload": True, "optimizer_offload": True, "mixed_precision": None},
    ),
    "patterns": ("untied", {"lora_adapter_path": "patterns"}),
}


def several(rank: int, folder: Path, cases: dict[str, tuple[str, dict[str, Any]]]) -> None:
    """Ranks are dear to start: one after the other in the same ones."""
    import verl_ranks

    import lora_merge.integrations.verl  # noqa: F401 - as verl imports `model.external_lib`

    for name, (base, changes) in cases.items():
        if "lora_adapter_path" in changes:
            changes = changes | {"lora_adapter_path": str(folder / base / changes["lora_adapter_path"])}
        where = folder / base
        verl_ranks.streams(rank, where, changes, folder / f"{name}.json")
    verl_ranks.checks(rank, folder / "untied")
    verl_ranks.refusals(rank, folder)


def test_two_ranks(
    place: Path, entry_points: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams of all cases on verl's engine, and beside stock's; the check; what is refused."""
    monkeypatch.syspath_prepend(str(vllm_by_name(entry_points)))
    spawn(2, several, place, CASES)
    for name in CASES:
        found = json.loads((place / f"{name}.json").read_text())
        with capsys.disabled():
            print(
                f"\nverl's own stream, {name}: {found['differ']} of {found['elements']} elements in {found['tensors']} "
                f"tensors differ from ours, its error is {found['error']:.3f} of ours; its merge leaves "
                f"{found['drift']} elements of the base changed, ours 0"
            )
        assert found["wrong"] == found["lacking"] == [], found
        assert found["error"] > 0.999, found
        first, *later = found["told"]
        assert first == {}  # nothing had been sent
        assert [told["lora_merge/version"] for told in later] == [[1.0], [2.0]], later
        assert all(told["lora_merge/tensors"] == [found["tensors"]] for told in later), later


def one_shard(rank: int, folder: Path, answer: Path) -> None:
    import verl_ranks

    verl_ranks.steps_and_syncs(rank, folder, answer, "fsdp")


@pytest.mark.parametrize("world", [1, 2])
def test_fsdp1(world: int, place: Path, tmp_path: Path, entry_points: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`actor.strategy=fsdp`; on one rank torch shards nothing."""
    monkeypatch.syspath_prepend(str(vllm_by_name(entry_points)))
    spawn(world, one_shard, place / "untied", tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    print(f"verl's own stream beside ours, FSDP1: {found}")
    assert found["error"] > 0.999


SHOW = """
import verl
from verl.workers.engine import EngineRegistry
from verl.workers.rollout.base import _ROLLOUT_REGISTRY
places = [EngineRegistry.get_engine_cls("language_model", backend) for backend in ("fsdp", "fsdp2")]
print(*(f"{place.__module__}.{place.__name__}" for place in places), _ROLLOUT_REGISTRY["vllm", "async"])
"""
OURS = ["lora_merge.integrations.verl_engines.fsdp.LoraMergeFSDPEngine"] * 2
OUR_ADAPTER = "lora_merge.integrations.verl_engines.rollout.LoraMergeServerAdapter"
THEIRS = ["verl.workers.engine.fsdp.transformer_impl.FSDPEngineWithLMHead"] * 2
THEIR_ADAPTER = "verl.workers.rollout.vllm_rollout.ServerAdapter"


@pytest.fixture(scope="module")
def entry_points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip writes down of this package's entry points, wherever the installed one stands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("installed")
    found = folder / "lora_merge_of_the_test-1.0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: lora-merge-of-the-test\nVersion: 1.0\n")
    lines = [f"[verl.plugins]\n{name} = {value}" for name, value in project["entry-points"]["verl.plugins"].items()]
    (found / "entry_points.txt").write_text("\n".join(lines))
    return folder


def test_the_plugin_is_found(entry_points: Path) -> None:
    """Of itself, by its entry point, and no sooner than verl's own engines are imported."""
    first = "import sys, verl\nassert 'verl.workers.engine' not in sys.modules, 'too early for other plugins'\n"
    assert run(first + SHOW, entry_points=entry_points).split() == [*OURS, OUR_ADAPTER]


def test_by_name() -> None:
    """`model.external_lib`, for any vendor; refused is a release that lacks something, or somebody else's engine. The
    plugin steps aside in all of this, but engines that are to merge then raise; both do so where LORA_MERGE=0."""
    script = (
        """
import os
from types import SimpleNamespace
import verl.utils.fsdp_utils as utils
from lora_merge.integrations.verl_engines.registry import take_over, take_over_quietly
from verl.workers.engine import FSDPEngineWithLMHead
from verl.workers.engine.base import EngineRegistry

def tried(call):
    try:
        call()
    except RuntimeError as error:
        print(error)

os.environ["LORA_MERGE"] = "0"
take_over()
take_over_quietly()
del os.environ["LORA_MERGE"]
lacking, utils.offload_fsdp_model_to_cpu = utils.offload_fsdp_model_to_cpu, None
del utils.offload_fsdp_model_to_cpu
take_over_quietly()
engine = object.__new__(EngineRegistry.get_engine_cls("language_model", "fsdp2"))
engine.engine_config = SimpleNamespace(forward_only=False)
engine.model_config = SimpleNamespace(lora={"merge": True}, lora_rank=8)
tried(engine.initialize)  # and what does not merge is initialised as ever
engine.model_config.lora_rank = 0
try:
    engine.initialize()
except AttributeError:
    pass
tried(take_over)
utils.offload_fsdp_model_to_cpu = lacking
os.environ["VERL_ENGINE_VENDOR"] = "metax"
take_over_quietly()
"""
        + SHOW
        + """
mine = type("Mine", (FSDPEngineWithLMHead,), {})
EngineRegistry.register("language_model", "fsdp", device="cuda", vendor="mine")(mine)
os.environ["VERL_ENGINE_VENDOR"] = "mine"
tried(take_over)
os.environ["VERL_ENGINE_VENDOR"] = "metax"
import lora_merge.integrations.verl
take_over()
"""
        + SHOW
    )
    merging, lacking, before, other, after = run(script, VERL_USE_EXTERNAL_PLUGINS="none").splitlines()[-5:]
    assert merging == lacking
    assert "verl 0.9.1 does not offer verl.utils.fsdp_utils.offload_fsdp_model_to_cpu" in lacking
    assert "LORA_MERGE=0 leaves verl's own way in place" in lacking
    assert before.split() == [*THEIRS, THEIR_ADAPTER]
    assert "the engine of fsdp for cuda of mine is __main__.Mine" in other
    assert after.split() == [*OURS, OUR_ADAPTER]


def test_what_verl_does_not_offer_yet() -> None:
    """Reasons for two things that would better be done otherwise: an entry of verl's table of rollouts is replaced,
    because no function registers one; its servers' engines are called from inside, because `collective_rpc` returns
    nothing. When this fails, a new release allows for more."""
    spec = find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations
    rollout = Path(spec.submodule_search_locations[0]) / "workers" / "rollout"
    base = ast.parse((rollout / "base.py").read_text())
    functions = [node.name for node in ast.walk(base) if isinstance(node, ast.FunctionDef)]
    assert not [name for name in functions if "register" in name]
    server = ast.parse((rollout / "vllm_rollout" / "vllm_async_server.py").read_text())
    calls = [n for n in ast.walk(server) if isinstance(n, ast.AsyncFunctionDef) and n.name == "collective_rpc"]
    assert len(calls) == 1
    assert not any(isinstance(node, ast.Return) for node in ast.walk(calls[0]))
