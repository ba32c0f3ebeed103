"""The ranks' processes, and whether they run, as seen from other processes of the same host."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

_UNKNOWN = "?"


class Who(NamedTuple):
    """A rank's process.

    Attributes:
        host: equal for processes that see each other's pids (same boot, same pid namespace); "" if unknown.
        pid: process number in that namespace.
        started: start time in clock ticks since boot: tells a later process with the same pid apart.
        name: host name, for people.
        board: where its neighbours find its heartbeats (`failures/boards.py`); empty if it has no board.
    """

    host: str
    pid: int
    started: int
    name: str
    board: tuple[int, ...] = ()

    @classmethod
    def this(cls, board: tuple[int, ...] = ()) -> Who:
        return cls.of_process(os.getpid(), board)

    @classmethod
    def of_process(cls, pid: int, board: tuple[int, ...] = ()) -> Who:
        """A process of this host."""
        return cls(_host(), pid, _stat(pid)[1], socket.gethostname(), board)

    @classmethod
    def of(cls, found: Sequence[Any]) -> Who:
        host, pid, started, name, board = found
        return cls(host, pid, started, name, tuple(board))

    def __str__(self) -> str:
        return f"process {self.pid} on {self.name}"

    def is_neighbour_of(self, other: Who) -> bool:
        """Whether the two processes see each other by pid."""
        return bool(self.host) and self.host == other.host and _stat(self.pid)[1] in (0, self.started)

    @property
    def state(self) -> str:
        """The state of a neighbour: "runs", "stopped" (by a signal) or "ended"."""
        letter, started = _stat(self.pid)
        if letter == _UNKNOWN:
            return "runs"
        if letter in "ZX" or started != self.started:
            return "ended"
        return "stopped" if letter in "Tt" else "runs"


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process of this host."""
    return _stat(pid)[0] in "Tt"


def descends_from(pid: int) -> bool:
    """Whether this process was started by that one, or by one that it has started, and all of them still run. (Without
    /proc only its own parent is known.)"""
    one = os.getppid()
    while one and one != pid:
        one = _parent(one)
    return bool(one)


def _parent(pid: int) -> int:
    """0 if it is not known."""
    try:
        return int(_fields(pid)[1])
    except (OSError, IndexError, ValueError):
        return 0


def _fields(pid: int) -> list[bytes]:
    """What the system shows of a process, from its state on."""
    # Bytes: the system cuts the program's name off after 15 of them, also in the middle of a character.
    with open(f"/proc/{pid}/stat", "rb") as file:
        # Split after the last ")": the program's name, in parentheses, may itself contain spaces and ")" (proc(5)).
        return file.read().rpartition(b")")[2].split()


def _stat(pid: int) -> tuple[str, int]:
    """State letter and start time of a process; ("X", 0) if there is no such process, (_UNKNOWN, 0) if this process
    cannot look: it may have no descriptor left at this moment, or the other one is hidden."""
    try:
        fields = _fields(pid)
        return fields[0].decode(), int(fields[19])
    except (FileNotFoundError, ProcessLookupError):
        return _UNKNOWN if _is_hidden(pid) else "X", 0
    except (OSError, IndexError, ValueError):
        return _UNKNOWN, 0


def _is_hidden(pid: int) -> bool:
    """Whether there is such a process, although /proc does not show it: `hidepid` hides those of other users."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True


def _host() -> str:
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # /proc shows the pids of another namespace
            return ""
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
