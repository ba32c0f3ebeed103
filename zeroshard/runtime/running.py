"""Tracks running calls of modules that need units.

A call inside a call that has gathered the same units does not gather them again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from zeroshard.storage.unit import Unit


class Inside:
    """Counts running calls that need one unit. `now`: whether there is one."""

    def __init__(self) -> None:
        self.now = False  # a plain attribute, not a property: torch.compile guards it
        self._calls = 0

    def begin(self) -> None:
        self._calls, self.now = self._calls + 1, True

    def end(self) -> bool:
        """One call is over. Returns whether no other is running."""
        self._calls -= 1
        self.now = self._calls > 0
        return not self.now


class Running:
    """The running calls that have gathered units, the innermost last. `inside`: unit -> its counter."""

    def __init__(self) -> None:
        self._calls: list[Sequence[Unit]] = []
        self.inside: dict[Unit, Inside] = defaultdict(Inside)

    def __bool__(self) -> bool:
        return bool(self._calls)

    def begin(self, units: Sequence[Unit]) -> None:
        self._calls.append(units)
        for unit in units:
            self.inside[unit].begin()

    def end(self, units: Sequence[Unit]) -> bool:
        """The innermost call that needs these units is over. False if none has begun, because of an earlier error."""
        for index in range(len(self._calls) - 1, -1, -1):
            if self._calls[index] is units:  # not `==`: several modules may need the same units
                del self._calls[index]
                for unit in units:
                    self.inside[unit].end()
                return True
        return False
