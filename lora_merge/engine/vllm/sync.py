"""VllmSync: one call brings what is being trained into the vLLM engines that roll it out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ...errors import InvalidInput
from ...extras import needed
from ..adapter_versions import CONSTANT_PATH, name_of, path_of, version_of
from ..control.base import Control
from ..payload.adapter import ADAPTER_NAME
from ..push.sharing import Sharing
from ..sync import EngineSync
from ..tenants import PATHS, tenant_id
from .adapter import ADAPTER_ID
from .control import LlmControl
from .handles import control_of

if TYPE_CHECKING:
    from .cache_sleep import CacheSleep

_COMPILED = "TorchCompileWithNoGuardsWrapper"
"""The base that vLLM gives to classes which it decorates for its compiler."""


class VllmSync(EngineSync):
    """Updates vLLM engines with the model that is being trained: `push()` brings it as it is now into each of them.

        llm = LLM("base", weight_transfer_config=WeightTransferConfig(backend="lora_merge"))
        sync = lora_merge.VllmSync(model, llm)
        print(sync.push())
        outputs = sync.generate(prompts, sampling)

    lora_merge has to be installed where vLLM's workers run; vLLM finds it through its entry point. With a URL the
    trainer needs no vLLM. `with VllmSync(...) as sync:` closes it at the end of the block; for an `AsyncLLM` write
    `async with`.

    Several trainer ranks (torch.distributed is initialised): make one on every rank, of its model, and call `push` and
    `close` on every rank. Usually rank 0 has all handles and the others pass None; or each rank has an `LLM` of its
    own.

    Args:
        model: a PEFT model or any module; whole, or sharded by FSDP2, FSDP1 or ZeRO-3; or Megatron's list of chunks.
        engine: a `vllm.LLM`, an `LLMEngine`, an `AsyncLLM`, a Ray actor around one, the URL of a server, or a list of
            these (replicas); None on ranks without a handle. An engine that was started without
            `weight_transfer_config` works, too, unless vLLM packed a layer into a layout that cannot be loaded again.
        mode: "merged": the engine holds merged weights. "adapter": it holds the base, and the adapter beside it in
            vLLM's own LoRA path.
        merge: in merged mode, who adds the adapters to the base. "trainer": merged weights are sent; they are written
            straight into engines of the same host. "engine": the base is sent once, then adapters alone, and the
            engine's workers merge them into their own slices and take them off again exactly before the next ones; the
            bits are those of a merge in the trainer, and the engine keeps 2 bits for each adapted element and the
            adapters. "auto": the engine if some worker runs on another host than every rank of the trainer, else the
            trainer; `SyncReport.merge` says who did.
        rounding: of merged weights: "nearest" or "stochastic" (seeded by the version).
        pause: what happens to requests in flight: "keep" lets them go on with the new weights, "wait" lets them end
            first, "abort" ends them. A push that changes the mode waits where others keep.
        cache: what happens to the KV cache of requests that go on: "reset" drops it, and their tokens so far are
            computed again with the new weights; "keep" leaves it to them, and nothing is computed again, so that they
            go on with the new weights after what the old ones have computed. New requests never get any of it. For
            mode="merged" and pause="keep"; `weight_spans` reads what an answer says of its versions.
        bucket_bytes: size in bytes of each of two buckets, where buckets are needed; larger tensors are cut.
        strategy: as for `MergedWeights`.
        adapter_names: of PEFT's adapters: exactly these are pushed, in either mode. Default: those that act
            (`set_adapter`). No forward of the model may run while a push begins.
        tenants: of PEFT's adapters: each of these is served, the first one (or `push(hottest=name)`) merged, so that
            its requests run at base-model speed, the others as LoRA slots relative to it. Requests say whose they are
            by `lora_request(tenant=name)`. For engines with `enable_lora=True` and a `max_lora_rank` of both ranks
            together (docs/tenants.md).
        lost: what a push does about an engine that cannot be reached: its host is gone, or its server is not up (yet,
            or any more); before the push or in the middle of it. "refuse": the push is refused, or fails, and the error
            names the engine. "skip": the push goes on with the others, as long as there is one, warns, and has the
            engine in `SyncReport.skipped`. The first push that reaches it again, with whatever weights it comes back,
            brings it all that it lacks; until then it serves what it holds.
        share: hold the weights once: base weights of the model that the engine keeps in the same dtype become views of
            the engine's, their own memory is freed, and the model trains on merged weights (`train_merged`) in the
            engine's memory. Between two pushes the engine is dirty from the trainer's first write on: `check` and
            `generate` refuse. `sync.sharing` says what is shared and what is not; `close` gives the model memory of
            its own. For one in-process `LLM` on each trainer rank, tensor_parallel_size 1, started on the model's base;
            the model may wait on the CPU, or on meta without ever being loaded. In sleep mode, `sleep` frees the KV
            cache alone.

    Raises:
        InvalidInput: an argument that does not fit.
        PushRefused: an engine that no push can reach, as far as that is known before the first push.
        MissingExtra: vLLM is not installed, and some engine is no URL.
    """

    awaited = "an AsyncLLM"

    _cache: CacheSleep | None = None

    @staticmethod
    def _control_of(engine: Any) -> Control:
        return control_of(engine)

    def _guard(self, control: Control, sharing: Sharing) -> None:
        from .cache_sleep import CacheSleep

        assert isinstance(control, LlmControl)
        cache = CacheSleep(control.engine)
        cache.guard()
        sharing.ends.callback(cache.release)
        self._cache = cache

    def _require(self, engines: Sequence[Any]) -> None:
        if all(isinstance(engine, str) for engine in engines):
            return  # a server is asked over HTTP, and a rank without a handle asks nobody
        with needed("VllmSync needs vLLM", "'lora-merge[vllm]'", "vllm"):
            import vllm  # noqa: F401

    def _complaint(self, model: nn.Module) -> str:
        return forward_complaint(model)

    def lora_request(self, version: int | None = None, *, tenant: str | None = None) -> Any:
        """Return what requests carry as `lora_request`: a `LoRARequest` in adapter mode, None in merged mode.

            outputs = llm.generate(prompts, sampling, lora_request=sync.lora_request())

        Pushes with `keep` make another one for each version: ask again after a push. Otherwise it is constant.
        `generate` sets it by itself.

        Args:
            version: one of those that are kept (`SyncReport.versions`); None for the newest.
            tenant: whose policy answers, where there are `tenants`. The merged one's requests carry None: ask for each
                request, as a push may merge another one.

        Raises:
            InvalidInput: that version is not kept, or none is; no tenant, where there are some; or a name that is none
                of them.
            PushRefused: no tenants were pushed yet.
        """
        found = self._version(version)
        if self._tenants is not None or tenant is not None:
            return self._tenant_request(tenant)
        if self._mode == "merged":
            return None
        from vllm.lora.request import LoRARequest

        if found is not None:
            return LoRARequest(name_of(found.version), ADAPTER_ID + found.version, path_of(found))
        return LoRARequest(ADAPTER_NAME, ADAPTER_ID, CONSTANT_PATH)

    def adapter_name(self, version: int | None = None) -> str:
        """Return what requests to a server of engines that keep versions give as `model`; answers have it there, too.

            client.completions.create(model=sync.adapter_name(), prompt=prompt)

        Args:
            version: as for `lora_request`.

        Raises:
            InvalidInput: that version is not kept, or none is.
        """
        found = self._version(version)
        if found is None:
            raise InvalidInput("engines keep no versions of an adapter here: push with mode='adapter' and keep=")
        return name_of(found.version)

    @staticmethod
    def version_of(answer: Any) -> int | None:
        """Return the version of an adapter with which an answer was computed, from its first token to its last; None
        where it had none.

            output = llm.generate(prompt, sampling, lora_request=sync.lora_request(17))[0]
            sync.version_of(output)  # 17

        Args:
            answer: see `adapter_versions.version_of`: vLLM's `RequestOutput`, or what its server has answered.
        """
        return version_of(answer)

    def _tenant_request(self, tenant: Any) -> Any:
        if self._tenants is None:
            raise InvalidInput(f"tenant={tenant!r} is for a VllmSync with tenants=[...]")
        if tenant is None:
            raise InvalidInput(f"say whose policy answers: tenant=..., one of {', '.join(self._tenants.names)}")
        self._tenants.check(tenant, "tenant")
        if self._tenants.bare(tenant):
            return None
        from vllm.lora.request import LoRARequest

        name = f"{ADAPTER_NAME}/{tenant}"
        return LoRARequest(name, tenant_id(tenant), f"{PATHS}{tenant}")

    def sleep(self) -> None:
        """Free the memory of the KV cache while weights that are shared stay (`share=True`). Its contents are
        forgotten. `generate` wakes it, and pushes leave it asleep.

            sync.sleep()  # before an update that wants the memory

        Not collective: each rank's engine sleeps by itself.

        Raises:
            InvalidInput: no weights are shared, the engine has no sleep mode, or it has requests in flight.
        """
        self._shared_cache("sleep").sleep()

    def wake_up(self) -> None:
        """Give the KV cache that `sleep` has freed its memory back, empty; nothing where it is awake.

            sync.wake_up()

        Raises:
            InvalidInput: no weights are shared.
        """
        self._shared_cache("wake_up").wake_up()

    def _shared_cache(self, name: str) -> CacheSleep:
        if self.sharing is None or self._cache is None or self._closed:
            raise InvalidInput(
                f"{name}() of a VllmSync is for share=True, where the weights have to stay: call {name}() of the engine"
            )
        return self._cache

    def generate(
        self, *args: Any, version: int | None = None, tenant: str | Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        """Check that the engine holds what was pushed last, then call `generate` of the in-process `LLM`.

            outputs = sync.generate(prompts, sampling)

        Args:
            args: as for `LLM.generate`.
            version: as for `lora_request`.
            tenant: as for `lora_request`; or a list, one for each prompt.
            kwargs: as for `LLM.generate`; `lora_request` is set here.

        Raises:
            InvalidInput: there is not exactly one engine, or it is not an `LLM` in this process; or
                `lora_request` was given.
            PushRefused: the engine holds something else; see `check`.
        """
        if "lora_request" in kwargs:
            raise InvalidInput(
                "generate() sets lora_request by itself; for another adapter call generate() of the engine"
            )
        controls = self._trainer.controls
        if len(controls) != 1 or type(controls[0]) is not LlmControl or not hasattr(controls[0].handle, "generate"):
            raise InvalidInput(
                "generate() is for one in-process LLM. Ask other engines by their own calls: after push() they answer "
                "as the policy; in adapter mode pass lora_request() to them"
            )
        self.check()
        if self.sharing is not None and self._cache is not None:
            self._cache.wake_up()
        if tenant is None or isinstance(tenant, str):
            request = self.lora_request(version, tenant=tenant)
        else:
            request = [self.lora_request(version, tenant=name) for name in tenant]
        return controls[0].handle.generate(*args, lora_request=request, **kwargs)


def compiled_classes(model: nn.Module | Sequence[nn.Module]) -> list[str]:
    """Return the classes of a trainer's modules that an engine in this process has changed.

    vLLM's Transformers backend (models that it has no class of its own for) decorates transformers' decoder classes
    themselves. `__call__` of instances that were made before then asks for attributes which they lack, and passes by
    hooks; making another instance asks for vLLM's configuration.
    """
    found = {
        type(module).__name__
        for part in ([model] if isinstance(model, nn.Module) else model)
        for module in part.modules()
        # This is asked each time, not once for a class: its bases are what changes.
        if "do_not_compile" not in module.__dict__ and any(base.__name__ == _COMPILED for base in type(module).__mro__)
    }
    return sorted(found)


def forward_complaint(model: Any) -> str:
    """Return a warning if the forward of a trainer's model fails because its classes were changed; else ""."""
    names = compiled_classes(model if isinstance(model, nn.Module | list | tuple) else [])
    if not names:
        return ""
    return (
        f"an engine in this process has changed {', '.join(names)} of transformers for itself (vLLM's Transformers "
        "backend), and the trainer's forward of the same class fails with \"no attribute 'do_not_compile'\": start the "
        "engine in a process of its own (VLLM_ENABLE_V1_MULTIPROCESSING=1, an AsyncLLM, a Ray actor, a server)"
    )
