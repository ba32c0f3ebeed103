"""The calls that a backward comes back to: their visits, the trails that these are in, and what a call has made."""

from __future__ import annotations

import itertools
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import Node

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.packets import on_device
from zeroshard.model.trees import differentiable
from zeroshard.storage.unit import Unit


class Graph:
    """Held by the hooks in a graph of autograd, so that a weak reference tells whether the graph is gone."""


MOST_VISITS = 8
"""At most this many visits of each module that needs units are remembered until a backward."""


_numbers = itertools.count()


def newest() -> int:
    """A number for what is newer than all visits so far, and older than those to come."""
    return next(_numbers)


@dataclass(eq=False)
class Visit:
    """One forward of a unit that backward will come back to.

    Attributes:
        around: units of the calls around it. Backward comes to them first, by their own outputs. Not so a second one
            through the same graph that begins at an output of this unit, so they are shown again with it.
        trail: that it is in; None for a forward in a scope.
        call: the call of a module that the forward is a part of, with those of its other units. Backward comes to all
            of them at once, by the outputs of the call.
        number: of the visits of this process, in the order of the forwards.
    """

    unit: Unit
    around: Sequence[Unit]
    trail: Trail | None
    call: object
    number: int = field(default_factory=_numbers.__next__)

    @property
    def may_come(self) -> bool:
        """Whether a backward may come to it."""
        return self.trail is not None and not self.trail.is_gone


class Trail:
    """The visits of one call of the model, and of calls of its parts until the next one, in order. See [Note: the trail
    of a backward] in `schedule.py`.

    Attributes:
        graphs: of its outputs, those that are not gone on this rank, and that a backward may come to.
        is_gone: whether the graphs are gone on every rank: forwards without a backward.
        retained_with: if a backward has retained its graph: the trails that this one had listed, the oldest first. The
            next one may come to all of them.
    """

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self.graphs = weakref.WeakSet[Graph]()
        self.is_gone = False
        self.retained_with: Sequence[Trail] = (self,)


_SEVERAL = "a backward after several forwards"
_RETAINED = "a backward after one with retain_graph=True, which all ranks must give"


class Trails:
    """The trails of a model.

    Attributes:
        last: of the last call of the model.
        listed: those of forwards since the last backward, and those that this one may come to.
    """

    def __init__(self) -> None:
        self._older: Sequence[Trail] = ()  # of several forwards, those that were not gone when the last backward began
        self._why = _SEVERAL  # these are asked for
        self._renewals = 0  # of weights, before them
        self.begin_anew()

    def begin_anew(self) -> None:
        self.last = Trail()
        self.listed = [self.last]

    def begin_call(self) -> None:
        """A call of the model begins."""
        if self.last.visits:
            self.last = Trail()
            self.listed.append(self.last)

    def find_living(self, units: Sequence[Unit], collectives: Collectives) -> list[Visit]:
        """At the beginning of a backward: list what may come of several forwards, on any rank. Returns the visits of
        those that were not listed."""
        renewals = sum(unit.weights.versions.num_renewals for unit in units)
        if self._renewals != renewals:
            self._older = ()  # the graphs of older weights raise
        self._renewals = renewals
        why = self._why if self._older else _SEVERAL
        asked = [*self._older, *(trail for trail in self.listed if trail.visits)]
        # One rank may have kept a loss that the others have dropped (a log on rank 0, an error on one rank). If each
        # looked at its own graphs, they would reduce at different places between the gathers, and wait for each other.
        # Followers of a join have none to ask: there, all may come.
        if len(asked) < 2 or collectives.orders is not None:
            self._older = ()
            return []
        alive = on_device([len(trail.graphs) for trail in asked], collectives.device)
        for trail, count in zip(asked, collectives.add_up(alive, why), strict=True):
            trail.is_gone = not count
        living = [trail for trail in asked if not trail.is_gone]
        self._older, self._why = living if len(living) > 1 else (), _SEVERAL
        return self.list_again(living)

    def list_again(self, trails: Sequence[Trail]) -> list[Visit]:
        """Backward may come to these trails, of earlier forwards. Returns the visits of those that were not listed."""
        added = [one for one in trails if one not in self.listed]
        for one in added:
            one.is_gone = False
        self.listed += added
        return [visit for one in added for visit in one.visits]

    def note_retained(self) -> None:
        """At the end of a backward for which these were listed."""
        if torch._C._autograd._get_current_graph_task_keep_graph():
            retained = [trail for trail in self.listed if trail.visits and not trail.is_gone]
            for trail in retained:
                trail.retained_with = sorted(retained, key=lambda one: one.visits[0].number)
            if retained and not self._older:  # the next backward may be of a new forward, and of these
                self._older, self._why = retained, _RETAINED


@dataclass(frozen=True, eq=False)
class Unrecorded:
    """A forward of a unit without grad, which a reentrant checkpoint may run again.

    Attributes:
        behind: the last visit before it.
        inside: units whose calls are around it; their visits come after it.
        number: as of visits.
    """

    behind: Visit | None
    inside: frozenset[Unit]
    number: int = field(default_factory=_numbers.__next__)


