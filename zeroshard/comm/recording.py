"""Records when ranges of this process begin and end, for timelines.

A mark is a moment of the host. On a device that works through a queue (a GPU), the host is ahead of the computation, so
a mark is an event in the device's current stream as well, and says when the device came to that place of the program.
The times of the events are read when the recording has stopped: until then nobody waits for the device.
"""

from __future__ import annotations

import threading
import time
from typing import ClassVar, Literal, NamedTuple

import torch

from zeroshard.errors import InvalidState

Kind = Literal["forward", "backward", "phase", "wait", "collective"]


class Device:
    """Makes and reads the events of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def event(self) -> torch.Event:
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def synchronize(self) -> None:
        """Wait until the device has reached all events."""
        torch.accelerator.synchronize(self.device)


class Mark(NamedTuple):
    """`seconds`: of `time.perf_counter`, which the processes of a host share (on Linux)."""

    seconds: float
    event: torch.Event | None


class Range:
    """Open until `close`.

    Attributes:
        thread: ident of the thread that opened it.
        end: None while it is open.
    """

    __slots__ = ("_recording", "begin", "end", "kind", "name", "num_bytes", "phase", "thread", "unit")

    def __init__(self, recording: Recording, kind: Kind, name: str, unit: str, phase: str, num_bytes: int) -> None:
        self.kind, self.name, self.unit, self.phase, self.num_bytes = kind, name, unit, phase, num_bytes
        self.thread = threading.get_ident()
        self._recording = recording
        self.end: Mark | None = None
        self.begin = recording.mark()

    def close(self) -> None:
        if self.end is None:
            self.end = self._recording.mark()


class Recording:
    """The ranges that were opened between `start` and `stop`.

    Attributes:
        now: the recording that has started; None: nothing is recorded. One per process, as torch's profiler: all
            handles and threads record there.
        ranges: in the order in which they were opened.
        began, ended: marks of `start` and `stop`.
    """

    now: ClassVar[Recording | None] = None
    began: Mark
    ended: Mark

    def __init__(self, device: Device | None) -> None:
        """`device`: None: the host computes."""
        self._device = device
        self.ranges: list[Range] = []

    def start(self) -> None:
        """
        Raises:
            RuntimeError: another recording of this process has started, and not stopped.
        """
        if Recording.now is not None:
            raise InvalidState(
                "a timeline of this process is being recorded, and contains everything: record one at a time"
            )
        if self._device is not None:
            self._device.synchronize()  # so that the first event is at the same moment as the host
        self.began = self.mark()
        Recording.now = self

    def stop(self) -> None:
        """Waits for the device."""
        Recording.now = None
        self.ended = self.mark()
        if self._device is not None:
            self._device.synchronize()

    def mark(self) -> Mark:
        event = None if self._device is None else self._device.event()
        return Mark(time.perf_counter(), event)

    def contains(self, mark: Mark) -> bool:
        """Whether the mark lies before the end, when the recording has stopped."""
        return mark.seconds <= self.ended.seconds

    def on_host(self, mark: Mark) -> float:
        """Seconds since the start."""
        return mark.seconds - self.began.seconds

    def on_device(self, mark: Mark) -> float | None:
        """Seconds from the start until the device came to the mark; None if the host computes."""
        if mark.event is None or self.began.event is None:
            return None
        return self.began.event.elapsed_time(mark.event) / 1000


def open_range(kind: Kind, name: str, unit: str = "", phase: str = "", num_bytes: int = 0) -> Range | None:
    """Open a range in the recording that has started, if there is one."""
    recording = Recording.now
    if recording is None:
        return None
    opened = Range(recording, kind, name, unit, phase, num_bytes)
    recording.ranges.append(opened)  # one operation of Python, so threads do not disturb each other
    return opened
