"""What cannot be taken over of ms-swift says which of swift's flags to change, before an engine is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import swift_runs
import torch
from peft import get_peft_model
from repository import ROOT
from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin
from swift.trainers import TrainerFactory
from swift.tuners import LoraConfig
from swift.tuners.peft import keep_device_forward
from swift_runs import arguments, training
from torch import nn

from lora_merge import InvalidInput, UnsupportedAdapter, merged
from lora_merge.integrations.compat import TrainerRefused
from lora_merge.integrations.ms_swift import PLUGIN, kinds
from lora_merge.integrations.ms_swift.delivery import Colocated
from lora_merge.integrations.ms_swift.refusals import refuse, refuse_server
from lora_merge.integrations.options import Options

nothing_set = swift_runs.nothing_set


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return swift_runs.checkpoint(swift_runs.qwen2(tied=False), tmp_path_factory.mktemp("swift") / "base")


@pytest.fixture
def factory() -> Iterator[None]:
    """swift's own trainers, before and after."""
    mapping, known = dict(TrainerFactory.TRAINER_MAPPING), dict(kinds._before)
    TrainerFactory.TRAINER_MAPPING.update(known)
    kinds._before.clear()
    yield
    TrainerFactory.TRAINER_MAPPING.update(mapping)
    kinds._before.update(known)


def fails(kind: str, base: Path, out: Path, **flags: Any) -> None:
    swift_runs.train(arguments(kind, base, out, **flags))


NO_VLLM = {"use_vllm": "false", "vllm_mode": None}


@pytest.mark.parametrize(("kind", "flags", "environment", "message"), [
    ("grpo", NO_VLLM, {}, "--use_vllm true --vllm_mode colocate"),
    ("gkd", NO_VLLM, {}, "--use_vllm true --vllm_mode colocate"),
    ("grpo", {}, {"LORA_MERGE_MODE": "adapter"}, "--vllm_enable_lora true"),
    ("grpo", {"tuner_type": "full", "vllm_enable_lora": "true"}, {"LORA_MERGE_MODE": "adapter"}, "--tuner_type lora"),
    ("grpo", {"top_k": "5", "top_p": "0.9", "lora_dropout": "0.05"}, {"LORA_MERGE_CHECK": "1"},
     r"--top_k 5 \(pass -1\), --top_p 0.9 \(pass 1\), dropout.*--lora_dropout 0"),
    ("gkd", {"repetition_penalty": "1.1"}, {"LORA_MERGE_CHECK": "0.1"}, r"--repetition_penalty 1.1 \(pass 1\)"),
])  # fmt: skip
def test_flags(
    kind: str, flags: dict[str, Any], environment: dict[str, str], message: str, base: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainerRefused, match=message):
        fails(kind, base, tmp_path, **flags)


@pytest.mark.parametrize(("name", "value"), [("MODE", "both"), ("ROUNDING", "up"), ("CHECK", "2"), ("VERIFY", "maybe")])
def test_variables(name: str, value: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"LORA_MERGE_{name}", value)
    with pytest.raises(InvalidInput, match=f"LORA_MERGE_{name}"):
        fails("grpo", base, tmp_path)


@pytest.mark.parametrize("flags", [{"use_dora": "true"}, {"modules_to_save": "lm_head"}])
def test_adapters_that_vllm_cannot_serve(flags: dict[str, Any], base: Path, tmp_path: Path) -> None:
    """Of modules_to_save swift itself would send what they were at first, for ever."""
    with pytest.raises(TrainerRefused, match="--vllm_enable_lora false pushes merged weights"):
        fails("grpo", base, tmp_path, vllm_enable_lora="true", **flags)


PLAIN = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_lora": False, "tuner_type": "lora"}
WHOLE = SimpleNamespace(quant_method=None, quant_bits=None)


