"""Trainers that know nothing of rollout push at the end of a step: transformers' Trainer, accelerate, Lightning."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import lightning
import models
import pytest
import torch
import torch.distributed as dist
from computed import computed
from docs_code import names_of
from engines import ask, assert_answers
from launched import free_port
from processes import spawn
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments
from vllm import LLM

from lora_merge import InvalidInput, PushRefused
from lora_merge.integrations.lightning import PushCallback as LightningPush
from lora_merge.integrations.options import Options
from lora_merge.integrations.pushing import Pusher
from lora_merge.integrations.transformers import PushCallback, attach

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers


class Tokens(Dataset):
    """Rows that repeat themselves, which a model of this size learns."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = torch.tensor([3 + (index + i % 4) % 200 for i in range(16)])
        return {"input_ids": row, "labels": row}


def policy(seed: int = 0) -> nn.Module:
    """Another adapter for another seed, on one base."""
    torch.manual_seed(7)
    base = engines.qwen2()
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=engines.LINEARS))
    if seed:
        engines.train(model, seed)
    return model


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    chosen = {"max_steps": 4, "learning_rate": 0.05, "per_device_train_batch_size": 4, "logging_steps": 1}
    chosen |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "seed": 1}
    return TrainingArguments(output_dir=str(folder), **chosen | options)


class Seen(TrainerCallback):
    """Asks the engine at the beginning of every step, when the policy is what the last one left."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.steps, self.answers = llm, [], []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        outputs = ask(self.llm)
        assert_answers(outputs, kwargs["model"].eval(), tolerance=24e-6)
        kwargs["model"].train()
        self.steps.append(state.global_step)
        self.answers.append([step.outputs[0].token_ids for step in outputs])


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with engines.engine(policy(), tmp_path_factory.mktemp("plain") / "base", enable_lora=True, max_lora_rank=8) as one:
        yield one


def base_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" not in name}


def test_transformers_trainer_and_a_resumed_run(llm: LLM, tmp_path: Path) -> None:
    """At each step the engine answers as the policy does; a resumed run begins with the checkpoint's, counted once."""
    options = {"save_strategy": "steps", "save_steps": 2}
    trainer = Trainer(model=policy(), args=arguments(tmp_path, **options), train_dataset=Tokens())
    before, seen = base_of(trainer.model), Seen(llm)
    attach(trainer, llm)
    trainer.add_callback(seen)
    trainer.train()
    assert_answers(ask(llm), trainer.model.eval(), tolerance=24e-6)
    assert seen.steps == [0, 1, 2, 3]
    assert seen.answers[0] != seen.answers[3], "four steps at this rate have to show"
    assert all(torch.equal(p, before[n]) for n, p in base_of(trainer.model).items())
    logged = [entry for entry in trainer.state.log_history if "lora_merge/seconds" in entry]
    assert [entry["lora_merge/version"] for entry in logged] == sorted(e["lora_merge/version"] for e in logged)
    assert [entry["step"] for entry in logged] == [1, 2, 3, 4]
    assert all(entry["lora_merge/coverage"] == 1 and entry["lora_merge/megabytes"] > 0 for entry in logged)

    resumed = Trainer(model=policy(seed=5), args=arguments(tmp_path, **options), train_dataset=Tokens())
    attach(resumed, llm)
    again = Seen(llm)
    resumed.add_callback(again)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.steps == [2, 3]
    assert again.answers[0] == seen.answers[2]


