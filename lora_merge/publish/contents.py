"""What a version holds of a PEFT model: its configuration, and its tensors as `save_pretrained` names them, each where
its ranks have it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InvalidInput
from ..extras import needed
from ..models.pausing import training_of
from ..models.peft.files import TENSORS
from ..models.peft.folder import all_finite, check_kind
from ..models.peft.layer import PARAMETER, PEFT_MODEL, TUNER_LAYER
from ..names import lineage, path_of
from ..saving.format import as_bytes, make_header, write_from
from ..shards import Box, Shard
from ..shards.exchange import Exchange
from ..shards.layout import Layout
from ..shards.owners import divide
from ..shards.ranks import Ranks
from ..stream.buckets import Meta

_LEFT_OUT = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of names of modules that `state_dict` leaves out."""


class Place(NamedTuple):
    """Where a model has a tensor."""

    owner: nn.Module
    attribute: str


class Contents:
    """Reads what a version holds of a model.

    Args:
        model: a `PeftModel`, plain, under FSDP2, FSDP1 or ZeRO-3, or something that wraps one.

    Raises:
        InvalidInput: there is no `PeftModel` in it.
        MissingExtra: peft is not installed.
    """

    def __init__(self, model: Any) -> None:
        with needed("Publisher writes PEFT's format", "'lora-merge[publish]'", "peft"):
            import peft  # noqa: F401
        self._model = model
        found = [m for m in model.modules() if PEFT_MODEL in lineage(type(m))] if isinstance(model, nn.Module) else []
        if not found:
            raise InvalidInput(f"model must be a PeftModel, or something around one; got {type(model).__name__}")
        self._peft: Any = found[0]
        self._known: tuple[Any, dict[str, Place]] | None = None

    def config(self) -> Any:
        """Return PEFT's configuration of the adapter, as it is saved.

        Raises:
            InvalidInput: not one adapter acts, or the configuration does not say what the layers do.
            UnsupportedAdapter: the adapter belongs to another base than the one that is loaded, or is no LoRA.
        """
        name = self._adapter()
        config = copy.copy(self._peft.peft_config[name])
        config.inference_mode = True
        config.base_model_name_or_path = self.base_name() or None
        if config.task_type is None:  # as `save_pretrained`, for `AutoPeftModel`
            library, _, kind = path_of(type(self._peft.get_base_model())).rpartition(".")
            config.auto_mapping = {"base_model_class": kind, "parent_library": library}
        check_kind("the model", {"peft_type": config.peft_type.value, **_known_of(config)})
        self._check_scalings(config, name)
        return config

    def base_name(self) -> str:
        """Return the folder or hub name of the base; "" where neither PEFT nor transformers know it."""
        said = getattr(self._peft.peft_config[self._adapter()], "base_model_name_or_path", None)
        return str(said or getattr(getattr(self._peft, "config", None), "name_or_path", None) or "")

    def tensors(self) -> tuple[dict[str, Shard], Ranks]:
        """Return the adapter's tensors by PEFT's names, in their order, and the ranks that hold them together.

        Raises:
            InvalidInput: something is trained that the format does not hold; what `Layout` raises.
        """
        layout = Layout(self._model)
        layout.check_idle()
        layout.reshard()
        places = self._places(layout)
        self._check_trained(layout, places)
        found: dict[str, Shard] = {}
        for name, place in sorted(places.items()):
            tensor = place.owner._buffers.get(place.attribute)
            shard = layout.of(name, *place) if tensor is None else layout.shard(name, tensor)
            assert shard is not None, name
            found[name] = shard
        return found, layout.ranks()

    def _adapter(self) -> str:
        training = training_of(self._model)
        if training is not None and training.rounding != "nearest":
            raise InvalidInput(
                f"train_merged(model) trains with rounding={training.rounding!r}, and engines round what is published "
                "to nearest: that would be another policy. Push with VllmSync(rounding=...), or train with nearest"
            )
        active = list(self._peft.active_adapters)
        if len(active) != 1:
            raise InvalidInput(
                f"a version holds one adapter, and {len(active)} are active ({active}): set_adapter() one"
            )
        return str(active[0])

    def _places(self, layout: Layout) -> dict[str, Place]:
        """Return where the tensors are, by PEFT's names. PEFT says which they are, of a state dict without values: with
        them it would be gathered."""
        from peft import get_peft_model_state_dict

        name, there = self._adapter(), dict(_places_in(self._peft, layout))
        if self._known is None or self._known[0] != (name, list(there)):
            # PEFT looks for the base's configuration, on the hub, too: once is enough.
            stand_ins = {key: torch.empty(0, device="meta") for key in there}
            of = {id(stand_in): key for key, stand_in in stand_ins.items()}
            with _named_plainly(self._peft):
                chosen = get_peft_model_state_dict(self._peft, stand_ins, adapter_name=name)
            keys = {key.replace("._orig_mod.", "."): of[id(stand_in)] for key, stand_in in chosen.items()}
            self._known = (name, list(there)), keys  # type: ignore[assignment]
        assert self._known is not None
        return {key: there[path] for key, path in self._known[1].items()}  # type: ignore[index]

    def _check_trained(self, layout: Layout, places: dict[str, Place]) -> None:
        """Raise `InvalidInput` where something is trained that PEFT does not save."""
        saved = {(id(place.owner), place.attribute) for place in places.values()}
        tensors = {id(getattr(place.owner, place.attribute, None)) for place in places.values()}
        for path, module in self._peft.named_modules():
            name = _plain(path)
            for key, parameter in layout.parameters(module):
                if parameter.requires_grad and (id(module), key) not in saved and id(parameter) not in tensors:
                    raise InvalidInput(
                        f"{name}.{key} is trained (requires_grad), and PEFT does not save it with the active adapter: "
                        "freeze it, name it in modules_to_save, or push with VllmSync"
                    )

    def _check_scalings(self, config: Any, adapter: str) -> None:
        """Raise `InvalidInput` where a layer scales its adapter in another way than the configuration says."""
        from peft.utils.other import get_pattern_key

        ranks, alphas = getattr(config, "rank_pattern", None) or {}, getattr(config, "alpha_pattern", None) or {}
        for path, layer in self._peft.named_modules():
            if TUNER_LAYER not in lineage(type(layer)) or adapter not in getattr(layer, "scaling", {}):
                continue
            rank, alpha = layer.r[adapter], layer.lora_alpha[adapter]
            scaling = alpha / math.sqrt(rank) if config.use_rslora else alpha / rank
            name = _plain(path).removeprefix("base_model.model.")
            if layer.disable_adapters or adapter not in layer.active_adapters:
                raise InvalidInput(
                    f"{name} computes without its adapter {adapter!r}, and engines would serve it: leave "
                    f"disable_adapter(), or call enable_adapter_layers() and set_adapter({adapter!r})"
                )
            said = rank, alpha
            if PARAMETER not in lineage(type(layer)):
                said = (
                    ranks.get(get_pattern_key(ranks.keys(), name), config.r),
                    alphas.get(get_pattern_key(alphas.keys(), name), config.lora_alpha),
                )
            if layer.scaling[adapter] != scaling or said != (rank, alpha):
                raise InvalidInput(
                    f"{name} has rank {rank} and scales by {layer.scaling[adapter]}, and the adapter's configuration "
                    f"says rank {said[0]} and lora_alpha {said[1]}: set_scale or scale_layer has changed it, which "
                    "PEFT's format does not hold. Set it back, or put it into alpha_pattern"
                )


