"""Runs a script of `examples/` inside a rank of `run_ranks`, as `torchrun` would."""

from __future__ import annotations

import runpy
import sys
from typing import Any

from tests.house.pages import ROOT

FOLDER = ROOT / "examples"


def run_example(name: str, *arguments: str) -> dict[str, Any]:
    """Run a script; returns its global variables."""
    sys.argv = [name, *arguments]  # this process is a fork: nobody else sees it
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
