"""Draws one step in time, modelled or measured: computations, gathers and reductions, and what of them is exposed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeroshard.planning.in_words import in_seconds
from zeroshard.planning.time_model import Span
from zeroshard.report.facts import Timeline
from zeroshard.report.run_timeline import MeasuredStep
from zeroshard.report.svg import Legend, Scale, element, label, line, picture, ticks, title

LANES = {
    "compute": "computation",
    "waits": "waits",
    "gathers": "gathers",
    "reductions": "reductions",
    "others": "control",
}
_ROW, _BAR = 34, 24


def draw(timeline: Timeline, width: int) -> str:
    """The step by the model, `width` pixels wide; time runs to the right."""
    computes = [span for span in timeline.spans if span.lane == "compute"]
    spans = [*timeline.spans, *_waits(computes, timeline.time.total)]
    return _draw(spans, timeline.time.total, f"one step in time on {timeline.machine}, by a model", width)


def draw_measured(step: MeasuredStep, width: int) -> str:
    """A step as a run has recorded it."""
    return _draw(step.spans, step.seconds, "one step in time, measured", width)


def _draw(spans: Sequence[Span], total: float, name: str, width: int) -> str:
    left, right, top = (110 if width > 600 else 84), width - 12, 8
    scale = Scale(0, max(total, 1e-12), left, right)
    body, y = list[str](), float(top)
    for lane, words in LANES.items():
        of_lane = [span for span in spans if span.lane == lane]
        if not any(span.stop > span.start for span in of_lane):
            continue
        body.append(label(left - 8, y + 16, words, "row"))
        body += [_bar(span, scale, y) for span in _merged(of_lane, scale)]
        y += _ROW
    axis = _axis(scale, y, 6 if width > 600 else 3)
    return picture(width, y + 22, [*axis, *body], name, class_="time")


def _bar(span: Span, scale: Scale, y: float) -> str:
    x, stop = scale(span.start), scale(span.stop)
    words = title(f"{span.unit}, {span.phase}: {in_seconds(span.stop - span.start)}")
    shape = {"x": x, "y": y, "width": max(0.4, stop - x - 0.6), "height": float(_BAR)}
    return element("rect", words, class_=f"span l-{span.lane} f-{span.phase}", **shape)


def _merged(spans: Sequence[Span], scale: Scale) -> Iterator[Span]:
    """Neighbours of one phase that are together narrower than a pixel become one."""
    held: Span | None = None
    for span in spans:
        joins = held is not None and held.phase == span.phase and scale(span.stop) - scale(held.start) < 1.0
        if held is not None and joins:
            held = Span(span.lane, f"{held.unit.partition(' … ')[0]} … {span.unit}", span.phase, held.start, span.stop)
            continue
        if held is not None:
            yield held
        held = span
    if held is not None:
        yield held


def _waits(computes: Sequence[Span], total: float) -> Iterator[Span]:
    """The time in which nothing computes, because messages are exposed."""
    ends = [0.0, *(span.stop for span in computes)]
    starts = [*(span.start for span in computes), total]
    for end, start in zip(ends, starts, strict=True):
        if start - end > 1e-12:
            yield Span("waits", "waits for messages", "", end, start)


def _axis(scale: Scale, y: float, most: int) -> Iterator[str]:
    for value in ticks(0, scale.high, most):
        x = scale(value)
        yield line([(x, 4), (x, y - 4)], "grid")
        yield label(x, y + 12, in_seconds(value), "middle quiet")


LEGEND: Legend = (
    ("l-compute f-forward", "forward"),
    ("l-compute f-backward", "backward"),
    ("l-compute f-step", "update"),
    ("l-gathers f-forward", "gathers"),
    ("l-reductions f-backward", "reductions"),
    ("l-waits", "waits: messages are exposed"),
)


def measured_rows(step: MeasuredStep) -> Iterator[tuple[str, str]]:
    """Name and value of each part of a recorded step. The parts overlap."""
    for phase in ("forward", "backward", "step"):
        yield f"in {phase}", in_seconds(step.covered("compute", phase=phase))
    yield "messages in flight", in_seconds(step.covered("gathers", "reductions", "others"))
    yield "in waits (exposed)", in_seconds(step.covered("waits"))
    yield "the step", in_seconds(step.seconds)


def rows(timeline: Timeline) -> Iterator[tuple[str, str]]:
    """Name and value of each part of the step's time."""
    time = timeline.time
    yield "computation", in_seconds(time.compute)
    yield "update", in_seconds(time.update)
    yield "messages", in_seconds(time.communication)
    yield "hidden behind computation", in_seconds(max(0.0, time.communication - time.exposed))
    yield "exposed", in_seconds(time.exposed)
    yield "the step", in_seconds(time.total)
