"""The numbers on a page are the planner's and those of the run's records. (No browser is needed.)"""

from __future__ import annotations

import gzip
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import zeroshard
from tests.cli.test_commands import said
from tests.planning.test_replay import Nested, inside, loss_of, tokens
from tests.report.common import PLANS, RANKS, START, facts, forecasts, write_run
from zeroshard.cli.main import run
from zeroshard.layout.layout import BufferLayout
from zeroshard.planned.parts import Bytes
from zeroshard.planning import Configuration, Forecast, Workload
from zeroshard.planning.in_words import in_units
from zeroshard.report import (
    Report,
    buffer_map,
    facts_of,
    read_plan,
    read_run,
    run_curves,
    stacked,
    step_flow,
    time_lanes,
    write_plan,
)
from zeroshard.report.facts import Facts, Planned

NET = "tests.kit:Net"


def cells_of(text: str) -> list[ElementTree.Element]:
    """The table cells and headings of a page, in order."""
    return re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", text)  # type: ignore[return-value]


def differences(found: Facts, expected: tuple[Forecast, ...]) -> list[str]:
    """The numbers of the facts that are not those of the planner."""
    wrong = []
    for planned, forecast in zip(found.planned, expected, strict=True):
        pairs: dict[str, tuple[Any, Any]] = {
            "sent": (planned.sent, forecast.sent),
            "peak": (planned.peak, forecast.peak),
            "whole peak": (planned.whole_peak, forecast.whole_peak),
            "at rest": (planned.at_rest, forecast.at_rest),
            "messages": (sum(m.num_bytes * m.times for m in planned.messages), forecast.sent),
            "elements": (
                sum(slot.world.numel for unit in planned.maps for slot in unit.layout.slots for _ in unit.names),
                forecast.num_parameters,
            ),
            "step": (planned.timeline and planned.timeline.time, forecast.time("cpu")),
        }
        pairs |= {name: (planned.in_phase(name), phase.held) for name, phase in forecast.phases.items()}
        (point,) = (
            point
            for curve in found.curves
            if curve.plan == planned.plan
            for point in curve.points
            if point.ranks == RANKS
        )
        pairs["curve"] = (point.at_rest, point.at_most), (forecast.at_rest.sum, forecast.peak)
        wrong += [f"{planned.plan}: {name}" for name, (found, expected) in pairs.items() if found != expected]
    return wrong


