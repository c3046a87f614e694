"""The worker's side of a push: vLLM's weight-transfer backend `lora_merge`, and the worker method of the same name.

vLLM's four weight-transfer methods carry full weight sets and return nothing. Everything else (what the engine holds,
what it expects, checksums, adapters) goes through one worker method, JSON in and JSON out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from ...stream.buckets import Slot, Table, extent, from_json
from ...stream.filler import Places
from ..claim import Claim
from ..replica import ONE_ENGINE
from ..sources import add_checksums
from ..state import Modules, Sampler, State
from ..transport import Received, Receiver, introduction
from .adapter import ADAPTER_ID, load_adapter, remove_adapter, unserved_modules
from .loader import Examination, Loader

_SIDE = "_lora_merge"


@dataclass
class InitInfo(WeightTransferInitInfo):
    """For each worker of this engine its `Sender.channel`, and which trainer they lead to."""

    channels: list[dict[str, Any]]
    trainer: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One push: the digest of an examined table, and the state that it brings."""

    digest: str
    state: dict[str, Any]
    verify: bool = False


class Side:
    """What this package keeps in a worker, beside the model's weights."""

    def __init__(self, model: nn.Module, model_config: Any, device: torch.device) -> None:
        self.device, self.modules = device, Modules(model)
        self.loader = Loader(self.modules, model_config, device)
        self.receiver: Receiver | None = None
        self.tables: dict[str, Table] = {}
        self.pending: State | None = None
        self.checksums: dict[str, int] = {}
        self.arrived: dict[str, bool] = {}
        self.coverage: tuple[int, int] = (0, 0)
        self.updating = False
        self.claim = Claim()
        self.paused, self.waking = False, False
        self.held = State()
        self._sampler = Sampler()
        self._sample = ""
        self._kernels: list[Any] = []

    def state(self) -> State:
        """What the weights are; "dirty" if they changed since this package wrote them."""
        if self.held.kind in ("nothing", "dirty") or asleep():
            return self.held
        kernels = self.modules.kernels()
        same = len(kernels) == len(self._kernels) and all(a is b for a, b in zip(kernels, self._kernels, strict=True))
        if not same or self._sampler(self.modules.tensors()) != self._sample:
            self.held = self.held.dirty("its weights were changed by something else: a sleep, a reload, an update")
        return self.held

    def settle(self, state: State) -> None:
        """The weights are now `state`: note what they look like."""
        self.held = state
        if state.kind != "dirty":
            self._sample = self._sampler(self.modules.tensors())
            self._kernels = self.modules.kernels()

    def evicted(self) -> None:
        """The adapter is gone, the base is still what it was."""
        self.held = replace(self.held, kind="base")

    def connect(self, channel: dict[str, Any]) -> None:
        """Open a channel to a trainer; the one before is closed."""
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None
        self.receiver = Receiver(channel, self.device)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """A transfer: if it fails here, also before the first bucket, the trainer does not wait for this worker, and
        no layer stays open (the trainer may be dead, and the next one looks at the layers first)."""
        try:
            yield
        except BaseException:
            self.loader.abort()
            if self.receiver is not None:
                self.receiver.left()
            raise

    def take(
        self,
        table: Table,
        use: Callable[[Sequence[Slot], Received], None],
        verify: bool,
        places: Places | None = None,
    ) -> None:
        """Receive every bucket of a table, as `Receiver.receive`, and hand it to `use` with its slots."""
        if self.receiver is None:
            raise RuntimeError("no trainer is connected: init_weight_transfer_engine comes first")
        self.checksums, self.arrived = {}, {}
        with closing(self.receiver.receive([extent(slots) for slots in table], places, verify)) as buckets:
            for received in buckets:
                if verify and received.data is not None:
                    add_checksums(self.checksums, table[received.index], received.data)
                use(table[received.index], received)


class LoraMergeWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Full weight sets, merged by the trainer, into the model that vLLM serves."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    @property
    def side(self) -> Side:
        return side_of(self.model, self.model_config, self.device)

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        side = self.side
        side.claim.check(init_info.trainer)
        side.connect(init_info.channels[self.parallel_config.rank])

    def start_weight_update(self) -> None:
        side = self.side
        side.settle(side.held.dirty("a push is under way or did not end"))
        side.loader.abort()
        side.updating = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        side = self.side
        side.claim.check(update_info.state["trainer"])
        with side.taking(), set_current_vllm_config(self.vllm_config):
            self._receive(side, side.tables[update_info.digest], update_info)

    def _receive(self, side: Side, table: Table, update_info: UpdateInfo) -> None:
        examination = side.loader.examine(update_info.digest, table)
        side.loader.begin(examination)

        def load(slots: Sequence[Slot], received: Received) -> None:
            if received.data is None:
                return
            if not received.placed:
                side.loader.load(examination, received.index, slots, received.data)
            seen = side.loader.arrived(examination, slots, received.data) if update_info.verify else {}
            for name, same in seen.items():
                side.arrived[name] = side.arrived.get(name, True) and same

        side.take(table, load, update_info.verify, examination.places)
        side.coverage = examination.elements
        side.pending = State(**update_info.state)

    def finish_weight_update(self) -> None:
        side = self.side
        if side.pending is None:
            raise RuntimeError("finish_weight_update without a whole update before it")
        with set_current_vllm_config(self.vllm_config):
            side.loader.finish()
        side.settle(side.pending)
        side.pending, side.updating = None, False

    def shutdown(self) -> None:
        side = self.side
        if side.receiver is not None:
            side.receiver.close()
            side.receiver = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26 asks for this static method; `VllmSync` is the trainer's side."""
        raise NotImplementedError("use lora_merge.VllmSync on the trainer's side")


