"""Who takes what of an update, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import models
import policies
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory import assert_nobody_holds_weights
from torch import Tensor

from lora_merge import MergedWeights
from lora_merge.engine.payload.recipients import Recipients, shares_of
from lora_merge.engine.payload.update import UpdateBuilder, UpdatePayload
from lora_merge.engine.transport.routing import Route
from lora_merge.stream.window import Window

WORKERS = [(0, 0), (0, 1), (1, 0), (1, 1)]


def delta(experts: int | None) -> Any:
    return SimpleNamespace(experts=experts)


def expert(number: int, many: int = 1) -> Window:
    return Window((number, 0, 0), (many, 8, 4), (None, 1, 2) if many == 1 else (0, 1, 2))


def plain() -> Window:
    return Window((0, 0), (8, 4), (0, 1))


def test_nothing_is_cut_where_all_take_all() -> None:
    deltas = [delta(None), delta(4)]
    tensors = [("plain", 0, plain()), *((f"expert {e}", 1, expert(e)) for e in range(4))]
    everybody = Recipients(dict.fromkeys(WORKERS, "same"), {"same": []})
    for recipients in (None, everybody):
        assert shares_of(deltas, tensors, recipients) == [(0, 0, 1, None), (1, 0, 4, None)]


@pytest.mark.parametrize("owner", [lambda e: e // 2, lambda e: e % 2], ids=["runs", "in turns"])
def test_experts_of_two_workers(owner: Any) -> None:
    """Each engine has one worker for each half; several tensors are made of the same expert."""
    names = {e: [f"gate {e}", f"up {e}"] for e in range(4)}
    ignored = {str(w): [name for e in range(4) if owner(e) != w for name in names[e]] for w in range(2)}
    recipients = Recipients({place: str(place[1]) for place in WORKERS}, ignored)
    tensors = [("plain", 0, plain()), *((name, 1, expert(e)) for e in range(4) for name in names[e])]
    first, *found = shares_of([delta(None), delta(4)], tensors, recipients)
    assert first == (0, 0, 1, None)
    whose = [w for e in range(4) for w in [owner(e)]]
    halves = [frozenset(place for place in WORKERS if place[1] == w) for w in range(2)]
    assert [s.recipients for s in found for _ in range(s.many)] == [halves[w] for w in whose]
    assert [s.first for s in found] == ([0, 2] if whose == [0, 0, 1, 1] else [0, 1, 2, 3])


def test_a_tensor_of_all_experts_goes_to_all() -> None:
    """Of a checkpoint that holds them in one tensor: who ignores its neighbour takes it all the same."""
    recipients = Recipients({(0, 0): "a", (0, 1): "b"}, {"a": ["bias 1"], "b": ["bias 0"]})
    tensors = [("experts", 0, expert(0, 4)), *((f"bias {e}", 0, expert(e)) for e in range(2))]
    assert shares_of([delta(4)], tensors, recipients) == [(0, 0, 4, None)]


def test_what_nobody_takes_goes_to_nobody() -> None:
    recipients = Recipients({(0, 0): "a", (0, 1): "b"}, {"a": ["x", "y"], "b": ["y"]})
    tensors = [("x", 0, plain()), ("y", 1, plain())]
    assert shares_of([delta(None), delta(None)], tensors, recipients) == [
        (0, 0, 1, frozenset([(0, 1)])),
        (1, 0, 1, frozenset()),
    ]


def test_a_rank_that_begins_with_any_bucket_sends_what_the_adapters_are_now() -> None:
    """DoRA's row factors are taken, and several adapters laid side by side, before the first bucket of a pass."""
    options: dict[str, Any] = {"target_modules": policies.LINEARS, "use_dora": True}
    model = models.with_lora(policies.qwen2, **options)
    base = MergedWeights(model, adapters=False)
    names = list(base.bucket_writer().entries)
    ignored = {str(layer): [name for name in names if f"layers.{layer}." in name] for layer in range(2)}
    recipients = Recipients({(0, 0): "1", (0, 1): "0"}, ignored)
    updates = UpdateBuilder(MergedWeights(model, bucket_bytes=1 << 14))
    update = updates(base, base.bucket_writer(), recipients)
    assert set(update.recipients.values()) == {frozenset([(0, 0)]), frozenset([(0, 1)])}
    factors = [i for i, slots in enumerate(update.table) if i in update.recipients]
    assert sum("row_scale" in slot.name for i in factors for slot in update.table[i]) == 14

    def filled(indices: list[int]) -> list[Tensor]:
        buffers = []
        with update.passing():
            for index in indices:
                buffers.append(torch.zeros(update.capacity, dtype=torch.uint8))
                update.fill(index, buffers[-1], {})
        return buffers

    for at in factors:
        policies.train(model, at)
        assert updates(base, base.bucket_writer(), recipients) is update
        (alone,) = filled([at])
        assert torch.equal(alone, filled(list(range(at + 1)))[-1]), at


