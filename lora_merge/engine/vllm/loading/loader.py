"""Loads into vLLM's parameters: what differs from engine/worker/loader.py.

Layers that vLLM lays out anew after loading (prepacked on CPUs, shuffled experts) go through `load_weights` into memory
of their own (reload.py); what vLLM makes of several layers' weights is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config

from ....names import renamed
from ....stream.buckets import Slot, Table
from ....stream.direct_targets import DirectTargets
from ...messages import NO_PART
from ...worker import loader
from ...worker.dry_run import Capture, Record, feed
from ...worker.loader import DryRunReport, everything
from ...worker.modules import Modules, unchanged, unwrapped, wrapped
from .. import internals
from . import parts
from .checkpoint import Checkpoint
from .compressed import Scheme, as_in_checkpoint, named_back, schemes_of
from .direct import DirectComparison, DirectLayers
from .formats import QuantisingPeers, bring_scales_back, method_of
from .reload import Reload, on_meta, packed_kernels, same_layout
from .rest import Rest, differing, outside

_AS_LOADED = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Methods that leave weights on a CUDA device as they were loaded."""
_EXPERTS, _PLAIN_EXPERTS = "UnquantizedFusedMoEMethod", {"TRITON", "BATCHED_TRITON"}
"""The method for experts, and those of its backends that leave them as they were loaded (0.26, 0.32)."""
_ENGINE_OWNED = {
    "_expert_map",
    "expert_mask",
    "expert_global_to_physical",
    "expert_physical_to_global",
    "expert_local_to_global",
    "W_UV",
    "W_UK_T",
    "W_UK_T_dcp_qrep",
    "position_ids",
}
"""Tensors that vLLM computes and no checkpoint holds: BERT's positions count from 0, and MLA's may be views of the
weight that they come from."""
_COMPUTED = {"FusedMMInputNorm"}
"""Modules whose persistent buffers vLLM makes from the processor's settings: in no checkpoint, and random after a dummy
load."""
_OF_CACHE = ("q_scale", "k_scale", "v_scale", "prob_scale", "_zero_point")
"""Ends the names of scales of a quantised cache; vLLM 0.26 has them as parameters (compressed-tensors)."""
_HOOK = "process_weights_after_loading"
_IDLE = "vllm.v1.attention.backend"
"""The module that defines the hook of attention backends which does nothing."""
_NOT_BUILT = "StageMissingLayer"
"""The class that vLLM puts in the place of a part that its settings leave out."""


