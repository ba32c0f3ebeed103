"""Draws bytes per rank of all plans against the number of ranks, with the user's budget as a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeroshard.planning.in_words import in_units
from zeroshard.report.facts import Curve
from zeroshard.report.svg import Scale, data, element, label, line, log_ticks, picture


def draw(curves: Sequence[Curve], width: int, *, budget: int | None, ranks: int) -> str:
    """The picture, `width` pixels wide; both axes are logarithmic. `ranks`: those of the plan, marked."""
    left, right, top, bottom = 66, width - (70 if width > 600 else 52), 14, 330
    across, up = _scales(curves, budget, (left, right), (bottom, top))
    body = []
    for value in log_ticks(up.low, up.high, 9):
        body += [
            line([(left, up(value)), (right, up(value))], "grid"),
            label(left - 8, up(value) + 4, in_units(round(value)), "end quiet"),
        ]
    body += _numbers_of_ranks(curves[0], across, bottom)
    if curves[0].points[0].ranks <= ranks <= curves[0].points[-1].ranks:
        body.append(line([(across(ranks), top), (across(ranks), bottom)], "border"))
    if budget is not None:
        body += [
            line([(left, up(budget)), (right, up(budget))], "budget"),
            label(right - 4, up(budget) + 15, f"budget {in_units(budget)}", "strong end halo"),
        ]
    ends = _apart([up(max(1, curve.points[-1].at_most)) for curve in curves])
    for number, (curve, end) in enumerate(zip(curves, ends, strict=True)):
        for points, class_ in (
            ([(p.ranks, p.at_most) for p in curve.points], f"curve s{number}"),
            ([(p.ranks, p.at_rest) for p in curve.points], f"curve dashed s{number}"),
        ):
            body.append(line([(across(x), up(max(1, y))) for x, y in points], class_))
        for point in curve.points:
            x, y = across(point.ranks), up(max(1, point.at_most))
            body.append(element("circle", cx=x, cy=y, r=2.6, class_=f"dot d{number}"))
        body.append(label(right + 8, end + 4, curve.plan, f"t{number} strong"))
    name = "bytes per rank against the number of ranks"
    return picture(width, bottom + 40, body, name, class_="chart", data_left=left, data_right=right)


def _scales(
    curves: Sequence[Curve], budget: int | None, sides: tuple[float, float], heights: tuple[float, float]
) -> tuple[Scale, Scale]:
    ranks = [point.ranks for point in curves[0].points]
    sizes = [max(1, size) for curve in curves for p in curve.points for size in (p.at_rest, p.at_most)]
    sizes += [budget] if budget is not None else []
    across = Scale(ranks[0], ranks[-1], *sides, log=True)
    return across, Scale(min(sizes) * 0.8, max(sizes) * 1.3, *heights, log=True)


def _numbers_of_ranks(curve: Curve, across: Scale, bottom: float) -> Iterator[str]:
    free = -100.0
    for point in curve.points:
        x = across(point.ranks)
        if x - free > 26:
            yield label(x, bottom + 17, point.ranks, "middle quiet")
            free = x
    yield label((across.start + across.stop) / 2, bottom + 35, "ranks", "middle")


def _apart(heights: Sequence[float]) -> list[float]:
    """The heights, moved so that labels at them do not overlap."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    moved, free = list(heights), -100.0
    for index in order:
        moved[index] = max(heights[index], free + 14)
        free = moved[index]
    return moved


def says(curves: Sequence[Curve]) -> str:
    """What the script shows near each number of ranks."""
    points = curves[0].points
    across = Scale(points[0].ranks, points[-1].ranks, 0.0, 1.0, log=True)
    words = []
    for index, point in enumerate(points):
        lines = (
            f"{c.plan}: {in_units(c.points[index].at_rest)} between steps, {in_units(c.points[index].at_most)} at most"
            for c in curves
        )
        words.append("\n".join([f"{point.ranks} ranks", *lines]))
    return data({"at": [round(across(point.ranks), 5) for point in points], "says": words})


def rows(curves: Sequence[Curve]) -> Iterator[tuple[object, ...]]:
    """The table of the picture: at most in a step."""
    for index, point in enumerate(curves[0].points):
        yield f"{point.ranks:,}", *(in_units(curve.points[index].at_most) for curve in curves)
