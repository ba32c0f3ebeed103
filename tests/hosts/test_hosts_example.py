"""The example of two machines: as a person runs it, on machines that a shell script makes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.documents.test_examples import losses_of_two_machines
from tests.examples import FOLDER
from tests.hosts.namespaces import expect_namespaces
from zeroshard.testing import run_ranks

pytestmark = pytest.mark.hosts


def test_the_script_of_the_example(tmp_path: Path) -> None:
    expect_namespaces()
    devices = sorted(os.listdir("/sys/class/net"))
    variables = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    for _ in range(2):
        command = [str(FOLDER / "two_machines.sh"), str(tmp_path / "run"), "--steps", "10"]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        # Two processes write to it: a line may begin behind another one.
        found = set(re.findall(r"rank \d of 2 on node\d", done.stdout))
        assert found == {"rank 0 of 2 on node0", "rank 1 of 2 on node1"}
        expected = run_ranks(losses_of_two_machines, 2, str(tmp_path / "reference"))
        assert sorted(line for line in done.stdout.splitlines() if "loss" in line) == expected
    assert sorted(os.listdir("/sys/class/net")) == devices
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"zeroshard-\d+", left)
