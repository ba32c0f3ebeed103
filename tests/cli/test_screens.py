"""What a person sees of `zeroshard train`: on terminals of 80 and 200 columns, and in a file."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.cli.screen import Screen, run_on_terminal
from tests.cli.test_cli import SMALL
from tests.forked import Forked

STEPS = 12
LINE = re.compile(r"step +\d+/12 \| loss [\d.]+ nats( \| .*)? \| eta [\d:]+")


def command(text: Path, out: Path, num_ranks: int = 1) -> list[str]:
    run = [
        "train",
        f"--nproc={num_ranks}",
        f"--steps={STEPS}",
        "--log-seconds=0.001",
        f"--out={out}",
        "--data",
        str(text),
    ]
    return [sys.executable, "-m", "zeroshard", *run, "--evaluation.every=4", "--run.log_every=4", *SMALL]


def expect_a_whole_run(lines: list[str]) -> None:
    """The beginning, the evaluations, the sample, the table and the summary, in this order."""
    text = "\n".join(lines)
    marks = ["parameters, zero", "text: ", "run folder", "step 4: validation loss", "step 8: validation loss"]
    marks += ["step 12: validation loss", "╭─ sample ─", "rank 0 holds", "between steps", "total", "12 steps, "]
    marks += ["on average ", "best validation loss", "peak memory", "saved in ", "report "]
    places = [text.find(mark) for mark in marks]
    assert -1 not in places and places == sorted(places), (marks[places.index(-1)] if -1 in places else places, text)


@pytest.mark.long
def test_screens_of_80_and_200_columns_and_a_file(text_folder: Path, tmp_path: Path) -> None:
    start = partial(Forked, cwd=tmp_path)  # paths are short, as a person's are

    def to_terminal(columns: int) -> Screen:
        of_columns = command(text_folder, Path(f"runs/{columns}"), num_ranks=2 if columns == 80 else 1)
        screen, status = run_on_terminal(columns, of_columns, start)
        assert status == 0, screen.lines
        return screen

    to_file = start(command(text_folder, Path("runs/file")), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with ThreadPoolExecutor() as threads:
        narrow, wide = threads.map(to_terminal, (80, 200))
    in_file, errors = to_file.communicate()
    assert (to_file.returncode, errors) == (0, "")
    of_narrow, of_wide = (steps_on(screen) for screen in (narrow, wide))
    assert "memory" not in of_narrow[0] and "memory" in of_wide[0]
    assert max(map(len, of_narrow)) <= 80 < len(of_wide[0]) <= 200

    print("file:", in_file)
    expect_a_whole_run(in_file.splitlines())
    assert "\x1b" not in in_file and "\r" not in in_file
    steps = [line for line in in_file.splitlines() if line.startswith("step ") and "|" in line]
    assert [line.split("/")[0].split()[1] for line in steps] == ["1", "4", "8", "12"]
    assert all(LINE.fullmatch(line) and "memory" in line for line in steps)


def steps_on(screen: Screen) -> list[str]:
    """The lines of the steps; after checking the whole screen."""
    print(f"{screen.columns} columns:", *screen.lines, sep="\n")
    expect_a_whole_run(screen.lines)
    steps = [line for line in screen.lines if line.startswith("step ") and "|" in line]
    assert len(steps) >= STEPS * 2 / 3 and all(LINE.fullmatch(line.rstrip()) for line in steps), steps
    bars = [line for line in screen.lines if re.match("[━╌]+ step", line)]
    assert len(bars) == 1 and f"{STEPS}/{STEPS}" in bars[0], bars  # the live line of the last step; no remains
    assert screen.drawn > STEPS / 2 and screen.wrapped == 0
    return steps


def test_the_terminal_of_this_test() -> None:
    screen = Screen(10)
    screen.feed("live 1\r\x1b[2")
    screen.feed("Khistory\r\n\x1b[1;32mlive 2\x1b[0m\r\n\x1b[1A\x1b[2Klive 3\r\n")
    assert screen.lines == ["history", "live 3", ""] and (screen.wrapped, screen.drawn) == (0, 2)
    screen.feed("0123456789" + "a")
    assert screen.lines[2:] == ["0123456789", "a"] and screen.wrapped == 1
    with pytest.raises(ValueError, match="does not know"):
        screen.feed("\x1b[3J")
