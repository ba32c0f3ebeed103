"""Runs pieces of `make test-gpu` and suites on the device, each in a fork of this interpreter.

    ZEROSHARD_TEST_DEVICE=apart python -m tests.apart.one_interpreter report.md tests/parity/test_whole.py ...

A fork need not import torch. Tests cannot fork for the device themselves: a process that has run a backward has threads
for the devices it knew then, which a fork has not.
"""

from __future__ import annotations

import importlib
import os
import sys

from tests import apart
from tests.forked import Forked
from tests.gpu import checks, runner

PIECES = ("one-rank", "syncs", "memory", "checkpoint", "sharing")


def main(report: str, *suites: str) -> int:
    apart.load()
    importlib.import_module("pytest")
    checks.POPEN = Forked
    of_pieces = runner.main(["--device", apart.NAME, "--report", report, "--pieces", *PIECES], Forked)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites]
    of_suites = Forked(command, env={**os.environ, "ZEROSHARD_TEST_BACKEND": "late"}).wait()
    return of_pieces or of_suites


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
