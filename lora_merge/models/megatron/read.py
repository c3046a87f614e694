"""megatron-core: what this rank holds of every HF checkpoint tensor, and what the adapters add to it.

Nothing is copied or permuted: pieces are views of the live parameters, placed in coordinates of the HF tensor. So the
blocks of a fused QKV of grouped queries, the halves of gate and up, and the experts of a grouped weight are pieces like
any others, and de-interleaving is a matter of where they start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ...errors import InvalidInput, LoraMergeError, UnsupportedAdapter
from ...names import innermost, lineage, walk, wrapped
from ...shards import Shard
from ..delta import Factors
from .adapters import Half, Layer, Pair, Style, cut_of, style_of
from .conversion import ONE_LESS
from .groups import Groups, groups_of
from .layers import check_known, columns_of, cut_within, is_layer, is_mamba, text_of
from .names import Names, names_of
from .rows import CONCATENATED, HF, INTERLEAVED, Block, place, row_blocks

_GROUPED_MLP = "megatron.core.transformer.moe.experts.GroupedMLP"
_CONFIG = (
    "add_qkv_bias",
    "attention_output_gate",
    "experimental_attention_variant",
    "gated_linear_unit",
    "hidden_size",
    "kv_channels",
    "kv_lora_rank",
    "layernorm_zero_centered_gamma",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "mamba_head_dim",
    "mamba_num_groups",
    "mamba_num_heads",
    "mamba_state_dim",
    "moe_layer_freq",
    "multi_latent_attention",
    "num_attention_heads",
    "num_layers",
    "num_moe_experts",
    "num_query_groups",
    "q_lora_rank",
    "qk_layernorm",
    "softmax_type",
    "v_head_dim",
    "virtual_pipeline_model_parallel_size",
    "vocab_size",
    *INTERLEAVED,
)
"""What reading asks of a configuration."""
_EXPERT = re.compile(r"(.*mlp\.experts)\.(?:local_experts\.(\d+)\.)?(linear_fc[12]\.(?:weight|bias))(\d+)?")
_LANGUAGE = "language_model."
_VOCABULARY = {f"{at}.{kind}" for at in ("embedding.word_embeddings", "output_layer") for kind in ("weight", "bias")}


@dataclass(frozen=True, eq=False)
class Chunks:
    """A Megatron model together with what its configuration does not say; pass it wherever a model is asked for.

        with lora_merge.merged(lora_merge.megatron.Chunks(chunks, vocab_size=151936)):
            evaluate(chunks)

    Args:
        list: the GPTModel or MambaModel of every virtual stage of this rank, or the model with images around it, in any
            of Megatron's and PEFT's wrappers.
        vocab_size: rows of the checkpoint's embedding; see `read`.
        names: function from Megatron's parameter names to HF names; see `read`.
    """

    list: Sequence[nn.Module]
    vocab_size: int | None = None
    names: Names | None = None


@dataclass(frozen=True, slots=True, eq=False)
class MegatronModel:
    """What `read` found on this rank.

    Args:
        tensors: `(HF name, shard)` of every checkpoint tensor that is in a parameter of this rank; the shard has no
            pieces where the rank's part of a fused parameter has no row of it.
        deltas: HF name -> what the active adapters add to it; both factors in coordinates of the HF tensor. q, k and v
            share the shard of one lora_A, as do gate and up, and experts under one adapter.
        groups: see `Groups`.
        adapters: the adapter layers, active or not.
        parameters: HF name -> the live parameter that holds what is here of the tensor.
        tied: HF names of the embedding and of the head that is the same tensor; None where the head is its own.
        layers: global numbers of the transformer layers that are here, of `layer_count` in all stages.
    """

    tensors: list[tuple[str, Shard]]
    deltas: dict[str, tuple[Factors, ...]]
    adapters: tuple[nn.Module, ...]
    parameters: dict[str, Tensor]
    tied: tuple[str, str] | None
    groups: Groups
    layers: tuple[int, ...]
    layer_count: int


def is_megatron(model: object) -> bool:
    """Return True if a model (or the first of a list of chunks) is a megatron-core GPTModel or MambaModel in any
    wrappers, or has one as its `language_model`."""
    chunks = model.list if isinstance(model, Chunks) else model
    first = chunks[0] if isinstance(chunks, Sequence) and len(chunks) else chunks
    return isinstance(first, nn.Module) and text_of(first) is not None


def read(
    chunks: Sequence[nn.Module] | nn.Module, *, vocab_size: int | None = None, names: Names | None = None
) -> MegatronModel:
    """List which checkpoint tensors this rank's chunks of a model hold, and what adapters add to them; no collective.

        found = lora_merge.megatron.read(chunks)
        print(found.deltas.keys())

    Args:
        chunks: the GPTModel or MambaModel of every virtual stage of this rank, or the model with images around it, in
            any of Megatron's and PEFT's wrappers.
        vocab_size: rows of the checkpoint's embedding; default: the configuration's `vocab_size` where it has one
            (Megatron-Bridge's providers do), else the model's, padding and all.
        names: function from Megatron's parameter names to HF names, such as `bridge_names` makes; default: by the
            configuration, see `names_of`.

    Returns:
        tensors, deltas and groups of this rank, as views of the live parameters. What goes into a checkpoint tensor
        that is no box of them is named after its place there; see `models/megatron/conversion.py`.

    Raises:
        InvalidInput: a parameter that has no HF name, or that does not fit the configuration; names it and the rank.
        UnsupportedAdapter: an adapter that cannot be merged exactly; names its module and the rank.
        AlreadyMerged: the weights hold an adapter already; names its module and the rank.
    """
    chunks = [chunks] if isinstance(chunks, nn.Module) else list(chunks)
    if not chunks or not all(is_megatron(chunk) for chunk in chunks):
        kinds = ", ".join(type(chunk).__name__ for chunk in chunks) or "none"
        raise InvalidInput(f"expected the chunks of a megatron-core GPTModel or MambaModel, got {kinds}")
    reader = _Reader(chunks, vocab_size, names)
    try:
        for chunk in chunks:
            reader.chunk(chunk)
    except LoraMergeError as error:
        raise type(error)(f"rank {dist.get_rank()}: {error}") from None
    return reader.model()


def facts_of(
    chunks: Sequence[nn.Module], modules: Iterable[nn.Module], *, adapters: bool
) -> tuple[list[Any], list[Tensor]]:
    """Return all that reading these modules of chunks depends on, beside which they are and their parameters; it holds
    no tensor.

    Args:
        adapters: with what they add.

    Returns:
        values to be compared, and the adapters' halves.

    Raises:
        UnsupportedAdapter, AlreadyMerged: as `read`, which says where.
    """
    models: list[Any] = [text_of(chunk) for chunk in chunks]
    facts: list[Any] = [groups_of(models[0])[0]]
    facts += [(model.share_embeddings_and_output_weights, model.vocab_size) for model in models]
    configs: dict[int, tuple[int, Any]] = {}
    halves: list[Tensor] = []
    for module in modules:
        own = module.__dict__
        config = own.get("config")
        facts += (own.get("layer_number"), own.get("num_local_experts"))
        facts.append(configs.setdefault(id(config), (len(configs), config))[0])
        style = style_of("", module)
        for pair in style.pairs("", module) if style is not None and adapters else ():
            facts += pair[2:]
            for tensor, cut in pair[:2]:
                facts += (cut, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
                halves.append(tensor)
    for _, config in configs.values():
        facts += [str(getattr(config, name, None)) for name in _CONFIG]
    return facts, halves


class _Weight(NamedTuple):
    """A parameter as a matrix (or vector) of its own: one expert of a grouped weight, or a parameter as it is."""

    name: str
    parameter: Tensor
    tensor: Tensor
    cut: int | None
    expert: int | None
    grid: tuple[int, int]
    config: Any
    own: str
    """Its name where the layer norm is a module of its own, as some mappings have it."""
    centered: bool | None = None
    """Of a layer norm: whether it is held less one; None where its module does not say."""


def _check_norms(config: Any, names: Names | None) -> None:
    """Check that norms mean what the checkpoint's do: Megatron may hold their weights less one, as Qwen3-Next does."""
    centered = bool(getattr(config, "layernorm_zero_centered_gamma", False))
    known = getattr(config, "experimental_attention_variant", None) == "gated_delta_net"
    if centered and not known and not getattr(names, "zero_centered", False):
        raise InvalidInput(
            "layernorm_zero_centered_gamma: whether the checkpoint holds its norms less one, too, is not known here; "
            "pass names=bridge_names(...) of a Megatron-Bridge that converts this model"
        )
    if known and names is None and not centered:
        raise InvalidInput("layernorm_zero_centered_gamma=False: the checkpoints of Qwen3-Next hold norms less one")


class _Reader:
    def __init__(self, chunks: Sequence[nn.Module], vocab_size: int | None, names: Names | None) -> None:
        self._models: list[Any] = [text_of(chunk) for chunk in chunks]
        outer, config = innermost(chunks[0]), self._models[0].config
        around = outer is not self._models[0]
        self._prefix = _LANGUAGE if around else ""
        kind = "MambaModel" if is_mamba(self._models[0]) else "GPTModel"
        self._names = names or names_of(config, kind, lineage(type(outer)) if around else ())
        _check_norms(config, names)
        self._vocabulary = vocab_size or getattr(config, "vocab_size", None) or self._models[0].vocab_size
        self._groups, _ = groups_of(self._models[0])
        self._check_stages(config)
        self._shards: dict[str, Shard] = {}
        self._parameters: dict[str, Tensor] = {}
        self._deltas: dict[str, list[Factors]] = {}
        self._layers: list[int] = []
        self._halves: dict[tuple[Any, ...], Shard] = {}
        self._within: set[str] = set()
        self._rows: dict[str, tuple[HF, dict[str, list[Block]]]] = {}
        self._adapters: list[nn.Module] = []

    def model(self) -> MegatronModel:
        deltas = {name: tuple(factors) for name, factors in self._deltas.items()}
        layers, count = tuple(self._layers), self._models[0].config.num_layers
        tensors, adapters = list(self._shards.items()), tuple(self._adapters)
        return MegatronModel(tensors, deltas, adapters, self._parameters, self._tied(), self._groups, layers, count)

    def _tied(self) -> tuple[str, str] | None:
        at = (f"{self._prefix}{name}.weight" for name in ("embedding.word_embeddings", "output_layer"))
        embedding, head = map(self._names, at)
        shared = self._models[0].share_embeddings_and_output_weights
        return (embedding, head) if shared and isinstance(embedding, str) and isinstance(head, str) else None

    def _check_stages(self, config: Any) -> None:
        stages = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
        if len(self._models) != stages:
            raise InvalidInput(
                f"rank {dist.get_rank()}: the model has {stages} virtual stages on each rank, got {len(self._models)} "
                "chunks; pass them all"
            )

    def chunk(self, chunk: nn.Module) -> None:
        model: Any = text_of(chunk)
        adapters: dict[str, list[tuple[Layer, Style]]] = {}
        layer_at, layer_name, inside = "", "", "."  # no path begins with a dot
        for path, module in walk(chunk):
            if path.startswith(inside):  # modules of an adapter
                continue
            style = style_of(path, module)
            if style is not None:
                adapters.setdefault(path, []).append((module, style))
                self._adapters.append(module)
            if wrapped(module) is not None:
                continue
            if style is not None:
                inside = path + "."
            if is_layer(module) and path.startswith(self._prefix + "decoder."):
                number = int(module.layer_number) - 1  # type: ignore[arg-type]
                self._layers.append(number)
                layer_at, layer_name = path + ".", f"{path.rpartition('.')[0]}.{number}."
            check_known(path, module, model.config)
            if not module._parameters and not module._buffers and path not in adapters:
                continue
            name = layer_name + path[len(layer_at) :] if layer_at and path.startswith(layer_at) else path
            weights = list(self._weights(name, module, model))
            for weight in weights:
                self._weight(weight)
            for layer, adapter_style in adapters.get(path, ()):
                self._adapt(name, module, weights, adapter_style.pairs(name, layer))

    def _weights(self, path: str, module: nn.Module, model: Any) -> Iterator[_Weight]:
        """Yield the parameters and persistent buffers of a module under the names of `Names`, experts one by one."""
        tied = model.share_embeddings_and_output_weights and path == self._prefix + "output_layer"
        config, cut = module.__dict__.get("config", model.config), cut_of(module)
        if not hasattr(config, "kv_channels"):
            config = model.config  # a tower of transformers', with a configuration of its own
        self._within.update(f"{path}.{child}" for child in cut_within(module))
        experts = ".experts." in path + "." and ".shared_experts" not in path
        grid = self._groups.expert_tp if experts else self._groups.tp
        if _GROUPED_MLP in lineage(type(module)):
            yield from self._grouped(path, module, config)
            return
        buffers = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
        for key, tensor in (*module._parameters.items(), *buffers.items()):
            if tensor is None or tied:  # the last of several stages holds a copy of the embedding
                continue
            data = tensor.detach()
            if type(data) is not Tensor:
                raise InvalidInput(f"{path}.{key}: expected a plain tensor, got a {type(data).__name__}")
            name, expert = self._canonical(f"{path}.{key}", config)
            along = cut if key.startswith("weight") or (cut == 0 and key.startswith("bias")) else None
            along = 0 if f"{path}.{key}" in self._within or path in self._within else along
            if along is None and grid[1] > 1 and getattr(tensor, "tensor_model_parallel", False):
                raise InvalidInput(
                    f"{path}.{key}: expected a linear or an embedding of megatron-core, got a tensor-parallel "
                    f"parameter of class {lineage(type(module))[0]}, and how that cuts its weight is not known here"
                )
            centered = getattr(module, "zero_centered_gamma", None) if "norm" in f"{path}.{key}" else None
            yield _Weight(name, tensor, data, along, expert, grid, config, f"{path}.{key}", centered)

    def _grouped(self, path: str, module: Any, config: Any) -> Iterator[_Weight]:
        """Read GroupedMLP, which holds the experts' weights transposed: `[E, hidden, ffn]` and `[E, ffn, hidden]`."""
        count, hidden, grid = module.num_local_experts, config.hidden_size, self._groups.expert_tp
        for linear, weight, shape, cut in (
            ("linear_fc1", module.weight1, (count, hidden, -1), 0),
            ("linear_fc2", module.weight2, (count, -1, hidden), 1),
        ):
            for e, matrix in enumerate(weight.detach().view(shape).unbind(0)):
                name, _ = self._canonical(f"{path}.{linear}.weight{e}", config)
                yield _Weight(name, weight, matrix.t(), cut, e, grid, config, name)

    def _canonical(self, name: str, config: Any) -> tuple[str, int | None]:
        """Return the name that `Names` takes, and the number of the local expert."""
        rank, size = self._groups.ep
        found = _EXPERT.fullmatch(name) if ".experts." in name else None
        if found and (local := found[2] or found[4]):
            prefix, linear = found[1], found[3]
            count, rest = divmod(config.num_moe_experts, size)
            if rest or int(local) >= count:
                raise InvalidInput(
                    f"{name}: num_moe_experts={config.num_moe_experts} over {size} ranks leaves {count} here"
                )
            return f"{prefix}.{linear}{rank * count + int(local)}", int(local)
        if name.endswith(".input_layernorm.weight"):
            return name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"), None
        if name.endswith(".pre_mlp_layernorm.weight") and not self._has_experts(name):
            return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"), None
        return name, None

    def _has_experts(self, name: str) -> bool:
        """Return True if the layer of a (global) name has experts: `moe_layer_freq` is a period or a list."""
        config = self._models[0].config
        if not config.num_moe_experts:
            return False
        layer = int(re.findall(r"layers\.(\d+)\.", name)[-1])
        pattern = config.moe_layer_freq
        return bool(pattern[layer]) if isinstance(pattern, Sequence) else layer % pattern == 0

    def _hf(self, weight: _Weight) -> tuple[HF, dict[str, list[Block]]]:
        """Return where the rows of a parameter over all ranks belong."""
        if weight.name.startswith(self._prefix + "mtp."):
            raise InvalidInput(
                f"{weight.name}: layers of multi-token prediction are not exported, and an engine's draft would be "
                "stale; train with mtp_num_layers=None"
            )
        hf = self._names(weight.name)
        hf = self._names(weight.own) if hf is None else hf
        if hf is None:
            raise InvalidInput(
                f"{weight.name}: a parameter without a HF name here; pass names= for architectures of your own"
            )
        if weight.centered is not None and weight.centered != bool(
            getattr(self._models[0].config, "layernorm_zero_centered_gamma", False)
        ):
            if weight.centered or not isinstance(hf, str) or not hf.endswith(ONE_LESS):
                raise InvalidInput(
                    f"{weight.name}: its zero_centered_gamma={weight.centered} is not the configuration's "
                    "layernorm_zero_centered_gamma; which of them the checkpoint has is not known here"
                )
            hf = hf.removesuffix(ONE_LESS)
        ranks = weight.grid[1] if weight.cut == 0 else 1
        blocks = row_blocks(weight.name, hf, weight.tensor.shape[0] * ranks, ranks, weight.config)
        if weight.name.removeprefix(self._prefix) in _VOCABULARY:
            ((_, _, rows),) = blocks[""]
            if rows < self._vocabulary:
                raise InvalidInput(f"{weight.name}: {rows} rows, fewer than the vocabulary of {self._vocabulary}")
            blocks = {"": [(0, 0, self._vocabulary)]}
        return hf.removesuffix(CONCATENATED) if isinstance(hf, str) else hf, blocks

    def _weight(self, weight: _Weight) -> None:
        hf, blocks = self._rows[weight.name] = self._hf(weight)
        self._check_columns(weight)
        for key, name in {"": hf}.items() if isinstance(hf, str) else hf.items():
            if name in self._shards:
                raise InvalidInput(f"{weight.name}: {name} was found twice")
            self._shards[name] = place(weight.tensor, weight.cut, weight.grid, blocks[key])
            self._parameters[name] = weight.parameter

    def _check_columns(self, weight: _Weight) -> None:
        """Check the side of a linear that is not cut, and the columns of one that is cut along them."""
        if weight.tensor.dim() != 2 or weight.cut is None or weight.name in self._within or "merger" in weight.name:
            return  # what merges a tower's patches has a width of its own
        shape, (_, ranks) = tuple(weight.tensor.shape), weight.grid
        if weight.cut == 1 and shape[0] != weight.config.hidden_size:
            raise InvalidInput(f"{weight.name}: shape {shape} does not fit hidden_size={weight.config.hidden_size}")
        said, wanted = columns_of(weight.name, weight.config)
        if weight.cut == 0 and shape[1] != wanted:
            raise InvalidInput(f"{weight.name}: shape {shape} does not fit {said}")
        if ".linear_proj." in weight.name and shape[1] * ranks != wanted:
            raise InvalidInput(f"{weight.name}: {shape[1] * ranks} columns over {ranks} ranks do not fit {said}")

    # ---- adapters ----------------------------------------------------------------------------------------------------

    def _adapt(self, name: str, module: nn.Module, weights: Sequence[_Weight], pairs: Sequence[Pair]) -> None:
        if pairs and name == self._prefix + "output_layer" and not weights:
            raise UnsupportedAdapter(
                f"{name}: its weight is the embedding's (share_embeddings_and_output_weights): an adapter on it alone "
                "cannot be merged into both; untie them"
            )
        matrices = [w for w in weights if w.tensor.dim() == 2 and "layer_norm" not in w.name]
        experts = {w.expert: [w] for w in matrices}
        for pair in pairs:
            for weight in matrices if pair.expert is None else experts.get(pair.expert, ()):
                self._pair(name, weight, pair)

    def _pair(self, name: str, weight: _Weight, pair: Pair) -> None:
        ranks, groups = weight.grid[1], weight.config.num_query_groups
        if weight.expert is not None and weight.cut == 1 and ranks > 1:
            raise UnsupportedAdapter(
                f"{name}: an adapter on linear_fc2 of experts with expert tensor parallelism {ranks}: its own forward "
                "does not compute scaling * B @ A (each rank adds a part that is summed once too often)"
            )
        if pair.part in ("q", "k", "v") and groups % ranks:
            raise UnsupportedAdapter(
                f"{name}: separate adapters for q, k and v need whole query groups on each rank, got {groups} query "
                f"groups over {ranks} ranks: train LoRA on linear_qkv, or with a tensor parallel size that divides them"
            )
        if pair.part == "q" and getattr(weight.config, "attention_output_gate", False):
            raise UnsupportedAdapter(
                f"{name}: an adapter on q alone with attention_output_gate, whose gates lie between its heads in the "
                "checkpoint; train LoRA on linear_qkv"
            )
        hf, blocks = self._rows[weight.name]
        if pair.part is not None and (isinstance(hf, str) or pair.part not in hf):
            raise UnsupportedAdapter(
                f"{name}: an adapter on {pair.part} alone, which is no tensor of its own in the checkpoint "
                f"({hf if isinstance(hf, str) else ', '.join(hf)}); train LoRA on the whole linear"
            )
        shared = self._half(pair.lora_A, weight.grid)
        rank, columns = shared.shape
        wanted = weight.tensor.shape[1] * (ranks if weight.cut == 1 else 1)
        if columns != wanted or rank != pair.lora_B.tensor.shape[1]:
            raise InvalidInput(
                f"{name}: lora_A {list(shared.shape)} and lora_B [.., {pair.lora_B.tensor.shape[1]}] over {ranks} "
                f"ranks do not fit a weight of {wanted} columns"
            )
        for key, hf_name in {"": hf}.items() if isinstance(hf, str) else hf.items():
            if pair.part is not None and pair.part != key:
                continue
            lora_B = self._half(pair.lora_B, weight.grid, key, blocks[key] if pair.part is None else None)
            has = pair.lora_B.tensor.shape[0] * (ranks if pair.lora_B.cut == 0 else 1)
            if pair.part is not None:
                needs = sum(count for _, _, count in blocks[key])
            else:
                needs = weight.tensor.shape[0] * (ranks if weight.cut == 0 else 1)
            if has != needs:
                raise InvalidInput(f"{name}: lora_B has {has} rows over {ranks} ranks, the weight {needs}")
            self._deltas.setdefault(hf_name, []).append(Factors(shared, lora_B, pair.scaling))

    def _half(self, half: Half, grid: tuple[int, int], key: str = "", blocks: Sequence[Block] | None = None) -> Shard:
        """Return a factor in coordinates of a checkpoint tensor (its key); by default in its own, as one block."""
        tensor = half.tensor.detach()
        memo = (tensor.data_ptr(), tensor.shape, key, half.cut)
        if memo not in self._halves:
            rows = tensor.shape[0] * (grid[1] if half.cut == 0 else 1)
            self._halves[memo] = place(tensor, half.cut, grid, blocks or [(0, 0, rows)])
        return self._halves[memo]
