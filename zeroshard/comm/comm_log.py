"""The log of what was communicated."""

from __future__ import annotations

import json
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class CommEvent(NamedTuple):
    """One collective as this rank issued it. `bytes`: what the rank sends, (d - 1) / d of the full buffer. (Where parts
    of it do not take part, ranks may send different amounts.)"""

    op: str
    unit: str
    phase: str
    bytes: int


@dataclass
class CommLog:
    """What was communicated. `entries` holds the most recent events (bounded), the totals hold all of them."""

    entries: deque[CommEvent] = field(default_factory=lambda: deque(maxlen=100_000))
    total_bytes: int = 0
    wait_seconds: float = 0.0
    digests: dict[str, int] = field(default_factory=dict)

    def record(self, op: str, unit: str, phase: str, num_bytes: int, *, common: int | None = None) -> None:
        """`common`: a number that is the same on every rank, where they send different amounts."""
        self.entries.append(CommEvent(op, unit, phase, num_bytes))
        self.total_bytes += num_bytes
        self.digests[op] = zlib.crc32(
            f"{unit} {num_bytes if common is None else common}".encode(), self.digests.get(op, 0)
        )

    def clear(self) -> None:
        """Forget the entries (the totals stay)."""
        self.entries.clear()

    def bytes(self, op: str | None = None) -> int:
        """Bytes sent by the remembered events, of one kind or of all."""
        return sum(event.bytes for event in self.entries if op in (None, event.op))

    @property
    def digest(self) -> int:
        """One number for the order and the sizes of all collectives so far, each kind on its own: ranks that issue
        the same ones have the same number."""
        return zlib.crc32(json.dumps(self.digests, sort_keys=True).encode())
