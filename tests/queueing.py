"""How long processes wanted a processor and had none, as the scheduler counts it (Linux).

Seconds minus these are what a program needs where nobody else is: it computes, or it waits for a time or for an event.
A limit on that difference does not depend on how busy the machine is. Of several processes, all of this waiting is
taken off, also where two wait side by side: on a busy machine the limit is less strict, never more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

IS_COUNTED = Path("/proc/thread-self/schedstat").exists()


def queued_by_threads(pid: int) -> dict[int, float]:
    """Of each thread of a process, the seconds that it has been ready and not running. Empty: the process has ended, or
    the kernel does not count this."""
    found = {}
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(FileNotFoundError, ProcessLookupError):
                found[int(task)] = _seconds(f"/proc/{pid}/task/{task}/schedstat")
    return found


def queued_by_this_thread() -> float:
    with suppress(FileNotFoundError):
        return _seconds("/proc/thread-self/schedstat")
    return 0.0


class Queueing:
    """Adds up what processes have queued since this object was made. Call `look` often: what a thread has queued after
    the last look is lost when it ends."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._seen, self.seconds = pids, dict[tuple[int, int], float](), 0.0
        self.look()
        self.seconds = 0.0

    def look(self) -> None:
        for pid in self._pids:
            for task, now in queued_by_threads(pid).items():
                before = self._seen.get((pid, task), 0.0)
                self.seconds += now - before if now >= before else now  # less: a new thread with that number
                self._seen[pid, task] = now


def _seconds(schedstat: str) -> float:
    """The second of the file's three numbers: nanoseconds in the queue of a processor. (Read without a text file's
    object: this is called many thousand times.)"""
    file = os.open(schedstat, os.O_RDONLY)
    try:
        return int(os.read(file, 100).split()[1]) / 1e9
    finally:
        os.close(file)
