"""Real vLLM engines for tests: tiny models that vLLM serves on a CPU, and what they must answer."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

import first_calls  # noqa: F401 - this process computes cosines too, and makes the engines that run in it
import models
import products
import pytest
import torch
import warm
from policies import (  # noqa: F401 - tests find them here, too
    EXPERTS,
    LINEARS,
    MOE,
    SIZES,
    gemma2,
    llama,
    prompts,
    qwen2,
    qwen3,
    qwen3_moe,
    save_base,
    train,
)
from processes import leaving_nothing
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from lora_merge.engine.worker import lease as claim

if not torch.cuda.is_available():
    warm.instead_of_spawn()
    products.free_later()


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return models.eager(MixtralForCausalLM(MixtralConfig(**SIZES | {"num_hidden_layers": 1}, num_local_experts=4)))


def gemma4() -> nn.Module:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = SIZES | {"head_dim": 32, "global_head_dim": 32, "vocab_size_per_layer_input": 256}
    model = Gemma4ForCausalLM(Gemma4TextConfig(**sizes, hidden_size_per_layer_input=0))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.75)
    return model


def cohere() -> nn.Module:
    """As Gemma 2's; vLLM passes over the head's name here."""
    from transformers import CohereConfig, CohereForCausalLM

    return CohereForCausalLM(CohereConfig(**SIZES))


def phi() -> nn.Module:
    """A bias of the head, for which vLLM makes a parameter when it comes; of vLLM's Transformers backend."""
    from transformers import PhiConfig, PhiForCausalLM

    model = PhiForCausalLM(PhiConfig(**SIZES))
    nn.init.normal_(model.lm_head.bias)
    return model


def olmo2() -> nn.Module:
    """Of vLLM's Transformers backend."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    return Olmo2ForCausalLM(Olmo2Config(**SIZES))


def gpt_oss() -> nn.Module:
    """Experts that vLLM copies into parameters without their loaders; sinks."""
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = SIZES | MOE | {"num_hidden_layers": 1}
    model = models.eager(GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=4)))
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            nn.init.normal_(parameter, std=0.1)
    return model


def deepseek_v3() -> nn.Module:
    """Multi-head latent attention, in the one size that vLLM's CPU backend has."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 1, "first_k_dense_replace": 1, "q_lora_rank": None}
    heads = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, **heads, n_routed_experts=4, n_group=1, topk_group=1))


def idefics3() -> nn.Module:
    """A vision tower and a language model; vLLM serves it without torchvision where it takes no images."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    vision = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": 32, "patch_size": 8}  # fmt: skip
    text = SIZES | {"model_type": "llama", "pad_token_id": 0}
    return Idefics3ForConditionalGeneration(
        Idefics3Config(text_config=text, vision_config=vision, image_token_id=255, scale_factor=2)
    )


IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ["<|endoftext|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]


def qwen2_5_vl() -> nn.Module:
    """A vision tower and a language model."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 128, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128,
              "fullatt_block_indexes": [1]}  # fmt: skip
    ids = {f"{kind}_token_id": 256 + SPECIAL.index(f"<|{token}|>") for kind, token in (
        ("vision_start", "vision_start"), ("vision_end", "vision_end"), ("image", "image_pad"), ("video", "video_pad")
    )}  # fmt: skip
    text = SIZES | {"vocab_size": 256 + len(SPECIAL), "rope_parameters": rope}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def qwen2_5_vl_processor() -> Any:
    """Bytes as tokens, and what makes patches of images; needs torchvision."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), _tokenizer(), Qwen2VLVideoProcessor(), chat_template="")


def qwen3_vl_processor() -> Any:
    """Bytes as tokens, and what makes few patches of images; needs torchvision."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    pixels = Qwen2VLImageProcessor(patch_size=16, size={"shortest_edge": 56 * 56, "longest_edge": 128 * 128})
    return Qwen3VLProcessor(pixels, _tokenizer(), Qwen3VLVideoProcessor(), chat_template="")


def _tokenizer() -> Any:
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2TokenizerFast

    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {token: 256 + i for i, token in enumerate(SPECIAL)}
    return Qwen2TokenizerFast(vocab=vocabulary, merges=[], extra_special_tokens=SPECIAL)


