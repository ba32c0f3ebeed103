"""Writes SVG and HTML elements with everything escaped, and chooses the numbers of an axis."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LETTER = 6.6
"""Width of a letter in pixels, at the size of the labels in a picture: labels that do not fit are left out."""
Legend = Sequence[tuple[str, str]]
"""Of each kind of thing in a picture: its classes, and its name."""
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udc7f\udd00-\udfff]")
"""What XML may not contain, and surrogates that stand for no byte of a file's name."""


def element(name: str, *content: str, **attributes: object) -> str:
    """An element. `content` is markup. An attribute's name has "_" for "-"; `class_` is `class`; None: left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(shown(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{''.join(content)}</{name}>"


def shown(value: object) -> str:
    """A number with at most two decimals; other values as they are."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def escaped(text: object) -> str:
    """`text` inside of a page. Pages are UTF-8, whatever the locale: a file's name is read again from its bytes. A name
    of a module may be any text: what cannot be written becomes a replacement character."""
    writable = _UNWRITABLE.sub("\ufffd", str(text))
    return html.escape(writable.encode(errors="surrogateescape").decode(errors="replace"))


def rect(x: float, y: float, width: float, height: float, class_: str, **attributes: object) -> str:
    size = {"x": float(x), "y": float(y), "width": max(0.0, float(width)), "height": float(height)}
    return element("rect", class_=class_, **size, **attributes)


def label(x: float, y: float, words: object, class_: str | None = None, **attributes: object) -> str:
    return element("text", escaped(words), x=float(x), y=float(y), class_=class_, **attributes)


def title(words: str) -> str:
    """What a browser shows above an element that contains it."""
    return element("title", escaped(words))


def line(points: Iterable[tuple[float, float]], class_: str, **attributes: object) -> str:
    path = " ".join(f"{shown(float(x))},{shown(float(y))}" for x, y in points)
    return element("polyline", points=path, class_=class_, **attributes)


def picture(width: float, height: float, body: Iterable[str], name: str, **attributes: object) -> str:
    """An SVG element of that size. `name`: what it shows, for readers of the screen."""
    box = f"0 0 {shown(width)} {shown(height)}"
    space = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": box, "role": "img", "aria_label": name}
    return element("svg", "\n", "\n".join(body), "\n", **space, **attributes)


def legend(entries: Legend) -> str:
    """The legend beside a picture on a page; "" if there is none."""
    chips = (element("li", f"{element('span', class_=f'chip {class_}')}{escaped(words)}") for class_, words in entries)
    return element("ul", *chips, class_="legend") if entries else ""


def alone(drawn: str, style: str, defs: str, *, heading: str, entries: Legend) -> str:
    """A picture as a file of its own, with its heading and legend above it, and without what a page's script reads."""
    drawn = re.sub(r'<text[^>]* opacity="0"[^>]*>[^<]*</text>\n?| (?:data-[\w-]+)="[^"]*"', "", drawn)
    found = re.match(r'<svg xmlns="[^"]*" viewBox="0 0 ([\d.]+) ([\d.]+)" role="img" aria-label="([^"]*)"', drawn)
    assert found is not None, "made by `picture`"
    width, height, name = float(found[1]), float(found[2]), html.unescape(found[3])
    above, top = _above(heading, entries, width)
    inner = f'<svg y="{shown(top)}" width="{found[1]}" height="{found[2]}" viewBox="0 0 {found[1]} {found[2]}"'
    sheet = element("rect", width="100%", height="100%", class_="sheet")
    body = [f"<style>{style}</style><defs>{defs}</defs>{sheet}", *above, inner + drawn[found.end() :]]
    return picture(width, top + height, body, heading or name) + "\n"


def _above(heading: str, entries: Legend, width: float) -> tuple[list[str], float]:
    """Heading and legend, and the height that they take."""
    found, x, y = ([label(8, 22, heading, "heading")] if heading else []), 8.0, 40.0
    for class_, words in entries:
        room = 34 + LETTER * len(words)
        if x + room > width and x > 8:
            x, y = 8.0, y + 18
        found += [rect(x, y - 2, 11, 11, f"span {class_}"), label(x + 16, y + 8, words, "quiet")]
        x += room
    return found, y + 18 if entries else 30.0 if heading else 0.0


def data(values: Any) -> str:
    """A script element that holds JSON, which no name in it can end."""
    text = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    return f'<script type="application/json">{text}</script>'


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` on pixels from `start` to `stop`. `log`: equal factors get equal lengths."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        return self.start + (self.stop - self.start) * self.share(value)

    def share(self, value: float) -> float:
        """The position between `low` (0) and `high` (1)."""
        low, high, value = map(math.log, (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        return (value - low) / (high - low) if high > low else 0.5


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, at most about `most`."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if (high - low) / (step * factor) <= most)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten from `low` to `high`; with few of them, also their doubles and fivefolds."""
    found: list[float] = []
    for factors in ((1,), (1, 3), (1, 2, 5)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        every = [factor * 10.0**power for power in powers for factor in factors]
        within = [value for value in every if low * 0.999 <= value <= high * 1.001]
        if not found or len(within) <= most:
            found = within
    return found or ticks(low, high, most)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], class_: str = "") -> str:
    """An HTML table that scrolls sideways where it is wider than the page. The first column is the name of a row."""
    head = element("tr", *(element("th", escaped(column), scope="col") for column in columns))
    body = (
        element("tr", element("th", escaped(row[0]), scope="row"), *(element("td", escaped(cell)) for cell in row[1:]))
        for row in rows
    )
    inner = element("table", element("thead", head), element("tbody", *body), class_=class_ or None)
    return element("div", inner, class_="scrolls", tabindex=0)
