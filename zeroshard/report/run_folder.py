"""Reads what a run has recorded in its folder: `metrics.jsonl`, line by line, checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zeroshard.comm.collectives import transport_named
from zeroshard.comm.transport import TransportName
from zeroshard.errors import InvalidValue
from zeroshard.placement import as_plan
from zeroshard.report.plan_file import MOST
from zeroshard.report.run_timeline import MeasuredStep, in_short, read_timeline

METRICS = "metrics.jsonl"
_WHOLE = ("step", "engine_bytes", "peak_memory_bytes", "memory_bytes")
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
    try:
        found = replace(_record(folder, rows), timeline=measured)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidValue(f"{path} is damaged: {in_short(error)}") from error
    if not found.steps:
        raise InvalidValue(f"{path}: the run has not come to its first step")
    if not found.starts:
        raise InvalidValue(f"{path} is damaged: it records no start of the ranks")
    return found


def _rows(path: Path, lines: list[str]) -> Iterator[Mapping[str, Any]]:
    for number, text in enumerate(lines, 1):
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            # A run that was killed may have written a part of its last line.
            if number == len(lines) and number > 1:
                return
            raise InvalidValue(f"{path} is damaged in line {number}: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
            raise InvalidValue(f"{path} is damaged in line {number}: expected an object with a kind")
        if row["kind"] == "step":
            _check_step(path, number, row)
        yield row


def _check_step(path: Path, number: int, row: Mapping[str, Any]) -> None:
    """Raises:
    ValueError: a field is none that the page can draw."""
    wrong = [key for key in _WHOLE if key in row and not _is_whole(row[key])]
    wrong += [key for key in _NUMBERS if key in row and not _is_number(row[key])]
    wrong += [key for key in ("step", "engine_bytes", "peak_memory_bytes") if key not in row]
    if wrong:
        raise InvalidValue(f"{path} is damaged in line {number}: {wrong[0]} is {str(row.get(wrong[0]))[:60]!r}")


def _record(folder: Path, rows: list[Mapping[str, Any]]) -> RunRecord:
    def of(kind: str) -> list[Mapping[str, Any]]:
        return [row for row in rows if row["kind"] == kind]

    memory = of("memory")[-1:]
    return RunRecord(
        folder,
        steps=tuple(of("step")),
        validations=tuple((_whole("step", row["step"]), _number(row["loss"])) for row in of("validation")),
        starts=tuple(map(_start, of("start"))),
        measured=_measured(memory[0]) if memory else None,
    )


def _start(row: Mapping[str, Any]) -> Start:
    transport_named(row["transport"])
    as_plan(row["plan"])
    step, ranks, restarts = (_whole(key, row[key], 1 if key == "ranks" else 0) for key in ("step", "ranks", "restarts"))
    batch = {key: _whole(key, row["batch"][key], 1) for key in _OF_A_BATCH} if "batch" in row else {}
    if batch:
        batch["reduce_every_micro_batch"] = bool(row["batch"]["reduce_every_micro_batch"])
    recompute = bool(row["recompute"]) if "recompute" in row else None
    where = ranks, str(row["device"]), restarts, row["transport"]
    return Start(step, row["plan"], str(row["precision"]), *where, batch, recompute)


def _measured(row: Mapping[str, Any]) -> Measured:
    held = {str(phase): _kinds(kinds) for phase, kinds in row["held"].items()}
    return Measured(_whole("step", row["step"]), held, held.pop("at most"))


def _kinds(kinds: Mapping[str, Any]) -> dict[str, int]:
    return {str(kind): _whole(kind, num_bytes) for kind, num_bytes in kinds.items()}


def _whole(key: str, value: Any, least: int = 0) -> int:
    """Raises:
    ValueError: `value` is not a whole number from `least`."""
    if not _is_whole(value) or value < least:
        raise InvalidValue(f"{key} must be a whole number from {least}, found {value!r:.60}")
    return int(value)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST


def _number(value: Any) -> float | None:
    """Raises:
    ValueError: it cannot be drawn."""
    if not _is_number(value):
        raise InvalidValue(f"expected a number or null, found {value!r:.60}")
    return None if value is None else float(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not abs(value) > _LARGEST)
