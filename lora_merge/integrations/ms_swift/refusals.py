"""Refusals of what cannot be served: each raises `TrainerRefused`, which names the flag of swift's to change."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...choices import Rounding
from ...errors import InvalidInput, UnsupportedAdapter
from ..compat import TrainerRefused, off
from ..options import SWITCH, Options
from ..sharing import how_sharded
from ..train import TrainsMerged


def refuse(model: Any, args: Any, options: Options) -> None:
    """Refuse a training that cannot be taken over, before swift starts an engine.

    Args:
        model: as swift loaded it.
        args: swift's training arguments.
    """
    _refuse_any(args, options)
    info = model.model_info
    if info.quant_method and (info.quant_method != "bnb" or _quantised_on_disk(info.model_dir)):
        raise _quantised(info, "on a checkpoint of plain weights, with --quant_method bnb (QLoRA) or without it")


def trained_merged(model: nn.Module, rounding: Rounding) -> TrainsMerged:
    """Return what trains the model on its merged weights; refuse what cannot be trained so."""
    try:
        return TrainsMerged(model, rounding)
    except (InvalidInput, UnsupportedAdapter) as error:
        raise TrainerRefused(
            f"{SWITCH}_TRAIN=merged: {error}. (In ms-swift: --tuner_type lora --lora_dropout 0.) Or leave "
            f"{SWITCH}_TRAIN out, which trains as PEFT computes"
        ) from error


def refuse_sharded(accelerator: Any) -> None:
    """Refuse to share weights that training will shard."""
    if how := how_sharded(accelerator):
        raise _refused(
            f"{SWITCH}_SHARE=1, and {how} shards the trainer's weights over its ranks: no rank holds one as its engine "
            f"does. Train under DDP, or leave {SWITCH}_SHARE out"
        )


def refuse_megatron(args: Any, options: Options) -> None:
    """Refuse a `megatron rlhf` that cannot be taken over, before swift makes a model."""
    _refuse_any(args, options)
    if args.model_info.quant_method:
        raise _quantised(args.model_info, "on one that is not, without --quant_method and --quant_bits")
    if args.rlhf_type == "gkd" and args.lmbda == 0:
        raise _refused("--lmbda 0 trains on no answers of an engine: there is nothing to push to")
    if args.use_megatron_fsdp:
        raise _refused("--use_megatron_fsdp true shards weights in a way that is not read here: pass false")
    if args.bridge_backend != "mcore-bridge":
        raise _refused(f"--bridge_backend {args.bridge_backend} has not been tried: pass mcore-bridge")
    for flag in ("fp8_param_gather", "fp4_param_gather"):
        if getattr(args, flag):
            raise _refused(f"--{flag} true keeps weights in 8 or 4 bits, and merged weights are not: pass false")
    if options.check is not None and args.rlhf_type == "gkd":
        raise TrainerRefused(
            f"{SWITCH}_CHECK needs the trainer's log-probs of the engine's tokens, which swift's Megatron GKD does not "
            f"compute: leave {SWITCH}_CHECK out"
        )
    if options.check is not None:
        _refuse_filters(args, [])


def _refuse_any(args: Any, options: Options) -> None:
    if not args.use_vllm:
        raise _refused("there is no engine to push to: pass --use_vllm true --vllm_mode colocate (or server)")
    if options.train == "merged" and args.vllm_enable_lora:
        chosen = f"{SWITCH}_SHARE=1" if options.share else f"{SWITCH}_TRAIN=merged"
        raise TrainerRefused(
            f"{chosen} trains the policy of merged weights, and --vllm_enable_lora true serves base and "
            "adapter apart, which computes otherwise: leave one of them out"
        )
    if options.share and args.vllm_mode == "server":
        raise _refused(
            f"{SWITCH}_SHARE=1 shares weights with an engine in the trainer's process: pass --vllm_mode colocate, or "
            f"leave {SWITCH}_SHARE out"
        )
    if options.share and args.offload_model:
        raise _refused(
            f"--offload_model true moves the model off while the engine answers, which shares its weights "
            f"({SWITCH}_SHARE=1): leave one of them out"
        )
    adapters = args.tuner_type == "lora" and args.vllm_enable_lora
    if options.mode == "adapter" and not (adapters and args.vllm_mode == "colocate"):
        raise _refused(
            f"{SWITCH}_MODE=adapter needs an engine that takes adapters: pass --vllm_mode colocate --tuner_type lora "
            f"--vllm_enable_lora true, or leave {SWITCH}_MODE out"
        )
    if options.cache == "keep" and args.vllm_mode == "server":
        raise _refused(
            f"swift's server drops its caches by itself: leave {SWITCH}_CACHE out, or pass --vllm_mode colocate"
        )
    if options.verify and args.vllm_mode == "server":
        raise _refused(
            f"swift's server tells no checksums of what it holds: leave {SWITCH}_VERIFY out, or pass --vllm_mode "
            "colocate"
        )


def _quantised(info: Any, instead: str) -> TrainerRefused:
    how = f"{info.quant_method}, {info.quant_bits} bits"
    return _refused(f"the base is quantised ({how}), and merged weights are not: train {instead}")


def _quantised_on_disk(folder: str) -> bool:
    """Return True if an engine that is started on a checkpoint holds quantised weights, too."""
    from swift.utils.hf_config import HfConfigFactory
    from transformers import PretrainedConfig

    return bool(HfConfigFactory.get_quant_info(PretrainedConfig.get_config_dict(folder)[0]))


def refuse_server(takes_adapters: bool) -> None:
    """Refuse a server that puts an adapter of its own on top of merged weights, if one was ever loaded there."""
    if takes_adapters:
        raise _refused(
            "the server takes adapters, and an adapter that was loaded there would count on top of the merged weights: "
            "start `swift rollout` without --vllm_enable_lora"
        )


def refuse_check(model: nn.Module, args: Any, template: Any, forward: bool) -> None:
    """Refuse the check of importance ratios where one and the same policy does not give 1.

    Args:
        model: as swift loaded it, with its adapter.
        args: swift's training arguments.
        template: swift's.
        forward: whether the check runs the model itself.
    """
    wrong = []
    if forward and template.sequence_parallel_size > 1:
        wrong.append(f"--sequence_parallel_size {template.sequence_parallel_size} (pass 1)")
    if any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()):
        wrong.append("dropout, which swift leaves on where it computes log-probs (pass --lora_dropout 0)")
    _refuse_filters(args, wrong)


def _refuse_filters(args: Any, more: list[str]) -> None:
    """Refuse the check where answers are sampled otherwise than from the policy.

    Args:
        more: further reasons, in words.
    """
    wanted = {"top_k": (-1, 0), "top_p": (1,), "min_p": (0,), "repetition_penalty": (1,), "async_generate": (False,)}
    wrong = []
    for name, values in wanted.items():
        if getattr(args, name, values[0]) not in values:
            wrong.append(f"--{name} {getattr(args, name)} (pass {str(values[0]).lower()})")
    if args.structured_outputs_regex:
        wrong.append("--structured_outputs_regex")
    wrong += more
    if wrong:
        raise TrainerRefused(
            f"{SWITCH}_CHECK compares log-probs of trainer and engine, which differ by themselves with "
            f"{', '.join(wrong)}; change that, or leave {SWITCH}_CHECK out"
        )


def _refused(why: str) -> TrainerRefused:
    return TrainerRefused(f"{why}. {off('ms-swift')}")