def side_of(model: nn.Module, model_config: Any, device: torch.device) -> Side:
    """The `Side` of a model, made at first use, for one call to a worker."""
    if _SIDE not in model.__dict__:
        model.__dict__[_SIDE] = Side(model, model_config, device)
    side: Side = model.__dict__[_SIDE]
    side.modules.doubt()
    return side


def asleep() -> bool:
    """Whether the weights of this process are unmapped at the moment (sleep mode): they must not be read."""
    if not torch.cuda.is_available():
        return False
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    return allocator is not None and any(
        data.is_asleep and data.tag == "weights" for data in allocator.pointer_to_data.values()
    )


def lora_merge(worker: Any, request: str) -> str:
    """The worker method: a JSON object with `op` in, a JSON object out.

    Refusals come back as `{"error": ...}`, so that one worker's refusal does not look like a dead engine.
    """
    message = json.loads(request)
    side = side_of(worker.get_model(), worker.model_config, worker.device)
    if "trainer" in message:  # a call of a push
        side.claim.check(message.pop("trainer"))
    with set_current_vllm_config(worker.vllm_config):
        return json.dumps(_OPS[message.pop("op")](worker, side, **message))


def _hello(worker: Any, side: Side, claim: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Who this worker is, what it holds, what it can serve. With a claim a push begins, which `end` ends."""
    import vllm

    lora = worker.vllm_config.lora_config
    backend = type(getattr(worker, "weight_transfer_engine", None)).__name__
    return {
        **introduction(worker.device),
        "rank": worker.parallel_config.rank,
        "world": worker.parallel_config.world_size,
        "engines": _engines(worker.parallel_config),
        "eplb": bool(worker.parallel_config.enable_eplb),
        "version": vllm.__version__,
        "backend": backend == LoraMergeWeightTransferEngine.__name__,
        "quantized": worker.model_config.quantization,
        "dtype": str(worker.model_config.dtype).removeprefix("torch."),
        "tied": side.loader.ties,
        "lora": None if lora is None else {"max_rank": lora.max_lora_rank, "dtype": _lora_dtype(lora)},
        "busy": "" if claim is None else side.claim.take(**claim),
        "asleep": asleep(),
        "paused": side.paused,
        "waking": side.waking,
        "session": None if side.receiver is None else side.receiver.session,
        "connector": worker.vllm_config.kv_transfer_config is not None,
        "multimodal": bool(worker.model_config.is_multimodal_model),
        "lacks": _lacks(),
        "state": _served(worker, side, side.state()),
    }


def _engines(parallel: Any) -> int:
    """How many engines the handle of this one reaches. vLLM calls all of them, and passes on what the first one says.

    Raises:
        RuntimeError: this is not the first; the call then fails. (vLLM configures the engines of dense models as if
            each were alone, but for their number, which is the only way to see it there.)
    """
    if parallel.data_parallel_external_lb or envs.VLLM_DP_SIZE > 1:  # a handle for each
        return 1
    if getattr(parallel, "data_parallel_hybrid_lb", False):
        count, number = parallel.data_parallel_size_local, parallel.data_parallel_rank_local or 0
    else:
        count, number = parallel.data_parallel_size, parallel.data_parallel_index
    if number:
        raise RuntimeError(f"this is number {number} of {ONE_ENGINE}")
    return int(count)


def _served(worker: Any, side: Side, state: State) -> dict[str, Any]:
    """The state of the weights; an adapter may have been evicted since."""
    if state.kind == "adapter" and ADAPTER_ID not in worker.list_loras():
        side.evicted()
        state = side.held
    return state.to_json()


def _lacks() -> list[str]:
    """What this vLLM does not have of all that is used here."""
    from importlib import import_module

    needed = {
        "vllm.model_executor.model_loader.reload": ("initialize_layerwise_reload", "finalize_layerwise_reload"),
        "vllm.model_executor.model_loader.reload.layerwise": ("get_layerwise_info", "_place_kernel_tensors"),
        "vllm.model_executor.model_loader.reload.meta": ("restore_layer_on_meta",),
        "vllm.model_executor.model_loader.reload.utils": ("get_layer_params_buffers",),
        "vllm.model_executor.layers.attention": ("Attention", "MLAAttention", "MMEncoderAttention"),
        "vllm.lora.lora_model": ("LoRAModel",),
        "vllm.lora.peft_helper": ("PEFTHelper",),
    }
    lacking = []
    for module, names in needed.items():
        try:
            found = import_module(module)
        except ImportError:
            lacking.append(module)
            continue
        lacking += [f"{module}.{name}" for name in names if not hasattr(found, name)]
    return lacking


def _start(worker: Any, side: Side) -> dict[str, Any]:
    """Begin a full push; what a broken one left open is closed."""
    _abort(worker, side)
    worker.start_weight_update()
    return {}


def _commit(worker: Any, side: Side, full: bool) -> dict[str, Any]:
    """End a push; an adapter that does not belong to the weights any more goes."""
    if full:
        worker.finish_weight_update()
    if worker.vllm_config.lora_config is not None and side.held.kind != "adapter":
        remove_adapter(worker.model_runner.lora_manager)
    return {"rank": worker.parallel_config.rank, "state": _served(worker, side, side.held)}


def _lora_dtype(lora: Any) -> str:
    return str(lora.lora_dtype).removeprefix("torch.")


def _examine(worker: Any, side: Side, digest: str, table: Any = None) -> dict[str, Any]:
    """Dry run of a table; without one, of the table that was sent before under this digest."""
    if table is not None:
        side.tables = {digest: from_json(table)}
    if digest not in side.tables:
        return {"unknown": True}
    found: Examination = side.loader.examine(digest, side.tables[digest])
    return {
        "refused": found.refused,
        "ignored": found.ignored,
        "absent": found.absent,
        "missing": found.missing,
        "dtypes": found.dtypes,
        "elements": found.elements,
        "straight": len(found.copies),
        "reloaded": len(found.staged),
    }


def _adapter_modules(worker: Any, side: Side, modules: list[str]) -> dict[str, Any]:
    """Modules that this engine cannot adapt."""
    return {"unserved": unserved_modules(worker.model_runner.lora_manager, modules)}


def _adapter(worker: Any, side: Side, table: Any, rank: int, state: dict[str, Any], verify: bool) -> dict[str, Any]:
    """Receive an adapter and load it in the place of the one before."""
    with side.taking():
        before = side.state()
        if before.kind not in ("base", "adapter") or before.base != state["base"]:
            raise RuntimeError(f"an adapter needs the base that it was trained on; this engine holds {before}")
        side.settle(before.dirty("an adapter push is under way or did not end"))
        tensors: dict[str, Tensor] = {}

        def keep(slots: Sequence[Slot], received: Received) -> None:
            assert received.data is not None
            tensors.update({slot.name: slot.view(received.data).clone() for slot in slots})

        side.take(from_json(table), keep, verify)
        load_adapter(worker.model_runner.lora_manager, tensors, rank)
        side.settle(State(**state))
    return {}


def _verified(worker: Any, side: Side) -> dict[str, Any]:
    """Checksums of what came in the last push, and whether what lies in the parameters equals it."""
    return {"checksums": side.checksums, "damaged": [name for name, same in side.arrived.items() if not same]}


def _coverage(worker: Any, side: Side) -> dict[str, Any]:
    """Elements that the last full push wrote, and elements there are."""
    return {"elements": side.coverage, "state": side.state().to_json()}


def _abort(worker: Any, side: Side, reason: str | None = None) -> dict[str, Any]:
    """Close what a broken push left open; with a reason, the engine is dirty."""
    side.loader.abort()
    side.pending = None
    if side.updating or reason is not None:
        side.settle(side.held.dirty(reason or "a push broke off in the middle"))
    side.updating = False
    worker._weight_update_active = False
    return {}


def _note_pause(worker: Any, side: Side, paused: bool | None = None, waking: bool | None = None) -> dict[str, Any]:
    """That generation stands still because of a push, or the KV cache sleeps: if that push fails, or its trainer dies,
    the next one lets it go on."""
    side.paused = side.paused if paused is None else paused
    side.waking = side.waking if waking is None else waking
    return {}


def _end(worker: Any, side: Side, owner: str, **notes: bool) -> dict[str, Any]:
    """A push is over, however it went; `notes` as in `note_pause`."""
    if side.claim.end(owner):
        _note_pause(worker, side, **notes)
    return {}


def _disconnect(worker: Any, side: Side, sessions: list[str]) -> dict[str, Any]:
    """Let go of a trainer's memory, before the trainer frees it."""
    if side.receiver is not None and side.receiver.session in sessions:
        side.receiver.close()
        side.receiver = None
    return {}


_OPS: dict[str, Callable[..., dict[str, Any]]] = {
    "hello": _hello,
    "examine": _examine,
    "adapter_modules": _adapter_modules,
    "adapter": _adapter,
    "verified": _verified,
    "coverage": _coverage,
    "abort": _abort,
    "start": _start,
    "commit": _commit,
    "note_pause": _note_pause,
    "end": _end,
    "disconnect": _disconnect,
}
