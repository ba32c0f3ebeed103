"""Draws buffer-map.svg: 16 elements of 4 parameters on 4 ranks under ZeRO-1, as `zeroshard report` draws a real unit.

    python docs/pictures/buffer_map.py              write the picture

`tests/house/test_documents.py` checks that the file is current.
"""

from __future__ import annotations

from pathlib import Path

from zeroshard.layout.layout import BufferLayout
from zeroshard.report.buffer_map import Row, draw
from zeroshard.report.facts import UnitMap
from zeroshard.report.page import alone

SHAPES = (("a", (2, 2)), ("b", (1,)), ("c", (5,)), ("d", (2, 2)))
"""The buffer has 16 elements, as in the figure of Megatron's distributed optimizer: 14 of parameters, 2 of padding."""
RANKS = 4
BARS = (Row("weights", "replicated", 2), Row("gradients", "partial", 4), Row("main weights", "sharded", 4))


def unit() -> UnitMap:
    """The layout of the example, with alignments of 1 element inside the buffer and 4 at its end."""
    layout = BufferLayout.pack(SHAPES, RANKS, alignment=4, slot_alignment=1)
    return UnitMap(("example",), layout, tuple(bar.itemsize for bar in BARS))


def picture() -> str:
    return alone(draw(unit(), BARS, range(RANKS), 760))


if __name__ == "__main__":
    Path(__file__).with_name("buffer-map.svg").write_text(picture(), encoding="utf-8")
