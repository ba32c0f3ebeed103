"""The log of collectives and of the bytes sent."""

from __future__ import annotations

import json
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple


class CommEvent(NamedTuple):
    """One collective as this rank issued it. `bytes`: what this rank sends, (d - 1) / d of the full buffer. (If only
    portions of the buffer take part, ranks may send different amounts.)"""

    op: str
    unit: str
    phase: str
    bytes: int


@dataclass
class CommLog:
    """The log of one handle's collectives. `entries` holds the most recent 100,000 events; the totals count all."""

    entries: deque[CommEvent] = field(default_factory=lambda: deque(maxlen=100_000))
    total_bytes: int = 0
    wait_seconds: float = 0.0
    digests: dict[str, int] = field(default_factory=dict)

    def record(self, op: str, unit: str, phase: str, num_bytes: int, *, common: int | None = None) -> None:
        """`common`: a number that is the same on every rank, for the digest, if ranks send different amounts."""
        self.entries.append(CommEvent(op, unit, phase, num_bytes))
        self.total_bytes += num_bytes
        self.digests[op] = zlib.crc32(
            f"{unit} {num_bytes if common is None else common}".encode(), self.digests.get(op, 0)
        )

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
