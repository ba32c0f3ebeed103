"""Which parameters require grad: the same ones on every rank, as they change between steps.

A unit of which nothing requires grad any more *rests*: its gradients are not reduced. Ranks must agree in that, because
a reduction is theirs together. So whoever finds a change, when the model is called, meets the others there.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.collectives import Collectives
from zeroshard.gradients import GradState
from zeroshard.unit import Unit

_POINT = "(a change of requires_grad)"


class Freezing:
    """Of the units of one model. What they are built with is agreed."""

    def __init__(self, units: Sequence[Unit], collectives: Collectives) -> None:
        self._units, self._collectives = units, collectives
        self._agreed = self._flags()
        self._again = False  # a unit could not rest yet, because gradients of it wait for a step
        collectives.messages.introduce(_POINT)

    def has_changed(self) -> bool:
        """On this rank."""
        return self._again or self._flags() != self._agreed

    def agree(self) -> set[Unit]:
        """Meet the other ranks. Collective. Returns the units that rest from now on.

        Raises:
            ValueError: on every rank: ranks differ, with a parameter and the ranks.
        """
        self._collectives.meet_at(_POINT)
        flags = self._flags()
        still = [unit for unit in self._units if unit.grads is not None and not any(flags[unit.index])]
        waiting = [unit.index for unit in still if unit.grads and unit.grads.state is not GradState.EMPTY]
        found = self._collectives.exchange_objects([flags, waiting])
        for unit in self._units:
            for index, slot in enumerate(unit.layout.slots):
                theirs = [of_rank[unit.index][index] for of_rank, _ in found]
                if len(set(theirs)) > 1:
                    ranks = ", ".join(str(rank) for rank, requires in enumerate(theirs) if requires)
                    raise ValueError(
                        f"parameter {slot.name} requires grad on rank {ranks} alone: let the same parameters require "
                        "grad on every rank"
                    )
        busy = {index for _, of_rank in found for index in of_rank}
        self._agreed, self._again = flags, bool(busy)
        return {unit for unit in still if unit.index not in busy}

    def ask_again(self) -> None:
        """What has been agreed could not be done yet."""
        self._again = True

    def _flags(self) -> list[list[bool]]:
        return [[parameter.requires_grad for parameter in unit.parameters] for unit in self._units]
