"""An adapter that PEFT has saved, read by PEFT's own code onto a base without values.

Merging where the base lies asks of the base here no more than names, shapes and dtypes. Its parameters have addresses
of their own, by which tied ones are told from others, in memory that nobody has touched: reading gives zeros and takes
no memory, whatever the size of the model.
"""

from __future__ import annotations

import json
import mmap
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ... import hub
from ...errors import InvalidInput, LoraMergeError, UnsupportedAdapter
from ...extras import needed
from ...names import hf_name, named_tensors, own_parameters
from ..brought import bring, brought
from .beside import put, read_beside
from .experts import as_laid_out_here, scale_as_trained
from .files import CONFIG, TENSORS, file_of
from .matching import advice, match
from .read import ADAPTER_TYPES
from .tokens import TRAINED
from .tying import tie_again

_ALIGNED = 64
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python names only from 3.13 on."""
_OWN = ("lora_", TRAINED)
"""What names of an adapter's own tensors contain, magnitudes among them."""
_BASE_AS_IT_IS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""What `init_lora_weights` says of adapters that are trained on the base as it is; others begin with another one."""
_AGAIN = "save it again with the PEFT that trained it"
_LEFT_OUT = (
    "PEFT before 0.21 leaves the biases out of what it saves under bias='lora_only'. While the trained model is "
    "loaded, save it with lora_merge.save_merged"
)
_CONVERTED = ("pissa", "olora", "corda", "lora_ga")
"""How `init_lora_weights` begins where PEFT can make an adapter of the base before."""
_notes: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()
_WIDEST = (
    *("AutoModelForTextToWaveform", "AutoModelForMultimodalLM", "AutoModelForImageTextToText"),
    *("AutoModelForCausalLM", "AutoModelForSeq2SeqLM"),
)


def read_folder(folder: str | Path, base: str | Path | None, dtype: torch.dtype, *, values: bool = False) -> nn.Module:
    """Read the adapter in a folder onto its base, as PEFT loads it: a `PeftModel` on the CPU.

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
    with needed("reading an adapter takes PEFT and transformers", "'lora-merge[peft]'", "peft", "transformers"):
        import transformers  # noqa: F401
        from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict
    folder = Path(folder)
    said = config_of(folder)
    check_kind(folder, said)
    file = file_of(folder)
    if file is None:
        raise InvalidInput(f"{folder} holds no {TENSORS}, which the adapter's tensors are in; save or fetch it again")
    try:
        config: Any = PeftConfig.from_pretrained(str(folder))
    except Exception as error:
        raise InvalidInput(
            f"{folder / CONFIG} cannot be read by the PEFT here ({type(error).__name__}: {error}); save the "
            "adapter again"
        ) from error
    _check_known(folder, said, config)
    _check_alpha(folder, said)
    _check_patterns(folder, said)
    named = base if base is not None else config.base_model_name_or_path
    if not named:
        raise InvalidInput(f"{folder / CONFIG} names no base model: pass base=, the engine's model")
    try:
        with file.open("rb"):
            pass
        held = load_peft_weights(str(folder), device="cpu")
    except OSError as error:
        raise InvalidInput(f"{folder}: the file of its tensors cannot be read ({error.strerror or error})") from error
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise InvalidInput(
            f"{folder}: its tensors cannot be read ({type(error).__name__}: {reason}): "
            "the file is cut short, or something else (a Git LFS pointer?); save or fetch the adapter again"
        ) from error
    _check_finite(folder, held)
    revision = None if base is not None else config.revision
    model = _base(str(named), dtype, values, given=base is not None, revision=revision)
    matched = match(folder, model, held, config)
    view, held = matched.view, matched.tensors
    config.init_lora_weights = True  # all values come from the file; MiCA's would be taken off the base's
    config.inference_mode = False  # then what it trains requires a gradient, as in training
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what PEFT warns of is an error below
            _check_sizes(folder, view.root, held)
            adapted: Any = PeftModel(view.root, config)
            held = as_laid_out_here(folder, said, adapted, held)
            problems: Any = set_peft_model_state_dict(adapted, dict(held), "default")
            scale_as_trained(folder, said, adapted, held)
    except LoraMergeError:
        raise
    except Exception as error:
        first = str(error).strip().splitlines()
        reason = "; ".join(line.strip() for line in first[:3])
        raise InvalidInput(
            f"{folder}: the adapter does not fit the base {named} ({type(error).__name__}: {reason}); "
            f"{advice(matched, said, given=base is not None)}"
        ) from error
    missing = _missing(adapted, set(problems.missing_keys))
    if lacking := [*missing, *problems.unexpected_keys]:
        raise InvalidInput(
            f"{folder}: the adapter does not fit the base {named}: {len(missing)} of its tensors are not "
            f"in the file, {len(problems.unexpected_keys)} of the file's have no place, {lacking[0]} for one; "
            f"{advice(matched, said, given=base is not None)}"
        )
    _mark_whole(folder, adapted, {hf_name(key) for key in held if not _own(key)}, getattr(config, "bias", "none"))
    view.give_back(model)
    adapted.base_model.model = model  # the whole base, of which the view is a part
    beside = read_beside(folder, Path(str(named)), adapted, held)
    _check_finite(folder, beside.tensors)
    put(adapted, beside)
    part = [] if view.root is model else [f"{folder.name} was trained on {view.named()} of {type(model).__name__}"]
    _notes[adapted] = (*part, *beside.notes)
    tie_again(adapted)
    return adapted.eval()


