"""TRL's asynchronous trainers with a real server. Their forward needs a GPU's attention, so what trains here is
`train`; their own callbacks sync, and the server answers while they do."""

from __future__ import annotations

import json
import multiprocessing
import queue
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
import trl.experimental.async_distillation.async_distillation_trainer as distillation
import trl.experimental.async_grpo.async_grpo_trainer as grpo
import trl_training
from engines import train
from transformers import TrainerControl, TrainerState
from trl.experimental.async_distillation import AsyncDistillationConfig, AsyncDistillationTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

from lora_merge import Span, weight_spans
from lora_merge.integrations import trl as lm
from lora_merge.integrations.compat import TrainerRefused
from lora_merge.integrations.trl.attach import attached
from tests.vllm.test_vllm_processes import Server

pytestmark = pytest.mark.usefixtures("no_leftovers")
no_leftovers = engines.no_leftovers
PROMPT = [70, 71, 72, 73]


class Worker:
    """TRL takes any object as its rollout's worker."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = multiprocessing.Queue()
        self.versions: list[int] = []

    def start(self) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trl_training.checkpoint(tmp_path_factory.mktemp("trl") / "base")


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    served = Server(base, tmp_path_factory.mktemp("server") / "log", tokenizer=True)
    try:
        served.wait()
        yield served
    finally:
        served.close()


def trainer_of(kind: type, base: Path, out: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    for module in (grpo, distillation):
        monkeypatch.setattr(module, "get_peak_flops_per_device", lambda *args: None)  # of a GPU
    config, more = (
        (AsyncGRPOConfig, {"reward_funcs": trl_training.vowels})
        if kind is AsyncGRPOTrainer
        else (AsyncDistillationConfig, {})
    )
    options: dict[str, Any] = {"use_cpu": True, "bf16": False, "dtype": "float32", "report_to": "none", "max_steps": 4}
    if kind is AsyncDistillationTrainer:
        options["model_init_kwargs"] = {"attn_implementation": "eager"}
    return kind(
        model=str(base),
        args=config(output_dir=str(out), vllm_server_base_url=url, weight_sync_steps=2, **options),
        train_dataset=trl_training.prompts(),
        processing_class=trl_training.tokenizer(base),
        peft_config=trl_training.lora(),
        rollout_worker=Worker(),
        **more,
    )


def complete(server: Server, prompt: list[int]) -> Any:
    """Ask as clients of OpenAI's do."""
    body = json.dumps({"prompt": prompt, "max_tokens": 10, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.loads(response.read())


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """What the policy says."""
    model.set_attn_implementation("eager")
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(10):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", [AsyncGRPOTrainer, AsyncDistillationTrainer])
def test_syncs_are_pushes(
    kind: type, base: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(kind, base, tmp_path, server.url, monkeypatch)
    own = trainer.weight_transfer
    keeps = kind is AsyncGRPOTrainer
    rollout = lm.attach(trainer, verify=True, cache="keep" if keeps else None)
    assert rollout is not None
    assert attached(trainer) is rollout
    # TRL's forward has its own head, and attention that runs on GPUs: the answers come of the same weights in another.
    plain = trl_training_model(base)
    trainer._rollout_dataset = SimpleNamespace(wait_s=0.0)  # of a loop over batches, for TRL's own metrics
    before = {name: p.clone() for name, p in trainer.model.named_parameters() if "lora_" not in name}
    state, control = TrainerState(), TrainerControl()
    answering, end = [], threading.Event()

    def ask() -> None:
        while not end.is_set():
            answering.append(server.generate(PROMPT))

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        trainer.callback_handler.on_train_begin(trainer.args, state, control)
        for step in (1, 2, 3, 4):
            train(trainer.model, step, size=0.2)
            state.global_step = step
            trainer.callback_handler.on_step_end(trainer.args, state, control)
    finally:
        end.set()
        asking.join()
    assert rollout.report is not None
    assert (rollout.report.coverage, trainer.model_version) == (1.0, 3), "at the start, and after steps 2 and 4"
    assert trainer.rollout_worker.versions == [1, 2, 3]
    assert answering, "requests were answered meanwhile"
    plain.load_state_dict({n: p for n, p in trainer.model.state_dict().items() if "lora_" in n}, strict=False)
    assert server.generate(PROMPT) == greedy(plain, PROMPT)
    if keeps:  # and the server's answers say of which weights they are
        version = f"merged@{rollout.report.version}"
        spans = weight_spans(complete(server, PROMPT))
        assert (spans.tokens, spans.mixed) == ((Span(version, 0, 10),), False)
    assert trainer._metrics["train"]["lora_merge/version"]
    for name, p in trainer.model.named_parameters():
        assert name not in before or torch.equal(p, before[name]), f"{name}: the base was written"
    rollout.detach()
    assert trainer.weight_transfer is own
    assert attached(trainer) is None


def trl_training_model(base: Path) -> Any:
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    return get_peft_model(AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager"), trl_training.lora())


@pytest.mark.parametrize("kind", [AsyncGRPOTrainer, AsyncDistillationTrainer])
def test_what_is_refused(kind: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "_init_lora_sync", lambda self, model: False)  # which asks the server
    trainer = trainer_of(kind, base, tmp_path, "http://127.0.0.1:1", monkeypatch)
    own = trainer.weight_transfer
    for options, words in (({"mode": "adapter"}, "sends adapters by itself"), ({"check": True}, "max_staleness")):
        with pytest.raises(TrainerRefused, match=words):
            lm.attach(trainer, **options)
    trainer._lora_sync = True
    with pytest.raises(TrainerRefused, match="without --enable-lora"):
        lm.attach(trainer)
    trainer._lora_sync = False
    sync = trainer.__dict__.pop("model_version")
    with pytest.raises(TrainerRefused, match=rf"does not offer {kind.__name__}\.model_version"):
        lm.attach(trainer)
    trainer.model_version = sync
    assert trainer.weight_transfer is own
    assert attached(trainer) is None
