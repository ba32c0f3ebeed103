"""When a rank writes a heartbeat, and which rank writes the regular heartbeats of all ranks of a host: its speaker.

    rank 9    each round: posts its heartbeat on its board
    rank 8    each round: posts its own ── every ten seconds: reads the boards, and writes all heartbeats in one call

The speaker is the lowest rank whose board the others see changing, and which can read theirs. It lists on its board for
which ranks it speaks. A rank that no running speaker lists writes its own heartbeats. So nothing has to be agreed: if
the speaker ends, is stopped, or leaves, its board no longer changes, and the next rank begins to speak. What is news (a
long wait that begins or ends, an answer to a rank that asks) every rank writes itself, at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import Enum

from torch._C._distributed_c10d import Store

from zeroshard.failures.boards import Board, Posted, make_board, open_board
from zeroshard.failures.notices import Beat, Notices
from zeroshard.failures.processes import Who

BEAT_SECONDS = 0.5
"""Seconds between two rounds of the watch, and between two heartbeats while a checkpoint is saved."""
STALE_ROUNDS = 4
"""A speaker whose board has not changed for this many rounds of this rank no longer speaks."""
_PACE_SECONDS = 10.0
_HURRY_SECONDS = 10.0
"""For how long a rank that has been asked where it is writes a heartbeat in every round."""


class Due(Enum):
    """What a rank writes in a round: nothing, a regular heartbeat, or one that is news."""

    NOTHING = "nothing"
    REGULAR = "regular"
    NEWS = "news"


class Pace:
    """When a rank writes a heartbeat: every `seconds`; at once if a long wait begins or ends, or the rank is no longer
    spoken for; and in every round for a while after the rank has been asked.

    Attributes:
        timeout: of collectives, in seconds: a rank without a heartbeat for this long is lost.
        seconds: between two regular heartbeats.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.seconds = max(BEAT_SECONDS, min(_PACE_SECONDS, timeout / 8))
        self._next, self._hurries_until, self._calls = 0.0, 0.0, 0
        self._was_stuck = self._was_spoken_for = False

    def is_called(self, calls: int) -> bool:
        """Whether a rank has asked since the last call of this method. `calls`: how often ranks have asked in all."""
        self._calls, before = calls, self._calls
        if calls > before:
            self._hurries_until = time.monotonic() + _HURRY_SECONDS
        return calls > before

    @property
    def hurries(self) -> bool:
        return time.monotonic() < self._hurries_until

    def due(self, *, is_stuck: bool, is_spoken_for: bool = False) -> Due:
        """Call it once in each round."""
        now = time.monotonic()
        is_news = is_stuck != self._was_stuck or self.hurries
        # A speaker that has ended may have written long ago: whoever it spoke for does not wait for its own next time.
        is_alone = self._was_spoken_for and not is_spoken_for
        self._was_stuck, self._was_spoken_for = is_stuck, is_spoken_for
        if not is_news and not is_alone and now < self._next:
            return Due.NOTHING
        self._next = now + self.seconds
        return Due.NEWS if is_news else Due.REGULAR


class Heartbeats:
    """The heartbeats of one rank, and those that it writes for other ranks of its host. Runs on the thread of the
    `StoreLine`, except for the pace.

    Attributes:
        pace: when heartbeats are due.
        card: what the other ranks of this host need to read this rank's board; empty if it has none.
    """

    def __init__(self, rank: int, notices: Notices, timeout: float) -> None:
        self.pace = Pace(timeout)
        self._rank, self._notices = rank, notices
        self._own = make_board()
        self.card = self._own.card if self._own is not None else ()
        self._boards: dict[int, Board | None] = {}
        self._ages: dict[int, tuple[int, int]] = {}  # rank -> number of its last heartbeat, rounds since it changed

    def round(self, store: Store, beat: Beat, neighbours: Mapping[int, Who]) -> Due:
        """Post this rank's heartbeat, and write what is due. `neighbours`: the other ranks of this host."""
        self._open(neighbours)
        is_spoken_for = self._post(beat)
        is_news = beat.position is not None or beat.left is not None
        due = self.pace.due(is_stuck=is_news, is_spoken_for=is_spoken_for)
        if due is Due.NEWS:
            self._notices.beat(store, beat)
        elif due is Due.REGULAR and not is_spoken_for:
            self._notices.beat(store, beat, {rank: posted.beat for rank, posted in self._others().items()})
        return due

    def end(self) -> None:
        """Speak for nobody any longer."""
        if self._own is not None:
            self._own.post(-1, "", ())

    def _open(self, neighbours: Mapping[int, Who]) -> None:
        if self._own is not None and len(self._boards) < len(neighbours):
            self._boards |= {rank: open_board(neighbours[rank]) for rank in neighbours.keys() - self._boards.keys()}

    def _post(self, beat: Beat) -> bool:
        """Post this rank's heartbeat. Returns whether another rank speaks for this one."""
        # With a short timeout the ranks could be taken for silent before the next speaker begins.
        if self._own is None or self.pace.seconds <= BEAT_SECONDS:
            return False
        is_spoken_for = self._has_speaker()
        # A rank that has been asked writes only its own heartbeats: whoever asks compares their numbers, and one
        # that is told for a stopped rank would look like an answer.
        speaks = not is_spoken_for and not self.pace.hurries
        return self._own.post(beat.number, beat.encode(), self._others() if speaks else ()) and is_spoken_for

    def _others(self) -> dict[int, Posted]:
        """What the higher ranks have posted: those that this rank may speak for."""
        found = {rank: board.read() for rank, board in self._boards.items() if rank > self._rank and board is not None}
        return {rank: posted for rank, posted in found.items() if posted is not None and posted.beat}

    def _has_speaker(self) -> bool:
        """Whether a lower rank that still runs lists this one."""
        for rank in sorted(self._boards):
            board = self._boards[rank]
            posted = board.read() if board is not None and rank < self._rank else None
            if posted is not None and self._rank in posted.speaks_for and self._is_fresh(rank, posted.number):
                return True
        return False

    def _is_fresh(self, rank: int, number: int) -> bool:
        last, age = self._ages.get(rank, (number, -1))
        age = age + 1 if number == last else 0
        self._ages[rank] = number, age
        return age < STALE_ROUNDS
