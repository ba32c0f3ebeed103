"""Reads what a run has recorded in its folder: `metrics.jsonl`, line by line, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from zeroshard.comm.collectives import transport_named
from zeroshard.comm.transport import TransportName
from zeroshard.errors import InvalidValue
from zeroshard.placement import as_plan
from zeroshard.report.plan_file import MOST
from zeroshard.report.run_timeline import MeasuredStep, in_short, read_timeline

METRICS = "metrics.jsonl"
T = TypeVar("T")
_OF_A_BATCH = ("sequences", "micro_batches")
_LARGEST = 1e300
"""Of a number that is drawn: a scale over larger ones has no length."""
_NUMBERS = ("loss", "grad_norm", "loss_scale", "tokens_per_second", "communication_share", "seconds")


@dataclass(frozen=True)
class Start:
    """A start of the run's ranks. `step`: the step from which they continued; `restarts`: how often a launcher had
    started them again by then; `transport`: how they exchanged buffers; `batch`, `recompute`: as configured, where that
    is recorded."""

    step: int
    plan: str
    precision: str
    ranks: int
    device: str
    restarts: int
    transport: TransportName
    batch: Mapping[str, int]
    recompute: bool | None

    @property
    def words(self) -> str:
        if self.restarts:
            return f"restart {self.restarts} after step {self.step}"
        return f"resumed after step {self.step}" if self.step else ""


@dataclass(frozen=True)
class Measured:
    """Live bytes of the engine at a step, by kind: phase -> kind -> bytes, and kind -> the most so far."""

    step: int
    held: Mapping[str, Mapping[str, int]]
    at_most: Mapping[str, int]


@dataclass(frozen=True)
class RunRecord:
    """What a run has recorded.

    Attributes:
        steps: in order; in each the fields of `train.metrics.StepRecord`. A loss that was not finite is None.
        validations: (step, loss).
        starts: of the ranks, at least one.
        measured: the last measurement by kind, if there is one.
        timeline: of one step, if the run has recorded one.
    """

    folder: Path
    steps: tuple[Mapping[str, Any], ...]
    validations: tuple[tuple[int, float | None], ...]
    starts: tuple[Start, ...]
    measured: Measured | None
    timeline: MeasuredStep | None = None

    @property
    def last(self) -> Mapping[str, Any]:
        return self.steps[-1]

    @property
    def started(self) -> Start:
        """The start of the ranks that have done the last step. (Others may have started since, and have done none.)"""
        return next((start for start in reversed(self.starts) if start.step < self.last["step"]), self.starts[-1])

    @property
    def skipped(self) -> list[int]:
        """The steps that were not applied."""
        return [step["step"] for step in self.steps if step.get("applied") is False]


def read_run(folder: Path, *, timeline: bool = True) -> RunRecord:
    """What the run in `folder` has recorded.

    Args:
        timeline: also read that.

    Raises:
        ValueError: the folder contains no run, a damaged one, or one that has not done a step yet.
    """
    path = folder / METRICS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidValue(f"{folder} is not the folder of a run: there is no {path.name} in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is damaged: {in_short(error)}") from error
    rows = list(_rows(path, lines))
    measured = read_timeline(folder) if timeline else None
    found = replace(_record(path, rows), timeline=measured)
    if not found.steps:
        raise InvalidValue(f"{path}: the run has not come to its first step")
    if not found.starts:
        raise InvalidValue(f"{path} is damaged: it records no start of the ranks")
    return found


def _rows(path: Path, lines: list[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The lines with their numbers."""
    for number, text in enumerate(lines, 1):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            # A run that was killed may have written a part of its last line.
            if number == len(lines) and number > 1:
                return
            raise InvalidValue(f"{path} is damaged in line {number}: it is not JSON ({error})") from error
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
            raise InvalidValue(f"{path} is damaged in line {number}: expected an object with a kind")
        yield number, row


def _record(path: Path, rows: list[tuple[int, Mapping[str, Any]]]) -> RunRecord:
    def of(kind: str, read: Callable[[Mapping[str, Any]], T]) -> tuple[T, ...]:
        found = []
        for number, row in rows:
            if row["kind"] == kind:
                with _in_line(path, number):
                    found.append(read(row))
        return tuple(found)

    return RunRecord(
        path.parent,
        steps=of("step", _step),
        validations=of("validation", lambda row: (_whole("step", row["step"]), _number("loss", row["loss"]))),
        starts=of("start", _start),
        measured=next(reversed(of("memory", _measured)), None),
    )


@contextmanager
def _in_line(path: Path, number: int) -> Iterator[None]:
    """Raises:
    ValueError: in place of an error inside, with the number of the line."""
    try:
        yield
    except KeyError as error:
        raise InvalidValue(f"{path} is damaged in line {number}: it has no {error.args[0]}") from error
    except ValueError as error:
        raise InvalidValue(f"{path} is damaged in line {number}: {error}") from error


def _step(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises:
    ValueError: a field is none that the page can draw."""
    for key in ("step", "engine_bytes", "peak_memory_bytes"):
        _whole(key, row[key])
    if "memory_bytes" in row:
        _whole("memory_bytes", row["memory_bytes"])
    for key in _NUMBERS:
        _number(key, row.get(key))
    return row


def _start(row: Mapping[str, Any]) -> Start:
    transport, plan = (_text(key, row[key]) for key in ("transport", "plan"))
    transport_named(transport)
    as_plan(plan)
    step, ranks, restarts = (_whole(key, row[key], 1 if key == "ranks" else 0) for key in ("step", "ranks", "restarts"))
    given = _object("batch", row.get("batch", {}))
    batch = {key: _whole(key, given[key], 1) for key in _OF_A_BATCH} if given else {}
    if batch:
        batch["reduce_every_micro_batch"] = bool(given["reduce_every_micro_batch"])
    recompute = bool(row["recompute"]) if "recompute" in row else None
    where = ranks, _text("device", row["device"]), restarts, transport
    return Start(step, plan, _text("precision", row["precision"]), *where, batch, recompute)


def _measured(row: Mapping[str, Any]) -> Measured:
    held = {phase: _kinds(phase, kinds) for phase, kinds in _object("held", row["held"]).items()}
    return Measured(_whole("step", row["step"]), held, held.pop("at most"))


def _kinds(phase: str, kinds: Any) -> dict[str, int]:
    return {kind: _whole(kind, num_bytes) for kind, num_bytes in _object(phase, kinds).items()}


def _object(key: str, value: Any) -> Mapping[str, Any]:
    """Raises:
    ValueError: `value` is no object of JSON."""
    if not isinstance(value, dict):
        raise InvalidValue(f"{key} must be an object, found {value!r:.60}")
    return value


def _text(key: str, value: Any) -> Any:
    """Raises:
    ValueError: `value` is no text."""
    if not isinstance(value, str):
        raise InvalidValue(f"{key} must be a text, found {value!r:.60}")
    return value


def _whole(key: str, value: Any, least: int = 0) -> int:
    """Raises:
    ValueError: `value` is not a whole number from `least`."""
    if type(value) is not int or not least <= value <= MOST:
        raise InvalidValue(f"{key} must be a whole number from {least}, found {value!r:.60}")
    return int(value)


def _number(key: str, value: Any) -> float | None:
    """Raises:
    ValueError: it cannot be drawn."""
    if not (value is None or (isinstance(value, (int, float)) and not abs(value) > _LARGEST)):
        raise InvalidValue(f"{key} must be a number or null, found {value!r:.60}")
    return None if value is None else float(value)
