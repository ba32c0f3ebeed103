"""Wires that delay and lose packets: a process carries every frame between two TAP devices.

    node0: eth0 ═ far0 ─ this process, after `delay` seconds ─ port0 ═ bridge

tc's netem does the same in the kernel, but many kernels are built without it.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import random
import select
import signal
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress

_SET_INTERFACE, _TAP, _NO_HEADER = 0x400454CA, 2, 0x1000
_LARGEST_FRAME = 1 << 16


class LongWires:
    """Wires between `port{n}` and `far{n}`, in the network namespace that `enter` enters. A context manager.

    Attributes:
        delay: seconds, in each direction.
        loss: the share of the packets that are lost, in each direction.
        carried: number of packets so far.
        lost: number of packets so far.
    """

    def __init__(self, enter: Callable[[], None], count: int) -> None:
        # Memory that this process shares with the fork: delay, loss, carried, lost, whether the devices exist.
        self._numbers = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("d")
        self._enter, self._count = enter, count

    def __enter__(self) -> LongWires:
        sys.stdout.flush(), sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
                self._enter()
                _Carrier(self._numbers, self._count).run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        while not self._numbers[4]:
            ended, _ = os.waitpid(self._pid, os.WNOHANG)
            assert not ended, "the process that carries the packets has ended"
            time.sleep(0.002)
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def set(self, *, delay: float = 0.0, loss: float = 0.0) -> None:
        self._numbers[0], self._numbers[1] = delay, loss

    @property
    def carried(self) -> int:
        return int(self._numbers[2])

    @property
    def lost(self) -> int:
        return int(self._numbers[3])


class _Carrier:
    """The process that carries the packets."""

    def __init__(self, numbers: memoryview[float], count: int) -> None:
        self._numbers, self._random = numbers, random.Random(0)
        self._other: dict[int, int] = {}  # the two ends of each wire
        self._poll = select.poll()
        for number in range(count):
            near, far = _tap(f"port{number}"), _tap(f"far{number}")
            self._other |= {near: far, far: near}
        for end in self._other:
            self._poll.register(end, select.POLLIN)
        # Frames on their way: (when they arrive, at which end, content). One queue, as all wires have the same delay.
        self._on_the_way: deque[tuple[float, int, bytes]] = deque()
        numbers[4] = 1.0

    def run(self) -> None:
        while True:
            arrives = self._on_the_way[0][0] if self._on_the_way else float("inf")
            wait = arrives - time.monotonic()
            for end, event in self._poll.poll(None if wait == float("inf") else max(0.0, wait) * 1000):
                if event & select.POLLIN:
                    self._take(end)
                else:  # the device has gone with its host
                    self._poll.unregister(end)
            self._deliver()

    def _take(self, end: int) -> None:
        delay, loss = self._numbers[0], self._numbers[1]
        arrives = time.monotonic() + delay
        if self._on_the_way:  # as the delay may have become shorter
            arrives = max(arrives, self._on_the_way[-1][0])
        with suppress(OSError):  # no more frames, or the device is down
            while True:
                frame = os.read(end, _LARGEST_FRAME)
                if self._random.random() < loss:
                    self._numbers[3] += 1
                else:
                    self._numbers[2] += 1
                    self._on_the_way.append((arrives, self._other[end], frame))

    def _deliver(self) -> None:
        while self._on_the_way and self._on_the_way[0][0] <= time.monotonic():
            _, end, frame = self._on_the_way.popleft()
            with suppress(OSError):  # the device is down
                os.write(end, frame)


def _tap(name: str) -> int:
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER))
    return file
