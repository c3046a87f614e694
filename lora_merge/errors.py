"""The exceptions of the package. All but `NotRestored` and `PushFailed` are raised before the first byte is written."""


class LoraMergeError(Exception):
    """Base class of everything that this package raises on purpose."""


class InvalidInput(LoraMergeError, ValueError):
    """An argument, tensor, shape, dtype, device or scaling does not fit; names it, what was expected and what came."""


class UnsupportedAdapter(LoraMergeError, NotImplementedError):
    """The adapter has no exact merge; names the module and the reason."""


class AlreadyMerged(LoraMergeError, RuntimeError):
    """The weights hold an adapter already; says how to go on."""


class NotRestored(LoraMergeError, RuntimeError):
    """Weights were written while they were merged, and their base cannot be restored; names them. Others are back."""


class BackendUnavailable(LoraMergeError, RuntimeError):
    """`LORA_MERGE_BACKEND` asks for a backend that cannot run here, or none can."""


class MissingExtra(LoraMergeError, ImportError):
    """An optional dependency is not installed, or fails to import; names the extra that brings it, or what failed."""


class PushRefused(LoraMergeError, RuntimeError):
    """A model and an engine do not fit, or the engine cannot be pushed to; nothing was written, it is as before."""


class PushFailed(LoraMergeError, RuntimeError):
    """A push broke off half-way; says which engines are dirty and which are valid. The next push heals dirty ones."""
