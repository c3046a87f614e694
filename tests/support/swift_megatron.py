"""`megatron rlhf` of ms-swift on CPUs, one process a rank: swift's own entry and trainers, mcore-bridge's models,
adapters and bridge, megatron-core, and vLLM engines. TransformerEngine's modules alone are stood in for (`te_cpu`)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import te_cpu

te_cpu.install()

import cuda_cpu  # noqa: E402
import swift_runs  # noqa: E402
from helpers import assert_same_bits  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from swift_runs import Exact  # noqa: E402
from torch import Tensor  # noqa: E402

FLAGS = {
    "use_hf": "true", "check_model": "false", "add_version": "false", "report_to": "print", "torch_dtype": "float32",
    "bf16": "false", "fp16": "false", "attention_backend": "unfused", "padding_free": "false", "system": "x",
    "split_dataset_ratio": "0", "use_vllm": "true", "vllm_mode": "colocate", "vllm_max_model_len": "160",
    "vllm_enforce_eager": "true", "max_length": "128", "max_completion_length": "10", "train_iters": "3",
    "logging_steps": "1", "micro_batch_size": "2", "global_batch_size": "8", "lr": "1e-2", "lora_dropout": "0",
    "lr_decay_style": "constant",
    "tuner_type": "lora", "lora_rank": "8", "target_modules": "all-linear", "dataset_num_proc": "1",
    "dataloader_num_workers": "0", "no_save_optim": "true", "no_save_rng": "true", "save_steps": "1000",
    "merge_lora": "false",  # with it swift merges and unmerges the base where it saves a checkpoint
    # What megatron-core does on GPUs alone.
    "ddp_backend": "gloo", "use_distributed_optimizer": "false", "clip_grad": "0", "recompute_granularity": "none",
    "gradient_accumulation_fusion": "false", "bias_activation_fusion": "false", "bias_dropout_fusion": "false",
    "masked_softmax_fusion": "false", "apply_rope_fusion": "false", "cross_entropy_loss_fusion": "false",
    "use_cpu_initialization": "true",
}  # fmt: skip
KINDS = {
    "grpo": {"reward_funcs": "letters", "num_generations": "4", "beta": "0"},
    "gkd": {"lmbda": "1", "temperature": "0.9"},
}


def arguments(kind: str, base: Path, out: Path, **flags: Any) -> list[str]:
    """A command line of `megatron rlhf`."""
    data = base.parent / "data.jsonl"
    if not data.exists():
        swift_runs.dataset(data)
    plugins = [swift_runs.REWARDS, str(swift_runs.PLUGIN)]
    named = {"rlhf_type": kind, "model": str(base), "model_type": "qwen2", "template": "qwen2_5", "dataset": str(data),
             "output_dir": str(out), "external_plugins": plugins}  # fmt: skip
    line = []
    for name, value in (named | FLAGS | KINDS[kind] | flags).items():
        line += [f"--{name}", *([value] if isinstance(value, str) else value)]
    return line


def prepare() -> None:
    """Let all of it believe in a CPU device; for the rest of this process."""
    cuda_cpu.be_a_gpu()
    from accelerate import PartialState

    PartialState(cpu=True)  # starts gloo; else accelerate's gathers take each rank for the only one
    with cuda_cpu.triton():
        import mcore_bridge.model.gpts  # noqa: F401
        import swift.megatron.trainers.grpo_trainer  # noqa: F401
    from megatron.core.transformer.moe import token_dispatcher
    from swift.megatron.pipelines.train import sft
    from swift.megatron.trainers import base

    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **options: (
        tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor
    )
    base.warmup_jit_function = lambda *args: None
    sft.plot_images = lambda *args: None  # wants matplotlib
    sft.dist.destroy_process_group = lambda *args: None  # the trainer is looked at afterwards
    cuda_cpu.OnCPU().__enter__()


def policy(trainer: Any, base: Path) -> dict[str, Exact]:
    """What the trainer computes with, by HF names: the base of its file, and the adapters as swift's bridge exports
    them to PEFT's format; collective."""
    files = load_file(base / "model.safetensors")
    begun = {name: t.to(trainer.config.params_dtype).double() for name, t in files.items()}
    wanted = {name: Exact(t, t.abs()) for name, t in begun.items()}
    halves = dict(trainer.bridge.export_weights(trainer.unwrapped_models, peft_format=True))
    scaling = trainer.args.lora_alpha / trainer.args.lora_rank
    for name, A in halves.items():
        if ".lora_A." in name:
            B, module = halves[name.replace(".lora_A.", ".lora_B.")], name.removesuffix(".lora_A.weight")
            weight = f"{module.removeprefix('base_model.model.')}.weight"
            A, B, was = A.double(), B.double(), wanted[weight].value
            terms = was.abs() + scaling * B.abs() @ A.abs()
            wanted[weight] = Exact(was + scaling * B @ A, terms, A.shape[0])
    return wanted


