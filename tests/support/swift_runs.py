"""Trainings by ms-swift on a CPU: tiny checkpoints with a tokenizer, its real entry in this process, what to see."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import vllm_name

HERE = Path(__file__).parent
NAMED = vllm_name.folder(Path(tempfile.mkdtemp()))
sys.path.append(str(NAMED))
# vLLM's own plugin of LoRA resolvers wants torchvision, which its environment for CPUs has not.
os.environ |= {"VLLM_PLUGINS": "lora_merge", "MODELSCOPE_LOG_LEVEL": "40", "TOKENIZERS_PARALLELISM": "false"}

import engines  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from images import live_names  # noqa: E402
from launched import free_port  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from lora_merge.integrations.ms_swift import PLUGIN  # noqa: E402

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
REWARDS = str(HERE / "swift_plugins.py")
FLAGS = {
    "use_cpu": "true", "use_hf": "true", "check_model": "false", "add_version": "false", "report_to": "none",
    "torch_dtype": "float32", "bf16": "false", "fp16": "false", "attn_impl": "sdpa", "split_dataset_ratio": "0",
    "use_vllm": "true", "vllm_mode": "colocate", "vllm_max_model_len": "160", "vllm_enforce_eager": "true",
    "max_length": "128", "max_completion_length": "10", "max_steps": "2", "logging_steps": "1", "save_strategy": "no",
    "per_device_train_batch_size": "4", "learning_rate": "1e-2", "lr_scheduler_type": "constant", "system": "x",
    "lora_dropout": "0", "target_modules": "all-linear", "dataset_num_proc": "1", "dataloader_num_workers": "0",
}  # fmt: skip
KINDS = {
    "grpo": {"reward_funcs": "letters", "num_generations": "4", "beta": "0"},
    "gkd": {"lmbda": "1", "temperature": "0.9"},
}


def qwen2(tied: bool) -> nn.Module:
    """Of a vocabulary that holds every byte and swift's special tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**engines.SIZES | {"vocab_size": 264}, tie_word_embeddings=tied))


def qwen3_moe() -> nn.Module:
    """Of the same vocabulary, with four experts a layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = engines.SIZES | engines.MOE | {"vocab_size": 264, "num_experts": 4, "moe_intermediate_size": 64}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, norm_topk_prob=True, tie_word_embeddings=False))


def checkpoint(base: nn.Module, folder: Path) -> Path:
    """A checkpoint in HF format with a tokenizer of bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2TokenizerFast

    engines.save_base(base, folder)
    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {token: 256 + i for i, token in enumerate(SPECIAL)}
    names = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    Qwen2TokenizerFast(vocab=vocabulary, merges=[], extra_special_tokens=SPECIAL, **names).save_pretrained(folder)
    return folder


def dataset(file: Path, count: int = 32) -> None:
    """Questions with answers, as swift reads them."""
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"{i}"}]}
            for i in range(count)]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(kind: str, base: Path, out: Path, **flags: str | Sequence[str]) -> list[str]:
    """A command line of `swift rlhf`; flags that are None are left out."""
    data = base.parent / "data.jsonl"
    if not data.exists():
        dataset(data)
    named = {"rlhf_type": kind, "model": str(base), "model_type": "qwen2", "template": "qwen2_5", "dataset": str(data),
             "output_dir": str(out), "external_plugins": [REWARDS, str(PLUGIN)]}  # fmt: skip
    line = []
    for name, value in (named | FLAGS | KINDS.get(kind, {}) | flags).items():
        if value is not None:
            line += [f"--{name}", *([value] if isinstance(value, str) else value)]
    return line


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test sets stays there after it, as a training puts another os.environ in place."""
    for name in [name for name in os.environ if name.startswith("LORA_MERGE")]:
        monkeypatch.delenv(name)


_ports: set[int] = set()


def port() -> str:
    """Free, and not handed out before: what was asked for it may not listen there yet."""
    while (found := free_port()) in _ports:
        pass
    _ports.add(found)
    return str(found)


# A training in this process


@contextmanager
def training(line: Sequence[str], watch: Callable[[Any], None] | None = None) -> Iterator[Any]:
    """Train, by swift's own entry, and yield its trainer; the engine is gone afterwards.

    Args:
        watch: called with the trainer before it begins.
    """
    from accelerate.state import AcceleratorState
    from swift.pipelines.train.rlhf import SwiftRLHF
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    kept: list[Any] = []
    before = dict(os.environ)
    # Each training imports the plugin, as the first of a process does: LORA_MERGE is read there.
    for name in [name for name, m in sys.modules.items() if getattr(m, "__file__", None) == str(PLUGIN)]:
        del sys.modules[name]
    # As torchrun would: swift sets these by itself for GRPO only, and vLLM wants them in every rank's engine.
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port()}

    class Kept(SwiftRLHF):
        def train(self, trainer: Any) -> Any:
            kept.append(trainer)
            if watch is not None:
                watch(trainer)
            return super().train(trainer)

    try:
        Kept(list(line)).main()
        yield kept[0]
    finally:
        for trainer in kept:
            engine = getattr(trainer, "engine", None)
            if getattr(engine, "engine", None) is not None:
                engine.engine.engine_core.shutdown()
                del engine.engine
        kept.clear()
        gc.collect()
        cleanup_dist_env_and_memory()
        AcceleratorState._reset_state(True)
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ |= before


def train(line: Sequence[str], watch: Callable[[Any], None] | None = None) -> None:
    """As `training`, where nothing is looked at afterwards."""
    with training(line, watch):
        pass


class Said(logging.Handler):
    """What swift's logger is told, whoever else listens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


