"""Draws what a run has recorded against its steps: loss, gradient norm, loss scale, tokens/s, memory.

Skipped steps are marked at the bottom, restarts and resumes by a line. Of a long run each point shows the range of
several steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zeroshard.planning.in_words import in_units
from zeroshard.report.run_folder import RunRecord
from zeroshard.report.svg import Legend, Scale, data, element, label, line, log_ticks, picture, ticks, title

MOST_POINTS = 400


@dataclass(frozen=True)
class Series:
    """A curve. `values`: (step, value); None: not recorded, or not finite. `only_points`: without a line."""

    name: str
    values: tuple[tuple[int, float | None], ...]
    class_: str = "s0"
    only_points: bool = False

    @property
    def finite(self) -> list[tuple[int, float]]:
        return [(step, value) for step, value in self.values if value is not None and math.isfinite(value)]


@dataclass(frozen=True)
class Chart:
    """Curves over one axis. `write`: a value as text. `log`: a logarithmic axis."""

    title: str
    series: tuple[Series, ...]
    write: Callable[[float], str]
    log: bool = False
    from_zero: bool = False

    @property
    def shown(self) -> tuple[Series, ...]:
        return tuple(series for series in self.series if series.finite)


def charts(run: RunRecord, planned_bytes: int) -> list[Chart]:
    """The charts of a run; without those of which nothing is recorded. `planned_bytes`: of the engine, at rest."""

    def of(key: str, name: str, class_: str = "s0") -> Series:
        return Series(name, tuple((row["step"], row.get(key)) for row in run.steps), class_)

    first, last = run.steps[0]["step"], run.steps[-1]["step"]
    planned = Series("planned", ((first, float(planned_bytes)), (last, float(planned_bytes))), "s1 dashed")
    found = [
        Chart(
            "loss (nats per token)",
            (of("loss", "training"), Series("validation", run.validations, "s1", only_points=True)),
            lambda value: f"{value:.4g}",
        ),
        Chart("gradient norm", (of("grad_norm", "norm"),), lambda value: f"{value:.3g}", log=True),
        Chart("loss scale", (of("loss_scale", "scale"),), _thousands, log=True),
        Chart("tokens per second", (of("tokens_per_second", "tokens/s"),), _thousands, from_zero=True),
        Chart(
            "memory of the process, rank 0",
            (of("peak_memory_bytes", "at most", "s1"), of("memory_bytes", "now")),
            lambda value: in_units(round(value)),
            from_zero=True,
        ),
        Chart(
            "memory of the engine, rank 0",
            (of("engine_bytes", "measured after a step"), planned),
            lambda value: in_units(round(value)),
            from_zero=True,
        ),
        Chart(
            "time spent waiting in collectives",
            (of("communication_share", "share"),),
            lambda value: f"{value:.0%}",
            from_zero=True,
        ),
    ]
    return [chart for chart in found if any(_differs(one) for one in chart.shown)]


def _differs(series: Series) -> bool:
    """Whether there is something to see: a loss scale of 1 in all steps is none."""
    return {value for _, value in series.finite} != {1.0} if series.name == "scale" else bool(series.finite)


def _thousands(value: float) -> str:
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


# The picture ----------------------------------------------------------------------------------------------------------


def draw(chart: Chart, run: RunRecord, width: int) -> str:
    """The picture, `width` pixels wide."""
    left, right, top, bottom = 58, width - 12, 16, 190
    across = _steps(run, left, right)
    up = _values(chart, bottom - 6, top)
    body = list(_grid(chart, up, left, right))
    numbers = ticks(across.low, across.high, 6)
    body += [label(across(value), bottom + 16, f"{value:,.0f}", "middle quiet") for value in numbers]
    body += _events(run, across, top, bottom)
    for series in chart.shown:
        body += _points(series, across, up) if series.only_points else _curve(series, across, up)
    name = f"{chart.title} against steps"
    return picture(width, bottom + 22, body, name, class_="chart", data_left=left, data_right=right)


def _steps(run: RunRecord, left: float, right: float) -> Scale:
    return Scale(min(0, run.steps[0]["step"]), run.steps[-1]["step"], left, right)


def _values(chart: Chart, bottom: float, top: float) -> Scale:
    values = [value for series in chart.shown for _, value in series.finite if not chart.log or value > 0]
    low, high = min(values, default=1.0), max(values, default=1.0)
    if chart.log:
        return Scale(low * 0.8, high * 1.25, bottom, top, log=True)
    low = min(0.0, low) if chart.from_zero else low
    margin = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low if chart.from_zero else low - margin, high + margin, bottom, top)


def _grid(chart: Chart, up: Scale, left: float, right: float) -> Iterator[str]:
    for value in log_ticks(up.low, up.high, 6) if chart.log else ticks(up.low, up.high, 5):
        yield line([(left, up(value)), (right, up(value))], "grid")
        yield label(left - 7, up(value) + 4, chart.write(value), "end quiet")


def _events(run: RunRecord, across: Scale, top: float, bottom: float) -> Iterator[str]:
    for start in run.starts:
        if start.words:
            x, words = across(start.step), title(start.words)
            class_ = "restart" if start.restarts else "resume"
            yield element("line", words, x1=x, x2=x, y1=float(top - 8), y2=float(bottom), class_=f"event {class_}")
    for step in run.skipped:
        x, words = across(step), title(f"step {step} was skipped: a gradient overflowed")
        yield element("path", words, d=f"M{x - 3.5:.2f} {bottom} h7 l-3.5 -8 z", class_="event skipped")


def _curve(series: Series, across: Scale, up: Scale) -> Iterator[str]:
    """A line through the means of neighbouring steps; where they differ, a band from the least to the most."""
    for piece in _pieces(series.values):
        drawable = [(step, value) for step, value in piece if not up.log or value > 0]
        groups = list(_grouped(drawable))
        if any(len(group) > 1 for group in groups):
            highs = [(_mean_step(g, across), up(max(v for _, v in g))) for g in groups]
            lows = [(_mean_step(g, across), up(min(v for _, v in g))) for g in groups]
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*highs, *reversed(lows)])
            yield element("polygon", points=points, class_=f"band {series.class_}")
        means = [(_mean_step(g, across), up(sum(v for _, v in g) / len(g))) for g in groups]
        if len(means) == 1:
            yield element("circle", cx=means[0][0], cy=means[0][1], r=2.0, class_=f"dot {_dot(series)}")
        yield line(means, f"curve {series.class_}")


def _points(series: Series, across: Scale, up: Scale) -> Iterator[str]:
    points = [(across(step), up(value)) for step, value in series.finite]
    yield line(points, f"curve thin {series.class_}")
    for x, y in points:
        yield element("circle", cx=x, cy=y, r=3.0, class_=f"dot {_dot(series)}")


def _dot(series: Series) -> str:
    return f"d{series.class_[1]}"


def _pieces(values: Sequence[tuple[int, float | None]]) -> Iterator[list[tuple[int, float]]]:
    """Runs of finite values: the curve has a gap where there is none."""
    piece: list[tuple[int, float]] = []
    for step, value in values:
        if value is not None and math.isfinite(value):
            piece.append((step, value))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _grouped(points: Sequence[tuple[int, float]]) -> Iterator[Sequence[tuple[int, float]]]:
    size = -(-len(points) // MOST_POINTS)
    for start in range(0, len(points), max(1, size)):
        yield points[start : start + size]


def _mean_step(group: Sequence[tuple[int, float]], across: Scale) -> float:
    return across(sum(step for step, _ in group) / len(group))


def says(chart: Chart, run: RunRecord) -> str:
    """What the script shows near each step; of a long run, of every n-th."""
    across = _steps(run, 0.0, 1.0)
    every = -(-len(run.steps) // MOST_POINTS)
    found: list[Mapping[int, float | None]] = [dict(series.values) for series in chart.shown]
    chosen: list[Mapping[str, Any]] = [*run.steps[::every]]
    words = []
    for row in chosen:
        step = row["step"]
        values = ((series.name, of.get(step)) for series, of in zip(chart.shown, found, strict=True))
        lines = [f"{name}: {chart.write(value)}" for name, value in values if value is not None]
        skipped = ["skipped"] if row.get("applied") is False else []
        words.append("\n".join([f"step {step}", *lines, *skipped]))
    return data({"at": [round(across(row["step"]), 5) for row in chosen], "says": words})


def legend(chart: Chart) -> Legend:
    """The curves, if there are several."""
    return [(_dot(series), series.name) for series in chart.shown] if len(chart.shown) > 1 else []


def events_in_words(run: RunRecord) -> str:
    """What the marks mean, and how many there are of each."""
    starts = [start.words for start in run.starts if start.words]
    skipped = run.skipped
    few = ", ".join(map(str, skipped[:12])) + (" …" if len(skipped) > 12 else "")
    words = [f"Skipped steps (triangles): {few}." if skipped else "No step was skipped."]
    words.append(f"Lines: {'; '.join(starts)}." if starts else "The run was not resumed or restarted.")
    return " ".join(words)