def made(model: Any) -> UpdatePayload:
    """The update of a model that one worker takes."""
    base = MergedWeights(model, adapters=False)
    updates = UpdateBuilder(MergedWeights(model))
    update = updates(base, base.bucket_writer(), Recipients({(0, 0): "a"}, {"a": []}))
    base.release()
    return update


def filled(update: UpdatePayload) -> list[Tensor]:
    buffers = [torch.zeros(update.capacity, dtype=torch.uint8) for _ in update.table]
    with update.passing():
        for index, buffer in enumerate(buffers):
            update.fill(index, buffer, {})
    return buffers


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_no_weight_is_held_between_pushes(options: dict[str, Any]) -> None:
    """What a trainer offloads is free, also if the engine merges."""
    model = models.with_lora(policies.qwen2, target_modules=policies.LINEARS, **options)
    update = made(model)
    filled(update)
    assert_nobody_holds_weights(model)


def test_buckets_on_another_device_than_the_model() -> None:
    """A folder is read on the CPU and may be sent from a GPU: no kernel reads what lies elsewhere ("cpu:0" is another
    device than "cpu" to torch)."""
    model = models.with_lora(policies.qwen2, target_modules=policies.LINEARS, use_dora=True)
    update, other = made(model), made(model)
    other.device = torch.device("cpu:0")
    for mine, wanted in zip(filled(other), filled(update), strict=True):
        assert torch.equal(mine, wanted)
    live = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert live.isdisjoint(t.untyped_storage().data_ptr() for t in other._gathered().tensors.values())


@given(data=st.data())
def test_each_worker_hears_of_its_buckets_and_no_host_of_the_others(data: Any) -> None:
    kinds = st.sampled_from(["nccl", "tcp", "shm", "ipc", "local"])
    served = {place: (data.draw(st.integers(0, 1)), data.draw(kinds)) for place in WORKERS}
    hosts = {place: data.draw(st.sampled_from("ab")) for place in WORKERS}
    recipients = data.draw(st.dictionaries(st.integers(0, 5), st.frozensets(st.sampled_from(WORKERS))))
    route = Route(frozenset(), tuple(range(6)), None, recipients)
    told = {place: route.wire_spec(place, served, hosts) for place in WORKERS}
    for place, what in told.items():
        assert what["own"] == [i for i in range(6) if place in recipients.get(i, WORKERS)]
        assert set(what["own"]) <= set(what["sent"])
        rank, kind = served[place]
        beside = [at for at in WORKERS if served[at][0] == rank and (served[at][1] == "local") == (kind == "local")]
        if kind in ("shm", "ipc"):
            assert what["sent"] == route.by(beside), "all that its rank hands over"
        if kind == "tcp":
            host = [at for at in beside if (at[0], hosts[at]) == (place[0], hosts[place])]
            assert all(set(recipients.get(i, WORKERS)) & set(host) for i in what["sent"])
        if kind == "nccl":
            assert what["sent"] == what["own"]
            group = {at for at in beside if at[0] == place[0] and served[at][1] == "nccl"}
            assert what["apart"] == [i for i in what["own"] if not group <= set(recipients.get(i, WORKERS))]