@pytest.fixture
def said() -> Iterator[Said]:
    handler = Said()
    logging.getLogger("swift").addHandler(handler)
    yield handler
    logging.getLogger("swift").removeHandler(handler)


def before_answers(trainer: Any, look: Callable[[Any], None]) -> None:
    """Call `look` with the trainer each time when its engine is about to answer."""
    infer = trainer._engine_infer

    def looked(*args: Any, **kwargs: Any) -> Any:
        look(trainer)
        return infer(*args, **kwargs)

    trainer._engine_infer = looked


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """vLLM's linear layers on CPUs keep their weights as they were loaded, so that they can be read, and swift's own
    way of loading them works."""
    from vllm.model_executor.layers import utils

    def plain(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain)
        yield


# What must be where


@dataclass
class Exact:
    """A weight of the policy in float64, and what rounding may do to it where the merge is computed in float32.

    Args:
        value: base and adapter, in float64.
        terms: sum of the magnitudes of what is added up in each element.
        rank: of the adapter; 0: nothing is added.
        norm: how many squares are added up in the norm that DoRA divides by; 0: it is not DoRA.
    """

    value: Tensor
    terms: Tensor
    rank: int = 0
    norm: int = 0

    def allowed(self, dtype: torch.dtype) -> Tensor:
        """Half a step of the dtype, and one rounding of float32 for each product and each sum (half of one in a norm,
        which is a square root), and four for what DoRA makes of it."""
        step = torch.finfo(dtype).eps / 2
        scale = (self.norm / 2 + 4) * 2.0**-24 if self.norm else 0.0
        return self.value.abs() * (step + scale) + self.terms * (2 * self.rank) * 2.0**-24


