"""DeepSpeed: tests/unit/runtime/half_precision/test_dynamic_loss_scale.py.

"loss_scale": 0, "initial_scale_power": p, "loss_scale_window": w, "min_loss_scale": m is `DynamicScale(init=2.0**p,
growth_interval=w, floor=m)`. One difference, deliberate: the scale grows after w finite steps in a row, as torch's
GradScaler does it; DeepSpeed's grows with the step after them. Its tests run on one rank; here the overflow is on one
rank of two only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import with_plans
from tests.together import in_turn
from zeroshard.optim import Lamb
from zeroshard.placement import Plan
from zeroshard.testing import run_ranks

INF, NAN = float("inf"), float("nan")


class Run:
    """A 16-bit model under a plan, stepped with given gradients (scaled, as after backward)."""

    def __init__(
        self, rank: int, plan: Plan, optimizer_class: type[torch.optim.Optimizer], policy: zeroshard.DynamicScale
    ) -> None:
        torch.manual_seed(0)
        self.rank, self.model = rank, nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False))
        self.handle = zeroshard.shard(self.model, plan, precision="fp16")
        self.optimizer = zeroshard.ShardedOptimizer(self.handle, optimizer_class, lr=0.00015, loss_scale=policy)
        self.steps = 0

    @property
    def scale(self) -> float:
        scaler = self.optimizer.scaling.default
        assert scaler is not None
        return scaler.scale

    def step(self, gradients: Sequence[float], *, applied: bool, on: int = 0) -> None:
        """Rank `on` has these gradients, the other rank finite ones. A skipped step must change no weight."""
        for gradient in gradients:
            value = (gradient if self.rank == on else 0.01) / self.scale
            before = self.handle.full_state_dict()
            self.optimizer.backward(self.model(torch.ones(1, 1)).sum() * value)
            result = self.optimizer.step()
            self.steps += 1
            after = self.handle.full_state_dict()
            assert result.applied is applied
            assert applied or all(torch.equal(before[name], after[name]) for name in before)


def expect_of_both_classes(check: Callable[[int, type[torch.optim.Optimizer], Plan], None]) -> None:
    """On two ranks. TestFused and TestUnfused; each class under two plans (`plans_of`)."""
    run_ranks(in_turn(check, with_plans((torch.optim.Adam, Lamb))), 2)


def harmless(count: int) -> list[float]:
    generator = random.Random(0)
    return [generator.uniform(0.01, 0.1) for _ in range(count)]


def test_without_overflow_the_scale_doubles_every_window() -> None:
    """test_no_overflow."""

    def check(rank: int, optimizer_class: type[torch.optim.Optimizer], plan: Plan) -> None:
        run = Run(rank, plan, optimizer_class, zeroshard.DynamicScale(init=2.0**8, growth_interval=2))
        assert run.scale == 2.0**8
        for number, value in enumerate(harmless(8), 1):
            run.step([value], applied=True)
            assert run.scale == 2.0 ** (8 + number // 2)

    expect_of_both_classes(check)


@pytest.mark.parametrize("floor", [1.0, 0.25])
def test_with_overflows_alone_the_scale_halves_down_to_its_floor(floor: float) -> None:
    """test_all_overflow: inf, -inf and NaN, also with "min_loss_scale"."""

    def check(rank: int, optimizer_class: type[torch.optim.Optimizer], plan: Plan) -> None:
        run = Run(rank, plan, optimizer_class, zeroshard.DynamicScale(init=2.0**4, growth_interval=2, floor=floor))
        expected = 2.0**4
        for number, value in enumerate([INF, -INF] + [NAN] * 6):
            run.step([value], applied=False, on=number % 2)
            expected = max(expected / 2, floor)
            assert run.scale == expected
        run.step(harmless(2), applied=True)
        assert run.scale == 2 * floor

    expect_of_both_classes(check)


def test_now_and_then_an_overflow() -> None:
    """test_some_overflow: down twice, up after a window, down."""

    def check(rank: int, optimizer_class: type[torch.optim.Optimizer], plan: Plan) -> None:
        run = Run(rank, plan, optimizer_class, zeroshard.DynamicScale(init=2.0**8, growth_interval=2))
        run.step([INF, NAN], applied=False)
        assert run.scale == 2.0**6
        run.step(harmless(3), applied=True)
        assert run.scale == 2.0**7
        run.step([INF], applied=False, on=1)
        assert run.scale == 2.0**6 and run.steps == 6

    expect_of_both_classes(check)
