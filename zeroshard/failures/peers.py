"""What a rank knows of the other ranks: their processes, where each was last seen, and which rank waits for which."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterable, Mapping
from functools import partial

from torch._C._distributed_c10d import Store

from zeroshard.failures.blame import OUTSIDE, Seen, blame, describe_knot
from zeroshard.failures.found import holder_of, launcher_holds_store, port_of, stopped_of_this_job, wake
from zeroshard.failures.notices import Beat, Cause, Notices
from zeroshard.failures.positions import HERE, Position, knot
from zeroshard.failures.processes import Who

_DIED = (
    "killed, often out of memory; a crash in native code; or os._exit. See its own output, and the exit status that "
    "the launcher reports"
)
"""A peer is not a child process of this rank, so this rank cannot read its exit status, which would tell them apart."""
_LONGEST_PAUSE = 10.0
_STOPPED_SECONDS = 10.0
"""How long a rank that was stopped while the store did not answer counts as stopped."""
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
        self._were_stopped, self._noted = dict[int, Who](), -math.inf

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
        # New dictionaries, here and in `look`: another thread may be in a loop over the old ones.
        self._who = {**self._who, **found}
        near = {rank: who for rank, who in found.items() if rank != self._rank and who.is_neighbour_of(self.me)}
        self.neighbours = {**self.neighbours, **near}

    def look(self, store: Store, ranks: Iterable[int] | None = None) -> None:
        """Read the heartbeats of `ranks` (None: all others). Only one rank at a time may read all of them."""
        ranks = [rank for rank in ranks or range(self._world_size) if rank != self._rank]
        self._know(self._notices.who(store, [rank for rank in ranks if rank not in self._who]))
        beats, now = self._notices.last_beats(store, (rank for rank in ranks if rank in self._who)), time.monotonic()
        seen = dict(self._seen)
        for rank, beat in beats.items():
            seen.setdefault(rank, Seen(beat, now, now)).note(now, beat)
        self._seen = seen

    def ask(self, store: Store) -> None:
        """Ask all other ranks for a heartbeat: who does not answer from now on is silent."""
        self._notices.call(store, [rank for rank in range(self._world_size) if rank != self._rank])
        now = time.monotonic()
        for seen in self._seen.values():
            seen.asked = now

    def death(self, store: Store) -> Cause | None:
        """The cause, if a process on this host has ended without a report; else None."""
        for rank, who in self.neighbours.items():
            # A rank whose work is done writes so before its process ends (`Watch.close`): without that, it has died.
            if who.state == "ended" and not self._notices.last_beats(store, [rank])[rank].is_last:
                return Cause(rank, f"died without reporting an error (process {who.pid}): {_DIED}")
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
        """Whether an awaited rank is silent or has left: then no longer look is needed to name the cause."""
        awaited = self._awaited()
        return any(seen.is_silent or seen.has_left for rank, seen in self._seen.items() if rank in awaited)

    def _awaited(self) -> Collection[int]:
        """The ranks that this rank waits for, those that these wait for, and so on; all if its wait is not known. Ranks
        of another group may have ended their work, or be anywhere, and hold up nobody here."""
        found, waits = set[int](), [HERE.wait]
        while waits:
            if (wait := waits.pop()) is None:
                return range(self._world_size)
            new = {*wait.ranks} - found
            found |= new
            positions = (self.seen(rank).beat.position for rank in new)
            waits += [position.wait for position in positions if position is not None]
        return found

    def blame(self, *, closed: bool, timeout: float) -> list[str]:
        """See `failures/blame.py`."""
        awaited = self._awaited()
        missing = [rank for rank in awaited if rank not in self._who]
        stopped = stopped_of_this_job() if missing else {}
        absent = {rank: stopped.get(rank) for rank in missing}
        known = partial(blame, self._rank, self._who, self._seen, absent, stopped=self.stopped(), closed=closed)
        return known(awaited=awaited, timeout=timeout) or known(timeout=timeout)

    def stopped(self) -> dict[int, Who]:
        """The ranks on this host that are stopped by a signal, or were a moment ago: another rank, which gives up, may
        have woken them."""
        were = self._were_stopped if time.monotonic() - self._noted < _STOPPED_SECONDS else {}
        return were | {rank: who for rank, who in self.neighbours.items() if who.state == "stopped"}

    def wake(self, store: object) -> None:
        """Continue ranks that are stopped by a signal, so that they can end, too. `store`: as of `why_silent`."""
        if 0 not in self._who:
            self._find_holder(store)
        wake({**stopped_of_this_job(), **self.stopped()})

    # Who holds the store ---------------------------------------------------------------------------------------------

    @property
    def holder_ended(self) -> Who | None:
        """The process of rank 0, if that rank held the store and has ended. Its connections may still be open: workers
        that it has forked (a DataLoader's) have inherited them, and take seconds to notice the end of their parent."""
        who = self.neighbours.get(0)
        return who if not launcher_holds_store() and who is not None and who.state == "ended" else None

    def note_stopped(self, store: object) -> None:
        """Remember who is stopped now, while the store does not answer. Asks no other process."""
        self._find_holder(store)
        self._were_stopped, self._noted = self.stopped(), time.monotonic()

    def _find_holder(self, store: object) -> Who | None:
        """The process of this host that holds the store; it may have stopped before it could tell that it is rank 0."""
        holder, is_at = holder_of(store), os.environ.get("MASTER_PORT")
        if holder is not None and 0 not in self._who and not launcher_holds_store() and str(port_of(store)) == is_at:
            self._know({0: holder})
        return holder

    def why_silent(self, store: object) -> str:
        """Why the store does not answer. Asks no other process."""
        holder = self._find_holder(store)
        stopped = [f"rank {rank} ({who})" for rank, who in self.stopped().items()]
        if stopped:
            return f"{' and '.join(stopped)} has stopped (no heartbeat)"
        if ended := self.holder_ended:
            return f"rank 0 ({ended}), which held it, has ended"
        if holder is not None:
            name = "the launcher" if launcher_holds_store() else "rank 0" if self._who.get(0) == holder else "a process"
            stops = "has stopped" if holder.state == "stopped" else "runs now: it may have been stopped for a while"
            return f"{name} ({holder}), which holds it, {stops}"
        network = f"the network between {self.me.name} and its host, or that host itself"
        return f"{network}, is the likely cause, not a process"