class Loader(loader.Loader):
    """Loads full weight sets into one worker's model.

    Args:
        modules: of the live vLLM model, LoRA wrappers and all.
        model_config: vLLM's.
    """

    def __init__(self, modules: Modules, model_config: Any, device: torch.device) -> None:
        super().__init__(modules, device)
        self._config = model_config
        self.peers = QuantisingPeers(modules)
        self._direct = DirectLayers()
        self._reload: Reload | None = None
        self._comparison: DirectComparison | None = None
        self._schemes: dict[str, Scheme] = {}  # by name of the stream; of any that came, as it depends on the model
        self._of_scales: list[Record] = []  # of the last dry run
        self._rest = Rest()
        self._renaming = False  # while names are tried

    def examine(self, digest: str, table: Table) -> DryRunReport:
        """Return the base's report, kept for as long as layers hold nothing else."""
        if self._direct.outdated or (self._examined is not None and self._rest_changed(self._examined[1])):
            self._examined = None
        return super().examine(digest, table)

    def begin(self, report: DryRunReport) -> None:
        """Begin as the base does, and expect layers whose layout changes after loading."""
        super().begin(report)
        self._comparison, self.reloaded = None, 0
        if report.staged:
            self._reload = Reload(report.layers, report.touched, self.device.type, self.peers)

    def written(self, names: Collection[str]) -> None:
        if self._reload is not None:
            self._reload.written(names)

    def arrived(
        self, report: DryRunReport, slots: Sequence[Slot], data: Tensor, placed: bool = False
    ) -> dict[str, bool]:
        equal = super().arrived(report, slots, data, placed)
        if not placed or not report.near.together:
            return equal
        if self._comparison is None:
            self._comparison = DirectComparison(report.near)
        whole = [found for slot in slots if slot.name in self._comparison.of for found in self._staged(slot, data)]
        return equal | self._comparison.add(whole)

    def _near(
        self,
        targets: DirectTargets,
        roots: Sequence[nn.Module],
        records: Sequence[Record],
        fed: Mapping[str, Tensor],
        owners: Mapping[str, nn.Module],
    ) -> DirectTargets:
        found = self._direct.targets(roots, [*records, *self._of_scales], fed, owners, self._schemes)
        return DirectTargets({**targets.views, **found.views}, found.scaled, found.together)

    def _through(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        assert self._reload is not None
        names = [name for name, _ in tensors]
        self._reload.open_layers(names)
        super()._through(as_in_checkpoint(tensors, self._schemes))
        self._reload.process_complete(names)

    def _recorded(
        self, tensors: dict[str, Tensor], owners: Mapping[str, nn.Module], fed: list[tuple[str, Tensor]]
    ) -> tuple[Capture, dict[str, str]]:
        """Record as the base does; for layers on a quantised checkpoint, record the pair that it holds for a weight."""
        capture, refused = super()._recorded(tensors, owners, fed)
        schemes, unfit = schemes_of(capture.records, owners, dict(fed))
        self._of_scales = []
        if schemes:
            self._schemes |= schemes
            capture, refused = super()._recorded(tensors, owners, as_in_checkpoint(fed, schemes))
            refused, self._of_scales = named_back(capture, refused, schemes, self._config.dtype)
        return capture, {name: parts.plainly(why) for name, why in refused.items()} | unfit

    def load_layers(
        self, report: DryRunReport, layers: Sequence[tuple[nn.Module, frozenset[str]]], tensor: Callable[[str], Tensor]
    ) -> None:
        self._reload = Reload(layers, report.touched, self.device.type, self.peers)
        done: set[str] = set()
        with torch.no_grad(), self._bare():
            for _, names in layers:
                self._through([(name, tensor(name)) for name in sorted(names - done)])
                done |= names

    def finish(self) -> None:
        if self._reload is not None and self._reload.lacking:  # their layers are closed by `abort`
            raise RuntimeError(f"these tensors did not come: {', '.join(self._reload.lacking)}")
        reload, self._reload = self._reload, None
        self.reloaded = 0 if reload is None else reload.done
        if reload is not None and reload.began:  # vLLM's own code has run; of what is written as it lies nothing moves
            self.modules.doubt()
        derived, tied, computed = self.modules.kept(_derived), self._tied_layers(), self.modules.kept(_computed)
        bring_scales_back(self.modules)
        if not (derived or tied or computed):
            return
        with torch.no_grad(), self._bare():
            for layer in derived:
                layer.process_weights_after_loading(self._config.dtype)
            for layer in self._tied_layers():
                layer.quant_method.process_weights_after_loading(layer)
            for layer in computed:
                self._compute(layer)

    def _compute(self, layer: nn.Module) -> None:
        """Set buffers that vLLM computes to what it would compute now."""
        made = internals.build_mm_input_norm(self._config)
        for key, buffer in layer._buffers.items():
            if buffer is not None:
                buffer.copy_(made._buffers[key])

    def abort(self) -> None:
        if self._reload is not None:
            with torch.no_grad(), self._bare():
                self._reload.abort()
        self._reload = None
        super().abort()

    def kernels(self) -> list[Any]:
        """Return what vLLM's CPU layers compute with instead of their parameters."""
        if self.device.type != "cpu":
            return []
        linear = [module.__dict__["cpu_linear"] for module in self.modules if "cpu_linear" in module.__dict__]
        return linear + packed_kernels(self.modules)

    def _bare(self) -> AbstractContextManager[None]:
        """Return the model without vLLM's LoRA wrappers, whose names `load_weights` does not know."""
        return unwrapped(self.modules, _wrapped)

    def _as_loading(self, layers: Sequence[nn.Module]) -> AbstractContextManager[None]:
        return on_meta(layers)

    def _filled(self, module: nn.Module) -> dict[str, Tensor | None]:
        if type(module).__name__ in _COMPUTED:
            return {}
        if not hasattr(module, "kv_cache_dtype"):
            found = super()._filled(module)
        else:  # attention has scales of a quantised cache, which vLLM sets itself: buffers, or parameters (0.26)
            found = {key: t for key, t in module._parameters.items() if not key.endswith(_OF_CACHE)}
        return {key: tensor for key, tensor in found.items() if key not in _ENGINE_OWNED}

    def _unreachable(self) -> dict[str, str]:
        """Return the parts of a model that make something of weights which no reload makes again, each with why it is
        refused."""
        why = {}
        for path, module in self.modules.paths():
            if _deferred(module):
                projection = module._modules.get("kv_b_proj")
                if isinstance(projection, nn.Module) and not getattr(projection, "weight", torch.empty(1)).numel():
                    why[f"{path}.kv_b_proj"] = (
                        "the engine's attention backend packed this weight and dropped it, which vLLM cannot reload: "
                        'start the engine with attention_backend="CPU_MLA"'
                    )
            elif hasattr(module, _HOOK) and hasattr(module, "load_weights") and not _makes_nothing(module):
                why[path or type(module).__name__] = (
                    f"{type(module).__name__}.{_HOOK} makes something of all its weights when the engine starts, and "
                    "vLLM does not make it again after a reload: start a new engine on a checkpoint instead"
                )
        return why

    def _absent(self, fed: Sequence[tuple[str, Tensor]]) -> list[str]:
        """Return the tensors of parts that vLLM did not build (`limit_mm_per_prompt` of 0) but keeps on the meta
        device: modules beside the model, and parameters of its own (LLaVA-NeXT's `image_newline`). With these in place,
        `load_weights` takes or refuses their tensors, and passes over others."""
        parts = [
            (parent, key, stage)
            for parent in self.modules
            for key, stage in parent._modules.items()
            if type(stage).__name__ == _NOT_BUILT and isinstance(stage.__dict__.get("module"), nn.Module)
        ]
        if not parts or not fed:
            return []
        tensors: dict[str, Tensor] = {}
        try:
            for number, (parent, key, stage) in enumerate(parts):
                parent._modules[key] = part = stage.__dict__["module"]
                tensors |= {f"{number}.{name}": t for name, t in [*part.named_parameters(), *part.named_buffers()]}
            tensors |= {path: t for path, (t, _) in self._engine_tensors().items() if t.is_meta}
            capture = Capture(tensors, list(fed), everything(self.model))
            refused = feed(self.model, capture, list(fed))
        finally:
            for parent, key, stage in parts:
                parent._modules[key] = stage
        return sorted(refused.keys() | {record.name for record in capture.records})

    def _left_out(self, names: Sequence[str]) -> list[str]:
        return parts.left_out(self.model, names)

    def _serves(self) -> str:
        return str(next(iter(self._config.hf_config.architectures or ()), type(self.model).__name__))

    def _renames(self, table: Table, refused: Mapping[str, str]) -> Sequence[Sequence[str]]:
        """Try the names of narrower classes, where the model has no part that is called `model`."""
        if self._renaming or not any(why.startswith(f"{NO_PART}'model'") for why in refused.values()):
            return ()
        self._renaming = True
        try:
            for renames in parts.NARROWER:
                tried = tuple(tuple(_renamed(slot, renames) for slot in slots) for slots in table)
                answer = self._dry_run(tried).answer
                if not answer.refused and set(answer.ignored) <= set(answer.absent):
                    return renames
        finally:
            self._renaming = False
        return ()

    def _kept(self, missing: Mapping[str, str], written: Collection[str]) -> tuple[list[str], list[str]]:
        """Keep what lies outside of the language model where the stream has all of that, and nothing else."""
        inside = parts.language_model(self.model)
        if not missing or inside is None:
            return super()._kept(missing, written)
        if any(path.startswith(f"{inside}.") for path in missing) or not all(
            path.startswith(f"{inside}.") for path in written
        ):
            return super()._kept(missing, written)
        if not self._rest.same(held := outside(self.model, inside)):
            if why := self._unlike_checkpoint(missing):
                listed = ", ".join(f"{part} ({many})" for part, many in parts.parts_of(missing).items())
                return [], [
                    f"the parameters of {listed}, which the model here does not have, and which cannot stay as the "
                    f"engine has them: {why}; push a {self._serves()}, which has them, or start the engine anew on its "
                    "checkpoint"
                ]
            self._rest.note(held)
        return sorted(missing), []

    def _unlike_checkpoint(self, paths: Collection[str]) -> str:
        """Return why parameters are not known to be what the engine loaded when it started; "" where they are."""
        checkpoint = Checkpoint(get_current_vllm_config().load_config, self._config, self.model)
        try:
            tensors = checkpoint.stored()
        except RuntimeError as error:
            return str(error)
        fed = [(name, torch.empty(t.shape, dtype=t.dtype, device="meta")) for name, t in tensors.items()]
        modules = [module for _, module in self.model.named_modules()]
        with self._as_loading(self._laid_anew()), unchanged(modules):
            found = self._engine_tensors()
            owners = {path: owner for path, (_, owner) in found.items()}
            capture, _ = self._recorded({path: tensor for path, (tensor, _) in found.items()}, owners, fed)
            return differing(capture.records, paths, tensors)

    def _rest_changed(self, report: DryRunReport) -> bool:
        """Return True if what a report leaves as it is has changed since it was compared."""
        inside = parts.language_model(self.model) if report.answer.kept else None
        return inside is not None and not self._rest.same(outside(self.model, inside))

    def _laid_anew(self) -> list[Any]:
        """Return the layers that vLLM processes after loading; the outermost where they nest."""
        tied = {id(layer) for layer in self._tied_layers()}
        inside: set[int] = set()
        layers = []
        for module in self.modules:
            method = method_of(module)
            if method is None or id(module) in tied or id(module) in inside or _deferred(module):
                continue
            if self.device.type == "cuda" and _as_loaded(method) and same_layout(module):
                continue
            inside.update(map(id, module.modules()))
            layers.append(module)
        return layers

    def _tied_layers(self) -> list[Any]:
        """Return layers on a CPU that compute from a packed copy of another layer's parameter (a tied head)."""
        if self.device.type != "cpu":
            return []
        seen: set[int] = set()
        tied = []
        for module in self.modules:
            own = {id(p) for p in module._parameters.values() if p is not None and p.numel()}
            if own and own <= seen and getattr(module, "quant_method", None) is not None:
                tied.append(module)
            seen |= own
        return tied


def _renamed(slot: Slot, renames: parts.Renames) -> Slot:
    return replace(slot, name=renamed(slot.name, renames))


def _as_loaded(method: Any) -> bool:
    """Return True if a layer with this method keeps its weights on a GPU as `load_weights` puts them."""
    kind = type(method).__name__
    if kind == _EXPERTS:
        backend = getattr(getattr(method, "unquantized_backend", None), "name", "")
        return backend in _PLAIN_EXPERTS and torch.version.hip is None  # which pads them
    return kind in _AS_LOADED


def _deferred(module: nn.Module) -> bool:
    """Return True if vLLM calls this module's hook after loads and reloads, when all other layers are done."""
    if internals.has("is_deferred_attention_layer"):
        return bool(internals.is_deferred_attention_layer(module))
    kinds = internals.Attention, internals.MLAAttention, internals.MMEncoderAttention  # vLLM 0.26
    return isinstance(module, kinds) and callable(getattr(module, _HOOK, None))


def _derived(modules: Modules) -> list[Any]:
    """Return attention layers whose hook may keep something made of weights: MLA's matrices, sinks in float32."""
    return [module for module in modules if _deferred(module) and not _keeps_nothing(module)]


def _makes_nothing(model: nn.Module) -> bool:
    """Return True for Kimi-Linear, and Kimi-K3's language model, whose hook (vLLM 0.32) does nothing but to lay experts
    out for one kernel, where no layer runs that."""
    return type(model).__name__ == "KimiLinearForCausalLM" and not any(
        getattr(module, "use_mega_moe", False) for module in model.modules()
    )


def _keeps_nothing(layer: Any) -> bool:
    """Return True for plain attention over a backend without a hook: its hook only resets the cache's scales, in six
    small steps a layer."""
    plain = getattr(type(layer), _HOOK) is getattr(internals.Attention, _HOOK)
    return plain and getattr(layer.impl, _HOOK).__module__ == _IDLE


def _wrapped(modules: Modules) -> list[tuple[nn.Module, str, Any]]:
    return wrapped(modules, internals.BaseLayerWithLoRA)


def _computed(modules: Modules) -> list[nn.Module]:
    return [module for module in modules if type(module).__name__ in _COMPUTED]
