"""Several models in one backward: their exchanges in one order.

    loss = critic(generator(x))     the hooks of two handles run in one backward

[Note: several models in one backward]
A rank that leaves out a unit comes to it later than its peers: at another visit, or at the end of the backward. Inside
of one model that is enough (the notes in `schedule.py` and `reduce.py`). But then such a rank would be at the other
model, and wait there for peers that wait for it here. So:

- *Gathers.* Visits of all models are numbered together. Where backward comes to one, it is done with newer ones of the
  other models as well: they are visited first. At the end, too, what was not visited comes in this order.
- *Reductions of plans that gather nothing in a backward.* There are no visits, so nothing tells that backward is done
  with a model. The models take turns, in the order in which their backwards have begun: none starts to reduce before
  all reductions of those in front of it have started, and, if it may have to wait before the end of backward, are over.
  What waits for its turn stays in buckets. So a rank only waits for exchanges that it has started itself, and all ranks
  start them in one order: the one that is behind all others never waits.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

from zeroshard.runtime.gather import Gatherer
from zeroshard.runtime.reduce import Reducer
from zeroshard.runtime.walk import Walk


class Visiting(Protocol):
    """The schedule of a model.

    Attributes:
        task: id of autograd's graph task of its backward; None: there is none.
        walk: of its backward.
    """

    task: int | None
    walk: Walk
    gatherer: Gatherer
    reducer: Reducer

    def visit_newer(self, number: int) -> None:
        """Come to all newer ones, and be done with them."""


_BEGUN: list[weakref.ref[Visiting]] = []
"""Of this process: schedules with a backward, in the order in which the backwards have begun."""


def begin(schedule: Visiting, task: int) -> None:
    """A backward of this model begins. `task`: id of autograd's graph task."""
    in_front = beside(schedule, task)
    others = [
        ref for ref in _BEGUN if (other := ref()) is not None and other is not schedule and other.task is not None
    ]
    _BEGUN[:] = [*others, weakref.ref(schedule)]
    gathers = any(unit.weights.buffer.borrows for unit in schedule.gatherer.units)
    schedule.reducer.now.in_front = [] if gathers else [other.reducer for other in in_front]


def beside(schedule: Visiting, task: int | None) -> list[Visiting]:
    """The other models whose backward runs in this graph task, in the order in which they have begun."""
    begun = [other for ref in _BEGUN if (other := ref()) is not None]
    return [other for other in begun if other is not schedule and other.task == task]


def note_order(schedule: Visiting) -> None:
    """It accumulates. In another order on another rank, ranks would add up gradients of different models, where no
    message tells of which unit they are: then the step raises. (In a join, followers have no backward to note.)"""
    reducer, collectives = schedule.reducer, schedule.reducer.collectives
    if reducer.now.in_front and not (reducer.local or collectives.transport.announces or collectives.orders):
        behind = sum(bool(other.order) and not other.local for other in reducer.now.in_front)
        collectives.log.note("models in one backward", str(behind))


def come_to(schedule: Visiting, number: int) -> None:
    """The backward that runs has come to what this model had made before the visit of this number."""
    others = beside(schedule, torch._C._current_graph_task_id()) if _BEGUN else []
    if others and schedule.task is not None:  # its own as well, in their places between those of the others
        with torch.no_grad():
            _visit_newer([schedule, *others], number)
    for other in others:
        other.visit_newer(number)


def visit_rest(schedule: Visiting, task: int | None) -> None:
    """Backward is over: visit what is left of all of its models."""
    _visit_newer([schedule, *beside(schedule, task)], -1)


def _visit_newer(models: Sequence[Visiting], number: int) -> None:
    """Visit what is newer, the newest first."""
    while (newest := max(models, key=lambda model: model.reducer.to_come.newest)).reducer.to_come.newest > number:
        for other in models:
            if other is not newest:  # as `come_to`, by which its peers may come there
                other.visit_newer(newest.reducer.to_come.newest)
        newest.walk.visit_from(len(newest.reducer.to_come.visits) - 1)
