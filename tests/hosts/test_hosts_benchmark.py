"""The benchmark between hosts: it runs, and the contenders agree."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.hosts.namespaces import ROOT, expect_namespaces

pytestmark = pytest.mark.hosts


def test_steps_are_timed_on_each_network() -> None:
    expect_namespaces()
    options = "--mbit 500 0 --steps 2 --warmup 1 --layers 1 --width 16 --heads 2 --vocabulary 16 --context 8 --batch 1"
    command = [sys.executable, "benchmarks/hosts.py", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert [line for line in done.stdout.splitlines() if line.startswith("2 hosts")] == [
        "2 hosts, 500 Mbit/s",
        "2 hosts, no limit",
    ]
    assert done.stdout.count("losses agree") == 2
    for contender in ("ddp", "zero3", "torch FSDP2"):
        assert sum(line.startswith(f"{contender} ") for line in done.stdout.splitlines()) >= 2
