"""A base on disk: which files hold which of its tensors, and what lies beside them."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import hub
from ..errors import InvalidInput
from ..extras import needed
from ..kernels.segments import FLOATS
from ..models.peft.files import CONFIG as ADAPTER_CONFIG
from ..models.peft.files import PICKLED as ADAPTER_PICKLED
from ..models.peft.files import same_bits
from ..stream.buckets import dtype_name
from .chunks import Buffer, Rows, Take
from .format import Stored, as_bytes, read_header, read_into

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_OTHERS = (".h5", ".msgpack", ".gguf", ".ot", ".onnx", ".onnx_data", ".ckpt", ".tflite", ".pdparams")
"""Endings of files that hold weights in other formats; they are not taken along."""
_MODELS = re.compile(
    r"(model|pytorch_model|openvino_\w+|diffusion_pytorch_model|consolidated|adapter_model|flax_model|tf_model|optimi[sz]er|"
    r"scheduler|scaler|rng_state|training_args|random_states)([-_.].*)?\.(safetensors|bin|xml|pt|pth|npz)"
)
"""How transformers names weights, Llama's and Mistral's authors theirs, and trainers what they keep."""
_TENSORS = (".safetensors", ".bin", ".pt", ".pth")
_NOT_ALONG = ("README.md", "trainer_state.json", ADAPTER_CONFIG)
_FOLDERS_ALONG = ("additional_chat_templates",)
_PARTS = "modules.json"
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.py", "*.tiktoken", "LICENSE*"]
_WANTED += ["NOTICE*", "USE_POLICY*", ADAPTER_PICKLED, "*.spm", "*.codes", "*_Dense/pytorch_model.bin"]
_WANTED += ["non_lora_*.bin"]
_DATA = ["*.pt", "*.npz", "*.ttf"]
"""What models read beside their weights; adapters' repositories have optimizers under such names."""
_PICKLES = ["pytorch_model*.bin"]
"""Weights of a repository that has no others."""


