"""Facts and runs for the tests of the pages: planned on the meta device, without ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

import zeroshard
from tests.kit import Block, Net
from zeroshard.planning import Configuration, Forecast, Workload
from zeroshard.report import Facts, facts_of

PLANS = ("zero3", "ddp", "zero1", "zero2")
RANKS = 3


def workload() -> Workload:
    return Workload(
        lambda: torch.zeros(4, 7, dtype=torch.long), lambda model, ids: model(ids).float().mean(), num_tokens=28
    )


@cache
def forecasts() -> tuple[Forecast, ...]:
    """The four plans of a small model on three ranks."""
    with torch.device("meta"):
        model = Net()
    batch = workload()
    return tuple(
        zeroshard.plan(
            model, Configuration(plan=plan, ranks=RANKS, precision="bf16", units=Block, device="cpu", workload=batch)
        )
        for plan in PLANS
    )


@cache
def facts() -> Facts:
    return facts_of("net", forecasts(), "cpu")


START: dict[str, Any] = {
    "kind": "start", "step": 0, "plan": "zero3", "precision": "fp32", "ranks": 2, "device": "cpu",
    "transport": "shared", "restarts": 0,
    "batch": {"sequences": 24, "micro_batches": 1, "reduce_every_micro_batch": False}, "recompute": False,
}  # fmt: skip
"""A line of a run's metrics: its ranks have begun."""


def write_run(
    folder: Path, num_steps: int = 6, change: Callable[[int, dict[str, Any]], object] = lambda *_: None
) -> Path:
    """A run's metrics: step 3 skipped, resumed after step 2, started again after step 4; the loss of step 5 is not
    finite. `change`: called with each step's number and line."""
    held = dict.fromkeys(vars(facts().planned[0].at_rest), 10)
    memory = {"held": dict.fromkeys(("forward", "backward", "between steps", "at most"), held)}
    lines: list[dict[str, Any]] = [START]
    lines.append({"kind": "memory", "step": 1, **memory})
    for step in range(1, num_steps + 1):
        line = {"kind": "step", "step": step, "loss": None if step == 5 else 3 / step, "grad_norm": 0.5 + step}
        line |= {"applied": step != 3, "loss_scale": 1024.0 / step, "tokens_per_second": 1000.0 + step, "seconds": 0.5}
        line |= {"communication_share": 0.25, "memory_bytes": 400, "peak_memory_bytes": 500, "engine_bytes": 80}
        change(step, line)
        lines.append(line)
        if step in (2, 4):
            lines.append(START | {"step": step, "restarts": int(step == 4)})
    lines.append({"kind": "validation", "step": num_steps, "loss": 1.25})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