def base_of(trainer: Any) -> dict[str, Tensor]:
    """Copies of this rank's parameters that are not trained."""
    found = (item for chunk in trainer.unwrapped_models for item in chunk.named_parameters())
    return {name: p.detach().clone() for name, p in found if ".lora_" not in name}


def without_experts(tensors: dict[str, Any]) -> dict[str, Any]:
    """vLLM fuses and packs those of a layer; what they compute is in the importance ratios."""
    return {name: tensor for name, tensor in tensors.items() if ".experts." not in name}


class Watch:
    """Looks at a trainer's engine each time before it answers."""

    def __init__(self, trainer: Any, base: Path) -> None:
        self.trainer, self.base, self.before = trainer, base, base_of(trainer)
        self.looks, self.worst, self.trained = 0, 0.0, 0.0
        name = f"_{trainer.vllm_mode}_rollout"
        infer = getattr(trainer, name)

        def looked(*args: Any, **kwargs: Any) -> Any:
            self.look()
            return infer(*args, **kwargs)

        setattr(trainer, name, looked)

    def look(self) -> None:
        wanted, engine = policy(self.trainer, self.base), getattr(self.trainer, "engine", None)
        if engine is None:
            assert self.trainer.vllm_mode == "server"
        elif self.trainer.rollout_enable_lora:
            assert engine.default_adapter_request.lora_name == "lora_merge"
            saved = load_file(self.base / "model.safetensors")
            for name, tensor in swift_runs.engine_weights(engine.inner_model).items():
                if "stacked" not in name:
                    assert_same_bits(tensor, saved[name].to(tensor.dtype), name)
        else:
            weights = without_experts(swift_runs.engine_weights(engine.inner_model))
            self.worst = max(self.worst, swift_runs.assert_is(weights, without_experts(wanted)))
        self.trained = max(float((exact.terms - exact.value.abs()).abs().max()) for exact in wanted.values())
        self.looks += 1
        for name, p in base_of(self.trainer).items():
            assert_same_bits(p, self.before[name], f"{name} after push {self.looks}")

    def stock(self) -> dict[str, float]:
        """What swift itself would have sent now, and what it leaves of the base; collective."""
        trainer, wanted = self.trainer, policy(self.trainer, self.base)
        trainer.merge_lora_adapters()
        sent = {name: t.clone() for name, t in trainer.bridge.export_weights(trainer.unwrapped_models)}
        trainer.unmerge_lora_adapters()
        now = base_of(trainer)
        changed = sum(int((p != self.before[name]).sum()) for name, p in now.items())
        apart = max(float((sent[name].double() - exact.value).abs().max()) for name, exact in wanted.items())
        return {"changed": changed, "of": sum(p.numel() for p in now.values()), "apart": apart, "sent": len(sent)}


def train(kind: str, base: Path, out: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """One training on this rank, and what was seen of it."""
    from swift.megatron.pipelines.train.rlhf import MegatronRLHF

    if flags.get("vllm_mode") == "server":
        import swift_server  # noqa: F401 - its transport on CPUs
    watched: list[Watch] = []
    logs: list[dict[str, Any]] = []

    class Watched(MegatronRLHF):
        def prepare_trainer(self) -> Any:
            trainer = super().prepare_trainer()
            watched.append(Watch(trainer, base))
            tell = trainer.call_event

            def call_event(event: str, **kwargs: Any) -> Any:
                if event == "on_log":
                    logs.append(dict(kwargs["logs"]))
                return tell(event, **kwargs)

            trainer.call_event = call_event
            return trainer

    with swift_runs.as_on_a_gpu():
        Watched(arguments(kind, base, out, **flags)).main()
    (watch,) = watched
    for name, p in base_of(watch.trainer).items():
        assert_same_bits(p, watch.before[name], f"{name} after training")
    told = [{name: value for name, value in log.items() if "lora_merge" in name} for log in logs]
    return {"class": f"{type(watch.trainer).__module__}.{type(watch.trainer).__qualname__}", "looks": watch.looks,
            "worst": watch.worst, "trained": watch.trained, "told": told, "stock": watch.stock()}  # fmt: skip


def main(kind: str, base: str, out: str, flags: str) -> None:
    """A rank's process: writes what it has seen to `out/RANK.json`."""
    prepare()
    found = train(kind, Path(base), Path(out), json.loads(flags))
    Path(out, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines and process groups end in any order


if __name__ == "__main__":
    main(*sys.argv[1:])
