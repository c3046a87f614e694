"""The exceptions of the package. All but `NotRestored` and `PushFailed` are raised before the first byte
is written."""


class LoraMergeError(Exception):
    """Base class of everything that this package raises on purpose."""


class InvalidInput(LoraMergeError, ValueError):
    """A tensor, a shape, a dtype, a device, a scaling or a table that cannot be merged; names the tensor."""


class UnsupportedAdapter(LoraMergeError, NotImplementedError):
    """An adapter that has no exact merge here; names the module and the reason."""


class AlreadyMerged(LoraMergeError, RuntimeError):
    """The model already holds merged weights; says how to go on."""


class NotRestored(LoraMergeError, RuntimeError):
    """Merged weights were written meanwhile, so that their base cannot be brought back; names them."""


class BackendUnavailable(LoraMergeError, RuntimeError):
    """`LORA_MERGE_BACKEND` asks for a backend that cannot run here, or none can."""


class MissingExtra(LoraMergeError, ImportError):
    """An optional dependency is not installed; names the extra that brings it."""


class PushRefused(LoraMergeError, RuntimeError):
    """Something does not fit between a model and an engine; nothing was sent, the engine is as before."""


class PushFailed(LoraMergeError, RuntimeError):
    """A push broke off half-way; says which engines are dirty and which are valid. The next push heals them."""