class TensorFile:
    """The safetensors file of a version, into which each rank writes what it owns.

    Args:
        shards: of its tensors, by name, in order.
        ranks: that hold them together; making it is collective over them.
    """

    def __init__(self, shards: dict[str, Shard], ranks: Ranks) -> None:
        self._shards, self._ranks = shards, ranks
        self._owned = divide(list(shards), list(shards.values()), ranks)
        metas = [Meta(name, shard.dtype, shard.shape) for name, shard in shards.items()]
        self._header, self._places = make_header(Path(TENSORS), metas, {"format": "pt"})
        self.nbytes = len(self._header) + sum(meta.nbytes for meta in metas)

    def begin(self, folder: Path) -> None:
        """Make the file, with its header and room for the tensors."""
        with (folder / TENSORS).open("xb") as file:
            file.write(self._header)
            file.truncate(self.nbytes)

    def write_own(self, folder: Path) -> None:
        """Write the boxes that this rank owns.

        Raises:
            InvalidInput: this rank does not see the file, or a tensor holds NaN or infinity.
        """
        mine = [(name, place, shard, owned[self._ranks.rank]) for name, place, shard, owned in self._each()]
        if not any(boxes for *_, boxes in mine):
            return
        try:
            file = (folder / TENSORS).open("r+b")
        except FileNotFoundError as error:
            raise InvalidInput(
                f"{folder} is not there on every rank: each writes what it owns of the adapter, so the store has to "
                "lie on a file system that all hosts share, or in an object store. (Or another trainer publishes into "
                "it, and has removed what was begun before its own versions.)"
            ) from error
        with file:
            for name, place, shard, boxes in mine:
                for box in boxes:
                    for start, (_, size), view in shard.views(box):  # Megatron's may be of several pieces
                        _write_box(file.fileno(), place.begin, shard, (start, size), view, name)

    def write_all(self, folder: Path | None) -> None:
        """Bring all tensors together, and write them on the rank that has a folder. Collective over the ranks."""
        shards = list(self._shards.values())
        if self._ranks.alone:
            if folder is not None:
                self.write_own(folder)
            return
        exchange = Exchange(list(self._shards), shards, self._ranks, shards[0].device)
        whole = exchange.run()
        exchange.wait()
        with self._ranks.vote("publish"):
            if folder is not None:
                with (folder / TENSORS).open("r+b") as file:
                    for (name, place, shard, _), tensor in zip(self._each(), whole, strict=True):
                        _write_box(file.fileno(), place.begin, shard, shard.box, tensor, name)
        exchange.release()

    def _each(self) -> Iterator[tuple[str, Any, Shard, Sequence[Sequence[Box]]]]:
        return zip(self._shards, self._places, self._shards.values(), self._owned, strict=True)


