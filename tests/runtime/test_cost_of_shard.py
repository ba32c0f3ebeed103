"""The work of `shard`, of making an optimizer, of a first step and of `close` grows with the number of parameters, not
with its square. Counted in calls, as seconds depend on the machine."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.grids import EVERYTHING
from zeroshard.testing import run_ranks

COUNTS = (16, 32, 64)


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def calls(work: Callable[[], Any]) -> tuple[Any, int]:
    """The result, and how many functions have been called."""
    profile = cProfile.Profile()
    result = profile.runcall(work)
    return result, pstats.Stats(profile).total_calls  # type: ignore[attr-defined]


def counted(units: Any, count: int) -> dict[str, int]:
    model, found = Layers(count), {}
    handle, found["shard"] = calls(lambda: zeroshard.shard(model, "zero3", units=units))
    adam = torch.optim.AdamW
    optimizer, found["optimizer"] = calls(lambda: zeroshard.ShardedOptimizer(handle, adam, lr=1e-3, foreach=False))
    optimizer.backward(model(torch.ones(1, 2)).sum())
    _, found["step"] = calls(optimizer.step)
    _, found["close"] = calls(handle.close)
    return found


def work(rank: int, units: Any) -> list[dict[str, int]]:
    counted(units, 1)  # what the first use imports and caches
    return [counted(units, count) for count in COUNTS]


@pytest.mark.parametrize(
    ("num_ranks", "units"), [(1, None), (2, nn.Linear), *([(2, None), (1, nn.Linear)] if EVERYTHING else [])]
)
def test_work_grows_with_the_number_of_parameters(num_ranks: int, units: Any) -> None:
    few, more, many = run_ranks(work, num_ranks, units)[0]
    for name in few:
        # Twice as many: the difference doubles. With the square of the number it would grow fourfold.
        assert many[name] - more[name] < 2.5 * (more[name] - few[name]) + 500, (name, few, more, many)
