"""torch: test/distributed/_composable/fsdp/test_fully_shard_autograd.py: outputs that the loss does not use, and
containers of activations.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.outside.common import (
    Twins,
    numbers,
    under_all_plans,
)
from tests.together import on_ranks
from zeroshard.placement import Plan


class TwoLinear(nn.Module):
    """Two layers side by side; `second`: whether the second's output is returned."""

    def __init__(self, second: bool) -> None:
        super().__init__()
        self.lin1, self.lin2, self.second = nn.Linear(8, 8), nn.Linear(8, 8), second

    def forward(self, x: Tensor) -> Any:
        if self.second:
            return torch.relu(self.lin1(x)), torch.relu(self.lin2(x))
        return torch.relu(self.lin1(x))


@on_ranks(2)
def test_an_output_that_the_loss_leaves_out(rank: int) -> None:
    """TestFullyShardAutograd.test_unused_forward_output: first both outputs, then the first one only."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(TwoLinear(True), plan, shard={"units": nn.Linear})

        def loss(model: nn.Module, step: int) -> Tensor:
            first, second = model(numbers(8, rank, step))
            return (first * second).sum() if step < 2 else first.sum()

        return twins.train(loss, steps=5)

    under_all_plans(rank, train)


@on_ranks(2)
def test_a_module_that_forward_does_not_use(rank: int) -> None:
    """TestFullyShardAutograd.test_unused_forward_module."""

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(TwoLinear(False), plan, shard={"units": nn.Linear})
        return twins.train(lambda model, step: model(numbers(8, rank, step)).sum())

    under_all_plans(rank, train)


Two = namedtuple("Two", ["x", "y"])


@pytest.mark.parametrize("kind", [list, tuple, dict, Two])
@on_ranks(2)
def test_activations_in_containers(rank: int, kind: Any) -> None:
    """TestFullyShardAutograd.test_nontensor_activations."""

    class Into(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"x": x} if kind is dict else Two(x, torch.ones_like(x)) if kind is Two else kind((x,))

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin1, self.lin2 = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, value: Any) -> Any:
            x = value["x"] if kind is dict else value[0]
            x = torch.relu(self.lin2(torch.relu(self.lin1(x))))
            return {"x": x} if kind is dict else Two(x, value[1]) if kind is Two else kind((x,))

    class Out(nn.Module):
        def forward(self, value: Any) -> Tensor:
            return value["x"] if kind is dict else value[0]

    def train(rank: int, plan: Plan) -> Any:
        twins = Twins(nn.Sequential(Into(), Inside(), Inside(), Inside(), Out()), plan, shard={"units": Inside})
        return twins.train(lambda model, step: model(numbers(8, rank, step)).sum())

    under_all_plans(rank, train)
