"""Replays which gathers a step starts under ZeRO-3, from the recorded calls of the model's modules (`calls.py`).

`Gatherer` decides, as in the engine, what has to be gathered and what is gathered ahead, and `Walk` which units a
backward comes to. Their units have no weights here: they only count how often they are gathered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from zeroshard.comm.pending import Pending
from zeroshard.model.paths import parent
from zeroshard.planned.parts import PlannedUnit
from zeroshard.planning.calls import Calls, Event
from zeroshard.runtime.calls import Visit
from zeroshard.runtime.gather import Gatherer
from zeroshard.runtime.needs import NeededUnits
from zeroshard.runtime.walk import Walk
from zeroshard.storage.pool import PoolBuffer
from zeroshard.storage.weights import Residency


class _Weights:
    """In place of `storage.weights.Weights`, and of its buffer. `gathered`: phase -> how often they were gathered."""

    borrows, rests_in_full, scopes, pending = True, False, 0, Pending()
    place = ...  # not None: they need no memory of a pool buffer

    def __init__(self) -> None:
        self.state, self.in_use, self.shown = Residency.SHARDED, 0, False
        self.gathered = Counter[str]()
        self.absent, self.buffer = SimpleNamespace(), self

    @property
    def is_passing(self) -> bool:
        return not self.in_use

    def gather(self, collectives: object, phase: str, full: object) -> None:
        self.gathered[phase] += 1
        self.state = Residency.RESIDENT

    def arrive(self) -> None:
        """They have."""

    def show(self) -> None:
        self.shown = True

    def put_away(self, *, after_forward: bool = True) -> None:
        self.shown = False

    def make_room(self) -> None:
        self.state, self.shown = Residency.SHARDED, False


class _Unit:
    """In place of `storage.unit.Unit`."""

    def __init__(self, planned: PlannedUnit) -> None:
        self.planned, self.spec, self.layout, self.name = planned, planned.spec, planned.layout, planned.spec.name
        self.weights = _Weights()


class _Pool:
    """In place of `storage.pool.Pool`, without memory."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.buffers: list[PoolBuffer] = []

    def buffer(self: Any, kind: Any, num_bytes: int, user: Any, why: str = "") -> PoolBuffer:
        self.buffers.append(PoolBuffer(self, kind, num_bytes, user, None))
        return self.buffers[-1]  # type: ignore[no-any-return]


class _Collectives:
    """In place of `comm.collectives.Collectives`."""

    def give_order(self, *order: object) -> None:
        """Nobody follows."""


@dataclass(eq=False)
class _Needed(NeededUnits[Any]):
    """What the calls of a module need. `around`: of the modules around it that need as much; while one of them runs,
    the calls of this one count for nothing."""

    around: list[_Needed] = field(default_factory=list)


class Replay:
    """Replays the micro-batches of a step, one after the other."""

    def __init__(self, units: Sequence[PlannedUnit], calls: Calls) -> None:
        self._units: Any = [_Unit(unit) for unit in units]
        collectives: Any = _Collectives()
        pool: Any = _Pool()
        self._gatherer, self._buffers = Gatherer(self._units, collectives, pool), pool.buffers
        self._num_buffers = len(self._buffers)
        self._gatherer.during = lambda: "backward" if self._is_in_backward else "forward"
        self._needs = _needs(self._units, calls.number_of)
        self._events = [event for event in calls.events if event.module in self._needs]
        self._task, self._trains = -1, False
        self._walk = Walk(lambda: self._task, lambda unit, next_units: True)
        self._walk.gatherer = self._gatherer
        self._running: list[tuple[int, _Needed]] = []
        self._made: dict[int, list[Visit]] = {}  # call -> its visits

    def micro_batch(self) -> None:
        for event in self._events:
            self._task = event.task
            {"begin": self._begin, "end": self._end, "grad": self._grad}[event.kind](event)
        self._walk.visit_from(0)
        self._walk.end()
        self._trains = False
        self._running.clear()
        self._made.clear()
        self._gatherer.end_backward()

    def gathered(self) -> Iterator[tuple[PlannedUnit, str, int]]:
        """The gathers since the last call: unit, phase, how many."""
        for unit in self._units:
            found, unit.weights.gathered = unit.weights.gathered, Counter()
            yield from ((unit.planned, phase, number) for phase, number in found.items())

    @property
    def _is_in_backward(self) -> bool:
        return self._task != -1

    @property
    def state(self) -> Hashable:
        """What the next micro-batch depends on."""
        given, occupants = map(self._gatherer.turns.given, self._units), (one.occupant for one in self._buffers)
        return self._gatherer.order.state, *given, *occupants, *(unit.weights.state for unit in self._units)

    def step(self, staying: Collection[int]) -> None:
        """The weights that train change, and pool buffers are given back, but for those with these numbers."""
        for number, buffer in enumerate(self._buffers):
            if buffer.occupant is not None and (buffer.occupant.spec.trainable or number not in staying):
                self._gatherer.vacate(buffer)
                buffer.occupant = None

    def apart(self) -> Iterator[str]:
        """The units that have got a buffer of their own, though they were to take turns."""
        more = self._buffers[self._num_buffers :]
        return (unit.name for unit in self._units if self._gatherer.turns.given(unit) in more)

    # The calls ----------------------------------------------------------------------------------------------------

    def _begin(self, event: Event) -> None:
        needed = self._needs[event.module]
        if any(outer.running for outer in needed.around):
            return
        self._trains = self._trains or any(unit.spec.trainable for unit in needed.units)
        self._running.append((event.call, needed))
        needed.running += 1
        if self._is_in_backward:
            first = self._walk.to_come.run_again(needed.units)
            if first and self._walk.begins(event.checkpoint):
                self._walk.return_to(first)
        self._gatherer.enter(needed.units, needed.gathers)

    def _end(self, event: Event) -> None:
        index = next((n for n, (call, _) in enumerate(self._running) if call == event.call), None)
        if index is None:
            return
        _, needed = self._running.pop(index)
        needed.running -= 1
        free = self._gatherer.leave(needed.units, waits=True)
        around: dict[Any, None] = dict.fromkeys(unit for _, other in self._running for unit in other.units)
        if not event.makes_graph:
            for unit in free:
                self._walk.to_come.ran_without_grad(unit, frozenset(around.keys() | self._walk.at.keys()))
            return
        gathered = tuple(unit for unit in around if unit.weights.state is not Residency.SHARDED)
        visits = [Visit(unit, gathered, None, event.call) for unit in free]
        for unit in () if self._is_in_backward else free:
            self._walk.to_come.without_graph.pop(unit, None)
        if self._trains:
            (self._walk.list_recomputed if self._is_in_backward else self._walk.to_come.add)(visits)
        self._made[event.call] = visits

    def _grad(self, event: Event) -> None:
        if visits := self._made.get(event.call):
            self._walk.reach(visits)


def _needs(units: Sequence[Any], number_of: Mapping[str, int]) -> dict[int, _Needed]:
    """Number of a module -> what its calls need, for the modules that have hooks of the engine."""
    needs = {number_of[""]: _Needed()}
    for unit in units:
        for path in unit.spec.modules:
            needs.setdefault(number_of[path], _Needed()).add(unit, path)
    for path, number in number_of.items():
        needed, outer = needs.get(number), path
        while needed is not None and outer:
            outer = parent(outer)
            other = needs.get(number_of[outer])
            if other is not None and other.covers(needed):
                needed.around.append(other)
    return needs
