"""Unwritten: what a pass reads stays as it was when the pass began, or the pass ends in an error."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

from ..errors import AlreadyMerged, InvalidInput
from ..models.claims import check_base
from ..models.steps import stepped, steps
from .source import Source

_NAMED = 5
"""How many tensors an error names."""
_version = attrgetter("_version")


class Unwritten:
    """The version counters of all that a pass reads, as they are when it is made; `check` then looks at them again.

    A bucket is merged when the consumer asks for it. So an optimizer step in the middle of a pass leaves old weights in
    the buckets before it and new ones after it, which is no policy at all.

    Writes that change no version counter (`.data`, kernels of others) are not found, except an optimizer's and PEFT's
    own merge.

    Args:
        source: of the pass.
        layers: see `layers_of`.
    """

    def __init__(self, source: Source, layers: Sequence[int]) -> None:
        self._tensors, self._modules = source.counted, source.modules
        # A writer that has let go of the model runs plans that are made: an update's second pass, say.
        self._layers = [source.modules[at] for at in layers] if source.modules and source.reader is None else []
        self._steps = steps()
        try:
            self._versions = list(map(_version, self._tensors))
        except RuntimeError:  # tensors of inference mode have no counter
            self._tensors = [tensor for tensor in self._tensors if not tensor.is_inference()]
            self._versions = list(map(_version, self._tensors))

    def check(self) -> None:
        """Raise `InvalidInput` where something was written since."""
        now = list(map(_version, self._tensors))
        if now != self._versions:
            pairs = zip(self._tensors, self._versions, now, strict=True)
            names = self._names([tensor for tensor, before, after in pairs if before != after])
            raise InvalidInput(f"{names}: written while the model was streamed. {_ADVICE}")
        if stepped(self._steps, self._tensors):
            raise InvalidInput(f"an optimizer stepped while the model was streamed. {_ADVICE}")
        try:
            check_base(self._layers)
        except AlreadyMerged as error:
            raise InvalidInput(f"PEFT merged adapters while the model was streamed: {error}. {_ADVICE}") from error

    def _names(self, tensors: Sequence[Tensor]) -> str:
        """Return the names of some of the tensors, where the model has them under names."""
        ids = set(map(id, tensors))
        everything = [pair for m in self._modules[:1] for pair in (*m.named_parameters(), *m.named_buffers())]
        named = [name for name, tensor in everything if id(tensor) in ids]
        if not named:
            return f"{len(tensors)} of the model's tensors"
        more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
        return ", ".join(named[:_NAMED]) + more


_ADVICE = (
    "Tensors that this pass gave before are of the weights as they were, and later ones may be of what they are now: "
    "do not use them together. Stream again, and train, load or merge between two passes"
)


def layers_of(source: Source) -> list[int]:
    """Return the numbers of PEFT's layers among the modules: the same as long as the key of the reading is."""
    return [at for at, module in enumerate(source.modules) if "merged_adapters" in vars(module)]
