"""The engines that grpo.py rolls out with: which class pushes to each, how it is started, and how it is asked.

Both start with random weights: what they serve is what was pushed. Prompts and answers are token ids, so there is no
tokenizer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from lora_merge import SglangSync, VllmSync

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
REQUESTS = 256
"""That an engine works on at a time."""
Answer = tuple[list[int], list[float]]
"""Token ids, and the engine's log-prob of each."""


class Rollouts(Protocol):
    """An engine that has been started, and what pushes to it."""

    @staticmethod
    def sync(model: Any, engine: Any, args: argparse.Namespace) -> Any: ...

    @staticmethod
    def start(base: Path, context: int, args: argparse.Namespace) -> Any:
        """A context manager with the engine.

        Args:
            base: a folder, of whose checkpoint the config alone is read.
            context: most tokens of a prompt and its answer.
            args: of grpo.py.
        """

    @staticmethod
    def ask(
        engine: Any, sync: Any, prompts: list[list[int]], seeds: list[int], *, group: int, tokens: int, stop: int
    ) -> list[list[Answer]]:
        """Sample `group` answers to each prompt, of at most `tokens` tokens, to the token `stop` and with it."""


class Vllm:
    @staticmethod
    def sync(model: Any, engine: Any, args: argparse.Namespace) -> VllmSync:
        return VllmSync(model, engine, mode=args.mode, merge=args.merge)

    @staticmethod
    @contextmanager
    def start(base: Path, context: int, args: argparse.Namespace) -> Iterator[Any]:
        """In a process of its own."""
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if args.device == "cpu":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": args.rank} if args.mode == "adapter" else {}
        if args.quantization:
            options["quantization"] = args.quantization
        if args.device == "cuda":
            # As much as a policy of this size needs; said, it is not measured, so that runs may start side by side.
            options |= {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
        llm = LLM(
            str(base),
            dtype=args.dtype,
            load_format="dummy",
            weight_transfer_config=WeightTransferConfig(backend="lora_merge"),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=context,
            max_num_seqs=REQUESTS,
            **options,
        )
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()

    @staticmethod
    def ask(
        engine: Any, sync: VllmSync, prompts: list[list[int]], seeds: list[int], *, group: int, tokens: int, stop: int
    ) -> list[list[Answer]]:
        from vllm import SamplingParams

        common = {"n": group, "max_tokens": tokens, "logprobs": 0, "stop_token_ids": [stop], "detokenize": False}
        sampling = [SamplingParams(seed=seed, **common) for seed in seeds]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = engine.generate(requests, sampling, lora_request=sync.lora_request(), use_tqdm=False)
        return [[_of_vllm(answer) for answer in output.outputs] for output in outputs]


def _of_vllm(answer: Any) -> Answer:
    ids = list(answer.token_ids)
    return ids, [step[token].logprob for step, token in zip(answer.logprobs, ids, strict=True)]


class Sglang:
    @staticmethod
    def sync(model: Any, engine: Any, args: argparse.Namespace) -> SglangSync:
        return SglangSync(model, engine, mode=args.mode, merge=args.merge)

    @staticmethod
    @contextmanager
    def start(base: Path, context: int, args: argparse.Namespace) -> Iterator[Any]:
        """Its schedulers are processes of their own, in which lora-merge has to be installed."""
        import sglang

        # Schedulers inherit the environment, and would take torchrun's store for the one that they meet in.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        # Triton's kernels are in every installation; those that SGLang would choose on a GPU may not be.
        options: dict[str, Any] = {"mem_fraction_static": 0.3}
        options |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
        if args.device == "cpu":
            options = {
                "device": "cpu",
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "max_total_tokens": REQUESTS * context,
            }
        if args.mode == "adapter":
            options |= {"enable_lora": True, "max_lora_rank": args.rank, "max_loras_per_batch": 2}
            options |= {"lora_target_modules": LINEARS}
            if args.device == "cpu":
                options["lora_backend"] = "torch_native"
        engine = sglang.Engine(
            model_path=str(base),
            dtype=args.dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            context_length=context,
            max_running_requests=REQUESTS,
            random_seed=args.seed,
            log_level="error",
            **options,
        )
        try:
            yield engine
        finally:
            engine.shutdown()

    @staticmethod
    def ask(
        engine: Any, sync: SglangSync, prompts: list[list[int]], seeds: list[int], *, group: int, tokens: int, stop: int
    ) -> list[list[Answer]]:
        """Requests have no seeds of their own: the engine's `random_seed` is that of all."""
        sampling = {"temperature": 1.0, "max_new_tokens": tokens, "stop_token_ids": [stop]}
        requests = [prompt for prompt in prompts for _ in range(group)]
        outputs = engine.generate(
            input_ids=requests, sampling_params=sampling, return_logprob=True, lora_path=sync.lora_path()
        )
        answers = [_of_sglang(output) for output in outputs]
        return [answers[first : first + group] for first in range(0, len(answers), group)]


def _of_sglang(output: dict[str, Any]) -> Answer:
    logps = [(logp, token) for logp, token, _ in output["meta_info"]["output_token_logprobs"]]
    return [token for _, token in logps], [logp for logp, _ in logps]


ENGINES: dict[str, type[Rollouts]] = {"vllm": Vllm, "sglang": Sglang}
