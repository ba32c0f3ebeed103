"""The events of a timeline; the time that they cover; and the trace for Perfetto that is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard.comm.ranges import Kind, Range, Recording, label

Times = tuple[float, float]
"""Begin and end, in seconds since the timeline began."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One range of a timeline.

    Attributes:
        kind: "forward": a call of a unit's module, with the wait for its weights;
            "backward": from when backward has the gradient of an output of the unit's module until it has that of an
            input. A unit whose module calls modules of other units has several in one backward;
            "phase": a part of the engine's work, for example "gather", "reduce", "step: agree", "step: batch", "save";
            "wait": this rank waits for a collective, and copies or sums what the peers have sent;
            "collective": an entry of `handle.comm_log`, from its start until its result has been waited for. (It may
            have been complete before: nobody looked.)
        name: of the phase or collective, or the kind.
        unit: whose weights or gradients; "" if there is none.
        phase: of a collective and of a wait for it: as in `handle.comm_log`.
        num_bytes: of a collective: what this rank sends.
        host: when the host began and ended.
        device: when the device came to these places of its stream. None without such a device: on CPUs.
        thread: number of the host's thread, in the order of their first events.
        is_complete: whether it had ended before the timeline ended.
    """

    kind: Kind
    name: str
    unit: str
    phase: str
    num_bytes: int
    host: Times
    device: Times | None
    thread: int
    is_complete: bool

    @property
    def times(self) -> Times:
        """On the device if there is one, else on the host."""
        return self.host if self.device is None else self.device

    @property
    def seconds(self) -> float:
        begin, end = self.times
        return end - begin

    @property
    def label(self) -> str:
        """Name and unit, as in torch's profiler: "gather(blocks.3)"."""
        return label(self.name if self.kind != "wait" else f"wait: {self.name}", self.unit)

    @classmethod
    def of(cls, opened: Range, recording: Recording, thread: int) -> TimelineEvent:
        """The event of a range, when the recording has stopped."""
        ended = opened.end if opened.end is not None and recording.contains(opened.end) else None
        marks = opened.begin, ended or recording.ended
        begin, end = (recording.on_device(mark) for mark in marks)
        return cls(
            opened.kind,
            opened.name,
            opened.unit,
            opened.phase,
            opened.num_bytes,
            host=(recording.on_host(marks[0]), recording.on_host(marks[1])),
            device=None if begin is None or end is None else (begin, end),
            thread=thread,
            is_complete=ended is not None,
        )


def covered(spans: Iterable[Times]) -> float:
    """Seconds in at least one of these spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def lanes(spans: Sequence[Times]) -> list[int]:
    """For each span a number: spans with the same number do not overlap. As few numbers as possible."""
    chosen, free_from = [0] * len(spans), list[float]()
    for index in sorted(range(len(spans)), key=lambda index: spans[index]):
        begin, end = spans[index]
        lane = next((lane for lane, free in enumerate(free_from) if free <= begin), len(free_from))
        free_from[lane : lane + 1] = [end]
        chosen[index] = lane
    return chosen


def trace_events(events: Sequence[TimelineEvent], rank: int, title: str, began: float) -> list[dict[str, Any]]:
    """The events in the trace event format. Each rank is a process, and each track a thread of it: host threads, device
    streams, and as many tracks as collectives were in flight at once. `began`: seconds on the host's clock."""
    tracks: dict[str, int] = {}
    found: list[dict[str, Any]] = []
    for track, event, (begin, end) in _on_tracks(events):
        arguments = {"unit": event.unit, "phase": event.phase, "bytes": event.num_bytes, "complete": event.is_complete}
        found.append(
            {
                "name": event.label,
                "cat": event.kind,
                "ph": "X",
                "pid": rank,
                "tid": tracks.setdefault(track, len(tracks)),
                "ts": round((began + begin) * 1e6, 3),  # microseconds, to the nanosecond
                "dur": round((end - begin) * 1e6, 3),
                "args": arguments,
            }
        )
    names = [("process_name", 0, title), *(("thread_name", number, track) for track, number in tracks.items())]
    return [*({"name": n, "ph": "M", "pid": rank, "tid": t, "args": {"name": v}} for n, t, v in names), *found]


def _on_tracks(events: Sequence[TimelineEvent]) -> Iterator[tuple[str, TimelineEvent, Times]]:
    """Track, event and times, for the host and for the device. Ranges on one track nest."""
    nested = [event for event in events if event.kind != "collective"]
    flights = [event for event in events if event.kind == "collective"]
    yield from ((f"host, thread {event.thread}", event, event.host) for event in nested)
    for lane, event in zip(lanes([event.host for event in flights]), flights, strict=True):
        yield f"host, in flight {lane}", event, event.host
    yield from ((f"device, thread {event.thread}", event, event.device) for event in nested if event.device)
    landed = [(event, event.device) for event in flights if event.device]
    for lane, (event, times) in zip(lanes([times for _, times in landed]), landed, strict=True):
        yield f"device, in flight {lane}", event, times
