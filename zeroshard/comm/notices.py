"""What the ranks write to the store for each other: that they run and where, that their work is done, who failed first.

| key | value | written |
|---|---|---|
| who-R | the process of rank R | once |
| beat-R | how often, where its main thread is, what it waits for (if for long) | twice a second |
| left-R | how many collectives of each kind it had begun | when its work is done |
| first | a cause, by the rank that was the first to claim it | once |
| failure | a cause: all ranks leave | when the first rank has printed its traceback |
| come-K | how many ranks have come to the wait K, and how often | as they come |
"""

from __future__ import annotations

import json
from typing import NamedTuple

from torch._C._distributed_c10d import Store

from zeroshard.comm.positions import HERE, Position
from zeroshard.comm.processes import Who


class Cause(NamedTuple):
    """Why all ranks leave, as a sentence in two parts.

    Attributes:
        whose: fault it is: a rank's, the launcher's (None) or nobody's ("").
        what: has become of it.
    """

    whose: int | str | None
    what: str

    def __str__(self) -> str:
        if self.whose is None:
            return f"the launcher {self.what}"
        return f"rank {self.whose} {self.what}" if self.whose != "" else self.what


class Beat(NamedTuple):
    """A rank says that it runs.

    Attributes:
        number: of the times that it has said so.
        where: its main thread is.
        position: what it waits for, if for long.
    """

    number: int
    where: str
    position: Position | None


class Notices:
    """Of one rank. Each method is a job for the line to the store."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def come(self, store: Store, who: Who) -> None:
        self.beat(store, Beat(0, "at the start", None))
        store.set(f"who-{self._rank}", json.dumps(who.as_list()))

    def beat(self, store: Store, beat: Beat) -> None:
        number, where, position = beat
        store.set(f"beat-{self._rank}", json.dumps([number, where, position and position.as_list()]))

    def leave(self, store: Store) -> None:
        store.set(f"left-{self._rank}", json.dumps(dict(HERE.begun)))

    def who(self, store: Store, rank: int) -> Who | None:
        """None where that rank has not come yet."""
        return Who(*json.loads(store.get(f"who-{rank}"))) if store.check([f"who-{rank}"]) else None

    def last_beat(self, store: Store, rank: int) -> Beat:
        number, where, position = json.loads(store.get(f"beat-{rank}"))
        return Beat(number, where, Position.of(position) if position else None)

    def has_left(self, store: Store, rank: int) -> bool:
        return store.check([f"left-{rank}"])

    def begun(self, store: Store, rank: int) -> dict[str, int]:
        """How many collectives of each kind a rank that has left had begun."""
        found: dict[str, int] = json.loads(store.get(f"left-{rank}"))
        return found

    def claim(self, store: Store, cause: Cause) -> bool:
        """Whether nobody has claimed to be the first before."""
        text = json.dumps(cause)
        return store.compare_set("first", "", text).decode() == text

    def announce(self, store: Store, cause: Cause) -> None:
        store.set("failure", json.dumps(cause))

    def failure(self, store: Store) -> Cause | None:
        """What the rank that failed first has said."""
        return Cause(*json.loads(store.get("failure"))) if store.check(["failure"]) else None

    def count(self, store: Store, key: str, by: int) -> int:
        """How often ranks have come to a wait, after `by` more."""
        return store.add(f"come-{key}", by)