def _missing(adapted: nn.Module, keys: set[str]) -> list[str]:
    """List the tensors of an adapter that its file did not bring, but for those that are the same as one that came: of
    tied weights PEFT saves one.

    Args:
        keys: all of the model that did not come.
    """
    there = dict(adapted.named_parameters(remove_duplicate=False))
    came = {id(parameter) for name, parameter in there.items() if name not in keys}
    own = [key for key in sorted(keys) if _own(key) and ".default" in key]
    return [key for key in own if id(there.get(key)) not in came]


def _own(key: str) -> bool:
    """Return True if a tensor is the adapter's own, and none of the base's."""
    return any(part in key for part in _OWN)


def notes_of(model: nn.Module) -> tuple[str, ...]:
    """List what `read_folder` has left out of an adapter's folder, and why."""
    return _notes.get(model, ())


def all_finite(tensor: Tensor) -> bool:
    """Return False if a tensor of an adapter holds NaN or infinity, in float32, in which it is merged."""
    eight = tensor.itemsize == 1 and tensor.is_floating_point()  # which `isfinite` does not know
    seen = tensor.float() if eight or tensor.dtype == torch.float64 else tensor
    return not seen.is_floating_point() or bool(torch.isfinite(seen).all())


def _check_finite(folder: Path, held: Mapping[str, Tensor]) -> None:
    """Raise where an adapter has numbers that no merged weight should have: its training has diverged."""
    for key, tensor in held.items():
        if _own(key) and not tensor.is_floating_point():
            raise InvalidInput(f"{folder}: {key} is {tensor.dtype}, expected floating-point numbers")
        if not all_finite(tensor):
            raise InvalidInput(
                f"{folder}: {key} holds NaN or infinity, which would be in every weight that it is merged into: take "
                "an earlier step of its training"
            )


def _check_sizes(folder: Path, model: nn.Module, held: Mapping[str, Tensor]) -> None:
    """Raise where an adapter brings a tensor whole in another size than the base has it: after
    `resize_token_embeddings` PEFT saves the embeddings along."""
    there = {t.name: t.tensor for t in named_tensors(model, own_parameters)}
    for key, tensor in held.items():
        mine = there.get(hf_name(key)) if not _own(key) else None
        if mine is not None and mine.shape != tensor.shape:
            raise InvalidInput(
                f"{folder}: the adapter brings {hf_name(key)} as {list(tensor.shape)}, and the base has "
                f"{list(mine.shape)}: it was trained after resize_token_embeddings, or on another base. Load the base, "
                f"call model.resize_token_embeddings({tensor.shape[0]}), put the adapter on with "
                "PeftModel.from_pretrained, and use lora_merge.save_merged"
            )


