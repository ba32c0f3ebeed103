"""The life cycle of a sharded model, and the errors of calls that do not fit its state.

OPEN --park()--> PARKED --unpark()--> OPEN --close()--> CLOSING (until it is done) --> CLOSED
OPEN, PARKED, CLOSING --abandon()--> ABANDONED
"""

from __future__ import annotations

from enum import Enum

from zeroshard.errors import InvalidState


class Life(Enum):
    OPEN = "open"
    PARKED = "parked"
    CLOSING = "closing"
    CLOSED = "closed"
    ABANDONED = "abandoned"

    @property
    def is_over(self) -> bool:
        return self in (Life.CLOSED, Life.ABANDONED)

    def expect_open(self, what: str) -> None:
        """Raises:
        RuntimeError: the handle is not open. `what`: the call, for the message."""
        if self is Life.CLOSING and what != "close":
            raise InvalidState(f"{what}: close() of this handle has been interrupted; call it again, or abandon()")
        if self is Life.CLOSED:
            raise InvalidState(f"{what}: this handle is closed, and its model is a plain one again; call shard() anew")
        if self is Life.ABANDONED:
            raise InvalidState(
                f"{what}: this handle was abandoned; build and shard() the model anew, load a checkpoint"
            )
        if self is Life.PARKED:
            raise InvalidState(f"{what}: this handle is parked; call unpark() first")

    def expect_parked(self, what: str) -> None:
        """Raises:
        RuntimeError: the handle is not parked."""
        if self is not Life.PARKED:
            raise InvalidState(f"{what}: this handle is not parked")