def _write_box(descriptor: int, begin: int, shard: Shard, box: Box, view: Tensor, name: str) -> None:
    """Write a box of a tensor where it belongs in a file that has the whole tensor from byte `begin` on.

    Raises:
        InvalidInput: the tensor, of this name, holds NaN or infinity.
    """
    start, size = box
    shape, item = shard.shape, shard.dtype.itemsize
    values = view.detach().cpu().contiguous()
    if not all_finite(values):
        raise InvalidInput(
            f"{name} holds NaN or infinity: the run has diverged, and engines refuse such a version. None was "
            "published; go back to a step before"
        )
    data = as_bytes(values)
    # Behind the last dimension that is cut, bytes follow one another.
    last = max((dim for dim in range(len(shape)) if size[dim] != shape[dim]), default=0)
    steps = [math.prod(shape[dim + 1 :]) * item for dim in range(len(shape))]
    run = math.prod(size[last:]) * item
    for number, index in enumerate(np.ndindex(*size[:last])):
        at = sum((s + i) * step for s, i, step in zip(start, (*index, *[0] * len(shape)), steps, strict=False))
        write_from(descriptor, begin + at, data[number * run : (number + 1) * run])


def _places_in(model: nn.Module, layout: Layout) -> Iterator[tuple[str, Place]]:
    """Yield what `model.state_dict()` would hold, under its names."""
    for path, module in model.named_modules(remove_duplicate=False):
        plain = _plain(path)
        buffers = [key for key in module._buffers if key not in module._non_persistent_buffers_set]
        for key in (*(key for key, _ in layout.parameters(module)), *buffers):
            yield f"{plain}.{key}" if plain else key, Place(module, key)


def _plain(path: str) -> str:
    return ".".join(part for part in path.split(".") if part not in _LEFT_OUT)


@contextmanager
def _named_plainly(model: nn.Module) -> Iterator[None]:
    """Have a model name its modules as `state_dict` does, under wrappers, too: PEFT compares the two."""
    names = model.named_modules

    def named_modules(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        return ((_plain(path), module) for path, module in names(*args, **kwargs))

    model.__dict__["named_modules"] = named_modules
    try:
        yield
    finally:
        del model.__dict__["named_modules"]


def _known_of(config: Any) -> dict[str, Any]:
    wanted = ("layer_replication", "init_lora_weights")
    return {key: getattr(config, key) for key in wanted if hasattr(config, key)}
