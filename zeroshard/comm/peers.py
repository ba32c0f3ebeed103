"""What a rank has heard of the others: whose processes they are, where each was last, and who waits for whom."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from torch._C._distributed_c10d import Store

from zeroshard.comm.blame import OUTSIDE, Seen, blame, describe_knot
from zeroshard.comm.notices import Cause, Notices
from zeroshard.comm.positions import Position, knot
from zeroshard.comm.processes import Who

_SEE_ELSEWHERE = "see its own output, and the exit status that the launcher reports"
"""A process that is no child of ours: we cannot know whether a signal has ended it."""
_LONGEST_PAUSE = 10.0


class Peers:
    """Of one rank. What takes a store is a job for the line to it; the rest is remembered.

    Attributes:
        me: this rank's process.
        looks: whether this is the rank that looks at all others, as it has been waiting for long.
    """

    def __init__(self, rank: int, world_size: int, notices: Notices) -> None:
        self.me, self.looks = Who.this(), False
        self._rank, self._world_size, self._notices = rank, world_size, notices
        self._who = {rank: self.me}
        self._neighbours: dict[int, Who] = {}
        self._seen: dict[int, Seen] = {}
        self._begun: dict[int, Mapping[str, int]] = {}  # by those that have left
        self._suspected: list[int] = []
        self._on_host = 0
        self._complete, self._pause, self._next = False, 0.0, 0.0

    def find_neighbours(self, store: Store) -> None:
        """On this host, as they come; asked less and less often, until all ranks have come."""
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
        self._neighbours |= {
            rank: who for rank, who in found.items() if rank != self._rank and who.is_neighbour_of(self.me)
        }

    def look(self, store: Store, ranks: Iterable[int] | None = None) -> None:
        """Where these are, or all others: for one rank at a time."""
        ranks = [rank for rank in ranks or range(self._world_size) if rank != self._rank]
        self._know(self._notices.who(store, [rank for rank in ranks if rank not in self._who]))
        beats, now = self._notices.last_beats(store, (rank for rank in ranks if rank in self._who)), time.monotonic()
        for rank, beat in beats.items():
            seen = self._seen.setdefault(rank, Seen(beat.number, beat.where, now, now))
            seen.note(now, beat.number, beat.where, beat.position)
            seen.left = beat.left is not None
            if beat.left is not None:
                self._begun[rank] = beat.left

    def death(self, store: Store) -> Cause | None:
        """Of a process on this host that has ended without a report."""
        for rank, who in self._neighbours.items():
            # A rank that is done has written so before it ended (`Watch.close`): only the others have died.
            if who.state == "ended" and self._notices.last_beats(store, [rank])[rank].left is None:
                died = f"died without reporting an error (process {who.pid}; killed, possibly out of memory)"
                return Cause(rank, f"{died}: {_SEE_ELSEWHERE}")
        return None

    def decide_who_looks(self, store: Store, *, is_stuck: bool) -> None:
        """Of those that have been waiting for long, one looks at all: the first."""
        if is_stuck:
            self.looks = self._notices.may_look(store)
        elif self.looks:
            self._notices.has_looked(store)
            self.looks = False

    def deadlock(self, store: Store, position: Position, where: str) -> Cause | None:
        """This rank has been waiting for long, there, and looks at all: do ranks wait for each other without end? The
        same must be found twice, a beat apart."""
        self.look(store)
        left = {rank: self._begun[rank] for rank, seen in self._seen.items() if seen.left}
        positions = {rank: seen.position for rank, seen in self._seen.items() if seen.position is not None}
        positions = {**positions, self._rank: position}
        # Positions are read one after the other, not at one instant: a rank may have moved on in between. The same knot
        # twice, a beat apart, is no coincidence.
        suspected, self._suspected = self._suspected, knot(positions, left)
        if not self._suspected or self._suspected != suspected:
            return None
        places = {**{rank: seen.where for rank, seen in self._seen.items()}, self._rank: where}
        return Cause("", describe_knot(self._suspected, positions, places))

    def where(self, rank: int) -> str:
        """Where it was when somebody last looked."""
        return self._seen[rank].where if rank in self._seen else OUTSIDE

    def silence_of(self, rank: int) -> float:
        """Seconds."""
        return self._seen[rank].silent_seconds if rank in self._seen else 0.0

    def number_of(self, rank: int) -> int:
        """Of the last beat that has been seen."""
        return self._seen[rank].beats if rank in self._seen else -1

    @property
    def is_clear(self) -> bool:
        """Whether what has been seen says already whom to blame."""
        return any(seen.is_silent or seen.left for seen in self._seen.values())

    def blame(self) -> list[str]:
        return blame(self._rank, self._who, self._seen)

    def stopped(self) -> dict[int, Who]:
        """On this host, by a signal."""
        return {rank: who for rank, who in self._neighbours.items() if who.state == "stopped"}

    def wake(self) -> None:
        """Whoever has been stopped by a signal is to leave, too."""
        for who in self.stopped().values():
            with suppress(OSError):
                os.kill(who.pid, signal.SIGCONT)