def _mark_whole(folder: Path, model: nn.Module, saved: set[str], bias: str) -> None:
    """Note what the folder holds whole, and let exactly these parameters of the base require a gradient.

    Args:
        saved: their names.
        bias: what the adapter's configuration says of biases.
    """
    there = list(named_tensors(model, own_parameters))
    if surplus := sorted(saved - {t.name for t in there}):
        raise InvalidInput(
            f"{folder}: {surplus[0]} is in the adapter's file, and its base has no such parameter; pass the base that "
            "it was trained on"
        )
    bring(model, there, saved)
    held = set(map(id, brought(model)))
    for t in there:
        if t.tensor.requires_grad and id(t.tensor) not in held:
            raise InvalidInput(
                f"{folder}: the adapter's configuration says that {t.name} was trained, and its file does not hold it: "
                f"{_LEFT_OUT if bias == 'lora_only' and t.attribute == 'bias' else _AGAIN}"
            )


def needs_values(folder: str | Path) -> bool:
    """Return True if what the adapter adds depends on the base's weights: DoRA's factors of rows do."""
    return bool(config_of(Path(folder)).get("use_dora"))


def config_of(folder: Path) -> dict[str, Any]:
    """Return what an adapter's configuration says."""
    if not (folder / CONFIG).is_file():
        raise InvalidInput(
            f"{folder} holds no adapter of PEFT's: expected {CONFIG} there, as save_pretrained writes it"
            f"{elsewhere(folder)}"
        )
    try:
        said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{folder / CONFIG} cannot be read: {error}; save the adapter again") from error
    if not isinstance(said, dict):
        raise InvalidInput(f"{folder / CONFIG} must hold a JSON object, got a {type(said).__name__}")
    return said


def elsewhere(folder: Path) -> str:
    """Return where a folder that holds no adapter has one: PEFT saves adapters of another name than "default" one
    folder down."""
    found = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    return f"; there is one in {folder / found[0]}" if found else ""


def _check_alpha(folder: Path, said: Mapping[str, Any]) -> None:
    """Refuse an adapter that by its configuration adds nothing: nobody trains one."""
    if said.get("lora_alpha") == 0 and not said.get("alpha_pattern"):
        raise InvalidInput(
            f"{folder / CONFIG} says lora_alpha=0, by which the adapter adds nothing: verl's model_merger writes that "
            "where it does not find the alpha (lora_train_meta.json); set it to the one of the training"
        )


def _check_patterns(folder: Path, said: Mapping[str, Any]) -> None:
    """Refuse names of modules that PEFT reads as regular expressions, and that are none."""
    for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        found = said.get(key)
        for pattern in [found] if isinstance(found, str) else found if isinstance(found, Mapping) else ():
            try:
                re.compile(pattern)
            except re.error as error:
                raise InvalidInput(
                    f"{folder / CONFIG} says {key}={pattern!r}, which is no regular expression ({error}): correct it "
                    "there, or save the adapter again"
                ) from error


def _check_known(folder: Path, said: Mapping[str, Any], config: Any) -> None:
    """Refuse what switches something on that this PEFT does not know: a flag, or the settings of something. Numbers and
    texts of their own do not; newer releases write them of what is off."""
    on = {key: value for key, value in said.items() if value is True or (isinstance(value, dict | list) and value)}
    if unknown := sorted(key for key in on if not hasattr(config, key)):
        raise UnsupportedAdapter(
            f"{folder}: {CONFIG} says {unknown[0]}={on[unknown[0]]!r}, which the PEFT here does not know: install the "
            "one that saved it"
        )