@dataclass(eq=False)
class Checkpoint:
    """A base in Hugging Face's layout.

    Args:
        tensors: by name.
        files: for each of its weight files, under the name that a safetensors file has for it, the names of its
            tensors, in order.
        metadata: of the safetensors files.
        index: what its index says beside the map of names; None where there is no index.
        notes: what may be worth a look.
        packed: how weights of it are quantised that go along as they lie, in words; "" where none are.
    """

    folder: Path
    tensors: Mapping[str, Stored]
    files: Mapping[str, tuple[str, ...]]
    metadata: Mapping[str, str]
    index: Mapping[str, Any] | None
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    packed: str = ""
    _pickled: Mapping[str, Tensor] = field(default_factory=dict)
    _open: dict[Path, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(stored.nbytes for stored in self.tensors.values())

    def read(self, name: str, begin: int, into: Tensor) -> None:
        """Fill a contiguous tensor on the CPU with the bytes of one of the base's tensors from number `begin` on."""
        stored = self.tensors[name]
        if name in self._pickled:
            flat = self._pickled[name].detach().reshape(-1).view(torch.uint8)
            there = into.view(-1).view(torch.uint8)
            there.copy_(flat[begin : begin + there.numel()])
            return
        with readable(stored.file):
            if stored.file not in self._open:
                self._open[stored.file] = os.open(stored.file, os.O_RDONLY)
            read_into(self._open[stored.file], stored.begin + begin, as_bytes(into), f"{stored.file}: {name}")

    def chunk(self, name: str, rows: Rows, take: Take) -> Buffer:
        """Return rows of one of the base's tensors, in a buffer.

        Args:
            take: gives memory for a shape and dtype.
        """
        stored = self.tensors[name]
        shape = (rows.end - rows.begin, *stored.shape[1:]) if stored.shape else ()
        buffer = take(shape, stored.dtype)
        each = stored.nbytes // stored.shape[0] if stored.shape else 0
        self.read(name, rows.begin * each, buffer.tensor)
        return buffer

    def kept(self, name: str) -> torch.dtype:
        """Return the dtype that one of its tensors has in what is made of the base, unless another one is asked for."""
        return self.tensors[name].dtype

    def turn(self, names: Collection[str]) -> None:
        """Note which weights are those of transformers' Conv1D, which quantised bases hold transposed."""

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def along(self) -> Iterator[Path]:
        """Yield the files that go with the weights, relative to the folder: tokenizer, generation config, templates,
        code, licence, data that the model reads beside its weights (Qwen2.5-Omni's speakers), what
        sentence-transformers keeps in folders; not the weights, config.json, the index, README and what a trainer
        keeps."""
        parts = _parts(self.folder / _PARTS)
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(".") or path.name in _NOT_ALONG or path.name == CONFIG:
                continue
            weights = self._is_weights(path)
            if path.is_symlink() and not path.exists() and not weights:
                raise InvalidInput(f"{path} is a link that leads nowhere: fetch the base again, or remove it")
            if path.is_file() and not weights:
                yield Path(path.name)
            elif path.is_dir() and (path.name in _FOLDERS_ALONG or path.name in parts):
                yield from (Path(path.name, inner.name) for inner in sorted(path.iterdir()) if inner.is_file())

    def _is_weights(self, path: Path) -> bool:
        """Return True if a file holds weights of the model, by its name, the index, or the names of tensors in it."""
        name = path.name
        if name.endswith((*_OTHERS, ".index.json")) or _MODELS.fullmatch(name):
            return True
        if not name.endswith(_TENSORS) or not path.is_file():
            return False
        lying = self._lying()
        return any(stored.file.name == name for stored in lying.values()) or not _names_in(path).isdisjoint(lying)

    def _lying(self) -> Mapping[str, Stored]:
        return self.tensors

    @property
    def dtype(self) -> torch.dtype:
        """In which its floating-point tensors can all be held."""
        floats = {dtype for name in self.tensors if (dtype := self.kept(name)) in FLOATS}
        return floats.pop() if len(floats) == 1 else torch.float32


def _names_in(path: Path) -> set[str]:
    """Return the names of the tensors in a file; none where it holds something else."""
    try:
        if path.suffix == ".safetensors":
            return {stored.name for stored in read_header(path).tensors}
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return set(loaded) if isinstance(loaded, dict) else set()
    except Exception:  # objects of somebody's own: no weights, as a file without an index is not read as such
        return set()


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raise an error that names the file where the system fails to read it."""
    try:
        yield
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error


def find(named: str | Path, what: str) -> Path:
    """Return the folder of a model or adapter: a folder, or the name of a repository, which is fetched, or found in the
    cache.

    Args:
        named: as the user says it.
        what: the argument, for errors.

    Raises:
        InvalidInput: it is neither, or cannot be fetched.
        MissingExtra: huggingface_hub is not installed, and it is no folder.
    """
    folder = Path(named).expanduser()
    with readable(folder):
        there, taken = folder.is_dir(), folder.exists()
    if there:
        return folder
    if taken:
        raise InvalidInput(f"{what} {str(named)!r} is a file; expected a folder, or the name of a repository")
    name = str(named)
    if not hub.is_name(name):
        raise InvalidInput(
            f"{what} {name!r}: there is no such folder here, and it is no name of a repository (owner/name)"
        )
    why = f"{what} {name!r} is no folder here; to fetch a repository takes huggingface_hub"
    with needed(why, "'lora-merge[peft]'", "huggingface_hub"):
        from huggingface_hub import snapshot_download
    cached = not hub.answers(what, name)
    try:
        wanted = [*_WANTED, *_DATA] if what == "base" else _WANTED
        folder = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=cached))
        if what == "base" and not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*wanted, *_PICKLES], local_files_only=cached))
        return folder
    except Exception as error:
        begin = f"{what} {name!r}: there is no such folder here"
        if cached:
            raise InvalidInput(f"{begin}; {hub.absent()}") from error
        text = str(error).strip().splitlines()
        raise InvalidInput(
            f"{begin}, and the repository cannot be fetched ({type(error).__name__}{': ' + text[0] if text else ''}); "
            "pass a folder, or fetch it where there is a network"
        ) from error


def open_checkpoint(folder: Path) -> Checkpoint:
    """Look at what lies in a base's files, codes of a quantised one among it: names, dtypes, shapes and places of the
    tensors; none is read.

    Raises:
        InvalidInput: it has no weights or no config.json, a file is missing or cut short, or its index names tensors
            that are not there; says which.
    """
    config = json_of(folder / CONFIG, "as every model of transformers has")
    for single, named, pickles in ((SINGLE, INDEX, False), (_PICKLED, _PICKLED_INDEX, True)):
        if (folder / single).is_file():
            found = Checkpoint(folder=folder, config=config, **_files(folder, [single], None, pickles=pickles))
            if (folder / named).is_file():
                _check_shards_beside(found, named, pickles)
            return found
        if (folder / named).is_file():
            return Checkpoint(folder=folder, config=config, **_sharded(folder, named, pickles))
    raise InvalidInput(
        f"{folder} holds no weights: expected {SINGLE}, {INDEX} with its shards, or {_PICKLED} there"
        f"{_told_adapter(folder)}"
    )


def holds_weights(folder: Path) -> bool:
    """Return True if a folder has the files that a base's weights are in, or their index."""
    return any((folder / name).is_file() for name in (SINGLE, INDEX, _PICKLED, _PICKLED_INDEX))


def _parts(file: Path) -> set[str]:
    """Return the folders of what a model of sentence-transformers computes after its transformer: pooling, dense
    layers."""
    try:
        return {str(part["path"]) for part in json.loads(file.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError, KeyError):  # there is none
        return set()


def _told_adapter(folder: Path) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        return "; it holds an adapter: the base comes first, then the adapters"
    return ""


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return a config that says of another dtype, also of the model's parts (text_config) where it does."""
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]
    said = {**config, **dict.fromkeys(keys, dtype_name(dtype))}
    for key, part in said.items():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part):
            said[key] = with_dtype(part, dtype)
    return said


