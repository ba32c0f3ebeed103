"""Draws the buffer map of a unit: ranks x elements, each parameter in its colour, shards as columns, padding hatched.

              | rank 0    | rank 1    | rank 2    | rank 3    |      shards of equal length
    buffer    | head | mlp.weight            | norm     |////|      one colour for each parameter
    rank 0    |█████|                                             one bar each for weights, gradients and main:
    rank 1                |███████|                               what the rank holds of the full buffer

A cell has the three ranges of `layout.Fragment` as attributes: in the full buffer, in what the rank holds, and in the
flattened parameter. (The picture follows that of Megatron's distributed optimizer.)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from zeroshard.layout.interval import Interval
from zeroshard.layout.layout import BufferLayout
from zeroshard.placement import PARTIAL, SHARDED
from zeroshard.report.facts import Planned, UnitMap
from zeroshard.report.svg import LETTER, Legend, Scale, element, escaped, label, picture, rect

COLOURS = 10
"""Parameters get as many colours, in turn."""
MOST_RANKS, FEW_RANKS, MOST_BORDERS, MOST_BUTTONS = 64, 16, 256, 24
ELEMENTWISE = 64
"""A buffer of at most so many elements is drawn with a box for each."""
_STRIP, _GAP = 26, 2
_LOW, _BAR, _TALL = 4, 7, 17
"""Heights of a bar, of many ranks, of few ranks, and of a small buffer."""


@dataclass(frozen=True)
class Cell:
    """A part of a buffer that a rank holds. `slot`: index of the parameter; None: padding. `local`: in what the rank
    holds. `is_stale`: the values are terms of a sum whose result another rank has."""

    slot: int | None
    world: Interval
    local: Interval
    param: Interval
    is_stale: bool = False


def cells(layout: BufferLayout, placement: str, rank: int) -> list[Cell]:
    """What the rank holds of a buffer of that placement, after backward, in order."""
    if placement == SHARDED.value:
        shard = layout.shard(rank)
        return list(_cells_in(layout, shard, shard.start))
    if placement == PARTIAL.value:
        shard = layout.shard(rank)
        before, behind = Interval(0, shard.start), Interval(shard.stop, layout.numel)
        stale = [*_cells_in(layout, before, 0, is_stale=True), *_cells_in(layout, behind, 0, is_stale=True)]
        return sorted([*stale, *_cells_in(layout, shard, 0)], key=lambda cell: cell.world)
    return list(_cells_in(layout, Interval(0, layout.numel), 0))


def _cells_in(layout: BufferLayout, interval: Interval, origin: int, *, is_stale: bool = False) -> Iterator[Cell]:
    """Fragments and padding in an interval; `local` counts from `origin`."""
    found = [
        Cell(f.index, f.world, f.world.relative_to(origin), f.param, is_stale) for f in layout.fragments_in(interval)
    ]
    found += [
        Cell(None, world, world.relative_to(origin), Interval(0, 0), is_stale)
        for empty in layout.padding
        if (world := empty & interval)
    ]
    yield from sorted(found, key=lambda cell: cell.world)


@dataclass(frozen=True)
class Row:
    """One buffer of the unit on one rank. `placement`: after backward; None: the rank holds nothing of it."""

    tensor: str
    placement: str | None
    itemsize: int


def rows(planned: Planned, unit: UnitMap) -> tuple[Row, ...]:
    """Weights, gradients and main of a unit, as they are after backward."""
    placements = planned.weights, planned.grads, planned.main
    names = "weights", "gradients", "main weights"
    return tuple(
        Row(name, placement if itemsize else None, itemsize)
        for name, placement, itemsize in zip(names, placements, unit.itemsizes, strict=True)
    )


def ranks_shown(planned: Planned, unit: UnitMap, first: int, most_cells: int) -> range:
    """The ranks that are drawn: as many as the number of cells allows."""
    of_rank = sum(len(cells(unit.layout, row.placement, 0)) for row in rows(planned, unit) if row.placement is not None)
    number = max(1, min(MOST_RANKS, most_cells // max(1, of_rank)))
    start = min(first, max(0, planned.num_shards - number))
    return range(start, min(start + number, planned.num_shards))


def elements_shown(unit: UnitMap, of_rank: tuple[Row, ...], ranks: range) -> Interval:
    """The elements that are in view at first: all, or those of the drawn ranks if their shards are a small part."""
    layout = unit.layout
    holds_all = any(row.placement not in (None, SHARDED.value) for row in of_rank)
    if holds_all or 4 * len(ranks) >= layout.num_shards:
        return Interval(0, layout.numel)
    return Interval(layout.shard(ranks[0]).start, layout.shard(ranks[-1]).stop)


def draw(unit: UnitMap, of_rank: tuple[Row, ...], ranks: range, width: int) -> str:
    """The picture, `width` pixels wide, with one bar for each of `of_rank` on each rank."""
    layout, is_small = unit.layout, unit.layout.numel <= ELEMENTWISE and width > 600
    left, height = (150 if is_small else 76 if width > 600 else 46), (_TALL if is_small else _BAR)
    if len(ranks) > FEW_RANKS:
        height = _LOW
    window = elements_shown(unit, of_rank, ranks)
    scale = Scale(window.start, window.stop, left, width - 8)
    pitch, top = len(of_rank) * (height + _GAP) + min(height, 8), 36 + _STRIP + 14
    bottom = top + pitch * len(ranks)
    body = [*_columns(layout, scale, bottom), *_strip(layout, scale)]
    body.append(label(left - 8, 36 + _STRIP * 0.68, "buffer", "row"))
    for index, rank in enumerate(ranks):
        y = top + index * pitch
        where = (50, y + height * 0.8) if is_small else (left - 8, y + pitch / 2 + 1)
        body.append(label(*where, f"rank {rank}" if width > 600 else rank, "row"))
        for number, row in enumerate(of_rank):
            at = y + number * (height + _GAP)
            body.append(_bar(layout, row, rank, scale, (at, height)))
            body += _elements(layout, row, rank, scale, at) if is_small else ()
    if is_small:
        body += _names(layout, scale, bottom)
        bottom += 26
    slots = [[slot.name, list(slot.shape)] for slot in layout.slots]
    return picture(
        width,
        bottom + 4,
        body,
        f"buffer map of {unit.title}",
        class_="map",
        data_slots=json.dumps(slots, separators=(",", ":")),
        data_numel=layout.numel,
        data_window=_pair(window),
        data_left=left,
        data_right=width - 8,
    )


def _columns(layout: BufferLayout, scale: Scale, bottom: float) -> Iterator[str]:
    """The borders of the shards in view, and their ranks above them as far as there is room."""
    first, last = int(scale.low) // layout.shard_numel, -(-int(scale.high) // layout.shard_numel)
    column = (scale.stop - scale.start) / (last - first)
    words = "rank {}" if column > 9 * LETTER else "{}"
    every = math.ceil((len(str(layout.num_shards)) + 1.2) * LETTER / column)
    for rank in range(first, last + 1) if last - first <= MOST_BORDERS else ():
        x = scale(rank * layout.shard_numel)
        yield element("line", x1=x, x2=x, y1=24.0, y2=float(bottom), class_="border", data_at=rank * layout.shard_numel)
    for rank in range(first, last, every):
        shard = layout.shard(rank)
        place = {"data_world": _pair(shard), "data_room": LETTER * 2}
        yield label(scale((shard.start + shard.stop) / 2), 18, words.format(rank), "middle quiet", **place)


def _strip(layout: BufferLayout, scale: Scale) -> Iterator[str]:
    """The full buffer with the names of its parameters; with the numbers of its elements, if it has few."""
    shapes, words = [], []
    for cell in cells(layout, "replicated", 0):
        shapes.append(_cell(cell, scale, 36, _STRIP))
        name = "" if cell.slot is None else layout.slots[cell.slot].name
        if layout.numel > ELEMENTWISE and name:
            words.append(_name(cell, scale, name))
    yield element("g", *shapes, class_="strip", data_tensor="buffer")
    if layout.numel <= ELEMENTWISE:
        for index in range(layout.numel):
            x = scale(index)
            yield element("line", x1=x, x2=x, y1=36.0, y2=36.0 + _STRIP, class_="element", data_at=index)
            place = {"data_world": f"{index},{index + 1}", "data_room": LETTER}
            yield label(scale(index + 0.5), 36 + _STRIP * 0.68, index, "in middle", **place)
    yield from words


def _name(cell: Cell, scale: Scale, name: str) -> str:
    """The name in a cell of the strip. Without room it is transparent: the script shows it when there is, zoomed."""
    room = len(name) * LETTER + 8
    x, stop = _in_view(cell.world, scale)
    place = {"data_world": _pair(cell.world), "data_room": room, "opacity": None if stop - x > room else 0}
    return label((x + stop) / 2, 36 + _STRIP * 0.68, name, "in middle", **place)


def _elements(layout: BufferLayout, row: Row, rank: int, scale: Scale, y: float) -> Iterator[str]:
    """Of a small buffer: the name of a bar, borders of its elements, and in a shard their local numbers."""
    yield label(scale.start - 8, y + _TALL * 0.76, row.tensor, "end quiet")
    for index in range(1, layout.numel):
        x = scale(index)
        yield element("line", x1=x, x2=x, y1=y, y2=y + _TALL, class_="element", data_at=index)
    shard = layout.shard(rank)
    for index in range(shard.start, shard.stop) if row.placement == SHARDED.value else ():
        place = {"data_world": f"{index},{index + 1}", "data_room": LETTER}
        yield label(scale(index + 0.5), y + _TALL * 0.76, index - shard.start, "in middle", **place)


def _names(layout: BufferLayout, scale: Scale, y: float) -> Iterator[str]:
    """Of a small buffer: colour, name and shape of each parameter, below the picture."""
    x = scale.start
    for index, slot in enumerate(layout.slots):
        words = f"{slot.name} ({' x '.join(map(str, slot.shape)) or 'one value'})"
        yield rect(x, y + 8, 11, 11, f"p{index % COLOURS}")
        yield label(x + 16, y + 18, words, "quiet")
        x += 44 + LETTER * len(words)
    yield rect(x, y + 8, 11, 11, "padding")
    yield label(x + 16, y + 18, "padding", "quiet")


def _bar(layout: BufferLayout, row: Row, rank: int, scale: Scale, place: tuple[float, float]) -> str:
    """One buffer on one rank; a dashed frame for what it does not hold, unless bars are low. `place`: y and height."""
    frame = rect(scale.start, place[0], scale.stop - scale.start, place[1], "absent") if place[1] > _LOW else ""
    held = cells(layout, row.placement, rank) if row.placement is not None else []
    shapes = [_cell(cell, scale, *place) for cell in held]
    attributes = {"data_rank": rank, "data_tensor": row.tensor, "data_itemsize": row.itemsize}
    return element("g", frame, *shapes, class_="held", **attributes)


def _in_view(interval: Interval, scale: Scale) -> tuple[float, float]:
    """Where the part of an interval that is in view begins and ends, in pixels."""
    start, stop = (max(scale.start, min(scale.stop, scale(at))) for at in (interval.start, interval.stop))
    return start, stop


def _cell(cell: Cell, scale: Scale, y: float, height: float) -> str:
    x, stop = _in_view(cell.world, scale)
    colour = "padding" if cell.slot is None else f"p{cell.slot % COLOURS}"
    return rect(
        x,
        y,
        stop - x,
        height,
        f"cell {colour}{' stale' if cell.is_stale else ''}",
        data_slot=cell.slot,
        data_world=_pair(cell.world),
        data_local=_pair(cell.local),
        data_param=None if cell.slot is None else _pair(cell.param),
    )


def _pair(interval: Interval) -> str:
    return f"{interval.start},{interval.stop}"


# Beside the picture ---------------------------------------------------------------------------------------------------

RANGES = ("rank", "parameter", "world", "local", "param", "elements")


def ranges(unit: UnitMap, ranks: range) -> Iterator[tuple[object, ...]]:
    """The table of all shards: for each fragment its three ranges; padding has none in a parameter."""
    for rank in ranks:
        for cell in cells(unit.layout, SHARDED.value, rank):
            name = "padding" if cell.slot is None else unit.layout.slots[cell.slot].name
            param = "" if cell.slot is None else _range(cell.param)
            yield rank, name, _range(cell.world), _range(cell.local), param, f"{cell.world.numel:,}"


def _range(interval: Interval) -> str:
    return f"[{interval.start:,}, {interval.stop:,})"


def legend(unit: UnitMap) -> Legend:
    """The parameters of the picture as a file. (A small buffer has their names below it.)"""
    slots = unit.layout.slots if unit.layout.numel > ELEMENTWISE else ()
    found = [(f"p{index % COLOURS}", slot.name) for index, slot in enumerate(slots)]
    return [*found, ("padding", "padding")] if found else []


def buttons(unit: UnitMap) -> str:
    """The parameters with their colours; a click zooms to one."""
    entries = []
    for index, slot in enumerate(unit.layout.slots[:MOST_BUTTONS]):
        shape = " x ".join(map(str, slot.shape)) or "one value"
        chip = element("span", class_=f"chip c{index % COLOURS}")
        words = f"{chip}{escaped(slot.name)} {element('small', escaped(shape))}"
        entries.append(element("li", element("button", words, type="button", data_goto=_pair(slot.world))))
    more = len(unit.layout.slots) - MOST_BUTTONS
    if more > 0:
        entries.append(element("li", f"and {more} more"))
    padding = sum(empty.numel for empty in unit.layout.padding)
    words = f"{element('span', class_='chip hatched')}padding {element('small', f'{padding:,} elements')}"
    entries.append(element("li", words))
    return element("ul", *entries, class_="legend")
