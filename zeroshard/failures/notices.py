"""The keys that ranks write to the store for each other: heartbeats, ended work, and which rank failed first.

| key | value | written |
|---|---|---|
| who-R | the process of rank R | once |
| come | how many ranks have started | once by each |
| seats-H, seat-H-n | how many ranks have started on host H, and the n-th of them | once by each |
| beat-R | heartbeat number, place, what R waits for (if for long), collectives begun (at the end) | by R: see `Pace` |
| told-R | a heartbeat of R | by the rank that speaks for R (`heartbeat.py`) |
| looker | the rank that reads the heartbeats of all others | when a rank has waited for long, or timed out |
| looks | how often all ranks have been asked where they are | before such a look |
| bell-R | no content: rank R blocks on this key, then reads `failure` and `looks` | with these |
| first | a cause, by the first rank that claimed it | once |
| failure | a cause: all ranks leave | when the first rank has printed its traceback |
| come-K | how many ranks have come to the wait K, summed over all its uses | as they come |

No rank polls the store for news: it blocks on its bell. So the store serves one call per host and pace, and one rank
that reads all heartbeats in one call.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

from torch._C._distributed_c10d import Store

from zeroshard.errors import InvalidState
from zeroshard.failures.positions import HERE, Position
from zeroshard.failures.processes import Who


class Cause(NamedTuple):
    """Why all ranks leave, as subject and predicate of a sentence.

    Attributes:
        whose: the subject: a rank, the launcher (None), or "" if `what` is the whole sentence.
        what: what happened.
    """

    whose: int | str | None
    what: str

    def __str__(self) -> str:
        if self.whose is None:
            return f"the launcher {self.what}"
        return f"rank {self.whose} {self.what}" if self.whose != "" else self.what


class Beat(NamedTuple):
    """A heartbeat.

    Attributes:
        number: counts the rounds of the rank's watch.
        where: the place of its main thread in the program.
        position: what it waits for, if it has been waiting for long.
        left: how many collectives of each kind it had begun when its program ended; None before that.
        saves: whether it has left, and its process still saves in the background.
    """

    number: int
    where: str
    position: Position | None
    left: Mapping[str, int] | None = None
    saves: bool = False

    @property
    def is_last(self) -> bool:
        """Whether the process may end now."""
        return self.left is not None and not self.saves

    def encode(self) -> str:
        return json.dumps([self.number, self.where, self.position and self.position.as_list(), self.left, self.saves])

    @classmethod
    def decode(cls, data: bytes) -> Beat:
        number, where, position, left, saves = json.loads(data)
        return cls(number, where, Position.of(position) if position else None, left, saves)


class Notices:
    """Reads and writes of one rank. Each method runs on the thread of the `StoreLine`."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    def come(self, store: Store, who: Who) -> None:
        """Register this rank's process and host: six calls, independent of the number of ranks.

        Raises:
            RuntimeError: the store has keys of an earlier run, and a failure of that time would be taken for a new one.
        """
        if store.check([f"who-{self._rank}"]):
            raise InvalidState(
                "init: the store of the process group has the keys of an earlier run: each start needs a new one. "
                'Remove the file of init_method="file://...", or of a FileStore, before the start, or name another one'
            )
        # The order matters: a rank that finds `who-R` reads `beat-R` with a get that blocks until the key exists, and a
        # rank that finds `come` complete looks for new seats only once more.
        first = Beat(0, "at the start", None)
        self.beat(store, first, {self._rank: first.encode()})
        store.set(f"who-{self._rank}", json.dumps(who))
        host = _name(who)
        store.set(f"seat-{host}-{store.add(f'seats-{host}', 1)}", str(self._rank))
        store.add("come", 1)

    def have_all_come(self, store: Store) -> bool:
        return store.add("come", 0) >= self._world_size

    def on_host_of(self, store: Store, who: Who, known: int) -> list[int]:
        """The ranks that have started on the host of `who`, except for the first `known` ones."""
        host = _name(who)
        keys = [f"seat-{host}-{number}" for number in range(known + 1, store.add(f"seats-{host}", 0) + 1)]
        while keys and not store.check(keys):  # the counter is raised before the key is written
            keys.pop()
        return [int(rank) for rank in _all_of(store, keys)]

    def who(self, store: Store, ranks: Sequence[int]) -> dict[int, Who]:
        """The processes of those `ranks` that have started."""
        keys = [f"who-{rank}" for rank in ranks]
        if not store.check(keys):
            ranks = [rank for rank in ranks if store.check([f"who-{rank}"])]
            keys = [f"who-{rank}" for rank in ranks]
        return {rank: Who.of(json.loads(data)) for rank, data in zip(ranks, _all_of(store, keys), strict=True)}

    def beat(self, store: Store, beat: Beat, told: Mapping[int, str] | None = None) -> None:
        """Write this rank's heartbeat, and those that it tells for others, encoded, in one call."""
        beats = {f"beat-{self._rank}": beat.encode(), **{f"told-{rank}": text for rank, text in (told or {}).items()}}
        cast(Any, store).multi_set(list(beats), list(beats.values()))

    def last_beats(self, store: Store, ranks: Iterable[int]) -> dict[int, Beat]:
        """The last heartbeats of `ranks`, which must have started: the read blocks until the keys exist."""
        ranks = list(ranks)
        found = _all_of(store, [f"{kind}-{rank}" for kind in ("beat", "told") for rank in ranks])
        beats = [Beat.decode(data) for data in found]
        # A rank and its speaker write to keys of their own. With one key, a heartbeat that the speaker has read before
        # could replace a newer one: the last one of all, for example, which says that the rank has left.
        newest = (max(pair, key=lambda beat: beat.number) for pair in zip(beats, beats[len(ranks) :], strict=False))
        return dict(zip(ranks, newest, strict=True))

    def leave(self, store: Store, number: int, where: str) -> None:
        self.beat(store, Beat(number, where, None, HERE.counts()))

    # Bells -----------------------------------------------------------------------------------------------------------

    @property
    def bell(self) -> str:
        """The key that this rank waits for."""
        return f"bell-{self._rank}"

    def ring(self, store: Store, ranks: Iterable[int]) -> None:
        """Wake these ranks, so that they read `failure` and `looks`."""
        keys = [f"bell-{rank}" for rank in ranks]
        if keys:
            cast(Any, store).multi_set(keys, ["1"] * len(keys))

    def call(self, store: Store, ranks: Iterable[int]) -> None:
        """Ask these ranks to write heartbeats now, and at a faster pace for a while."""
        # The counter first: a rank that is woken reads it at once.
        store.add("looks", 1)
        self.ring(store, ranks)

    def calls(self, store: Store) -> int:
        """How often ranks have been asked by `call`."""
        return store.add("looks", 0)

    def may_look(self, store: Store) -> bool:
        """Whether this rank is the one that reads all heartbeats: the first that asks, until it calls `has_looked`."""
        me = str(self._rank)
        return store.compare_set("looker", "", me).decode() == me

    def has_looked(self, store: Store) -> None:
        store.compare_set("looker", str(self._rank), "")

    # Failures --------------------------------------------------------------------------------------------------------

    def claim(self, store: Store, cause: Cause) -> bool:
        """Whether this rank is the first to claim a cause. Only the first cause is reported."""
        text = json.dumps(cause)
        return store.compare_set("first", "", text).decode() == text

    def announce(self, store: Store, cause: Cause) -> None:
        store.set("failure", json.dumps(cause))
        # `failure` before the bells: a rank that is woken reads it at once. This rank's own bell rings, too, so that
        # its watch ends the process if the program does not end by itself.
        self.ring(store, range(self._world_size))

    def failure(self, store: Store) -> Cause | None:
        """The cause that the rank that failed first has announced, if any."""
        return Cause(*json.loads(store.get("failure"))) if store.check(["failure"]) else None

    def count(self, store: Store, key: str, by: int) -> int:
        """Add `by` to the number of arrivals at a wait, and return the sum."""
        return store.add(f"come-{key}", by)

    def forget_counts(self, store: Store, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(RuntimeError):  # a store that deletes nothing
                store.delete_key(f"come-{key}")


def _name(who: Who) -> str:
    """The part of a key that stands for a host. If `who.host` is "" (unknown), the host name alone decides."""
    return f"{zlib.crc32(f'{who.host} {who.name}'.encode()):x}"


def _all_of(store: Store, keys: list[str]) -> list[bytes]:
    """The values of `keys`, in one call to the store."""
    return store.multi_get(keys) if keys else []