def json_of(file: Path, why: str = "") -> dict[str, Any]:
    """Return what a file of JSON says.

    Args:
        why: it is expected, for errors.

    Raises:
        InvalidInput: it is not there, or no object of JSON.
    """
    if not file.is_file():
        raise InvalidInput(f"{file.parent} holds no {file.name}{f', {why}' if why else ''}{_told_adapter(file.parent)}")
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InvalidInput(f"{file} cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise InvalidInput(f"{file} must hold a JSON object, got a {type(said).__name__}")
    return said


def _named(file: Path, index: Mapping[str, Any]) -> list[str]:
    """Return the files that an index names. They lie beside it: a name that leads elsewhere would have the result,
    which has the same names, written there too."""
    names = index.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise InvalidInput(f"{file} has no weight_map, the file of each tensor by its name; fetch the base again")
    found = list(dict.fromkeys(names.values()))
    strange = next((name for name in found if Path(name).name != name or name.startswith(".")), None)
    if strange is not None:
        raise InvalidInput(f"{file} says that weights are in {strange!r}: expected names of files beside it, no paths")
    return found


def _files(folder: Path, names: list[str], index: Mapping[str, Any] | None, *, pickles: bool) -> dict[str, Any]:
    """Return what the files of a base hold, and what its index says; the arguments of `Checkpoint`."""
    placed = (index or {}).get("weight_map", {})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InvalidInput(
            f"{folder}: {missing[0]} is missing ({len(missing)} of {len(names)} files), which the index says holds "
            f"{sum(file in missing for file in placed.values())} tensors; fetch the base again"
        )
    tensors: dict[str, Stored] = {}
    pickled: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for file in names:
        held = _pickled(folder / file) if pickles else {}
        if pickles:
            found = [Stored(name, value.dtype, tuple(value.shape), folder / file, 0) for name, value in held.items()]
        else:
            with readable(folder / file):
                header = read_header(folder / file)
            found = list(header.tensors)
            metadata |= header.metadata
        for stored in found:
            first = tensors.get(stored.name)
            if first is not None and not same_bits(_mapped(first, pickled), _mapped(stored, held)):
                raise InvalidInput(
                    f"{folder}: {stored.name} is in {first.file.name} and, with other bits, in {file}: the checkpoint "
                    "is broken; download or save it again"
                )
            if first is None or placed.get(stored.name) == file:
                tensors[stored.name] = stored
        pickled |= held
    inside: dict[str, list[str]] = {file: [] for file in names}
    for name, stored in tensors.items():
        inside[stored.file.name].append(name)
    if pickles:  # transformers' own names for the same shards in the other format
        inside = {
            file.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors": its
            for file, its in inside.items()
        }
    absent = sorted(name for name, file in placed.items() if name not in tensors or tensors[name].file.name != file)
    if absent:
        other = tensors.get(absent[0])
        raise InvalidInput(
            f"{folder}: the index says that {absent[0]} is in {placed[absent[0]]}, which does not hold it"
            f"{f'; {other.file.name} does' if other else ''} ({len(absent)} such tensors): index and files are not of "
            "one checkpoint; fetch the base again"
        )
    said = None if index is None else {key: value for key, value in index.items() if key != "weight_map"}
    files = {file: tuple(its) for file, its in inside.items()}
    known = {"tensors": tensors, "files": files, "metadata": metadata or {"format": "pt"}}
    return {**known, "index": said, "_pickled": pickled}


def _sharded(folder: Path, named: str, pickles: bool) -> dict[str, Any]:
    index = json_of(folder / named)
    return _files(folder, _named(folder / named, index), index, pickles=pickles)


def _check_shards_beside(base: Checkpoint, named: str, pickles: bool) -> None:
    """Raise `InvalidInput` if shards beside a base's one file are of another model: transformers reads the file, vLLM
    the shards."""
    try:
        other = _sharded(base.folder, named, pickles)
    except InvalidInput:  # what is left of some
        return
    for name, stored in other["tensors"].items():
        mine = base.tensors.get(name)
        if mine and not same_bits(_mapped(mine, base._pickled), _mapped(stored, other["_pickled"])):
            raise InvalidInput(
                f"{base.folder}: {name} is in {mine.file.name} and, with other bits, in {stored.file.name}, which "
                f"{named} names: two models were saved there; move the files out of the folder that are not meant"
            )


def _mapped(stored: Stored, pickled: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor as it lies in its file; what is not read takes no memory.

    Args:
        pickled: the tensors of its file, if that is of `torch.save`.
    """
    if stored.name in pickled:
        return pickled[stored.name]
    with readable(stored.file), stored.file.open("rb") as opened:
        memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # read-only memory would have torch warn
    count = prod(stored.shape)
    if not count:
        return torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
    return torch.frombuffer(memory, dtype=stored.dtype, count=count, offset=stored.begin).view(stored.shape)


def _pickled(file: Path) -> dict[str, Tensor]:
    """Open a file of `torch.save`, mapped: no code in it is run, and what is not read takes no memory."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise InvalidInput(
            f"{file} cannot be read as plain tensors ({type(error).__name__}: {text[0] if text else ''}); "
            "convert the base to safetensors with transformers' save_pretrained"
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        raise InvalidInput(f"{file} holds a {type(loaded).__name__}, expected a state dict: tensors by their names")
    return {name: value.contiguous() for name, value in loaded.items() if isinstance(value, Tensor)}
