"""Runs the tests under every setting that makes torch choose other kernels, with every backward on another thread, and
next to a program that keeps all cores busy.

    make test-settings                                        every setting, one after the other
    make test-settings SETTINGS=--few                         each value once: six runs
    make test-settings SETTINGS=--few TESTS=tests/runtime     of these tests

Prints a table: setting, tests passed and failed, minutes; then the tests that failed. Exit status 1 if any did.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """`variables` choose kernels, or another thread for backward; `threads`: of each rank; `busy`: whether another
    program takes all cores."""

    variables: tuple[tuple[str, str], ...] = ()
    threads: int = 1
    busy: bool = False

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.variables] or ["as it is"]
        words.append(f"{self.threads} thread{'s' * (self.threads > 1)}")
        return ", ".join([*words, *["busy"] * self.busy])

    @property
    def environment(self) -> dict[str, str]:
        threads = {"OMP_NUM_THREADS": str(self.threads), "OMP_WAIT_POLICY": "passive"}
        return {**os.environ, **dict(self.variables), **threads}


COMPATIBLE, AVX2 = ("MKL_CBWR", "COMPATIBLE"), ("MKL_CBWR", "AVX2")
PLAIN_LOOPS, AVX2_LOOPS = ("ATEN_CPU_CAPABILITY", "default"), ("ATEN_CPU_CAPABILITY", "avx2")
KERNELS = [(), (COMPATIBLE,), (AVX2,), (PLAIN_LOOPS,), (AVX2_LOOPS,)]
OTHER_THREAD = Setting((("ZEROSHARD_TEST_BACKWARD_THREAD", "1"),))
EVERY = [*(Setting(kernels, threads) for kernels in KERNELS for threads in (1, 2)), OTHER_THREAD, Setting(busy=True)]
FEW = [
    Setting(),
    Setting((COMPATIBLE, PLAIN_LOOPS)),
    Setting((AVX2, AVX2_LOOPS), threads=2),
    Setting(threads=2),
    OTHER_THREAD,
    Setting(busy=True),
]


SPIN = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # ends when this program ends


@contextmanager
def all_cores_busy() -> Iterator[None]:
    programs = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def run(setting: Setting, arguments: list[str], log: Path) -> tuple[str, float, list[str]]:
    """pytest's last line, minutes, and the tests that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    began = time.monotonic()
    with log.open("w") as file:
        if setting.busy:
            with all_cores_busy():
                status = subprocess.call(command, stdout=file, stderr=subprocess.STDOUT, env=setting.environment)
        else:
            status = subprocess.call(command, stdout=file, stderr=subprocess.STDOUT, env=setting.environment)
    text = log.read_text()
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    summary = re.sub(r" in [\d.]+s.*|=", "", text.rstrip().rpartition("\n")[2]).strip()
    return summary, (time.monotonic() - began) / 60, failed or ([f"status {status}"] if status else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--few", action="store_true", help="each value once, together with others")
    parser.add_argument("arguments", nargs="*", help="for pytest, after --")
    options = parser.parse_args()
    folder, problems = Path(tempfile.mkdtemp(prefix="zeroshard-settings-")), []
    print(f"What pytest says lies in {folder}\n\n| setting | tests | minutes |\n|---|---|---|", flush=True)
    for number, setting in enumerate(FEW if options.few else EVERY):
        summary, minutes, failed = run(setting, options.arguments, folder / f"{number}.log")
        print(f"| {setting} | {summary} | {minutes:.1f} |", flush=True)
        problems += [f"{setting}: {test}" for test in failed]
    print("\n" + ("\n".join(problems) or "No test failed."))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
