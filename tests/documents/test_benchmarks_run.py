"""Every program in `benchmarks/` runs, with few numbers. Two had not started any more: one called a function with an
argument that was gone, one began with libraries that nobody has installed. What they measure is not looked at here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.grids import EVERYTHING

ROOT = Path(__file__).parents[2]
SMALL = "--layers 1 --width 16 --heads 2 --vocabulary 16 --context 8 --batch 1"
PLANS = ("ddp", "zero1", "zero2", "zero3")
RUNS = {
    "activations": ("--models gpt --plans zero3 --sequences 1", [r"\| gpt \| zero3 \|  \| 1 \|", r"zero3 \| blocks"]),
    "checkpoint": ("--megabytes 1 --rounds 1", ["save: ours", "load: ours"]),
    "large_runs": ("--models 8B --ranks 64", ["8B +64 ranks"]),
    "memory": (f"--contenders zero3 torch\\ FSDP2 {SMALL}", [r"zero3 +\d", r"torch FSDP2 +\d"]),
    "overlap": (f"--ranks 4 --rounds 2 --warmup 1 --networks fast {SMALL}", [f"\n{plan} +\\d" for plan in PLANS]),
    "plan_time": ("prune --help", ["Usage: zeroshard prune", "s of processor time, peak"]),
    "step_time": (
        "--model perceptron --contenders zero3 torch\\ FSDP2 --steps 2 --warmup 0",
        ["losses agree", r"zero3 / torch FSDP2 +\d"],
    ),
    "time_model": (f"--ranks 2 --rounds 2 --warmup 0 {SMALL}", [rf"\| 2 \| {plan} \|" for plan in PLANS]),
    "precision_curves": (
        "--steps 2 --every 1 --out curves",
        [r"\| fp32 \|", r"\| bf16-remainder \|", "fp16, skipping"],
    ),
}
ELSEWHERE = {
    "control_plane": "tests/comm/test_control_plane.py",
    "hosts": "tests/hosts/test_hosts_benchmark.py",
    "peers": "step_time.py",
    "workloads": "step_time.py",
}
"""Who runs the others."""


@pytest.mark.parametrize("name", RUNS)
def test_each_benchmark_runs(name: str, tmp_path: Path) -> None:
    if name == "precision_curves" and not EVERYTHING:
        pytest.skip("runs the trainer 13 times: make test-everything")
    options, said = RUNS[name]
    command = [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *shlex.split(options)]
    # torch's checkpoints start threads, and have once waited for ever in a fork of a process that had run other tests.
    start = subprocess.Popen if name == "checkpoint" else Forked
    with start(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, errors
    for pattern in said:
        assert re.search(pattern, output), output


def test_no_benchmark_is_left_out() -> None:
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert scripts == RUNS.keys() | ELSEWHERE.keys()
    for name, runner in ELSEWHERE.items():
        assert name in next(ROOT.rglob(runner)).read_text(encoding="utf-8")
