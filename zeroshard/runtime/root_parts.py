"""When the parts of the root unit are gathered, which are needed somewhere in a forward.

[Note: when root parts are gathered]
At a place that all ranks reach: behind the unit in front of them. Not when they are used: one rank may call a module
(for images, say) that another one does not need for its inputs, as with the root unit. For the same reason they arrive
in the order in which the gathers began, before what began after them; and they have no part in the order of prefetches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from zeroshard.runtime.prefetch_order import During
from zeroshard.storage.unit import Unit
from zeroshard.storage.weights import Residency, Weights


class RootParts:
    """Gathers the root parts that borrow their full weights; false if there are none.

    Args:
        units: all units of the model, in its order.
        start: starts to gather a unit, and returns the number of that gather.
        before_wait: called before a wait for weights.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        start: Callable[[Unit, During], int],
        before_wait: Callable[[Weights], None],
    ) -> None:
        self._start, self._before_wait = start, before_wait
        self._behind = _parts_behind(units)
        self._in_flight: list[tuple[int, Unit]] = []  # with the numbers of their gathers

    def __bool__(self) -> bool:
        return bool(self._behind)

    def start(self, before: Unit | None, during: During) -> None:
        """Start to gather the parts behind `before` that a running forward needs."""
        for unit in self._behind.get(before, ()):
            if unit.weights.in_use and unit.weights.state is Residency.SHARDED:
                self._in_flight.append((self._start(unit, during), unit))

    def let_arrive(self, number: float = math.inf) -> None:
        """Wait for the parts whose gathers began before that number."""
        while self._in_flight and self._in_flight[0][0] < number:
            _, unit = self._in_flight.pop(0)
            if unit.weights.state is Residency.GATHERING:
                self._before_wait(unit.weights)
                unit.weights.arrive()


def _parts_behind(units: Sequence[Unit]) -> dict[Unit | None, list[Unit]]:
    """Unit -> the root parts behind it; None: behind no unit."""
    found: dict[Unit | None, list[Unit]] = {}
    before = None
    for unit in units:
        if not unit.spec.is_part:
            before = unit
        elif unit.weights.buffer.borrows:
            found.setdefault(before, []).append(unit)
    return found
