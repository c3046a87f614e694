"""An adapter that PEFT has saved, read by PEFT's own code onto a base without values.

Merging where the base lies asks of the base here no more than names, shapes and dtypes. Its parameters have addresses
of their own, by which tied ones are told from others, in memory that nobody has touched: reading gives zeros and takes
no memory, whatever the size of the model.
"""

from __future__ import annotations

import json
import mmap
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InvalidInput, MissingExtra, UnsupportedAdapter
from ...names import hf_name, named_tensors, own_parameters

CONFIG = "adapter_config.json"
_ALIGNED = 64
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python names only from 3.13 on."""
_FACTORS = "lora_"
"""What names of an adapter's own tensors contain, magnitudes among them."""
_BASE_AS_IT_IS = (True, False, None, "gaussian", "eva", "orthogonal")
"""What `init_lora_weights` says of adapters that are trained on the base as it is; others begin with another one."""


def read_folder(folder: str | Path, base: str | Path | None, dtype: torch.dtype, *, values: bool = False) -> nn.Module:
    """The adapter in a folder, on its base, as PEFT loads it: a `PeftModel` on the CPU.

    Args:
        folder: as `save_pretrained` of a `PeftModel` wrote it.
        base: folder or name of the base model; default: `base_model_name_or_path` of the adapter.
        dtype: of the base.
        values: read the base's weights, too. Without, they are zeros in memory that is not there: DoRA's norms cannot
            be taken then (`needs_values`).

    Raises:
        MissingExtra: peft or transformers is not installed.
        InvalidInput: the folder holds no adapter, or it does not fit its base; the base cannot be found.
        UnsupportedAdapter: it is no LoRA, or was trained on another base than the one that is named.
    """
    try:
        import transformers  # noqa: F401
        from peft import PeftConfig, PeftModel, load_peft_weights
    except ImportError as error:
        raise MissingExtra("reading an adapter takes PEFT and transformers: pip install lora-merge[peft]") from error
    folder = Path(folder)
    _check_folder(folder)
    config: Any = PeftConfig.from_pretrained(str(folder))
    _check_config(folder, config)
    named = base if base is not None else config.base_model_name_or_path
    if not named:
        raise InvalidInput(f"{folder / CONFIG} names no base model: pass base=, the engine's model")
    model = _base(str(named), dtype, values, given=base is not None)
    config.inference_mode = False  # then what it trains requires a gradient, as in training
    problems: Any = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what PEFT warns of is an error below
            adapted = PeftModel(model, config)
            problems = adapted.load_adapter(str(folder), "default", is_trainable=True, torch_device="cpu")
            keys = list(load_peft_weights(str(folder), device="cpu"))
    except Exception as error:
        first = str(error).strip().splitlines()
        told = "; ".join(line.strip() for line in first[:3])
        raise InvalidInput(
            f"{folder}: the adapter does not fit the base {named} ({type(error).__name__}: {told}); pass base= if it "
            "was trained on another one"
        ) from error
    if lacking := [*problems.missing_keys, *problems.unexpected_keys]:
        raise InvalidInput(
            f"{folder}: the adapter does not fit the base {named}: {len(problems.missing_keys)} of its tensors are not "
            f"in the file, {len(problems.unexpected_keys)} of the file's have no place, {lacking[0]} for one; pass "
            "base= if it was trained on another one"
        )
    _mark_whole(folder, adapted, {hf_name(key) for key in keys if _FACTORS not in key})
    return adapted.eval()


def _mark_whole(folder: Path, model: nn.Module, saved: set[str]) -> None:
    """Let exactly those parameters of the base require a gradient that the folder holds whole.

    Args:
        saved: their names.
    """
    there = [(t.name, t.tensor) for t in named_tensors(model, own_parameters)]
    if surplus := sorted(saved - {name for name, _ in there}):
        raise InvalidInput(f"{folder}: {surplus[0]} is in the adapter's file, and its base has no such parameter")
    held = {id(tensor) for name, tensor in there if name in saved}  # tied ones have several names
    for name, tensor in there:
        if id(tensor) in held:
            tensor.requires_grad_()
        elif tensor.requires_grad:
            raise InvalidInput(
                f"{folder}: the adapter's configuration says that {name} was trained, and its file does not hold it: "
                "save it again with the PEFT that trained it"
            )


def needs_values(folder: str | Path) -> bool:
    """Whether what the adapter adds depends on the base's weights: DoRA's factors of rows do."""
    _check_folder(Path(folder))
    return bool(json.loads((Path(folder) / CONFIG).read_text()).get("use_dora"))


def _check_folder(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        raise InvalidInput(
            f"{folder} holds no adapter of PEFT's: expected {CONFIG} there, as save_pretrained writes it"
        )


def _check_config(folder: Path, config: Any) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise UnsupportedAdapter(f"{folder}: an adapter of type {kind}; only LoRA adapters can be merged here")
    said = json.loads((folder / CONFIG).read_text())
    if unknown := sorted(key for key, value in said.items() if value is True and not hasattr(config, key)):
        raise UnsupportedAdapter(
            f"{folder}: {CONFIG} says {unknown[0]}=True, which the PEFT here does not know: install the one that saved "
            "it"
        )
    begun = config.init_lora_weights
    if begun not in _BASE_AS_IT_IS:
        raise UnsupportedAdapter(
            f"{folder}: init_lora_weights={begun!r} changes the base that the adapter belongs to, and the engine has "
            "the one before: save it again with path_initial_model_for_weight_conversion, which makes it a plain LoRA"
        )


def _base(name: str, dtype: torch.dtype, values: bool, given: bool) -> nn.Module:
    """The base model, of the class that wrote its checkpoint."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name)
        written = next(iter(getattr(config, "architectures", None) or ()), "")
        cls = getattr(transformers, written, None)
        if values:
            return (cls or transformers.AutoModelForCausalLM).from_pretrained(name, dtype=dtype)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config) if cls is None else cls(config)
    except Exception as error:
        told = str(error).strip().splitlines()
        whose = "base" if given else "the adapter's base_model_name_or_path"
        raise InvalidInput(
            f"{whose}: {name!r} cannot be read as a model of transformers ({type(error).__name__}: "
            f"{told[0] if told else ''}); pass base=, a folder or name of the model that the engine serves"
        ) from error
    return _placed(model.to(dtype))


def _placed(model: nn.Module) -> nn.Module:
    """A model on the meta device -> the same on the CPU, in memory that nobody has touched."""
    found: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        found.setdefault(id(tensor), tensor)
    sizes = {key: -(-max(t.nbytes, 1) // _ALIGNED) * _ALIGNED for key, t in found.items()}
    # Of a private mapping without a reservation a page comes to be when it is written to.
    memory = mmap.mmap(-1, max(sum(sizes.values()), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    placed: dict[int, Tensor] = {}
    begin = 0
    for key, tensor in found.items():
        if tensor.numel():
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=begin)
            placed[key] = flat.view(tensor.shape)
        else:
            placed[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
        begin += sizes[key]
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                key = id(parameter)
                parameters.setdefault(key, nn.Parameter(placed[key], requires_grad=False))
                module._parameters[name] = parameters[key]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = placed[id(buffer)]
    return model