def test_training_on_merged_weights(llm: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine holds what the trainer computes with at each step; the base is back at the end, or by an interrupt."""
    merged = Options(train="merged", verify=True)
    trainer = Trainer(model=policy(), args=arguments(tmp_path), train_dataset=Tokens())
    before, seen, held = base_of(trainer.model), Seen(llm), dict[str, Tensor]()
    with caplog.at_level(logging.INFO):
        callback = attach(trainer, llm, options=merged)
    assert caplog.text.count("trains on merged weights") == 1
    push = callback._pusher.push

    def pushed() -> Any:
        report = push()
        held.update({name: tensor.clone() for name, tensor in callback.sync._weights})
        return report

    callback._pusher.push = pushed
    trainer.add_callback(seen)
    with computed(trainer.model, lambda: held) as looked:
        trainer.train()
    assert seen.steps == [0, 1, 2, 3]
    assert looked["forward"] >= looked["backward"] > 0
    assert all(torch.equal(p, before[n]) for n, p in base_of(trainer.model).items())

    class Interrupts(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["model"](input_ids=torch.tensor([[1, 2]]))
            raise KeyboardInterrupt

    trainer.add_callback(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert all(torch.equal(p, before[n]) for n, p in base_of(trainer.model).items())
    with pytest.raises(InvalidInput, match="train='merged' is not for Lightning"):
        LightningPush(llm, model=lambda module: module, options=merged)


@pytest.mark.parametrize(("every", "pushes"), [(2, [0, 2, 4, 5]), (3, [0, 3, 5])])
def test_every_so_many_steps_and_at_the_end(llm: LLM, tmp_path: Path, every: int, pushes: list[int]) -> None:
    trainer = Trainer(model=policy(), args=arguments(tmp_path, max_steps=5), train_dataset=Tokens())
    callback = attach(trainer, llm, every=every)
    pushed: list[int] = []
    push = callback._push
    callback._push = lambda should_log: (pushed.append(trainer.state.global_step), push(should_log))
    trainer.train()
    assert pushed == pushes
    assert_answers(ask(llm), trainer.model.eval(), tolerance=24e-6)


def test_the_best_model_is_what_the_engine_ends_with(llm: LLM, tmp_path: Path) -> None:
    """The trainer loads it after the last step; and reports come where it logs, between its pushes too."""

    class Others(Tokens):
        def __getitem__(self, i: int) -> dict[str, Any]:
            row = torch.tensor([3 + (7 * i + 13 * (k % 5)) % 60 for k in range(16)])
            return {"input_ids": row, "labels": row}

    args = arguments(
        tmp_path, max_steps=6, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2,
        load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=False, learning_rate=0.3,
        logging_steps=3,
    )  # fmt: skip
    trainer = Trainer(model=policy(), args=args, train_dataset=Tokens(), eval_dataset=Others())
    callback = attach(trainer, llm, every=4)
    trainer.train()
    assert trainer.state.best_model_checkpoint is not None
    assert not trainer.state.best_model_checkpoint.endswith("checkpoint-6"), "it is another one than the last"
    assert callback.sync is not None
    callback.sync.check()
    assert_answers(ask(llm), trainer.model.eval(), tolerance=24e-6)
    told = [entry["step"] for entry in trainer.state.log_history if any("lora_merge/" in key for key in entry)]
    assert told == [3, 6], "of the push at the beginning, and of that after step 4"


def test_gradient_accumulation_and_adapter_mode(llm: LLM, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2, gradient_accumulation_steps=2)
    trainer = Trainer(model=policy(), args=args, train_dataset=Tokens())
    callback = attach(trainer, llm, options=Options(mode="adapter", verify=True))
    trainer.train()
    assert callback.sync is not None
    assert [state.kind for state in callback.sync.states()] == ["adapter"]
    assert_answers(ask(llm, callback.sync.lora_request()), trainer.model.eval(), tolerance=24e-6)
    callback.sync.push(mode="merged")


def test_what_does_not_fit(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(model=policy(), args=arguments(tmp_path), train_dataset=Tokens())
    with pytest.raises(InvalidInput, match="every must be 1 or more"):
        attach(trainer, llm, every=0)
    monkeypatch.setenv("LORA_MERGE_CHECK", "1")
    with pytest.raises(InvalidInput, match="LORA_MERGE_CHECK"):
        attach(trainer, llm)
    with pytest.raises(InvalidInput, match="LORA_MERGE_CHECK"):
        LightningPush(llm, model=lambda module: module.policy)
    monkeypatch.delenv("LORA_MERGE_CHECK")
    attach(trainer, llm)
    with pytest.raises(InvalidInput, match="pushes already"):
        attach(trainer, llm)
    with pytest.raises(InvalidInput, match="every must be 1 or more"):
        LightningPush(llm, model=lambda module: module.policy, every=0)


def test_a_model_of_another_size_ends_training_before_its_first_step(llm: LLM, tmp_path: Path) -> None:
    """A refused push is the trainer's error, not a line in a log."""
    other = models.with_lora(models.qwen2)
    trainer = Trainer(model=other, args=arguments(tmp_path), train_dataset=Tokens())
    attach(trainer, llm)
    with pytest.raises(PushRefused, match="of another size"):
        trainer.train()
    assert trainer.state.global_step == 0


def two_ranks(rank: int, folder: Path, port: int) -> None:
    """DDP; the engine is rank 0's, in processes of its own."""
    world = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= world | {"ACCELERATE_USE_CPU": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    model = policy()
    llm = None
    if rank == 0:
        engine = engines.engine(model, folder / "base", processes=True)
        llm = engine.__enter__()
    trainer = Trainer(model=model, args=arguments(folder, max_steps=2), train_dataset=Tokens())
    callback = attach(trainer, llm)
    trainer.train()
    assert dist.get_world_size() == 2
    assert isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
    if rank == 0:
        assert_answers(ask(llm), trainer.model.eval(), tolerance=24e-6)
    assert callback.sync is not None
    callback.sync.close()
    if rank == 0:
        engine.__exit__(None, None, None)


def test_two_ranks_of_ddp(tmp_path: Path) -> None:
    spawn(2, two_ranks, tmp_path, free_port())


class Module(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.policy = model

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        return self.policy(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.05)


class Asks(lightning.Callback):
    """Asks the engine at the beginning of every batch."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.steps = llm, []

    def on_train_batch_start(self, trainer: Any, pl_module: Module, batch: Any, batch_idx: int) -> None:
        pl_module.eval()
        assert_answers(ask(self.llm), pl_module.policy, tolerance=24e-6)
        pl_module.train()
        self.steps.append(trainer.global_step)


def lightning_trainer(folder: Path, *callbacks: Any, **options: Any) -> lightning.Trainer:
    chosen = {"accelerator": "cpu", "max_steps": 4, "enable_progress_bar": False, "enable_model_summary": False}
    chosen |= {"logger": False, "default_root_dir": folder, "log_every_n_steps": 1}
    return lightning.Trainer(callbacks=list(callbacks), **chosen | options)


def test_lightning_and_a_resumed_run(llm: LLM, tmp_path: Path) -> None:
    data = DataLoader(Tokens(), batch_size=4)
    push, asks = LightningPush(llm, model=lambda module: module.policy), Asks(llm)
    trainer = lightning_trainer(tmp_path, push, asks)
    module = Module(policy())
    before = base_of(module)
    trainer.fit(module, data)
    assert_answers(ask(llm), module.policy.eval(), tolerance=24e-6)
    assert asks.steps == [0, 1, 2, 3]
    assert trainer.callback_metrics["lora_merge/coverage"] == 1
    assert all(torch.equal(p, before[n]) for n, p in base_of(module).items())
    trainer.save_checkpoint(tmp_path / "last.ckpt")

    # Accumulated gradients: a push a step of the optimizer, none between.
    push, asks = LightningPush(llm, model=lambda module: module.policy), Asks(llm)
    resumed = lightning_trainer(tmp_path, push, asks, max_steps=6, accumulate_grad_batches=2)
    module = Module(policy(seed=5))
    resumed.fit(module, data, ckpt_path=tmp_path / "last.ckpt")
    assert asks.steps[0] == 4
    assert resumed.global_step == 6
    assert_answers(ask(llm), module.policy.eval(), tolerance=24e-6)


def test_the_integration_says_what_a_callback_is() -> None:
    assert issubclass(PushCallback, TrainerCallback)
    assert issubclass(LightningPush, lightning.Callback)


def test_the_page_for_accelerate_and_transformers(llm: LLM, tmp_path: Path) -> None:
    """The blocks of docs/trainers.md, as they are."""
    train = names_of("trainers.md", vllm=True)["train_with_accelerate"]
    model = policy(seed=2)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    versions = []
    for report in train(model, optimizer, DataLoader(Tokens(), batch_size=8), llm):
        assert_answers(ask(llm), model.eval(), tolerance=24e-6)
        model.train()
        versions.append(report.version)
    assert versions == list(range(versions[0], versions[0] + 3))
    push = names_of("trainers.md")["train_and_push"]
    trainer = push(policy(seed=3), Tokens(), arguments(tmp_path, max_steps=1), llm)
    assert_answers(ask(llm), trainer.model.eval(), tolerance=24e-6)


def test_lightning_ends_with_averaged_weights(llm: LLM, tmp_path: Path) -> None:
    """A callback before the push's puts them there when training ends."""
    from lightning.pytorch.callbacks import EMAWeightAveraging

    push, module = LightningPush(llm, model=lambda module: module.policy), Module(policy())
    trainer = lightning_trainer(tmp_path, EMAWeightAveraging(decay=0.5), push)
    trainer.fit(module, DataLoader(Tokens(), batch_size=4))
    assert push.sync is not None
    push.sync.check()
    assert_answers(ask(llm), module.policy.eval(), tolerance=24e-6)


@pytest.mark.parametrize(
    ("every", "last", "ends", "wanted"),
    [(4, 0, [3, 6, 9, 12], [6, 9, 12]), (2, 5, [6, 7, 8, 9], [6, 8]), (1, 0, [3, 6], [3, 6]), (7, 0, [6, 8], [8])],
)
def test_batches_of_several_steps(every: int, last: int, ends: list[int], wanted: list[int]) -> None:
    """A push is due where a multiple has passed since the last one, though no batch ended there."""
    pusher, pushed = Pusher(None, every, Options(), trainer="a trainer", log=logging.getLogger()), [last]
    for step in ends:
        if pusher.due(step, pushed[-1]):
            pushed.append(step)
    assert pushed[1:] == wanted