def test_the_facts_are_the_planners() -> None:
    assert [planned.plan for planned in facts().planned] == list(PLANS)
    assert differences(facts(), forecasts()) == []
    first, *others = facts().planned
    wrong = replace(facts(), planned=(replace(first, sent=first.sent + 1), *others))
    assert differences(wrong, forecasts()) == ["zero3: sent"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_point_of_a_curve_is_what_is_planned_for_so_many_ranks(device: str) -> None:
    """On so many ranks small units are merged, which they are not on few; and each shard has replicas."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    options = {"units": nn.Linear, "precision": "bf16", "device": device, "replicas": 2}
    facts = facts_of("net", [zeroshard.plan(model, Configuration(ranks=1024, **options))])
    for curve in facts.curves:
        assert [point.ranks for point in curve.points] == [2, 4, 8, 16, 32, 64, 128, 512, 1024]
        for point in curve.points:
            of_point = zeroshard.plan(model, Configuration(plan=curve.plan, ranks=point.ranks, **options))
            assert (point.at_rest, point.at_most) == (of_point.at_rest.sum, of_point.peak), (curve.plan, point.ranks)


def test_units_that_are_gathered_apart_are_in_the_curves() -> None:
    """The curves left them out."""
    with torch.device("meta"):
        model = inside()
    batch = Workload(tokens, loss_of)
    options: dict[str, Any] = {"units": Nested, "device": "cpu", "transport": "native", "workload": batch}
    planned = zeroshard.plan(model, Configuration(ranks=2, **options))
    assert planned.training.gathered_apart
    for curve in facts_of("net", [planned]).curves:
        for point in curve.points[:4]:
            there = zeroshard.plan(model, Configuration(plan=curve.plan, ranks=point.ranks, **options))
            assert (point.at_rest, point.at_most) == (there.at_rest.sum, there.peak), (curve.plan, point.ranks)


def test_the_page_has_the_numbers_of_the_facts() -> None:
    page = Report(facts()).html
    cells = cells_of(page)
    for forecast in forecasts():
        for number in (
            forecast.peak,
            forecast.sent,
            forecast.at_rest.sum,
            forecast.whole_peak,
            forecast.checkpoint_bytes,
        ):
            assert in_units(number) in cells
    assert in_units(forecasts()[0].peak * 3 + 1) not in cells
    assert f"{forecasts()[0].num_parameters:,} parameters" in page


def test_a_page_makes_no_requests() -> None:
    page = Report(facts()).html
    assert re.findall(r"(?:src|href|url)\s*[=(]\s*[\"']?(?!#|data:)(\w[^\"')>]*)", page) == []
    assert [address for address in re.findall(r"https?://[^\"'<\s]+", page) if "www.w3.org" not in address] == []
    assert "default-src 'none'" in page


def expected_cells(layout: BufferLayout, planned: Planned, ranks: range) -> set[tuple[int, str, int, int]]:
    """(rank, tensor, begin, end) of each run of elements that a rank holds, element by element."""
    owner = ["padding"] * layout.numel
    for slot in layout.slots:
        owner[slot.world.start : slot.world.stop] = [slot.name] * slot.world.numel
    found = set()
    for rank in ranks:
        mine = range(rank * layout.shard_numel, (rank + 1) * layout.shard_numel)
        for tensor, placement in (
            ("weights", planned.weights),
            ("gradients", planned.grads),
            ("main weights", planned.main),
        ):
            start, held = 0, mine if placement == "sharded" else range(layout.numel)
            for at in range(1, layout.numel + 1):
                ends_here = at == layout.numel or owner[at] != owner[at - 1]
                ends_here |= placement != "replicated" and at in (mine.start, mine.stop)
                if ends_here:
                    if start in held:
                        found.add((rank, tensor, start, at))
                    start = at
    return found


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_the_cells_of_a_buffer_map_are_what_each_rank_holds(number: int) -> None:
    planned = facts().planned[number]
    for unit in planned.maps:
        ranks = buffer_map.ranks_shown(planned, unit, 0, 10_000)
        drawing = buffer_map.draw(unit, buffer_map.rows(planned, unit), ranks, 1100)
        root = ElementTree.fromstring(drawing)
        found = set()
        for group in root.iter("{http://www.w3.org/2000/svg}g"):
            if group.get("class") != "held":
                continue
            for cell in group:
                if (world := cell.get("data-world")) is None:
                    continue
                start, stop = map(int, world.split(","))
                found.add((int(group.attrib["data-rank"]), group.attrib["data-tensor"], start, stop))
                shown = 76 + (1100 - 8 - 76) * start / unit.layout.numel
                assert float(cell.attrib["x"]) == pytest.approx(shown, abs=0.01)
        other = "sharded" if planned.weights == "replicated" else "replicated"
        expected = expected_cells(unit.layout, planned, ranks)
        assert found == expected and len(found) > len(ranks)
        assert found != expected_cells(unit.layout, replace(planned, weights=other), ranks)  # a control


def test_the_table_of_ranges_is_that_of_the_layout() -> None:
    planned = facts().planned[0]
    unit = planned.maps[-1]
    rows = list(buffer_map.ranges(unit, range(RANKS)))
    for rank in range(RANKS):
        for fragment in unit.layout.fragments(rank):
            ranges = (f"[{part.start:,}, {part.stop:,})" for part in (fragment.world, fragment.local, fragment.param))
            assert (rank, fragment.slot.name, *ranges, f"{fragment.world.numel:,}") in rows
    assert sum(int(str(row[5]).replace(",", "")) for row in rows) == unit.layout.numel


def test_the_flow_of_a_step_has_all_messages_and_the_placements() -> None:
    for planned in facts().planned:
        parts = step_flow.flow(planned)
        assert sum(part.num_bytes for part in parts if isinstance(part, step_flow.Move)) == planned.sent
        held = {part.phase: part for part in parts if isinstance(part, step_flow.State)}
        assert held["backward"].num_bytes == planned.in_phase("backward").sum
        assert held["between steps"].weights == ("shard" if planned.plan == "zero3" else "full")
        words = [part.words for part in parts if isinstance(part, step_flow.Move)]
        assert ("all-gather the new weights" in words) == (planned.plan in ("zero1", "zero2"))
        assert ("all-gather the mean of gradients" in words) == (planned.plan == "ddp")
        assert ("all-gather weights for forward" in words) == (planned.plan == "zero3")


def test_memory_over_a_step_is_stacked_from_the_moments() -> None:
    planned = facts().planned[0]
    columns = stacked.columns(planned)
    assert max(column.num_bytes for column in columns) == forecasts()[0].whole_peak
    without = replace(planned, moments=())
    assert max(column.num_bytes for column in stacked.columns(without)) == forecasts()[0].peak
    assert "budget 5.00 kB" in stacked.draw(planned, 1100, budget=5000, measured=None)


# Plan files -----------------------------------------------------------------------------------------------------------


def test_a_plan_file_has_everything(tmp_path: Path) -> None:
    write_plan(facts(), tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == facts()


def test_a_unit_of_empty_parameters_has_no_buffer_to_draw(tmp_path: Path) -> None:
    """The page was a ZeroDivisionError."""
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("prompt", nn.Parameter(torch.zeros(0, 4)))
    planned = zeroshard.plan(model, Configuration(ranks=2, units=nn.Linear))
    assert len(planned.training.units) == 2
    report = Report(facts_of("net", [planned]))
    assert len(report.facts.planned[0].maps) == 1 and report.html and report.write_pictures(tmp_path)


def damage(values: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """A copy of JSON values in which one is replaced; None: removed."""
    copy: dict[str, Any] = json.loads(json.dumps(values))
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("."))
    at: Any = copy
    for key in keys:
        at = at[key]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return copy


IMPOSSIBLE = (
    ("ranks", -1, "[0], ranks is damaged: expected a number from 0 to 2**63, found '-1'"),
    ("ranks", 0, "[0] is damaged: 0 ranks do not divide into 1 replicas"),
    ("replicas", 10**30, "[0], replicas is damaged: expected a number from 0"),
    ("replicas", 5, "ranks do not divide into 5 replicas"),
    ("sent", -5, "[0], sent is damaged: expected a number from 0"),
    ("held.0.engine.weights", -1, "weights is damaged: expected a number from 0"),
    ("grads", "x", "[0] is damaged: expected placements of ['partial', 'replicated', 'sharded'], found 'x'"),
    ("held", [], "[0] is damaged: expected what is held in each phase, found none for 'backward'"),
    ("maps.0.names", [], "maps[0] is damaged: expected units and three sizes, found 0 and 3"),
)
"""Where in a plan, the value there, the message."""


def test_one_line_for_each_bad_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    write_plan(facts(), path)
    whole = json.loads(path.read_text())
    moment = {"phase": "x", "until": "", "engine": dict.fromkeys(vars(Bytes()), 0), "activations": 0}
    for change, message in (
        (lambda: path.write_text("{"), "is not a plan file: it is not JSON"),
        (lambda: path.write_text("[" * 100_000), "is not a plan file: it is not JSON (maximum recursion depth"),
        (lambda: path.write_text("[1]"), "is not a plan file: write one with zeroshard plan MODEL --save"),
        (lambda: path.write_text(json.dumps(whole | {"zeroshard plan": 7})), "of version 7, and this zeroshard reads"),
        (lambda: path.write_text(json.dumps(damage(whole, "planned.0.sent", "many"))), "[0], sent is damaged"),
        (lambda: path.write_text(json.dumps(damage(whole, "planned.0.sent", None))), "missing or unknown: sent"),
        (
            lambda: path.write_text(json.dumps(damage(whole, "planned.0.maps.0.layout.numel", 5))),
            "is damaged: 5 elements",
        ),
        (lambda: path.write_text(json.dumps(damage(whole, "planned", []))), "planned is damaged: it has no entry"),
        (lambda: path.write_text(json.dumps(damage(whole, "curves", []))), "curves is damaged: it has no entry"),
        (
            lambda: path.write_text(json.dumps(damage(whole, "curves.1.points.0", None))),
            "plan.json is damaged: expected curves over the same numbers of ranks, found different ones",
        ),
        (
            lambda: path.write_text(json.dumps(damage(whole, "planned.0.moments", [moment]))),
            "moments[0] is damaged: expected a moment of one of forward, backward, step, between steps, found 'x'",
        ),
        (
            lambda: path.write_text(json.dumps(damage(whole, "curves.0.points", []))),
            "curves[0] is damaged: expected points of the curve, found none",
        ),
        *(
            (lambda at=at, to=to: path.write_text(json.dumps(damage(whole, f"planned.0.{at}", to))), message)
            for at, to, message in IMPOSSIBLE
        ),
        (path.unlink, "there is no"),
    ):
        change()
        assert message in said(capsys, "report", path, code=2), message
    assert "is not the folder of a run" in said(capsys, "report", tmp_path, code=2)
    assert "--save: not with --fit" in said(capsys, "plan", NET, "--fit", "1GB", "--save", path, code=2)


def test_from_a_plan_to_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    said(capsys, "plan", NET, "--ranks", "2,4", "--plan", "zero2", "--save", path)
    assert "is the plan file itself" in said(capsys, "report", path, "--out", path, code=2)
    assert run(["plan", NET, "--save", str(tmp_path / "absent" / "plan.json")]) == 2
    assert capsys.readouterr().out == "", "the table came before the error"
    out = said(capsys, "report", path, "--svg", tmp_path / "pictures", "--budget", "1MB")
    written = [Path(line) for line in out.splitlines()]
    assert written[0] == tmp_path / "plan.html" and "budget 1.00 MB" in written[0].read_text()
    assert {"ranks.svg", "0-zero2-flow.svg", "1-zero2-map-0.svg"} <= {path.name for path in written}
    for picture in written[1:]:
        assert ElementTree.parse(picture).getroot().tag.endswith("svg")


def test_names_from_elsewhere_are_written_as_text(tmp_path: Path) -> None:
    first, *_ = facts().planned
    unit = first.maps[0]
    evil = "</script><script>alert(1)</script>\x00\x1b[31m\ud800\uffff"
    slots = tuple(replace(slot, name=f"{evil}{slot.name}") for slot in unit.layout.slots)
    maps = (replace(unit, names=(evil,), layout=replace(unit.layout, slots=slots)),)
    assert first.timeline is not None
    timeline = replace(first.timeline, spans=tuple(replace(span, unit=evil) for span in first.timeline.spans))
    moments = tuple(replace(moment, until=evil) for moment in first.moments)
    planned = replace(first, maps=maps, plan=evil, optimizer=evil, timeline=timeline, moments=moments)
    report = Report(replace(facts(), model=evil, planned=(planned,)))
    for path in report.write_pictures(tmp_path):
        ElementTree.parse(path)
    page = report.write(tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert page.count("</script>") == Report(facts_of("net", forecasts()[:1], "cpu")).html.count("</script>")


# Runs -----------------------------------------------------------------------------------------------------------------


def test_the_curves_of_a_run_are_its_records(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    assert run.skipped == [3]
    assert [start.words for start in run.starts] == ["", "resumed after step 2", "restart 1 after step 4"]
    charts = {chart.title: chart for chart in run_curves.charts(run, 77)}
    assert charts["loss (nats per token)"].series[0].finite == [(1, 3.0), (2, 1.5), (3, 1.0), (4, 0.75), (6, 0.5)]
    assert charts["memory of the engine, rank 0"].series[1].values[0] == (1, 77.0)
    page = Report(facts(), run).html
    for words in (
        "resumed after step 2",
        "restart 1 after step 4",
        "step 3 was skipped",
        "Skipped steps (triangles): 3.",
    ):
        assert words in page
    assert page.count('class="event resume"') == page.count('class="event restart"') == 2 * len(charts)
    assert "1.2500" in page and "step 5\\ngrad" not in page


def test_planned_beside_measured(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    assert run.measured is not None
    rows = {row[0]: row[1:] for row in stacked.against(facts().planned[0], run.measured)}
    rest = facts().planned[0].at_rest
    assert rows["weights"][:2] == (f"{rest.weights:,}", "10") and rows["weights"][-1] != "equal"
    equal = replace(
        run.measured, held={"between steps": vars(rest)}, at_most=vars(facts().planned[0].in_phase("backward"))
    )
    assert {row[-1] for row in stacked.against(facts().planned[0], equal)} == {"equal"}
    page = Report(facts(), run).html
    assert "Lines across a column: measured at the end of that phase" in page
    assert "Black" not in page, "in a browser's dark mode they are white"


def test_a_long_run_is_thinned_and_one_step_is_a_point(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, 3000))
    page = Report(facts(), run).html
    assert len(page) < 2_500_000 and 'class="band' in page
    assert "circle" in run_curves.draw(run_curves.charts(read_run(write_run(tmp_path, 1)), 77)[0], run, 350)


def test_a_damaged_run_is_refused_in_one_line(tmp_path: Path) -> None:
    def check(change: Any, message: str) -> None:
        path = write_run(tmp_path) / "metrics.jsonl"
        path.write_text(change(path.read_text()))
        with pytest.raises(ValueError, match=message):
            read_run(tmp_path)

    check(lambda text: "", "has not come to its first step")
    check(
        lambda text: text.replace('"loss": 1.5', '"loss": "low"'),
        "in line 4: loss must be a number or null, found 'low'",
    )
    check(lambda text: "\n".join(line for line in text.splitlines() if "restarts" not in line), "records no start")
    check(lambda text: "]\n" + text, "damaged in line 1")
    check(lambda text: "[]\n" + text, "in line 1: expected an object with a kind")
    check(lambda text: "[" * 100_000 + "\n" + text, r"damaged in line 1: it is not JSON \(maximum recursion depth")
    large = "1" + 400 * "0"  # as were these: they are no floats, or have no difference
    for key, value in (("loss", large), ("loss", "-1.7e+308"), ("step", large), ("engine_bytes", "-5")):
        check(
            lambda text, key=key, value=value: text.replace(f'"{key}":', f'"{key}": {value}, "was":'),
            rf"damaged in line [23]: {key} must be a .*, found {re.escape(value[:5])}",
        )
    check(lambda text: text.replace('"loss": 1.25', f'"loss": {large}'), r"in line \d+: loss must be a number")
    for value in ("Infinity", "NaN", "-1", "2.5", '"many"', large):  # raised OverflowError; 2.5 was rounded
        held = f'{{"kind": "memory", "step": 6, "held": {{"at most": {{"state": {value}}}}}}}\n'
        check(lambda text, line=held: text + line, "is damaged in line 12: state must be a whole number from 0")
    for key, value, found in (  # ranks 0 divided by zero, and the other numbers were rounded
        ("restarts", '"x"', "restarts must be a whole number from 0, found 'x'"),
        ("ranks", "0", "ranks must be a whole number from 1, found 0"),
        ("ranks", "2.5", "ranks must be a whole number from 1, found 2.5"),
        ("ranks", "true", "ranks must be a whole number from 1, found True"),
        ("plan", '"zero7"', "unknown plan 'zero7'"),
    ):
        start = json.dumps(START)
        damaged = start.replace(f'"{key}": {json.dumps(json.loads(start)[key])}', f'"{key}": {value}')
        assert damaged != start
        check(lambda text, line=damaged: f"{line}\n{text}", f"is damaged in line 1: {found}")
    for key, value, found in (  # these were Python's words, without the line
        ("plan", "[]", r"plan must be a text, found \[\]"),
        ("batch", "3", "batch must be an object, found 3"),
        ("batch", '{"sequences": 24}', "it has no micro_batches"),
        ("was", "null", "it has no ranks"),
    ):
        line = json.dumps({**{k: v for k, v in START.items() if key != "was" or k != "ranks"}, key: json.loads(value)})
        check(lambda text, line=line: f"{line}\n{text}", f"is damaged in line 1: {found}")
    whole = write_run(tmp_path) / "metrics.jsonl"
    content = whole.read_bytes()
    whole.write_bytes(content + b" " * 10**6 + b"\xff")
    with pytest.raises(ValueError, match=r"is damaged: UnicodeDecodeError: .* byte 0xff in position") as caught:
        read_run(tmp_path)
    assert len(str(caught.value)) < 200 + len(str(whole))
    whole.write_bytes(content)
    whole.write_text(whole.read_text() + '{"kind": "ste')  # a run that was killed while it wrote
    assert read_run(tmp_path).last["step"] == 6


def test_a_damaged_folder_of_a_run_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its configuration."""
    pytest.importorskip("pydantic")
    config = write_run(tmp_path) / "config.toml"
    for text, message in (
        (None, "config.toml"),
        ("[model", "config.toml"),
        ("[model]\nlayer = 2\n", "unknown configuration key 'model.layer'"),
    ):
        if text is not None:
            config.write_text(text)
        for command in (["report"], ["plan", "--compare"]):
            assert message in said(capsys, *command, tmp_path, code=2), (command, text)


def test_a_recorded_step_is_drawn_as_it_was_recorded(tmp_path: Path) -> None:
    """Two forwards, one of them inside of the other, a wait and its gather."""
    rows = [
        ("root", "forward", 10, 40, ""),
        ("blocks.0", "forward", 20, 10, ""),
        ("blocks.0", "collective", 5, 12, "forward"),
    ]
    rows += [("blocks.0", "wait", 12, 5, "forward"), ("", "phase", 60, 4, "")]
    names = {"collective": "all_gather(blocks.0)", "wait": "wait: all_gather(blocks.0)", "phase": "step: batch"}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for unit, kind, ts, dur, phase in rows:
        arguments = {"unit": unit, "phase": phase}
        events.append({"ph": "X", "cat": kind, "name": names.get(kind, kind), "ts": ts, "dur": dur, "args": arguments})
    path = write_run(tmp_path) / "timeline-0.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    run = read_run(tmp_path)
    assert run.timeline is not None
    parts = dict(time_lanes.measured_rows(run.timeline))
    assert parts["in forward"] == "40 µs" and parts["in waits (exposed)"] == "5 µs" and parts["the step"] == "59 µs"
    assert (parts["in step"], parts["messages in flight"], parts["in backward"]) == ("4 µs", "12 µs", "0")
    drawing = time_lanes.draw_measured(run.timeline, 1100)
    assert drawing.count('class="span') == 5 and "One step, measured" in Report(facts(), run).html
    for content in (b"nothing", gzip.compress(b"a" * 10**6 + b"\xff")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="is not a timeline") as caught:
            read_run(tmp_path)
        assert len(str(caught.value)) < 200 + len(str(path))
    for key, value in (("ts", math.inf), ("dur", math.nan), ("ts", -1), ("dur", 10**30)):  # drawing them has raised
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, events[-1] | {key: value}]}).encode()))
        with pytest.raises(ValueError, match=rf"traceEvents\[\d+\]: {key} must be a number from 0 to"):
            read_run(tmp_path)
    assert read_run(tmp_path, timeline=False).last == run.last
