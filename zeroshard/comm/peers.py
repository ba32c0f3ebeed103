"""What a rank knows of the other ranks: their processes, where each was last seen, and which rank waits for which."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from torch._C._distributed_c10d import Store

from zeroshard.comm.blame import OUTSIDE, Seen, blame, describe_knot
from zeroshard.comm.notices import Beat, Cause, Notices
from zeroshard.comm.positions import Position, knot
from zeroshard.comm.processes import Who

_SEE_ELSEWHERE = "see its own output, and the exit status that the launcher reports"
"""A peer is not a child process of this rank, so this rank cannot read its exit status."""
_LONGEST_PAUSE = 10.0
_NEVER = Seen(Beat(-1, OUTSIDE, None), 0.0, 0.0)
"""Of a rank of which no heartbeat has been read."""


class Peers:
    """The peers of one rank. Methods that take a store run on the thread of the `StoreLine`; the others read what is
    remembered.

    Attributes:
        me: this rank's process.
        neighbours: the other ranks whose processes this rank can see.
        looks: whether this rank, having waited for long, is the one that reads all heartbeats.
    """

    def __init__(self, rank: int, world_size: int, notices: Notices, me: Who | None = None) -> None:
        self.me, self.looks = me or Who.this(), False
        self._rank, self._world_size, self._notices = rank, world_size, notices
        self._who = {rank: self.me}
        self.neighbours: dict[int, Who] = {}
        self._seen: dict[int, Seen] = {}
        self._suspected: list[int] = []
        self._on_host = 0
        self._complete, self._pause, self._next = False, 0.0, 0.0

    def find_neighbours(self, store: Store) -> None:
        """Find the ranks of this host as they start; asks the store less and less often, until all ranks have
        started."""
        now = time.monotonic()
        if self._complete or now < self._next:
            return
        self._complete = self._notices.have_all_come(store)
        found = self._notices.on_host_of(store, self.me, self._on_host)
        self._on_host += len(found)
        self._know(self._notices.who(store, found))
        self._pause = min(2 * self._pause + 0.4, _LONGEST_PAUSE)
        self._next = now + self._pause

    def _know(self, found: Mapping[int, Who]) -> None:
        self._who |= found
        self.neighbours |= {
            rank: who for rank, who in found.items() if rank != self._rank and who.is_neighbour_of(self.me)
        }

    def look(self, store: Store, ranks: Iterable[int] | None = None) -> None:
        """Read the heartbeats of `ranks` (None: all others). Only one rank at a time may read all of them."""
        ranks = [rank for rank in ranks or range(self._world_size) if rank != self._rank]
        self._know(self._notices.who(store, [rank for rank in ranks if rank not in self._who]))
        beats, now = self._notices.last_beats(store, (rank for rank in ranks if rank in self._who)), time.monotonic()
        for rank, beat in beats.items():
            self._seen.setdefault(rank, Seen(beat, now, now)).note(now, beat)

    def death(self, store: Store) -> Cause | None:
        """The cause, if a process on this host has ended without a report; else None."""
        for rank, who in self.neighbours.items():
            # A rank whose work is done writes so before its process ends (`Watch.close`): without that, it has died.
            if who.state == "ended" and self._notices.last_beats(store, [rank])[rank].left is None:
                died = f"died without reporting an error (process {who.pid}; killed, possibly out of memory)"
                return Cause(rank, f"{died}: {_SEE_ELSEWHERE}")
        return None

    def decide_who_looks(self, store: Store, *, is_stuck: bool) -> None:
        """Let one rank, the first that has waited for long, read all heartbeats."""
        if is_stuck:
            self.looks = self._notices.may_look(store)
        elif self.looks:
            self._notices.has_looked(store)
            self.looks = False

    def deadlock(self, store: Store, position: Position, where: str) -> Cause | None:
        """The cause, if ranks wait for each other without end. Called on the one rank that reads all heartbeats, which
        has waited for long at `position`. The same deadlock must be found twice, one heartbeat apart."""
        self.look(store)
        beats = {rank: seen.beat for rank, seen in self._seen.items()}
        left = {rank: beat.left for rank, beat in beats.items() if beat.left is not None}
        positions = {rank: beat.position for rank, beat in beats.items() if beat.position is not None}
        positions = {**positions, self._rank: position}
        # Positions are not read at one instant: a rank may have moved on in between, which can look like a deadlock. A
        # real one is found again at the next heartbeat.
        suspected, self._suspected = self._suspected, knot(positions, left)
        if not self._suspected or self._suspected != suspected:
            return None
        places = {**{rank: beat.where for rank, beat in beats.items()}, self._rank: where}
        return Cause("", describe_knot(self._suspected, positions, places))

    def seen(self, rank: int) -> Seen:
        """What is known of the rank since this rank's last look."""
        return self._seen.get(rank, _NEVER)

    @property
    def is_clear(self) -> bool:
        """Whether a rank is silent or has left: then no longer look is needed to name the cause."""
        return any(seen.is_silent or seen.has_left for seen in self._seen.values())

    def blame(self, *, closed: bool, timeout: float) -> list[str]:
        """See `comm/blame.py`."""
        return blame(self._rank, self._who, self._seen, closed=closed, timeout=timeout)

    def stopped(self) -> dict[int, Who]:
        """The ranks on this host that are stopped by a signal."""
        return {rank: who for rank, who in self.neighbours.items() if who.state == "stopped"}

    def wake(self) -> None:
        """Continue ranks that are stopped by a signal, so that they can end, too."""
        for who in self.stopped().values():
            with suppress(OSError):
                os.kill(who.pid, signal.SIGCONT)
