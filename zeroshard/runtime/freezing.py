"""Which parameters require grad: the same ones on every rank, as they change between steps.

What does not require grad is not reduced. A unit of which nothing does *rests*: it has no reductions at all. Ranks must
agree in that, because a reduction is theirs together. So whoever finds a change, when the model is called, meets the
others there. What was frozen with a gradient that waits for a step takes part until then.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.comm.collectives import Collectives
from zeroshard.errors import InvalidValue
from zeroshard.storage.unit import Unit

_POINT = "a change of requires_grad"

Slots = dict[Unit, set[int]]
"""Of each unit, by index."""


class Freezing:
    """Of the units of one model. What they are built with is agreed."""

    def __init__(self, units: Sequence[Unit], collectives: Collectives) -> None:
        self._units, self._collectives = units, collectives
        self._agreed = self._trained()
        collectives.messages.introduce(_POINT)

    def has_changed(self) -> bool:
        """On this rank: what requires grad, or what had to take part nevertheless."""
        trained = self._trained()
        return trained != self._agreed or any(unit.grads.summed != slots for unit, slots in trained.items())

    def agree(self) -> Slots:
        """Meet the other ranks. Collective. Returns what is summed over ranks from now on.

        Raises:
            ValueError: on every rank: ranks differ, with a parameter and the ranks.
        """
        self._collectives.meet_at(_POINT)
        trained = self._trained()
        waiting = {unit: unit.grads.waiting - slots for unit, slots in trained.items() if unit.trainable}
        found = self._collectives.exchange_objects([_listed(trained), _listed(waiting)], "a change of requires_grad")
        for number, unit in enumerate(self._units):
            theirs = [set(of_rank[number]) for of_rank, _ in found]
            for index in sorted(set().union(*theirs) - set.intersection(*theirs)):
                ranks = ", ".join(str(rank) for rank, slots in enumerate(theirs) if index in slots)
                raise InvalidValue(
                    f"parameter {unit.layout.slots[index].name} requires grad on rank {ranks} alone: let the same "
                    "parameters require grad on every rank"
                )
        for number, unit in enumerate(waiting):
            trained[unit] = trained[unit].union(*(of_rank[number] for _, of_rank in found))
        return trained

    def apply(self, slots: Slots) -> None:
        """From now on just these are summed, as agreed."""
        self._agreed = self._trained()
        for unit, of_unit in slots.items():
            unit.grads.sum_only(of_unit)

    def _trained(self) -> Slots:
        return {unit: set(unit.requiring_grad()) for unit in self._units}


def _listed(slots: Slots) -> list[list[int]]:
    return [sorted(of_unit) for of_unit in slots.values()]
