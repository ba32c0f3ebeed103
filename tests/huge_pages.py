"""Puts memory into huge pages: a fork copies one page-table entry for each page, and there are 512 times fewer huge
pages.

Thousands of ranks are forked from a process that has imported torch and all tests. A fork takes 14 ms of kernel time
with pages of 4 kB, and 3 ms with huge pages (Linux 6.1, `madvise(2)`: MADV_COLLAPSE). On other systems nothing changes.

After a fork, the first write to a huge page that this process shares with its child divides the page for good. After 90
forks half of them are gone, and a fork takes twice as long. So they are collapsed again from time to time.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

FORKS = 20
HUGE = 2**21
MADV_COLLAPSE = 25


def collapse() -> int:
    """Collapse what this process has allocated so far; returns the number of huge pages."""
    if not sys.platform.startswith("linux"):
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    count = 0
    for start, end in _allocated():
        for address in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE):
            count += madvise(address, HUGE, MADV_COLLAPSE) == 0
    return count


class Again:
    """Collapses once more after every `FORKS` forks of this process."""

    def __init__(self) -> None:
        self._forks = 0
        os.register_at_fork(after_in_parent=self._count)

    def _count(self) -> None:
        self._forks += 1

    def look(self) -> None:
        if self._forks >= FORKS:
            self._forks = 0
            collapse()


def _allocated() -> list[tuple[int, int]]:
    """Address ranges that map no file: the heap, and the memory that allocators have mapped."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, inode, name = [*line.split(maxsplit=5), ""][:6]
        if access.startswith("rw") and inode == "0" and name in ("", "[heap]"):
            start, end = (int(address, 16) for address in addresses.split("-"))
            ranges.append((start, end))
    return ranges
