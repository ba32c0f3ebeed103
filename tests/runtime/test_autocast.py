"""Several forwards inside one `torch.autocast` block, which keeps the casts of weights until it ends.

An evaluation first made the casts, and a training forward used them again. Their graph nodes are then older than those
of that forward, and backward came to them when their unit was hidden: ZeRO-3 raised, where plain torch trains.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeroshard
from tests.kit import DEVICE, PLANS, same_bits
from tests.together import in_turn, on_ranks

WIDTH, STEPS = 8, 2


def small() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers).to(DEVICE)


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1 + rank + 10 * number)).to(DEVICE)


def micro_batches(how: str, model: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """The losses of a step, made inside of autocast. The caller runs the backward of each."""

    def evaluate() -> None:
        with torch.no_grad():
            model(batch(rank, 7))

    def loss(number: int) -> Tensor:
        return model(batch(rank, 10 * step + number)).float().square().mean()

    if how.startswith("evaluation first"):
        evaluate()
    if "in between" in how:
        first = loss(0)
        evaluate()
        yield first + loss(1)
    else:
        yield loss(0)
    if how == "two backwards":
        yield loss(1)


CASES = ("evaluation first", "evaluation first and in between", "evaluation in between", "two backwards")


def expect_plain(rank: int, how: str, plan: Any, *, one_block: bool) -> None:
    """`one_block`: all steps are inside one block. The reference has a block for each step: casts are not those of the
    weights before."""
    model, plain = small(), small()
    handle = zeroshard.shard(model, plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=one_block):
        for step in range(STEPS):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                for loss in micro_batches(how, model, rank, step):
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for step in range(STEPS):
        sums = [torch.zeros_like(parameter) for parameter in plain.parameters()]
        for of_rank in range(2):
            of_plain.zero_grad()
            with torch.autocast(DEVICE.type, torch.bfloat16):
                for loss in micro_batches(how, plain, of_rank, step):
                    loss.backward()
            for total, parameter in zip(sums, plain.parameters(), strict=True):
                total += parameter.grad
        for total, parameter in zip(sums, plain.parameters(), strict=True):
            parameter.grad = total / 2
        of_plain.step()
    assert same_bits(handle.full_state_dict(), plain.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("one_block", [False, True])
def test_all_plans_train_as_plain_torch_does(rank: int, one_block: bool) -> None:
    def check(rank: int, how: str, plan: Any) -> None:
        expect_plain(rank, how, plan, one_block=one_block)

    in_turn(check, [(how, plan) for how in CASES for plan in PLANS])(rank)


@on_ranks(2)
def test_outside_of_autocast_its_cache_is_left_alone(rank: int) -> None:
    model = small()
    zeroshard.ShardedOptimizer(zeroshard.shard(model, "zero3", units=nn.Linear), torch.optim.SGD, lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "clear_autocast_cache", lambda: pytest.fail("cleared"))
        with torch.no_grad():
            model(batch(rank, 0))
        model(batch(rank, 0)).sum().backward()
