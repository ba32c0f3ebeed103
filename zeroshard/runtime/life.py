"""The life of a sharded model, and what is refused in it.

OPEN --park()--> PARKED --unpark()--> OPEN --close()--> CLOSED
"""

from __future__ import annotations

from enum import Enum
from typing import Literal


class Life(Enum):
    OPEN = "open"
    PARKED = "parked"
    CLOSED = "closed"

    def expect_open(self, what: str) -> None:
        """Raises:
        RuntimeError: it is not, and `what` needs that."""
        if self is Life.CLOSED:
            raise RuntimeError(f"{what}: this handle is closed, and its model is a plain one again; call shard() anew")
        if self is Life.PARKED:
            raise RuntimeError(f"{what}: this handle is parked; call unpark() first")

    def after(self, what: Literal["park", "unpark", "close"]) -> Life:
        """Where that leads.

        Raises:
            RuntimeError: it is not possible now.
        """
        begins, ends = _EDGES[what]
        if begins is Life.OPEN:
            self.expect_open(what)
        if self is not begins:
            raise RuntimeError(f"{what}: this handle is not {begins.value}")
        return ends


_EDGES = {
    "park": (Life.OPEN, Life.PARKED),
    "unpark": (Life.PARKED, Life.OPEN),
    "close": (Life.OPEN, Life.CLOSED),
}
