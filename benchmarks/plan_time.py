"""How long `zeroshard plan` takes for large models, and how much memory: wall-clock time, processor time, and the peak
of the resident set of the command's own process.

    python benchmarks/plan_time.py                                          # the two models of docs/will-it-fit.md
    python benchmarks/plan_time.py plan config.json --ranks 1024 --plan zero3       # any other command of zeroshard

Needs transformers for the models of the page. No weights, no process group, no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "will-it-fit.md"
LARGE = re.compile(
    r"Save it as `(?P<name>.*?)`:.*?```json\n(?P<config>.*?)```\n\n"
    r"    zeroshard (?P<command>.*?)\n\n(?P<said>.*?)\n\n\w",
    re.DOTALL,
)
"""A large model of the page: its file, the command that plans it, and what that prints."""


@dataclass(frozen=True)
class Cost:
    """Of one process, from its start to its end. `peak`: bytes of the resident set. `said`: its standard output."""

    seconds: float
    processor_seconds: float
    peak: int
    said: str


def measure(arguments: Sequence[str], folder: str | Path) -> Cost:
    """Run `zeroshard ARGUMENTS` in a folder.

    Raises:
        SystemExit: the command has failed; it has printed why.
    """
    with tempfile.TemporaryFile("w+") as output:
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, "-m", "zeroshard", *arguments], cwd=folder, stdout=output)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.monotonic() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"zeroshard {' '.join(arguments)}: exit status {process.returncode}")
        output.seek(0)
        unit = 1 if sys.platform == "darwin" else 1024
        return Cost(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * unit, output.read())


def large_models() -> list[dict[str, str]]:
    """The large models of the page, each with `name`, `config`, `command` and `said`."""
    text = PAGE.read_text(encoding="utf-8") + "\n\nEnd"
    return [found.groupdict() for found in LARGE.finditer(text)]


def show(arguments: Sequence[str], folder: str | Path) -> None:
    cost = measure(arguments, folder)
    print(f"$ zeroshard {' '.join(arguments)}", cost.said, sep="\n")
    print(
        f"{cost.seconds:.1f} s, {cost.processor_seconds:.1f} s of processor time, peak {cost.peak / 1e6:.0f} MB\n",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="of zeroshard, with its arguments; default: the page's"
    )
    if command := parser.parse_args().command:
        return show(command, Path.cwd())
    with tempfile.TemporaryDirectory() as folder:
        for model in large_models():
            Path(folder, model["name"]).write_text(model["config"])
            show(model["command"].split(), folder)


if __name__ == "__main__":
    main()
