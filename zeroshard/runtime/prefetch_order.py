"""The order in which units are gathered ahead: that of the last time."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from zeroshard.storage.unit import Unit

During = Literal["forward", "backward", "unshard"]
"""The phase for which a unit is gathered."""


class Order:
    """Which unit followed which one last time.

    [Note: prefetch order]
    Prefetch the unit that followed this one last time, not the next one in the model: a forward may skip units, or run
    them in another order. A unit that is called several times (embedding and head together) has several followers: if
    it has come behind the unit before it already, what followed then counts. The choice must depend on nothing that
    differs between ranks (time, what has arrived, or, after a join, which forwards a rank has run), or they would issue
    gathers in different orders. If the order has changed this time, a gather starts late, or the prefetched unit loses
    its buffer again; the values are right in any case.
    """

    def __init__(self) -> None:
        self._followers: dict[tuple[During, Unit | None, Unit | None] | tuple[During, Unit | None], Unit | None] = {}
        self._last: tuple[During, Unit | None, Unit | None] = ("forward", None, None)  # the last two units of a pass

    @property
    def state(self) -> Hashable:
        """What it depends on, which unit follows."""
        return self._last, frozenset(self._followers.items())

    def follow(self, unit: Unit, during: During) -> Unit | None:
        """Note that the unit follows the last one. Returns the unit that followed it last time."""
        before, _, previous = self._last
        if before != during:  # nothing followed in that pass this time
            self._followers[self._last] = self._followers[before, previous] = None
            self._last, previous = (during, None, None), None
        self._followers[self._last] = self._followers[during, previous] = unit
        self._last = (during, previous, unit)
        return self._followers.get(self._last, self._followers.get((during, unit)))
