"""One copy of the weights: a trainer's parameters lie in a vLLM of its process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import engines
import models
import pytest
import torch
from engines import ask, assert_answers, engine
from torch import Tensor, nn
from weight_bits import bits_of

from lora_merge import InvalidInput, MergedWeights, PushRefused, VllmSync, save_merged

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
LOADED = {"load_format": "auto"}


@pytest.fixture
def plain_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    engines.plain_layout(monkeypatch)


def base_bits(model: Any) -> dict[str, Any]:
    return {name: bits_of(tensor) for name, tensor in model.state_dict().items() if "lora_" not in name}


def base_of(model: nn.Module) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if "lora_" not in name]


def parameters_of(llm: Any) -> list[Tensor]:
    return list(llm.apply_model(lambda model: list(model.parameters()))[0])


def lies_in(model: nn.Module, llm: Any) -> bool:
    theirs = {p.untyped_storage().data_ptr() for p in parameters_of(llm)}
    return all(p.untyped_storage().data_ptr() in theirs for p in base_of(model))


class Trained:
    """A policy with an optimizer and data."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2, fused=True)
        self.tokens = torch.tensor(engines.prompts()[:1])

    def backward(self) -> None:
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@contextmanager
def shared(model: Any, llm: Any) -> Iterator[tuple[VllmSync, Trained]]:
    with closing(VllmSync(model, llm, share=True)) as sync:
        assert sync.sharing is not None
        assert sync.sharing.shared == sum(p.nbytes for p in base_of(model)), sync.sharing
        assert not sync.sharing.apart
        assert lies_in(model, llm)
        yield sync, Trained(model)


def refuses(sync: VllmSync) -> None:
    with pytest.raises(PushRefused, match="trainer that shares them"):
        sync.check()
    with pytest.raises(PushRefused, match="trainer that shares them"):
        sync.generate([{"prompt_token_ids": [1, 2]}], engines.GREEDY)


