"""What `make lint` says: style, format and types. Here it runs beside the other tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.parametrize(
    "command", [("mypy", "--strict", "-p", "zeroshard"), ("ruff", "check", "."), ("ruff", "format", "--check", ".")]
)
def test_lint(command: tuple[str, ...]) -> None:
    assert " ".join(command) in (ROOT / "Makefile").read_text(), "not what `make lint` runs"
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
