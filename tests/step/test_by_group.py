"""Optimizer classes that are built over param groups only, each of which says how it is stepped, as
`SingleDeviceMuonWithAuxAdam` of the package muon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zeroshard
from tests.kit import LAST_BITS, PLANS, largest_difference
from tests.together import on_ranks
from zeroshard.step.flat_step import FlatStep
from zeroshard.step.owner_step import OwnerStep
from zeroshard.testing import run_ranks


class ByFlag(torch.optim.Optimizer):
    """Whole matrices by their norm where the flag is set; other elements one by one. It refuses what it does not know,
    a learning rate of a scheduler as well."""

    def __init__(self, param_groups: Any) -> None:
        for group in param_groups:
            assert "whole" in group
            group["lr"] = group.get("lr", 0.02 if group["whole"] else 0.003)
            own = {"momentum": 0.9} if group["whole"] else {"betas": (0.8, 0.9)}
            group.update({key: group.get(key, value) for key, value in own.items()})
            assert set(group) == {"params", "whole", "lr", *own}
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad
                state["mean"] = grad + group.get("momentum", 0.8) * state.get("mean", torch.zeros_like(grad))
                if group["whole"]:
                    p.sub_(state["mean"] / state["mean"].norm(), alpha=group["lr"])
                else:
                    state["step"] = state.get("step", 0) + 1
                    square = state.get("square", torch.zeros_like(grad))
                    state["square"] = square.mul(group["betas"][1]).addcmul(grad, grad)
                    p.sub_(state["mean"] / (state["square"].sqrt() + 0.1 * state["step"]), alpha=group["lr"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outer(self.inner(x).tanh())
        return found

    def groups(self) -> list[dict[str, Any]]:
        """The learning rate of the second one is left to the class, as is that of the last."""
        return [
            {"params": [self.outer.bias], "lr": 0.05, "whole": False},
            {"params": [self.inner.bias], "whole": False},
            {"params": [self.inner.weight, self.outer.weight], "whole": True},
        ]


def train(model: Model, optimizer: Any, rank: int, steps: range) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    for step in steps:
        torch.manual_seed(10 * step + rank)
        model(torch.randn(4, 3)).square().mean().backward()
        for parameter in model.parameters() if isinstance(optimizer, ByFlag) else ():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@on_ranks(3)
def test_it_steps_as_in_plain_torch(rank: int) -> None:
    plain = Model()
    before = ByFlag(plain.groups())
    train(plain, before, rank, range(4))
    for plan in PLANS:
        for taken_over in (False, True):
            model = Model()
            old = ByFlag(model.groups())
            torch.optim.lr_scheduler.LambdaLR(old, lambda step: 1.0)  # leaves initial_lr in the groups
            handle = zeroshard.shard(model, plan)
            optimizer = (
                zeroshard.ShardedOptimizer.from_optimizer(handle, old)
                if taken_over
                else zeroshard.ShardedOptimizer(model.groups(), ByFlag)
            )
            assert [type(stepper) for stepper in optimizer.steppers] == [OwnerStep, FlatStep]
            train(model, optimizer, rank, range(4))
            assert largest_difference(handle.full_state_dict(), plain.state_dict()) < LAST_BITS, (plan, taken_over)
            assert options_of(optimizer) == options_of(before)


@pytest.mark.parametrize("plan", ["zero1", "zero3"])
def test_it_is_resumed(plan: str, tmp_path: Path) -> None:
    def resume(rank: int, folder: str) -> None:
        expected = Model()
        whole = ByFlag(expected.groups())
        train(expected, whole, rank, range(2))
        train(expected, whole, rank, range(2, 4))
        for by_state_dict in (False, True):
            first = Model()
            handle = zeroshard.shard(first, plan)
            optimizer = zeroshard.ShardedOptimizer(first.groups(), ByFlag)
            train(first, optimizer, rank, range(2))
            weights, saved = handle.full_state_dict(), optimizer.state_dict()
            zeroshard.save(folder, handle, optimizer, step=int(by_state_dict))
            model = Model()
            handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(model.groups(), ByFlag)
            if by_state_dict:
                handle.load_full_state_dict(weights)
                optimizer.load_state_dict(saved)
            else:
                zeroshard.load(folder, handle, optimizer)
            train(model, optimizer, rank, range(2, 4))
            assert largest_difference(handle.full_state_dict(), expected.state_dict()) < LAST_BITS

    run_ranks(resume, 2, str(tmp_path))


@on_ranks(2)
def test_a_group_that_says_nothing_is_refused(rank: int) -> None:
    """The first message was torch's, about `__contains__` of a tensor."""
    model = Model()
    handle = zeroshard.shard(model, "zero3")
    with pytest.raises(ValueError, match=r"ByFlag cannot be sharded: .* give each group a class"):
        zeroshard.ShardedOptimizer(handle, ByFlag)
    with pytest.raises(ValueError, match=r"ByFlag cannot be sharded: .* give each group a class"):
        zeroshard.ShardedOptimizer([{"params": [*model.parameters()]}], ByFlag)
    groups = model.groups()
    for second in ({}, {"whole": False, "other": 1}):
        with pytest.raises(ValueError, match=r"ByFlag refuses a param group with the options \(.*\): AssertionError"):
            zeroshard.ShardedOptimizer([groups[0], {"params": groups[1]["params"], **second}], ByFlag)
    optimizer = zeroshard.ShardedOptimizer(groups[:1], ByFlag)
    optimizer.add_param_group(groups[2])
    optimizer.add_param_group({"params": groups[1]["params"], "optimizer_class": torch.optim.SGD, "lr": 0.1})
    before = handle.full_state_dict()
    model(torch.ones(4, 3)).square().mean().backward()
    assert optimizer.step().applied
    assert all(not torch.equal(before[name], value) for name, value in handle.full_state_dict().items())