def decoded(parameter: nn.Parameter) -> Tensor:
    """What a parameter stands for: of codes of 4 bits, what bitsandbytes itself makes of them."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)


@torch.no_grad()
def policy(model: nn.Module) -> dict[str, Exact]:
    """What a PEFT model computes with, by HF names, without any code of this package."""
    base, found = model.get_base_model(), {}
    for name, parameter in base.named_parameters():
        value = decoded(parameter).double()
        if "lora_" in name or ".original_module." in name:
            continue
        if ".base_layer." not in name:
            found[name.replace(".modules_to_save.default.", ".")] = Exact(value, value.abs())
            continue
        owner, kind = name.split(".base_layer.")
        layer, name = base.get_submodule(owner), f"{owner}.{kind}"
        if kind != "weight":
            found[name] = Exact(value, value.abs())
            continue
        factors = [(layer.scaling[a], layer.lora_B[a].weight.double(), layer.lora_A[a].weight.double())
                   for a in layer.active_adapters]  # fmt: skip
        whole = value + sum(s * B @ A for s, B, A in factors)
        terms = value.abs() + sum(abs(s) * B.abs() @ A.abs() for s, B, A in factors)
        norm = 0
        if layer.use_dora[layer.active_adapters[0]]:
            scale = layer.lora_magnitude_vector[layer.active_adapters[0]].weight.double() / whole.norm(dim=1)
            whole, terms, norm = whole * scale[:, None], terms * scale.abs()[:, None], value.shape[1]
        found[name] = Exact(whole, terms, sum(A.shape[0] for _, _, A in factors), norm)
    return found


def engine_weights(model: nn.Module) -> dict[str, Tensor]:
    """Of a vLLM model of Qwen2 whose layers are as loaded, by HF names."""
    config, found = model.config, {}
    head = config.hidden_size // config.num_attention_heads
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    for name, parameter in model.named_parameters():
        name, value = name.replace(".base_layer.", "."), parameter.detach()
        if ".qkv_proj." in name:
            for part, block in zip("qkv", value.split([queries, keys, keys]), strict=True):
                found[name.replace("qkv_proj", f"{part}_proj")] = block
        elif ".gate_up_proj." in name:
            for part, block in zip(("gate", "up"), value.chunk(2), strict=True):
                found[name.replace("gate_up_proj", f"{part}_proj")] = block
        else:
            found[name] = value[: config.vocab_size] if "embed_tokens" in name or "lm_head" in name else value
    return found


def assert_is(weights: dict[str, Tensor], wanted: dict[str, Exact]) -> float:
    """The weights are the policy's, each element rounded once; returns the largest part of what is allowed that was
    needed."""
    wanted = {name: exact for name, exact in wanted.items() if name in weights or name != "lm_head.weight"}
    assert weights.keys() == wanted.keys()
    worst = 0.0
    for name, exact in wanted.items():
        error, allowed = (weights[name].double() - exact.value).abs(), exact.allowed(weights[name].dtype)
        assert (error <= allowed).all(), f"{name}: off by {float(error.max()):.3e}"
        worst = max(worst, float((error / allowed.clamp(min=1e-300)).max()))
    return worst


def assert_untouched(model: nn.Module, checkpoint: Path) -> None:
    """Every weight of the base is bit for bit what its file holds."""
    saved = live_names(model, load_file(checkpoint / "model.safetensors"))
    seen = 0
    for name, parameter in model.get_base_model().named_parameters():
        if "lora_" in name or ".modules_to_save." in name:
            continue
        known = saved[name.replace(".base_layer.", ".").replace(".original_module.", ".")].to(parameter.dtype)
        assert torch.equal(known.view(torch.uint8), parameter.detach().view(torch.uint8)), f"{name} has changed"
        seen += 1
    assert seen >= len(saved)


class Stock:
    """What swift itself would send, on a copy of the model beside the training: merged, loaded, unmerged in turn.

    Attributes:
        sent: the tensors of the last turn, by name.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.model, self.sent = trainer, copy.deepcopy(trainer.model), {}
        self.before = {name: p.detach().clone() for name, p in self.model.named_parameters() if ".base_layer." in name}
        self.vllm_mode = "beside"  # neither of swift's two: what it sends stays here

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.trainer, name)
        return MethodType(value.__func__, self) if isinstance(value, MethodType) else value

    def turn(self, trainer: Any) -> None:
        """The adapter as it is now; the base stays the copy's."""
        from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), trainer.model.parameters(), strict=True):
                if theirs.requires_grad:
                    mine.copy_(theirs)
        self.sent = {}
        RolloutTrainerMixin._move_full_model_to_vllm(self)

    def _move_adapter_to_vllm(self) -> None:
        from swift.rlhf_trainers.rollout_mixin import RolloutTrainerMixin

        RolloutTrainerMixin._move_adapter_to_vllm(self)

    def _load_state_dict_to_vllm(self, state: dict[str, Tensor]) -> None:
        self.sent |= {name: tensor.detach().clone() for name, tensor in state.items()}

    def drift(self) -> str:
        """How far the base of the copy has moved, in words."""
        now = dict(self.model.named_parameters())
        moved = sum(int((now[name] != before).sum()) for name, before in self.before.items())
        most = max(float((now[name] - before).abs().max()) for name, before in self.before.items())
        return f"{moved} of {sum(b.numel() for b in self.before.values())} base elements changed, by up to {most:.1e}"
