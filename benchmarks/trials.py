"""What `architectures.py` does with one family, in a process of its own: engines, pushes, and what is compared."""

from __future__ import annotations

import copy
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from families import Architecture, build, published, save

TOLERANCE = 12e-6
"""Of log-probs, in float32: some ten roundings of each forward, see tests/support/engines.py."""
OF_16_BITS = 2e-2
"""Of log-probs of bfloat16 weights in two engines: PEFT's merge and this one's differ in a rounding here and there."""
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
"""CUDA graphs of decoding, without torch.compile, which takes a minute a model."""
OTHER = "other answers"
FRESH = "as a fresh engine"
SAVED = "as a fresh engine on what save_merged writes"
BITS = "the bits of a fresh engine on what save_merged writes"
TOWER, LANGUAGE, NONE = "tower", "language", ""
"""Which LoRA layers an engine has."""


@dataclass(slots=True)
class Row:
    """What became of one architecture; "right", or what was seen instead.

    Args:
        kind: as of `Architecture`.
        vllm: vLLM's own answers on the checkpoint that transformers saved.
        merged: after two pushes in merged mode.
        image: the same for prompts with an image; "" where none was asked.
        adapter: after a push in adapter mode.
        error: largest difference of a log-prob that was seen.
        tensors: that crossed.
        device: "CPU" or "GPU".
        release: of vLLM.
    """

    name: str
    kind: str = "text"
    vllm: str = ""
    merged: str = ""
    image: str = ""
    adapter: str = ""
    error: float = 0.0
    tensors: int = 0
    seconds: float = 0.0
    device: str = "CPU"
    release: str = ""

    @property
    def fine(self) -> bool:
        """What is not right is vLLM's."""
        fits = ("right", FRESH, SAVED)
        if self.vllm != "right":
            return not self.merged.startswith(OTHER)
        return self.merged in fits and self.image in ("", *fits)