@pytest.mark.parametrize(("info", "args", "options", "message"), [
    ({"quant_method": "bnb", "quant_bits": 4, "model_dir": "codes"}, {}, {}, r"bnb, 4 bits.*plain weights, with --q"),
    ({"quant_method": "gptq", "quant_bits": 8}, {}, {}, r"gptq, 8 bits"),
    ({"quant_method": "hqq", "quant_bits": 4}, {}, {}, r"hqq, 4 bits.*--quant_method bnb"),
    ({}, {"vllm_mode": "server"}, {"verify": True}, "LORA_MERGE_VERIFY"),
    ({}, {"vllm_mode": "server"}, {"cache": "keep"}, "LORA_MERGE_CACHE"),
    ({}, {"vllm_mode": "server", "vllm_enable_lora": True}, {"mode": "adapter"}, "--vllm_mode colocate"),
])  # fmt: skip
def test_what_needs_other_libraries(
    info: dict[str, Any], args: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Arguments as swift makes them of --quant_bits and --vllm_mode server."""
    monkeypatch.chdir(tmp_path)
    Path("codes").mkdir()
    codes = {"quant_method": "bitsandbytes", "_load_in_4bit": True, "load_in_4bit": True}
    Path("codes", "config.json").write_text(json.dumps({"model_type": "qwen2", "quantization_config": codes}))
    model = SimpleNamespace(model_info=SimpleNamespace(**vars(WHOLE) | info))
    with pytest.raises(TrainerRefused, match=message) as refused:
        refuse(model, SimpleNamespace(**PLAIN | args), Options(**options))
    assert "LORA_MERGE=0 leaves ms-swift's own way in place" in str(refused.value)
    refuse(SimpleNamespace(model_info=WHOLE), SimpleNamespace(**PLAIN), Options())


def test_a_server_that_takes_adapters() -> None:
    """The one that a training before left there would count on top of the merged weights."""
    refuse_server(False)
    with pytest.raises(TrainerRefused, match="without --vllm_enable_lora"):
        refuse_server(True)


def test_an_engine_that_cannot_be_told_of_an_adapter() -> None:
    """It would answer by the base alone, without a word."""
    with pytest.raises(TrainerRefused, match=r"default_adapter_request.*--vllm_enable_lora"):
        Colocated(SimpleNamespace(), "adapter", Options())


def test_other_trainings_go_on(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], factory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the plugin, DPO is swift's own, and a line says so: also after a training with LORA_MERGE=0."""
    answer = {"role": "assistant", "content": "yes"}
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}, answer], "rejected_response": "no"} for i in range(8)]
    data = tmp_path / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    without = {name: None for name in swift_runs.FLAGS if "vllm" in name} | {"max_completion_length": None}
    line = arguments("dpo", base, tmp_path / "out", max_steps="1", dataset=str(data), **without)
    for off in (True, False):
        with monkeypatch.context() as patch:
            patch.setenv("LORA_MERGE", "0" if off else "1")
            with training(line) as trainer:
                assert type(trainer).__module__ == "swift.rlhf_trainers.dpo_trainer"
                assert trainer.state.global_step == 1
        said = capfd.readouterr().err
        assert said.count("lora_merge takes over nothing of ms-swift 4.6.0: dpo has no rollout engine") == 1 - off


def test_a_release_that_lacks_names(base: Path, tmp_path: Path, factory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in one error, and LORA_MERGE=0 looks at none."""
    with monkeypatch.context() as patch:
        patch.delattr(TrainerFactory, "TRAINER_MAPPING")
        with pytest.raises(TrainerRefused, match=r"does not offer swift\.trainers\.TrainerFactory\.TRAINER_MAPPING"):
            kinds.take_over()
        patch.setenv("LORA_MERGE", "0")
        kinds.take_over()
    kinds.take_over()
    monkeypatch.delattr(RolloutTrainerMixin, "_move_full_model_to_vllm")
    monkeypatch.delattr(RolloutTrainerMixin, "_engine_infer")
    with pytest.raises(TrainerRefused, match=r"_move_full_model_to_vllm, .*_engine_infer.*tested with 4\.6\.0"):
        TrainerFactory.get_trainer_cls(SimpleNamespace(rlhf_type="grpo"))


def test_a_trainer_of_the_users_own(factory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another plugin has put in place pushes, too."""
    from swift.rlhf_trainers import GRPOTrainer

    class Own(GRPOTrainer):
        pass

    monkeypatch.setattr(sys.modules[__name__], "Own", Own, raising=False)
    TrainerFactory.TRAINER_MAPPING["grpo"] = f"{__name__}.Own"
    kinds.take_over()
    kinds.take_over()
    found = TrainerFactory.get_trainer_cls(SimpleNamespace(rlhf_type="grpo"))
    assert issubclass(found, Own)
    assert found.__name__ == "Own"
    assert found._move_full_model_to_vllm is not Own._move_full_model_to_vllm


def test_the_path_of_the_plugin(tmp_path: Path) -> None:
    """It is all that is printed, lies in an installed package, too, and has its folder for itself."""
    printed = subprocess.run(
        [sys.executable, "-m", "lora_merge.integrations.ms_swift"], text=True, capture_output=True, check=True,
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    ).stdout  # fmt: skip
    assert printed == f"{PLUGIN}\n"
    build = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(build, cwd=ROOT, env=os.environ | {"LORA_MERGE_BUILD": "0"}, check=True, capture_output=True)
    installed = tmp_path / "lib" / PLUGIN.relative_to(ROOT)
    assert [file.name for file in installed.parent.iterdir()] == [PLUGIN.name]


def test_factors_whose_forward_swift_wraps() -> None:
    """Its own brings the input to the weight's device; one that computes otherwise inside of it is refused."""
    config = LoraConfig(r=2, target_modules=["0"], init_lora_weights=False)
    model = get_peft_model(nn.Sequential(nn.Linear(8, 8)), config).eval()
    part = model.base_model.model[0].lora_A["default"]
    assert part.forward.__func__ is keep_device_forward
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    adapter = model(x)
    for _ in range(3):
        with merged(model):
            torch.testing.assert_close(model(x), adapter)
    inner = part.forward_origin
    part.forward_origin = lambda x: 2 * inner(x)
    with pytest.raises(UnsupportedAdapter, match=r"0: lora_A of 'default', a .*Linear, computes by"), merged(model):
        pass
