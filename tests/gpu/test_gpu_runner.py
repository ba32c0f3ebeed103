"""`make test-gpu`: every piece runs in its CPU form, and the runner tells each bad end of a piece from a good one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.apart import one_interpreter
from tests.forked import Forked
from tests.gpu import checks as checks_file
from tests.gpu import pieces, runner
from tests.gpu.checks import ROOT
from tests.gpu.correct import SUITES
from tests.gpu.faulty_pieces import FUNCTIONS
from tests.gpu.runner import PIECES, Piece, Result, main, report_of, run, verdict
from tests.gpu.worlds import Lone
from tests.grids import EVERYTHING

importlib.import_module("torch._dynamo")  # forked pieces need not

FAULTY = {name: Piece(name, f"{name} it is", 120, module="tests.gpu.faulty_pieces") for name in FUNCTIONS}
VERDICTS = {
    "good": "passed",
    "wrong": "failed",
    "raising": "ended with status 1",
    "crashing": "killed by SIGSEGV",
    "leaving": "ended with status 0",
    "hanging": "too long",
    "lacking": "skipped",
    "unequipped": "skipped",
}


OF_LIBRARIES = ("transformers", "accelerate", "lightning", "peft")
"""The pieces that import large libraries: see `test_gpu_libraries.py`."""
ELSEWHERE = (*OF_LIBRARIES, *(() if EVERYTHING else one_interpreter.PIECES))
"""And those that `tests/apart/test_device_apart.py` runs in the same sizes, on a device that is more like a GPU."""


@pytest.mark.by_gloo
@pytest.mark.parametrize("name", [piece.name for piece in PIECES if piece.name not in ELSEWHERE])
def test_each_piece_passes_in_its_cpu_form(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_passed(name, tmp_path, monkeypatch)


def expect_passed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_file, "POPEN", Forked)
    piece = next(piece for piece in PIECES if piece.name == name)
    result = run(piece, "cpu", 0, tmp_path, Forked)
    assert result.verdict == "passed", (result.rows, result.log.read_text())
    assert any(row["kind"] == "check" for row in result.rows)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("faulty")
    FAULTY["hanging"] = replace(FAULTY["hanging"], seconds=2)
    return {name: run(piece, "cpu", 0, folder, Forked) for name, piece in FAULTY.items()}


def test_each_end_of_a_piece_is_told_apart(results: dict[str, Result]) -> None:
    assert {name: result.verdict for name, result in results.items()} == VERDICTS
    assert [name for name, result in results.items() if not result.is_bad] == ["good", "lacking", "unequipped"]
    assert verdict(1, [{"kind": "check", "is_right": True}, {"kind": "end"}]) == "ended with status 1"


def test_what_a_piece_has_found_outlives_its_crash(results: dict[str, Result]) -> None:
    assert results["crashing"].checks == results["raising"].checks == "1 of 1"
    assert results["wrong"].remark == "one is two: 1, expected 2" and results["wrong"].checks == "1 of 2"


def test_nothing_of_a_piece_runs_on_after_its_limit(results: dict[str, Result]) -> None:
    for row in results["hanging"].rows:
        status = Path("/proc", row["found"], "stat")
        assert not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


def test_the_report_has_every_row_and_the_output_of_what_failed(results: dict[str, Result]) -> None:
    report = report_of(list(results.values()), "no GPU")
    for line in (
        "- ok one is one: 1",
        "- - width: 3",
        "| 1 | x/y |",
        "says this",
        "- **FAILED** one is two: 1, expected 2",
        "ValueError: a fault of the piece",
        "Skipped: it needs two GPUs.",
        "Skipped: the package a_package_that_nobody_has is not installed.",
    ):
        assert line in report.splitlines(), (line, report)
    assert "The end of its output" not in report_of([results["good"]], "no GPU")
    assert "Segmentation fault" in results["crashing"].log.read_text()


@pytest.mark.parametrize(("names", "status"), [(["good", "lacking"], 0), (["wrong", "good"], 1)])
def test_the_exit_status_says_whether_a_piece_failed(
    names: list[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    chosen = [FAULTY[name] for name in names]
    monkeypatch.setattr(runner, "PIECES", (PIECES[0], *chosen))
    report = tmp_path / "new" / "report.md"
    assert main(["--device", "cpu", "--report", str(report), "--pieces", *names], Forked) == status
    assert all(f"## {name}: {VERDICTS[name]}" in report.read_text() for name in names)
    assert report.read_text() in capfd.readouterr().out


def test_without_what_all_pieces_need_only_the_first_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "PIECES", (FAULTY["wrong"], FAULTY["good"]))
    assert main(["--device", "cpu", "--report", str(tmp_path / "report.md")], Forked) == 1
    assert "## good" not in (tmp_path / "report.md").read_text()


def test_without_a_gpu_it_says_so_without_torch(tmp_path: Path) -> None:
    lines = ("import sys", "from tests.gpu import runner", "status = runner.main([])")
    program = "\n".join([*lines, "assert 'torch' not in sys.modules", "sys.exit(status)"])
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert (found.returncode, found.stderr) == (2, "")
    assert len(found.stdout.splitlines()) == 1 and "no GPU" in found.stdout


def test_names_are_those_of_pieces_and_tests() -> None:
    assert [piece.name for piece in PIECES] == list(pieces.FUNCTIONS)
    assert all((ROOT / file).exists() for file in SUITES)


def test_one_rank_that_counts_as_one_and_compares_as_more() -> None:
    one = Lone(1)
    assert [one > 1, one >= 1, one != 1, one == 1, one <= 1] == [True, True, True, False, False]
    assert one == Lone(1) and one > 1 and 0 < one < 2
    assert (12 // one, 12 % one, 3 * one, list(range(one)), [0] * one) == (12, 0, 3, [0], [0])
    assert max(one, 1) == 1 or max(one, 1) is one
