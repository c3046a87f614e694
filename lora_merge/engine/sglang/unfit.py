"""Which of SGLang's engines no push can reach, and why."""

from __future__ import annotations

from typing import Any

from ..push.replica import ONE_ENGINE
from ..unfit import Reason, first, where
from . import internals

_WITHOUT_WEIGHTS = {"NGRAM"}
"""Algorithms of speculative decoding that draft without a model."""
_BY_TRANSFORMERS = "Transformers"
"""Begins the names of classes by which SGLang runs transformers' own code."""
_SEEING = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
"""Multimodal models of which SGLang keeps nothing over a push beside its `embedding_cache`. Others were not looked at,
or do: Kimi-VL and PaddleOCR-VL keep position embeddings that they made of weights."""
_UPDATING = ("_session", "_weight_update_in_progress")
"""Attributes that are set from the beginning to the end of an update of SGLang's own (0.5.21 on)."""


def unfit(manager: Any) -> str:
    """Return why no push can reach the engine of a scheduler, in words that follow its name; "" where one can.

    Args:
        manager: SGLang's `SchedulerWeightUpdaterManager`.
    """
    if unknown := internals.unknown_release(internals.lacks(manager)):
        return unknown
    scheduler = manager.scheduler
    arguments, config = scheduler.server_args, scheduler.model_config
    if quantized := config.quantization or getattr(arguments, "torchao_config", ""):  # SGLang 0.5.17 has it
        return (
            f"holds {quantized} weights; only unquantised ones can be pushed to: start it on an unquantised "
            "checkpoint, without quantization or torchao_config, or use vLLM, which takes pushes into quantised weights"
        )
    kind = type(manager.tp_worker.model_runner.model).__name__
    if kind.startswith(_BY_TRANSFORMERS) and arguments.model_impl != "transformers":
        return (
            f"runs {kind}, transformers' own code, in the place of a model of SGLang's: there is none of that name, or "
            'its file failed to import there (the scheduler logs "Ignore import error when loading sglang.srt..."). '
            'Mend what the log names, or, if that is wanted, start it with model_impl="transformers"'
        )
    if why := first(_REFUSED, arguments):
        return why
    if any(getattr(manager, name, None) for name in _UPDATING):
        return "is in the middle of a weight update of SGLang's own: finish it first (end_weight_update)"
    algorithm = str(arguments.speculative_algorithm or "")
    if manager.draft_worker is not None and algorithm.upper() not in _WITHOUT_WEIGHTS:
        return (
            f"drafts tokens with a model ({algorithm}), which would keep the weights that it started with, and no push "
            "reaches it: start the engine without speculative_algorithm, or with NGRAM, which has no weights"
        )
    if config.is_multimodal and kind not in _SEEING:
        return (
            f"serves a multimodal model ({kind}) that may keep what it made of old weights where no push resets it; "
            f"{' and '.join(_SEEING)} are known not to: start it with enable_multimodal=False or on a model of text "
            "alone, or use vLLM"
        )
    return ""


def _has(*names: str) -> Any:
    """Return a test whether arguments have one of these set; not all releases have all of them."""
    return lambda arguments: any(getattr(arguments, name, None) not in (None, False, 0, "none") for name in names)


_REFUSED: tuple[Reason, ...] = (
    where(lambda a: a.enable_dp_attention, "runs attention data-parallel (enable_dp_attention): start it without"),
    where(lambda a: a.dp_size > 1, f"is {ONE_ENGINE}"),
    where(lambda a: a.pp_size > 1, "is cut into stages (pp_size): start it with pp_size=1 and tensor parallelism"),
    where(
        lambda a: a.enable_eplb or a.ep_num_redundant_experts > 0 or a.init_expert_location != "trivial",
        "moves its experts about or doubles some (enable_eplb, ep_num_redundant_experts, init_expert_location), and a "
        "push would put them where they were at first: start it without these",
    ),
    where(
        lambda a: a.disaggregation_mode != "null",
        "serves prefill and decode apart (disaggregation_mode), where cached blocks of the old weights lie in other "
        "engines, too: start it without",
    ),
    where(
        _has("encoder_only", "language_only"),
        "leaves images to other servers (encoder_only, language_only), whose towers a push does not reach: start it "
        "without",
    ),
    where(
        lambda a: a.enable_hierarchical_cache or a.enable_lmcache or _has("enable_flexkv", "enable_hisparse")(a),
        "keeps cached blocks outside of the GPU, too (enable_hierarchical_cache, enable_lmcache, enable_flexkv, "
        "enable_hisparse), which a push does not reach: start it without",
    ),
    where(
        _has("radix_cache_backend"),
        "keeps cached blocks in a prefix cache that is not SGLang's own (radix_cache_backend), of which it is not "
        "known whether it forgets those of the old weights: start it without",
    ),
    where(
        lambda a: a.cpu_offload_gb > 0 or a.offload_group_size > 0,
        "keeps weights in the host's memory (cpu_offload_gb, offload_group_size): start it without",
    ),
    where(
        _has("kt_weight_path"),
        "computes experts on the CPU, with weights of their own file (kt_weight_path), which a push does not reach: "
        "start it without",
    ),
    where(
        _has("enable_elastic_expert_backup", "elastic_ep_backend"),
        "starts experts anew from copies or from its checkpoint (enable_elastic_expert_backup, elastic_ep_backend), "
        "which a push does not reach: start it without",
    ),
    where(
        lambda a: (getattr(a, "dwdp_size", None) or 1) > 1,
        "fetches experts' weights from other GPUs as it computes (dwdp_size), perhaps those of before a push: start it "
        "with dwdp_size=1",
    ),
    where(
        lambda a: a.tokenizer_worker_num > 1,
        "answers from several processes (tokenizer_worker_num), of which a push reaches one: the others would go on "
        "naming the weight version before: start it with tokenizer_worker_num=1",
    ),
    where(
        _has("enable_pdmux"),
        "serves prefill and decode on streams of their own (enable_pdmux), which no pause stops: start it without",
    ),
    where(
        lambda a: a.device == "cpu" and a.enable_torch_compile,
        "compiles its weights in as constants (enable_torch_compile on a CPU), which a push does not reach: start it "
        "without",
    ),
    where(
        lambda a: a.weight_cache_mode != "off",
        "shares its weights with other engines (weight_cache_mode), which a push to one of them would change: start it "
        'with weight_cache_mode="off"',
    ),
)
"""Settings under which something that belongs to the old weights outlives a push, of SGLang's `ServerArgs`."""