def check_kind(folder: object, said: Mapping[str, Any]) -> None:
    """Refuse, by what its configuration says, what no weight of its base can express."""
    kind = str(said.get("peft_type"))
    if kind not in ADAPTER_TYPES:
        raise UnsupportedAdapter(
            f"{folder}: an adapter of type {kind}; only LoRA adapters and trainable tokens can be merged here"
        )
    if said.get("layer_replication"):
        raise UnsupportedAdapter(
            f"{folder}: layer_replication: the adapter belongs to a model of more layers than its base has; load "
            "both with PEFT, and use save_merged"
        )
    begun = said.get("init_lora_weights", True)
    if begun not in _BASE_AS_IT_IS:
        raise UnsupportedAdapter(f"{folder}: init_lora_weights={begun!r} {_other_base(str(begun).lower())}")


def _other_base(begun: str) -> str:
    """Say what an initialisation does to the base, and what to do about it.

    Args:
        begun: what `init_lora_weights` says.
    """
    if begun.startswith(_CONVERTED):
        return (
            "changes the base that the adapter belongs to, and what it is to be merged into is the one before: save it "
            "again with path_initial_model_for_weight_conversion, which makes it a plain LoRA"
        )
    what = "changes" if begun == "loftq" else "is not known here, and may change"
    # PEFT converts LoftQ's with a warning, and what comes out belongs to a base that differs by what quantising lost.
    return (
        f"{what} the base that the adapter belongs to, and PEFT has no conversion that makes it an exact LoRA of the "
        "base before: while the trained model is loaded, save it with lora_merge.save_merged"
    )


def _base(name: str, dtype: torch.dtype, values: bool, given: bool, revision: str | None) -> nn.Module:
    """Return the base model, of the class that wrote its checkpoint."""
    import transformers

    whose = "base" if given else "the adapter's base_model_name_or_path"
    there = Path(name).exists()
    if not there and not hub.is_name(name):
        raise InvalidInput(
            f"{whose}: there is no folder {name!r} here, and it is no name of a repository (owner/name); pass base=, "
            "the base's folder or name"
        )
    cached = not there and not hub.answers("base", name)
    try:
        # `trust_remote_code=False` does not ask.
        options = {"trust_remote_code": False, "local_files_only": cached, "revision": revision or "main"}
        config = transformers.AutoConfig.from_pretrained(name, **options)
        cls = class_of(config)
        if values:
            loaded: nn.Module = cls.from_pretrained(name, dtype=dtype, **options)
            return loaded.requires_grad_(False)  # PEFT freezes only what it is put on
        with torch.device("meta"):
            model = cls.from_config(config, trust_remote_code=False) if hasattr(cls, "from_config") else cls(config)
    except Exception as error:
        reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
        if cached and isinstance(error, OSError):
            raise InvalidInput(f"{whose}: there is no folder {name!r} here; {hub.absent()}") from error
        raise InvalidInput(
            f"{whose}: {name!r} cannot be read as a model of transformers ({type(error).__name__}: "
            f"{reason}); pass base=, the base's folder or name. A model "
            "with code of its own: load it, put the adapter on with PeftModel.from_pretrained, and use "
            "lora_merge.save_merged"
        ) from error
    return _placed(model.to(dtype)).requires_grad_(False)


def class_of(config: Any) -> Any:
    """Return the class that wrote a base; where its config names one that transformers does not have (as Qwen2.5-Omni's
    does), transformers' own for such a config, the widest first."""
    import transformers

    written = next(iter(getattr(config, "architectures", None) or ()), "")
    if cls := getattr(transformers, written, None):
        return cls
    for kind in _WIDEST:
        found = getattr(getattr(transformers, kind, None), "_model_mapping", {}).get(type(config), None)
        if isinstance(found, type):
            return found
    return transformers.AutoModelForCausalLM


def _placed(model: nn.Module) -> nn.Module:
    """Move a model from the meta device to the CPU, into memory that nobody has touched."""
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
            placed[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
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