class ToCome:
    """What backward has not come to.

    Attributes:
        visits: in the order of the forwards.
        without_graph: forwards without grad; the last `MOST_VISITS` of each unit.
        reached: the number of the last visit.
        again: unit -> the number of the forward that runs again.
    """

    def __init__(self) -> None:
        self.visits: list[Visit] = []
        self._visits_of = Counter[Unit]()  # how many of the listed visits are of the unit
        self.without_graph: dict[Unit, deque[Unrecorded]] = defaultdict(partial(deque, maxlen=MOST_VISITS))
        self.reached = -1
        self.again: dict[Unit, int] = {}

    @property
    def newest(self) -> int:
        """The number of the newest visit; -1 if there is none."""
        return self.visits[-1].number if self.visits else -1

    def add(self, visits: Sequence[Visit], *, in_front: bool = False) -> None:
        """List these. `in_front`: they are older than all that is listed."""
        place = 0 if in_front else len(self.visits)
        self.visits[place:place] = visits
        self._visits_of.update(visit.unit for visit in visits)

    def drop(self, first: int) -> list[Visit]:
        """Remove the visits from number `first` on, and return them."""
        dropped, self.visits[first:] = self.visits[first:], []
        self._visits_of.subtract(visit.unit for visit in dropped)
        if not self.visits:
            self._visits_of.clear()
        return dropped

    def where(self, of_call: Sequence[Visit]) -> range:
        """The numbers of those of these visits that are listed. Visits of one call lie side by side, mostly at the
        end."""
        visits = self.visits
        stop = next((n for n in range(len(visits), 0, -1) if visits[n - 1] in of_call), 0)
        begin = stop
        while begin and visits[begin - 1] in of_call:
            begin -= 1
        return range(begin, stop)

    def ran_without_grad(self, unit: Unit, inside: frozenset[Unit]) -> None:
        self.without_graph[unit].append(Unrecorded(self.visits[-1] if self.visits else None, inside))

    def run_again(self, units: Sequence[Unit]) -> list[Unrecorded]:
        """The last forward without grad of each of these units, if there was one: a checkpoint runs it again."""
        first = {unit: self.without_graph[unit].pop() for unit in units if self.without_graph.get(unit)}
        self.again.update((unit, forward.number) for unit, forward in first.items())
        return [*first.values()]

    def numbered(self, visits: Sequence[Visit]) -> Sequence[Visit]:
        """Visits of a recomputation, with the numbers of the forwards that run again."""
        for visit in visits:
            visit.number = self.again.pop(visit.unit, visit.number)
        return visits

    def begin_of(self, unrecorded: Unrecorded) -> int:
        """The number of the first visit after this forward."""
        behind = unrecorded.behind
        if behind is None:
            return 0
        return self.visits.index(behind) + 1 if behind in self.visits else len(self.visits)

    def behind(self, number: int) -> int:
        """The first visit that is newer than this number."""
        return next((index for index, visit in enumerate(self.visits) if visit.number > number), len(self.visits))

    def take(self, first: int) -> list[Visit]:
        """Remove the visits of the last call, from number `first` on, and return them in order."""
        visits, begin = self.visits, len(self.visits) - 1
        while begin > first and visits[begin - 1].call is visits[-1].call:
            begin -= 1
        self.reached = visits[begin].number
        return self.drop(begin)

    def end_backward(self) -> None:
        self.without_graph.clear()
        self.again.clear()

    def has_any(self) -> bool:
        """Whether backward will come to any unit."""
        return bool(self.visits) or any(self.without_graph.values())

    def has(self, unit: Unit) -> bool:
        """Whether backward will come to the unit (again)."""
        return self.is_listed(unit) and any(visit.unit is unit and visit.may_come for visit in self.visits)

    def is_listed(self, unit: Unit) -> bool:
        """Whether a visit of the unit is listed, also one that may not come."""
        return self._visits_of[unit] > 0


@dataclass(frozen=True, eq=False)
class Entry:
    """The state of the autograd graph when a unit's forward began.

    Attributes:
        next_node: the sequence number of the next node of this thread. Each thread counts for itself, so a forward
            that is recomputed on the thread of a backward may have lower numbers than its inputs.
        given: the nodes that made the inputs of the forward.
    """

    next_node: int
    given: frozenset[Node | None]

    @classmethod
    def of(cls, inputs: Any) -> Self:
        return cls(torch._C._autograd._get_sequence_nr(), frozenset([one.grad_fn for one in differentiable(inputs)]))

    def has_advanced(self) -> bool:
        """Whether any node has been made since."""
        return torch._C._autograd._get_sequence_nr() > self.next_node

    def has_made(self, output: Tensor) -> bool:
        # [Note: who made an output]
        # A skipped block returns its input. A gather for that output could take over the pool buffer of the unit that
        # made it, just before backward uses it: gradients from another unit's weights, without an error. Sequence
        # numbers alone are not enough: each thread counts for itself (pytorch/pytorch#52180), so a recomputed forward
        # may have lower numbers.
        node = output.grad_fn
        return node is not None and node not in self.given and node._sequence_nr() >= self.next_node
