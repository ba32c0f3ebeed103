"""Replays which gathers a step starts under ZeRO-3, from the recorded calls of the model's modules (`calls.py`).

It decides as the engine does: `Replay` as `runtime/schedule.py`, which units a forward and a backward come to, and
`_Buffers` as `runtime/gather.py`, which of them have to be gathered then, and which are gathered ahead. Nothing is
gathered here: a unit is in its pool buffer or not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from zeroshard.layout.pool_plan import PoolPlan
from zeroshard.model.paths import parent
from zeroshard.planner import PlannedUnit
from zeroshard.planning.calls import Calls, Event
from zeroshard.runtime.calls import NeededUnits

During = Literal["forward", "backward"]


@dataclass(eq=False)
class _Unit:
    """A unit, and where its weights are.

    Attributes:
        place: its pool buffer; None: none is assigned yet.
        in_use: how many running calls need it.
        is_gathered: whether its weights are in its pool buffer.
        is_shown: whether the parameters have them.
    """

    unit: PlannedUnit
    place: Hashable = None
    in_use: int = 0
    is_gathered: bool = False
    is_shown: bool = False

    def __post_init__(self) -> None:
        self.spec = self.unit.spec
        self.request = self.spec.weight_request(self.unit.layout.numel)
        self.is_part = self.spec.is_part

    def drop(self) -> None:
        self.is_gathered = self.is_shown = False


@dataclass(eq=False)
class _Needed(NeededUnits[_Unit]):
    """What the calls of a module need. `around`: of the modules around it that need as much; while one of them runs,
    the calls of this one count for nothing."""

    around: list[_Needed] = field(default_factory=list)


@dataclass(eq=False)
class _Visit:
    """A forward of a unit that backward will come back to. `around`: the units of the calls around it; `call`: the one
    that it is a part of; `number`: its place among the visits to come, if it is one."""

    unit: _Unit
    around: Sequence[_Unit]
    call: int
    number: int = -1


class _Buffers:
    """Which units are in their pool buffers. `gathered`: a unit and the phase -> how often it has been gathered."""

    def __init__(self, units: Sequence[_Unit]) -> None:
        self.units = units
        self.gathered = Counter[tuple[_Unit, During]]()
        plan = PoolPlan.for_weights(one.request for one in units)
        self._count = {queue: count for queue, (count, _) in plan.shared.items()}
        self._assigned = Counter[Hashable]()
        self._occupants: dict[Hashable, _Unit] = {}
        self._protected: tuple[_Unit, ...] = ()
        self._followers: dict[Hashable, _Unit | None] = {}
        self._last: tuple[During, _Unit | None, _Unit | None] = ("forward", None, None)
        self._behind: dict[_Unit | None, list[_Unit]] = defaultdict(list)  # unit -> root parts behind it
        before = None
        for one in units:
            if one.is_part:
                self._behind[before].append(one)
            else:
                before = one

    @property
    def state(self) -> Hashable:
        """Between two micro-batches."""
        where = tuple((one.place, one.is_gathered) for one in self.units)
        return where, self._last, frozenset(self._followers.items()), frozenset(self._occupants.items())

    def enter(self, needed: _Needed, during: During) -> None:
        for one in needed.units:
            one.in_use += 1
        if len(needed.gathers) < len(needed.units):
            self._start_parts(None, during)
        for one in needed.gathers:
            if one.is_shown:
                self._start_parts(one, during)
            else:
                self._unshard(one, during)

    def leave(self, units: Iterable[_Unit], during: During) -> list[_Unit]:
        """The units that no running call needs any more, and that backward may have to gather again."""
        for one in units:
            one.in_use -= 1
        free = [one for one in units if not one.in_use and (one.is_gathered or not one.is_part)]
        for one in free if during == "forward" else ():
            one.is_shown = False
        return free

    def gather_for_backward(self, units: Sequence[_Unit]) -> None:
        inner = tuple(one for one in units if not one.spec.outer)
        self._protected = inner or self._protected
        for one in units:
            if not one.is_gathered:
                self._start(one, "backward")

    def enter_backward(self, units: Sequence[_Unit]) -> None:
        self.gather_for_backward(units)
        for one in units:
            if not one.is_shown:
                self._unshard(one, "backward")

    def end_backward(self) -> None:
        self._protected = ()
        for one in self.units:
            one.is_shown = one.is_shown and one.in_use > 0

    def step(self, staying: Callable[[Hashable], bool]) -> None:
        """The weights that train change, and buffers are given back, but those in such places."""
        for one in self.units:
            if one.spec.trainable or not staying(one.place):
                one.drop()
        self._occupants = {place: one for place, one in self._occupants.items() if one.is_gathered}

    def _unshard(self, one: _Unit, during: During) -> None:
        if not one.is_gathered:
            self._start(one, during)
        self._start_parts(one, during)
        one.is_shown = True
        if one.is_part:
            return
        self._follow(one, during)
        follower = self._followers.get(self._last, self._followers.get((during, one)))
        if follower is not None and not follower.is_gathered:
            occupant = self._occupants.get(self._place_of(follower))
            is_needed = occupant is one or occupant in self._protected or (occupant is not None and occupant.in_use > 0)
            if occupant is follower or not is_needed:
                self._start(follower, during)

    def _follow(self, one: _Unit, during: During) -> None:
        before, _, previous = self._last
        if before != during:
            self._followers[self._last] = self._followers[before, previous] = None
            self._last, previous = (during, None, None), None
        self._followers[self._last] = self._followers[during, previous] = one
        self._last = (during, previous, one)

    def _start_parts(self, before: _Unit | None, during: During) -> None:
        for one in self._behind.get(before, ()):
            if one.in_use and not one.is_gathered:
                self._start(one, during)

    def _start(self, one: _Unit, during: During) -> None:
        place = self._place_of(one)
        occupant = self._occupants.get(place)
        if occupant is not None and occupant is not one:
            if occupant.in_use:  # one of them runs inside the other: it gets a buffer of its own
                place = one.place = one.request.key
            else:
                occupant.drop()
        self._occupants[place] = one
        one.is_gathered = True
        self.gathered[one, during] += 1

    def _place_of(self, one: _Unit) -> Hashable:
        """Its pool buffer, its own or one that it shares: assigned in turn, in the order of first use."""
        if one.place is None:
            queue = one.request.queue
            one.place = one.request.key
            if not one.request.alone:
                one.place = queue, self._assigned[queue] % self._count[queue]
                self._assigned[queue] += 1
        return one.place


class Replay:
    """Replays the micro-batches of a step, one after the other."""

    def __init__(self, units: Sequence[PlannedUnit], calls: Calls) -> None:
        self._units = [_Unit(unit) for unit in units]
        self._buffers = _Buffers(self._units)
        needs = _needs(self._units, calls.number_of)
        self._needs = needs
        self._events = [event for event in calls.events if event.module in needs]
        self._trains = False
        self._visits: list[_Visit] = []
        self._running: list[tuple[int, _Needed]] = []
        self._made: dict[int, list[_Visit]] = {}  # call -> its visits
        self._at: dict[_Unit, int] = {}
        self._without_graph: dict[_Unit, list[tuple[int, set[_Unit]]]] = {}
        self._checkpoint = 0

    def micro_batch(self) -> None:
        for event in self._events:
            {"begin": self._begin, "end": self._end, "grad": self._grad}[event.kind](event)
        self._visit_from(0)
        self._trains, self._running = False, []
        self._made.clear()
        self._at.clear()
        self._without_graph.clear()
        self._checkpoint = 0
        self._buffers.end_backward()

    def gathered(self) -> Iterator[tuple[PlannedUnit, During, int]]:
        """The gathers since the last call: unit, phase, how many."""
        found, self._buffers.gathered = self._buffers.gathered, Counter()
        return ((one.unit, during, number) for (one, during), number in found.items())

    @property
    def state(self) -> Hashable:
        """What the next micro-batch depends on."""
        return self._buffers.state

    def step(self, staying: Callable[[Hashable], bool]) -> None:
        """See `_Buffers.step`."""
        self._buffers.step(staying)

    def apart(self) -> Iterator[str]:
        """The units that have got a buffer of their own, though they were to take turns."""
        return (one.spec.name for one in self._units if not one.request.alone and one.place == one.request.key)

    # The calls ----------------------------------------------------------------------------------------------------

    def _begin(self, event: Event) -> None:
        needed = self._needs[event.module]
        if any(outer.running for outer in needed.around):
            return
        self._trains = self._trains or any(one.spec.trainable for one in needed.units)
        self._running.append((event.call, needed))
        needed.running += 1
        if event.task != -1:
            self._return_to(needed.units, event)
        self._buffers.enter(needed, _during(event))

    def _end(self, event: Event) -> None:
        index = next((n for n, (call, _) in enumerate(self._running) if call == event.call), None)
        if index is None:
            return
        _, needed = self._running.pop(index)
        needed.running -= 1
        free = self._buffers.leave(needed.units, _during(event))
        around = [one for _, other in self._running for one in other.units]
        if not event.makes_graph:
            for one in free:
                self._without_graph.setdefault(one, []).append((len(self._visits), {*around, *self._at}))
            return
        gathered = tuple(dict.fromkeys(each for each in around if each.is_gathered))
        visits = [_Visit(one, gathered, event.call) for one in free]
        if event.task == -1:
            for one in free:
                self._without_graph.pop(one, None)
        if self._trains:
            seen = {visit.unit for visit in self._visits} | self._at.keys() if event.task != -1 else set()
            for visit in visits:
                if visit.unit not in seen:
                    visit.number = len(self._visits)
                    self._visits.append(visit)
        self._made[event.call] = visits

    def _grad(self, event: Event) -> None:
        visits = self._made.get(event.call)
        if not visits:
            return
        units, around = [visit.unit for visit in visits], visits[0].around
        to_come = self._visits
        waiting = [n for visit in visits if (n := visit.number) != -1 and n < len(to_come) and to_come[n] is visit]
        if not waiting:
            self._buffers.enter_backward([*around, *units])
            return
        self._visit_from(max(waiting) + 1, event.task)
        del to_come[min(waiting) :]
        self._come_to(units, around, event.task)

    # Backward -----------------------------------------------------------------------------------------------------

    def _return_to(self, units: Iterable[_Unit], event: Event) -> None:
        """A reentrant checkpoint is about to recompute these."""
        first = [self._without_graph[one].pop() for one in units if self._without_graph.get(one)]
        if not first or event.checkpoint == self._checkpoint:
            return
        self._checkpoint = event.checkpoint
        self._visit_from(max(begin for begin, _ in first), event.task)
        self._come_to([one for one in self._at if any(one in inside for _, inside in first)], (), event.task)

    def _visit_from(self, first: int, task: int = 0) -> None:
        while len(self._visits) > first:
            begin = len(self._visits) - 1
            while begin > first and self._visits[begin - 1].call == self._visits[-1].call:
                begin -= 1
            visits, self._visits[begin:] = self._visits[begin:], []
            self._come_to([visit.unit for visit in visits], visits[0].around, task)

    def _come_to(self, units: Sequence[_Unit], around: Sequence[_Unit], task: int) -> None:
        self._buffers.gather_for_backward([*around, *units])
        unfinished = {one: of for one, of in self._at.items() if of < task or one in around}
        self._at = dict.fromkeys(units, task) | unfinished
        self._buffers.enter_backward([*around, *units])


def _during(event: Event) -> During:
    return "forward" if event.task == -1 else "backward"


def _needs(units: Sequence[_Unit], number_of: Mapping[str, int]) -> dict[int, _Needed]:
    """Number of a module -> what its calls need, for the modules that have hooks of the engine."""
    needs = {number_of[""]: _Needed()}
    for one in units:
        for path in one.spec.modules:
            needs.setdefault(number_of[path], _Needed()).add(one, path)
    for path, number in number_of.items():
        needed, outer = needs.get(number), path
        while needed is not None and outer:
            outer = parent(outer)
            other = needs.get(number_of[outer])
            if other is not None and other.covers(needed):
                needed.around.append(other)
    return needs