class Trial:
    """One family, with one kind of engine.

    Args:
        lora: which LoRA layers the engine has.
        device: of the trainer and of the engine: "cpu" or "cuda".
        parallel: tensor-parallel size.
    """

    def __init__(self, architecture: Architecture, lora: str, device: str, parallel: int, folder: Path) -> None:
        import engines  # type: ignore[import-not-found]

        self.architecture, self.lora, self.device, self.folder, self.engines = (
            architecture, lora, device, folder, engines,
        )  # fmt: skip
        self.row = Row(architecture.title, architecture.kind)
        dtype = torch.bfloat16 if device == "cuda" else getattr(torch, architecture.dtype)
        self.exact = dtype == torch.float32
        model = build(architecture).to(dtype)
        # Whole Omni models are loaded with a file of speakers beside the weights.
        loads = architecture.kind == "image" and not architecture.name.startswith("Qwen2_5Omni")
        self.model = (published(model, folder / "base") if loads else model).to(device)
        self.dtypes = {name: tensor.dtype for name, tensor in self.model.state_dict().items()}
        self.processor, self.image = _sight(architecture)
        self.options = self._options(parallel)
        self.asks = Asks(engines, architecture, self.processor, self.image)
        self.trained: Any = None
        self.merged: Any = None
        self.alike = False
        self.bits: Any = None

    def _options(self, parallel: int) -> dict[str, Any]:
        options: dict[str, Any] = {"load_format": "auto", "worker_extension_cls": "weight_bits.Bits"}
        if self.device == "cuda":
            options |= {
                "processes": True, "enforce_eager": False, "compilation_config": GRAPHS,
                "enable_sleep_mode": True, "tensor_parallel_size": parallel, "max_num_seqs": 8, "max_model_len": 256,
                # Of a given size, vLLM measures no free memory, which others on the GPU change: several runs share one.
                "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 29,
                "additional_config": {"gdn_prefill_backend": "triton"},  # FlashInfer may be missing
            }  # fmt: skip
        else:
            several = {"tensor_parallel_size": parallel} if parallel > 1 else {}
            options |= {"processes": by_transformers(self.model) or parallel > 1} | several
        if self.processor is not None:
            options |= {"skip_tokenizer_init": False, "max_model_len": 256}
        if self.lora:
            options |= {"enable_lora": True, "max_lora_rank": 8}
        if self.lora == TOWER:
            options |= {"enable_tower_connector_lora": True}
        engine = dict(self.architecture.engine)
        if "limit_mm_per_prompt" in engine and self.processor is None:
            engine["limit_mm_per_prompt"] = dict.fromkeys(engine["limit_mm_per_prompt"], 0)
        return options | engine

    @contextmanager
    def engine(self, model: Any, name: str) -> Iterator[Any]:
        """Run a block with an engine on a checkpoint of a model."""
        path = self.folder / name
        save(model, path)
        if self.processor is not None:
            self.processor.save_pretrained(path)
        with self.engines.engine(model, path, **self.options) as llm:
            yield llm

    def run(self) -> Row:
        try:
            with self.engine(self.model, "base") as llm:
                pushed = self._push(llm)
                self.bits = llm.collective_rpc("bits")
            if pushed and self.row.vllm != "right":
                self.row.merged = self._as_saved(pushed) or f"{OTHER} than a fresh engine's"
            elif pushed and (not self.exact or self.row.merged.startswith(OTHER) or self.row.image.startswith(OTHER)):
                self._compare(pushed)
        except Exception as error:
            self.row.vllm = short(error)
        return self.row

    def _push(self, llm: Any) -> list[Answers]:
        """Ask before any push, after two merged ones, after a sleep and after one of an adapter. Return the answers to
        the last merged push."""
        from lora_merge import VllmSync

        row, images = self.row, self.image is not None
        before = self.asks(llm)
        row.vllm = said(lambda: self._check(before[:1], self.model)) if self.exact else "right"
        own = row.vllm != "right"
        # Else (Gemma-3 on a CPU) a fresh engine is asked.
        self.alike = images and self.exact and said(lambda: self._check(before[1:], self.model)) == "right"
        self.trained = trained = adapted(self.model, self.architecture.bare)
        sync = VllmSync(trained, llm, bucket_bytes=1 << 17 if self.device == "cpu" else 1 << 28)
        after: list[Answers] = []
        for step in range(2):
            self.engines.train(trained, step)
            if step:
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter.mul_(1.01)

            def push() -> None:
                row.tensors = sync.push(verify=True).tensors
                after[:] = self.asks(llm)
                if moved(before[:1], after[:1]) < 1e-3:
                    raise ValueError("the adapter changes nothing")

            row.merged = said(push)
            if row.merged != "right":
                return []
            if self.exact and not own:
                row.merged = said(lambda: self._check(after[:1], trained))
                row.image = said(lambda: self._check(after[1:], trained)) if self.alike else OTHER if images else ""
            if {row.merged, row.image} - {"right", ""} and not (row.image == OTHER and row.merged == "right"):
                return list(after)
        if self.device == "cuda":
            row.merged = said(lambda: self._sleep(llm, sync, after))
        if not self.exact or row.image == OTHER:
            self.merged = self._merge()
        if self.lora and row.merged == "right" and not own:
            row.adapter = said(lambda: self._adapter(llm, sync, trained))
            if row.adapter.startswith("PushRefused") and self.architecture.kind == "image":
                sync.close()
                language = adapted(trained.unload(), rf"{self.architecture.bare}|{TOWERS}")
                sync = VllmSync(language, llm, bucket_bytes=1 << 17)
                found = said(lambda: self._adapter(llm, sync, language))
                row.adapter = "right, of the language model" if found == "right" else row.adapter
        return list(after)

    def _sleep(self, llm: Any, sync: Any, after: Sequence[Answers]) -> None:
        """Sleep and push, at both levels: parameters, buffers and answers are as before."""
        bits = llm.collective_rpc("bits", args=(True,))
        for level in (1, 2):
            llm.sleep(level=level)
            sync.push(verify=level == 2)
            if llm.collective_rpc("bits", args=(True,)) != bits:
                raise AssertionError(f"other bits after sleep at level {level}")
            if (error := moved(after, again := self.asks(llm))) >= 1e-3:
                repeated, own = moved(again, self.asks(llm)), self._own_sleep(llm)
                beside = f"asked twice {repeated:.0e}, vLLM's own {own:.0e}"
                raise AssertionError(f"{error:.1e} off after sleep at level {level}, bits the same; {beside}")

    def _own_sleep(self, llm: Any) -> float:
        """Return how far answers move by vLLM's own sleep and waking, without a push."""
        before = self.asks(llm)
        llm.sleep(level=1)
        llm.wake_up()
        return moved(before, self.asks(llm))

    def _adapter(self, llm: Any, sync: Any, trained: Any) -> None:
        self.engines.train(trained, 2)
        sync.push(mode="adapter")
        answers = self.asks(llm, sync.lora_request())
        if self.exact:
            self._check(answers if self.alike else answers[:1], trained)
        elif moved(self.asks(llm), answers) == 0:
            raise ValueError("the adapter changes nothing")

    def _check(self, answers: Sequence[Answers], model: Any) -> None:
        """Raise `AssertionError` unless answers are those of the trainer's own forward."""
        for answer in answers:
            if answer.image:
                error = self.asks.image_error(answer, model)
                assert error < TOLERANCE, f"{error:.1e} off with an image"
                self.row.error = max(self.row.error, error)
            else:
                forward = forward_of(model)
                self.row.error = max(self.row.error, float(self.engines.log_prob_errors(answer.outputs, forward).max()))
                self.engines.assert_answers(answer.outputs, forward, tolerance=TOLERANCE)

    def _merge(self) -> Any:
        """Return what PEFT merges, in float32."""
        merged = copy.deepcopy(self.trained).float().merge_and_unload()
        with torch.no_grad():
            for name, tensor in merged.state_dict(keep_vars=True).items():
                tensor.data = tensor.data.to(self.dtypes[name])
        return merged

    def _compare(self, pushed: Sequence[Answers]) -> None:
        """Ask a fresh engine on the checkpoint that PEFT merges and transformers saves."""
        merged = self._merge() if self.merged is None else self.merged
        with self.engine(merged, "merged") as llm:
            fresh = self.asks(llm)
        tolerance = TOLERANCE if self.exact else OF_16_BITS
        if not self.exact:
            self.row.error = max(differences(pushed, fresh))
        for field, one, other in (("merged", pushed[:1], fresh[:1]), ("image", pushed[1:], fresh[1:])):
            was = getattr(self.row, field)
            if not one or not (was.startswith(OTHER) if self.exact else was in ("", "right")):
                continue
            if alike(one, other, tolerance):
                setattr(self.row, field, FRESH)
            elif not self.exact and self._as_saved(pushed) == SAVED:
                setattr(self.row, field, SAVED)
            else:
                setattr(self.row, field, f"{OTHER}: {max(differences(one, other)):.1e} from a fresh engine")

    def _as_saved(self, pushed: Sequence[Answers]) -> str:
        """Ask a fresh engine on the checkpoint that `save_merged` writes. Return `SAVED` if it answers as the pushed
        one, `BITS` if its parameters alone are the same, "" else.

        PEFT's merge differs in a rounding here and there. A router between experts that are as likely then chooses
        others: 47 of the 2 million weights of a tiny Qwen3-VL-MoE, moved by one rounding, moved log-probs by 0.008, and
        in 5 draws of 60 by 0.16.
        """
        from lora_merge import save_merged

        path = self.folder / "saved"
        if not path.exists():
            save_merged(self.trained, path)
            if self.processor is not None:
                self.processor.save_pretrained(path)
        with self.engines.engine(self.model, path, **self.options) as llm:
            same = self.bits == llm.collective_rpc("bits")
            return SAVED if alike(pushed, self.asks(llm), TOLERANCE if self.exact else 1e-3) else BITS if same else ""