def test_a_trainer_and_an_engine_with_one_copy(
    plain_layout: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine, and one trainer after another: each has a way of its own to begin, to train and to end."""
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    base = base_bits(model)
    with engine(model, tmp_path / "base", **LOADED) as llm:
        steps(model, llm)
        assert base_bits(model) == base
        assert not lies_in(model, llm)
        Trained(model).backward()
        assert base_bits(model) == base
        several_steps(model, llm)
        exceptions(model, llm)
        moved(model, llm)
        files(model, llm, tmp_path)
        sleeps(model, llm, monkeypatch)
        assert base_bits(model) == base
        on_meta(model, llm)
        another_trainer(model, llm)
        assert base_bits(model) == base
        dies(model, llm)
        assert base_bits(model) == base


def steps(model: Any, llm: Any) -> None:
    """Parameters are views of the engine's; a push moves nothing; reference passes see the base."""
    with torch.no_grad(), model.disable_adapter():
        reference = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    with shared(model, llm) as (sync, trained):
        with pytest.raises(PushRefused, match="nothing was pushed"):
            sync.check()
        for _ in range(2):
            trained.backward()
            trained.step()
            report = sync.push()
            assert sync.sharing is not None
            assert (report.shared, report.nbytes) == (sync.sharing.shared, 0)
            assert_answers(ask(llm), model)
            sync.check()
            with torch.no_grad(), model.disable_adapter():
                assert torch.equal(model(input_ids=torch.tensor([[1, 2, 3]])).logits, reference)
            refuses(sync)
            assert sync.push(verify=True).version == report.version + 1
            assert_answers(ask(llm), model)


def several_steps(model: Any, llm: Any) -> None:
    """Several optimizer steps between two pushes, gradients of several batches in each; a forward that merges nothing
    new leaves the engine as it is; optimizer states are what they are without an engine."""
    alone = copy.deepcopy(model)
    with shared(model, llm) as (sync, trained):
        other = Trained(alone)
        sync.push()
        trained.backward()
        sync.check()  # the same bits
        trained.backward()
        other.backward()
        other.backward()
        for _ in range(3):
            for one in (trained, other):
                one.step()
                one.backward()
                one.backward()
        refuses(sync)
        sync.push()
        sync.generate([{"prompt_token_ids": [1, 2]}], engines.GREEDY, use_tqdm=False)
        assert_answers(ask(llm), model)
        for mine, theirs in zip(
            trained.optimizer.state_dict()["state"].values(),
            other.optimizer.state_dict()["state"].values(),
            strict=True,
        ):
            assert mine.keys() == theirs.keys()
            assert all(torch.isfinite(t).all() for t in mine.values())
            assert mine["step"] == theirs["step"] == 3


def another_trainer(model: Any, llm: Any) -> None:
    """Nobody else writes to weights that a trainer shares; when it has ended, others do, and are followed by it."""
    other = models.with_lora(engines.qwen2, target_modules=engines.LINEARS, seed=3)
    with shared(model, llm) as (sync, _):
        version = sync.push().version
        with closing(VllmSync(other, llm)) as theirs:
            with pytest.raises(PushRefused, match="shares its weights with another trainer"):
                theirs.push()
            sync.check()
            assert_answers(ask(llm), model)
        with pytest.raises(PushRefused, match="shares its weights with another trainer"):
            VllmSync(model, llm, share=True)
        sync.check()
        assert sync.push().version == version + 1
    assert not lies_in(model, llm)
    with closing(VllmSync(other, llm)) as theirs:
        theirs.push()
        assert_answers(ask(llm), other)
    empty = never_loaded()
    with pytest.raises(InvalidInput, match=r"is on meta, to take what the engine has, which holds merged@\d+ and not"):
        VllmSync(empty, llm, share=True)
    with shared(model, llm) as (sync, _):  # the engine gets the trainer's base, as by a push
        with pytest.raises(PushRefused, match="trainer that shares them"):
            theirs.check()
        sync.push()
        assert_answers(ask(llm), model)


def exceptions(model: Any, llm: Any) -> None:
    """A forward or backward that raises, in the middle of a step."""

    def fails(*args: Any) -> None:
        raise KeyboardInterrupt

    with shared(model, llm) as (sync, trained):
        sync.push()
        hook = model.get_base_model().model.layers[-1].register_forward_hook(fails)
        with pytest.raises(KeyboardInterrupt):
            trained.backward()
        hook.remove()
        trained.backward()
        trained.step()
        sync.push()
        assert_answers(ask(llm), model)


def moved(model: Any, llm: Any) -> None:
    """Trainers move a model when they wrap it; its next push brings it back. What was changed stays apart."""
    with shared(model, llm) as (sync, trained):
        for _ in range(2):
            trained.backward()
            trained.step()
            model.to("cpu:0")  # to PyTorch another device than "cpu"
            assert not lies_in(model, llm)
            trained.backward()
            trained.step()
            report = sync.push()
            assert report.nbytes == 0
            assert lies_in(model, llm)
            assert_answers(ask(llm), model)
        norm = model.get_base_model().model.norm.weight
        before = norm.data.clone()
        norm.data = 2 * before
        report = sync.push()
        assert (report.nbytes, report.nbytes + report.shared) == (norm.nbytes, sum(p.nbytes for p in base_of(model)))
        assert_answers(ask(llm), model)
        norm.data = before
        sync.push()
        assert_answers(ask(llm), model)
        assert sync.push().nbytes == 0, "now the engine has it again, too"


def files(model: Any, llm: Any, folder: Path) -> None:
    """Checkpoints have no merged weights; training goes on from one."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    base = base_bits(model)
    with shared(model, llm) as (sync, trained):
        trained.backward()
        trained.step()
        trained.backward()
        model.save_pretrained(folder / "saved")
        state = load_file(folder / "saved" / "adapter_model.safetensors")
        assert all("lora_" in name for name in state)
        held = {name: bits_of(tensor) for name, tensor in MergedWeights(model)}
        save_merged(model, folder / "merged")
        written = load_file(folder / "merged" / "model.safetensors")
        assert {name: bits_of(tensor) for name, tensor in written.items()} == held
        assert sync.sharing is not None
        sync.sharing.training.pause()
        assert base_bits(model) == base
        trained.step()
        trained.backward()
        set_peft_model_state_dict(model, state)
        sync.push()
        assert_answers(ask(llm), model)
        assert all(
            torch.equal(model.state_dict()[n.replace(".weight", ".default.weight")], t) for n, t in state.items()
        )


def sleeps(model: Any, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has no sleep mode on CPUs: here its executor notes who sleeps, and no memory is freed."""
    with shared(model, llm) as (sync, trained):
        sync.push()
        for level in (1, 2):
            with pytest.raises(InvalidInput, match=r"sleep\(level=\d\) takes the engine's weights along"):
                llm.sleep(level=level)
        sync.check()
        assert_answers(ask(llm), model)
        with pytest.raises(InvalidInput, match="enable_sleep_mode=True"):
            sync.sleep()
        told = engines.Sleeping(llm, monkeypatch)
        sync.sleep()
        sync.sleep()
        assert told.calls == ["discard"]
        trained.backward()
        trained.step()
        sync.push()
        assert told.tags == {"kv_cache"}, "a push leaves the cache asleep"
        prompts = [{"prompt_token_ids": list(p)} for p in engines.prompts()]
        assert_answers(sync.generate(prompts, engines.GREEDY, use_tqdm=False), model)
        assert told.calls == ["discard", "wake_up"]
        sync.wake_up()
        assert told.calls == ["discard", "wake_up"]
        sync.sleep()
        llm.wake_up(tags=["weights"])
        assert told.tags == {"kv_cache"}
        llm.wake_up()
        llm.wake_up()
        assert told.calls == 2 * ["discard", "wake_up"], "weights that are mapped are not mapped again"
        assert_answers(ask(llm), model)
        sync.sleep()
    assert not told.tags
    with pytest.raises(InvalidInput, match=r"sleep\(\) of a VllmSync is for share=True"):
        sync.sleep()
    assert {"sleep", "wake_up"}.isdisjoint(vars(llm.llm_engine.engine_core.engine_core))


def policy_of(base: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(base, LoraConfig(r=4, lora_alpha=6, target_modules=engines.LINEARS)).eval()


def never_loaded() -> Any:
    from accelerate import init_empty_weights

    with init_empty_weights():
        empty = engines.qwen2()
    empty.tie_weights()
    return policy_of(empty)


def on_meta(model: Any, llm: Any) -> None:
    """A model that was never loaded: it has the engine's weights, and an adapter as PEFT makes it; closed to meta."""
    policy = never_loaded()
    assert {p.device.type for p in policy.parameters()} == {"meta"}
    with closing(VllmSync(policy, llm, share=True)) as sync:
        assert lies_in(policy, llm)
        assert base_bits(policy) == base_bits(model)
        assert policy.get_base_model().lm_head.weight is policy.get_base_model().model.embed_tokens.weight
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                assert bool(parameter.any()) == ("lora_A" in name), name
        trained = Trained(policy)
        for _ in range(2):
            trained.backward()
            trained.step()
        sync.push()
        assert_answers(ask(llm), policy)
        sync.close(meta=True)
    assert {p.device.type for p in base_of(policy)} == {"meta"}
    dropping = never_loaded()
    for module in dropping.modules():
        if hasattr(module, "lora_dropout"):
            module.lora_dropout["default"] = nn.Dropout(0.1)
    with pytest.raises(InvalidInput, match=r"lora_dropout=0\.1"):
        VllmSync(dropping, llm, share=True)
    assert {p.device.type for p in dropping.parameters()} == {"meta"}, "nothing was made or moved"
    with torch.device("meta"):
        wholly = policy_of(engines.qwen2())
    with pytest.raises(InvalidInput, match="is on meta, and the engine does not keep it as the trainer has it"):
        VllmSync(wholly, llm, share=True)


def dies(model: Any, llm: Any) -> None:
    """The engine ends first: the trainer goes on with the memory, and gets its own when it closes."""
    sync = VllmSync(model, llm, share=True)
    trained = Trained(model)
    trained.backward()
    sync.push()
    llm.llm_engine.engine_core.shutdown()
    trained.step()
    trained.backward()
    with pytest.raises(PushRefused):
        sync.push()
    sync.close()
    trained.backward()


def test_what_cannot_be_shared(tmp_path: Path) -> None:
    model = models.with_lora(engines.qwen2, target_modules=engines.LINEARS)
    base = base_bits(model)
    with (
        engine(model, tmp_path / "base") as llm,
        pytest.raises(InvalidInput, match=r"engine holds other values|laid out anew"),
    ):
        VllmSync(model, llm, share=True)
    with engine(model, tmp_path / "base", processes=True, **LOADED) as llm:
        with pytest.raises(PushRefused, match="expected one worker in this process"):
            VllmSync(model, llm, share=True)
        with pytest.raises(InvalidInput, match="share=True got mode='adapter'"):
            VllmSync(model, llm, mode="adapter", share=True)
    assert base_bits(model) == base
