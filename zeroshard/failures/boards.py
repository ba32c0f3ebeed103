"""Boards: each rank posts its heartbeat in memory that the other ranks of its host read, without a call to the store.

A board is a labelled memory file, found as in `shared_memory.py`. It stays readable after its process has ended.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from zeroshard.failures.processes import Who
from zeroshard.ranks.shared_memory import Location, Process, SharedMemory, opened

_BYTES = 1 << 20
"""Of one board. Only the pages that have been written take memory."""
_HEAD = struct.Struct("<II")
"""Checksum and length of what is posted."""


@dataclass(frozen=True)
class Posted:
    """What a rank has posted.

    Attributes:
        number: of its heartbeat.
        beat: the heartbeat, encoded.
        speaks_for: the ranks whose heartbeats it writes to the store.
    """

    number: int
    beat: str
    speaks_for: tuple[int, ...]


class Board:
    """The memory of one rank's heartbeats: written by that rank, read by the others.

    Attributes:
        card: what these need to open it, see `open_board`; of their own copies empty.
    """

    def __init__(self, memory: mmap.mmap, card: tuple[int, ...] = ()) -> None:
        self._memory, self.card = memory, card
        self._last: Posted | None = None

    def post(self, number: int, beat: str, speaks_for: Iterable[int]) -> bool:
        """Replace what is posted. False if it does not fit: then nothing is posted."""
        data = json.dumps([number, beat, list(speaks_for)]).encode()
        fits = len(data) <= _BYTES - _HEAD.size
        data = data if fits else b""
        self._memory[: _HEAD.size + len(data)] = _HEAD.pack(zlib.crc32(data), len(data)) + data
        return fits

    def read(self) -> Posted | None:
        """What was posted last; None if there is nothing. Any process may read at any time."""
        checksum, size = _HEAD.unpack(self._memory[: _HEAD.size])
        data = self._memory[_HEAD.size : _HEAD.size + size]
        # There is no lock: a reader that meets the writer in the middle finds a wrong checksum, and keeps what it has
        # read before. So does one whose peer was killed in the middle.
        if zlib.crc32(data) == checksum:
            self._last = None
            if data:
                number, beat, speaks_for = json.loads(data)
                self._last = Posted(number, beat, tuple(speaks_for))
        return self._last


def make_board() -> Board | None:
    """A board for this process; None where the system has no such memory."""
    with suppress(OSError, AttributeError):  # os.memfd_create exists on Linux only
        shared = SharedMemory()
        segment, fd = shared.create(_BYTES)
        board = Board(mmap.mmap(fd, _BYTES), (shared.process.identity, segment, fd))
        weakref.finalize(board, os.close, fd)  # peers open it through /proc
        return board
    return None


def open_board(who: Who) -> Board | None:
    """The board of a process of this host; None if it has none, or this process may not open it."""
    if who.board:
        identity, segment, fd = who.board
        with suppress(OSError), opened(Process(who.pid, identity), Location(segment, fd, _BYTES, 0)) as file:
            return Board(mmap.mmap(file, _BYTES))
    return None
