"""Reads the timeline that rank 0 of a run has written (`--run.timeline`), as spans in the lanes of a picture."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.errors import InvalidValue
from zeroshard.planning.time_model import Span
from zeroshard.report.plan_file import MOST
from zeroshard.runtime.timeline_event import covered

FILE = "timeline-0.json.gz"
_LANES = {"all_gather": "gathers", "reduce_scatter": "reductions", "reduce_replicas": "reductions"}


@dataclass(frozen=True)
class MeasuredStep:
    """A step as rank 0 has recorded it. The lanes of `spans`: those of `planning.Span`, and "waits"."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        return max((span.stop for span in self.spans), default=0.0)

    def covered(self, *lanes: str, phase: str | None = None) -> float:
        """Seconds in at least one span of these lanes."""
        return covered((s.start, s.stop) for s in self.spans if s.lane in lanes and phase in (None, s.phase))


def read_timeline(folder: Path) -> MeasuredStep | None:
    """The timeline in the folder of a run; None: the run has written none.

    Raises:
        ValueError: the file is damaged.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        found = json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise InvalidValue(f"{path} is not a timeline: {in_short(error)}") from error
    try:
        spans = list(_spans(_events(found)))
    except ValueError as error:
        raise InvalidValue(f"{path} is not a timeline: {error}") from error
    return MeasuredStep(tuple(spans))


def in_short(error: Exception) -> str:
    """Its class and the beginning of its text. (The `repr` of a `UnicodeDecodeError` has the whole file.)"""
    return f"{type(error).__name__}: {str(error)[:200]}"


def _events(found: Any) -> list[Mapping[str, Any]]:
    """The spans of the file.

    Raises:
        ValueError: one of them is damaged, or the file has no list of them."""
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list):
        raise InvalidValue("expected an object with a list, traceEvents")
    kept = []
    for number, event in enumerate(events):
        where = f"traceEvents[{number}]"
        _expect_keys(where, event, ("ph",))
        if event["ph"] == "X":
            _expect_keys(where, event, ("ts", "dur", "cat", "name", "args"))
            _expect_keys(
                f"{where}, args",
                event["args"],
                ("unit", "phase") if event["cat"] in ("wait", "collective") else ("unit",),
            )
            for key in ("ts", "dur"):
                if type(event[key]) not in (int, float) or not 0 <= event[key] <= MOST:  # nothing is drawn at infinity
                    raise InvalidValue(f"{where}: {key} must be a number from 0 to 2**63, found {event[key]!r:.60}")
            kept.append(event)
    return kept


def _expect_keys(where: str, found: Any, keys: Sequence[str]) -> None:
    """Raises:
    ValueError: it is no object with these keys."""
    if not isinstance(found, dict):
        raise InvalidValue(f"{where} must be an object, found {found!r:.60}")
    if missing := [key for key in keys if key not in found]:
        raise InvalidValue(f"{where} has no {missing[0]}")


def _spans(events: Sequence[Mapping[str, Any]]) -> Iterator[Span]:
    """Spans in the order in which they begin, in seconds since the first. Of the engine's phases, only those of the
    optimizer's step are computation."""
    began = min((float(event["ts"]) for event in events), default=0.0)
    for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        kind, name, arguments = event["cat"], str(event["name"]), event["args"]
        start = (event["ts"] - began) / 1e6
        place = str(arguments["unit"] or name), start, start + event["dur"] / 1e6
        if kind in ("forward", "backward"):
            yield Span("compute", place[0], kind, *place[1:])
        elif kind == "phase" and name.startswith("step"):
            yield Span("compute", name, "step", *place[1:])
        elif kind == "wait":
            yield Span("waits", name, str(arguments["phase"]), *place[1:])
        elif kind == "collective":
            yield Span(_LANES.get(name.partition("(")[0], "others"), place[0], str(arguments["phase"]), *place[1:])
