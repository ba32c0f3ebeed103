"""The progress output of a run, and the records it writes."""

import io
import json
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from zeroshard.train.metrics import JsonLines, Observers, StepRecord, TensorBoard, ValidationRecord
from zeroshard.train.progress import (
    Progress,
    Smoothed,
    bytes_table,
    describe,
    duration,
    fitting,
    live_line,
    sample_panel,
    si,
)
from zeroshard.train.summary import Summary

RECORD = StepRecord(
    step=10,
    loss=2.0,
    lr=1e-3,
    grad_norm=0.5,
    applied=True,
    loss_scale=1.0,
    tokens_per_second=15_321.0,
    communication_share=0.123,
    memory_bytes=412_000_000,
    peak_memory_bytes=430_000_000,
    engine_bytes=61_000_000,
    planned_bytes=61_000_000,
    seconds=0.4,
    eta_seconds=123.0,
    data_seconds=0.004,
    tokens=61_440,
    wall_seconds=7.0,
    flops_per_second=12.34e9,
    mfu=None,
)
SKIPPED = replace(RECORD, applied=False, loss_scale=65536.0)


def console(width: int = 200, **values: bool) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width, **values), file  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"),
        (999, "B", "999 B"),
        (999.7, "", "1.0 k"),
        (15321, "B", "15.3 kB"),
        (412e6, "B", "412 MB"),
        (5, "", "5"),
    ],
)
def test_numbers_have_three_digits(value: float, unit: str, text: str) -> None:
    assert si(value, unit) == text


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 123, 7265)] == ["0:00", "1:00", "2:03", "2:01:05"]


def test_a_line_has_everything() -> None:
    assert fitting(describe(RECORD, 400), None) == (
        "step  10/400 | loss 2.0000 nats | 2.885 bits/byte | 15.3 k tokens/s | 12.3 GFLOP/s | norm 0.500 | "
        "memory 412 MB peak 430 MB engine 61.0 MB | comm 12% | data 1% | eta 2:03"
    )
    assert "12.3 GFLOP/s MFU 41% |" in fitting(describe(replace(RECORD, mfu=0.412), 400), None)
    assert "| skipped | scale 65,536 |" in fitting(describe(SKIPPED, 400), None)


def test_a_line_keeps_what_matters_most_on_a_narrow_screen() -> None:
    assert live_line(describe(RECORD, 400), 0.5, 80) == (
        "━━━━╌╌╌╌ step  10/400 | loss 2.0000 nats | 15.3 k tokens/s | comm 12% | eta 2:03"
    )
    assert fitting(describe(SKIPPED, 400), 60) == "step  10/400 | loss 2.0000 nats | skipped | scale 65,536"
    parts = describe(RECORD, 400)
    for width in range(1, 201):
        assert len(fitting(parts, width)) <= width
        assert len(live_line(parts, 0.5, width)) <= width


def test_smoothed_values_follow_slowly() -> None:
    smoothed = Smoothed()
    assert [smoothed(3.0), smoothed(3.0)] == pytest.approx([3.0, 3.0])
    assert 3.0 < smoothed(6.0) < 4.5  # the mean of three values is 4
    for _ in range(100):
        last = smoothed(6.0)
    assert last == pytest.approx(6.0, abs=1e-3)


def test_plain_lines_where_there_is_no_terminal() -> None:
    screen, file = console()
    progress = Progress(screen, steps=25, log_every=10)
    for step in range(1, 26):
        progress.on_step(replace(RECORD, step=step))
    progress.on_validation(ValidationRecord(25, 1.5))
    progress.close()
    lines = file.getvalue().splitlines()
    assert [line.split("|")[0].split() for line in lines[:-1]] == [["step", f"{n}/25"] for n in (1, 10, 20, 25)]
    assert lines[-1] == "step 25: validation loss 1.5000 nats, 2.1640 bits per byte"


