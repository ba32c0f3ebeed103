"""Walks back through the calls of a forward, as a backward does: gathers in front of it, and leaves what is behind it.

The hooks of the engine call it (`schedule.py`), and the plan of a step (`planning/replay.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from zeroshard.runtime.calls import ToCome, Unrecorded, Visit
from zeroshard.runtime.gather import Gatherer
from zeroshard.storage.unit import Unit


class Walk:
    """Where a backward is.

    Attributes:
        gatherer: gathers what it comes to.
        to_come: what it has not come to.
        at: units that it is at -> id of the graph task that came there.
    """

    gatherer: Gatherer

    def __init__(self, task: Callable[[], int], leave: Callable[[Unit, Sequence[Unit]], bool]) -> None:
        """
        Args:
            task: id of autograd's graph task that runs.
            leave: is called with a unit that backward was at, and with the next ones; returns whether it is done with
                the unit.
        """
        self._task, self._leave = task, leave
        self.to_come = ToCome()
        self.at: dict[Unit, int] = {}
        self._recomputed: Hashable = None  # the reentrant checkpoint that recomputed last

    def end(self) -> None:
        """A backward has ended, and the records of forwards without grad with it."""
        self.to_come.end_backward()
        self._recomputed = None
        self.at.clear()

    def list_recomputed(self, visits: Sequence[Visit]) -> None:
        """Backward will come to these, of a forward that runs again. (If that is a part of a graph, they are listed
        already; the first forward of a reentrant checkpoint has left no visits.)"""
        seen = [*self.at, *filter(self.to_come.is_listed, [visit.unit for visit in visits])]
        self.to_come.add([visit for visit in self.to_come.numbered(visits) if visit.unit not in seen])

    def reach(self, visits: Sequence[Visit]) -> None:
        """Backward has the gradient of an output of this call."""
        units, around = [visit.unit for visit in visits], visits[0].around
        waiting = self.to_come.where(visits)
        if not waiting:
            self.gatherer.enter_backward([*around, *units])
            return
        self.visit_from(waiting.stop)
        self.to_come.reached = visits[0].number
        self.to_come.drop(waiting.start)
        self.come_to(units, around)

    def begins(self, checkpoint: Hashable) -> bool:
        """Whether this reentrant checkpoint begins to recompute: later visits belong to it."""
        before, self._recomputed = self._recomputed, checkpoint
        return checkpoint is not before

    def return_to(self, first: Sequence[Unrecorded]) -> None:
        """Backward is done with the units that ran after these: visit them first. Not with those around them, whose
        parameters the checkpoint may use as well. (If it contains another one, it recomputes that one's part without
        grad.)"""
        self.visit_from(max(map(self.to_come.begin_of, first)))
        self.come_to([unit for unit in self.at if any(unit in forward.inside for forward in first)])

    def visit_from(self, first: int) -> None:
        """Visit the units of the visits from number `first` on, the last call first."""
        while len(self.to_come.visits) > first:
            visits = self.to_come.take(first)
            self.come_to([visit.unit for visit in visits], visits[0].around)

    def come_to(self, units: Sequence[Unit], around: Sequence[Unit] = ()) -> None:
        """Backward has reached these units. It runs the graph in reverse, so it is done with the units visited before:
        they are reduced here, also if this rank has no gradient of them, as its peers may have some."""
        # Gather before any reduction: a peer may wait for this gather before it reads what a reduction below waits for.
        self.gatherer.gather_for_backward([*around, *units])
        task = self._task()
        # An inner backward (of a reentrant checkpoint) has a higher id. While it runs, it is unknown whether the outer
        # backward has more gradients for the units that it was at: they stay in `at` until the outer one goes on.
        # Nor is it done with units around these: a checkpoint in their calls may have gradients that the graph has not.
        unfinished = {
            unit: of for unit, of in self.at.items() if of < task or unit in around or not self._leave(unit, units)
        }
        self.at = dict.fromkeys(units, task) | unfinished
        self.gatherer.enter_backward([*around, *units])