CLIENT_THREADS = ("EngineCoreOutputQueueThread", "MPClientEngineMonitor")
"""Of vLLM's client of an engine in another process: those that use its sockets."""


def plain_layout(patch: pytest.MonkeyPatch) -> None:
    """Linear layers of vLLM on a CPU keep their weights as they were loaded, as on a GPU; see shared_weights.py, which
    does it for processes of their own."""
    from vllm.model_executor.layers import utils

    from lora_merge.engine.vllm.loading.loader import Loader

    def plain(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear  # type: ignore[assignment]

    patch.setattr(utils, "dispatch_cpu_unquantized_gemm", plain)
    patch.setattr(Loader, "_laid_anew", lambda self: [])


class Sleeping:
    """Stands in for sleep mode, which vLLM does not have on CPUs: an engine notes who sleeps, and no memory is freed.

    Args:
        llm: an `LLM` in this process, or its `LLMEngine`.

    Attributes:
        calls: of the worker's methods that free and map memory.
    """

    def __init__(self, llm: Any, patch: pytest.MonkeyPatch) -> None:
        from lora_merge.engine.vllm import cache_sleep

        engine: Any = getattr(llm, "llm_engine", llm)
        core = engine.engine_core
        executor = core.engine_core.model_executor
        call, self.calls, self.tags = executor.collective_rpc, list[str](), executor.sleeping_tags

        def told(method: Any, *args: Any, **kwargs: Any) -> Any:
            if method not in ("sleep", "discard", "wake_up"):
                return call(method, *args, **kwargs)
            self.calls.append(method)
            return None

        patch.setattr(engine.vllm_config.model_config, "enable_sleep_mode", True)
        patch.setattr(executor, "collective_rpc", told)
        patch.setattr(cache_sleep, "cache_asleep", lambda: "kv_cache" in self.tags)


@contextmanager
def engine(model: nn.Module, folder: Path, *, processes: bool = False, **options: Any) -> Iterator[LLM]:
    """A vLLM engine of the model's architecture, with random weights unless `options` say otherwise.

    Args:
        folder: a checkpoint; where there is none, the model's base is saved there.
    """
    if not folder.exists():
        save_base(model.get_base_model() if hasattr(model, "get_base_model") else model, folder)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if processes else "0"
    gc.collect()  # an engine of the test before, which its frame held
    products.free()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    before = set(threading.enumerate())
    options = engine_options(model) | options
    try:
        llm = LLM(str(folder), **options)
    except BaseException:
        if not processes:
            _no_longer_extended(options["worker_extension_cls"])
        raise
    threads = [t for t in threading.enumerate() if t not in before and t.name in CLIENT_THREADS]
    try:
        yield llm
    finally:
        core: Any = llm.llm_engine.engine_core
        context = getattr(core, "ctx", None)
        core.shutdown()
        if context is not None:
            _end(context, threads)
        del llm, core
        gc.collect()
        if not processes:
            _no_longer_extended(options["worker_extension_cls"])
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


def _no_longer_extended(extension: str) -> None:
    """Take an extension out of vLLM's worker class, which in this process keeps it after its engine: the next engine's
    may be a subclass of it, and Python allows no base in front of its own subclass."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.worker_base import WorkerBase

    extended, classes = resolve_obj_by_qualname(extension), [WorkerBase]
    for worker in classes:
        classes.extend(worker.__subclasses__())
        if extended in worker.__bases__:
            worker.__bases__ = tuple(base for base in worker.__bases__ if base is not extended)


def _end(context: Any, threads: Sequence[threading.Thread]) -> None:
    """End a client's sockets: what was meant for an engine that was killed would be waited for, for ever.

    Its threads close sockets of their own, which are no other thread's to touch: where this one closed them at the same
    time, the process now and then died of it, without a word if it was a thread of ZeroMQ's, as they block all signals.
    """
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), f"{thread.name} goes on after shutdown(): its sockets cannot be closed here"
    context.destroy(linger=0)


def engine_options(model: nn.Module) -> dict[str, Any]:
    dtype = next(model.parameters()).dtype
    # On a CPU a start fills the memory of the cache, half a second a GiB.
    few = {} if torch.cuda.is_available() else {"num_gpu_blocks_override": 512}
    return few | {
        "dtype": str(dtype).removeprefix("torch."),
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "load_format": "dummy",
        "weight_transfer_config": WeightTransferConfig(backend="lora_merge"),
        "worker_extension_cls": "first_calls.Settled",
    }


GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=1, detokenize=False, ignore_eos=True)


def assert_answers(
    outputs: Sequence[Any],
    model: nn.Module,
    asked: Sequence[Sequence[int]] | None = None,
    *,
    tolerance: float = 12e-6,
    greedy: bool = True,
) -> None:
    """Greedy tokens and their log-probs are the trainer's own, adapter counted once.

    The tolerance is for float32: log-probs of a few units out of sums over a few hundred products, each of the two
    forwards in its own order: some ten roundings of 2^-24 times 10 for each.
    """
    for prompt, (answer, got, logp) in zip(asked or prompts(), _answers(outputs, model, asked), strict=True):
        wanted = logp.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)
        assert not greedy or logp.argmax(-1).tolist() == answer, f"greedy tokens differ for the prompt {prompt}"
        assert (got - wanted).abs().max() < tolerance, (got, wanted.tolist())


def log_prob_errors(outputs: Sequence[Any], model: nn.Module, asked: Sequence[Sequence[int]] | None = None) -> Tensor:
    """How far the log-probs of all tokens are from the trainer's own."""
    return torch.cat(
        [
            (got - logp.gather(-1, torch.tensor(answer)[:, None]).squeeze(-1)).abs()
            for answer, got, logp in _answers(outputs, model, asked)
        ]
    )


def _answers(
    outputs: Sequence[Any], model: nn.Module, asked: Sequence[Sequence[int]] | None
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Of each prompt: the tokens said, the engine's log-probs of them, and the trainer's of all tokens."""
    for prompt, output in zip(asked or prompts(), outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *answer]], device=next(model.parameters()).device)
            logp = model(ids).logits[0].float().log_softmax(-1)[len(prompt) - 1 : -1].cpu()
        got = [step[token].logprob for step, token in zip(output.outputs[0].logprobs, answer, strict=True)]
        yield answer, torch.tensor(got), logp


class Slow:
    """Extends vLLM's workers: in a slow engine requests stay in flight for as long as a test needs them there."""

    STEP_S = 0.05

    def slow(self, on: bool) -> None:
        runner = self.model_runner  # type: ignore[attr-defined]
        vars(runner).pop("execute_model", None)
        execute = runner.execute_model

        def late(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self.STEP_S)
            return execute(*args, **kwargs)

        if on:
            runner.execute_model = late

    def silent(self, seconds: float) -> None:
        """Take a trainer on another host for dead sooner, or later."""
        claim.SILENT_S = seconds


class Slower(Slow):
    """The same for what another process loads meanwhile."""

    STEP_S = 0.2


def ask(llm: LLM, lora: Any = None, asked: Sequence[Sequence[int]] | None = None) -> list[Any]:
    requests = [{"prompt_token_ids": list(p)} for p in asked or prompts()]
    return llm.generate(requests, GREEDY, use_tqdm=False, lora_request=lora)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Nothing of ours stays in shared memory."""
    with leaving_nothing():
        yield


def fail_at_each_bucket(sync: Any, llm: Any, model: Any, error: type[BaseException]) -> Iterator[Any]:
    """The trainer fails as it fills each bucket of an update in turn, and the engine is as before each time.

    Yields:
        the report of the push after each failure, which goes through.
    """
    from lora_merge import LoraMergeError
    from lora_merge.engine.payload.update import UpdatePayload

    fill, count = UpdatePayload.fill, len(sync._planner._update._updates._known[2].table)
    assert count > 1
    for at in range(count):
        train(model, at, size=0.02)
        before, bits = sync.states(), llm.collective_rpc("bits")

        def broken(self: UpdatePayload, index: int, *args: Any, at: int = at) -> None:
            if index == at:
                raise error("injected")
            fill(self, index, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UpdatePayload, "fill", broken)
            with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else LoraMergeError):
                sync.push()
        assert sync.states() == before, "the engine is as before"
        assert llm.collective_rpc("bits") == bits
        yield sync.push()
