"""Timelines: when everything that the engine does in a block begins and ends on this rank."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

from zeroshard.comm.ranges import Device, Kind, Recording
from zeroshard.errors import InvalidState, InvalidValue
from zeroshard.ranks.mesh import Mesh
from zeroshard.runtime.summary import Table, aligned
from zeroshard.runtime.timeline_event import TimelineEvent, covered, trace_events


class Timeline:
    """What happened in one block on this rank, see `Handle.timeline`. Everything but `title` can be read when the block
    has ended; before, it raises a RuntimeError.

    Attributes:
        title: rank, plan and size of the model.
    """

    def __init__(self, mesh: Mesh, title: str) -> None:
        self.title = title
        self._rank = mesh.world.here
        self._recording = Recording(_device_of(mesh))
        self._events: tuple[TimelineEvent, ...] | None = None
        self._seconds = 0.0

    def __enter__(self) -> Self:
        if self._events is not None:
            raise InvalidState("this timeline has recorded its block: call handle.timeline() for each block")
        self._recording.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recording = self._recording
        recording.stop()
        # Another thread (a save in the background) may go on: what it marks after the end is not in the timeline.
        ranges = [opened for opened in recording.ranges if recording.contains(opened.begin)]
        recording.ranges.clear()
        number_of: dict[int, int] = {}
        for opened in ranges:
            number_of.setdefault(opened.thread, len(number_of))
        self._events = tuple(TimelineEvent.of(opened, recording, number_of[opened.thread]) for opened in ranges)
        self._seconds = recording.on_device(recording.ended) or recording.on_host(recording.ended)

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        """All events, in the order in which they began on the host."""
        return self._expect_recorded()

    @property
    def seconds(self) -> float:
        """Duration of the block."""
        self._expect_recorded()
        return self._seconds

    def seconds_in(self, *kinds: Kind) -> float:
        """Seconds in which at least one event of these kinds was in progress: `seconds_in("wait")` is the time that
        communication was exposed.

        Raises:
            ValueError: there is no such kind.
        """
        if not set(kinds) <= set(get_args(Kind)):
            raise InvalidValue(f"seconds_in: expected kinds out of {', '.join(get_args(Kind))}, found {kinds}")
        return covered(event.times for event in self.events if event.kind in kinds)

    def summary(self) -> str:
        """A table to print: for each kind and name the number of events, their seconds, the longest and the bytes sent;
        then the share of waits."""
        groups: dict[tuple[str, str], list[TimelineEvent]] = {}
        for event in self.events:
            shown = f"{event.name} ({event.phase})" if event.phase else event.name
            groups.setdefault((event.kind, shown), []).append(event)
        columns = ("kind", "name", "count", "seconds", "longest", "bytes")
        rows = [_row(kind, name, events) for (kind, name), events in sorted(groups.items())]
        lines = [f"timeline of {self.title}", "", *aligned([columns, *rows], columns[2:]), ""]
        waited = self.seconds_in("wait")
        end = f"{self.seconds:.4f} s, in waits: {waited:.4f} s ({waited / self.seconds:.0%})"
        return Table("\n".join([*lines, end]))

    def export_chrome_trace(self, path: Path | str) -> None:
        """Write a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open; compressed if the name ends in
        ".gz". Each rank writes its own file. Ranks of one host have the same clock: the lists `traceEvents` of their
        files can be joined. (The name is torch.profiler's.)"""
        events = trace_events(self.events, self._rank, self.title, self._recording.began.seconds)
        data = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
        Path(path).write_bytes(gzip.compress(data) if str(path).endswith(".gz") else data)

    def _expect_recorded(self) -> tuple[TimelineEvent, ...]:
        if self._events is None:
            raise InvalidState(
                "this timeline is not recorded yet: read it after its block, `with handle.timeline() as timeline:`"
            )
        return self._events


def _device_of(mesh: Mesh) -> Device | None:
    """Makes the events of the mesh's device; None: there are none on a CPU."""
    return None if mesh.device.type == "cpu" else Device(mesh.device)


def _row(kind: str, name: str, events: list[TimelineEvent]) -> tuple[str, ...]:
    seconds, longest = covered(event.times for event in events), max(event.seconds for event in events)
    num_bytes = f"{sum(event.num_bytes for event in events):,}" if kind == "collective" else ""
    return kind, name, f"{len(events)}", f"{seconds:.4f}", f"{longest:.4f}", num_bytes
