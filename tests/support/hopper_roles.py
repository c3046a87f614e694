"""A model of the roles in csrc/cuda/sm90/merge.cuh: every barrier, turn and copy, and no arithmetic.

Roles take steps in random order, so that a run shows what one schedule does: a role that waits for ever, or a box that
is read while it holds something else. The model is kept like the kernel by hand: what changes there changes here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Steps = Iterator[bool]
"""A role: whether it got on."""
SLOTS, STORE_WARPS, NEXT = 8, 2, 2


class Stuck(AssertionError):
    """Nobody gets on."""


@dataclass
class Barrier:
    """mbarrier: a phase is complete when all have arrived, and the copies that it was told of are there."""

    count: int
    phase: int = 0
    arrived: int = 0
    copies: int = 0

    def arrive(self, copies: int = 0) -> None:
        assert self.arrived < self.count
        self.arrived += 1
        self.copies += copies
        self._look()

    def landed(self) -> None:
        self.copies -= 1
        self._look()

    def state(self) -> tuple[int, int, int]:
        return self.phase, self.arrived, self.copies

    def _look(self) -> None:
        if self.arrived == self.count and self.copies == 0:
            self.phase, self.arrived = self.phase + 1, 0

    def wait(self, parity: int) -> Steps:
        """Knows of the last two phases alone, as the GPU's does."""
        while self.phase % 2 == parity:
            yield False


@dataclass
class Turn:
    """A barrier of the hardware: one role waits, another one arrives."""

    there: int = 0
    over: int = 0

    def arrive(self) -> None:
        self.there += 1
        if self.there == 2:
            self.there, self.over = 0, self.over + 1

    def sync(self) -> Steps:
        before = self.over
        self.arrive()
        while self.over == before:
            yield False


@dataclass
class Ring:
    stage: int = 0
    parity: int = 0

    def advance(self, stages: int, by: int = 1) -> Ring:
        self.stage += by
        if self.stage >= stages:
            self.stage, self.parity = self.stage - stages, self.parity ^ 1
        return self


