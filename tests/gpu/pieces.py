"""Runs one piece of `make test-gpu` in this process: `python -m tests.gpu.pieces NAME DEVICE NUM_GPUS FOLDER`."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.gpu import around_steps, compiled, correct, costs, habits, libraries, several_gpus
from tests.gpu.checks import Checks, Setting, Skip

FUNCTIONS: dict[str, Callable[[Checks, Setting], None]] = {
    "versions": costs.versions,
    "examples": correct.examples,
    "one-rank": correct.one_rank_exchanges,
    "arithmetic": correct.arithmetic,
    "delays": correct.delays,
    "syncs": costs.syncs,
    "norms": correct.norms,
    "memory": costs.memory,
    "sharing": correct.sharing,
    "several": correct.several,
    "several-values": several_gpus.values,
    "several-ends": several_gpus.ends,
    "several-costs": several_gpus.costs,
    "checkpoint": around_steps.checkpoint,
    "park": around_steps.park,
    "join": around_steps.join,
    "transformers": libraries.transformers,
    "accelerate": libraries.accelerate,
    "lightning": libraries.lightning,
    "peft": libraries.peft,
    "vision": libraries.vision,
    "trainer": libraries.trainer,
    "sanitizer": correct.sanitizer,
    "profile": costs.profile,
    "large": costs.large,
    "step-time": costs.step_time,
    "habits": habits.habits,
    "compiled": compiled.compiled,
    "suites": correct.suites,
}
"""By the names in `runner.PIECES`."""


def run(piece: Callable[[Checks, Setting], None], checks: Checks, setting: Setting) -> int:
    """The exit status."""
    try:
        piece(checks, setting)
    except Skip as reason:
        checks.skip(str(reason))
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("zeroshard", "tests", "torch"):
            raise
        checks.skip(f"the package {error.name} is not installed")
    checks.end()
    return int(checks.failed > 0)


def main(functions: Mapping[str, Callable[[Checks, Setting], None]]) -> int:
    faulthandler.enable()
    name, device, num_gpus, folder = sys.argv[1:]
    setting = Setting(device, int(num_gpus), Path(folder))
    return run(functions[name], Checks(setting.folder / f"{name}.jsonl"), setting)


if __name__ == "__main__":
    sys.exit(main(FUNCTIONS))