@pytest.mark.parametrize("width", [80, 200])
def test_a_live_line_and_a_history_on_a_terminal(width: int) -> None:
    """The clock advances by one second in each step; every seventh second a line stays, and nothing wraps."""
    screen, file = console(width, force_terminal=True)
    now = [0.0]
    progress = Progress(screen, steps=25, log_every=10, log_seconds=7.0, clock=lambda: now[0])
    for step in range(1, 26):
        now[0] += 1.0
        progress.on_step(replace(RECORD, step=step))
    progress.on_validation(ValidationRecord(25, 1.5))
    progress.close()
    assert "━" * (16 if width == 200 else 8) + " step 25/25 | loss 2.0000" in file.getvalue()
    assert "\x1b[2K" in file.getvalue()  # lines are redrawn in place
    lines = [re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", line).strip("\r") for line in file.getvalue().splitlines()]
    assert [line.split("/")[0] for line in lines if line.startswith("step ") and "|" in line] == [
        "step  7", "step 14", "step 21"
    ]  # fmt: skip
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("terminal", [False, True])
def test_a_skipped_step_is_a_line_of_its_own(terminal: bool) -> None:
    """On a terminal the live line is soon overwritten; in other output step 7 has no line of its own."""
    screen, file = console(force_terminal=terminal)
    progress = Progress(screen, steps=25, log_every=10)
    for step in range(1, 26):
        progress.on_step(replace(RECORD, step=step, applied=step != 7, loss_scale=1024.0))
        if step == 8 and progress._live:
            progress._live.refresh()
    progress.close()
    shown = [line for line in file.getvalue().splitlines() if "skipped | scale 1,024" in line]
    assert any("step  7/25" in line and "━" not in line and "╌" not in line for line in shown)


def test_the_summary_adds_up_a_session_and_knows_earlier_evaluations() -> None:
    summary = Summary([ValidationRecord(5, 1.0), ValidationRecord(8, 3.0)])
    assert summary.lines() == []
    for step in (9, 10):
        rate = 10_000.0 if step == 9 else 20_000.0
        summary.on_step(replace(RECORD, step=step, seconds=step - 8.0, tokens_per_second=rate, mfu=0.5, tokens=50_000))
    summary.on_validation(ValidationRecord(10, float("nan")))
    lines = summary.lines()
    assert lines == [
        "10 steps, 50.0 k tokens in 0:07; 2 steps in this session took 0:03",
        "on average 16.7 k tokens/s, 12.3 GFLOP/s MFU 50%, 12% in comm, 0% for data",
        "best validation loss 1.0000 nats, 1.4427 bits/byte, after step 5",
        "peak memory 430 MB on rank 0",
    ]
    summary.on_validation(ValidationRecord(12, 0.5))
    assert "0.5000 nats" in summary.lines()[2]


@pytest.mark.parametrize("terminal", [False, True])
def test_other_bytes_than_planned_are_told_once(terminal: bool) -> None:
    screen, file = console(force_terminal=terminal)
    progress = Progress(screen, steps=25, log_every=10)
    for step in range(1, 4):
        progress.on_step(replace(RECORD, step=step))
    progress.on_step(replace(RECORD, step=4, engine_bytes=5, applied=False))  # a skipped step makes no state
    assert "WARNING" not in file.getvalue()
    for step in range(5, 8):
        progress.on_step(replace(RECORD, step=step, engine_bytes=61_000_001))
    progress.close()
    told = "step 5: WARNING: the engine holds 61,000,001 bytes, and 61,000,000 were planned: see the table at the end"
    assert file.getvalue().count("WARNING") == 1 and told in file.getvalue()


def test_table_of_bytes() -> None:
    screen, file = console()
    planned = {"weights": 400, "grads": 400, "main": 0, "state": 800, "ring": 100}
    screen.print(bytes_table("zero3", 100, planned, {**planned, "ring": 50, "scalars": 16}, 80))
    cells = {line.split("│")[0].strip(): line.split("│")[1:] for line in file.getvalue().splitlines() if "│" in line}
    rows = {name: [cell.strip() for cell in row] for name, row in cells.items()}
    assert rows["weights"] == ["4.000", "4.000", "400", "400"]
    assert rows["between steps"] == ["16.000", "16.160", "1,600", "1,616"]
    assert rows["ring, transient"] == ["1.000", "0.500", "100", "50"]
    assert rows["total"] == ["17.000", "16.660", "1,700", "1,666"]


def test_a_sample_is_shown_as_it_is() -> None:
    screen, file = console()
    screen.print(sample_panel("def f(x): [bold]x[/bold]"))
    assert "def f(x): [bold]x[/bold]" in file.getvalue()


def test_json_lines_are_json_even_when_the_loss_is_not_a_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path, 0)
    writer.on_step(replace(RECORD, loss=float("nan")))
    row = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (row["loss"], row["bits_per_byte"], row["grad_norm"]) == (None, None, 0.5)
    writer.close()


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """The system refuses writes beyond that size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class _Closes:
    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_lines_that_a_full_disk_has_lost_are_told_and_do_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run, whose steps are saved, ended with an error."""
    path, other = tmp_path / "metrics.jsonl", _Closes()
    with files_of_at_most(10), Observers([JsonLines(path, 0), other]) as observers:  # type: ignore[list-item]
        observers._observers[0].on_step(RECORD)
    assert caplog.messages[-1] == f"cannot write {path}: File too large; its last lines are lost"
    assert other.closed == 1


def test_no_line_is_lost_on_a_disk_that_was_full_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The run ended there, with the steps since its last checkpoint."""
    path = tmp_path / "metrics.jsonl"
    writer = JsonLines(path, 0)
    with files_of_at_most(1000):
        for step in (1, 2, 3):
            writer.on_step(replace(RECORD, step=step))
    assert path.stat().st_size == 1000
    assert [f"cannot write {path}: File too large; training" in message for message in caplog.messages] == [True]
    writer.on_step(replace(RECORD, step=4))
    assert [json.loads(line)["step"] for line in path.read_text().splitlines() if '"kind": "step"' in line] == [
        1,
        2,
        3,
        4,
    ]
    writer.close()


@pytest.mark.parametrize("width", [80, 79, 40])
def test_the_table_of_bytes_cuts_no_number_on_a_narrow_screen(width: int) -> None:
    screen, file = console(width)
    large = dict.fromkeys(("weights", "grads", "main", "state", "scalars", "buckets"), 23_456_789_012)
    screen.print(bytes_table("zero3", 1_000_000_000, large, large, width))
    assert "140,740,734,072" in file.getvalue() and "140.741" in file.getvalue() and "…" not in file.getvalue()
    assert max(map(len, file.getvalue().splitlines())) <= width


def test_tensorboard_writes_an_event_file(tmp_path: Path) -> None:
    assert TensorBoard.installed()
    with Observers([TensorBoard(tmp_path, 0)]) as observers:
        observers.on_step(RECORD)
        observers.on_validation(ValidationRecord(10, 1.5))
    (events,) = tmp_path.iterdir()
    content = events.read_bytes()
    assert b"train/loss" in content
    assert b"validation/bits_per_byte" in content