@dataclass
class Launch:
    """A launch: its tiles (`Tiles` in shapes.h), and what one block gets.

    Args:
        boxes: of a strip.
        planes: 1 adapters of 16 bits, 2 pairs, 3 float32 ones in parts.
        products: 2 where one update goes and another one comes.
        chunks: of a product.
        groups: that multiply.
        units: tiles of each unit, one after the other.
        ahead: whether lora_A of float32 adapters is split ahead: groups then have no turns, and any of them any box.
        in_pairs: whether a group has two boxes side by side, half a tile; halves go round the groups, without turns.
        blocks: whether the stage of every other tile of a unit is kept until the next one is done, or the unit is.
    """

    boxes: int
    held: int
    stages: int
    planes: int
    products: int
    chunks: int
    groups: int
    units: Sequence[int]
    ahead: bool = False
    in_pairs: bool = False
    blocks: bool = False
    full: list[Barrier] = field(init=False)

    def __post_init__(self) -> None:
        def barriers(number: int, count: int) -> list[Barrier]:
            return [Barrier(count) for _ in range(number)]

        self.full, self.empty = barriers(self.stages, 1), barriers(self.stages, 1)
        self.done = barriers(self.stages, self.groups)
        self.full_A = barriers(self.held, 1)
        self.splits = self.planes == 3 and not self.ahead  # the groups do
        self.any_box = self.in_pairs or (self.planes == 3 and self.ahead)
        self.empty_A = barriers(self.held, self.groups if self.boxes == 1 or self.any_box else 1)
        self.next_A, self.split = barriers(NEXT, 1), Ring()
        self.coming: list[Any] = [None] * NEXT
        self.given = barriers(SLOTS, 1)
        self.turns = [Turn() for _ in range(self.groups)]
        self.stage: list[Any] = [None] * self.stages
        self.tiles: list[Any] = [None] * self.stages
        self.lora_A: list[Any] = [None] * self.held
        self.slots: list[Any] = [None] * SLOTS
        self.under_way: list[Callable[[], None]] = []
        self.out: list[Any] = []

    def copy(self, to: list[Any], at: int, what: Any, barrier: Barrier) -> None:
        """Begins; lands some time."""
        to[at] = "being written"

        def land() -> None:
            to[at] = what
            barrier.landed()

        self.under_way.append(land)

    def produce_tiles(self) -> Steps:
        ring, number = Ring(), 0

        def take(n: int) -> None:
            self.slots[n % SLOTS] = n if n < len(self.units) else None
            self.given[n % SLOTS].arrive()

        take(0)
        for n, count in enumerate(self.units):
            for row in range(count):
                if row == count - 1:
                    take(n + 1)
                yield from self.empty[ring.stage].wait(ring.parity ^ 1)
                self.tiles[ring.stage] = (number, n, row == 0, row == count - 1)
                self.full[ring.stage].arrive(1)
                self.copy(self.stage, ring.stage, number, self.full[ring.stage])
                ring.advance(self.stages)
                number += 1
                yield True
        for _ in range(STORE_WARPS):
            yield from self.empty[ring.stage].wait(ring.parity ^ 1)
            self.tiles[ring.stage] = None
            self.full[ring.stage].arrive()
            ring.advance(self.stages)
            yield True

    def produce_A(self) -> Steps:
        n, rings = 0, [Ring() for _ in range(self.groups)]
        while True:
            yield from self.given[n % SLOTS].wait(n // SLOTS % 2)
            if self.slots[n % SLOTS] is None:
                return
            assert self.slots[n % SLOTS] == n
            if self.planes == 3 and self.ahead:
                yield from self.split_unit(n, rings[0])
                n += 1
                continue
            for number in range(self.boxes):
                group = number % self.groups if self.splits else 0
                ring, own = (rings[group], self.held // self.groups) if self.splits else (rings[0], self.held)
                at = ring.stage + group * own
                yield from self.empty_A[at].wait(ring.parity ^ 1)
                self.full_A[at].arrive(1)
                self.copy(self.lora_A, at, (n, number), self.full_A[at])
                ring.advance(own)
                yield True
            n += 1

    def split_unit(self, n: int, ring: Ring) -> Steps:
        coming, chunks = Ring(self.split.stage, self.split.parity), self.boxes * self.products

        def load(chunk: int) -> None:
            if chunk < chunks:
                self.next_A[coming.stage].arrive(1)
                self.copy(self.coming, coming.stage, (n, chunk), self.next_A[coming.stage])
            coming.advance(NEXT)

        load(0)
        for chunk in range(chunks):
            load(chunk + 1)
            if chunk % self.products == 0:
                yield from self.empty_A[ring.stage].wait(ring.parity ^ 1)
            yield from self.next_A[self.split.stage].wait(self.split.parity)
            self.lora_A[ring.stage] = "being written"
            yield True
            self.read(self.coming, self.split.stage, (n, chunk))
            self.split.advance(NEXT)
            if chunk % self.products == self.products - 1:
                self.lora_A[ring.stage] = (n, chunk // self.products)
                self.full_A[ring.stage].arrive()
                ring.advance(self.held)
            yield True

    def store(self, which: int) -> Steps:
        ring, t = Ring(), 0
        while True:
            if t % STORE_WARPS == which:
                yield from self.done[ring.stage].wait(ring.parity)
                if self.tiles[ring.stage] is None:
                    return
                self.out.append(self.stage[ring.stage])
                yield True
                self.empty[ring.stage].arrive()
            t += 1
            ring.advance(self.stages)

    def multiply(self, group: int) -> Steps:
        alone, own = self.boxes == 1, self.held // self.groups
        box, stops, tile_number, ring, ring_A = group, 0, 0, Ring(), Ring()
        end, step, half, row = self.boxes, 1 if self.in_pairs else self.groups, group, 0
        upper: tuple[int, int] | None = None  # stage and number of a tile that is kept
        at_once = {2: 8, 3: 2, 4: 2}[self.groups] // self.products  # kChunksOfTurn
        turns = -(-self.chunks // at_once) if self.planes == 1 else self.products

        def pass_turn() -> None:
            self.turns[(group + 1) % self.groups].arrive()

        if group == self.groups - 1 and not self.any_box:
            pass_turn()
        while stops < STORE_WARPS:
            yield from self.full[ring.stage].wait(ring.parity)
            tile = self.tiles[ring.stage]
            if tile is not None:
                number, unit, first, last = tile
                assert number == tile_number
                if alone and box >= self.boxes:  # the other group's; both have seen each unit's lora_A come and go
                    if first:
                        yield from self.full_A[ring_A.stage].wait(ring_A.parity)
                    if last:
                        self.empty_A[ring_A.stage].arrive()
                if self.in_pairs:  # whole blocks, or tiles, go round the groups
                    box, end = (2 * half, 2 * half + 2) if half < 2 else (self.boxes, self.boxes)
                    for i in range(self.boxes if first else 0):
                        at = Ring(ring_A.stage, ring_A.parity).advance(self.held, i)
                        yield from self.full_A[at.stage].wait(at.parity)
                while box < end:
                    at = Ring(ring_A.stage, ring_A.parity)
                    if self.splits and first:
                        there = group * own + ring_A.stage
                        yield from self.full_A[there].wait(ring_A.parity)
                        self.read(self.lora_A, there, (unit, box))
                        self.empty_A[there].arrive()
                        ring_A.advance(own)
                        yield True
                    if not self.splits:
                        at.advance(self.held, box)
                        if (first or self.any_box) and not self.in_pairs:
                            yield from self.full_A[at.stage].wait(at.parity)
                    self.read(self.stage, ring.stage, number)
                    for turn in range(turns):
                        if not self.any_box and (not alone or turn == 0):
                            yield from self.turns[group].sync()
                        if not self.splits:
                            self.read(self.lora_A, at.stage, (unit, box))
                        yield True
                        if not self.any_box and (not alone or turn == turns - 1):
                            pass_turn()
                        yield True
                        if not self.splits:
                            self.read(self.lora_A, at.stage, (unit, box))
                    if not self.splits and last and not self.any_box:
                        self.empty_A[at.stage].arrive()
                    yield True
                    self.read(self.stage, ring.stage, number)
                    box += step
                if not self.in_pairs:
                    box -= self.boxes
                if self.any_box and last:
                    for i in range(self.boxes):
                        at = Ring(ring_A.stage, ring_A.parity).advance(self.held, i)
                        if not self.in_pairs:
                            yield from self.full_A[at.stage].wait(at.parity)
                        self.empty_A[at.stage].arrive()
                if not self.splits and last:
                    ring_A.advance(self.held, self.boxes)
                tile_number += 1
                row = 0 if first else row + 1
                owns, over = half < 2, not self.blocks or last or row % 2 == 1
                if over:
                    half = half + self.groups - 2 if half < 2 else half - 2
                if owns and not over:
                    upper = ring.stage, number
                    ring.advance(self.stages)
                    continue
                if upper is not None:
                    self.read(self.stage, *upper)
                    self.done[upper[0]].arrive()
                    upper = None
                    yield True
            self.done[ring.stage].arrive()
            stops += tile is None
            ring.advance(self.stages)

    def state(self) -> list[tuple[int, ...]]:
        every = (*self.full, *self.empty, *self.done, *self.full_A, *self.empty_A, *self.given, *self.next_A)
        return [barrier.state() for barrier in every] + [(turn.there, turn.over) for turn in self.turns]

    @staticmethod
    def read(where: list[Any], at: int, wanted: Any) -> None:
        assert where[at] == wanted, f"{where[at]} instead of {wanted}"

    def run(self, seed: int) -> None:
        """Raises what goes wrong in one schedule."""
        chance = random.Random(seed)
        roles = {"tiles": self.produce_tiles(), "A": self.produce_A()}
        roles |= {f"store {which}": self.store(which) for which in range(STORE_WARPS)}
        roles |= {f"group {group}": self.multiply(group) for group in range(self.groups)}
        weights = {name: chance.choice((1, 1, 5, 25)) for name in [*roles, "copies"]}
        waiting: set[str] = set()
        while roles:
            if self.under_way and (len(waiting) == len(roles) or chance.random() * 30 < weights["copies"]):
                self.under_way.pop(chance.randrange(len(self.under_way)))()
                waiting.clear()
            if len(waiting) == len(roles):
                raise Stuck(sorted(roles))
            names = [name for name in roles if name not in waiting]
            name, before = chance.choices(names, [weights[name] for name in names])[0], self.state()
            try:
                got_on = next(roles[name])
            except StopIteration:
                del roles[name]
                got_on = True
            waiting = set() if got_on else waiting | {name} if self.state() == before else {name}
        assert sorted(self.out) == list(range(sum(self.units)))
        assert not any(turn.over and turn.there > 1 for turn in self.turns)
