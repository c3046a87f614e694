"""Live models as merging sees them: what their adapters add, which tensors they stream, who holds them together.

Everything that depends on the trainer is behind `Live`: PEFT's models, plain, under FSDP or ZeRO-3, are in
`peft/live.py`, Megatron's chunks in `megatron/live.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..names import check_module
from ..shards import Address
from ..shards.ranks import Ranks
from .conversion import Conversion
from .delta import Delta, Job
from .part import Part
from .pausing import pause, training_of
from .snapshot import Layed, Owners, Snapshot


class Live(Protocol):
    """A model as it is at this moment. Making one is no collective, nor is anything but `united` and `everyones`.

    Attributes:
        key: under which plans for it are kept.
        ranks: that hold one whole copy of it.
        merging: the ranks among them whose parts of an adapter make up the whole one.
        device: on which it computes, where its weights may lie elsewhere.
        sharded: whether ranks hold parts of tensors.
    """

    key: nn.Module
    ranks: Ranks
    merging: Ranks
    device: torch.device | None
    sharded: bool
    reader: Any
    """What merged the weights, where they are read as they lie: nothing adds to them then."""

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """See `names.walk`."""

    def snapshot(self, *, adapters: bool = True) -> Snapshot:
        """Return all that the methods below depend on, on this rank; taken once.

        Args:
            adapters: False: all that the parts without adapters depend on.
        """

    def adapters(self) -> tuple[list[object], Sequence[Delta]]:
        """Return its adapter layers and what they add.

        Raises:
            UnsupportedAdapter, AlreadyMerged, InvalidInput: as `read_deltas`.
        """

    def parts(self, *, adapters: bool, keep_tied: bool) -> dict[str, Part]:
        """Return what it streams, by name.

        Args:
            adapters: with what they add.
            keep_tied: every name of a tied weight.
        """

    def united(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """Return the parts of all ranks, those of which this one holds nothing too, in the same order everywhere.
        Collective over `ranks`."""

    def everyones(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Return the deltas of all ranks, in the same order everywhere. Collective over `ranks`."""

    def conversion(self) -> Conversion:
        """Return the conversion of its tensors to those of the checkpoint."""

    def weights(self, deltas: Sequence[Delta]) -> dict[Address, Tensor]:
        """Return what is written when deltas, all that `adapters` gave, are merged in place."""

    def owners(self, weights: Mapping[Address, Tensor]) -> Owners:
        """Return the places that hold `weights` by themselves: none where FSDP puts parameters in and takes them
        out."""

    def layouts(self, weights: Mapping[Address, Tensor]) -> Sequence[Layed]:
        """Return the shapes, strides and dtypes of `weights`."""

    def jobs(self, deltas: Sequence[Delta], copy: Callable[[Address], Tensor]) -> AbstractContextManager[Sequence[Job]]:
        """Return what is to be merged in place; tied weights are separate inside, by copies of the bases of
        `weights`."""

    def off(self) -> None:
        """Make the adapters' forwards add nothing from now on."""

    def on(self) -> None:
        """Undo `off`, if it was called. May be called repeatedly."""

    def reshard(self) -> None:
        """Give back what is gathered of what `jobs` merges: on every rank that holds the model, or on none."""


def live(model: Any, *, as_it_lies: bool = False) -> Live:
    """Wrap a trainer's model: PEFT's, or Megatron's chunks.

    Args:
        model: if it is trained on merged weights, its base comes back before it is read.
        as_it_lies: that model is read as it is trained instead: with its adapters in the base weights, where any act.

    Raises:
        InvalidInput: it is neither.
    """
    from .megatron.live import Megatron
    from .peft.live import Peft

    training = training_of(model) if as_it_lies else None
    if training is not None and training.hold():
        return Peft(model, training)
    pause(model)
    return Megatron(model) if check_model(model) else Peft(model)


def check_model(model: Any) -> bool:
    """Return True if a model is Megatron's; raise `InvalidInput` unless it is a model."""
    from .megatron.live import is_megatron

    if is_megatron(model):
        return True
    check_module(model)
    return False
