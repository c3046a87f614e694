"""Kinds of transport, as the pusher's side sees them."""

from __future__ import annotations

import pytest

from lora_merge.engine.push import channels
from lora_merge.engine.push.channels import Trainer, _rounds
from lora_merge.engine.transport import routing
from lora_merge.engine.transport.routing import Route
from lora_merge.shards.ranks import Ranks


def test_kinds_say_themselves_where_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pusher's side knows none by its name: under other names they serve the same workers."""
    named = {"local": "inside", "write": "mapped"}
    kinds = {named.get(kind, kind): transport for kind, transport in routing.TRANSPORTS.items()}
    for module in (routing, channels):
        monkeypatch.setattr(module, "TRANSPORTS", kinds)
    places = {(0, 0): (0, "shm"), (1, 0): (0, "inside"), (1, 1): (0, "inside"), (2, 0): (0, "mapped")}
    placed = Route(frozenset({0, 1}), ())
    assert _rounds(places) == [[(0, 0), (2, 0)], [(1, 0)], [(1, 1)]]
    trainer, sent = Trainer([], Ranks()), Route(frozenset(), (0, 1))
    trainer._places = places
    assert trainer.kinds(sent) == ("inside", "mapped", "shm")
    trainer._places = {(0, 0): (0, "shm"), (1, 0): (0, "inside")}
    assert trainer.kinds(placed) == ("inside", "mapped")
    trainer._places = {(1, 0): (0, "inside")}
    assert trainer.kinds(placed) == ("inside",)
    assert routing.without_buckets() == "mapped"
