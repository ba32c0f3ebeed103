"""The log of collectives and of the bytes sent."""

from __future__ import annotations

import json
import zlib
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zeroshard.comm.ranges import Range, open_range, span


class CommEvent(NamedTuple):
    """One collective as this rank issued it. `bytes`: what this rank sends, (d - 1) / d of the full buffer. (If only
    portions of the buffer take part, ranks may send different amounts.)"""

    op: str
    unit: str
    phase: str
    bytes: int


class Flight:
    """A collective on its way: from its start until `land`, when its result is there. `begun`: its range, if a timeline
    is recorded and the collective is logged."""

    __slots__ = ("_range", "event")

    def __init__(self, event: CommEvent, begun: Range | None = None) -> None:
        self.event, self._range = event, begun

    def waiting(self, name: str = "") -> AbstractContextManager[Any]:
        """The range of a wait for it. `name`: if the wait is for something other than its result."""
        op, unit, phase, _ = self.event
        return span(name or op, unit, "wait", phase)

    def part(self) -> Flight:
        """For an exchange that is only the first part of this collective: its waits belong to it."""
        return Flight(self.event)

    def land(self) -> None:
        if self._range is not None:
            self._range.close()


@dataclass
class CommLog:
    """The log of one handle's collectives. `entries` holds the most recent 100,000 events; the totals count all."""

    entries: deque[CommEvent] = field(default_factory=lambda: deque(maxlen=100_000))
    total_bytes: int = 0
    wait_seconds: float = 0.0
    digests: dict[str, int] = field(default_factory=dict)

    def start(
        self, op: str, unit: str, phase: str, num_bytes: int, *, common: int | None = None, kind: str = ""
    ) -> Flight:
        """Record a collective that starts here. Whoever waits for it calls `land`."""
        event = self.record(op, unit, phase, num_bytes, common=common, kind=kind)
        return Flight(event, open_range("collective", *event))

    def record(
        self, op: str, unit: str, phase: str, num_bytes: int, *, common: int | None = None, kind: str = ""
    ) -> CommEvent:
        """
        Args:
            common: a number that is the same on every rank, for the digest, if ranks send different amounts.
            kind: collectives of one kind have one order on all ranks; by default, those of one `op`.
        """
        kind = kind or op
        event = CommEvent(op, unit, phase, num_bytes)
        self.entries.append(event)
        self.total_bytes += num_bytes
        self.note(kind, f"{unit} {num_bytes if common is None else common}")
        return event

    def note(self, kind: str, what: str) -> None:
        """Add to the digest what has to be the same on all ranks."""
        self.digests[kind] = zlib.crc32(what.encode(), self.digests.get(kind, 0))

    def clear(self) -> None:
        """Forget the entries (the totals stay)."""
        self.entries.clear()

    def bytes(self, op: str | None = None) -> int:
        """Bytes sent in `entries`, by collectives of one kind or of all kinds."""
        return sum(event.bytes for event in self.entries if op in (None, event.op))

    @property
    def digest(self) -> int:
        """One number for the order and the sizes of all collectives so far. Ranks that issue the same collectives have
        the same number. The order is kept per kind: gathers and reductions may interleave differently."""
        return zlib.crc32(json.dumps(self.digests, sort_keys=True).encode())
