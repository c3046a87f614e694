"""Weights that lie in an adapter's folder beside the adapter, because the trainer trained them whole.

Such are ms-swift's `vit.safetensors` and `non_lora_trainables.bin` of LLaVA's family. They are taken where each tensor
has the name and the shape of a parameter of the base. A file of weights that is neither that nor known to be something
else is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from filecmp import cmp
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InvalidInput
from ...names import hf_name, lineage, named_tensors, own_parameters
from ..brought import bring
from .files import FILES, TENSORS, file_of, same_bits
from .layer import TUNER_LAYER

_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_STATE = re.compile(
    r"(optimi[sz]er|optim|scheduler|lr_scheduler|scaler|grad_scaler|sampler|dl_state|rng_state|random_states|"
    r"training_args|trainer_state|train_state|custom_checkpoint|zero_pp|bf16_zero_pp|mp_rank|tokenizer|vocab)",
    re.IGNORECASE,
)
"""How the names of files begin that trainers keep for themselves, or that hold no weights."""
_MODEL = re.compile(r"(model|pytorch_model|consolidated)([-.].*)?\.(safetensors|bin|pth)")
"""How whole models are called: their files belong together."""
_VALUE_HEAD = re.compile(r"(.*\.)?(v_head|value_head)\..*")
_FACTORS = "lora_"


@dataclass
class Beside:
    """What lies beside an adapter.

    Args:
        tensors: of the model, that the trainer trained whole, by the parameters' names.
        files: parameter's name -> the file.
        notes: what is left out, and why.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_beside(folder: Path, base: Path, model: nn.Module, held: Mapping[str, Tensor]) -> Beside:
    """Read the weights beside an adapter.

    Args:
        folder: of it.
        base: folder of the base, if it is one: trainers copy files from there that the model reads beside its weights.
        model: the adapter's layers on its base.
        held: tensors of the adapter's own file.

    Raises:
        InvalidInput: a file holds weights that have no place in the base, or of another shape; names both.
    """
    found = Beside()
    shapes = {t.name: tuple(t.tensor.shape) for t in named_tensors(model, own_parameters)}
    whole = {hf_name(key): tensor for key, tensor in held.items() if _FACTORS not in key}
    adapted = set(_adapted(model))
    for name, tensors in _files(folder, base, found.notes):
        own = {hf_name(key): tensor for key, tensor in tensors.items() if _FACTORS not in key}
        if not own:
            found.notes.append(f"{folder.name}: {name} holds factors of LoRA, too; those of {_own(folder)} are read")
        elif all(map(_VALUE_HEAD.fullmatch, own)):
            found.notes.append(
                f"{folder.name}: {name} holds a value head, which is no part of the base, and is not in the result; a "
                "reward model needs it"
            )
        elif _is_a_model(own, shapes, adapted) or (_MODEL.fullmatch(name) and (folder / "config.json").is_file()):
            found.notes.append(
                f"{folder.name}: {name} holds a whole model, which is not read: the result is the base with the adapter"
            )
        else:
            _take(folder, name, own, shapes, adapted, whole, found)
    return found


def _take(
    folder: Path,
    name: str,
    own: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    adapted: set[str],
    whole: Mapping[str, Tensor],
    found: Beside,
) -> None:
    leave = (
        f"load the model with the trainer that wrote it, put the adapter on, and use lora_merge.save_merged; if {name} "
        "is no part of the model, move it out of the folder"
    )
    for key, tensor in own.items():
        if key not in shapes or key in adapted:
            why = "the adapter changes, too" if key in adapted else "has no place in the base"
            raise InvalidInput(f"{folder}: {name} holds weights beside the adapter, and {key} of them {why}: {leave}")
        if tuple(tensor.shape) != shapes[key]:
            raise InvalidInput(
                f"{folder}: {name} holds {key} as {list(tensor.shape)}, and the base has {list(shapes[key])}: {leave}"
            )
        before = found.tensors.get(key, whole.get(key))
        if before is not None and not same_bits(before, tensor):
            first = found.files.get(key) or _own(folder)
            raise InvalidInput(
                f"{folder}: {key} is in {first} and, with other bits, in {name}: move the one out of the folder that "
                "is not meant"
            )
        found.tensors[key], found.files[key] = tensor, name


def _own(folder: Path) -> str:
    """Return the name of the file of the adapter's own tensors."""
    file = file_of(folder)
    return TENSORS if file is None else file.name


def put(model: nn.Module, beside: Beside) -> None:
    """Give the base's tensors the values that lie beside the adapter; parameters among them require a gradient, as in
    training."""
    with torch.no_grad():
        for t in named_tensors(model, own_parameters):
            if t.name in beside.tensors:
                t.tensor.copy_(beside.tensors[t.name])
    bring(model, named_tensors(model, own_parameters), beside.tensors.keys())


def _adapted(model: nn.Module) -> Iterator[str]:
    """Yield the names of the parameters that the adapter's factors change."""
    for name, module in model.named_modules():
        if TUNER_LAYER in lineage(type(module)):
            yield f"{hf_name(name)}.{getattr(module, 'parameter_name', 'weight')}"


def _is_a_model(own: Mapping[str, Tensor], shapes: Mapping[str, Any], adapted: set[str]) -> bool:
    """Return True if a file holds all weights that the adapter changes: trainers do not train these whole."""
    return bool(adapted & shapes.keys()) and adapted & shapes.keys() <= own.keys()


def _files(folder: Path, base: Path, notes: list[str]) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    """Yield the files of tensors, by name; those of one model together."""
    together: dict[str, Tensor] = {}
    first = ""  # of the files of a whole model
    for path in sorted(folder.iterdir()):
        name = path.name
        if name.startswith(".") or name in FILES or not name.endswith(_ENDINGS) or not path.is_file():
            continue
        if _STATE.match(name) or ((base / name).is_file() and cmp(path, base / name, shallow=False)):
            continue
        tensors = _tensors(path)
        if tensors is None:
            notes.append(f"{folder.name}: {name} cannot be read as tensors by their names, and is left out")
        elif _MODEL.fullmatch(name):
            first = first or name
            if twice := next((k for k in together.keys() & tensors if not same_bits(together[k], tensors[k])), None):
                raise InvalidInput(
                    f"{folder}: {twice} is in {name} and, with other bits, in another file of the same model: move "
                    "the files out of the folder that are not meant"
                )
            together |= tensors
        elif tensors:
            yield name, tensors
    if together:
        yield first, together


def _tensors(path: Path) -> dict[str, Tensor] | None:
    """Return the tensors in a file, mapped; none where it holds something else; None where that cannot be told."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path, device="cpu")
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:
        return None
    inside = loaded.get("state_dict", loaded) if isinstance(loaded, dict) else {}
    if not isinstance(inside, dict):
        return {}
    found = {key: value for key, value in inside.items() if isinstance(key, str) and isinstance(value, Tensor)}
    return None if not found and any(isinstance(value, dict) for value in inside.values()) else found
