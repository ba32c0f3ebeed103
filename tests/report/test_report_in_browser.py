"""A page in a headless Chromium: no error, no request, the right number of cells, hovering, zooming, choosing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.report.browser import MISSING, Browser, find
from tests.report.common import RANKS, facts, write_run
from zeroshard.report import Report, buffer_map, read_run


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip(MISSING)
    with Browser(program) as one:
        yield one


def problems(browser: Browser) -> list[object]:
    """Exceptions, messages of the console and requests to elsewhere, since the page was opened."""
    requests = [event["request"]["url"] for event in browser.of("Network.requestWillBeSent")]
    return [
        *browser.of("Runtime.exceptionThrown"),
        *browser.of("Runtime.consoleAPICalled"),
        *browser.of("Log.entryAdded"),
        *[url for url in requests[1:] if not url.startswith("data:")],
    ]


def middle(browser: Browser, expression: str) -> tuple[float, float]:
    """The middle of an element, after scrolling to it."""
    browser.value(f"void {expression}.scrollIntoView({{block: 'center'}})")
    browser.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
    box = f"{expression}.getBoundingClientRect()"
    x, y = browser.value(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + b.height / 2] }})()")
    return x, y


TIP = "(() => { const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent })()"
MAP = "[...document.querySelectorAll('svg.map')].find(map => map.getBoundingClientRect().width)"


def test_a_page_in_the_browser(browser: Browser, tmp_path: Path) -> None:
    page = Report(facts(), read_run(write_run(tmp_path)), budget=10**6).write(tmp_path / "page.html")
    for width in (1280, 390):
        browser.open(page, width=width)
        assert problems(browser) == []
        assert browser.value("document.documentElement.scrollWidth") <= width, "the page is wider than the window"

        planned = facts().planned[0]
        unit = planned.maps[0]
        cells = sum(
            len(buffer_map.cells(unit.layout, row.placement, rank))
            for rank in range(RANKS) for row in buffer_map.rows(planned, unit) if row.placement is not None
        )  # fmt: skip
        assert browser.value(f"{MAP}.querySelectorAll('.held .cell').length") == cells

        browser.move(*middle(browser, f"{MAP}.querySelector('[data-rank=\"1\"] .cell')"))
        (fragment, *_) = unit.layout.fragments(1)
        lines = browser.value(TIP).split("\n")
        assert lines[0].startswith(fragment.slot.name) and lines[1] == "weights on rank 1"
        for name, part in (("world", fragment.world), ("local", fragment.local), ("param", fragment.param)):
            assert f"{name} [{part.start:,}, {part.stop:,})" in lines
        assert browser.value("document.querySelectorAll('tr.lit').length") == 1
        browser.move(2, 2)
        assert browser.value(TIP) == ""

        chart = "[...document.querySelectorAll('svg.chart')].find(chart => chart.getBoundingClientRect().width)"
        browser.move(*middle(browser, chart))
        assert "step 3\ntraining: 1\nskipped" in browser.value(TIP)
    assert problems(browser) == []


def test_zooming_and_choosing(browser: Browser, tmp_path: Path) -> None:
    page = Report(facts()).write(tmp_path / "page.html")
    browser.open(page)
    width = f"Number({MAP}.querySelector('.held .cell').getAttribute('width'))"
    before = browser.value(width)
    numel = facts().planned[0].maps[0].layout.numel
    browser.value(f"{MAP}.closest('figure').querySelector('[data-zoom=left]').click()")
    assert browser.value(width) == pytest.approx(before, rel=1e-3), "there is nothing to the left of the first element"
    browser.value(f"{MAP}.closest('figure').querySelector('[data-zoom=in]').click()")
    shown = f"{MAP}.closest('figure').querySelector('output').textContent"
    assert browser.value(shown) == f"elements [{numel // 4:,}, {numel // 4 * 3:,}) of {numel:,}"
    browser.value(f"{MAP}.closest('figure').querySelector('[data-zoom=all]').click()")
    assert browser.value(width) == pytest.approx(before, rel=1e-3)

    flow = "[...document.querySelectorAll('svg.flow')].find(flow => flow.getBoundingClientRect().width)"
    title = f"{flow}.getAttribute('aria-label')"
    assert browser.value(title) == "the flow of a step under zero3"
    select = "document.querySelector('.details select')"
    choose = f"(() => {{ {select}.value = '2'; {select}.dispatchEvent(new Event('change')) }})()"
    browser.value(choose)
    assert browser.value(title) == "the flow of a step under zero1"
    assert problems(browser) == []


def test_the_checks_can_fail(browser: Browser, tmp_path: Path) -> None:
    """A page with an error, an image from elsewhere and a wrong width is noticed."""
    page = tmp_path / "bad.html"
    page.write_text("<img src='nowhere.png'><script>console.log('x'); missing()</script><p style='width:2000px'>wide")
    browser.open(page)
    found = str(problems(browser))
    assert "missing is not defined" in found and "nowhere.png" in found and "'value': 'x'" in found
    assert browser.value("document.documentElement.scrollWidth") > 1280
