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
import pytest
import torch
from processes import leaving_nothing
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

# vLLM wants head dimensions of 32 and more in float32.
SIZES = models._SIZES | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 256,
}
MOE = {"head_dim": 32, "num_experts_per_tok": 2}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def qwen2(tied: bool = True) -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return models.eager(MixtralForCausalLM(MixtralConfig(**SIZES | {"num_hidden_layers": 1}, num_local_experts=4)))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = SIZES | MOE | {"num_hidden_layers": 1}
    return models.eager(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=64)))


def gemma4() -> nn.Module:
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    sizes = SIZES | {"head_dim": 32, "global_head_dim": 32, "vocab_size_per_layer_input": 256}
    model = Gemma4ForCausalLM(Gemma4TextConfig(**sizes, hidden_size_per_layer_input=0))
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.75)
    return model


def gemma2() -> nn.Module:
    """A tied head, of which vLLM's class knows nothing."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    # Other attention of transformers leaves the soft cap of its logits out.
    sizes = SIZES | {"head_dim": 32, "query_pre_attn_scalar": 32, "attn_implementation": "eager"}
    return Gemma2ForCausalLM(Gemma2Config(**sizes))


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
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2_5_VLProcessor, Qwen2TokenizerFast, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    vocabulary = {character: i for i, character in enumerate(sorted(ByteLevel.alphabet()))}
    vocabulary |= {token: 256 + i for i, token in enumerate(SPECIAL)}
    tokenizer = Qwen2TokenizerFast(vocab=vocabulary, merges=[], extra_special_tokens=SPECIAL)
    return Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template="")


def train(model: nn.Module, seed: int = 1, size: float = 0.05) -> None:
    """Move the adapter as a step of an optimizer would."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_((torch.randn(parameter.shape, generator=g) * size).to(parameter))


CLIENT_THREADS = ("EngineCoreOutputQueueThread", "MPClientEngineMonitor")
"""Of vLLM's client of an engine in another process: those that use its sockets."""


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
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    before = set(threading.enumerate())
    llm = LLM(str(folder), **engine_options(model) | options)
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
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


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
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "load_format": "dummy",
        "weight_transfer_config": WeightTransferConfig(backend="lora_merge"),
        "worker_extension_cls": "first_calls.Settled",
    }


def save_base(base: nn.Module, folder: Path) -> None:
    """The base in HF format, without what PEFT injected into it."""
    from safetensors.torch import save_file

    import lora_merge.stream.weights

    folder.mkdir(parents=True)
    base.config.architectures = [type(base).__name__]
    base.config.save_pretrained(folder)
    stream = lora_merge.stream.weights.MergedWeights(base, adapters=False)
    save_file({name: t.contiguous().clone() for name, t in stream}, folder / "model.safetensors", {"format": "pt"})


def prompts(count: int = 4, seed: int = 3) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 256, (12,), generator=g).tolist() for _ in range(count)]


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


def ask(llm: LLM, lora: Any = None, asked: Sequence[Sequence[int]] | None = None) -> list[Any]:
    requests = [{"prompt_token_ids": list(p)} for p in asked or prompts()]
    return llm.generate(requests, GREEDY, use_tqdm=False, lora_request=lora)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Nothing of ours stays in shared memory."""
    with leaving_nothing():
        yield
