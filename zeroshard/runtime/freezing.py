"""Agrees between ranks on which parameters require grad, when this changes between steps.

Parameters that do not require grad are not reduced, and a unit without any that does has no reductions at all. Ranks
must agree on this, because a reduction is collective. So a rank that finds a change when the model is called meets the
other ranks there. A parameter that was frozen while its gradient waits for a step takes part until that step.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.comm.collectives import Collectives
from zeroshard.comm.together import together
from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.storage.unit import Unit

POINT = "a change of requires_grad (freeze and unfreeze the same parameters on every rank)"
"""What messages call the meeting of the ranks."""

Slots = dict[Unit, set[int]]
"""Unit -> indices of slots."""


class Freezing:
    """`requires_grad` of the units of one model. What reductions sum is what the ranks have agreed on.

    Attributes:
        num_changes: how often the ranks have agreed on a change.
    """

    def __init__(self, units: Sequence[Unit], collectives: Collectives) -> None:
        self.num_changes = 0
        self._units, self._collectives = units, collectives
        collectives.messages.introduce(POINT)

    def has_changed(self) -> bool:
        """Whether, on this rank, `requires_grad` has changed since the last agreement, or a frozen slot still takes
        part."""
        return any(unit.grads.summed != slots for unit, slots in self._trained().items())

    def agree(self) -> Slots:
        """Agree with the other ranks. Collective. Returns the slots that reductions sum from now on.

        Raises:
            ValueError: on every rank: ranks differ; the message names a parameter and the ranks.
        """
        # A rank without a change does not come here but gathers. `meet_at` makes it and this rank raise; the exchange
        # alone would hang.
        self._collectives.meet_at(POINT)
        trained = self._trained()
        waiting = {unit: unit.grads.waiting - slots for unit, slots in trained.items() if unit.trainable}
        found = self._collectives.by_rank([_listed(trained), _listed(waiting)], POINT)
        for number, unit in enumerate(self._units):
            theirs = {rank: set(of_rank[number]) for rank, (of_rank, _) in found.items()}
            for index in sorted(set().union(*theirs.values()) - set.intersection(*theirs.values())):
                ranks = ", ".join(str(rank) for rank, slots in theirs.items() if index in slots)
                raise InvalidValue(
                    f"parameter {unit.layout.slots[index].name} requires grad on rank {ranks} alone: let the same "
                    "parameters require grad on every rank"
                )
        for number, unit in enumerate(waiting):
            trained[unit] = trained[unit].union(*(of_rank[number] for _, of_rank in found.values()))
        return trained

    def unfreeze(self, units: Sequence[Unit]) -> None:
        """Make these units trainable. Collective.

        Raises:
            RuntimeError: on every rank: there was no memory on one of them. The units are frozen as before.
        """

        def allocate() -> None:
            for unit in units:
                unit.unfreeze(self._collectives)

        try:
            together(self._collectives, "requires_grad_(True)", allocate, errors=(InvalidState,))
        except BaseException:
            for unit in units:
                unit.freeze()
            raise

    def apply(self, slots: Slots) -> None:
        """Sum exactly these slots from now on, as agreed."""
        self.num_changes += 1
        for unit, of_unit in slots.items():
            unit.grads.sum_only(of_unit)

    def _trained(self) -> Slots:
        return {unit: set(unit.requiring_grad()) for unit in self._units}


def _listed(slots: Slots) -> list[list[int]]:
    return [sorted(of_unit) for of_unit in slots.values()]
