"""The time for which this process has run: without what passes while a signal has stopped it (Control-Z, a scheduler
that suspends a job, a container that is paused).

All ranks of a job are stopped together. Where each of them then counted that time as silence of the others, the first
one that goes on would give up on ranks that go on a moment later.
"""

from __future__ import annotations

import math
import time

LOOK_SECONDS = 1.0
"""Whoever waits looks at its clock at least this often."""


class Clock:
    """Counts seconds, as long as somebody looks at it regularly. Any thread may look.

    Attributes:
        stop: (when it was noticed, by `time.monotonic`; seconds) of the last stop.
    """

    def __init__(self, look_seconds: float = LOOK_SECONDS) -> None:
        """`look_seconds`: between two looks, at most. A process that runs has looked after twice that time, unless its
        machine is busy: what is longer does not count."""
        self.stop = -math.inf, 0.0
        self._most = 2 * look_seconds
        self._last = time.monotonic(), 0.0

    def seconds(self) -> float:
        """Since this clock was made."""
        # No lock: two looks at once find the same, and garbage collection may look in the middle of this one.
        (looked, before), now = self._last, time.monotonic()
        passed = now - looked
        if passed > self._most:
            self.stop = now, passed
        seconds = before + min(passed, self._most)
        self._last = now, seconds
        return seconds


class Patience:
    """How long a wait may still take. Look at it every `LOOK_SECONDS`."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._clock = seconds, Clock()

    @property
    def left(self) -> float:
        """Seconds; not above zero: it is over."""
        return self._seconds - self._clock.seconds()

    @property
    def pause(self) -> float:
        """Seconds until the next look."""
        return max(0.0, min(self.left, LOOK_SECONDS))
