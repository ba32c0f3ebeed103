"""Named ranges: for torch's profiler if one runs, and for the timeline that is being recorded (`Handle.timeline`).

    zeroshard::gather(blocks.3)                  a phase: from when a module needs the unit until its weights are there
        zeroshard::all_gather(blocks.3)          a collective: only its start on this rank
        zeroshard::wait: all_gather(blocks.3)    this rank waits for it, and copies or sums what the peers have sent
    zeroshard::reduce(blocks.3)
        zeroshard::wait: reduce_scatter(blocks.5)    an earlier reduction, whose memory is needed now
    zeroshard::step: agree

| of                | phases                                                                                          |
|-------------------|-------------------------------------------------------------------------------------------------|
| forward           | before forward, gather                                                                          |
| backward          | begin of backward, gather, reduce, end of backward                                              |
| a step            | step: agree, update, batch, updated, read from peers; of whole parameters: gradients to owners, |
|                   | main to owners, whole parameters, main to holders                                               |
| between steps     | unshard, read in full, full state, load full state, state_dict, load_state_dict, park, unpark   |
| a join            | join: gather, backward, open, reduce, end, agree, step (orders that this rank carries out)      |
| checkpoints       | save: collect, plan, write, commit; load: find, compare, preflight, restore; verify             |

A timeline also has the forward and the backward of each unit (`stretches.py`), and each collective from its start until
its result is there (`comm_log.py`). Torch's profiler has not: its ranges begin and end in one call.

While neither runs, a range costs two tests (less than a microsecond). Else it costs some microseconds, so there are
ranges per unit and per step, never per parameter.

A mark is a moment of the host. On a device that works through a queue (a GPU), the host is ahead of the computation, so
a mark is an event in the device's current stream as well, and says when the device came to that place of the program.
The times of the events are read when the recording has stopped: until then nobody waits for the device.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, ClassVar, Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch.autograd.profiler import record_function

from zeroshard.errors import InvalidState

P = ParamSpec("P")
R = TypeVar("R")
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


_NOTHING = nullcontext()


def label(name: str, unit: str) -> str:
    return f"{name}({unit})" if unit else name


def profiled(name: str, unit: str = "") -> AbstractContextManager[Any]:
    """A range for torch's profiler only."""
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return record_function(f"zeroshard::{label(name, unit)}")


def span(name: str, unit: str = "", kind: Kind = "phase", phase: str = "") -> AbstractContextManager[Any]:
    """A range, for as long as the block runs."""
    if Recording.now is None and not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return _Span(name, unit, kind, phase)


def phase(name: str, *, of_unit: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator: each call is a range. `of_unit`: on a method whose first argument is a unit: of that unit."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            if Recording.now is None and not torch._C._autograd._profiler_enabled():
                return function(*args, **kwargs)
            unit: Any = args[1] if of_unit else None
            with _Span(name, unit.name if of_unit else "", "phase", ""):
                return function(*args, **kwargs)

        return wrapper

    return decorate


class _Span:
    def __init__(self, name: str, unit: str, kind: Kind, phase: str) -> None:
        self._described = kind, name, unit, phase
        shown = f"{kind}: {name}" if kind == "wait" else name
        self._profiled = profiled(shown, unit)
        self._range: Range | None = None

    def __enter__(self) -> None:
        self._profiled.__enter__()
        self._range = open_range(*self._described)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._range is not None:
            self._range.close()
        self._profiled.__exit__(kind, error, trace)
