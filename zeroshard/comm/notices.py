"""What the ranks write to the store for each other: that they run and where, that their work is done, who failed first.

| key | value | written |
|---|---|---|
| who-R | the process of rank R | once |
| come | how many ranks have come | once by each |
| seats-H, seat-H-n | how many ranks have come on host H, and the n-th of them | once by each |
| beat-R | how often, where it is, what it waits for (for long), what it had begun (at the end) | see `Pace` |
| looker | the rank that looks at all others | when a rank has been waiting for long, or in vain |
| looks | how often somebody has asked all ranks where they are | before such a look |
| bell-R | nothing: rank R waits for this key, and looks at `failure` and `looks` when it comes | with these |
| first | a cause, by the rank that was the first to claim it | once |
| failure | a cause: all ranks leave | when the first rank has printed its traceback |
| come-K | how many ranks have come to the wait K, and how often | as they come |

No rank asks the store again and again whether there is news: it waits for its bell. So a store serves a call of each
rank at its pace, and one rank that looks at all others in one call.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

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
        number: of the times that it has looked around.
        where: its main thread is.
        position: what it waits for, if for long.
        left: how many collectives of each kind it had begun; None before its work is done.
    """

    number: int
    where: str
    position: Position | None
    left: Mapping[str, int] | None = None

    def encode(self) -> str:
        return json.dumps([self.number, self.where, self.position and self.position.as_list(), self.left])

    @classmethod
    def decode(cls, data: bytes) -> Beat:
        number, where, position, left = json.loads(data)
        return cls(number, where, Position.of(position) if position else None, left)


class Notices:
    """Of one rank. Each method is a job for the line to the store."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def come(self, store: Store, who: Who) -> None:
        """The one exchange of hosts and processes: five calls, however many ranks there are."""
        self.beat(store, Beat(0, "at the start", None))
        store.set(f"who-{self._rank}", json.dumps(who.as_list()))
        host = _name(who)
        store.set(f"seat-{host}-{store.add(f'seats-{host}', 1)}", str(self._rank))
        store.add("come", 1)

    def have_all_come(self, store: Store) -> bool:
        return store.add("come", 0) >= self._world_size

    def on_host_of(self, store: Store, who: Who, known: int) -> list[int]:
        """Ranks that have come there after the first `known` ones."""
        host = _name(who)
        keys = [f"seat-{host}-{number}" for number in range(known + 1, store.add(f"seats-{host}", 0) + 1)]
        while keys and not store.check(keys):  # counted, and not written yet
            keys.pop()
        return [int(rank) for rank in _all_of(store, keys)]

    def who(self, store: Store, ranks: Sequence[int]) -> dict[int, Who]:
        """Of those that have come."""
        keys = [f"who-{rank}" for rank in ranks]
        if not store.check(keys):
            ranks = [rank for rank in ranks if store.check([f"who-{rank}"])]
            keys = [f"who-{rank}" for rank in ranks]
        return {rank: Who(*json.loads(data)) for rank, data in zip(ranks, _all_of(store, keys), strict=True)}

    def beat(self, store: Store, beat: Beat) -> None:
        store.set(f"beat-{self._rank}", beat.encode())

    def last_beats(self, store: Store, ranks: Iterable[int]) -> dict[int, Beat]:
        """Of ranks that have come."""
        ranks = list(ranks)
        found = _all_of(store, [f"beat-{rank}" for rank in ranks])
        return {rank: Beat.decode(data) for rank, data in zip(ranks, found, strict=True)}

    def leave(self, store: Store, number: int, where: str) -> None:
        self.beat(store, Beat(number, where, None, dict(HERE.begun)))

    # Bells -----------------------------------------------------------------------------------------------------------

    @property
    def bell(self) -> str:
        """The key that this rank waits for."""
        return f"bell-{self._rank}"

    def ring(self, store: Store, ranks: Iterable[int]) -> None:
        """Let these ranks look at the store."""
        keys = [f"bell-{rank}" for rank in ranks]
        if keys:
            cast(Any, store).multi_set(keys, ["1"] * len(keys))  # in one call

    def call(self, store: Store, ranks: Iterable[int]) -> None:
        """Ask these ranks to say where they are, now and for a while."""
        store.add("looks", 1)
        self.ring(store, ranks)

    def calls(self, store: Store) -> int:
        """How often somebody has."""
        return store.add("looks", 0)

    def may_look(self, store: Store) -> bool:
        """Whether this rank is the one that looks at all others: the first that asks, until it says that it is done."""
        me = str(self._rank)
        return store.compare_set("looker", "", me).decode() == me

    def has_looked(self, store: Store) -> None:
        store.compare_set("looker", str(self._rank), "")

    # Failures --------------------------------------------------------------------------------------------------------

    def claim(self, store: Store, cause: Cause) -> bool:
        """Whether nobody has claimed to be the first before."""
        text = json.dumps(cause)
        return store.compare_set("first", "", text).decode() == text

    def announce(self, store: Store, cause: Cause) -> None:
        store.set("failure", json.dumps(cause))
        self.ring(store, range(self._world_size))  # its own, too: it is to end, if it does not by itself

    def failure(self, store: Store) -> Cause | None:
        """What the rank that failed first has said."""
        return Cause(*json.loads(store.get("failure"))) if store.check(["failure"]) else None

    def count(self, store: Store, key: str, by: int) -> int:
        """How often ranks have come to a wait, after `by` more."""
        return store.add(f"come-{key}", by)


def _name(who: Who) -> str:
    """Of a host, in a key; of a rank whose host cannot be told its own."""
    return f"{zlib.crc32(f'{who.host} {who.name}'.encode()):x}"


def _all_of(store: Store, keys: list[str]) -> list[bytes]:
    """In one call."""
    return store.multi_get(keys) if keys else []