@dataclass(frozen=True, slots=True)
class Answers:
    """What an engine answered: outputs of vLLM's, to prompts of text, or to one with an image."""

    outputs: Sequence[Any]
    image: bool = False

    def log_probs(self) -> list[list[tuple[int, float]]]:
        """Return of each output the log-probs of the tokens of the prompt that are text, where they were asked for,
        and of the tokens said."""
        return [
            [
                *_of_prompt(output),
                *(
                    (token, step[token].logprob)
                    for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
                ),
            ]
            for output in self.outputs
        ]

    def check(self) -> None:
        """Raise `ValueError` if a log-prob is no number: no distance from it is larger than another."""
        if not all(math.isfinite(found) for output in self.log_probs() for _, found in output):
            raise ValueError("the engine answers with log-probs that are no numbers")


def _of_prompt(output: Any) -> list[tuple[int, float]]:
    steps = (output.prompt_logprobs or [])[1:]
    tokens = list(output.prompt_token_ids)[1:]
    return [(token, step[token].logprob) for token, step in zip(tokens, steps, strict=False) if token < TEXT]


TEXT = 256
"""Tokens of text; those behind are special."""


class Asks:
    """Asks an engine the same each time: prompts of text, and one with an image where it can see.

    One prompt at a time: an engine in another process batches prompts as they come in, and other batches round
    otherwise, enough for a router between experts that are as likely, and for the 28 layers of a whole Qwen2.5-VL-7B.
    """

    def __init__(self, engines: Any, architecture: Architecture, processor: Any, image: Any) -> None:
        self._engines, self._prompt, self._image = engines, architecture.prompt, image
        self._inputs = None
        if image is not None:
            self._inputs = dict(processor(text=[self._prompt], images=[image], return_tensors="pt"))

    def __call__(self, llm: Any, lora: Any = None) -> list[Answers]:
        from vllm import SamplingParams

        prompts = self._engines.prompts()
        found = [Answers([output for one in prompts for output in self._engines.ask(llm, lora, [one])])]
        if self._image is not None:
            once = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=1, detokenize=False)
            prompt = {"prompt": self._prompt, "multi_modal_data": {"image": self._image}}
            found.append(Answers(llm.generate([prompt], once, use_tqdm=False, lora_request=lora), image=True))
        for answers in found:
            answers.check()
        return found

    def image_error(self, answers: Answers, model: Any) -> float:
        """Return how far the log-probs are from the trainer's own forward on the same image."""
        assert self._inputs is not None
        (output,) = answers.outputs
        ids = self._inputs["input_ids"][0].tolist()
        assert list(output.prompt_token_ids) == ids, "vLLM's processor makes another prompt"
        with torch.no_grad():
            wanted = forward_of(model)(**self._inputs).logits[0].float().log_softmax(-1)
        rows = [at for at, token in enumerate(ids[1:]) if token < TEXT] + [len(ids) - 1]
        (found,) = answers.log_probs()
        return max(abs(got - wanted[row, token].item()) for row, (token, got) in zip(rows, found, strict=True))


