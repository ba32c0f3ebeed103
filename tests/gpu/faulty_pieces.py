"""Pieces that end in every way, for the tests of the runner."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys

from tests.gpu.checks import Checks, Setting, Skip
from tests.gpu.pieces import main


def good(checks: Checks, setting: Setting) -> None:
    checks.expect("one is one", True, 1)
    checks.note("width", 3)
    checks.table("sizes", ["a", "b"], [[1, "x|y"]])
    checks.text("another program", "says this")


def wrong(checks: Checks, setting: Setting) -> None:
    checks.expect_equal("one is two", 1, 2)
    checks.expect("and it goes on", True)


def raising(checks: Checks, setting: Setting) -> None:
    checks.expect("so far", True)
    raise ValueError("a fault of the piece")


def crashing(checks: Checks, setting: Setting) -> None:
    checks.expect("so far", True)
    ctypes.string_at(0)


def leaving(checks: Checks, setting: Setting) -> None:
    sys.exit(0)


def hanging(checks: Checks, setting: Setting) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    checks.note("its child", child.pid)
    child.wait()


def lacking(checks: Checks, setting: Setting) -> None:
    raise Skip("it needs two GPUs")


def unequipped(checks: Checks, setting: Setting) -> None:
    importlib.import_module("a_package_that_nobody_has")


FUNCTIONS = {f.__name__: f for f in (good, wrong, raising, crashing, leaving, hanging, lacking, unequipped)}

if __name__ == "__main__":
    sys.exit(main(FUNCTIONS))
