"""The calls of modules that need units and are not over.

A call inside of another that has asked for the same units asks for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from zeroshard.storage.unit import Unit


class Inside:
    """Of one unit: `now`, whether a call that needs it is running. A plain attribute, which torch.compile can guard."""

    def __init__(self) -> None:
        self.now = False
        self._calls = 0

    def begin(self) -> None:
        self._calls, self.now = self._calls + 1, True

    def end(self) -> bool:
        """Whether no other is left."""
        self._calls -= 1
        self.now = self._calls > 0
        return not self.now


class Running:
    """The calls that have asked for units and are not over, the innermost last. `inside`: of each unit."""

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
        """The innermost call of these is over. False if none has begun: something raised before."""
        for index in range(len(self._calls) - 1, -1, -1):
            if self._calls[index] is units:  # not `==`: several modules may need the same units
                del self._calls[index]
                for unit in units:
                    self.inside[unit].end()
                return True
        return False
