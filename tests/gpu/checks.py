"""What a piece of `make test-gpu` has found, written line by line: a piece that crashes loses nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Skip(Exception):
    """This machine lacks what the piece needs; the message says what."""


@dataclass(frozen=True)
class Setting:
    """Where a piece runs.

    Attributes:
        device: "cuda", or "cpu": the same code with small sizes, to test the pieces.
        num_gpus: how many GPUs there are. Asked by the runner, as a piece that forks ranks must not use CUDA.
        folder: for files.
    """

    device: str
    num_gpus: int
    folder: Path

    @property
    def is_small(self) -> bool:
        return self.device != "cuda"


class Checks:
    """The rows of one piece, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.failed = 0
        path.write_text("")

    def expect(self, what: str, is_right: object, found: object = "") -> None:
        """A check. A piece goes on after one that fails."""
        self.failed += not is_right
        self._write(kind="check", what=what, is_right=bool(is_right), found=str(found))

    def expect_equal(self, what: str, found: object, expected: object) -> None:
        is_right = found == expected
        self.expect(what, is_right, found if is_right else f"{found}, expected {expected}")

    def note(self, what: str, value: object) -> None:
        """A number for the report, without a limit."""
        self._write(kind="note", what=what, found=str(value))

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """A table for the report."""
        self._write(kind="table", what=title, header=list(header), rows=[[str(cell) for cell in row] for row in rows])

    def text(self, title: str, text: str) -> None:
        """Output of another program."""
        self._write(kind="text", what=title, found=text)

    def skip(self, why: str) -> None:
        self._write(kind="skip", what=why)

    def end(self) -> None:
        """The piece has reached its end."""
        self._write(kind="end")

    def _write(self, **row: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a piece; without the last one, if the piece was killed while it wrote it."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


POPEN: type[subprocess.Popen[Any]] = subprocess.Popen
"""Starts the programs that a piece runs."""


def run_python(
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    during: Callable[[subprocess.Popen[Any]], None] | None = None,
) -> tuple[int, str]:
    """Status and output of this interpreter with these arguments, at the root of the repository. `during`: is called
    with the process once it has started, before its output is read."""
    environment = {**os.environ, **(variables or {})}
    command = [sys.executable, *arguments]
    process = POPEN(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if during is not None:
        during(process)
    output, _ = process.communicate()
    return process.returncode, output
