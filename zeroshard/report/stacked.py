"""Draws the memory of one rank over a step, stacked by kind, with what a run has measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zeroshard.planned.parts import Bytes
from zeroshard.planning.fit import KINDS_IN_WORDS
from zeroshard.planning.in_words import in_units
from zeroshard.planning.moments import PHASES
from zeroshard.report.facts import Planned
from zeroshard.report.run_folder import Measured
from zeroshard.report.svg import Legend, Scale, data, element, label, line, picture, ticks

KINDS = ("weights", "main", "state", "scalars", "grads", "ring", "buckets", "scratch", "activations")
"""From the bottom to the top: first what is held all the time."""
WORDS = KINDS_IN_WORDS | {"scalars": "step counts", "activations": "activations and inputs"}
SHORT = {"forward": "fwd", "backward": "bwd", "step": "step", "between steps": "rest"}


@dataclass(frozen=True)
class Column:
    """A part of the step: its phase, what ends it, and bytes by kind."""

    phase: str
    until: str
    held: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.held.values())

    @property
    def says(self) -> str:
        until = f", until the gradient of {self.until}" if self.until else ""
        kinds = (f"{WORDS[kind]}: {in_units(self.held[kind])}" for kind in reversed(KINDS) if self.held.get(kind))
        return "\n".join([f"{self.phase}{until}", *kinds, f"together: {in_units(self.num_bytes)}"])


def columns(planned: Planned) -> list[Column]:
    """The step from its first forward to the rest after it: by gradients where activations are planned, else by
    phases."""
    found = [
        Column(moment.phase, moment.until, _kinds(moment.engine) | {"activations": moment.activations})
        for moment in planned.moments
    ]
    if not found:
        found = [Column(phase, "", _kinds(planned.in_phase(phase))) for phase in PHASES[:-1]]
    return [*found, Column(PHASES[-1], "", _kinds(planned.at_rest))]


def _kinds(held: Bytes) -> dict[str, int]:
    return dict(vars(held))


def used(found: Sequence[Column]) -> list[str]:
    """The kinds of which there is any, from the bottom."""
    return [kind for kind in KINDS if any(column.held.get(kind) for column in found)]


def draw(planned: Planned, width: int, *, budget: int | None, measured: Measured | None) -> str:
    """The picture, `width` pixels wide. `budget`: a line at so many bytes."""
    found = columns(planned)
    left, right, top, bottom = 66, width - 10, 16, 300
    most = max([*(column.num_bytes for column in found), *([budget] if budget is not None else [])]) * 1.06
    up = Scale(0, max(most, 1), bottom, top)
    edges = _edges(found, left, right)
    body = [*_axis(up, left, right)]
    below = [0] * len(found)
    for kind in used(found):
        above = [low + column.held.get(kind, 0) for low, column in zip(below, found, strict=True)]
        body.append(_area(edges, [*map(up, below)], [*map(up, above)], f"k-{kind}"))
        below = above
    body += _phases(found, edges, top, bottom)
    if budget is not None:
        body += [
            line([(left, up(budget)), (right, up(budget))], "budget"),
            label(right - 4, up(budget) - 5, f"budget {in_units(budget)}", "end strong halo"),
        ]
    body += _marks(found, edges, up, measured)
    name = f"memory over one step under {planned.plan}"
    return picture(width, bottom + 24, body, name, class_="chart", data_left=left, data_right=right)


def _edges(found: Sequence[Column], left: float, right: float) -> list[float]:
    """The borders of the columns: each phase but backward gets an equal part, backward as much as it has gradients."""
    weights = [max(1.0, len(found) / 6) if not c.until and c.phase != "backward" else 1.0 for c in found]
    total, edges = sum(weights), [left]
    for weight in weights:
        edges.append(edges[-1] + (right - left) * weight / total)
    return edges


def _area(edges: Sequence[float], below: Sequence[float], above: Sequence[float], class_: str) -> str:
    """The area between two step functions."""
    there = [(x, y) for i, y in enumerate(above) for x in (edges[i], edges[i + 1])]
    back = [(x, y) for i, y in reversed([*enumerate(below)]) for x in (edges[i + 1], edges[i])]
    return element("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in [*there, *back]), class_=class_)


def _axis(up: Scale, left: float, right: float) -> Iterator[str]:
    for value in ticks(up.low, up.high, 5):
        yield line([(left, up(value)), (right, up(value))], "grid")
        yield label(left - 8, up(value) + 4, in_units(round(value)), "end quiet")


def _phases(found: Sequence[Column], edges: Sequence[float], top: float, bottom: float) -> Iterator[str]:
    """A border where a phase begins, and its name below."""
    start = 0
    for index, column in enumerate(found):
        if index + 1 == len(found) or found[index + 1].phase != column.phase:
            left, right = edges[start], edges[index + 1]
            words = column.phase if right - left > 7 * len(column.phase) else SHORT[column.phase]
            yield label((left + right) / 2, bottom + 17, words, "middle")
            if start:
                yield element("line", x1=left, x2=left, y1=float(top), y2=float(bottom), class_="border")
            start = index + 1


def _marks(found: Sequence[Column], edges: Sequence[float], up: Scale, measured: Measured | None) -> Iterator[str]:
    """A line where the run has measured the engine's bytes: at the end of that phase."""
    for index, column in enumerate(found):
        is_last = index + 1 == len(found) or found[index + 1].phase != column.phase
        held = measured.held.get(column.phase) if measured is not None else None
        if is_last and held is not None:
            y = up(sum(held.values()))
            yield line([(edges[index] + 1, y), (edges[index + 1] - 1, y)], "measured")


def says(planned: Planned) -> str:
    """What the script shows above each column."""
    found = columns(planned)
    edges = _edges(found, 0.0, 1.0)
    return data({"edges": [round(edge, 5) for edge in edges], "says": [column.says for column in found]})


def legend(planned: Planned) -> Legend:
    """The kinds of bytes, from the top."""
    return [(f"k-{kind}", WORDS[kind]) for kind in reversed(used(columns(planned)))]


def against(planned: Planned, measured: Measured) -> Iterator[tuple[object, ...]]:
    """Planned and measured bytes by kind, between steps and at most."""
    rest, most = vars(planned.at_rest), vars(planned.in_phase("backward"))
    found = measured.held.get("between steps", {})
    for kind in rest:
        numbers = rest[kind], found.get(kind, 0), most[kind], measured.at_most.get(kind, 0)
        if any(numbers):
            yield WORDS[kind], *(f"{number:,}" for number in numbers), _differ(numbers)
    sums = sum(rest.values()), sum(found.values()), sum(most.values()), sum(measured.at_most.values())
    yield "together", *(f"{number:,}" for number in sums), _differ(sums)


def _differ(numbers: tuple[int, int, int, int]) -> str:
    rest, measured, most, at_most = numbers
    return "equal" if (rest, most) == (measured, at_most) else f"{measured - rest:+,}; {at_most - most:+,}"


AGAINST = ("bytes of rank 0", "between steps: planned", "measured", "at most: planned", "measured", "difference")