def _sight(architecture: Architecture) -> tuple[Any, Any]:
    """Return a family's processor and an image; None where it has none, or torchvision is not installed."""
    if architecture.processor is None:
        return None, None
    try:
        import torchvision  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        return None, None
    from PIL import Image

    return architecture.processor(), Image.effect_mandelbrot((112, 112), (-2, -1.5, 1, 1.5), 50).convert("RGB")


TOWERS = r"visual|vision|audio|projector|connector|merger|embed_audio"
"""What names of modules outside of the language model contain."""


def adapted(model: Any, bare: str) -> Any:
    """Put an adapter on every linear layer but the head, and on fused experts.

    Args:
        bare: pattern of names that get none.
    """
    from peft import LoraConfig, get_peft_model
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    def taken(name: str) -> bool:
        return re.search(bare, name) is None

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head and not name.endswith("lm_head")
        and taken(name)
    ]  # fmt: skip
    fused = [n for n, p in model.named_parameters() if p.dim() == 3 and ".experts." in n and not n.endswith("_bias")]
    targets = sorted({".".join(n.split(".")[-3:]) for n in fused if taken(n)})
    config = LoraConfig(
        r=4, lora_alpha=6, target_modules=linears, target_parameters=targets or None, init_lora_weights=False
    )
    trained = get_peft_model(model, config).eval()
    with torch.no_grad():  # large ones make large sums, and these large errors
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.3)
    return trained


def forward_of(model: Any) -> Any:
    """Return what computes the logits: of an Omni model its thinker."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(inner, "thinker", model)


def by_transformers(model: Any) -> bool:
    """Return True if vLLM runs the classes of transformers, which it changes: then its process must not be the
    trainer's."""
    from vllm.model_executor.models.registry import ModelRegistry

    known = ModelRegistry.models.get(type(model).__name__)
    return known is None or known.module_name.endswith(".transformers")


def differences(some: Sequence[Answers], others: Sequence[Answers]) -> list[float]:
    """Return how far log-probs of two engines are apart, up to the first token that differs."""
    found = [0.0]
    for one, other in zip(some, others, strict=True):
        for here, there in zip(one.log_probs(), other.log_probs(), strict=True):
            for (first, got), (second, wanted) in zip(here, there, strict=True):
                found.append(abs(got - wanted))
                if first != second:
                    break
    return found


def alike(some: Sequence[Answers], others: Sequence[Answers], tolerance: float) -> bool:
    """Return True if two engines say the same: tokens that differ were as likely as each other, and what follows them
    is not compared."""
    return max(differences(some, others)) < tolerance


def moved(before: Sequence[Answers], after: Sequence[Answers]) -> float:
    """Return how far log-probs moved."""
    return max(differences(before, after))


def said(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except AssertionError as error:
        return f"{OTHER}: {(str(error).splitlines() or [''])[0][:100]}"
    except Exception as error:
        return short(error)
    return "right"


def short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:300]}"


def examine(architecture: Architecture, lora: str, options: Mapping[str, Any]) -> Row:
    """Return one row, of an engine with LoRA layers or without.

    Args:
        options: `device` and `parallel`, as of `Trial`.
    """
    import vllm

    with tempfile.TemporaryDirectory() as folder:
        try:
            row = Trial(architecture, lora, options["device"], options["parallel"], Path(folder)).run()
        except Exception as error:
            row = Row(architecture.title, architecture.kind, vllm=short(error))
    row.device, row.release = "GPU" if options["device"] == "cuda" else "CPU", vllm.__version__
    return row
