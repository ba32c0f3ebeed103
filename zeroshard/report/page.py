"""The page of a plan or run: one HTML file with pictures, styles and script inside; the pictures as SVG files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.resources import files
from pathlib import Path

from zeroshard.checkpoint.files import made
from zeroshard.io.whole import write_together, write_whole
from zeroshard.planning.in_words import in_seconds, in_units
from zeroshard.report import against_ranks, buffer_map, run_curves, stacked, step_flow, svg, time_lanes
from zeroshard.report.facts import Facts, Planned, UnitMap
from zeroshard.report.run_curves import Chart
from zeroshard.report.run_folder import Measured, RunRecord
from zeroshard.report.svg import Legend, element, escaped, legend, table

WIDE, NARROW, HALF, FILE = 1100, 350, 540, 800
"""Pixels of the pictures: on a page of 1,280 pixels, on a phone, two in a row, and as a file of its own."""
MOST_CELLS = 6_000
"""Cells of all buffer maps of a page, which limit its size."""
MOST_MAPS = 48
PAGE = "report.html"
"""The name of the page in the folder of a run."""

_HATCH = (
    '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect class="under" width="6" height="6"/><line class="over" x1="0" y1="0" x2="0" y2="6"/></pattern>'
    '<pattern id="sums" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    '<rect class="k-grads" width="5" height="5"/><line class="paper" x1="0" y1="0" x2="0" y2="5"/></pattern>'
)
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def _file(name: str) -> str:
    return (files("zeroshard.report") / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Picture:
    """A picture of a page. `draw`: draws it for a width; `heading` and `legend`: of the picture as a file. (On a page
    they are text beside it.)"""

    draw: Callable[[int], str]
    heading: str
    legend: Legend = ()

    @property
    def file(self) -> str:
        return alone(self.draw(FILE), self.heading, self.legend)


@dataclass(frozen=True)
class Report:
    """What is shown: plans, and a run if there is one. The first plan of a run is its own.

    Attributes:
        budget: bytes on each rank, drawn as a line; None: no line.
        first_rank: the first rank of the buffer maps, if there are too many to draw.
    """

    facts: Facts
    run: RunRecord | None = None
    budget: int | None = None
    first_rank: int = 0

    def write(self, path: Path) -> Path:
        """Write the page. Returns `path`."""
        write_whole(path, self.html)
        return path

    def write_pictures(self, folder: Path) -> list[Path]:
        """Write each picture as an SVG file of its own into `folder`."""
        pictures = {folder / f"{name}.svg": picture.file for name, picture in self.pictures.items()}
        with made(folder):
            write_together(pictures)
        return [*pictures]

    @property
    def _detailed(self) -> tuple[Planned, ...]:
        """The configurations that are drawn: of a run only its own."""
        return self.facts.planned[:1] if self.run is not None else self.facts.planned

    @property
    def _measured(self) -> Measured | None:
        return None if self.run is None else self.run.measured

    def _prefix(self, number: int, planned: Planned) -> str:
        """How the names of the pictures of a configuration begin."""
        return f"{number}-{planned.plan}-" if len(self._detailed) > 1 else ""

    @cached_property
    def _most_cells(self) -> int:
        return MOST_CELLS // max(1, sum(min(MOST_MAPS, len(planned.maps)) for planned in self._detailed))

    @cached_property
    def pictures(self) -> dict[str, Picture]:
        """Name -> picture. The names are those of the SVG files."""
        found: dict[str, Picture] = {} if self.run is None else dict(self._pictures_of(self.run))
        for number, planned in enumerate(self._detailed):
            name, of = self._prefix(number, planned), planned.title
            draw: Callable[[int], str] = partial(stacked.draw, planned, budget=self.budget, measured=self._measured)
            words = "; lines: measured" if self._measured is not None else ""
            heading = f"Memory of one rank over one step: {of}{words}"
            found[f"{name}memory"] = Picture(draw, heading, stacked.legend(planned))
            found[f"{name}flow"] = Picture(partial(step_flow.draw, planned), f"The flow of a step: {of}")
            if planned.timeline is not None:
                heading = f"One step in time, by a model of the machine “{planned.timeline.machine}”: {of}"
                found[f"{name}time"] = Picture(partial(time_lanes.draw, planned.timeline), heading, time_lanes.LEGEND)
            for index, unit in enumerate(planned.maps[:MOST_MAPS]):
                draw = partial(buffer_map.draw, unit, buffer_map.rows(planned, unit), self._ranks(planned, unit))
                heading = f"Weights, gradients and main weights of {unit.title}: {of}"
                found[f"{name}map-{index}"] = Picture(draw, heading, buffer_map.legend(unit))
        heading = "Bytes per rank against the number of ranks; full: at most in a step, dashed: between steps"
        ranks = self.facts.planned[0].ranks
        found["ranks"] = Picture(
            partial(against_ranks.draw, self.facts.curves, budget=self.budget, ranks=ranks), heading
        )
        return found

    def _pictures_of(self, run: RunRecord) -> Iterator[tuple[str, Picture]]:
        if run.timeline is not None:
            heading = "One step in time, as rank 0 has recorded it"
            yield "run-time", Picture(partial(time_lanes.draw_measured, run.timeline), heading, time_lanes.LEGEND)
        for chart in self._charts:
            heading = f"{chart.title[0].upper()}{chart.title[1:]}, against steps"
            yield _name_of(chart), Picture(partial(run_curves.draw, chart, run), heading, run_curves.legend(chart))

    @property
    def _charts(self) -> list[Chart]:
        return [] if self.run is None else run_curves.charts(self.run, self.facts.planned[0].at_rest.sum)

    def _ranks(self, planned: Planned, unit: UnitMap) -> range:
        return buffer_map.ranks_shown(planned, unit, self.first_rank, self._most_cells)

    # The page ------------------------------------------------------------------------------------------------------

    @property
    def html(self) -> str:
        """The page. It makes no requests: everything is inside, and a policy forbids others."""
        first = self.facts.planned[0]
        title = str(self.run.folder) if self.run is not None else self.facts.model
        head = (
            '<meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
            f"<title>{escaped(title)}: zeroshard report</title>"
            f"<style>{_file('picture.css')}{_file('page.css')}</style>"
        )
        defs = f'<svg width="0" height="0" aria-hidden="true" class="defs"><defs>{_HATCH}</defs></svg>'
        what = "run" if self.run is not None else "plan"
        chosen = first.title if len(self._detailed) == 1 else f"{len(self._detailed)} configurations"
        header = element(
            "header",
            element("h1", f"{element('small', what)} {escaped(title)}"),
            element("p", escaped(f"{self.facts.num_parameters:,} parameters; {chosen}; {first.units} units")),
        )
        script = f"<script>{_file('page.js')}</script>"
        body = "\n".join([defs, header, *self._sections(), '<div id="tip" role="status" hidden></div>', script])
        return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'

    def _sections(self) -> Iterator[str]:
        if self.run is not None:
            yield self._of_run(self.run)
        yield self._side_by_side()
        choices = [(planned.title, "".join(self._details(n, planned))) for n, planned in enumerate(self._detailed)]
        yield element("div", _choose("configuration", choices), class_="details")

    def _of_run(self, run: RunRecord) -> str:
        last = run.last
        validations = [loss for _, loss in run.validations if loss is not None]
        tiles = [
            ("steps", f"{last['step']:,}"),
            ("loss", _number(last.get("loss"))),
            ("validation loss", _number(validations[-1] if validations else None)),
            ("tokens/s, median", f"{_median([row.get('tokens_per_second') for row in run.steps]):,.0f}"),
            ("engine, measured", in_units(last["engine_bytes"])),
            ("process at most", in_units(last["peak_memory_bytes"])),
            ("skipped steps", f"{len(run.skipped):,}"),
        ]
        figures = [
            self._figure(
                _name_of(chart),
                chart.title,
                below=legend(run_curves.legend(chart)) + run_curves.says(chart, run),
                wide=HALF,
            )
            for chart in self._charts
        ]
        words = element("p", escaped(run_curves.events_in_words(run)), class_="note")
        return _section("The run", _tiles(tiles) + words + element("div", *figures, class_="pairs"))

    def _side_by_side(self) -> str:
        columns, rows = _plans_table(self.facts)
        note = f"Bytes of rank {self.facts.planned[0].rank}. “At most” is in a step, without activations."
        figure = self._figure(
            "ranks",
            "Bytes per rank against the number of ranks",
            below=against_ranks.says(self.facts.curves)
            + element("p", "Full lines: at most in a step; dashed: between steps. Without activations.", class_="note")
            + _folded("as a table", table(("ranks", *_names(self.facts)), against_ranks.rows(self.facts.curves))),
        )
        return _section("Plans side by side", table(columns, rows) + element("p", note, class_="note") + figure)

    def _details(self, number: int, planned: Planned) -> Iterator[str]:
        name, measured = self._prefix(number, planned), self._measured
        note = "Without activations: no batch is planned. "
        if planned.activations is not None:
            note = (
                "Activations are what autograd saves, in the last micro-batch; memory inside kernels is not included. "
            )
        below = stacked.says(planned) + legend(stacked.legend(planned)) + element("p", note, class_="note")
        if measured is not None:
            words = f"Lines across a column: measured at the end of that phase, in step {measured.step}."
            below += element("p", words, class_="note") + table(stacked.AGAINST, stacked.against(planned, measured))
        yield _section("Memory over one step", self._figure(f"{name}memory", "", below=below))
        flow = element("p", escaped(step_flow.caption(planned)), class_="note")
        yield _section("The flow of a step", self._figure(f"{name}flow", "", below=flow))
        if planned.timeline is not None:
            yield self._time(name, planned)
        yield _section("Buffer map", self._maps(name, planned))

    def _time(self, name: str, planned: Planned) -> str:
        assert planned.timeline is not None, "checked by the caller"
        note = f"By a model of the machine “{planned.timeline.machine}”; it is not a measurement."
        if self.run is not None:
            seconds = _median([row.get("seconds") for row in self.run.steps])
            share = _median([row.get("communication_share") for row in self.run.steps])
            note += f" Measured in this run: {in_seconds(seconds)} a step, {share:.0%} of it in collectives."
        below = legend(time_lanes.LEGEND) + table(("part", "time"), time_lanes.rows(planned.timeline))
        picture = self._figure(f"{name}time", "", below=below + element("p", escaped(note), class_="note"))
        if self.run is not None and self.run.timeline is not None:
            rows = table(("part", "time"), time_lanes.measured_rows(self.run.timeline))
            words = element(
                "p", "As rank 0 has recorded it. Parts overlap: a forward contains its waits.", class_="note"
            )
            picture += self._figure("run-time", "One step, measured", below=rows + words)
        return _section("Time over one step", picture)

    def _maps(self, name: str, planned: Planned) -> str:
        choices = []
        for index, unit in enumerate(planned.maps[:MOST_MAPS]):
            ranks = self._ranks(planned, unit)
            rows = list(buffer_map.ranges(unit, ranks))
            listed = table(buffer_map.RANGES, rows, class_="ranges")
            figure = self._figure(
                f"{name}map-{index}",
                "",
                above=_ZOOM,
                below=buffer_map.buttons(unit) + _folded("ranges of every shard", listed, is_open=len(rows) <= 24),
            )
            numel = f"{unit.layout.numel:,} elements, {unit.layout.shard_numel:,} in a shard"
            few = f"; ranks {ranks[0]} to {ranks[-1]} of {planned.num_shards} (others: zeroshard report --first-rank)"
            words = numel + (few if len(ranks) < planned.num_shards else "")
            words += f"; the ranks of one of {planned.replicas} replicas" if planned.replicas > 1 else ""
            choices.append((unit.title, element("p", escaped(words), class_="note") + figure))
        intro = (
            "After backward, before the step. The bars of a rank are its weights, gradients and main weights (with the "
            "optimizer state); dashed or empty: not held. Pale gradients are terms of a sum that another rank has."
        )
        return element("p", intro, class_="note") + _choose("unit", choices)

    def _figure(self, name: str, title: str, *, below: str, above: str = "", wide: int = WIDE) -> str:
        draw = self.pictures[name].draw
        sizes = element("div", draw(wide), class_="wide") + element("div", draw(NARROW), class_="narrow")
        caption = element("figcaption", escaped(title)) if title else ""
        return element("figure", caption, above, sizes, below, id=name)


def alone(drawn: str, heading: str = "", entries: Legend = ()) -> str:
    """A picture as a file of its own."""
    return svg.alone(drawn, _file("picture.css"), _HATCH, heading=heading, entries=entries)


_ZOOM = element(
    "div",
    *(
        element("button", words, type="button", data_zoom=what, aria_label=name)
        for what, words, name in (
            ("in", "+", "zoom in"),
            ("out", "−", "zoom out"),
            ("left", "←", "to the left"),
            ("right", "→", "to the right"),
            ("all", "all", "show all"),
        )
    ),
    element("output", ""),
    class_="zoom",
)


def _names(facts: Facts) -> list[str]:
    return [curve.plan for curve in facts.curves]


def _plans_table(facts: Facts) -> tuple[list[str], list[list[object]]]:
    """The rows of `zeroshard plan`."""
    columns = ["plan", "precision", "ranks", "optimizer", "units", "weights", "gradients", "main", "state"]
    columns += ["transient", "padding", "at rest", "at most", "sent a step", "largest message", "checkpoint"]
    has_activations = any(planned.activations is not None for planned in facts.planned)
    columns += ["inputs", "activations", "in all"] if has_activations else []
    rows = []
    for one in facts.planned:
        rest = one.at_rest
        mesh = f"{one.replicas} x {one.num_shards}" if one.replicas > 1 else f"{one.ranks:,}"
        sizes = [rest.weights, one.in_phase("backward").grads, rest.main, rest.state + rest.scalars, one.transient]
        sizes += [one.padding, rest.sum, one.peak, one.sent, one.largest_message, one.checkpoint_bytes]
        row: list[object] = [one.plan, one.precision, mesh, one.optimizer, one.units, *map(in_units, sizes)]
        if has_activations:
            more = one.inputs, one.activations, one.whole_peak
            row += ["" if size is None or one.activations is None else in_units(size) for size in more]
        rows.append(row)
    return columns, rows


def _section(title: str, *content: str) -> str:
    return element("section", element("h2", title), *content)


def _tiles(values: list[tuple[str, str]]) -> str:
    tiles = (element("div", element("dt", escaped(name)), element("dd", escaped(value))) for name, value in values)
    return element("dl", *tiles, class_="tiles")


def _folded(title: str, content: str, *, is_open: bool = False) -> str:
    return element("details", element("summary", escaped(title)), content, open="" if is_open else None)


def _choose(name: str, choices: list[tuple[str, str]]) -> str:
    """Contents of which the reader chooses one by its title; without a script all are shown."""
    if len(choices) == 1:
        return element("p", escaped(choices[0][0]), class_="chosen") * (name == "unit") + choices[0][1]
    options = (element("option", escaped(title), value=number) for number, (title, _) in enumerate(choices))
    select = element("label", f"{escaped(name)} ", element("select", *options), class_="choose")
    contents = (element("div", element("h3", escaped(title)), content, class_="choice") for title, content in choices)
    return element("div", select, *contents, class_="chooser")


def _name_of(chart: Chart) -> str:
    """The name of its picture."""
    words = "".join(letter if letter.isalnum() else " " for letter in chart.title.lower()).split()
    return f"run-{'-'.join(words)}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def _median(values: list[float | None]) -> float:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else 0.0
