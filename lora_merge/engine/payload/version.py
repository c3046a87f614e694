"""A new version of an adapter, which engines receive while they go on with the versions that they have."""

from __future__ import annotations

from ..transport.routing import Route
from .adapter import AdapterSource
from .base import Payload, Terms, WireSpecs, WorkerOp


class VersionPayload(Payload):
    """An adapter that workers put beside the versions before it.

    Args:
        source: the adapter.
        staged: whether it comes beside the engine's work; else between two of its steps.
    """

    writes = False
    merges = True
    finishes = False  # a version is added when all workers of all engines have it
    announced = False

    def __init__(self, source: AdapterSource, staged: bool) -> None:
        self._source, self.staged = source, staged

    @property
    def sent(self) -> AdapterSource:
        return self._source

    def transfer_op(self, terms: Terms, route: Route, comes: WireSpecs | None) -> WorkerOp | None:
        received = self._source.transfer_op(terms, route, comes)
        return received._replace(op="stage_version" if self.staged else "receive_version")
